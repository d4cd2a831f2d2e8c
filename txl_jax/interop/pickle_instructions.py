"""The instructions of the pickle module's protocols 0 to 5, over the stack machine of `safe_pickle`."""

import codecs
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

_MAX_INTEGER_BYTES = 1 << 10
_TRUTH = {b"00": False, b"01": True}  # Of protocols 0 and 1.
STOP = pickle.STOP[0]


class DamagedError(Exception):
    """An instruction that cannot be carried out."""


class Machine(Protocol):
    """The state of the machine, and the parts of its instructions that need care."""

    at: int
    stack: list[Any]
    memo: dict[int, Any]

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes."""

    def number(self, form: str) -> Any:
        """Returns the next number of a struct's format."""

    def line(self) -> bytes:
        """Returns the bytes up to a newline."""

    def long_text(self, form: str, decode: Callable[[bytes], Any]) -> None:
        """Pushes a text or bytes with its length before it."""

    def push(self, value: Any) -> None:
        """Puts a value on the stack."""

    def mark(self) -> None:
        """Pushes a mark."""

    def pop(self) -> Any:
        """Takes a value off the stack."""

    def top(self) -> Any:
        """Returns the value on top of the stack."""

    def pop_to_mark(self) -> list[Any]:
        """Takes the values above the last mark, and the mark, off the stack."""

    def symbol(self, module: Any, name: Any) -> Any:
        """Returns a name."""

    def refused(self, verb: str, what: str) -> Exception:
        """Returns the error of a pickle that would run code."""

    def call(self, function: Any, args: Any) -> Any:
        """Returns what a known call makes of the arguments."""

    def new(self, cls: Any, args: Any) -> Any:
        """Returns an object of a class."""

    def build(self) -> None:
        """Gives an object its state."""

    def set_entries(self, values: list[Any]) -> None:
        """Puts keys and values, in turn, into the dict on top of the stack."""

    def add_elements(self, values: list[Any]) -> None:
        """Puts values into the list on top of the stack."""

    def persist(self, value: Any) -> None:
        """Pushes the value of a persistent id."""


