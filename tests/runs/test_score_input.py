"""Tests the records of an input against each document alone, and mistakes in the input."""

import json

import numpy as np
import pytest

from support import tiny_model
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.runs.score import InputFormat, documents, open_input, score_documents

LINES = ["abc dab", "", "k", "abba " * 9, "cab"]
TEXT = b"one\n\n \ntwo\nthree\n\nfour"


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n\n"])
def test_documents_have_their_lines(tmp_path, end):
    (tmp_path / "file").write_bytes(TEXT + end)
    for form in InputFormat:
        with open_input(str(tmp_path / "file")) as file:
            found = list(documents(file, form))
        lines = (TEXT + end).removesuffix(b"\n").split(b"\n")
        numbered = list(enumerate(lines, start=1)), [(1, b"one"), (4, b"two\nthree"), (7, b"four")]
        assert found == numbered[form is InputFormat.DOCUMENTS]
    assert list(documents([], InputFormat.LINES)) == list(documents([b"\n"], InputFormat.DOCUMENTS)) == []


def test_what_cannot_be_opened_is_named(tmp_path):
    for path, hint in ((tmp_path / "missing", "--input"), (tmp_path, "--input"), ("-", "/dev/stdin")):
        with pytest.raises(UserError, match=rf"{path} .*{hint}"):
            open_input(str(path))


@pytest.mark.full
def test_an_input_in_a_bucket(bucket):
    (bucket / "input.txt").write_bytes(b"one\ntwo")
    with open_input(str(bucket / "input.txt")) as file:
        assert file.readlines() == [b"one\n", b"two"]
    with pytest.raises(UserError, match=r"gs://.*--input"):
        open_input(str(bucket / "missing.txt"))


class Opened:
    """A trained model that is not read from a folder."""

    def __init__(self, model, params):
        self.vocabulary, self.components, self.drawn = model.vocabulary, model.components, params

    def build(self, *, log):
        return self.components

    def params(self, components, *, log):
        return 7, self.drawn


def score(lines, *, per_token=False, params=None, write=None):
    """(lines written, number of documents) with 3 rows."""
    model, written = tiny_model.make(eval__batch_size=3), []
    write = write or written.append
    opened = Opened(model, params or model.params)
    count = score_documents(opened, enumerate(lines, 1), name="book.txt", per_token=per_token, write=write, log=str)
    return "".join(written), count


def test_a_record_per_document():
    model = tiny_model.make()
    written, count = score([line.encode() for line in LINES])
    records = [json.loads(line) for line in written.splitlines()]
    assert count == len(records) == len(LINES)
    for number, (line, record) in enumerate(zip(LINES, records, strict=True)):
        nats = tiny_model.alone(model, model.encode(line))
        assert record == {"index": number, "nats": pytest.approx(nats.sum(), rel=1e-6), "tokens": len(nats)}


def test_a_record_per_token_reads_back_exactly():
    model = tiny_model.make(eval__batch_size=3)
    written, _ = score([line.encode() for line in LINES], per_token=True)
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
        score([b"abc", b"a" * 70, b"aZ", b"abc"], write=written.append)
    assert [json.loads(line)["tokens"] for line in written] == [2, 69] and "\n" not in str(error.value)


def test_a_loss_that_is_no_number_is_a_mistake():
    model = tiny_model.make()
    broken = model.params | {"softmax": {name: value * np.nan for name, value in model.params["softmax"].items()}}
    with pytest.raises(NonFiniteError, match=r"line 1 of book\.txt.*nan"):
        score([b"abc"], params=broken)
