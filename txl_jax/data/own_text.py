"""Text of this machine: the user's own files, parts of a corpus, and the source of Python's standard library.

Ids are memory-mapped and archives are read at random, so remote files are copied first, to `fetched` in the cache, and
again when the object was replaced. You can delete the directory at any time.
"""

import contextlib
import glob
import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from txl_jax.config import CorpusName, DataConfig, LineMark, Tokenizer, config_tree
from txl_jax.data.published import PublishedCorpus
from txl_jax.data.text import SPLITS, File, Text, checked, digest_of, expanded, file_part, with_bar
from txl_jax.errors import UserError
from txl_jax.runtime.storage import as_path, download, is_remote, matching, modified, names, remote_error, size

# Tests are more text than the library itself, and installed packages differ from machine to machine.
STDLIB_SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_NPY_MAGIC = b"\x93NUMPY"  # How a .npy file begins.
_BORDER_WINDOW = 1 << 16  # Bytes by which a border between splits may move to the beginning of a line.


def read_own_text(config: DataConfig) -> Text:
    """Reads one file, split 90/5/5, or the user's own files, a list per split, each concatenated in the order given.

    With a published corpus the file is a part of it. A pattern in a list matches files in the order of their names.
    Raises `UserError` if a name has no file, or a file is a directory, empty, a NumPy array, or ends in empty lines,
    each of which would be a token.
    """
    if config.file:
        path = checked(config.file, flag="--data.file")
        size, name = os.path.getsize(path), Path(path).name
        if config.corpus is not CorpusName.TEXT:  # Its alphabet is not closed: it may lack bytes of the rest.
            return _split_text(f"{config.corpus} prefix", f"prefix of {size} bytes of {name}", [path], config)
        _check_text(config, [path])
        return _split_text("text", f"own text, {size:,} bytes of {name}", [path], config)
    lists = {split: expanded(getattr(config, split), flag=f"--data.{split}") for split in SPLITS}
    for paths in lists.values():
        _check_text(config, paths)
    splits = {split: tuple(map(file_part, paths)) for split, paths in lists.items()}
    sizes = " + ".join(f"{sum(file.size for file in files):,}" for files in splits.values())
    # Digests of digests of digests: it matters where a file ends, as a line does there, and which split it is in.
    digest = digest_of(
        digest_of(_digest([file]) for file in with_bar(f"reading {split}", files)) for split, files in splits.items()
    )
    return Text("text", f"own text, {sizes} bytes in train + valid + test", digest, splits)


def read_python_stdlib(config: DataConfig) -> Text:
    """Reads the modules of the running Python's standard library in the order of their paths, split 90/5/5."""
    root, paths = sysconfig.get_paths()["stdlib"], list[str]()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - STDLIB_SKIPPED_DIRS
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    paths = sorted(filter(os.path.isfile, paths))  # Some distributions leave dangling links behind.
    if not paths:
        raise UserError(
            f"the standard library at {root} holds no .py files (it may be packed in an archive); "
            "use a Python that is installed as source files, or another --data.corpus"
        )
    total = sum(map(os.path.getsize, paths))
    described = f"standard library of Python {platform.python_version()}, {len(paths)} files, {total:,} bytes"
    return _split_text("python_stdlib", described, paths, config)


def _split_text(name: str, description: str, paths: Sequence[str], config: DataConfig) -> Text:
    """Returns the files as one text, split by position."""
    splits = split_by_position(paths, at_lines=config.tokenizer.kind is not Tokenizer.BYTE)
    whole = [file for split in SPLITS for file in splits[split]]
    return Text(name, description, _digest(with_bar("reading", whole)), splits)


