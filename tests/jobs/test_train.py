"""Tests the training job: stop and resume, damage, other settings, non-finite losses, best parameters, hooks."""

import dataclasses
import json
import os
import re

import jax
import numpy as np
import pytest

from txl_jax.assemble import assemble
from txl_jax.config import (
    CorpusName,
    DataConfig,
    DropoutConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.data.tokens.byte_vocabulary import ByteVocabulary
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.jobs import evaluate, generate, train
from txl_jax.jobs.restore import load_parameters, load_state
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.metrics_log import read_metrics
from txl_jax.runtime.sinks.sink import MEASURED
from txl_jax.training import results
from txl_jax.training.loop import Hook
from txl_jax.training.run_checkpoints import RunCheckpoints

STEPS = 24


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """3,000 bytes; an epoch of the config below is 37 steps."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = np.random.default_rng(0).choice(["one", "two", "three", "four"], 800)
    path.write_bytes(" ".join(words).encode()[:3000])
    return path


@pytest.fixture
def config(text_file):
    return ExperimentConfig(
        model=ModelConfig(n_layer=2, d_model=12, n_head=3, d_head=5, d_inner=14, dropout=DropoutConfig(rate=0.1)),
        data=DataConfig(corpus=CorpusName.TEXT, file=str(text_file)),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=4),
        train=TrainConfig(
            steps=STEPS,
            batch_size=8,
            segment_len=9,
            mem_len=7,
            segments_per_call=2,
            log_every=4,
            eval_every=8,
            checkpoint_every=6,
        ),
        eval=EvalConfig(batch_size=2, segment_len=11, mem_len=13, clamp_len=None, segments_per_call=3),
    )


@pytest.fixture(scope="module")
def corpus(text_file):
    return read_corpus(DataConfig(corpus=CorpusName.TEXT, file=str(text_file)), "nowhere", str(text_file.parent))


class StopAfter:
    """Asks to stop at the `calls`-th question."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self):
        self.calls -= 1
        return self.calls <= 0


def numbers(workdir):
    """The records of a run without what the clock decides."""
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in read_metrics(workdir.path)]


def weights(config, corpus, workdir):
    """Everything in the latest checkpoint, as arrays."""
    parts = assemble(config, vocab_size=corpus.vocabulary.size)
    with Checkpointer(workdir.latest, keep=2, log=print) as latest:
        step, state, _ = latest.restore(parts.training.abstract_state)
    return step, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture
def finished(config, corpus, tmp_path):
    workdir = Workdir(tmp_path / "whole")
    outcome = train.run(config, corpus, workdir)
    return workdir, outcome


def test_a_run_leaves_results_metrics_and_checkpoints(finished, config, corpus):
    workdir, outcome = finished
    assert outcome.finished and outcome.step == STEPS
    assert json.loads((workdir.path / "results.json").read_text()) == outcome.results
    assert outcome.results["test"]["tokens"] == len(corpus.test) - 1
    records = read_metrics(workdir.path)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(4, STEPS + 1, 4))
    valid = [r for r in records if r["kind"] == "valid"]
    assert [r["step"] for r in valid] == [8, 16, 24]
    assert outcome.results["best_valid"]["loss"] == min(r["loss"] for r in valid)
    assert weights(config, corpus, workdir)[0] == STEPS
    assert valid[-1]["loss"] < np.log(256)  # It learned something.


@pytest.mark.parametrize("stops", [[3], [4, 5], [1, 1, 1, 1]])
def test_a_stopped_run_goes_on_exactly(finished, config, corpus, tmp_path, stops):
    whole, _ = finished
    workdir = Workdir(tmp_path / "pieces")
    for calls in stops:
        assert not train.run(config, corpus, workdir, stop_requested=StopAfter(calls)).finished
    assert train.run(config, corpus, workdir).finished
    assert numbers(workdir) == numbers(whole)
    for resumed, undisturbed in zip(
        weights(config, corpus, workdir)[1], weights(config, corpus, whole)[1], strict=True
    ):
        np.testing.assert_array_equal(resumed, undisturbed)


def test_a_run_in_parts_that_end_after_given_updates_is_the_whole_run(finished, config, corpus, tmp_path):
    """A second start with the same end changes nothing; a stop in the evaluation there is repeated, and ends there."""
    whole, _ = finished
    workdir = Workdir(tmp_path / "pieces")
    assert not train.run(config, corpus, workdir, stop_after=8, stop_requested=StopAfter(5)).finished
    for _ in range(2):
        outcome = train.run(config, corpus, workdir, stop_after=8)
        assert (outcome.finished, outcome.step) == (False, 8)
        assert [r["step"] for r in read_metrics(workdir.path) if r["kind"] == "valid"] == [8]
    assert train.run(config, corpus, workdir, stop_after=STEPS).finished
    assert numbers(workdir) == numbers(whole)


