"""Checkpoints that a run can trust after any kind of stop.

Orbax writes and reads the arrays: asynchronously, sharded, under a temporary name until all is there. Digests and the
fallback to an earlier step are added here, because a flipped byte in Orbax's files restores silently:

    <directory>/200/state/...          arrays, as Orbax lays them out
    <directory>/200/notes/...          a small JSON object
    <directory>/200/digests.json       sha256 of every other file of the step; written last, so it vouches for them
    <directory>/200.replaced-1/        the earlier 200, while a run that fell back past it writes 200 again
    <directory>/100.deleted/           a step that is being deleted

Object storage has no rename. A step there is complete once Orbax has written `commit_success.txt`, which is the last
object that it writes and the first that is deleted. A step that exists already is written again as 200.again-1.

Old steps are deleted only after the new one has its digests, so at no time is there less to go back to than before the
save. That is why Orbax's CheckpointManager is not used: it deletes right after the commit, and its list of steps goes
stale when steps are replaced. Opening a directory and restoring from it write nothing, so both are safe while a run
writes there.
"""

import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from txl_jax.errors import CheckpointError, UserError
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.storage import AnyPath, is_remote

DIGESTS = "digests.json"
NO_DIGESTS = "it has no digests"
COMMIT = "commit_success.txt"  # Orbax's name.
_STEP = re.compile(r"(0|[1-9]\d*)(?:\.(replaced|again)-(\d+))?")
_LEFTOVER = re.compile(r".*\.orbax-checkpoint-tmp.*|.*\.deleted")
_SAVE_TIMEOUT_SECONDS = 30 * 86400


