"""Tests one call of S updates: the same numbers for every S, what is scored, penalties, dropout, memory, types."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import DType, LossPart
from txl_jax.training.step import activation_penalty, make_train_step, position_weights

# Half loss without dropout and without a limit on the gradient.
HALF = {"model__dropout__rate": 0.0, "optimizer__clip_norm": 1e9, "train__loss": LossPart.HALF}


def one_update(state=None, segments=None, *, step=0, **changes):
    """(state, metrics) after one update of segment `step`, by default from the first state."""
    made, train_step, _ = tiny_run.compiled(**changes)
    state = tiny_run.state(made) if state is None else state
    segments = tiny_run.text().segments(step, 1) if segments is None else segments
    return tiny_run.call(made, train_step, state, segments)


def changed(array: np.ndarray, places) -> np.ndarray:
    """The tokens of `array`, others at `places`."""
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
    assert any(resets[step] for step in range(tiny_run.STEPS) if step % per_call), "no epoch begins inside a call"
    tiny_run.assert_equal(tiny_run.train(tiny_run.STEPS, train__segments_per_call=per_call), trained)


def test_every_update_moves_every_parameter_and_is_counted(trained):
    state, metrics = trained
    made, *_ = tiny_run.compiled()
    assert state.step == tiny_run.STEPS
    before = tiny_run.state(made).params
    for (path, first), last in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(state.params), strict=True):
        assert (first != last).mean() >= 0.9, jax.tree_util.keystr(path)  # A unit that never fires may stay.
    assert metrics.tokens.tolist() == [tiny_run.B * tiny_run.L] * tiny_run.STEPS
    rates = [float(made.schedule(step)) for step in range(tiny_run.STEPS)]
    np.testing.assert_allclose(metrics.learning_rate, rates, rtol=0, atol=1e-6 * max(rates))


def test_the_reported_loss_is_that_of_the_model():
    made, *_ = tiny_run.compiled(**HALF)
    state, segments = tiny_run.state(made), tiny_run.text().segments(0, 1)
    _, metrics = one_update(state, segments, **HALF)
    hidden, _ = tiny.encoder(made.model)({"params": state.params}, segments.inputs[0], state.memory)
    nll = made.model.apply({"params": state.params}, hidden, segments.targets[0], method=made.model.nll)
    np.testing.assert_allclose(metrics.nats[0], nll[:, tiny_run.L // 2 :].sum(), rtol=1e-5)


def test_half_loss_ignores_the_first_half():
    segments, middle = tiny_run.text().segments(0, 1), tiny_run.L // 2
    expected = one_update(segments=segments, **HALF)
    assert expected[1].tokens == tiny_run.B * 4  # L = 7: positions 3, 4, 5, 6.

    early = segments._replace(targets=changed(segments.targets, np.s_[..., :middle]))
    tiny_run.assert_equal(one_update(segments=early, **HALF), expected)
    late = segments._replace(targets=changed(segments.targets, np.s_[:, 1, middle]))
    assert one_update(segments=late, **HALF)[1].nats != expected[1].nats


def test_the_gradient_is_that_of_the_mean_over_scored_tokens():
    # Three equal rows have the mean of one; a sum, or a mean over all places, would not.
    segments = tiny_run.text().segments(0, 1)
    repeated = {name: np.repeat(getattr(segments, name)[:, :1], tiny_run.B, axis=1) for name in ("inputs", "targets")}
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
    other = padded._replace(inputs=changed(padded.inputs, end), targets=changed(padded.targets, end))
    other_state, other_metrics = one_update(segments=other)
    tiny_run.assert_equal((other_state.params, other_metrics), (state.params, metrics))
    # The same change where it counts.
    other_state, other_metrics = one_update(segments=other._replace(weights=segments.weights))
    assert other_metrics.nats != one_update(segments=segments)[1].nats


def test_a_segment_of_padding_alone_gives_zeros():
    segments = tiny_run.text().segments(0, 1)
    _, metrics = one_update(segments=with_weights(segments, np.s_[:], 0))
    assert (metrics.nats, metrics.tokens, metrics.grad_norm) == (0, 0, 0)


def test_dropout_is_a_function_of_the_step():
    made, *_ = tiny_run.compiled()
    first, segments = tiny_run.state(made), tiny_run.text().segments(0, 1)
    _, metrics = one_update(first.replace(step=np.int32(4)), segments)
    assert one_update(first.replace(step=np.int32(4)), segments)[1].nats == metrics.nats
    assert one_update(first.replace(step=np.int32(5)), segments)[1].nats != metrics.nats
    # And without dropout the step changes nothing.
    _, metrics = one_update(first, segments, **HALF)
    assert one_update(first.replace(step=np.int32(5)), segments, **HALF)[1].nats == metrics.nats


@pytest.mark.full
def test_dropout_is_a_function_of_the_seed():
    def program(seed):
        made = tiny_run.parts(seed=seed)
        train_step = make_train_step(made.model, made.optimizer, made.schedule, made.config)
        return str(jax.make_jaxpr(train_step)(tiny_run.state(made), tiny_run.text().segments(0, 1)))

    assert program(seed=4321) != program(seed=8765)
    assert program(seed=4321).replace("4321", "8765") == program(seed=8765)


def test_the_memory_reaches_the_next_segment():
    made, *_ = tiny_run.compiled()
    state, _ = one_update()
    assert state.memory.valid.tolist() == [tiny_run.L] * tiny_run.B
    _, metrics = one_update(state, step=1)
    forgetful = state.replace(memory=tiny_run.state(made).memory)
    assert one_update(forgetful, step=1)[1].nats != metrics.nats
    # Which rows forget is the reset bit's business.
    segments = tiny_run.text().segments(1, 1)
    assert not segments.reset.any()
    _, metrics = one_update(state, segments._replace(reset=~segments.reset))
    tiny_run.assert_equal(metrics, one_update(forgetful, segments)[1])


def test_the_gradient_norm_is_reported_before_clipping():
    def first_moment(state):
        return optax.tree.get(state.opt_state, "mu")

    made, *_ = tiny_run.compiled()
    limit, b1 = made.config.optimizer.clip_norm, 0.9
    state, metrics = one_update()
    assert metrics.grad_norm > 2 * limit
    np.testing.assert_allclose(optax.tree.norm(first_moment(state)) / (1 - b1), limit, rtol=1e-5)
    state, metrics = one_update(**HALF)
    np.testing.assert_allclose(optax.tree.norm(first_moment(state)) / (1 - b1), metrics.grad_norm[0], rtol=1e-5)


@pytest.mark.full
def test_bfloat16_keeps_parameters_and_moments_in_float32():
    narrow = HALF | {"model__dtype": DType.BFLOAT16}
    state, metrics = one_update(**narrow)
    _, expected = one_update(**HALF)
    assert state.memory.hidden.dtype == jnp.bfloat16
    kept = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim]
    assert {leaf.dtype for leaf in kept} == {np.dtype("float32")}
    # The losses are rounded about the right place, and each update is small against bfloat16's 3 digits.
    np.testing.assert_allclose(metrics.nats, expected.nats, rtol=0.02)
    np.testing.assert_allclose(metrics.grad_norm, expected.grad_norm, rtol=0.05)
    for leaf in jax.tree.leaves(state.params):
        assert (leaf != leaf.astype(jnp.bfloat16)).mean() > 0.5


@pytest.mark.parametrize("expected", [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [1]])
def test_position_weights(expected):
    np.testing.assert_array_equal(position_weights(len(expected), LossPart.HALF), expected)
    np.testing.assert_array_equal(position_weights(len(expected), LossPart.FULL), np.ones(len(expected)))


def test_activation_penalties_by_hand():
    outputs = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    square = sum(float(x) ** 2 for x in outputs.ravel()) / outputs.size
    change = [float(outputs[b, i + 1, d] - outputs[b, i, d]) ** 2 for b in range(2) for i in range(3) for d in range(3)]
    found = activation_penalty(jnp.asarray(outputs), activation=0.2, temporal=0.1)
    assert found == pytest.approx(0.2 * square + 0.1 * np.mean(change), rel=1e-5)
    assert activation_penalty(jnp.ones((2, 1, 3)), activation=0.0, temporal=1.0) == 0
