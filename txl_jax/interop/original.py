"""Weights of the authors' PyTorch release, in both directions, as a dict of numpy arrays.

    params = to_flax(tensors, config, vocab_size=204)    # {"params": params} is what `model.apply` takes
    tensors = from_flax(params, config)                  # every name of the release's state_dict

`_pieces` builds the whole correspondence as one table, which each direction reads once. The release stores a matrix as
[out, in], stacks q, k and v in one matrix, has one tensor per layer and, in the softmax, one bias per cluster. Here
matrices are [in, out] with heads as their own axis, layers are stacked, and there is one bias. The release's attn_type
0 is our relative encoding, 1 Shaw's (with `compat.shaw_terms=original`), 2 Vaswani's and 3 Al-Rfou's. Its tables begin
with the greatest distance, ours with 0.

`write` makes a directory: `model.safetensors`, with one name for each shared tensor, `config.json` with the arguments
of the release's `MemTransformerLM`, and the vocabulary.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.config import EvalConfig, ExperimentConfig, ModelConfig, NormPlace
from txl_jax.config import settings as config_tree
from txl_jax.config.experiment import apply_preset
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop import portable, safetensors
from txl_jax.interop.leaves import Leaf, Leaves, Renamed
from txl_jax.interop.portable import ModelInfo
from txl_jax.modules.positions import encoding_of
from txl_jax.runtime.storage import write_json, write_lines

FREQUENCIES = "pos_emb.inv_freq"  # A constant in the release's state_dict, checked when read.
_UNKNOWN = ("<UNK>", "<unk>")  # In the order in which TransfoXLTokenizer searches for them.

_DOUBLE = np.dtype(np.float64)


class ClusterOrder(enum.StrEnum):
    """Order of the rows of cluster_weight and cluster_bias: which tail cluster each belongs to."""

    REVERSED = "reversed"  # Last row for the first tail: the authors' PyTorch release.
    FORWARD = "forward"  # First row for the first tail, as here: Hugging Face.


class Piece(NamedTuple):
    """Rows of an original tensor, and the place in our parameters that holds the same numbers."""

    name: str  # The original's tensor,
    shape: tuple[int, ...]  # its shape,
    rows: slice | tuple[slice, slice]  # and which of its rows, or of its first two axes.
    path: str  # Our parameter, "a/b/c",
    path_shape: tuple[int, ...]  # its shape,
    place: slice | int  # and where along its first axis.
    transposed: bool  # [out, in] there, [in, out] here.


def to_flax(
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
    *,
    vocab_size: int,
    cluster_order: ClusterOrder = ClusterOrder.REVERSED,
) -> dict[str, Any]:
    """Returns the nested parameters of `TransformerXL` that `to_leaves` describes."""
    return leaves_lib.to_tree(to_leaves(tensors, config, vocab_size=vocab_size, cluster_order=cluster_order))


def to_leaves(
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
    *,
    vocab_size: int,
    cluster_order: ClusterOrder = ClusterOrder.REVERSED,
) -> dict[str, Leaf]:
    """Returns the parameters of `TransformerXL` (with `final_norm` off) by path, in the tensors' dtypes.

    Args:
      tensors: Every tensor by its original name, shared ones under all their names. They are read when leaves are.
      config: Sizes and ties.
      vocab_size: V.
      cluster_order: Order of the tails in `crit.cluster_weight` and `crit.cluster_bias`.

    Raises:
      UserError: If a tensor is missing, unknown or of the wrong shape, or shared tensors differ.
    """
    pieces = list(_pieces(config, vocab_size, cluster_order))
    shared = aliases(config)
    expected = {piece.name: piece.shape for piece in pieces}
    expected |= {name: expected[first] for name, first in shared.items()}
    constants = {FREQUENCIES} if encoding_of(config).has_original_frequencies else set()
    _check({name: np.shape(tensors[name]) for name in tensors if name not in constants}, expected, "tensor")
    for name in constants & tensors.keys():
        _check_frequencies(tensors[name], config.d_model)
    for name, first in shared.items():
        if not np.array_equal(tensors[name], tensors[first]):
            raise UserError(
                f"tensors {name} and {first} differ, but model.tie_weight {config.tie_weight} and model.tie_projs "
                f"{list(config.tie_projs)} share them. Turn the tie off or pass equal values."
            )
    return {path: _leaf_of_tensors(tensors, parts) for path, parts in _grouped(pieces, "path").items()}


def _grouped(pieces: list[Piece], field: str) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(getattr(piece, field), []).append(piece)
    return found


def _leaf_of_tensors(tensors: Mapping[str, np.ndarray], pieces: list[Piece]) -> Leaf:
    """Returns one of our parameters, which is made of pieces of original tensors."""
    shape, dtype = pieces[0].path_shape, tensors[pieces[0].name].dtype

    def fill(target: np.ndarray, piece: Piece) -> None:
        source = tensors[piece.name][piece.rows]
        target[...] = (source.T if piece.transposed else source).reshape(target.shape)

    def read() -> np.ndarray:
        array = np.empty(shape, dtype)
        for piece in pieces:
            fill(array[piece.place], piece)
        return array

    def read_entry(entry: int) -> np.ndarray:
        array = np.empty(shape[1:], dtype)
        for piece in pieces:
            if piece.place == entry:
                fill(array, piece)
        return array

    return Leaf(shape, dtype, read, read_entry if isinstance(pieces[0].place, int) else None)


def from_flax(
    params: Mapping[str, Any], config: ModelConfig, *, cluster_order: ClusterOrder = ClusterOrder.REVERSED
) -> dict[str, np.ndarray]:
    """Inverts `to_flax`. Also takes a tree of gradients: a shared tensor's is then the sum over its uses."""
    leaves = from_leaves(leaves_lib.from_tree(params), config, cluster_order=cluster_order)
    tensors = {name: leaf.read() for name, leaf in leaves.items()}
    return tensors | {name: tensors[first] for name, first in aliases(config).items()}


