"""Pretrained weights at a path: the config, the vocabulary and the parameters of a trained model."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import CacheDType, ExperimentConfig, WeightDType
from txl_jax.config import tree as config_tree
from txl_jax.data.tokens.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.interop import exported_folder, portable, tensorflow
from txl_jax.jobs.restore import assemble_trained, load_parameters
from txl_jax.jobs.workdir import Workdir
from txl_jax.runtime import distributed
from txl_jax.runtime.paths import as_path

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

    path: Path
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


def holds_other_weights(path: Path) -> bool:
    """Returns whether a path is a file of weights of another implementation by its name, or a folder with one."""
    if path.is_file():
        return path.suffix in _FOREIGN_SUFFIXES
    if (path / "checkpoints").exists() or exported_folder.is_exported(path):
        return False
    if tensorflow.find(path):
        return True
    return path.is_dir() and any(file.suffix in _FOREIGN_SUFFIXES for file in path.iterdir() if file.is_file())


def _open_portable(folder: Path, member: str | None) -> Pretrained:
    if member is not None:
        raise UserError(f"the member {member!r} was given and {folder} holds one model; leave the member out")
    info = portable.read_info(folder)
    return Pretrained(folder, info.config, info.vocabulary, f"the model {folder}, {info.description}", info)
