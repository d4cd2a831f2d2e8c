"""Tests sweeps: the runs of a file, random search, mistakes, tables, and a study of a real
training.
"""

import csv
import dataclasses
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


@pytest.fixture
def write(tmp_path):
    """Writes the file of a sweep, on tiny runs unless given others; returns its path."""
    programs.write_words(tmp_path, 12_000)

    def make(text, base=TINY):
        (tmp_path / "sweep.toml").write_text(base.replace("WORK", str(tmp_path)) + text)
        return tmp_path / "sweep.toml"

    return make


def read(path):
    """The runs of a file."""
    return list(sweep_file.Sweep(path, str(path.parent / "out")).runs.values())


def names(path):
    return [run.name for run in read(path)]


def test_a_grid_is_every_combination_and_names_contain_the_differences(write):
    found = read(write("[grid]\nseed = [1, 2]\nmodel.dropout.rate = [0.0, 0.5]\n"))
    assert [run.name for run in found] == [
        f"seed={seed}+dropout.rate={rate}" for seed in (1, 2) for rate in (0.0, 0.5)
    ]
    last = found[3]
    assert (last.config.seed, last.config.model.dropout.rate, last.config.train.steps) == (
        2,
        0.5,
        1200,
    )
    assert list(last.command[1:3]) == ["-m", "experiments.text"]
    assert list(last.command[-3:]) == [
        "--seed=2",
        "--model.dropout.rate=0.5",
        f"--workdir={last.folder}",
    ]


def test_the_file_may_begin_with_a_byte_order_mark(write):
    path = write("[grid]\nseed = [1, 2]\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert names(path) == ["seed=1", "seed=2"]


def test_each_run_is_combined_with_the_grid(write):
    text = (
        '[grid]\nseed = [1, 2]\n[[runs]]\nmodel.d_inner = 8\n[[runs]]\nname = "deep '
        'one"\nmodel.n_layer = 3\n[[runs]]\n'
    )
    of_runs = ("d_inner=8+", "deep_one+", "")
    assert names(write(text)) == [f"{name}seed={seed}" for name in of_runs for seed in (1, 2)]
    alike = names(write("[[runs]]\ntrain.mem_len = 8\n[[runs]]\neval.mem_len = 8\n"))
    assert alike == ["train.mem_len=8", "eval.mem_len=8"], "names that end alike are written out"


def test_values_become_flags_after_the_flagfile(write):
    found = read(
        write(
            "[[runs]]\nmodel.untie_r = true\nmodel.cutoffs = [9, "
            '20]\ndata.tokenizer.newlines = "drop"\n'
        )
    )
    words = found[0].command
    assert {
        "--model.untie_r=true",
        "--model.cutoffs=9,20",
        "--data.tokenizer.newlines=drop",
    } <= set(words)
    base = 'program = "ptb"\nflagfile = "ptb_small"\nbase.train.steps = 2000\n'
    [run] = read(write("[grid]\nseed = [1]\n", base=base))
    assert (
        list(run.command[3:5]) == ["--flagfile=ptb_small", "--train.steps=2000"]
        and run.config.model.n_layer == 4
    )


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[grid]\n", r"\bgrid\b.*\bruns\b"),
        ("[grid]\nseed = 3\n", r"\bgrid\.seed\b.*\b3\b"),
        ("[gird]\nseed = [1]\n", r"'gird'"),
        ("[grid]\nmodel.n_layr = [1, 2]\n", r"--model\.n_layr\b"),
        ("[grid]\ntrain.steps = [1201]\n", r"train\.steps.*\b1201\b"),
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
            (
                "[random]\nsamples=2\nmodel.n_layer = {uniform = [1, "
                "9]}\n[grid]\nmodel.n_layer = [2]\n"
            ),
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
    [
        (["FILE"], "--out"),
        (["none", "--out=OUT"], "none"),
        (["FILE", "--out=gs://bucket/sweep"], "--storage"),
        (
            ["FILE", "--out=gs://bucket/sweep", "--storage=sqlite:///study.db", "--print=sky"],
            "--storage",
        ),
        (["FILE", "--out=OUT", "--print=sky"], "gs://"),
    ],
)
def test_mistakes_on_the_command_line_too(write, capsys, words, named):
    path = write("[grid]\nseed = [1]\n")
    words = [
        word.replace("FILE", str(path)).replace("OUT", str(path.parent / "out")) for word in words
    ]
    assert sweep.main(["sweep", *words]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [".", "..", ".hidden", "../up", "a/b", "/root", "a\\b", "study.db", "results.csv"]
)
@pytest.mark.parametrize("more", ["", "[grid]\nseed = [1, 2]\n"])
def test_no_name_of_a_run_leads_out_of_the_directory(write, capsys, name, more):
    path = write(f"{more}[[runs]]\nname = '{name}'\ntrain.mem_len = 8\n")
    code = sweep.main(["sweep", str(path), f"--out={path.parent / 'out'}", "--dry_run"])
    out, err = capsys.readouterr()
    if code == 0:  # A file's name with something behind it is another name.
        assert more and "." in name
        assert {Path(line.split("--workdir=")[1]).parent for line in out.splitlines()} == {
            path.parent / "out"
        }
    else:
        assert code == 2 and "name of a run" in err and not out


