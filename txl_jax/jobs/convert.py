"""Conversion of trained weights between this project's formats and those of other implementations."""

import enum
import os
import time
from collections.abc import Callable
from pathlib import Path

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError
from txl_jax.interop import export, portable
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop.leaves import Leaves
from txl_jax.jobs import verify_conversion
from txl_jax.jobs.weights_in import NATIVE, WeightsIn, open_foreign, open_weights
from txl_jax.runtime.files import check_new_folder, new_folder
from txl_jax.runtime.paths import as_path, size

_GROUPS = ("model", "compat", "eval")  # What is printed.
_LENGTHS = ("mem_len", "clamp_len", "same_length")  # Of `eval`, what other formats hold too.


class TargetFormat(enum.StrEnum):
    """Formats that can be written."""

    NATIVE = "native"  # The portable folder (`interop.portable`).
    HUGGINGFACE = "huggingface"  # Of `TransfoXLLMHeadModel.from_pretrained`, transformers 4.35.2.
    ORIGINAL = "original"  # Names and layouts of the authors' PyTorch release, as safetensors.


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to_format: TargetFormat = TargetFormat.NATIVE,
    from_format: str | None = None,
    member: str | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Converts weights and verifies the result: reads it back, and compares tensors and losses.

    One array at a time is in memory while files are written, and the parameters once while losses are computed. The
    folder appears under its name when it has been verified; after an error nothing of it is left.

    Args:
      source: a run's workdir, a portable folder, or a file or folder of another implementation.
      target: a folder that is missing or empty.
      from_format: the format of `source`: "native" or a `formats.Format`; None: it is recognised.
      member: the member of an ensemble, if `source` is one's workdir.

    Raises:
      UserError: the weights cannot be read or have parts that the format lacks, or `target` cannot be written.
    """
    began = time.monotonic()
    source, target = as_path(source), as_path(target)
    check_new_folder(target)
    if target.is_relative_to(source):
        raise UserError(f"--to={target} lies in --from={source}; give a folder outside of it")
    read = open_weights(source, from_format=from_format, member=member, log=log)
    for line in _describe(read):
        log(line)
    with new_folder(target) as folder:
        for note in _write(folder, read, to_format):
            log(f"note      {note}")
        log(f"written   {_size(folder)} after {time.monotonic() - began:.1f} s; reading it back")
        difference = _verify(read, folder, to_format)
    log(
        f"verified  tensors equal bit for bit, losses to {difference:.1g} nats; {time.monotonic() - began:.1f} s in all"
    )
    log(f"to        {to_format}: {target}")


def _write(folder: Path, read: WeightsIn, to_format: TargetFormat) -> list[str]:
    """Writes the files; returns notes for people."""
    match to_format:
        case TargetFormat.HUGGINGFACE:
            return export.write_huggingface(folder, read.info, read.leaves)
        case TargetFormat.ORIGINAL:
            return export.write_original(folder, read.info, read.leaves)
    portable.write(folder, read.info, read.leaves)
    return []


def _verify(read: WeightsIn, folder: Path, to_format: TargetFormat) -> float:
    """Reads the folder back and compares; returns the greatest difference of a loss."""
    back = _read_back(read, folder, to_format)
    config, again = read.info.config, back.info.config
    for name in _LENGTHS:
        before, after = getattr(config.eval, name), getattr(again.eval, name)
        if before != after:
            raise UserError(f"eval.{name} was {before} and is read back as {after}; this is a bug, please report it")
    if back.info.vocabulary != read.info.vocabulary:
        raise UserError("the vocabulary is not read back as it was; this is a bug, please report it")
    verify_conversion.check_same_tensors(read.leaves, back.leaves)
    vocab_size = read.info.vocabulary.size
    # In the same way of reading: other implementations have their own, which the notes name.
    alike = config_tree.replace(config, {"compat": again.compat})
    expected = verify_conversion.losses(alike, read.leaves, vocab_size=vocab_size)
    found = verify_conversion.losses(again, back.leaves, vocab_size=vocab_size)
    return verify_conversion.check_same_losses(expected, found)


def _read_back(read: WeightsIn, folder: Path, to_format: TargetFormat) -> WeightsIn:
    if to_format is TargetFormat.NATIVE:
        return WeightsIn(NATIVE, portable.read_info(folder), portable.read_leaves(folder), [])
    return open_foreign(folder, to_format)


def _describe(read: WeightsIn) -> list[str]:
    """Returns lines for people: the format, the settings that are not the defaults, and notes."""
    info = read.info
    lines = [
        f"from      {read.format}: {info.description}",
        f"tokens    {info.vocabulary.size:,} of the kind {info.vocabulary.kind}",
        f"weights   {_count(read.leaves):,} parameters in {len(read.leaves)} arrays",
    ]
    for group in _GROUPS:
        changed = config_tree.differences(getattr(ExperimentConfig(), group), getattr(info.config, group))
        values = ", ".join(f"{leaf.name}={config_tree.format_value(value)}" for leaf, _, value in changed)
        lines.append(f"{group:<10}{values or 'the defaults'}")
    return lines + [f"note      {note}" for note in read.notes]


def _count(leaves: Leaves) -> int:
    return sum(leaves_lib.num_bytes({path: leaf}) // leaf.dtype.itemsize for path, leaf in leaves.items())


def _size(folder: Path) -> str:
    return f"{sum(map(size, folder.iterdir())) / 1e6:,.1f} MB"
