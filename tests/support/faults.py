"""Starts programs with injected faults and compares the files of their runs: support of
`tests/faults`.

The run does all kinds of work: it makes the records and tokens of a miniature of the Penn Treebank,
trains, evaluates and saves a model, and scores the test split. Its numbers are compared to the last
bit.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from support import ROOT, programs
from support.runs import numbers
from txl_jax.runtime import checkpoint

STEPS = 24
# Evaluations and checkpoints come at different steps, and all meet at 24. Dropout, for its keys.
FLAGS = [
    *programs.TINY,
    *programs.steps(STEPS, every=4),
    "--train.eval_every=8",
    "--train.checkpoint_every=6",
]
FLAGS += ["--model.dropout.rate=0.2", "--eval.batch_size=16"]
# With these, the loss is worse at step 16 than at step 8, and best at step 24.
FLAGS += ["--seed=9", "--optimizer.learning_rate=0.14"]
# A resumed run continues the mean of the weights, begun after an evaluation that is not the best.
FLAGS += ["--average.start_step=16", "--average.ema_decay=0.9", "--average.lr_scale=0.5"]
# Step of the first checkpoint of a run of two processes.
SAVED = 4
# Progress lines come less often than checkpoints, which then have running totals.
FLAGS_OF_TWO = [*programs.TINY, *programs.steps(12, every=6), f"--train.checkpoint_every={SAVED}"]
FLAGS_OF_TWO += ["--model.dropout.rate=0.2", "--train.batch_size=8", "--eval.batch_size=8"]
FLAGS_OF_TWO += ["--average.start_step=2", "--average.ema_decay=0.9", "--data.roll=rows"]
KILLED = -signal.SIGKILL
MEMBERS = ("seed=1", "seed=2 model.dropout.rate=0.3")  # Members of the ensemble.
PATIENCE = 120  # Seconds that one start may take.
NIGHTLY = pytest.mark.nightly(part="faults")


def few_or_all(few, every):
    """A test's two forms: with a few of its faults, and nightly with all of them."""
    return [
        pytest.param(few, id="few", marks=pytest.mark.full),
        pytest.param(every, id="all", marks=NIGHTLY),
    ]


class Victim:
    """A start of a program, with the faults of `victim.py` that happen to it."""

    def __init__(self, place, *flags, faults, program="ptb"):
        self._marks, marks = os.pipe()
        # As a user starts it: jax, which is imported here, sets this variable for itself.
        environment = dict(os.environ)
        environment.pop("TPU_LIBRARY_PATH", None)
        victim = str(Path(__file__).with_name("victim.py"))
        command = [sys.executable, victim, str(marks), json.dumps(faults), program, *flags]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | place.environment,
            pass_fds=[marks],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(marks)
        self.pid = self._process.pid
        self._received = b""

    def wait_for(self, mark):
        """Returns once the program has come to a mark, and fails if it ends before."""
        while f"{mark}\n".encode() not in self._received:
            lines = os.read(self._marks, 4096)
            assert lines, f"it ended before {mark!r}: {self._process.communicate()}"
            self._received += lines

    def send(self, signal_number):
        self._process.send_signal(signal_number)

    def end(self):
        try:
            out, err = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # It prints the stack of each thread.
            raise AssertionError(
                f"it did not end in {PATIENCE} s: {self._process.communicate()}"
            ) from None
        os.close(self._marks)
        return subprocess.CompletedProcess(self._process.args, self._process.returncode, out, err)


@dataclasses.dataclass(frozen=True)
class Place:
    """A directory of runs that share a text and a compilation cache."""

    folder: Path
    environment: dict[str, str]

    def train(self, name, *faults, program="ptb", **fault):
        """Starts the run `name`, or resumes it.

        Faults are objects as `victim.py` takes them. One fault can be passed by its parts.
        """
        flags = [*FLAGS]
        if program == "ensemble":
            flags += ["--data.corpus=ptb", *(f"--ensemble_member={member}" for member in MEMBERS)]
        if fault:
            faults = [*faults, fault]
        return self._start(name, *flags, faults=faults, program=program)

    def score(self, name, **fault):
        faults = [fault] if fault else []
        return self._start(name, "--mode=eval", faults=faults)

    def _start(self, name, *flags, **options):
        """Each run has a cache of its own, so that each prepares its text."""
        folders = [
            f"--data_dir={self.folder / 'data'}",
            f"--cache_dir={self.cache(name)}",
            f"--workdir={self.workdir(name)}",
        ]
        return Victim(self, *flags, *folders, **options)

    def workdir(self, name):
        return self.folder / name / "run"

    def cache(self, name):
        return self.folder / name / "cache"


def finished(victim):
    ended = victim.end()
    assert ended.returncode == 0, ended.stderr
    return ended


def command_of_two(folder, workdir):
    """Words for Python that start a run, or resume it, on the words.txt of a directory."""
    flags = [
        f"--data.file={folder / 'words.txt'}",
        f"--cache_dir={folder}",
        f"--workdir={workdir}",
    ]
    return ["-m", "experiments.text", *FLAGS_OF_TWO, *flags]


def result(workdir, name="results.json"):
    """Returns a file of results without its date."""
    results = json.loads((workdir / name).read_text())
    results.pop("date", None)
    return results


def arrays(folder):
    """Step and arrays of the latest checkpoint in a directory, which must be whole."""
    step, latest = checkpoint.find_steps(folder)[0]
    assert checkpoint.find_damage(latest) is None

    reader = ocp.PyTreeCheckpointer()
    path = epath.Path(latest) / "state"
    saved = reader.metadata(path).item_metadata.tree
    on_host = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    leaves = jax.tree.leaves_with_path(reader.restore(path, restore_args=on_host))
    return step, {jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in leaves}


def assert_equal_runs(workdir, undisturbed):
    """The curve, the scores, and everything in the latest checkpoints are the same to the last
    bit.
    """
    assert numbers(workdir) == numbers(undisturbed)
    assert result(workdir) == result(undisturbed)

    folders = {path.parents[1] for path in (undisturbed / "checkpoints").rglob("digests.json")}
    names = sorted(str(path.relative_to(undisturbed)) for path in folders)
    assert len(names) > 1, "no best parameters"
    for folder in names:
        step, by_name = arrays(workdir / folder)
        expected_step, expected_by_name = arrays(undisturbed / folder)
        assert step == expected_step, folder
        assert by_name.keys() == expected_by_name.keys() != set(), folder
        for name, expected in expected_by_name.items():
            assert by_name[name].tobytes() == expected.tobytes(), f"{folder} {name}"
