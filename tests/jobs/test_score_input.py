"""Tests the records of an input against each document alone, and mistakes in the input."""

import json

import numpy as np
import pytest

from support import tiny_model
from txl_jax.data.sources.input_text import InputFormat, InputReader
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.jobs import score_input

LINES = ["abc dab", "", "k", "abba " * 9, "cab"]


class FakeInput(InputReader):
    """An input of these lines, without a file."""

    def __init__(self, lines):
        super().__init__(-1, InputFormat.LINES)
        self._given = iter(lines)

    def _is_ready(self, wait):
        return True

    def _read_block(self):
        line = next(self._given, None)
        self._closed = line is None
        if line is not None:
            self._lines.append(line)


class Opened:
    """A trained model that is not read from a folder."""

    def __init__(self, model, params):
        self.vocabulary, self.components, self.params = model.vocabulary, model.components, params

    def assemble(self, *, log):
        return self.components

    def load_params(self, components, *, log):
        return 7, self.params


def score(reader, *, per_token=False, params=None, write=None):
    """(lines written, number of documents) with 3 rows."""
    model, written = tiny_model.make(eval__batch_size=3), []
    write = write or written.append
    opened = Opened(model, params or model.params)
    count = score_input.run(opened, reader, name="book.txt", per_token=per_token, write=write, log=str)
    return "".join(written), count


def test_a_record_per_document():
    model = tiny_model.make()
    written, count = score(FakeInput([line.encode() for line in LINES]))
    records = [json.loads(line) for line in written.splitlines()]
    assert count == len(records) == len(LINES)
    for number, (line, record) in enumerate(zip(LINES, records, strict=True)):
        nats = tiny_model.alone(model, model.encode(line))
        assert record == {"index": number, "nats": pytest.approx(nats.sum(), rel=1e-6), "tokens": len(nats)}


def test_a_record_per_token_reads_back_exactly():
    model = tiny_model.make(eval__batch_size=3)
    written, _ = score(FakeInput([line.encode() for line in LINES]), per_token=True)
    records = [json.loads(line) for line in written.splitlines()]
    expected = model.score(LINES, per_token=True, batch_size=3)
    assert len(records) == sum(map(len, expected))
    for number, (line, nats) in enumerate(zip(LINES, expected, strict=True)):
        mine = [record for record in records if record["index"] == number]
        assert "".join(record["token"] for record in mine) == line[1:]
        assert [record["position"] for record in mine] == list(range(1, len(line)))
        assert np.array_equal(np.array([record["nats"] for record in mine], np.float32), nats)


def test_a_mistake_names_its_line_after_the_records_before():
    written = []
    with pytest.raises(UserError, match=r"^line 3 of book\.txt.*\b90\b") as error:
        score(FakeInput([b"abc", b"a" * 70, b"aZ", b"abc"]), write=written.append)
    assert [json.loads(line)["tokens"] for line in written] == [2, 69] and "\n" not in str(error.value)


def test_a_loss_that_is_no_number_is_a_mistake():
    model = tiny_model.make()
    broken = model.params | {"softmax": {name: value * np.nan for name, value in model.params["softmax"].items()}}
    with pytest.raises(NonFiniteError, match=r"line 1 of book\.txt.*nan"):
        score(FakeInput([b"abc"]), params=broken)
