"""Tests of the comparison with nanoGPT, without its clone: what runs are made, for how long, what
is scored, and the file.
"""

import dataclasses
import math
import types

import numpy as np
import pytest

from benchmarks import nanogpt
from benchmarks.nanogpt import Pace, Plan, Result, Run, Shape, Side, Window
from txl_jax.errors import UserError

SMALL = Shape(4, 8)
LARGE = Shape(2, 16)
TEMPLATE = Run(Side.OURS, "text", 1000, 10.0, SMALL, learning_rate=0.0, seed=0)
PLAN = Plan(Side.NANOGPT, (SMALL, LARGE), (0.1, 0.2, 0.3), seeds=(1, 2, 3))
RESULT = Result(
    parameters=7,
    steps=50,
    training_seconds=10.1,
    wall_seconds=10.3,
    settings="warm-up 5",
    context="64",
    valid_bpc=2.5,
    test_bpc=2.25,
)


def result(valid_bpc, test_bpc=0.0):
    return dataclasses.replace(RESULT, valid_bpc=valid_bpc, test_bpc=test_bpc)


# The plan


def made_by(plan, valid_bits):
    """The runs of a plan in their order, as (shape, rate, seed), and their results.

    `valid_bits` has the bits of a run by shape and rate. The test split would choose the opposite.
    """
    results = {}
    order = []
    while run := plan.next_run(TEMPLATE, results):
        bits = valid_bits[run.shape, run.learning_rate]
        results[run] = result(bits, test_bpc=-bits)
        order.append((run.shape, run.learning_rate, run.seed))
    return order, results


def test_the_best_rate_and_shape_by_validation_get_all_seeds():
    valid_bits = {(SMALL, 0.1): 3.0, (SMALL, 0.2): 2.0, (SMALL, 0.3): 4.0, (LARGE, 0.2): 1.0}

    order, results = made_by(PLAN, valid_bits)

    search = [(SMALL, 0.1, 1), (SMALL, 0.2, 1), (SMALL, 0.3, 1), (LARGE, 0.2, 1)]
    # The first seed of the best was made in the search.
    assert order == [*search, (LARGE, 0.2, 2), (LARGE, 0.2, 3)]
    final = PLAN.final_runs(TEMPLATE, results)
    assert [(run.shape, run.learning_rate, run.seed) for run in final] == [
        (LARGE, 0.2, 1),
        (LARGE, 0.2, 2),
        (LARGE, 0.2, 3),
    ]
    assert {run.side for run in results} == {Side.NANOGPT}


def test_another_shape_that_is_worse_is_not_used():
    valid_bits = {(SMALL, 0.1): 1.0, (SMALL, 0.2): 2.0, (SMALL, 0.3): 4.0, (LARGE, 0.1): 1.5}

    order, _ = made_by(PLAN, valid_bits)

    assert order[3:] == [(LARGE, 0.1, 1), (SMALL, 0.1, 2), (SMALL, 0.1, 3)]


def test_runs_of_another_budget_or_text_are_not_this_plans():
    first = PLAN.next_run(TEMPLATE, {})
    assert first is not None
    others = {
        dataclasses.replace(first, budget_seconds=20.0): RESULT,
        dataclasses.replace(first, n_bytes=999): RESULT,
        dataclasses.replace(first, side=Side.OURS): RESULT,
    }

    assert PLAN.next_run(TEMPLATE, others) == first
    following = PLAN.next_run(TEMPLATE, others | {first: RESULT})
    assert following == dataclasses.replace(first, learning_rate=0.2)


def test_a_comparison_needs_all_runs_and_reads_only_the_last_ones():
    results = {}
    for plan in nanogpt.PLANS.values():
        while run := plan.next_run(TEMPLATE, results):
            with pytest.raises(UserError, match=str(run.learning_rate)):
                plan.final_runs(TEMPLATE, results)
            # The middle rate is the best, and its seeds have 3.1, 3.2 and 3.3 bits.
            is_middle = run.learning_rate == plan.learning_rates[1]
            results[run] = result(2.0 if is_middle else 9.0, test_bpc=3 + run.seed / 10)

    *_, ours, theirs = nanogpt.comparison(results, TEMPLATE)

    n_read = 50 * 2048
    bits = "3.200 (3.100, 3.200, 3.300)"
    assert ours == f"| ours | 7 | 64 x 32 | 0.01 | 64 | 50 | {n_read:,} | {bits} |"
    assert theirs == f"| nanogpt | 7 | 16 x 128 | 0.002 | 64 | 50 | {n_read:,} | {bits} |"


# The training time


def test_the_steps_that_are_left_follow_the_pace_of_all_steps():
    # Ten timed steps of one second.
    pace = Pace(budget_seconds=100.0, timed_steps=10, timed_seconds=10.0)
    assert pace.planned_steps == 100
    # Thirty more steps took twice as long: 70 s in 40 steps, and 40 s are left.
    assert pace.steps_left(30, 60.0) == 23
    # A step begins if at least half of it fits.
    assert pace.steps_left(90, 99.4) == 1
    assert pace.steps_left(90, 99.6) == 0
    assert pace.steps_left(90, 130.0) == 0


