"""Reads pickles without running anything that they name.

`pickletools.genops` splits a pickle into instructions, and this module's stack machine has neither
an import nor a call. A name stays a `Symbol`, whatever it names, and an object becomes a `Record`
of its state. Only the functions in `calls`, which build plain values, take arguments from a pickle.
Calls and instructions that weight files do not need raise a `UserError` that names them.

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

# Longest text, in characters or bytes. Longer ones, such as a corpus's tokens, become `Omitted`.
MAX_TEXT = 1 << 24
# Longest integer. Python can still print an integer of this length.
_MAX_INTEGER_BITS = 1 << 13
# Longest text as a key. Two equal texts are compared whole, which at this length takes a fraction
# of a microsecond.
MAX_KEY_TEXT = 1 << 13
# Longest tuple as a key. A tuple is hashed whole at each use. Files of weights have pairs at most.
_MAX_KEY_PARTS = 10
# Longest integer as a key. Such an integer is its own hash. Of a longer one the hash is the
# remainder modulo 2**61 - 1, which a file can choose.
_MAX_KEY_BITS = 60
# Longest integer in a tuple as a key. From longer ones a file could make tuples of equal hashes.
_MAX_KEY_PART_BITS = 32
# Longest name of a module, and of something in it, in characters. They are joined at each use.
_MAX_NAME = 500
# Characters of a dotted name in an error.
_MAX_SHOWN_NAME = 120
# Elements that the calls of a pickle may copy in total, per byte of the file, and in any case.
_COPIES_PER_BYTE = 4
_COPIES_ALWAYS = 1 << 20

# Encodings of the text as which protocols 0 to 2 write bytes.
_ENCODINGS_OF_BYTES = ("latin1", "latin-1", "utf-8", "ascii")
# Calls that occur in files of weights and vocabularies, with results that nobody needs.
_INERT_CALLS = frozenset(
    {
        "datetime.date",
        "datetime.datetime",
        "datetime.timedelta",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.core.numeric._frombuffer",
        "numpy.dtype",
        "numpy.ndarray",
        "pathlib.Path",
        "pathlib.PosixPath",
        "re._compile",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.storage._load_from_bytes",
    }
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
        state = self.state
        # Objects with slots have a pair as their state: their `__dict__`, and their slots.
        if isinstance(state, tuple) and state:
            state = state[0]
        # The file chooses the state, which may be anything.
        if not isinstance(state, dict):
            return {}
        return state


class Omitted(NamedTuple):
    """Text or bytes too long to keep, of this length."""

    size: int


class DamagedError(ValueError):
    """An instruction that cannot run, or a part of a file that `torch.save` does not write."""


Call = Callable[..., Any]
_PLAIN_KEYS = (str, bytes, int, type(None), Record)


def _key(key: Any) -> Any:
    """Returns a key of a dict or an element of a set, once it is known to be harmless.

    Raises:
      DamagedError: If the key could take long to hash or to compare, or the file could choose its
        hash.
    """
    if isinstance(key, tuple):
        parts = key
        max_bits = _MAX_KEY_PART_BITS
    else:
        parts = (key,)
        max_bits = _MAX_KEY_BITS

    # A tuple is hashed whole each time that the file uses it, for two bytes. Tuples in tuples could
    # nest so deep that hashing them ends Python, so that a part is never a tuple.
    is_short = len(parts) <= _MAX_KEY_PARTS
    if not (is_short and all(_is_plain(part, max_bits) for part in parts)):
        raise DamagedError(f"a {type(key).__name__} cannot be a key")
    return key


def _is_plain(part: Any, max_bits: int) -> bool:
    """Returns whether a key, or a part of one, is short and flat.

    Args:
      part: Any value.
      max_bits: Length of the longest integer that is allowed.
    """
    # Longer integers can all have one hash. Putting many such keys into a dict takes time with the
    # square of their number.
    if type(part) is int:
        return part.bit_length() <= max_bits
    # A file cannot choose a text's hash, which depends on a secret of the process. But it can use
    # equal long texts again and again, which are compared whole.
    if isinstance(part, str | bytes):
        return len(part) <= MAX_KEY_TEXT
    # A file chooses the hash of anything else, such as a float, but not of a record.
    return isinstance(part, _PLAIN_KEYS)


def _dict(entries: Any = ()) -> dict[Any, Any]:
    pairs: Iterable[Any] = entries
    if isinstance(entries, dict):
        pairs = entries.items()
    return {_key(key): value for key, value in pairs}


def _pairs(values: list[Any]) -> Iterable[tuple[Any, Any]]:
    """Returns pairs of keys and values, which take turns in a list."""
    return zip(values[::2], values[1::2], strict=True)


def _set(elements: Any = ()) -> set[Any]:
    return set(map(_key, elements))


def _bytes(text: Any = b"", encoding: Any = "utf-8") -> Any:
    """Returns bytes, which protocols 0 to 2 write as text."""
    if isinstance(text, (bytes, Omitted)):
        return text
    # For any other name Python imports a module, and some, such as idna, take quadratic time.
    if encoding not in _ENCODINGS_OF_BYTES:
        raise DamagedError("bytes have an unknown encoding")
    return text.encode(encoding)


def _default_dict(_factory: Any = None, entries: Any = ()) -> dict[Any, Any]:
    """Returns a defaultdict's entries. Its factory, which would be called, is dropped."""
    return _dict(entries)


