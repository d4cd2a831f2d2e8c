"""The portable folder of a trained model: weights without optimizer and checkpoints, to be copied and published.

config.json         sizes, ties and lengths, the training's settings, scores, and the sha256 of the next two
model.safetensors   the parameters, float32, by their paths: "stack.layers.attention.query"
vocabulary.txt      the tokens by id
tokenizer.json      the same of Hugging Face tokens, for other programs; it is not read here
README.md           the model card; may be edited

The folder is written under another name and renamed. Each file but the card is checked against its sha256 when it is
read, so that a copy that was cut off is not taken for the model.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import KINDS
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.vocabulary import TITLE, Vocabulary, digest, dumps, loads
from txl_jax.errors import CheckpointError, MissingPackageError, UserError
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop import safetensors
from txl_jax.interop.leaves import Leaf, Leaves
from txl_jax.interop.model_card import make_card
from txl_jax.interop.safetensors import SafeTensors
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import describe_arrays, describe_difference
from txl_jax.runtime.storage import AnyPath

CONFIG, WEIGHTS, VOCABULARY, CARD = "config.json", "model.safetensors", "vocabulary.txt", "README.md"
TOKENIZER = "tokenizer.json"
_KIND, _KIND_VERSION = "txl_jax_model", 1  # The key that only a portable folder's config.json has.
# The groups of settings that go along. Those of data and mesh belong to one machine.
_GROUPS = ("seed", "model", "compat", "optimizer", "train", "regularization", "average", "eval", "generate")


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInfo:
    """All of a trained model but its weights.

    Attributes:
      config: the settings; only sizes, ties and lengths matter to the weights.
      vocabulary: text to token ids and back.
      step: number of updates after which the weights were saved; 0: unknown.
      description: one clause for people: where the weights come from.
      scores: those of results.json, as far as they are of these weights.
    """

    config: ExperimentConfig
    vocabulary: Vocabulary
    step: int
    description: str
    scores: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def is_portable(folder: AnyPath) -> bool:
    """Returns whether a folder's config.json is that of a portable folder; nothing else is read."""
    try:
        return _KIND in json.loads(storage.read(os.path.join(folder, CONFIG)))
    except (OSError, ValueError, TypeError):
        return False


def write(folder: AnyPath, info: ModelInfo, leaves: Leaves) -> None:
    """Writes the files into a folder that exists; config.json last, as the folder is none without it.

    Args:
      leaves: the parameters of `TransformerXL`; converted to float32 where they are not.

    Raises:
      OSError, LogError: they cannot be written.
    """
    leaves = leaves_lib.as_type(leaves, np.dtype(np.float32))
    named = {path.replace("/", "."): leaf for path, leaf in leaves.items()}
    sha256 = safetensors.write(Path(folder, WEIGHTS), named, metadata={"format": "txl_jax"})
    write_vocabulary(folder, info.vocabulary)
    num_parameters = leaves_lib.num_bytes(leaves) // 4
    settings = _settings(info.config)
    card = make_card(info.config, info.vocabulary, num_parameters, info.description, info.scores)
    storage.write(os.path.join(folder, CARD), card.encode())
    saved = {
        _KIND: _KIND_VERSION,
        "description": info.description,
        "parameters": num_parameters,
        "vocab_size": info.vocabulary.size,
        "step": info.step,
        "config": settings,
        "scores": dict(info.scores),
        "sha256": {WEIGHTS: sha256, VOCABULARY: digest(info.vocabulary)},
    }
    storage.write_json(os.path.join(folder, CONFIG), saved)