def from_leaves(
    leaves: Leaves, config: ModelConfig, *, cluster_order: ClusterOrder = ClusterOrder.REVERSED
) -> dict[str, Leaf]:
    """Inverts `to_leaves`, with only the first name of a shared tensor.

    Raises:
      UserError: If a parameter is missing, unknown or of the wrong shape, or has no name in the original.
    """
    if any(path.startswith("final_norm/") for path in leaves):
        raise UserError("final_norm has no name in the original. To export pre-norm, train with compat.final_norm off.")
    if "softmax/bias" not in leaves:
        raise UserError("parameter softmax/bias is missing, expected with shape [V]. Pass the tree below 'params'.")
    bias = leaves["softmax/bias"]
    pieces = list(_pieces(config, bias.shape[0], cluster_order))
    expected = {piece.path: piece.path_shape for piece in pieces}
    _check({path: leaf.shape for path, leaf in leaves.items()}, expected, "parameter")
    tensors = {name: _tensor_of_leaves(leaves, parts) for name, parts in _grouped(pieces, "name").items()}
    if encoding_of(config).has_original_frequencies:
        tensors[FREQUENCIES] = leaves_lib.leaf_of(_frequencies(config.d_model, bias.dtype))
    return tensors


def _tensor_of_leaves(leaves: Leaves, pieces: list[Piece]) -> Leaf:
    """Returns an original tensor, which is made of pieces of our parameters."""
    shape, dtype = pieces[0].shape, leaves[pieces[0].path].dtype

    def read() -> np.ndarray:
        tensor = np.empty(shape, dtype)
        for piece in pieces:
            source, target = leaves[piece.path].part(piece.place), tensor[piece.rows]
            target[...] = source.reshape(target.shape[::-1]).T if piece.transposed else source.reshape(target.shape)
        return tensor

    return Leaf(shape, dtype, read)


def fill_shared(tensors: Mapping[str, np.ndarray], shared: Mapping[str, str]) -> Mapping[str, np.ndarray]:
    """Returns a file's tensors under all their names, because files have only one of the names in `aliases`."""
    names = {name: name for name in tensors}
    for first in set(shared.values()):
        group = [first, *(second for second, of in shared.items() if of == first)]
        if found := next((name for name in group if name in tensors), None):
            names |= {name: found for name in group if name not in tensors}
    return Renamed(tensors, names)


def aliases(config: ModelConfig) -> dict[str, str]:
    """Returns the second names of shared tensors, each with its first name."""
    n_table = config.n_cluster if config.div_val > 1 else 1
    shared: dict[str, str] = {}
    if config.tie_weight:
        shared |= {f"crit.out_layers.{c}.weight": f"word_emb.emb_layers.{c}.weight" for c in range(n_table)}
    if _is_projected(config):
        for c, tied in enumerate(config.tie_projs):
            if tied:
                shared[f"crit.out_projs.{c}"] = f"word_emb.emb_projs.{c if config.div_val > 1 else 0}"
    return shared


