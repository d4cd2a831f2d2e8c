"""Text of this machine: the user's own files, parts of a corpus, and Python's standard library.

The text of the library is its source.

Remote files are first copied to the directory `fetched` in the cache, because ids are memory-mapped
and archives are not read in order. You can delete this directory at any time.
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
from txl_jax.data.published import CORPORA, PublishedCorpus
from txl_jax.data.text import (
    BLOCK_BYTES,
    SPLITS,
    File,
    Text,
    digest_of,
    expanded,
    file_part,
    is_inside_character,
    json_texts,
    with_bar,
)
from txl_jax.errors import UserError
from txl_jax.runtime import distributed, remote, storage
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
# Minimum and maximum bytes of the standard library's test split, and of its validation split. A
# split is complete with the module or package that reaches the minimum. No held-out module or
# package has more bytes than the difference, so a split cannot exceed the maximum
# (`split_by_name`).
STDLIB_LEAST_HELDOUT = 600_000
STDLIB_MOST_HELDOUT = 680_000
# Fewer training files by themselves are split by position. Others are split between files.
_FEWEST_FILES = 3
# One file in this number is held out for the validation split, and as many for the test split.
_FILES_PER_HELDOUT_FILE = 20
# First bytes of a .npy file.
_NPY_MAGIC = b"\x93NUMPY"
# Number of bytes in which line ends are searched: a border between splits moves by at most this
# many, and the empty lines at the end of a file are in its last bytes.
_WINDOW_BYTES = 1 << 16


def read_own_text(
    config: DataConfig, cache: Path = Path("data", "prepared"), document_end: str = "\n"
) -> Text:
    """Reads one file, or the user's own files, a list per split.

    The files of a list are concatenated in the order of the list, and a pattern in it matches files
    in the order of their names. A single file is split 90/5/5, and so is a training list without
    others: by position or, if it has three or more files, between files. For a published corpus the
    file is a part of it.

    Args:
      cache: Directory of this machine for the text of JSON lines.
      document_end: Text that follows each document of JSON lines.

    Raises:
      UserError: If a file does not exist, is a directory, is empty, is a NumPy array, or ends in
        empty lines, each of which would be a token.
    """
    lists = {}
    if config.file:
        lists["file"] = expanded((config.file,), flag="--data.file")
    else:
        for split in SPLITS:
            paths = getattr(config, split)
            if paths:
                lists[split] = expanded(paths, flag=f"--data.{split}")

    # The text of JSON lines is a file in the cache. For errors, its path leads to the user's file.
    json_paths: dict[str, str] = {}
    if config.json_field is not None:
        for name, paths in lists.items():
            lists[name] = []
            for path in paths:
                text_path = _text_of_json(path, config, document_end, cache)
                lists[name].append(text_path)
                json_paths[text_path] = path

    # The file, or the training files.
    first_paths = next(iter(lists.values()))
    n_bytes = sum(map(os.path.getsize, first_paths))
    if config.corpus is not CorpusName.TEXT:
        # The alphabet of this text is not closed, because it may lack bytes of the rest.
        description = f"prefix of {n_bytes} bytes of {Path(config.file or '').name}"
        return _split_text(f"{config.corpus} prefix", description, first_paths, config)

    for paths in lists.values():
        _check_text(config, paths)
    is_one_list = len(lists) == 1
    if is_one_list and len(first_paths) < _FEWEST_FILES:
        names = " and ".join(Path(path).name for path in first_paths)
        if config.file:
            # These are the user's names, not the names of the texts of JSON lines.
            names = Path(config.file).name
        description = f"own text, {n_bytes:,} bytes of {names}"
        text = _split_text("text", description, first_paths, config)
        return dataclasses.replace(text, splits=_with_json_names(text.splits, json_paths))

    if is_one_list:
        n_heldout = max(len(first_paths) // _FILES_PER_HELDOUT_FILE, 1)
        lists = {
            "train": first_paths[: -2 * n_heldout],
            "valid": first_paths[-2 * n_heldout : -n_heldout],
            "test": first_paths[-n_heldout:],
        }
    splits = {split: tuple(map(file_part, paths)) for split, paths in lists.items()}

    # A line ends with its file, and splits differ. The digest is therefore computed from the
    # splits' digests, which are computed from the files' digests.
    sizes = []
    digests = []
    for split, files in splits.items():
        sizes.append(f"{sum(file.size for file in files):,}")
        digests.append(digest_of(_digest([file]) for file in with_bar(f"reading {split}", files)))
    return Text(
        name="text",
        description=f"own text, {' + '.join(sizes)} bytes in train + valid + test",
        digest=digest_of(digests),
        splits=_with_json_names(splits, json_paths),
    )


def _with_json_names(
    splits: dict[str, tuple[File, ...]], json_paths: dict[str, str]
) -> dict[str, tuple[File, ...]]:
    """Returns splits whose errors name the user's files of JSON lines too.

    Args:
      json_paths: Path of the JSON lines by the path of their text.
    """
    named = {}
    for split, files in splits.items():
        named_files = []
        for file in files:
            if file.name in json_paths:
                name = f"{json_paths[file.name]} (its text is {file.name})"
                file = dataclasses.replace(file, name=name)
            named_files.append(file)
        named[split] = tuple(named_files)
    return named


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
    # Some distributions leave dangling links behind.
    paths = sorted(filter(os.path.isfile, paths))
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
    # A digest of digests, because it matters which split a file is in.
    digest = digest_of(_digest(with_bar(f"reading {name}", splits[name])) for name in SPLITS)
    return Text("python_stdlib", description, digest, splits)


def split_by_name(root: str, paths: Sequence[str]) -> dict[str, tuple[File, ...]]:
    """Splits the standard library between its top-level modules and packages.

    A split by position would test on other subjects than it trains on: the last files in path order
    are about XML, URLs and zip files. The names are therefore sorted by a hash. The first names are
    the test split, up to the name with which it reaches 600,000 bytes. The next names are the
    validation split, and the rest is the training split. The files of a package stay together,
    because they repeat one another. In each split, files are in the order of `paths`.

    Two versions of Python differ in few names, each of which moves a border by at most its size.
    Names with more than 80,000 bytes are always in the training split. Otherwise a held-out split
    would cover few subjects, and would differ if one of its packages is not installed. By this rule
    `encodings`, 1.4 MB of files that are almost copies of each other, is in the training split.

    Raises:
      UserError: If the names are not sufficient for a test and a validation split.
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
    for name, files_of_name in files.items():
        parts[split_of[name]] += map(file_part, files_of_name)
    return {split: tuple(parts[split]) for split in SPLITS}


