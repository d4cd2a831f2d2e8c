"""Statistics for the rule RMS of dynamic evaluation: sums of squared gradients of training text.

For each parameter it is the sum over n segments of the squared gradient of the segment's mean loss,
at the trained parameters. `DynamicModel.step` computes it: dynamic evaluation with an optimizer
that leaves parameters unchanged and sums squares.

The sums are computed once, and stored in a file in the run's directory, or in --out. Its metadata
contains everything that they depend on (`_expected`), so that a file for other weights is never
used. A portable checkpoint contains a copy of the file.
"""

import dataclasses
import functools
import os
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import DynamicRule, config_tree
from txl_jax.config.config_tree import format_value, require
from txl_jax.data.corpus import Corpus
from txl_jax.data.published import program_of
from txl_jax.data.segments import evaluation_segments
from txl_jax.errors import CheckpointError, NonFiniteError, UserError, reading
from txl_jax.evaluation import dynamic
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.interop import leaves as leaves_lib
from txl_jax.interop import portable, safetensors
from txl_jax.interop.leaves import Leaf, Leaves
from txl_jax.metrics import Totals
from txl_jax.runs.dynamic import DynamicModel, build_to_learn, built_with_rule
from txl_jax.runs.run import Run
from txl_jax.runs.scoring_progress import progress_bar
from txl_jax.runs.trained import TrainedModel
from txl_jax.runtime import distributed, environment, storage
from txl_jax.runtime.checkpoint import describe_difference
from txl_jax.runtime.output import say

NAME = "dynamic_statistics.safetensors"

# As published: the sums are over a five-thousandth of the segments of training text.
_SHARE_OF_TEXT = 5000
# With fewer segments a note is logged. Of the published results, enwik8 has the fewest: 90 million
# bytes are 140 times 5,000 segments of 128.
_FEW_SEGMENTS = 100
# Settings that the sums depend on, with their names in the metadata. The sums also depend on
# `eval.average_checkpoints`, but only through the weights, whose digest is in the metadata.
_SETTINGS = (
    "eval.batch_size",
    "eval.segment_len",
    "eval.mem_len",
    "eval.clamp_len",
    "eval.same_length",
    "eval.temperature",
    "eval.dynamic.statistics_segments",
)
# Other keys of the metadata.
_WEIGHTS = "weights_sha256"
_TEXT = "text_sha256"
_SEGMENTS = "segments"
_SUMS = "sums_sha256"
_KEYS = (_WEIGHTS, _TEXT, *_SETTINGS, _SEGMENTS, _SUMS)
# Number of characters of a digest, or of a stranger's value, that an error shows.
_MOST_SHOWN = 20


class _File(NamedTuple):
    """A file of statistics, whose arrays have not been read yet."""

    path: str
    # The sums by the path of their parameter, "stack/layers/attention/query".
    sums: dict[str, Leaf]
    metadata: dict[str, str]


def learning_model(
    trained: TrainedModel,
    params: Any,
    *,
    corpus: Corpus | None = None,
    folder: str | None = None,
    stop_requested: Callable[[], Any] = lambda: False,
    log: Callable[[str], None] = say,
) -> DynamicModel:
    """Builds a model that learns by the rule and at the lengths of its config.

    All processes call it.

    Args:
      trained: The model, with `eval.dynamic.rule` set.
      params: Its parameters on the devices of its config's mesh.
      corpus: The text that is scored. If it is the run's own, the statistics of the rule RMS are
        computed from its training split. None means that they must be in a file.
      folder: The directory for computed statistics, or None to discard them.
      stop_requested: Is called while statistics are computed.
      log: Receives a line about the statistics.

    Raises:
      UserError: If settings do not match the devices, or statistics are missing.
      CheckpointError: If a file of statistics is corrupted.
      Interrupted: If a stop was requested.
    """
    model = DynamicModel(build_to_learn(trained), params)
    if model.settings.rule is not DynamicRule.RMS:
        return model
    statistics = find_or_make(
        model, trained, corpus=corpus, folder=folder, stop_requested=stop_requested, log=log
    )
    return dataclasses.replace(model, statistics=statistics)


