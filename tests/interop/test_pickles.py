"""Tests of reading pickles without running them: the pickle module as oracle, and harmful files."""

import collections
import contextlib
import copyreg
import os
import pickle
import subprocess

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from txl_jax.errors import UserError
from txl_jax.interop import pickles
from txl_jax.interop.pickles import Omitted, Record, Symbol

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
# The characters that Hypothesis takes by default. Named here, they need no table, which it computes
# for a second otherwise.
CHARACTERS = strategies.characters(exclude_categories=["Cs"])
LEAVES = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(1 << 80), 1 << 80)
    | strategies.floats(allow_nan=False)
    | strategies.text(CHARACTERS, max_size=300)
    | strategies.binary(max_size=300)
)


def integers_of(n_bits):
    """Integers of up to `n_bits` bits, and a sign."""
    return strategies.integers(1 - (1 << n_bits), (1 << n_bits) - 1)


# The largest integers that the reader takes as keys, and as parts of tuples that are keys. A file
# can choose the hashes of larger ones, and equal hashes make a dict slow.
PART_INTEGERS = integers_of(32)
KEY_INTEGERS = integers_of(60)
KEYS = (
    strategies.text(CHARACTERS, max_size=5)
    | KEY_INTEGERS
    | strategies.tuples(PART_INTEGERS, strategies.text(CHARACTERS))
)
VALUES = strategies.recursive(
    LEAVES | strategies.sets(KEYS) | strategies.frozensets(KEY_INTEGERS),
    lambda inner: (
        strategies.lists(inner)
        | strategies.lists(inner, max_size=4).map(tuple)
        | strategies.dictionaries(KEYS, inner)
        | strategies.dictionaries(KEYS, inner).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


def load(data: bytes):
    """The value of a pickle, which ends inside the file."""
    value, end = pickles.load(data, name="file.pt")
    assert end <= len(data)
    return value


@hypothesis.settings(max_examples=60)
@hypothesis.given(VALUES, strategies.sampled_from(PROTOCOLS))
def test_plain_values_are_those_of_the_pickle_module(value, protocol):
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_values_stay_shared(protocol):
    shared = ["a"]
    first, second = load(pickle.dumps([shared, shared], protocol))
    assert first is second


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("values", [[], [1, 2, 3]], ids=["no values", "three values"])
def test_circles_stay_circles(values, protocol):
    """A pickle of a tuple that holds itself takes values, or values and a mark, off the stack
    again.
    """
    inner = list(values)
    outer = (inner, *range(len(values)))
    inner.append(outer)
    loaded = load(pickle.dumps(outer, protocol))
    assert loaded[0][-1] is loaded
    assert loaded[1:] == outer[1:]


class Vocab:
    """A class that a reader of the file does not import."""

    def __init__(self):
        self.words = ["a", "b"]


class Words(list):
    """A list's subclass."""


# In protocols 0 and 1 an object is a call of `copyreg._reconstructor`, which is not known.
@pytest.mark.parametrize("protocol", PROTOCOLS[2:])
def test_objects_are_records(protocol, monkeypatch):
    """Their classes are not imported and do not run."""
    value = {"vocab": Vocab(), "words": Words(["x"]), "counts": collections.Counter("aab")}
    data = pickle.dumps(value, protocol)

    def run(self, state):
        pytest.fail("it ran")

    monkeypatch.setattr(Vocab, "__setstate__", run, raising=False)

    loaded = load(data)
    assert isinstance(loaded["vocab"], Record)
    assert loaded["vocab"].symbol.name == "Vocab"
    assert loaded["vocab"].attributes() == {"words": ["a", "b"]}
    assert isinstance(loaded["words"], Record)
    assert loaded["counts"] == {"a": 2, "b": 1}
    # Nor does the function of numpy that would make an array.
    assert isinstance(load(pickle.dumps(np.arange(3), protocol)), Record)


def test_texts_of_python_2_are_utf_8_or_latin_1():
    assert load(b"\x80\x02U\x03\xc3\xbcxq\x00.") == "üx"
    assert load(b"S'a\\nb'\np0\n.") == "a\nb"
    assert load(b"\x80\x02U\x02\xff\xfe.") == "ÿþ"


def test_long_texts_are_omitted():
    data = pickle.dumps(["a", "b" * (pickles.MAX_TEXT + 1), b"c" * (pickles.MAX_TEXT + 2)])
    assert load(data) == ["a", Omitted(pickles.MAX_TEXT + 1), Omitted(pickles.MAX_TEXT + 2)]


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.function = function
        self.args = args

    def __reduce__(self):
        return self.function, self.args


def harmful_calls(marker) -> dict[str, Call]:
    """Calls that would write the file `marker`, or run something else."""
    command = f"touch {marker}"
    options = (-1, None, None, None, None, None, True, True)  # The last one is `shell`.
    return {
        "os.system": Call(os.system, command),
        "builtins.exec": Call(exec, f"open({str(marker)!r}, 'w').close()"),
        "builtins.getattr": Call(getattr, "a text", "upper"),
        "subprocess.Popen": Call(subprocess.Popen, command, *options),
        "a function of tests": Call(write_marker, str(marker)),
    }


def harmful_instructions(marker) -> dict[str, bytes]:
    """Pickles that would run something by each other instruction that can."""
    command = f"S'touch {marker}'\n".encode()
    return {
        "INST": b"(" + command + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + command + b"o.",
        "a buffer outside of the pickle": b"\x80\x05\x97.",
        "EXT1": b"\x80\x02\x82\xf0.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": b"\x80\x02S'os'\nQ.",
        "a call of what a call made": b"cbuiltins\nset\n((ltR)R.",
        "a call of a text": b"S'os'\n)R.",
        "BUILD of an unknown object's call": b"ctests.x\nEvil\n)R}b.",
    }


def harmful(marker) -> dict[str, bytes]:
    """Pickles that would write the file `marker`, or run something else, in each possible way."""
    pickled = harmful_instructions(marker)
    for name, call in harmful_calls(marker).items():
        # As text, in binary, and with frames.
        for protocol in (0, 2, 4):
            pickled[f"{name}, protocol {protocol}"] = pickle.dumps(call, protocol)
    return pickled


def write_marker(path):
    open(path, "w").close()


@pytest.mark.parametrize("name", sorted(harmful("x")))
def test_what_would_run_is_an_error(name, tmp_path):
    marker = tmp_path / "marker"
    copyreg.add_extension(__name__, "write_marker", 0xF0)  # What EXT1 calls by its number.
    try:
        with pytest.raises(UserError, match=r"^file\.pt: its pickle (calls|uses|contains) "):
            load(harmful(marker)[name])
    finally:
        copyreg.remove_extension(__name__, "write_marker", 0xF0)
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x02csubprocess\nPopen\nS'ls'\n\x85\x81.", id="NEWOBJ"),
        pytest.param(b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93)}\x92.", id="NEWOBJ_EX"),
    ],
)
def test_an_object_is_never_made(data):
    loaded = load(data)
    assert type(loaded) is Record
    assert loaded.symbol == Symbol("subprocess", "Popen")


