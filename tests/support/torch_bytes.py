"""Writes files as `torch.save` does, in both formats, without torch.

Values may name any class and any call.
"""

import dataclasses
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

STORAGES = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}


@dataclasses.dataclass
class Name:
    module: str
    name: str


@dataclasses.dataclass
class Call:
    """A value that an unpickler gets by a call."""

    function: Name
    args: tuple


@dataclasses.dataclass
class Object:
    cls: Any  # A Name, or a value that is pickled instead.
    attributes: dict


@dataclasses.dataclass
class Raw:
    code: bytes


@dataclasses.dataclass
class Persistent:
    key: tuple


def parameter(array: np.ndarray) -> Call:
    hooks = Call(Name("collections", "OrderedDict"), ())
    return Call(Name("torch._utils", "_rebuild_parameter"), (array, True, hooks))


def module(
    cls: str, *, parameters: dict | None = None, buffers: dict | None = None, **attributes: Any
) -> Object:
    """A module. `cls` is "module.Name", and attributes that are modules are its submodules."""
    children = {}
    others = {}
    for name, value in attributes.items():
        if isinstance(value, Object):
            children[name] = value
        else:
            others[name] = value

    state = {
        "training": False,
        "_parameters": {name: parameter(array) for name, array in (parameters or {}).items()},
        "_buffers": dict(buffers or {}),
        "_modules": children,
    }
    parent, _, class_name = cls.rpartition(".")
    return Object(Name(parent, class_name), state | others)


class Writer:
    """Pickles values with protocol 2, and collects the storages of their arrays.

    Views of the same base share a storage.
    """

    def __init__(self, *, legacy: bool):
        self.legacy = legacy
        self.storages: dict[int, tuple[str, np.ndarray]] = {}

    def pickled(self, value: Any) -> bytes:
        return b"\x80\x02" + self.code(value) + b"."

    def code(self, value: Any) -> bytes:
        """The instructions that push a value."""
        match value:
            case np.ndarray():
                return self.code(self.tensor(value))
            case Name(name=name, module=parent):
                return f"c{parent}\n{name}\n".encode()
            case Call(function=function, args=args):
                return self.code(function) + self.code(args) + pickle.REDUCE
            case Object(cls=cls, attributes=attributes):
                return self.code(cls) + b")" + pickle.NEWOBJ + self.code(attributes) + pickle.BUILD
            case Raw(code=code):
                return code
            case Persistent(key=key):
                return self.code(key) + pickle.BINPERSID
            case dict():
                items = b"".join(self.code(key) + self.code(item) for key, item in value.items())
                return b"}(" + items + pickle.SETITEMS
            case list():
                return b"](" + b"".join(map(self.code, value)) + pickle.APPENDS
            case tuple():
                return b"(" + b"".join(map(self.code, value)) + pickle.TUPLE
        return pickle.dumps(value, 2)[2:-1]

    def tensor(self, array: np.ndarray) -> Call:
        """The call that makes a tensor: a view of the storage of the array's base."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        key, base = self.storages.setdefault(id(base), (str(len(self.storages)), base))
        storage = ("storage", Name("torch", STORAGES[array.dtype]), key, "cpu", base.size)
        if self.legacy:
            storage += (None,)

        # Torch counts in elements, numpy in bytes.
        begin = (_address(array) - _address(base)) // array.itemsize
        strides = tuple(stride // array.itemsize for stride in array.strides)
        hooks = Call(Name("collections", "OrderedDict"), ())
        return Call(
            Name("torch._utils", "_rebuild_tensor_v2"),
            (Persistent(storage), begin, array.shape, strides, False, hooks),
        )


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def write_zip(path: Path, value: Any) -> Path:
    """Writes the format of torch 1.6 and later."""
    writer = Writer(legacy=False)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", writer.pickled(value))
        archive.writestr("archive/byteorder", "little")
        for key, base in writer.storages.values():
            archive.writestr(f"archive/data/{key}", base.tobytes())
        archive.writestr("archive/version", "3\n")
    return path


def write_legacy(path: Path, value: Any) -> Path:
    writer = Writer(legacy=True)
    machine = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    parts = [writer.pickled(part) for part in (0x1950A86A20F9469CFC6C, 1001, machine, value)]
    parts.append(writer.pickled([key for key, _ in writer.storages.values()]))
    for _, base in writer.storages.values():
        parts += [struct.pack("<q", base.size), base.tobytes()]
    path.write_bytes(b"".join(parts))
    return path


by_format = pytest.mark.parametrize("write", [write_legacy, write_zip], ids=["legacy", "zip"])
