"""Tests of `python -m experiments.compress`: files come back, and nothing else is ever written."""

import dataclasses
import functools
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from unittest import mock

import jax
import numpy as np
import pytest

from experiments import compress
from support import ON_PATH, drawn_run, programs, tiny_run
from txl_jax.compression import codec, file_format, predictor
from txl_jax.compression.predictor import Predictor
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import open_weights
from txl_jax.runtime import stop
from txl_jax.runtime.checkpoint import Checkpointer

TEXT = b"the cat sat on a mat, and the dog ran after it. " * 80  # 3,840 bytes.
# The high rate lets a model without knowledge learn enough within TEXT to shrink it.
SMALL = ("--streams=8", "--segment_len=16", "--learning_rate=0.02")


@functools.cache
def predictor_of(path, coding):
    """Returns a predictor, which is compiled at its first use."""
    return Predictor(open_weights(path), coding, log=print)


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Gives commands with the same model and coding the same predictor instead of a new one each.

    Compiling takes most of a command's time. `programs.run` reads a program's file anew, and the
    file imports its predictor by the name that is replaced here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            predictor, "Predictor", lambda trained, coding, log: predictor_of(trained.path, coding)
        )
        yield


def make_model(folder, **changes):
    """Returns the path of a run of bytes that predicts next to nothing before it learns."""
    config, corpus = drawn_run.on_text(folder, drawn_run.letters(), model__n_layer=1, **changes)
    run, built = drawn_run.make(folder / "run", config, corpus)
    # Weights as they are drawn for other tests are sure of wrong bytes.
    weak = jax.tree.map(lambda leaf: 0.1 * leaf, tiny_run.params(built.model))
    # A later step takes the place of the weights that `drawn_run.make` has stored.
    with Checkpointer(run.best, keep=1, log=print) as best:
        best.save(drawn_run.STEP + 1, {"params": jax.device_put(weak)}, {})
        best.wait()
    return run.path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def compress_file(*words):
    """Returns the exit code, the output and the errors of compressing with small settings."""
    return programs.run("experiments.compress", *words, *SMALL)


@pytest.fixture(scope="module")
def compressed(model, tmp_path_factory):
    """(text file, compressed file)."""
    folder = tmp_path_factory.mktemp("files")
    text = folder / "text"
    text.write_bytes(TEXT)
    file = folder / "text.txl"
    code, out, err = compress_file(text, f"--model={model}", f"--out={file}")
    assert (code, err) == (0, "")
    assert "result    3,840 bytes to" in out
    return text, file


def decompress(file, model, out):
    """Returns the exit code and the error of decompressing a file."""
    code, _, err = programs.run(
        "experiments.compress", "--decompress", file, f"--model={model}", f"--out={out}"
    )
    return code, err


def assert_one_error(result, message):
    """Checks that `decompress` or a command failed with one line that matches a pattern."""
    code, err = result
    assert code == 1, err
    assert re.search(message, err), err
    assert err.count("\n") == 1, err


def with_header(file, to, *, environment=(), coding=(), **values):
    """Copies a compressed file with other values in its header and the SHA-256 that fits.

    Returns the path of the copy.
    """
    header, payload = file_format.load(file.read_bytes(), name="")
    header = dataclasses.replace(
        header,
        environment=dataclasses.replace(header.environment, **dict(environment)),
        coding=dataclasses.replace(header.coding, **dict(coding)),
        **values,
    )
    to.write_bytes(file_format.dump(header, payload))
    return to


def test_a_file_comes_back(compressed, model, tmp_path):
    _, file = compressed
    out = tmp_path / "again"
    # Another process has another predictor, so this one may not be the one that compressed.
    predictor_of.cache_clear()

    assert decompress(file, model, out) == (0, "")
    assert out.read_bytes() == TEXT

    header, payload = file_format.load(file.read_bytes(), name="")
    assert len(payload) < 0.85 * len(TEXT), "nothing was learned"
    assert header.text_sha256 == hashlib.sha256(TEXT).hexdigest()


@pytest.mark.parametrize("n_bytes", [0, 1, 2000])
def test_a_text_that_does_not_shrink_is_stored_and_comes_back_without_a_model(
    model, tmp_path, n_bytes
):
    noise = np.random.default_rng(0).bytes(n_bytes)
    (tmp_path / "noise").write_bytes(noise)
    file = tmp_path / "noise.txl"

    code, out, err = compress_file(tmp_path / "noise", f"--model={model}", f"--out={file}")
    assert code == 0, err
    assert "stored as it is" in out
    # The file's mark, its header and its SHA-256 take less than 200 bytes.
    assert file.stat().st_size < n_bytes + 200

    again = tmp_path / "again"
    code, _, err = programs.run("experiments.compress", "--decompress", file, f"--out={again}")
    assert code == 0, err
    assert again.read_bytes() == noise


