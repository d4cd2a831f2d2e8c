"""The training loss: weights of positions, adversarial softmax, activation penalties, weighted sums."""

import jax
import jax.numpy as jnp

from txl_jax.config import LossPart


def position_weights(segment_len: int, part: LossPart) -> jax.Array:
    """Returns weights [L]: all ones, or (half loss, table 6) ones on the last L - L // 2 positions only."""
    scored_from = segment_len // 2 if part is LossPart.HALF else 0
    return (jnp.arange(segment_len) >= scored_from).astype(jnp.float32)


def adversarial_nll(nll: jax.Array, hidden: jax.Array, vectors: jax.Array, size: float) -> jax.Array:
    """Computes the nats [B, L] with adversarial noise on the vectors of the targets (Wang et al., 2019, AdvSoft).

    The worst vector within `size` |w| of a target's own, w, lies against h, so that the target's logit falls by
    `size` |w| |h|; a logit that is negative already does not change. All other logits do not change either, so the new
    loss needs no logits: with p = exp(-nll) and a fall of d it is nll + d + log(1 - p + p exp(-d)). As in the authors'
    code no gradient goes into |w|, which would change the lengths of vectors that a tied embedding shares.

    Args:
      nll: [B, L].
      hidden: [B, L, D], h.
      vectors: [B, L, D], w of each target.
      size: at least 0.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    hidden, vectors = hidden.astype(wide), jax.lax.stop_gradient(vectors.astype(wide))
    # The root of a sum of squares has no derivative at 0, and dropout may zero all of h.
    norms = [jnp.sqrt(jnp.maximum(jnp.sum(array**2, axis=-1), 1e-12)) for array in (hidden, vectors)]
    fall = jnp.where(jnp.sum(hidden * vectors, axis=-1) > 0, size * norms[0] * norms[1], 0)
    log_others = jnp.log(-jnp.expm1(-jnp.maximum(nll, 1e-7)))  # log(1 - p)
    return nll + fall + jnp.logaddexp(-nll - fall, log_others)


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
