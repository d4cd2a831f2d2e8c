"""What a loss may ask of the network beside its outputs: the last layer's outputs before dropout.

    (hidden, memory), kept = model.apply(variables, ..., mutable=[COLLECTION])
    outputs = last(kept)

Nothing is kept where nobody asks.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

COLLECTION = "activations"


def keep_last(module: nn.Module, outputs: jax.Array) -> None:
    """Leaves [B, L, D] for who asks with `mutable`."""
    if not module.is_initializing():
        module.sow(COLLECTION, "last", outputs, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def last(kept: Mapping[str, Any]) -> jax.Array:
    """What `keep_last` left."""
    return kept[COLLECTION]["last"]
