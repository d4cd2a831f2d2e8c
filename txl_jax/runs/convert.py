"""Converts trained weights between the formats of this project and other implementations.

A conversion is verified: the written tensors equal the original ones, bit for bit, and the losses
are equal up to rounding.
"""

import enum
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.config import ExperimentConfig, MeshConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.errors import CheckpointError
from txl_jax.interop import formats, huggingface, leaves, original, own_settings, portable
from txl_jax.interop.formats import Model
from txl_jax.interop.leaves import Leaves
from txl_jax.interop.original import Format
from txl_jax.interop.portable import ModelInfo
from txl_jax.runs import dynamic_statistics
from txl_jax.runs.build import Built, build
from txl_jax.runs.run import Run, read_results
from txl_jax.runs.trained import holds_other_weights, open_weights
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import describe_difference
from txl_jax.runtime.output import say
from txl_jax.sharding.mesh import make_mesh

# Rows and tokens per row of the random text whose losses are compared.
_ROWS = 3
_ROW_LEN = 8
# Largest difference of two equal losses, as a fraction of the largest loss, or in nats below 1.
_ROUNDING = 1e-5


class TargetFormat(enum.StrEnum):
    """Formats that can be written."""

    NATIVE = "native"  # The portable checkpoint (`interop.portable`).
    HUGGINGFACE = "huggingface"  # For `TransfoXLLMHeadModel.from_pretrained`, transformers 4.35.2.
    ORIGINAL = "original"  # Names and layouts of the authors' PyTorch release, as safetensors.


_WRITE: Mapping[TargetFormat, Callable[[Path, ModelInfo, Leaves], list[str] | None]] = {
    TargetFormat.NATIVE: portable.write,
    TargetFormat.HUGGINGFACE: huggingface.write,
    TargetFormat.ORIGINAL: original.write,
}
# Formats of other implementations.
_OTHERS = {TargetFormat.HUGGINGFACE: Format.HUGGINGFACE, TargetFormat.ORIGINAL: Format.ORIGINAL}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to_format: TargetFormat = TargetFormat.NATIVE,
    member: str | None = None,
    log: Callable[[str], None] = say,
) -> None:
    """Converts weights and verifies the result: reads it back, and compares tensors and losses.

    One array at a time is in memory while files are written, and one copy of the parameters while
    losses are computed. The directory gets its name once it is verified. After an error it is
    removed.

    Args:
      source: A run's workdir, a portable checkpoint, or a file or directory of another
        implementation.
      target: A directory that is missing or empty.
      to_format: The format of `target`.
      member: The ensemble member, if `source` is an ensemble's workdir.
      log: Receives one line.

    Raises:
      UserError: If the weights cannot be read, the format does not support all of their parts, or
        `target` cannot be written.
    """
    began = time.monotonic()
    source = storage.as_path(source)
    target = storage.as_path(target)
    storage.check_new_folder(target)
    require(
        not f"{target}/".startswith(f"{source}/"),
        f"--to={target} must be outside --from={source}. Pass another directory.",
    )
    model, statistics = _read(source, member, log)
    _describe(model, log)
    other_format = _OTHERS.get(to_format)
    if other_format is not None:
        original.check_exportable(model.info.config.model, other_format)

    with storage.new_folder(target) as folder:
        if to_format is TargetFormat.NATIVE and statistics is not None:
            # Written before the other files, because config.json must be the last.
            line = dynamic_statistics.copy(statistics, folder, model.leaves)
            if line is not None:
                log(line)
        for note in _WRITE[to_format](folder, model.info, model.leaves) or []:
            log(f"note      {note}")
        if other_format is not None:
            own_settings.write(folder, model.info, other_format)
            log(
                f"settings  {own_settings.NAME} contains the settings that the format lacks, so "
                "that txl_jax reads the same model back"
            )
        megabytes = sum(map(storage.size, folder.iterdir())) / 1e6
        seconds = time.monotonic() - began
        log(
            f"written   {megabytes:,.1f} MB after {seconds:.1f} s, reading it back to compare "
            "everything"
        )
        difference = _verify(model, folder, to_format)

    seconds = time.monotonic() - began
    log(
        f"verified  tensors equal bit for bit, losses to {difference:.1g} nats, "
        f"{seconds:.1f} s in total"
    )
    log(f"to        {to_format}: {target}")


