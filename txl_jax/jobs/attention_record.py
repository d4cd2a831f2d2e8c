"""The record in config.json of the implementations of attention that a run uses.

`auto` may choose another one later: on another device, or with another version of this code. Numbers of two
implementations agree up to rounding only, so a resumed run keeps the recorded one and stays equal bit for bit.

    "attention": {"training": "tiled 128x256", "evaluation": "tiled 80x512"}
"""

import json
from collections.abc import Mapping

from txl_jax.attention_choice import AttentionChoice, Chosen
from txl_jax.config import EvalConfig, ExperimentConfig
from txl_jax.ops.attention import Implementation, Implementations
from txl_jax.runtime import distributed

Record = Mapping[str, str]  # "training" and "evaluation" to their implementations; one may be missing.

# Runs without a record were trained with the reference, when there was nothing else.
UNRECORDED: Record = {"training": "reference"}
# Settings that the choice for evaluation depends on.
_EVALUATION = ("batch_size", "segment_len", "mem_len", "clamp_len", "same_length", "cache_dtype")


def to_json(choice: AttentionChoice | None) -> dict[str, str]:
    """Returns the record of a choice; empty if the network has no attention."""
    return {name: str(chosen.implementation) for name, chosen in _by_name(choice).items()}


def check(record: Record) -> Record:
    """Returns a record as it was read; raises `ValueError` if it is damaged."""
    for name in record:
        Implementation.parse(record[name])
    return record


def kept(record: Record, old: ExperimentConfig, new: ExperimentConfig) -> dict[str, str]:
    """Returns the part of a record that a start with these settings keeps.

    Nothing if `model.attention` was changed; that of evaluation only for the lengths that it was chosen for.
    """
    if old.model.attention is not new.model.attention:
        return {}
    same = _lengths(old.eval) == _lengths(new.eval)
    return {name: text for name, text in record.items() if same or name != "evaluation"}


def parse(record: Record, config: ExperimentConfig) -> Implementations:
    """Returns the implementations of a record; what it lacks is chosen as the config asks for."""
    path = str(config.model.attention)
    training, evaluation = (
        Implementation.parse(record[name]) if name in record else path for name in ("training", "evaluation")
    )
    return Implementations(training, evaluation)


def check_same_on_all(choice: AttentionChoice | None) -> None:
    """Raises `UserError`, in all processes, if one has chosen another implementation than process 0."""
    distributed.assert_same_on_all(
        json.dumps(to_json(choice)),
        lambda first, other: (
            f"it would compute attention by {_text(other)} and process 0 by {_text(first)}; start all hosts with the "
            "same devices and versions of the libraries, or choose with --model.attention"
        ),
    )


def opening_line(choice: AttentionChoice) -> str:
    """Describes what was chosen, and why."""
    return "attention " + _with_reasons(
        {f"{name} {each.implementation}": each for name, each in _by_name(choice).items()}
    )


def changes(before: Record, choice: AttentionChoice | None) -> list[str]:
    """Returns a line that names the implementations that differ from those before; none if all are the same."""
    changed = {
        f"{name} was {before[name]} and is now {chosen.implementation}": chosen
        for name, chosen in _by_name(choice).items()
        if name in before and before[name] != str(chosen.implementation)
    }
    return [f"attention: {_with_reasons(changed)}"] if changed else []


def evaluation_lines(recorded: Implementations, choice: AttentionChoice | None) -> list[str]:
    """Returns a line about the implementation that a trained run is scored with; none if it is the recorded one."""
    if choice is None or recorded.cached == choice.evaluation.implementation:
        return []
    was = f"was {recorded.cached} and is now " if isinstance(recorded.cached, Implementation) else ""
    return [f"attention: evaluation {was}{choice.evaluation.implementation} ({choice.evaluation.reason})"]


def _by_name(choice: AttentionChoice | None) -> dict[str, Chosen]:
    return {} if choice is None else choice._asdict()


def _with_reasons(clauses: Mapping[str, Chosen]) -> str:
    """Joins clauses, each with its reason in brackets, or all with one if it is the same."""
    reasons = {chosen.reason for chosen in clauses.values()}
    if len(reasons) == 1:
        return f"{', '.join(clauses)} ({reasons.pop()})"
    return "; ".join(f"{clause} ({chosen.reason})" for clause, chosen in clauses.items())


def _lengths(config: EvalConfig) -> list[object]:
    return [getattr(config, name) for name in _EVALUATION]


def _text(record: str) -> str:
    return ", ".join(f"{text} in {name}" for name, text in json.loads(record).items()) or "none"
