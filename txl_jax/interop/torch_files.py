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

# The first two values of a file in the older format.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_MAX_RANK = 16
# Longest name of a storage, in characters. `torch.save` writes numbers.
_MAX_STORAGE_NAME = 200
# Characters of a name from the file in an error.
_MAX_SHOWN_KEY = 40
_MAX_SHOWN_ENTRY = 60
# Most parts of a persistent id. `torch.save` writes 6 at most.
_MAX_PERSISTENT_PARTS = 8
# Longest size and stride of a tensor.
_MAX_SIZE_BITS = 63
# Header of a zip entry: signature, and the lengths of the name and of the extra field behind it.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1  # Bit of a zip entry's flags.
# In the older format, the number of a storage's numbers comes before them.
_COUNT = struct.Struct("<q")
# Dtypes by the name of the class of a storage, without "Storage".
_DTYPES: dict[str, Any] = {
    "Double": "<f8",
    "Float": "<f4",
    "Half": "<f2",
    "BFloat16": ml_dtypes.bfloat16,
    "Long": "<i8",
    "Int": "<i4",
    "Short": "<i2",
    "Char": "i1",
    "Byte": "u1",
    "Bool": "?",
}
_STORAGES = {f"{kind}Storage": np.dtype(dtype) for kind, dtype in _DTYPES.items()}


@dataclasses.dataclass(eq=False)
class _TensorStorage:
    """Numbers of one dtype in a file, which tensors share."""

    dtype: np.dtype[Any]
    numel: int  # Number of numbers.
    offset: int | None = None  # Of the first byte in the file, or None until the bytes are found.


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor's place in a file. Equal ones are the same numbers of one storage."""

    storage: _TensorStorage
    begin: int  # Index in the storage of the tensor's first element.
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # In elements, one per axis.


@dataclasses.dataclass(frozen=True)
class TorchFile:
    """A file's value, and its sizes, which bound what is made of the value."""

    path: Path
    root: Any  # The value, with a `Tensor` for each tensor, and a `Record` for each object.
    size: int  # Bytes of the file.
    pickle_size: int  # Bytes of the pickle of `root`.

    def leaf(self, tensor: Tensor) -> Leaf:
        """Returns a tensor's numbers, read-only.

        Each read maps them again, so that a dropped array frees its pages.
        """
        storage = tensor.storage
        dtype = storage.dtype

        def part(index: Any) -> np.ndarray:
            # An empty file, or an empty part of one, cannot be mapped.
            if not math.prod(tensor.shape):
                return np.empty(tensor.shape, dtype)[index]

            # The numbers from the tensor's first to its last, with those between them that other
            # tensors have.
            assert storage.offset is not None  # All storages are found before a file is returned.
            offset = storage.offset + tensor.begin * dtype.itemsize
            size = _last(tensor) + 1 - tensor.begin
            mapped = np.memmap(self.path, dtype, mode="r", offset=offset, shape=(size,))

            strides = [stride * dtype.itemsize for stride in tensor.strides]
            numbers = np.lib.stride_tricks.as_strided(
                mapped.view(np.ndarray), tensor.shape, strides, writeable=False
            )
            return numbers[index]

        return Leaf(tensor.shape, dtype, part)


def _last(tensor: Tensor) -> int:
    """Returns the index of a tensor's last number in its storage."""
    last = tensor.begin
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        last += (size - 1) * stride
    return last