def split_by_position(paths: Sequence[str], *, at_lines: bool) -> dict[str, tuple[File, ...]]:
    """Splits the files' bytes into the first 90 %, the next 5 % and the last 5 %; borders are rounded down.

    With `at_lines` a border moves on to the next beginning of a line, or, where lines are very long, of a word.
    """
    sizes = [os.path.getsize(path) for path in paths]
    total = sum(sizes)
    borders = [0, total * 90 // 100, total * 95 // 100, total]
    if at_lines:
        borders[1:3] = [_line_start(paths, sizes, border) for border in borders[1:3]]
    ranges = zip(SPLITS, borders, borders[1:], strict=False)
    return {split: tuple(_between(paths, sizes, first, last)) for split, first, last in ranges}


def _between(paths: Sequence[str], sizes: Sequence[int], first: int, last: int) -> Iterator[File]:
    """Yields the parts of files between two positions in their concatenation."""
    start = 0
    for path, length in zip(paths, sizes, strict=True):
        low, high = max(first - start, 0), min(last - start, length)
        if low < high:
            yield file_part(path, low, high)
        start += length


def _line_start(paths: Sequence[str], sizes: Sequence[int], border: int) -> int:
    """Returns the first position from `border` on at which a line begins, or a word, or at least a character."""
    first = max(border - 1, 0)  # The byte before the border decides whether a line begins there already.
    files = _between(paths, sizes, first, first + _BORDER_WINDOW)
    window = b"".join(block for file in files for block in file.blocks())
    for white in (b"\n", b" "):
        if (found := window.find(white)) >= 0:
            return first + found + 1
    starts = (i for i, byte in enumerate(window) if byte & 0xC0 != 0x80 and first + i >= border)
    return first + next(starts, len(window))


def _check_text(config: DataConfig, paths: Sequence[str]) -> None:
    """Raises `UserError` for an array, and for empty lines at the end of a file if each would be a token."""
    marked = config.tokenizer.kind is Tokenizer.WORD and config.tokenizer.line_mark is not LineMark.NONE
    for path in paths:
        with open(path, "rb") as file:
            if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
                raise UserError(
                    f"{path} is an array of NumPy and data.tokenizer.kind is {config.tokenizer.kind}; read ids with "
                    "--data.tokenizer.kind=id"
                )
            file.seek(max(os.path.getsize(path) - _BORDER_WINDOW, 0))
            end = file.read()
        white = end[len(end.rstrip()) :]
        empty = white.count(b"\n") - white.endswith(b"\n")  # A newline ends a line; what follows is another one.
        if marked and empty > 0:
            raise UserError(
                f"{path} ends in {empty} empty line{'s' if empty > 1 else ''}, each of which would be scored as a "
                "line; remove them"
            )


def _digest(files: Iterable[File]) -> str:
    digest = hashlib.sha256()
    for file in files:
        for block in file.blocks():
            digest.update(block)
    return digest.hexdigest()


# Copies of remote files


def remote_paths(config: DataConfig) -> dict[str, tuple[str, ...]]:
    """Returns the paths of each setting that names remote files, by its dotted name."""
    names = (leaf.name for leaf in config_tree.leaves(DataConfig) if leaf.setting.path)
    given = {name: config_tree.get(config, name) or () for name in names}
    paths = {name: (value,) if isinstance(value, str) else value for name, value in given.items()}
    return {name: each for name, each in paths.items() if any(map(is_remote, each))}


def local_config(config: DataConfig, cache: Path) -> DataConfig:
    """Returns a config whose files are all on this machine: remote ones are copied into the cache."""
    local: dict[str, Any] = {}
    for name, paths in remote_paths(config).items():
        is_list = isinstance(config_tree.get(config, name), tuple)
        copies = tuple(itertools.chain(*(_copies(path, cache, expand=is_list) for path in paths)))
        local[name] = copies if is_list else copies[0]
    return config_tree.replace(config, local)


def _copies(path: str, cache: Path, *, expand: bool) -> list[str]:
    """Returns the local files of a path, or with `expand` of a pattern, in order of name; a local path as it is."""
    if not is_remote(path):
        return [path]
    url = as_path(path)
    with _reading(url):
        urls = matching(url) if expand and glob.has_magic(path) else [url]
        if not urls:
            raise UserError(f"no object matches {path}; check the pattern")
        return [_copy(each, os.path.dirname(each), cache) for each in urls]


def local_folder(corpus: PublishedCorpus, data_dir: str, cache: Path) -> str:
    """Returns a directory of this machine with copies of a corpus's files in a remote one."""
    root = as_path(data_dir)
    wanted = set(itertools.chain(*corpus.file_sets(corpus.folders[0])))
    found: set[str] = set()
    with _reading(root):
        for place, folder in itertools.product(corpus.places(root), {os.path.dirname(name) for name in wanted}):
            with contextlib.suppress(FileNotFoundError):
                there = names(os.path.join(place, folder).rstrip("/"))
                found |= {os.path.join(place, folder, each) for each in there if os.path.join(folder, each) in wanted}
        for url in sorted(found):
            _copy(url, root, cache)
    return str(_copy_of(root, cache))


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    """Turns an error of object storage into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise remote_error("read", url, error) from error


def _copy_of(folder: str, cache: Path) -> Path:
    return cache / "fetched" / hashlib.sha256(folder.encode()).hexdigest()[:16]


def _copy(url: str, root: str, cache: Path) -> str:
    """Downloads an object below `root`, under a temporary name first, unless there is a copy of its size and time."""
    local = _copy_of(root, cache) / os.path.relpath(url, root)
    time = modified(url)  # Before the download: an object that is replaced meanwhile is copied again.
    if not local.exists() or (local.stat().st_size, local.stat().st_mtime) != (size(url), time):
        local.parent.mkdir(parents=True, exist_ok=True)
        part = local.with_name(f".{local.name}.{os.getpid()}.tmp")
        try:
            download(url, part)
            os.utime(part, (time, time))
            os.replace(part, local)
        finally:
            part.unlink(missing_ok=True)
    return str(local)
