"""Precedence of settings: the layers of a config, from the lowest precedence to the highest.

1. The command's defaults. If it reads your own text and nothing names a size, the preset `small`.
2. With `--init_from`, the settings that come from the trained model.
3. The settings of `--compat`, if it is passed.
4. Flags, typed or in a flagfile. If a flag is repeated, its last value counts.

If the run is recorded already, its record replaces 1 and 2.

Settings that nobody typed, such as a flagfile's, yield in three cases, each with a note for the
log: sizes to the sizes of the weights (`yield_to_weights`), the warm-up to the recorded one or to a
short training (`yield_warmup`), and pre-norm to a recorded post-norm (`yield_norm_place`).

In all functions `places` says where each flag was set: "" for the command line, else
"FILE, line N: ".
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from txl_jax.cli import flag_tree
from txl_jax.config import CorpusName, ExperimentConfig, NormPlace, config_tree
from txl_jax.config.experiment import preset
from txl_jax.data.published import check_file, default_data
from txl_jax.runs import warm_start

FLAGS = flags.FLAGS
WARMUP = "optimizer.warmup_steps"
NORM_PLACE = "model.layer_norm"
# The preset for your own text if no sizes are set: the paper's would take months on a CPU.
SMALL = "small"


class Settled(NamedTuple):
    """A config in which settings may have yielded."""

    config: ExperimentConfig
    # Note for the log with the settings that yielded, or None if none did.
    note: str | None


def config_of_words(
    defaults: ExperimentConfig,
    words: Sequence[str],
    *,
    without: Collection[str] = (),
    by_corpus: bool = False,
    recorded: ExperimentConfig | None = None,
) -> ExperimentConfig:
    """Returns the config that a command builds from its command line.

    Args:
      defaults: The command's defaults.
      words: The command's name, then its flags.
      without: Names of flags that are not settings.
      by_corpus: Whether the defaults of `data` come from the corpus that the flags name.
      recorded: The config of the run in the workdir, if any.

    Raises:
      UserError: If a flag is invalid or settings are incompatible, as in the command itself.
    """
    values, places = _parse(defaults, words, without)
    base = defaults if recorded is None else recorded
    if by_corpus and recorded is None:
        base = defaults_of_corpus(defaults, values)
    base = small_if_no_sizes(base, places).config
    config, _ = apply_flags(base, places, values, is_recorded=recorded is not None)
    return config


def defaults_in_force(
    defaults: ExperimentConfig,
    words: Sequence[str],
    *,
    without: Collection[str] = (),
    by_corpus: bool = False,
) -> ExperimentConfig:
    """Returns the values of all settings that no further flag sets, which `--help` shows.

    The arguments are the same as for `config_of_words`. Incompatible settings are not an error,
    because further flags may change them, such as the file of a text.

    Raises:
      UserError: If a flag has a wrong name or value.

    >>> own_text = ExperimentConfig(data=default_data(CorpusName.TEXT))
    >>> defaults_in_force(own_text, ["text"]).model.n_layer
    4
    >>> defaults_in_force(own_text, ["text", "--flagfile=enwik8_24l"]).model.n_layer
    24
    """
    values, places = _parse(defaults, words, without)
    base = defaults_of_corpus(defaults, values) if by_corpus else defaults
    return flag_tree.build(small_if_no_sizes(base, places).config, values)


def _parse(
    defaults: ExperimentConfig, words: Sequence[str], without: Collection[str]
) -> tuple[flags.FlagValues, Mapping[str, str]]:
    """Returns the flags of a command line, and where each of them was set."""
    values = flags.FlagValues()
    flag_tree.define(defaults, values)
    for name in without:
        flags.DEFINE_string(name, None, "", flag_values=values)
    return values, flag_tree.parse(words, values).places


def defaults_of_corpus(
    defaults: ExperimentConfig, flag_values: flags.FlagValues
) -> ExperimentConfig:
    """Returns `defaults` with the data settings of the corpus that the flags name."""
    corpus = CorpusName(str(flag_values["data.corpus"].value))
    return dataclasses.replace(defaults, data=default_data(corpus))


def small_if_no_sizes(
    defaults: ExperimentConfig, places: Mapping[str, str], *, has_weights: bool = False
) -> Settled:
    """Returns the preset `small` instead of the paper's sizes for your own text.

    This applies if no flag sets a size: no flagfile is passed, and no setting of the model is
    typed.

    Args:
      defaults: The command's defaults.
      places: Where each flag was set.
      has_weights: Whether the run starts from trained weights, which the note then mentions.

    >>> own_text = ExperimentConfig(data=default_data(CorpusName.TEXT))
    >>> small_if_no_sizes(own_text, {"train.steps": ""}).config.model.n_layer
    4
    >>> small_if_no_sizes(own_text, {"model.d_model": ""}).config.model.n_layer
    12
    >>> small_if_no_sizes(own_text, {"train.steps": "mine.flags, line 1: "}).config.model.n_layer
    12
    """
    if defaults != ExperimentConfig(data=default_data(CorpusName.TEXT)):
        return Settled(defaults, None)
    for name, place in places.items():
        is_in_flagfile = place != ""
        if is_in_flagfile or name.startswith("model."):
            return Settled(defaults, None)

    sizes = " and the sizes of the weights" if has_weights else ""
    return Settled(
        preset(SMALL),
        f"no flag sets a model size, so this run uses --flagfile={SMALL} with your flags{sizes}",
    )


def note_of_large_steps(
    base: ExperimentConfig, places: Mapping[str, str], corpus: CorpusName
) -> str | None:
    """Returns a note if a new run on your own text trains with the paper's large batches.

    Args:
      base: The settings below the flags.
      places: Where each flag was set.
      corpus: The corpus that the flags name.

    Returns:
      The note, or None for other corpora, or if a flag or `base` sets the size of a step.
    """
    sets_size = {"train.batch_size", "train.segment_len"} & places.keys()
    if sets_size or corpus is not CorpusName.TEXT or base.train != ExperimentConfig().train:
        return None
    return (
        f"settings without a flag are the paper's ({base.train.batch_size} x "
        f"{base.train.segment_len} tokens per step). --flagfile={SMALL} suits one machine."
    )


def apply_flags(
    base: ExperimentConfig,
    places: Mapping[str, str],
    flag_values: flags.FlagValues = FLAGS,
    *,
    is_recorded: bool = False,
    trained: ExperimentConfig | None = None,
) -> tuple[ExperimentConfig, list[str]]:
    """Returns the config with the flags applied, and a note for each setting that yielded.

    Args:
      base: The settings that the flags change.
      places: Where each flag was set.
      flag_values: The parsed flags.
      is_recorded: Whether `base` is the record of a run.
      trained: The settings of the trained model whose weights a new run starts from, if any.

    Raises:
      UserError: If settings are incompatible, or describe another model than the weights.
    """
    # The flags win over `base`. A flag that was typed, not set in a flagfile, has no place.
    config = flag_tree.build(base, flag_values)
    typed = {name for name, place in places.items() if not place}

    notes: list[str | None] = []
    # The record of a run that started from weights has the sizes of the weights. Without weights
    # there are no sizes to yield to.
    sizes = base if is_recorded and config.init_from is not None else trained
    if sizes is not None:
        config, note = yield_to_weights(config, sizes, typed)
        notes.append(note)
    recorded = base if is_recorded else None
    config, note = yield_norm_place(config, typed, recorded=recorded)
    notes.append(note)
    config, note = yield_warmup(config, typed, recorded=recorded)
    notes.append(note)

    if is_recorded:
        origin = "the run's record"
    elif trained is not None:
        origin = "the weights or the defaults"
    else:
        origin = "the defaults"
    # An error then says where the settings in it come from.
    with flag_tree.naming_places(places, origin):
        config.validate()
    check_file(config.data)
    if trained is not None:
        warm_start.check_model(config, trained)
    return config, [note for note in notes if note is not None]


def yield_to_weights(
    config: ExperimentConfig, trained: ExperimentConfig, typed: Collection[str]
) -> Settled:
    """Returns a config whose sizes yield to the sizes of the weights, except typed ones.

    Args:
      config: The settings with the flags applied.
      trained: The settings of the model that has the weights.
      typed: Names of the flags on the command line. Typing `compat` types all of model.compat.

    >>> trained = config_tree.replace(ExperimentConfig(), {"model.n_layer": 4})
    >>> yield_to_weights(ExperimentConfig(), trained, typed=()).note
    'sizes come from the weights, not from the flagfile: model.n_layer is 4 instead of 12'
    >>> yield_to_weights(ExperimentConfig(), trained, typed={"model.n_layer"}).config.model.n_layer
    12
    """
    sizes = {}
    for name, size in warm_start.other_sizes(config, trained).items():
        is_typed_by_compat = "compat" in typed and name.startswith("model.compat.")
        if name not in typed and not is_typed_by_compat:
            sizes[name] = size
    return _settle(config, sizes, "sizes come from the weights, not from the flagfile")


def yield_warmup(
    config: ExperimentConfig,
    typed: Collection[str],
    *,
    recorded: ExperimentConfig | None = None,
) -> Settled:
    """Returns a config whose warm-up yields, unless it was typed.

    It yields to the recorded run's warm-up. If that is the same, or nothing is recorded, a warm-up
    that would not end before training does becomes a tenth of the steps.

    >>> short = config_tree.replace(preset("small"), {"train.steps": 50})
    >>> yield_warmup(short, typed={"train.steps"}).note
    'the warm-up is a tenth of the steps: optimizer.warmup_steps is 5 instead of 100'
    >>> yield_warmup(short, typed={"optimizer.warmup_steps"}).config.optimizer.warmup_steps
    100
    >>> recorded = config_tree.replace(preset("small"), {"optimizer.warmup_steps": 7})
    >>> yield_warmup(preset("small"), typed=(), recorded=recorded).config.optimizer.warmup_steps
    7
    """
    if WARMUP in typed:
        return Settled(config, None)

    warmup = config.optimizer.warmup_steps
    if recorded is not None and warmup != recorded.optimizer.warmup_steps:
        recorded_warmup = {WARMUP: recorded.optimizer.warmup_steps}
        return _settle(config, recorded_warmup, "the recorded run's warm-up is kept")

    last_step = config.optimizer.decay_steps or config.train.steps
    if warmup >= last_step:
        return _settle(config, {WARMUP: last_step // 10}, "the warm-up is a tenth of the steps")
    return Settled(config, None)


def yield_norm_place(
    config: ExperimentConfig, typed: Collection[str], *, recorded: ExperimentConfig | None
) -> Settled:
    """Returns a config whose pre-norm yields to the recorded run's post-norm, unless it was typed.

    A short training by `--minutes` records post-norm, although its flagfile says pre-norm.

    >>> recorded = config_tree.replace(preset("own_bytes"), {"model.layer_norm": NormPlace.POST})
    >>> yield_norm_place(preset("own_bytes"), typed=(), recorded=recorded).note
    "the recorded run's norm place is kept: model.layer_norm is post instead of pre"
    """
    if recorded is None or NORM_PLACE in typed:
        return Settled(config, None)
    recorded_place = recorded.model.layer_norm
    if config.model.layer_norm is NormPlace.PRE and recorded_place is NormPlace.POST:
        recorded_values = {NORM_PLACE: recorded_place}
        return _settle(config, recorded_values, "the recorded run's norm place is kept")
    return Settled(config, None)


def _settle(config: ExperimentConfig, values: Mapping[str, Any], reason: str) -> Settled:
    """Returns the config with settings replaced, and a note that lists them after the reason."""
    if not values:
        return Settled(config, None)
    changed = config_tree.replace(config, values)
    changes = []
    for leaf, before, after in config_tree.differences(config, changed):
        after_text = config_tree.format_value(after)
        before_text = config_tree.format_value(before)
        changes.append(f"{leaf.name} is {after_text} instead of {before_text}")
    return Settled(changed, f"{reason}: {', '.join(changes)}")
