"""Warm starts: training from the parameters of a trained model (`init_from`), as in fine-tuning.

Optimizer, step, memory and the position in the text start over. A warm start happens once, before
the first checkpoint: config.json records the weights that were read, and later starts of the same
command resume without them. The settings that determine the parameters come from the trained model
unless a flag sets them.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

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
from txl_jax.interop import leaves as leaves_lib
from txl_jax.runs.build import Built, build_for, shardings_of
from txl_jax.runs.run import Run
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import find_steps
from txl_jax.training.step import TrainState
from txl_jax.training.vocabulary_transfer import RowMap, match_tokens, row_map, transfer

_CUTOFFS = "model.cutoffs"
# Settings that are not the model's, in which the fine-tuning may differ, and which change losses.
_TRAINING_LENGTHS = ("train.segment_len", "train.mem_len", "train.clamp_len", "train.same_length")
# Settings of the model that change no loss of trained parameters.
_UNNOTED = ("model.attention", "model.remat", "model.init_std", "model.projection_init_std")


class WarmStart(NamedTuple):
    """The trained model that a run starts from, or started from."""

    # Path, step and sha256 of the weights, and counts of their tokens, for config.json.
    record: Mapping[str, Any]
    # Maps the initial parameters of a new model to the state before the first update.
    state: Callable[[Any], TrainState]
    # A line about settings that differ and change losses, or empty.
    note: str = ""

    @property
    def lines(self) -> list[str]:
        """Describes the weights, for the startup summary of the run."""
        record = self.record
        tokens = record["tokens"]
        counts = f"{tokens['kept']:,} tokens kept, {tokens['new']:,} new"
        if tokens["moved"]:
            counts += f" ({tokens['moved']:,} moved to a cluster of another size)"
        counts += f", {tokens['dropped']:,} dropped"
        source = f"{record['path']}, step {record['step']:,}, sha256 {record['sha256'][:12]}..."
        lines = [f"init      weights from {source}", f"          vocabulary: {counts}"]
        if self.note:
            lines.append(self.note)
        return lines


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
    trained_values = {}
    for leaf in config_tree.leaves(ExperimentConfig):
        if leaf.setting.shapes_params or leaf.name.startswith("model.compat."):
            trained_values[leaf.name] = config_tree.get(trained.config, leaf.name)
    if which is InitVocabulary.KEPT:
        trained_values |= tokenizer_settings(trained.vocabulary)
    return config_tree.replace(defaults, trained_values)


def read_corpus(config: ExperimentConfig, run: Run, data_dir: str, cache_dir: str | None) -> Corpus:
    """Reads the text of a config in its own vocabulary or in the trained model's vocabulary.

    The trained model's vocabulary is used if `init_vocabulary` is kept.
    """
    vocabulary: Vocabulary | None = None
    if config.init_from is not None and config.init_vocabulary is InitVocabulary.KEPT:
        vocabulary = basis(config.init_from, run).vocabulary

    def read() -> Corpus:
        if vocabulary is not None:
            _check_tokenizer(config, vocabulary)
        return corpus_lib.read_corpus(config.data, data_dir, cache_dir, vocabulary=vocabulary)

    return distributed.run_on_all(read)


def _check_tokenizer(config: ExperimentConfig, kept: Vocabulary) -> None:
    """Raises `UserError` if token settings do not match a vocabulary that is kept."""
    with_kept = config_tree.replace(config, tokenizer_settings(kept))
    changes = [
        f"{leaf.name} is {value} instead of {kept_value}"
        for leaf, kept_value, value in config_tree.differences(with_kept, config)
    ]
    require(
        not changes,
        f"init_vocabulary is kept (the vocabulary of {config.init_from}), "
        f"but {'; '.join(changes)}. Omit these flags.",
    )


def other_sizes(config: ExperimentConfig, trained: ExperimentConfig) -> dict[str, Any]:
    """Returns the trained model's values of settings that determine parameters and differ.

    Cutoffs of the same number of clusters count as equal, because tokens can move between clusters.
    """
    sizes = {}
    for leaf, trained_value, value in config_tree.differences(trained, config):
        if not leaf.setting.shapes_params or not _is_read(leaf.name, config):
            continue
        if leaf.name != _CUTOFFS or len(trained_value) != len(value):
            sizes[leaf.name] = trained_value
    return sizes


def check_model(config: ExperimentConfig, trained: ExperimentConfig) -> None:
    """Raises `UserError` if settings that determine parameters differ.

    Bounds of clusters may differ.
    """
    changes = []
    for name, trained_value in other_sizes(config, trained).items():
        value_text = config_tree.format_value(config_tree.get(config, name)) or "empty"
        trained_text = config_tree.format_value(trained_value) or "empty"
        changes.append(f"{name} is {value_text} instead of {trained_text}")
    require(
        not changes,
        f"the weights in {config.init_from} are from another model: {', '.join(changes)}. "
        "Omit these settings to take them from the weights.",
    )


def load(built: Built, vocabulary: Vocabulary, run: Run) -> WarmStart | None:
    """Reads the weights at `init_from`, once. All processes call it.

    Args:
      built: The model to train.
      vocabulary: Vocabulary of the text to train on.
      run: The run that begins or resumes.

    Returns:
      The warm start. If the run resumes from a checkpoint, no weights are read: the result is then
      only their record, or None if the run did not start from weights.

    Raises:
      UserError: If the weights cannot be read, or are from another model.
    """
    config = built.config
    assert config.init_from is not None

    if distributed.broadcast_from_primary(lambda: bool(find_steps(run.latest))):
        if run.warm_start is None:
            return None

        def vanished(initial: Any) -> TrainState:
            raise CheckpointError(
                f"the checkpoints in {run.latest} disappeared while the run was opened. "
                "Rerun the same command."
            )

        return WarmStart(run.warm_start, vanished)

    trained = _open(config.init_from)
    rows = distributed.run_on_all(lambda: _match(config, trained, vocabulary))

    # The trained model is placed on the mesh of the new run. Its best parameters are read, even if
    # its config specifies an average of checkpoints.
    names = ("mesh.data", "mesh.fsdp", "mesh.tensor", "model.dtype", "model.attention")
    changes = {name: config_tree.get(config, name) for name in names}
    changes["eval.average_checkpoints"] = None
    trained_built = build_for(
        config_tree.replace(trained.config, changes),
        trained.vocabulary,
        mesh=built.mesh,
        uses=(),
    )
    step, trained_params = trained.params(trained_built)
    record = {
        "path": trained.path,
        "step": step,
        "sha256": digest(trained_params),
        "tokens": rows.counts,
    }

    shardings = shardings_of(built.abstract_state.params)
    move = built.jit(transfer(rows, trained.config.model, config.model), out_shardings=shardings)

    def state(initial: Any) -> TrainState:
        return built.state_from_params(move(initial, trained_params))

    # Weights without training steps come from another implementation (or are random). Its training
    # lengths are not known: those in the config are defaults.
    lengths = _TRAINING_LENGTHS if step > 0 else ()
    return WarmStart(record, state, _note(config, trained.config, lengths))


def digest(params: Any) -> str:
    """Returns the sha256 digest of parameters, in hexadecimal.

    The digest covers names, dtypes, shapes and values. All processes call this function.
    """
    return leaves_lib.digest(leaves_lib.from_tree(params))


def _open(path: str) -> TrainedModel:
    """Opens the model at `init_from`. Errors name the flag."""
    with rephrased(f"--init_from is {path}, whose weights cannot be used: %s", UserError):
        return open_weights(path)


def tokenizer_settings(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the settings that determine token ids, from a vocabulary."""
    # A vocabulary records only some of these settings. The others have their defaults.
    recorded = {"kind": vocabulary.kind, **vocabulary.header()}
    leaves = config_tree.leaves(TokenizerConfig)
    names = [leaf.name for leaf in leaves if leaf.setting.shapes_tokens]
    tokenizer = TokenizerConfig(**{name: recorded[name] for name in names if name in recorded})
    return {f"data.tokenizer.{name}": getattr(tokenizer, name) for name in names}


