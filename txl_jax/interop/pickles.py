"""Reads pickles without running anything that they name.

`pickletools.genops` splits a pickle into instructions, and the stack machine here has neither an
import nor a call. A name stays a `Symbol`, whatever it names, and an object becomes a `Record` of
its state. Only the functions in `calls`, which build plain values, take arguments from a pickle.
Calls and instructions that files of weights do not need are a `UserError` that names them.

The file's size bounds time and memory. A pickle can use a value again for two bytes (its memo), so
whatever an instruction copies, hashes or compares is short, or counts against a budget: calls may
copy a few times the file's size in total, and keys and names are short and flat. Before Python
3.12.8, `genops` rejects a `str` of Python 2 in protocol 0 that is not ASCII.
"""

# ruff: noqa: N802  # The machine's methods have the names that pickletools gives to instructions.

import contextlib
import dataclasses
import io
import mmap
import pickletools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from txl_jax.errors import UserError

MAX_TEXT = 1 << 24  # Longer text and bytes, such as a corpus's tokens, become `Omitted`.
_MAX_INTEGER_BITS = 1 << 13  # Python can still print them.
# Longest text as a key. Two equal ones are compared whole, which at this length takes a fraction of
# a microsecond.
MAX_KEY_TEXT = 1 << 13
# Of a tuple as a key, which is hashed whole at each use. Files of weights have two at most.
_MAX_KEY_PARTS = 10
# Characters of a module's name, and of a name in it. They are joined at each use.
_MAX_NAME = 500

_BUILTINS = ("builtins", "__builtin__")
# Calls that occur in files of weights and vocabularies, with results that nobody needs.
_INERT_CALLS = frozenset(
    """datetime.date datetime.datetime datetime.timedelta numpy._core.multiarray._reconstruct
    numpy._core.multiarray.scalar numpy._core.numeric._frombuffer numpy.core.multiarray._reconstruct
    numpy.core.multiarray.scalar numpy.core.numeric._frombuffer numpy.dtype numpy.ndarray
    pathlib.Path pathlib.PosixPath re._compile torch.device torch.serialization._get_layout
    torch.storage._load_from_bytes""".split()  # noqa: SIM905
)


class Symbol(NamedTuple):
    """A name in a module, which is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(eq=False, repr=False)
class Record:
    """An object whose class is not imported.

    Arguments, and what a subclass of list or dict contains, are omitted.
    """

    symbol: Symbol
    state: Any = None

    def __repr__(self) -> str:
        return f"<{self.symbol}>"

    def attributes(self) -> dict[Any, Any]:
        """Returns the object's `__dict__`, or an empty dict."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state if isinstance(state, dict) else {}


class Omitted(NamedTuple):
    """Text or bytes too long to keep, of this length."""

    size: int


class DamagedError(ValueError):
    """An instruction that cannot run, or a part of a file that `torch.save` does not write."""


Call = Callable[..., Any]
_PLAIN_KEYS = (str, bytes, int, type(None), Record)


def _key(key: Any) -> Any:
    """Returns a key if hashing it takes no deep recursion and the file cannot choose its hash.

    Keys with equal hashes take much time.
    """
    parts, bits = (key, 32) if isinstance(key, tuple) else ((key,), 60)
    if len(parts) <= _MAX_KEY_PARTS and all(_is_plain(part, bits) for part in parts):
        return key
    raise DamagedError(f"a {type(key).__name__} cannot be a key")


def _is_plain(part: Any, bits: int) -> bool:
    """Returns whether a key, or a part of one, is short.

    `bits` is the greatest length of an integer.
    """
    if type(part) is int:
        return part.bit_length() <= bits
    if isinstance(part, str | bytes):
        return len(part) <= MAX_KEY_TEXT
    return isinstance(part, _PLAIN_KEYS)


def _dict(entries: Any = ()) -> dict[Any, Any]:
    pairs: Iterable[Any] = entries.items() if isinstance(entries, dict) else entries
    return {_key(key): value for key, value in pairs}


def _pairs(values: list[Any]) -> Iterable[tuple[Any, Any]]:
    """Pairs keys and values, which take turns."""
    return zip(values[::2], values[1::2], strict=True)


def _set(elements: Any = ()) -> set[Any]:
    return set(map(_key, elements))


def _bytes(text: Any = b"", encoding: Any = "utf-8") -> Any:
    """Returns bytes, which protocols 0 to 2 write as text."""
    if isinstance(text, (bytes, Omitted)):
        return text
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise DamagedError("bytes have an unknown encoding")
    return text.encode(encoding)


