"""LAMB as in NVIDIA's DeepLearningExamples for Transformer-XL.

The original is in lamb.py, in the classes Lamb and JITLamb.

It differs from `optax.lamb` in four ways:

- The moments have no bias correction: m / (sqrt(v) + eps), in which a first update is 3.2 times as
  large (the trust ratio takes most of that away).
- The norm of the weights counts up to 10. A larger tensor, such as an embedding, moves by less.
- eps is added to the norm of the step too.
- A norm is over a tensor of NVIDIA's model. Query, key and value of a layer are one there; with
  div_val > 1 the bias of the softmax is one for each cluster.
"""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import ModelConfig, OptimizerConfig
from txl_jax.config.training import ADAM_B1
from txl_jax.modules.positions import encoding_of
from txl_jax.training.param_axes import is_stacked, names_of

LARGEST_NORM = 10.0


def scale_by_moments(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Returns m / (sqrt(v) + eps) with Adam's moments, not corrected for their bias.

    The state is Adam's.
    """
    b2, eps = optimizer.adam_b2, optimizer.adam_eps

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, ADAM_B1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        return steps, state._replace(count=optax.safe_increment(state.count), mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def scale_by_trust_ratio(
    model: ModelConfig, optimizer: OptimizerConfig
) -> optax.GradientTransformation:
    """Returns the step times min(|w|, 10) / (|step| + eps) for each of NVIDIA's tensors.

    The factor is 1 if a norm is 0.
    """
    eps, nets = optimizer.adam_eps, encoding_of(model).original_projections
    joined = {projection: net for net, projections in nets.items() for projection in projections}

    def norms(tree: Any) -> dict[tuple[Any, ...], jax.Array]:
        squares: dict[tuple[Any, ...], Any] = collections.defaultdict(float)
        for path, leaf in jax.tree.leaves_with_path(tree):
            own_axes = tuple(range(is_stacked(names_of(path)), leaf.ndim))
            for tensor, rows in _parts(names_of(path), leaf.shape, model, joined):
                squares[tensor] += jnp.sum(
                    jnp.square(leaf if rows is None else leaf[rows]), axis=own_axes
                )
        return {tensor: jnp.sqrt(square) for tensor, square in squares.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        of_step, of_weight = norms(updates), norms(params)
        ratio = {}
        for tensor, step in of_step.items():
            weight = of_weight[tensor]
            trusted = jnp.minimum(weight, LARGEST_NORM) / (step + eps)
            ratio[tensor] = jnp.where((step == 0) | (weight == 0), 1, trusted)

        def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            parts = list(_parts(names_of(path), leaf.shape, model, joined))
            (tensor, rows), *_ = parts
            if rows is not None:
                return jnp.concatenate([leaf[rows] * ratio[tensor] for tensor, rows in parts])
            factor = ratio[tensor]
            return leaf * factor.reshape(factor.shape + (1,) * (leaf.ndim - factor.ndim))

        return jax.tree.map_with_path(scaled, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _parts(
    names: tuple[str, ...], shape: tuple[int, ...], model: ModelConfig, joined: dict[str, str]
) -> Iterator[tuple[tuple[Any, ...], slice | None]]:
    """Yields the parts of a parameter, each in one of NVIDIA's tensors.

    Each item is one of NVIDIA's tensors (of each layer), and its rows, or None for all rows.

    `joined` has the tensor that contains each projection of attention. A projection not listed is
    its own tensor.
    """
    if names == ("softmax", "bias") and model.div_val > 1:
        for start, end in itertools.pairwise([0, *model.cutoffs, shape[0]]):
            yield (*names, start), slice(start, end)
    elif names[-2:-1] == ("attention",) and names[-1] in joined:
        yield (*names[:-1], joined[names[-1]]), None
    else:
        yield names, None