def find_or_make(
    model: DynamicModel,
    trained: TrainedModel,
    *,
    corpus: Corpus | None,
    folder: str | None,
    stop_requested: Callable[[], Any] = lambda: False,
    log: Callable[[str], None] = print,
) -> Any:
    """Returns the statistics of a model on its mesh, from a file or computed.

    Computed statistics are stored in a file in `folder`. All processes call it.

    Args:
      model: The model, built for the rule RMS.
      trained: The model's directory.
      corpus: The text that is scored. If it is the run's own, its training split is read.
      folder: The directory of the run's outputs, or None to write nothing.
      stop_requested: Is called after each call.
      log: Receives a line of progress, or a note.

    Raises:
      UserError: If neither a file nor the training text is available.
      CheckpointError: If a file is corrupted.
      Interrupted: If a stop was requested. No file is written.
    """
    expected = _expected(model, trained)
    mismatches = []
    for file in _read_files(trained, folder):
        mismatch = _mismatch(file, expected)
        if mismatch is None:
            sums = _place(file, model.built.abstract_state.params)
            log(f"note      squared gradients of training text were read from {file.path}")
            return sums
        mismatches.append(mismatch)

    own_text = _own_text(trained, corpus)
    if own_text is None:
        raise UserError(_missing(trained, folder, mismatches))
    for mismatch in mismatches:
        log(f"note      {mismatch}. It is computed again.")
    n_segment = _count_segments(model, own_text.train)
    sums = _sum_over_text(
        model, trained, own_text.train, n_segment, stop_requested=stop_requested, log=log
    )
    if folder is not None:
        path = os.path.join(folder, NAME)
        # All processes gather the arrays that are sharded over them.
        sums_on_host = jax.tree.map(distributed.to_host, sums)
        metadata = expected | {_SEGMENTS: str(n_segment)}
        distributed.broadcast_from_primary(lambda: _write(path, sums_on_host, metadata))
        log(f"squares   {path}")
    return sums


def digest_of_weights(weights: Leaves) -> str:
    """Returns the sha256 of parameters by path, which does not depend on the width of floats.

    With JAX_ENABLE_X64 they are loaded as float64.
    """
    return leaves_lib.digest(leaves_lib.as_type(weights, np.dtype(np.float32)))


def path_of(trained: TrainedModel) -> str:
    """Returns the path of the file in a model's own directory, where it may be missing."""
    folder = trained.path
    if isinstance(trained.source, Run):
        folder = trained.source.outputs_path
    return os.path.join(folder, NAME)


def copy(path: str, folder: Path, weights: Leaves) -> str | None:
    """Copies the file into a directory of converted weights, if it exists and was made for them.

    Returns:
      A line for the log, or None without a file.

    Raises:
      CheckpointError: If the file is corrupted.
    """
    if not storage.exists(path):
        return None
    file = _read(path)
    if file.metadata.get(_WEIGHTS) != digest_of_weights(weights):
        return f"note      {path} was not copied, because it belongs to other weights"
    shapes = {name: leaf.shape for name, leaf in weights.items()}
    _check(file, shapes)
    known = {key: file.metadata[key] for key in _KEYS if key in file.metadata}
    copied_path = os.path.join(folder, NAME)
    safetensors.write(copied_path, _stored(file.sums), metadata=known)
    _check(_read(copied_path), shapes)
    return f"squares   {NAME}, for --eval.dynamic.rule={DynamicRule.RMS}"


def _own_text(trained: TrainedModel, corpus: Corpus | None) -> Corpus | None:
    """Returns the corpus if the model was trained on it, otherwise None.

    A portable checkpoint does not record the text that it was trained on.
    """
    if corpus is None or not isinstance(trained.source, Run):
        return None
    if corpus.digest != trained.source.text.digest:
        return None
    return corpus


def _expected(model: DynamicModel, trained: TrainedModel) -> dict[str, str]:
    """Returns the metadata that a file must have to be used. All processes call it.

    The text of a portable checkpoint is unknown, so it is not compared.
    """
    expected = {_WEIGHTS: digest_of_weights(leaves_lib.from_tree(model.params))}
    if isinstance(trained.source, Run):
        expected[_TEXT] = trained.source.text.digest
    for name in _SETTINGS:
        expected[name] = format_value(config_tree.get(model.built.config, name))
    return expected


