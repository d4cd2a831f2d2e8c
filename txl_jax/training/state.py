"""The training state: everything that is carried from update to update."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from txl_jax.config import AverageConfig
from txl_jax.memory import Memory
from txl_jax.modules.language_model import LanguageModel
from txl_jax.training import weight_averaging
from txl_jax.training.weight_averaging import Average

_NO_AVERAGE = AverageConfig()


@flax.struct.dataclass
class TrainState:
    """The training state, which a checkpoint holds as a whole.

    The position in the text and the random keys are functions of `step`: neither has state. In an ensemble every leaf
    has a leading member axis.

    Attributes:
      step: int32 [], updates done.
      params: the parameters, float32.
      opt_state: state of the optimizer.
      memory: M slots for each row of the batch.
      average: the mean of the parameters over updates; None: none is kept.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    memory: Memory
    average: Average | None = None

    @property
    def scored_params(self) -> Any:
        """The parameters that are evaluated and kept as the best: the mean where there is one."""
        return self.params if self.average is None else self.average.params


def init_params(model: LanguageModel, key: jax.Array) -> Any:
    """Returns the initial parameters, each in a box that holds its logical axis names."""
    token = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, token, model.init_memory(batch_size=1, mem_len=0))["params"]


def init_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    *,
    seed: int | jax.Array,
    batch_size: int,
    mem_len: int,
    average: AverageConfig = _NO_AVERAGE,
) -> TrainState:
    """Returns the state before the first update; parameters and their moments are boxed as in `init_params`."""
    params = init_params(model, jax.random.key(seed))
    return state_from_params(model, optimizer, params, batch_size=batch_size, mem_len=mem_len, average=average)


def state_from_params(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    params: Any,
    *,
    batch_size: int,
    mem_len: int,
    average: AverageConfig = _NO_AVERAGE,
) -> TrainState:
    """Returns the state before the first update of training that begins with these parameters, boxed or not."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=model.init_memory(batch_size=batch_size, mem_len=mem_len),
        average=weight_averaging.init(params, average),
    )
