"""Training for a time: how many training steps fit into it."""

import math
import time
from collections.abc import Callable

import jax

from txl_jax import flops
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import require
from txl_jax.data.corpus import Corpus
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.trainer import training_reader

_SECONDS_TO_TIME = 5.0  # Updates are timed for so long before their number is set.
_LEAST_CALLS = 2  # Calls that are made at least: one that is not timed, and one that is.
_LEAST_STEPS = 100  # Steps for which the error names the time that they need.


def steps_in(
    seconds: float,
    config: ExperimentConfig,
    corpus: Corpus,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, float]:
    """Measures updates, and computes how many fit into a time together with their evaluations.

    The timed updates are discarded. Compilation does not count, and evaluations count by their
    FLOPs.

    Args:
      seconds: The time for training and evaluation.
      config: All settings.
      corpus: The text.
      clock: Returns the time in seconds.

    Returns:
      (number of steps, a multiple of `train.segments_per_call`, seconds per update).

    Raises:
      UserError: If the text cannot be trained on, or evaluations leave no time for updates.
    """
    built = build_for(config, corpus.vocabulary)
    built.check_batch_size()
    train = config.train
    per_update = _seconds_per_update(built, corpus, clock)

    # The device is assumed to do the FLOPs of an evaluation as fast as those of an update.
    vocab_size = built.model.vocab_size
    update_flops = flops.of_step(config, vocab_size=vocab_size, n_device=built.mesh.size).flops
    token_flops = flops.of_inference(config.model, config.eval, vocab_size=vocab_size)
    per_token = per_update * token_flops / (update_flops or math.inf)
    validation = per_token * len(corpus.valid[: config.eval.valid_tokens])

    # The last update is evaluated too, whether it is a multiple of eval_every or not.
    last_scores = validation + per_token * len(corpus.test)
    per_step = per_update + validation / train.eval_every
    steps = int((seconds - last_scores) / per_step)
    steps -= steps % train.segments_per_call
    enough = math.ceil((last_scores + _LEAST_STEPS * per_step) / 60)
    require(
        steps > 0,
        f"{seconds / 60:g} minutes are too few to train: a step takes {per_update:.3g} s, and "
        f"scoring the validation and test splits {last_scores:.3g} s. Pass at least {enough} "
        f"minutes for {_LEAST_STEPS} steps, or a smaller model.",
    )
    return steps, per_update


def _seconds_per_update(built: Built, corpus: Corpus, clock: Callable[[], float]) -> float:
    """Makes updates for some seconds, and returns the time of each after the first call."""
    train = built.config.train
    reader = training_reader(built, corpus, built.config.seed)
    train_step = built.compile_step().program
    state = built.init_state()

    # The first call is not timed: it fills buffers, and on GPUs loads kernels.
    times = [clock()]  # The start, and the end of each call.
    n_call = 0
    while n_call < _LEAST_CALLS or times[-1] - times[1] < _SECONDS_TO_TIME:
        segments = reader.segments(n_call * train.segments_per_call, train.segments_per_call)
        placed = built.place(segments, batch_size=train.batch_size)
        state, metrics = train_step(state, placed)
        jax.block_until_ready(metrics)
        times.append(clock())
        n_call += 1
    return (times[-1] - times[1]) / ((n_call - 1) * train.segments_per_call)
