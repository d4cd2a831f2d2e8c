"""Converts weights of the authors' PyTorch release, in both directions.

Tensors can have the release's names and other implementations' names.

    leaves = to_leaves(tensors, config, vocab_size=204)  # Our parameters by path.
    tensors = from_flax(params, config)                  # Every name of the release's state_dict.

`_part_pairs` is the correspondence as one table, which both directions read. The release stores
matrices as [out, in], stacks q, k and v in one matrix, and has a tensor per layer and, in the
softmax, a bias per cluster. Our matrices are [in, out] with heads as a separate axis, layers are
stacked, and the softmax has one bias. The release's attn_type 0 is our relative encoding, 1 is
Shaw's (with `compat.shaw_terms=original`), 2 is Vaswani's and 3 is Al-Rfou's. Its tables start with
the greatest distance, ours with 0.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from txl_jax.config import (
    Encoding,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    Network,
    NormPlace,
    ShawTerms,
    config_tree,
)
from txl_jax.config.experiment import apply_preset
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop import portable, safetensors
from txl_jax.interop.leaves import Leaf, Leaves
from txl_jax.interop.portable import ModelInfo
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.positions.encoding import OriginalTensor
from txl_jax.runtime.storage import write_json, write_lines


class Format(enum.StrEnum):
    """Implementations, whose tensors are by the names of the authors' PyTorch release."""

    # The authors' PyTorch release. The last row of the softmax's head is the first tail cluster's.
    ORIGINAL = "original"
    # DeepLearningExamples, once `formats` has renamed its tensors.
    NVIDIA = "nvidia"
    # The authors' TensorFlow release (`tensorflow.read`). Tails are in order, as here.
    TENSORFLOW = "tensorflow"
    # Tails in order, `PREFIX` before all but the softmax, u and v in every layer.
    HUGGINGFACE = "huggingface"


PRESETS = {
    Format.ORIGINAL: "pytorch",
    Format.NVIDIA: "pytorch",
    Format.TENSORFLOW: "tf",
    Format.HUGGINGFACE: "hf",
}
# Names of the implementations in messages.
_OWNERS = {
    Format.ORIGINAL: "the authors' PyTorch release",
    Format.NVIDIA: "NVIDIA's release",
    Format.TENSORFLOW: "the authors' TensorFlow release",
    Format.HUGGINGFACE: "Hugging Face's class",
}
# Hugging Face's names have it before all but the softmax's.
PREFIX = "transformer."
# A constant in the release's state_dict, which is checked when it is read.
FREQUENCIES = "pos_emb.inv_freq"
_BIASES = ("r_w_bias", "r_r_bias")  # u and v.
# Words for unknown words, in the order in which TransfoXLTokenizer searches for them.
_UNKNOWN = ("<UNK>", "<unk>")
_DOUBLE = np.dtype(np.float64)
# Largest relative difference of a frequency that is read, in files of 32 bits, and of 16 bits or
# from a program that trains in 16 bits.
_FREQUENCY_ROUNDING = 1e-5
_FREQUENCY_ROUNDING_16_BITS = 2**-8


class TensorPart(NamedTuple):
    """A part of an original tensor, or of one of our parameters."""

    # Name of the tensor, or path of the parameter, "a/b/c".
    name: str
    # Shape of the whole array.
    shape: tuple[int, ...]
    # Where the part is in the array, as an index.
    place: slice | int | tuple[slice, slice] | EllipsisType = ...
    # Whether it is [out, in], as in the original, instead of our [in, out].
    transposed: bool = False

    def view(self, array: np.ndarray) -> np.ndarray:
        """Returns the part of an array in our order of axes."""
        part = array[self.place]
        return part.T if self.transposed else part


class PartPair(NamedTuple):
    """Two parts with the same numbers in the same order, possibly in different shapes."""

    released: TensorPart  # In an original tensor.
    ours: TensorPart  # In one of our parameters.


class _Copy(NamedTuple):
    """A part of an array that becomes a part of another."""

    source: TensorPart
    target: TensorPart


