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
from txl_jax.interop.weight_files import FileKind, WeightFiles
from txl_jax.runtime import storage

_SHOWN = 3  # Names of tensors in an error.
# In NVIDIA's checkpoints (DeepLearningExamples) the softmax's biases and untied tables are lists of
# parameters.
_NVIDIA_LISTS = {"biases": "bias", "weights": "weight"}
_NVIDIA_LISTED = re.compile(r"\Acrit\.out_layers_(biases|weights)\.(\d+)\Z")


class Model(NamedTuple):
    """A trained model whose parameters are read one at a time."""

    format: str  # Name of the format that the model was read from.
    info: ModelInfo
    leaves: Leaves  # The parameters of `TransformerXL` by path.
    notes: list[str]  # Lines for the user about choices and omissions.


class _RecognizedWeights(NamedTuple):
    """A file's tensors and everything known about them."""

    # The file or prefix, for errors.
    path: Path
    # Tensors by the format's names (`original.Format`).
    tensors: Leaves
    # The implementation, or None if the tensors do not belong to a Transformer-XL.
    format: Format | None
    # The model's arguments, as a pickled module or a checkpoint records them.
    facts: Mapping[str, Any]
    # Directories that may have a vocabulary, in the order in which they are searched.
    folders: list[Path]
    # A pickled vocabulary in the file itself, or None.
    vocabulary: Any = None
    # Lines for the user about choices and omissions.
    notes: tuple[str, ...] = ()


