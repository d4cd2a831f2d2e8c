"""Tests sweeps: the runs of a file, random search, mistakes, tables, and a study of a real
training.
"""

import csv
import dataclasses
import datetime
import json
import math
import re
import shlex
import signal
from pathlib import Path

import pytest
import sqlalchemy

from launch import sweep, sweep_file
from support import programs, recorded_run, runs
from support.sweep_worker import TINY
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.runs.run import Run, TextInfo
from txl_jax.runs.run_tables import read_runs

SAMPLED = "[sampler]\nname = 'TPESampler'\n[random]\nsamples = 2\nmodel.d_head.log = [1, 2]\n"
ONE_RUN = "[grid]\nseed = [1]\n"
TWO_RUNS = "[grid]\nseed = [1, 2]\n"


@pytest.fixture
def write(tmp_path):
    """Writes the file of a sweep, by default on tiny runs. Returns its path."""
    programs.write_words(tmp_path, 12_000)

    def write_file(text, base=TINY):
        path = tmp_path / "sweep.toml"
        path.write_text(base.replace("WORK", str(tmp_path)) + text)
        return path

    return write_file


@pytest.fixture
def one_run(write):
    """The only run of a sweep."""
    [run] = read(write(ONE_RUN))
    return run


def read(path):
    """The runs of a file."""
    return list(sweep_file.Sweep(path, str(path.parent / "out")).runs.values())


def names(path):
    """The names of a file's runs."""
    return [run.name for run in read(path)]


def sweep_of(path, *words):
    """Runs the command on a file, with the output next to it. Returns its exit code."""
    return sweep.main(["sweep", str(path), f"--out={path.parent / 'out'}", *words])


