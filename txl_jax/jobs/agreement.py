"""Checks that all processes of a run have the same settings and text; each reads its own rows of the text."""

import json

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.tokens.vocabulary import digest
from txl_jax.runtime import distributed

# Hosts may keep their files in different places; the contents are compared.
_PLACES = {leaf.name for leaf in config_tree.leaves() if leaf.setting.path and leaf.name.startswith("data.")}


def check(config: ExperimentConfig, corpus: Corpus) -> None:
    """Raises `UserError`, in all processes, if one has other settings or another text than process 0."""
    check_settings(config)
    distributed.assert_same_on_all(
        f"{corpus.description} (sha256 {corpus.digest[:12]}...)",
        lambda first, other: f"its text is {other} and that of process 0 is {first}; give all hosts the same files",
    )
    distributed.assert_same_on_all(
        digest(corpus.vocabulary),
        lambda first, other: (
            f"its vocabulary has the sha256 {other[:12]}... and that of process 0 {first[:12]}...; give all hosts the "
            "same files and the same versions of the libraries"
        ),
    )


def check_settings(config: ExperimentConfig) -> None:
    """Does the part of `check` that needs no text."""
    settings = {name: value for name, value in config_tree.to_dict(config).items() if name not in _PLACES}
    distributed.assert_same_on_all(json.dumps(settings), _difference)


def _difference(first: str, other: str) -> str:
    ours, theirs = json.loads(first), json.loads(other)
    names = [name for name in ours if theirs.get(name) != ours[name]]
    differences = ", ".join(f"{name} is {theirs.get(name)} there and {ours[name]} in process 0" for name in names[:3])
    return f"{differences}; start all hosts with the same command"