class _Source(NamedTuple):
    """A model to convert, with its metadata."""

    # The arrays of files are read later, one by one.
    model: Model
    # Path of the statistics of dynamic evaluation, which may be missing, or None for a model of
    # another implementation.
    statistics: str | None = None


def _read(source: str, member: str | None, log: Callable[[str], None]) -> _Source:
    """Reads a model of any implementation.

    Args:
      source: A run's workdir, a portable checkpoint, or another implementation's weights.
      member: The ensemble member, if `source` is an ensemble's workdir.
      log: Receives one line.
    """
    if holds_other_weights(source) and not portable.is_portable(source):
        require(
            member is None,
            f"--ensemble_member is {member!r}, but {source} is not an ensemble. Omit it.",
        )
        require(
            not storage.is_remote(source),
            f"{source} must be a local path, because other implementations' weights need random "
            "access. Copy it first.",
        )
        return _Source(formats.read(source))

    trained = open_weights(source, member=member)
    statistics = dynamic_statistics.path_of(trained)
    if not isinstance(trained.source, Run):
        model = Model(TargetFormat.NATIVE, trained.source, portable.read_leaves(source), [])
        return _Source(model, statistics)

    step, params = trained.params(trained.build(log=log), log=log)
    scores: dict[str, Any] = {}
    # The run's scores are of one checkpoint's parameters, not of an average of checkpoints.
    if trained.config.eval.average_checkpoints is None:
        scores = _scores(trained.source, step)
    info = ModelInfo(
        # If checkpoints were averaged, the parameters are the mean already.
        config=config_tree.replace(trained.config, {"eval.average_checkpoints": None}),
        vocabulary=trained.vocabulary,
        step=step,
        description=f"{trained.description.partition(', ')[2]}, after {step:,} updates",
        scores=scores,
    )
    return _Source(Model("run", info, leaves.from_tree(params), []), statistics)


def _scores(run: Run, step: int) -> dict[str, Any]:
    """Returns the scores in results.json, empty if missing or for other parameters."""
    results = read_results(run.path, run.member)
    try:
        if results["test"]["step"] != step:
            return {}
        return {name: results[name] for name in ("best_valid", "test", "eval")}
    except (KeyError, TypeError):  # The run has not ended, or the file is corrupted.
        return {}


def _describe(model: Model, log: Callable[[str], None]) -> None:
    """Logs the source's tokens, parameters, and settings that differ from the defaults."""
    info = model.info
    n_parameter = sum(math.prod(leaf.shape) for leaf in model.leaves.values())
    log(f"from      {model.format}: {info.description}")
    log(f"tokens    {info.vocabulary.size:,} of kind {info.vocabulary.kind}")
    log(f"weights   {n_parameter:,} parameters in {len(model.leaves)} arrays")
    for group in ("model", "eval"):
        defaults = getattr(ExperimentConfig(), group)
        changed = config_tree.differences(defaults, getattr(info.config, group))
        values = [f"{leaf.name}={config_tree.format_value(value)}" for leaf, _, value in changed]
        log(f"{group:<10}{', '.join(values) or 'the defaults'}")
    for note in model.notes:
        log(f"note      {note}")