def _read_files(trained: TrainedModel, folder: str | None) -> list[_File]:
    """Reads the files in the directory of outputs and in the model's own, without their arrays.

    All processes call it.
    """

    def find() -> list[str]:
        paths = [path_of(trained)]
        if folder is not None:
            paths.insert(0, os.path.join(folder, NAME))
        # Usually both are the same directory.
        return [path for path in dict.fromkeys(paths) if storage.exists(path)]

    files = []
    for path in distributed.broadcast_from_primary(find):
        file = distributed.run_on_all(functools.partial(_read, path))
        # The metadata has a digest of the arrays, which `_check` compares.
        distributed.assert_same_on_all(
            {path: file.metadata}, "Wait until all hosts see the same file, or delete it."
        )
        files.append(file)
    return files


def _read(path: str) -> _File:
    """Reads names, shapes and metadata. Raises `CheckpointError` if that fails."""
    with reading(path):
        tensors, metadata = safetensors.read_contents(path)
    sums = {name.replace(".", "/"): leaf for name, leaf in tensors.items()}
    return _File(path, leaves_lib.guarded(sums, name=path), metadata)


def _write(path: str, sums: Any, metadata: Mapping[str, str]) -> None:
    """Writes a file, in one process."""
    leaves = leaves_lib.from_tree(sums)
    metadata = {**metadata, _SUMS: leaves_lib.digest(leaves)}
    storage.write_file(
        path, lambda local: safetensors.write(local, _stored(leaves), metadata=metadata)
    )


def _stored(sums: Leaves) -> dict[str, Leaf]:
    """Returns arrays by their names in the file, like those in a portable checkpoint."""
    return {name.replace("/", "."): leaf for name, leaf in sums.items()}


def _mismatch(file: _File, expected: Mapping[str, str]) -> str | None:
    """Returns a clause about a file's other weights or settings, or None if it can be used."""
    differences = []
    for name, value in expected.items():
        stored = file.metadata.get(name, "missing")
        if stored != value:
            differences.append(f"{name} is {stored[:_MOST_SHOWN]} instead of {value[:_MOST_SHOWN]}")
    if not differences:
        return None
    return f"{file.path} was made with other weights, text or settings: {', '.join(differences)}"


