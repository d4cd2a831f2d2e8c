"""Updates of several runs as one program: what they differ in are numbers that the program is given.

A small model leaves an accelerator idle, and its time goes into starting kernels. With `jax.vmap` over a leading axis
of runs, each kernel does the work of all of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.modules.dropout import DropoutRates
from txl_jax.modules.language_model import LanguageModel
from txl_jax.segments import Segments
from txl_jax.training.optimizer import learning_rate, make_optimizer
from txl_jax.training.state import TrainState, init_state
from txl_jax.training.step import UpdateMetrics, make_train_step

# What runs of one program may differ in: it changes no shape, and nothing that evaluation reads.
RATES = tuple(f"model.dropout.{name}" for name in DropoutRates._fields)
NUMBERS = ("seed", "optimizer.learning_rate", *RATES)

# (numbers [n] by name, states with a leading axis n, segments [n, S, B, L]) -> (states, metrics [n, S])
TogetherStep = Callable[[Mapping[str, jax.Array], TrainState, Segments], tuple[TrainState, UpdateMetrics]]


def make_step(model: LanguageModel, base: ExperimentConfig) -> TogetherStep:
    """The updates of n runs that differ from `base` in their numbers; each is what `make_train_step` makes of it."""

    def step(numbers: Mapping[str, jax.Array], state: TrainState, segments: Segments) -> Any:
        changed = {name.rpartition(".")[2]: number for name, number in numbers.items() if name in RATES}
        own_model = model.clone(rates=DropoutRates.of(base.model.dropout, **changed))
        config = config_tree.replace(base, {name: number for name, number in numbers.items() if name not in RATES})
        own = make_train_step(own_model, make_optimizer(config), learning_rate(config), config)
        return own(state, segments)

    return jax.vmap(step)


def make_init(model: LanguageModel, base: ExperimentConfig) -> Callable[[jax.Array], TrainState]:
    """The state of one run before its first update, from its seed."""
    optimizer, span = make_optimizer(base), base.train

    def init(seed: jax.Array) -> TrainState:
        sizes = {"batch_size": span.batch_size, "mem_len": span.mem_len}
        return init_state(model, optimizer, seed=seed, **sizes, average=base.average)

    return init
