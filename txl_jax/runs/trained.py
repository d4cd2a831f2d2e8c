"""Trained weights at a path: config, vocabulary and parameters of a run or portable checkpoint.

`txl_jax.interop` is imported when a path is opened: a run that begins at random needs none of it.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from txl_jax.config import ExperimentConfig, config_tree
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

# Files of weights that other programs write, by their names: those in a bucket are not opened.
_REMOTE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index", ".meta", ".ckpt", ".h5")


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model at a path. Its weights are not read before `params`."""

    # Absolute.
    path: str
    # Of the model and of its training.
    config: ExperimentConfig
    vocabulary: Vocabulary
    # One clause for the user: what the directory contains, and what the weights were trained on.
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
        return dataclasses.replace(
            cls.of_run(model) if isinstance(model, Run) else model, config=config
        )

    def outputs(self, *, needed: bool = False) -> str | None:
        """Returns the directory for scores and samples, or None if the model's own is read-only.

        If it returns None, it also prints a note.

        Raises `UserError` instead if the directory is `needed`, or if `out` cannot be written to.
        """

        def find() -> str | None:
            try:
                folder = self.out or (
                    self.source.outputs if isinstance(self.source, Run) else self.path
                )
                storage.probe(folder)
                return folder
            except OSError as error:
                found = f"cannot write to {self.out or self.path} ({error.strerror or error})"
                require(
                    not needed and not self.out, f"{found}. Pass a writable directory as --out."
                )
                say(f"note      no file will be written: {found}. Pass --out to write elsewhere.")
                return None

        return distributed.broadcast_from_primary(find)

    def build(self, *, log: Callable[[str], None] = lambda line: None) -> Built:
        """Builds the model on its config's mesh, a run's with its recorded attention.

        All processes call it.

        Raises `UserError` if settings do not match the devices.
        """
        recorded = self.source.attention_for(self.config) if isinstance(self.source, Run) else None
        built = attention_check.build_on_all(
            lambda: build_for(self.config, self.vocabulary, recorded=recorded, uses=["evaluation"])
        )
        check_same_attention(built.attention)
        # Settings that the recorded choice was not made for have none: then nothing was replaced.
        before = None
        if recorded is not None and isinstance(recorded.cached, Implementation):
            before = {"evaluation": str(recorded.cached)}
        if built.attention is not None and (before or built.attention.cached.replaces_failed):
            line = attention_choice.describe(built.attention, before)
            if line:  # It is empty if the recorded path is used again.
                log(f"attention: {line}")
        return built

    def params(
        self, built: Built, *, log: Callable[[str], None] = lambda line: None
    ) -> tuple[int, Any]:
        """Loads the parameters onto the mesh, in their shardings: (training steps, parameters).

        For a run see `load_parameters`. From a portable checkpoint each device reads its own part
        of the file. `built` has this config's `model`, on any mesh. Raises `UserError` if no
        checkpoint exists yet, and `CheckpointError` if the weights are corrupted or belong to
        another model.
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

    Portable checkpoints are described in `interop.portable`.

    Takes the arguments of `txl_jax.load`. All processes call it, and not within
    `distributed.run_on_all`. Raises `UserError` if the run or member does not exist, its files
    cannot be read, or the model cannot have these dtypes.
    """
    folder = as_path(path)
    try:
        found = TrainedModel.of_run(Run.read(folder, member=member))
    except UserError as error:
        found = _open_portable(folder, member, error)
    given = {"eval.weight_dtype": weight_dtype, "eval.cache_dtype": cache_dtype}
    if changes := {name: dtype for name, dtype in given.items() if dtype is not None}:
        found = dataclasses.replace(found, config=config_tree.replace(found.config, changes))
        found.config.validate()
    return found


def _open_portable(folder: str, member: str | None, no_run: UserError) -> TrainedModel:
    """Opens a portable checkpoint.

    Raises `no_run`, or an error that says more, if the directory contains none.
    """
    from txl_jax.interop import exported, portable

    def check() -> None:
        if portable.is_portable(folder):
            one = (
                f"the ensemble member is {member!r}, but {folder} contains one model. "
                "Omit the member."
            )
            require(member is None, one)
        elif exported.is_exported(folder):
            raise UserError(
                f"{folder} is an exported model (docs/export.md). "
                "Pass the directory it was exported from."
            )
        elif holds_other_weights(folder):
            convert = f"`python -m experiments.convert --from={folder} --to=NEW_DIRECTORY`"
            raise UserError(
                f"{folder} contains another implementation's weights. "
                f"Convert them with {convert} first."
            )
        else:
            raise no_run

    # Process 0 decides, so that all processes go the same way, whatever each of them sees.
    distributed.broadcast_from_primary(check)
    info = distributed.run_on_all(lambda: portable.read_info(folder))
    return TrainedModel(
        folder, info.config, info.vocabulary, f"the model {folder}, {info.description}", info
    )


