"""Tests of `python -m experiments.compress`: files come back, and nothing else is ever written."""

import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import compress
from support import ON_PATH, drawn_run, programs, tiny_run
from txl_jax.compression import codec, file_format
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runtime import stop
from txl_jax.runtime.checkpoint import Checkpointer

TEXT = b"the cat sat on a mat, and the dog ran after it. " * 80
SMALL = ("--streams=4", "--segment_len=16", "--learning_rate=0.01")


def make_model(folder, **changes):
    """Returns the path of a run of bytes that predicts next to nothing before it learns."""
    config, corpus = drawn_run.on_text(folder, drawn_run.letters(), **changes)
    run, built = drawn_run.make(folder / "run", config, corpus)
    # Weights as they are drawn for other tests are sure of wrong bytes.
    weak = jax.tree.map(lambda leaf: 0.1 * leaf, tiny_run.params(built.model))
    with Checkpointer(run.best, keep=1, log=print) as best:
        best.save(drawn_run.STEP + 1, {"params": jax.device_put(weak)}, {})
        best.wait()
    return run.path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compressed(model, tmp_path_factory):
    """(text file, compressed file)."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text").write_bytes(TEXT)
    code, out, err = programs.run(
        "experiments.compress",
        folder / "text",
        f"--model={model}",
        f"--out={folder / 'text.txl'}",
        *SMALL,
    )
    assert (code, err) == (0, "")
    assert "result    3,840 bytes to" in out
    return folder / "text", folder / "text.txl"


def decompress(file, model, out):
    """Returns the exit code and the error."""
    code, _, err = programs.run(
        "experiments.compress", "--decompress", file, f"--model={model}", f"--out={out}"
    )
    return code, err


def rewritten(path, to, change):
    """Writes a compressed file with another header and the SHA-256 that fits. Returns its path."""
    header, payload = file_format.load(path.read_bytes(), name="")
    to.write_bytes(file_format.dump(change(header), payload))
    return to


def test_a_file_comes_back(compressed, model, tmp_path):
    _, file = compressed
    out = tmp_path / "again"
    assert decompress(file, model, out) == (0, "")
    assert out.read_bytes() == TEXT
    header, payload = file_format.load(file.read_bytes(), name="")
    assert len(payload) < 0.85 * len(TEXT)
    assert header.text_sha256 == hashlib.sha256(TEXT).hexdigest()


@pytest.mark.parametrize("n_bytes", [0, 1, 2000])
def test_what_does_not_shrink_is_stored(model, tmp_path, n_bytes):
    """It needs no model to come back."""
    noise = np.random.default_rng(0).bytes(n_bytes)
    (tmp_path / "noise").write_bytes(noise)
    flags = [f"--model={model}", f"--out={tmp_path / 'noise.txl'}", *SMALL]
    code, out, _ = programs.run("experiments.compress", tmp_path / "noise", *flags)
    assert code == 0
    assert "stored as it is" in out
    assert (tmp_path / "noise.txl").stat().st_size < n_bytes + 200
    code, _, _ = programs.run(
        "experiments.compress",
        "--decompress",
        tmp_path / "noise.txl",
        f"--out={tmp_path / 'again'}",
    )
    assert code == 0
    assert (tmp_path / "again").read_bytes() == noise


def test_nothing_is_overwritten(compressed, model, tmp_path):
    text, file = compressed
    before = file.read_bytes()
    code, _, err = programs.run(
        "experiments.compress", text, f"--model={model}", f"--out={file}", *SMALL
    )
    assert code == 1
    assert "nothing is overwritten" in err
    assert file.read_bytes() == before


def test_a_name_that_is_taken_meanwhile(tmp_path):
    """Another process may have made a file since the start."""
    (tmp_path / "out").write_bytes(b"theirs")
    with pytest.raises(Exception, match="nothing is overwritten"):
        compress.storage.write_new(str(tmp_path / "out"), b"ours")
    assert (tmp_path / "out").read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["out"]


# Changes of a header with a right SHA-256, and what the error says.
FORGED = {
    "text_bytes": (lambda h: dataclasses.replace(h, text_bytes=3839), "another SHA-256"),
    "text": (lambda h: dataclasses.replace(h, text_sha256="0" * 64), "another SHA-256"),
    "weights": (lambda h: dataclasses.replace(h, weights_sha256="0" * 64), "another model"),
    "probe": (lambda h: dataclasses.replace(h, probe_sha256="0" * 64), "computes other numbers"),
    "threads": (
        lambda h: dataclasses.replace(
            h, coding=dataclasses.replace(h.coding, threads=h.coding.threads + 1)
        ),
        r"must compute with \d+ threads, but JAX has started \d+",
    ),
    "learning_rate": (
        lambda h: dataclasses.replace(h, coding=dataclasses.replace(h.coding, learning_rate=1e-3)),
        "computes other numbers",
    ),
}


@pytest.mark.parametrize(("change", "message"), FORGED.values(), ids=FORGED.keys())
def test_a_forged_header_is_one_error(compressed, model, tmp_path, change, message):
    _, file = compressed
    forged = rewritten(file, tmp_path / "forged.txl", change)
    code, err = decompress(forged, model, tmp_path / "out")
    assert code == 1
    assert re.search(message, err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_another_processor_is_named(compressed, model, tmp_path):
    """If the numbers differ, the error says what else does."""
    _, file = compressed

    def change(header):
        environment = dataclasses.replace(header.environment, processor="x86_64-other")
        return dataclasses.replace(header, environment=environment, probe_sha256="0" * 64)

    code, err = decompress(rewritten(file, tmp_path / "a.txl", change), model, tmp_path / "out")
    assert code == 1
    assert "processor: x86_64-other there" in err


def test_a_processor_of_another_name_with_the_same_numbers(compressed, model, tmp_path):
    """Only the numbers decide: an update of the system may change the name."""
    _, file = compressed

    def change(header):
        environment = dataclasses.replace(header.environment, processor="x86_64-other")
        return dataclasses.replace(header, environment=environment)

    out = tmp_path / "out"
    assert decompress(rewritten(file, tmp_path / "a.txl", change), model, out) == (0, "")
    assert out.read_bytes() == TEXT


def test_another_model_is_one_error(compressed, tmp_path):
    _, file = compressed
    other = make_model(tmp_path, model__n_head=2)
    code, err = decompress(file, other, tmp_path / "out")
    assert code == 1
    assert "with another model than" in err
    assert not (tmp_path / "out").exists()


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

    def stopped(*_, **__):
        raise Interrupted("compressing")

    monkeypatch.setattr(codec, "compress", stopped)
    text, _ = compressed
    code, out, err = programs.run(
        "experiments.compress", text, f"--model={model}", "--out=-", *SMALL
    )
    assert out == ""
    assert "stopped   on request in compressing, nothing was written" in err
    # No signal was the reason here.
    assert code == 0


def test_too_little_memory_names_flags_that_help(compressed, model, tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise MemoryError("10 TB")

    monkeypatch.setattr(codec, "compress", too_large)
    text, _ = compressed
    code, _, err = programs.run(
        "experiments.compress", text, f"--model={model}", f"--out={tmp_path / 'out'}", *SMALL
    )
    assert code == 1
    assert "Lower --streams or --segment_len" in err
    assert err.count("\n") == 1


WRONG = {
    "no file": ([], "pass one file"),
    "two files": (["a", "b"], "pass one file"),
    "missing": (["nowhere.txt"], "cannot read nowhere.txt"),
    "a directory": (["."], r"cannot read \."),
    "not compressed": (["--decompress", __file__], "does not begin like one"),
    "no model": ([__file__], "--model must name"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_commands_are_one_error(tmp_path, words, message):
    code, _, err = programs.run("experiments.compress", *words, f"--out={tmp_path / 'out'}")
    assert code == 1
    assert re.search(message, err), err
    assert err.count("\n") == 1


def test_an_output_in_a_directory_that_is_missing(tmp_path):
    code, _, err = programs.run("experiments.compress", __file__, f"--out={tmp_path / 'no' / 'a'}")
    assert code == 1
    assert "must be in a directory that exists" in err


def test_a_stop_before_the_first_byte(compressed, model, tmp_path):
    """While a machine's numbers are compared, which takes minutes for long segments."""
    text, file = compressed
    for words in ((text, *SMALL), ("--decompress", file)):
        stop.request_stop("test")
        try:
            code, out, _ = programs.run(
                "experiments.compress", *words, f"--model={model}", f"--out={tmp_path / 'out'}"
            )
        finally:
            stop._stop_requested.clear()
        assert code == 128 + signal.SIGTERM
        assert "in the probe of this machine's numbers, nothing was written" in out
        assert os.listdir(tmp_path) == []


