"""Reads other implementations' models.

This recognizes the format, infers the configuration, and finds the vocabulary.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.config import AttentionWindow, CompatConfig, ExperimentConfig
from txl_jax.config.experiment import apply_preset
from txl_jax.data.id_tokens import IdVocabulary
from txl_jax.errors import UserError, reading, rephrased
from txl_jax.interop import foreign_vocabulary as vocabularies
from txl_jax.interop import (
    infer_config,
    names,
    original,
    own_settings,
    safetensors,
    state_dict,
    tensorflow,
    torch_files,
    weight_files,
)
from txl_jax.interop.leaves import Leaf, Leaves, guarded
from txl_jax.interop.original import Format
from txl_jax.interop.portable import ModelInfo
from txl_jax.interop.torch_files import TorchFile
from txl_jax.interop.weight_files import Kind, WeightFiles
from txl_jax.runtime import storage

# In NVIDIA's checkpoints (DeepLearningExamples) the softmax's biases and untied tables are lists of
# parameters.
_NVIDIA_LISTS = {"biases": "bias", "weights": "weight"}
_NVIDIA_LISTED = re.compile(r"\Acrit\.out_layers_(biases|weights)\.(\d+)\Z")


class Model(NamedTuple):
    """A trained model whose parameters are read one at a time."""

    format: str
    info: ModelInfo
    leaves: Leaves  # The parameters of `TransformerXL` by path.
    notes: list[str]  # What was chosen or omitted: lines for the user.


class _Weights(NamedTuple):
    """A file's tensors and everything known about them."""

    path: Path
    # By the format's names (`original.Format`).
    tensors: Leaves
    # None if they belong to another model.
    format: Format | None
    # The model's arguments, as a pickled module or a checkpoint records them.
    facts: Mapping[str, Any]
    # Where a vocabulary may be.
    folders: list[Path]
    # A pickled vocabulary in the file itself.
    vocabulary: Any = None
    notes: tuple[str, ...] = ()


def read(path: str | os.PathLike[str]) -> Model:
    """Reads another implementation's model from a file of weights or its directory.

    This includes config.json and the vocabulary.
    """
    path = Path(path)
    with reading(str(path)):
        files = weight_files.find(path)
        if files is None:
            expected = (
                f"Expected one of {', '.join(weight_files.NAMES)}, such a file, or "
                "a TensorFlow checkpoint."
            )
            raise UserError(f"{path} contains no weights of another implementation. {expected}")
        weights = _open(files)
    file = weights.path
    if weights.format is None:
        some = ", ".join(list(weights.tensors)[:3])
        raise UserError(
            f"{file} has tensors such as {some}, which do not belong to a Transformer-XL"
        )
    try:
        with reading(str(file)):
            model = _read_weights(weights, weights.format)
    except UserError as error:
        if str(file.parent) in str(error):
            raise
        # Errors on tensors and settings name only these.
        raise UserError(f"{file}: {error}") from error
    return model._replace(leaves=guarded(model.leaves, name=str(file)))


def _read_weights(weights: _Weights, format: Format) -> Model:
    beside = weights.path.with_name("config.json")
    facts = dict(weights.facts) | (_read_json(beside) if beside.is_file() else {})
    by_release = {
        name.removeprefix(original.PREFIX): leaf for name, leaf in weights.tensors.items()
    }
    config, vocab_size, eval_config, notes = infer_config.infer(by_release, facts)
    params = original.to_leaves(weights.tensors, config, vocab_size=vocab_size, format=format)
    vocabulary, more = _vocabulary(weights, vocab_size)
    notes += [*more, *weights.notes]
    if vocabulary is None:
        vocabulary = IdVocabulary(size=vocab_size)
        notes.append(
            "tokens are named by their ids. For words, put the vocabulary next to the weights and "
            "convert again"
        )
    config = dataclasses.replace(config, compat=_compat(format, facts))
    whole = dataclasses.replace(ExperimentConfig(), model=config, eval=eval_config)
    info = ModelInfo(whole, vocabulary, 0, f"converted from the {format} format")
    found = own_settings.apply(weights.path, info, format)
    return Model(format, found.info, params, [*notes, *found.notes])


