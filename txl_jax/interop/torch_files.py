"""Reads tensors of PyTorch files without torch, and without running anything that the files name.

It reads the zip archive of torch 1.6, and the older sequence of pickles and storages of the
published weights.

    file = read("pytorch_model.bin")  # .root: the file's value, with `Tensor` instead of tensors.
    tensors = state_dict.of(file)     # Leaves by name, also for a pickled module (model.pt).
"""

import dataclasses
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from txl_jax.errors import UserError
from txl_jax.interop import pickles
from txl_jax.interop.leaves import Leaf
from txl_jax.interop.pickles import DamagedError, Symbol

_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_MAX_RANK = 16
_MAX_STORAGE_NAME = 200  # Characters. `torch.save` writes numbers.
_MAX_PERSISTENT_PARTS = 8  # Of a persistent id. `torch.save` writes 6 at most.
_MAX_SIZE_BITS = 63  # Of a tensor's sizes and strides.
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # Zip entry: signature, lengths of name and extra field.
_KINDS = {"Double": "<f8", "Float": "<f4", "Half": "<f2", "BFloat16": ml_dtypes.bfloat16}
_KINDS |= {"Long": "<i8", "Int": "<i4", "Short": "<i2", "Char": "i1", "Byte": "u1", "Bool": "?"}
_STORAGES = {f"{kind}Storage": np.dtype(dtype) for kind, dtype in _KINDS.items()}


@dataclasses.dataclass(eq=False)
class _Storage:
    """Numbers of one dtype in a file, which tensors share."""

    dtype: np.dtype[Any]
    numel: int
    offset: int | None = None  # Known once the bytes are found.


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor's place in a file. Equal ones are the same numbers of one storage."""

    storage: _Storage
    begin: int  # First element of the storage.
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # In elements.


@dataclasses.dataclass(frozen=True)
class TorchFile:
    """A file's value. `root` has a `Tensor` for each tensor, and a `Record` for each object."""

    path: Path
    root: Any
    size: int  # Bytes of the file, and of the pickle of `root`. They bound what is made of them.
    pickle_size: int

    def leaf(self, tensor: Tensor) -> Leaf:
        """Returns a tensor's numbers, read-only.

        Each read maps them again, so that a dropped array frees its pages.
        """
        storage, shape, dtype = tensor.storage, tensor.shape, tensor.storage.dtype

        def part(index: Any) -> np.ndarray:
            if not math.prod(shape):
                return np.empty(shape, dtype)[index]
            assert storage.offset is not None  # All storages are found before a file is returned.
            offset = storage.offset + tensor.begin * dtype.itemsize
            size = _last(tensor) + 1 - tensor.begin
            mapped = np.memmap(self.path, dtype, mode="r", offset=offset, shape=(size,)).view(
                np.ndarray
            )
            strides = [stride * dtype.itemsize for stride in tensor.strides]
            return np.lib.stride_tricks.as_strided(mapped, shape, strides, writeable=False)[index]

        return Leaf(shape, dtype, part)


def _last(tensor: Tensor) -> int:
    """Returns the index of a tensor's last number in its storage."""
    steps = zip(tensor.shape, tensor.strides, strict=True)
    return tensor.begin + sum((size - 1) * stride for size, stride in steps)


def read(path: str | os.PathLike[str]) -> TorchFile:
    """Reads a `torch.save` file or a plain pickle.

    Raises `UserError` if it is corrupted or would run code.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            read_value = _read_zip if data[:4] == b"PK\x03\x04" else _read_pickles
            return read_value(path, data)
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}). Check the path."
        ) from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise UserError(
            f"{path} is not a complete torch.save file ({error}). Copy or download it again."
        ) from error


@dataclasses.dataclass
class _Reader:
    """Storages and tensors of a file, as its pickle asks for them."""

    name: str
    size: int
    storages: dict[str, _Storage] = dataclasses.field(default_factory=dict)

    def load(self, data: Any, start: int = 0) -> tuple[Any, int]:
        """Reads a pickle that refers to storages. Returns its value and the offset after it."""
        return pickles.load(
            data, name=self.name, calls=_CALLS, persistent=self.persistent, start=start
        )

    def persistent(self, key: Any) -> Any:
        """Returns a storage or a module's class, or raises `DamagedError` for anything else."""
        if isinstance(key, tuple) and len(key) > _MAX_PERSISTENT_PARTS:
            raise DamagedError("a persistent id has too many parts")
        match key:
            case ("module", Symbol() as cls, *_):  # Its source follows.
                return cls
            case ("storage", Symbol(name=kind), str(name), _, int(numel), *view) if (
                kind in _STORAGES and numel >= 0
            ):
                dtype = _STORAGES[kind]
                if len(name) > _MAX_STORAGE_NAME:
                    raise DamagedError("a storage's name is too long")
                storage = self.storages.setdefault(name, _Storage(dtype, numel))
                if (
                    storage.dtype != dtype
                    or numel > storage.numel
                    or numel * dtype.itemsize > self.size
                ):
                    raise DamagedError(
                        f"storage {name[:40]} has {numel:,} numbers in a file "
                        f"of {self.size:,} bytes"
                    )
                if any(view):
                    raise DamagedError(
                        "a storage is a view of another, which torch 1.0 and later do not write"
                    )
                return storage
        raise DamagedError("a persistent id is of an unknown kind")


