"""Finds the files at a path that are weights of another implementation, and their kind.

Files are recognized by their first bytes.

A name only decides between several files, and where a format has no mark of its own: a checkpoint
of TensorFlow is several files with one prefix.
"""

import enum
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.errors import UserError, rephrased
from txl_jax.interop import foreign_vocabulary, tensorflow
from txl_jax.runtime import storage


class Kind(enum.StrEnum):
    """Formats of weights that are read."""

    SAFETENSORS = "safetensors"
    TORCH = "torch.save"
    TENSORFLOW = "TensorFlow"


class WeightFiles(NamedTuple):
    """Weights at a path."""

    kind: Kind
    # The file, the index of several files, or TensorFlow's prefix: what messages name.
    path: Path
    # Files with tensors, each with the names to read, or None for all.
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
# What files of weights in other formats begin with, or end their names with.
_OTHER_MAGIC = {b"\x89HDF\r\n\x1a\n": "HDF5 (Keras, TensorFlow)", b"GGUF": "GGUF"}
_OTHER_SUFFIXES = {".h5": "HDF5 (Keras, TensorFlow)", ".msgpack": "msgpack (Flax)", ".gguf": "GGUF"}
_POINTER = b"version https://git-lfs"  # What Git has in place of a large file.
_INDEX = ".index.json"
# A file of a model that is split.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
# The number that old files of torch.save begin with.
_TORCH_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_FIRST_BYTES = 512
_MAX_FILES = 1000  # Of a directory that are opened.
_SHOWN = 5  # Names in an error.


def find(path: Path) -> WeightFiles | None:
    """Returns the weights at a path.

    The weights are a file, a directory, or a TensorFlow checkpoint by any of its names.

    Returns None if there are none. Raises `UserError` if weights are there that cannot be read,
    parts of them are missing, or it is unclear which file is meant.
    """
    if path.is_dir():
        return _find_in(path)
    if path.is_file() and (found := _open(path, is_sure=True)):
        return found
    if prefix := tensorflow.find(path):
        return WeightFiles(Kind.TENSORFLOW, prefix, {})
    if path.is_file():
        _refuse_unreadable(path, is_sure=path.suffix in SUFFIXES)
    return None


def _find_in(folder: Path) -> WeightFiles | None:
    """Returns a directory's weights."""
    for name in NAMES:
        if (folder / name).is_file() and (found := _open(folder / name, is_sure=True)):
            return found
    names = [
        name for name in storage.names(folder) if name not in (*foreign_vocabulary.NAMES, *_OTHERS)
    ]
    names.sort(key=lambda name: not name.endswith(SUFFIXES))  # The likely ones come first.
    files = [folder / name for name in names[:_MAX_FILES] if (folder / name).is_file()]
    whole = {found.path: found for file in files if (found := _open(file, is_sure=False))}
    if len(whole) == 1:
        return next(iter(whole.values()))
    if whole:
        some = _some(path.name for path in whole)
        raise UserError(
            f"{folder} has several files of weights: {some}. Pass the path of one of them."
        )
    if prefix := tensorflow.find(folder):
        return WeightFiles(Kind.TENSORFLOW, prefix, {})
    for file in files:
        _refuse_unreadable(file, is_sure=file.name in NAMES)
    return None


def _refuse_unreadable(path: Path, *, is_sure: bool) -> None:
    """Raises `UserError` for a file of weights that is not read.

    `is_sure` says that it should be one that is.
    """
    begin = _begin(path)
    if begin.startswith(_POINTER) and path.suffix in (*SUFFIXES, *_OTHER_SUFFIXES):
        raise UserError(
            f"{path} is a pointer of Git LFS, not the file itself. Download it with `git lfs pull`."
        )
    other = next(
        (format for magic, format in _OTHER_MAGIC.items() if begin.startswith(magic)), None
    )
    if (path.suffix in SUFFIXES and other) or path.suffix in _OTHER_SUFFIXES:
        raise UserError(
            f"{path} has weights in the format {other or _OTHER_SUFFIXES[path.suffix]}, which is "
            "not read. Save them as safetensors or by torch.save, under the names "
            "of PyTorch's class."
        )
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


def kind_of(path: Path) -> Kind | None:
    """Returns a weights file's format by its first bytes, or None if the format is unsupported."""
    begin = _begin(path)
    if begin.startswith(b"PK\x03\x04"):
        return (
            Kind.TORCH
            if _first_entry(begin).endswith(b"/data.pkl") or path.suffix in SUFFIXES
            else None
        )
    if begin[:1] == b"\x80" and begin[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return Kind.TORCH
    if begin[8:9] == b"{" and struct.unpack("<Q", begin[:8])[0] <= path.stat().st_size - 8:
        return Kind.SAFETENSORS
    return None


def _begin(path: Path) -> bytes:
    """Returns the first bytes of a regular file."""
    with (
        rephrased(f"{path} cannot be read (%s). Check the path.", OSError),
        open(path, "rb") as file,
    ):
        return file.read(_FIRST_BYTES)


def _is_certain(path: Path) -> bool:
    """Returns whether a file of a known kind has a name of weights, or begins like nothing else."""
    begin = _begin(path)
    # Other pickles may have any content.
    return path.suffix in SUFFIXES or begin[:1] != b"\x80" or begin[2:].startswith(_TORCH_MAGIC)


def _first_entry(begin: bytes) -> bytes:
    """Returns the name of the first file in a zip archive, given only the archive's beginning."""
    if len(begin) < 30:
        return b""
    (length,) = struct.unpack("<H", begin[26:28])
    return begin[30 : 30 + length]


def _of_index(path: Path) -> WeightFiles:
    """Returns the files that an index lists: {"weight_map": {tensor: file}}, next to it."""
    damaged = f"{path} is not an index of weights (%s). Copy or download it again."
    with rephrased(damaged, OSError, ValueError, LookupError, TypeError, AttributeError):
        names: dict[str, set[str]] = {}
        # No name leads out of the directory.
        for tensor, file in storage.read_json(path)["weight_map"].items():
            if Path(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"it names {file!r:.100}, which is not a file next to it")
            names.setdefault(file, set()).add(tensor)
    parts = {path.with_name(file): frozenset(tensors) for file, tensors in names.items()}
    return _of_files(path, parts)


def _of_parts(path: Path, part: re.Match[str]) -> WeightFiles | None:
    """Returns the files of a split model from one of their names.

    An example of such a name is model-00001-of-00003.safetensors.
    """
    if kind_of(path) is None:  # Texts and ids are split too.
        return None
    name, _, count, suffix = part.groups()
    for index in (f"{name}{suffix}{_INDEX}", f"{name}{_INDEX}"):
        if path.with_name(index).is_file():
            return _of_index(path.with_name(index))
    files = [
        path.with_name(f"{name}-{number:05}-of-{count}{suffix}")
        for number in range(1, int(count) + 1)
    ]
    if suffix not in SUFFIXES:
        return None
    return _of_files(files[0] if files else path, dict.fromkeys(files))


def _of_files(path: Path, parts: Mapping[Path, Any]) -> WeightFiles:
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise UserError(
            f"{path}: the model has {len(parts)} files, of which {_some(missing)} are missing. "
            "Get them too."
        )
    kinds = {part: kind_of(part) for part in parts}
    for part, kind in kinds.items():
        if kind is None:
            raise UserError(_corrupted(part))
    return WeightFiles(next(iter(kinds.values())) or Kind.TORCH, path, parts)


def _corrupted(path: Path) -> str:
    return (
        f"{path} begins like neither a safetensors file nor one of torch.save. "
        "Copy or download it again."
    )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
