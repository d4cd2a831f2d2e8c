"""Text of this machine: the user's own files, parts of a corpus, and Python's standard library.

The text of the library is its source.

Remote files are first copied to `fetched` in the cache, which you can delete at any time: ids are
memory-mapped, and archives are read at random.
"""

import contextlib
import dataclasses
import functools
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
from txl_jax.config.config_tree import require
from txl_jax.data.published import CORPORA, PublishedCorpus
from txl_jax.data.text import (
    BLOCK_BYTES,
    SPLITS,
    File,
    Text,
    digest_of,
    expanded,
    file_part,
    json_texts,
    with_bar,
)
from txl_jax.errors import UserError
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import as_path, is_remote, size

# Tests are more text than the library itself, and installed packages differ from machine to
# machine.
STDLIB_SKIPPED_DIRS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
# Least and most bytes of the standard library's test split, and of its validation split. A split is
# complete with the module or package that reaches the least. No module or package that is held out
# has more bytes than the difference, so a split cannot exceed the most (`split_by_name`).
STDLIB_LEAST_HELDOUT = 600_000
STDLIB_MOST_HELDOUT = 680_000
# How a .npy file begins.
_NPY_MAGIC = b"\x93NUMPY"
# Bytes by which a border between splits may move to the beginning of a line.
_BORDER_WINDOW = 1 << 16


