"""Tests that a command survives a standard output that goes away, is full, is missing or lacks
letters, and that no text acts on a terminal.
"""

import errno
import io
import os
import re
import select
import signal
import sys

import pytest

from txl_jax.errors import UserError, one_line
from txl_jax.runtime import environment, output
from txl_jax.runtime.log import RunLog

GONE = 141  # The exit code of a program that SIGPIPE ends, as a shell reports it.


@pytest.fixture
def open_stream():
    """Opens a stream on a file, which is closed after the test."""
    opened = []

    def open_stream(number, encoding="utf-8", **options):
        opened.append(number)
        before = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        return output.tolerant(number, before, **options)

    yield open_stream
    for number in opened:
        os.close(number)


def written_to(path, text, open_stream, **options):
    stream = open_stream(os.open(path, os.O_WRONLY | os.O_CREAT), **options)
    print(text, file=stream, flush=True)
    assert output.loss(stream) is None
    return path.read_bytes()


def test_a_reader_that_goes_away_is_noticed_and_nothing_raises(open_stream, monkeypatch):
    reader, writer = os.pipe()
    stream = open_stream(writer)
    monkeypatch.setattr(sys, "stdout", stream)
    print("one", flush=True)
    assert output.loss() is None
    assert output.exit_code() == 0
    assert os.read(reader, 100) == b"one\n"
    os.close(reader)
    for _ in range(3):
        print("x" * 100_000, flush=True)
    assert output.loss().errno == errno.EPIPE
    assert output.exit_code() == GONE
    assert os.write(writer, b"of a library") > 0, "the file itself drops what is written"


def test_a_full_disk_is_no_reader_that_has_enough(open_stream, monkeypatch):
    """Somebody wants the result, so the command must not end as if all were well."""
    monkeypatch.setattr(sys, "stdout", open_stream(os.open("/dev/full", os.O_WRONLY)))
    print("result", flush=True)
    with pytest.raises(OSError, match="output is incomplete: No space") as refused:
        output.exit_code()
    assert refused.value.errno == errno.ENOSPC


def test_a_closed_file_drops_what_is_written(open_stream):
    number = os.open(os.devnull, os.O_WRONLY)
    stream = open_stream(number)
    os.close(number)
    print("one", file=stream, flush=True)
    assert output.loss(stream).errno == errno.EBADF
    os.fstat(number)  # No other file can get its number.


def test_a_terminal_that_does_not_wait_is_waited_for(open_stream, monkeypatch):
    """Another program may have set O_NONBLOCK for all that share the terminal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    waits = []

    def read_all(readers, writers, others):
        waits.append(writers)
        os.read(reader, 1 << 20)

    monkeypatch.setattr(select, "select", read_all)
    stream = open_stream(writer)
    for _ in range(30):  # More than a pipe holds.
        print("x" * 10_000, file=stream, flush=True)
    assert output.loss(stream) is None
    assert waits
    os.close(reader)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_encoding_lacks_are_escaped(encoding, tmp_path, open_stream):
    written = written_to(tmp_path / "out", "Größe № kůň", open_stream, encoding=encoding)
    assert written.endswith(b"\n")
    assert written.removesuffix(b"\n").decode(encoding).isprintable()
    assert rb"\u2116" in written
    assert (b"Gr\xf6" in written) == (encoding == "latin-1")


def test_text_keeps_lines_and_tabs_and_cannot_act_on_a_terminal(tmp_path, open_stream):
    # Clears the screen, sets the window's title, sets a color, and goes back to overwrite the line.
    text = "a\tb\r\nc\x1b[2J\x1b]0;owned\x07 \x9b31m \rd"
    expected = b"a\tb\r\nc\\x1b[2J\\x1b]0;owned\\x07 \\x9b31m \\rd\n"
    assert written_to(tmp_path / "out", text, open_stream) == expected


def test_a_progress_bar_works_on_the_error_stream(tmp_path, open_stream):
    """It goes back to the beginning of its line, and up by a line. It cannot clear the screen."""
    control = output._CONTROL_OF_ERRORS
    written = written_to(tmp_path / "err", "\r50%\x1b[A\x1b[2J", open_stream, control=control)
    assert written == b"\r50%\x1b[A\\x1b[2J\n"


def test_colors_reach_a_terminal_only(open_stream):
    master, terminal = os.openpty()
    stream = open_stream(terminal)
    print("\x1b[1;34musage\x1b[0m\x1b[2J", file=stream, flush=True)
    assert os.read(master, 100).rstrip() == b"\x1b[1;34musage\x1b[0m\\x1b[2J"
    os.close(master)


def test_streams_of_others_stay(capsys):
    """Such as the ones by which pytest keeps what a test prints."""
    before = sys.stdout, sys.stderr
    output.prepare()
    assert (sys.stdout, sys.stderr) == before
    assert not output.is_prepared(sys.stdout)
    assert output.loss() is None
    assert output.exit_code() == 0


def test_a_message_is_one_line_and_no_longer_than_people_read():
    assert (
        str(UserError("the tensor a\n\x1b[2J\u202eb is unknown"))
        == r"the tensor a\n\x1b[2J\u202eb is unknown"
    )
    long = str(UserError(f"cutoffs must be 1, got {list(range(300_000))}. Lower it."))
    assert len(long) < 5_000
    assert long.startswith("cutoffs must be 1") and long.endswith("Lower it.")
    # Of 2.3 million characters.
    assert int(re.search(r"\(([\d,]+) characters left out\)", long)[1].replace(",", "")) > 1_900_000
    assert one_line("größe № 1") == "größe № 1"


def test_a_cell_of_a_table_adds_no_row():
    """Settings and names of runs come from records, which may be other people's."""
    assert list(environment.table(["run"], [["a\n| b |\x1b[2J"]])) == [
        "| run |",
        "|---|",
        r"| a\n| b |\x1b[2J |",
    ]


class Broken(io.StringIO):
    """A standard output whose reader is gone."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


# The words stand for streams that the test makes.
@pytest.mark.parametrize("stream", [Broken(), None, "closed", "ascii"])
def test_lines_for_people_never_end_a_run_that_somebody_starts_from_python(
    tmp_path, monkeypatch, stream
):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    elif stream == "ascii":
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with RunLog(tmp_path).open() as log:
        monkeypatch.setattr(sys, "stdout", stream)
        log.print("größe")
        log.note("a name\n\x1b[2J")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    # Without their times.
    assert [line.partition("  ")[2] for line in lines] == ["größe", r"note      a name\n\x1b[2J"]
    if isinstance(stream, io.TextIOWrapper):
        assert stream.buffer.getvalue().startswith(rb"gr\xf6\xdfe")


def test_the_code_is_the_one_of_the_signal():
    assert output.READER_GONE == GONE == 128 + signal.SIGPIPE
