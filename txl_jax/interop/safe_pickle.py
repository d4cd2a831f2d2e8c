"""Reads pickles without running anything that they name.

A pickle is a program for a stack machine, whose instructions import and call whatever its author likes. The machine
here has no import and no call: a name stays a `Symbol`, an object of a class becomes a `Record` of its arguments and
state, and only the callables of `calls`, functions of this package that build plain values, take arguments. What a
file of weights has no use for (a call of anything else, names such as os.system, codes of the extension registry)
is a `UserError` that names it, so that nobody takes such a file for a harmless one.

Sizes are bounded by the file: lengths are checked before anything is allocated, a text or bytes above `MAX_TEXT` (the
tokens of a whole corpus) is left out as `Omitted`, and calls may copy a few times the file's size in all.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from txl_jax.errors import UserError
from txl_jax.interop import pickle_instructions
from txl_jax.interop.pickle_instructions import DamagedError

MAX_TEXT = 1 << 24
_MAX_LINE = 1 << 16  # Of the text instructions of protocol 0.

# Names from here run code, read files or reach the network in an ordinary unpickler.
_CODE_MODULES = frozenset(
    """_io _operator _pickle __builtin__ asyncio bdb builtins cPickle code codeop commands ctypes functools http imp
    importlib io marshal multiprocessing nt operator os pdb pickle pip platform popen2 posix pty requests runpy shutil
    signal socket subprocess sys tempfile threading timeit types urllib webbrowser""".split()  # noqa: SIM905
)
_SAFE_BUILTINS = frozenset(
    """bool bytearray bytes complex dict float frozenset int list long object range set slice str tuple
    unicode""".split()  # noqa: SIM905
)
# Calls that occur in files of weights and vocabularies, and whose values nobody needs.
_INERT_CALLS = frozenset(
    [
        *(f"{module}.{name}" for module in ("numpy.core.multiarray", "numpy._core.multiarray") for name in
          ("_reconstruct", "scalar")),
        *("numpy.dtype", "numpy.ndarray", "numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"),
        *("re._compile", "torch.device", "torch.serialization._get_layout", "torch.storage._load_from_bytes"),
        *("datetime.datetime", "datetime.date", "datetime.timedelta", "pathlib.PosixPath", "pathlib.Path"),
    ]
)  # fmt: skip


class Symbol(NamedTuple):
    """A name of a module, which is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(eq=False, repr=False)
