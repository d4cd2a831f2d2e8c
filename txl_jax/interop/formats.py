"""Reads other implementations' models: recognises the format, infers the configuration, finds the vocabulary.

found = read("transfo-xl-wt103")       # a directory or a file
found.config, found.compat, found.vocabulary, found.params
"""

import collections
import dataclasses
import enum
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.config import AttentionWindow, CompatConfig, EvalConfig, ExperimentConfig, ModelConfig
from txl_jax.config.experiment import apply_preset
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.interop import (
    foreign_vocabulary,
    huggingface,
    infer_config,
    nvidia,
    original,
    state_dict,
    tensorflow,
    torch_files,
)
from txl_jax.interop.leaves import Leaf, Leaves, Renamed
from txl_jax.interop.safetensors import SafeTensors
from txl_jax.interop.state_dict import StateDict

_MAX_JSON = 1 << 24


class Format(enum.StrEnum):
    """Formats of other implementations."""

    HUGGINGFACE = "huggingface"
    ORIGINAL = "original"  # The authors' PyTorch release.
    TENSORFLOW = "tensorflow"  # Their TensorFlow release.
    NVIDIA = "nvidia"  # DeepLearningExamples.


_PRESETS = {Format.HUGGINGFACE: "hf", Format.ORIGINAL: "pytorch", Format.TENSORFLOW: "tf", Format.NVIDIA: "pytorch"}
# Files of weights in a directory, in order of preference.
_NAMES = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("model.pt", "checkpoint_best.pt", "checkpoint_last.pt"),
)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


class Foreign(NamedTuple):
    """A model of another implementation."""

    format: Format
    config: ModelConfig  # Sizes, ties and encoding, inferred.
    compat: CompatConfig  # The differences that give the same numbers.
    eval_config: EvalConfig  # Lengths of evaluation, if the files record them.
    vocabulary: Vocabulary | None  # None if the files have none.
    vocab_size: int
    params: Leaves  # The parameters of `TransformerXL`, read one at a time.
    notes: list[str]  # What was chosen or omitted, for people.


class _Weights(NamedTuple):
    """A file's tensors and everything known about them."""

    path: Path
    tensors: Mapping[str, np.ndarray]  # By the file's names.
    format: Format | None  # By these names, or None if they belong to another model.
    names: Mapping[str, str]  # The file's names of the model's tensors, by the PyTorch release's names.
    facts: Mapping[str, Any]  # The model's arguments, as a pickled module or a checkpoint records them.
    vocabulary: Any  # A pickled vocabulary in the file itself.
    folders: list[Path]  # Where a vocabulary may be.


def read(path: str | os.PathLike[str], format: Format | None = None) -> Foreign:
    """Reads a model of another implementation.

    Args:
      path: A file of weights, or a directory that contains one, with config.json and a vocabulary if present.
      format: The implementation, or None to recognise it by the names of the tensors.

    Raises:
      UserError: If there are no weights, they are damaged or another model's, config.json contradicts them, or the
        vocabulary has another size.
    """
    path = Path(path)
    weights = _open_any(path)
    if weights is None:
        raise UserError(
            f"{path} contains no weights of another implementation. Expected one of {', '.join(_NAMES)}, such a file, "
            "or a checkpoint of TensorFlow."
        )
    found, file = weights.format, weights.path
    if found is None or format not in (None, found):
        some = ", ".join(list(weights.tensors)[:3])
        raise UserError(f"{file} has tensors such as {some}, which are not names of {format or 'a Transformer-XL'}")
    try:
        return _read_weights(weights, found)
    except UserError as error:
        if str(file.parent) in str(error):
            raise
        raise UserError(f"{file}: {error}") from error  # Errors of the correspondence name tensors alone.


def _read_weights(weights: _Weights, format: Format) -> Foreign:
    tensors, names = weights.tensors, weights.names
    beside = weights.path.with_name("config.json")
    facts = dict(weights.facts) | (_read_json(beside) if beside.is_file() else {})
    if isinstance(tensors, tensorflow.Checkpoint):
        shapes = dict(tensors.shapes)  # Without reading the tensors.
    else:
        shapes = {own: np.shape(tensors[name]) for own, name in names.items()}
    _join_biases(shapes)

    def is_shared(a: str, b: str) -> bool:
        a, b = names[a], names[b]
        return (isinstance(tensors, StateDict) and tensors.is_same(a, b)) or np.array_equal(tensors[a], tensors[b])

    inferred = infer_config.infer(shapes, facts, is_shared, name=str(weights.path))
    config, vocab_size = inferred.config, inferred.vocab_size
    params: Mapping[str, Leaf]
    if format is Format.HUGGINGFACE:
        filled = original.fill_shared(tensors, huggingface.aliases(config))
        params = huggingface.to_leaves(filled, config, vocab_size=vocab_size)
    else:
        order = original.ClusterOrder.FORWARD if format is Format.TENSORFLOW else original.ClusterOrder.REVERSED
        filled = original.fill_shared(Renamed(tensors, names), original.aliases(config))
        params = original.to_leaves(filled, config, vocab_size=vocab_size, cluster_order=order)
    found = _vocabulary(weights, vocab_size)
    if found.order is not None:
        params = _in_order(params, found.order, config)
    notes = inferred.notes + found.notes
    if isinstance(tensors, tensorflow.Checkpoint):
        notes.append(f"{tensors.left_out} variables of the optimizer and of averages are left out")
    compat = _compat(format, facts)
    return Foreign(format, config, compat, inferred.eval_config, found.vocabulary, vocab_size, params, notes)


