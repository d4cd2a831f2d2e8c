"""Folders for other implementations: Hugging Face's `from_pretrained`, and the original PyTorch release's names.

Both hold `model.safetensors`, with one name for each shared tensor, and `config.json`. Words are written as
`vocab.txt`, which TransfoXLTokenizer reads without running code (its own files are pickles). Tokens of all kinds are in
`vocabulary.txt` too, in the format of txl_jax.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import EvalConfig, ExperimentConfig, ModelConfig, NormPlace, Residual
from txl_jax.config import tree as config_tree
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.vocabulary import MARKS, Vocabulary
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import huggingface, original, safetensors
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop.leaves import Leaves
from txl_jax.interop.portable import CONFIG, VOCABULARY, WEIGHTS, ModelInfo, write_vocabulary
from txl_jax.modules.positions import encoding_of
from txl_jax.runtime.storage import write_json, write_lines

_WORDS = "vocab.txt"
_UNKNOWN = ("<UNK>", "<unk>")  # In the order in which TransfoXLTokenizer searches for them.


def write_huggingface(folder: Path, info: ModelInfo, leaves: Leaves) -> list[str]:
    """Writes the files that transformers 4.35.2 reads with `TransfoXLLMHeadModel.from_pretrained(folder)`.

    Returns:
      Notes for people: what is not the same there.

    Raises:
      UserError: the model has parts that it lacks there (`huggingface.config_of`, `huggingface.from_leaves`).
      OSError, LogError: the files cannot be written.
    """
    config, vocabulary = info.config, info.vocabulary
    arguments = huggingface.config_of(config.model, config.eval, vocab_size=vocabulary.size)
    arguments |= {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        "torch_dtype": "float32",
        "transformers_version": "4.35.2",
        "dropout": config.model.dropout.rate,
        "dropatt": config.model.dropout.attention,
        "layer_norm_epsilon": config.compat.layer_norm_eps,
        "eos_token_id": vocabulary.mark,
    }
    tensors = huggingface.from_leaves(_float32(leaves), config.model)
    # transformers refuses a file without this word.
    safetensors.write(folder / WEIGHTS, tensors, metadata={"format": "pt"})
    notes = _write_vocabulary(folder, vocabulary)
    if isinstance(vocabulary, WordVocabulary):
        write_json(folder / "tokenizer_config.json", _tokenizer_config(vocabulary))
    write_json(folder / CONFIG, arguments)
    # The epsilon goes along in config.json.
    return notes + _differences(config, "hf", "Hugging Face's model", without=("layer_norm_eps",))


def write_original(folder: Path, info: ModelInfo, leaves: Leaves) -> list[str]:
    """Writes the tensors under the names of the authors' PyTorch release, and the arguments of its `MemTransformerLM`.

    Returns:
      Notes for people: what is not the same there.

    Raises:
      UserError: the model has parts that it lacks there (`original.from_leaves`).
      OSError, LogError: the files cannot be written.
    """
    config = info.config
    if config.model.residual is not Residual.SUM:
        raise UserError(f"model.residual is {config.model.residual}; the original PyTorch release has sums only")
    if encoding_of(config.model).original_type is None or config.model.tie_positions:
        raise UserError(
            f"model.encoding is {config.model.encoding} and model.tie_positions is {config.model.tie_positions}; the "
            "original PyTorch release has no such model"
        )
    tensors = original.from_leaves(_float32(leaves), config.model)
    safetensors.write(folder / WEIGHTS, tensors, metadata={"format": "pt"})
    notes = _write_vocabulary(folder, info.vocabulary)
    write_json(folder / CONFIG, original_arguments(config.model, config.eval, vocab_size=info.vocabulary.size))
    if config.model.untie_r:
        notes.append("the release's class shares u and v among the layers; here each layer has its own (untie_r)")
    return notes + _differences(config, "pytorch", "the original PyTorch release")


def original_arguments(config: ModelConfig, eval_config: EvalConfig, *, vocab_size: int) -> dict[str, Any]:
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


def _float32(leaves: Leaves) -> Leaves:
    return leaves_lib.as_type(leaves, np.dtype(np.float32))


def _write_vocabulary(folder: Path, vocabulary: Vocabulary) -> list[str]:
    """Writes vocabulary.txt, and vocab.txt or tokenizer.json; returns notes about what cannot be read there."""
    write_vocabulary(folder, vocabulary)
    if isinstance(vocabulary, SubwordVocabulary):
        return []
    if not isinstance(vocabulary, WordVocabulary):
        return [f"the tokens are of the kind {vocabulary.kind!r}, for which there is no tokenizer there: {VOCABULARY}"]
    write_lines(folder / _WORDS, (f"{word}\n" for word in vocabulary.words))
    found = next((word for word in _UNKNOWN if word in vocabulary.words), None)
    if found != vocabulary.unknown:
        return [f"unknown words are {vocabulary.unknown!r}, and TransfoXLTokenizer takes {found!r} for them"]
    return []


def _tokenizer_config(vocabulary: WordVocabulary) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "TransfoXLTokenizer",
        "lower_case": vocabulary.lower_case,
        "unk_token": vocabulary.unknown,
        "eos_token": MARKS.get(vocabulary.line_mark, vocabulary.unknown),
        "additional_special_tokens": [],  # By default one is added behind the last id, where there is no row for it.
    }


def _differences(config: ExperimentConfig, preset: str, name: str, *, without: Collection[str] = ()) -> list[str]:
    """Lists the settings of compatibility that differ from those of an implementation and change its numbers."""
    theirs = config_tree.apply_preset(config, preset).compat
    unused = {*without, "final_norm"}  # A model that has one is refused.
    if not config.model.has_shaw_terms:
        unused.add("shaw_terms")
    if not config.eval.same_length:
        unused.add("same_length_window")
    apart = f"documents are kept apart here, by the token {config.model.end_token}, and not by {name}"
    return [apart] * (config.model.end_token is not None) + [
        f"{name} has compat.{leaf.name} {config_tree.format_value(there)}, and these weights were read with "
        f"{config_tree.format_value(here)}: it gives other losses"
        for leaf, here, there in config_tree.differences(config.compat, theirs)
        if leaf.name not in unused
    ]
