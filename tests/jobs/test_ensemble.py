"""Tests runs that are trained together: each is the run that it would be alone, stopped and resumed alike."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from support import tiny_run
from txl_jax.assemble import assemble
from txl_jax.config import CorpusName, DataConfig, DType
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.errors import NonFiniteError
from txl_jax.jobs import ensemble, train
from txl_jax.jobs.workdir import Workdir
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.integrity import DIGESTS
from txl_jax.runtime.metrics_log import read_metrics
from txl_jax.training.ensemble import make_step as together_step
from txl_jax.training.step import make_train_step

STEPS = 12
RATE, DROPOUT = "optimizer.learning_rate", "model.dropout.rate"
# A rate that is 0 in one and not in another; the others at rates of their own throughout.
MEMBERS = [{"seed": 3}, {"seed": 4, RATE: 0.02, DROPOUT: 0.0}, {DROPOUT: 0.5}]
NAMES = ["seed=3", "seed=4+learning_rate=0.02+dropout=0.0", "dropout=0.5"]


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
    return ensemble.run(base[0], chosen, base[1], folder, log=others.pop("say", lambda line: None), **others)


def latest(config, corpus, path):
    """Step and state of the newest checkpoint."""
    with Checkpointer(Workdir(path).latest, keep=2, log=print) as checkpoints:
        step, state, _ = checkpoints.restore(
            assemble(config, vocab_size=corpus.vocabulary.size).training.abstract_state
        )
    return step, state


def records(path):
    return [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in read_metrics(path)]


@pytest.fixture(scope="module")
def together(base, tmp_path_factory):
    """(folder, outcomes, lines) of members that were never stopped."""
    folder, said = tmp_path_factory.mktemp("together"), []
    return folder, run(base, folder, log=said.append), said


def test_each_is_the_run_that_it_would_be_alone(base, tmp_path, x64):
    base = config_tree.replace(base[0], {"model.dtype": DType.FLOAT64}), base[1]
    outcomes = run(base, tmp_path)
    for name, config in ensemble.member_configs(base[0], MEMBERS).items():
        alone = train.run(config, base[1], Workdir(tmp_path / "alone" / name))
        assert outcomes[name].finished and outcomes[name].step == STEPS
        found, expected = records(tmp_path / name), records(tmp_path / "alone" / name)
        for one, other in zip(found, expected, strict=True):
            assert one.pop("kind") == other.pop("kind") and one == pytest.approx(other, rel=1e-6)
        assert outcomes[name].results["test"]["loss"] == pytest.approx(alone.results["test"]["loss"], rel=1e-9)
        own, lone = (latest(config, base[1], path / name)[1] for path in (tmp_path, tmp_path / "alone"))
        for (path, a), b in zip(jax.tree.leaves_with_path(own), jax.tree.leaves(lone), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9, err_msg=jax.tree_util.keystr(path))
        # And goes on alone: the folder is that of a run.
        assert train.run(config, base[1], Workdir(tmp_path / name)).results == outcomes[name].results


def test_members_are_not_alike(together):
    losses = [outcome.results["test"]["loss"] for outcome in together[1].values()]
    assert len({round(loss, 3) for loss in losses}) == 3


def test_the_table_has_every_member_and_lines_have_every_loss(together):
    folder, outcomes, said = together
    page = (folder / "members.md").read_text()
    assert all(f"| {name} | " in page for name in NAMES)
    assert json.loads((folder / "members.json").read_text()) == {n: o.results for n, o in outcomes.items()}
    lines = [line for line in said if line.startswith("step ")]
    assert len(lines) == STEPS // 4
    last = [read_metrics(folder / name) for name in NAMES]
    told = [[r["loss"] for r in of if r["kind"] == "train"][-1] for of in last]
    assert "  ".join(f"{loss:.4f}" for loss in told) in lines[-1]
    assert f"{told[1]:.4f}" in (folder / NAMES[1] / "log.txt").read_text()


def stop_after(calls):
    asked = iter([False] * (calls - 1))
    return lambda: next(asked, True)


@pytest.mark.parametrize("stops", [pytest.param([2, 2], marks=pytest.mark.slow), [3], [6]], ids=str)
def test_stopped_members_go_on_exactly(base, together, tmp_path, stops):
    """After updates, and in the middle of the evaluation of one of them."""
    for calls in stops:
        assert not any(outcome.finished for outcome in run(base, tmp_path, stop_requested=stop_after(calls)).values())
    outcomes = run(base, tmp_path)
    assert all(outcome.finished for outcome in outcomes.values())
    for name, outcome in outcomes.items():
        assert records(tmp_path / name) == records(together[0] / name)
        assert outcome.results["test"] == together[1][name].results["test"]
    assert run(base, tmp_path) == outcomes  # And finished already.


@pytest.mark.parametrize("damage", ["the whole checkpoint", "its digests"])
def test_members_that_were_killed_between_saves_go_on_from_the_last_common_one(base, together, tmp_path, damage):
    run(base, tmp_path, stop_requested=stop_after(9))
    config = ensemble.member_configs(base[0], MEMBERS)[NAMES[1]]
    newest = Workdir(tmp_path / NAMES[1]).latest / str(latest(config, base[1], tmp_path / NAMES[1])[0])
    if damage == "its digests":
        (newest / DIGESTS).unlink()
    else:
        shutil.rmtree(newest)
    assert latest(config, base[1], tmp_path / NAMES[1])[0] == latest(config, base[1], tmp_path / NAMES[0])[0] - 2
    outcomes = run(base, tmp_path)
    for name, outcome in outcomes.items():
        assert outcome.results["test"] == together[1][name].results["test"]
        assert records(tmp_path / name) == records(together[0] / name)


def test_members_that_were_killed_while_the_first_checkpoints_were_written_begin_anew(base, together, tmp_path):
    run(base, tmp_path, stop_requested=stop_after(1))
    shutil.rmtree(Workdir(tmp_path / NAMES[2]).latest)
    for name, outcome in run(base, tmp_path).items():
        assert outcome.results["test"] == together[1][name].results["test"]
        assert records(tmp_path / name) == records(together[0] / name)


def test_a_finished_member_is_not_scored_again(base, together, tmp_path):
    """The stop comes while the second member's test text is scored."""
    calls = 0

    def stop():
        nonlocal calls
        calls += 1
        return (tmp_path / NAMES[0] / "results.json").exists()

    first = run(base, tmp_path, stop_requested=stop)
    assert [outcome.finished for outcome in first.values()] == [True, False, False] and calls
    outcomes = run(base, tmp_path)
    for name in NAMES:
        assert outcomes[name].finished and records(tmp_path / name) == records(together[0] / name)


