"""Update rules of the optimizers: how a clipped gradient becomes an update, before the learning rate.

All are optax's, with two adaptations. What is by tensor (trust ratios, root mean squares, factors) is by tensor and
layer, although `nn.scan` stacks the layers. And a projection of attention is the matrix that it multiplies by, although
its heads are an axis. NVIDIA's LAMB is in `txl_jax.training.nvidia_lamb`.
"""

import math
from typing import Any, NamedTuple

import jax
import optax

from txl_jax.config import ExperimentConfig, OptimizerConfig, OptimizerName
from txl_jax.training import nvidia_lamb
from txl_jax.training.nvidia_lamb import ADAM_B1
from txl_jax.training.param_axes import as_matrices, matrix_axes, matrix_shape, names_of, per_layer

LION_B1, LION_B2 = 0.9, 0.99
MUON_MOMENTUM = 0.95
# Root mean square of a Muon update times this: that of an Adam update, so that one learning rate serves both (Liu et
# al., 2025).
MUON_RMS = 0.2


class UpdateRule(NamedTuple):
    """An update rule, around the decoupled weight decay.

    Attributes:
      before: from the gradient to the update without decay.
      after: what follows the decay.
    """

    before: tuple[optax.GradientTransformation, ...]
    after: tuple[optax.GradientTransformation, ...] = ()


def update_rule(config: ExperimentConfig) -> UpdateRule:
    """Returns the rule of `optimizer.name`."""
    optimizer = config.optimizer
    match optimizer.name:
        case OptimizerName.ADAM | OptimizerName.ADAMW:
            return UpdateRule((_adam(optimizer),))
        case OptimizerName.LAMB_NVIDIA:
            return UpdateRule(
                (nvidia_lamb.scale_by_moments(optimizer),), (nvidia_lamb.scale_by_trust_ratio(config.model, optimizer),)
            )
        case OptimizerName.LAMB:
            return UpdateRule((_adam(optimizer),), (per_layer(optax.scale_by_trust_ratio()),))
        case OptimizerName.ADAFACTOR:
            factored = optax.chain(
                optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
            )
            return UpdateRule((per_layer(as_matrices(factored)),))
        case OptimizerName.LION:
            return UpdateRule((optax.scale_by_lion(LION_B1, LION_B2),))
        case OptimizerName.MUON:
            return UpdateRule((_muon(optimizer),))


def _adam(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=ADAM_B1, b2=optimizer.adam_b2, eps=optimizer.adam_eps)


def _muon(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Returns Muon for the layers' matrices and Adam for all other parameters."""

    def axes_of(tree: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: matrix_axes(names_of(path)), tree)

    def by_size(updates: Any, params: Any) -> Any:
        """Gives each update the root mean square of an Adam update, whatever the matrix's shape."""
        del params

        def scaled(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
            return MUON_RMS * math.sqrt(max(matrix_shape(names_of(path), update.shape)[-2:])) * update

        return jax.tree.map_with_path(scaled, updates)

    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "adam" if matrix_axes(names_of(path)) is None else "muon", params)

    muon = optax.contrib.scale_by_muon(beta=MUON_MOMENTUM, weight_dimension_numbers=axes_of)
    return optax.partition({"muon": optax.chain(muon, optax.stateless(by_size)), "adam": _adam(optimizer)}, labels)
