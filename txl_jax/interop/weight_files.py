"""Finds the files at a path that are weights of another implementation, and their kind.

Files are recognized by their first bytes. Names matter only if there are multiple files, and for a
format whose files do not begin with a mark: a TensorFlow checkpoint consists of multiple files with
one prefix.
"""

import enum
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.errors import UserError, rephrased
from txl_jax.interop import foreign_vocabulary, tensorflow
from txl_jax.runtime import storage


class FileKind(enum.StrEnum):
    """Formats of weights that are read."""

    SAFETENSORS = "safetensors"
    TORCH = "torch.save"
    TENSORFLOW = "TensorFlow"


class WeightFiles(NamedTuple):
    """Weights at a path."""

    # All of the files have this kind.
    kind: FileKind
    # The file, the index of several files, or TensorFlow's prefix. Messages name it.
    path: Path
    # Files with tensors, each with the names to read, or None for all. Empty for TensorFlow.
    parts: Mapping[Path, frozenset[str] | None]


# Files of weights in a directory, in order of preference. Indexes name the files of a model that is
# split.
NAMES = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.pt",
    "checkpoint_best.pt",
    "checkpoint_last.pt",
    "last.ckpt",
)
# Usual suffixes. Files of other names count only if nothing else begins with their first bytes.
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Files that trainers write next to the weights, in the same formats.
_OTHERS = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state.pth",
)
# First bytes, and suffixes, of files of weights in formats that are not read.
_OTHER_MAGIC = {b"\x89HDF\r\n\x1a\n": "HDF5 (Keras, TensorFlow)", b"GGUF": "GGUF"}
_OTHER_SUFFIXES = {".h5": "HDF5 (Keras, TensorFlow)", ".msgpack": "msgpack (Flax)", ".gguf": "GGUF"}
# First bytes of the file that Git has instead of a large one.
_POINTER = b"version https://git-lfs"
_INDEX = ".index.json"
# A name of a file of a model that is split: the stem, the file's number, how many files there are,
# and the suffix.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
# The number that old files of torch.save begin with.
_TORCH_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ZIP_MAGIC = b"PK\x03\x04"
# First bytes of pickles from protocol 2 on.
_PICKLE_MAGIC = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# A safetensors file begins with the length of its header, which is a JSON object.
_HEADER_LENGTH = struct.Struct("<Q")
# A zip archive begins with a header of this many bytes, which ends with the length of the first
# name and of an extra field. The name follows.
_ZIP_HEADER_SIZE = 30
_ZIP_NAME_LENGTH = struct.Struct("<26xH")
_FIRST_BYTES = 512
_MAX_FILES = 1000  # Files of a directory that are opened.
_SHOWN = 5  # Names in an error.


def find(path: Path) -> WeightFiles | None:
    """Returns the weights at a path, or None if it does not contain weights.

    Args:
      path: A file, a directory, or a TensorFlow checkpoint by any of its names.

    Raises:
      UserError: If weights exist but cannot be read, parts of them are missing, or the choice of a
        file is ambiguous.
    """
    if path.is_dir():
        return _find_in(path)
    if path.is_file():
        weights = _open(path, is_sure=True)
        if weights:
            return weights
    prefix = tensorflow.find(path)
    if prefix:
        return WeightFiles(FileKind.TENSORFLOW, prefix, parts={})
    if path.is_file():
        _check_readable(path, is_sure=path.suffix in SUFFIXES)
    return None


def _find_in(folder: Path) -> WeightFiles | None:
    """Returns a directory's weights."""
    for name in NAMES:
        if (folder / name).is_file():
            weights = _open(folder / name, is_sure=True)
            if weights:
                return weights

    # Without a usual name, each file is opened. Those with a usual suffix come first, as only a
    # thousand files of a directory are opened.
    others = (*foreign_vocabulary.NAMES, *_OTHERS)
    names = [name for name in storage.names(folder) if name not in others]
    names.sort(key=lambda name: not name.endswith(SUFFIXES))
    files = [folder / name for name in names[:_MAX_FILES] if (folder / name).is_file()]
    weights_by_path: dict[Path, WeightFiles] = {}
    for file in files:
        weights = _open(file, is_sure=False)
        if weights:
            # The files of a split model are one model, with the path of its index or first file.
            weights_by_path[weights.path] = weights
    if len(weights_by_path) == 1:
        return next(iter(weights_by_path.values()))
    # Any of them may be an average, an older step, or another model.
    if weights_by_path:
        names = [path.name for path in weights_by_path]
        raise UserError(
            f"{folder} contains multiple weight files: {_first(names)}. Pass the path of one file."
        )

    prefix = tensorflow.find(folder)
    if prefix:
        return WeightFiles(FileKind.TENSORFLOW, prefix, parts={})
    for file in files:
        _check_readable(file, is_sure=file.name in NAMES)
    return None


def _check_readable(path: Path, *, is_sure: bool) -> None:
    """Raises `UserError` for a file of weights that is not read.

    Args:
      path: A regular file that is not weights of a known kind.
      is_sure: Whether its name is one of weights, so that it must be corrupted.
    """
    begin = _begin(path)
    # A clone without Git LFS has pointers of a hundred bytes.
    if begin.startswith(_POINTER) and path.suffix in (*SUFFIXES, *_OTHER_SUFFIXES):
        raise UserError(
            f"{path} is a Git LFS pointer, not the file itself. Download it with `git lfs pull`."
        )
    # Weights of Keras, Flax or llama.cpp, which other programs take by the same names.
    formats = [format for magic, format in _OTHER_MAGIC.items() if begin.startswith(magic)]
    if path.suffix in _OTHER_SUFFIXES:
        formats.append(_OTHER_SUFFIXES[path.suffix])
    if formats and path.suffix in (*SUFFIXES, *_OTHER_SUFFIXES):
        raise UserError(
            f"{path} has weights in the format {formats[0]}, which is not supported. "
            "Save them as safetensors or with torch.save, under the names of PyTorch's class."
        )
    # A download that ended early or is an error page.
    if is_sure:
        raise UserError(_corrupted(path))