@pytest.mark.parametrize("what", ["one more", "one ahead"])
def test_members_without_a_common_checkpoint_are_refused_and_keep_what_they_have(base, tmp_path, what):
    run(base, tmp_path, stop_requested=stop_after(9))
    chosen = MEMBERS
    if what == "one more":
        chosen = [*MEMBERS, {"seed": 9}]
    else:
        config = ensemble.member_configs(base[0], MEMBERS)[NAMES[2]]
        train.run(config, base[1], Workdir(tmp_path / NAMES[2]))
    before = {name: (records(tmp_path / name), sorted(Workdir(tmp_path / name).latest.iterdir())) for name in NAMES}
    with pytest.raises(ValueError, match=f"{re.escape(NAMES[0])}.*--members_out"):
        run(base, tmp_path, chosen)
    after = {name: (records(tmp_path / name), sorted(Workdir(tmp_path / name).latest.iterdir())) for name in NAMES}
    assert before == after and all(found for found, _ in after.values())


@pytest.mark.slow
def test_in_bfloat16_a_traced_rate_widens_nothing(base):
    """And members that drop nothing of queries, keys and values draw the other masks that they would draw alone."""
    names = ("model.dropout.embedding", "model.dropout.qkv", "model.dropout.weight", DROPOUT)
    config = config_tree.replace(base[0], {"model.dtype": DType.BFLOAT16, "average.start_step": -1})
    made = assemble(config, vocab_size=256)
    segments = train.training_reader(made, base[1]).segments(0, 2)
    state, rates = tiny_run.state(made), {name: [0.0, 0.3] for name in names}
    step = jax.jit(together_step(made.model, config))
    numbers = {name: np.asarray(values, np.float32) for name, values in rates.items()}
    _, found = step(numbers, *jax.tree.map(lambda leaf: np.stack([leaf, leaf]), (state, segments)))
    for i in range(2):
        alone = assemble(config_tree.replace(config, {n: v[i] for n, v in rates.items()}), vocab_size=256)
        _, expected = jax.jit(make_train_step(alone.model, alone.optimizer, alone.schedule, alone.config))(
            state, segments
        )
        # The same roundings, up to the order of sums.
        np.testing.assert_allclose(found.nats[i], expected.nats, rtol=2e-3)
        np.testing.assert_allclose(found.grad_norm[i], expected.grad_norm, rtol=2e-2)


def test_a_loss_that_is_not_finite_names_its_member(base, tmp_path):
    with pytest.raises(NonFiniteError, match=r"^learning_rate=1e\+20:.*\b\d+\b.*--member\b"):
        run(base, tmp_path, [{"seed": 1}, {RATE: 1e20}])


@pytest.mark.parametrize(
    ("chosen", "changes", "says"),
    [
        ([{"seed": 1}], {}, r"\b1\b"),
        ([{"seed": 1}, {"seed": 1}], {}, "seed=1; seed=1"),
        ([{}, {"seed": 1111}], {}, "base; seed=1111"),
        ([{"seed": 1}, {"seed": -1}], {}, r"\bseed\D*-1\b"),
        ([{"seed": 1}, {"seed": 2}], {"train.keep_checkpoints": 1}, r"keep_checkpoints\D*\b1\b"),
        ([{"seed": 1}, {"model.n_layer": 3}], {}, r"model\.n_layer\b.*model\.dropout"),
        ([{"seed": 1}, {DROPOUT: 1.5}], {}, r"model\.dropout\D*\b1\.5\b"),
        ([{"seed": 1}, {"seed": 2}], {"train.patience": 2}, r"train\.patience\D*\b2\b"),
    ],
)
def test_mistakes_are_refused(base, chosen, changes, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        run((config_tree.replace(base[0], changes), base[1]), tmp_path, chosen)
    assert not list(tmp_path.iterdir())