def to_leaves(
    tensors: Leaves, config: ModelConfig, *, vocab_size: int, format: Format = Format.ORIGINAL
) -> dict[str, Leaf]:
    """Returns the parameters of `TransformerXL` by path, in the tensors' dtypes.

    The model has `model.compat.final_norm` off.

    Args:
      tensors: Tensors by their names in `format`. A shared one needs only one of its names.
      config: The model.
      vocab_size: Number of tokens.
      format: The implementation.

    Raises:
      UserError: If a tensor is missing, unknown or of the wrong shape, shared tensors differ, or
        the implementation does not support the model.
    """
    pairs = _part_pairs(config, vocab_size, format)
    first_names = aliases(config, format)
    named = _with_all_names(tensors, first_names)

    # A state_dict contains the frequencies of sinusoids, which are not parameters.
    frequencies = None
    if _has_frequencies(config):
        frequencies = named.pop(_name(FREQUENCIES, format), None)
    shapes = {pair.released.name: pair.released.shape for pair in pairs}
    shapes |= {name: shapes[first] for name, first in first_names.items()}
    _check_shapes(named, shapes, kind="tensor")
    if frequencies is not None:
        _check_frequencies(frequencies.read(), config.d_model, format)

    # A model that was trained without the tie would lose one of the two tensors.
    for name, first in first_names.items():
        if not leaves_lib.is_same(named[name], named[first]):
            raise UserError(
                f"tensors {name} and {first} differ, but model.tie_weight {config.tie_weight}, "
                f"model.tie_projs {list(config.tie_projs)} and model.untie_r {config.untie_r} "
                "share them. Turn the tie off or pass equal values."
            )
    return _assembled(named, [_Copy(source=released, target=ours) for released, ours in pairs])


def _with_all_names(tensors: Leaves, first_names: Mapping[str, str]) -> dict[str, Leaf]:
    """Returns tensors by each of their names.

    Args:
      tensors: Tensors, of which a shared one has at least one of its names.
      first_names: Second names of shared tensors, each with its first name.
    """
    named = dict(tensors)
    # A tensor that a file has by a second name only gets its first name.
    for name, first in first_names.items():
        if name in tensors and first not in tensors:
            named[first] = tensors[name]
    # All of its other names follow from the first.
    for name, first in first_names.items():
        if first in named:
            named.setdefault(name, named[first])
    return named


def from_flax(
    params: Mapping[str, Any], config: ModelConfig, *, format: Format = Format.ORIGINAL
) -> dict[str, np.ndarray]:
    """Inverts `to_leaves` for nested parameters, or for their gradients.

    A shared tensor's gradient is the sum over its uses.
    """
    leaves = from_leaves(leaves_lib.from_tree(params), config, format=format)
    tensors = {name: leaf.read() for name, leaf in leaves.items()}
    return tensors | {name: tensors[first] for name, first in aliases(config, format).items()}


def from_leaves(
    leaves: Leaves, config: ModelConfig, *, format: Format = Format.ORIGINAL
) -> dict[str, Leaf]:
    """Inverts `to_leaves`, with only the first name of a shared tensor.

    Args:
      leaves: Parameters by path.
      config: The model.
      format: The implementation.

    Raises:
      UserError: If a parameter is missing, unknown or of the wrong shape, or the implementation
        does not support the model.
    """
    check_exportable(config, format)
    # Callers may pass all variables of a module instead of its parameters.
    if "softmax/bias" not in leaves:
        raise UserError("parameter softmax/bias is missing. Pass the tree under 'params'.")
    bias = leaves["softmax/bias"]
    # Its length says how many tokens there are, by which all shapes are checked below.
    if len(bias.shape) != 1:
        raise UserError(f"parameter softmax/bias must have the shape [V], got {bias.shape}")
    vocab_size = bias.shape[0]
    pairs = _part_pairs(config, vocab_size, format)
    shapes = {pair.ours.name: pair.ours.shape for pair in pairs}
    _check_shapes(leaves, shapes, kind="parameter")

    tensors = _assembled(leaves, [_Copy(source=ours, target=released) for released, ours in pairs])
    if _has_frequencies(config):
        frequencies = _frequencies(config.d_model, bias.dtype)
        tensors[_name(FREQUENCIES, format)] = leaves_lib.leaf_of(frequencies)
    return tensors


