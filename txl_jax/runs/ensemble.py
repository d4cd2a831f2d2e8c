"""The ensemble job: runs that differ in seed, learning rate or dropout, trained as one run with a leading member axis.

There is one workdir, one program of an update (`txl_jax.training.ensemble`) and one checkpoint, whose arrays have the
member axis; the best parameters are kept per member, and records name their member. All members have made the same
number of updates. If a loss of one is not finite, all stop.

A member can be scored, sampled and exported alone (`Run.read(path, member=NAME)`, `--ensemble_member=NAME`), and
`split_off` makes it a run of its own.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.errors import CheckpointError, UserError
from txl_jax.metrics import Measure, Totals
from txl_jax.runs import train
from txl_jax.runs.build import Built, Compilation, build_for
from txl_jax.runs.run import RESULTS, Run, member_name, read_results
from txl_jax.runs.trainer import Outcome
from txl_jax.runs.weights import load_state
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.log import METRICS, read_metrics, replace_appended
from txl_jax.runtime.sinks import Sink
from txl_jax.training import ensemble as ensemble_step
from txl_jax.training.ensemble import Members
from txl_jax.training.hooks import Hook
from txl_jax.training.step import TrainState, init_params, init_state

Member = Mapping[str, float]  # The settings that differ from the base, by dotted name.


def train_members(
    base: ExperimentConfig,
    members: Sequence[Member],
    corpus: Corpus,
    run: Run,
    *,
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    profile_steps: tuple[int, int] | None = None,
    stop_requested: Callable[[], Any] = lambda: False,
) -> Outcome:
    """Trains all members to the end, or until a stop is requested; the same call resumes where that stopped.

    results.json has an object `members` with the scores of each, and members.md has them as a table.

    Args:
      hooks: As in `train_run`, like the other arguments. States have the member axis.

    Raises:
      UserError: If there are fewer than two members, two are equal, they differ in a setting in which they cannot, or
        there is more than one device; and as `train_run`.
      NonFiniteError: If a member's loss was not finite. The message names the member.
    """
    train.check_requests(base, hooks, profile_steps)
    members = [_in_order(member) for member in members]
    configs = member_configs(base, members)
    run.compare(base, members)
    built = Ensemble.of(build_for(base, corpus.vocabulary, recorded=run.attention_for(base)), configs)
    if built.mesh.size != 1:
        raise UserError(
            f"the mesh has {built.mesh.size} devices and the members of an ensemble share one; give "
            "--mesh.data=1, or train each as a run of its own"
        )
    readers = [train.training_reader(built, corpus, config.seed) for config in configs.values()]
    outcome = train.begin_and_train(
        built,
        corpus,
        run,
        readers,
        members=members,
        opening=[f"ensemble  {'; '.join(configs)}: one program, losses in this order"],
        hooks=hooks,
        sinks=sinks,
        profile_steps=profile_steps,
        stop_requested=stop_requested,
    )
    if outcome.results is not None:
        print(f"table     {_write_table(run.path, outcome.results, corpus.vocabulary.measure)}", flush=True)
    return outcome


@dataclasses.dataclass(frozen=True)
class Ensemble(Built):
    """The model and functions of the base, with the step and the first state of all members at once."""

    configs: Mapping[str, ExperimentConfig] = dataclasses.field(default_factory=dict)  # By member.

    @classmethod
    def of(cls, base: Built, configs: Mapping[str, ExperimentConfig]) -> "Ensemble":
        """Returns an ensemble of members with these configs, which differ from the base's as `member_configs` says."""
        return cls(base.config, base.model, base.optimizer, base.schedule, base.mesh, base.attention, configs)

    @property
    def members(self) -> Members:
        """Members of the ensemble."""
        return Members(tuple(self.configs))

    def init_state(self, begin: Callable[[Any], TrainState] | None = None) -> TrainState:
        """As in `Built`, for all members; `begin` makes the state of one."""

        # Each member is initialized by itself, so that its parameters are, bit for bit, those of a run of its own.
        @jax.jit
        def params_of(seed: jax.Array) -> Any:
            return nn.unbox(init_params(self.model, jax.random.key(seed)))

        @jax.jit
        def state_of(seed: jax.Array) -> Any:
            params = init_params(self.model, jax.random.key(seed))
            return nn.unbox(init_state(self.model, self.optimizer, self.config, params))

        seeds = [jnp.asarray(config.seed, jnp.uint32) for config in self.configs.values()]
        states = [state_of(seed) if begin is None else begin(params_of(seed)) for seed in seeds]
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.members.abstract(self.abstract_state))
        placed: TrainState = jax.device_put(self.members.stack(states), shardings)
        return placed

    def compile_step(self) -> Compilation:
        """As in `Built`, for all members."""
        variation = ensemble_step.Variation.of(self.config, list(self.configs.values()))
        abstract_state = self.members.abstract(self.abstract_state)
        segments = self.members.abstract(self.abstract_segments(self.config.train))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state), None
        step = ensemble_step.make_ensemble_step(self.model, self.config)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=shardings)
        compilation = Compilation.of(jitted.lower(variation, abstract_state, segments))
        return compilation._replace(program=functools.partial(compilation.program, variation))


