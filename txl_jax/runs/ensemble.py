"""Ensembles of runs that are trained as one run with a leading member axis.

The runs differ in seed, learning rate or dropout.

There is one workdir, one compiled training step (`txl_jax.training.member_axis`) and one
checkpoint, whose arrays have the member axis. The best parameters are kept per member, and records
name their member. `train_run` trains them. All members have made the same number of updates. If a
loss of one is not finite, all stop. Any member can be scored, sampled and exported by its name
(`--ensemble_member=NAME`), and `split_off` makes it a separate run.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.errors import UserError
from txl_jax.runs.build import Built, Compilation, build_for
from txl_jax.runs.run import RESULTS, MemberSettings, Run, member_name, read_results
from txl_jax.runs.trained import load_state
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.log import METRICS, read_metrics, replace_appended
from txl_jax.runtime.output import say
from txl_jax.training import member_axis
from txl_jax.training.step import TrainState, init_params


class Ensemble(Built):
    """The base's model and functions, with the step and first state of all ensemble members.

    The step and the first state are for all members at once.
    """

    @classmethod
    def of(cls, base: Built, members: MemberSettings) -> "Ensemble":
        """Returns the ensemble of these members.

        Raises `UserError` if it cannot be trained as one.
        """
        configs = member_configs(base.config, members)
        size = base.mesh.size
        require(
            size == 1,
            f"an ensemble must train on one device, got a mesh of {size}. Pass --mesh.data=1.",
        )
        return cls(
            base.config,
            base.model,
            base.optimizer,
            base.schedule,
            base.mesh,
            base.attention,
            configs,
        )

    def init_state(self, warm_state: Callable[[Any], TrainState] | None = None) -> TrainState:
        """Like `Built.init_state`, for all members. `warm_state` makes one member's state."""

        # Each member is initialized by itself, so that its parameters are, bit for bit, those of a
        # run of its own.
        @jax.jit
        def params_of(seed: jax.Array) -> Any:
            return nn.unbox(init_params(self.model, jax.random.key(seed)))

        state_of = warm_state or self.state_from_params
        states = [
            state_of(params_of(jnp.asarray(config.seed, jnp.uint32)))
            for config in self.configs.values()
        ]
        shardings = jax.tree.map(
            lambda leaf: leaf.sharding, self.members.abstract(self.abstract_state)
        )
        return jax.device_put(self.members.stack(states), shardings)

    def compile_step(self) -> Compilation:
        """Like `Built.compile_step`, for all members."""
        variation = member_axis.Variation.of(self.config, list(self.configs.values()))
        abstract_state = self.members.abstract(self.abstract_state)
        segments = self.members.abstract(self.abstract_segments(self.config.train))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state), None
        step = member_axis.make_ensemble_step(self.model, self.config)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=shardings)
        compilation = Compilation.of(jitted.lower(variation, abstract_state, segments))
        return compilation._replace(program=functools.partial(compilation.program, variation))


def member_configs(base: ExperimentConfig, members: MemberSettings) -> dict[str, ExperimentConfig]:
    """Returns the config of each member by its name, as "seed=2+learning_rate=0.001".

    Checks them.
    """
    require(len(members) > 1, f"an ensemble must have at least two members, got {len(members)}")
    for name in sorted({name for member in members for name in member}):
        suggestion = config_tree.did_you_mean(name, member_axis.VARYING)
        require(
            name in member_axis.VARYING,
            f"ensemble members cannot differ in {name}, only in "
            f"{', '.join(member_axis.VARYING)}{suggestion}",
        )
    base.expect(
        not base.train.patience,
        "train.patience",
        "all members train for the same number of steps, so omit it",
    )
    names = [member_name(in_order(member)) for member in members]
    configs = [config_tree.replace(base, dict(member)) for member in members]
    alike = any(config in configs[:i] for i, config in enumerate(configs))
    require(not alike, f"ensemble members must differ, got {'; '.join(names)}")
    for config in configs:
        config.validate()
        require(
            0 <= config.seed < 2**32,
            f"seeds of an ensemble must be 0 to {2**32 - 1}, got {config.seed}",
        )
    return dict(zip(names, configs, strict=True))


def in_order(member: Mapping[str, float]) -> dict[str, float]:
    """Sorts the differences of a member, so that its name does not depend on their order."""
    return {name: member[name] for name in (*member_axis.VARYING, *member) if name in member}


def split_off(workdir: str, member: str, target: str) -> None:
    """Copies an ensemble member into a new workdir, where ordinary training resumes it.

    The state equals the ensemble's, bit for bit. Updates from there agree with the ensemble's up to
    rounding. Raises `UserError` if the member or its checkpoint does not exist, or `target`
    contains a run.
    """
    source = Run.read(workdir, member=member)
    with Run.open(target) as made:
        made.claim()
        restored = load_state(
            build_for(source.config, source.text.vocabulary, uses=()), source, log=say
        )
        if restored is None:
            raise UserError(f"{workdir} has no checkpoint yet. Train it first.")
        step, state, notes = restored
        notes |= {"running_totals": notes["running_totals"][member]}
        with Checkpointer(made.latest, keep=1, log=say) as latest:
            latest.save(step, state, notes)
        for path in storage.files_below(source.best):
            copy = os.path.join(made.best, path.removeprefix(f"{source.best}/"))
            storage.make_folder(os.path.dirname(copy))
            storage.write(copy, storage.read(path))
        records = [record for record in read_metrics(source.path) if record.get("member") == member]
        for record in records:
            del record["member"]
        replace_appended(
            os.path.join(made.path, METRICS), [json.dumps(record) + "\n" for record in records]
        )
        if results := read_results(source.path, member):
            storage.write_json(os.path.join(made.path, RESULTS), results)
        made.warm_start = source.warm_start
        # Last: without config.json the folder holds no run.
        made.record(source.config, source.text, attention=source.attention)
    say(f"split off {member} after step {step}: {target}")