def test_long_names_are_cut_and_stay_different(write):
    names_of = names(write('[[runs]]\nname = "' + "é" * 150 + '"\n[grid]\nseed = [1, 2]\n'))
    assert len(set(names_of)) == 2
    for name in names_of:
        assert sweep_file.MAX_NAME_BYTES - 1 <= len(name.encode()) <= sweep_file.MAX_NAME_BYTES
        assert re.fullmatch(r"é+-[0-9a-f]{12}", name)
    assert sweep_file.safe_name("x" * 200, []) == "x" * 200
    assert sweep_file.safe_name("x" * 201, []) != sweep_file.safe_name("x" * 202, [])


def test_commas_and_quotation_marks_in_lists_arrive(write):
    texts = ['War, and "Peace".txt', "b.txt"]
    lists = "".join(f"data.{split} = {json.dumps(texts)}\n" for split in ("train", "valid", "test"))
    base = TINY.replace('data.file = "WORK/words.txt"\n', lists)
    assert base != TINY
    [run] = read(write("[grid]\nseed = [1]\n", base=base))
    assert [Path(path).name for path in run.config.data.train] == texts


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[grid]\nseed = {0}\ntrain.mem_len = {0}\nmodel.d_inner = {0}\n", "1,000,000"),
        ("[random]\nsamples = 10001\nmodel.dropout.rate = { uniform = [0, 0.5] }\n", "10,001"),
        (
            (
                "[random]\nsamples = 101\nmodel.dropout.rate = { uniform = [0, 0.5] "
                "}\n[grid]\nseed = {0}\n"
            ),
            "10,100",
        ),
        (SAMPLED.replace("samples = 2", "samples = 20000"), "20,000"),
    ],
)
def test_too_many_runs_are_refused_before_they_are_made(write, capsys, monkeypatch, text, count):
    monkeypatch.setattr(sweep_file, "draw_samples", None)
    monkeypatch.setattr(sweep_file.Sweep, "run", None)
    path = write(text.replace("{0}", str(list(range(1, 101)))))
    assert sweep.main(["sweep", str(path), f"--out={path.parent / 'out'}"]) == 2
    err = capsys.readouterr().err
    assert "10,000 runs" in err and f"got {count} (" in err


@pytest.fixture
def worker(monkeypatch):
    """The arguments of the worker of a study, which trains nothing."""
    found = {}

    class Worker:
        signal_number = 0

        def __init__(self, given, place, gpus):
            found.update(out=given.out, runs=list(given.runs), place=place, gpus=gpus)

        def run(self):
            pass

        def report(self):
            return []

    monkeypatch.setattr(sweep.study, "Worker", Worker)
    return found


def test_each_flag_reaches_the_worker_or_the_table(write, worker, capsys, tmp_path):
    path = write("[grid]\nseed = [1, 2]\n")

    def start(*flags):
        worker.clear()
        assert sweep.main(["sweep", str(path), f"--out={tmp_path / 'out'}", *flags]) == 0
        return dict(worker)

    usual = {
        "out": str(tmp_path / "out"),
        "runs": ["seed=1", "seed=2"],
        "place": sqlalchemy.URL.create("sqlite", database=f"{tmp_path / 'out'}/study.db"),
    }
    assert start() == usual | {"gpus": [None]}
    assert start("--jobs=3") == usual | {"gpus": [None, None, None]}
    assert start("--gpus=4,7") == usual | {"gpus": ["4", "7"]}
    other = {"gpus": [None], "place": sqlalchemy.URL.create("sqlite", database="other.db")}
    assert start("--storage=sqlite:///other.db") == usual | other
    assert start(f"--out={tmp_path / 'new'}")["out"] == str(tmp_path / "new")
    for flag, printed in (("--table", "| seed=1 | "), ("--dry_run", "--seed=1")):
        capsys.readouterr()
        assert start(flag) == {} and printed in capsys.readouterr().out
    known = {"files", "out", "storage", "jobs", "gpus", "table", "dry_run", "print"}
    assert vars(sweep._parsed([])).keys() == known, "a new flag needs a line above"