# Calls that are carried out. Each builds a plain value, and checks its arguments.
_CALLS: Mapping[str, Call] = {
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    # The same, as Python 2 names them.
    "__builtin__.set": _set,
    "__builtin__.frozenset": _set,
    "__builtin__.bytes": _bytes,
    "__builtin__.bytearray": _bytes,
    "_codecs.encode": _bytes,
    "collections.Counter": _dict,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _default_dict,
}


def load(
    data: bytes | mmap.mmap,
    *,
    name: str,
    calls: Mapping[str, Call] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    start: int = 0,
) -> tuple[Any, int]:
    """Reads one pickle.

    Args:
      data: Content of the file, which may continue after the pickle.
      name: Name of the file in errors.
      calls: Functions by dotted name, which replace functions that the pickle calls, in addition to
        those that build containers. They must be harmless with any arguments.
      persistent: Maps a persistent id to its value. Without it, no id is allowed.
      start: Offset of the pickle's first byte.

    Returns:
      The value, and the offset after the pickle. The value consists of plain values and containers,
      `Symbol`, `Record`, `Omitted`, and the results of `persistent` and `calls`.

    Raises:
      UserError: If the pickle is corrupted, ends early, or calls anything else.
    """
    file: Any = data
    if isinstance(data, bytes):
        file = io.BytesIO(data)  # A map already reads like a file.
    machine = _Machine(
        name=name,
        calls={**_CALLS, **(calls or {})},
        persistent=persistent,
        budget=_COPIES_PER_BYTE * len(data) + _COPIES_ALWAYS,
    )
    try:
        file.seek(start)
        for instruction, argument, _ in pickletools.genops(file):
            if instruction.name == "STOP":
                return machine.pop(), file.tell()
            # Instructions without a method, such as EXT1 and INST, would name a class of the file's
            # choice, or are not in files of weights.
            if not hasattr(_Machine, instruction.name):
                raise machine.refusal(f"uses the instruction {instruction.name}")
            getattr(machine, instruction.name)(argument)
    except UserError:
        raise
    # An instruction that finds too few values, or values of other types, raises one of these, and
    # so does `genops` for bytes that are not an instruction or end too early.
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        # Python's own messages quote values from the file, which may be long.
        reason = type(error).__name__
        if isinstance(error, DamagedError):
            reason = str(error)
        raise UserError(
            f"{name}: the pickle at byte {start} is corrupted or ends early at "
            f"byte {file.tell()} ({reason}). Copy or download the file again."
        ) from error
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

    # The file's name in errors.
    name: str
    # Functions by dotted name that the pickle may call.
    calls: Mapping[str, Call]
    # Returns the value of a persistent id, or None if the pickle must not have any.
    persistent: Callable[[Any], Any] | None
    # Number of elements that calls may still copy.
    budget: int
    # Values above the latest mark.
    stack: list[Any] = dataclasses.field(default_factory=list)
    # The stacks below each mark, set aside until the values above it are taken.
    below_marks: list[list[Any]] = dataclasses.field(default_factory=list)
    # Values that later instructions use again, by number.
    memo: dict[int, Any] = dataclasses.field(default_factory=dict)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_tuple(self, length: int) -> tuple[Any, ...]:
        """Takes the top values, of which the last was pushed last."""
        top_first = [self.pop() for _ in range(length)]
        return tuple(reversed(top_first))

    def MARK(self, _: Any) -> None:
        self.below_marks.append(self.stack)
        self.stack = []

    def POP_MARK(self, _: Any = None) -> list[Any]:
        """Takes all values above the latest mark, and the mark."""
        values = self.stack
        self.stack = self.below_marks.pop()
        return values

    def POP(self, _: Any) -> None:
        """Drops the top value, or the mark if nothing is above it."""
        if self.stack:
            self.pop()
        else:
            self.POP_MARK()

    def PUT(self, number: int) -> None:
        # Protocol 0 has the number as text, so that the file could choose numbers of one hash.
        self.memo[_key(number)] = self.stack[-1]

    def MEMOIZE(self, _: Any) -> None:
        self.PUT(len(self.memo))

    def PROTO(self, _: Any) -> None:
        """Does nothing: instructions mean the same in all protocols."""

    FRAME = PROTO
    BINPUT = LONG_BINPUT = PUT
    GET = BINGET = LONG_BINGET = _pushes(lambda m, number: m.memo[number])

    def INT(self, value: int) -> None:
        # Printing an integer takes time with the square of its length, and Python refuses to print
        # a longer one, for instance in an error about a setting.
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise DamagedError("an integer is too long")
        self.push(value)

    def UNICODE(self, value: str | bytes) -> None:
        # A text longer than any name, such as a corpus's tokens as bytes, would only take memory.
        if len(value) > MAX_TEXT:
            self.push(Omitted(len(value)))
        else:
            self.push(value)

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
    TUPLE1 = _pushes(lambda m, _: m.pop_tuple(1))
    TUPLE2 = _pushes(lambda m, _: m.pop_tuple(2))
    TUPLE3 = _pushes(lambda m, _: m.pop_tuple(3))
    LIST = _pushes(lambda m, _: m.POP_MARK())
    FROZENSET = _pushes(lambda m, _: _set(m.POP_MARK()))
    DICT = _pushes(lambda m, _: _dict(_pairs(m.POP_MARK())))

    def APPEND(self, _: Any) -> None:
        self.add_elements([self.pop()])

    def APPENDS(self, _: Any) -> None:
        self.add_elements(self.POP_MARK())

    ADDITEMS = APPENDS

    def SETITEM(self, _: Any) -> None:
        value = self.pop()
        key = self.pop()
        self.set_entries([key, value])

    def SETITEMS(self, _: Any) -> None:
        self.set_entries(self.POP_MARK())

    def add_elements(self, values: list[Any]) -> None:
        """Adds values to the list or set on top of the stack. Those of a record are dropped."""
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(_set(values))
        elif isinstance(target, list):
            target.extend(values)
        # A real pickle calls `append` or `extend` of whatever is there, also of a function's or a
        # class's attribute. Here nothing but plain containers is changed.
        elif not isinstance(target, Record):
            raise DamagedError("an element has no list")

    def set_entries(self, values: list[Any]) -> None:
        """Puts keys and values, in turn, into the dict on top of the stack."""
        entries = _dict(_pairs(values))
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(entries)
        # A real pickle calls `__setitem__` of whatever is there, for instance of a module's names.
        elif not isinstance(target, Record):
            raise DamagedError("an entry has no dict")

    GLOBAL = _pushes(lambda m, names: m.symbol(*names.split(" ")))

    def STACK_GLOBAL(self, _: Any) -> None:
        name = self.pop()
        module = self.pop()
        self.push(self.symbol(module, name))

    def REDUCE(self, _: Any) -> None:
        args = self.pop()
        function = self.pop()
        self.push(self.call(function, args))

    def NEWOBJ(self, _: Any) -> None:
        args = self.pop()
        cls = self.pop()
        # The file chooses both. Only a name can be looked up, and only a tuple has arguments.
        if not (isinstance(cls, Symbol) and isinstance(args, tuple)):
            raise DamagedError("an object's class is not a name")
        if str(cls) in self.calls:
            self.push(self.call(cls, args))
        else:
            self.push(Record(cls))

    def NEWOBJ_EX(self, _: Any) -> None:
        self.pop()  # Keyword arguments, which nobody needs.
        self.NEWOBJ(None)

    def BUILD(self, _: Any) -> None:
        """Gives a record its state.

        Nothing else takes a state, neither functions nor plain containers: a file could otherwise
        change an allowed function, such as its default arguments.
        """
        state = self.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state

    def PERSID(self, value: Any) -> None:
        # A file that is not from torch.save cannot know what an id would stand for.
        if self.persistent is None:
            raise self.refusal("contains a persistent id")
        self.push(self.persistent(value))

    def BINPERSID(self, _: Any) -> None:
        self.PERSID(self.pop())

    def symbol(self, module: Any, name: Any) -> Symbol:
        # STACK_GLOBAL takes its names from the stack, where the file can put any value.
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedError("a name is not text")
        # The names are joined at each use, which costs the file two bytes.
        if max(len(module), len(name)) > _MAX_NAME:
            raise DamagedError(f"a name has more than {_MAX_NAME} characters")
        return Symbol(module, name)

    def call(self, function: Any, args: Any) -> Any:
        """Returns the result of one of `calls`, or a record of an inert call.

        The record stands for a call whose result nobody needs.
        """
        # Anything else, such as a long text, would become as many arguments as it has elements.
        if not isinstance(args, tuple):
            raise DamagedError("arguments are not a tuple")
        if isinstance(function, Symbol):
            dotted = str(function)
        else:
            dotted = f"a value of type {type(function).__name__}"

        if dotted in self.calls:
            # The arguments are paid for before they are looked at one by one: a pickle can pass one
            # long list to a million calls, for a few bytes each.
            self.spend(len(args))
            for arg in args:
                if hasattr(arg, "__len__"):
                    self.spend(len(arg))
            return self.calls[dotted](*args)
        if dotted in _INERT_CALLS:
            return Record(function)
        # Any other call, such as `os.system`, is what a pickle attacks with. It is not run.
        raise self.refusal(f"calls {dotted[:_MAX_SHOWN_NAME]}")

    def spend(self, elements: int) -> None:
        """Charges the budget for the elements that an instruction copies.

        Raises:
          DamagedError: If the budget is exceeded.
        """
        self.budget -= elements
        if self.budget < 0:
            raise DamagedError("its values are larger than the file")

    def refusal(self, action: str) -> UserError:
        """Returns the error for a pickle with actions that weight files never contain."""
        return UserError(
            f"{self.name}: its pickle {action}, which weights and vocabularies do not need. "
            "None of it was run. Get the file from a source that you trust."
        )