def _split_text(name: str, description: str, paths: Sequence[str], config: DataConfig) -> Text:
    """Returns the text of files that are concatenated and split by position.

    Its digest is of the bytes, wherever a file or a split ends.
    """
    splits = split_by_position(paths, at_lines=config.tokenizer.kind is not Tokenizer.BYTE)
    files = itertools.chain.from_iterable(splits[split] for split in SPLITS)
    return Text(name, description, _digest(with_bar("reading", files)), splits)


def split_by_position(paths: Sequence[str], *, at_lines: bool) -> dict[str, tuple[File, ...]]:
    """Splits the files' bytes into the first 90 %, the next 5 % and the last 5 %.

    Borders are rounded down.

    With `at_lines` a border moves forward to the next beginning of a line, or of a word if lines
    are very long.
    """
    total = sum(map(os.path.getsize, paths))
    valid_start = total * 90 // 100
    test_start = total * 95 // 100
    if at_lines:
        valid_start = _line_start(paths, valid_start)
        test_start = _line_start(paths, test_start)
    return {
        "train": tuple(_between(paths, 0, valid_start)),
        "valid": tuple(_between(paths, valid_start, test_start)),
        "test": tuple(_between(paths, test_start, total)),
    }


def _between(paths: Sequence[str], first: int, last: int) -> Iterator[File]:
    """Yields the parts of files from position `first` to before `last` in their concatenation."""
    start = 0
    for path in paths:
        n_bytes = os.path.getsize(path)
        part_first = max(first - start, 0)
        part_last = min(last - start, n_bytes)
        if part_first < part_last:
            yield file_part(path, part_first, part_last)
        start += n_bytes


def _line_start(paths: Sequence[str], border: int) -> int:
    """Returns the first position from `border` on at which a line begins.

    If no line begins nearby, a word begins at the position, or at least a character.
    """
    # The byte before the border shows whether a line begins at the border itself.
    first = max(border - 1, 0)
    files = _between(paths, first, first + _WINDOW_BYTES)
    window = b"".join(itertools.chain.from_iterable(file.blocks() for file in files))
    for white in (b"\n", b" "):
        end = window.find(white)
        if end >= 0:
            return first + end + 1
    for position, byte in enumerate(window, start=first):
        if position >= border and not is_inside_character(byte):
            return position
    return first + len(window)


