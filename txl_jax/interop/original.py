"""Converts weights of the authors' PyTorch release, in both directions.

Tensors can have the release's names and other implementations' names.

    leaves = to_leaves(tensors, config, vocab_size=204)  # Our parameters by path.
    tensors = from_flax(params, config)                  # Every name of the release's state_dict.

`_pieces` is the correspondence as one table, which both directions read. The release stores
matrices as [out, in], stacks q, k and v in one, and has a tensor per layer and, in the softmax, a
bias per cluster. Here matrices are [in, out] with heads as their own axis, layers are stacked, and
there is one bias. The release's attn_type 0 is our relative encoding, 1 Shaw's (with
`compat.shaw_terms=original`), 2 Vaswani's and 3 Al-Rfou's. Its tables begin with the greatest
distance, ours with 0.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple, NoReturn

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

    # That release. The last row of the softmax's head belongs to the first tail cluster.
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
# What a message calls each implementation.
_OWNERS = {
    Format.ORIGINAL: "the authors' PyTorch release",
    Format.NVIDIA: "NVIDIA's release",
    Format.TENSORFLOW: "the authors' TensorFlow release",
    Format.HUGGINGFACE: "Hugging Face's class",
}
PREFIX = "transformer."
FREQUENCIES = "pos_emb.inv_freq"  # A constant in the release's state_dict, checked when read.
_BIASES = ("r_w_bias", "r_r_bias")  # u and v.
_UNKNOWN = ("<UNK>", "<unk>")  # In the order in which TransfoXLTokenizer searches for them.
_DOUBLE = np.dtype(np.float64)


class Part(NamedTuple):
    """A part of an original tensor, or of one of our parameters."""

    name: str  # Of the array; our parameters' are paths, "a/b/c".
    shape: tuple[int, ...]  # Of the whole array.
    place: slice | int | tuple[slice, slice] | EllipsisType = ...  # Where in it, as an index.
    transposed: bool = False  # [out, in] in the original, [in, out] here.

    def view(self, array: np.ndarray) -> np.ndarray:
        """Returns the part of an array in our order of axes."""
        part = array[self.place]
        return part.T if self.transposed else part


# A part of an original tensor, and the part of our parameter that holds the same numbers.
Piece = tuple[Part, Part]


def to_leaves(
    tensors: Leaves, config: ModelConfig, *, vocab_size: int, format: Format = Format.ORIGINAL
) -> dict[str, Leaf]:
    """Returns the parameters of `TransformerXL` by path, in the tensors' dtypes.

    The model has `model.compat.final_norm` off.

    `tensors` are by their names in `format`. A shared one needs only one of its names. Raises
    `UserError` if a tensor is missing, unknown or of the wrong shape, shared tensors differ, or the
    implementation does not support the model.
    """
    pieces, shared = _pieces(config, vocab_size, format), aliases(config, format)
    found = {first: tensors[name] for name, first in shared.items() if name in tensors} | dict(
        tensors
    )
    found = {name: found[first] for name, first in shared.items() if first in found} | found
    constant = found.pop(_name(FREQUENCIES, format), None) if _has_frequencies(config) else None
    expected = {theirs.name: theirs.shape for theirs, _ in pieces}
    _check(found, expected | {name: expected[first] for name, first in shared.items()}, "tensor")
    if constant:
        _check_frequencies(constant.read(), config.d_model, format)
    for name, first in shared.items():
        if not leaves_lib.is_same(found[name], found[first]):
            raise UserError(
                f"tensors {name} and {first} differ, but model.tie_weight {config.tie_weight}, "
                f"model.tie_projs {list(config.tie_projs)} and model.untie_r {config.untie_r} "
                "share them. Turn the tie off or pass equal values."
            )
    return _assembled(found, pieces)


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

    Raises the same `UserError`s.
    """
    check_exportable(config, format)
    if "softmax/bias" not in leaves:
        raise UserError("parameter softmax/bias is missing. Pass the tree under 'params'.")
    bias = leaves["softmax/bias"]
    pieces = _pieces(config, bias.shape[0], format)
    _check(leaves, {ours.name: ours.shape for _, ours in pieces}, "parameter")
    tensors = _assembled(leaves, [(ours, theirs) for theirs, ours in pieces])
    if _has_frequencies(config):
        tensors[_name(FREQUENCIES, format)] = leaves_lib.leaf_of(
            _frequencies(config.d_model, bias.dtype)
        )
    return tensors