class Checkpointer:
    """The checkpoints in one directory. Use it as a context manager, in every process of a run alike.

    `latest_step` and `notes` may be called by one process alone; all else must be called by all processes.

    Args:
      directory: On a file system that all processes see, or a URL such as gs://bucket/run/checkpoints; made by the
        first save.
      keep: How many of the latest steps are kept; at least 1.
      log: Takes one line, such as why a step was skipped.

    Raises:
      UserError: If keep is below 1, or nothing here can open such a URL.
    """

    def __init__(self, directory: AnyPath, *, keep: int, log: Callable[[str], None]):
        if keep < 1:
            raise UserError(f"keep is {keep} and must be at least 1: the newest checkpoint always stays")
        self._directory = storage.as_path(directory) if is_remote(directory) else os.path.abspath(directory)
        self._keep = keep
        self._log = log
        self._writer: ocp.AsyncCheckpointer | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "checkpoint_digests")
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except CheckpointError as second:
            if error is None:
                raise
            self._log(str(second))  # Raised, it would hide the error that ended the block.

    def close(self) -> None:
        """Waits for the save in progress and frees the threads; nothing happens the second time.

        Raises:
          CheckpointError: If the save failed.
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
          step: At least 0.
          state: A pytree of arrays, the same structure that will be restored.
          notes: A small JSON object stored with it.

        Raises:
          CheckpointError: If this save cannot start, or the one before it failed.
          RemoteProcessError: The same, in the other processes.
        """
        distributed.run_on_all(self.wait)
        name = distributed.broadcast_from_primary(lambda: self._prepare(step))
        path = os.path.join(self._directory, name)
        try:
            if self._writer is None:
                self._writer = _open_writer(os.path.basename(self._directory))
            args = ocp.args.Composite(state=ocp.args.StandardSave(_drop_empty(state)), notes=ocp.args.JsonSave(notes))
            self._writer.save(path, args=args)
        except Exception as error:
            self._writer = None
            raise self._not_written(step, error) from error
        self._pending = step, self._threads.submit(self._finish, self._writer, StepFolder(step, path))

    def sweep(self) -> None:
        """Deletes what killed runs left behind; only for the run that writes here, and not during a save.

        Raises:
          CheckpointError: If the directory cannot be read.
        """
        if not distributed.is_primary():
            return
        with _reading(self._directory):
            if is_remote(self._directory):
                left = [match[0] for match in _matches(self._directory) if not _is_committed(self._directory, match)]
            else:
                found = storage.names(self._directory) if storage.is_dir(self._directory) else []
                left = [name for name in found if _LEFTOVER.fullmatch(name)]
        for name in left:
            storage.remove_tree(os.path.join(self._directory, name))

    def wait(self) -> None:
        """Returns once the last save is on disk with its digests.

        Raises:
          CheckpointError: If it failed. The steps before it are intact, and saving may be tried again.
        """
        if self._pending is None:
            return
        step, future = self._pending
        concurrent.futures.wait([future])
        self._pending = None
        if error := future.exception():
            self._writer = None
            raise self._not_written(step, error) from error

    def _prepare(self, step: int) -> str:
        """Deletes what killed runs left behind, and returns the name of the folder for a step."""
        try:
            storage.make_folder(self._directory)
            self.sweep()
            if newer := sorted({other.step for other in find_steps(self._directory) if other.step > step}):
                self._log(
                    f"checkpoints of steps {', '.join(map(str, newer))} in {self._directory} come after step {step} "
                    "that is being saved: they are of a run that was given up, and are deleted when the new one is "
                    "verified"
                )
            return os.path.basename(new_step_folder(self._directory, step))
        except (OSError, CheckpointError) as error:
            raise self._not_written(step, error) from error

    def _finish(self, writer: ocp.AsyncCheckpointer, written: "StepFolder") -> None:
        """Waits for the commit, writes the digests, then deletes steps no longer kept; runs in the background."""
        writer.wait_until_finished()
        if not distributed.is_primary():
            return
        files = {os.path.relpath(file, written.path): file for file in storage.files_below(written.path)}
        digests = {name: storage.sha256(file) for name, file in files.items() if name != DIGESTS}
        storage.write_json(os.path.join(written.path, DIGESTS), digests)
        found = find_steps(self._directory)
        older = {
            other.step: other.path
            for other in reversed(found)
            if other.step < written.step and ".replaced-" not in os.path.basename(other.path)
        }
        # Steps without digests are deleted first.
        best = sorted(older, key=lambda step: (is_verified(older[step]), step), reverse=True)
        kept = {written.path, *(older[step] for step in best[: self._keep - 1])}
        for other in found:
            if other.path not in kept:
                delete_step(other.path)

    def _not_written(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._directory} ({_short(error)}); "
            "free space or allow writing there, then resume: earlier checkpoints are untouched"
        )

    # Reading

    def latest_step(self) -> int | None:
        """Returns the latest step on disk, verified or not; None if there is none."""
        self.wait()
        return max((found.step for found in find_steps(self._directory)), default=None)

    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes of a step, without reading its arrays.

        Raises:
          CheckpointError: If the step does not exist, or its notes cannot be read.
        """
        self.wait()
        found = find_steps(self._directory)
        path = next((candidate.path for candidate in found if candidate.step == step), None)
        if path is None:
            steps = sorted({candidate.step for candidate in found})
            raise CheckpointError(f"there is no checkpoint of step {step} in {self._directory}; there are {steps}")
        try:
            asked = ocp.args.Composite(notes=ocp.args.JsonRestore())
            notes: dict[str, Any] = _open_reader(alone=True).restore(path, args=asked).notes
        except Exception as error:
            raise CheckpointError(
                f"the notes of checkpoint {path} cannot be read ({_short(error)}); use another step"
            ) from error
        return notes

    def restore(self, abstract_state: Any, *, before: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores the latest undamaged checkpoint: verified steps first, then those without digests.

        Each step that is skipped is logged in a line. Nothing on disk is changed.

        Args:
          abstract_state: A pytree like the saved one, of jax.ShapeDtypeStruct with shardings, or of arrays.
          before: Only steps before this one, or None for any.

        Returns:
          (step, state with the shardings of `abstract_state`, notes); None if there is no step at all.

        Raises:
          CheckpointError: If there are steps and none restores, or they are of another model.
        """
        distributed.run_on_all(self.wait)
        # The steps that process 0 finds: all must try the same ones.
        found = distributed.broadcast_from_primary(
            lambda: [(each.step, os.path.basename(each.path)) for each in find_steps(self._directory)]
        )
        paths = [(step, os.path.join(self._directory, name)) for step, name in found]
        candidates = [StepFolder(step, path) for step, path in paths if before is None or step < before]
        if not candidates:
            return None
        unverified: list[StepFolder] = []
        tried: list[str] = []
        for candidate in candidates:
            # It is enough that one process reads every byte, and all must restore the same step.
            damage = distributed.broadcast_from_primary(functools.partial(find_damage, candidate.path))
            if damage == NO_DIGESTS:
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

    def _skip(self, candidate: "StepFolder", damage: str, tried: list[str]) -> None:
        tried.append(f"{os.path.basename(candidate.path)}: {damage}")
        self._log(f"checkpoint {candidate.path} is skipped, an older one is tried: {damage}")

    def _try_restore(
        self, candidate: "StepFolder", abstract_state: Any, tried: list[str], *, is_verified: bool
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores a step; None if Orbax cannot. Raises for another model's step: an older one would be no better."""
        reader, wanted = _open_reader(), _drop_empty(abstract_state)
        restored, difference, failure = None, "", None
        try:
            saved = reader.metadata(candidate.path).item_metadata.state.tree
            difference = describe_difference(describe_arrays(saved), describe_arrays(wanted))
            if not difference:
                args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), notes=ocp.args.JsonRestore())
                restored = reader.restore(candidate.path, args=args)
        except Exception as error:  # noqa: BLE001 (damage shows as nearly any type)
            failure = _short(error)
        if failure := distributed.first_error(failure):
            if is_verified and is_remote(candidate.path):  # An older one would undo updates because of the network.
                raise UserError(f"cannot read {candidate.path} ({failure}); start again once it can be reached")
            self._skip(candidate, f"Orbax cannot restore it ({failure})", tried)
            return None
        if restored is not None:
            return candidate.step, _restore_empty(restored.state, abstract_state), restored.notes
        raise CheckpointError(
            f"checkpoint {candidate.path} is of another model ({difference}); "
            "use the configuration that it was saved with, or another directory"
        )