def _check(file: _File, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks the arrays of a file, of which one at a time is in memory.

    Args:
      file: The file, which may be a stranger's.
      shapes: The shapes of the parameters, by path.

    Raises:
      CheckpointError: If the file does not contain exactly one array of sums of squares for each
        parameter, or the arrays have changed since they were written.
    """
    floats = (np.dtype(np.float32), np.dtype(np.float64))
    described = {name: str(list(leaf.shape)) for name, leaf in file.sums.items()}
    wanted = {name: str(list(shape)) for name, shape in shapes.items()}
    difference = describe_difference(described, wanted)
    if difference:
        raise _corrupted(file, difference)
    for name, leaf in file.sums.items():
        if leaf.dtype not in floats:
            raise _corrupted(file, f"{name} has dtype {leaf.dtype}")
        values = leaf.read()
        # A sum that is nan is not at least 0 either.
        if not np.all((values >= 0) & (values < np.inf)):
            raise _corrupted(file, f"{name} has values that are not sums of squares")
    if file.metadata.get(_SUMS) != leaves_lib.digest(file.sums):
        raise _corrupted(file, "the sha256 of its arrays does not match")


def _corrupted(file: _File, reason: str) -> CheckpointError:
    """Returns the error for a file that must not be used."""
    return CheckpointError(f"{file.path} is corrupted ({reason}). Delete it, or copy it again.")


def _place(file: _File, abstract_params: Any) -> Any:
    """Checks a file, and reads each device's part of each array. All processes call it."""
    named = flax.traverse_util.flatten_dict(abstract_params, sep="/")
    shapes = {name: tuple(leaf.shape) for name, leaf in named.items()}
    distributed.run_on_all(lambda: _check(file, shapes))
    return portable.place(file.sums, abstract_params)


def _count_segments(model: DynamicModel, tokens: Any) -> int:
    """Returns n, the number of segments that are summed.

    Raises:
      UserError: If the text has fewer segments.
    """
    lengths = model.built.config.eval
    n_target = len(tokens) - 1
    asked = model.settings.statistics_segments
    if asked is None:
        # Segments of one row, as published. With more rows, n segments of each row are summed.
        return max(n_target // lengths.segment_len // _SHARE_OF_TEXT, 1)

    most = max(n_target // (lengths.batch_size * lengths.segment_len), 1)
    require(
        asked <= most,
        f"eval.dynamic.statistics_segments must be at most {most:,} (segments of "
        f"{lengths.batch_size} x {lengths.segment_len} tokens in the training text), "
        f"got {asked:,}",
    )
    return asked


def _sum_over_text(
    model: DynamicModel,
    trained: TrainedModel,
    tokens: Any,
    n_segment: int,
    *,
    stop_requested: Callable[[], Any],
    log: Callable[[str], None],
) -> Any:
    """Sums the squared gradients of the first segments of a text. All processes call it."""
    began = time.monotonic()
    summing = DynamicModel(
        built_with_rule(model.built, dynamic.sum_squared_gradients()), model.params
    )
    lengths = model.built.config.eval
    # The rows read the beginning of the text, n segments each.
    n_target = n_segment * lengths.batch_size * lengths.segment_len
    reader = evaluation_segments(
        tokens[: n_target + 1],
        batch_size=lengths.batch_size,
        segment_len=lengths.segment_len,
        own=model.built.own_rows(lengths.batch_size),
    )

    state = summing.start()
    totals = Totals()
    with progress_bar(
        "squared gradients",
        n_segment,
        unit="segment",
        measure=trained.vocabulary.measure,
        log=log,
        stop_requested=stop_requested,
    ) as show:
        for first_segment in range(0, n_segment, SEGMENTS_PER_CALL):
            segments = reader.segments(first_segment, SEGMENTS_PER_CALL)
            placed = model.built.place(segments, batch_size=lengths.batch_size)
            state, losses = summing.step(None, state, placed)
            nats = distributed.to_host(losses.nats).sum(dtype="float64").item()
            n_token = distributed.to_host(losses.tokens).sum(dtype="float64").item()
            totals += Totals(nats, n_token)
            # Segments after the end of the text are padding, which does not change the sums.
            show(min(first_segment + SEGMENTS_PER_CALL, n_segment), totals)

    sums = state.opt_state
    is_finite = model.built.jit(
        lambda leaves: jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
    )
    if not is_finite(jax.tree.leaves(sums)):
        raise NonFiniteError(
            "squared gradients of training text are not finite, so these parameters cannot learn "
            f"with eval.dynamic.rule={DynamicRule.RMS}"
        )
    if n_segment < _FEW_SEGMENTS:
        log(
            f"note      {n_segment:,} segments are few, so that most sums are about 0. Pass "
            "--eval.dynamic.statistics_segments=1024 and --eval.dynamic.epsilon=0.01 "
            "(docs/dynamic.md)."
        )
    log(
        f"squares   of the gradients of {n_segment:,} segments of training text, in "
        f"{environment.duration(time.monotonic() - began)}"
    )
    return sums


def _missing(trained: TrainedModel, folder: str | None, mismatches: list[str]) -> str:
    """Returns the error for statistics that are needed and cannot be computed."""
    reason = "; ".join(mismatches)
    if not mismatches:
        path = path_of(trained) if folder is None else os.path.join(folder, NAME)
        reason = f"{path} is missing"
    return (
        f"eval.dynamic.rule={DynamicRule.RMS} requires squared gradients of the training text, "
        f"which is not the text that is scored, and {reason}. "
        f"Create the file with {_command(trained)}"
    )


def _command(trained: TrainedModel) -> str:
    """Returns the command that makes the file that a model needs."""
    words = ["--mode=eval", f"--eval.dynamic.rule={DynamicRule.RMS}"]
    for name in (*_SETTINGS, "eval.average_checkpoints"):
        value = config_tree.get(trained.config, name)
        if value != config_tree.get(trained.source.config, name):
            words.append(f"--{name}={format_value(value)}")

    source = trained.source
    if isinstance(source, Run):
        words.append(f"--workdir={shlex.quote(trained.path)}")
        if source.member is not None:
            words.append(f"--ensemble_member={shlex.quote(source.member)}")
        if trained.out is not None:
            words.append(f"--out={shlex.quote(trained.out)}")
        program = program_of(source.config.data.corpus)
        return f"`python -m experiments.{program} {' '.join(words)}`, on the run's own text."
    program = program_of(trained.config.data.corpus)
    return (
        f"`python -m experiments.{program} {' '.join(words)} --workdir=RUN` on the run that was "
        f"converted, and convert it again: `python -m experiments.convert --from=RUN --to=PATH`."
    )
