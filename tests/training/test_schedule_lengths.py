"""Tests that the lengths of a schedule are data of the training step: the same program for all of
them, and the same bits as with constants.

What a schedule is: tests/training/test_optimizer.py. How often a run compiles:
tests/runs/test_compilations.py.
"""

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

PEAK, MIN_RATIO = 0.01, 0.1
# Settings that other lengths have.
LENGTHS = (
    {"train__steps": 40, "optimizer__warmup_steps": 4},
    {"train__steps": 60, "optimizer__warmup_steps": 0, "optimizer__decay_steps": 50},
)


def constant_rate(config, peak):
    """The schedule by optax's functions, whose lengths are constants."""
    optimizer = config.optimizer
    warmup = optimizer.warmup_steps
    start = warmup if optimizer.schedule_offset is ScheduleOffset.AFTER_WARMUP else 0
    steps = (optimizer.decay_steps or config.train.steps) - start
    if optimizer.schedule is Schedule.COSINE:
        decay = optax.cosine_decay_schedule(peak, steps, alpha=MIN_RATIO)
    else:
        decay = optax.linear_schedule(peak, peak * MIN_RATIO, steps)
    # Of the original, update 0 is at the peak.
    rises_from = 0 if optimizer.schedule_offset is ScheduleOffset.AFTER_WARMUP else 1
    return lambda count: jnp.where(
        (rises_from <= count) & (count < warmup),
        peak * count / max(warmup, 1),
        decay(count - start),
    )


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("decay_steps", [None, 777])
@pytest.mark.parametrize("offset", ScheduleOffset)
@pytest.mark.parametrize("schedule", Schedule)
def test_rates_have_the_bits_of_a_schedule_of_constants(schedule, offset, decay_steps, wide):
    """Of lengths whose inverses are rounded, with a peak of the config and with a traced one."""
    with tiny.enable_x64(wide):
        compare_rates(schedule, offset, decay_steps)


# Warm-up and steps, whose inverses are rounded.
ROUNDED_LENGTHS = ((30, 1187), (7, 997), (333, 1111), (77, 3001))


def compare_rates(schedule, offset, decay_steps):
    for warmup, steps in ROUNDED_LENGTHS:
        config = ExperimentConfig(
            optimizer=OptimizerConfig(
                learning_rate=PEAK,
                warmup_steps=warmup,
                schedule=schedule,
                schedule_offset=offset,
                decay_steps=decay_steps,
                min_lr_ratio=MIN_RATIO,
            ),
            train=TrainConfig(steps=steps),
        )
        compare_rates_of(config)


def compare_rates_of(config):
    counts = jnp.arange(config.train.steps + 13, dtype=jnp.int32)
    lengths = jax.tree.map(jnp.asarray, ScheduleLengths.of(config))
    for traced in (None, jnp.asarray(PEAK)):

        @jax.jit
        def as_data(lengths, peak, counts):
            return jax.vmap(learning_rate(config, peak=peak, lengths=lengths))(counts)

        @jax.jit
        def as_constants(peak, counts):
            return jax.vmap(constant_rate(config, PEAK if peak is None else peak))(counts)

        found = as_data(lengths, traced, counts)
        expected = as_constants(traced, counts)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        # With the original offset the decay has begun where the warm-up ends.
        assert 0.6 * PEAK < found.max() <= PEAK * (1 + 1e-6)
        assert len(np.unique(found)) > 400


@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(OptimizerName, itertools.cycle(Schedule), strict=False))
)
def test_an_update_is_the_same_program_for_all_lengths(name, schedule):
    """With one of the schedules, a rate of the embedding's own, and a factor while weights are
    averaged.
    """
    texts = set()
    for changes in LENGTHS:
        made = tiny_run.parts(
            optimizer__name=name,
            optimizer__weight_decay=0.1 if name is OptimizerName.ADAMW else 0.0,
            optimizer__embedding_lr_multiplier=3.0,
            optimizer__schedule=schedule,
            average__start_step=4,
            average__lr_scale=0.5,
            **changes,
        )
        config = made.config

        def update(lengths, grads, state, params, config=config):
            return make_optimizer(config, lengths=lengths).update(grads, state, params)

        params = made.abstract_state.params
        lowered = jax.jit(update).lower(
            ScheduleLengths.of(config), params, made.abstract_state.opt_state, params
        )
        texts.add(lowered.as_text())
    assert len(texts) == 1


def ensemble(built: Built) -> Ensemble:
    return Ensemble.of(built, [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.02}])


@pytest.mark.parametrize("kind", [lambda built: built, ensemble], ids=["run", "ensemble"])
def test_a_step_is_the_same_program_for_all_lengths(kind):
    """With microbatches, averaged weights, and a rate of the embedding's own."""
    settings = {
        "train__grad_accum_steps": 3,
        "average__start_step": 4,
        "average__lr_scale": 0.5,
        "optimizer__embedding_lr_multiplier": 3.0,
    }
    offsets = zip(ScheduleOffset, LENGTHS, strict=True)
    made = [
        kind(tiny_run.parts(**settings, **changes, optimizer__schedule_offset=offset))
        for offset, changes in offsets
    ]
    first, second = (built.lower_step().as_text() for built in made)
    assert first == second
    # The comparison would see a length: another setting makes another text.
    other = kind(tiny_run.parts(**settings, **LENGTHS[0], optimizer__min_lr_ratio=0.5))
    assert other.lower_step().as_text() != first


def test_a_compiled_step_is_used_again_only_if_it_is_the_same_program():
    """Then it has the lengths of the run that uses it."""
    made, _, compilation = tiny_run.compiled()
    longer = tiny_run.parts(train__steps=40, optimizer__warmup_steps=20)
    shared = longer.compile_step(compilation)
    assert shared.executable is compilation.executable
    segments = tiny_run.text().segments(0, 1)
    state = tiny_run.state(made).replace(step=np.int32(7))
    _, own = tiny_run.call(made, compilation.program, state, segments)
    _, others = tiny_run.call(longer, shared.program, state, segments)
    assert own.learning_rate == pytest.approx(float(made.schedule(7)), rel=1e-6)
    assert others.learning_rate == pytest.approx(float(longer.schedule(7)), rel=1e-6)
    assert abs(own.learning_rate - others.learning_rate) > 1e-4

    stronger = tiny_run.parts(optimizer__clip_norm=0.25)
    assert stronger.compile_step(compilation).executable is not compilation.executable