def _verify(model: Model, folder: Path, to_format: TargetFormat) -> float:
    """Reads the directory back and compares. Returns the largest difference of a loss, in nats."""
    if to_format is TargetFormat.NATIVE:
        back = Model(to_format, portable.read_info(folder), portable.read_leaves(folder), [])
    else:
        back = formats.read(folder)

    # The sizes are checked with the tensors. Equal ones have more than one name: d_embed=none is
    # d_model.
    config_leaves = config_tree.leaves(ExperimentConfig)
    sizes = {leaf.name for leaf in config_leaves if leaf.setting.shapes_params}
    before = portable.stored_settings(model.info.config)
    after = portable.stored_settings(back.info.config)
    changed = [name for name in before if before[name] != after[name] and name not in sizes]
    vocabulary = model.info.vocabulary
    if back.info.vocabulary != vocabulary:
        changed.append("the vocabulary")
    require(not changed, f"{', '.join(changed)} changed when read back. Please report this bug.")

    _check_same_tensors(model.leaves, back.leaves)
    expected = _losses(model.info.config, model.leaves, vocab_size=vocabulary.size)
    losses = _losses(back.info.config, back.leaves, vocab_size=vocabulary.size)
    return check_same_losses(expected, losses)


def _check_same_tensors(read: Leaves, written: Leaves) -> None:
    """Raises `CheckpointError` unless all tensors are bit-for-bit equal.

    Names, shapes and float32 values must be equal. One array is compared at a time.
    """
    difference = describe_difference(_shapes(written), _shapes(read))
    if difference:
        raise CheckpointError(f"the written weights differ from those read ({difference})")
    for path, leaf in read.items():
        before = np.asarray(leaf.read(), np.float32)
        after = np.asarray(written[path].read(), np.float32)
        if not np.array_equal(before.view(np.uint32), after.view(np.uint32)):
            raise CheckpointError(
                f"parameter {path} changed when it was written. Check the disk and try again."
            )


def _shapes(arrays: Leaves) -> dict[str, str]:
    return {path: str(list(leaf.shape)) for path, leaf in arrays.items()}


def check_same_losses(expected: np.ndarray, actual: np.ndarray) -> float:
    """Returns the largest difference in nats.

    Raises `CheckpointError` if it is larger than a rounding error, or not finite.
    """
    if not np.isfinite(expected).all():
        raise CheckpointError(
            "the weights give losses that are not finite. They are corrupted, or belong to another "
            "model."
        )
    difference = float(np.abs(expected - actual).max())
    # A difference that is nan must not pass, so the condition is not written with >.
    if not difference <= _ROUNDING * max(1.0, float(np.abs(expected).max())):
        raise CheckpointError(
            f"the converted weights give different losses, by up to {difference:.3g} nats"
        )
    return difference


def _losses(config: ExperimentConfig, parameters: Leaves, *, vocab_size: int) -> np.ndarray:
    """Computes the losses of random tokens in nats on one device, float32 [B, L].

    The tokens include the ends of every cluster.
    """
    # Equal settings share one compiled program: the source and the result usually have them.
    settings = ExperimentConfig(model=config.model, eval=config.eval, mesh=MeshConfig(data=1))
    built = _build(settings, vocab_size)

    generator = np.random.default_rng(0)
    tokens = generator.integers(vocab_size, size=_ROWS * _ROW_LEN + 1, dtype=np.int32)
    # The first targets are the last token of each cluster and the first of the next one.
    ends: list[int] = []
    for cutoff in (*config.model.cutoffs, vocab_size):
        ends += [cutoff - 1, cutoff % vocab_size]
    ends = ends[: len(tokens) - 1]
    tokens[1 : len(ends) + 1] = ends

    # Arrays are read and placed one after another.
    params = portable.place(parameters, built.abstract_state.params)
    inputs = tokens[:-1].reshape(_ROWS, _ROW_LEN)
    targets = tokens[1:].reshape(_ROWS, _ROW_LEN)
    return np.asarray(built.window_step(params, inputs, targets), np.float32)


@functools.lru_cache(maxsize=1)
def _build(config: ExperimentConfig, vocab_size: int) -> Built:
    return build(config, vocab_size=vocab_size, mesh=make_mesh(config.mesh, jax.devices()[:1]))
