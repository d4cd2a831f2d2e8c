"""Activation checkpointing (rematerialization, remat) of layers.

The scan over layers stacks what each layer keeps, which is most of the memory of a training step.
In arrays [B, L, D], with M = L and F = 4 D, a layer keeps:

- `none`: everything that its backward pass reads, 26 arrays in bfloat16. Nearly half of it is
  layer norms in float32.
- `dots`: the results of matmuls with weights, and what attention names (`ops.attention.saved`), 13
  arrays, and the probabilities of `stored`. Layer norms, ReLU and dropout masks are computed again
  from these, which moves fewer bytes than storing them. No matmul and no attention is computed
  again, except the scores of the reference.
- `full`: its inputs, 1 array. The backward pass runs the whole layer again.

tests/modules/test_remat.py counts them.
"""

import flax.linen as nn
import jax

from txl_jax.config import Remat
from txl_jax.ops.attention import saved

# Matmuls with weights have no batch dimensions, unlike those of queries with keys.
_MATMULS_AND_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(*saved.NAMES),
)


def for_platform(remat: Remat, platform: str) -> Remat:
    """Returns the meaning of `Remat.AUTO` on a platform. Other values are returned unchanged.

    A model that is built without a run knows only the platform. A run also compares memory
    (`runs.remat_choice`), and its model has no `AUTO`.

    Args:
      remat: `model.remat`.
      platform: "cpu", "gpu" or "tpu".
    """
    if remat is not Remat.AUTO:
        return remat
    # A CPU is bound by its arithmetic, and all numbers of a layer fit in its memory.
    if platform == "cpu":
        return Remat.NONE
    return Remat.DOTS


def checkpointed(layer: type[nn.Module], remat: Remat) -> type[nn.Module]:
    """Returns a layer whose backward pass recomputes the values that `remat` does not keep.

    Args:
      layer: The module of a layer.
      remat: Any value except `Remat.AUTO`.
    """
    assert remat is not Remat.AUTO
    if remat is Remat.NONE:
        return layer
    policy = None  # Keeps only the layer's inputs.
    if remat is Remat.DOTS:
        policy = _MATMULS_AND_ATTENTION
    # Inside a scan the compiler cannot merge the recomputation with the forward pass, so the
    # barrier that prevents it would only cost time.
    return nn.remat(layer, policy=policy, prevent_cse=False)
