"""Tests sweeps: the runs of a file, random search, mistakes, a sweep that is stopped and resumed, tables."""

import csv
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from launch import sweep
from support import ROOT, recorded_run, runs, shell
from txl_jax.config import config_tree
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import LogError
from txl_jax.runs.records import read_runs
from txl_jax.runs.run import Run, TextInfo
from txl_jax.runtime.log import read_metrics

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


@pytest.fixture
def write(tmp_path):
    """Writes the file of a sweep, on tiny runs unless given others; returns its path."""
    (tmp_path / "words.txt").write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three"], 12_000)))

    def make(text, base=TINY):
        (tmp_path / "sweep.toml").write_text(base.replace("WORK", str(tmp_path)) + text)
        return tmp_path / "sweep.toml"

    return make


def read(path):
    return sweep.read(path, path.parent / "out")


def names(path):
    return [run.name for run in read(path).runs]


def test_a_grid_is_every_combination_and_names_contain_the_differences(write):
    found = read(write("[grid]\nseed = [1, 2]\nmodel.dropout.rate = [0.0, 0.5]\n"))
    assert [run.name for run in found.runs] == [
        f"seed={seed}+dropout.rate={rate}" for seed in (1, 2) for rate in (0.0, 0.5)
    ]
    last = found.runs[3]
    assert (last.config.seed, last.config.model.dropout.rate, last.config.train.steps) == (2, 0.5, 1200)
    assert list(last.command[1:3]) == ["-m", "experiments.text"]
    assert list(last.command[-3:]) == ["--seed=2", "--model.dropout.rate=0.5", f"--workdir={last.folder}"]


def test_each_run_is_combined_with_the_grid(write):
    text = (
        '[grid]\nseed = [1, 2]\n[[runs]]\nmodel.d_inner = 8\n[[runs]]\nname = "deep one"\nmodel.n_layer = 3\n[[runs]]\n'
    )
    of_runs = ("d_inner=8+", "deep_one+", "")
    assert names(write(text)) == [f"{name}seed={seed}" for name in of_runs for seed in (1, 2)]
    alike = names(write("[[runs]]\ntrain.mem_len = 8\n[[runs]]\neval.mem_len = 8\n"))
    assert alike == ["train.mem_len=8", "eval.mem_len=8"], "names that end alike are written out"


