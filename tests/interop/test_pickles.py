"""Tests of reading pickles without running them: the pickle module as oracle, and files that mean
harm.
"""

import collections
import contextlib
import copyreg
import itertools
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
LEAVES = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(1 << 80), 1 << 80)
    | strategies.floats(allow_nan=False)
    | strategies.text(max_size=300)
    | strategies.binary(max_size=300)
)
SMALL, LARGE = (strategies.integers(1 - (1 << bits), (1 << bits) - 1) for bits in (32, 60))
KEYS = strategies.text(max_size=5) | LARGE | strategies.tuples(SMALL, strategies.text())
VALUES = strategies.recursive(
    LEAVES | strategies.sets(KEYS) | strategies.frozensets(LARGE),
    lambda inner: (
        strategies.lists(inner)
        | strategies.lists(inner, max_size=4).map(tuple)
        | strategies.dictionaries(KEYS, inner)
        | strategies.dictionaries(KEYS, inner).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


def load(data: bytes):
    value, end = pickles.load(data, name="file.pt")
    assert end <= len(data)
    return value


@hypothesis.settings(max_examples=60)
@hypothesis.given(VALUES, strategies.sampled_from(PROTOCOLS))
def test_plain_values_are_those_of_the_pickle_module(value, protocol):
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_values_stay_shared_and_circles_circles(protocol):
    """A pickle of a tuple that holds itself takes values, or values and a mark, off the stack
    again.
    """
    shared = ["a"]
    found = load(pickle.dumps([shared, shared], protocol))
    assert found[0] is found[1]
    for inner in ([], [1, 2, 3]):
        inner.append((inner, *range(len(inner))))
        found = load(pickle.dumps(inner[-1], protocol))
        assert found[0][-1] is found and found[1:] == inner[-1][1:]


class Vocab:
    """A class that a reader of the file does not import."""

    def __init__(self):
        self.words = ["a", "b"]


class Words(list):
    """A list's subclass."""


@pytest.mark.parametrize("protocol", PROTOCOLS[2:])
def test_objects_are_records(protocol, monkeypatch):
    data = pickle.dumps(
        {"vocab": Vocab(), "words": Words(["x"]), "counts": collections.Counter("aab")}, protocol
    )
    monkeypatch.setattr(
        Vocab, "__setstate__", lambda self, state: pytest.fail("it ran"), raising=False
    )
    found = load(data)
    assert isinstance(found["vocab"], Record) and found["vocab"].symbol.name == "Vocab"
    assert found["vocab"].attributes() == {"words": ["a", "b"]}
    assert isinstance(found["words"], Record) and found["counts"] == {"a": 2, "b": 1}
    assert isinstance(load(pickle.dumps(np.arange(3), protocol)), Record)


def test_texts_of_python_2_are_utf_8_or_latin_1_and_long_texts_are_left_out():
    assert load(b"\x80\x02U\x03\xc3\xbcxq\x00.") == "üx"
    assert load(b"S'a\\nb'\np0\n.") == "a\nb"
    assert load(b"\x80\x02U\x02\xff\xfe.") == "ÿþ"
    data = pickle.dumps(["a", "b" * (pickles.MAX_TEXT + 1), b"c" * (pickles.MAX_TEXT + 2)])
    assert load(data) == ["a", Omitted(pickles.MAX_TEXT + 1), Omitted(pickles.MAX_TEXT + 2)]


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def harmful(marker) -> dict[str, bytes]:
    """Pickles that would write the file `marker`, or run something else, by each way that there
    is.
    """
    command = f"touch {marker}"
    text = command.encode()
    calls = {
        "os.system": Calls(os.system, command),
        "builtins.exec": Calls(exec, f"open({str(marker)!r}, 'w').close()"),
        "builtins.getattr": Calls(getattr, "a text", "upper"),
        "subprocess.Popen": Calls(
            subprocess.Popen, command, -1, None, None, None, None, None, True, True
        ),
        "a function of tests": Calls(write_marker, str(marker)),
    }
    found = {
        f"{name}, protocol {p}": pickle.dumps(call, p)
        for name, call in calls.items()
        for p in (0, 2, 4)
    }
    return found | {
        "INST": b"(S'" + text + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + text + b"'\no.",
        "a buffer outside of the pickle": b"\x80\x05\x97.",
        "EXT1": b"\x80\x02\x82\xf0.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": b"\x80\x02S'os'\nQ.",
        "a call of what a call made": b"cbuiltins\nset\n((ltR)R.",
        "a call of a text": b"S'os'\n)R.",
        "BUILD of an unknown object's call": b"ctests.x\nEvil\n)R}b.",
    }


def write_marker(path):
    open(path, "w").close()


@pytest.mark.parametrize("name", sorted(harmful("x")))
def test_what_would_run_is_refused(name, tmp_path):
    marker = tmp_path / "marker"
    copyreg.add_extension(__name__, "write_marker", 0xF0)
    try:
        with pytest.raises(UserError, match=r"^file\.pt: its pickle (calls|uses|contains) "):
            load(harmful(marker)[name])
    finally:
        copyreg.remove_extension(__name__, "write_marker", 0xF0)
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02csubprocess\nPopen\nS'ls'\n\x85\x81.",  # NEWOBJ.
        b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93)}\x92.",  # NEWOBJ_EX.
    ],
)
def test_an_object_is_never_made(data):
    found = load(data)
    assert type(found) is Record and found.symbol == Symbol("subprocess", "Popen")


