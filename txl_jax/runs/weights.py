"""Pretrained weights at a path: the config, the vocabulary and the parameters of a trained model."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.config import CacheDType, ExperimentConfig, WeightDType
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import CheckpointError, UserError
from txl_jax.interop import exported_folder, portable, tensorflow
from txl_jax.ops.attention import Implementations
from txl_jax.runs import run as run_lib
from txl_jax.runs.build import RunComponents, assemble
from txl_jax.runs.run import TextInfo, Workdir
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.storage import as_path, exists, is_dir, is_remote, names
from txl_jax.training.members import Members
from txl_jax.training.state import TrainState

# -- Checkpoint restore: the parameters of a trained run, or of one member of an ensemble.


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
    run_lib.check_agreement(config, corpus)
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
    run_lib.check_same_attention(components.attention)
    for line in run_lib.evaluation_lines(recorded, components.attention):
        log(line)
    return components


def recorded_attention(workdir: Workdir, config: ExperimentConfig) -> Implementations:
    """Returns the recorded implementations of attention that a start with `config` keeps; all processes call it."""
    record = distributed.broadcast_from_primary(lambda: workdir.attention(config))
    return run_lib.parse_attention(record, config)


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
    has_best, has_latest = distributed.broadcast_from_primary(lambda: [exists(workdir.best), exists(workdir.latest)])
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


# Files of weights that other programs write.
_FOREIGN_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index", ".meta", ".ckpt", ".h5")


def _no_log(line: str) -> None:
    """Drops a line."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A trained model that was found at a path; its weights are not read before `load_params`.

    Attributes:
      path: the folder, absolute.
      config: the settings of the model and of its training.
      vocabulary: text to token ids and back.
      description: one clause for people: what the folder holds, and what the weights were trained on.
      source: the run, or the member of an ensemble; or the portable folder's contents without the weights.
    """

    path: str
    config: ExperimentConfig
    vocabulary: Vocabulary
    description: str
    source: Workdir | portable.ModelInfo

    def assemble(self, *, log: Callable[[str], None] = _no_log) -> RunComponents:
        """Assembles the model over the mesh of its config, with the recorded implementations of attention.

        Raises:
          UserError: settings that do not fit the devices.
        """
        if isinstance(self.source, Workdir):
            return assemble_trained(self.config, self.source, vocab_size=self.vocabulary.size, log=log)
        return distributed.run_on_all(lambda: assemble(self.config, vocab_size=self.vocabulary.size))

    def load_params(self, components: RunComponents, *, log: Callable[[str], None] = _no_log) -> tuple[int, Any]:
        """Loads the parameters onto the components' mesh, in their shardings: (number of updates, parameters).

        Of a run they are the best, or the latest before its first evaluation. Of a portable folder each device reads
        its own part of the file.

        Args:
          components: of this config, or of one with the same `model` and `compat` on another mesh.

        Raises:
          UserError: there is no checkpoint yet.
          CheckpointError: the weights are damaged, or of another model.
        """
        if isinstance(self.source, Workdir):
            return load_parameters(components, self.source, log=log)
        leaves = distributed.run_on_all(lambda: portable.read_leaves(self.path))
        return self.source.step, portable.place(leaves, components.training.abstract_state.params)


def open_pretrained(
    path: str | os.PathLike[str],
    *,
    member: str | None = None,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
) -> Pretrained:
    """Opens the folder of a trained model: a run's workdir, or a portable folder (see `interop.portable`).

    Args:
      path: the folder; "~" is the home folder.
      member: the member of an ensemble, as "seed=2"; None: the run is none.
      weight_dtype: `eval.weight_dtype` in place of the saved one; None: as saved.
      cache_dtype: `eval.cache_dtype`, likewise.

    Raises:
      UserError: there is no such run or member, or its files cannot be read; for a folder of another implementation
        the message has the command that converts it. Or the model can have no such weights or cache.
    """
    found = _open(path, member)
    changes = {}
    for name, given, kind in (("weight_dtype", weight_dtype, WeightDType), ("cache_dtype", cache_dtype, CacheDType)):
        if given is not None:
            types = [str(each) for each in kind]
            if given not in types:
                raise UserError(f"{name} is {given!r}; it must be {' or '.join(types)}, or left out")
            changes[f"eval.{name}"] = kind(given)
    if not changes:
        return found
    config = config_tree.replace(found.config, changes)
    config.validate()
    return dataclasses.replace(found, config=config)


def _open(path: str | os.PathLike[str], member: str | None) -> Pretrained:
    folder = as_path(path)
    if portable.is_portable(folder):
        return _open_portable(folder, member)
    workdir = Workdir(folder, member)
    if exported_folder.is_exported(folder):
        raise UserError(
            f"{folder} is an exported model, which runs without txl_jax (docs/export.md) and is not read back; give "
            "the run or the folder of weights that it was exported from"
        )
    if holds_other_weights(folder):
        raise UserError(
            f"{folder} holds no run of txl_jax but other files of weights; convert them with "
            f"`python -m experiments.convert --from={folder} --to=NEW_FOLDER`, and give that folder"
        )
    config, text = workdir.load()
    description = f"the run {folder}{f' ({member})' if member else ''}, trained on {text.description}"
    return Pretrained(folder, config, text.vocabulary, description, workdir)


def holds_other_weights(path: str) -> bool:
    """Returns whether a path is a file of weights of another implementation by its name, or a folder with one."""
    if exists(path) and not is_dir(path):
        return os.path.splitext(path)[1] in _FOREIGN_SUFFIXES
    if exists(os.path.join(path, "checkpoints")) or exported_folder.is_exported(path):
        return False
    if not is_remote(path) and tensorflow.find(Path(path)):
        return True
    return is_dir(path) and any(os.path.splitext(name)[1] in _FOREIGN_SUFFIXES for name in names(path))


def _open_portable(folder: str, member: str | None) -> Pretrained:
    if member is not None:
        raise UserError(f"the member {member!r} was given and {folder} holds one model; leave the member out")
    info = portable.read_info(folder)
    return Pretrained(folder, info.config, info.vocabulary, f"the model {folder}, {info.description}", info)