def read_own_text(
    config: DataConfig, cache: Path = Path("data", "prepared"), document_end: str = "\n"
) -> Text:
    """Reads one file, split 90/5/5, or the user's own files, a list per split.

    The files of a list are concatenated in the order given.

    With a published corpus the file is a part of it. A pattern in a list matches files in the order
    of their names. A training list by itself is split: by position or, from three files on, between
    files. JSON lines become text in `cache`, each document followed by `document_end`. Raises
    `UserError` if a name has no file, or a file is a directory, empty, a NumPy array, or ends in
    empty lines, each of which would be a token.
    """
    given = (
        {"file": (config.file,)}
        if config.file
        else {split: getattr(config, split) for split in SPLITS}
    )
    lists = {name: expanded(paths, flag=f"--data.{name}") for name, paths in given.items() if paths}
    original: dict[str, str] = {}  # The user's files by the files of their text in the cache.
    if config.json_field is not None:
        for name, paths in lists.items():
            lists[name] = [_text_of_json(path, config, document_end, cache) for path in paths]
            original |= zip(lists[name], paths, strict=True)
    first, name = next(iter(lists.values())), Path(config.file or "").name
    total, held_out = sum(map(os.path.getsize, first)), max(len(first) // 20, 1)
    # Its alphabet is not closed: it may lack bytes of the rest.
    if config.corpus is not CorpusName.TEXT:
        return _split_text(
            f"{config.corpus} prefix", f"prefix of {total} bytes of {name}", first, config
        )
    for paths in lists.values():
        _check_text(config, paths)
    if len(lists) == 1 and len(first) < 3:
        name = name or " and ".join(Path(path).name for path in first)
        text = _split_text("text", f"own text, {total:,} bytes of {name}", first, config)
        return dataclasses.replace(text, splits=_named_as(original, text.splits))
    if len(lists) == 1:
        parts = first[: -2 * held_out], first[-2 * held_out : -held_out], first[-held_out:]
        lists = dict(zip(SPLITS, parts, strict=True))
    splits = {split: tuple(map(file_part, paths)) for split, paths in lists.items()}
    sizes = " + ".join(f"{sum(file.size for file in files):,}" for files in splits.values())
    # Digests of digests of digests: it matters where a file ends, as a line does there, and which
    # split it is in.
    digest = digest_of(
        digest_of(_digest([file]) for file in with_bar(f"reading {split}", files))
        for split, files in splits.items()
    )
    return Text(
        "text",
        f"own text, {sizes} bytes in train + valid + test",
        digest,
        _named_as(original, splits),
    )


def _named_as(
    original: dict[str, str], splits: dict[str, tuple[File, ...]]
) -> dict[str, tuple[File, ...]]:
    """Returns splits whose errors name the user's files too.

    This applies if the text in the splits was made of other files.
    """

    def named(file: File) -> File:
        return dataclasses.replace(file, name=f"{original[file.name]} (its text is {file.name})")

    return {
        split: tuple(named(file) if file.name in original else file for file in files)
        for split, files in splits.items()
    }


def read_python_stdlib(config: DataConfig) -> Text:
    """Reads the modules of the running Python's standard library, split by their names.

    Raises:
      UserError: If the library is not installed as source files, or too small for three splits.
    """
    root = sysconfig.get_paths()["stdlib"]
    paths: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - STDLIB_SKIPPED_DIRS
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    paths = sorted(filter(os.path.isfile, paths))  # Some distributions leave dangling links behind.
    if not paths:
        raise UserError(
            f"the standard library at {root} has no .py files (it may be packed in an archive). "
            "Use a Python that is installed as source files, or another --data.corpus."
        )

    splits = split_by_name(root, paths)
    total = sum(map(os.path.getsize, paths))
    description = (
        f"standard library of Python {platform.python_version()}, {len(paths)} "
        f"files, {total:,} bytes, split by names"
    )
    # Digests of digests: it matters which split a file is in.
    digest = digest_of(_digest(with_bar(f"reading {name}", splits[name])) for name in SPLITS)
    return Text("python_stdlib", description, digest, splits)


def split_by_name(root: str, paths: Sequence[str]) -> dict[str, tuple[File, ...]]:
    """Splits the standard library between its top-level modules and packages.

    A split by position tests on other subjects than it trains on: the last files in path order are
    about XML, URLs and zip files. So the names are sorted by a hash instead. The first are the test
    split, up to the name with which it has 600,000 bytes. The next are the validation split, and
    the rest is the training split. The files of a package stay together, because they repeat one
    another. In each split, files are in the order of `paths`.

    Two versions of Python differ in few names, each of which moves a border by no more than its
    size. Names of more than 80,000 bytes always train. Otherwise a held-out split would be about
    few subjects, and another text where one of its packages is not installed. By this rule
    `encodings` trains, 1.4 MB of files that are almost copies of each other.

    Raises:
      UserError: If the names do not suffice for a test and a validation split.
    """
    files: dict[str, list[str]] = {}
    for path in paths:
        name = os.path.relpath(path, root).split(os.sep)[0].removesuffix(".py")
        files.setdefault(name, []).append(path)
    sizes = {name: sum(map(os.path.getsize, files[name])) for name in files}
    # Unlike `hash`, sha256 is the same in each process and on each machine.
    by_hash = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    largest = STDLIB_MOST_HELDOUT - STDLIB_LEAST_HELDOUT
    small_names = iter([name for name in by_hash if sizes[name] <= largest])

    split_of = dict.fromkeys(files, "train")
    for split in ("test", "valid"):
        n_bytes = 0
        while n_bytes < STDLIB_LEAST_HELDOUT:
            next_name = next(small_names, None)
            if next_name is None:
                raise UserError(
                    f"the standard library at {root} is too small: its modules of at most "
                    f"{largest:,} bytes must have {2 * STDLIB_LEAST_HELDOUT:,} bytes for the test "
                    f"and validation splits, and the {split} split got {n_bytes:,}. Use a Python "
                    "that is installed as source files, or another --data.corpus."
                )
            split_of[next_name] = split
            n_bytes += sizes[next_name]

    parts: dict[str, list[File]] = {split: [] for split in SPLITS}
    for name, its_paths in files.items():
        parts[split_of[name]] += map(file_part, its_paths)
    return {split: tuple(parts[split]) for split in SPLITS}


def _split_text(name: str, description: str, paths: Sequence[str], config: DataConfig) -> Text:
    splits = split_by_position(paths, at_lines=config.tokenizer.kind is not Tokenizer.BYTE)
    whole = [file for split in SPLITS for file in splits[split]]
    return Text(name, description, _digest(with_bar("reading", whole)), splits)


def split_by_position(paths: Sequence[str], *, at_lines: bool) -> dict[str, tuple[File, ...]]:
    """Splits the files' bytes into the first 90 %, the next 5 % and the last 5 %.

    Borders are rounded down.

    With `at_lines` a border moves on to the next beginning of a line, or, where lines are very
    long, of a word.
    """
    total = sum(map(os.path.getsize, paths))
    inner = [total * 90 // 100, total * 95 // 100]
    borders = [0, *([_line_start(paths, border) for border in inner] if at_lines else inner), total]
    ranges = zip(SPLITS, itertools.pairwise(borders), strict=True)
    return {split: tuple(_between(paths, first, last)) for split, (first, last) in ranges}


def _between(paths: Sequence[str], first: int, last: int) -> Iterator[File]:
    """Yields the parts of files between two positions in their concatenation."""
    start = 0
    for path in paths:
        size = os.path.getsize(path)
        low, high = max(first - start, 0), min(last - start, size)
        if low < high:
            yield file_part(path, low, high)
        start += size


def _line_start(paths: Sequence[str], border: int) -> int:
    """Returns the first position from `border` on at which a line begins.

    If there is none, a word begins at the position, or at least a character.
    """
    # The byte before the border decides whether a line begins there already.
    first = max(border - 1, 0)
    files = _between(paths, first, first + _BORDER_WINDOW)
    window = b"".join(block for file in files for block in file.blocks())
    for white in (b"\n", b" "):
        if (found := window.find(white)) >= 0:
            return first + found + 1
    starts = (i for i, byte in enumerate(window) if byte & 0xC0 != 0x80 and first + i >= border)
    return first + next(starts, len(window))


def _check_text(config: DataConfig, paths: Sequence[str]) -> None:
    """Raises `UserError` for an array, and for empty lines at the end of a file.

    Empty lines are an error only if each would be a token.
    """
    kind, line_mark = config.tokenizer.kind, config.tokenizer.line_mark
    marked = kind is Tokenizer.WORD and line_mark is not LineMark.NONE
    for path in paths:
        with open(path, "rb") as file:
            is_array = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
            file.seek(max(os.path.getsize(path) - _BORDER_WINDOW, 0))
            end = file.read()
        wrong = (
            f"{path} is a NumPy array, but data.tokenizer.kind is {kind}. "
            "For ids, pass --data.tokenizer.kind=id."
        )
        require(not is_array, wrong)
        white = end[len(end.rstrip()) :]
        # A newline ends a line; what follows is another one.
        empty = white.count(b"\n") - white.endswith(b"\n")
        wrong = (
            f"{path} ends in {empty} empty line(s), each of which would be scored as a line. "
            "Remove them."
        )
        require(not marked or empty <= 0, wrong)


def _text_of_json(path: str, config: DataConfig, end: str, cache: Path) -> str:
    """Writes a file's documents as text, unless the cache has the text, and returns its path.

    Each document is written with its end.

    Raises `UserError` with the file and the line of a document that is not a text.
    """
    field = config.json_field
    assert field is not None
    about = os.stat(path)
    facts = repr((os.path.abspath(path), about.st_size, about.st_mtime_ns, field, end))
    made = _copy_of(facts, cache) / f"{Path(path).stem}.txt"
    if not made.exists():
        with (
            storage.writable(made.parent, what="the text of JSON lines"),
            open(path, "rb") as lines,
        ):
            zeros_allowed = config.tokenizer.kind is Tokenizer.BYTE
            numbered = json_texts(lines, field, name=path, zeros_allowed=zeros_allowed)
            texts = (text for _, text in numbered if text.strip())
            # With newlines of its own at its end a document would end in empty lines.
            storage.write_lines(
                made, ((text.rstrip("\n") if end[0] == "\n" else text) + end for text in texts)
            )
    return str(made)


def _digest(files: Iterable[File]) -> str:
    digest = hashlib.sha256()
    for block in itertools.chain.from_iterable(file.blocks() for file in files):
        digest.update(block)
    return digest.hexdigest()


# Copies of remote files


def copied(config: DataConfig, data_dir: str, cache: Path) -> tuple[DataConfig, str]:
    """Returns a config and `data_dir` with copies in the cache instead of remote files.

    Raises `UserError`.
    """
    settings = [leaf.name for leaf in config_tree.leaves(DataConfig) if leaf.setting.path]
    config = _without_pipes(config, settings, cache)
    try:
        config = _listed(config)
        given = {name: value for name in settings if (value := config_tree.get(config, name))}
        local = {name: _copies(value, cache) for name, value in given.items()}
        if is_remote(data_dir) and config.corpus in CORPORA and not config.file:
            data_dir = local_folder(CORPORA[config.corpus], data_dir, cache)
    except OSError as error:
        raise storage.access_error("read", error.filename or "a remote file", error) from error
    return config_tree.replace(config, local), data_dir


def _without_pipes(config: DataConfig, settings: Sequence[str], cache: Path) -> DataConfig:
    """Returns a config with copies in the cache instead of pipes, such as a shell's <(command)."""
    # A pipe can be read only once, even if several settings name it.
    copy = functools.cache(functools.partial(_copy_of_pipe, cache=cache))
    changed: dict[str, Any] = {}
    for name in settings:
        value = config_tree.get(config, name)
        if isinstance(value, str):
            changed[name] = copy(value) if storage.is_pipe(value) else value
        elif value:
            changed[name] = tuple(copy(path) if storage.is_pipe(path) else path for path in value)
    return config_tree.replace(config, changed)


def _copy_of_pipe(path: str, cache: Path) -> str:
    """Writes the content of a pipe to a file that is named after it, and returns its path.

    Raises `UserError` if it has no content, or several processes would read a part of it each.
    """
    shared = f"a text must be a file if several processes read it, got {path}, which is a pipe"
    require(not distributed.is_multiprocess(), f"{shared}. Write it to a file first.")
    folder = cache / "fetched" / "pipes"
    digest = hashlib.sha256()
    with storage.writable(folder, what="the content of a pipe"):
        part = folder / f".{os.getpid()}.tmp"
        try:
            with open(path, "rb") as pipe, open(part, "wb") as copy:
                while block := pipe.read(BLOCK_BYTES):
                    digest.update(block)
                    copy.write(block)
            require(
                size(part),
                f"the pipe {path} has no content. Its command may have failed, or it "
                "was read before.",
            )
            made = folder / f"pipe-{digest.hexdigest()[:16]}"
            # The text of JSON lines is found again by the time of their file.
            if not made.exists():
                os.replace(part, made)
        finally:
            part.unlink(missing_ok=True)
    return str(made)


def _listed(config: DataConfig) -> DataConfig:
    """Returns a config with a training list instead of a directory or pattern in `data.file`.

    The list has the files of the directory or pattern.
    """
    path = config.file
    if not path or config.corpus is not CorpusName.TEXT or config.tokenizer.kind is Tokenizer.ID:
        return config
    if storage.is_dir(path):
        found = {name: os.path.relpath(name, path) for name in storage.files_below(path)}
    elif glob.has_magic(path) and not storage.exists(path):
        local = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        found = {
            name: os.path.basename(name)
            for name in (storage.matching(path) if is_remote(path) else local)
        }
    else:
        return config
    kept = tuple(name for name, below in found.items() if "/." not in f"/{below}" and size(name))
    require(
        kept,
        f"--data.file is {path}, which contains only hidden or empty files. Pass another path.",
    )
    if len(kept) < len(found):
        say(f"note      {len(found) - len(kept)} hidden or empty files in {path} were skipped")
    return dataclasses.replace(config, file=None, train=kept)


def _copies(value: str | tuple[str, ...], cache: Path) -> Any:
    """Returns a path, or a list of paths and patterns, with copies instead of the remote ones."""
    if isinstance(value, str):
        return _copy(as_path(value), cache) if is_remote(value) else value
    return tuple(_copies(path, cache) for pattern in value for path in _expanded(pattern))


def _expanded(pattern: str) -> list[str]:
    found = (
        storage.matching(as_path(pattern))
        if is_remote(pattern) and glob.has_magic(pattern)
        else [pattern]
    )
    require(found, f"no object matches {pattern}. Check the pattern.")
    return found


def local_folder(corpus: PublishedCorpus, data_dir: str, cache: Path) -> str:
    """Returns a directory of this machine with copies of a corpus's files in a remote one."""
    root = as_path(data_dir)
    wanted = set(itertools.chain(*corpus.file_sets(corpus.folders[0])))
    for place, folder in itertools.product(
        corpus.places(root), {os.path.dirname(name) for name in wanted}
    ):
        with contextlib.suppress(FileNotFoundError):
            there = storage.names(os.path.join(place, folder).rstrip("/"))
            for name in wanted & {os.path.join(folder, each) for each in there}:
                _copy(os.path.join(place, name), cache, root)
    return str(_copy_of(root, cache))


def _copy_of(folder: str, cache: Path) -> Path:
    return cache / "fetched" / hashlib.sha256(folder.encode()).hexdigest()[:16]


def _copy(url: str, cache: Path, root: str | None = None) -> str:
    """Downloads an object unless there is a copy of its size and time.

    The object is downloaded under a temporary name first.
    """
    root = root or os.path.dirname(url)  # Copies keep their paths relative to it.
    local = _copy_of(root, cache) / os.path.relpath(url, root)
    # Before the download: an object that is replaced meanwhile is copied again.
    time = storage.modified(url)
    if not local.exists() or (local.stat().st_size, local.stat().st_mtime) != (size(url), time):
        local.parent.mkdir(parents=True, exist_ok=True)
        part = local.with_name(f".{local.name}.{os.getpid()}.tmp")
        try:
            storage.download(url, part)
            os.utime(part, (time, time))
            os.replace(part, local)
        finally:
            part.unlink(missing_ok=True)
    return str(local)