def check_exportable(config: ModelConfig, format: Format) -> None:
    """Raises `UserError` if an implementation cannot compute the model's formula.

    The error names flags that avoid this.
    """
    owner = _OWNERS[format]
    preset = f"--compat={PRESETS[format]}"

    def refuse(reason: str, flags: str) -> NoReturn:
        raise UserError(
            f"{owner} {reason}, so this model cannot be converted to it. "
            f"Train with {flags}, or convert with --to_format=native, which supports every model."
        )

    if config.network is not Network.TRANSFORMER_XL:
        refuse(
            f"has no recurrent network (model.network is {config.network})",
            f"--model.network={Network.TRANSFORMER_XL}",
        )
    if config.layer_norm is NormPlace.PRE and config.compat.final_norm:
        refuse(
            "has no layer norm after the last layer, but this one has (model.layer_norm is pre "
            "and model.compat.final_norm on)",
            f"--model.compat.final_norm=false or with --model.layer_norm={NormPlace.POST}",
        )
    if config.tie_positions:
        refuse(
            "has a matrix of positions, u and v (model.tie_positions is on)",
            "--model.tie_positions=false",
        )
    if not _has_encoding(config, format):
        flags = f"--model.encoding={Encoding.RELATIVE}"
        refuse(f"does not have these positions (model.encoding is {config.encoding})", flags)
    width_of_heads = config.n_head * config.d_head
    if config.encoding is Encoding.AL_RFOU and width_of_heads != config.d_model:
        refuse(
            "cuts Al-Rfou's vectors of positions into heads (model.n_head x model.d_head is "
            f"{width_of_heads}, and model.d_model {config.d_model})",
            "--model.n_head and --model.d_head whose product is model.d_model",
        )
    if config.encoding is Encoding.SHAW and config.compat.shaw_terms is not ShawTerms.ORIGINAL:
        refuse(
            "has more terms in Shaw's encoding (model.compat.shaw_terms is "
            f"{config.compat.shaw_terms})",
            preset,
        )


def _has_encoding(config: ModelConfig, format: Format) -> bool:
    """Returns whether an implementation has the model's positional encoding."""
    number = encoding_of(config).original_type
    return number is not None and (format is not Format.HUGGINGFACE or number == 0)


def _assembled(sources: Leaves, copies: list[_Copy]) -> dict[str, Leaf]:
    """Returns leaves that are made of parts of others when they are read."""
    copies_by_name: dict[str, list[_Copy]] = {}
    for copy in copies:
        copies_by_name.setdefault(copy.target.name, []).append(copy)
    return {name: _assembled_leaf(sources, parts) for name, parts in copies_by_name.items()}


def _assembled_leaf(sources: Leaves, copies: list[_Copy]) -> Leaf:
    """Returns one leaf of `_assembled`.

    Args:
      sources: Arrays by name.
      copies: Parts of them that together fill the leaf.
    """
    shape = copies[0].target.shape
    # A stacked parameter has one dtype. Tensors of other dtypes are converted to the first one's.
    dtype = sources[copies[0].source.name].dtype
    # Copies by the entry of a stacked parameter, so that reading all layers does not search them
    # for each one.
    copy_by_entry = {
        copy.target.place: copy for copy in copies if isinstance(copy.target.place, int)
    }

    def part(index: Any) -> np.ndarray:
        # A layer's entry of a stacked parameter needs its own tensor only. The others stay
        # undefined, and are not returned.
        needed = copies
        if isinstance(index, int) and index in copy_by_entry:
            needed = [copy_by_entry[index]]

        array = np.empty(shape, dtype)
        for source, target in needed:
            view = target.view(array)
            values = sources[source.name].part(source.place)
            if source.transposed:
                values = values.T
            view[...] = values.reshape(view.shape)
        return array[index]

    return Leaf(shape, dtype, part)


