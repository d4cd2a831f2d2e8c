"""Weights of Hugging Face's `TransfoXLLMHeadModel` (transformers 4.35), in both directions, as a dict of numpy arrays.

    params = to_flax(tensors, config, vocab_size=204)    # {"params": params} is what `model.apply` takes
    tensors = from_flax(params, config)                  # every name of the model's state_dict
    TransfoXLConfig(**config_of(config, eval_config, vocab_size=204))

The names are the original's with three differences: all but the softmax's are under "transformer.", u and v are in
every layer, and the first row of cluster_weight belongs to the first tail. The preset "hf" of `CompatConfig` gives the
same numbers. `write` makes a directory for `from_pretrained`, with words as `vocab.txt`, which TransfoXLTokenizer reads
without running code (its own files are pickles).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import EvalConfig, ModelConfig, NormPlace
from txl_jax.data.vocabulary import MARKS
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop import original, portable
from txl_jax.interop.leaves import Leaf, Leaves, Renamed
from txl_jax.interop.portable import ModelInfo
from txl_jax.modules.positions import ENCODINGS, encoding_of
from txl_jax.runtime.storage import write_json

_ENCODER, _SOFTMAX = "transformer.", "crit."
_BIASES = ("r_w_bias", "r_r_bias")


def to_flax(tensors: Mapping[str, np.ndarray], config: ModelConfig, *, vocab_size: int) -> dict[str, Any]:
    """Returns the nested parameters of `TransformerXL` that `to_leaves` describes."""
    return leaves_lib.to_tree(to_leaves(tensors, config, vocab_size=vocab_size))


def to_leaves(tensors: Mapping[str, np.ndarray], config: ModelConfig, *, vocab_size: int) -> dict[str, Leaf]:
    """Returns the parameters of `TransformerXL` (with `final_norm` off) by path, in the tensors' dtypes.

    Args:
      tensors: Every tensor of the model's state_dict, shared ones under all their names. They are read when leaves are.
      config: Sizes and ties.
      vocab_size: V.

    Raises:
      UserError: If a tensor is missing, unknown or of the wrong shape, shared tensors differ, or positions are
        absolute. Errors of `original` use its names, without "transformer.".
    """
    _check_encoding(config)
    joined = {bias: _join_bias(tensors, bias, config) for bias in _BIASES}
    taken = {name for bias in _BIASES for name in (_name(bias), *_bias_names(bias, config))}
    names = {_original_name(name): name for name in tensors if name not in taken}
    renamed = Renamed(tensors, names, joined)
    return original.to_leaves(renamed, config, vocab_size=vocab_size, cluster_order=original.ClusterOrder.FORWARD)


def from_flax(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Inverts `to_flax`. Also takes a tree of gradients: a shared tensor's is then the sum over its uses."""
    tensors = {name: leaf.read() for name, leaf in from_leaves(leaves_lib.from_tree(params), config).items()}
    return tensors | {name: tensors[first] for name, first in aliases(config).items()}


def from_leaves(leaves: Leaves, config: ModelConfig) -> dict[str, Leaf]:
    """Inverts `to_leaves`, with only the first name of a shared tensor.

    Raises:
      UserError: If a parameter is missing, unknown or of the wrong shape, or has no name there.
    """
    _check_encoding(config)
    tensors = original.from_leaves(leaves, config, cluster_order=original.ClusterOrder.FORWARD)
    own = {bias: tensors.pop(bias) for bias in _BIASES} if config.untie_r else {}
    tensors = {_name(name): leaf for name, leaf in tensors.items()}
    for bias, leaf in own.items():
        value_NxHxE = leaf.read()
        names = _bias_names(bias, config)
        tensors |= {name: leaves_lib.leaf_of(value) for name, value in zip(names, value_NxHxE, strict=True)}
    return tensors


def aliases(config: ModelConfig) -> dict[str, str]:
    """Returns the second names of shared tensors, each with its first name."""
    shared = {_name(name): _name(first) for name, first in original.aliases(config).items()}
    if not config.untie_r:
        shared |= {name: _name(bias) for bias in _BIASES for name in _bias_names(bias, config)}
    return shared