@pytest.mark.parametrize("stop_after", [0, -8, 12])
def test_a_part_ends_where_the_run_is_evaluated(config, corpus, tmp_path, stop_after):
    with pytest.raises(UserError, match=rf"{stop_after}\b.*eval_every.*\b8\b"):
        train.run(config, corpus, Workdir(tmp_path / "run"), stop_after=stop_after)
    assert not (tmp_path / "run").exists()


def test_a_stop_during_evaluation_repeats_it(finished, config, corpus, tmp_path, monkeypatch):
    whole, _ = finished
    workdir = Workdir(tmp_path / "pieces")
    asked = StopAfter(5)  # Three calls of updates, then the first evaluation, which asks twice.
    assert not train.run(config, corpus, workdir, stop_requested=asked).finished
    assert not [r for r in read_metrics(workdir.path) if r["kind"] == "valid"]
    train.run(config, corpus, workdir)
    assert numbers(workdir) == numbers(whole)


@pytest.mark.parametrize("fails", ["repeated evaluation", "test"])
def test_what_was_recorded_before_a_kill_is_not_recorded_twice(finished, config, corpus, tmp_path, monkeypatch, fails):
    """A kill between a record and the file that marks it as done."""
    whole, _ = finished
    workdir = Workdir(tmp_path / "pieces")
    asked = StopAfter(5)  # In the first evaluation, which then has to be repeated.
    assert not train.run(config, corpus, workdir, stop_requested=asked).finished

    class Killed(BaseException):
        pass

    def killed(*unused):
        raise Killed

    with monkeypatch.context() as patch:
        if fails == "test":
            patch.setattr(results, "write_json", killed)
        else:
            patch.setattr(RunCheckpoints, "save", killed)
        with pytest.raises(Killed):
            train.run(config, corpus, workdir)
    kind = "test" if fails == "test" else "valid"
    assert [record["kind"] for record in read_metrics(workdir.path)][-1] == kind
    train.run(config, corpus, workdir)
    assert numbers(workdir) == numbers(whole)


def test_results_of_an_earlier_end_are_not_those_of_a_later_one(finished, config, corpus):
    """Files after a kill between the last checkpoint and the test scores of a run that went on from an end."""
    workdir, outcome = finished
    path = workdir.path / "results.json"
    path.write_text(json.dumps(outcome.results | {"steps": STEPS - 8, "test": {"loss": 0.0}}))
    assert train.run(config, corpus, workdir) == outcome
    assert json.loads(path.read_text()) == outcome.results


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"steps": 24, "eval": 7}', b"\xff"])
def test_damaged_results_are_made_again(finished, config, corpus, content):
    workdir, outcome = finished
    before = numbers(workdir)
    (workdir.path / "results.json").write_bytes(content)
    assert train.run(config, corpus, workdir) == outcome
    assert numbers(workdir) == before


def test_a_finished_run_is_left_as_it_is(finished, config, corpus, capsys):
    workdir, outcome = finished
    before = numbers(workdir)
    assert train.run(config, corpus, workdir) == outcome
    assert numbers(workdir) == before
    assert re.search(r"(?m)^finished\b", capsys.readouterr().out)


def test_a_run_from_before_a_setting_of_evaluation_existed_is_left_as_it_is(finished, config, corpus, monkeypatch):
    workdir, outcome = finished
    before, path = numbers(workdir), workdir.path / "results.json"
    found = json.loads(path.read_text())
    assert found["eval"].pop("stride") is None
    path.write_text(json.dumps(found))
    assert train.run(config, corpus, workdir).results == found
    assert numbers(workdir) == before
    # And its best is compared with: it is not chosen anew.
    notes = Checkpointer.notes

    def of_old(self, step):
        noted = notes(self, step)
        del noted["eval"]["stride"]
        return noted

    monkeypatch.setattr(Checkpointer, "notes", of_old)
    longer = config_tree.replace(config, {"train.checkpoint_every": 8, "train.log_every": 8})
    path.unlink()
    assert train.run(longer, corpus, workdir).results["best_valid"] == outcome.results["best_valid"]
    assert "--eval" not in (workdir.path / "log.txt").read_text()


def test_a_finished_run_is_scored_again_at_other_lengths(finished, config, corpus):
    workdir, outcome = finished
    again = train.run(config_tree.replace(config, {"eval.mem_len": 3}), corpus, workdir)
    assert again.results["eval"]["mem_len"] == 3
    assert again.results["test"]["loss"] != outcome.results["test"]["loss"]