def _check_shapes(
    arrays: Leaves, expected: Mapping[str, tuple[int, ...]], *, kind: Literal["tensor", "parameter"]
) -> None:
    """Raises `UserError` for the first array that is missing, of another shape, or unknown.

    Args:
      arrays: Arrays by name.
      expected: Their shapes.
      kind: What messages call an array.
    """
    for name, shape in expected.items():
        if name not in arrays:
            raise UserError(
                f"{kind} {name} is missing, expected shape {list(shape)}. "
                "Correct the sizes in the config, or model.untie_r."
            )
        # An array of another shape could be broadcast, or cut at its end, without an error.
        if arrays[name].shape != shape:
            raise UserError(
                f"{kind} {name} has shape {list(arrays[name].shape)}, expected shape "
                f"{list(shape)}. Correct the sizes in the config, or model.untie_r."
            )
    # An array that is not used belongs to another model, or would be lost.
    for name, array in arrays.items():
        if name not in expected:
            raise UserError(
                f"{kind} {name} has shape {list(array.shape)}, expected no such {kind}. "
                "Correct the sizes in the config, or model.untie_r."
            )


def aliases(config: ModelConfig, format: Format = Format.ORIGINAL) -> dict[str, str]:
    """Returns the second names of shared tensors, each with its first name."""
    first_names: dict[str, str] = {}
    num_tables = config.n_cluster if config.div_val > 1 else 1
    if config.tie_weight:
        for table in range(num_tables):
            name = f"crit.out_layers.{table}.weight"
            first_names[name] = f"word_emb.emb_layers.{table}.weight"
    if config.has_projections:
        for cluster, is_tied in enumerate(config.tie_projs):
            if is_tied:
                # If all clusters have one table, they share its projection.
                table = min(cluster, num_tables - 1)
                first_names[f"crit.out_projs.{cluster}"] = f"word_emb.emb_projs.{table}"
    # Hugging Face's class has u and v in every layer, also if the layers share them.
    if format is Format.HUGGINGFACE and not config.untie_r:
        for layer in range(config.n_layer):
            for bias in _BIASES:
                first_names[f"layers.{layer}.dec_attn.{bias}"] = bias
    return {_name(name, format): _name(first, format) for name, first in first_names.items()}


def _name(name: str, format: Format) -> str:
    """Returns an implementation's name of an original tensor."""
    if format is Format.HUGGINGFACE and not name.startswith("crit."):
        return f"{PREFIX}{name}"
    return name


def position_tensors(config: ModelConfig, format: Format) -> Sequence[OriginalTensor]:
    """Returns the tensors that only this encoding has.

    Raises:
      UserError: If the implementation does not have the encoding.
    """
    if not _has_encoding(config, format):
        raise UserError(
            f"model.encoding is {config.encoding}, which the {format} format does not support. "
            "Choose another."
        )
    return encoding_of(config).original_tensors()


def _part_pairs(config: ModelConfig, vocab_size: int, format: Format) -> list[PartPair]:
    """Returns the correspondence, tensor by tensor, without second names of shared tensors."""
    pairs = list(_encoding(config, format))
    for layer in range(config.n_layer):
        pairs += _layer(config, layer)
    pairs += _embedding_and_softmax(config, vocab_size)
    if config.cutoffs:
        pairs += _tail_clusters(config, format)

    renamed: list[PartPair] = []
    for released, ours in pairs:
        renamed.append(PartPair(released._replace(name=_name(released.name, format)), ours))
    return renamed


def _tail_clusters(config: ModelConfig, format: Format) -> Iterator[PartPair]:
    """Yields the rows of the softmax's head that stand for the tail clusters."""
    rows = slice(None)
    if format in (Format.ORIGINAL, Format.NVIDIA):
        rows = slice(None, None, -1)  # The last row belongs to the first tail cluster.
    num_tails = len(config.cutoffs)
    table = (num_tails, config.embed_width)
    yield PartPair(
        TensorPart("crit.cluster_weight", table, rows), TensorPart("softmax/tail_table", table)
    )
    bias = (num_tails,)
    yield PartPair(
        TensorPart("crit.cluster_bias", bias, rows), TensorPart("softmax/tail_bias", bias)
    )