def printed(capsys, path, *words):
    out = (
        [] if any(word.startswith("--out=") for word in words) else [f"--out={path.parent / 'out'}"]
    )
    assert sweep.main(["sweep", str(path), *out, *words]) == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_commands_are_printed_for_a_shell_and_for_skypilot(write, capsys, monkeypatch, bucket):
    """The password stays in the environment."""
    path = write("[grid]\nseed = [1, 2]\n")
    lines = printed(capsys, path, "--dry_run").splitlines()
    assert [shlex.split(line) for line in lines] == [list(run.command) for run in read(path)]
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    shared = [f"--out={bucket}/sweep", "--storage=postgresql://me@host/db"]
    lines = printed(capsys, path, *shared, "--print=sky", "--jobs=2").splitlines()
    first, second = map(shlex.split, lines)
    assert (
        first[:4] == ["sky", "jobs", "launch", "launch/sky.yaml"] and "--secret=PGPASSWORD" in first
    )
    assert (
        first[-1] == "--name=sweep-1"
        and second == [*first[:-1], "--name=sweep-2"]
        and "hunter2" not in lines[0]
    )
    [run] = [word.removeprefix("--env=RUN=") for word in first if word.startswith("--env=RUN=")]
    assert shlex.split(run) == ["python", "-m", "launch.sweep", str(path), *shared]


@pytest.mark.full
def test_a_study_whose_runs_are_in_a_bucket(write, bucket, tmp_path, capsys):
    path = write(
        "train.steps = 20\ntrain.checkpoint_every = 20\n[grid]\nseed = [1]\n",
        base=TINY.replace("train.steps = 1200\n", "").replace("train.checkpoint_every = 600\n", ""),
    )
    words = [str(path), f"--out={bucket}/sweep", f"--storage=sqlite:///{tmp_path}/study.db"]
    assert sweep.main(["sweep", *words]) == 0, capsys.readouterr().out
    assert "| finished |" in capsys.readouterr().out
    assert b"step 20" in (bucket / "sweep/seed=1/sweep.log").read_bytes().replace(b"  ", b" ")
    assert (bucket / "sweep/results.csv").exists()


def test_states_are_read_from_the_folders(write):
    run = read(write("[grid]\nseed = [1]\n"))[0]

    def state():
        return run.row([])["state"]

    assert state() == "not started"
    Path(run.folder).mkdir(parents=True)
    (Path(run.folder) / "sweep.log").touch()
    for code, expected in (
        (1, "failed: exit code 1"),
        (-signal.SIGKILL, "failed: killed by SIGKILL"),
    ):
        assert run.end(code, 2.0, pruned=False) == expected == state()
    assert json.loads((Path(run.folder) / "sweep.json").read_text())["seconds"] == 4.0
    with Run.open(run.folder) as held:
        held.claim()
        assert state().startswith("running")
    for code, pruned, word in (
        (143, True, "pruned"),
        (143, False, "stopped"),
        (-signal.SIGINT, False, "stopped"),
    ):
        assert re.fullmatch(
            rf"{word}\D*\b0", run.end(code, 2.0, pruned=pruned)
        ) and state().startswith(word)
    (Path(run.folder) / "sweep.json").write_text("{")
    assert state() == "not started"


def test_notes_of_another_version_of_the_file_are_not_in_its_table(write, tmp_path, capsys):
    """A sampler's runs are found by their notes, which others can have written."""
    path = write(SAMPLED + "[grid]\nseed = [1, 2]\n")
    for name, content in (
        ("old", {"values": {"model.d_head": 1, "seed": "3"}}),
        ("short", {"values": {"seed": "1"}}),
        ("list", [1]),
        ("text", {"values": "x"}),
        ("kept", {"values": {"model.d_head": 1, "seed": "2"}}),
    ):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "sweep.json").write_text(json.dumps(content))
    assert "| d_head=1+seed=2 |" in printed(capsys, path, "--table")
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["d_head=1+seed=2"]


def record(run, config, **results):
    """Records a run with a config and its results, instead of training."""
    runs.record(run.folder, config, TextInfo("text", "own text", "d" * 64, recorded_run.VOCABULARY))
    results = {"steps": config.train.steps, "eval": config_tree.to_dict(config.eval)} | results
    (Path(run.folder) / "results.json").write_text(json.dumps(results))