def _check_text(config: DataConfig, paths: Sequence[str]) -> None:
    """Raises `UserError` for an array, and for empty lines at the end of a file.

    Empty lines are an error only if each would be a token.
    """
    kind = config.tokenizer.kind
    marks_lines = kind is Tokenizer.WORD and config.tokenizer.line_mark is not LineMark.NONE
    for path in paths:
        with open(path, "rb") as file:
            is_array = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
            file.seek(max(os.path.getsize(path) - _WINDOW_BYTES, 0))
            end = file.read()

        # The model would be trained on its bytes as if they were text.
        if is_array:
            raise UserError(
                f"{path} is a NumPy array, but data.tokenizer.kind is {kind}. "
                "For ids, pass --data.tokenizer.kind=id."
            )

        # The first newline ends the last line with words. Each line after it is empty, also one of
        # spaces without a newline.
        white = end[len(end.rstrip()) :]
        n_empty = white.count(b"\n")
        if white.endswith(b"\n"):
            n_empty -= 1
        if marks_lines and n_empty > 0:
            raise UserError(
                f"{path} ends in {n_empty} empty line(s), each of which would be scored as a line. "
                "Remove them."
            )


def _text_of_json(path: str, config: DataConfig, end: str, cache: Path) -> str:
    """Writes the documents of a file as text, unless the cache has the text, and returns its path.

    Each document is written with its end.

    Raises:
      UserError: If a line is not a document. The error contains the file and the line.
    """
    field = config.json_field
    assert field is not None
    # Everything that the text depends on. A changed file has another size or time.
    status = os.stat(path)
    facts = repr((os.path.abspath(path), status.st_size, status.st_mtime_ns, field, end))
    text_path = _copy_of(facts, cache) / f"{Path(path).stem}.txt"
    if text_path.exists():
        return str(text_path)

    # Only bytes may contain zeros.
    zeros_allowed = config.tokenizer.kind is Tokenizer.BYTE
    with (
        storage.writable(text_path.parent, what="the text of JSON lines"),
        open(path, "rb") as lines,
    ):
        numbered = json_texts(lines, field, name=path, zeros_allowed=zeros_allowed)
        storage.write_lines(text_path, _with_ends(numbered, end))
    return str(text_path)


def _with_ends(numbered: Iterable[tuple[int, str]], end: str) -> Iterator[str]:
    """Yields each of numbered documents that is not empty, followed by `end`."""
    for _, document in numbered:
        if not document.strip():
            continue
        # Newlines at its end would become empty lines before the newline in `end`.
        if end[0] == "\n":
            document = document.rstrip("\n")
        yield document + end


def _digest(files: Iterable[File]) -> str:
    """Returns sha256 of the concatenated files, in hexadecimal."""
    digest = hashlib.sha256()
    for file in files:
        for block in file.blocks():
            digest.update(block)
    return digest.hexdigest()


# Copies of remote files


def copied(config: DataConfig, data_dir: str, cache: Path) -> tuple[DataConfig, str]:
    """Returns a config and `data_dir` with copies in the cache instead of remote files and pipes.

    A directory or pattern in `data.file` becomes a list of training files.

    Raises:
      UserError: If a file cannot be read, or a pattern has no match.
    """
    path_settings = [leaf.name for leaf in config_tree.leaves(DataConfig) if leaf.setting.path]
    config = _without_pipes(config, path_settings, cache)
    try:
        config = _listed(config)
        copies = {}
        for name in path_settings:
            value = config_tree.get(config, name)
            if value:
                copies[name] = _copies(value, cache)
        if is_remote(data_dir) and config.corpus in CORPORA and not config.file:
            data_dir = local_folder(CORPORA[config.corpus], data_dir, cache)
    except OSError as error:
        raise storage.access_error("read", error.filename or "a remote file", error) from error
    return config_tree.replace(config, copies), data_dir


def _without_pipes(config: DataConfig, path_settings: Sequence[str], cache: Path) -> DataConfig:
    """Returns a config with copies in the cache instead of pipes, such as a shell's <(command)."""

    # A pipe can be read only once, even if more than one setting names it.
    @functools.cache
    def without_pipe(path: str) -> str:
        return _copy_of_pipe(path, cache) if storage.is_pipe(path) else path

    changed: dict[str, Any] = {}
    for name in path_settings:
        value = config_tree.get(config, name)
        if isinstance(value, str):
            changed[name] = without_pipe(value)
        elif value:
            changed[name] = tuple(map(without_pipe, value))
    return config_tree.replace(config, changed)


