"""Conversion of trained weights between the formats of this project and of other implementations.

A conversion is verified: the written tensors equal the ones that were read, bit for bit, and so do
the losses, up to rounding.
"""

import enum
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from txl_jax.runs.build import Built, build
from txl_jax.runs.run import Run, read_results
from txl_jax.runs.trained import holds_other_weights, open_weights
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import describe_difference
from txl_jax.runtime.output import say
from txl_jax.sharding.mesh import make_mesh

_ROWS, _ROW_LEN = 3, 8  # Of tokens, for verification.


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
_THEIRS = {TargetFormat.HUGGINGFACE: Format.HUGGINGFACE, TargetFormat.ORIGINAL: Format.ORIGINAL}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to_format: TargetFormat = TargetFormat.NATIVE,
    member: str | None = None,
    log: Callable[[str], None] = say,
) -> None:
    """Converts weights and verifies the result: reads it back, and compares tensors and losses.

    One array at a time is in memory while files are written, and the parameters once while losses
    are computed. The directory gets its name once it is verified. After an error nothing of it
    remains.

    Args:
      source: A run's workdir, a portable checkpoint, or a file or directory of another
        implementation.
      target: A directory that is missing or empty.
      to_format: The format of `target`.
      member: The ensemble member, if `source` is an ensemble's workdir.
      log: Takes one line.

    Raises:
      UserError: If the weights cannot be read or have parts that the format lacks, or `target`
        cannot be written.
    """
    began = time.monotonic()
    source, target = storage.as_path(source), storage.as_path(target)
    storage.check_new_folder(target)
    inside = f"{target}/".startswith(f"{source}/")
    require(not inside, f"--to={target} must be outside --from={source}. Pass another directory.")
    read = _read(source, member, log)
    _describe(read, log)
    if to_format in _THEIRS:
        original.check_exportable(read.info.config.model, _THEIRS[to_format])
    with storage.new_folder(target) as folder:
        for note in _WRITE[to_format](folder, read.info, read.leaves) or []:
            log(f"note      {note}")
        if to_format in _THEIRS:
            own_settings.write(folder, read.info, _THEIRS[to_format])
            log(
                f"settings  {own_settings.NAME} has those that the format lacks, so that we read "
                "the same model back"
            )
        size = sum(map(storage.size, folder.iterdir())) / 1e6
        log(
            f"written   {size:,.1f} MB after {time.monotonic() - began:.1f} s, reading it back to "
            "compare all of it"
        )
        difference = _verify(read, folder, to_format)
    seconds = time.monotonic() - began
    log(
        f"verified  tensors equal bit for bit, losses to {difference:.1g} nats, "
        f"{seconds:.1f} s in total"
    )
    log(f"to        {to_format}: {target}")


def _read(source: str, member: str | None, log: Callable[[str], None]) -> Model:
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
        return formats.read(source)
    found = open_weights(source, member=member)
    if not isinstance(found.source, Run):
        return Model(TargetFormat.NATIVE, found.source, portable.read_leaves(source), [])
    step, params = found.params(found.build(log=log), log=log)
    # If checkpoints were averaged, the weights are the mean already, and results.json has the
    # scores of others.
    config = config_tree.replace(found.config, {"eval.average_checkpoints": None})
    scores = (
        {} if found.config.eval.average_checkpoints is not None else _scores(found.source, step)
    )
    description = f"{found.description.partition(', ')[2]}, after {step:,} updates"
    return Model(
        "run",
        ModelInfo(config, found.vocabulary, step, description, scores),
        leaves.from_tree(params),
        [],
    )


def _scores(run: Run, step: int) -> dict[str, Any]:
    """Returns the scores in results.json, empty if missing or for other parameters."""
    results = read_results(run.path, run.member)
    try:
        belongs = results["test"]["step"] == step
        return {name: results[name] for name in ("best_valid", "test", "eval")} if belongs else {}
    except (KeyError, TypeError):  # The run has not ended, or the file is corrupted.
        return {}


