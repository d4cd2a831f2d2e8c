"""What yields to what: defaults, presets, trained weights, flagfiles, typed flags and records."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import flags

from txl_jax.cli import flag_tree
from txl_jax.config import (
    CorpusName,
    ExperimentConfig,
    config_tree,
)
from txl_jax.config.experiment import preset
from txl_jax.data.published import check_file, default_data
from txl_jax.runs import warm_start

FLAGS = flags.FLAGS


WARMUP = "optimizer.warmup_steps"


# The preset for your own text if no sizes are set: the paper's would take months on a CPU.
SMALL = "small"


def config_of_words(
    defaults: ExperimentConfig,
    words: Sequence[str],
    *,
    without: Collection[str] = (),
    by_corpus: bool = False,
    recorded: ExperimentConfig | None = None,
) -> ExperimentConfig:
    """Returns the config that a command makes of its command line. Raises `UserError` as it does.

    `without` names flags that are not settings. `recorded` is the config of the run in the workdir,
    if any.
    """
    values = flags.FlagValues()
    flag_tree.define(defaults, values)
    for name in without:
        flags.DEFINE_string(name, None, "", flag_values=values)
    _, places, _ = flag_tree.parse(words, values)
    base = recorded or (defaults_of_corpus(defaults, values) if by_corpus else defaults)
    base = preset(SMALL) if names_no_sizes(base, places) else base
    return apply_flags(base, places, values, is_recorded=recorded is not None)


def defaults_of_corpus(
    defaults: ExperimentConfig, flag_values: flags.FlagValues
) -> ExperimentConfig:
    """Returns `defaults` with the data settings of the corpus that the flags name."""
    return dataclasses.replace(
        defaults, data=default_data(CorpusName(str(flag_values["data.corpus"].value)))
    )


def names_no_sizes(defaults: ExperimentConfig, places: Mapping[str, str]) -> bool:
    """Returns whether flags for your own text leave the model at the paper's defaults.

    A flagfile's have a place.
    """
    named = (place or name.startswith("model.") for name, place in places.items())
    return defaults == ExperimentConfig(data=default_data(CorpusName.TEXT)) and not any(named)


def apply_flags(
    base: ExperimentConfig,
    places: Mapping[str, str],
    flag_values: flags.FlagValues = FLAGS,
    *,
    is_recorded: bool = False,
    weights: ExperimentConfig | None = None,
    notes: list[str] | None = None,
) -> ExperimentConfig:
    """Returns the flags applied to a config. Raises `UserError` if settings are incompatible.

    Settings that were not typed yield, with a line in `notes`: sizes to the sizes of the `weights`
    that a run starts from, and a warm-up to the recorded one or, if it would not end before
    training does, to a tenth of the steps.
    """
    config = flag_tree.build(base, flag_values)
    typed = {name for name, place in places.items() if not place}

    def use(values: Mapping[str, Any], what: str) -> ExperimentConfig:
        changed = config_tree.replace(config, values)
        # Nobody typed the values that yield: they are a flagfile's or the command's.
        lines = [
            f"{leaf.name} is {config_tree.format_value(new)} instead of "
            f"{config_tree.format_value(old)}"
            for leaf, old, new in config_tree.differences(config, changed)
        ]
        if values and notes is not None:
            notes.append(f"{what}: {', '.join(lines)}")
        return changed

    if weights is not None or (is_recorded and config.init_from is not None):
        sizes = warm_start.other_sizes(config, weights or base)
        keep = typed | {
            name for name in sizes if name.startswith("model.compat.") and "compat" in typed
        }
        theirs = {name: value for name, value in sizes.items() if name not in keep}
        config = use(theirs, "sizes come from the weights")
    end, warmup = config.optimizer.decay_steps or config.train.steps, config.optimizer.warmup_steps
    if is_recorded and warmup != base.optimizer.warmup_steps and WARMUP not in typed:
        config = use({WARMUP: base.optimizer.warmup_steps}, "the recorded run's warm-up is kept")
    elif warmup >= end and WARMUP not in typed:
        config = use({WARMUP: end // 10}, "the warm-up is a tenth of the steps")
    usual = "the weights or the defaults" if weights is not None else "the defaults"
    with flag_tree.naming_places(places, "the run's record" if is_recorded else usual):
        config.validate()
    check_file(config.data)
    if weights is not None:
        warm_start.check_model(config, weights)
    return config
