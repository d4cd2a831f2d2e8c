"""The members job: several runs that differ in seed, learning rate or dropout, trained at once as one program.

Each is a run like any other, in a folder of its own, with its own log, checkpoints and results: it can be scored,
written with, and gone on with alone. What they share is the program of an update (`txl_jax.training.ensemble`) and the
pace: all of them have made the same number of updates, and if a loss of one is not finite, all stop.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.batches.prefetch import Prefetcher
from txl_jax.data.corpus import Corpus
from txl_jax.errors import NonFiniteError
from txl_jax.jobs import report
from txl_jax.jobs.train import Outcome, Run, training_reader
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.metrics import Totals
from txl_jax.runtime import environment
from txl_jax.runtime.environment import duration
from txl_jax.runtime.files import write_json, write_text
from txl_jax.segments import Segments
from txl_jax.training import ensemble as ensemble_step
from txl_jax.training.loop import Hook, train
from txl_jax.training.progress import check_finite
from txl_jax.training.state import TrainState
from txl_jax.training.step import UpdateMetrics

Member = Mapping[str, float]  # What a run differs in, by dotted name.


def run(
    base: ExperimentConfig,
    members: Sequence[Member],
    corpus: Corpus,
    folder: Path,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Outcome]:
    """Trains all to the end, or until a stop is requested; the same call goes on where that stopped.

    At the end members.md and members.json in `folder` have the scores of all.

    Returns:
      How each ended, by its name.

    Raises:
      ValueError: fewer than two members, two that are alike, a setting in which they cannot differ, more than one
        device; or as `txl_jax.jobs.train.run`.
      NonFiniteError: a loss of one of them was not finite; it is named.
    """
    configs = member_configs(base, members)
    parts = assemble(base, vocab_size=corpus.vocabulary.size)
    if parts.mesh.size != 1:
        raise ValueError(
            f"the mesh has {parts.mesh.size} devices and the members share one; give --mesh.data=1, or start each as a "
            "run of its own"
        )
    text, changes = TextInfo.of(corpus), {}
    workdirs = {name: Workdir(folder / name) for name in configs}
    readers = {name: training_reader(_parts_of(parts, config), corpus) for name, config in configs.items()}
    for name, config in configs.items():
        workdirs[name].check_same_run(config, text)
    with contextlib.ExitStack() as stack:
        for name, config in configs.items():
            stack.enter_context(workdirs[name].create().lock())
            changes[name] = workdirs[name].check_same_run(config, text)
            workdirs[name].record(config, text)
        for line in report.opening(parts, corpus, next(iter(readers.values()))):
            log(line)
        log(f"members   {'; '.join(configs)}: one program, losses in this order")
        runs = {
            name: Run(parts, corpus, readers[name], workdirs[name], stop_requested, label=f"{name}: ")
            for name in configs
        }
        outcomes = _Together(parts, configs, runs, changes, log, stop_requested).run(stack)
    if all(outcome.finished for outcome in outcomes.values()):
        _write(folder, outcomes, corpus, log)
    return outcomes


def member_configs(base: ExperimentConfig, members: Sequence[Member]) -> dict[str, ExperimentConfig]:
    """The config of each member by its name, as "seed=2+learning_rate=0.001".

    Raises:
      ValueError: as `run`.
    """
    if len(members) < 2:
        raise ValueError(f"{len(members)} members were given; give two or more, or start a run of its own")
    for name in sorted({name for member in members for name in member}):
        if name not in ensemble_step.NUMBERS:
            near = config_tree.did_you_mean(name, ensemble_step.NUMBERS)
            raise ValueError(
                f"members cannot differ in {name}{near}; they can in {', '.join(ensemble_step.NUMBERS)}, which change no shape"
            )
    if base.train.patience:
        raise ValueError(
            f"train.patience is {base.train.patience}, and members are trained to the same end; leave it out"
        )
    if base.train.keep_checkpoints < 2:
        raise ValueError(
            f"train.keep_checkpoints is {base.train.keep_checkpoints}, and members that are killed between two saves need "
            "the one before; give at least 2"
        )
    names = [_name(member) for member in members]
    configs = [config_tree.replace(base, dict(member)) for member in members]
    if any(config in configs[:i] for i, config in enumerate(configs)):
        raise ValueError(f"the members are {'; '.join(names)}; two that are alike would be trained twice")
    for config in configs:
        config.validate()
        if not 0 <= config.seed < 2**32:
            raise ValueError(f"a member's seed is {config.seed}; together seeds go from 0 to {2**32 - 1}")
    return dict(zip(names, configs, strict=True))


def _name(member: Member) -> str:
    """Also its folder's: "seed=2+learning_rate=0.001"."""
    return (
        "+".join(f"{name.rpartition('.')[2]}={member[name]}" for name in ensemble_step.NUMBERS if name in member)
        or "base"
    )


