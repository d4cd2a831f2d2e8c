"""The update of an ensemble: several runs vmapped into one program over a leading member axis.

A small model leaves an accelerator idle: its time goes into starting kernels. With `jax.vmap` over the members each
kernel does the work of all of them. What they differ in changes no shape: it is passed beside the config, as arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ExperimentConfig
from txl_jax.modules.dropout import DropoutRates
from txl_jax.modules.language_model import LanguageModel
from txl_jax.segments import Segments
from txl_jax.training.optimizer import learning_rate, make_optimizer
from txl_jax.training.state import TrainState, init_params, init_state
from txl_jax.training.step import UpdateMetrics, make_train_step

SEED, LEARNING_RATE = "seed", "optimizer.learning_rate"
# Settings in which members may differ: they change no shape, and nothing that evaluation reads.
VARYING = (SEED, LEARNING_RATE, *(f"model.dropout.{name}" for name in DropoutRates._fields))


class Variation(NamedTuple):
    """The values in which members differ from their base: an array [n] for each; None, or a name left out: as the base.

    Attributes:
      seed: uint32, of the initial parameters and of dropout.
      learning_rate: the peak.
      dropout: rates by the fields of `DropoutRates`.
    """

    seed: jax.Array | None
    learning_rate: jax.Array | None
    dropout: dict[str, jax.Array]

    @classmethod
    def of(cls, base: ExperimentConfig, configs: Sequence[ExperimentConfig]) -> "Variation":
        """Returns the values of members with these configs."""
        base_rates = DropoutRates.of(base.model.dropout)
        rates = [DropoutRates.of(config.model.dropout) for config in configs]
        dropout = {
            name: _unless_all(getattr(base_rates, name), [getattr(each, name) for each in rates], float)
            for name in DropoutRates._fields
        }
        return cls(
            seed=_unless_all(base.seed, [config.seed for config in configs], jnp.uint32),
            learning_rate=_unless_all(
                base.optimizer.learning_rate, [config.optimizer.learning_rate for config in configs], float
            ),
            dropout={name: values for name, values in dropout.items() if values is not None},
        )


def _unless_all(value: Any, values: Sequence[Any], dtype: Any) -> jax.Array | None:
    return None if set(values) == {value} else jnp.asarray(values, dtype)


# (values of the members, states with a leading axis n, segments [n, S, B, L]) -> (states, metrics [n, S])
EnsembleStep = Callable[[Variation, TrainState, Segments], tuple[TrainState, UpdateMetrics]]


def make_ensemble_step(model: LanguageModel, base: ExperimentConfig) -> EnsembleStep:
    """Returns S updates of n members; each is that of `make_train_step` with the member's values, up to rounding."""
    rates = DropoutRates.of(base.model.dropout)

    def step(own: Variation, state: TrainState, segments: Segments) -> tuple[TrainState, UpdateMetrics]:
        member_step = make_train_step(
            model.clone(rates=rates._replace(**own.dropout)) if own.dropout else model,
            make_optimizer(base, peak=own.learning_rate),
            learning_rate(base, peak=own.learning_rate),
            base,
            seed=own.seed,
        )
        return member_step(state, segments)

    return jax.vmap(step)


def make_ensemble_init(
    model: LanguageModel,
    base: ExperimentConfig,
    seeds: Sequence[int],
    *,
    begin: Callable[[Any], TrainState] | None = None,
) -> Callable[[], TrainState]:
    """Returns a function that makes the states of all members before the first update, stacked.

    Args:
      begin: makes the state of a member from its initial parameters, as a warm start does; None: they are kept.
    """
    optimizer, train = make_optimizer(base), base.train

    def init(seed: jax.Array) -> TrainState:
        state = init_state(
            model, optimizer, seed=seed, batch_size=train.batch_size, mem_len=train.mem_len, average=base.average
        )
        return nn.unbox(state)

    def init_warm(seed: jax.Array) -> TrainState:
        assert begin is not None
        return begin(jitted_params(seed))

    # Each member is initialized by itself, so that its parameters are, bit for bit, those of a run of its own.
    jitted = jax.jit(init) if begin is None else init_warm
    jitted_params = jax.jit(lambda seed: nn.unbox(init_params(model, jax.random.key(seed))))

    def init_all() -> TrainState:
        states = [jitted(jnp.asarray(seed, jnp.uint32)) for seed in seeds]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    return init_all