def check_exportable(config: ModelConfig, format: Format) -> None:
    """Raises `UserError` if no setting of an implementation gives the model's formula.

    Names flags that avoid it.
    """
    owner = _OWNERS[format]
    preset = f"--compat={PRESETS[format]}"

    def refuse(reason: str, flags: str) -> NoReturn:
        raise UserError(
            f"{owner} {reason}, so this model cannot be converted to it. "
            f"Train with {flags} for that, or convert with --to_format=native, which "
            "stores every model."
        )

    if config.network is not Network.TRANSFORMER_XL:
        refuse(
            f"has no recurrent network (model.network is {config.network})",
            f"--model.network={Network.TRANSFORMER_XL}",
        )
    if config.layer_norm is NormPlace.PRE and config.compat.final_norm:
        refuse(
            "has no layer norm after the last layer (model.compat.final_norm, of a pre-norm model)",
            "--model.compat.final_norm=false",
        )
    if config.tie_positions:
        refuse(
            "has a matrix of positions, u and v (model.tie_positions is on)",
            "--model.tie_positions=false",
        )
    if not _has_encoding(config, format):
        flags = f"--model.encoding={Encoding.RELATIVE}"
        refuse(f"has no such positions (model.encoding is {config.encoding})", flags)
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


def _assembled(sources: Leaves, pairs: list[tuple[Part, Part]]) -> dict[str, Leaf]:
    """Returns leaves made of parts of others.

    Each pair is a part of a source and the part of a result it becomes.
    """
    by_name: dict[str, list[tuple[Part, Part]]] = {}
    for pair in pairs:
        by_name.setdefault(pair[1].name, []).append(pair)

    def leaf(parts: list[tuple[Part, Part]]) -> Leaf:
        first, result = parts[0]
        dtype = sources[first.name].dtype
        # By the entry of a stacked parameter, so that reading all layers does not search them for
        # each one.
        entries = {
            target.place: [(source, target)]
            for source, target in parts
            if isinstance(target.place, int)
        }

        def part(index: Any) -> np.ndarray:
            array = np.empty(result.shape, dtype)
            # A layer's entry of a stacked parameter needs its own tensors only.
            chosen = entries.get(index, parts) if isinstance(index, int) else parts
            for source, target in chosen:
                view, values = target.view(array), sources[source.name].part(source.place)
                view[...] = (values.T if source.transposed else values).reshape(view.shape)
            return array[index]

        return Leaf(result.shape, dtype, part)

    return {name: leaf(parts) for name, parts in by_name.items()}


def _check(found: Leaves, expected: Mapping[str, tuple[int, ...]], kind: str) -> None:
    """Raises `UserError` for the first name that is missing, of another shape, or unknown."""
    for name in [*expected, *found]:
        if name not in found or found[name].shape != expected.get(name):
            there = f"has shape {list(found[name].shape)}" if name in found else "is missing"
            wanted = (
                f"expected shape {list(expected[name])}"
                if name in expected
                else f"expected no such {kind}"
            )
            raise UserError(
                f"{kind} {name} {there}, {wanted}. Correct the sizes in the config, or "
                "model.untie_r."
            )


