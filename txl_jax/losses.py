"""The training loss: weights of positions, activation penalties, weighted sums."""

import jax
import jax.numpy as jnp

from txl_jax.config import LossPart


def position_weights(segment_len: int, part: LossPart) -> jax.Array:
    """Returns weights [L]: all ones, or (half loss, table 6) ones on the last L - L // 2 positions only."""
    scored_from = segment_len // 2 if part is LossPart.HALF else 0
    return (jnp.arange(segment_len) >= scored_from).astype(jnp.float32)


def activation_penalty(outputs: jax.Array, *, activation: float, temporal: float) -> jax.Array:
    """Computes the penalties AR and TAR on the last layer's outputs [B, L, D] (Merity et al., 2017).

    Activation regularization penalises large outputs, temporal activation regularization fast changes. Both take the
    outputs before dropout, as the authors' PTB release does; AWD-LSTM takes AR after dropout.
    """
    outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    change = outputs[:, 1:] - outputs[:, :-1]
    return activation * jnp.mean(outputs**2) + temporal * jnp.sum(change**2) / max(change.size, 1)


def weighted_sum(nll: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns summed nats and summed weights of losses [B, L] with weights [B, L].

    A position of weight 0 adds exactly 0 even where its loss is not finite.
    """
    return jnp.sum(jnp.where(weights > 0, nll * weights, 0)), jnp.sum(weights)