def _tensor(storage: Any, begin: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    """Returns a tensor's place, or raises `DamagedError` if it is not inside the storage."""
    sizes = (
        (begin, *shape, *strides)
        if isinstance(shape, tuple) and isinstance(strides, tuple)
        else None
    )
    # The number of sizes and their lengths come first, as the product of many sizes takes long.
    if not isinstance(storage, _Storage) or sizes is None or len(sizes) > 1 + 2 * _MAX_RANK:
        raise DamagedError("a tensor has no storage or sizes, or too many")
    if not all(type(n) is int and n >= 0 and n.bit_length() <= _MAX_SIZE_BITS for n in sizes):
        raise DamagedError("a tensor's sizes are not numbers that fit")
    numel, last = math.prod(shape), _last(Tensor(storage, begin, shape, strides))
    # A stride of 0 repeats numbers, so that a small file could claim any number of them.
    if numel > storage.numel or (numel and last >= storage.numel):
        found = f"a tensor of shape {list(shape)} at element {begin}"
        raise DamagedError(f"{found} exceeds its storage ({storage.numel:,})")
    return Tensor(storage, begin, shape, strides)


_PARAMETERS = (
    "_utils._rebuild_parameter",
    "_utils._rebuild_parameter_with_state",
    "nn.parameter.Parameter",
)
_CALLS: dict[str, Callable[..., Any]] = {
    **{
        f"torch.{name}": lambda data=None, *_: data
        for name in (*_PARAMETERS, "nn.parameter.Buffer")
    },
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2")},
    "torch.Size": lambda sizes=(): tuple(sizes),
}


def _read_zip(path: Path, data: mmap.mmap) -> TorchFile:
    """Reads an archive: the pickle NAME/data.pkl, and the storages NAME/data/KEY.

    The storages are not compressed.
    """
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise DamagedError("the zip archive has no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if (
        f"{folder}byteorder" in entries
        and data[_place(data, entries[f"{folder}byteorder"])] != b"little"
    ):
        raise DamagedError("the byte order is not little-endian")
    reader = _Reader(str(path), len(data))
    pickled = data[_place(data, entries[pickles[0]])]
    root, _ = reader.load(pickled)
    for key, storage in reader.storages.items():
        if f"{folder}data/{key}" not in entries:
            raise DamagedError(f"storage {key[:40]} is missing")
        place = _place(data, entries[f"{folder}data/{key}"])
        if place.stop - place.start < storage.numel * storage.dtype.itemsize:
            raise DamagedError(
                f"storage {key[:40]} has fewer bytes than its {storage.numel:,} numbers"
            )
        storage.offset = place.start
    return TorchFile(path, root, len(data), len(pickled))


def _place(data: mmap.mmap, entry: zipfile.ZipInfo) -> slice:
    """Returns the place of an archive's entry in the file."""
    # `zipfile` computes offsets from the directory's own place, which a file with bytes missing has
    # wrong.
    if entry.header_offset < 0:
        raise DamagedError(f"{entry.filename[:60]} would begin before the file")
    header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size]
    if (
        len(header) < _LOCAL_HEADER.size
        or entry.compress_type != zipfile.ZIP_STORED
        or entry.flag_bits & 1
    ):
        raise DamagedError(f"{entry.filename[:60]} is compressed, encrypted or missing")
    signature, name, extra = _LOCAL_HEADER.unpack(header)
    begin = entry.header_offset + _LOCAL_HEADER.size + name + extra
    if signature != b"PK\x03\x04" or begin + entry.file_size > len(data):
        raise DamagedError(f"{entry.filename[:60]} is beyond the file's end")
    return slice(begin, begin + entry.file_size)


def _read_pickles(path: Path, data: mmap.mmap) -> TorchFile:
    """Reads the older format, or a plain pickle.

    The older format consists of magic number, protocol, machine, value, keys and storages.
    """
    reader = _Reader(str(path), len(data))
    if data[:1] != b"\x80" and not data[:1].isascii():
        raise DamagedError("it is neither an archive nor a pickle")
    root, at = reader.load(data)
    if root != _LEGACY_MAGIC:
        return TorchFile(path, root, len(data), at)
    protocol, at = reader.load(data, at)
    machine, at = reader.load(data, at)
    if protocol != _LEGACY_PROTOCOL or not (
        isinstance(machine, dict) and machine.get("little_endian") is True
    ):
        raise DamagedError("its protocol or byte order is unknown")
    begin = at
    root, at = reader.load(data, begin)
    pickle_size = at - begin
    keys, at = reader.load(data, at)
    # The names of `storages` are short. Others are not compared with each other, which could take
    # long.
    known = isinstance(keys, list) and all(
        isinstance(key, str) and key in reader.storages for key in keys
    )
    if not known or not len(keys) == len(set(keys)) == len(reader.storages):
        raise DamagedError("its list of storages does not match")
    for key in keys:
        storage = reader.storages[key]
        (numel,) = struct.unpack("<q", data[at : at + 8]) if at + 8 <= len(data) else (None,)
        storage.offset, at = at + 8, at + 8 + storage.numel * storage.dtype.itemsize
        if numel != storage.numel or at > len(data):
            raise DamagedError(
                f"storage {key[:40]} of {storage.numel:,} numbers ends beyond the file's end"
            )
    return TorchFile(path, root, len(data), pickle_size)