def aliases(config: ModelConfig, format: Format = Format.ORIGINAL) -> dict[str, str]:
    """Returns the second names of shared tensors, each with its first name."""
    n_table = config.n_cluster if config.div_val > 1 else 1
    tables = range(n_table if config.tie_weight else 0)
    shared = {f"crit.out_layers.{c}.weight": f"word_emb.emb_layers.{c}.weight" for c in tables}
    tied = [c for c, is_tied in enumerate(config.tie_projs) if is_tied and config.has_projections]
    shared |= {f"crit.out_projs.{c}": f"word_emb.emb_projs.{min(c, n_table - 1)}" for c in tied}
    if format is Format.HUGGINGFACE and not config.untie_r:
        layers = itertools.product(range(config.n_layer), _BIASES)
        shared |= {f"layers.{layer}.dec_attn.{bias}": bias for layer, bias in layers}
    return {_name(name, format): _name(first, format) for name, first in shared.items()}


def _name(name: str, format: Format) -> str:
    """Returns an implementation's name of an original tensor."""
    return (
        name if format is not Format.HUGGINGFACE or name.startswith("crit.") else f"{PREFIX}{name}"
    )


def position_tensors(config: ModelConfig, format: Format) -> Sequence[OriginalTensor]:
    """Returns the encoding's own tensors.

    Raises `UserError` if an implementation has no such encoding.
    """
    if not _has_encoding(config, format):
        raise UserError(
            f"model.encoding is {config.encoding}, unsupported in the {format} format. "
            "Choose another."
        )
    return encoding_of(config).original_tensors()


def _pieces(config: ModelConfig, vocab_size: int, format: Format) -> list[Piece]:
    """Returns the correspondence, tensor by tensor, without second names of shared tensors."""
    layers = (_layer(config, layer) for layer in range(config.n_layer))
    tables = _embedding_and_softmax(config, vocab_size)
    pieces = [*_encoding(config, format), *itertools.chain.from_iterable(layers), *tables]
    if config.cutoffs:
        in_order = format in (Format.HUGGINGFACE, Format.TENSORFLOW)
        rows, tails = slice(None, None, None if in_order else -1), len(config.cutoffs)
        for theirs, ours, shape in (
            ("weight", "table", (tails, config.embed_width)),
            ("bias", "bias", (tails,)),
        ):
            pieces.append(
                (Part(f"crit.cluster_{theirs}", shape, rows), Part(f"softmax/tail_{ours}", shape))
            )
    return [(theirs._replace(name=_name(theirs.name, format)), ours) for theirs, ours in pieces]


def _encoding(config: ModelConfig, format: Format) -> Iterator[Piece]:
    for name, shape, path, path_shape, is_reversed in position_tensors(config, format):
        if format is Format.HUGGINGFACE and config.untie_r:
            for layer in range(config.n_layer):
                yield (
                    Part(f"layers.{layer}.dec_attn.{name}", shape[1:]),
                    Part(path, path_shape, layer),
                )
        else:
            place = (slice(None), slice(None, None, -1)) if is_reversed else ...
            yield Part(name, shape, place), Part(path, path_shape)


