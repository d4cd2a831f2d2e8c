"""Warm starts: training from the parameters of a trained model (`init_from`), as in fine-tuning.

Optimizer, step, memory and the position in the text start over. A warm start happens once, before
the first checkpoint:
config.json records the weights read, and later starts of the same command resume without the
weights. The settings that determine the parameters come from the trained model unless a flag sets
them.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.config import (
    Encoding,
    ExperimentConfig,
    InitVocabulary,
    NormPlace,
    TokenizerConfig,
    config_tree,
)
from txl_jax.config.config_tree import require
from txl_jax.data import corpus as corpus_lib
from txl_jax.data.corpus import Corpus
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import CheckpointError, UserError, rephrased
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.run import Run
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import find_steps
from txl_jax.training.step import TrainState
from txl_jax.training.vocabulary_transfer import RowMap, match_tokens, row_map, transfer

_CUTOFFS = "model.cutoffs"
# Settings beside those of the model and its compatibility in which the fine-tuning may differ, and
# which change losses.
_NOTED = ("train.segment_len", "train.mem_len", "train.clamp_len", "train.same_length")
_UNNOTED = ("model.attention", "model.remat", "model.init_std", "model.projection_init_std")


class WarmStart(NamedTuple):
    """The trained model that a run begins with, or began with."""

    # Their path, step, sha256 and tokens, for config.json.
    record: Mapping[str, Any]
    # Initial parameters of a new model -> the state before the first update.
    state: Callable[[Any], TrainState]
    # A line about settings that differ and change losses, if any.
    note: str = ""

    @property
    def lines(self) -> list[str]:
        """Describes the weights, for the startup summary of the run."""
        record, tokens = self.record, self.record["tokens"]
        moved = (
            f" ({tokens['moved']:,} moved to a cluster of another size)" if tokens["moved"] else ""
        )
        counts = (
            f"{tokens['kept']:,} tokens kept, {tokens['new']:,} "
            f"new{moved}, {tokens['dropped']:,} dropped"
        )
        return [
            (
                f"init      weights from {record['path']}, step {record['step']:,}, sha256 "
                f"{record['sha256'][:12]}..."
            ),
            f"          vocabulary: {counts}",
            *filter(None, [self.note]),
        ]


def basis(path: str, run: Run) -> TrainedModel:
    """Returns the run itself if it is recorded, otherwise the model at `path`.

    A recorded run needs no other weights.
    """
    return _open(path) if run.is_new else TrainedModel.of_run(run)


def with_trained_settings(
    defaults: ExperimentConfig, trained: TrainedModel, which: InitVocabulary
) -> ExperimentConfig:
    """Returns `defaults` with the settings that come from the trained model.

    These are its sizes and compatibility settings and, if its vocabulary is kept, its token
    settings.
    """
    leaves = config_tree.leaves(ExperimentConfig)
    names = [
        leaf.name
        for leaf in leaves
        if leaf.setting.shapes_params or leaf.name.startswith("model.compat.")
    ]
    taken = {name: config_tree.get(trained.config, name) for name in names}
    if which is InitVocabulary.KEPT:
        taken |= tokenizer_settings(trained.vocabulary)
    return config_tree.replace(defaults, taken)


def read_corpus(config: ExperimentConfig, run: Run, data_dir: str, cache_dir: str | None) -> Corpus:
    """Reads the text of a config in its own vocabulary or in the trained model's vocabulary.

    The trained model's vocabulary is used if `init_vocabulary` is kept.
    """
    vocabulary: Vocabulary | None = None
    if config.init_from is not None and config.init_vocabulary is InitVocabulary.KEPT:
        vocabulary = basis(config.init_from, run).vocabulary

    def read() -> Corpus:
        if vocabulary is not None:
            theirs = config_tree.replace(config, tokenizer_settings(vocabulary))
            different = config_tree.differences(theirs, config)
            named = "; ".join(
                f"{leaf.name} is {ours} instead of {kept}" for leaf, kept, ours in different
            )
            basis_of = f"init_vocabulary is kept (the vocabulary of {config.init_from})"
            require(not different, f"{basis_of}, but {named}. Omit these flags.")
        return corpus_lib.read_corpus(config.data, data_dir, cache_dir, vocabulary=vocabulary)

    return distributed.run_on_all(read)


def other_sizes(config: ExperimentConfig, trained: ExperimentConfig) -> dict[str, Any]:
    """Returns the trained model's values of settings that determine parameters and differ."""
    different = config_tree.differences(trained, config)
    sizes = [
        each
        for each in different
        if each[0].setting.shapes_params and _is_read(each[0].name, config)
    ]
    return {
        leaf.name: old for leaf, old, new in sizes if leaf.name != _CUTOFFS or len(old) != len(new)
    }


