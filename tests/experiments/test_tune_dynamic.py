"""Tests the tuning of dynamic evaluation: what is scored, what is chosen, what is stored."""

import copy
import dataclasses
import json
import math
import shlex

import numpy as np
import pytest

from experiments import tune_dynamic
from experiments.tune_dynamic import Plan, beyond, search, tune, with_rule
from support import drawn_run
from txl_jax.cli import precedence
from txl_jax.config import DynamicRule, ExperimentConfig, config_tree
from txl_jax.errors import UserError
from txl_jax.runs.score_splits import Kind, Split, evaluate_splits
from txl_jax.runs.scoring_progress import Interrupted

# `Scores` is best at the rate in the middle and the decay at the end, beyond which 2e-2 is tried.
PLAN = Plan(learning_rates=(1e-3, 2e-3, 4e-3), decays=(0.0, 1e-2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, corpus, run)."""
    folder = tmp_path_factory.mktemp("run")
    config, corpus = drawn_run.on_text(folder, drawn_run.letters())
    run, _ = drawn_run.make(folder / "run", config, corpus)
    return with_rule(run.config), corpus, run


class Scores:
    """Replaces a model's scores by ones that follow from the numbers, and keeps the calls.

    With the best numbers of a split a token has a loss of 1, and without learning one of 9.
    """

    def __init__(self, monkeypatch):
        # The best numbers of each split.
        self.best = {Split.VALID: (2e-3, 1e-2), Split.TEST: (4e-3, 0.0)}
        self.diverges_from = math.inf  # The smallest rate that gives no finite loss.
        self.stop_at = math.inf  # The number of the call, from 1, that is interrupted.
        self.calls = []  # Split, and (rate, decay) or None without learning.
        self.weights = {"weight": np.zeros(3, np.float32)}
        monkeypatch.setattr(tune_dynamic._Scores, "_nats", self.nats)
        monkeypatch.setattr(
            tune_dynamic,
            "load_to_score",
            lambda *given, log: ("built", drawn_run.STEP, self.weights),
        )

    def nats(self, split, tokens, lengths):
        if len(self.calls) + 1 == self.stop_at:
            raise Interrupted(split)
        settings = lengths.dynamic
        if settings.rule is None:
            self.calls.append((split, None))
            return 9.0 * len(tokens)
        rate = settings.learning_rate
        decay = settings.decay
        self.calls.append((split, (rate, decay)))
        if rate >= self.diverges_from:
            return None
        best_rate, best_decay = self.best[split]
        distance = abs(math.log2(rate / best_rate)) + 10 * abs(decay - best_decay)
        return (1 + distance) * len(tokens)

    def of(self, split):
        """Returns the numbers of the calls for a split."""
        return [numbers for called, numbers in self.calls if called is split]


@pytest.fixture
def scores(monkeypatch):
    return Scores(monkeypatch)


def numbers(tuned):
    return tuned.settings.learning_rate, tuned.settings.decay


def test_validation_chooses_and_the_test_split_is_scored_with_the_choice_alone(
    trained, scores, tmp_path
):
    tuned = tune(*trained, dataclasses.replace(PLAN, out=str(tmp_path)))

    assert numbers(tuned) == (2e-3, 1e-2)
    rates_first = [None, (1e-3, 0.0), (2e-3, 0.0), (4e-3, 0.0)]
    # Then a larger decay is tried, because the best one is the largest of the list.
    assert scores.of(Split.VALID)[:5] == [*rates_first, (2e-3, 1e-2)]
    assert scores.of(Split.TEST) == [None, (2e-3, 1e-2)]
    assert scores.calls[-2:] == [(Split.TEST, None), (Split.TEST, (2e-3, 1e-2))]
    # Both splits have both scores, in the file too.
    stored = json.loads((tmp_path / "tune_dynamic.json").read_text())["tuned"]
    assert stored["eval"]["dynamic.learning_rate"] == 2e-3
    for split in Split:
        assert tuned.scores[split][Kind.STATIC].nll > tuned.scores[split][Kind.DYNAMIC].nll
        for kind in Kind:
            assert stored[split][kind]["loss"] == tuned.scores[split][kind].nll


# Of eight calls: the first, among the rates, the last of the decays, and the last of all.
@pytest.mark.parametrize("stop_at", [1, 3, 6, 8])
def test_a_stopped_command_goes_on_with_what_is_missing(trained, scores, tmp_path, stop_at):
    plan = dataclasses.replace(PLAN, out=str(tmp_path))
    whole = tune(*trained, dataclasses.replace(PLAN, out=str(tmp_path / "whole")))
    whole_calls = scores.calls

    scores.calls = []
    scores.stop_at = stop_at
    with pytest.raises(Interrupted):
        tune(*trained, plan)
    scores.stop_at = math.inf
    tuned = tune(*trained, plan)

    assert scores.calls == whole_calls
    assert tuned == whole
    # Everything is stored by now.
    scores.calls = []
    assert tune(*trained, plan) == whole
    assert scores.calls == []


def test_stored_scores_of_other_weights_are_not_used_and_an_earlier_result_stays_until_the_end(
    trained, scores, tmp_path
):
    plan = dataclasses.replace(PLAN, out=str(tmp_path))
    tune(*trained, plan)
    file = tmp_path / tune_dynamic.FILE
    result = json.loads(file.read_text())["tuned"]

    scores.calls = []
    scores.weights = {"weight": np.ones(3, np.float32)}
    scores.stop_at = 3
    with pytest.raises(Interrupted):
        tune(*trained, plan)

    # Both scores before the stop were computed again.
    assert len(scores.calls) == 2
    assert json.loads(file.read_text())["tuned"] == result


def test_stored_scores_of_other_settings_or_tokens_are_not_used(trained, scores, tmp_path):
    config, corpus, run = trained
    plan = dataclasses.replace(PLAN, out=str(tmp_path))
    tune(config, corpus, run, plan)
    n_call = len(scores.calls)

    scores.calls = []
    tune(config, corpus, run, dataclasses.replace(plan, valid_tokens=20, test_tokens=20))
    assert len(scores.calls) == n_call

    scores.calls = []
    tune(config_tree.replace(config, {"eval.segment_len": 3}), corpus, run, plan)
    assert len(scores.calls) == n_call

    # The scores without learning, one of each split, do not depend on the rule.
    scores.calls = []
    other_rule = config_tree.replace(config, {"eval.dynamic.rule": DynamicRule.SGD})
    tune(other_rule, corpus, run, plan)
    assert len(scores.calls) == n_call - 2


def test_stored_scores_of_another_member_are_not_used(trained, scores, tmp_path):
    config, corpus, run = trained
    plan = dataclasses.replace(PLAN, out=str(tmp_path))
    tune(config, corpus, run, plan)
    n_call = len(scores.calls)

    as_member = copy.copy(run)
    as_member.member = "seed=2"
    scores.calls = []
    tune(config, corpus, as_member, plan)

    assert len(scores.calls) == n_call


def test_only_the_first_tokens_are_scored(trained, scores, tmp_path):
    plan = dataclasses.replace(PLAN, out=str(tmp_path), valid_tokens=21, test_tokens=31)
    tuned = tune(*trained, plan)
    assert tuned.scores.keys() == {Split.VALID, Split.TEST}
    # The first token of a text has no score.
    assert tuned.scores[Split.VALID][Kind.DYNAMIC].tokens == 20
    assert tuned.scores[Split.TEST][Kind.DYNAMIC].tokens == 30


def test_rates_that_diverge_lose(trained, scores, tmp_path, capsys):
    scores.diverges_from = 2e-3
    tuned = tune(*trained, dataclasses.replace(PLAN, out=str(tmp_path)))
    assert tuned.settings.learning_rate == 1e-3
    # 2e-3 and 4e-3. Half of 1e-3 is tried too, and is worse.
    assert capsys.readouterr().out.count("diverged") == 2


def test_if_all_rates_diverge_the_test_split_is_not_scored(trained, scores, tmp_path):
    scores.diverges_from = 0.0
    with pytest.raises(UserError, match=r"--learning_rates"):
        tune(*trained, dataclasses.replace(PLAN, out=str(tmp_path)))
    assert scores.of(Split.TEST) == []


@pytest.mark.parametrize(
    ("values", "best", "expected"),
    [
        ([1.0, 2.0, 4.0], 2.0, 2.0),
        ([1.0, 2.0, 4.0], 16.0, 16.0),  # And 32 is worse.
        ([1.0, 2.0, 4.0], 0.25, 0.25),
        ([0.0, 1.0, 3.0], 0.0, 0.0),  # There is nothing below 0.
        ([0.0, 1.0], 4.0, 4.0),
        ([1.0], 5.0, 1.0),  # The only value stays.
        ([1.0, 2.0], 2.0**20, 2.0**9),  # Eight values are tried beyond the end.
    ],
)
def test_a_best_value_at_an_end_is_followed(values, best, expected, capsys):
    tried = []

    def loss_of(value):
        tried.append(value)
        return abs(value - best)

    assert search("decays", values, loss_of) == expected
    assert len(tried) == len(set(tried)), "each value is scored once"
    # The search gave up at an end. Without a note a user could not tell that the best value may lie
    # further.
    assert ("--decays" in capsys.readouterr().out) == (best == 2.0**20)


def test_a_value_beyond_an_end_has_few_digits():
    assert beyond([0.0007, 0.0021, 0.0063], 0.0063) == 0.0189
    # A third of it, with six digits.
    assert beyond([0.0007, 0.0021], 0.0007) == 0.000233333


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rates", 0.0), ("learning_rates", math.inf), ("decays", -1e-3)],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        Plan(workdir="run", **{name: (value,)}).validate()


def test_the_rule_is_rmsprop_unless_it_is_set():
    recorded = config_tree.replace(
        ExperimentConfig(),
        {"eval.dynamic.rule": DynamicRule.SGD, "eval.dynamic.learning_rate": 0.3},
    )
    assert with_rule(ExperimentConfig()).eval.dynamic.rule is DynamicRule.RMSPROP
    assert with_rule(recorded).eval.dynamic.rule is DynamicRule.SGD
    # The recorded rate becomes the default, so that stored scores do not depend on a number that
    # tuning replaces.
    assert with_rule(recorded).eval.dynamic.learning_rate == 1e-3


@pytest.mark.full
def test_scores_are_those_of_the_command_that_is_printed(trained, tmp_path):
    config, corpus, run = trained
    config = config_tree.replace(config, {"eval.batch_size": 2, "eval.dynamic.rule": "sgd"})
    plan = Plan(learning_rates=(0.05, 0.1), decays=(0.0, 1e-2), out=str(tmp_path))

    tuned = tune(config, corpus, run, plan)

    _, *words = shlex.split(tune_dynamic.command(tuned.settings, config, run))
    assert words[:3] == ["-m", "experiments.text", "--mode=eval"]
    assert words[3] == f"--workdir={run.path}"
    # The command's own flags, read as the command does, score the same.
    command_config = precedence.config_of_words(
        ExperimentConfig(), ["text", *words[4:]], recorded=run.config
    )
    results = evaluate_splits(command_config, corpus, run)
    losses = set()
    for split, kinds in tuned.scores.items():
        for kind, totals in kinds.items():
            loss = results[kind][split]["loss"]
            assert loss == pytest.approx(totals.nll, rel=1e-6), (split, kind)
            losses.add(totals.nll)
    assert len(losses) == 4, "two splits, without learning and with it, all differ"