def _describe(read: Model, log: Callable[[str], None]) -> None:
    info, count = read.info, sum(math.prod(leaf.shape) for leaf in read.leaves.values())
    log(f"from      {read.format}: {info.description}")
    log(f"tokens    {info.vocabulary.size:,} of kind {info.vocabulary.kind}")
    log(f"weights   {count:,} parameters in {len(read.leaves)} arrays")
    for group in ("model", "eval"):
        changed = config_tree.differences(
            getattr(ExperimentConfig(), group), getattr(info.config, group)
        )
        values = ", ".join(
            f"{leaf.name}={config_tree.format_value(value)}" for leaf, _, value in changed
        )
        log(f"{group:<10}{values or 'the defaults'}")
    for note in read.notes:
        log(f"note      {note}")


def _verify(read: Model, folder: Path, to_format: TargetFormat) -> float:
    """Reads the directory back and compares. Returns the largest difference of a loss, in nats."""
    if to_format is TargetFormat.NATIVE:
        back = Model(to_format, portable.read_info(folder), portable.read_leaves(folder), [])
    else:
        back = formats.read(folder)
    config = read.info.config
    again = back.info.config
    vocabulary = read.info.vocabulary
    before = portable.stored_settings(config)
    after = portable.stored_settings(again)
    # The sizes are checked with the tensors. Equal ones have more than one name: d_embed=none is
    # d_model.
    sizes = {
        leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.shapes_params
    }
    changed = [name for name in before if before[name] != after[name] and name not in sizes]
    changed += [] if back.info.vocabulary == vocabulary else ["the vocabulary"]
    require(not changed, f"{', '.join(changed)} changed when read back. Please report this bug.")
    _check_same_tensors(read.leaves, back.leaves)
    expected = _losses(config, read.leaves, vocab_size=vocabulary.size)
    return check_same_losses(expected, _losses(again, back.leaves, vocab_size=vocabulary.size))


def _check_same_tensors(read: Leaves, written: Leaves) -> None:
    """Raises `CheckpointError` unless all tensors are bit-for-bit equal.

    Names, shapes and float32 values must be equal. One array is compared at a time.
    """
    shapes = [
        {path: str(list(leaf.shape)) for path, leaf in each.items()} for each in (read, written)
    ]
    if difference := describe_difference(shapes[1], shapes[0]):
        raise CheckpointError(f"the written weights differ from those read ({difference})")
    for path, leaf in read.items():
        before, after = (np.asarray(each.read(), np.float32) for each in (leaf, written[path]))
        if not np.array_equal(before.view(np.uint32), after.view(np.uint32)):
            raise CheckpointError(
                f"parameter {path} changed when it was written. Check the disk and try again."
            )


def check_same_losses(expected: np.ndarray, found: np.ndarray) -> float:
    """Returns the largest difference in nats.

    Raises `CheckpointError` if it is more than rounding, or not finite.
    """
    if not np.isfinite(expected).all():
        raise CheckpointError(
            "the weights give losses that are not finite. They are corrupted, or "
            "from another model."
        )
    difference = float(np.abs(expected - found).max())
    if not difference <= 1e-5 * max(1.0, float(np.abs(expected).max())):
        raise CheckpointError(
            f"the converted weights give different losses, by up to {difference:.3g} nats"
        )
    return difference


def _losses(config: ExperimentConfig, parameters: Leaves, *, vocab_size: int) -> np.ndarray:
    """Computes the losses of random tokens in nats on one device, float32 [B, L].

    The tokens include the ends of every cluster.
    """
    # Equal settings share one compiled program: the source and the result usually have them.
    built = _build(
        ExperimentConfig(model=config.model, eval=config.eval, mesh=MeshConfig(data=1)), vocab_size
    )
    tokens = np.random.default_rng(0).integers(
        vocab_size, size=_ROWS * _ROW_LEN + 1, dtype=np.int32
    )
    ends = [
        end
        for cutoff in (*config.model.cutoffs, vocab_size)
        for end in (cutoff - 1, cutoff % vocab_size)
    ]
    ends = ends[: len(tokens) - 1]
    tokens[1 : len(ends) + 1] = ends
    params = portable.place(parameters, built.abstract_state.params)  # One after another.
    windows, targets = (each.reshape(_ROWS, _ROW_LEN) for each in (tokens[:-1], tokens[1:]))
    return np.asarray(built.window_step(params, windows, targets), np.float32)


@functools.lru_cache(maxsize=1)
def _build(config: ExperimentConfig, vocab_size: int) -> Built:
    return build(config, vocab_size=vocab_size, mesh=make_mesh(config.mesh, jax.devices()[:1]))
