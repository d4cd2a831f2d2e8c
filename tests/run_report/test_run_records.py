"""Tests that a report reads what runs have written: records, results, members of ensembles, samples, settings."""

import json
import statistics

import pytest

from launch import sweep_file
from support import recorded_run
from txl_jax.config import COMPAT_PRESETS
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError
from txl_jax.run_report.run_records import read_runs, swept_settings
from txl_jax.run_report.seed_groups import seed_groups
from txl_jax.runtime.log import read_metrics

pytestmark = pytest.mark.full


def test_a_run_has_its_records_and_results(tmp_path):
    folder = recorded_run.make(tmp_path / "mine", seed=3)
    (folder / "sample-seed10.txt").write_text("ten")
    (folder / "sample-seed9.txt").write_text("nine\n\n")
    [run] = read_runs([str(folder)])
    valid = [(each["step"], each["perplexity"]) for each in read_metrics(folder) if each["kind"] == "valid"]
    assert run.name == "mine" and run.state == "finished" and run.last_step == 1000
    assert run.scores("valid") == valid and run.best_valid == min(valid, key=lambda point: point[1])
    assert run.test == pytest.approx(json.loads((folder / "results.json").read_text())["test"]["perplexity"])
    assert run.samples == {"sample-seed9.txt": "nine", "sample-seed10.txt": "ten"}
    rates = [each["tokens_per_second"] for each in read_metrics(folder) if each["kind"] == "train"]
    expected = sum(recorded_run.LOG_EVERY * 22 * 512 / rate for rate in rates)
    assert run.training_seconds == pytest.approx(expected) and run.median("tokens_per_second") == statistics.median(
        rates
    )
    assert run.median("peak_share") is None


def test_members_of_an_ensemble_are_runs(tmp_path):
    members = [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.001}]
    folder = recorded_run.make(tmp_path / "both", member_settings=members)
    (folder / "members" / "seed=1").mkdir(parents=True)
    (folder / "members" / "seed=1" / "sample-seed0.txt").write_text("a sample")
    runs = read_runs([str(folder)])
    assert [run.name for run in runs] == ["seed=1", "seed=2+learning_rate=0.001"]
    assert [run.config.seed for run in runs] == [1, 2] and runs[0].samples and not runs[1].samples
    results = json.loads((folder / "results.json").read_text())
    for run in runs:
        assert run.test == pytest.approx(results["members"][run.name]["test"]["perplexity"])
        assert {record["member"] for record in run.records} == {run.name}
    assert (
        "experiments.ensemble" in runs[1].command and "--ensemble_member=seed=2+learning_rate=0.001" in runs[1].command
    )
    assert {run.name for run in read_runs([str(folder), str(recorded_run.make(tmp_path / "own"))])} == {
        "both: seed=1",
        "both: seed=2+learning_rate=0.001",
        "own",
    }


def test_a_folder_of_runs_and_folders_of_the_same_name(tmp_path):
    for name in ("b", "a"):
        recorded_run.make(tmp_path / "sweep" / name, seed=ord(name))
    (tmp_path / "sweep" / "results.csv").write_text("")
    assert [run.name for run in read_runs([str(tmp_path / "sweep"), str(tmp_path / "sweep" / "a")])] == ["a", "b"]
    other = recorded_run.make(tmp_path / "other" / "a")
    assert [run.name for run in read_runs([str(tmp_path / "sweep" / "a"), str(other)])] == [
        str(tmp_path / "sweep" / "a"),
        str(other),
    ]


def test_a_run_that_goes_on_and_damaged_results(tmp_path):
    [run] = read_runs([str(recorded_run.make(tmp_path / "half", done=500))])
    assert (run.state, run.test, run.results) == ("500 of 1,000 updates", None, None)
    folder = recorded_run.make(tmp_path / "damaged")
    (folder / "results.json").write_text("{")
    (folder / "metrics.jsonl").write_text('{"kind": "valid", "step": 5, "perplexity": "nan"}\n{"kind": "va')
    [run] = read_runs([str(folder)])
    assert run.results is None and run.scores("valid") == [] and run.best_valid is None and run.training_seconds == 0


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_a_run_is_one_sentence(tmp_path, made):
    folder = tmp_path / "none"
    if made:
        (folder / "below").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{folder}.*{'config.json' if made else 'no folder'}"):
        read_runs([str(folder)])


@pytest.mark.parametrize("preset", [None, *COMPAT_PRESETS])
def test_the_command_has_the_settings_of_the_run(tmp_path, preset):
    settings = COMPAT_PRESETS[preset] if preset else {"model.dropout.locked": True, "train.clamp_len": 7}
    values = {"model.cutoffs": (9, 20), "optimizer.warmup_steps": 10, "eval.clamp_len": None, **settings}
    folder = recorded_run.make(tmp_path / "mine", **{name.replace(".", "__"): value for name, value in values.items()})
    [run] = read_runs([str(folder)])
    words = run.command_words()
    assert words[:3] == ["python", "-m", "experiments.ptb"] and words[-2:] == [
        "--data_dir=/data",
        f"--workdir={folder}",
    ]
    assert sweep_file._config("ptb", words[3:-1]) == run.config


def test_runs_are_grouped_by_all_but_the_seed(tmp_path):
    for seed, rate in ((1, 0.1), (2, 0.1), (1, 0.2)):
        recorded_run.make(tmp_path / f"{seed}-{rate}", seed=seed, model__dropout__rate=rate, train__log_every=seed)
    runs = read_runs([str(tmp_path)])
    assert swept_settings(runs) == ["seed", "model.dropout.rate"]
    assert swept_settings(runs, all_settings=True) == ["seed", "model.dropout.rate", "train.log_every"]
    groups = seed_groups(runs)
    assert [(group.name, len(group.runs)) for group in groups] == [("dropout.rate 0.1", 2), ("dropout.rate 0.2", 1)]
    assert groups[0].values == {"model.dropout.rate": 0.1}
    tests = [run.test for run in groups[0].runs]
    mean = groups[0].mean(lambda run: run.test)
    assert mean == (statistics.mean(tests), statistics.stdev(tests), 2)
    step, valid = groups[0].validation()[-1]
    assert step == 1000 and valid.mean == statistics.mean(dict(run.scores("valid"))[1000] for run in groups[0].runs)
    assert config_tree.get(groups[1].runs[0].config, "model.dropout.rate") == 0.2