class Slowing:
    """A side whose steps take a second at first, and from the 31st on two seconds."""

    def __init__(self):
        self.now = 0.0
        self.totals = []

    def clock(self):
        return self.now

    def step(self, done, total):
        self.now += 1.0 if len(self.totals) < 30 else 2.0
        self.totals.append(total)


def test_a_training_ends_with_its_time_and_the_projection_with_it():
    side = Slowing()
    pace = nanogpt.time_steps(side, 80.0, side.clock)
    # Two steps are not timed, and then five seconds are.
    assert (pace.timed_steps, pace.timed_seconds) == (5, 5.0)
    side.totals.clear()

    steps, seconds = nanogpt.train(side, pace, side.clock)

    # 30 steps in 30 s, 25 in 50 s.
    assert steps == 55
    assert abs(seconds - 80.0) <= 1.0
    assert side.totals[0] == 80
    assert side.totals[-1] == steps, "the learning rate would not reach its end"


@pytest.mark.parametrize(("steps", "most", "warmup"), [(9, 30, 0), (200, 30, 20), (1000, 30, 30)])
def test_a_warmup_is_a_tenth_and_at_most_the_settings(steps, most, warmup):
    assert nanogpt.warmup_of(steps, most) == warmup


def test_nanogpts_rate_rises_and_falls_to_a_tenth():
    """As get_lr of its train.py, whose values these are."""
    shares = [nanogpt.share_of_rate(done, 24, warmup=4) for done in range(25)]

    np.testing.assert_allclose(shares[:5], [0.2, 0.4, 0.6, 0.8, 1.0])
    np.testing.assert_allclose(shares[14], 0.55)
    np.testing.assert_allclose(shares[24], 0.1)
    # A step more than the projection stays at the end.
    assert math.isclose(nanogpt.share_of_rate(25, 24, warmup=4), 0.1)


# What is scored


@pytest.mark.parametrize("stride", [1, 3, 4, 8])
@pytest.mark.parametrize("n_token", [9, 10, 20, 33])
def test_windows_score_each_token_but_the_first_once(n_token, stride):
    scored = []
    for window in nanogpt.windows_of(n_token, block=8, stride=stride):
        targets = range(window.start + 1, window.start + 1 + 8)
        assert window.start >= 0
        assert targets[-1] < n_token
        scored += targets[8 - window.n_scored :]

    assert scored == list(range(1, n_token))


def test_a_window_has_the_context_that_its_stride_leaves():
    windows = list(nanogpt.windows_of(16, block=8, stride=4))
    # After 8 targets each window scores 4, behind 4 bytes of context. The last one has 3 left.
    assert windows == [Window(0, 8), Window(4, 4), Window(7, 3)]
    with pytest.raises(UserError, match="9"):
        list(nanogpt.windows_of(8, block=8, stride=4))


def test_splits_are_nine_tenths_and_two_halves_of_a_tenth(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(250)))

    splits = nanogpt.read_splits(path, 200)

    assert splits.train.tolist() == list(range(180))
    assert splits.valid.tolist() == list(range(180, 190))
    assert splits.test.tolist() == list(range(190, 200))
    with pytest.raises(UserError, match="250"):
        nanogpt.read_splits(path, 251)


class Scores:
    """A side whose bits per byte are its context, or for a text of 20 bytes 10 minus it."""

    versions = "a version"
    parameters = 7
    settings = "settings"

    def prepare(self, pace):
        pass

    def step(self, done, total):
        pass

    def contexts(self):
        return (1, 2, 3)

    def describe(self, context):
        return f"context {context}"

    def score(self, tokens, context):
        return 10.0 - context if len(tokens) == 20 else float(context)


def test_the_context_is_chosen_on_validation_and_not_on_test(monkeypatch):
    ticks = iter(range(1000))
    clock = types.SimpleNamespace(process_time=lambda: next(ticks), perf_counter=lambda: 0.0)
    monkeypatch.setattr(nanogpt, "time", clock)
    splits = nanogpt.Splits(np.zeros(5), valid=np.zeros(20), test=np.zeros(30))

    made = nanogpt.make_run(Scores(), TEMPLATE, splits)

    assert made.context == "context 3"
    assert made.valid_bpc == 7.0
    assert made.test_bpc == 3.0


# The file


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "nanogpt.csv"
    other = dataclasses.replace(TEMPLATE, side=Side.NANOGPT, shape=LARGE, learning_rate=0.002)
    assert nanogpt.read_results(path) == {}

    nanogpt.add_result(path, TEMPLATE, RESULT, versions="1")
    nanogpt.add_result(path, other, result(1.0, 2.0), versions="2, 3")

    assert nanogpt.read_results(path) == {TEMPLATE: RESULT, other: result(1.0, 2.0)}