def _vocabulary(weights: _Weights, vocab_size: int) -> vocabularies.Found:
    """Returns the vocabulary in the file itself, or in the first directory that has one."""
    if weights.vocabulary is not None:
        found = vocabularies.of_object(weights.vocabulary, name=str(weights.path))
        return vocabularies.check_size(found, vocab_size, name=str(weights.path))
    for folder in weights.folders:
        if (found := vocabularies.find(folder, vocab_size)).vocabulary:
            break
    return found


def _compat(format: Format, facts: Mapping[str, Any]) -> CompatConfig:
    """Returns the differences that give the implementation's numbers."""
    compat = apply_preset(ExperimentConfig(), original.PRESETS[format]).model.compat
    if format is Format.NVIDIA:  # With same_length a query sees one key more.
        compat = dataclasses.replace(compat, same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE)
    if format is Format.HUGGINGFACE and isinstance(facts.get("layer_norm_epsilon"), float):
        compat = dataclasses.replace(compat, layer_norm_eps=facts["layer_norm_epsilon"])
    compat.validate()
    return compat


def _open(files: WeightFiles) -> _Weights:
    """Opens weights, and recognizes the implementation that wrote them."""
    if files.kind is Kind.TENSORFLOW:
        return _open_tensorflow(files.path)
    tensors, file = _tensors(files)
    folders = [files.path.parent]
    named = names.known(tensors)
    root = file.root if file else None
    if (
        isinstance(root, dict)
        and isinstance(facts := root.get("model_config"), dict)
        and "model_state" in root
    ):
        notes = tuple(named.notes)
        return _Weights(
            files.path,
            _renamed(named.tensors),
            Format.NVIDIA,
            facts,
            folders,
            root.get("vocab"),
            notes,
        )
    format = None
    if named.is_recognized:
        format = Format.HUGGINGFACE if named.has_transformer else Format.ORIGINAL
    facts = state_dict.facts_of_module(file) if file else {}
    return _Weights(files.path, named.tensors, format, facts, folders, notes=tuple(named.notes))


def _tensors(files: WeightFiles) -> tuple[Leaves, TorchFile | None]:
    """Returns the tensors of all files by name, and the value of the PyTorch file.

    The value is returned only if there is exactly one file.
    """
    found: dict[str, Leaf] = {}
    file = None
    for path, wanted in files.parts.items():
        if weight_files.kind_of(path) is Kind.SAFETENSORS:
            tensors: Leaves = safetensors.read(path)
        else:
            file = torch_files.read(path)
            tensors = state_dict.of(file)
        if wanted is not None:
            if missing := wanted - tensors.keys():
                raise UserError(
                    f"{path} has no tensor {min(missing)}, which {files.path.name} says is in it"
                )
            tensors = {name: leaf for name, leaf in tensors.items() if name in wanted}
        if twice := found.keys() & tensors.keys():
            raise UserError(f"tensor {min(twice)} is in more than one of the files of {files.path}")
        found |= tensors
    return found, file if len(files.parts) == 1 else None


def _renamed(tensors: Leaves) -> dict[str, Leaf]:
    """Returns NVIDIA's tensors by the release's names.

    Projections that are shared with the embedding are omitted, because the embedding has them too.
    """
    return {
        _NVIDIA_LISTED.sub(
            lambda match: f"crit.out_layers.{match[2]}.{_NVIDIA_LISTS[match[1]]}", name
        ): leaf
        for name, leaf in tensors.items()
        if not name.startswith("crit.shared_out_projs.")
    }


def _open_tensorflow(prefix: Path) -> _Weights:
    """Opens a checkpoint of TensorFlow, with the evaluation lengths published for its corpus."""
    tensors, facts, note = tensorflow.read(prefix)
    folders = [prefix.parent, prefix.parent.parent / "data"]  # The second one as published.
    abouts = (folder / "corpus-info.json" for folder in folders)
    if about := next((path for path in abouts if path.is_file()), None):
        facts |= tensorflow.lengths(_read_json(about).get("dataset"))
    return _Weights(prefix, tensors, Format.TENSORFLOW, facts, folders, notes=(note,))


def _read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON file's object, or raises `UserError` if it does not contain an object."""
    with rephrased(
        f"{path} is not a JSON object (%s). Copy or download it again.",
        OSError,
        ValueError,
        TypeError,
    ):
        return dict(storage.read_json(path))
