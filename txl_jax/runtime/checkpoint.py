"""Checkpoints that a run can trust after any kind of stop.

Orbax writes and reads the arrays: asynchronously, sharded, under a temporary name until all is there. Digests and the
fallback to an earlier step are added here, because a flipped byte in Orbax's files restores silently:

    <directory>/200/state/...          arrays, as Orbax lays them out
    <directory>/200/notes/...          a small JSON object
    <directory>/200/digests.json       sha256 of every other file of the step; written last, so it vouches for them
    <directory>/200.replaced-1/        the earlier 200, while a run that fell back past it writes 200 again
    <directory>/100.deleted/           a step that is being deleted

On object storage, which has no rename, `step_folders` has other names for the last two.

Old steps are deleted only after the new one has its digests, so at no time is there less to go back to than before the
save. That is why Orbax's CheckpointManager is not used: it deletes right after the commit, and its list of steps goes
stale when steps are replaced. Opening a directory and restoring from it write nothing: that is safe beside
a running job.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orbax.checkpoint as ocp

from txl_jax.errors import CheckpointError, UserError
from txl_jax.runtime import distributed, integrity, step_folders
from txl_jax.runtime.array_trees import describe_arrays, describe_difference, drop_empty, restore_empty
from txl_jax.runtime.orbax_io import open_reader, open_writer, short_error
from txl_jax.runtime.paths import as_path, is_remote
from txl_jax.runtime.step_folders import StepFolder


class Checkpointer:
    """The checkpoints in one directory. Use it as a context manager, in every process of a run alike.

    `latest_step` and `notes` may be called by one process alone; all else must be called by all processes.

    Args:
      directory: on a file system that all processes see, or a URL such as gs://bucket/run/checkpoints; made by the
        first save.
      keep: how many of the newest steps are kept; at least 1.
      log: takes one line for people, such as why a step was skipped.

    Raises:
      UserError: keep is below 1, or nothing here can open such a URL.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int, log: Callable[[str], None]):
        if keep < 1:
            raise UserError(f"keep is {keep} and must be at least 1: the newest checkpoint always stays")
        self._directory = as_path(directory) if is_remote(directory) else Path(os.path.abspath(directory))
        self._keep = keep
        self._log = log
        self._writer: ocp.AsyncCheckpointer | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "checkpoint_digests")
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as second:
            if error is None:
                raise
            self._log(str(second))  # Raised, it would hide the error that ended the block.

    def close(self) -> None:
        """Waits for the save in progress and frees the threads; nothing happens the second time.

        Raises:
          CheckpointError: the save failed.
        """
        try:
            self.wait()
        finally:
            self._threads.shutdown()
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    # Writing

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Starts writing a step; returns once the arrays are copied to the host, so they may be donated.

        An existing checkpoint of this step is replaced, and later steps are deleted, once the new one is verified: they
        belong to a run that was given up when this one fell back.

        Args:
          step: at least 0.
          state: a pytree of arrays, the same structure that will be restored.
          notes: a small JSON object stored beside it.

        Raises:
          CheckpointError: this save cannot start, or the one before it failed.
          RemoteProcessError: the same, in the other processes.
        """
        distributed.run_on_all(self.wait)
        path = self._directory / distributed.broadcast_from_primary(lambda: self._prepare_folder(step))
        try:
            if self._writer is None:
                self._writer = open_writer(self._directory.name)
            args = ocp.args.Composite(state=ocp.args.StandardSave(drop_empty(state)), notes=ocp.args.JsonSave(notes))
            self._writer.save(os.fspath(path), args=args)
        except Exception as error:
            self._writer = None
            raise self._not_written(step, error) from error
        self._pending = step, self._threads.submit(self._finish, self._writer, StepFolder(step, path))

    def sweep(self) -> None:
        """Deletes what killed runs left behind; only for the run that writes here, and not during a save."""
        if distributed.is_primary():
            step_folders.sweep(self._directory)

    def wait(self) -> None:
        """Returns once the last save is on disk with its digests.

        Raises:
          CheckpointError: it failed. The steps before it are intact, and saving may be tried again.
        """
        if self._pending is None:
            return
        step, future = self._pending
        concurrent.futures.wait([future])
        self._pending = None
        if error := future.exception():
            self._writer = None
            raise self._not_written(step, error) from error

    def _prepare_folder(self, step: int) -> str:
        """Deletes what killed runs left behind, and returns the name of the folder for a step."""
        try:
            return self._clear_step(step).name
        except (OSError, CheckpointError) as error:
            raise self._not_written(step, error) from error

    def _clear_step(self, step: int) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.sweep()
        if newer := sorted({other.step for other in self._candidates() if other.step > step}):
            self._log(
                f"checkpoints of steps {', '.join(map(str, newer))} in {self._directory} come after step {step} that "
                "is being saved: they are of a run that was given up, and are deleted when the new one is verified"
            )
        return step_folders.new(self._directory, step)

    def _finish(self, writer: ocp.AsyncCheckpointer, written: StepFolder) -> None:
        """Waits for the commit, writes the digests, then deletes steps no longer kept; runs in the background."""
        writer.wait_until_finished()
        if not distributed.is_primary():
            return
        integrity.write_digests(written.path)
        found = [other for other in self._candidates() if not step_folders.is_replaced(other.path)]
        older = {other.step: other for other in reversed(found) if other.step < written.step}
        # Steps without digests are deleted first.
        best = sorted(older.values(), key=lambda other: (integrity.is_verified(other.path), other.step), reverse=True)
        kept = {written.path, *(other.path for other in best[: self._keep - 1])}
        for other in self._candidates():
            if other.path not in kept:
                step_folders.delete(other.path)

    def _not_written(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._directory} ({short_error(error)}); "
            "free space or allow writing there, then resume: earlier checkpoints are untouched"
        )

    # Reading

    def latest_step(self) -> int | None:
        """Returns the newest step on disk, verified or not; None if there is none."""
        self.wait()
        return max((candidate.step for candidate in self._candidates()), default=None)

    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes of a step, without reading its arrays.

        Raises:
          CheckpointError: there is no such step, or its notes cannot be read.
        """
        self.wait()
        candidates = self._candidates()
        path = next((candidate.path for candidate in candidates if candidate.step == step), None)
        if path is None:
            found = sorted({candidate.step for candidate in candidates})
            raise CheckpointError(f"there is no checkpoint of step {step} in {self._directory}; there are {found}")
        try:
            asked = ocp.args.Composite(notes=ocp.args.JsonRestore())
            notes: dict[str, Any] = open_reader(alone=True).restore(os.fspath(path), args=asked).notes
        except Exception as error:
            raise CheckpointError(
                f"the notes of checkpoint {path} cannot be read ({short_error(error)}); use another step"
            ) from error
        return notes

    def restore(self, abstract_state: Any, *, before: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores the newest undamaged checkpoint: verified steps first, then those without digests.

        Each step that is skipped is logged in a line. Nothing on disk is changed.

        Args:
          abstract_state: a pytree like the saved one, of jax.ShapeDtypeStruct with shardings, or of arrays.
          before: only steps before this one; None: any.

        Returns:
          (step, state with the shardings of `abstract_state`, notes); None if there is no step at all.

        Raises:
          CheckpointError: there are steps and none restores, or they are of another model.
        """
        distributed.run_on_all(self.wait)
        # The steps that process 0 finds: all must try the same ones.
        found = distributed.broadcast_from_primary(lambda: [(each.step, each.path.name) for each in self._candidates()])
        candidates = [
            StepFolder(step, self._directory / name) for step, name in found if before is None or step < before
        ]
        if not candidates:
            return None
        unverified: list[StepFolder] = []
        tried: list[str] = []
        for candidate in candidates:
            # It is enough that one process reads every byte, and all must restore the same step.
            damage = distributed.broadcast_from_primary(functools.partial(integrity.find_damage, candidate.path))
            if damage == integrity.NO_DIGESTS:
                unverified.append(candidate)
                self._log(f"checkpoint {candidate.path} is unverified ({damage}): verified ones are tried first")
            elif damage is not None:
                self._skip(candidate, damage, tried)
            elif restored := self._try_restore(candidate, abstract_state, tried, is_verified=True):
                return restored
        for candidate in unverified:
            self._log(f"no verified checkpoint could be restored: trying the unverified {candidate.path}")
            if restored := self._try_restore(candidate, abstract_state, tried, is_verified=False):
                return restored
        raise CheckpointError(
            f"none of the checkpoints in {self._directory} can be restored ({'; '.join(tried)}); "
            "bring back a copy of one, or move them away to start anew"
        )

    def _skip(self, candidate: StepFolder, damage: str, tried: list[str]) -> None:
        tried.append(f"{candidate.path.name}: {damage}")
        self._log(f"checkpoint {candidate.path} is skipped, an older one is tried: {damage}")

    def _try_restore(
        self, candidate: StepFolder, abstract_state: Any, tried: list[str], *, is_verified: bool
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores a step; None if Orbax cannot. Raises for another model's step: an older one would be no better."""
        reader = open_reader()
        wanted = drop_empty(abstract_state)
        restored, difference, failure = None, "", None
        try:
            saved = reader.metadata(os.fspath(candidate.path)).item_metadata.state.tree
            difference = describe_difference(describe_arrays(saved), describe_arrays(wanted))
            if not difference:
                args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), notes=ocp.args.JsonRestore())
                restored = reader.restore(os.fspath(candidate.path), args=args)
        except Exception as error:  # noqa: BLE001 (damage shows as nearly any type)
            failure = short_error(error)
        if failure := distributed.first_error(failure):
            if is_verified and is_remote(candidate.path):  # An older one would undo updates because of the network.
                raise UserError(f"cannot read {candidate.path} ({failure}); start again once it can be reached")
            self._skip(candidate, f"Orbax cannot restore it ({failure})", tried)
            return None
        if restored is not None:
            return candidate.step, restore_empty(restored.state, abstract_state), restored.notes
        raise CheckpointError(
            f"checkpoint {candidate.path} is of another model ({difference}); "
            "use the configuration that it was saved with, or another directory"
        )

    def _candidates(self) -> list[StepFolder]:
        """The steps on disk, newest first; of one step the one that was written last comes first."""
        return step_folders.find(self._directory)
