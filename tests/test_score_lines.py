"""Tests docs/examples/score_lines.py: its numbers are the library's, and a restart keeps them."""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

import txl_jax
from support import ON_PATH, ROOT, drawn_run
from txl_jax.config import EvalConfig, Tokenizer

PROGRAM = ROOT / "docs" / "examples" / "score_lines.py"
PIECE = 5  # Bytes that are read at a time.
LEARNING = ["--learning_rate=0.01", "--decay=0.001"]
# Lines shorter and longer than a piece, of exactly one, an empty one, bytes that are not UTF-8, one
# whose newline is a piece of its own, and a last line without newline.
LINES = [
    b"the cat\n",
    b"ran\n",
    b"away\n",
    b"\n",
    b"\xff\x00\xfe to\xc3\n",
    b"a mat and saw the dog run . it ran\n",
    b"it ran away\r\n",
    b"too",
]
TEXT = b"".join(LINES)
SECONDS = 120  # Longer is a hang.


@pytest.fixture(scope="module")
def program():
    """The program's names."""
    return types.SimpleNamespace(**runpy.run_path(str(PROGRAM)))


def make_run(folder, **changes):
    """Returns the directory of a run on bytes with drawn parameters."""
    settings = {
        "eval": EvalConfig(segment_len=PIECE, mem_len=9, same_length=True, batch_size=1),
        "data.tokenizer.kind": Tokenizer.BYTE,
    }
    config, corpus = drawn_run.on_text(folder, drawn_run.TEXT, **settings | changes)
    run, _ = drawn_run.make(folder / "run", config, corpus)
    return run.path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def model(run):
    return txl_jax.load(run)


@pytest.fixture
def score(program, monkeypatch, capsys):
    """Returns a function that runs the program in this process on bytes.

    It returns the records, what is printed to standard error, and the exit code.
    """

    def score_bytes(*words, text=TEXT):
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(text)))
        exit_code = program.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return [json.loads(line) for line in out.splitlines()], err, exit_code

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield score_bytes
    for number, handler in before.items():
        signal.signal(number, handler)


def bytes_of_lines(model, lines, **options):
    """Returns the nats of each line's bytes, from the scores of all lines as one document."""
    [nats] = model.score([b"".join(lines)], per_token=True, first="\n", **options)
    ends = np.cumsum([len(line) for line in lines])
    return np.split(nats, ends[:-1])


def nats_of_lines(model, lines, **options):
    return [nats.sum(dtype=np.float64) for nats in bytes_of_lines(model, lines, **options)]


def nats_of(records):
    return [record["nats"] for record in records]


def test_lines_have_the_nats_that_they_have_in_the_whole_text(model, run, score):
    records, _, exit_code = score(run, "--threshold=1000")

    assert exit_code == 0
    # The records have four decimals.
    np.testing.assert_allclose(nats_of(records), nats_of_lines(model, LINES), rtol=0, atol=1.5e-4)
    largest = [nats.max() for nats in bytes_of_lines(model, LINES)]
    np.testing.assert_allclose(
        [record["max_nats"] for record in records], largest, rtol=0, atol=1.5e-4
    )
    assert [record["line"] for record in records] == list(range(1, len(LINES) + 1))
    assert [record["bytes"] for record in records] == [len(line) for line in LINES]
    bits = [
        record["nats"] / np.log(2) / len(line) for record, line in zip(records, LINES, strict=True)
    ]
    np.testing.assert_allclose(
        [record["bits_per_byte"] for record in records], bits, rtol=0, atol=2e-4
    )
    assert records[3]["text"] == ""
    assert records[4]["text"] == "\\xff\x00\\xfe to\\xc3"
    assert records[6]["text"] == "it ran away"


def test_learning_is_dynamic_evaluation(model, run, score):
    """With lines of one segment each, all gradients are the same as the library's."""
    lines = [b"the \n", b"cat \n", b"ran \n", b"the \n", b"cat \n"]
    rule = txl_jax.DynamicConfig(rule="rmsprop", learning_rate=0.01, decay=0.001)

    records, _, _ = score(run, "--threshold=1000", *LEARNING, text=b"".join(lines))

    learned = nats_of_lines(model, lines, dynamic=rule)
    np.testing.assert_allclose(nats_of(records), learned, rtol=1e-5, atol=1e-4)
    # Repeated lines cost less than without learning.
    assert sum(learned[3:]) < sum(nats_of_lines(model, lines)[3:]) - 0.1