def test_values_become_flags_after_the_flagfile(write):
    found = read(write('[[runs]]\nmodel.untie_r = true\nmodel.cutoffs = [9, 20]\ndata.tokenizer.newlines = "drop"\n'))
    words = found.runs[0].command
    assert {"--model.untie_r=true", "--model.cutoffs=9,20", "--data.tokenizer.newlines=drop"} <= set(words)
    base = 'program = "ptb"\nflagfile = "ptb_small"\nbase.train.steps = 2000\n'
    [run] = read(write("[grid]\nseed = [1]\n", base=base)).runs
    assert list(run.command[3:5]) == ["--flagfile=ptb_small", "--train.steps=2000"] and run.config.model.n_layer == 4


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[grid]\n", r"\bgrid\b.*\bruns\b"),
        ("[grid]\nseed = 3\n", r"\bseed = 3\b"),
        ("[gird]\nseed = [1]\n", r"'gird'"),
        ("[grid]\nmodel.n_layr = [1, 2]\n", r"--model\.n_layr\b"),
        ("[grid]\ntrain.steps = [1201]\n", r"train\.steps\D*\b1201\b"),
        ("[[runs]]\nname = 'a'\n[[runs]]\nname = 'a'\nseed = 2\n", r"\ba\b(?!.*\bseed\b)"),
        ("[[runs]]\nname = 'a'\n[[runs]]\nname = 'b'\n", r"\ba\b.*\bb\b"),
        ("[grid]\nseed = [1]\n[[runs]]\nseed = 2\n", r"\bseed\b.*\bgrid\b.*\bruns\b"),
        ("[grid]\ndata.corpus = ['ptb']\n", r"corpus=ptb: .*data\.file\b"),
        ("[grid\n", r"sweep\.toml\b.*\bTOML\b"),
        ("program = 'text'\nflagfile = 'ptb_small'\ngrid.seed = [1]\n", "experiments.ptb"),
        ("program = 'ptb'\nbase.data.file = 'a'\ngrid.seed = [1]\n", r"data\.file\b.*\bptb\b"),
        ("program = 'ptp'\ngrid.seed = [1]\n", r"'ptp'"),
        ("[random]\nsamples = 3\n", r"no range"),
        ("[random]\nsamples = 0\nmodel.dropout.rate = { uniform = [0, 0.5] }\n", r"samples = 0"),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { normal = [0, 0.5] }\n", r"rate\.normal"),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { uniform = [0.5, 0] }\n", r"\[0\.5, 0\].*lower"),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { log = [0, 0.5] }\n", r"above 0"),
        (
            "[random]\nsamples=2\nmodel.n_layer = {uniform = [1, 9]}\n[grid]\nmodel.n_layer = [2]\n",
            r"n_layer.*grid.*random",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(write, capsys, text, pattern):
    path = write("", base=text) if text.startswith("program") else write(text)
    assert sweep.main(["sweep", str(path), f"--out={path.parent / 'out'}"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and re.search(pattern, err), err
    assert not (path.parent / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [(["FILE"], "--out"), (["none", "--out=OUT"], "none"), (["FILE", "--out=OUT", "--with=--gpus=2"], "--with")],
)
def test_mistakes_on_the_command_line_too(write, capsys, words, named):
    path = write("[grid]\nseed = [1]\n")
    words = [word.replace("FILE", str(path)).replace("OUT", str(path.parent / "out")) for word in words]
    assert sweep.main(["sweep", *words]) == 2
    assert named in capsys.readouterr().err


def printed(capsys, path, *words):
    assert sweep.main(["sweep", str(path), f"--out={path.parent / 'out'}", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_printed_for_a_shell_for_slurm_and_for_tpus(write, capsys):
    path = write("[grid]\nseed = [1, 2]\n")
    lines = printed(capsys, path, "--dry_run").splitlines()
    assert [shlex.split(line) for line in lines] == [list(run.command) for run in read(path).runs]
    script = printed(capsys, path, "--print=slurm", "--with=--gpus=2 --time=1:00:00")
    assert "#SBATCH --array=0-1" in script and "#SBATCH --time=1:00:00" in script and not shell.findings(script)
    assert f"  1) srun --cpus-per-task=8 {shlex.join(['python', *read(path).runs[1].command[1:]])} ;;" in script
    lines = printed(capsys, path, "--print=tpu", "--with=--zone=z --type=v6e-8").splitlines()
    assert lines[1].startswith("launch/tpu.sh watch txl-seed-2 --zone=z --type=v6e-8 -- python -m experiments.text ")


def test_a_long_name_is_cut_for_a_tpu_and_stays_its_own():
    names = [f"learning_rate=0.00025+dropout=0.1+segment_len=150+mem_len=150+seed={seed}" for seed in (1, 2)]
    cut = [sweep._tpu_name(name) for name in names]
    assert cut[0] != cut[1] and all(len(name) <= 61 for name in cut)
    assert all(re.fullmatch(r"txl-learning-rate-0-00025-[-a-z0-9]*[a-z0-9]", name) for name in cut)
    assert sweep._tpu_name("Größe=1+seed=2") == "txl-gr-e-1-seed-2"


def table(folder):
    """The rows of results.csv, by run."""
    with open(folder / "results.csv", newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


@pytest.mark.full
def test_a_sweep_is_stopped_resumed_and_summarized(write, capsys):
    """The run is stopped on the way, and finishes at the second call."""
    path = write("[grid]\nseed = [1]\n")
    out = path.parent / "out"
    command = [sys.executable, "-m", "launch.sweep", str(path), f"--out={out}"]
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes)
    while len(read_metrics(out / "seed=1")) <= 3:
        time.sleep(0.05)
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM and not err, err
    state = table(out)["seed=1"]["state"]
    step = int(re.fullmatch(r"stopped\D*(\d+)", state)[1])
    assert 0 < step < 1200 and (out / "seed=1" / "checkpoints" / "latest" / str(step)).is_dir()
    printed(capsys, path)
    assert re.search(rf"resum\w+\D*\b{step}\b", (out / "seed=1" / "sweep.log").read_text())
    results = json.loads((out / "seed=1" / "results.json").read_text())
    row = table(out)["seed=1"]
    assert row["state"] == "finished" and row["steps"] == "1200" and row["measure"] == "bpc"
    for name in ("test", "best_valid"):
        assert float(row[name]) == pytest.approx(results[name]["bpc"])
    assert float(row["seconds"]) > 1
    before = (out / "seed=1" / "log.txt").stat().st_mtime_ns
    printed(capsys, path)
    assert (out / "seed=1" / "log.txt").stat().st_mtime_ns == before, "a finished run is not opened"


def pool(path, *scripts, slots=(None,)):
    """A pool of runs that do something else: scripts of Python, which are given the run's folder."""
    found = read(path)
    runs = [
        dataclasses.replace(run, command=(sys.executable, "-c", script, str(run.folder)))
        for run, script in zip(found.runs, scripts, strict=True)
    ]
    found = dataclasses.replace(found, runs=tuple(runs))
    return found, sweep._Pool(found, slots=slots)


TWO, THREE = "[grid]\nseed = [1, 2]\n", "[grid]\nseed = [1, 2, 3]\n"


@pytest.mark.full
def test_failed_runs_are_reported_and_tried_again(write, capsys):
    path = write(TWO)
    for times in (1, 2):
        found, started = pool(path, *["import sys; sys.exit('error: no')"] * 2)
        started.run()
        assert sweep.write(found, Path(found.runs[0].folder).parent) == 1
        assert capsys.readouterr().out.count("| failed: error: no |") == 2
        assert (Path(found.runs[1].folder) / "sweep.log").read_text() == "error: no\n" * times


def test_states_are_read_from_the_folders(write):
    run = read(write("[grid]\nseed = [1]\n")).runs[0]
    assert run.state == "not started"
    Path(run.folder).mkdir(parents=True)
    for code, state in ((1, "failed: exit code 1"), (-signal.SIGKILL, "failed: killed by SIGKILL")):
        (Path(run.folder) / "sweep.log").touch()
        run.note_end(seconds=2.0, code=code)
        assert run.state == state
    assert json.loads((Path(run.folder) / "sweep.json").read_text())["seconds"] == 4.0
    with Run.open(run.folder) as held:
        held.claim()
        assert re.fullmatch(r"running\D*\b0", run.state)
    (Path(run.folder) / "sweep.json").write_text("{")
    assert re.fullmatch(r"stopped\D*\b0", run.state)


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("{", False),
        ('{"steps": 1200, "eval": EVAL}', True),
        ('{"steps": 600, "eval": EVAL}', False),  # Of the same run, before it was given more steps.
        ('{"steps": 1200, "eval": {"eval.mem_len": 64}}', False),
    ],
)
def test_damaged_results_and_those_of_other_settings_are_none(write, text, finished):
    run = read(write("[grid]\nseed = [1]\n")).runs[0]
    words = WordVocabulary(("<eos>", "one", "<unk>"))
    runs.record(run.folder, run.config, TextInfo("text", "own text", "d" * 64, words))
    evaluation = json.dumps(config_tree.to_dict(run.config.eval))
    (Path(run.folder) / "results.json").write_text(text.replace("EVAL", evaluation))
    assert (run.results is not None) == finished


def test_a_sweep_compares_a_run_with_its_record_as_the_program_does(write):
    """A flagfile's sizes yield to those of the weights, and its warm-up to a short training or to the record."""
    small = 'program = "text"\nflagfile = "small"\n[base]\ndata.file = "WORK/words.txt"\n'

    def read_one(text):
        return read(write(f"[[runs]]\nname = 'a'\n{text}", base=small)).runs[0]

    run = read_one("train.steps = 100\n")
    assert run.config.optimizer.warmup_steps == 10
    words = WordVocabulary(("<eos>", "one", "<unk>"))
    info, results = TextInfo("text", "own text", "d" * 64, words), Path(run.folder) / "results.json"
    runs.record(run.folder, run.config, info)
    results.write_text(json.dumps({"steps": 100, "eval": config_tree.to_dict(run.config.eval)}))
    assert run.results is not None
    longer = read_one("train.steps = 200\n")
    assert longer.config == config_tree.replace(run.config, {"train.steps": 200}) and longer.results is None
    shutil.rmtree(run.folder)
    tuned = read_one("init_from = 'weights'\ntrain.steps = 100\n")
    runs.record(run.folder, config_tree.replace(tuned.config, {"model.n_layer": 2, "model.n_head": 3}), info)
    results.write_text(json.dumps({"steps": 100, "eval": config_tree.to_dict(run.config.eval)}))
    tuned = read_one("init_from = 'weights'\ntrain.steps = 100\n")
    assert (tuned.config.model.n_layer, tuned.config.model.n_head) == (2, 3) and tuned.results is not None


def test_a_run_that_diverged_has_ended_and_says_so(write):
    run = read(write("[grid]\nseed = [1]\n")).runs[0]
    runs.record(run.folder, run.config, TextInfo("text", "own text", "d" * 64, recorded_run.VOCABULARY))
    scores = {"best_valid": {"loss": 5.0}, "test": {"loss": 30.0}}
    results = {"steps": 1200, "eval": config_tree.to_dict(run.config.eval), **scores}
    (Path(run.folder) / "results.json").write_text(json.dumps(results))
    row = run.row([])
    assert run.state == row["state"] == "diverged" and row["test"] == math.inf and row["best_valid"] < 150


@pytest.mark.full
def test_no_run_outlives_a_sweep_that_breaks_off(write, monkeypatch):
    _, started = pool(write(TWO), "import time; time.sleep(60)", "", slots=[None, None])
    monkeypatch.setattr(sweep.Run, "note_end", mock.Mock(side_effect=LogError("no space")))
    with pytest.raises(LogError):
        started.run()
    assert [process.poll() for process in started._running] == [-signal.SIGTERM]


@pytest.mark.full
def test_a_run_that_is_going_on_is_left_alone(write, capsys):
    """A run of another sweep, for example; it is no failure."""
    found, started = pool(write(TWO), "", "")
    Path(found.runs[0].folder).mkdir(parents=True)
    with Run.open(found.runs[0].folder) as held:
        held.claim()
        started.run()
        output = capsys.readouterr().out
    assert re.findall(r"(?m)^started +(.*)", output) == ["seed=2"] and "seed=1 is running" in output


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_reaches_each_run_once_and_no_other_is_started(write, name):
    """A terminal that is closed counts as SIGTERM, which is what runs understand."""
    script = (
        "import os, pathlib, signal, sys, time\n"
        "got = pathlib.Path(sys.argv[1], 'got')\n"
        "[signal.signal(n, lambda n, _: got.open('a').write(signal.Signals(n).name)) for n in (1, 2, 15)]\n"
        f"os.kill(os.getppid(), signal.{name})\n"
        "time.sleep(0.5)"
    )
    found, started = pool(write(THREE), script, *["import time; time.sleep(9)"] * 2, slots=[None, None])
    started.run()
    assert started.signal_number == signal.Signals[name]
    assert (Path(found.runs[0].folder) / "got").read_text() == name.replace("HUP", "TERM")
    assert not Path(found.runs[2].folder).exists()


@pytest.mark.full
def test_gpus_are_shared_out(write):
    """Two GPUs for three runs: the first run waits for the third, which takes the second's."""
    script = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    waits = "\nwhile not os.path.exists(sys.argv[1].replace('seed=1', 'seed=3')): time.sleep(0.01)"
    found, started = pool(write(THREE), script + waits, script, script, slots=["4", "7"])
    started.run()
    assert [(Path(run.folder) / "sweep.log").read_text() for run in found.runs] == ["4\n", "7\n", "7\n"]


# Random search


def draw(samples=400, seed=0, **ranges):
    return sweep.drawn({"samples": samples, "seed": seed} | ranges)


def test_values_are_drawn_from_their_ranges():
    points = draw(
        optimizer={"learning_rate": {"log": [1e-4, 1e-2]}},
        model={"dropout": {"rate": {"uniform": [0, 0.3]}}, "n_layer": {"uniform": [2, 5]}},
    )
    rate, dropout, n_layer = (np.array([point[name] for point in points]) for name in points[0])
    np.testing.assert_allclose(np.quantile(rate, [0, 0.25, 0.75, 1]), [1e-4, 10**-3.5, 10**-2.5, 1e-2], rtol=0.25)
    np.testing.assert_allclose(np.quantile(dropout, [0, 0.25, 0.75, 1]), [0, 0.075, 0.225, 0.3], atol=0.02)
    assert np.bincount(n_layer)[2:].min() > 70 and set(n_layer.tolist()) == {2, 3, 4, 5}
    assert abs(np.corrcoef(np.log(rate), dropout)[0, 1]) < 0.15


def test_draws_depend_on_their_seed_number_and_setting_alone():
    one = {"optimizer": {"learning_rate": {"log": [1e-4, 1e-2]}}}
    two = one | {"model": {"dropout": {"rate": {"uniform": [0, 0.3]}}}}
    rates = [point["optimizer.learning_rate"] for point in draw(5, **one)]
    assert [point["optimizer.learning_rate"] for point in draw(9, **two)][:5] == rates
    assert [point["optimizer.learning_rate"] for point in draw(5, seed=1, **one)] != rates


def test_equal_draws_are_one_run_and_each_goes_with_the_grid(write):
    path = write("[random]\nsamples = 30\nmodel.n_layer = { uniform = [1, 3] }\n[grid]\nseed = [1, 2]\n")
    runs = read(path).runs
    assert sorted(run.name for run in runs) == [f"n_layer={n}+seed={seed}" for n in (1, 2, 3) for seed in (1, 2)]
    assert {run.config.model.n_layer for run in runs} == {1, 2, 3}


# Tables


def test_a_table_of_any_runs(tmp_path, capsys):
    for seed in (1, 2):
        recorded_run.make(tmp_path / "slurm" / f"job-{seed}", seed=seed)
    recorded_run.make(tmp_path / "half", seed=3, done=500)
    words = ["sweep", "--table", str(tmp_path / "slurm"), str(tmp_path / "half"), f"--out={tmp_path / 'tables'}"]
    assert sweep.main(words) == 0
    rows = table(tmp_path / "tables")
    assert list(rows) == ["job-1", "job-2", "half"] and rows["half"]["state"] == "500 of 1,000 updates"
    for run in read_runs([str(tmp_path / "slurm")]):
        assert float(rows[run.name]["test"]) == pytest.approx(run.row([])["test"])
    assert "± " in capsys.readouterr().out and (tmp_path / "tables" / "means.csv").exists()
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for name, message in (("empty", r"config\.json"), ("none", "no folder")):
        assert sweep.main(["sweep", "--table", str(tmp_path / name)]) == 2
        assert re.search(f"{tmp_path / name}.*{message}", capsys.readouterr().err)