def test_the_same_command_makes_only_the_runs_that_are_missing(tmp_path, monkeypatch):
    """A command that was interrupted after two runs continues with the third."""
    text = tmp_path / "text"
    text.write_bytes(bytes(1000))
    words = ["run", "--side=ours", f"--text={text}", "--bytes=1000", "--seconds=10"]
    words.append(f"--csv={tmp_path / 'nanogpt.csv'}")
    made = []

    def make_run(trainer, run, splits):
        made.append((run.learning_rate, run.seed))
        if len(made) == 3:
            raise KeyboardInterrupt
        return result(run.learning_rate)

    monkeypatch.setattr(nanogpt, "make_trainer", lambda *_: Scores())
    monkeypatch.setattr(nanogpt, "make_run", make_run)
    # The command sets NPROC for its own process. This gives it back after the test.
    monkeypatch.setenv("NPROC", "1")
    with pytest.raises(KeyboardInterrupt):
        nanogpt.main(words)
    assert nanogpt.main(words) == 0
    assert nanogpt.main(words) == 0

    lowest, middle, highest = nanogpt.OUR_PLAN.learning_rates
    search = [(lowest, 1), (middle, 1), (highest, 1)]
    assert made == [*search, (highest, 1), (lowest, 2), (lowest, 3)]


def test_a_side_without_its_clone_is_exit_code_2(tmp_path, capsys):
    assert nanogpt.main(["run", "--side=nanogpt"]) == 2
    assert "--nanogpt" in capsys.readouterr().err
    with pytest.raises(UserError, match="--nanogpt"):
        nanogpt.import_model(tmp_path)


# Ours


@pytest.mark.parametrize(("planned", "place"), [(40, "post"), (900, "pre")])
def test_our_side_is_own_bytes_with_the_choices_of_minutes(planned, place, monkeypatch):
    """The warm-up is a tenth of few steps, few steps get post-norm, and the weights are reset."""
    small = {"model.n_layer": 1, "model.d_model": 16, "model.d_inner": 16, "model.d_head": 4}
    own_bytes = nanogpt.config_tree.replace(nanogpt.preset("own_bytes"), small)
    monkeypatch.setattr(nanogpt, "preset", {"own_bytes": own_bytes}.__getitem__)
    monkeypatch.setattr(nanogpt.Ours, "MEMORIES", (4, 8))
    text = np.random.default_rng(0).integers(0, 4, 4000).astype(np.uint8)
    run = dataclasses.replace(TEMPLATE, learning_rate=0.02, seed=3)

    side = nanogpt.Ours(run, text)
    side.step(0, planned)
    side.prepare(Pace(float(planned), timed_steps=1, timed_seconds=1.0))

    warmup = min(planned // 10, own_bytes.optimizer.warmup_steps)
    assert side.settings == f"warm-up {warmup}, {place}-norm"
    # Untrained: 256 bytes are about equally likely.
    before = side.score(text[:500], 4)
    assert 7.0 < before < 9.0
    for done in range(30):
        # The last steps are more than projected.
        side.step(done, 28)
    # The text has 4 bytes, equally likely.
    after = side.score(text[:500], 4)
    assert 1.9 < after < before - 3.0


# nanoGPT's side, with a model instead of its clone

BIGRAMS = """
import dataclasses

import torch


@dataclasses.dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.logits = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=0.0)

    def forward(self, inputs, targets):
        logits = self.logits(inputs)
        return logits, torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets)
"""


def test_nanogpts_side_scores_each_byte_and_learns(tmp_path, monkeypatch):
    """A table of bigrams has the same bits in all windows."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda model: model)
    # The rest of the suite keeps its threads.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(nanogpt, "commit_of", lambda clone: "a commit")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    (tmp_path / "model.py").write_text(BIGRAMS)
    # Each byte decides the next one.
    text = (np.arange(2000) % 5).astype(np.uint8)
    run = dataclasses.replace(TEMPLATE, side=Side.NANOGPT, learning_rate=0.1)

    side = nanogpt.NanoGPT(run, text, tmp_path)
    side.step(0, 10)
    side.prepare(Pace(200.0, timed_steps=1, timed_seconds=1.0))

    assert side.settings == "warm-up 20"
    assert list(side.contexts()) == [8, 4, 2]
    with torch.no_grad():
        table = side._model.logits.weight
        losses = torch.nn.functional.cross_entropy(
            table[text[:99].astype(int)], torch.from_numpy(text[1:100].astype(int))
        )
    bits = [side.score(text[:100], stride) for stride in side.contexts()]
    np.testing.assert_allclose(bits, losses.item() / math.log(2), rtol=1e-5)
    for done in range(200):
        side.step(done, 200)
    assert side.score(text[:100], 4) < 0.05