# The folders of steps


class StepFolder(NamedTuple):
    """A step on disk; the same step may be there twice, if a run fell back past it and came to it again."""

    step: int
    path: str


def find_steps(directory: AnyPath) -> list[StepFolder]:
    """Returns the complete steps, latest first; of one step the one that was written last comes first.

    Raises:
      CheckpointError: If the directory cannot be read.
    """
    with _reading(directory):
        found = [match for match in _matches(directory) if not is_remote(directory) or _is_committed(directory, match)]

    def order(match: re.Match[str]) -> tuple[int, int]:
        """Folders `again` come before the first, the last of them first; `replaced` after it."""
        number = int(match[3] or 0)
        return -int(match[1]), -number if match[2] == "again" else number

    return [StepFolder(int(match[1]), os.path.join(directory, match[0])) for match in sorted(found, key=order)]


def new_step_folder(directory: AnyPath, step: int) -> str:
    """Returns where a step is to be written; on this machine an earlier one of that number is renamed."""
    path = os.path.join(directory, str(step))
    earlier = [match for match in _matches(directory) if int(match[1]) == step]
    if not earlier:
        return path
    # Above all that are there: a free number below them would be the name of an earlier folder.
    number = max(int(match[3] or 0) for match in earlier) + 1
    if is_remote(directory):
        return f"{path}.again-{number}"
    if storage.exists(path):
        os.rename(path, f"{path}.replaced-{number}")
    return path


def delete_step(path: str) -> None:
    """Deletes a step; a kill halfway does not leave half a step that counts."""
    if is_remote(path):
        storage.remove(os.path.join(path, COMMIT))
        storage.remove_tree(path)
    else:
        os.rename(path, f"{path}.deleted")
        shutil.rmtree(f"{path}.deleted")


@contextlib.contextmanager
def _reading(directory: AnyPath) -> Iterator[None]:
    """Turns an OSError of the block into a `CheckpointError` that names the directory."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint directory {directory} cannot be read ({error.strerror}); "
            "it must be a folder that this user may read"
        ) from error


def _matches(directory: AnyPath) -> list[re.Match[str]]:
    """Returns the names of steps in a directory, complete or not; empty if it is missing."""
    try:
        return [match for name in storage.names(directory) if (match := _STEP.fullmatch(name))]
    except FileNotFoundError:
        return []


def _is_committed(directory: AnyPath, match: re.Match[str]) -> bool:
    return storage.exists(os.path.join(directory, match[0], COMMIT))


# Digests


def is_verified(folder: str) -> bool:
    """Returns whether a folder has digests; the files themselves are not read."""
    return storage.exists(os.path.join(folder, DIGESTS))


def find_damage(folder: AnyPath) -> str | None:
    """Reads every file of a checkpoint and compares its digest.

    Returns:
      None if all files are as they were written, `NO_DIGESTS` if that cannot be known, else one clause that names the
      damaged file.

    Raises:
      UserError: If object storage cannot be reached, so that nothing is known.
    """
    path = os.path.join(folder, DIGESTS)
    try:
        expected = {name: str(digest) for name, digest in json.loads(storage.read(path)).items()}
    except (OSError, ValueError, AttributeError) as error:
        _raise_if_out_of_reach(path, error)
        return NO_DIGESTS  # Digests that cannot be read vouch for nothing.
    for name, digest in expected.items():
        path = os.path.join(folder, name)
        try:
            if storage.sha256(path) != digest:
                return f"the file {name} is damaged (its sha256 is not the one in {DIGESTS})"
        except OSError as error:
            _raise_if_out_of_reach(path, error)
            return f"the file {name} cannot be read ({error.strerror})"
    return None


def _raise_if_out_of_reach(path: str, error: Exception) -> None:
    """Raises if an object could not be read for another reason than that it is missing: it is no damage."""
    if is_remote(path) and isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        raise UserError(f"cannot read {path} ({error.strerror}); start again once it can be reached") from error


# Trees of arrays


def describe_arrays(tree: Any) -> dict[str, str]:
    """Returns dtypes and shapes by the arrays' names, such as {"params/q": "float32[2, 3]"}."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        described[jax.tree_util.keystr(path, simple=True, separator="/")] = f"{dtype}{list(np.shape(leaf))}"
    return described


