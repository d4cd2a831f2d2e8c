"""Local text: the user's own files, and the source text of Python's standard library."""

import dataclasses
import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from txl_jax.config import DataConfig, EmptyEnd, LineMark, Tokenizer
from txl_jax.data.published import PublishedCorpus
from txl_jax.data.text import BLOCK_BYTES, SPLITS, File, Text, with_bar
from txl_jax.errors import UserError
from txl_jax.runtime.storage import (
    as_path,
    download,
    is_remote,
    matching,
    modified,
    names,
    remote_error,
    size,
)

# -- Copies of remote texts on this machine: ids are memory-mapped, and archives are read at random, so files are local.
#
#     <cache_dir>/fetched/<digest of URL, size and time>/<name>
#     <cache_dir>/fetched/<digest of data_dir>/                  a published corpus, its files in the folders of data_dir
#
# An object that was replaced is copied anew. Copies of single objects are not removed; the folder may be deleted at any
# time.

_FOLDER = "fetched"


def local_config(config: DataConfig, cache: Path) -> DataConfig:
    """Returns a config whose files are all on this machine; remote ones are copied into the cache.

    Raises:
      UserError: a file cannot be read.
    """

    def one(path: str | None) -> str | None:
        return path and _copies(path, cache)[0]

    def each(paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(copy for path in paths for copy in _copies(path, cache))

    tokenizer = config.tokenizer
    return dataclasses.replace(
        config,
        file=one(config.file),
        train=each(config.train),
        valid=each(config.valid),
        test=each(config.test),
        tokenizer=dataclasses.replace(
            tokenizer,
            vocab_file=one(tokenizer.vocab_file),
            hf_file=one(tokenizer.hf_file),
        ),
    )


def local_folder(corpus: PublishedCorpus, data_dir: str, cache: Path) -> str:
    """Returns a folder on this machine with what a remote one has of a corpus.

    Raises:
      UserError: the folder cannot be read.
    """
    root = as_path(data_dir)
    places = [root, *(os.path.join(root, name) for name in corpus.folders), os.path.join(root, "downloads", "manual")]
    layouts = [*corpus.layouts, *corpus.own_layouts]
    wanted = {file for layout in layouts for files in layout.values() for file in files} | set(corpus.archives)
    target = cache / _FOLDER / hashlib.sha256(data_dir.encode()).hexdigest()[:16]
    try:
        for place in places:
            for name in wanted & _names_in(place, wanted):
                url = os.path.join(place, name)
                local = target / os.path.relpath(url, root)
                if not _is_copy(local, url):
                    _fetch(url, local)
    except OSError as error:
        raise remote_error("read", root, error) from error
    target.mkdir(parents=True, exist_ok=True)
    return str(target)


def check_cache(cache_dir: str | None, data_dir: str) -> None:
    """Raises `UserError` if the folder for prepared text would be remote: ids are memory-mapped."""
    if is_remote(cache_dir or data_dir):
        raise UserError(
            f"the folder for prepared text would be {cache_dir or data_dir}, and prepared text is memory-mapped: give "
            "--cache_dir=... a folder of this machine"
        )


def _names_in(place: str, wanted: Iterable[str]) -> set[str]:
    """Names of files, with the folders above them, relative to a place."""
    found: set[str] = set()
    for folder in {os.path.dirname(name) for name in wanted}:
        try:
            found |= {os.path.join(folder, name) for name in names(os.path.join(place, folder).rstrip("/"))}
        except FileNotFoundError:
            continue
    return found


def _copies(path: str, cache: Path) -> list[str]:
    """The local files of a path or pattern, in the order of their names; a local path as it is."""
    if not is_remote(path):
        return [path]
    url = as_path(path)
    try:
        urls = [url]
        if glob.has_magic(path):
            urls = matching(url)
            if not urls:
                raise UserError(f"no object matches {path}; check the pattern")
        return [str(_copy(each, cache)) for each in urls]
    except OSError as error:
        raise remote_error("read", url, error) from error


def _copy(url: str, cache: Path) -> Path:
    identity = f"{url} {size(url)} {modified(url)}"
    local = cache / _FOLDER / hashlib.sha256(identity.encode()).hexdigest()[:16] / os.path.basename(url)
    if not local.exists():
        _fetch(url, local)
    return local


def _is_copy(local: Path, url: str) -> bool:
    """Returns whether a file is what `_fetch` made of the object as it is now, by size and time."""
    if not local.exists():
        return False
    found = local.stat()
    return (found.st_size, found.st_mtime) == (size(url), modified(url))


def _fetch(url: str, local: Path) -> None:
    """Downloads under a temporary name first; the copy gets the object's time."""
    local.parent.mkdir(parents=True, exist_ok=True)
    part = local.with_name(f".{local.name}.{os.getpid()}.tmp")
    try:
        time = modified(url)  # Before the download: an object that is replaced meanwhile is copied again.
        download(url, part)
        os.utime(part, (time, time))
        os.replace(part, local)
    finally:
        part.unlink(missing_ok=True)


# Tests are more text than the library itself, and installed packages differ from machine to machine.
STDLIB_SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

_NPY_MAGIC = b"\x93NUMPY"  # How a .npy file begins.
_BORDER_WINDOW = 1 << 16  # Bytes by which a border between splits may move to the beginning of a line.


def read_own_text(config: DataConfig) -> Text:
    """Reads the user's own files: one, split 90/5/5, or a list per split, each concatenated in the order given.

    A name with * or ? matches any number of files, in the order of their names.

    Raises:
      UserError: a name that no file has, a directory, an empty file, an array of NumPy, or empty lines at a file's
        end, each of which would be a token.
    """
    if config.file:
        path = _checked(config.file, flag="--data.file")
        _check_text(config, [path])
        return _split_text("text", f"own text, {os.path.getsize(path):,} bytes of {Path(path).name}", [path], config)
    lists = {
        "train": expanded(config.train, flag="--data.train"),
        "valid": expanded(config.valid, flag="--data.valid"),
        "test": expanded(config.test, flag="--data.test"),
    }
    for paths in lists.values():
        _check_text(config, paths)
    splits = {name: tuple(map(file_part, paths)) for name, paths in lists.items()}
    sizes = " + ".join(f"{sum(file.size for file in files):,}" for files in splits.values())
    # Digests of digests of digests: it matters where a file ends, as a line does there, and which split it is in.
    digest = _of_digests(
        _of_digests(_digest([file]) for file in with_bar(f"reading {name}", files)) for name, files in splits.items()
    )
    return Text("text", f"own text, {sizes} bytes in train + valid + test", digest, splits)


def read_prefix(config: DataConfig) -> Text:
    """Reads a part of a published corpus, split 90/5/5.

    Its byte tokens are all 256, as it may lack values that occur in the rest.
    """
    path = _checked(config.file, flag="--data.file")
    described = f"prefix of {os.path.getsize(path)} bytes of {Path(path).name}"
    return _split_text(f"{config.corpus} prefix", described, [path], config)


def read_python_stdlib(config: DataConfig) -> Text:
    """Reads the modules of the running Python's standard library in the order of their paths, split 90/5/5.

    Raises:
      UserError: the library is not there as source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [str(path) for path in _python_files(root)]
    if not paths:
        raise UserError(
            f"the standard library at {root} holds no .py files (it may be packed in an archive); "
            "use a Python that is installed as source files, or another --data.corpus"
        )
    size = sum(map(os.path.getsize, paths))
    described = f"standard library of Python {platform.python_version()}, {len(paths)} files, {size:,} bytes"
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
    return {name: tuple(_between(paths, sizes, first, last)) for name, first, last in ranges}


def file_part(path: str, first: int = 0, last: int | None = None) -> File:
    """Returns bytes `first` to `last - 1` of the file at `path`."""
    last = os.path.getsize(path) if last is None else last
    return File(path, last - first, partial(_blocks, path, first, last), offset=first)


def _blocks(path: str, first: int, last: int) -> Iterator[bytes]:
    with open(path, "rb") as source:
        source.seek(first)
        while first < last:
            block = source.read(min(BLOCK_BYTES, last - first))
            if not block:
                raise UserError(f"{path} became shorter while it was read; leave it alone while a run starts")
            yield block
            first += len(block)


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
    window = b"".join(
        block for file in _between(paths, sizes, first, first + _BORDER_WINDOW) for block in file.blocks()
    )
    for white in (b"\n", b" "):
        if (found := window.find(white)) >= 0:
            return first + found + 1
    return first + next(
        (i for i, byte in enumerate(window) if byte & 0xC0 != 0x80 and first + i >= border), len(window)
    )


def expanded(names: Sequence[str], *, flag: str) -> list[str]:
    """Returns the files of a list of names and patterns; raises `UserError` for one that is missing or empty."""
    paths = []
    for name in names:
        found = sorted(glob.glob(name)) if glob.has_magic(name) and not os.path.exists(name) else [name]
        if not found:
            raise UserError(f"{flag} names {name}, which no file matches; check the pattern")
        paths += [_checked(path, flag=flag) for path in found]
    return paths


def _checked(path: str | None, *, flag: str) -> str:
    """Returns the path; raises `UserError` if it is missing, a directory or empty."""
    if path is None:
        raise UserError(f"{flag} is not given; give the path of a text file")
    if os.path.isdir(path):
        raise UserError(f"{flag} names {path}, which is a directory; name the files in it, for example {path}/*.txt")
    if not os.path.exists(path):
        raise UserError(f"{flag} names {path}, which does not exist; give the path of a text file")
    if not os.path.getsize(path):
        raise UserError(f"{flag} names {path}, which is empty; give a file that holds text")
    return path


def _check_text(config: DataConfig, paths: Sequence[str]) -> None:
    """Raises `UserError` for a file of ids, and as `_check_end`."""
    for path in paths:
        with open(path, "rb") as file:
            if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
                raise UserError(
                    f"{path} is an array of NumPy and data.tokenizer.kind is {config.tokenizer.kind}; read ids with "
                    "--data.tokenizer.kind=id"
                )
    _check_end(config, paths)


def _check_end(config: DataConfig, paths: Sequence[str]) -> None:
    """Raises `UserError` for empty lines at the end of a file, if each would be a token and the config refuses them."""
    marked = config.tokenizer.kind is Tokenizer.WORD and config.tokenizer.line_mark is not LineMark.NONE
    if not marked or config.tokenizer.empty_end is EmptyEnd.KEEP:
        return
    for path in paths:
        size = os.path.getsize(path)
        end = b"".join(file_part(path, max(size - _BORDER_WINDOW, 0), size).blocks())
        white = end[len(end.rstrip()) :]
        if (empty := white.count(b"\n") - white.endswith(b"\n")) > 0:  # A newline ends a line; what follows is another.
            raise UserError(
                f"{path} ends in {empty} empty line{'s' if empty > 1 else ''}, each of which would be scored as a "
                "line; remove them, or keep them with --data.tokenizer.empty_end=keep"
            )


def _python_files(root: Path) -> list[Path]:
    """Returns the modules below `root` in the order of their relative paths, without tests and installed packages."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED_DIRS]
        # is_file: some distributions leave dangling links behind.
        found += [path for name in files if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _of_digests(digests: Iterable[str]) -> str:
    """Returns sha256 of digests in order, in hexadecimal."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(files: Iterable[File]) -> str:
    """Returns sha256 of the files' bytes in order, in hexadecimal."""
    digest = hashlib.sha256()
    for file in files:
        for block in file.blocks():
            digest.update(block)
    return digest.hexdigest()
