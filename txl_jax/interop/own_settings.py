"""txl_jax.json: our settings next to weights in another implementation's format.

The file stores the settings that the implementation's config.json lacks.

It has no parameters. Its digest binds it to the weights that it was written for: next to others it
is ignored, with a note. What the other config.json says (`Format`'s sizes and lengths) is not
repeated, so that a change there is read.
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
_KIND, _VERSION = "txl_jax_settings", 1
_DOCUMENTS = "data.reset_at"  # Names a token, so that it belongs to the vocabulary too.
# Settings that the other config.json has as well, beside the sizes that shape the parameters.
_LENGTHS = frozenset({"eval.mem_len", "eval.clamp_len", "eval.same_length"})
_SAID = {
    Format.HUGGINGFACE: _LENGTHS | {"model.compat.layer_norm_eps"},
    Format.ORIGINAL: _LENGTHS | {"eval.segment_len"},
}


class Found(NamedTuple):
    """A model with the settings of its own, if they are there."""

    info: ModelInfo
    notes: list[str]  # For people.


def names(format: Format) -> list[str]:
    """Returns the settings that txl_jax.json has next to weights in a format.

    They are the settings that config.json cannot express.
    """
    shapes = {
        leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.shapes_params
    }
    said = {name for name in shapes if not name.startswith("model.compat.")} | _SAID[format]
    return [name for name in portable.stored_settings(ExperimentConfig()) if name not in said]


def write(folder: Path, info: ModelInfo, format: Format) -> None:
    """Writes the file next to the weights and the vocabulary, which must be there."""
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


def apply(weights: Path, info: ModelInfo, format: Format) -> Found:
    """Returns a model read from weights, with its own settings if they are next to the file.

    Raises `UserError` if the file of settings is corrupted.
    """
    path = weights.with_name(NAME)
    if format not in _SAID or not path.is_file():
        return Found(info, [])
    advice = (
        f"Copy it again, or remove it to read the model with the settings of the {format} format."
    )
    damaged = f"{path} is corrupted or from another version (%s). {advice}"
    with rephrased(
        damaged, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError
    ):
        content = storage.read_json(path)
        if content[_KIND] != _VERSION:
            raise ValueError(f"version must be {_VERSION}, got {content[_KIND]!r:.50}")
        sums = {str(name): str(value) for name, value in content["sha256"].items()}
        if weights.name not in sums or storage.sha256(weights) != sums[weights.name]:
            return Found(
                info, [f"{NAME} is ignored: it was written for other weights than {weights.name}"]
            )
        return _with_settings(info, content, sums, format)


def _with_settings(
    info: ModelInfo, content: dict[str, Any], sums: dict[str, str], format: Format
) -> Found:
    settings = dict(content["config"])
    known = names(format)
    for name in settings:
        if name not in known:
            raise ValueError(
                f"it must have only settings that {portable.CONFIG} lacks, got {name!r:.50}"
            )
    notes = []
    if settings.get(_DOCUMENTS) is not None and digest(info.vocabulary) != sums.get(
        portable.VOCABULARY
    ):
        notes.append(
            f"{_DOCUMENTS} of {NAME} is ignored: it names a token of another {portable.VOCABULARY}"
        )
        settings.pop(_DOCUMENTS)
    config = config_tree.from_dict(ExperimentConfig, config_tree.to_dict(info.config) | settings)
    config.model.validate()
    config.model.compat.validate()
    config.eval.validate()
    scores = dict(content["scores"])
    portable.check_scores(scores, info.vocabulary)
    found = ModelInfo(
        config, info.vocabulary, int(content["step"]), str(content["description"]), scores
    )
    return Found(
        found, [*notes, f"compat, lengths and other settings come from {NAME}, not from the format"]
    )