def describe_difference(saved: dict[str, str], wanted: dict[str, str]) -> str:
    """Returns one clause on how two trees differ, naming up to three arrays; empty if they do not."""
    differ = [
        f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
    return ", ".join(differ[:3]) + more


def _drop_empty(tree: Any) -> Any:
    """Returns the tree with None for each array of size zero, which Orbax refuses: a memory without recurrence."""
    return jax.tree.map(lambda leaf: leaf if np.size(leaf) else None, tree)


def _restore_empty(tree: Any, abstract_tree: Any) -> Any:
    leaves = iter(jax.tree.leaves(tree))

    def leaf_for(wanted: Any) -> Any:
        if np.size(wanted):
            return next(leaves)
        if isinstance(wanted, np.ndarray):
            return np.zeros_like(wanted)
        return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)

    return jax.tree.map(leaf_for, abstract_tree)


# Orbax


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler(), notes=ocp.JsonCheckpointHandler())


def _open_writer(name: str) -> ocp.AsyncCheckpointer:
    """Opens a writer; `name` keeps processes from meeting at the barriers of another writer that is open."""
    multiprocessing = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
    # Orbax gives a save 20 minutes of the time of day, and takes a clock that was set, or a computer that slept, for a
    # save that hangs. With several processes the limit stays: one that fails leaves the others waiting at a barrier.
    timeout = {} if distributed.is_multiprocess() else {"timeout_secs": _SAVE_TIMEOUT_SECONDS}
    # Its threads wait for folders that are created asynchronously, with another such limit, which cannot be set.
    asynchronous = ocp.options.AsyncOptions(create_directories_asynchronously=False, **timeout)
    return ocp.AsyncCheckpointer(_handler(), async_options=asynchronous, multiprocessing_options=multiprocessing)


def _open_reader(*, alone: bool = False) -> ocp.Checkpointer:
    """Opens a reader that all processes read with, or, if `alone`, one that waits for no other process."""
    own = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own}) if alone else None
    return ocp.Checkpointer(_handler(), multiprocessing_options=options or ocp.options.MultiprocessingOptions())


def _short(error: BaseException) -> str:
    """Returns an error in one line: Orbax's go on for pages, and name the system's reason far behind the paths."""
    if code := re.search(r"\[os_error_code='?(\d+)", str(error)):
        return os.strerror(int(code[1]))
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}"


def quiet_orbax() -> None:
    """Hides what Orbax logs, and what Python prints of writes that Orbax did not wait for once one has failed.

    `CheckpointError` and the `log` of a `Checkpointer` report it in one sentence. A program calls this once at
    its start: it changes the process's log filters, warning filters and `sys.unraisablehook`, for good, because
    abandoned writes outlive the save. Called again it changes nothing. With absl's verbosity at INFO or DEBUG all of
    Orbax's log lines are shown.
    """
    for name, filter_function in (("absl", _is_wanted), ("asyncio", _is_no_failed_write)):
        logging.getLogger(name).addFilter(filter_function)  # Adds no filter twice.
    warnings.filterwarnings("ignore", r"coroutine '.*serialize.*' was never awaited", RuntimeWarning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _hide_closed_loops


def _is_wanted(record: logging.LogRecord) -> bool:
    """A filter for absl's log without Orbax's lines."""
    return absl.logging.get_verbosity() >= absl.logging.INFO or f"{os.sep}orbax{os.sep}" not in record.pathname


def _is_no_failed_write(record: logging.LogRecord) -> bool:
    """A filter for asyncio's log, which reports each of several failed writes that Orbax did not wait for."""
    return "os_error_code=" not in str(record.exc_info and record.exc_info[1])


def _hide_closed_loops(unraisable: Any) -> None:
    """sys.unraisablehook without TensorStore's reports of writes that end after Orbax gave up on the first of them."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