# With 200 damages in one process, and files of real size in another one.


@pytest.mark.full
def test_two_hundred_damages_are_one_error_each(model, tmp_path):
    """Of what 10,000 bytes became: flipped bits, cuts, and pieces that moved."""
    rng = np.random.default_rng(0)
    text = (TEXT * 3)[:10_000]
    (tmp_path / "text").write_bytes(text)
    file = tmp_path / "text.txl"
    code, _, _ = programs.run(
        "experiments.compress", tmp_path / "text", f"--model={model}", f"--out={file}", *SMALL
    )
    assert code == 0
    content = file.read_bytes()
    damaged = tmp_path / "damaged.txl"
    for number in range(200):
        place = int(rng.integers(len(content)))
        match number % 4:
            case 0:
                flipped = content[place] ^ (1 << int(rng.integers(8)))
                changed = content[:place] + bytes([flipped]) + content[place + 1 :]
            case 1:
                changed = content[:place]
            case 2:
                changed = content[:place] + content[place + 1 :]
            case _:
                changed = content[place:] + content[:place]
        if changed == content:
            continue
        damaged.write_bytes(changed)
        code, err = decompress(damaged, model, tmp_path / "out")
        assert code == 1, number
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert not (tmp_path / "out").exists()
    # The file itself was not the reason.
    assert decompress(file, model, tmp_path / "out") == (0, "")
    assert (tmp_path / "out").read_bytes() == text


def in_another_process(*words, content=None, **variables):
    return subprocess.run(
        [sys.executable, "-m", "experiments.compress", *map(str, words)],
        input=content,
        capture_output=True,
        check=False,
        env=os.environ | ON_PATH | variables,
    )


@pytest.mark.full
def test_a_file_comes_back_in_another_process(model):
    """Which had another number of threads, and is connected by pipes."""
    flags = [f"--model={model}", "--out=-"]
    made = in_another_process("-", *flags, *SMALL, "--threads=1", content=TEXT)
    assert made.returncode == 0, made.stderr
    header, _ = file_format.load(made.stdout, name="")
    assert header.coding.threads == 1
    again = in_another_process("--decompress", "-", *flags, content=made.stdout, NPROC="3")
    assert again.returncode == 0, again.stderr
    assert again.stdout == TEXT
