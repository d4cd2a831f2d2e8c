"""Ensemble members and their training step: multiple runs vmapped into one.

A small model leaves an accelerator idle, because its time goes into starting kernels. With
`jax.vmap` over a leading member axis, each kernel does the work of all members. The settings in
which members differ change no shape: they are passed as arrays, next to the config that members
share.
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
from txl_jax.training.optimizer import ScheduleLengths, learning_rate, make_optimizer
from txl_jax.training.step import TrainState, UpdateMetrics, make_train_step

SEED = "seed"
LEARNING_RATE = "optimizer.learning_rate"
# Dropout rates by the fields of `DropoutConfig`.
RATES = tuple(field.name for field in dataclasses.fields(DropoutConfig) if field.name != "locked")
# Settings in which members may differ: they change no shape, and nothing that evaluation reads.
VARYING = (SEED, LEARNING_RATE, *(f"model.dropout.{name}" for name in RATES))

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Members:
    """The members of an ensemble by name.

    Without names it is a single run: the only member, without a member axis. Loops over `labels`
    work for both.
    """

    names: tuple[str, ...] = ()  # In the order of the axis.

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The names, or a single None for a single run."""
        return self.names or (None,)

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, tree: Any) -> list[Any]:
        """Returns the tree of each member: leaves [n, ...] -> n trees of leaves [...]."""
        return [self.take(tree, index) for index in range(len(self))]

    def take(self, tree: Any, index: int) -> Any:
        """Returns the tree of one member."""
        if not self.names:
            return tree
        return jax.tree.map(lambda leaf: leaf[index], tree)

    def stack(self, trees: Sequence[Any]) -> Any:
        """Inverts `split`, for arrays on the host or on devices."""
        if not self.names:
            return trees[0]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def abstract(self, tree: Any) -> Any:
        """Adds the axis to a tree of `jax.ShapeDtypeStruct` with shardings."""
        if not self.names:
            return tree

        def with_axis(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((len(self), *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(with_axis, tree)

    def to_json(self, values: Sequence[T]) -> Any:
        """Returns one value per member as an object by name, or a single run's only value."""
        if not self.names:
            return values[0]
        return dict(zip(self.names, values, strict=True))

    def from_json(self, stored: Any) -> list[Any]:
        """Inverts `to_json`. None, if nothing was stored, gives None for each member."""
        if stored is None:
            return [None] * len(self)
        if not self.names:
            return [stored]
        return [stored[name] for name in self.names]

    def prefix(self, index: int) -> str:
        """Returns the beginning of a line about one member: "seed=2: ", or nothing."""
        if not self.names:
            return ""
        return f"{self.names[index]}: "


class Variation(NamedTuple):
    """The values in which members differ from their base.

    There is an array [n] for each setting in which members differ.
    """

    # uint32 seeds of initial parameters and dropout, or None if all have the base's seed.
    seed: jax.Array | None
    # Peak learning rates, or None if all have the base's.
    learning_rate: jax.Array | None
    # Dropout rates by the names in `RATES`, without those that all share with the base.
    dropout: dict[str, jax.Array]

    @classmethod
    def of(cls, base: ExperimentConfig, configs: Sequence[ExperimentConfig]) -> "Variation":
        """Returns the values of members with these configs."""
        seeds = [config.seed for config in configs]
        peaks = [config.optimizer.learning_rate for config in configs]
        base_rates = _rates(base.model.dropout)
        member_rates = [_rates(config.model.dropout) for config in configs]

        dropout = {}
        for name in RATES:
            rates = [rates_by_name[name] for rates_by_name in member_rates]
            varying = _unless_all(base_rates[name], rates, float)
            if varying is not None:
                dropout[name] = varying
        return cls(
            seed=_unless_all(base.seed, seeds, jnp.uint32),
            learning_rate=_unless_all(base.optimizer.learning_rate, peaks, float),
            dropout=dropout,
        )


def _unless_all(base_value: Any, values: Sequence[Any], dtype: Any) -> jax.Array | None:
    """Returns the members' values as an array, or None if all are the base's."""
    if set(values) == {base_value}:
        return None
    return jnp.asarray(values, dtype)


class _TracedRates(DropoutConfig):
    """Dropout rates that may be traced."""

    def __post_init__(self) -> None:
        """Converts nothing: a traced rate is not a float."""


def with_rates(model: AnyModel, rates: Mapping[str, jax.Array]) -> AnyModel:
    """Returns the model with other dropout rates, by the names in `RATES`. Rates may be traced."""
    dropout = model.config.dropout
    all_rates: dict[str, Any] = {**_rates(dropout), **rates}
    traced = _TracedRates(**all_rates, locked=dropout.locked)
    return model.clone(config=dataclasses.replace(model.config, dropout=traced))


def _rates(dropout: DropoutConfig) -> dict[str, float]:
    """Returns the rates by name. Input and output rates that are None follow the others."""
    rates = {name: getattr(dropout, name) for name in RATES}
    return rates | {"input": dropout.input_rate, "output": dropout.output_rate}


def make_ensemble_step(
    model: AnyModel, base: ExperimentConfig
) -> Callable[[ScheduleLengths, Variation, TrainState, Segments], tuple[TrainState, UpdateMetrics]]:
    """Returns a function that makes S updates of each of n members.

    Up to rounding, each member's updates are the same as with `make_train_step` and the member's
    values.

    The function takes the schedule's lengths, which members share, the members' values, states with
    a leading axis n and segments [n, S, B, L]. It returns the states and metrics [n, S].
    """

    def member_updates(
        lengths: ScheduleLengths, variation: Variation, state: TrainState, segments: Segments
    ) -> tuple[TrainState, UpdateMetrics]:
        # Below vmap, each value of the variation is one member's scalar.
        member_model = with_rates(model, variation.dropout) if variation.dropout else model
        peak = variation.learning_rate
        train_step = make_train_step(
            member_model,
            make_optimizer(base, peak=peak, lengths=lengths),
            learning_rate(base, peak=peak, lengths=lengths),
            base,
            seed=variation.seed,
        )
        return train_step(state, segments)

    return jax.vmap(member_updates, in_axes=(None, 0, 0, 0))
