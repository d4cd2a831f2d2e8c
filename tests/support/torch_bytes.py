"""Writes files as `torch.save` does, in both formats, without torch; values may name any class and
call.
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

STORAGES = {np.dtype(ml_dtypes.bfloat16): "BFloat16Storage", np.dtype(np.bool_): "BoolStorage"}
STORAGES |= {
    np.dtype(f"f{size}"): f"{kind}Storage"
    for size, kind in ((8, "Double"), (4, "Float"), (2, "Half"))
}
STORAGES |= {
    np.dtype(name): f"{kind}Storage"
    for name, kind in (("i8", "Long"), ("i4", "Int"), ("u1", "Byte"))
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
    cls: Any  # A Name, or what is pickled in its place.
    attributes: dict


@dataclasses.dataclass
class Raw:
    code: bytes


@dataclasses.dataclass
class Persistent:
    key: tuple


def parameter(array: np.ndarray) -> Call:
    return Call(
        Name("torch._utils", "_rebuild_parameter"),
        (array, True, Call(Name("collections", "OrderedDict"), ())),
    )


def module(
    cls: str, *, parameters: dict | None = None, buffers: dict | None = None, **attributes: Any
) -> Object:
    """A module: its submodules are the attributes that are modules; `cls` is "module.Name"."""
    children = {name: value for name, value in attributes.items() if isinstance(value, Object)}
    rest = {name: value for name, value in attributes.items() if name not in children}
    parts = {
        "_parameters": {name: parameter(array) for name, array in (parameters or {}).items()},
        "_buffers": dict(buffers or {}),
        "_modules": children,
    }
    return Object(Name(*cls.rsplit(".", 1)), {"training": False, **parts, **rest})


class Writer:
    """Pickles values with protocol 2, and collects the storages of their arrays, one for each base
    of views.
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
                return (
                    b"}("
                    + b"".join(self.code(k) + self.code(v) for k, v in value.items())
                    + pickle.SETITEMS
                )
            case list():
                return b"](" + b"".join(map(self.code, value)) + pickle.APPENDS
            case tuple():
                return b"(" + b"".join(map(self.code, value)) + pickle.TUPLE
        return pickle.dumps(value, 2)[2:-1]

    def tensor(self, array: np.ndarray) -> Call:
        """The call that makes a tensor: a view of the storage of the array that it is a view of."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        key, base = self.storages.setdefault(id(base), (str(len(self.storages)), base))
        begin = (
            array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        ) // array.itemsize
        storage = ("storage", Name("torch", STORAGES[array.dtype]), key, "cpu", base.size)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        hooks = Call(Name("collections", "OrderedDict"), ())
        storage_id = Persistent((*storage, None) if self.legacy else storage)
        return Call(
            Name("torch._utils", "_rebuild_tensor_v2"),
            (storage_id, begin, array.shape, strides, False, hooks),
        )


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