def error_of(capsys):
    """The error message that was printed, and nothing else."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    return err


def test_a_grid_is_every_combination_and_names_contain_the_differences(write):
    grid = read(write("[grid]\nseed = [1, 2]\nmodel.dropout.rate = [0.0, 0.5]\n"))
    assert [run.name for run in grid] == [
        "seed=1+dropout.rate=0.0",
        "seed=1+dropout.rate=0.5",
        "seed=2+dropout.rate=0.0",
        "seed=2+dropout.rate=0.5",
    ]

    last = grid[3]
    assert last.config.seed == 2
    assert last.config.model.dropout.rate == 0.5
    assert last.config.train.steps == 1200
    assert list(last.command[1:3]) == ["-m", "experiments.text"]
    assert list(last.command[-3:]) == [
        "--seed=2",
        "--model.dropout.rate=0.5",
        f"--workdir={last.folder}",
    ]


def test_the_file_may_begin_with_a_byte_order_mark(write):
    path = write(TWO_RUNS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert names(path) == ["seed=1", "seed=2"]


def test_each_run_is_combined_with_the_grid(write):
    text = (
        "[grid]\nseed = [1, 2]\n"
        "[[runs]]\nmodel.d_inner = 8\n"
        '[[runs]]\nname = "deep one"\nmodel.n_layer = 3\n'
        "[[runs]]\n"
    )
    assert names(write(text)) == [
        "d_inner=8+seed=1",
        "d_inner=8+seed=2",
        "deep_one+seed=1",
        "deep_one+seed=2",
        "seed=1",
        "seed=2",
    ]


def test_names_that_end_alike_are_written_out(write):
    text = "[[runs]]\ntrain.mem_len = 8\n[[runs]]\neval.mem_len = 8\n"
    assert names(write(text)) == ["train.mem_len=8", "eval.mem_len=8"]


def test_values_become_flags(write):
    text = (
        "[[runs]]\nmodel.untie_r = true\nmodel.cutoffs = [9, 20]\n"
        'data.tokenizer.newlines = "drop"\n'
    )
    [run] = read(write(text))
    assert "--model.untie_r=true" in run.command
    assert "--model.cutoffs=9,20" in run.command
    assert "--data.tokenizer.newlines=drop" in run.command


def test_flags_come_after_the_flagfile(write):
    base = 'program = "ptb"\nflagfile = "ptb_small"\nbase.train.steps = 2000\n'
    [run] = read(write(ONE_RUN, base=base))
    assert list(run.command[3:5]) == ["--flagfile=ptb_small", "--train.steps=2000"]
    assert run.config.model.n_layer == 4  # From the flagfile.


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[grid]\n", r"\bgrid\b.*\bruns\b"),
        ("[grid]\nseed = 3\n", r"\bgrid\.seed\b.*\b3\b"),
        ("[gird]\nseed = [1]\n", r"'gird'"),
        ("[grid]\nmodel.n_layr = [1, 2]\n", r"--model\.n_layr\b"),
        # An odd number of steps, of which each call makes two.
        ("[grid]\ntrain.steps = [1201]\n", r"train\.steps.*\b1201\b"),
        # One name for two runs, and two names for one run.
        ("[[runs]]\nname = 'a'\n[[runs]]\nname = 'a'\nseed = 2\n", r"\ba\b(?!.*\bseed\b)"),
        ("[[runs]]\nname = 'a'\n[[runs]]\nname = 'b'\n", r"\ba\b.*\bb\b"),
        ("[grid]\nseed = [1]\n[[runs]]\nseed = 2\n", r"\bseed\b.*\bgrid\b.*\bruns\b"),
        ("[grid]\ndata.corpus = ['ptb']\n", r"corpus=ptb: .*data\.file\b"),
        ("[grid\n", r"sweep\.toml\b.*\bTOML\b"),
        ("program = 'text'\nflagfile = 'ptb_small'\ngrid.seed = [1]\n", "experiments.ptb"),
        ("program = 'ptb'\nbase.data.file = 'a'\ngrid.seed = [1]\n", r"data\.file\b.*\bptb\b"),
        ("program = 'ptp'\ngrid.seed = [1]\n", r"'ptp'"),
        ("[random]\nsamples = 3\n", r"no range"),
        ("[sampler]\nname = 'TPESampler'\n[grid]\nseed = [1]\n", r"sampler.*no range"),
        # Optuna's package of samplers has no "Tpe". The next two names there are not of classes.
        ("[sampler]\nname = 'Tpe'\n[grid]\nseed = [1]\n", r"sampler.*'Tpe'"),
        ("[sampler]\nname = '__dir__'\n[grid]\nseed = [1]\n", r"sampler.*unknown class '__dir__'"),
        ("[sampler]\nname = 'nsgaii'\n[grid]\nseed = [1]\n", r"sampler.*'nsgaii'"),
        ("[pruner]\nname = 'MedianPruner'\nsteps = 3\n[grid]\nseed = [1]\n", r"pruner.*'steps'"),
        (SAMPLED + "[grid]\ntrain.steps = [3]\n", r"train\.steps.*\b3\b"),
        (
            "[random]\nsamples = 0\nmodel.dropout.rate = { uniform = [0, 0.5] }\n",
            r"random\.samples\b.*\b0\b",
        ),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { normal = [0, 0.5] }\n", r"rate\.normal"),
        (
            "[random]\nsamples = 2\nmodel.dropout.rate = { uniform = [0.5, 0] }\n",
            r"lower number first.*\[0\.5, 0\]",
        ),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { log = [0, 0.5] }\n", r"\[0, 0\.5\].*log"),
        (
            "[random]\nsamples=2\nmodel.n_layer.uniform = [1, 9]\n[grid]\nmodel.n_layer = [2]\n",
            r"n_layer.*grid.*random",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(write, capsys, text, pattern):
    path = write("", base=text) if text.startswith("program") else write(text)
    assert sweep_of(path) == 2
    assert re.search(pattern, error_of(capsys))
    assert not (path.parent / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(["FILE"], "--out", id="no --out"),
        pytest.param(["none", "--out=OUT"], "none", id="no file"),
        pytest.param(["FILE", "--out=gs://bucket/sweep"], "--storage", id="no database"),
        pytest.param(
            ["FILE", "--out=gs://bucket/sweep", "--storage=sqlite:///study.db", "--print=sky"],
            "--storage",
            id="a database that hosts cannot share",
        ),
        pytest.param(["FILE", "--out=OUT", "--print=sky"], "gs://", id="no bucket"),
    ],
)
def test_mistakes_on_the_command_line_too(write, capsys, words, named):
    path = write(ONE_RUN)
    paths = {"FILE": str(path), "OUT": str(path.parent / "out")}
    for name, value in paths.items():
        words = [word.replace(name, value) for word in words]
    assert sweep.main(["sweep", *words]) == 2
    assert named in capsys.readouterr().err


ODD_NAMES = [".", "..", ".hidden", "../up", "a/b", "/root", "a\\b", "study.db", "results.csv"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_no_name_of_a_run_leads_out_of_the_directory(write, capsys, name):
    path = write(f"[[runs]]\nname = '{name}'\ntrain.mem_len = 8\n")
    assert sweep_of(path, "--dry_run") == 2
    assert "name of a run" in error_of(capsys)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_no_name_with_a_grid_leads_out_of_the_directory(write, capsys, name):
    """The name of a file with something behind it is another name."""
    path = write(f"{TWO_RUNS}[[runs]]\nname = '{name}'\ntrain.mem_len = 8\n")
    code = sweep_of(path, "--dry_run")
    if code == 0:
        assert name in ("study.db", "results.csv")
        for line in capsys.readouterr().out.splitlines():
            folder = Path(line.split("--workdir=")[1])
            assert folder.parent == path.parent / "out"
    else:
        assert code == 2
        assert "name of a run" in error_of(capsys)


def test_long_names_are_cut_and_stay_different(write):
    path = write('[[runs]]\nname = "' + "é" * 150 + '"\n' + TWO_RUNS)
    first, second = names(path)
    assert first != second
    for name in (first, second):
        n_bytes = len(name.encode())
        # A letter of two bytes that would be cut is left out.
        assert sweep_file.MAX_NAME_BYTES - 1 <= n_bytes <= sweep_file.MAX_NAME_BYTES
        assert re.fullmatch(r"é+-[0-9a-f]{12}", name)

    longest = "x" * sweep_file.MAX_NAME_BYTES
    assert sweep_file.safe_name(longest, []) == longest
    assert sweep_file.safe_name(longest + "x", []) != sweep_file.safe_name(longest + "xx", [])


def test_commas_and_quotation_marks_in_lists_arrive(write):
    files = ['War, and "Peace".txt', "b.txt"]
    lists = ""
    for split in ("train", "valid", "test"):
        lists += f"data.{split} = {json.dumps(files)}\n"
    base = TINY.replace('data.file = "WORK/words.txt"\n', lists)
    assert base != TINY

    [run] = read(write(ONE_RUN, base=base))
    assert [Path(path).name for path in run.config.data.train] == files


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param(
            "[grid]\nseed = HUNDRED\ntrain.mem_len = HUNDRED\nmodel.d_inner = HUNDRED\n",
            "1,000,000",
            id="grid",
        ),
        pytest.param(
            "[random]\nsamples = 10001\nmodel.dropout.rate = { uniform = [0, 0.5] }\n",
            "10,001",
            id="random",
        ),
        pytest.param(
            "[random]\nsamples = 101\nmodel.dropout.rate = { uniform = [0, 0.5] }\n"
            "[grid]\nseed = HUNDRED\n",
            "10,100",
            id="both",
        ),
        pytest.param(SAMPLED.replace("samples = 2", "samples = 20000"), "20,000", id="sampler"),
    ],
)
def test_too_many_runs_are_an_error_before_they_are_made(write, capsys, monkeypatch, text, count):
    # Drawing or making a run would fail.
    monkeypatch.setattr(sweep_file, "draw_samples", None)
    monkeypatch.setattr(sweep_file.Sweep, "run", None)
    path = write(text.replace("HUNDRED", str(list(range(1, 101)))))
    assert sweep_of(path) == 2
    message = capsys.readouterr().err
    assert "10,000 runs" in message
    assert f"got {count} (" in message


@pytest.fixture
def worker_arguments(monkeypatch):
    """The arguments of the worker of a study, which trains nothing."""
    arguments = {}

    class Worker:
        signal_number = 0

        def __init__(self, made, place, gpus):
            arguments.update(out=made.out, runs=list(made.runs), place=place, gpus=gpus)

        def run(self):
            pass

        def report(self):
            return []

    monkeypatch.setattr(sweep.study, "Worker", Worker)
    return arguments


def test_each_flag_reaches_the_worker(write, worker_arguments, tmp_path):
    path = write(TWO_RUNS)

    def start(*flags):
        worker_arguments.clear()
        assert sweep_of(path, *flags) == 0
        return dict(worker_arguments)

    usual = {
        "out": str(tmp_path / "out"),
        "runs": ["seed=1", "seed=2"],
        "place": sqlalchemy.URL.create("sqlite", database=f"{tmp_path / 'out'}/study.db"),
        "gpus": [None],
    }
    assert start() == usual
    assert start("--jobs=3") == usual | {"gpus": [None, None, None]}
    assert start("--gpus=4,7") == usual | {"gpus": ["4", "7"]}
    other_place = sqlalchemy.URL.create("sqlite", database="other.db")
    assert start("--storage=sqlite:///other.db") == usual | {"place": other_place}
    assert start(f"--out={tmp_path / 'new'}")["out"] == str(tmp_path / "new")


@pytest.mark.parametrize(
    ("flag", "printed"), [("--table", "| seed=1 | "), ("--dry_run", "--seed=1")]
)
def test_flags_that_only_print_start_no_worker(write, worker_arguments, capsys, flag, printed):
    assert sweep_of(write(TWO_RUNS), flag) == 0
    assert worker_arguments == {}
    assert printed in capsys.readouterr().out


def test_the_flags_of_the_tests_above_are_all():
    known = {"files", "out", "storage", "jobs", "gpus", "table", "dry_run", "print"}
    assert vars(sweep._parsed([])).keys() == known, "a new flag needs a test above"


def printed(capsys, path, *words):
    """What the command prints on a file, with the output next to it unless `words` say where."""
    if any(word.startswith("--out=") for word in words):
        code = sweep.main(["sweep", str(path), *words])
    else:
        code = sweep_of(path, *words)
    assert code == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_commands_are_printed_for_a_shell(write, capsys):
    path = write(TWO_RUNS)
    lines = printed(capsys, path, "--dry_run").splitlines()
    assert [shlex.split(line) for line in lines] == [list(run.command) for run in read(path)]


@pytest.mark.full
def test_commands_are_printed_for_skypilot(write, capsys, monkeypatch, bucket):
    """The password stays in the environment."""
    path = write(TWO_RUNS)
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    shared = [f"--out={bucket}/sweep", "--storage=postgresql://me@host/db"]

    lines = printed(capsys, path, *shared, "--print=sky", "--jobs=2").splitlines()

    assert "hunter2" not in lines[0]
    first, second = map(shlex.split, lines)
    assert first[:4] == ["sky", "jobs", "launch", "launch/sky.yaml"]
    assert "--secret=PGPASSWORD" in first
    assert first[-1] == "--name=sweep-1"
    assert second == [*first[:-1], "--name=sweep-2"]
    [command] = [word for word in first if word.startswith("--env=RUN=")]
    words = shlex.split(command.removeprefix("--env=RUN="))
    assert words == ["python", "-m", "launch.sweep", str(path), *shared]


@pytest.mark.full
def test_a_study_whose_runs_are_in_a_bucket(write, bucket, tmp_path, capsys):
    base = TINY.replace("train.steps = 1200\n", "train.steps = 20\n")
    base = base.replace("train.checkpoint_every = 600\n", "train.checkpoint_every = 20\n")
    path = write(ONE_RUN, base=base)
    words = [str(path), f"--out={bucket}/sweep", f"--storage=sqlite:///{tmp_path}/study.db"]

    code = sweep.main(["sweep", *words])

    out = capsys.readouterr().out
    assert code == 0, out
    assert "| finished |" in out
    log = (bucket / "sweep/seed=1/sweep.log").read_bytes()
    assert b"step 20" in log.replace(b"  ", b" ")
    assert (bucket / "sweep/results.csv").exists()


def test_a_run_without_a_directory_has_not_started(one_run):
    assert one_run.row([])["state"] == "not started"


@pytest.fixture
def started_run(one_run):
    """A run with a log."""
    folder = Path(one_run.folder)
    folder.mkdir(parents=True)
    (folder / "sweep.log").touch()
    return one_run


def test_a_run_that_failed_has_its_exit_code_and_the_time_of_all_tries(started_run):
    assert started_run.end(1, 2.0, pruned=False) == "failed: exit code 1"
    assert started_run.row([])["state"] == "failed: exit code 1"

    assert started_run.end(-signal.SIGKILL, 2.0, pruned=False) == "failed: killed by SIGKILL"
    assert started_run.row([])["state"] == "failed: killed by SIGKILL"
    notes = json.loads((Path(started_run.folder) / "sweep.json").read_text())
    assert notes["seconds"] == 4.0


def test_a_run_whose_workdir_is_locked_is_running(started_run):
    with Run.open(started_run.folder) as held:
        held.claim()
        assert started_run.row([])["state"].startswith("running")


def test_a_run_whose_worker_was_killed_is_interrupted(one_run):
    """Its notes have no end. The time of the killed process is counted up to its last record."""
    folder = Path(one_run.folder)
    folder.mkdir(parents=True)
    one_run.note()
    assert one_run.row([])["state"] == "starting"
    record(one_run, one_run.config)
    (folder / "results.json").unlink()
    one_run.note()
    assert one_run.row([])["state"] == "starting, 0 of 1,200 training steps"

    notes = json.loads((folder / "sweep.json").read_text())
    notes["started"] -= 1000
    (folder / "sweep.json").write_text(json.dumps(notes))
    last = datetime.datetime.fromtimestamp(notes["started"] + 100, datetime.UTC)
    metrics = {"kind": "train", "step": 500, "time": last.strftime("%Y-%m-%dT%H:%M:%SZ")}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")

    row = one_run.row([])
    assert row["state"] == "interrupted, 500 of 1,200 training steps"
    assert row["steps"] == 500
    (folder / "checkpoints" / "latest" / "540").mkdir(parents=True)
    assert one_run.row([])["steps"] == 540
    assert row["seconds"] == pytest.approx(100, abs=1)

    one_run.note()
    one_run.end(-signal.SIGKILL, 2.0, pruned=False)
    assert one_run.row([])["seconds"] == pytest.approx(102, abs=1)


def test_a_finished_run_whose_results_do_not_count_has_its_steps(one_run):
    """Such as one whose train.steps was raised. Its note still says that it has finished."""
    record(one_run, one_run.config)
    one_run.note()
    assert one_run.end(0, 2.0, pruned=False) == "finished"
    (Path(one_run.folder) / "results.json").unlink()
    assert one_run.row([])["state"] == "0 of 1,200 training steps"


@pytest.mark.parametrize(
    ("code", "pruned", "word"),
    [(143, True, "pruned"), (143, False, "stopped"), (-signal.SIGINT, False, "stopped")],
)
def test_a_run_that_was_stopped_has_its_step(started_run, code, pruned, word):
    assert re.fullmatch(rf"{word}\D*\b0", started_run.end(code, 2.0, pruned=pruned))
    assert started_run.row([])["state"].startswith(word)


def test_a_run_with_corrupted_notes_has_not_started(started_run):
    started_run.end(1, 2.0, pruned=False)
    (Path(started_run.folder) / "sweep.json").write_text("{")
    assert started_run.row([])["state"] == "not started"


def test_notes_of_another_version_of_the_file_are_not_in_its_table(write, tmp_path, capsys):
    """A sampler's runs are found by their notes, which others can have written."""
    path = write(SAMPLED + TWO_RUNS)
    # Only the last one has values of this file: another seed, no value of the range, and other
    # types do not count.
    notes = {
        "old": {"values": {"model.d_head": 1, "seed": "3"}},
        "short": {"values": {"seed": "1"}},
        "list": [1],
        "text": {"values": "x"},
        "kept": {"values": {"model.d_head": 1, "seed": "2"}},
    }
    for name, content in notes.items():
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "sweep.json").write_text(json.dumps(content))

    assert "| d_head=1+seed=2 |" in printed(capsys, path, "--table")
    assert list(read_rows(tmp_path / "out")) == ["d_head=1+seed=2"]


