"""Tests documents of files and pipes: lines, text between empty lines, numbers of lines, and waiting."""

import os
import tracemalloc

import pytest

from txl_jax.data.sources import input_text
from txl_jax.data.sources.input_text import InputFormat, InputReader, open_input
from txl_jax.errors import UserError

TEXT = b"one\n\n \ntwo\nthree\n\nfour"


@pytest.fixture
def pipe():
    """Returns the reading end and the writing end."""
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def documents(reader):
    """All that come, as (line, text)."""
    found = []
    while (document := reader.next(wait=True)) is not None:
        found.append(tuple(document))
    assert reader.ended and reader.next(wait=True) is None
    return found


@pytest.mark.parametrize("block", [1, 2, 5, 1 << 16])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n\n"])
def test_documents_have_their_lines(monkeypatch, block, end):
    monkeypatch.setattr(input_text, "_BLOCK", block)
    for form in InputFormat:
        read, write = os.pipe()
        os.write(write, TEXT + end)
        os.close(write)
        found = documents(InputReader(read, form))
        os.close(read)
        if form is InputFormat.LINES:
            lines = (TEXT + end).removesuffix(b"\n").split(b"\n")
            assert found == list(enumerate(lines, start=1))
        else:
            assert found == [(1, b"one"), (4, b"two\nthree"), (7, b"four")]


@pytest.mark.parametrize("form", InputFormat)
def test_an_empty_input_has_no_documents(pipe, form):
    os.close(pipe[1])
    assert documents(InputReader(pipe[0], form)) == []


def test_only_a_reader_that_is_asked_to_waits(pipe):
    polls = []

    def after_poll():
        polls.append(None)
        os.write(pipe[1], b"d\n")

    reader = InputReader(pipe[0], InputFormat.LINES, after_poll=after_poll)
    os.write(pipe[1], b"one\ntwo\nbegun")
    assert [reader.next(wait=True).text, reader.next(wait=False).text] == [b"one", b"two"]
    assert reader.next(wait=False) is None and not reader.ended and not polls
    assert reader.next(wait=True).text == b"begund" and len(polls) == 1
    os.close(pipe[1])
    assert reader.next(wait=False) is None and reader.ended


@pytest.mark.full
def test_a_large_file_is_read_in_blocks(tmp_path):
    (tmp_path / "large").write_bytes(b"some words of a line\n" * 200_000)
    descriptor = open_input(str(tmp_path / "large"))
    reader = InputReader(descriptor, InputFormat.LINES)
    tracemalloc.start()
    count = sum(1 for _ in iter(lambda: reader.next(wait=True), None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    os.close(descriptor)
    assert count == 200_000 and peak < 2e6


def test_what_cannot_be_opened_is_a_sentence(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match=rf"{path} .*--input"):
            open_input(str(path))
    assert open_input("-") == 0


@pytest.mark.full
def test_an_input_in_a_bucket(bucket):
    (bucket / "input.txt").write_bytes(b"one\ntwo")
    descriptor = open_input(str(bucket / "input.txt"))
    reader = InputReader(descriptor, InputFormat.LINES)
    assert [reader.next(wait=True).text for _ in range(2)] == [b"one", b"two"]
    os.close(descriptor)
    with pytest.raises(UserError, match=r"gs://.*--input"):
        open_input(str(bucket / "missing.txt"))