def test_a_damaged_best_checkpoint_costs_only_the_best(finished, config, corpus, capsys):
    workdir, _ = finished
    (workdir.path / "results.json").unlink()
    for path in workdir.best.rglob("*"):
        if path.is_file() and path.name != "digests.json":
            path.write_bytes(path.read_bytes()[:-1] + b"#")
    outcome = train.run(config, corpus, workdir)
    assert outcome.finished and outcome.results["best_valid"] is None
    assert str(workdir.best) in capsys.readouterr().out
    assert generate.run(config, corpus.vocabulary, workdir)


def test_a_damaged_newest_checkpoint_falls_back_and_is_logged(finished, config, corpus, tmp_path, capsys):
    whole, _ = finished
    workdir = Workdir(tmp_path / "pieces")
    train.run(config, corpus, workdir, stop_requested=StopAfter(9))  # Checkpoints of steps 12 and 14.
    newest = workdir.latest / "14"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    capsys.readouterr()
    train.run(config, corpus, workdir)
    printed = capsys.readouterr().out
    assert str(newest) in printed and re.search(r"resum\w+\D*\b12\b", printed)
    assert numbers(workdir) == numbers(whole)


def test_other_settings_in_a_used_workdir_are_refused_by_name(finished, config, corpus):
    workdir, _ = finished
    before = (workdir.path / "config.json").read_bytes()
    other = config_tree.replace(config, {"model.n_layer": 3, "optimizer.learning_rate": 0.02, "train.log_every": 2})
    with pytest.raises(UserError, match="--model") as error:
        train.run(other, corpus, workdir)
    message = str(error.value)
    assert re.search(r"--model\.n_layer\D*\b2\b\D*\b3\b", message)
    assert re.search(r"--optimizer\.learning_rate\D*\b0\.01\b\D*\b0\.02\b", message)
    assert "log_every" not in message  # It does not touch the training.
    assert (workdir.path / "config.json").read_bytes() == before


def test_another_text_in_a_used_workdir_is_refused(finished, config, corpus):
    workdir, _ = finished
    with pytest.raises(ValueError, match=re.escape(corpus.description)):
        train.run(config, dataclasses.replace(corpus, digest="0" * 64), workdir)


def test_settings_that_do_not_touch_training_may_change(config, corpus, tmp_path, capsys):
    workdir = Workdir(tmp_path / "run")
    train.run(config, corpus, workdir, stop_requested=StopAfter(2))
    other = config_tree.replace(config, {"train.log_every": 2})
    assert train.run(other, corpus, workdir).finished
    assert re.search(r"--train\.log_every\D*\b4\b\D*\b2\b", capsys.readouterr().out)


def test_two_runs_in_one_workdir_are_refused(config, corpus, tmp_path):
    workdir = Workdir(tmp_path / "run").create()
    with workdir.lock(), pytest.raises(UserError, match=rf"\b{os.getpid()}\b.*--workdir"):
        train.run(config, corpus, workdir)


