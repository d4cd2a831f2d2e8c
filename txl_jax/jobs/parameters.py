"""Finding the parameters of a trained run."""

from collections.abc import Callable
from typing import Any

from txl_jax.assemble import Parts, assemble
from txl_jax.checkpoint import Checkpointer, CheckpointError
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.workdir import TextInfo, Workdir


def load_to_score(
    config: ExperimentConfig, corpus: Corpus, workdir: Workdir, *, trained_on: TextInfo, say: Callable[[str], None]
) -> tuple[Parts, int, Any]:
    """A trained run that is to score a text: (its parts, step, parameters).

    Args:
      trained_on: what the run was trained on; another text may be scored if its vocabulary is the same.

    Raises:
      ValueError: the text has another vocabulary.
      OSError: the workdir cannot be written to.
      FileNotFoundError, CheckpointError: as `load_parameters`.
    """
    if corpus.vocabulary != trained_on.vocabulary:
        raise ValueError(
            f"the run was trained on {trained_on.description!r} with {trained_on.vocabulary.size} tokens, and "
            f"{corpus.description!r} was read with {corpus.vocabulary.size} or others; read it in the run's vocabulary"
        )
    if corpus.digest != trained_on.digest:
        say(f"note: this is not the text of training ({trained_on.description}), but {corpus.description}")
    workdir.create()
    parts = assemble(config, vocab_size=corpus.vocabulary.size)
    return parts, *load_parameters(parts, workdir, say=say)


def load_parameters(parts: Parts, workdir: Workdir, *, say: Callable[[str], None]) -> tuple[int, Any]:
    """The best parameters of a run, or, before its first evaluation, the latest: (step, parameters).

    Raises:
      FileNotFoundError: the run has no checkpoint.
      CheckpointError: it has, but none can be read.
    """
    if workdir.best.exists():
        try:
            with Checkpointer(workdir.best, keep=1, report=say) as best:
                restored = best.restore({"params": parts.abstract_state.params})
            if restored is not None:
                return restored[0], restored[1]["params"]
        except CheckpointError as error:
            if not workdir.latest.exists():
                raise
            say(str(error))
    if workdir.latest.exists():
        with Checkpointer(workdir.latest, keep=parts.config.train.keep_checkpoints, report=say) as latest:
            restored = latest.restore(parts.abstract_state)
        if restored is not None:
            say("no best checkpoint to be had; these are the latest parameters")
            return restored[0], restored[1].params
    raise FileNotFoundError(f"{workdir.path} has no checkpoint yet; train it first (--mode=train)")