def _encoding(config: ModelConfig, format: Format) -> Iterator[PartPair]:
    """Yields the tensors that only the model's positional encoding has."""
    for tensor in position_tensors(config, format):
        name = tensor.name
        if format is Format.HUGGINGFACE and config.untie_r:
            # The class has a tensor per layer. Each is an entry of our stacked parameter.
            for layer in range(config.n_layer):
                yield PartPair(
                    TensorPart(f"layers.{layer}.dec_attn.{name}", tensor.shape[1:]),
                    TensorPart(tensor.path, tensor.path_shape, layer),
                )
            continue
        released = TensorPart(name, tensor.shape)
        if tensor.reversed:
            released = released._replace(place=(slice(None), slice(None, None, -1)))
        yield PartPair(released, TensorPart(tensor.path, tensor.path_shape))


def _layer(config: ModelConfig, layer: int) -> Iterator[PartPair]:
    """Yields one layer's tensors. Each is entry `layer` of a stacked parameter."""
    d_model = config.d_model
    d_inner = config.d_inner
    n_head = config.n_head
    d_head = config.d_head
    width_of_heads = n_head * d_head

    def pair(
        name: str,
        shape: tuple[int, ...],
        path: str,
        our_shape: tuple[int, ...],
        rows: slice | EllipsisType = ...,
    ) -> PartPair:
        is_matrix = len(shape) == 2
        released = TensorPart(f"layers.{layer}.{name}", shape, place=rows, transposed=is_matrix)
        ours = TensorPart(f"stack/layers/{path}", (config.n_layer, *our_shape), place=layer)
        return PartPair(released, ours)

    # A matrix of the release has the rows of several projections, one after another. Which ones
    # depends on the encoding: `qkv_net` has queries, keys and values, `r_net` the position keys.
    for net, projections in encoding_of(config).original_projections.items():
        shape = (len(projections) * width_of_heads, d_model)
        for i, projection in enumerate(projections):
            rows = slice(i * width_of_heads, (i + 1) * width_of_heads)
            yield pair(
                f"dec_attn.{net}.weight",
                shape,
                f"attention/{projection}",
                (d_model, n_head, d_head),
                rows,
            )
    yield pair(
        "dec_attn.o_net.weight",
        (d_model, width_of_heads),
        "attention/output",
        (n_head, d_head, d_model),
    )
    # CoreNet is a sequence: 0 is the first linear layer and 3 the second, after ReLU and dropout.
    yield pair(
        "pos_ff.CoreNet.0.weight",
        (d_inner, d_model),
        "feed_forward/inner_kernel",
        (d_model, d_inner),
    )
    yield pair("pos_ff.CoreNet.0.bias", (d_inner,), "feed_forward/inner_bias", (d_inner,))
    yield pair(
        "pos_ff.CoreNet.3.weight",
        (d_model, d_inner),
        "feed_forward/outer_kernel",
        (d_inner, d_model),
    )
    yield pair("pos_ff.CoreNet.3.bias", (d_model,), "feed_forward/outer_bias", (d_model,))
    for name, path in (("dec_attn", "attention_norm"), ("pos_ff", "feed_forward_norm")):
        yield pair(f"{name}.layer_norm.weight", (d_model,), f"{path}/scale", (d_model,))
        yield pair(f"{name}.layer_norm.bias", (d_model,), f"{path}/bias", (d_model,))


