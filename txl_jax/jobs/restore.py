"""Finding the parameters of a trained run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.errors import CheckpointError
from txl_jax.jobs import agreement
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import Checkpointer


def load_to_score(
    config: ExperimentConfig, corpus: Corpus, workdir: Workdir, *, trained_on: TextInfo, log: Callable[[str], None]
) -> tuple[RunComponents, int, Any]:
    """A trained run that is to score a text: (its parts, step, parameters).

    Args:
      trained_on: what the run was trained on; another text may be scored if its vocabulary is the same.

    Raises:
      ValueError: the text has another vocabulary, or processes have different ones.
      OSError: the workdir cannot be written to.
      FileNotFoundError, CheckpointError: as `load_parameters`.
    """
    agreement.check(config, corpus)
    if corpus.vocabulary != trained_on.vocabulary:
        raise ValueError(
            f"the run was trained on {trained_on.description!r} with {trained_on.vocabulary.size} tokens, and "
            f"{corpus.description!r} was read with {corpus.vocabulary.size} or others; read it in the run's vocabulary"
        )
    if corpus.digest != trained_on.digest:
        log(f"note: this is not the text of training ({trained_on.description}), but {corpus.description}")
    make(workdir)
    parts = distributed.run_on_all(lambda: assemble(config, vocab_size=corpus.vocabulary.size))
    return parts, *load_parameters(parts, workdir, log=log)


def make(workdir: Workdir) -> None:
    """Makes the folder of a run; raises `OSError` if it cannot be written to."""
    distributed.broadcast_from_primary(lambda: workdir.create() and None)


def load_parameters(parts: RunComponents, workdir: Workdir, *, log: Callable[[str], None]) -> tuple[int, Any]:
    """The best parameters of a run, or, before its first evaluation, the latest: (step, parameters).

    With `eval.average_checkpoints` the mean of that many newest checkpoints, and the newest's step.

    Raises:
      FileNotFoundError: the run has no checkpoint.
      CheckpointError: it has, but none can be read.
      ValueError: a mean of more checkpoints than there are.
    """
    if parts.config.eval.average_checkpoints:
        return _mean_of_newest(parts, workdir, parts.config.eval.average_checkpoints, log=log)
    has_best, has_latest = distributed.broadcast_from_primary(lambda: [workdir.best.exists(), workdir.latest.exists()])
    if has_best:
        try:
            with Checkpointer(workdir.best, keep=1, log=log) as best:
                restored = best.restore({"params": parts.training.abstract_state.params})
            if restored is not None:
                return restored[0], restored[1]["params"]
        except CheckpointError as error:
            if not has_latest:
                raise
            log(str(error))
    if has_latest:
        with Checkpointer(workdir.latest, keep=parts.config.train.keep_checkpoints, log=log) as latest:
            restored = latest.restore(parts.training.abstract_state)
        if restored is not None:
            log("no best checkpoint to be had; these are the latest parameters")
            return restored[0], restored[1].scored_params
    raise FileNotFoundError(f"{workdir.path} has no checkpoint yet; train it first (--mode=train)")


def _mean_of_newest(
    parts: RunComponents, workdir: Workdir, count: int, *, log: Callable[[str], None]
) -> tuple[int, Any]:
    """The mean of the scored parameters of the newest checkpoints, and the first one's step."""
    steps, total = [], None
    with Checkpointer(workdir.latest, keep=parts.config.train.keep_checkpoints, log=log) as latest:
        while len(steps) < count:
            restored = latest.restore(parts.training.abstract_state, before=steps[-1] if steps else None)
            if restored is None:
                raise ValueError(
                    f"eval.average_checkpoints is {count} and {workdir.latest} holds {len(steps)}; train with as many "
                    "--train.keep_checkpoints, or give a smaller number"
                )
            steps.append(restored[0])
            params = restored[1].scored_params
            total = params if total is None else jax.tree.map(jnp.add, total, params)
    log(f"the mean of the checkpoints of steps {', '.join(map(str, reversed(steps)))}")
    return steps[0], jax.tree.map(lambda leaf: leaf / count, total)