def _copy_of_pipe(path: str, cache: Path) -> str:
    """Writes the content of a pipe to a file that is named after it, and returns its path.

    Raises:
      UserError: If the pipe has no content, or multiple processes would each read a part of it.
    """
    if distributed.is_multiprocess():
        raise UserError(
            f"a text must be a file if multiple processes read it, got {path}, which is a pipe. "
            "Write it to a file first."
        )
    folder = cache / "fetched" / "pipes"
    digest = hashlib.sha256()
    with storage.writable(folder, what="the content of a pipe"):
        partial = folder / f".{os.getpid()}.tmp"
        try:
            with open(path, "rb") as pipe, open(partial, "wb") as copy:
                while block := pipe.read(BLOCK_BYTES):
                    digest.update(block)
                    copy.write(block)
            if not size(partial):
                raise UserError(
                    f"the pipe {path} has no content. Its command may have failed, or it "
                    "was read before."
                )
            local = folder / f"pipe-{digest.hexdigest()[:16]}"
            # An earlier copy of this content is kept with its time, by which the text of JSON lines
            # is found again.
            if not local.exists():
                os.replace(partial, local)
        finally:
            partial.unlink(missing_ok=True)
    return str(local)


def _listed(config: DataConfig) -> DataConfig:
    """Returns a config with a list of training files instead of a directory or pattern.

    Only `data.file` of the user's own text may be a directory or pattern.
    """
    path = config.file
    if not path or config.corpus is not CorpusName.TEXT or config.tokenizer.kind is Tokenizer.ID:
        return config

    # Each file, and the part of its path that the user did not type: hidden files are skipped, but
    # not those of a hidden directory that was named.
    if storage.is_dir(path):
        relative_paths = {file: os.path.relpath(file, path) for file in storage.files_below(path)}
    elif glob.has_magic(path) and not storage.exists(path):
        if is_remote(path):
            matches = remote.matching(path)
        else:
            matches = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        relative_paths = {file: os.path.basename(file) for file in matches}
    else:
        return config

    files = []
    for file, relative_path in relative_paths.items():
        is_hidden = "/." in f"/{relative_path}"
        if not is_hidden and size(file):
            files.append(file)
    if not files:
        raise UserError(
            f"--data.file is {path}, which contains only hidden or empty files. Pass another path."
        )
    n_skipped = len(relative_paths) - len(files)
    if n_skipped:
        say(f"note      {n_skipped} hidden or empty files in {path} were skipped")
    return dataclasses.replace(config, file=None, train=tuple(files))


def _copies(value: str | tuple[str, ...], cache: Path) -> Any:
    """Returns a path, or a list of paths and patterns, with copies instead of the remote ones."""
    if isinstance(value, str):
        return _local_path(value, cache)
    paths = []
    for pattern in value:
        for path in _expanded(pattern):
            paths.append(_local_path(path, cache))
    return tuple(paths)


def _local_path(path: str, cache: Path) -> str:
    return _copy(as_path(path), cache) if is_remote(path) else path


def _expanded(pattern: str) -> list[str]:
    """Returns the objects that match a remote pattern. Others are left for `text.expanded`."""
    if not is_remote(pattern) or not glob.has_magic(pattern):
        return [pattern]
    paths = remote.matching(as_path(pattern))
    if not paths:
        raise UserError(f"no object matches {pattern}. Check the pattern.")
    return paths


def local_folder(corpus: PublishedCorpus, data_dir: str, cache: Path) -> str:
    """Returns a directory of this machine with copies of a corpus's files in a remote one."""
    root = as_path(data_dir)
    wanted = set(itertools.chain(*corpus.file_sets(corpus.folders[0])))
    wanted_folders = {os.path.dirname(path) for path in wanted}
    for place in corpus.places(root):
        for folder in wanted_folders:
            # Most of the places do not exist.
            with contextlib.suppress(FileNotFoundError):
                for name in storage.names(os.path.join(place, folder).rstrip("/")):
                    path = os.path.join(folder, name)
                    if path in wanted:
                        _copy(os.path.join(place, path), cache, root)
    return str(_copy_of(root, cache))


def _copy_of(source: str, cache: Path) -> Path:
    """Returns the directory for copies from a source: a remote directory, or facts about a file."""
    return cache / "fetched" / hashlib.sha256(source.encode()).hexdigest()[:16]


def _copy(url: str, cache: Path, root: str | None = None) -> str:
    """Downloads an object, unless there is a copy of its size and time, and returns its path.

    Args:
      root: The remote directory below which the copy keeps its path, or None for the object's own.
    """
    root = root or os.path.dirname(url)
    local = _copy_of(root, cache) / os.path.relpath(url, root)
    # The time is read before the download, so that an object that is replaced meanwhile is copied
    # again.
    time = storage.modified(url)
    if local.exists():
        status = local.stat()
        if status.st_size == size(url) and status.st_mtime == time:
            return str(local)

    local.parent.mkdir(parents=True, exist_ok=True)
    # The copy has a temporary name first, so that an interrupted download is not used.
    partial = local.with_name(f".{local.name}.{os.getpid()}.tmp")
    try:
        remote.download(url, partial)
        os.utime(partial, (time, time))
        os.replace(partial, local)
    finally:
        partial.unlink(missing_ok=True)
    return str(local)