def _embedding_and_softmax(config: ModelConfig, vocab_size: int) -> Iterator[PartPair]:
    """Yields the clusters' tables, projections and biases.

    With div_val 1 they share one table and one bias.
    """
    bounds = [0, vocab_size]
    if config.div_val > 1:
        bounds = [0, *config.cutoffs, vocab_size]
    first_names = aliases(config)

    for c, (start, end) in enumerate(itertools.pairwise(bounds)):
        width = config.cluster_width(c)
        table = (end - start, width)
        yield PartPair(
            TensorPart(f"word_emb.emb_layers.{c}.weight", table),
            TensorPart(f"embedding/table_{c}", table),
        )
        if f"crit.out_layers.{c}.weight" not in first_names:
            yield PartPair(
                TensorPart(f"crit.out_layers.{c}.weight", table),
                TensorPart(f"softmax/table_{c}", table),
            )
        if config.has_projections:
            yield _projection(
                f"word_emb.emb_projs.{c}", f"embedding/projection_{c}", config.d_model, width
            )
        yield PartPair(
            TensorPart(f"crit.out_layers.{c}.bias", (end - start,)),
            TensorPart("softmax/bias", (vocab_size,), slice(start, end)),
        )

    # The softmax has a projection per cluster, also if all clusters have one table.
    for c in range(config.n_cluster):
        if config.has_projections and f"crit.out_projs.{c}" not in first_names:
            yield _projection(
                f"crit.out_projs.{c}",
                f"softmax/projection_{c}",
                config.d_model,
                config.cluster_width(c),
            )


def _projection(name: str, path: str, d_model: int, width: int) -> PartPair:
    return PartPair(
        TensorPart(name, (d_model, width), transposed=True),
        TensorPart(path, (width, d_model)),
    )


def _has_frequencies(config: ModelConfig) -> bool:
    """Returns whether the release adds or attends to sinusoids.

    If it does, its state_dict contains their frequencies.
    """
    return encoding_of(config).original_type in (0, 2)


def _frequencies(d_model: int, dtype: np.dtype = _DOUBLE) -> np.ndarray:
    """Returns the frequencies of the sinusoids, [d_model / 2]."""
    # Torch computes in float32: so rounded, at most 9 of 640 numbers differ from its own, and none
    # for D = 64.
    exponents = (np.arange(0, d_model, 2, dtype=dtype) / np.array(d_model, dtype)).astype(_DOUBLE)
    return np.array(1, dtype) / (10000**exponents).astype(dtype)


def _check_frequencies(frequencies: np.ndarray, d_model: int, format: Format) -> None:
    """Raises `UserError` for other frequencies, which would make another model.

    A cast to 16 bits may round them.
    """
    rounding = _FREQUENCY_ROUNDING
    # NVIDIA's recipe trains in 16 bits.
    if frequencies.dtype.itemsize < 4 or format is Format.NVIDIA:
        rounding = _FREQUENCY_ROUNDING_16_BITS
    expected = _frequencies(d_model)
    # The shape comes first, as a single number would be compared with each.
    is_expected = frequencies.shape == expected.shape and np.allclose(
        frequencies.astype(_DOUBLE), expected, rtol=rounding, atol=0
    )
    if not is_expected:
        raise UserError(
            f"tensor {FREQUENCIES} must be 10000^(-2i/{d_model}) of shape {list(expected.shape)}, "
            f"got shape {list(frequencies.shape)}. Only those frequencies are supported."
        )


def write(folder: Path, info: ModelInfo, leaves: Leaves) -> list[str]:
    """Writes the tensors under the release's names, and its `MemTransformerLM` arguments.

    Returns and raises as `write_model`.
    """
    arguments = arguments_of(info.config.model, info.config.eval, vocab_size=info.vocabulary.size)
    return write_model(folder, info, leaves, arguments, Format.ORIGINAL)


def write_model(
    folder: Path, info: ModelInfo, leaves: Leaves, arguments: Mapping[str, Any], format: Format
) -> list[str]:
    """Writes model.safetensors, config.json and the vocabulary for an implementation.

    Args:
      folder: An existing directory.
      info: The model.
      leaves: Its parameters, which are converted to float32.
      arguments: Content of config.json.
      format: The implementation.

    Returns:
      Notes on differences between the model and the implementation's, a line each.

    Raises:
      UserError: If the implementation does not support the model.
    """
    leaves = leaves_lib.as_type(leaves, np.dtype(np.float32))
    tensors = from_leaves(leaves, info.config.model, format=format)
    # transformers rejects a file without this word.
    safetensors.write(folder / portable.WEIGHTS, tensors, metadata={"format": "pt"})
    write_json(folder / portable.CONFIG, arguments)
    return _write_vocabulary(folder, info.vocabulary, format) + _differences(info.config, format)


