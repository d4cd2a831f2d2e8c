"""`python -m launch.sweep` with made-up trainings, and heartbeats of a second: `python -m
support.sweep_worker`.

A training counts to train.steps in its directory, saves on SIGTERM, and resumes from there. The
file `starts` has the step of each start with its GPU, `ends` a line for each end. The loss depends
on seed and learning rate, and a training with a loss above 90 fails.
"""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

import optuna
import sqlalchemy

from launch import study, sweep, sweep_file
from support import recorded_run, runs
from txl_jax.errors import UserError
from txl_jax.runs.run import TextInfo, holds_run

TRAINING = """
import fcntl, json, os, signal, sys, time
folder, steps, loss = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
os.chdir(folder)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
lock = open(".lock", "a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # A second training fails.
step = int(open("step").read()) if os.path.exists("step") else 0
with open("starts", "a") as starts:
    starts.write(f"{step} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
if loss > 90:
    sys.exit("error: no")
while step < steps:
    step += 1
    time.sleep(float(os.environ.get("STEP_SECONDS", 0.005)))
    with open("metrics.jsonl", "a") as metrics:
        kind = "valid" if step % 5 == 0 else "train"
        record = {"kind": kind, "step": step, "loss": loss + 1 / step}
        metrics.write(json.dumps(record) + "\\n")
    with open("new", "w") as new:
        new.write(str(step))
    os.rename("new", "step")
    if asked:
        time.sleep(float(os.environ.get("SAVE_SECONDS", 0)))
        sys.exit(143)
with open("new", "w") as results:
    scores = {"best_valid": {"loss": loss + 1 / steps}, "test": {"loss": loss}}
    json.dump({"steps": steps} | scores, results)
os.rename("new", "results.json")
open("ends", "a").write("x\\n")
"""


# Real trainings of seconds, in a directory WORK with words.txt.
TINY = """
program = "text"
[base]
data.file = "WORK/words.txt"
cache_dir = "WORK/cache"
model = { n_layer = 1, d_model = 16, n_head = 2, d_head = 8, d_inner = 16 }
optimizer.warmup_steps = 10
train.batch_size = 4
train.segment_len = 16
train.mem_len = 16
train.segments_per_call = 2
train.steps = 1200
train.log_every = 10
train.eval_every = 100
train.checkpoint_every = 600
eval = { batch_size = 4, segment_len = 16, mem_len = 32 }
"""


FILE = """
program = "ptb"
flagfile = "ptb_small"
[base]
seed = 1
train.steps = 20
optimizer.warmup_steps = 10
"""


class Run(sweep_file.SweepRun):
    @property
    def results(self):
        path = Path(self.folder, "results.json")
        if not path.exists():
            return None
        return json.loads(path.read_text())


def loss_of(config):
    """The loss of a training with these settings, before its steps count."""
    return config.seed + 10 * config.optimizer.learning_rate


def install(patch=setattr):
    """Makes up the trainings of sweeps, unless REAL_TRAININGS is set.

    Dead workers are noticed soon.
    """
    patch(study, "GRACE_SECONDS", 3)
    patch(study, "POLL_SECONDS", 0.1)
    if os.environ.get("REAL_TRAININGS"):
        return
    real = sweep_file.Sweep.run

    def run(self, values):
        made = real(self, values)
        if not holds_run(made.folder):
            with contextlib.suppress(UserError):  # Another worker records it at this moment.
                text = TextInfo("ptb", "PTB", "d" * 64, recorded_run.VOCABULARY)
                runs.record(made.folder, made.config, text)
        words = [made.folder, str(made.config.train.steps), str(loss_of(made.config))]
        fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        fields["command"] = (sys.executable, "-ISc", TRAINING, *words)
        return Run(**fields)

    patch(sweep_file.Sweep, "run", run)


def opened(url):
    """The study in a database, through a separate connection."""
    storage = optuna.storages.RDBStorage(url, engine_kwargs={"poolclass": sqlalchemy.pool.NullPool})
    [name] = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


def trials(url):
    return opened(url).trials


def end_running_trials(url):
    """Ends the trials of all workers, as a worker ends the trials of a dead worker.

    Returns their numbers.
    """
    open_study = opened(url)
    numbers = []
    for trial in open_study.trials:
        if trial.state is optuna.trial.TrialState.RUNNING:
            open_study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            numbers.append(trial.number)
    return numbers


def folders(out):
    return sorted(path for path in out.iterdir() if path.is_dir())


def starts(folder):
    """The step of each start of a training."""
    path = folder / "starts"
    if not path.exists():
        return []
    return [int(line.split()[0]) for line in path.read_text().splitlines()]


def check_each_trained_once(out, count, steps=20):
    """Asserts that there are so many runs, each with every step once, in order, and one end."""
    assert len(folders(out)) == count
    for folder in folders(out):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        recorded = [json.loads(line)["step"] for line in lines]
        assert recorded == list(range(1, steps + 1)), folder
        assert (folder / "ends").read_text() == "x\n", folder


if __name__ == "__main__":
    install()
    sys.exit(sweep.main(sys.argv))
