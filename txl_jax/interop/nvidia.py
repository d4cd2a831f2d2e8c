"""Checkpoints of NVIDIA's Transformer-XL (DeepLearningExamples), checkpoint_best.pt: names, settings and vocabulary.

A checkpoint is a dict: the model's tensors are under "model_state", MemTransformerLM's keyword arguments under
"model_config", and the vocabulary under "vocab". Names are those of the authors' PyTorch release but for the softmax:
its biases, and tables that are not tied, are lists of parameters, and projections that the embedding shares are there
twice. With same_length a query sees one key more than in the release.
"""

import re
from collections.abc import Mapping
from typing import Any

_LISTS = {"crit.out_layers_biases": "bias", "crit.out_layers_weights": "weight"}
_LISTED = re.compile(r"(crit\.out_layers_(?:biases|weights))\.(\d+)")
# Frequencies are a constant, which mixed precision rounds to 10 bits: they are not compared.
_LEFT_OUT = re.compile(r"crit\.shared_out_projs\.\d+|pos_emb\.inv_freq")


def is_checkpoint(root: Any) -> bool:
    """Returns whether a PyTorch file's value is such a checkpoint."""
    return isinstance(root, dict) and isinstance(root.get("model_config"), dict) and "model_state" in root


def original_names(names: Mapping[str, Any]) -> dict[str, str]:
    """Returns the release's name of each tensor that it has, and the name here."""
    found: dict[str, str] = {}
    for name in names:
        if match := _LISTED.fullmatch(name):
            found[f"crit.out_layers.{match[2]}.{_LISTS[match[1]]}"] = name
        elif not _LEFT_OUT.fullmatch(name):
            found[name] = name
    return found


def facts(root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of MemTransformerLM."""
    return dict(root["model_config"])
