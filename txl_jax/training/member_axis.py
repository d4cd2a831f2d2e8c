"""Ensemble members and their training step, with multiple runs vmapped into one.

The runs are vmapped over a leading member axis.

A small model leaves an accelerator idle: its time goes into starting kernels. With `jax.vmap` over
the members each kernel does the work of all of them. What they differ in changes no shape: it is
passed with the config, as arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.config import DropoutConfig, ExperimentConfig
from txl_jax.modules import AnyModel
from txl_jax.recurrence import Segments
from txl_jax.training.optimizer import learning_rate, make_optimizer
from txl_jax.training.step import TrainState, UpdateMetrics, make_train_step

SEED, LEARNING_RATE = "seed", "optimizer.learning_rate"
# Settings in which members may differ: they change no shape, and nothing that evaluation reads.
RATES = tuple(field.name for field in dataclasses.fields(DropoutConfig) if field.name != "locked")
VARYING = (SEED, LEARNING_RATE, *(f"model.dropout.{name}" for name in RATES))

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Members:
    """Members of an ensemble by name.

    Without names it is a single run, without a member axis; `labels` serves both.
    """

    names: tuple[str, ...] = ()  # In the order of the axis.

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The names, or one None for a run by itself."""
        return self.names or (None,)

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, tree: Any) -> list[Any]:
        """Returns the tree of each member: leaves [n, ...] -> n trees of leaves [...]."""
        return [self.take(tree, i) for i in range(len(self))]

    def take(self, tree: Any, index: int) -> Any:
        """Returns the tree of one member."""
        return jax.tree.map(lambda leaf: leaf[index], tree) if self.names else tree

    def stack(self, trees: Sequence[Any]) -> Any:
        """Inverts `split`, for arrays on the host or on devices."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if self.names else trees[0]

    def abstract(self, tree: Any) -> Any:
        """Adds the axis to a tree of `jax.ShapeDtypeStruct`."""

        def with_axis(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            placed = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((len(self), *leaf.shape), leaf.dtype, sharding=placed)

        return jax.tree.map(with_axis, tree) if self.names else tree

    def to_json(self, values: Sequence[T]) -> Any:
        """Returns one value per member as an object by name, or a single run's only value."""
        return dict(zip(self.names, values, strict=True)) if self.names else values[0]

    def from_json(self, stored: Any) -> list[Any]:
        """Inverts `to_json`. None (nothing was stored) gives None for each member."""
        if stored is None:
            return [None] * len(self)
        return [stored[name] for name in self.names] if self.names else [stored]

    def prefix(self, index: int) -> str:
        """Returns the beginning of a line about one member: "seed=2: ", or nothing."""
        return f"{self.names[index]}: " if self.names else ""


class Variation(NamedTuple):
    """The values in which members differ from their base.

    There is an array [n] for each setting in which members differ.
    """

    seed: jax.Array | None  # uint32, of the initial parameters and of dropout.
    learning_rate: jax.Array | None  # The peak.
    dropout: dict[str, jax.Array]  # Rates by the fields of `DropoutConfig`.

    @classmethod
    def of(cls, base: ExperimentConfig, configs: Sequence[ExperimentConfig]) -> "Variation":
        """Returns the values of members with these configs."""
        base_rates, *rates = (_rates(config.model.dropout) for config in (base, *configs))
        dropout = {
            name: _unless_all(base_rates[name], [each[name] for each in rates], float)
            for name in RATES
        }
        base_peak, *peaks = (config.optimizer.learning_rate for config in (base, *configs))
        return cls(
            seed=_unless_all(base.seed, [config.seed for config in configs], jnp.uint32),
            learning_rate=_unless_all(base_peak, peaks, float),
            dropout={name: values for name, values in dropout.items() if values is not None},
        )


class _TracedRates(DropoutConfig):
    """Dropout rates that may be traced."""

    def __post_init__(self) -> None:
        """Converts nothing: a traced rate is not a float."""


def with_rates(model: AnyModel, rates: Mapping[str, jax.Array]) -> AnyModel:
    """Returns the model with other dropout rates, by the names in `RATES`. Rates may be traced."""
    dropout = model.config.dropout
    every: Any = {**_rates(dropout), **rates}
    return model.clone(
        config=dataclasses.replace(
            model.config, dropout=_TracedRates(**every, locked=dropout.locked)
        )
    )


def _rates(dropout: DropoutConfig) -> dict[str, float]:
    """Returns the rates by name. Input and output rates that are None follow the others."""
    rates = {name: getattr(dropout, name) for name in RATES}
    return rates | {"input": dropout.input_rate, "output": dropout.output_rate}


def _unless_all(value: Any, values: Sequence[Any], dtype: Any) -> jax.Array | None:
    return None if set(values) == {value} else jnp.asarray(values, dtype)


def make_ensemble_step(
    model: AnyModel, base: ExperimentConfig
) -> Callable[[Variation, TrainState, Segments], tuple[TrainState, UpdateMetrics]]:
    """Returns a function that makes S updates of each of n members.

    Up to rounding, each member's updates are the same as with `make_train_step` and the member's
    values.

    The function takes the members' values, states with a leading axis n and segments [n, S, B, L].
    """

    def step(
        own: Variation, state: TrainState, segments: Segments
    ) -> tuple[TrainState, UpdateMetrics]:
        member_step = make_train_step(
            with_rates(model, own.dropout) if own.dropout else model,
            make_optimizer(base, peak=own.learning_rate),
            learning_rate(base, peak=own.learning_rate),
            base,
            seed=own.seed,
        )
        return member_step(state, segments)

    return jax.vmap(step)
