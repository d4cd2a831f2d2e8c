"""Portable checkpoints: directories of trained weights, to be copied and published.

They do not contain the optimizer and the steps.

config.json         sizes, ties and lengths, the training's settings, scores, and the sha256 of the
                    next two
model.safetensors   the parameters, float32, by their paths: "stack.layers.attention.query"
vocabulary.txt      the tokens by id
tokenizer.json      a subword vocabulary once more, for other programs
README.md           the model card, which you can edit

dynamic_statistics.safetensors, if the run has it, is for dynamic evaluation
(`runs.dynamic_statistics`).
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.config.config_tree import format_value, from_dict
from txl_jax.data.corpus import KINDS
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.vocabulary import Vocabulary, digest, dumps, loads
from txl_jax.errors import CheckpointError, UserError, reading, rephrased
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop import safetensors
from txl_jax.interop.leaves import Leaf, Leaves
from txl_jax.metrics import Measure
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import describe_arrays, describe_difference
from txl_jax.runtime.storage import AnyPath
from txl_jax.version import __version__

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
VOCABULARY = "vocabulary.txt"
CARD = "README.md"
# The key that only a portable checkpoint's config.json has. Its value is the version.
_KIND = "txl_jax_model"
_KIND_VERSION = 1
# Groups of settings that are stored. Data and mesh belong to one machine, except for the end of a
# document.
_GROUPS = ("seed", "model", "optimizer", "train", "regularization", "average", "eval", "generate")
# Settings of an evaluation that are named below the card's scores.
_SHOWN_LENGTHS = ("segment_len", "mem_len", "clamp_len", "same_length", "stride")
_CARD = """---
library_name: txl_jax
pipeline_tag: text-generation
tags:
  - transformer-xl
  - jax
---

# Transformer-XL

A language model with {parameters:,} parameters in the format of txl_jax {version}:
{info.description}.

## Model

| | |
|---|---|
| layers | {model.n_layer} |
| hidden size | {model.d_model} |
| heads x head size | {model.n_head} x {model.d_head} |
| inner size | {model.d_inner} |
| parameters | {parameters:,} |
| tokens | {info.vocabulary.size:,} ({info.vocabulary.kind}) |
| positional encoding | {model.encoding} |
| cutoffs of the adaptive softmax | {cutoffs} |
| div_val | {model.div_val} |
| evaluation: segment, memory, clamp | {lengths.segment_len}, {lengths.mem_len}, {clamp} |

{scores}## Use

```python
import txl_jax

model = txl_jax.load("PATH_OF_THIS_DIRECTORY")
model.score(["A text."])
```

To convert it to Hugging Face's format:

```sh
python -m experiments.convert --from=PATH_OF_THIS_DIRECTORY --to=PATH --to_format=huggingface
```
"""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInfo:
    """A trained model without its weights."""

    # All settings. Sizes, ties and lengths belong to the weights, others to the training.
    config: ExperimentConfig
    vocabulary: Vocabulary
    # Training steps before the weights were saved, or 0 if unknown.
    step: int
    # Origin of the weights, as one human-readable clause.
    description: str
    # Entries of results.json about these weights, or empty if they are unknown.
    scores: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def is_portable(folder: AnyPath) -> bool:
    """Returns whether a directory is a portable checkpoint, by its config.json."""
    try:
        return _KIND in storage.read_json(os.path.join(folder, CONFIG))
    except (OSError, ValueError, TypeError):
        return False


def write(folder: AnyPath, info: ModelInfo, leaves: Leaves) -> None:
    """Writes the files into an existing directory, config.json last.

    Without config.json, the directory is not a portable checkpoint.

    Args:
      folder: The directory.
      info: The model.
      leaves: Parameters of `TransformerXL` by path, which are converted to float32.
    """
    leaves = leaves_lib.as_type(leaves, np.dtype(np.float32))
    named = {path.replace("/", "."): leaf for path, leaf in leaves.items()}
    safetensors.write(Path(folder, WEIGHTS), named, metadata={"format": "txl_jax"})
    write_vocabulary(folder, info.vocabulary)
    num_parameters = sum(math.prod(leaf.shape) for leaf in leaves.values())
    storage.write(os.path.join(folder, CARD), _card(info, num_parameters).encode())
    sums = {WEIGHTS: storage.sha256(Path(folder, WEIGHTS)), VOCABULARY: digest(info.vocabulary)}
    storage.write_json(os.path.join(folder, CONFIG), _saved(info, num_parameters, sums))


def stored_settings(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the settings that go along with weights, as JSON values by dotted name."""
    paths = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.path}
    settings: dict[str, Any] = {}
    for name, value in config_tree.to_dict(config).items():
        group = name.split(".")[0]
        # Paths are this machine's, and may have a person's name in them.
        if group in _GROUPS and name not in paths:
            settings[name] = value
    settings["data.reset_at"] = config.data.reset_at
    return settings