def callable_of_a_reader(shape=(), *, is_kept=True):
    """What a caller of `load` allows a pickle to call."""
    return shape, is_kept


READER = {"of.reader": callable_of_a_reader}
# All functions and classes that a pickle can name.
OURS = {**pickles._CALLS, **READER, "txl_jax.interop.pickles.Record": Record}


def attributes_of_ours():
    """Defaults and attributes of each function and class, by its dotted name."""
    attributes = {}
    for dotted, value in OURS.items():
        defaults = getattr(value, "__defaults__", None)
        keyword_defaults = getattr(value, "__kwdefaults__", None)
        attributes[dotted] = (defaults, keyword_defaults, dict(vars(value)))
    return attributes


def instructions(value) -> bytes:
    """The instructions that push a value: a pickle without its begin and end."""
    return pickle.dumps(value, 2)[2:-1]


def test_a_state_changes_no_function_and_no_class_of_ours():
    """The pickle module would set the defaults of a function by BUILD with the state (None, {name:
    value}).
    """
    change = {
        "__defaults__": ("of the file",),
        "__kwdefaults__": {"is_kept": "of the file"},
        "attribute": 1,
    }
    before = attributes_of_ours()
    for dotted in OURS:
        module, _, name = dotted.rpartition(".")
        push = f"\x80\x02c{module}\n{name}\n".encode("latin1")
        for state in (change, (None, change), (change, change)):
            with contextlib.suppress(UserError):
                pickles.load(push + instructions(state) + b"b.", name="file.pt", calls=READER)
            assert attributes_of_ours() == before, dotted


