"""Conversion of trained weights between this project's formats and those of other implementations."""

import dataclasses
import enum
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import sharding
from txl_jax.config import ExperimentConfig, MeshConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.ready_ids import IdVocabulary
from txl_jax.errors import CheckpointError, UserError
from txl_jax.interop import export, formats, portable
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop.leaves import Leaves
from txl_jax.interop.portable import ModelInfo
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.run import Run
from txl_jax.runs.validation import RESULTS
from txl_jax.runs.weights import Weights, holds_other_weights, open_weights
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import describe_difference
from txl_jax.runtime.storage import as_path, check_new_folder, is_remote, new_folder, size

# Weights that are to be converted: of a run, a portable folder or another implementation, read by array.

NATIVE = "native"


class SourceFormat(enum.StrEnum):
    """Formats that can be read: our own, and those of `formats.Format`."""

    NATIVE = "native"
    HUGGINGFACE = "huggingface"
    ORIGINAL = "original"
    TENSORFLOW = "tensorflow"
    NVIDIA = "nvidia"


_SCORES = ("best_valid", "test", "eval")


class WeightsIn(NamedTuple):
    """Weights that were read.

    Attributes:
      format: its name.
      info: config, vocabulary and where they come from.
      leaves: the parameters of `TransformerXL` by path.
      notes: lines for people.
    """

    format: str
    info: ModelInfo
    leaves: Leaves
    notes: list[str]


def read_weights(
    source: str, *, from_format: str | None = None, member: str | None = None, log: Callable[[str], None] = print
) -> WeightsIn:
    """Opens the weights of a run, of a portable folder, or of another implementation.

    Args:
      source: a folder, or a file of weights.
      from_format: "native" or a `formats.Format`; None: it is recognised.
      member: the member of an ensemble, if `source` is the workdir of one.

    Raises:
      UserError: there are none of that format, or they cannot be read.
    """
    is_foreign = holds_other_weights(source) and not portable.is_portable(source)
    if from_format == NATIVE or (from_format is None and not is_foreign):
        return _open_native(source, member, log)
    if member is not None:
        raise UserError(f"the member {member!r} was given and {source} is no workdir of an ensemble; leave it out")
    return open_foreign(source, from_format)


def open_foreign(source: str | os.PathLike[str], from_format: str | None = None) -> WeightsIn:
    """Opens a file or folder of another implementation.

    Raises:
      UserError: it cannot be read, is on object storage, or its parts contradict each other.
    """
    if is_remote(source):
        raise UserError(
            f"{source} holds weights of another implementation, which are read at random; copy the folder to this "
            "machine, and give the copy"
        )
    source = Path(source)
    found = formats.read(source, None if from_format is None else formats.Format(from_format))
    vocabulary, notes = found.vocabulary, list(found.notes)
    folder = source if source.is_dir() else source.parent
    if portable.holds_vocabulary(folder):  # Of our own export: it has line marks too.
        vocabulary = portable.read_vocabulary(folder)
    if vocabulary is None:
        vocabulary = IdVocabulary(found.vocab_size)
        notes.append("the tokens are named by their ids; a vocabulary beside the weights would be read")
    if vocabulary.size != found.vocab_size:
        raise UserError(
            f"the vocabulary of {folder} has {vocabulary.size:,} tokens and the weights {found.vocab_size:,}; give the "
            "folder that both were saved in"
        )
    config = dataclasses.replace(ExperimentConfig(), model=found.config, compat=found.compat, eval=found.eval_config)
    info = ModelInfo(config, vocabulary, 0, f"converted from the {found.format} format")
    return WeightsIn(found.format, info, found.params, notes)


def _open_native(source: str, member: str | None, log: Callable[[str], None]) -> WeightsIn:
    found = open_weights(source, member=member)
    if isinstance(found.source, Run):
        return _of_run(found, found.source, log)
    return WeightsIn(NATIVE, found.source, portable.read_leaves(source), [])


def _of_run(found: Weights, run: Run, log: Callable[[str], None]) -> WeightsIn:
    """Loads the best parameters of a run."""
    components = found.build(log=log)
    step, params = found.params(components, log=log)
    # The weights are the mean already.
    config = config_tree.replace(found.config, {"eval.average_checkpoints": None})
    description = found.description.partition(", ")[2]
    averaged = found.config.eval.average_checkpoints is not None
    scores = {} if averaged else _scores(run, step)
    info = ModelInfo(config, found.vocabulary, step, f"{description}, after {step:,} updates", scores)
    return WeightsIn("run", info, leaves_lib.from_tree(params), [])


def _scores(run: Run, step: int) -> dict[str, Any]:
    """Returns the scores of results.json; empty if there are none, or they are of other parameters."""
    try:
        results = json.loads(storage.read(os.path.join(run.path, RESULTS)))
        own = results if run.member is None else results["members"][run.member] | {"eval": results["eval"]}
        return {name: own[name] for name in _SCORES} if own["test"]["step"] == step else {}
    except (OSError, ValueError, KeyError, TypeError):  # The run has not ended, or the file is damaged.
        return {}