class Record:
    """An object of a class that is not imported: what its pickle holds, as it is."""

    symbol: Symbol
    args: tuple[Any, ...] = ()
    state: Any = None
    elements: list[Any] = dataclasses.field(default_factory=list)  # Of a list's subclass.
    entries: dict[Any, Any] = dataclasses.field(default_factory=dict)  # Of a dict's subclass.

    def attributes(self) -> dict[Any, Any]:
        """Returns the object's `__dict__`; empty if it has none."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state if isinstance(state, dict) else {}


class Omitted(NamedTuple):
    """A text or bytes that was too long to read."""

    size: int


Call = Callable[..., Any]
_MARK = object()  # On the stack.


def load(
    data: Any,
    *,
    name: str,
    calls: Mapping[str, Call] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    start: int = 0,
) -> tuple[Any, int]:
    """Reads one pickle.

    Args:
      data: bytes, or what has a buffer of bytes, as a memory-mapped file.
      name: of the file, for errors.
      calls: functions by dotted name, in place of what the pickle calls; they must do no harm with any arguments.
      persistent: makes a value of a persistent id; None: there are none.
      start: offset of the pickle.

    Returns:
      The value: plain values and containers, `Symbol`, `Record`, `Omitted` and what `calls` and `persistent` made;
      and the offset after the pickle.

    Raises:
      UserError: the pickle is damaged, ends early, or calls something else.
    """
    # Released here, as a file that is mapped into memory cannot be closed while an error's traceback holds a view.
    with memoryview(data) as whole, whole.cast("B") as view:
        return _Machine(view, name, {**_CALLS, **(calls or {})}, persistent, start).run()


class _Machine:
    """The stack machine of the pickle module's protocols 0 to 5."""

    def __init__(
        self,
        data: memoryview,
        name: str,
        calls: Mapping[str, Call],
        persistent: Callable[[Any], Any] | None,
        start: int,
    ) -> None:
        self.data, self.name, self.calls, self.persistent, self.at = data, name, calls, persistent, start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.budget = 4 * len(data) + (1 << 20)  # Elements that calls may copy.

    def run(self) -> tuple[Any, int]:
        """Carries out instructions up to STOP."""
        data, size, begin = self.data, len(self.data), self.at
        instructions, stop = pickle_instructions.TABLE, pickle_instructions.STOP
        try:
            while self.at < size:
                code = data[self.at]
                self.at += 1
                if code == stop:
                    return self.pop(), self.at
                instructions[code](self)
        except UserError:
            raise
        except (
            *(DamagedError, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, struct.error),
            *(RecursionError, MemoryError),
        ) as error:
            reason = str(error) if isinstance(error, DamagedError) else f"{type(error).__name__}"
            raise UserError(
                f"{self.name}: the pickle at byte {begin} is damaged at byte {self.at} ({reason}); copy or download "
                "the file again"
            ) from error
        raise UserError(f"{self.name}: the pickle at byte {begin} ends early; copy or download the file again")

    # The bytes.

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes."""
        if size < 0 or size > len(self.data) - self.at:
            raise DamagedError("it ends early")
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def number(self, form: str) -> Any:
        """Returns the next number of a struct's format."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> bytes:
        """Returns the bytes up to a newline."""
        found = bytes(self.data[self.at : self.at + _MAX_LINE])
        end = found.find(b"\n")
        if end < 0:
            raise DamagedError("a line has no end")
        self.at += end + 1
        return found[:end]

    def long_text(self, form: str, decode: Callable[[bytes], Any]) -> None:
        """Pushes a text or bytes with its length before it, or `Omitted`."""
        size = self.number(form)
        if size > MAX_TEXT and size <= len(self.data) - self.at:
            self.at += size
            self.stack.append(Omitted(size))
        else:
            self.stack.append(decode(self.take(size)))

    # The stack.

    def pop(self) -> Any:
        """Takes a value off the stack."""
        if not self.stack or self.stack[-1] is _MARK:
            raise DamagedError("its stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        """Returns the value on top of the stack."""
        if not self.stack or self.stack[-1] is _MARK:
            raise DamagedError("its stack is empty")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """Takes the values above the last mark, and the mark, off the stack."""
        values: list[Any] = []
        while self.stack:
            value = self.stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)
        raise DamagedError("a mark is missing")

    def push(self, value: Any) -> None:
        """Puts a value on the stack."""
        self.stack.append(value)

    # Names, calls and objects.

    def symbol(self, module: Any, name: Any) -> Symbol:
        """Returns a name; raises `UserError` for one that can only serve to run code."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedError("a name is no text")
        package = module.partition(".")[0]
        builtin = package in ("builtins", "__builtin__") and name in _SAFE_BUILTINS
        if package in _CODE_MODULES and not builtin:
            raise self.refused("names", f"{module}.{name}")
        return Symbol(module, name)

    def refused(self, verb: str, what: str) -> UserError:
        """Returns the error of a pickle that would run code."""
        return UserError(
            f"{self.name}: its pickle {verb} {what[:120]}, for which a file of weights or words has no use; nothing "
            "of it was run, so take the file from a source that you trust"
        )

    def call(self, function: Any, args: Any) -> Any:
        """Returns what one of `calls` makes of the arguments, or a record of a call that is known and not needed."""
        if not isinstance(args, tuple):
            raise DamagedError("arguments are no tuple")
        dotted = str(function) if isinstance(function, Symbol) else f"a value of type {type(function).__name__}"
        if dotted in self.calls:
            self.budget -= sum(len(arg) for arg in args if hasattr(arg, "__len__"))
            if self.budget < 0:
                raise DamagedError("its values are larger than the file")
            return self.calls[dotted](*args)
        if isinstance(function, Symbol) and dotted in _INERT_CALLS:
            return Record(function, args)
        raise self.refused("calls", dotted)

    def new(self, cls: Any, args: Any) -> Any:
        """Returns an object: empty, of plain containers or a record."""
        if not (isinstance(cls, Symbol) and isinstance(args, tuple)):
            raise DamagedError("an object's class is no name")
        return self.call(cls, args) if str(cls) in self.calls else Record(cls, args)

    def build(self) -> None:
        """Gives an object its state; attributes of plain containers are left out."""
        state = self.pop()
        value = self.top()
        if isinstance(value, Record):
            if isinstance(state, dict) and isinstance(value.state, dict):
                value.state |= state
            else:
                value.state = state

    def set_entries(self, values: list[Any]) -> None:
        """Puts keys and values, in turn, into the dict or record on top of the stack."""
        target = self.top()
        entries = target.entries if isinstance(target, Record) else target
        if len(values) % 2 or not isinstance(entries, dict):
            raise DamagedError("an entry has no key or no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            entries[_hashable(key)] = value

    def add_elements(self, values: list[Any]) -> None:
        """Puts values into the list, set or record on top of the stack."""
        target = self.top()
        if isinstance(target, set):
            target.update(map(_hashable, values))
        elif isinstance(target, Record):
            target.elements.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise DamagedError("an element has no list")

    def persist(self, value: Any) -> None:
        """Pushes the value of a persistent id."""
        if self.persistent is None:
            raise self.refused("holds", "a persistent id")
        self.stack.append(self.persistent(value))

    def mark(self) -> None:
        """Pushes a mark."""
        self.stack.append(_MARK)


def _hashable(key: Any) -> Any:
    """Returns a key whose hash needs no deep recursion."""
    plain = (str, bytes, int, float, complex, bool, type(None), Record)
    if isinstance(key, plain) or (isinstance(key, tuple) and all(isinstance(part, plain) for part in key)):
        return key
    raise DamagedError(f"a {type(key).__name__} is no key")


def _dict(entries: Any = ()) -> dict[Any, Any]:
    pairs: Iterable[Any] = entries.items() if isinstance(entries, dict) else entries
    return {_hashable(key): value for key, value in pairs}


def _set(elements: Any = ()) -> set[Any]:
    return set(map(_hashable, elements))


def _encode(text: Any, encoding: Any = "utf-8") -> Any:
    """Returns the bytes that protocol 2 writes as a text."""
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise DamagedError("bytes have an unknown encoding")
    return text if isinstance(text, Omitted) else text.encode(encoding)


def _object_of(cls: Any, base: Any = None, state: Any = None) -> Record:
    """Returns an object that protocols 0 and 1 make with copyreg."""
    if not isinstance(cls, Symbol):
        raise DamagedError("an object's class is no name")
    elements, entries = (
        (list(state) if isinstance(state, list) else []),
        _dict(state if isinstance(state, dict) else ()),
    )
    return Record(cls, (), None, elements, entries)


def _bytes(text: Any = b"", encoding: Any = "utf-8") -> Any:
    """Returns bytes: empty ones, or those of a text or of bytes."""
    return text if isinstance(text, (bytes, Omitted)) else _encode(text, encoding)


_BUILTINS: Mapping[str, Call] = {"set": _set, "frozenset": _set, "bytes": _bytes, "bytearray": _bytes}
_CALLS: Mapping[str, Call] = {
    **{f"{module}.{name}": call for module in ("builtins", "__builtin__") for name, call in _BUILTINS.items()},
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": lambda factory=None, entries=(): _dict(entries),
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _object_of,
    "copy_reg._reconstructor": _object_of,
}