def test_a_state_does_not_change_a_record():
    state = (None, {"symbol": 1, "__class__": 1})
    record = load(b"\x80\x02cevil\nEvil\n)\x81" + instructions(state) + b"b.")
    assert type(record) is Record
    assert record.symbol == Symbol("evil", "Evil")
    assert record.state[1]["symbol"] == 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"a.", id="a text of 2^60 bytes"
        ),
        pytest.param(b"\x80\x02\x8b\xff\xff\xff\x7fa.", id="an integer of 2^31 bytes"),
    ],
)
def test_sizes_beyond_the_file_are_an_error(data):
    with pytest.raises(UserError, match=r"corrupted|early"):
        load(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            b"\x80\x02\x8b\x00\x08\x00\x00" + b"\x01" * 2048 + b".",
            id="an integer that Python cannot print",
        ),
        pytest.param(b"L" + b"9" * (1 << 17) + b"L\n.", id="many digits"),
        pytest.param(
            b"\x80\x02}(" + b")" + b"\x85" * 100_000 + b"K\x01u.", id="a key that nests deep"
        ),
    ],
)
def test_what_python_cannot_print_convert_or_hash_is_an_error(data):
    """Python has limits for digits of integers, and hashes nested tuples by recursion."""
    with pytest.raises(UserError, match=r"corrupted|early"):
        load(data)


def test_calls_may_not_copy_without_end():
    """A list of 5,000 numbers from which 5,000 sets are made: 25 million elements from 125 kB,
    which is more than are allowed for any file.
    """
    numbers = b"(l" + b"(" + b"K\x01" * 5_000 + b"e" + b"p0\n"
    data = b"\x80\x02" + numbers + b"0]" + b"c__builtin__\nset\ng0\n\x85Ra" * 5_000 + b"."
    with pytest.raises(UserError, match="larger than the file"):
        load(data)


def test_a_memo_of_any_number_costs_nothing():
    """A value is stored as number 2^32 - 1, and taken from there. A list would be as long."""
    assert load(b"\x80\x02K\x01r\xff\xff\xff\xff0j\xff\xff\xff\xff.") == 1


def text_op(text: str) -> bytes:
    """The instruction that pushes a text."""
    return b"X" + len(text.encode()).to_bytes(4, "little") + text.encode()


LONG_KEY = text_op("k" * (pickles.MAX_KEY_TEXT + 1))
LONG_NAME = text_op("n" * 501)


# A pickle could use such values again and again for two bytes each.
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(b"}(" + b"N" * 11 + b"tNs.", id="a long tuple as a key"),
        pytest.param(b"}" + LONG_KEY + b"Ns.", id="a long text as a key"),
        pytest.param(b"(" + LONG_KEY + b"\x91.", id="a long text in a set"),
        pytest.param(LONG_NAME + text_op("C") + b"\x93.", id="a module with a long name"),
        pytest.param(text_op("m") + LONG_NAME + b"\x93.", id="a class with a long name"),
        pytest.param(b"cm\n" + b"C" * 501 + b"\n.", id="a name of protocol 0"),
    ],
)
def test_what_is_hashed_or_copied_at_each_use_is_short(code):
    with pytest.raises(UserError, match=r"cannot be a key|more than 500"):
        load(b"\x80\x04" + code)


def test_keys_and_names_of_usual_lengths():
    key = "k" * pickles.MAX_KEY_TEXT
    name = "n" * 500
    assert load(b"\x80\x04}(" + b"N" * 10 + b"tK\x01s.") == {(None,) * 10: 1}
    assert load(b"\x80\x04}" + text_op(key) + b"K\x01s.") == {key: 1}
    assert load(b"\x80\x04" + text_op(name) + text_op(name) + b"\x93.") == Symbol(name, name)


def test_arguments_are_counted_at_each_call():
    """A tuple of 100,000 values that is passed to 50,000 calls: 5e9 values from 400 kB.

    To look at all of them would take minutes.
    """
    function = b"ctorch\nparameter\nq\x010"
    arguments = b"(" + b"N" * 100_000 + b"tq\x020"
    calls = b"h\x01h\x02R0" * 50_000
    with pytest.raises(UserError, match="larger than the file"):
        pickles.load(
            b"\x80\x02]" + function + arguments + calls + b".",
            name="file.pt",
            calls={"torch.parameter": lambda *args: None},
        )
