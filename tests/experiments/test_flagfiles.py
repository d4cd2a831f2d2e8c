"""Tests that every packaged flagfile resolves to what its golden text says, and to the published size.

    python tests/experiments/test_flagfiles.py     # writes the golden texts anew

A golden text that changes means that a published configuration changed, or that a default did.
"""

import json
from pathlib import Path

import pytest
from absl import flags

from experiments import flag_tree
from txl_jax import config as config_lib
from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig

GOLDEN_DIR = Path(__file__).parent / "flagfiles"

# Counted from the original release's model; V is that of enwik8 without newlines.
PUBLISHED_SIZES = {"enwik8_12l": (204, 41_055_436), "enwik8_24l": (204, 277_231_820)}


def resolved(name):
    """The config that a flagfile makes of the defaults."""
    values = flags.FlagValues()
    flag_tree.define(ExperimentConfig(), values)
    flag_tree.parse(["program", f"--flagfile={name}"], values)
    return flag_tree.build(ExperimentConfig(), values)


def golden_text(name):
    return json.dumps(config_lib.to_dict(resolved(name)), indent=1) + "\n"


@pytest.mark.parametrize("name", flag_tree.flagfile_names())
def test_flagfile_resolves_to_its_golden_text(name):
    resolved(name).validate()
    assert golden_text(name) == (GOLDEN_DIR / f"{name}.json").read_text()


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_published_sizes_to_the_unit(name):
    vocab_size, size = PUBLISHED_SIZES[name]
    assert assemble(resolved(name), vocab_size=vocab_size).n_parameter == size


if __name__ == "__main__":
    GOLDEN_DIR.mkdir(exist_ok=True)
    for flagfile in flag_tree.flagfile_names():
        (GOLDEN_DIR / f"{flagfile}.json").write_text(golden_text(flagfile))