def test_a_workdir_that_cannot_be_made_is_one_sentence(config, corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.*--workdir"):
        train.run(config, corpus, Workdir(tmp_path / "file" / "run"))


def test_a_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(config, corpus, tmp_path):
    workdir = Workdir(tmp_path / "run")
    train.run(config, corpus, workdir, stop_requested=StopAfter(3))
    steps = sorted(path.name for path in workdir.latest.iterdir())
    # The same run, but with a rate that blows up; the workdir records that it was started so.
    wild = config_tree.replace(config, {"optimizer.learning_rate": 1e30})
    workdir.record(wild, TextInfo.of(corpus))
    with pytest.raises(NonFiniteError) as error:
        train.run(wild, corpus, workdir)
    assert re.search(r"(?<![\w.])6(?![\w.])", str(error.value)), "the step of the checkpoint"
    assert sorted(path.name for path in workdir.latest.iterdir()) == steps


def test_a_text_too_short_for_the_batch_is_refused_before_anything_is_written(config, corpus, tmp_path):
    workdir = Workdir(tmp_path / "run")
    with pytest.raises(ValueError, match=r"train\.batch_size"):
        train.run(config_tree.replace(config, {"train.batch_size": 2000}), corpus, workdir)
    assert not workdir.path.exists()


def test_evaluation_and_generation_use_the_best_parameters(finished, config, corpus, capsys):
    workdir, outcome = finished
    scored = evaluate.run(config, corpus, workdir, trained_on=TextInfo.of(corpus))
    assert scored["test"] == {k: v for k, v in outcome.results["test"].items() if k != "step"}
    assert scored["step"] == outcome.results["best_valid"]["step"]
    longer = config_tree.replace(config, {"generate.length": 30, "generate.samples": 2, "generate.prompt": "one "})
    first = generate.run(longer, corpus.vocabulary, workdir)
    assert [len(text) for text in first] == [30, 30] and first[0] != first[1]
    assert generate.run(longer, corpus.vocabulary, workdir) == first
    assert (workdir.path / "sample-seed0.txt").read_bytes().startswith(b"one " + first[0])


def test_evaluation_of_an_untrained_workdir_is_one_sentence(config, corpus, tmp_path):
    with pytest.raises(UserError, match="--mode=train"):
        evaluate.run(config, corpus, Workdir(tmp_path), trained_on=TextInfo.of(corpus))
    with pytest.raises(UserError, match=r"config\.json"):
        Workdir(tmp_path).load()


def test_evaluation_of_another_kind_of_text_is_refused(finished, config, corpus):
    workdir, _ = finished
    other = TextInfo(corpus.name, "letters", corpus.digest, ByteVocabulary(b"abc"))
    with pytest.raises(ValueError, match=r"\b3\b.*\b256\b"):
        evaluate.run(config, corpus, workdir, trained_on=other)


def test_a_prompt_with_bytes_outside_the_vocabulary_is_refused(finished, config):
    workdir, _ = finished
    asked = config_tree.replace(config, {"generate.prompt": "one\n"})
    with pytest.raises(ValueError, match=r"prompt.*\b10\b"):
        generate.run(asked, ByteVocabulary(b" enotw"), workdir)


def test_generation_stops_on_request(finished, config, corpus):
    workdir, _ = finished
    asked = config_tree.replace(config, {"generate.length": 100})
    texts = generate.run(asked, corpus.vocabulary, workdir, stop_requested=StopAfter(3))
    assert len(texts[0]) == 32  # Two blocks of 16, after as many questions.


def test_the_mean_of_the_newest_checkpoints_is_scored(finished, config, corpus):
    workdir, _ = finished
    parts = assemble(config, vocab_size=corpus.vocabulary.size)
    each = []
    with Checkpointer(workdir.latest, keep=2, log=print) as latest:
        for before in (None, STEPS):
            step, state, _ = latest.restore(parts.training.abstract_state, before=before)
            each.append(state.params)
    assert step == STEPS - 6
    averaged = assemble(config_tree.replace(config, {"eval.average_checkpoints": 2}), vocab_size=corpus.vocabulary.size)
    logged = []
    step, found = load_parameters(averaged, workdir, log=logged.append)
    assert step == STEPS and [re.findall(r"\d+", line) for line in logged] == [[str(STEPS - 6), str(STEPS)]]
    for a, b, mean in zip(*map(jax.tree.leaves, (*each, found)), strict=True):
        np.testing.assert_allclose(mean, (np.asarray(a) + np.asarray(b)) / 2, rtol=1e-6)
    more = assemble(config_tree.replace(config, {"eval.average_checkpoints": 3}), vocab_size=corpus.vocabulary.size)
    with pytest.raises(ValueError, match=r"average_checkpoints\D*\b3\b.*\b2\b"):
        load_parameters(more, workdir, log=logged.append)


def test_hooks_of_the_caller_see_the_run_change_it_and_stop_it(finished, config, corpus, tmp_path):
    seen = []

    def hook(context):
        seen.append(context.step)
        context.record("watch", {"norm": float(np.linalg.norm(jax.tree.leaves(context.state.params)[0]))})
        if context.step == 8:
            context.log("that is enough")
            context.request_stop()

    workdir = Workdir(tmp_path)
    outcome = train.run(config, corpus, workdir, hooks=[Hook(4, hook)])
    assert not outcome.finished and outcome.step == 8 and seen == [4, 8]
    assert [record["step"] for record in read_metrics(tmp_path) if record["kind"] == "watch"] == [4, 8]
    assert "that is enough" in (tmp_path / "log.txt").read_text()
    assert train.run(config, corpus, workdir).finished
    without = [record for record in numbers(workdir) if record["kind"] != "watch"]
    assert without == numbers(finished[0])


def test_a_state_that_a_hook_returns_is_trained_on_and_saved(config, corpus, tmp_path):
    def zero(context):
        return context.state.replace(params=jax.tree.map(lambda leaf: leaf * 0, context.state.params))

    workdir = Workdir(tmp_path)
    train.run(config, corpus, workdir, hooks=[Hook(6, zero)], stop_requested=StopAfter(3))
    step, state, _ = load_state(assemble(config, vocab_size=corpus.vocabulary.size), workdir, log=print)
    assert step == 6 and not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.params))


def test_a_workdir_of_an_older_version_is_refused_in_one_sentence(finished, config, corpus):
    workdir, _ = finished
    saved = json.loads(workdir.config_file.read_text())
    settings = saved["config"]
    settings["train.batch_chunks"] = settings.pop("train.grad_accum_steps")
    settings["model.dropout"] = settings.pop("model.dropout.rate")
    workdir.config_file.write_text(json.dumps(saved))
    for act in (lambda: train.run(config, corpus, workdir), workdir.load):
        with pytest.raises(UserError, match=r"train\.batch_chunks.*--workdir") as error:
            act()
        assert "\n" not in str(error.value)