def _parts_of(parts: RunComponents, config: ExperimentConfig) -> RunComponents:
    return RunComponents(config, parts.model, parts.optimizer, parts.schedule, parts.mesh)


class _Together:
    """One start of all members."""

    def __init__(
        self,
        parts: RunComponents,
        configs: dict[str, ExperimentConfig],
        runs: dict[str, Run],
        changes: dict[str, list[str]],
        log: Callable[[str], None],
        stop_requested: Callable[[], Any],
    ):
        self.parts = parts
        self.configs = configs
        self.runs = runs
        self.changes = changes
        self.print = log
        self.stop_requested = stop_requested

    def run(self, stack: contextlib.ExitStack) -> dict[str, Outcome]:
        """All of it; logs and checkpoints are open until the stack is closed."""
        for run in self.runs.values():
            stack.enter_context(run.checkpoints())
        step, states, notes = self._restored()
        for name, run in self.runs.items():
            stack.enter_context(run.logging(step, self.changes[name], introduce=False))
        ended = [run.ended_before(step, noted) for run, noted in zip(self.runs.values(), notes, strict=True)]
        for i, (run, noted) in enumerate(zip(self.runs.values(), notes, strict=True)):
            run.begin(noted, shown=False)
            if noted.get("evaluation_pending"):
                states[i] = run.repeat_evaluation(step, states[i])
        pending = any(run.evaluation_pending for run in self.runs.values())
        if step < self.parts.config.train.steps and not pending:
            step, states = self._train(step, states)
        return {
            name: Outcome(True, step, results) if results else run.finish(step, state)
            for (name, run), state, results in zip(self.runs.items(), states, ended, strict=True)
        }

    def _restored(self) -> tuple[int, list[TrainState], list[dict[str, Any]]]:
        """Every member at the newest update that all have a sound checkpoint of. Nothing on disk is changed.

        Raises:
          ValueError: there is none, though some have checkpoints.
        """
        standing = {name: run.latest.latest_step() or 0 for name, run in self.runs.items()}
        init = jax.jit(lambda seed: nn.unbox(ensemble_step.make_init(self.parts.model, self.parts.config)(seed)))
        before = None
        if min(standing.values()) == 0 and max(standing.values()) <= self.parts.config.train.checkpoint_every:
            before = 1  # Killed while the first checkpoints were written: so little is made again.
        while True:
            found = [
                run.restore(lambda seed=self.configs[name].seed: init(seed), before=before)
                for name, run in self.runs.items()
            ]
            steps, states, notes = zip(*found, strict=True)
            if len(set(steps)) == 1:
                return steps[0], list(states), list(notes)
            if min(steps) == 0:
                raise ValueError(
                    f"the members have no checkpoint of the same update (the newest are {standing}); go on with each alone, "
                    "or give another --members_out to train all of them anew"
                )
            before = min(steps) + 1

    def _train(self, step: int, states: list[TrainState]) -> tuple[int, list[TrainState]]:
        span = self.parts.config.train
        state = _stack(states)
        states.clear()  # Else all would be held twice.
        train_step = self._compiled(step, state)
        try:
            with Prefetcher(self._segments, segments_per_call=span.segments_per_call, steps=span.steps) as segments:
                step, state = train(
                    state,
                    train_step,
                    segments,
                    first_step=step,
                    steps=span.steps,
                    segments_per_call=span.segments_per_call,
                    progress=self,
                    hooks=[Hook(span.eval_every, self._evaluate), Hook(span.checkpoint_every, self._save)],
                    stop_requested=self.stop_requested,
                )
        except NonFiniteError as error:
            kept = next(iter(self.runs.values())).kept
            raise NonFiniteError(
                f"{error}; {kept}. Leave that --member out, and the others go on from there; or give it a lower "
                "learning rate"
            ) from None
        return step, self._each(state)

    def _compiled(
        self, step: int, state: TrainState
    ) -> Callable[[TrainState, Segments], tuple[TrainState, UpdateMetrics]]:
        """The update of all; the numbers that they differ in are arrays that the compiled program is given."""
        began = time.monotonic()
        changes = (config_tree.differences(self.parts.config, config) for config in self.configs.values())
        names = sorted({leaf.name for changed in changes for leaf, *_ in changed})
        numbers = {
            name: jnp.asarray(
                [_number(config, name) for config in self.configs.values()], "uint32" if name == "seed" else float
            )
            for name in names
        }
        together_step = jax.jit(ensemble_step.make_step(self.parts.model, self.parts.config), donate_argnums=1)
        segments = self._segments(step, self.parts.config.train.segments_per_call)
        compiled = together_step.lower(numbers, state, segments).compile()
        self.exclude(time.monotonic() - began)
        return lambda state, segments: compiled(numbers, state, segments)

    def _segments(self, first: int, count: int) -> Segments:
        """[n, S, B, L]"""
        each = [run.reader.segments(first, count) for run in self.runs.values()]
        return jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *each)

    # What the loop asks of progress.

    def update(self, first_step: int, metrics: UpdateMetrics) -> None:
        """Takes the metrics [n, S]; says one line for all."""
        runs = list(self.runs.items())
        for i, (name, run) in enumerate(runs):
            own = jax.tree.map(lambda metric, i=i: metric[i], metrics)
            try:
                check_finite(first_step, own)
            except NonFiniteError as error:
                raise NonFiniteError(f"{name}: {error}") from None
            run.progress.update(first_step, own)
        done, told = first_step + metrics.nats.shape[1], runs[0][1].progress.reported
        if told.get("step") == done:
            losses = "  ".join(f"{run.progress.reported['loss']:.4f}" for _, run in runs)
            rate = told["tokens_per_second"] * len(runs)
            steps = self.parts.config.train.steps
            self.print(
                f"step {done:>{len(str(steps))}}/{steps}  losses {losses}  {rate:,.0f} tokens/s together  "
                f"ETA {duration(told['remaining'])}"
            )

    def exclude(self, seconds: float) -> None:
        """Leaves time spent on something else out of the next tokens/s."""
        for run in self.runs.values():
            run.progress.exclude(seconds)

    def _evaluate(self, step: int, state: TrainState) -> TrainState:
        each = self._each(state)
        after = [run.evaluate(step, own) for run, own in zip(self.runs.values(), each, strict=True)]
        began = any(a is not b for a, b in zip(each, after, strict=True))  # The mean of a member's weights.
        return _stack(after) if began else state

    def _save(self, step: int, state: TrainState) -> None:
        for run, own in zip(self.runs.values(), self._each(state), strict=True):
            run.save(step, own)

    def _each(self, state: TrainState) -> list[TrainState]:
        return [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(len(self.runs))]


