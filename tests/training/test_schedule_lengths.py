"""Tests that the lengths of a schedule are data of the training step: the same program for all of
them, and the same bits as with constants.

What a schedule is: tests/training/test_optimizer.py. How often a run compiles:
tests/runs/test_compilations.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support import tiny, tiny_run
from txl_jax.config import (
    ExperimentConfig,
    OptimizerConfig,
    OptimizerName,
    Schedule,
    ScheduleOffset,
    TrainConfig,
)
from txl_jax.runs.build import Built
from txl_jax.runs.ensemble import Ensemble
from txl_jax.training.optimizer import ScheduleLengths, learning_rate, make_optimizer

PEAK = 0.01
MIN_RATIO = 0.1
# Two runs whose lengths differ, also in which of the settings are set.
LENGTHS = (
    {"train__steps": 40, "optimizer__warmup_steps": 4},
    {"train__steps": 60, "optimizer__warmup_steps": 0, "optimizer__decay_steps": 50},
)


def constant_rate(config, peak):
    """The schedule by optax's functions, whose lengths are constants."""
    optimizer = config.optimizer
    warmup = optimizer.warmup_steps
    # With the original's offset the decay starts at update 0, which is at the peak, and goes on
    # below the warm-up.
    start = 0
    rises_from = 1
    if optimizer.schedule_offset is ScheduleOffset.AFTER_WARMUP:
        start = warmup
        rises_from = 0
    steps = (optimizer.decay_steps or config.train.steps) - start
    if optimizer.schedule is Schedule.COSINE:
        decay = optax.cosine_decay_schedule(peak, steps, alpha=MIN_RATIO)
    else:
        decay = optax.linear_schedule(peak, peak * MIN_RATIO, steps)
    return lambda count: jnp.where(
        (rises_from <= count) & (count < warmup),
        peak * count / max(warmup, 1),
        decay(count - start),
    )


# Pairs of warm-up and steps, whose inverses are rounded. XLA may multiply by the rounded inverse of
# a constant. If lengths that are data were divided by instead, the bits would differ.
ROUNDED_LENGTHS = ((30, 1187), (7, 997), (333, 1111), (77, 3001))
# The updates of the longest schedule and a few after it. All schedules are computed for as many, so
# that one compiled program serves them all.
UPDATES = np.arange(3001 + 13, dtype=np.int32)


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("decay_steps", [None, 777])
@pytest.mark.parametrize("offset", ScheduleOffset)
@pytest.mark.parametrize("schedule", Schedule)
def test_rates_have_the_bits_of_lengths_that_are_constants(schedule, offset, decay_steps, wide):
    """Of lengths whose inverses are rounded, with a peak of the config and with a traced one."""
    configs = []
    for warmup, steps in ROUNDED_LENGTHS:
        optimizer = OptimizerConfig(
            learning_rate=PEAK,
            warmup_steps=warmup,
            schedule=schedule,
            schedule_offset=offset,
            decay_steps=decay_steps,
            min_lr_ratio=MIN_RATIO,
        )
        configs.append(ExperimentConfig(optimizer=optimizer, train=TrainConfig(steps=steps)))

    with tiny.enable_x64(wide):
        compare_rates(configs)


def compare_rates(configs):
    """Compares the rates of schedules that differ only in their lengths."""

    @jax.jit
    def as_data(lengths, peak, updates):
        of_config = learning_rate(configs[0], lengths=lengths)
        of_traced_peak = learning_rate(configs[0], peak=peak, lengths=lengths)
        return jax.vmap(of_config)(updates), jax.vmap(of_traced_peak)(updates)

    @jax.jit
    def as_constants(peak, updates):
        rates = []
        for config in configs:
            of_config = learning_rate(config)
            of_traced_peak = learning_rate(config, peak=peak)
            rates.append((jax.vmap(of_config)(updates), jax.vmap(of_traced_peak)(updates)))
        return rates

    @jax.jit
    def of_optax(updates):
        return [jax.vmap(constant_rate(config, PEAK))(updates) for config in configs]

    peak = jnp.asarray(PEAK)
    all_expected = jax.device_get(as_constants(peak, UPDATES))
    all_of_optax = jax.device_get(of_optax(UPDATES))
    for config, of_both_peaks, by_optax in zip(configs, all_expected, all_of_optax, strict=True):
        steps = config.train.steps
        actual = jax.device_get(as_data(ScheduleLengths.of(config), peak, UPDATES))
        for kind, rates, expected in zip(
            ("the config's peak", "a traced peak"), actual, of_both_peaks, strict=True
        ):
            case = f"{steps} steps, {kind}"
            assert rates.dtype == expected.dtype, case
            np.testing.assert_array_equal(rates, expected, err_msg=case)

            # Optax divides by the lengths. XLA of jax 0.10 turns that into the same products. Later
            # versions keep the division, which rounds once less.
            atol = 2 * PEAK * np.finfo(rates.dtype).eps
            np.testing.assert_allclose(rates, by_optax, rtol=0, atol=atol, err_msg=case)

            # The schedules are not trivial. With the original offset the decay has begun where the
            # warm-up ends, so that the peak is not reached there.
            up_to_the_end = rates[: steps + 13]
            assert 0.6 * PEAK < up_to_the_end.max() <= PEAK * (1 + 1e-6), case
            assert len(np.unique(up_to_the_end)) > 400, case


