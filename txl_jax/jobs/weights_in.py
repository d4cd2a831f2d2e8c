"""Weights that are to be converted: of a run, a portable folder or another implementation, read by array."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.tokens.id_vocabulary import IdVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import formats, portable
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop.leaves import Leaves
from txl_jax.interop.portable import ModelInfo
from txl_jax.jobs.pretrained import Pretrained, holds_other_weights, open_pretrained
from txl_jax.jobs.workdir import Workdir
from txl_jax.runtime.paths import is_remote
from txl_jax.training.results import RESULTS

NATIVE = "native"
_SCORES = ("best_valid", "test", "eval")


class WeightsIn(NamedTuple):
    """Weights that were read.

    Attributes:
      format: its name.
      info: config, vocabulary and where they come from.
      leaves: the parameters of `TransformerXL` by path.
      notes: lines for people.
    """

    format: str
    info: ModelInfo
    leaves: Leaves
    notes: list[str]


def open_weights(
    source: Path, *, from_format: str | None = None, member: str | None = None, log: Callable[[str], None] = print
) -> WeightsIn:
    """Opens the weights of a run, of a portable folder, or of another implementation.

    Args:
      source: a folder, or a file of weights.
      from_format: "native" or a `formats.Format`; None: it is recognised.
      member: the member of an ensemble, if `source` is the workdir of one.

    Raises:
      UserError: there are none of that format, or they cannot be read.
    """
    is_foreign = holds_other_weights(source) and not portable.is_portable(source)
    if from_format == NATIVE or (from_format is None and not is_foreign):
        return _open_native(source, member, log)
    if member is not None:
        raise UserError(f"the member {member!r} was given and {source} is no workdir of an ensemble; leave it out")
    return open_foreign(source, from_format)


def open_foreign(source: Path, from_format: str | None = None) -> WeightsIn:
    """Opens a file or folder of another implementation.

    Raises:
      UserError: it cannot be read, is on object storage, or its parts contradict each other.
    """
    if is_remote(source):
        raise UserError(
            f"{source} holds weights of another implementation, which are read at random; copy the folder to this "
            "machine, and give the copy"
        )
    found = formats.read(source, None if from_format is None else formats.Format(from_format))
    vocabulary, notes = found.vocabulary, list(found.notes)
    folder = source if source.is_dir() else source.parent
    if portable.holds_vocabulary(folder):  # Of our own export: it has line marks too.
        vocabulary = portable.read_vocabulary(folder)
    if vocabulary is None:
        vocabulary = IdVocabulary(found.vocab_size)
        notes.append("the tokens are named by their ids; a vocabulary beside the weights would be read")
    if vocabulary.size != found.vocab_size:
        raise UserError(
            f"the vocabulary of {folder} has {vocabulary.size:,} tokens and the weights {found.vocab_size:,}; give the "
            "folder that both were saved in"
        )
    config = dataclasses.replace(ExperimentConfig(), model=found.config, compat=found.compat, eval=found.eval_config)
    info = ModelInfo(config, vocabulary, 0, f"converted from the {found.format} format")
    return WeightsIn(found.format, info, found.params, notes)


def _open_native(source: Path, member: str | None, log: Callable[[str], None]) -> WeightsIn:
    pretrained = open_pretrained(source, member=member)
    if isinstance(pretrained.source, Workdir):
        return _of_run(pretrained, pretrained.source, log)
    return WeightsIn(NATIVE, pretrained.source, portable.read_leaves(source), [])


def _of_run(pretrained: Pretrained, workdir: Workdir, log: Callable[[str], None]) -> WeightsIn:
    """Loads the best parameters of a run."""
    components = pretrained.assemble(log=log)
    step, params = pretrained.load_params(components, log=log)
    # The weights are the mean already.
    config = config_tree.replace(pretrained.config, {"eval.average_checkpoints": None})
    description = pretrained.description.partition(", ")[2]
    averaged = pretrained.config.eval.average_checkpoints is not None
    scores = {} if averaged else _scores(workdir, step)
    info = ModelInfo(config, pretrained.vocabulary, step, f"{description}, after {step:,} updates", scores)
    return WeightsIn("run", info, leaves_lib.from_tree(params), [])


def _scores(workdir: Workdir, step: int) -> dict[str, Any]:
    """Returns the scores of results.json; empty if there are none, or they are of other parameters."""
    try:
        results = json.loads((workdir.path / RESULTS).read_bytes())
        own = results if workdir.member is None else results["members"][workdir.member] | {"eval": results["eval"]}
        return {name: own[name] for name in _SCORES} if own["test"]["step"] == step else {}
    except (OSError, ValueError, KeyError, TypeError):  # The run has not ended, or the file is damaged.
        return {}
