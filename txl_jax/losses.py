"""Which positions of a segment count in the training loss, and how losses are summed."""

import jax
import jax.numpy as jnp

from txl_jax.config import LossPart


def position_weights(segment_len: int, part: LossPart) -> jax.Array:
    """Weights [L]: all ones, or (half loss, table 6) ones on the last L - L // 2 positions only."""
    scored_from = segment_len // 2 if part is LossPart.HALF else 0
    return (jnp.arange(segment_len) >= scored_from).astype(jnp.float32)


def activation_penalty(outputs: jax.Array, *, activation: float, temporal: float) -> jax.Array:
    """What is added to the loss for outputs [B, L, D] of the last layer that are large, or change fast (Merity et al., 2017).

    Both of the outputs before dropout, as the authors' PTB release has it; AWD-LSTM takes the first one after.
    """
    outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    change = outputs[:, 1:] - outputs[:, :-1]
    return activation * jnp.mean(outputs**2) + temporal * jnp.sum(change**2) / max(change.size, 1)


def weighted_sum(nll: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Summed nats and summed weights of losses [B, L] with weights [B, L].

    A position of weight 0 gives exactly 0 even where its loss is not finite.
    """
    return jnp.sum(jnp.where(weights > 0, nll * weights, 0)), jnp.sum(weights)
