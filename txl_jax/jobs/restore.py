"""Checkpoint restore: the parameters of a trained run, or of one member of an ensemble."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.errors import CheckpointError, UserError
from txl_jax.jobs import agreement, attention_record
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.ops.attention import Implementations
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.training.members import Members
from txl_jax.training.state import TrainState


def load_to_score(
    config: ExperimentConfig, corpus: Corpus, workdir: Workdir, *, trained_on: TextInfo, log: Callable[[str], None]
) -> tuple[RunComponents, int, Any]:
    """Loads a trained run that is to score a text: (its components, step, parameters).

    Args:
      workdir: of a run, or of an ensemble with the member chosen.
      trained_on: the text of the training; another text may be scored if its vocabulary is the same.

    Raises:
      UserError: the text has another vocabulary, processes have different ones, or the workdir cannot be written to.
      CheckpointError: as `load_parameters`.
    """
    agreement.check(config, corpus)
    if corpus.vocabulary != trained_on.vocabulary:
        raise UserError(
            f"the run was trained on {trained_on.description!r} with {trained_on.vocabulary.size} tokens, and "
            f"{corpus.description!r} was read with {corpus.vocabulary.size} or others; read it in the run's vocabulary"
        )
    if corpus.digest != trained_on.digest:
        log(f"note: this is not the text of training ({trained_on.description}), but {corpus.description}")
    make(workdir)
    components = assemble_trained(config, workdir, vocab_size=corpus.vocabulary.size, log=log)
    return components, *load_parameters(components, workdir, log=log)


def assemble_trained(
    config: ExperimentConfig, workdir: Workdir, *, vocab_size: int, log: Callable[[str], None]
) -> RunComponents:
    """Assembles the components of a trained run with its recorded implementations of attention; all processes call it.

    Raises:
      UserError: settings that do not fit each other or the devices, or processes with other devices.
    """
    recorded = recorded_attention(workdir, config)
    components = distributed.run_on_all(lambda: assemble(config, vocab_size=vocab_size, recorded_attention=recorded))
    attention_record.check_same_on_all(components.attention)
    for line in attention_record.evaluation_lines(recorded, components.attention):
        log(line)
    return components


def recorded_attention(workdir: Workdir, config: ExperimentConfig) -> Implementations:
    """Returns the recorded implementations of attention that a start with `config` keeps; all processes call it."""
    record = distributed.broadcast_from_primary(lambda: workdir.attention(config))
    return attention_record.parse(record, config)


def make(workdir: Workdir) -> None:
    """Makes the folder of a run; raises `UserError` if it cannot be written to."""
    distributed.broadcast_from_primary(lambda: workdir.create() and None)


def load_parameters(components: RunComponents, workdir: Workdir, *, log: Callable[[str], None]) -> tuple[int, Any]:
    """Loads the best parameters of a run, or, before its first evaluation, the latest: (step, parameters).

    With `eval.average_checkpoints` the mean of that many newest checkpoints, and the newest's step.

    Args:
      workdir: of a run, or of an ensemble with the member chosen.

    Raises:
      UserError: the run has no checkpoint, or fewer than are to be averaged.
      CheckpointError: it has checkpoints, but none can be read.
    """
    if components.config.eval.average_checkpoints:
        return _mean_of_newest(components, workdir, components.config.eval.average_checkpoints, log=log)
    has_best, has_latest = distributed.broadcast_from_primary(lambda: [workdir.best.exists(), workdir.latest.exists()])
    if has_best:
        try:
            with Checkpointer(workdir.best, keep=1, log=log) as best:
                restored = best.restore({"params": components.training.abstract_state.params})
            if restored is not None:
                return restored[0], restored[1]["params"]
        except CheckpointError as error:
            if not has_latest:
                raise
            log(str(error))
    if has_latest:
        latest = load_state(components, workdir, log=log)
        if latest is not None:
            log("no best checkpoint to be had; these are the latest parameters")
            return latest[0], latest[1].scored_params
    raise UserError(f"{workdir.path} has no checkpoint yet; train it first (--mode=train)")


def load_state(
    components: RunComponents, workdir: Workdir, *, log: Callable[[str], None], before: int | None = None
) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Loads the newest sound training state: (step, state, notes); None if there is none.

    Args:
      workdir: of a run, or of an ensemble with the member chosen, whose part of the state is returned; the notes are
        those of all members.
      before: only steps before this one.

    Raises:
      CheckpointError: there are checkpoints, but none can be read.
    """
    members, index = Members(), 0
    if workdir.member is not None:
        members, index = workdir.members(), workdir.member_index()
    abstract_state = members.abstract(components.training.abstract_state)
    with Checkpointer(workdir.latest, keep=components.config.train.keep_checkpoints, log=log) as latest:
        restored = latest.restore(abstract_state, before=before)
    if restored is None:
        return None
    step, state, notes = restored
    return step, members.take(state, index), notes


def _mean_of_newest(
    components: RunComponents, workdir: Workdir, count: int, *, log: Callable[[str], None]
) -> tuple[int, Any]:
    """Averages the scored parameters of the newest checkpoints; returns the newest step and the mean."""
    steps: list[int] = []
    total = None
    while len(steps) < count:
        restored = load_state(components, workdir, log=log, before=steps[-1] if steps else None)
        if restored is None:
            raise UserError(
                f"eval.average_checkpoints is {count} and {workdir.latest} holds {len(steps)}; train with as many "
                "--train.keep_checkpoints, or give a smaller number"
            )
        steps.append(restored[0])
        params = restored[1].scored_params
        total = params if total is None else jax.tree.map(jnp.add, total, params)
    log(f"the mean of the checkpoints of steps {', '.join(map(str, reversed(steps)))}")
    return steps[0], jax.tree.map(lambda leaf: leaf / count, total)
