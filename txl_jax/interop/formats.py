"""Reads what other implementations wrote: recognises the format, infers the configuration, finds the vocabulary.

found = read("transfo-xl-wt103")       # a folder or a file
found.config, found.compat, found.vocabulary, found.params
"""

import collections
import dataclasses
import enum
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.config import AttentionWindow, CompatConfig, EvalConfig, ExperimentConfig, ModelConfig
from txl_jax.config import tree as config_tree
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
# Files of weights in a folder, in the order in which they are taken.
_NAMES = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("model.pt", "checkpoint_best.pt", "checkpoint_last.pt"),
)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


class Foreign(NamedTuple):
    """A model of another implementation.

    Attributes:
      format: the implementation.
      config: sizes, ties and encoding, inferred.
      compat: the differences that give the same numbers.
      eval_config: lengths of evaluation, where the files have them.
      vocabulary: its tokens; None: the files hold none.
      vocab_size: V.
      params: the parameters of `TransformerXL`, read one at a time.
      notes: lines for people: what was chosen or left out.
    """

    format: Format
    config: ModelConfig
    compat: CompatConfig
    eval_config: EvalConfig
    vocabulary: Vocabulary | None
    vocab_size: int
    params: Leaves
    notes: list[str]


class _Weights(NamedTuple):
    """Tensors of a file by name, and what is known besides.

    Attributes:
      path: the file.
      tensors: by the names that they have there.
      format: by these names; None: they are another model's.
      names: by the PyTorch release's names, those of the tensors that the model has.
      facts: what a pickled module or a checkpoint records of the model.
      vocabulary: a pickled one of the file itself.
      folders: where a vocabulary may lie.
    """

    path: Path
    tensors: Mapping[str, np.ndarray]
    format: Format | None
    names: Mapping[str, str]
    facts: Mapping[str, Any]
    vocabulary: Any
    folders: list[Path]


def recognise(path: str | os.PathLike[str]) -> Format | None:
    """Returns the format of a file or folder; None: it is of none of them.

    Raises:
      UserError: a file of weights is damaged, or would run something.
    """
    weights = _open_any(Path(path))
    return weights.format if weights else None


def read(path: str | os.PathLike[str], format: Format | None = None) -> Foreign:
    """Reads a model of another implementation.

    Args:
      path: a file of weights, or a folder with one, and with config.json and a vocabulary where it has them.
      format: the implementation; None: recognised by the names of the tensors.

    Raises:
      UserError: there are no weights, they are damaged or another model's, a config.json contradicts them, or the
        vocabulary has another size.
    """
    path = Path(path)
    weights = _open_any(path)
    if weights is None:
        raise UserError(
            f"{path} holds no weights of another implementation; expected one of {', '.join(_NAMES)}, such a file, or "
            "a checkpoint of TensorFlow"
        )
    found, file = weights.format, weights.path
    if found is None or format not in (None, found):
        some = ", ".join(list(weights.tensors)[:3])
        raise UserError(f"{file} holds tensors such as {some}, which are no names of {format or 'a Transformer-XL'}")
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
    shapes = {own: np.shape(tensors[name]) for own, name in names.items()}
    if isinstance(tensors, tensorflow.Checkpoint):
        shapes = dict(tensors.shapes)  # Reading a tensor for its shape takes the time of reading it.
    _join_biases(shapes)

    def is_shared(a: str, b: str) -> bool:
        return _are_equal(tensors, names[a], names[b])

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
    """Returns the vocabulary of the file itself, or of the first of its folders that has one."""
    if weights.vocabulary is not None:
        found = foreign_vocabulary.of_object(weights.vocabulary, name=str(weights.path))
        return foreign_vocabulary.check_size(found, vocab_size, name=str(weights.path))
    for folder in weights.folders[:-1]:
        if (found := foreign_vocabulary.find(folder, vocab_size)).vocabulary:
            return found
    return foreign_vocabulary.find(weights.folders[-1], vocab_size)


def _compat(format: Format, facts: Mapping[str, Any]) -> CompatConfig:
    """Returns the differences that give the implementation's numbers."""
    compat = config_tree.apply_preset(ExperimentConfig(), _PRESETS[format]).compat
    if format is Format.NVIDIA:
        compat = dataclasses.replace(compat, same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE)
    if format is Format.HUGGINGFACE and isinstance(facts.get("layer_norm_epsilon"), float):
        compat = dataclasses.replace(compat, layer_norm_eps=facts["layer_norm_epsilon"])
    compat.validate()
    return compat


def _weights_file(path: Path) -> Path | None:
    """Returns the file of weights of a folder, or the file itself."""
    if path.is_dir():
        for name in _NAMES:
            if (path / name).is_file():
                return path / name
        found = [file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES and file.is_file()]
        found = [file for file in found if file.name not in foreign_vocabulary.NAMES]
        return found[0] if len(found) == 1 else None
    return path if path.suffix in _SUFFIXES or path.name.endswith(".index.json") else None