def test_damaged_results_and_those_of_other_settings_are_none(write):
    """Results of 600 steps are from the same run, before it was given more."""
    run = read(write("[grid]\nseed = [1]\n"))[0]
    record(run, run.config)
    assert run.results is not None
    for changes in ({"steps": 600}, {"eval": {"eval.mem_len": 64}}):
        record(run, run.config, **changes)
        assert run.results is None
    (Path(run.folder) / "results.json").write_text("{")
    assert run.results is None


def test_results_from_before_there_was_dynamic_evaluation_are_of_the_same_settings(write):
    [run] = read(write("[grid]\nseed = [1]\n"))
    record(run, run.config)
    results = json.loads((Path(run.folder) / "results.json").read_text())
    old = {name: value for name, value in results["eval"].items() if "dynamic" not in name}
    assert len(old) < len(results["eval"])
    (Path(run.folder) / "results.json").write_text(json.dumps(results | {"eval": old}))
    assert run.results is not None
    learning = config_tree.replace(run.config, {"eval.dynamic.rule": "sgd"})
    assert dataclasses.replace(run, config=learning).results is not None


def test_a_stopped_run_with_dropout_masks_of_another_version_is_in_the_table(write, capsys):
    """Only its own command, which would train it further, ends with an error."""
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
    """A flagfile's sizes yield to those of the weights, which the record has."""
    small = 'program = "text"\nflagfile = "small"\n[base]\ndata.file = "WORK/words.txt"\n'
    path = write("[grid]\ninit_from = ['weights']\n", base=small)
    [run] = read(path)
    record(run, config_tree.replace(run.config, {"model.n_layer": 2, "model.n_head": 3}))
    [tuned] = read(path)
    assert (tuned.config.model.n_layer, tuned.config.model.n_head) == (
        2,
        3,
    ) and tuned.results is not None


def test_a_run_that_diverged_has_ended_and_says_so(write):
    run = read(write("[grid]\nseed = [1]\n"))[0]
    record(run, run.config, best_valid={"loss": 5.0}, test={"loss": 30.0})
    row = run.row([])
    assert run.end(0, 1.0, pruned=False) == row["state"] == "diverged"
    assert row["test"] == math.inf and row["best_valid"] < 150


# Random search


def draws(write, text):
    """The values of each random run."""
    return [run.differs for run in read(write("[random]\n" + text))]


def test_values_are_drawn_from_their_ranges_and_more_samples_keep_the_first(write):
    text = (
        "samples = 9\noptimizer.learning_rate = { log = [1e-4, 1e-2] }\nmodel.n_layer = { uniform "
        "= [2, 3] }\n"
    )
    found = draws(write, text)
    assert len(found) == 9 and all(
        1e-4 <= each["optimizer.learning_rate"] <= 1e-2 for each in found
    )
    assert {each["model.n_layer"] for each in found} == {2, 3}
    assert all(
        float(f"{value:.4g}") == value
        for value in (each["optimizer.learning_rate"] for each in found)
    )
    assert draws(write, text.replace("9", "12"))[:9] == found != draws(write, "seed = 1\n" + text)


def test_equal_draws_are_one_run_and_each_goes_with_the_grid(write):
    path = write(
        "[random]\nsamples = 30\nmodel.n_layer = { uniform = [1, 3] }\n[grid]\nseed = [1, 2]\n"
    )
    runs = read(path)
    assert sorted(run.name for run in runs) == [
        f"n_layer={n}+seed={seed}" for n in (1, 2, 3) for seed in (1, 2)
    ]
    assert {run.config.model.n_layer for run in runs} == {1, 2, 3}


# Tables


def test_a_table_of_any_runs(tmp_path, capsys):
    for seed in (1, 2):
        recorded_run.make(tmp_path / "slurm" / f"job-{seed}", seed=seed)
    recorded_run.make(tmp_path / "half", seed=3, done=500)
    words = [
        "sweep",
        "--table",
        str(tmp_path / "slurm"),
        str(tmp_path / "half"),
        f"--out={tmp_path / 'tables'}",
    ]
    assert sweep.main(words) == 0
    with open(tmp_path / "tables" / "results.csv", newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert (
        list(rows) == ["job-1", "job-2", "half"]
        and rows["half"]["state"] == "500 of 1,000 training steps"
    )
    for run in read_runs([str(tmp_path / "slurm")]):
        assert float(rows[run.name]["test"]) == pytest.approx(run.row([])["test"])
    assert "± " in capsys.readouterr().out and (tmp_path / "tables" / "means.csv").exists()
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for name, message in (("empty", r"config\.json"), ("none", "not a directory")):
        assert sweep.main(["sweep", "--table", str(tmp_path / name)]) == 2
        assert re.search(f"{tmp_path / name}.*{message}", capsys.readouterr().err)
