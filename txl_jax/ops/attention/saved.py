"""Names of the arrays that attention's forward pass computes for its backward pass.

Activation checkpointing (`modules.remat`) decides by these names what it saves. Each implementation
marks the arrays with `mark_as_saved`. If all of them are saved, the backward pass does not run the
forward pass again.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

# Weighted sums of the values, [B, H, L, E].
OUTPUT = "attention.output"
# Logarithm of each query's sum of exp(score), for implementations that compute scores again.
LOG_TOTAL = "attention.log_total"
# Probabilities of all pairs, for the implementation that stores them.
PROBABILITIES = "attention.probabilities"
# Position keys [H, P, E], where devices of a mesh computed parts of them.
POSITION_KEYS = "attention.position_keys"

NAMES = (OUTPUT, LOG_TOTAL, PROBABILITIES, POSITION_KEYS)


def mark_as_saved(array: jax.Array, name: str) -> jax.Array:
    """Returns the array, named for activation checkpointing. `name` is one of `NAMES`."""
    assert name in NAMES, name
    return checkpoint_name(array, name)
