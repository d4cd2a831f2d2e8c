"""txl_jax.json: our settings next to weights in another implementation's format.

The file stores the settings that the implementation's config.json lacks, and no parameters. A
digest binds it to the weights that it was written for: next to other weights it is ignored, with a
note. The sizes and lengths in the other config.json are not repeated, so that a change there is
read.
"""

from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.data.vocabulary import digest
from txl_jax.errors import rephrased
from txl_jax.interop import portable
from txl_jax.interop.original import Format
from txl_jax.interop.portable import ModelInfo
from txl_jax.runtime import storage

NAME = "txl_jax.json"
# The key that has the file's version.
_KIND = "txl_jax_settings"
_VERSION = 1
# The setting that names a token, so that it belongs to the vocabulary too.
_DOCUMENTS = "data.reset_at"
# Settings that the other config.json has as well, besides the sizes that shape the parameters.
_LENGTHS = frozenset({"eval.mem_len", "eval.clamp_len", "eval.same_length"})
_SAID = {
    Format.HUGGINGFACE: _LENGTHS | {"model.compat.layer_norm_eps"},
    Format.ORIGINAL: _LENGTHS | {"eval.segment_len"},
}


class CompletedModel(NamedTuple):
    """A model with its own settings, if they are next to its weights."""

    info: ModelInfo
    notes: list[str]  # Where settings come from, or why they are ignored: lines for the user.


def names(format: Format) -> list[str]:
    """Returns the settings that txl_jax.json stores next to weights in a format.

    They are the settings that config.json cannot express.
    """
    said = set(_SAID[format])
    for leaf in config_tree.leaves(ExperimentConfig):
        # The other config.json has all sizes, but not the differences between implementations.
        if leaf.setting.shapes_params and not leaf.name.startswith("model.compat."):
            said.add(leaf.name)
    return [name for name in portable.stored_settings(ExperimentConfig()) if name not in said]


def write(folder: Path, info: ModelInfo, format: Format) -> None:
    """Writes the file next to the weights and the vocabulary, which must exist."""
    settings = portable.stored_settings(info.config)
    content = {
        _KIND: _VERSION,
        "description": info.description,
        "step": info.step,
        "config": {name: settings[name] for name in names(format)},
        "scores": dict(info.scores),
        "sha256": {
            portable.WEIGHTS: storage.sha256(folder / portable.WEIGHTS),
            portable.VOCABULARY: digest(info.vocabulary),
        },
    }
    storage.write_json(folder / NAME, content)


def apply(weights: Path, info: ModelInfo, format: Format) -> CompletedModel:
    """Returns a model with its own settings, if they are next to its weights.

    Args:
      weights: The file of weights that the model was read from.
      info: The model with the settings that the format has.
      format: The weights' format.

    Raises:
      UserError: If the file of settings is corrupted.
    """
    path = weights.with_name(NAME)
    if format not in _SAID or not path.is_file():
        return CompletedModel(info, [])
    damaged = (
        f"{path} is corrupted or from another version (%s). Copy it again, or remove it to read "
        f"the model with the settings of the {format} format."
    )
    with rephrased(
        damaged, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError
    ):
        content = storage.read_json(path)
        # Settings of another version could mean something else.
        if content[_KIND] != _VERSION:
            raise ValueError(f"version must be {_VERSION}, got {content[_KIND]!r:.50}")
        # The weights may have been replaced by those of another model.
        sums = {str(name): str(value) for name, value in content["sha256"].items()}
        if weights.name not in sums or storage.sha256(weights) != sums[weights.name]:
            note = f"{NAME} is ignored: it was written for other weights than {weights.name}"
            return CompletedModel(info, [note])
        return _with_settings(info, content, sums, format)


def _with_settings(
    info: ModelInfo, content: dict[str, Any], sums: dict[str, str], format: Format
) -> CompletedModel:
    """Returns a model with the settings of txl_jax.json.

    Args:
      info: The model with the settings that the format has.
      content: Content of the file.
      sums: The sha256 of the weights and of the vocabulary, in hexadecimal, by file.
      format: The weights' format.

    Raises:
      ValueError: If a setting is not one of those that are written, or has a value that is not
        possible.
    """
    settings = dict(content["config"])
    # A setting that config.json has, such as a size, would silently replace the one there.
    known = names(format)
    for name in settings:
        if name not in known:
            raise ValueError(
                f"it must have only settings that {portable.CONFIG} lacks, got {name!r:.50}"
            )

    notes = []
    has_vocabulary = sums.get(portable.VOCABULARY) == digest(info.vocabulary)
    # In another vocabulary, the token that ends a document may be any other.
    if settings.get(_DOCUMENTS) is not None and not has_vocabulary:
        notes.append(
            f"{_DOCUMENTS} of {NAME} is ignored: it names a token of another {portable.VOCABULARY}"
        )
        settings.pop(_DOCUMENTS)

    # Values may have been edited. Their types are checked when they become settings.
    config = config_tree.from_dict(ExperimentConfig, config_tree.to_dict(info.config) | settings)
    config.model.validate()
    config.model.compat.validate()
    config.eval.validate()
    scores = dict(content["scores"])
    portable.check_scores(scores, info.vocabulary)

    completed = ModelInfo(
        config=config,
        vocabulary=info.vocabulary,
        step=int(content["step"]),
        description=str(content["description"]),
        scores=scores,
    )
    notes.append(f"compat, lengths and other settings come from {NAME}, not from the format")
    return CompletedModel(completed, notes)
