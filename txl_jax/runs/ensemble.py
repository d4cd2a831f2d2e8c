"""Ensembles: runs that are trained together, as one run with a leading member axis.

The runs differ in seed, learning rate or dropout. `train_run` trains them.

- The runs share one workdir, one compiled training step (`txl_jax.training.member_axis`) and one
  checkpoint, whose arrays have the member axis.
- The best parameters are kept per member, and records name their member.
- All members have made the same number of updates. If the loss of a member is not finite, all stop.
- Any member can be scored, sampled and exported by its name (`--ensemble_member=NAME`), and
  `split_off` makes it a separate run.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.errors import UserError
from txl_jax.runs.build import Built, build_for, shardings_of
from txl_jax.runs.run import RESULTS, MemberSettings, Run, member_name, read_results
from txl_jax.runs.trained import load_state
from txl_jax.runtime import storage
from txl_jax.runtime.appended_text import replace_appended
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.log import METRICS, read_metrics
from txl_jax.runtime.output import say
from txl_jax.training import member_axis
from txl_jax.training.step import TrainState, init_params


class Ensemble(Built):
    """The model and functions that all members share, with the step and first state of all members.

    `config` is the base from which the members differ, and `configs` has each member's config.
    """

    @classmethod
    def of(cls, base: Built, members: MemberSettings) -> "Ensemble":
        """Returns the ensemble of these members.

        Raises:
          UserError: If the members cannot be trained together.
        """
        configs = member_configs(base.config, members)
        n_device = base.mesh.size
        require(
            n_device == 1,
            f"an ensemble must train on one device, got a mesh of {n_device}. Pass --mesh.data=1.",
        )
        return cls(
            config=base.config,
            model=base.model,
            mesh=base.mesh,
            attention=base.attention,
            remat=base.remat,
            configs=configs,
        )

    def init_state(self, warm_state: Callable[[Any], TrainState] | None = None) -> TrainState:
        """Like `Built.init_state`, for all members. `warm_state` creates one member's state."""

        @jax.jit
        def params_of(seed: jax.Array) -> Any:
            return init_params(self.model, jax.random.key(seed))

        # Members are initialized one after the other, so that each has the parameters of a separate
        # run, bit for bit.
        states = []
        state_from_params = warm_state or self.state_from_params
        for config in self.configs.values():
            params = params_of(jnp.asarray(config.seed, jnp.uint32))
            states.append(state_from_params(params))

        shardings = shardings_of(self.members.abstract(self.abstract_state))
        return jax.device_put(self.members.stack(states), shardings)

    def lower_step(self) -> jax.stages.Lowered:
        """Like `Built.lower_step`, for all members."""
        abstract_state = self.members.abstract(self.abstract_state)
        abstract_segments = self.members.abstract(self.abstract_segments(self.config.train))
        step = member_axis.make_ensemble_step(self.model, self.config)

        # The state must keep its shardings, otherwise the next call would reject it.
        out_shardings = (shardings_of(abstract_state), None)
        jitted = jax.jit(step, donate_argnums=2, out_shardings=out_shardings)
        return jitted.lower(*self.step_values(), abstract_state, abstract_segments)

    def step_values(self) -> tuple[Any, ...]:
        """Returns the lengths of the schedule, which members share, and their different values."""
        variation = member_axis.Variation.of(self.config, list(self.configs.values()))
        return (*super().step_values(), variation)


def member_configs(base: ExperimentConfig, members: MemberSettings) -> dict[str, ExperimentConfig]:
    """Returns the checked config of each member by its name, such as "seed=2+learning_rate=0.001".

    Raises:
      UserError: If there are fewer than two members, two are the same, or the settings cannot be
        trained as an ensemble.
    """
    require(len(members) > 1, f"an ensemble must have at least two members, got {len(members)}")
    settings: set[str] = set().union(*members)
    for setting in sorted(settings):
        suggestion = config_tree.did_you_mean(setting, member_axis.VARYING)
        require(
            setting in member_axis.VARYING,
            f"ensemble members cannot differ in {setting}, only in "
            f"{', '.join(member_axis.VARYING)}{suggestion}",
        )
    base.expect(
        not base.train.patience,
        "train.patience",
        "all members train for the same number of steps, so omit it",
    )

    names = [member_name(in_order(member)) for member in members]
    configs = [config_tree.replace(base, dict(member)) for member in members]
    for index, config in enumerate(configs):
        is_new = config not in configs[:index]
        require(is_new, f"ensemble members must differ, got {'; '.join(names)}")
    for config in configs:
        config.validate()
        require(
            0 <= config.seed < 2**32,
            f"seeds of an ensemble must be 0 to {2**32 - 1}, got {config.seed}",
        )
    return dict(zip(names, configs, strict=True))


def in_order(member: Mapping[str, float]) -> dict[str, float]:
    """Sorts the differences of a member, so that its name does not depend on their order."""
    names = (*member_axis.VARYING, *member)
    return {name: member[name] for name in names if name in member}


def split_off(workdir: str, member: str, target: str) -> None:
    """Copies an ensemble member into a new workdir, where ordinary training resumes it.

    The state equals the ensemble's, bit for bit. Updates from there agree with the ensemble's up to
    rounding.

    Raises:
      UserError: If the member or its checkpoint does not exist, or `target` contains a run.
    """
    source = Run.read(workdir, member=member)
    with Run.open(target) as run:
        run.claim()
        step = _copy_latest(source, member, run)
        _copy_best(source, run)
        _copy_records(source, member, run)
        results = read_results(source.path, member)
        if results:
            storage.write_json(os.path.join(run.path, RESULTS), results)

        # Written last, because a directory without config.json is not a run.
        run.warm_start = source.warm_start
        run.dropout_masks = source.dropout_masks
        run.record(source.config, source.text, attention=source.attention, remat=source.remat)
    say(f"split off {member} after step {step}: {target}")


def _copy_latest(source: Run, member: str, target: Run) -> int:
    """Copies the member's state from the latest checkpoint, and returns its step."""
    built = build_for(source.config, source.text.vocabulary, uses=())
    restored = load_state(built, source, log=say)
    if restored is None:
        raise UserError(f"{source.path} has no checkpoint yet. Train it first.")
    step, state, notes = restored
    # All other notes (`TrainNotes`) are the same, even those that only a later version knows.
    notes["running_totals"] = notes["running_totals"][member]
    with Checkpointer(target.latest, keep=1, log=say) as latest:
        latest.save(step, state, notes)
    return step


def _copy_best(source: Run, target: Run) -> None:
    """Copies the checkpoint of the member's best parameters, if there is one."""
    for path in storage.files_below(source.best):
        copy = os.path.join(target.best, path.removeprefix(f"{source.best}/"))
        storage.make_folder(os.path.dirname(copy))
        storage.write(copy, storage.read(path))


def _copy_records(source: Run, member: str, target: Run) -> None:
    """Copies the member's records, without its name."""
    lines = []
    for record in read_metrics(source.path):
        if record.get("member") == member:
            del record["member"]
            lines.append(json.dumps(record) + "\n")
    replace_appended(os.path.join(target.path, METRICS), lines)