@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(OptimizerName, itertools.cycle(Schedule), strict=False))
)
def test_an_update_is_the_same_program_for_all_lengths(name, schedule):
    """With one of the schedules, a rate of the embedding's own, and a factor while weights are
    averaged.
    """
    # AdamW must have a weight decay.
    weight_decay = 0.0
    if name is OptimizerName.ADAMW:
        weight_decay = 0.1
    params = parameter_shapes()
    texts = set()
    for changes in LENGTHS:
        config = tiny.changed(
            tiny_run.CONFIG,
            optimizer__name=name,
            optimizer__weight_decay=weight_decay,
            optimizer__embedding_lr_multiplier=3.0,
            optimizer__schedule=schedule,
            average__start_step=4,
            average__lr_scale=0.5,
            **changes,
        )

        def update(lengths, grads, state, params, config=config):
            return make_optimizer(config, lengths=lengths).update(grads, state, params)

        state = jax.eval_shape(make_optimizer(config).init, params)
        lowered = jax.jit(update).lower(ScheduleLengths.of(config), params, state, params)
        texts.add(lowered.as_text())
    assert len(texts) == 1


@functools.cache
def parameter_shapes():
    return tiny_run.parts().abstract_state.params


def ensemble(built: Built) -> Ensemble:
    return Ensemble.of(built, [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.02}])


@pytest.mark.parametrize("kind", [lambda built: built, ensemble], ids=["run", "ensemble"])
def test_a_step_is_the_same_program_for_all_lengths(kind):
    """With microbatches, averaged weights, and a rate of the embedding's own."""
    settings = {
        "model__dropout__rate": 0.0,  # A smaller program, which no length reaches.
        "train__grad_accum_steps": 3,
        "average__start_step": 4,
        "average__lr_scale": 0.5,
        "optimizer__embedding_lr_multiplier": 3.0,
    }

    def text(**changes):
        return kind(tiny_run.parts(**settings, **changes)).lower_step().as_text()

    shorter = text(**LENGTHS[0], optimizer__schedule_offset=ScheduleOffset.AFTER_WARMUP)
    longer = text(**LENGTHS[1], optimizer__schedule_offset=ScheduleOffset.ORIGINAL)
    assert shorter == longer
    # The comparison would see a length: another setting makes another text.
    assert text(**LENGTHS[0], optimizer__min_lr_ratio=0.5) != shorter


# The step of test_optimizer.py, which is compiled once for both files.
AVERAGED = {"average__start_step": 4, "model__dropout__rate": 0.0}


def test_a_compiled_step_is_used_again_only_if_it_is_the_same_program():
    """Then it has the lengths of the run that uses it."""
    built, _, compilation = tiny_run.compiled(**AVERAGED)
    longer = tiny_run.parts(train__steps=40, optimizer__warmup_steps=20, **AVERAGED)
    shared = longer.compile_step(compilation)
    assert shared.executable is compilation.executable

    segments = tiny_run.text().segments(0, 1)
    state = tiny_run.state(built).replace(step=np.int32(7))
    _, metrics = tiny_run.call(built, compilation.program, state, segments)
    _, metrics_of_longer = tiny_run.call(longer, shared.program, state, segments)
    assert metrics.learning_rate == pytest.approx(float(built.schedule(7)), rel=1e-6)
    assert metrics_of_longer.learning_rate == pytest.approx(float(longer.schedule(7)), rel=1e-6)
    assert abs(metrics.learning_rate - metrics_of_longer.learning_rate) > 1e-4


def test_a_step_of_another_program_is_compiled_anew():
    built, _, compilation = tiny_run.compiled(**AVERAGED)
    other = tiny_run.parts(optimizer__clip_norm=0.25, **AVERAGED)
    other_text = other.lower_step().as_text()
    assert other_text != compilation.text

    # The same executable under another program's text must not be used. Nothing is compiled twice
    # here: JAX's cache has the program.
    of_other = compilation._replace(text=other_text)
    compiled = built.compile_step(of_other)

    assert compiled.executable is not compilation.executable
    assert compiled.text == compilation.text