@pytest.mark.parametrize("learning", [[], LEARNING], ids=["static", "learning"])
def test_a_restart_continues_with_the_same_numbers(run, score, tmp_path, learning):
    state = tmp_path / "state"
    words = [run, "--threshold=1000", f"--state={state}", *learning]
    whole, _, _ = score(run, "--threshold=1000", *learning)

    first, _, _ = score(*words, text=b"".join(LINES[:3]))
    rest, err, _ = score(*words, text=b"".join(LINES[3:]))

    assert first + rest == whole
    assert "line 3" in err
    assert list(tmp_path.iterdir()) == [state], "no other file is left"


def test_an_input_that_has_grown_continues(run, score, tmp_path):
    words = [run, "--threshold=1000", f"--state={tmp_path / 'state'}", "--skip"]
    whole, _, _ = score(run, "--threshold=1000", text=TEXT + b" much\nnew\n")

    first, _, _ = score(*words, text=b"".join(LINES[:3]))
    empty, err_of_empty, _ = score(*words, text=b"")
    rest, _, _ = score(*words, text=TEXT)
    # The last line had no newline, so it is scored again.
    longer, err, _ = score(*words, text=TEXT + b" much\nnew\n")
    again, _, _ = score(*words, text=TEXT + b" much\nnew\n")

    assert (empty, err_of_empty.count("\n"), again) == ([], 1, [])
    assert first + rest[:-1] + longer == whole
    assert rest[-1]["text"] == "too"
    assert "another" not in err


def test_a_new_input_is_not_skipped(run, score, tmp_path):
    """Such as a log that was rotated while the program did not run. The memory continues."""
    words = [run, "--threshold=1000", f"--state={tmp_path / 'state'}", "--skip"]
    rotated = [b"another\n", b"cat\n", b"ran\n"]
    whole, _, _ = score(run, "--threshold=1000", text=TEXT + b"\n" + b"".join(rotated))

    score(*words, text=TEXT + b"\n")
    records, err, _ = score(*words, text=b"".join(rotated))
    longer, _, _ = score(*words, text=b"".join(rotated) + b"new\n")

    assert records == whole[len(LINES) :]
    assert "another line" in err
    # The new input is recognized when the program starts again.
    assert [record["line"] for record in longer] == [len(LINES) + len(rotated) + 1]


def test_without_skip_an_input_begins_anew(run, score, tmp_path):
    words = [run, "--threshold=1000", f"--state={tmp_path / 'state'}"]
    score(*words, text=TEXT + b"\n")
    score(*words, text=b"cat\nran\n")
    records, _, _ = score(*words, "--skip", text=b"cat\nran\nnew\n")
    assert [record["line"] for record in records] == [len(LINES) + 3]


def test_an_input_that_differs_at_the_last_line_read_is_named(run, score, tmp_path):
    """Such as a rotated file that begins with the same header. Its lines cannot be read again."""
    words = [run, "--threshold=1000", f"--state={tmp_path / 'state'}", "--skip"]
    score(*words, text=b"header\nthe cat\nsat\n")
    records, err, _ = score(*words, text=b"header\nthe dog\nran\naway\n")
    assert [record["text"] for record in records] == ["away"]
    assert "line 3 of the input" in err


def test_an_input_that_is_too_short_to_skip_is_named(run, score, tmp_path):
    words = [run, "--threshold=1000", f"--state={tmp_path / 'state'}", "--skip"]
    score(*words, text=TEXT + b"\n")
    records, err, _ = score(*words, text=b"".join(LINES[:3]))
    assert records == []
    assert f"3 of {len(LINES)}" in err


@pytest.mark.parametrize("by", ["nats", "max_nats", "bits_per_byte"])
def test_threshold_is_a_quantile_of_normal_lines(program, model, run, score, tmp_path, by):
    normal = tmp_path / "normal"
    normal_lines = drawn_run.TEXT.splitlines(keepends=True)[:40]
    normal.write_bytes(b"".join(normal_lines))
    everything, _, _ = score(run, "--threshold=1000", text=normal.read_bytes() + TEXT)
    values = [record[by] for record in everything]
    # The median of 40 lines is between two of them. The threshold is the higher one.
    threshold = sorted(values[:40])[20]

    state = tmp_path / "state"
    words = [run, f"--normal={normal}", "--quantile=0.5", f"--by={by}", f"--state={state}"]
    records, _, _ = score(*words)

    # The stream continues the normal lines, and its own lines count from 1.
    assert nats_of(records) == nats_of(everything[len(normal_lines) :])
    assert records[0]["line"] == 1
    alerts = [record["alert"] for record in records]
    assert alerts == [record[by] > threshold for record in records]
    assert 0 < sum(alerts) < len(alerts)

    # Records are rounded.
    saved = program.LineScorer(model).load(state)
    assert saved.threshold == pytest.approx(threshold, rel=0, abs=1e-4)

    # After a restart the threshold is the one of the state. The normal lines are not read again.
    normal.unlink()
    _, _, exit_code = score(*words)
    assert exit_code == 0