def read_info(folder: AnyPath) -> ModelInfo:
    """Reads all but the weights.

    Raises:
      UserError: this is no portable folder, it is of a newer version, or a file is damaged.
    """
    path, saved = os.path.join(folder, CONFIG), _read_config(folder)
    try:
        config = config_tree.from_dict(saved["config"])
        config.model.validate()
        expected = str(saved["sha256"][VOCABULARY])
        step, description, scores = int(saved["step"]), str(saved["description"]), dict(saved["scores"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged or of another version ({error}); copy or convert the folder again"
        ) from error
    vocabulary = read_vocabulary(folder)
    if digest(vocabulary) != expected:
        vocabulary_file = os.path.join(folder, VOCABULARY)
        raise UserError(f"{vocabulary_file} is not the file that {CONFIG} names (sha256); copy the folder again")
    if vocabulary.size != saved.get("vocab_size"):
        raise UserError(
            f"{path} has vocab_size {saved.get('vocab_size')} and {VOCABULARY} has {vocabulary.size} tokens; copy or "
            "convert the folder again"
        )
    return ModelInfo(config, vocabulary, step, description, scores)


def read_leaves(folder: AnyPath) -> dict[str, Leaf]:
    """Checks the file of weights against its sha256 and returns them by path; each is read when it is asked for.

    Raises:
      UserError: as `read_info`.
      CheckpointError: the file of weights cannot be read, or is not the one that was written.
    """
    expected = _read_config(folder).get("sha256", {})
    tensors = SafeTensors(os.path.join(folder, WEIGHTS))
    if storage.sha256(tensors.local) != expected.get(WEIGHTS):
        raise CheckpointError(
            f"{tensors.path} is damaged (its sha256 is not the one in {CONFIG}); copy or convert the folder again"
        )
    return {name.replace(".", "/"): tensors.leaf(name) for name in tensors}


def place(leaves: Leaves, abstract_params: Any) -> Any:
    """Reads parameters onto devices: each device gets its part of each array, read from the file alone.

    Args:
      leaves: by path.
      abstract_params: shapes, types and shardings of the parameters of a model.

    Raises:
      CheckpointError: the leaves are of another model; names up to three of them.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(abstract_params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): like for path, like in flat}
    found = {path: f"{np.dtype(np.float32)}{list(leaf.shape)}" for path, leaf in leaves.items()}
    if difference := describe_difference(found, describe_arrays(abstract_params)):
        raise CheckpointError(f"the weights are of another model than the config ({difference}); convert them again")
    # The largest first: a host holds an array twice while it is placed, and the first has nothing beside it yet.
    placed: dict[str, Any] = {}
    for path in sorted(named, key=lambda path: -int(np.prod(named[path].shape))):
        placed[path] = jax.block_until_ready(_place(leaves[path], named[path]))
    return jax.tree_util.tree_unflatten(structure, [placed[path] for path in named])


def _place(leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    # A copy: where a device shares the host's memory, jax would keep the map, and with it the file, as its array.
    def part(index: Any) -> np.ndarray:
        return np.array(leaf.read()[index], like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, part)


def _settings(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the settings that go along, by dotted name; none holds a path of this machine."""
    paths = {leaf.name for leaf in config_tree.leaves() if leaf.setting.path}
    values = config_tree.to_dict(config).items()
    return {name: value for name, value in values if name.partition(".")[0] in _GROUPS and name not in paths}


def _read_config(folder: AnyPath) -> dict[str, Any]:
    path = os.path.join(folder, CONFIG)
    try:
        saved = json.loads(storage.read(path))
        version = saved[_KIND]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} is no portable folder of txl_jax ({CONFIG}: {error!r}); give one that "
            "`python -m experiments.convert` wrote"
        ) from error
    if version != _KIND_VERSION:
        raise UserError(f"{path} has version {version!r}, not {_KIND_VERSION}; install a newer txl_jax")
    found: dict[str, Any] = saved
    return found


def write_vocabulary(folder: AnyPath, vocabulary: Vocabulary) -> None:
    """Writes vocabulary.txt, and the tokenizer.json of Hugging Face tokens."""
    storage.write(os.path.join(folder, VOCABULARY), dumps(vocabulary).encode())
    if isinstance(vocabulary, SubwordVocabulary):
        storage.write(os.path.join(folder, TOKENIZER), vocabulary.content.encode())


def holds_vocabulary(folder: AnyPath) -> bool:
    """Returns whether a folder has a vocabulary.txt in the format of txl_jax; other programs use the name too."""
    try:
        with open(os.path.join(folder, VOCABULARY), "rb") as file:
            return file.read(len(TITLE)) == TITLE.encode()
    except OSError:
        return False


def read_vocabulary(folder: AnyPath) -> Vocabulary:
    """Reads vocabulary.txt; raises `UserError` if it cannot be read."""
    path = os.path.join(folder, VOCABULARY)
    try:
        return loads(storage.read(path).decode(), KINDS)
    except MissingPackageError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy or convert the folder again") from error