def _utf8(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


def _text_of_python_2(text: bytes) -> str:
    """Returns a `str` of Python 2, whose encoding no pickle records."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text.decode("latin-1")


def _integer(text: bytes) -> int:
    if len(text) > _MAX_INTEGER_BYTES:
        raise DamagedError("an integer is too long")
    return int.from_bytes(text, "little", signed=True)


def _integer_of_line(m: Machine) -> None:
    line = m.line()
    m.push(_TRUTH[line] if line in _TRUTH else int(line.rstrip(b"L")))


def _quoted(m: Machine) -> None:
    line = m.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise DamagedError("a text has no quotes")
    m.push(_text_of_python_2(codecs.escape_decode(line[1:-1])[0]))


def _symbol_of_lines(m: Machine) -> Any:
    module, name = m.line(), m.line()
    return m.symbol(_utf8(module), _utf8(name))


def _symbol_of_stack(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    m.push(m.symbol(module, name))


def _extension(m: Machine) -> None:
    raise m.refused("uses", "a code of the extension registry")


def _reduce(m: Machine) -> None:
    args, function = m.pop(), m.pop()
    m.push(m.call(function, args))


def _new(m: Machine) -> None:
    args, cls = m.pop(), m.pop()
    m.push(m.new(cls, args))


def _new_with_keywords(m: Machine) -> None:
    keywords, args, cls = m.pop(), m.pop(), m.pop()
    if not isinstance(keywords, dict):
        raise DamagedError("keywords are no dict")
    m.push(m.new(cls, args))


def _instance_of_lines(m: Machine) -> None:
    cls = _symbol_of_lines(m)
    m.push(m.call(cls, tuple(m.pop_to_mark())))


def _instance_of_stack(m: Machine) -> None:
    cls, *args = m.pop_to_mark()
    m.push(m.call(cls, tuple(args)))


def _pop(m: Machine) -> None:
    if not m.stack:
        raise DamagedError("its stack is empty")
    m.stack.pop()


def _tuple(count: int) -> Callable[[Machine], None]:
    def run(m: Machine) -> None:
        m.push(tuple([m.pop() for _ in range(count)][::-1]))

    return run


def _entry(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_entries([key, value])


def _dict_of_mark(m: Machine) -> None:
    values = m.pop_to_mark()
    m.push({})
    m.set_entries(values)


def _set_of_mark(m: Machine) -> None:
    values = m.pop_to_mark()
    m.push(set())
    m.add_elements(values)


def _put(read: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def run(m: Machine) -> None:
        m.memo[read(m)] = m.top()

    return run


def _get(read: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def run(m: Machine) -> None:
        m.push(m.memo[read(m)])

    return run


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.top()


def _number(form: str) -> Callable[[Machine], int]:
    return lambda m: m.number(form)


def _line_number(m: Machine) -> int:
    return int(m.line())


def _text(form: str, decode: Callable[[bytes], Any]) -> Callable[[Machine], None]:
    return lambda m: m.long_text(form, decode)


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.push(value)


_BY_NAME: Mapping[bytes, Callable[[Machine], None]] = {
    pickle.PROTO: lambda m: m.number("<B"),
    pickle.FRAME: lambda m: m.number("<Q"),
    pickle.NONE: _constant(None),
    pickle.NEWTRUE: _constant(True),
    pickle.NEWFALSE: _constant(False),
    pickle.INT: _integer_of_line,
    pickle.LONG: _integer_of_line,
    pickle.BININT: lambda m: m.push(m.number("<i")),
    pickle.BININT1: lambda m: m.push(m.number("<B")),
    pickle.BININT2: lambda m: m.push(m.number("<H")),
    pickle.LONG1: lambda m: m.push(_integer(m.take(m.number("<B")))),
    pickle.LONG4: lambda m: m.push(_integer(m.take(m.number("<i")))),
    pickle.FLOAT: lambda m: m.push(float(m.line())),
    pickle.BINFLOAT: lambda m: m.push(m.number(">d")),
    pickle.STRING: _quoted,
    pickle.BINSTRING: _text("<I", _text_of_python_2),
    pickle.SHORT_BINSTRING: _text("<B", _text_of_python_2),
    pickle.UNICODE: lambda m: m.push(m.line().decode("raw-unicode-escape")),
    pickle.BINUNICODE: _text("<I", _utf8),
    pickle.SHORT_BINUNICODE: _text("<B", _utf8),
    pickle.BINUNICODE8: _text("<Q", _utf8),
    pickle.BINBYTES: _text("<I", bytes),
    pickle.SHORT_BINBYTES: _text("<B", bytes),
    pickle.BINBYTES8: _text("<Q", bytes),
    pickle.BYTEARRAY8: _text("<Q", bytes),
    pickle.MARK: lambda m: m.mark(),
    pickle.POP: _pop,
    pickle.POP_MARK: lambda m: (m.pop_to_mark(), None)[1],
    pickle.DUP: lambda m: m.push(m.top()),
    pickle.EMPTY_TUPLE: _constant(()),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_to_mark())),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.LIST: lambda m: m.push(m.pop_to_mark()),
    pickle.APPEND: lambda m: m.add_elements([m.pop()]),
    pickle.APPENDS: lambda m: m.add_elements(m.pop_to_mark()),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.DICT: _dict_of_mark,
    pickle.SETITEM: _entry,
    pickle.SETITEMS: lambda m: m.set_entries(m.pop_to_mark()),
    pickle.EMPTY_SET: lambda m: m.push(set()),
    pickle.ADDITEMS: lambda m: m.add_elements(m.pop_to_mark()),
    pickle.FROZENSET: _set_of_mark,
    pickle.PUT: _put(_line_number),
    pickle.BINPUT: _put(_number("<B")),
    pickle.LONG_BINPUT: _put(_number("<I")),
    pickle.MEMOIZE: _memoize,
    pickle.GET: _get(_line_number),
    pickle.BINGET: _get(_number("<B")),
    pickle.LONG_BINGET: _get(_number("<I")),
    pickle.GLOBAL: lambda m: m.push(_symbol_of_lines(m)),
    pickle.STACK_GLOBAL: _symbol_of_stack,
    pickle.EXT1: _extension,
    pickle.EXT2: _extension,
    pickle.EXT4: _extension,
    pickle.REDUCE: _reduce,
    pickle.NEWOBJ: _new,
    pickle.NEWOBJ_EX: _new_with_keywords,
    pickle.INST: _instance_of_lines,
    pickle.OBJ: _instance_of_stack,
    pickle.BUILD: lambda m: m.build(),
    pickle.PERSID: lambda m: m.persist(_utf8(m.line())),
    pickle.BINPERSID: lambda m: m.persist(m.pop()),
}
# A buffer outside of the pickle, of protocol 5, is in no file.
TABLE: Mapping[int, Callable[[Machine], None]] = {code[0]: run for code, run in _BY_NAME.items()}