def test_a_line_may_be_long(model, run, score):
    line = drawn_run.TEXT.replace(b"\n", b" ") + b"\n"
    assert len(line) > 1000 * PIECE
    records, _, _ = score(run, "--threshold=1000", text=line)
    np.testing.assert_allclose(nats_of(records), nats_of_lines(model, [line]), rtol=1e-5)
    assert len(records[0]["text"]) == 200


def test_empty_input(run, score, tmp_path):
    state = tmp_path / "state"
    records, _, exit_code = score(run, "--threshold=1000", f"--state={state}", text=b"")
    assert records == []
    assert exit_code == 0
    assert state.exists()


def test_state_file_is_the_old_one_or_the_new_one(program, model, tmp_path, monkeypatch):
    scorer = program.LineScorer(model)
    path = tmp_path / "state"
    [(_, state)] = scorer.scores(scorer.start(), io.BytesIO(b"cat\n"))
    scorer.save(state, path)

    def fail(*paths):
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(FileNotFoundError):
            scorer.save(state.replace(lines=7), path)
    assert scorer.load(path).lines == 1


@pytest.mark.parametrize("change", ["mem_len", "learning", "model", "content"])
def test_state_of_another_reader_is_an_error(run, score, tmp_path, change):
    state = tmp_path / "state"
    words = ["--threshold=1000", f"--state={state}"]
    score(run, *words)
    if change == "mem_len":
        words.append("--mem_len=4")
    elif change == "learning":
        words += LEARNING
    elif change == "model":
        run = make_run(tmp_path, model__untie_r=True)
    else:
        state.write_bytes(state.read_bytes()[:100])
    before = state.read_bytes()

    records, err, exit_code = score(run, *words)

    assert (records, exit_code) == ([], 1)
    assert str(state) in err
    assert state.read_bytes() == before


def test_model_of_words_is_an_error(score, tmp_path):
    words = drawn_run.of_words(tmp_path / "words")
    _, err, exit_code = score(words.path, "--threshold=1")
    assert exit_code == 1
    assert "byte" in err


@pytest.fixture
def start():
    """Returns a function that starts the program as a process. It is ended after the test."""
    started = []

    def start_process(*words):
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | ON_PATH,
        )
        started.append(process)
        return process

    yield start_process
    for process in started:
        process.kill()
        process.communicate()


def send(process, line):
    """Sends one line, and returns its record, which must come before the next line is sent."""
    process.stdin.write(line)
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.mark.full
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_records_after_a_signal_are_the_same(run, score, start, tmp_path, ending):
    """The process has read five lines. After a kill, the lines since the last save come again."""
    state = tmp_path / "state"
    words = [run, "--threshold=1000", f"--state={state}", "--save_every=2", *LEARNING]
    whole, _, _ = score(run, "--threshold=1000", *LEARNING)

    process = start(*words)
    first = [send(process, line) for line in LINES[:5]]
    process.send_signal(ending)
    _, err = process.communicate(timeout=SECONDS)
    rest, _, _ = score(*words, "--skip")

    assert first == whole[:5]
    if ending == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert rest == whole[4:]
    else:
        assert process.returncode == 130
        assert b"Traceback" not in err
        assert rest == whole[5:]


@pytest.mark.full
def test_reader_that_has_enough_ends_the_program(run, score, start, tmp_path):
    state = tmp_path / "state"
    process = start(run, "--threshold=1000", f"--state={state}")
    send(process, LINES[0])
    process.stdout.close()
    process.stdin.write(LINES[1])
    process.stdin.flush()

    assert process.wait(SECONDS) == 141
    assert b"Error" not in process.stderr.read()
    # The line without a record is read again.
    rest, _, _ = score(run, "--threshold=1000", f"--state={state}", "--skip")
    assert rest[0]["line"] == 2
