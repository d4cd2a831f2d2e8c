"""Trained weights at a path: config, vocabulary and parameters of a run or portable checkpoint.

`txl_jax.interop` is imported when a path is opened. A run with random initial weights does not need
it.
"""

import dataclasses
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from txl_jax.config import DynamicConfig, ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.data.corpus import Corpus
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import CheckpointError, UserError
from txl_jax.ops.attention import Implementation
from txl_jax.runs import attention_check, attention_choice
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.run import Run, check_same_attention, check_same_settings, check_same_text
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import as_path, exists, is_dir, names
from txl_jax.training.member_axis import Members
from txl_jax.training.step import TrainState

if TYPE_CHECKING:
    from txl_jax.interop.portable import ModelInfo

# Names of weight files of other implementations. Files in a bucket are not opened to find out.
_REMOTE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index", ".meta", ".ckpt", ".h5")


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model at a path. Its weights are not read before `params`."""

    # Absolute.
    path: str
    # Settings of the model and its training, with the evaluation and generation of this use.
    config: ExperimentConfig
    vocabulary: Vocabulary
    # One clause for the user: the content of the directory, and the training data of the weights.
    description: str
    # The run or its member, or the portable checkpoint's contents without the weights.
    source: "Run | ModelInfo"
    # Directory for scores and samples, or None for the model's own.
    out: str | None = None

    @classmethod
    def of_run(cls, run: Run) -> "TrainedModel":
        """Returns the model of a recorded run, or of a member."""
        member = f" ({run.member})" if run.member else ""
        description = f"the run {run.path}{member}, trained on {run.text.description}"
        return cls(run.path, run.config, run.text.vocabulary, description, run)

    @classmethod
    def of(cls, model: "Run | TrainedModel", config: ExperimentConfig) -> "TrainedModel":
        """Returns a trained model with other settings of evaluation, generation or data."""
        trained = cls.of_run(model) if isinstance(model, Run) else model
        return dataclasses.replace(trained, config=config)

    def outputs(self, *, needed: bool = False) -> str | None:
        """Returns the directory for scores and samples, or None if the model's own is read-only.

        If it returns None, it also prints a note. All processes call it.

        Raises:
          UserError: If the directory cannot be written to, and is `needed` or was passed as `out`.
        """
        return distributed.broadcast_from_primary(lambda: self._find_outputs(needed=needed))

    def _find_outputs(self, *, needed: bool) -> str | None:
        """Returns the result of `outputs`, in process 0."""
        try:
            if self.out:
                folder = self.out
            elif isinstance(self.source, Run):
                folder = self.source.outputs
            else:
                folder = self.path
            storage.probe(folder)
        except OSError as error:
            reason = f"cannot write to {self.out or self.path} ({error.strerror or error})"
            if needed or self.out:
                raise UserError(f"{reason}. Pass a writable directory as --out.") from error
            say(f"note      no file will be written: {reason}. Pass --out to write elsewhere.")
            return None
        return folder

    def build(
        self,
        *,
        log: Callable[[str], None] = lambda line: None,
        uses: Collection[str] = ("evaluation",),
    ) -> Built:
        """Builds the model on its config's mesh, a run's with its recorded attention.

        All processes call it.

        Args:
          log: Receives a line about the attention of evaluation, if it is not the recorded one.
          uses: Where attention will run, as in `runs.build.build`.

        Raises:
          UserError: If settings do not match the devices.
        """
        # For settings that a run's recorded choice was not made for, this only names a path, such
        # as "auto".
        recorded = self.source.attention_for(self.config) if isinstance(self.source, Run) else None
        built = attention_check.build_on_all(
            lambda: build_for(self.config, self.vocabulary, recorded=recorded, uses=uses)
        )
        check_same_attention(built.attention)
        if built.attention is None or "evaluation" not in uses:
            return built

        # The log names attention only if it is not the recorded one, or if one failed here.
        # With `before`, the line is empty if the recorded path is used again.
        before = None
        if recorded is not None and isinstance(recorded.cached, Implementation):
            before = {"evaluation": str(recorded.cached)}
        if before or built.attention.cached.replaces_failed:
            line = attention_choice.describe(built.attention, before)
            if line:
                log(f"attention: {line}")
        return built

    def params(
        self, built: Built, *, log: Callable[[str], None] = lambda line: None
    ) -> tuple[int, Any]:
        """Loads the parameters onto the mesh, in their shardings.

        For a run see `load_parameters`. From a portable checkpoint each device reads its own part
        of the file.

        Args:
          built: This config's `model`, built on any mesh.
          log: Receives one line.

        Returns:
          (training steps, parameters).

        Raises:
          UserError: If no checkpoint exists yet.
          CheckpointError: If the weights are corrupted or belong to another model.
        """
        if isinstance(self.source, Run):
            return load_parameters(built, self.source, log=log)
        from txl_jax.interop import portable

        leaves = distributed.run_on_all(lambda: portable.read_leaves(self.path))
        return self.source.step, portable.place(leaves, built.abstract_state.params)


def open_weights(
    path: str | os.PathLike[str],
    *,
    member: str | None = None,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
) -> TrainedModel:
    """Opens a trained model's directory, which is a run's workdir or a portable checkpoint.

    Portable checkpoints are described in `interop.portable`. All processes call it, and not within
    `distributed.run_on_all`.

    Args:
      path: The directory.
      member: The ensemble member, if the directory contains an ensemble.
      weight_dtype: `eval.weight_dtype`, or None for the model's own setting.
      cache_dtype: `eval.cache_dtype`, or None for the model's own setting. With either dtype the
        model has no `eval.dynamic`.

    Raises:
      UserError: If the run or member does not exist, its files cannot be read, or the model cannot
        have these dtypes.
    """
    folder = as_path(path)
    try:
        trained = TrainedModel.of_run(Run.read(folder, member=member))
    except UserError as error:
        # It may be a portable checkpoint. Otherwise this raises the same or a more specific error.
        trained = _open_portable(folder, member, error)

    dtypes: dict[str, str] = {}
    if weight_dtype is not None:
        dtypes["eval.weight_dtype"] = weight_dtype
    if cache_dtype is not None:
        dtypes["eval.cache_dtype"] = cache_dtype
    if not dtypes:
        return trained
    # These dtypes do not allow dynamic evaluation. They therefore imply fixed weights, even if the
    # run's own evaluations learn.
    changes = dtypes | {"eval.dynamic": DynamicConfig()}
    config = config_tree.replace(trained.config, changes)
    config.validate()
    return dataclasses.replace(trained, config=config)


def _open_portable(folder: str, member: str | None, no_run: UserError) -> TrainedModel:
    """Opens a portable checkpoint.

    Raises `no_run` or a more specific error if the directory does not contain one.
    """
    from txl_jax.interop import portable

    # Process 0 decides, so that all processes take the same branch, whatever files they see.
    distributed.broadcast_from_primary(lambda: _require_portable(folder, member, no_run))
    info = distributed.run_on_all(lambda: portable.read_info(folder))
    description = f"the model {folder}, {info.description}"
    return TrainedModel(folder, info.config, info.vocabulary, description, info)


def _require_portable(folder: str, member: str | None, no_run: UserError) -> None:
    """Raises the most specific error, unless a directory contains a portable checkpoint."""
    from txl_jax.interop import exported, portable

    if portable.is_portable(folder):
        require(
            member is None,
            f"the ensemble member is {member!r}, but {folder} contains one model. Omit the member.",
        )
        return
    if exported.is_exported(folder):
        raise UserError(
            f"{folder} is an exported model (docs/export.md). "
            "Pass the directory it was exported from."
        )
    if holds_other_weights(folder):
        raise UserError(
            f"{folder} contains another implementation's weights. Convert them with "
            f"`python -m experiments.convert --from={folder} --to=NEW_DIRECTORY` first."
        )
    raise no_run


def holds_other_weights(path: str) -> bool:
    """Returns whether a path contains another implementation's weights (`interop.weight_files`).

    Raises `UserError` if they cannot be read.
    """
    from txl_jax.interop import exported, weight_files

    # A run and an exported model may also contain files with such names.
    if is_dir(path) and (exists(os.path.join(path, "checkpoints")) or exported.is_exported(path)):
        return False
    if not storage.is_remote(path):
        return weight_files.find(Path(path)) is not None
    if is_dir(path):
        return any(name.endswith(_REMOTE_SUFFIXES) for name in names(path))
    return exists(path) and path.endswith(_REMOTE_SUFFIXES)


def load_to_score(
    config: ExperimentConfig,
    corpus: Corpus,
    model: Run | TrainedModel,
    *,
    log: Callable[[str], None],
) -> tuple[Built, int, Any]:
    """Loads a trained model to score a text of the same vocabulary.

    All processes call it.

    Returns:
      (the built model, step, parameters).

    Raises:
      UserError: If settings or text differ between processes, or the text was read in another
        vocabulary.
    """
    check_same_settings(config)
    check_same_text(corpus)
    trained = TrainedModel.of(model, config)
    require(
        corpus.vocabulary == trained.vocabulary,
        f"this is {trained.description}, with {trained.vocabulary.size} tokens, "
        f"but {corpus.description!r} was read in another vocabulary, of "
        f"{corpus.vocabulary.size} tokens. Read it in the model's vocabulary.",
    )

    # Only a run records the text that its model was trained on. If the scored text may be another
    # one, it is logged.
    is_own_text = isinstance(trained.source, Run) and corpus.digest == trained.source.text.digest
    if not is_own_text:
        log(f"note      scored text: {corpus.description}. Model: {trained.description}.")
    built = trained.build(log=log)
    step, params = trained.params(built, log=log)
    return built, step, params


def load_parameters(built: Built, run: Run, *, log: Callable[[str], None]) -> tuple[int, Any]:
    """Loads the best parameters of a run, or its latest before the first evaluation.

    With `eval.average_checkpoints` it loads the mean of that many latest checkpoints instead. With
    JAX_ENABLE_X64 parameters are read as float64, and the model computes in its own dtype as ever.

    Returns:
      (step, parameters). For a mean, it is the step of the last checkpoint.

    Raises:
      UserError: If the run has too few checkpoints.
      CheckpointError: If none can be read.
    """
    n_averaged = built.config.eval.average_checkpoints
    if n_averaged:
        return _mean_of_latest(built, run, n_averaged, log=log)

    has_best, has_latest = distributed.broadcast_from_primary(
        lambda: [exists(run.best), exists(run.latest)]
    )
    if has_best:
        try:
            with Checkpointer(run.best, keep=1, log=log) as best:
                # float32 parameters may be restored as float64, if the config asks for it.
                restored = best.restore({"params": built.abstract_state.params}, casts=True)
            if restored is not None:
                step, tree, _ = restored
                return step, tree["params"]
        except CheckpointError as error:
            if not has_latest:
                raise
            log(str(error))

    if has_latest:
        latest = load_state(built, run, log=log, casts=True)
        if latest is not None:
            log("note      no best checkpoint is available, so the latest parameters are used")
            step, state, _ = latest
            return step, state.scored_params
    raise UserError(f"{run.path} has no checkpoint yet. Train it first (--mode=train).")


def load_state(
    built: Built,
    run: Run,
    *,
    log: Callable[[str], None],
    before: int | None = None,
    casts: bool = False,
) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Loads the latest valid training state.

    Args:
      built: The model, for the shapes and shardings of the state.
      run: The run. For a chosen ensemble member, its state is loaded, with the notes of all
        members.
      log: Receives one line.
      before: If set, only states before that step count.
      casts: As in `Checkpointer.restore`.

    Returns:
      (step, state, notes), or None if no step exists.
    """
    members = Members(run.member_names)
    index = run.member_names.index(run.member) if run.member else 0
    with Checkpointer(run.latest, keep=built.config.train.keep_checkpoints, log=log) as latest:
        restored = latest.restore(
            members.abstract(built.abstract_state), before=before, casts=casts
        )
    if restored is None:
        return None
    step, state, notes = restored
    return step, members.take(state, index), notes


def _mean_of_latest(
    built: Built, run: Run, count: int, *, log: Callable[[str], None]
) -> tuple[int, Any]:
    """Averages the scored parameters of the latest checkpoints.

    Returns the last step and the mean.
    """
    steps: list[int] = []  # In descending order.
    total: Any = None
    while len(steps) < count:
        before = steps[-1] if steps else None
        restored = load_state(built, run, log=log, before=before, casts=True)
        if restored is None:
            raise UserError(
                f"eval.average_checkpoints must be at most {len(steps)} (found in {run.latest}), "
                f"got {count}. Lower it, or train with more --train.keep_checkpoints."
            )
        step, state, _ = restored
        steps.append(step)
        if total is None:
            total = state.scored_params
        else:
            total = jax.tree.map(jnp.add, total, state.scored_params)

    in_order = ", ".join(map(str, reversed(steps)))
    log(f"note      parameters are the mean of the checkpoints at steps {in_order}")
    return steps[0], jax.tree.map(lambda leaf: leaf / count, total)
