"""Tests that two processes of four devices do what one of eight does: train, stop, go on, score, write.

In float64: sums over devices are made in another order, and nothing else may differ.
"""

import json
import re
import shutil
import signal
import time

import numpy as np
import pytest

from support import processes, programs
from support.faults import arrays
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.sinks import MEASURED

STEPS = 16
TINY = [*programs.TINY, *programs.steps(STEPS, every=2), "--train.eval_every=4", "--train.checkpoint_every=4"]
TINY += ["--model.dtype=float64", "--train.batch_size=8", "--eval.batch_size=8", "--train.keep_checkpoints=4"]
TINY += ["--train.sample_every=4", "--generate.length=20", "--generate.samples=2"]
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], 2_000)))
    return path


@pytest.fixture(scope="module")
def start(text_file):
    """Starts a run, or another mode of it, in processes that have eight devices together."""

    def start(n_process, workdir, *flags):
        own = [*TINY, f"--data.file={text_file}", f"--cache_dir={text_file.parent}"]
        own = [] if any(flag.startswith("--mode") for flag in flags) else own
        command = ["-m", "experiments.text", *own, *flags, f"--workdir={workdir}"]
        return processes.start(*command, processes=n_process, devices=8 // n_process, JAX_ENABLE_X64="1")

    return start


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """The run of one process."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    [(code, _, err)] = processes.finish(start(1, workdir))
    assert code == 0, err
    return workdir


def wait_for_sample(workdir, step, started):
    """Returns once the run has written the sample of `step`."""
    until = time.monotonic() + processes.SECONDS
    while not (workdir / "samples" / f"step-{step}.txt").exists():
        running = time.monotonic() < until and all(process.poll() is None for process in started)
        assert running, processes.finish(started)
        time.sleep(0.02)


def assert_same_run(workdir, expected):
    """Records, results and the last checkpoint agree."""
    found, wanted = read_metrics(workdir), read_metrics(expected)
    for record, other in zip(found, wanted, strict=True):
        assert (record["kind"], record["step"]) == (other["kind"], other["step"])
        for name in record.keys() - {"kind", "time", *MEASURED}:
            assert record[name] == pytest.approx(other[name], rel=TOLERANCE), (record["kind"], record["step"], name)
    results, others = (json.loads((folder / "results.json").read_text()) for folder in (workdir, expected))
    for name in ("best_valid", "test"):
        assert results[name] == pytest.approx(others[name], rel=TOLERANCE)
    (step, found), (last, wanted) = (arrays(folder / "checkpoints" / "latest") for folder in (workdir, expected))
    for sampled in ("step-4.txt", f"step-{STEPS}.txt"):
        assert (workdir / "samples" / sampled).read_bytes() == (expected / "samples" / sampled).read_bytes()
    assert step == last == STEPS and found.keys() == wanted.keys() and len(found) > 10
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.full
def test_what_two_processes_began_one_ends_with_the_numbers_of_an_undisturbed_run(undisturbed, start, tmp_path):
    """A signal to the second process saves the same step in both; one process goes on from it."""
    started = start(2, tmp_path)
    wait_for_sample(tmp_path, 4, started)
    started[1].send_signal(signal.SIGTERM)
    (code_0, out_0, err_0), (code_1, out_1, err_1) = processes.finish(started)
    assert (code_0, code_1, out_1) == (143, 143, "") and "Traceback" not in err_0 + err_1, err_0 + err_1
    step = int(re.search(r"(?m)^stopped\D*(\d+)", out_0)[1])
    assert 4 <= step < STEPS
    assert re.search(r"\bdata 8\b.*\bfsdp 1\b.*\btensor 1\b.*\b2\b", out_0)
    newest = max(int(path.name) for path in (tmp_path / "checkpoints" / "latest").iterdir())
    assert newest == step and (tmp_path / "checkpoints" / "latest" / str(step) / "digests.json").exists()
    [(code, out, err)] = processes.finish(start(1, tmp_path))
    assert code == 0, err
    assert re.search(r"resum\w+\D*\d", out)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.nightly(part="long")
@pytest.mark.parametrize("flags", [[], ["--mesh.fsdp=2", "--mesh.tensor=2"]], ids=" ".join)
def test_two_processes_score_evaluate_and_write_as_one_does(undisturbed, start, tmp_path, flags):
    evaluate = ["--mode=eval", "--eval.stride=4", "--eval.mem_len=0", "--eval.same_length=false"]
    write = ["--mode=generate", "--generate.length=40", "--generate.samples=2", "--generate.prompt=one two three four"]
    scores, found = [], []
    for n_process in (1, 2):
        workdir = tmp_path / str(n_process)
        shutil.copytree(undisturbed, workdir)
        for job in (["--mode=score"], evaluate, write):
            ended = processes.finish(start(n_process, workdir, *job, *flags))
            assert {code for code, _, _ in ended} == {0}, ended
            assert all(out == "" for _, out, _ in ended[1:])
        lines = "".join((workdir / f"scores-{name}.tsv").read_text() for name in ("valid", "test")).splitlines()
        scores.append([float(line.split("\t")[2]) for line in lines if not line.startswith("index")])
        [sample] = workdir.glob("sample-seed*.txt")
        found.append((json.loads((workdir / "evaluation.json").read_text()), sample.read_bytes()))
    assert len(scores[0]) > 500
    np.testing.assert_allclose(scores[0], scores[1], rtol=TOLERANCE)
    for split in ("valid", "test"):
        assert found[0][0][split] == pytest.approx(found[1][0][split], rel=TOLERANCE)
    assert found[0][1] == found[1][1]