_CALLS: Mapping[str, Call] = {
    **{f"{module}.{name}": _set for module in _BUILTINS for name in ("set", "frozenset")},
    **{f"{module}.{name}": _bytes for module in _BUILTINS for name in ("bytes", "bytearray")},
    "_codecs.encode": _bytes,
    "collections.Counter": _dict,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda factory=None, entries=(): _dict(entries),
}


def load(
    data: bytes | mmap.mmap,
    *,
    name: str,
    calls: Mapping[str, Call] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    start: int = 0,
) -> tuple[Any, int]:
    """Reads one pickle, which begins at the byte `start`.

    Returns its value, and the offset after it.

    A value consists of plain values and containers, `Symbol`, `Record`, `Omitted`, and the results
    of `persistent`, which takes persistent ids, and of `calls`: functions by dotted name, which
    replace what the pickle calls. They must be harmless with any arguments. Raises `UserError` if
    the pickle is corrupted, ends early, or calls anything else.
    """
    file: Any = io.BytesIO(data) if isinstance(data, bytes) else data  # A map reads like a file.
    machine = _Machine(
        name, {**_CALLS, **(calls or {})}, persistent, budget=4 * len(data) + (1 << 20)
    )
    try:
        file.seek(start)
        for instruction, argument, _ in pickletools.genops(file):
            if instruction.name == "STOP":
                return machine.pop(), file.tell()
            if not hasattr(_Machine, instruction.name):
                raise machine.refused("uses", f"the instruction {instruction.name}")
            getattr(machine, instruction.name)(argument)
    except UserError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        reason = str(error) if isinstance(error, DamagedError) else type(error).__name__
        wrong = (
            f"the pickle at byte {start} is corrupted or ends early at "
            f"byte {file.tell()} ({reason})"
        )
        raise UserError(f"{name}: {wrong}. Copy or download the file again.") from error
    raise AssertionError("genops ends with STOP or an error")


def _pushes(value: Callable[["_Machine", Any], Any]) -> Callable[["_Machine", Any], None]:
    """Returns an instruction that pushes a value.

    The value is made from the machine and the instruction's argument.
    """
    return lambda machine, argument: machine.push(value(machine, argument))