def member_configs(base: ExperimentConfig, members: Sequence[Member]) -> dict[str, ExperimentConfig]:
    """Returns the config of each member by its name, as "seed=2+learning_rate=0.001"; raises as `train_members`."""
    if len(members) < 2:
        raise UserError(f"{len(members)} members were given; give two or more, or train a run of its own")
    for name in sorted({name for member in members for name in member}):
        if name not in ensemble_step.VARYING:
            near = config_tree.did_you_mean(name, ensemble_step.VARYING)
            raise UserError(
                f"members cannot differ in {name}; they can in {', '.join(ensemble_step.VARYING)}, which change no "
                f"shape{near}"
            )
    if base.train.patience:
        raise UserError(
            f"train.patience is {base.train.patience}, and the members of an ensemble are trained to the same end; "
            "leave it out"
        )
    names = [member_name(_in_order(member)) for member in members]
    configs = [config_tree.replace(base, dict(member)) for member in members]
    if any(config in configs[:i] for i, config in enumerate(configs)):
        raise UserError(f"the members are {'; '.join(names)}; two that are alike would be trained twice")
    for config in configs:
        config.validate()
        if not 0 <= config.seed < 2**32:
            raise UserError(f"a member's seed is {config.seed}; in an ensemble seeds go from 0 to {2**32 - 1}")
    return dict(zip(names, configs, strict=True))


def _in_order(member: Member) -> dict[str, float]:
    """Sorts the differences of a member, so that its name does not depend on their order."""
    return {name: member[name] for name in (*ensemble_step.VARYING, *member) if name in member}


def _write_table(folder: str, results: Mapping[str, Any], measure: Measure) -> str:
    """Writes members.md: the scores of all members, and the facts that a number needs beside it."""
    lines = [
        (
            f"{results['text']}; {results['device']}, {results['date']}; the test text was scored with the parameters "
            "of the best validation."
        ),
        "",
        f"| member | best valid {measure} | after updates | test {measure} |",
        "|---|---|---|---|",
    ]
    for name, found in results["members"].items():
        best, test = found["best_valid"], found["test"]
        valid = _value(best, measure) if best else ""
        lines.append(f"| {name} | {valid} | {test['step']:,} | {_value(test, measure)} |")
    path = os.path.join(folder, "members.md")
    storage.write(path, ("\n".join(lines) + "\n").encode())
    return path


def _value(scores: Mapping[str, float], measure: Measure) -> str:
    return Totals(scores["loss"], 1).format(measure).split()[-1]


def split_off(workdir: str, member: str, target: str) -> None:
    """Copies a member of an ensemble into a workdir of its own, with its config, state, best parameters and records.

    The state equals the ensemble's, bit for bit, and from there on the ordinary training job resumes it. It then uses
    the unbatched program, whose updates agree with the ensemble's up to rounding.

    Raises:
      UserError: If the member does not exist or has no checkpoint yet, or `target` contains a run.
      CheckpointError: If the checkpoints cannot be read.
    """
    source = Run.read(workdir, member=member)
    with Run.open(target) as made:
        made.claim()
        built = build_for(source.config, source.text.vocabulary)
        restored = load_state(built, source, log=print)
        if restored is None:
            raise UserError(f"{workdir} has no checkpoint yet; train it first")
        step, state, notes = restored
        members = Members(source.member_names)
        own = members.from_json(notes["running_totals"])[members.names.index(member)]
        _save(made.latest, step, state, notes | {"running_totals": own})
        _copy_best(source, made, built.abstract_state.params)
        records = [record for record in read_metrics(source.path) if record.get("member") == member]
        for record in records:
            del record["member"]
        replace_appended(os.path.join(made.path, METRICS), [json.dumps(record) + "\n" for record in records])
        if results := read_results(source.path, member):
            storage.write_json(os.path.join(made.path, RESULTS), results)
        made.weights = source.weights
        # Last: without config.json the folder holds no run.
        made.record(source.config, source.text, attention=source.attention)
    print(f"split off {member} after step {step}: {target}")


def _copy_best(source: Run, made: Run, abstract_params: Any) -> None:
    try:
        with Checkpointer(source.best, keep=1, log=print) as best:
            restored = best.restore({"params": abstract_params})
    except CheckpointError as error:
        print(f"{error}; the member goes on without its best parameters so far")
        return
    if restored is not None:
        _save(made.best, *restored)


def _save(folder: str, step: int, state: Any, notes: dict[str, Any]) -> None:
    with Checkpointer(folder, keep=1, log=print) as checkpoints:
        checkpoints.save(step, state, notes)