# Verification of a conversion: the tensors that were written equal those that were read, and so do the losses.

_SEGMENTS, _SEGMENT_LEN, _MEM_LEN = 3, 8, 12  # Memory is empty, filled in part, and full.


def check_same_tensors(read: Leaves, written: Leaves) -> None:
    """Compares two sets of parameters as float32, bit for bit, one array at a time.

    Raises:
      CheckpointError: they differ in names, shapes or values.
    """
    shapes = [{path: str(list(leaf.shape)) for path, leaf in leaves.items()} for leaves in (read, written)]
    if difference := describe_difference(shapes[1], shapes[0]):
        raise CheckpointError(f"what was written is not what was read ({difference})")
    for path, leaf in read.items():
        before, after = (np.asarray(each.read(), np.float32) for each in (leaf, written[path]))
        if not np.array_equal(before.view(np.uint32), after.view(np.uint32)):
            raise CheckpointError(f"parameter {path} is not written as it was read; check the disk and try again")


def losses(config: ExperimentConfig, leaves: Leaves, *, vocab_size: int) -> np.ndarray:
    """Computes losses in nats of drawn tokens, those of every cluster among them: float32 [S, L].

    The parameters are read one after another onto one device. Segments and memory are short; clamp and same_length are
    those of `config.eval`.
    """
    # Equal settings share one compiled program: what is read and what is written usually have them.
    score, components = _scorer(
        ExperimentConfig(model=config.model, compat=config.compat, eval=config.eval), vocab_size
    )
    params = portable.place(leaves, components.training.abstract_state.params)
    memory = components.model.init_memory(batch_size=1, mem_len=_MEM_LEN)
    tokens, found = _tokens(config, vocab_size), []
    for start in range(0, _SEGMENTS * _SEGMENT_LEN, _SEGMENT_LEN):
        nll, memory = score(params, memory, jnp.asarray(tokens[:, start : start + _SEGMENT_LEN + 1]))
        found.append(np.asarray(nll[0], np.float32))
    return np.stack(found)


@functools.lru_cache(maxsize=1)
def _scorer(config: ExperimentConfig, vocab_size: int) -> tuple[Callable[..., Any], RunComponents]:
    """Returns the jitted (params, memory, tokens [1, L + 1]) -> (losses [1, L], memory) of a model on one device."""
    one_device = MeshConfig(data=1)
    mesh = sharding.make_mesh(one_device, jax.devices()[:1])
    components = build(dataclasses.replace(config, mesh=one_device), vocab_size=vocab_size, mesh=mesh)
    model: Any = components.model  # `apply` returns what its method does.
    lengths = {"clamp_len": config.eval.clamp_len, "same_length": config.eval.same_length}

    def score(params: Any, memory: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        hidden, memory = model.apply({"params": params}, tokens[:, :-1], memory, **lengths)
        return model.apply({"params": params}, hidden, tokens[:, 1:], method=model.nll), memory

    return components.jit(score), components


def check_same_losses(expected: np.ndarray, found: np.ndarray) -> float:
    """Returns the greatest difference in nats.

    Raises:
      CheckpointError: losses are not finite, or differ by more than rounding.
    """
    if not np.isfinite(expected).all():
        raise CheckpointError("the weights give losses that are not finite; they are damaged, or of another model")
    difference = float(np.abs(expected - found).max())
    if not difference <= 1e-5 * max(1.0, float(np.abs(expected).max())):
        raise CheckpointError(f"the converted weights give other losses, by up to {difference:.3g} nats")
    return difference


def _tokens(config: ExperimentConfig, vocab_size: int) -> np.ndarray:
    """Draws token ids [1, S * L + 1]; the first and the last of every cluster are among them."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=_SEGMENTS * _SEGMENT_LEN + 1, dtype=np.int32)
    ends = [end for cutoff in (*config.model.cutoffs, vocab_size) for end in (cutoff - 1, cutoff % vocab_size)]
    ends = ends[: len(tokens) - 1]
    tokens[1 : len(ends) + 1] = ends
    return tokens[None]


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
    if f"{target}/".startswith(f"{source}/"):
        raise UserError(f"--to={target} lies in --from={source}; give a folder outside of it")
    read = read_weights(source, from_format=from_format, member=member, log=log)
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
    check_same_tensors(read.leaves, back.leaves)
    vocab_size = read.info.vocabulary.size
    # In the same way of reading: other implementations have their own, which the notes name.
    alike = config_tree.replace(config, {"compat": again.compat})
    expected = losses(alike, read.leaves, vocab_size=vocab_size)
    found = losses(again, back.leaves, vocab_size=vocab_size)
    return check_same_losses(expected, found)


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
