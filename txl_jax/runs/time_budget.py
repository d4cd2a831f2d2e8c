"""Computes how many training steps fit into a given time."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from txl_jax import flops
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError
from txl_jax.runs.build import Built, Compilation, build_for
from txl_jax.runs.trainer import training_reader
from txl_jax.runtime.output import say
from txl_jax.training.step import TrainState

_SECONDS_TO_TIME = 5.0  # Minimum time for which updates are timed.
# With fewer steps the warm-up, a tenth of them, has less than ten updates. If fewer steps fit into
# the minutes, a note tells how many minutes 100 steps need. If none fits, the error does.
_ADVISED_STEPS = 100


class FittingSteps(NamedTuple):
    """Number of training steps that fit into a time."""

    steps: int  # A multiple of `train.segments_per_call`.
    update_seconds: float  # Seconds per update.
    advised_steps: int  # `_ADVISED_STEPS`, rounded up to a multiple of `train.segments_per_call`.
    advised_minutes: int  # Minutes that `advised_steps` need, with evaluations.
    compilation: Compilation  # The training step that was timed.


def steps_in(
    seconds: float,
    config: ExperimentConfig,
    corpus: Corpus,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> FittingSteps:
    """Measures updates, and computes how many fit into a time together with their evaluations.

    The timed updates are discarded. Compilation is not counted. Evaluations are estimated from
    their FLOPs.

    Args:
      seconds: The time for training and evaluation.
      config: All settings.
      corpus: The text.
      clock: Returns the time in seconds.

    Raises:
      UserError: If the text cannot be trained on, or evaluations leave no time for updates.
    """
    built = build_for(config, corpus.vocabulary)
    built.check_batch_size()
    train = config.train
    compilation = built.compile_step()
    # On a busy machine compilation takes minutes, so a line says that it is over.
    say(f"speed     compiled in {compilation.seconds:.1f} s, timing some steps")
    update_seconds = _seconds_per_update(built, compilation, corpus, clock)

    # The device is assumed to do the FLOPs of an evaluation as fast as those of an update.
    vocab_size = built.model.vocab_size
    update_flops = flops.of_step(config, vocab_size=vocab_size, n_device=built.mesh.size).flops
    token_flops = flops.of_inference(config.model, config.eval, vocab_size=vocab_size)
    token_seconds = update_seconds * token_flops / (update_flops or math.inf)
    valid_seconds = token_seconds * len(corpus.valid[: config.eval.valid_tokens])
    test_seconds = token_seconds * len(corpus.test)

    # A step is an update and its share of the periodic evaluation. The last update is always
    # evaluated, even if it is not a multiple of eval_every.
    step_seconds = update_seconds + valid_seconds / train.eval_every
    end_seconds = valid_seconds + test_seconds
    per_call = train.segments_per_call
    steps = int((seconds - end_seconds) / step_seconds)
    steps -= steps % per_call

    advised_steps = per_call * math.ceil(_ADVISED_STEPS / per_call)
    advised_minutes = math.ceil((end_seconds + advised_steps * step_seconds) / 60)
    if steps <= 0:
        raise UserError(
            f"{seconds / 60:g} minutes are too few to train: a step takes {update_seconds:.3g} s, "
            f"and scoring the validation and test splits {end_seconds:.3g} s. Pass at least "
            f"{advised_minutes} minutes for {advised_steps} steps, or a smaller model."
        )
    return FittingSteps(steps, update_seconds, advised_steps, advised_minutes, compilation)


def _seconds_per_update(
    built: Built, compilation: Compilation, corpus: Corpus, clock: Callable[[], float]
) -> float:
    """Makes updates for some seconds, and returns the time of each after the first call.

    The command runs in a single process, so the clock may decide how many calls there are.
    """
    train = built.config.train
    reader = training_reader(built, corpus, built.config.seed)

    def call(state: TrainState, number: int) -> TrainState:
        """Makes the updates of one call, and waits for them."""
        segments = reader.segments(number * train.segments_per_call, train.segments_per_call)
        placed = built.place(segments, batch_size=train.batch_size)
        state, metrics = compilation.program(state, placed)
        jax.block_until_ready(metrics)
        return state

    # The first call is not timed: it fills buffers, and on GPUs loads kernels.
    state = call(built.init_state(), 0)
    began = clock()
    ended = began
    n_timed = 0
    while n_timed == 0 or ended - began < _SECONDS_TO_TIME:
        n_timed += 1
        state = call(state, n_timed)
        ended = clock()
    return (ended - began) / (n_timed * train.segments_per_call)
