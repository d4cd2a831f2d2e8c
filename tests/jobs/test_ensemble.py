"""Tests ensembles: each member is the run that it would be alone, stopped, resumed, scored and split off alike."""

import itertools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny_run
from txl_jax.assemble import assemble
from txl_jax.config import CorpusName, DataConfig, DType
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.jobs import ensemble, evaluate, train
from txl_jax.jobs.restore import load_parameters, load_state
from txl_jax.jobs.split_off import split_off
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime import executable_cache
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.metrics_log import read_metrics
from txl_jax.runtime.sinks.sink import MEASURED
from txl_jax.training.ensemble import Variation, make_ensemble_step
from txl_jax.training.loop import Hook
from txl_jax.training.run_checkpoints import RunCheckpoints
from txl_jax.training.step import make_train_step

STEPS = 12
RATE, DROPOUT = "optimizer.learning_rate", "model.dropout.rate"
# A rate that is 0 in one and not in another; the others at rates of their own throughout.
MEMBERS = [{"seed": 3}, {DROPOUT: 0.0, "seed": 4, RATE: 0.02}, {DROPOUT: 0.5}]
NAMES = ["seed=3", "seed=4+learning_rate=0.02+dropout.rate=0.0", "dropout.rate=0.5"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(config, corpus)."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text").write_bytes(np.random.default_rng(0).choice(list(b"the cat"), 1110).astype(np.uint8).tobytes())
    data = DataConfig(corpus=CorpusName.TEXT, file=str(folder / "text"))
    changes = {
        "data": data,
        "model.dropout.attention": 0.2,
        "model.dropout.embedding": 0.1,
        "train.steps": STEPS,
        "train.segments_per_call": 2,
        "train.log_every": 4,
        "train.eval_every": 4,
        "train.checkpoint_every": 2,
        "average.start_step": 6,
        "eval.segments_per_call": 4,
    }
    return config_tree.replace(tiny_run.CONFIG, changes), read_corpus(data, "nowhere", str(folder))


def run(base, folder, chosen=MEMBERS, **others):
    return ensemble.run(base[0], chosen, base[1], Workdir(folder), **others)


def records(path, member=None):
    """The records of a run, or those of one member, without what the clock decides."""
    left_out = {*MEASURED, "member"}
    found = read_metrics(path)
    return [{k: v for k, v in each.items() if k not in left_out} for each in found if each.get("member") == member]


def state_of(workdir, base):
    """Step, state and notes of the newest checkpoint."""
    config, _ = workdir.load()
    return load_state(assemble(config, vocab_size=base[1].vocabulary.size), workdir, log=print)