def read_rows(folder):
    """The rows of results.csv, by the names of the runs."""
    with open(folder / "results.csv", newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def record(run, config, **results):
    """Records a run with a config and its results, instead of training."""
    text = TextInfo("text", "own text", "d" * 64, recorded_run.VOCABULARY)
    runs.record(run.folder, config, text)
    usual = {"steps": config.train.steps, "eval": config_tree.to_dict(config.eval)}
    (Path(run.folder) / "results.json").write_text(json.dumps(usual | results))


@pytest.mark.parametrize(
    "changes",
    # Of the same run, before it was given more steps, and with another evaluation.
    [{"steps": 600}, {"eval": {"eval.mem_len": 64}}],
    ids=["steps", "eval"],
)
def test_results_of_other_settings_do_not_count(one_run, changes):
    record(one_run, one_run.config)
    assert one_run.results is not None

    record(one_run, one_run.config, **changes)
    assert one_run.results is None


def test_corrupted_results_do_not_count(one_run):
    record(one_run, one_run.config)
    (Path(one_run.folder) / "results.json").write_text("{")
    assert one_run.results is None


def test_results_from_before_there_was_dynamic_evaluation_are_of_the_same_settings(one_run):
    settings = config_tree.to_dict(one_run.config.eval)
    old_settings = {name: value for name, value in settings.items() if "dynamic" not in name}
    assert len(old_settings) < len(settings)
    record(one_run, one_run.config, eval=old_settings)
    assert one_run.results is not None

    learning = config_tree.replace(one_run.config, {"eval.dynamic.rule": "sgd"})
    assert dataclasses.replace(one_run, config=learning).results is not None


def test_a_stopped_run_with_dropout_masks_of_another_version_is_in_the_table(write, capsys):
    """Only its own command, which would train it further, ends with an error.

    Runs did not record the version of their masks before the second one.
    """
    path = write("[grid]\nmodel.dropout.rate = [0.5]\n")
    [run] = read(path)
    record(run, run.config)
    folder = Path(run.folder)
    (folder / "results.json").unlink()
    (folder / "checkpoints" / "latest" / "8").mkdir(parents=True)
    saved = json.loads((folder / "config.json").read_text())
    del saved["dropout_masks"]
    (folder / "config.json").write_text(json.dumps(saved))

    assert "| dropout.rate=0.5 |" in printed(capsys, path, "--table")
    with Run.open(folder) as opened, pytest.raises(UserError, match=r" version 1\b"):
        opened.compare(run.config)


def test_a_sweep_compares_a_run_with_its_record_as_the_program_does(write):
    """A flagfile's sizes yield to the sizes of the weights, which the record has."""
    small = 'program = "text"\nflagfile = "small"\n[base]\ndata.file = "WORK/words.txt"\n'
    path = write("[grid]\ninit_from = ['weights']\n", base=small)
    [run] = read(path)
    record(run, config_tree.replace(run.config, {"model.n_layer": 2, "model.n_head": 3}))

    [tuned] = read(path)
    assert tuned.config.model.n_layer == 2
    assert tuned.config.model.n_head == 3
    assert tuned.results is not None


def test_a_run_that_diverged_has_ended_and_says_so(one_run):
    record(one_run, one_run.config, best_valid={"loss": 5.0}, test={"loss": 30.0})
    row = one_run.row([])
    assert row["state"] == "diverged"
    assert one_run.end(0, 1.0, pruned=False) == "diverged"
    assert row["test"] == math.inf
    assert row["best_valid"] < 150  # A perplexity of exp(5.0).


# Random search


def draws(write, text):
    """The values of each random run."""
    return [run.differs for run in read(write("[random]\n" + text))]


RANGES = "optimizer.learning_rate = { log = [1e-4, 1e-2] }\nmodel.n_layer = { uniform = [2, 3] }\n"


def test_values_are_drawn_from_their_ranges(write):
    """Numbers have four digits."""
    drawn = draws(write, "samples = 9\n" + RANGES)
    assert len(drawn) == 9
    for values in drawn:
        rate = values["optimizer.learning_rate"]
        assert 1e-4 <= rate <= 1e-2
        assert float(f"{rate:.4g}") == rate
    assert {values["model.n_layer"] for values in drawn} == {2, 3}


def test_more_samples_keep_the_first_and_another_seed_draws_others(write):
    drawn = draws(write, "samples = 9\n" + RANGES)
    assert draws(write, "samples = 12\n" + RANGES)[:9] == drawn
    assert draws(write, "seed = 1\nsamples = 9\n" + RANGES) != drawn


def test_equal_draws_are_one_run_and_each_goes_with_the_grid(write):
    path = write("[random]\nsamples = 30\nmodel.n_layer = { uniform = [1, 3] }\n" + TWO_RUNS)
    drawn = read(path)
    assert sorted(run.name for run in drawn) == [
        "n_layer=1+seed=1",
        "n_layer=1+seed=2",
        "n_layer=2+seed=1",
        "n_layer=2+seed=2",
        "n_layer=3+seed=1",
        "n_layer=3+seed=2",
    ]
    assert {run.config.model.n_layer for run in drawn} == {1, 2, 3}


# Tables


def test_a_table_of_any_runs(tmp_path, capsys):
    """Of a directory of runs, and of a run that has not ended."""
    slurm = tmp_path / "slurm"
    for seed in (1, 2):
        recorded_run.make(slurm / f"job-{seed}", seed=seed)
    recorded_run.make(tmp_path / "half", seed=3, done=500)
    out = tmp_path / "tables"

    code = sweep.main(["sweep", "--table", str(slurm), str(tmp_path / "half"), f"--out={out}"])

    assert code == 0
    assert "± " in capsys.readouterr().out
    assert (out / "means.csv").exists()
    rows = read_rows(out)
    assert list(rows) == ["job-1", "job-2", "half"]
    assert rows["half"]["state"] == "500 of 1,000 training steps"
    assert rows["half"]["steps"] == "500"
    for run in read_runs([str(slurm)]):
        assert float(rows[run.name]["test"]) == pytest.approx(run.row([])["test"]), run.name


@pytest.mark.parametrize(
    ("name", "message"), [("empty", r"config\.json"), ("none", "not a directory")]
)
def test_a_table_without_runs_is_an_error(tmp_path, capsys, name, message):
    (tmp_path / "empty" / "below").mkdir(parents=True)
    assert sweep.main(["sweep", "--table", str(tmp_path / name)]) == 2
    assert re.search(f"{tmp_path / name}.*{message}", capsys.readouterr().err)