def check_scores(scores: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Checks that the scores that go along with weights are numbers, as the card needs them.

    Raises:
      ValueError: If a score is a text. Other values, such as a list instead of a dict, raise a
        TypeError or an AttributeError.
    """
    _score_table(scores, vocabulary.measure)


def _saved(info: ModelInfo, num_parameters: int, sums: Mapping[str, str]) -> dict[str, Any]:
    """Returns the content of config.json.

    Args:
      info: The model.
      num_parameters: Number of parameters.
      sums: The sha256 of other files in hexadecimal, by name.
    """
    return {
        _KIND: _KIND_VERSION,
        "description": info.description,
        "parameters": num_parameters,
        "vocab_size": info.vocabulary.size,
        "step": info.step,
        "config": stored_settings(info.config),
        "scores": dict(info.scores),
        "sha256": dict(sums),
    }


def read_info(folder: AnyPath) -> ModelInfo:
    """Reads everything except the weights.

    Raises:
      UserError: If the checkpoint is corrupted or has a newer version.
    """
    with reading(os.path.join(folder, CONFIG)):
        return _read_info(folder)


def _read_info(folder: AnyPath) -> ModelInfo:
    path = os.path.join(folder, CONFIG)
    saved = _read_config(folder)
    vocabulary = read_vocabulary(os.path.join(folder, VOCABULARY))
    # Anybody may have written or edited the file. A value of another type, or a setting that this
    # version does not have, raises one of these.
    damaged = f"{path} is corrupted or from another version (%s). Copy or convert it again."
    with rephrased(damaged, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        config = from_dict(ExperimentConfig, saved["config"])
        # Sizes that contradict each other would fail later, in a shape of JAX.
        config.model.validate()
        expected_digest = str(saved["sha256"][VOCABULARY])
        expected_size = int(saved["vocab_size"])
        info = ModelInfo(
            config=config,
            vocabulary=vocabulary,
            step=int(saved["step"]),
            description=str(saved["description"]),
            scores=dict(saved["scores"]),
        )
        check_scores(info.scores, vocabulary)
    # With another vocabulary, the model would read and write other words.
    if digest(vocabulary) != expected_digest or vocabulary.size != expected_size:
        raise UserError(
            f"{folder}/{VOCABULARY} ({vocabulary.size} tokens) does not match {CONFIG} (sha256, "
            f"or vocab_size {expected_size}). Copy or convert the directory again."
        )
    return info


def read_leaves(folder: AnyPath) -> dict[str, Leaf]:
    """Returns the weights by path, each read when it is needed.

    Raises:
      CheckpointError: If they are corrupted.
    """
    path = os.path.join(folder, WEIGHTS)
    with reading(path):
        expected = str(_read_config(folder)["sha256"].get(WEIGHTS))
        tensors = safetensors.read(path, sha256=expected)
    by_path = {name.replace(".", "/"): leaf for name, leaf in tensors.items()}
    return leaves_lib.guarded(by_path, name=path)


def place(leaves: Leaves, abstract_params: Any) -> Any:
    """Reads onto each device its part of each parameter.

    Args:
      leaves: Parameters by path.
      abstract_params: The nested parameters' shapes, dtypes and shardings.

    Returns:
      The nested parameters.

    Raises:
      CheckpointError: If the leaves belong to another model.
    """
    named = flax.traverse_util.flatten_dict(abstract_params, sep="/")

    # A missing or unknown parameter, or another shape, is found before any array is read. Dtypes
    # may differ: floats are converted to the dtype that is wanted, float64 with JAX_ENABLE_X64.
    described: dict[str, str] = {}
    for path, leaf in leaves.items():
        dtype = named[path].dtype if path in named else "float32"
        described[path] = f"{dtype}{list(leaf.shape)}"
    difference = describe_difference(described, describe_arrays(abstract_params))
    if difference:
        raise CheckpointError(
            f"the weights do not match the config ({difference}). Convert them again."
        )

    def part(path: str, index: Any) -> np.ndarray:
        # A copy: where a device shares the host's memory, jax would keep the mapped file as its
        # array.
        return np.array(leaves[path].part(index), named[path].dtype)

    placed: dict[str, Any] = {}
    # The largest comes first, when memory is empty: the host holds an array twice while it is
    # placed.
    for path in sorted(named, key=lambda path: -math.prod(named[path].shape)):
        array = jax.make_array_from_callback(
            named[path].shape, named[path].sharding, functools.partial(part, path)
        )
        placed[path] = jax.block_until_ready(array)
    return flax.traverse_util.unflatten_dict(placed, sep="/")


def _read_config(folder: AnyPath) -> dict[str, Any]:
    """Returns the content of config.json, whose values may be anything.

    Raises:
      UserError: If it is not a portable checkpoint's, or has a newer version.
    """
    path = os.path.join(folder, CONFIG)
    other = (
        f"{folder} is not a portable checkpoint of txl_jax ({CONFIG}: %s). "
        "Create one with `python -m experiments.convert`."
    )
    with rephrased(other, OSError, ValueError, KeyError, TypeError, AttributeError):
        saved: dict[str, Any] = storage.read_json(path)
        version = saved[_KIND]
        # The directories of other programs have a config.json too, without these two.
        saved["sha256"].items()
    if version != _KIND_VERSION:
        raise UserError(
            f"{path} must have version {_KIND_VERSION}, got {version!r}. Install a newer txl_jax."
        )
    return saved


def write_vocabulary(folder: AnyPath, vocabulary: Vocabulary) -> None:
    """Writes vocabulary.txt, and tokenizer.json for subwords."""
    storage.write(os.path.join(folder, VOCABULARY), dumps(vocabulary).encode())
    if isinstance(vocabulary, SubwordVocabulary):
        storage.write(os.path.join(folder, "tokenizer.json"), vocabulary.content.encode())


def read_vocabulary(path: AnyPath) -> Vocabulary:
    """Reads a vocabulary.txt.

    Raises:
      UserError: If it cannot be read.
    """
    unreadable = f"{path} cannot be read (%s). Copy or convert the directory again."
    with rephrased(unreadable, OSError, ValueError):
        # Some editors write a byte-order mark.
        return loads(storage.read(path).decode("utf-8-sig"), KINDS)


def _card(info: ModelInfo, num_parameters: int) -> str:
    return _CARD.format(
        info=info,
        version=__version__,
        parameters=num_parameters,
        model=info.config.model,
        lengths=info.config.eval,
        cutoffs=format_value(info.config.model.cutoffs) or "none",
        clamp=format_value(info.config.eval.clamp_len),
        scores=_score_table(info.scores, info.vocabulary.measure),
    )


def _score_table(scores: Mapping[str, Any], measure: Measure) -> str:
    """Returns the card's section of scores, empty for a model without scores."""
    name = "bpc" if measure.is_bits else "perplexity"
    heading = str(measure) if measure.is_bits else name
    lines = [
        "## Scores",
        "",
        f"| split | {heading} | nats per token | tokens |",
        "|---|---|---|---|",
    ]
    has_scores = False
    for key, split in (("best_valid", "validation"), ("test", "test")):
        row = scores.get(key)
        if row:
            has_scores = True
            cells = [
                _cell(row.get(name), ".4f"),
                _cell(row.get("loss"), ".4f"),
                _cell(row.get("tokens"), ",.0f"),
            ]
            lines.append(f"| {split} | {' | '.join(cells)} |")

    lengths = scores.get("eval")
    if lengths:
        settings = []
        for key in _SHOWN_LENGTHS:
            if key in lengths:
                settings.append(f"{key} {format_value(lengths[key])}")
        lines += ["", f"Scored with {', '.join(settings)}."]

    if not has_scores:
        return ""
    return "\n".join([*lines, "", ""])


def _cell(score: Any, form: str) -> str:
    """Returns a score in a format of Python, or an empty text if it is missing."""
    if score is None:
        return ""
    return format(score, form)
