"""Export to Hugging Face's `TransfoXLLMHeadModel` (transformers 4.35).

The module builds the class's arguments, and writes a directory for `from_pretrained`. A model with
the preset "hf" of `CompatConfig` has the same numbers as the class.
"""

import re
from pathlib import Path
from typing import Any

from txl_jax.config import EvalConfig, ModelConfig
from txl_jax.data.vocabulary import MARKS
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.interop import original
from txl_jax.interop.leaves import Leaves
from txl_jax.interop.original import Format
from txl_jax.interop.portable import ModelInfo
from txl_jax.runtime.storage import write_json

# Arguments that the authors' release has too.
_SAME = (
    "n_layer",
    "n_head",
    "d_model",
    "d_head",
    "d_inner",
    "d_embed",
    "div_val",
    "cutoffs",
    "tie_projs",
    "pre_lnorm",
)
_SAME_LENGTHS = ("mem_len", "clamp_len", "same_length")
# Words such as <formula> or [SEP], which TransfoXLTokenizer splits unless they are special tokens.
_SPECIAL_WORD = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")


def config_of(config: ModelConfig, eval_config: EvalConfig, *, vocab_size: int) -> dict[str, Any]:
    """Returns the keyword arguments of `TransfoXLConfig` for a model, without dropout.

    Args:
      config: The model's sizes, ties and encoding.
      eval_config: The lengths.
      vocab_size: Number of tokens.

    Raises:
      UserError: If the class does not support the model.
    """
    original.position_tensors(config, Format.HUGGINGFACE)
    arguments = original.arguments_of(config, eval_config, vocab_size=vocab_size)
    shared = {name: arguments[name] for name in _SAME + _SAME_LENGTHS}
    return shared | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tie_weight,
        "untie_r": config.untie_r,
        "init_std": config.init_std,
        "proj_init_std": config.projection_init_std,
        "dropout": 0.0,
        "dropatt": 0.0,
        # By default `generate` stops at token 0, here a token like any other.
        "eos_token_id": None,
    }


def write(folder: Path, info: ModelInfo, leaves: Leaves) -> list[str]:
    """Writes a model's files for transformers 4.35.2.

    The library reads them with `TransfoXLLMHeadModel.from_pretrained(folder)`. TransfoXLTokenizer
    reads words from vocab.txt without running code. Its own files are pickles.

    Returns:
      The notes of `original.write_model`.

    Raises:
      UserError: If the class does not support the model.
    """
    model = info.config.model
    vocabulary = info.vocabulary
    arguments = config_of(model, info.config.eval, vocab_size=vocabulary.size)
    arguments |= {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        "torch_dtype": "float32",
        "transformers_version": "4.35.2",
        "dropout": model.dropout.rate,
        "dropatt": model.dropout.attention,
        "layer_norm_epsilon": model.compat.layer_norm_eps,
        "eos_token_id": vocabulary.mark,
    }
    if isinstance(vocabulary, WordVocabulary):
        write_json(folder / "tokenizer_config.json", _tokenizer_arguments(vocabulary))
    return original.write_model(folder, info, leaves, arguments, Format.HUGGINGFACE)


def _tokenizer_arguments(vocabulary: WordVocabulary) -> dict[str, Any]:
    """Returns the arguments of `TransfoXLTokenizer` for a vocabulary.

    The tokenizer splits off punctuation, even in words of its vocabulary, except in special tokens.
    Our vocabulary has no list of special tokens, so they are recognized by their form.
    """
    unknown = vocabulary.unknown
    end = MARKS.get(vocabulary.line_mark, unknown)
    # Without this list there is <formula>. If the vocabulary lacks it, it gets the id after the
    # last one, where the table has no row.
    special = [word for word in vocabulary.words if _SPECIAL_WORD.fullmatch(word)]
    additional = [word for word in special if word not in (unknown, end)]
    return {
        "tokenizer_class": "TransfoXLTokenizer",
        "lower_case": vocabulary.lower_case,
        "unk_token": unknown,
        "eos_token": end,
        "additional_special_tokens": additional,
        # These are regular expressions. By default the words themselves are, so that [SEP] would
        # mean the letters S, E and P.
        "never_split": [re.escape(word) for word in (end, unknown, *additional)],
    }