def _pieces(config: ModelConfig, vocab_size: int, cluster_order: ClusterOrder) -> Iterator[Piece]:
    """Yields the correspondence, tensor by tensor, without second names of shared tensors."""
    for tensor in encoding_of(config).original_tensors():
        rows = (slice(None), slice(None, None, -1)) if tensor.reversed else slice(None)
        yield Piece(tensor.name, tensor.shape, rows, tensor.path, tensor.path_shape, slice(None), False)
    for layer in range(config.n_layer):
        yield from _layer(config, layer)
    yield from _embedding_and_softmax(config, vocab_size)
    if config.cutoffs:
        rows = slice(None, None, -1) if cluster_order is ClusterOrder.REVERSED else slice(None)
        for name, kind, shape in (("weight", "table", (config.embed_width,)), ("bias", "bias", ())):
            shape = (len(config.cutoffs), *shape)
            yield Piece(f"crit.cluster_{name}", shape, rows, f"softmax/tail_{kind}", shape, slice(None), False)


def _layer(config: ModelConfig, layer: int) -> Iterator[Piece]:
    """Yields one layer's tensors. Each is entry `layer` of a stacked parameter."""
    d_model, n_head, d_head, d_inner = config.d_model, config.n_head, config.d_head, config.d_inner
    heads = n_head * d_head

    def piece(name: str, shape: tuple[int, ...], path: str, ours: tuple[int, ...], rows: slice = slice(None)) -> Piece:
        stacked = (config.n_layer, *ours)
        return Piece(f"layers.{layer}.{name}", shape, rows, f"stack/layers/{path}", stacked, layer, len(shape) == 2)

    inward = (d_model, n_head, d_head)
    for net, parts in encoding_of(config).original_projections.items():
        for i, part in enumerate(parts):
            rows = slice(i * heads, (i + 1) * heads)
            shape = (len(parts) * heads, d_model)
            yield piece(f"dec_attn.{net}.weight", shape, f"attention/{part}", inward, rows)
    yield piece("dec_attn.o_net.weight", (d_model, heads), "attention/output", (n_head, d_head, d_model))
    yield piece("pos_ff.CoreNet.0.weight", (d_inner, d_model), "feed_forward/inner_kernel", (d_model, d_inner))
    yield piece("pos_ff.CoreNet.0.bias", (d_inner,), "feed_forward/inner_bias", (d_inner,))
    yield piece("pos_ff.CoreNet.3.weight", (d_model, d_inner), "feed_forward/outer_kernel", (d_inner, d_model))
    yield piece("pos_ff.CoreNet.3.bias", (d_model,), "feed_forward/outer_bias", (d_model,))
    for name, path in (("dec_attn", "attention_norm"), ("pos_ff", "feed_forward_norm")):
        yield piece(f"{name}.layer_norm.weight", (d_model,), f"{path}/scale", (d_model,))
        yield piece(f"{name}.layer_norm.bias", (d_model,), f"{path}/bias", (d_model,))


def _embedding_and_softmax(config: ModelConfig, vocab_size: int) -> Iterator[Piece]:
    """Yields the clusters' tables, projections and biases. With div_val 1 they share one table and one bias."""
    bounds = [0, *config.cutoffs, vocab_size] if config.div_val > 1 else [0, vocab_size]
    shared = aliases(config)

    def piece(name: str, path: str, shape: tuple[int, ...], transposed: bool) -> Piece:
        return Piece(name, shape, slice(None), path, shape[::-1] if transposed else shape, slice(None), transposed)

    for c, (start, end) in enumerate(itertools.pairwise(bounds)):
        width = config.cluster_width(c)
        yield piece(f"word_emb.emb_layers.{c}.weight", f"embedding/table_{c}", (end - start, width), False)
        if f"crit.out_layers.{c}.weight" not in shared:
            yield piece(f"crit.out_layers.{c}.weight", f"softmax/table_{c}", (end - start, width), False)
        if _is_projected(config):
            yield piece(f"word_emb.emb_projs.{c}", f"embedding/projection_{c}", (config.d_model, width), True)
        name, rows = f"crit.out_layers.{c}.bias", (end - start,)
        yield Piece(name, rows, slice(None), "softmax/bias", (vocab_size,), slice(start, end), False)
    for c in range(config.n_cluster):
        if _is_projected(config) and f"crit.out_projs.{c}" not in shared:
            shape = (config.d_model, config.cluster_width(c))
            yield piece(f"crit.out_projs.{c}", f"softmax/projection_{c}", shape, True)


def _is_projected(config: ModelConfig) -> bool:
    return config.div_val > 1 or config.embed_width != config.d_model