def check_model(config: ExperimentConfig, trained: ExperimentConfig) -> None:
    """Raises `UserError` if settings that determine parameters differ.

    Bounds of clusters may differ.
    """
    refused = []
    for name, theirs in other_sizes(config, trained).items():
        here, there = (
            config_tree.format_value(value) or "empty"
            for value in (config_tree.get(config, name), theirs)
        )
        refused.append(f"{name} is {here} instead of {there}")
    advice = "Omit these settings to take them from the weights."
    require(
        not refused,
        f"the weights in {config.init_from} are from another model: {', '.join(refused)}. {advice}",
    )


def load(components: Built, vocabulary: Vocabulary, run: Run) -> WarmStart | None:
    """Reads the weights at `init_from`, once.

    If the run resumes, returns only their record, or None if it has none.
    """
    config = components.config
    assert config.init_from is not None

    def vanished(initial: Any) -> TrainState:
        gone = f"the checkpoints in {run.latest} disappeared while the run was opened"
        raise CheckpointError(f"{gone}. Rerun the same command.")

    if distributed.broadcast_from_primary(lambda: bool(find_steps(run.latest))):
        return None if run.warm_start is None else WarmStart(run.warm_start, vanished)
    trained = _open(config.init_from)
    rows = distributed.run_on_all(lambda: _match(config, trained, vocabulary))
    # The trained model on the mesh of the run that begins.
    ours = ("mesh.data", "mesh.fsdp", "mesh.tensor", "model.dtype", "model.attention")
    changed = {name: config_tree.get(config, name) for name in ours} | {
        "eval.average_checkpoints": None
    }
    theirs = config_tree.replace(trained.config, changed)
    same_mesh = build_for(theirs, trained.vocabulary, mesh=components.mesh, uses=())
    step, params = trained.params(same_mesh)
    initial = components.abstract_state.params
    record = {"path": trained.path, "step": step, "sha256": digest(params), "tokens": rows.counts}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, initial)
    move = components.jit(
        transfer(rows, trained.config.model, config.model), out_shardings=shardings
    )

    def state(own: Any) -> TrainState:
        return components.state_from_params(move(own, params))

    return WarmStart(record, state, _note(config, trained.config))


def digest(params: Any) -> str:
    """Returns the sha256 digest of parameters, in hexadecimal.

    The digest covers names, dtypes, shapes and values. All processes call this function.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        values = np.ascontiguousarray(distributed.to_host(leaf))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found.update(f"{name} {values.dtype} {values.shape}\n".encode())
        found.update(values.data)
    return found.hexdigest()


def _open(path: str) -> TrainedModel:
    with rephrased(f"--init_from is {path}, whose weights cannot be used: %s", UserError):
        return open_weights(path)


def tokenizer_settings(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the settings that determine token ids, from a vocabulary."""
    given = {"kind": vocabulary.kind, **vocabulary.header()}
    names = [
        leaf.name for leaf in config_tree.leaves(TokenizerConfig) if leaf.setting.shapes_tokens
    ]
    tokenizer = TokenizerConfig(**{name: given[name] for name in names if name in given})
    return {f"data.tokenizer.{name}": getattr(tokenizer, name) for name in names}


def _is_read(name: str, config: ExperimentConfig) -> bool:
    """Returns whether the model uses the setting."""
    if name == "model.compat.shaw_terms":
        return config.model.encoding is Encoding.SHAW
    return name != "model.compat.final_norm" or config.model.layer_norm is NormPlace.PRE


def _match(config: ExperimentConfig, trained: TrainedModel, vocabulary: Vocabulary) -> RowMap:
    """Matches the tokens.

    Raises `UserError` for another model, or if tokens of the vocabularies mean other things.
    """
    check_model(config, trained.config)
    theirs = trained.vocabulary
    same = theirs == vocabulary
    kinds = [f"{each.kind} ({each.size:,})" for each in (theirs, vocabulary)]
    require(
        same or theirs.kind == vocabulary.kind,
        f"the tokens of {trained.path} are of kind {kinds[0]}, but the text's are of kind "
        f"{kinds[1]}. Pass --init_vocabulary=kept to read the text in that vocabulary.",
    )
    matched = (
        np.arange(vocabulary.size, dtype=np.int32) if same else match_tokens(theirs, vocabulary)
    )
    return row_map(matched, trained.config.model, config.model, old_size=theirs.size)


def _note(config: ExperimentConfig, trained: ExperimentConfig) -> str:
    """Names the settings that differ and change losses, in one line, which may be empty."""
    named = [
        f"{leaf.name} {config_tree.format_value(ours)} (was {config_tree.format_value(theirs)})"
        for leaf, theirs, ours in config_tree.differences(trained, config)
        if leaf.name in _NOTED or (leaf.name.startswith("model.") and leaf.name not in _UNNOTED)
    ]
    return (
        f"note      settings that differ from the pretrained model's: {', '.join(named)}"
        if named
        else ""
    )