def _is_read(name: str, config: ExperimentConfig) -> bool:
    """Returns whether the model uses the setting."""
    if name == "model.compat.shaw_terms":
        return config.model.encoding is Encoding.SHAW
    return name != "model.compat.final_norm" or config.model.layer_norm is NormPlace.PRE


def _match(config: ExperimentConfig, trained: TrainedModel, vocabulary: Vocabulary) -> RowMap:
    """Matches the tokens of the text's vocabulary with the trained model's.

    Raises `UserError` for another model, or if tokens of the vocabularies mean other things.
    """
    check_model(config, trained.config)
    trained_vocabulary = trained.vocabulary
    if trained_vocabulary == vocabulary:
        matched = np.arange(vocabulary.size, dtype=np.int32)
    else:
        require(
            trained_vocabulary.kind == vocabulary.kind,
            f"the tokens of {trained.path} are of kind {trained_vocabulary.kind} "
            f"({trained_vocabulary.size:,}), but the text's are of kind {vocabulary.kind} "
            f"({vocabulary.size:,}). "
            "Pass --init_vocabulary=kept to read the text in that vocabulary.",
        )
        matched = match_tokens(trained_vocabulary, vocabulary)
    return row_map(matched, trained.config.model, config.model, old_size=trained_vocabulary.size)


def _note(
    config: ExperimentConfig, trained: ExperimentConfig, training_lengths: Collection[str]
) -> str:
    """Names the settings that differ and change losses, in one line, which may be empty.

    Args:
      config: The settings of the fine-tuning.
      trained: The settings of the trained model.
      training_lengths: Names of the settings to compare, in addition to the model's.
    """
    changes = []
    for leaf, trained_value, value in config_tree.differences(trained, config):
        is_models = leaf.name.startswith("model.") and leaf.name not in _UNNOTED
        if is_models or leaf.name in training_lengths:
            now = config_tree.format_value(value)
            was = config_tree.format_value(trained_value)
            changes.append(f"{leaf.name} {now} (was {was})")
    if not changes:
        return ""
    return f"note      settings that differ from the pretrained model's: {', '.join(changes)}"
