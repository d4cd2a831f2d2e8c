"""The mean loss of a segment in plain JAX, with which loops of dynamic evaluation are written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.config import EvalConfig


def mean_loss_of(module: Any, lengths: EvalConfig) -> Callable[..., Any]:
    """Returns a function of (parameters, memory, inputs, targets, mask), arrays [B, L].

    It returns the mean over the mask, and (summed nats, new memory). It only uses the product's
    module's forward pass and its log probabilities.
    """

    def mean_loss(params: Any, memory: Any, inputs: Any, targets: Any, mask: Any) -> Any:
        hidden, memory = module.apply(
            {"params": params},
            inputs,
            memory,
            clamp_len=lengths.clamp_len,
            same_length=lengths.same_length,
        )
        log_p = module.apply({"params": params}, hidden, method=module.log_probabilities)
        # Dividing logits is dividing log probabilities, except for the norm.
        scaled = jax.nn.log_softmax(log_p / lengths.temperature)
        nll = -jnp.take_along_axis(scaled, targets[..., None], axis=-1)[..., 0]
        nats = jnp.sum(jnp.where(mask, nll, 0.0))
        return nats / mask.sum(), (nats, memory)

    return mean_loss
