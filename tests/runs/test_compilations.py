"""Tests how often a run compiles its training step: once, whatever the lengths of its schedule.

That the program's text does not depend on them: tests/training/test_schedule_lengths.py.
"""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from support import runs, tiny
from support.runs import stop_after
from txl_jax.cli import plans
from txl_jax.cli.job import Job
from txl_jax.config import AverageConfig, DropoutConfig
from txl_jax.runs import time_budget
from txl_jax.runs.run import Run

MORE = 36
# Beginnings of lines in JAX's log. The first line also comes for a program that is read from the
# persistent cache instead of compiled, and the second only for such a program.
COMPILED = "Finished XLA compilation of jit(step) "
CACHE_HIT = "Persistent compilation cache hit for 'jit_step' "


@pytest.fixture
def empty_cache(tmp_path):
    """JAX's persistent cache in a new directory, for this test."""
    usual = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", usual)
    compilation_cache.reset_cache()


def fit(minutes, config, corpus, run):
    """Returns the config and the compiled step that a plan with --minutes trains with."""
    plan = plans.TimedPlan(minutes=minutes)
    # No flag was typed.
    job = Job(plan, defaults=config, words=[], places={}, flagfile=None)
    return plan.fit_steps(config, corpus, job, run)


@pytest.mark.usefixtures("empty_cache")
def test_the_step_is_compiled_once_for_minutes_and_for_more_steps(
    config, corpus, tmp_path, caplog, monkeypatch
):
    # Nothing here depends on the size of the program.
    config = tiny.changed(
        config,
        model__n_layer=1,
        model__dropout=DropoutConfig(),
        average=AverageConfig(),
        train__segments_per_call=1,
    )
    # One call of the step is timed, instead of calls for five seconds.
    monkeypatch.setattr(time_budget, "_SECONDS_TO_TIME", 0)

    def count(line):
        return sum(message.startswith(line) for message in caplog.messages)

    with jax.log_compiles():
        run = Run(tmp_path / "run")
        fitted, timed_step = fit(10.0, config, corpus, run)
        # Ten minutes have more steps than the config that was timed, and the warm-up is changed,
        # too: the compiled step serves other lengths.
        assert fitted.train.steps > MORE > config.train.steps
        fitted = tiny.changed(fitted, optimizer__warmup_steps=1)
        outcome = runs.train(
            fitted, corpus, run, compiled_step=timed_step, stop_requested=stop_after(2)
        )
        assert not outcome.finished
        assert outcome.step > 0
        assert (count(COMPILED), count(CACHE_HIT)) == (1, 0)

        # A start without the step of the timing, as in another process, finds the program in the
        # persistent cache.
        more = tiny.changed(fitted, train__steps=fitted.train.steps + MORE)
        assert runs.train(more, corpus, run, stop_requested=stop_after(2)).step > outcome.step
        assert (count(COMPILED), count(CACHE_HIT)) == (2, 1)


@pytest.mark.parametrize(("steps", "n_note"), [(20, 2), (30, 1)], ids=["too few", "enough"])
def test_few_steps_are_noted_before_training(config, corpus, tmp_path, monkeypatch, steps, n_note):
    """Another note, which always comes, has the number of steps."""
    fitting = time_budget.FittingSteps(
        steps, update_seconds=0.25, advised_steps=30, advised_minutes=7, compilation=None
    )
    # Nothing is timed.
    monkeypatch.setattr(plans, "steps_in", lambda seconds, *rest: fitting)
    run = Run(tmp_path)
    fitted, _ = fit(0.5, config, corpus, run)
    assert fitted.train.steps == steps
    assert len(run.notes) == n_note
    words = ("20 steps", "30 steps", "7 minutes", "--train.steps")
    is_noted = all(word in run.notes[-1] for word in words)
    assert is_noted is (n_note == 2)
