"""Tests one call of S updates: the same numbers for every S and in parts of rows, what is scored,
memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import LossPart
from txl_jax.training.step import activation_penalty

# The loss of only the second half of each segment, without dropout and without a limit on the
# gradient.
HALF = {
    "model__n_layer": 1,
    "model__dropout__rate": 0.0,
    "optimizer__clip_norm": 1e9,
    "train__loss": LossPart.HALF,
}


# In float64 a batch in microbatches of one row has the same sums as the whole batch, up to tiny
# differences. In float32 they would differ by more, which Adam blows up.
EXACT = {"model__n_layer": 1, "model__dropout__rate": 0.0, "model__dtype": "float64"}
MICROBATCHES = EXACT | {"train__grad_accum_steps": tiny_run.B}
# What a mean over the batch must weigh rightly: fewer scored tokens, penalties, and an adaptive
# softmax.
CHANGES = [
    {"train__loss": LossPart.HALF},
    {"regularization__activation_l2": 2.0, "regularization__temporal_l2": 1.0},
    {"model__cutoffs": (4, 9), "model__div_val": 2},
]


def one_update(state=None, segments=None, changes=None):
    """(state, metrics) after one update, by default of the first state and segment."""
    built, train_step, _ = tiny_run.compiled(**(changes or {}))
    if state is None:
        state = tiny_run.state(built)
    if segments is None:
        segments = tiny_run.text().segments(0, 1)
    return tiny_run.call(built, train_step, state, segments)


def changed(array: np.ndarray, places) -> np.ndarray:
    """A copy of tokens in which these places have other tokens."""
    array = array.copy()
    array[places] = (array[places] + 1) % tiny.V
    return array


def with_weights(segments, places, value):
    """Segments in which these places have this weight."""
    weights = segments.weights.copy()
    weights[places] = value
    return segments._replace(weights=weights)


# Tests that share no compiled step with `trained` come first: from that fixture on, this file
# compiles as outside of tests, for equal bits, and that takes longer.


def test_the_reported_loss_is_the_models_loss():
    built, *_ = tiny_run.compiled(**HALF)
    state = tiny_run.state(built)
    segments = tiny_run.text().segments(0, 1)
    _, metrics = one_update(state, segments, HALF)

    @jax.jit
    def losses(params, tokens, targets, memory):
        variables = {"params": params}
        hidden, _ = built.model.apply(variables, tokens, memory, deterministic=True)
        return built.model.apply(variables, hidden, targets, method=built.model.nll)

    nll = losses(state.params, segments.inputs[0], segments.targets[0], state.memory)

    assert metrics.tokens == tiny_run.B * 4  # L = 7: positions 3, 4, 5, 6.
    np.testing.assert_allclose(metrics.learning_rate, built.schedule(0), rtol=1e-6)
    np.testing.assert_allclose(metrics.nats[0], nll[:, tiny_run.L // 2 :].sum(), rtol=1e-5)


def test_the_gradient_is_of_the_mean_over_scored_tokens():
    # Three equal rows have the mean of one; a sum, or a mean over all places, would not.
    segments = tiny_run.text().segments(0, 1)
    equal_rows = segments._replace(
        inputs=np.repeat(segments.inputs[:, :1], tiny_run.B, axis=1),
        targets=np.repeat(segments.targets[:, :1], tiny_run.B, axis=1),
    )
    first_row_only = with_weights(equal_rows, np.s_[:, 1:], 0)

    _, all_rows = one_update(segments=equal_rows, changes=HALF)
    _, one_row = one_update(segments=first_row_only, changes=HALF)

    np.testing.assert_allclose(one_row.grad_norm, all_rows.grad_norm, rtol=1e-5)
    np.testing.assert_allclose(one_row.nats * tiny_run.B, all_rows.nats, rtol=1e-5)
    assert one_row.tokens * tiny_run.B == all_rows.tokens


@pytest.mark.parametrize("changes", full_but(CHANGES[1:2], CHANGES), ids=str)
def test_microbatches_together_are_the_whole_batch(changes, x64):
    """Losses, gradient norms, parameters, moments and every row of the memory are the same, past an
    epoch's end.
    """
    in_microbatches = tiny_run.train(tiny_run.STEPS, **MICROBATCHES, **changes)
    whole = tiny_run.train(tiny_run.STEPS, **EXACT, **changes)

    tiny_run.assert_close(in_microbatches, whole, atol=1e-11)


def test_activation_penalties_by_hand():
    outputs = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    squares = 0.0
    squares_of_changes = 0.0
    for b, i, d in np.ndindex(2, 4, 3):
        squares += float(outputs[b, i, d]) ** 2
        if i > 0:
            squares_of_changes += float(outputs[b, i, d] - outputs[b, i - 1, d]) ** 2
    expected = 0.2 * squares / (2 * 4 * 3) + 0.1 * squares_of_changes / (2 * 3 * 3)

    penalty = activation_penalty(jnp.asarray(outputs), activation=0.2, temporal=0.1)

    assert penalty == pytest.approx(expected, rel=1e-5)


def test_a_segment_of_one_position_has_no_temporal_penalty():
    assert activation_penalty(jnp.ones((2, 1, 3)), activation=0.0, temporal=1.0) == 0


@pytest.fixture(scope="module")
def trained(usual_emitters):
    """(state, metrics) of ten updates, one per call."""
    return tiny_run.train(tiny_run.STEPS)


@pytest.mark.parametrize("per_call", full_but([5], [2, 5]))
def test_updates_per_call_change_no_bit(trained, per_call):
    """An epoch begins inside a call."""
    resets = tiny_run.text().segments(0, tiny_run.STEPS).reset[:, 0]
    inside_a_call = np.arange(tiny_run.STEPS) % per_call != 0
    assert resets[inside_a_call].any()

    in_calls = tiny_run.train(tiny_run.STEPS, train__segments_per_call=per_call)

    tiny_run.assert_equal(in_calls, trained)


def test_padding_contributes_nothing():
    segments = tiny_run.text().segments(0, 1)
    # The last two positions of row 1.
    end = np.s_[:, 1, tiny_run.L - 2 :]
    padded = with_weights(segments, end, 0)
    state, metrics = one_update(segments=padded)
    assert metrics.tokens == tiny_run.B * tiny_run.L - 2

    other_tokens = padded._replace(
        inputs=changed(padded.inputs, end), targets=changed(padded.targets, end)
    )
    other_state, other_metrics = one_update(segments=other_tokens)
    tiny_run.assert_equal((other_state.params, other_metrics), (state.params, metrics))

    # The same change where it counts.
    _, whole = one_update(segments=segments)
    _, changed_whole = one_update(segments=other_tokens._replace(weights=segments.weights))
    assert changed_whole.nats != whole.nats


def test_a_segment_of_padding_has_no_loss_and_no_gradient():
    padding = with_weights(tiny_run.text().segments(0, 1), np.s_[:], 0)

    _, metrics = one_update(segments=padding)

    assert (metrics.nats, metrics.tokens, metrics.grad_norm) == (0, 0, 0)


def test_ignored_targets_are_padding():
    """A negative target counts neither in the summed loss nor in the mean's number of tokens, as
    weight 0 does.
    """
    segments = tiny_run.text().segments(0, 1)
    # The last two positions of row 1. -100 is PyTorch's number for ignored targets.
    end = np.s_[:, 1, tiny_run.L - 2 :]
    targets = segments.targets.copy()
    targets[end] = -100

    state, metrics = one_update(segments=segments._replace(targets=targets))

    padded_state, padded_metrics = one_update(segments=with_weights(segments, end, 0))
    assert metrics.tokens == tiny_run.B * tiny_run.L - 2
    tiny_run.assert_close(
        (state.params, metrics), (padded_state.params, padded_metrics), rtol=1e-5, atol=1e-7
    )


def test_the_memory_reaches_the_next_segment_of_rows_that_are_not_reset():
    built, *_ = tiny_run.compiled()
    state, _ = one_update()
    assert state.memory.valid.tolist() == [tiny_run.L] * tiny_run.B, "one segment is in the memory"
    forgetful = state.replace(memory=tiny_run.state(built).memory)
    segments = tiny_run.text().segments(1, 1)
    all_reset = segments._replace(reset=np.ones_like(segments.reset))

    _, without_memory = one_update(forgetful, segments)
    _, after_reset = one_update(state, all_reset)
    _, with_memory = one_update(state, segments)

    tiny_run.assert_equal(after_reset, without_memory)
    assert with_memory.nats != without_memory.nats