def _layer(config: ModelConfig, layer: int) -> Iterator[Piece]:
    """Yields one layer's tensors. Each is entry `layer` of a stacked parameter."""
    d_model, n_head, d_head, d_inner = config.d_model, config.n_head, config.d_head, config.d_inner
    heads = n_head * d_head

    def piece(
        name: str, shape: tuple[int, ...], path: str, ours: tuple[int, ...], rows: Any = ...
    ) -> Piece:
        theirs = Part(f"layers.{layer}.{name}", shape, rows, transposed=len(shape) == 2)
        return theirs, Part(f"stack/layers/{path}", (config.n_layer, *ours), layer)

    for net, parts in encoding_of(config).original_projections.items():
        for i, part in enumerate(parts):
            shape, rows = (len(parts) * heads, d_model), slice(i * heads, (i + 1) * heads)
            yield piece(
                f"dec_attn.{net}.weight",
                shape,
                f"attention/{part}",
                (d_model, n_head, d_head),
                rows,
            )
    yield piece(
        "dec_attn.o_net.weight", (d_model, heads), "attention/output", (n_head, d_head, d_model)
    )
    yield piece(
        "pos_ff.CoreNet.0.weight",
        (d_inner, d_model),
        "feed_forward/inner_kernel",
        (d_model, d_inner),
    )
    yield piece("pos_ff.CoreNet.0.bias", (d_inner,), "feed_forward/inner_bias", (d_inner,))
    yield piece(
        "pos_ff.CoreNet.3.weight",
        (d_model, d_inner),
        "feed_forward/outer_kernel",
        (d_inner, d_model),
    )
    yield piece("pos_ff.CoreNet.3.bias", (d_model,), "feed_forward/outer_bias", (d_model,))
    for name, path in (("dec_attn", "attention_norm"), ("pos_ff", "feed_forward_norm")):
        yield piece(f"{name}.layer_norm.weight", (d_model,), f"{path}/scale", (d_model,))
        yield piece(f"{name}.layer_norm.bias", (d_model,), f"{path}/bias", (d_model,))


def _embedding_and_softmax(config: ModelConfig, vocab_size: int) -> Iterator[Piece]:
    """Yields the clusters' tables, projections and biases.

    With div_val 1 they share one table and one bias.
    """
    bounds = [0, *config.cutoffs, vocab_size] if config.div_val > 1 else [0, vocab_size]
    shared = aliases(config)

    def projection(name: str, path: str, width: int) -> Piece:
        return Part(name, (config.d_model, width), transposed=True), Part(
            path, (width, config.d_model)
        )

    for c, (start, end) in enumerate(itertools.pairwise(bounds)):
        width = config.cluster_width(c)
        table = (end - start, width)
        yield Part(f"word_emb.emb_layers.{c}.weight", table), Part(f"embedding/table_{c}", table)
        if f"crit.out_layers.{c}.weight" not in shared:
            yield Part(f"crit.out_layers.{c}.weight", table), Part(f"softmax/table_{c}", table)
        if config.has_projections:
            yield projection(f"word_emb.emb_projs.{c}", f"embedding/projection_{c}", width)
        bias = Part("softmax/bias", (vocab_size,), slice(start, end))
        yield Part(f"crit.out_layers.{c}.bias", (end - start,)), bias
    for c in range(config.n_cluster):
        if config.has_projections and f"crit.out_projs.{c}" not in shared:
            yield projection(
                f"crit.out_projs.{c}", f"softmax/projection_{c}", config.cluster_width(c)
            )


def _has_frequencies(config: ModelConfig) -> bool:
    """Returns whether the release adds or attends to sinusoids.

    If it does, its state_dict contains their frequencies.
    """
    return encoding_of(config).original_type in (0, 2)


def _frequencies(d_model: int, dtype: np.dtype = _DOUBLE) -> np.ndarray:
    # Torch computes in float32: so rounded, at most 9 of 640 numbers differ from its own, and none
    # for D = 64.
    exponents = (np.arange(0, d_model, 2, dtype=dtype) / np.array(d_model, dtype)).astype(_DOUBLE)
    return np.array(1, dtype) / (10000**exponents).astype(dtype)


def _check_frequencies(found: np.ndarray, d_model: int, format: Format) -> None:
    """Raises `UserError` for other frequencies, which would make another model.

    A cast to 16 bits may round them.
    """
    # NVIDIA's recipe trains in 16 bits.
    is_rounded = found.dtype.itemsize < 4 or format is Format.NVIDIA
    expected, rounding = _frequencies(d_model), 2**-8 if is_rounded else 1e-5
    if found.shape != expected.shape or not np.allclose(
        found.astype(_DOUBLE), expected, rtol=rounding, atol=0
    ):
        wanted = (
            f"tensor {FREQUENCIES} must be 10000^(-2i/{d_model}) of shape {list(expected.shape)}"
        )
        raise UserError(
            f"{wanted}, got shape {list(found.shape)}. Only those frequencies are supported."
        )