def read(path: str | os.PathLike[str]) -> TorchFile:
    """Reads a `torch.save` file or a plain pickle.

    Raises:
      UserError: If the file is corrupted or would run code.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[: len(_ZIP_SIGNATURE)] == _ZIP_SIGNATURE:
                return _read_zip(path, data)
            return _read_pickles(path, data)
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}). Check the path."
        ) from error
    # An empty file cannot be mapped, and `zipfile` and `struct` raise these for bytes that are
    # missing or changed.
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise UserError(
            f"{path} is not a complete torch.save file ({error}). Copy or download it again."
        ) from error


@dataclasses.dataclass
class _Reader:
    """Storages and tensors of a file, created when its pickle refers to them."""

    name: str  # The file's name in errors.
    size: int  # Bytes of the file.
    storages: dict[str, _TensorStorage] = dataclasses.field(default_factory=dict)  # By name.

    def load(self, data: Any, start: int = 0) -> tuple[Any, int]:
        """Reads a pickle that refers to storages. Returns its value and the offset after it."""
        return pickles.load(
            data, name=self.name, calls=_CALLS, persistent=self.persistent, start=start
        )

    def persistent(self, key: Any) -> Any:
        """Returns a storage or a module's class.

        Raises:
          DamagedError: If the persistent id is for anything else.
        """
        # Each use of an id, for a byte or two, would look at all of its parts.
        if isinstance(key, tuple) and len(key) > _MAX_PERSISTENT_PARTS:
            raise DamagedError("a persistent id has too many parts")
        match key:
            # The class's source code follows, which torch compares and nobody needs to run.
            case ("module", Symbol() as cls, *_):
                return cls
            case ("storage", Symbol(name=kind), str(name), _, int(numel), *view) if (
                kind in _STORAGES and numel >= 0
            ):
                return self._storage(name, _STORAGES[kind], numel, view)
        # The file chooses the id, which may be any value.
        raise DamagedError("a persistent id is of an unknown kind")

    def _storage(
        self, name: str, dtype: np.dtype[Any], numel: int, view: list[Any]
    ) -> _TensorStorage:
        """Returns the storage of a name, which is made when it is first asked for.

        Args:
          name: Name of the storage in the file.
          dtype: Dtype that the file claims for it.
          numel: Number of its numbers, as the file claims.
          view: Remaining parts of the persistent id.

        Raises:
          DamagedError: If the file contradicts itself, or cannot contain so many numbers.
        """
        # A storage is looked up by its name at each use, which compares the whole name.
        if len(name) > _MAX_STORAGE_NAME:
            raise DamagedError("a storage's name is too long")
        storage = self.storages.setdefault(name, _TensorStorage(dtype, numel))
        # Two claims about one storage would let a tensor reach beyond its bytes, and a claim that
        # exceeds the file would let a few bytes become terabytes.
        is_consistent = storage.dtype == dtype and numel <= storage.numel
        if not is_consistent or numel * dtype.itemsize > self.size:
            raise DamagedError(
                f"storage {name[:_MAX_SHOWN_KEY]} has {numel:,} numbers in a file of "
                f"{self.size:,} bytes"
            )
        # A view begins inside another storage, and would silently be read from its beginning.
        if any(view):
            raise DamagedError(
                "a storage is a view of another, which torch 1.0 and later do not write"
            )
        return storage


def _tensor(storage: Any, begin: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    """Returns a tensor's place.

    The arguments are those of torch's function, as the file has them, so that each can be anything.

    Raises:
      DamagedError: If they are not a place inside the storage.
    """
    are_tuples = isinstance(shape, tuple) and isinstance(strides, tuple)
    # Sizes of a million axes, or of a million digits, would take minutes to multiply.
    if (
        not isinstance(storage, _TensorStorage)
        or not are_tuples
        or len(shape) + len(strides) > 2 * _MAX_RANK
    ):
        raise DamagedError("a tensor has no storage or sizes, or too many")
    # Negative sizes and strides would reach bytes before the storage.
    for number in (begin, *shape, *strides):
        is_size = type(number) is int and number >= 0
        if not is_size or number.bit_length() > _MAX_SIZE_BITS:
            raise DamagedError("a tensor's sizes are not numbers that fit")

    tensor = Tensor(storage, begin, shape, strides)
    numel = math.prod(shape)
    last = _last(tensor)  # A ValueError if there are more sizes than strides, or fewer.
    # A stride of 0 repeats numbers, so that a small file could claim any number of them. A last
    # number beyond the storage would be another tensor's, or not in the file.
    if numel > storage.numel or (numel and last >= storage.numel):
        raise DamagedError(
            f"a tensor of shape {list(shape)} at element {begin} exceeds its storage "
            f"({storage.numel:,})"
        )
    return tensor


def _parameter(data: Any = None, *_: Any) -> Any:
    """Returns a parameter's tensor. Whether it is trained, and its hooks, are omitted."""
    return data


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    return tuple(sizes)


# Calls of torch in the pickles of `torch.save`, with what is made instead.
_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.Size": _size,
}


def _read_zip(path: Path, data: mmap.mmap) -> TorchFile:
    """Reads an archive: the pickle NAME/data.pkl, and the storages NAME/data/KEY.

    The storages are not compressed.
    """
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}

    # Zip archives of other programs begin with the same bytes.
    pickle_names = [name for name in entries if _is_pickle(name)]
    if len(pickle_names) != 1:
        raise DamagedError("the zip archive has no data.pkl")
    pickle_name = pickle_names[0]
    folder = pickle_name.removesuffix("data.pkl")

    # The numbers of a big-endian machine would be read as other numbers.
    byte_order = entries.get(f"{folder}byteorder")
    if byte_order is not None and data[_place(data, byte_order)] != b"little":
        raise DamagedError("the byte order is not little-endian")

    reader = _Reader(str(path), len(data))
    pickled = data[_place(data, entries[pickle_name])]
    root, _ = reader.load(pickled)

    for key, storage in reader.storages.items():
        # A file may name storages that it does not have, or fewer bytes for them than numbers.
        entry = entries.get(f"{folder}data/{key}")
        if entry is None:
            raise DamagedError(f"storage {key[:_MAX_SHOWN_KEY]} is missing")
        place = _place(data, entry)
        if place.stop - place.start < storage.numel * storage.dtype.itemsize:
            raise DamagedError(
                f"storage {key[:_MAX_SHOWN_KEY]} has fewer bytes than its {storage.numel:,} numbers"
            )
        storage.offset = place.start
    return TorchFile(path, root, size=len(data), pickle_size=len(pickled))


