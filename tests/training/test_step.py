"""Tests one call of S updates: the same numbers for every S and in parts of rows, what is scored,
memory.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import LossPart
from txl_jax.training.step import activation_penalty

# Half loss without dropout and without a limit on the gradient.
HALF = {"model__dropout__rate": 0.0, "optimizer__clip_norm": 1e9, "train__loss": LossPart.HALF}


def one_update(state=None, segments=None, *, step=0, **changes):
    """(state, metrics) after one update of segment `step`, by default from the first state."""
    made, train_step, _ = tiny_run.compiled(**changes)
    state = tiny_run.state(made) if state is None else state
    segments = tiny_run.text().segments(step, 1) if segments is None else segments
    return tiny_run.call(made, train_step, state, segments)


def changed(array: np.ndarray, places) -> np.ndarray:
    array = array.copy()
    array[places] = (array[places] + 1) % tiny.V
    return array


def with_weights(segments, places, value):
    weights = segments.weights.copy()
    weights[places] = value
    return segments._replace(weights=weights)


@pytest.fixture(scope="module")
def trained(usual_emitters):
    """(state, metrics) of ten updates, one per call."""
    return tiny_run.train(tiny_run.STEPS)


@pytest.mark.parametrize("per_call", full_but([5], [2, 5]))
def test_updates_per_call_change_no_bit(trained, per_call):
    resets = tiny_run.text().segments(0, tiny_run.STEPS).reset[:, 0]
    assert any(resets[step] for step in range(tiny_run.STEPS) if step % per_call), (
        "no epoch begins inside a call"
    )
    tiny_run.assert_equal(
        tiny_run.train(tiny_run.STEPS, train__segments_per_call=per_call), trained
    )


def test_the_reported_loss_is_that_of_the_model():
    made, *_ = tiny_run.compiled(**HALF)
    state, segments = tiny_run.state(made), tiny_run.text().segments(0, 1)
    _, metrics = one_update(state, segments, **HALF)
    assert metrics.tokens == tiny_run.B * 4  # L = 7: positions 3, 4, 5, 6.
    np.testing.assert_allclose(metrics.learning_rate, made.schedule(0), rtol=1e-6)
    hidden, _ = tiny.encoder(made.model)({"params": state.params}, segments.inputs[0], state.memory)
    nll = made.model.apply(
        {"params": state.params}, hidden, segments.targets[0], method=made.model.nll
    )
    np.testing.assert_allclose(metrics.nats[0], nll[:, tiny_run.L // 2 :].sum(), rtol=1e-5)


def test_the_gradient_is_that_of_the_mean_over_scored_tokens():
    # Three equal rows have the mean of one; a sum, or a mean over all places, would not.
    segments = tiny_run.text().segments(0, 1)
    repeated = {
        name: np.repeat(getattr(segments, name)[:, :1], tiny_run.B, axis=1)
        for name in ("inputs", "targets")
    }
    equal_rows = segments._replace(**repeated)
    _, all_rows = one_update(segments=equal_rows, **HALF)
    _, one_row = one_update(segments=with_weights(equal_rows, np.s_[:, 1:], 0), **HALF)
    np.testing.assert_allclose(one_row.grad_norm, all_rows.grad_norm, rtol=1e-5)
    np.testing.assert_allclose(one_row.nats * tiny_run.B, all_rows.nats, rtol=1e-5)
    assert one_row.tokens * tiny_run.B == all_rows.tokens


def test_padding_contributes_nothing():
    segments, end = tiny_run.text().segments(0, 1), np.s_[:, 1, tiny_run.L - 2 :]
    padded = with_weights(segments, end, 0)
    state, metrics = one_update(segments=padded)
    assert metrics.tokens == tiny_run.B * tiny_run.L - 2
    other = padded._replace(
        inputs=changed(padded.inputs, end), targets=changed(padded.targets, end)
    )
    other_state, other_metrics = one_update(segments=other)
    tiny_run.assert_equal((other_state.params, other_metrics), (state.params, metrics))
    # The same change where it counts.
    _, other_metrics = one_update(segments=other._replace(weights=segments.weights))
    assert other_metrics.nats != one_update(segments=segments)[1].nats
    _, metrics = one_update(segments=with_weights(segments, np.s_[:], 0))
    assert (metrics.nats, metrics.tokens, metrics.grad_norm) == (0, 0, 0)


def test_ignored_targets_are_padding():
    """A negative target counts neither in the summed loss nor in the mean's number of tokens, as
    weight 0 does.
    """
    segments, end = tiny_run.text().segments(0, 1), np.s_[:, 1, tiny_run.L - 2 :]
    targets = segments.targets.copy()
    targets[end] = -100
    state, metrics = one_update(segments=segments._replace(targets=targets))
    assert metrics.tokens == tiny_run.B * tiny_run.L - 2
    padded_state, padded_metrics = one_update(segments=with_weights(segments, end, 0))
    tiny_run.assert_close(
        (state.params, metrics), (padded_state.params, padded_metrics), rtol=1e-5, atol=1e-7
    )


def test_the_memory_reaches_the_next_segment_of_rows_that_are_not_reset():
    made, *_ = tiny_run.compiled()
    state, _ = one_update()
    assert state.memory.valid.tolist() == [tiny_run.L] * tiny_run.B
    segments, forgetful = (
        tiny_run.text().segments(1, 1),
        state.replace(memory=tiny_run.state(made).memory),
    )
    reset = segments._replace(reset=np.ones_like(segments.reset))
    (_, expected), (_, found), (_, other) = map(
        one_update, (forgetful, state, state), (segments, reset, segments)
    )
    tiny_run.assert_equal(found, expected)
    assert other.nats != expected.nats


def test_activation_penalties_by_hand():
    outputs = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    square = sum(float(x) ** 2 for x in outputs.ravel()) / outputs.size
    change = [
        float(outputs[b, i + 1, d] - outputs[b, i, d]) ** 2
        for b in range(2)
        for i in range(3)
        for d in range(3)
    ]
    found = activation_penalty(jnp.asarray(outputs), activation=0.2, temporal=0.1)
    assert found == pytest.approx(0.2 * square + 0.1 * np.mean(change), rel=1e-5)
    assert activation_penalty(jnp.ones((2, 1, 3)), activation=0.0, temporal=1.0) == 0


# A batch that goes through the model in parts of its rows. In float32 sums round otherwise, which
# Adam blows up.

EXACT = {"model__dropout__rate": 0.0, "model__dtype": "float64"}
PARTS = EXACT | {"train__grad_accum_steps": tiny_run.B}
CHANGES = [
    {"train__loss": LossPart.HALF},
    {"regularization__activation_l2": 2.0, "regularization__temporal_l2": 1.0},
    {"model__cutoffs": (4, 9), "model__div_val": 2},
]


@pytest.mark.parametrize("changes", full_but(CHANGES[1:2], CHANGES), ids=str)
def test_all_parts_together_are_the_whole_batch(changes, x64):
    """Losses, gradient norms, parameters, moments and every row of the memory, past an epoch's
    end.
    """
    found, whole = (tiny_run.train(tiny_run.STEPS, **of, **changes) for of in (PARTS, EXACT))
    tiny_run.assert_close(found, whole, atol=1e-11)
