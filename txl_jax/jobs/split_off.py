"""Splitting a member off an ensemble: a workdir of its own, which the ordinary training job resumes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.assemble import assemble
from txl_jax.errors import CheckpointError, UserError
from txl_jax.jobs.restore import load_state
from txl_jax.jobs.workdir import Workdir
from txl_jax.runtime.append_file import replace_appended
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.files import write_json
from txl_jax.runtime.metrics_log import METRICS, read_metrics
from txl_jax.training.results import RESULTS


def split_off(workdir: Path, member: str, target: Path, *, log: Callable[[str], None] = print) -> Workdir:
    """Copies a member of an ensemble into a workdir of its own, with its config, state, best parameters and records.

    The state is that of the ensemble, bit for bit, and from there on it is an ordinary run. Its updates are then those
    of the unbatched program, which agree with the ensemble's up to rounding.

    Raises:
      UserError: there is no such member, it has no checkpoint yet, or `target` holds a run.
      CheckpointError: the checkpoints cannot be read.
    """
    source, made = Workdir(workdir, member), Workdir(target)
    config, text = source.load()
    index, members = source.member_index(), source.members()
    if made.holds_run():
        raise UserError(f"{target} holds a run already; give another folder with --to=PATH")
    components = assemble(config, vocab_size=text.vocabulary.size)
    restored = load_state(components, source, log=log)
    if restored is None:
        raise UserError(f"{workdir} has no checkpoint yet; train it first")
    step, state, notes = restored
    with made.create().lock():
        own_notes = notes | {"running_totals": members.from_json(notes["running_totals"])[index]}
        _save(made.latest, step, state, own_notes, log)
        _copy_best(source, made, components.training.abstract_state.params, log)
        records = [record for record in read_metrics(workdir) if record.get("member") == member]
        replace_appended(target / METRICS, [json.dumps(_without_member(record)) + "\n" for record in records])
        _copy_results(source, made, member)
        # Last: without config.json the folder holds no run.
        made.record(
            config,
            text,
            attention=source.attention(config),
            warm_start=source.read().warm_start,
        )
    log(f"split off {member} after step {step}: {target}")
    return made


def _copy_best(source: Workdir, made: Workdir, abstract_params: Any, log: Callable[[str], None]) -> None:
    try:
        with Checkpointer(source.best, keep=1, log=log) as best:
            restored = best.restore({"params": abstract_params})
    except CheckpointError as error:
        log(f"{error}; the member goes on without its best parameters so far")
        return
    if restored is not None:
        step, tree, notes = restored
        _save(made.best, step, tree, notes, log)


def _save(folder: Path, step: int, state: Any, notes: dict[str, Any], log: Callable[[str], None]) -> None:
    with Checkpointer(folder, keep=1, log=log) as checkpoints:
        checkpoints.save(step, state, notes)


def _without_member(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "member"}


def _copy_results(source: Workdir, made: Workdir, member: str) -> None:
    """Writes results.json of the member, in the form and order of a run by itself."""
    try:
        results = json.loads((source.path / RESULTS).read_text())
        own = results["members"][member]
    except (OSError, ValueError, KeyError, TypeError):  # It has not ended, or the file is damaged.
        return
    flat: dict[str, Any] = {}
    for name, value in results.items():
        flat |= own if name == "members" else {name: value}
    write_json(made.path / RESULTS, flat)