def _is_pickle(entry: str) -> bool:
    """Returns whether an archive entry is the pickle, in a directory of any name."""
    return entry.endswith("/data.pkl") and entry.count("/") == 1


def _place(data: mmap.mmap, entry: zipfile.ZipInfo) -> slice:
    """Returns the place of an archive's entry in the file.

    Raises:
      DamagedError: If the entry's bytes are not in the file as they are.
    """
    shown_name = entry.filename[:_MAX_SHOWN_ENTRY]
    # `zipfile` computes offsets from the directory's own place, which a file with bytes missing has
    # wrong. A negative one would count from the file's end.
    if entry.header_offset < 0:
        raise DamagedError(f"{shown_name} would begin before the file")
    # Compressed entries could become a thousand times as large, and encrypted ones other numbers.
    header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size]
    is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & _ENCRYPTED
    if len(header) < _LOCAL_HEADER.size or not is_plain:
        raise DamagedError(f"{shown_name} is compressed, encrypted or missing")
    # The directory may claim any place and size. Python's slices would silently be shorter.
    signature, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    begin = entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size
    end = begin + entry.file_size
    if signature != _ZIP_SIGNATURE or end > len(data):
        raise DamagedError(f"{shown_name} is beyond the file's end")
    return slice(begin, end)


def _read_pickles(path: Path, data: mmap.mmap) -> TorchFile:
    """Reads the older format, or a plain pickle.

    The older format has pickles of a magic number, the protocol, the machine, the value and the
    names of the storages, and then the storages.
    """
    reader = _Reader(str(path), len(data))
    # Another format, such as an image, would be read as instructions until one of them fails.
    if data[:1] != b"\x80" and not data[:1].isascii():
        raise DamagedError("it is neither an archive nor a pickle")
    root, after_first = reader.load(data)
    if root != _LEGACY_MAGIC:
        return TorchFile(path, root, size=len(data), pickle_size=after_first)

    # The numbers of a big-endian machine would be read as other numbers.
    protocol, offset = reader.load(data, after_first)
    machine, begin = reader.load(data, offset)
    is_little_endian = isinstance(machine, dict) and machine.get("little_endian") is True
    if protocol != _LEGACY_PROTOCOL or not is_little_endian:
        raise DamagedError("its protocol or byte order is unknown")

    root, end = reader.load(data, begin)
    keys, offset = reader.load(data, end)
    _check_keys(keys, reader.storages)
    for key in keys:
        offset = _find_storage(data, offset, key, reader.storages[key])
    return TorchFile(path, root, size=len(data), pickle_size=end - begin)


def _check_keys(keys: Any, storages: dict[str, _TensorStorage]) -> None:
    """Raises `DamagedError` unless the list of names has each storage once."""
    # The names of `storages` are short. Others are not compared with each other, which could take
    # long.
    is_known = isinstance(keys, list) and all(
        isinstance(key, str) and key in storages for key in keys
    )
    # A name that is missing or occurs twice would leave a storage without its own bytes.
    if not is_known or not len(keys) == len(set(keys)) == len(storages):
        raise DamagedError("its list of storages does not match")


def _find_storage(data: mmap.mmap, offset: int, key: str, storage: _TensorStorage) -> int:
    """Sets a storage's offset in a file of the older format. Returns the offset after it.

    Args:
      data: Content of the file.
      offset: Where the storage begins, with the number of its numbers.
      key: Name of the storage, for errors.
      storage: The storage.
    """
    begin = offset + _COUNT.size
    end = begin + storage.numel * storage.dtype.itemsize
    numel = None
    if begin <= len(data):
        (numel,) = _COUNT.unpack(data[offset:begin])
    # A file that was cut, or whose count is not the one in the pickle, has other bytes here.
    if numel != storage.numel or end > len(data):
        raise DamagedError(
            f"storage {key[:_MAX_SHOWN_KEY]} of {storage.numel:,} numbers ends beyond the "
            "file's end"
        )
    storage.offset = begin
    return end
