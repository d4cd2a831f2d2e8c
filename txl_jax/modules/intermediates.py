"""Intermediate outputs for the loss: the last layer's outputs before dropout.

    (hidden, memory), kept = model.apply(variables, ..., mutable=[COLLECTION])
    outputs = last(kept)

They are kept only if the collection is mutable.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

COLLECTION = "activations"


def keep_last(module: nn.Module, outputs: jax.Array) -> None:
    """Keeps outputs [B, L, D] in the collection (`sow`)."""
    if not module.is_initializing():
        module.sow(COLLECTION, "last", outputs, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def last(kept: Mapping[str, Any]) -> jax.Array:
    """Returns what `keep_last` kept; `kept` is the second result of `apply`."""
    return kept[COLLECTION]["last"]
