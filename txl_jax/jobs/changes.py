"""Comparison of a start with the one before it in the same workdir: settings and members."""

from collections.abc import Mapping, Sequence

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree

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
