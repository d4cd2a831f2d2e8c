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
import dataclasses
import itertools
from typing import Any, NamedTuple

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
    b2 = optimizer.adam_b2
    eps = optimizer.adam_eps

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
    eps = optimizer.adam_eps
    tensors = _Tensors.of(model)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        step_norms = tensors.norms(updates)
        param_norms = tensors.norms(params)

        factors = {}
        for name, step_norm in step_norms.items():
            param_norm = param_norms[name]
            ratio = jnp.minimum(param_norm, LARGEST_NORM) / (step_norm + eps)
            has_zero = (step_norm == 0) | (param_norm == 0)
            factors[name] = jnp.where(has_zero, 1, ratio)

        return tensors.scale(updates, factors), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# Names along a parameter's path, with NVIDIA's name at the end where it differs.
_TensorName = tuple[Any, ...]


class _Part(NamedTuple):
    """The part of a parameter that belongs to one of NVIDIA's tensors."""

    tensor: _TensorName
    rows: slice | None  # Rows of the parameter, or None for all of them.


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """NVIDIA's tensors, as groups of our parameters or of their rows."""

    model: ModelConfig
    # NVIDIA's name for the matrix that contains a projection of attention, by the projection's
    # name. A projection without an entry is a tensor by itself.
    joined: dict[str, str]

    @classmethod
    def of(cls, model: ModelConfig) -> "_Tensors":
        """Returns the tensors of a model."""
        joined = {}
        for net, projections in encoding_of(model).original_projections.items():
            for projection in projections:
                joined[projection] = net
        return cls(model, joined)

    def norms(self, tree: Any) -> dict[_TensorName, jax.Array]:
        """Computes the norm of each tensor in a tree like the parameters.

        A norm is a scalar, or [N] if the tensor is in each of N stacked layers.
        """
        squares: dict[_TensorName, Any] = collections.defaultdict(float)
        for path, leaf in jax.tree.leaves_with_path(tree):
            names = names_of(path)
            # Each layer has its own norm, so that the axis of stacked layers stays.
            first_axis = 1 if is_stacked(names) else 0
            axes = tuple(range(first_axis, leaf.ndim))
            for part in self._parts(names, leaf.shape):
                values = leaf if part.rows is None else leaf[part.rows]
                squares[part.tensor] += jnp.sum(jnp.square(values), axis=axes)
        return {tensor: jnp.sqrt(square) for tensor, square in squares.items()}

    def scale(self, tree: Any, factors: dict[_TensorName, jax.Array]) -> Any:
        """Multiplies each tensor in a tree like the parameters by its factor."""

        def scale_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            scaled = []
            for part in self._parts(names_of(path), leaf.shape):
                factor = factors[part.tensor]
                if part.rows is None:
                    # The factors of stacked layers [N] meet the leading axis of the parameter.
                    return leaf * factor.reshape(factor.shape + (1,) * (leaf.ndim - factor.ndim))
                scaled.append(leaf[part.rows] * factor)
            return jnp.concatenate(scaled)

        return jax.tree.map_with_path(scale_leaf, tree)

    def _parts(self, names: tuple[str, ...], shape: tuple[int, ...]) -> list[_Part]:
        """Returns the parts of a parameter, in the order of its rows.

        A single part has all rows.
        """
        if names == ("softmax", "bias") and self.model.div_val > 1:
            # NVIDIA's softmax has a bias for each cluster.
            bounds = [0, *self.model.cutoffs, shape[0]]
            return [
                _Part((*names, start), slice(start, end))
                for start, end in itertools.pairwise(bounds)
            ]

        name = names[-1]
        if names[-2:-1] == ("attention",) and name in self.joined:
            return [_Part((*names[:-1], self.joined[name]), None)]
        return [_Part(names, None)]