def config_of(config: ModelConfig, eval_config: EvalConfig, *, vocab_size: int) -> dict[str, Any]:
    """Returns the keyword arguments of `TransfoXLConfig` for a model at the lengths of `eval_config`, without dropout.

    A TransfoXLConfig has no dtypes of activations and memory, no rematerialisation and no segment length.

    Raises:
      UserError: If positions are absolute, or values are incompatible, which Hugging Face's class would accept.
    """
    _check_encoding(config)
    config.validate()
    config.validate_vocabulary(vocab_size)
    eval_config.validate()
    same = ("d_model", "n_head", "d_head", "d_inner", "div_val", "n_layer", "untie_r", "init_std")
    return {name: getattr(config, name) for name in same} | {
        "vocab_size": vocab_size,
        "d_embed": config.embed_width,
        "cutoffs": list(config.cutoffs),
        "tie_word_embeddings": config.tie_weight,
        "tie_projs": list(config.tie_projs or (False,) * config.n_cluster),
        "pre_lnorm": config.layer_norm is NormPlace.PRE,
        "proj_init_std": config.projection_init_std,
        "dropout": 0.0,
        "dropatt": 0.0,
        "mem_len": eval_config.mem_len,
        "clamp_len": eval_config.clamp_len or -1,
        "same_length": eval_config.same_length,
        "eos_token_id": None,  # By default `generate` stops at token 0, here a token like any other.
    }


def write(folder: Path, info: ModelInfo, leaves: Leaves) -> list[str]:
    """Writes the files that transformers 4.35.2 reads with `TransfoXLLMHeadModel.from_pretrained(folder)`.

    Returns:
      Notes on the differences there.

    Raises:
      UserError: If the model has parts that Hugging Face's lacks.
      OSError, LogError: If the files cannot be written.
    """
    config, vocabulary = info.config, info.vocabulary
    arguments = config_of(config.model, config.eval, vocab_size=vocabulary.size) | {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        "torch_dtype": "float32",
        "transformers_version": "4.35.2",
        "dropout": config.model.dropout.rate,
        "dropatt": config.model.dropout.attention,
        "layer_norm_epsilon": config.compat.layer_norm_eps,
        "eos_token_id": vocabulary.mark,
    }
    original.write_weights(folder, from_leaves(leaves_lib.as_type(leaves, np.dtype(np.float32)), config.model))
    notes = original.write_vocabulary(folder, vocabulary)
    if isinstance(vocabulary, WordVocabulary):
        tokenizer = {
            "tokenizer_class": "TransfoXLTokenizer",
            "lower_case": vocabulary.lower_case,
            "unk_token": vocabulary.unknown,
            "eos_token": MARKS.get(vocabulary.line_mark, vocabulary.unknown),
            "additional_special_tokens": [],  # The default adds one after the last id, where the table has no row.
        }
        write_json(folder / "tokenizer_config.json", tokenizer)
    write_json(folder / portable.CONFIG, arguments)
    return notes + original.differences(config, "hf", "Hugging Face's model", same=("layer_norm_eps",))


def _check_encoding(config: ModelConfig) -> None:
    if not encoding_of(config).in_huggingface:
        known = ", ".join(name for name, encoding in ENCODINGS.items() if encoding.in_huggingface)
        raise UserError(f"model.encoding is {config.encoding}, and Hugging Face's model has {known} only")
    if config.tie_positions:
        raise UserError(
            "model.tie_positions is on, and Hugging Face's model has a matrix of positions, u and v; turn it off"
        )


def _join_bias(tensors: Mapping[str, np.ndarray], bias: str, config: ModelConfig) -> np.ndarray:
    """Returns u or v of all its names: [H, E], or [N, H, E] if each layer has its own."""
    shape = (config.n_head, config.d_head)

    def take(name: str) -> np.ndarray:
        if name not in tensors or tensors[name].shape != shape:
            found = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise UserError(f"tensor {name} {found}, expected with shape {list(shape)}; does the config fit?")
        return tensors[name]

    if config.untie_r:
        if _name(bias) in tensors:
            raise UserError(
                f"tensor {_name(bias)} was given, but with model.untie_r each layer has its own; turn it off"
            )
        return np.stack([take(name) for name in _bias_names(bias, config)])
    shared = take(_name(bias))
    for name in _bias_names(bias, config):
        if not np.array_equal(take(name), shared):
            raise UserError(f"tensors {name} and {_name(bias)} differ, but model.untie_r is off; turn it on")
    return shared


def _bias_names(bias: str, config: ModelConfig) -> list[str]:
    return [f"{_ENCODER}layers.{layer}.dec_attn.{bias}" for layer in range(config.n_layer)]


def _name(name: str) -> str:
    """Returns Hugging Face's name of an original tensor."""
    return name if name.startswith(_SOFTMAX) else _ENCODER + name


def _original_name(name: str) -> str:
    """Inverts `_name`; the original's own names are refused, because its cluster order is another."""
    found = name.removeprefix(_ENCODER)
    if _name(found) != name:
        raise UserError(f"tensor {name} was given, expected names under {_SOFTMAX} for the softmax, else {_ENCODER}")
    return found