def _open(path: Path, *, is_sure: bool) -> WeightFiles | None:
    """Returns a file's weights, or None if the file is not weights.

    If the model is split, its other files are included.

    Args:
      path: A regular file.
      is_sure: Whether the file is meant. Otherwise, files of the directory that may be something
        else do not count.
    """
    if path.name.endswith(_INDEX):
        return _of_index(path)
    if part := _PART.fullmatch(path.name):
        return _of_parts(path, part)
    kind = kind_of(path)
    if kind is None or not (is_sure or _is_certain(path)):
        return None
    return WeightFiles(kind, path, {path: None})


def kind_of(path: Path) -> FileKind | None:
    """Returns a weights file's format by its first bytes, or None if the format is unsupported."""
    begin = _begin(path)
    if begin.startswith(_ZIP_MAGIC):
        # Other programs write zip archives too, such as spreadsheets and numpy's.
        if _first_entry(begin).endswith(b"/data.pkl") or path.suffix in SUFFIXES:
            return FileKind.TORCH
        return None
    if begin.startswith(_PICKLE_MAGIC):
        return FileKind.TORCH
    # Bytes that happen to have a brace there would give a header longer than the file.
    if begin[_HEADER_LENGTH.size :].startswith(b"{"):
        (header_length,) = _HEADER_LENGTH.unpack_from(begin)
        if header_length <= path.stat().st_size - _HEADER_LENGTH.size:
            return FileKind.SAFETENSORS
    return None


def _begin(path: Path) -> bytes:
    """Returns the first bytes of a regular file."""
    unreadable = f"{path} cannot be read (%s). Check the path."
    with rephrased(unreadable, OSError), open(path, "rb") as file:
        return file.read(_FIRST_BYTES)


def _is_certain(path: Path) -> bool:
    """Returns whether a file of a known kind has a name of weights, or begins like nothing else."""
    if path.suffix in SUFFIXES:
        return True
    # Only old files of torch.save begin with their number. Other pickles may have any content.
    begin = _begin(path)
    is_pickle = begin.startswith(b"\x80")
    return not is_pickle or begin[2:].startswith(_TORCH_MAGIC)


def _first_entry(begin: bytes) -> bytes:
    """Returns the name of the first file in a zip archive, given only the archive's beginning."""
    # A file may end within its header.
    if len(begin) < _ZIP_HEADER_SIZE:
        return b""
    (length,) = _ZIP_NAME_LENGTH.unpack_from(begin)
    return begin[_ZIP_HEADER_SIZE : _ZIP_HEADER_SIZE + length]


def _of_index(path: Path) -> WeightFiles:
    """Returns the files that an index lists: {"weight_map": {tensor: file}}, next to it."""
    damaged = f"{path} is not an index of weights (%s). Copy or download it again."
    with rephrased(damaged, OSError, ValueError, LookupError, TypeError, AttributeError):
        names_by_file: dict[str, set[str]] = {}
        for tensor, file in storage.read_json(path)["weight_map"].items():
            # A path such as ../../other.bin, or /etc/passwd, leads out of the directory.
            if Path(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"it names {file!r:.100}, which is not a file next to it")
            names_by_file.setdefault(file, set()).add(tensor)
    parts = {path.with_name(file): frozenset(names) for file, names in names_by_file.items()}
    return _of_files(path, parts)


def _of_parts(path: Path, part: re.Match[str]) -> WeightFiles | None:
    """Returns the files of a split model from one of their names.

    Args:
      path: A regular file, such as model-00001-of-00003.safetensors.
      part: The match of its name.
    """
    # Texts and files of ids are split too.
    if kind_of(path) is None:
        return None
    stem, _, count, suffix = part.groups()
    for index in (f"{stem}{suffix}{_INDEX}", f"{stem}{_INDEX}"):
        if path.with_name(index).is_file():
            return _of_index(path.with_name(index))
    if suffix not in SUFFIXES:
        return None
    numbers = range(1, int(count) + 1)
    files = [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in numbers]
    return _of_files(files[0] if files else path, dict.fromkeys(files))


def _of_files(path: Path, parts: Mapping[Path, Any]) -> WeightFiles:
    """Returns a split model, after checking that all of its files are there.

    Args:
      path: The index, or the first file.
      parts: The files, each with the names to read, or None for all.

    Raises:
      UserError: If a file is missing, or is not weights.
    """
    # A download may have stopped before the last file, and an index may list none.
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise UserError(
            f"{path}: the model has {len(parts)} files, of which {_first(missing)} are missing. "
            "Download them too."
        )
    kinds: list[FileKind] = []
    for part in parts:
        kind = kind_of(part)
        if kind is None:
            raise UserError(_corrupted(part))
        kinds.append(kind)
    return WeightFiles(kinds[0], path, parts)


def _corrupted(path: Path) -> str:
    return (
        f"{path} begins like neither a safetensors file nor one of torch.save. "
        "Copy or download it again."
    )


def _first(names: list[str]) -> str:
    """Returns the first names, and the number of the others."""
    shown = ", ".join(names[:_SHOWN])
    if len(names) <= _SHOWN:
        return shown
    return f"{shown} and {len(names) - _SHOWN} more"