def _number(config: ExperimentConfig, name: str) -> float:
    """A setting as the program takes it: rates that stand for another are spelt out."""
    spelt_out = {
        "model.dropout.input": config.model.dropout.input_rate,
        "model.dropout.output": config.model.dropout.output_rate,
    }
    return spelt_out.get(name, config_tree.get(config, name))


def _stack(states: Sequence[TrainState]) -> TrainState:
    return jax.jit(lambda *each: jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))(*states)


def _write(folder: Path, outcomes: dict[str, Outcome], corpus: Corpus, log: Callable[[str], None]) -> None:
    """The scores of all members, and what each line means."""
    measure = corpus.vocabulary.measure
    results = {name: outcome.results for name, outcome in outcomes.items()}
    path = folder / "members.json"
    if path.exists() and json.loads(path.read_text()) == results:
        log(f"results   {folder / 'members.md'}")
        return
    write_json(folder / "members.json", results)
    lines = [
        f"{corpus.description}; {environment.describe()['device']}, {environment.describe()['date']}; the test text was scored "
        "with the parameters of the best validation.",
        "",
        f"| member | best valid {measure} | after updates | test {measure} |",
        "|---|---|---|---|",
    ]
    for name, result in results.items():
        best, test = result["best_valid"], result["test"]
        told = [Totals(scores["loss"], 1).told(measure).split()[-1] if scores else "" for scores in (best, test)]
        lines.append(f"| {name} | {told[0]} | {best['step'] if best else result['steps']:,} | {told[1]} |")
    write_text(folder / "members.md", "\n".join(lines) + "\n")
    log(f"\n{(folder / 'members.md').read_text()}\nresults   {folder / 'members.md'}")