def arguments_of(
    config: ModelConfig, eval_config: EvalConfig, *, vocab_size: int
) -> dict[str, Any]:
    """Returns the keyword arguments of the release's `MemTransformerLM`.

    Args:
      config: The model's sizes, ties and encoding.
      eval_config: The lengths.
      vocab_size: Number of tokens.
    """
    same = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "tie_weight", "div_val")
    arguments = {name: getattr(config, name) for name in same}
    return arguments | {
        "n_token": vocab_size,
        "dropout": config.dropout.rate,
        "dropatt": config.dropout.attention,
        "d_embed": config.embed_width,
        "tie_projs": list(config.tie_projs or (False,) * config.n_cluster),
        "pre_lnorm": config.layer_norm is NormPlace.PRE,
        "tgt_len": eval_config.segment_len,
        "ext_len": 0,
        "mem_len": eval_config.mem_len,
        "cutoffs": list(config.cutoffs),
        "same_length": eval_config.same_length,
        "clamp_len": eval_config.clamp_len or -1,
        "attn_type": encoding_of(config).original_type,
    }


def _write_vocabulary(folder: Path, vocabulary: Vocabulary, format: Format) -> list[str]:
    """Writes vocabulary.txt, and tokenizer.json or a vocab.txt that TransfoXLTokenizer reads.

    Returns notes on it.
    """
    portable.write_vocabulary(folder, vocabulary)
    if isinstance(vocabulary, SubwordVocabulary):
        return []
    if not isinstance(vocabulary, WordVocabulary):
        note = (
            f"the {format} format has no tokenizer for {vocabulary.kind} tokens, so pass token ids "
            f"to the model. {portable.VOCABULARY} lists the token of each id, from id 0 in line 2"
        )
        return [note]
    write_lines(folder / "vocab.txt", (f"{word}\n" for word in vocabulary.words))
    their_unknown = next((word for word in _UNKNOWN if word in vocabulary.words), None)
    if their_unknown == vocabulary.unknown:
        return []
    return [
        f"unknown words are {vocabulary.unknown!r}, but TransfoXLTokenizer uses {their_unknown!r}"
    ]


def _differences(config: ExperimentConfig, format: Format) -> list[str]:
    """Lists the ways in which a model differs from an implementation's model.

    Some of them change the losses.
    """
    notes = []
    if format is Format.ORIGINAL and config.model.untie_r:
        notes.append(
            "the release's class shares u and v among the layers, but in this model each layer "
            "has its own (untie_r)"
        )
    if config.model.encoding is Encoding.VASWANI and config.eval.mem_len:
        notes.append(
            "the release adds positions to its memory again in each segment, so losses differ "
            "(eval.mem_len)"
        )
    if config.data.reset_at is not None:
        notes.append(
            f"this model separates documents at the token {config.data.reset_at!r}, but the "
            f"{format} format does not"
        )

    # Differences between implementations that do not change this model's losses.
    irrelevant = {"final_norm"}  # A model that has one is rejected.
    if format is Format.HUGGINGFACE:
        irrelevant.add("layer_norm_eps")  # Its config.json has it.
    if config.model.encoding is not Encoding.SHAW:
        irrelevant.add("shaw_terms")
    if not config.eval.same_length:
        irrelevant.add("same_length_window")
    their_compat = apply_preset(config, PRESETS[format]).model.compat
    for leaf, our_value, their_value in config_tree.differences(config.model.compat, their_compat):
        if leaf.name not in irrelevant:
            notes.append(
                f"model.compat.{leaf.name} is {config_tree.format_value(our_value)} in this model, "
                f"but {config_tree.format_value(their_value)} in every model of the {format} "
                "format. So its losses in that implementation differ from the losses here "
                "(docs/weights.md, To other implementations)"
            )
    return notes