def holds_other_weights(path: str) -> bool:
    """Returns whether a path has another implementation's weights (`interop.weight_files`).

    Raises `UserError` if they cannot be read.
    """
    from txl_jax.interop import exported, weight_files

    if is_dir(path) and (exists(os.path.join(path, "checkpoints")) or exported.is_exported(path)):
        return False
    if storage.is_remote(path):
        if not is_dir(path):
            return exists(path) and path.endswith(_REMOTE_SUFFIXES)
        return any(name.endswith(_REMOTE_SUFFIXES) for name in names(path))
    return weight_files.find(Path(path)) is not None


def load_to_score(
    config: ExperimentConfig,
    corpus: Corpus,
    model: Run | TrainedModel,
    *,
    log: Callable[[str], None],
) -> tuple[Built, int, Any]:
    """Loads a trained model to score a text of the same vocabulary.

    Returns (the built model, step, parameters).
    """
    check_same_settings(config)
    check_same_text(corpus)
    weights = TrainedModel.of(model, config)
    theirs, ours = weights.vocabulary, corpus.vocabulary
    trained, scored = (
        f"{weights.description}, with {theirs.size} tokens",
        f"{corpus.description!r} was read with",
    )
    require(
        ours == theirs,
        f"this is {trained}, but {scored} {ours.size} or others. "
        "Read it in the model's vocabulary.",
    )
    if not isinstance(weights.source, Run) or corpus.digest != weights.source.text.digest:
        log(f"note      scored text: {corpus.description}. Model: {weights.description}.")
    built = weights.build(log=log)
    return built, *weights.params(built, log=log)


def load_parameters(built: Built, run: Run, *, log: Callable[[str], None]) -> tuple[int, Any]:
    """Loads the best parameters of a run, or its latest before the first evaluation.

    Returns (step, parameters).

    With JAX_ENABLE_X64 they are read as float64, and the model computes in its own dtype as ever.
    With `eval.average_checkpoints` it is the mean of that many latest checkpoints, and the step of
    the last. Raises `UserError` if the run has too few checkpoints, and `CheckpointError` if none
    can be read.
    """
    if count := built.config.eval.average_checkpoints:
        return _mean_of_latest(built, run, count, log=log)
    has_best, has_latest = distributed.broadcast_from_primary(
        lambda: [exists(run.best), exists(run.latest)]
    )
    if has_best:
        try:
            with Checkpointer(run.best, keep=1, log=log) as best:
                restored = best.restore({"params": built.abstract_state.params}, casts=True)
            if restored is not None:
                return restored[0], restored[1]["params"]
        except CheckpointError as error:
            if not has_latest:
                raise
            log(str(error))
    if has_latest:
        latest = load_state(built, run, log=log, casts=True)
        if latest is not None:
            log("note      no best checkpoint is available, so the latest parameters are used")
            return latest[0], latest[1].scored_params
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

    If `before` is passed, only states before that step count. Returns (step, state, notes), or None
    if no step exists.

    For a chosen ensemble member it is that member's state, with the notes of all members. `casts`
    is as in `Checkpointer.restore`.
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
    steps: list[int] = []
    total = None
    while len(steps) < count:
        restored = load_state(built, run, log=log, before=steps[-1] if steps else None, casts=True)
        if restored is None:
            what = (
                f"eval.average_checkpoints must be at most {len(steps)} (found "
                f"in {run.latest}), got {count}"
            )
            raise UserError(f"{what}. Lower it, or train with more --train.keep_checkpoints.")
        steps.append(restored[0])
        params = restored[1].scored_params
        total = params if total is None else jax.tree.map(jnp.add, total, params)
    log(
        "note      parameters are the mean of the checkpoints at steps "
        f"{', '.join(map(str, reversed(steps)))}"
    )
    return steps[0], jax.tree.map(lambda leaf: leaf / count, total)