def test_nothing_is_overwritten(compressed, model):
    text, file = compressed
    before = file.read_bytes()

    code, _, err = compress_file(text, f"--model={model}", f"--out={file}")

    assert code == 1
    assert "nothing is overwritten" in err
    assert file.read_bytes() == before


def test_a_file_that_another_process_has_made_since_the_start_is_not_overwritten(tmp_path):
    (tmp_path / "out").write_bytes(b"theirs")
    with pytest.raises(Exception, match="nothing is overwritten"):
        compress.storage.write_new(str(tmp_path / "out"), b"ours")
    assert (tmp_path / "out").read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["out"]


# Other values of a header, whose SHA-256 fits, and the error. The probe learns from a text of its
# own, so another rate gives other numbers.
FORGED = {
    "text_bytes": ({"text_bytes": 3839}, "another SHA-256"),
    "text": ({"text_sha256": "0" * 64}, "another SHA-256"),
    "weights": ({"weights_sha256": "0" * 64}, "another model"),
    "probe": ({"probe_sha256": "0" * 64}, "computes other numbers"),
    "learning_rate": ({"coding": {"learning_rate": 1e-3}}, "computes other numbers"),
}


@pytest.mark.parametrize(("values", "message"), FORGED.values(), ids=FORGED.keys())
def test_a_forged_header_is_one_error(compressed, model, tmp_path, values, message):
    _, file = compressed
    forged = with_header(file, tmp_path / "forged.txl", **values)
    assert_one_error(decompress(forged, model, tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_another_number_of_threads_is_one_error(compressed, model, tmp_path):
    """XLA's threads were started with the first number, and cannot change."""
    _, file = compressed
    header, _ = file_format.load(file.read_bytes(), name="")
    coding = {"threads": header.coding.threads + 1}
    forged = with_header(file, tmp_path / "forged.txl", coding=coding)
    message = r"must compute with \d+ threads, but JAX has started \d+"
    assert_one_error(decompress(forged, model, tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_if_the_numbers_differ_the_error_says_that_the_processor_does(compressed, model, tmp_path):
    _, file = compressed
    environment = {"processor": "x86_64-other"}
    moved = with_header(file, tmp_path / "a.txl", environment=environment, probe_sha256="0" * 64)
    code, err = decompress(moved, model, tmp_path / "out")
    assert code == 1
    assert "processor: x86_64-other there" in err


def test_a_processor_of_another_name_with_the_same_numbers_decompresses(
    compressed, model, tmp_path
):
    """Only the numbers decide, because an update of the system may change the name."""
    _, file = compressed
    moved = with_header(file, tmp_path / "a.txl", environment={"processor": "x86_64-other"})
    out = tmp_path / "out"
    assert decompress(moved, model, out) == (0, "")
    assert out.read_bytes() == TEXT


def test_another_model_is_one_error(compressed, tmp_path):
    _, file = compressed
    other = make_model(tmp_path, model__n_head=2)
    code, err = decompress(file, other, tmp_path / "out")
    assert code == 1
    assert "with another model than" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("direction", ["compress", "decompress"])
def test_the_member_that_is_named_is_opened_in_both_directions(
    compressed, model, tmp_path, direction
):
    """The run is no ensemble, so naming a member is an error."""
    text, file = compressed
    words = {"compress": [text], "decompress": ["--decompress", file]}[direction]
    out = tmp_path / "out"

    code, _, err = programs.run(
        "experiments.compress",
        *words,
        f"--model={model}",
        f"--out={out}",
        "--ensemble_member=seed=2",
    )

    assert_one_error((code, err), r"\bensemble_member\b|\bmember\b.*seed=2")
    assert not out.exists()


def test_flags_of_the_coding_come_from_the_file(compressed, model, tmp_path):
    _, file = compressed
    code, _, err = programs.run(
        "experiments.compress",
        "--decompress",
        file,
        f"--model={model}",
        f"--out={tmp_path / 'out'}",
        "--streams=4",
    )
    assert code == 1
    assert "Omit --streams" in err


def test_lines_for_people_do_not_get_into_the_result(compressed, model, monkeypatch):
    """Not even the last one, if the command is stopped."""
    text, _ = compressed
    monkeypatch.setattr(codec, "compress", mock.Mock(side_effect=Interrupted("compressing")))

    code, out, err = compress_file(text, f"--model={model}", "--out=-")

    assert out == ""
    assert "stopped   on request in compressing, nothing was written" in err
    # A signal would have set the exit code, and here there was none.
    assert code == 0


def test_too_little_memory_names_flags_that_help(compressed, model, tmp_path, monkeypatch):
    text, _ = compressed
    monkeypatch.setattr(codec, "compress", mock.Mock(side_effect=MemoryError("10 TB")))

    code, _, err = compress_file(text, f"--model={model}", f"--out={tmp_path / 'out'}")

    assert_one_error((code, err), "Lower --streams or --segment_len")


# This file stands for one that exists, and is not compressed.
WRONG = {
    "no file": ([], "pass one file"),
    "two files": (["a", "b"], "pass one file"),
    "missing": (["nowhere.txt"], "cannot read nowhere.txt"),
    "a directory": (["."], r"cannot read \."),
    "not compressed": (["--decompress", __file__], "got another format"),
    "no model": ([__file__], "--model must name"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_commands_are_one_error(tmp_path, words, message):
    code, _, err = programs.run("experiments.compress", *words, f"--out={tmp_path / 'out'}")
    assert_one_error((code, err), message)


def test_an_output_in_a_missing_directory_is_an_error(tmp_path):
    code, _, err = programs.run("experiments.compress", __file__, f"--out={tmp_path / 'no' / 'a'}")
    assert code == 1
    assert "must be in a directory that exists" in err


@pytest.mark.parametrize("direction", ["compress", "decompress"])
def test_a_stop_before_the_first_byte_writes_nothing(
    compressed, model, tmp_path, monkeypatch, direction
):
    """It comes while numbers are compared, which takes minutes for long segments."""
    text, file = compressed
    words = {"compress": [text, *SMALL], "decompress": ["--decompress", file]}[direction]
    # The request is made in an event of this test's own, because none can be taken back.
    monkeypatch.setattr(stop, "_stop_requested", threading.Event())
    stop.request_stop("test")

    code, out, err = programs.run(
        "experiments.compress", *words, f"--model={model}", f"--out={tmp_path / 'out'}"
    )

    assert code == 128 + signal.SIGTERM, err
    assert "in the probe of this machine's numbers, nothing was written" in out
    assert os.listdir(tmp_path) == []


# Many corrupted files, and files from another process


def corrupted(content, number, rng):
    """Returns the content with a flipped bit, cut off, without a byte, or with its ends swapped."""
    place = int(rng.integers(len(content)))
    match number % 4:
        case 0:
            flipped = content[place] ^ (1 << int(rng.integers(8)))
            return content[:place] + bytes([flipped]) + content[place + 1 :]
        case 1:
            return content[:place]
        case 2:
            return content[:place] + content[place + 1 :]
        case _:
            return content[place:] + content[:place]


@pytest.mark.full
def test_two_hundred_corrupted_files_are_one_error_each(model, tmp_path):
    """They come from one file of 10,000 bytes."""
    rng = np.random.default_rng(0)
    text = (TEXT * 3)[:10_000]
    (tmp_path / "text").write_bytes(text)
    file = tmp_path / "text.txl"
    code, _, err = compress_file(tmp_path / "text", f"--model={model}", f"--out={file}")
    assert code == 0, err

    content = file.read_bytes()
    corrupted_file = tmp_path / "corrupted.txl"
    for number in range(200):
        changed = corrupted(content, number, rng)
        # Swapped at place 0, or with equal bytes side by side, the content may be the same.
        if changed == content:
            continue
        corrupted_file.write_bytes(changed)
        code, err = decompress(corrupted_file, model, tmp_path / "out")
        assert code == 1, number
        assert err.startswith("error: "), (number, err)
        assert err.count("\n") == 1, (number, err)
        assert not (tmp_path / "out").exists(), number

    # The file itself was not the reason for the errors.
    assert decompress(file, model, tmp_path / "out") == (0, "")
    assert (tmp_path / "out").read_bytes() == text


def in_another_process(*words, content=None, **variables):
    """Returns the completed process of a command, whose standard input is `content`."""
    return subprocess.run(
        [sys.executable, "-m", "experiments.compress", *map(str, words)],
        input=content,
        capture_output=True,
        check=False,
        env=os.environ | ON_PATH | variables,
    )


@pytest.mark.full
def test_a_file_comes_back_in_another_process(model):
    """It is connected by pipes. By NPROC it would use three threads, but the file says one."""
    flags = [f"--model={model}", "--out=-"]
    made = in_another_process("-", *flags, *SMALL, "--threads=1", content=TEXT)
    assert made.returncode == 0, made.stderr
    header, _ = file_format.load(made.stdout, name="")
    assert header.coding.threads == 1

    again = in_another_process("--decompress", "-", *flags, content=made.stdout, NPROC="3")
    assert again.returncode == 0, again.stderr
    assert again.stdout == TEXT