def read(path: str | os.PathLike[str]) -> Model:
    """Reads another implementation's model from a file of weights or its directory.

    This includes config.json and the vocabulary.

    Raises:
      UserError: If the weights or the files next to them are missing, corrupted, or do not belong
        to a Transformer-XL.
    """
    path = Path(path)
    with reading(str(path)):
        files = weight_files.find(path)
        if files is None:
            raise UserError(
                f"{path} contains no weights of another implementation. "
                f"Expected one of {', '.join(weight_files.NAMES)}, such a file, or "
                "a TensorFlow checkpoint."
            )
        weights = _open(files)

    # Weights of any other model, such as BERT's, would end in an error about a tensor's name.
    file = weights.path
    if weights.format is None:
        examples = ", ".join(list(weights.tensors)[:_SHOWN])
        raise UserError(
            f"{file} has tensors such as {examples}, which do not belong to a Transformer-XL"
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


def _read_weights(weights: _RecognizedWeights, format: Format) -> Model:
    facts = dict(weights.facts)
    config_file = weights.path.with_name("config.json")
    if config_file.is_file():
        facts |= _read_json(config_file)

    # Sizes and ties follow from the tensors, and the parameters from both.
    by_release = {
        name.removeprefix(original.PREFIX): leaf for name, leaf in weights.tensors.items()
    }
    inferred = infer_config.infer(by_release, facts)
    params = original.to_leaves(
        weights.tensors, inferred.model, vocab_size=inferred.vocab_size, format=format
    )

    foreign = _vocabulary(weights, inferred.vocab_size)
    notes = [*inferred.notes, *foreign.notes, *weights.notes]
    vocabulary = foreign.vocabulary
    if vocabulary is None:
        vocabulary = IdVocabulary(size=inferred.vocab_size)
        notes.append(
            "tokens are named by their ids. For words, put the vocabulary next to the weights and "
            "convert again"
        )

    config = ExperimentConfig(
        model=dataclasses.replace(inferred.model, compat=_compat(format, facts)),
        eval=inferred.lengths,
    )
    # The file does not record the number of training steps.
    info = ModelInfo(config, vocabulary, step=0, description=f"converted from the {format} format")
    completed = own_settings.apply(weights.path, info, format)
    return Model(format, completed.info, params, [*notes, *completed.notes])


def _vocabulary(weights: _RecognizedWeights, vocab_size: int) -> vocabularies.ForeignVocabulary:
    """Returns the vocabulary in the file itself, or in the first directory that has one."""
    if weights.vocabulary is not None:
        name = str(weights.path)
        foreign = vocabularies.of_object(weights.vocabulary, name=name)
        return vocabularies.check_size(foreign, vocab_size, name=name)
    for folder in weights.folders:
        foreign = vocabularies.find(folder, vocab_size)
        if foreign.vocabulary:
            break
    return foreign


def _compat(format: Format, facts: Mapping[str, Any]) -> CompatConfig:
    """Returns the settings under which our model has the implementation's numbers."""
    compat = apply_preset(ExperimentConfig(), original.PRESETS[format]).model.compat
    # With same_length, a query of NVIDIA's model attends to one key more.
    if format is Format.NVIDIA:
        compat = dataclasses.replace(compat, same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE)
    # A file may have a text or a list there. Numbers out of range are found by `validate`.
    epsilon = facts.get("layer_norm_epsilon")
    if format is Format.HUGGINGFACE and isinstance(epsilon, float):
        compat = dataclasses.replace(compat, layer_norm_eps=epsilon)
    compat.validate()
    return compat


def _open(files: WeightFiles) -> _RecognizedWeights:
    """Opens weights, and recognizes the implementation that wrote them."""
    if files.kind is FileKind.TENSORFLOW:
        return _open_tensorflow(files.path)
    tensors, file = _tensors(files)
    folders = [files.path.parent]
    named = names.known(tensors)

    # NVIDIA's trainer saves the model's arguments and the vocabulary next to its tensors. The file
    # may have any value in their place.
    root = file.root if file else None
    if isinstance(root, dict) and "model_state" in root:
        arguments = root.get("model_config")
        if isinstance(arguments, dict):
            return _RecognizedWeights(
                path=files.path,
                tensors=_renamed(named.tensors),
                format=Format.NVIDIA,
                facts=arguments,
                folders=folders,
                vocabulary=root.get("vocab"),
                notes=tuple(named.notes),
            )

    format = None
    if named.is_recognized:
        format = Format.HUGGINGFACE if named.has_transformer else Format.ORIGINAL
    facts = state_dict.facts_of_module(file) if file else {}
    return _RecognizedWeights(
        path=files.path,
        tensors=named.tensors,
        format=format,
        facts=facts,
        folders=folders,
        notes=tuple(named.notes),
    )


def _tensors(files: WeightFiles) -> tuple[Leaves, TorchFile | None]:
    """Returns the tensors of all files by name, and the PyTorch file if it is the only file.

    Raises:
      UserError: If the files do not have the tensors that their index lists, or a tensor is in two
        of them.
    """
    all_tensors: dict[str, Leaf] = {}
    file = None
    for path, wanted in files.parts.items():
        if weight_files.kind_of(path) is FileKind.SAFETENSORS:
            tensors = safetensors.read(path)
        else:
            file = torch_files.read(path)
            tensors = state_dict.of(file)

        if wanted is not None:
            # A file of another model, or of another download, has other tensors.
            missing = wanted - tensors.keys()
            if missing:
                raise UserError(
                    f"{path} has no tensor {min(missing)}, which {files.path.name} says is in it"
                )
            tensors = {name: leaf for name, leaf in tensors.items() if name in wanted}
        # Which of two tensors counts would depend on the order of the files.
        duplicates = all_tensors.keys() & tensors.keys()
        if duplicates:
            raise UserError(
                f"tensor {min(duplicates)} is in more than one of the files of {files.path}"
            )
        all_tensors |= tensors
    # The values of several files are not one model's.
    if len(files.parts) != 1:
        file = None
    return all_tensors, file


def _renamed(tensors: Leaves) -> dict[str, Leaf]:
    """Returns NVIDIA's tensors by the release's names.

    Projections that are shared with the embedding are omitted, because the embedding has them too.
    """

    def released_name(match: re.Match[str]) -> str:
        return f"crit.out_layers.{match[2]}.{_NVIDIA_LISTS[match[1]]}"

    renamed: dict[str, Leaf] = {}
    for name, leaf in tensors.items():
        if not name.startswith("crit.shared_out_projs."):
            renamed[_NVIDIA_LISTED.sub(released_name, name)] = leaf
    return renamed


def _open_tensorflow(prefix: Path) -> _RecognizedWeights:
    """Opens a checkpoint of TensorFlow, with the evaluation lengths published for its corpus."""
    model = tensorflow.read(prefix)
    # The published archives have the text's files next to the directory of the checkpoint.
    folders = [prefix.parent, prefix.parent.parent / "data"]
    facts = dict(model.facts)
    for folder in folders:
        about = folder / "corpus-info.json"
        if about.is_file():
            facts |= tensorflow.lengths(_read_json(about).get("dataset"))
            break
    return _RecognizedWeights(
        path=prefix,
        tensors=model.tensors,
        format=Format.TENSORFLOW,
        facts=facts,
        folders=folders,
        notes=(model.note,),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON file's object.

    Raises:
      UserError: If it does not contain an object.
    """
    damaged = f"{path} is not a JSON object (%s). Copy or download it again."
    # A download that ended early is not JSON, and JSON may be a list or a number.
    with rephrased(damaged, OSError, ValueError, TypeError):
        return dict(storage.read_json(path))