def _frequencies(d_model: int, dtype: np.dtype = _DOUBLE) -> np.ndarray:
    # Torch computes in float32: so rounded, at most 9 of 640 numbers differ from its own, and none for D = 64.
    exponents = (np.arange(0, d_model, 2, dtype=dtype) / np.array(d_model, dtype)).astype(_DOUBLE)
    return np.array(1, dtype) / (10000**exponents).astype(dtype)


def _check_frequencies(found: np.ndarray, d_model: int) -> None:
    """Raises `UserError` for other frequencies, which would make another model."""
    expected = _frequencies(d_model)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5, atol=0):
        raise UserError(
            f"tensor {FREQUENCIES} of shape {list(found.shape)} is not 10000^(-2i/{d_model}), expected with shape "
            f"{list(expected.shape)}; only those frequencies are supported"
        )


def _check(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], kind: str) -> None:
    """Raises `UserError` for the first name that is missing, of another shape, or unknown."""
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{kind} {name} is missing, expected with shape {list(shape)}; does the config fit?")
        if found[name] != shape:
            raise UserError(
                f"{kind} {name} has shape {list(found[name])}, expected {list(shape)}; does the config fit?"
            )
    for name, shape in found.items():
        if name not in expected:
            raise UserError(
                f"{kind} {name} of shape {list(shape)} was given, expected no such {kind}; does the config fit?"
            )


def write(folder: Path, info: ModelInfo, leaves: Leaves) -> list[str]:
    """Writes the tensors under the release's names, and the arguments of its `MemTransformerLM`.

    Returns:
      Notes on the differences there.

    Raises:
      UserError: If the model has parts that the release lacks.
      OSError, LogError: If the files cannot be written.
    """
    model = info.config.model
    if encoding_of(model).original_type is None or model.tie_positions:
        raise UserError(
            f"model.encoding is {model.encoding} and model.tie_positions is {model.tie_positions}, but the original "
            "PyTorch release has no such model"
        )
    write_weights(folder, from_leaves(leaves_lib.as_type(leaves, np.dtype(np.float32)), model))
    notes = write_vocabulary(folder, info.vocabulary)
    write_json(folder / portable.CONFIG, arguments_of(model, info.config.eval, vocab_size=info.vocabulary.size))
    if model.untie_r:
        notes.append("the release's class shares u and v among the layers; here each layer has its own (untie_r)")
    return notes + differences(info.config, "pytorch", "the original PyTorch release")


def arguments_of(config: ModelConfig, eval_config: EvalConfig, *, vocab_size: int) -> dict[str, Any]:
    """Returns the keyword arguments of the release's `MemTransformerLM` at the lengths of `eval_config`."""
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


def write_weights(folder: Path, tensors: Leaves) -> None:
    """Writes `model.safetensors` for programs that read it with PyTorch."""
    # transformers rejects a file without this word.
    safetensors.write(folder / portable.WEIGHTS, tensors, metadata={"format": "pt"})


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> list[str]:
    """Writes vocabulary.txt, and tokenizer.json or a vocab.txt that TransfoXLTokenizer reads; returns notes on it."""
    portable.write_vocabulary(folder, vocabulary)
    if isinstance(vocabulary, SubwordVocabulary):
        return []
    if not isinstance(vocabulary, WordVocabulary):
        file = portable.VOCABULARY
        return [f"the tokens are of the kind {vocabulary.kind!r}, for which there is no tokenizer there: {file}"]
    write_lines(folder / "vocab.txt", (f"{word}\n" for word in vocabulary.words))
    found = next((word for word in _UNKNOWN if word in vocabulary.words), None)
    if found != vocabulary.unknown:
        return [f"unknown words are {vocabulary.unknown!r}, and TransfoXLTokenizer takes {found!r} for them"]
    return []


def differences(config: ExperimentConfig, preset: str, name: str, *, same: tuple[str, ...] = ()) -> list[str]:
    """Lists the compatibility settings that differ from an implementation's and change the losses.

    Args:
      config: The model's settings.
      preset: The implementation's preset.
      name: The implementation's name, for people.
      same: Settings that are written for the implementation.
    """
    theirs = apply_preset(config, preset).compat
    unused = {*same, "final_norm"}  # A model that has one is rejected.
    if not config.model.has_shaw_terms:
        unused.add("shaw_terms")
    if not config.eval.same_length:
        unused.add("same_length_window")
    apart = f"documents are kept apart here, by the token {config.data.reset_at!r}, and not by {name}"
    return [apart] * (config.data.reset_at is not None) + [
        f"{name} has compat.{leaf.name} {config_tree.format_value(there)}, and these weights were read with "
        f"{config_tree.format_value(here)}: it gives other losses"
        for leaf, here, there in config_tree.differences(config.compat, theirs)
        if leaf.name not in unused
    ]
