"""Checkpoints of NVIDIA's Transformer-XL (DeepLearningExamples), checkpoint_best.pt: names, settings and vocabulary.

A checkpoint is a dict with the keys "model_state", "model_config" (MemTransformerLM's keyword arguments) and "vocab".
Names are the authors' PyTorch release's except in the softmax: its biases and untied tables are lists of parameters,
and projections that the embedding shares occur twice. With same_length a query sees one key more.
"""

import re
from typing import Any

from txl_jax.interop.leaves import Leaf, Leaves

_LISTS = {"biases": "bias", "weights": "weight"}
_LISTED = re.compile(r"\Acrit\.out_layers_(biases|weights)\.(\d+)\Z")


def is_checkpoint(root: Any) -> bool:
    """Returns whether a PyTorch file's value is such a checkpoint."""
    return isinstance(root, dict) and isinstance(root.get("model_config"), dict) and "model_state" in root


def by_original_names(tensors: Leaves) -> dict[str, Leaf]:
    """Returns the tensors that the release has, by its names."""
    return {
        _LISTED.sub(lambda match: f"crit.out_layers.{match[2]}.{_LISTS[match[1]]}", name): leaf
        for name, leaf in tensors.items()
        if not name.startswith("crit.shared_out_projs.")
    }