def write(folder: Path, info: ModelInfo, leaves: Leaves) -> list[str]:
    """Writes the tensors under the release's names, and its `MemTransformerLM` arguments.

    See `write_model`.
    """
    arguments = arguments_of(info.config.model, info.config.eval, vocab_size=info.vocabulary.size)
    return write_model(folder, info, leaves, arguments, Format.ORIGINAL)


def write_model(
    folder: Path, info: ModelInfo, leaves: Leaves, arguments: Mapping[str, Any], format: Format
) -> list[str]:
    """Writes model.safetensors, config.json and the vocabulary for an implementation.

    Returns notes on differences.

    Raises `UserError` if the implementation does not support the model.
    """
    tensors = from_leaves(
        leaves_lib.as_type(leaves, np.dtype(np.float32)), info.config.model, format=format
    )
    # transformers rejects a file without this word.
    safetensors.write(folder / portable.WEIGHTS, tensors, metadata={"format": "pt"})
    write_json(folder / portable.CONFIG, arguments)
    return _write_vocabulary(folder, info.vocabulary) + _differences(info.config, format)


def arguments_of(
    config: ModelConfig, eval_config: EvalConfig, *, vocab_size: int
) -> dict[str, Any]:
    """Returns the keyword arguments of the release's `MemTransformerLM`.

    They are for the lengths of `eval_config`.
    """
    same = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "tie_weight", "div_val")
    return {name: getattr(config, name) for name in same} | {
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


def _write_vocabulary(folder: Path, vocabulary: Vocabulary) -> list[str]:
    """Writes vocabulary.txt, and tokenizer.json or a vocab.txt that TransfoXLTokenizer reads.

    Returns notes on it.
    """
    portable.write_vocabulary(folder, vocabulary)
    if isinstance(vocabulary, SubwordVocabulary):
        return []
    if not isinstance(vocabulary, WordVocabulary):
        file = portable.VOCABULARY
        kind = vocabulary.kind
        return [f"the tokens are of kind {kind!r}, for which the format has no tokenizer: {file}"]
    write_lines(folder / "vocab.txt", (f"{word}\n" for word in vocabulary.words))
    found = next((word for word in _UNKNOWN if word in vocabulary.words), None)
    if found != vocabulary.unknown:
        return [f"unknown words are {vocabulary.unknown!r}, but TransfoXLTokenizer uses {found!r}"]
    return []


def _differences(config: ExperimentConfig, format: Format) -> list[str]:
    """Lists the ways in which a model differs from an implementation's model.

    Some of them change the losses.
    """
    notes = []
    if format is Format.ORIGINAL and config.model.untie_r:
        notes.append(
            "the release's class shares u and v among the layers, but here each layer has "
            "its own (untie_r)"
        )
    if config.model.encoding is Encoding.VASWANI and config.eval.mem_len:
        notes.append(
            "the release adds positions to its memory again in each segment, so losses differ "
            "(eval.mem_len)"
        )
    if (mark := config.data.reset_at) is not None:
        notes.append(
            f"this model keeps documents apart by the token {mark!r}, but the "
            f"{format} format does not"
        )
    unused = {
        "final_norm": True,  # A model that has one is rejected.
        "layer_norm_eps": format is Format.HUGGINGFACE,  # Its config.json has it.
        "shaw_terms": config.model.encoding is not Encoding.SHAW,
        "same_length_window": not config.eval.same_length,
    }
    theirs = apply_preset(config, PRESETS[format]).model.compat
    return notes + [
        f"the {format} format has model.compat.{leaf.name} {config_tree.format_value(there)}, but "
        f"these weights were read with {config_tree.format_value(here)}, so losses differ there"
        for leaf, here, there in config_tree.differences(config.model.compat, theirs)
        if not unused.get(leaf.name)
    ]