def callable_of_a_reader(shape=(), *, is_kept=True):
    """What a caller of `load` allows a pickle to call."""
    return shape, is_kept


def test_a_state_changes_no_function_and_no_class_of_ours():
    """The pickle module would set the defaults of a function by BUILD with the state (None, {name:
    value}).
    """
    reader = {"of.reader": callable_of_a_reader}
    ours = {**pickles._CALLS, **reader, "txl_jax.interop.pickles.Record": Record}
    change = {
        "__defaults__": ("of the file",),
        "__kwdefaults__": {"is_kept": "of the file"},
        "attribute": 1,
    }

    def attributes():
        names = ("__defaults__", "__kwdefaults__")
        return [
            [getattr(each, name, None) for name in names] + [dict(vars(each))]
            for each in ours.values()
        ]

    before = attributes()
    for dotted, state in itertools.product(ours, (change, (None, change), (change, change))):
        module, _, name = dotted.rpartition(".")
        data = (
            f"\x80\x02c{module}\n{name}\n".encode("latin1") + pickle.dumps(state, 2)[2:-1] + b"b."
        )
        with contextlib.suppress(UserError):
            pickles.load(data, name="file.pt", calls=reader)
    assert attributes() == before
    made = load(
        b"\x80\x02cevil\nEvil\n)\x81"
        + pickle.dumps((None, {"symbol": 1, "__class__": 1}), 2)[2:-1]
        + b"b."
    )
    assert (
        type(made) is Record
        and made.symbol == Symbol("evil", "Evil")
        and made.state[1]["symbol"] == 1
    )


@pytest.mark.parametrize(
    "data",
    [
        # A text of 2^60 bytes.
        b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"a.",
        # An integer of 2^31 bytes.
        b"\x80\x02\x8b\xff\xff\xff\x7fa.",
        # An integer that Python cannot print.
        b"\x80\x02\x8b\x00\x08\x00\x00" + b"\x01" * 2048 + b".",
        b"L" + b"9" * (1 << 17) + b"L\n.",
        b"\x80\x02}(" + b")" + b"\x85" * 100_000 + b"K\x01u.",  # A key that nests 100,000 deep.
    ],
    ids=lambda data: repr(data[:6]),
)
def test_sizes_beyond_the_file_are_refused(data):
    with pytest.raises(UserError, match=r"corrupted|early"):
        load(data)


def test_calls_may_not_copy_without_end_and_a_memo_of_any_number_costs_nothing():
    """A list of 50,000 numbers from which 50,000 sets are made: 2.5e9 elements from 300 kB."""
    numbers = b"(l" + b"(" + b"K\x01" * 50_000 + b"e" + b"p0\n"
    data = b"\x80\x02" + numbers + b"0]" + b"c__builtin__\nset\ng0\n\x85Ra" * 50_000 + b"."
    with pytest.raises(UserError, match="larger than the file"):
        load(data)
    assert load(b"\x80\x02K\x01r\xff\xff\xff\xff0j\xff\xff\xff\xff.") == 1


def text_op(text: str) -> bytes:
    """Pushes a text."""
    return b"X" + len(text.encode()).to_bytes(4, "little") + text.encode()


# Values of more than a few characters or parts, which a pickle could use again and again for two
# bytes each.
REUSED = {
    "a long tuple as a key": b"}(" + b"N" * 11 + b"tNs.",
    "a long text as a key": b"}" + text_op("k" * (pickles.MAX_KEY_TEXT + 1)) + b"Ns.",
    "a long text in a set": b"(" + text_op("k" * (pickles.MAX_KEY_TEXT + 1)) + b"\x91.",
    "a module with a long name": text_op("m" * 501) + text_op("C") + b"\x93.",
    "a class with a long name": text_op("m") + text_op("C" * 501) + b"\x93.",
    "a name of protocol 0": b"cm\n" + b"C" * 501 + b"\n.",
}


@pytest.mark.parametrize("code", REUSED.values(), ids=REUSED)
def test_what_is_hashed_or_copied_at_each_use_is_short(code):
    with pytest.raises(UserError, match=r"cannot be a key|more than 500"):
        load(b"\x80\x04" + code)


def test_keys_and_names_of_usual_lengths():
    key, name = "k" * pickles.MAX_KEY_TEXT, "n" * 500
    assert load(b"\x80\x04}(" + b"N" * 10 + b"tK\x01s.") == {(None,) * 10: 1}
    assert load(b"\x80\x04}" + text_op(key) + b"K\x01s.") == {key: 1}
    assert load(b"\x80\x04" + text_op(name) + text_op(name) + b"\x93.") == Symbol(name, name)


def test_arguments_are_counted_before_they_are_looked_at():
    """A tuple of 100,000 values that is passed to 50,000 calls: 5e9 values from 350 kB."""
    data = (
        b"\x80\x02]ctorch\nparameter\nq\x010("
        + b"N" * 100_000
        + b"tq\x020"
        + b"h\x01h\x02R0" * 50_000
        + b"."
    )
    with pytest.raises(UserError, match="larger than the file"):
        pickles.load(data, name="file.pt", calls={"torch.parameter": lambda *args: None})