def assert_equal_trees(found, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """(folder, outcome) of an ensemble that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(base, folder)


@pytest.mark.parametrize(
    "compared", [NAMES[1:2], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["the one that differs most", "all"]
)
def test_each_is_the_run_that_it_would_be_alone(base, tmp_path, x64, compared):
    base = config_tree.replace(base[0], {"model.dtype": DType.FLOAT64}), base[1]
    outcome = run(base, tmp_path / "all")
    assert outcome.finished and outcome.step == STEPS and list(outcome.results["members"]) == NAMES
    configs = ensemble.member_configs(base[0], MEMBERS)
    for name, config in ((name, configs[name]) for name in compared):
        lone = Workdir(tmp_path / name)
        alone = train.run(config, base[1], lone)
        found, expected = records(tmp_path / "all", name), records(lone.path)
        for one, other in zip(found, expected, strict=True):
            assert one.pop("kind") == other.pop("kind") and one == pytest.approx(other, rel=1e-6)
        own = outcome.results["members"][name]
        assert own["test"]["loss"] == pytest.approx(alone.results["test"]["loss"], rel=1e-9)
        assert own["best_valid"]["step"] == alone.results["best_valid"]["step"]
        own_state, lone_state = (state_of(each, base)[1] for each in (Workdir(tmp_path / "all", name), lone))
        for (path, a), b in zip(jax.tree.leaves_with_path(own_state), jax.tree.leaves(lone_state), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9, err_msg=jax.tree_util.keystr(path))


def test_one_workdir_holds_all_members(base, whole):
    folder, outcome = whole
    losses = [found["test"]["loss"] for found in outcome.results["members"].values()]
    assert len({round(loss, 3) for loss in losses}) == 3
    assert json.loads((folder / "results.json").read_text()) == outcome.results
    saved = json.loads((folder / "config.json").read_text())
    assert saved["members"] == [{"seed": 3}, {"seed": 4, RATE: 0.02, DROPOUT: 0.0}, {DROPOUT: 0.5}]
    assert saved["config"] == config_tree.to_dict(base[0])
    page = (folder / "members.md").read_text()
    assert all(f"| {name} | " in page for name in NAMES)
    assert {record["member"] for record in read_metrics(folder)} == set(NAMES)
    lines = [line for line in (folder / "log.txt").read_text().splitlines() if re.match(r"step +\d+/", line)]
    assert len(lines) == STEPS // 4
    last = [[r["loss"] for r in records(folder, name) if r["kind"] == "train"][-1] for name in NAMES]
    assert "  ".join(f"{loss:.4f}" for loss in last) in lines[-1]


def test_members_differ_in_parameters_and_losses(base, whole):
    folder, outcome = whole
    states = [state_of(Workdir(folder, name), base)[1] for name in NAMES]
    for one, other in itertools.combinations(range(len(NAMES)), 2):
        pairs = zip(jax.tree.leaves_with_path(states[one].params), jax.tree.leaves(states[other].params), strict=True)
        for (path, a), b in pairs:
            assert a.shape == b.shape and not np.allclose(a, b, rtol=1e-3), jax.tree_util.keystr(path)
        found, others = (outcome.results["members"][NAMES[number]] for number in (one, other))
        assert found["test"]["loss"] != pytest.approx(others["test"]["loss"], abs=1e-3)
        assert found["best_valid"]["loss"] != pytest.approx(others["best_valid"]["loss"], abs=1e-3)


def test_the_results_table_has_every_member(whole):
    folder, outcome = whole
    rows = [line.strip("| ").split(" | ") for line in (folder / "members.md").read_text().splitlines() if "|" in line]
    assert rows[0][0] == "member" and [row[0] for row in rows[2:]] == NAMES
    for name, valid, updates, test in rows[2:]:
        found = outcome.results["members"][name]
        assert float(valid) == pytest.approx(found["best_valid"]["bpc"], abs=0.006)
        assert float(test) == pytest.approx(found["test"]["bpc"], abs=0.006)
        assert int(updates) == found["test"]["step"] == found["best_valid"]["step"]
    assert list(json.loads((folder / "results.json").read_text())["members"]) == NAMES


def test_a_finished_ensemble_is_not_scored_again(base, whole, tmp_path, monkeypatch):
    class Scored(BaseException):
        pass

    def score(*unused, **also_unused):
        raise Scored

    def contents(folder):
        """All files but the logs, which record that the run was opened."""
        paths = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tensorboard"]
        return {path: path.read_bytes() for path in paths if path.name != "log.txt"}

    folder = tmp_path / "all"
    shutil.copytree(whole[0], folder)
    before = contents(folder)
    monkeypatch.setattr(ensemble, "score_or_stop", score)
    monkeypatch.setattr(executable_cache, "compile_or_load", pytest.fail)  # Nor is anything compiled.
    outcome = run(base, folder)
    assert outcome.finished and outcome.results == whole[1].results
    assert contents(folder) == before
    # Without its results it is scored.
    (folder / "results.json").unlink()
    monkeypatch.undo()
    monkeypatch.setattr(ensemble, "score_or_stop", score)
    with pytest.raises(Scored):
        run(base, folder)


def stop_after(calls):
    asked = iter([False] * (calls - 1))
    return lambda: next(asked, True)


def assert_same_ensembles(folder, expected):
    for name in NAMES:
        assert records(folder, name) == records(expected, name)
    newest = []
    for each in (folder, expected):
        with Checkpointer(Workdir(each).latest, keep=2, log=print) as latest:
            newest.append(latest.latest_step())
    assert newest[0] == newest[1]


@pytest.mark.parametrize(
    "stops", [[3], *(pytest.param(stops, marks=pytest.mark.slow) for stops in ([2, 2], [6]))], ids=str
)
def test_a_stopped_ensemble_resumes_exactly(base, whole, tmp_path, stops):
    """After updates, and in the middle of the evaluation of one of them."""
    for calls in stops:
        assert not run(base, tmp_path, stop_requested=stop_after(calls)).finished
    outcome = run(base, tmp_path)
    assert outcome.finished and outcome.results["members"] == whole[1].results["members"]
    assert_same_ensembles(tmp_path, whole[0])
    for name in NAMES:
        found, expected = (state_of(Workdir(folder, name), base)[1] for folder in (tmp_path, whole[0]))
        assert_equal_trees(found, expected)
    assert run(base, tmp_path) == outcome  # And finished already.


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_kill_between_the_saves_of_members_is_made_good(base, whole, tmp_path, monkeypatch, count):
    """The best parameters of some members are written, those of the others and the checkpoint are not."""

    class Killed(BaseException):
        pass

    calls, save_best = iter(range(1, 100)), RunCheckpoints.save_best

    def save_some(self, *arguments):
        if next(calls) == count:
            raise Killed
        save_best(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "save_best", save_some)
        with pytest.raises(Killed):
            run(base, tmp_path)
    assert run(base, tmp_path).results["members"] == whole[1].results["members"]
    assert_same_ensembles(tmp_path, whole[0])


@pytest.mark.slow
def test_a_stop_while_the_test_text_is_scored_is_made_good(base, whole, tmp_path, capsys):
    def stop():
        return len(capsys.readouterr().out) < 0 or (tmp_path / "checkpoints/latest/12/digests.json").exists()

    assert not run(base, tmp_path, stop_requested=stop).finished
    assert run(base, tmp_path).results["members"] == whole[1].results["members"]
    assert_same_ensembles(tmp_path, whole[0])


@pytest.mark.parametrize(
    "chosen", [[*MEMBERS, {"seed": 9}], MEMBERS[:2], MEMBERS[::-1]], ids=["more", "fewer", "order"]
)
def test_other_members_in_a_used_workdir_are_refused(base, whole, chosen):
    before = sorted(whole[0].rglob("*"))
    with pytest.raises(UserError, match=f"{re.escape(NAMES[0])}.*--workdir"):
        run(base, whole[0], chosen)
    with pytest.raises(UserError, match=f"{re.escape(NAMES[0])}.*none.*--workdir"):
        train.run(base[0], base[1], Workdir(whole[0]))
    assert sorted(whole[0].rglob("*")) == before


def test_a_member_is_loaded_and_scored_by_its_name(base, whole):
    folder, outcome = whole
    for name, config in ensemble.member_configs(base[0], MEMBERS).items():
        workdir = Workdir(folder, name)
        assert workdir.load()[0] == config
        scored = evaluate.run(config, base[1], workdir, trained_on=TextInfo.of(base[1]))
        expected = outcome.results["members"][name]
        assert scored["test"]["loss"] == expected["test"]["loss"] and scored["step"] == expected["best_valid"]["step"]
    averaged = config_tree.replace(base[0], {"eval.average_checkpoints": 2})
    components, found = assemble(averaged, vocab_size=base[1].vocabulary.size), []
    for name in NAMES[:2]:
        step, params = load_parameters(components, Workdir(folder, name), log=print)
        assert step == STEPS
        found.append(jax.tree.leaves(params)[0])
    assert found[0].shape == found[1].shape and not np.array_equal(*found)


def test_a_member_that_is_not_there_is_refused_with_the_names(base, whole, tmp_path):
    for wrong in ("seed=7", None):
        with pytest.raises(UserError, match=rf"--ensemble_member.*{re.escape(NAMES[0])}"):
            Workdir(whole[0], wrong).load()
    lone = Workdir(tmp_path).create()
    lone.record(base[0], TextInfo.of(base[1]))
    with pytest.raises(UserError, match=r"--ensemble_member.*'seed=3'"):
        Workdir(tmp_path, "seed=3").load()


@pytest.mark.slow
def test_a_member_that_is_split_off_goes_on_as_an_ordinary_run(base, whole, tmp_path):
    """The state is the ensemble's, bit for bit; its updates from there on agree with the ensemble's up to rounding."""
    name = NAMES[1]
    assert not run(base, tmp_path / "all", stop_requested=stop_after(9)).finished
    made = split_off(tmp_path / "all", name, tmp_path / "own")
    config, _ = made.load()
    assert config == ensemble.member_configs(base[0], MEMBERS)[name]
    (step, found, _), (expected_step, expected, _) = (
        state_of(each, base) for each in (made, Workdir(tmp_path / "all", name))
    )
    assert 0 < step == expected_step < STEPS
    assert_equal_trees(found, expected)
    assert records(made.path) == records(tmp_path / "all", name)
    with pytest.raises(UserError, match=r"--to"):
        split_off(tmp_path / "all", name, made.path)
    # Stopped and resumed, it is bit for bit the run that it is in one piece.
    again = split_off(tmp_path / "all", name, tmp_path / "again")
    assert not train.run(config, base[1], again, stop_requested=stop_after(1)).finished
    outcomes = [train.run(config, base[1], each) for each in (made, again)]
    assert outcomes[0].finished and outcomes[0].results == outcomes[1].results
    assert records(made.path) == records(again.path)
    assert_equal_trees(*(state_of(each, base)[1] for each in (made, again)))
    ours, theirs = outcomes[0].results["test"], whole[1].results["members"][name]["test"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    own, all_of_it = records(made.path), records(whole[0], name)
    assert [(r["kind"], r["step"]) for r in own] == [(r["kind"], r["step"]) for r in all_of_it]


def test_a_member_of_a_finished_ensemble_is_finished_when_split_off(base, whole, tmp_path):
    name = NAMES[2]
    made = split_off(whole[0], name, tmp_path / "own")
    before = records(made.path)
    outcome = train.run(made.load()[0], base[1], made)
    own = whole[1].results["members"][name]
    assert outcome.finished and {key: outcome.results[key] for key in own} == own
    assert records(made.path) == before == records(whole[0], name)


@pytest.mark.slow
def test_nt_asgd_begins_in_each_member_by_itself(base, tmp_path):
    changes = {"average.start_step": None, "average.nt_asgd_patience": 1, "train.steps": 24, RATE: 0.2}
    base = config_tree.replace(base[0], changes), base[1]
    run(base, tmp_path, [{"seed": 1}, {"seed": 2}, {RATE: 0.001}])
    with Checkpointer(Workdir(tmp_path).latest, keep=2, log=print) as latest:
        assert latest.latest_step() == 24
    begun = []
    for name in ("seed=1", "seed=2", "learning_rate=0.001"):
        losses = [record["loss"] for record in records(tmp_path, name) if record["kind"] == "valid"]
        due = [n for n in range(3, 7) if losses[n - 1] > min(losses[: n - 2])]
        state = state_of(Workdir(tmp_path, name), base)[1]
        begun.append(int(state.average.begun))
        assert begun[-1] == (4 * due[0] if due else 2**31 - 1)
    assert len(set(begun)) > 1, "choose rates with which not all begin at once"


def test_hooks_see_the_member_axis(base, tmp_path):
    shapes = []
    hook = Hook(4, lambda context: shapes.append(context.state.step.shape) or context.request_stop())
    assert run(base, tmp_path, hooks=[hook]).step == 4 and shapes == [(3,)]


@pytest.mark.slow
def test_in_bfloat16_a_traced_rate_widens_nothing(base):
    """Members that drop nothing of queries, keys and values draw the other masks that they would draw alone."""
    names = ("model.dropout.embedding", "model.dropout.qkv", "model.dropout.weight", DROPOUT)
    config = config_tree.replace(base[0], {"model.dtype": DType.BFLOAT16, "average.start_step": None})
    made = assemble(config, vocab_size=256)
    segments = train.training_reader(made, base[1]).segments(0, 2)
    configs = [config_tree.replace(config, dict.fromkeys(names, rate)) for rate in (0.0, 0.3)]
    state, step = tiny_run.state(made), jax.jit(make_ensemble_step(made.model, config))
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (state, segments))
    _, found = step(Variation.of(config, configs), *both)
    for i, own in enumerate(configs):
        alone = assemble(own, vocab_size=256)
        _, expected = jax.jit(make_train_step(alone.model, alone.optimizer, alone.schedule, own))(state, segments)
        # The same roundings, up to the order of sums.
        np.testing.assert_allclose(found.nats[i], expected.nats, rtol=2e-3)
        np.testing.assert_allclose(found.grad_norm[i], expected.grad_norm, rtol=2e-2)


def test_a_loss_that_is_not_finite_names_its_member(base, tmp_path):
    with pytest.raises(NonFiniteError, match=r"^learning_rate=1e\+20:.*\b\d+\b.*--ensemble_member\b"):
        run(base, tmp_path, [{"seed": 1}, {RATE: 1e20}])


@pytest.mark.parametrize(
    ("chosen", "changes", "pattern"),
    [
        ([{"seed": 1}], {}, r"\b1\b"),
        ([{"seed": 1}, {"seed": 1}], {}, "seed=1; seed=1"),
        ([{}, {"seed": 1111}], {}, "base; seed=1111"),
        ([{"seed": 1}, {"seed": -1}], {}, r"\bseed\D*-1\b"),
        ([{"seed": 1}, {"model.n_layer": 3}], {}, r"model\.n_layer\b.*model\.dropout"),
        ([{"seed": 1}, {DROPOUT: 1.5}], {}, r"model\.dropout\D*\b1\.5\b"),
        ([{"seed": 1}, {"seed": 2}], {"train.patience": 2}, r"train\.patience\D*\b2\b"),
    ],
)
def test_mistakes_are_refused(base, chosen, changes, pattern, tmp_path):
    with pytest.raises(UserError, match=pattern):
        run((config_tree.replace(base[0], changes), base[1]), tmp_path, chosen)
    assert not list(tmp_path.iterdir())