@dataclasses.dataclass(eq=False)
class _Machine:
    """The stack machine, with a method per instruction.

    It supports plain values of protocols 0 to 5, and objects from protocol 2 on.
    """

    name: str
    calls: Mapping[str, Call]
    persistent: Callable[[Any], Any] | None
    # Elements that calls may still copy.
    budget: int
    stack: list[Any] = dataclasses.field(default_factory=list)
    # Put aside until values above are taken.
    below_marks: list[list[Any]] = dataclasses.field(default_factory=list)
    memo: dict[int, Any] = dataclasses.field(default_factory=dict)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def MARK(self, _: Any) -> None:
        self.below_marks.append(self.stack)
        self.stack = []

    def POP_MARK(self, _: Any = None) -> list[Any]:
        values, self.stack = self.stack, self.below_marks.pop()
        return values

    def POP(self, _: Any) -> None:
        self.pop() if self.stack else self.POP_MARK()

    def PUT(self, number: int) -> None:
        self.memo[_key(number)] = self.stack[-1]

    def MEMOIZE(self, _: Any) -> None:
        self.PUT(len(self.memo))

    def PROTO(self, _: Any) -> None:
        """Does nothing: instructions mean the same in all protocols."""

    FRAME = PROTO
    BINPUT = LONG_BINPUT = PUT
    GET = BINGET = LONG_BINGET = _pushes(lambda m, number: m.memo[number])

    def INT(self, value: int) -> None:
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise DamagedError("an integer is too long")
        self.push(value)

    def UNICODE(self, value: str | bytes) -> None:
        self.push(value if len(value) <= MAX_TEXT else Omitted(len(value)))

    def STRING(self, value: str) -> None:
        """Pushes a `str` of Python 2, whose encoding pickles do not record.

        It is decoded as UTF-8 if that is valid, and as Latin-1 otherwise.
        """
        with contextlib.suppress(UnicodeDecodeError):
            value = value.encode("latin-1").decode()
        self.UNICODE(value)

    def BYTEARRAY8(self, value: bytearray) -> None:
        self.UNICODE(bytes(value))

    NONE = _pushes(lambda m, _: None)
    NEWTRUE = _pushes(lambda m, _: True)
    NEWFALSE = _pushes(lambda m, _: False)
    BININT = BININT1 = BININT2 = LONG = LONG1 = LONG4 = INT
    FLOAT = BINFLOAT = _pushes(lambda m, number: number)
    BINUNICODE = SHORT_BINUNICODE = BINUNICODE8 = BINBYTES = SHORT_BINBYTES = BINBYTES8 = UNICODE
    BINSTRING = SHORT_BINSTRING = STRING

    EMPTY_TUPLE = _pushes(lambda m, _: ())
    EMPTY_LIST = _pushes(lambda m, _: [])
    EMPTY_DICT = _pushes(lambda m, _: {})
    EMPTY_SET = _pushes(lambda m, _: set())
    TUPLE = _pushes(lambda m, _: tuple(m.POP_MARK()))
    TUPLE1 = _pushes(lambda m, _: (m.pop(),))
    TUPLE2 = _pushes(lambda m, _: (m.pop(), m.pop())[::-1])
    TUPLE3 = _pushes(lambda m, _: (m.pop(), m.pop(), m.pop())[::-1])
    LIST = _pushes(lambda m, _: m.POP_MARK())
    FROZENSET = _pushes(lambda m, _: _set(m.POP_MARK()))
    DICT = _pushes(lambda m, _: _dict(_pairs(m.POP_MARK())))

    def APPEND(self, _: Any) -> None:
        self.add_elements([self.pop()])

    def APPENDS(self, _: Any) -> None:
        self.add_elements(self.POP_MARK())

    ADDITEMS = APPENDS

    def SETITEM(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self.set_entries([key, value])

    def SETITEMS(self, _: Any) -> None:
        self.set_entries(self.POP_MARK())

    def add_elements(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(_set(values))
        elif isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Record):
            raise DamagedError("an element has no list")

    def set_entries(self, values: list[Any]) -> None:
        """Puts keys and values, in turn, into the dict on top of the stack."""
        entries, target = _dict(_pairs(values)), self.stack[-1]
        if isinstance(target, dict):
            target.update(entries)
        elif not isinstance(target, Record):
            raise DamagedError("an entry has no dict")

    GLOBAL = _pushes(lambda m, names: m.symbol(*names.split(" ")))
    STACK_GLOBAL = _pushes(lambda m, _: m.symbol(name=m.pop(), module=m.pop()))
    REDUCE = _pushes(lambda m, _: m.call(args=m.pop(), function=m.pop()))

    def NEWOBJ(self, _: Any) -> None:
        args, cls = self.pop(), self.pop()
        if not (isinstance(cls, Symbol) and isinstance(args, tuple)):
            raise DamagedError("an object's class is not a name")
        self.push(self.call(cls, args) if str(cls) in self.calls else Record(cls))

    def NEWOBJ_EX(self, _: Any) -> None:
        self.pop()  # Keyword arguments, which nobody needs.
        self.NEWOBJ(None)

    def BUILD(self, _: Any) -> None:
        """Gives a record its state.

        Nothing else takes one: neither functions nor plain containers.
        """
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, Record):
            target.state = state

    def PERSID(self, value: Any) -> None:
        if self.persistent is None:
            raise self.refused("contains", "a persistent id")
        self.push(self.persistent(value))

    def BINPERSID(self, _: Any) -> None:
        self.PERSID(self.pop())

    def symbol(self, module: Any, name: Any) -> Symbol:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedError("a name is not text")
        if max(len(module), len(name)) > _MAX_NAME:
            raise DamagedError(f"a name has more than {_MAX_NAME} characters")
        return Symbol(module, name)

    def call(self, function: Any, args: Any) -> Any:
        """Returns the result of one of `calls`, or a record of a known call.

        The record stands for a call whose result nobody needs.
        """
        if not isinstance(args, tuple):
            raise DamagedError("arguments are not a tuple")
        dotted = (
            str(function)
            if isinstance(function, Symbol)
            else f"a value of type {type(function).__name__}"
        )
        if dotted in self.calls:
            self.spend(len(args))  # Before they are looked at one by one.
            self.spend(sum(len(arg) for arg in args if hasattr(arg, "__len__")))
            return self.calls[dotted](*args)
        if dotted in _INERT_CALLS:
            return Record(function)
        raise self.refused("calls", dotted)

    def spend(self, elements: int) -> None:
        """Charges the budget for the elements that an instruction copies.

        Raises `DamagedError` if the budget is exceeded.
        """
        self.budget -= elements
        if self.budget < 0:
            raise DamagedError("its values are larger than the file")

    def refused(self, verb: str, what: str) -> UserError:
        wrong = (
            f"{self.name}: its pickle {verb} {what[:120]}, which weights and vocabularies "
            "do not need"
        )
        return UserError(f"{wrong}. None of it was run. Get the file from a source that you trust.")