def _open_any(path: Path) -> _Weights | None:
    """Opens the weights of a file or folder; None: there are none."""
    file = _weights_file(path)
    if file is None:
        prefix = tensorflow.find(path)
        return _open_tensorflow(prefix) if prefix else None
    root: Any = None
    tensors: Mapping[str, np.ndarray]
    if file.name.endswith(".index.json"):
        tensors = _open_parts(file)
    elif file.suffix == ".safetensors":
        tensors = SafeTensors(file)
    else:
        tensors, root = _open_torch(file)
    tensors = _without_rounded_frequencies(tensors)
    format = _format_of(tensors, root)
    facts = nvidia.facts(root) if format is Format.NVIDIA else state_dict.facts_of_module(root)
    vocabulary = root.get("vocab") if format is Format.NVIDIA else None
    return _Weights(file, tensors, format, _names(tensors, format), facts, vocabulary, [file.parent])


def _without_rounded_frequencies(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Returns the tensors without the sinusoids' frequencies if these have 16 bits: a constant, rounded by a cast."""
    rounded = {name for name in tensors if name.endswith(original.FREQUENCIES) and tensors[name].dtype.itemsize == 2}
    return Renamed(tensors, {name: name for name in tensors if name not in rounded}) if rounded else tensors


def _open_torch(file: Path) -> tuple[StateDict, Any]:
    held = torch_files.read(file)
    return state_dict.of(held), held.root


def _open_parts(file: Path) -> Mapping[str, np.ndarray]:
    """Opens the files that an index lists."""
    parts = _read_json(file).get("weight_map")
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise UserError(f"{file} lists no files of its folder under weight_map; download it again")
    paths = [file.with_name(name) for name in names]
    maps = [SafeTensors(path) if path.suffix == ".safetensors" else _open_torch(path)[0] for path in paths]
    return collections.ChainMap(*maps)  # type: ignore[arg-type]


def _open_tensorflow(prefix: Path) -> _Weights:
    """Opens a checkpoint of TensorFlow, with the lengths of the published evaluation of its corpus."""
    tensors = tensorflow.Checkpoint(prefix)
    folders = tensorflow.folders_of_vocabulary(prefix)
    about = next((folder / "corpus-info.json" for folder in folders if (folder / "corpus-info.json").is_file()), None)
    facts: dict[str, Any] = {"pre_lnorm": False, "cutoffs": tensors.cutoffs}
    if "word_emb.emb_projs.0" in tensors:
        facts["tie_projs"] = [f"crit.out_projs.{c}" not in tensors for c in range(len(tensors.cutoffs) + 1)]
    facts |= tensorflow.lengths(_read_json(about).get("dataset")) if about else {}
    return _Weights(prefix, tensors, Format.TENSORFLOW, {name: name for name in tensors}, facts, None, folders)


def _format_of(tensors: Mapping[str, np.ndarray], root: Any) -> Format | None:
    """Returns the format by the names of the tensors, and by what is around them."""
    if any(name.startswith(("transformer.layers.", "transformer.word_emb.")) for name in tensors):
        return Format.HUGGINGFACE
    if "word_emb.emb_layers.0.weight" in tensors:
        return Format.NVIDIA if nvidia.is_checkpoint(root) else Format.ORIGINAL
    return None


def _names(tensors: Mapping[str, np.ndarray], format: Format | None) -> dict[str, str]:
    """Returns the PyTorch release's names, and those of the tensors here."""
    if format is Format.NVIDIA:
        return nvidia.original_names(tensors)
    return {name.removeprefix("transformer.") if format is Format.HUGGINGFACE else name: name for name in tensors}


def _join_biases(shapes: dict[str, tuple[int, ...]]) -> None:
    """Puts u and v, which lie in every layer of Hugging Face's model, where the release has them."""
    for bias in ("r_w_bias", "r_r_bias"):
        layers = [name for name in shapes if name.endswith(f"dec_attn.{bias}")]
        if layers and bias not in shapes:
            shapes[bias] = (len(layers), *shapes[layers[0]])
        for name in layers:
            del shapes[name]


def _are_equal(tensors: Mapping[str, np.ndarray], a: str, b: str) -> bool:
    """Returns whether two tensors are one, or have the same numbers."""
    if isinstance(tensors, StateDict) and tensors.is_same(a, b):
        return True
    x, y = tensors[a], tensors[b]
    return x.shape == y.shape and all(np.array_equal(p, q) for p, q in zip(_blocks(x), _blocks(y), strict=True))


def _blocks(array: np.ndarray, rows: int = 4096) -> Iterator[np.ndarray]:
    """Yields an array in parts, so that comparing large ones takes little memory."""
    array = np.atleast_1d(array)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _in_order(params: Mapping[str, Leaf], order: np.ndarray, config: ModelConfig) -> dict[str, Leaf]:
    """Returns the parameters with the rows of tokens in another order."""
    if config.cutoffs:
        raise UserError("the vocabulary's tokens are bytes in an order of their own, and the softmax has clusters")
    rows = ("embedding/table_0", "softmax/table_0", "softmax/bias")

    def ordered(leaf: Leaf) -> Leaf:
        return Leaf(leaf.shape, leaf.dtype, lambda: leaf.read()[order])

    return {path: ordered(leaf) if path in rows else leaf for path, leaf in params.items()}


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; raises `UserError` if it holds none."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ValueError("it is too long")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({type(error).__name__}); copy or download it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; copy or download it again")
    return found