def _vocabulary(weights: _Weights, vocab_size: int) -> foreign_vocabulary.Found:
    """Returns the vocabulary in the file itself, or in the first of its directories that has one."""
    if weights.vocabulary is not None:
        found = foreign_vocabulary.of_object(weights.vocabulary, name=str(weights.path))
        return foreign_vocabulary.check_size(found, vocab_size, name=str(weights.path))
    for folder in weights.folders[:-1]:
        if (found := foreign_vocabulary.find(folder, vocab_size)).vocabulary:
            return found
    return foreign_vocabulary.find(weights.folders[-1], vocab_size)


def _compat(format: Format, facts: Mapping[str, Any]) -> CompatConfig:
    """Returns the differences that give the implementation's numbers."""
    compat = apply_preset(ExperimentConfig(), _PRESETS[format]).compat
    if format is Format.NVIDIA:
        compat = dataclasses.replace(compat, same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE)
    if format is Format.HUGGINGFACE and isinstance(facts.get("layer_norm_epsilon"), float):
        compat = dataclasses.replace(compat, layer_norm_eps=facts["layer_norm_epsilon"])
    compat.validate()
    return compat


def _weights_file(path: Path) -> Path | None:
    """Returns a directory's file of weights, or the file itself."""
    if not path.is_dir():
        return path if path.suffix in _SUFFIXES or path.name.endswith(".index.json") else None
    if named := next((path / name for name in _NAMES if (path / name).is_file()), None):
        return named
    found = [file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES and file.is_file()]
    found = [file for file in found if file.name not in foreign_vocabulary.NAMES]
    return found[0] if len(found) == 1 else None


def _open_any(path: Path) -> _Weights | None:
    """Opens the weights at a path, or returns None if the path has no weights."""
    file = _weights_file(path)
    if file is None:
        prefix = tensorflow.find(path)
        return _open_tensorflow(prefix) if prefix else None
    tensors, root = _open_parts(file) if file.name.endswith(".index.json") else _open_file(file)
    # Frequencies are a constant. In 16 bits a cast has rounded it.
    rounded = {name for name in tensors if name.endswith(original.FREQUENCIES) and tensors[name].dtype.itemsize == 2}
    if rounded:
        tensors = Renamed(tensors, {name: name for name in tensors if name not in rounded})
    if any(name.startswith(("transformer.layers.", "transformer.word_emb.")) for name in tensors):
        names = {name.removeprefix("transformer."): name for name in tensors}
        return _Weights(file, tensors, Format.HUGGINGFACE, names, state_dict.facts_of_module(root), None, [file.parent])
    if "word_emb.emb_layers.0.weight" in tensors and nvidia.is_checkpoint(root):
        names, facts = nvidia.original_names(tensors), nvidia.facts(root)
        return _Weights(file, tensors, Format.NVIDIA, names, facts, root.get("vocab"), [file.parent])
    format = Format.ORIGINAL if "word_emb.emb_layers.0.weight" in tensors else None
    names, facts = {name: name for name in tensors}, state_dict.facts_of_module(root)
    return _Weights(file, tensors, format, names, facts, None, [file.parent])


def _open_file(file: Path) -> tuple[Mapping[str, np.ndarray], Any]:
    """Returns a file's tensors, and the value of a PyTorch file."""
    if file.suffix == ".safetensors":
        return SafeTensors(file), None
    found = torch_files.read(file)
    return state_dict.of(found), found.root


def _open_parts(file: Path) -> tuple[Mapping[str, np.ndarray], Any]:
    """Returns the tensors of the files that an index lists."""
    parts = _read_json(file).get("weight_map")
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise UserError(f"{file} lists no files of its directory under weight_map. Download it again.")
    return collections.ChainMap(*(_open_file(file.with_name(name))[0] for name in names)), None  # type: ignore[arg-type]


def _open_tensorflow(prefix: Path) -> _Weights:
    """Opens a checkpoint of TensorFlow, with the evaluation lengths published for its corpus."""
    tensors = tensorflow.Checkpoint(prefix)
    folders = tensorflow.folders_of_vocabulary(prefix)
    about = next((folder / "corpus-info.json" for folder in folders if (folder / "corpus-info.json").is_file()), None)
    facts: dict[str, Any] = {"pre_lnorm": False, "cutoffs": tensors.cutoffs}
    if "word_emb.emb_projs.0" in tensors:
        facts["tie_projs"] = [f"crit.out_projs.{c}" not in tensors for c in range(len(tensors.cutoffs) + 1)]
    facts |= tensorflow.lengths(_read_json(about).get("dataset")) if about else {}
    return _Weights(prefix, tensors, Format.TENSORFLOW, {name: name for name in tensors}, facts, None, folders)


def _join_biases(shapes: dict[str, tuple[int, ...]]) -> None:
    """Moves u and v from every layer of Hugging Face's model to where the release has them."""
    for bias in ("r_w_bias", "r_r_bias"):
        layers = [name for name in shapes if name.endswith(f"dec_attn.{bias}")]
        if layers and bias not in shapes:
            shapes[bias] = (len(layers), *shapes[layers[0]])
        for name in layers:
            del shapes[name]


def _in_order(params: Mapping[str, Leaf], order: np.ndarray, config: ModelConfig) -> dict[str, Leaf]:
    """Returns the parameters with the tokens' rows in another order."""
    if config.cutoffs:
        raise UserError("the vocabulary's bytes are not in order, which a softmax with clusters does not support")
    rows = ("embedding/table_0", "softmax/table_0", "softmax/bias")

    def ordered(leaf: Leaf) -> Leaf:
        return Leaf(leaf.shape, leaf.dtype, lambda: leaf.read()[order])

    return {path: ordered(leaf) if path in rows else leaf for path, leaf in params.items()}


def _read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON file's object, or raises `UserError` if it has none."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ValueError("it is too long")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({type(error).__name__}). Copy or download it again.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object. Copy or download it again.")
    return found
