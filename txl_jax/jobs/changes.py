"""Comparison of a start with the one before it in the same workdir: settings, members, and the format of the draws."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import CheckpointError
from txl_jax.runtime import format as file_format
from txl_jax.runtime.checkpoint import Checkpointer

Members = Sequence[Mapping[str, float]]  # What the members of an ensemble differ in; empty: a run by itself.


def of_settings(
    old: ExperimentConfig, new: ExperimentConfig, *, old_members: Members, new_members: Members
) -> tuple[list[str], list[str]]:
    """Returns one line for each setting that differs: those that may, and those that shape the training."""
    allowed: list[str] = []
    refused: list[str] = []
    for leaf, before, after in config_tree.differences(old, new):
        line = config_tree.describe_change(leaf, before, after)
        (allowed if leaf.setting.free_on_resume else refused).append(line)
    before, after = ("; ".join(by_name(each)) or "none" for each in (old_members, new_members))
    if before != after:
        refused.append(f"the members of the ensemble were {before} and are now {after}")
    return allowed, refused


def format_of_draws(recorded: int, checkpoints: Path) -> int:
    """Returns the format of the draws up to the newest checkpoint: what is drawn after it is drawn anew.

    Args:
      recorded: the number in config.json.
      checkpoints: folder of those that training resumes from.
    """
    if recorded == file_format.FORMAT:
        return recorded
    with Checkpointer(checkpoints, keep=1, log=lambda line: None) as latest:
        step = latest.latest_step()
        try:
            return file_format.FORMAT if step is None else latest.format(step)
        except (CheckpointError, ValueError):  # An earlier checkpoint may be restored.
            return recorded


def of_draws(format: int, config: ExperimentConfig, members: Members) -> list[str]:
    """Returns a line that names the draws of a run that changed since a format; none if no draw of it did."""

    def is_on(setting: str) -> bool:
        return any(each.get(setting, config_tree.get(config, setting)) for each in members or ({},))

    changes = [
        change.text
        for change in file_format.changes_since(format).values()
        if change.setting is None or is_on(change.setting)
    ]
    return [f"the format was {format} and is now {file_format.FORMAT}: {'; '.join(changes)}"] if changes else []


def member_name(differences: Mapping[str, float]) -> str:
    """Returns the name of a member, also of its folders: "seed=2+learning_rate=0.001"; "base" if nothing differs."""
    return "+".join(f"{short_name(name)}={value}" for name, value in differences.items()) or "base"


def by_name(members: Members) -> dict[str, Mapping[str, float]]:
    """Returns what each member differs in, by its name."""
    return {member_name(each): each for each in members}


def short_name(setting: str) -> str:
    """Shortens a setting's dotted name.

    >>> short_name("optimizer.learning_rate"), short_name("model.dropout.rate"), short_name("train.mem_len")
    ('learning_rate', 'dropout.rate', 'train.mem_len')
    """
    return setting.removeprefix("model.").removeprefix("optimizer.")
