"""Checkpoints that a run can trust after it was stopped in any way.

Orbax writes and reads the arrays: asynchronously, sharded, under a temporary name until everything
is written. This module adds digests and the fallback to an earlier step, because Orbax silently
restores a file with a flipped byte:

    <directory>/200/state/...     arrays, as Orbax lays them out
    <directory>/200/notes/...     a small JSON object
    <directory>/200/digests.json  sha256 of every other file of the step; written last, so it
                                  vouches for them
    <directory>/200.again-1/      step 200, written again by a run that fell back past it; then 200
                                  is deleted
    <directory>/100.deleted/      a step that is being deleted

Object storage has no rename. A step there is complete once Orbax has written `commit_success.txt`,
which is the last object that it writes and the first that is deleted.

Old steps are deleted only after the new one has its digests, so a save never reduces the number of
steps to fall back to. Orbax's CheckpointManager is not used, because it deletes right after the
commit, and its list of steps becomes stale when steps are replaced. Opening a directory and
restoring from it do not write, so both are safe while a run writes there.
"""

import concurrent.futures
import contextlib
import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from txl_jax.errors import CheckpointError, UserError, rephrased
from txl_jax.runtime import distributed, remote, storage, stored_arrays
from txl_jax.runtime.storage import AnyPath, is_remote

DIGESTS = "digests.json"
NO_DIGESTS = "it has no digests"
# The name that Orbax gives it.
COMMIT = "commit_success.txt"
_NOTES = "metadata"
_STATE = "state"
# A step's directory: its number, and how many times it was written before.
_STEP = re.compile(r"(0|[1-9]\d*)(?:\.again-(\d+))?")
_LEFTOVER = re.compile(r".*\.orbax-checkpoint-tmp.*|.*\.deleted")
_SAVE_TIMEOUT_SECONDS = 30 * 86400
# Network file systems may show another process's files late, as for the record of a run.
_SECONDS_TO_APPEAR = 30
# Processes wait for each other's verdict on a step as long as Orbax lets them wait during a save.
_VERDICT_TIMEOUT_SECONDS = 1200
# Arrays that a description of differences names.
_MOST_ARRAYS = 3
# Characters of an error's line, and of each of its ends if it is longer.
_LONGEST_LINE = 300
_LONGEST_END = 150


class _StepFolder(NamedTuple):
    """A directory of a step, complete or not. They are sorted by the fields in this order."""

    step: int
    again: int  # How many times the step was written before.
    name: str


class _IncompleteError(Exception):
    """A step was committed without all of its arrays. The message is a clause that names one."""


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """The checkpoints in one directory, of which the latest `keep` stay.

    A context manager, for all processes alike.

    All processes must see the directory, which the first save makes. A single process may call
    `notes`. `log` takes one line, such as why a step was skipped.
    """

    def __init__(self, directory: AnyPath, *, keep: int, log: Callable[[str], None]):
        if is_remote(directory):
            self._directory = storage.as_path(directory)
        else:
            self._directory = os.path.abspath(directory)
        if self._directory.startswith("gs://"):
            remote.make_gcsfs_patient()
        self._keep = keep
        self._log = log
        # Opened by the first save, and by the next one after an error.
        self._writer: ocp.AsyncCheckpointer | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "checkpoint_digests")
        # The step that is being saved, and the end of its save.
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.wait()
        except CheckpointError as second:
            if error is None:
                raise
            # Raised, it would hide the error that ended the block.
            self._log(str(second))
        finally:
            self._threads.shutdown()
            if self._writer is not None:
                self._writer.close()

    # Writing

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Starts writing a step, and returns once the arrays are copied to the host.

        The arrays may then be donated.

        An existing checkpoint of this step is replaced, and later steps are deleted, once the new
        one is verified: they belong to a run that was abandoned when this one fell back. Raises
        `CheckpointError` if this save cannot start or the one before it failed, and
        `RemoteProcessError` if that happened in another process.
        """
        distributed.run_on_all(self.wait)
        name = distributed.broadcast_from_primary(lambda: self._prepare(step))
        path = os.path.join(self._directory, name)
        with self._writing(step):
            if self._writer is None:
                self._writer = _open_writer(os.path.basename(self._directory))
            # Orbax rejects arrays of size zero, such as a memory without recurrence.
            tree = _drop_empty(state)
            # What `_finish` opens, to see that everything was written.
            arrays = stored_arrays.describe(tree)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(tree), notes=ocp.args.JsonSave(notes)
            )
            # Orbax would take a path with wildcards for a pattern. `folder` is a link to such a
            # directory, and any other directory itself. The write continues in the background, so
            # `pop_all` hands the link over to `_finish`, which removes it.
            with contextlib.ExitStack() as links:
                folder = links.enter_context(storage.without_wildcards(self._directory))
                self._writer.save(os.path.join(folder, name), args=args)
                finish = functools.partial(
                    self._finish, self._writer, step, path, arrays, links.pop_all()
                )
            self._pending = step, self._threads.submit(finish)

    def sweep(self) -> None:
        """Deletes what killed runs left behind.

        Only for the run that writes here, and not during a save.
        """
        if not distributed.is_primary():
            return
        with _reading(self._directory):
            for name in storage.names(self._directory, missing_ok=True):
                if _is_left_over(self._directory, name):
                    storage.remove_tree(os.path.join(self._directory, name))

    def wait(self) -> None:
        """Waits for the last save and its digests.

        Raises `CheckpointError` if it failed: earlier steps are intact.
        """
        if self._pending is None:
            return
        step, saved = self._pending
        concurrent.futures.wait([saved])
        self._pending = None
        with self._writing(step):
            saved.result()

    def _prepare(self, step: int) -> str:
        """Deletes what killed runs left behind, and returns the name of a step's directory."""
        with self._writing(step):
            storage.make_folder(self._directory)
            self.sweep()
            folders = _step_folders(self._directory)
            newer = sorted({folder.step for folder in folders if folder.step > step})
            if newer:
                self._log(
                    f"checkpoints of steps {', '.join(map(str, newer))} in {self._directory} come "
                    f"after step {step}, which is now saved: they belong to an abandoned run, and "
                    "are deleted once the new one is verified"
                )
            # An existing directory of this step stays until the new one is verified.
            for folder in folders:
                # The latest write of a step comes first.
                if folder.step == step:
                    return f"{step}.again-{folder.again + 1}"
            return str(step)

    def _finish(
        self,
        writer: ocp.AsyncCheckpointer,
        step: int,
        path: str,
        arrays: dict[str, stored_arrays.StoredArray],
        links: contextlib.ExitStack,
    ) -> None:
        """Waits for the commit of a step, and completes the checkpoint.

        It opens the arrays, writes the digests, and then deletes steps that are no longer kept.
        If a process cannot open an array, the step is deleted, and that process raises.

        Runs in the background, in all processes. `links` deletes, when it is closed, the link
        through which Orbax writes to a directory whose name has wildcards (see `save`).
        """
        with links:
            writer.wait_until_finished()
        is_complete = self._opens_everywhere(path, arrays)
        if not distributed.is_primary() or not is_complete:
            return
        self._write_digests(path)
        self._delete_old(step, path)

    def _write_digests(self, path: str) -> None:
        digests = {}
        for file in storage.files_below(path):
            digests[os.path.relpath(file, path)] = storage.sha256(file)
        storage.write_json(os.path.join(path, DIGESTS), digests)

    def _delete_old(self, step: int, path: str) -> None:
        """Deletes the steps that are no longer kept now that `step` is complete.

        Earlier steps are kept while there is room, and later ones never.
        """
        folders = find_steps(self._directory)
        # If a step was written again, its latest directory comes last here and stays.
        older = {number: folder for number, folder in reversed(folders) if number < step}

        # Steps without digests are deleted first, then the oldest.
        def worth(number: int) -> tuple[bool, int]:
            return storage.exists(os.path.join(older[number], DIGESTS)), number

        most_valuable = sorted(older, key=worth, reverse=True)
        kept = {path}
        for number in most_valuable[: self._keep - 1]:
            kept.add(older[number])
        for _, folder in folders:
            if folder not in kept:
                delete_step(folder)

    def _opens_everywhere(self, path: str, arrays: dict[str, stored_arrays.StoredArray]) -> bool:
        """Opens each array of a committed step, and returns whether all other processes could too.

        If one process cannot, it deletes the step, and this raises `_IncompleteError` there.
        """
        seconds = 0 if distributed.is_primary() else _SECONDS_TO_APPEAR
        missing = stored_arrays.find_missing(os.path.join(path, _STATE), arrays, seconds=seconds)
        # Else a process would miss what another one deletes.
        self._wait_for_all("opened", path)
        if missing is not None:
            # Another process may have deleted it.
            with contextlib.suppress(OSError):
                delete_step(path)
        self._wait_for_all("judged", path)
        if missing is not None:
            raise _IncompleteError(missing)
        if not distributed.is_multiprocess():
            return True
        # A process that could not open it has deleted it.
        if is_remote(path):
            return storage.exists(os.path.join(path, COMMIT))
        return storage.exists(path)

    def _wait_for_all(self, point: str, path: str) -> None:
        """Waits until every process has reached this point for a step.

        It is safe alongside the collectives of the thread that trains.
        """
        if distributed.is_multiprocess():
            key = f"{os.path.basename(self._directory)}_{point}.{os.path.basename(path)}"
            wait_at_barrier = ocp.multihost.get_barrier_sync_fn()
            wait_at_barrier(key=key, timeout_ms=_VERDICT_TIMEOUT_SECONDS * 1000)

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Turns an error of the block into a `CheckpointError`.

        The next save opens another writer.
        """
        try:
            yield
        except _IncompleteError as error:
            self._writer = None
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._directory} was written incompletely "
                f"({error}) and is ignored. Rerun the same command to resume from the previous "
                "one, which is intact."
            ) from error
        except Exception as error:
            self._writer = None
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._directory} "
                f"({_short(error)}). Free space or allow writing there, then resume: earlier "
                "checkpoints are intact."
            ) from error

    # Reading

    def notes(self) -> dict[str, Any] | None:
        """Returns the notes of the latest step, or None without one.

        Raises `CheckpointError` if they are corrupted.
        """
        self.wait()
        folders = find_steps(self._directory)
        if not folders:
            return None
        _, latest = folders[0]
        path = os.path.join(latest, "notes", _NOTES)
        message = f"the notes of a checkpoint, {path}, cannot be read (%s)."
        with rephrased(message, OSError, ValueError, TypeError, to=CheckpointError):
            return dict(storage.read_json(path))

    def restore(
        self, abstract_state: Any, *, before: int | None = None, casts: bool = False
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores the latest valid checkpoint. Nothing on disk is changed.

        Verified checkpoints are tried first, then checkpoints without digests. Each skipped step is
        logged.

        Args:
          abstract_state: A pytree like the saved one, of jax.ShapeDtypeStruct with shardings, or of
            arrays.
          before: If passed, only checkpoints before that step are tried.
          casts: Whether arrays that were saved as 32-bit floats may be restored as 64-bit floats.

        Returns:
          (step, state with those shardings, notes), or None if no step exists.

        Raises:
          CheckpointError: If no step can be restored, or they belong to another model.
          UserError: If a verified checkpoint in object storage cannot be reached.
        """
        distributed.run_on_all(self.wait)
        # The steps that process 0 finds: all must try the same ones.
        steps = distributed.broadcast_from_primary(
            lambda: [(step, os.path.basename(path)) for step, path in find_steps(self._directory)]
        )
        candidates = []
        for step, name in steps:
            if before is None or step < before:
                candidates.append((step, os.path.join(self._directory, name)))
        if not candidates:
            return None

        unverified: list[tuple[int, str]] = []
        # Checkpoints that were tried, and why they were skipped.
        tried: list[str] = []
        for step, path in candidates:
            # It is enough that one process reads every byte, and all must restore the same step.
            damage = distributed.broadcast_from_primary(functools.partial(find_damage, path))
            if damage == NO_DIGESTS:
                unverified.append((step, path))
                self._log(
                    f"checkpoint {path} is not verified ({damage}), so verified ones "
                    "are tried first"
                )
                continue
            if damage is not None:
                self._skip(path, damage, tried)
                continue
            restored = self._try_restore(path, abstract_state, tried, is_verified=True, casts=casts)
            if restored is not None:
                state, notes = restored
                return step, state, notes

        for step, path in unverified:
            self._log(
                f"no verified checkpoint could be restored, so {path} is tried, which "
                "is not verified"
            )
            restored = self._try_restore(
                path, abstract_state, tried, is_verified=False, casts=casts
            )
            if restored is not None:
                state, notes = restored
                return step, state, notes
        raise CheckpointError(
            f"none of the checkpoints in {self._directory} can be restored ({'; '.join(tried)}). "
            "Restore one from a copy, or move them away to start from scratch."
        )

    def _skip(self, path: str, damage: str, tried: list[str]) -> None:
        tried.append(f"{os.path.basename(path)}: {damage}")
        self._log(f"checkpoint {path} is skipped for an older one: {damage}")

    def _try_restore(
        self, path: str, abstract_state: Any, tried: list[str], *, is_verified: bool, casts: bool
    ) -> tuple[Any, dict[str, Any]] | None:
        """Restores (state, notes) of a step, or returns None and adds to `tried` if Orbax cannot.

        Raises for another model's step, and if a verified one in object storage cannot be reached.
        """
        reader = ocp.Checkpointer(_handler())
        wanted = _drop_empty(abstract_state)
        restored = None
        difference = ""
        failure = None
        try:
            with storage.without_wildcards(self._directory) as folder:
                plain_path = os.path.join(folder, os.path.basename(path))
                difference = _difference_of_saved(reader, plain_path, wanted, casts=casts)
                if not difference:
                    args = ocp.args.Composite(
                        state=ocp.args.StandardRestore(wanted), notes=ocp.args.JsonRestore()
                    )
                    restored = reader.restore(plain_path, args=args)
        except Exception as error:  # noqa: BLE001 (damage shows as nearly any type)
            failure = _short(error)

        failure = distributed.first_error(failure)
        if failure is not None:
            # An older one would undo updates because of the network.
            if is_verified and is_remote(path):
                raise UserError(
                    f"cannot read {path} ({failure}). Start again once it can be reached."
                )
            self._skip(path, f"Orbax cannot restore it ({failure})", tried)
            return None
        if restored is None:
            # An older step would not be better.
            raise CheckpointError(
                f"checkpoint {path} belongs to another model ({difference}). Use the "
                "configuration that it was saved with, or another directory."
            )
        return _restore_empty(restored.state, abstract_state), restored.notes


def _difference_of_saved(reader: ocp.Checkpointer, path: str, wanted: Any, *, casts: bool) -> str:
    """Returns how the saved arrays differ from the wanted ones, as `describe_difference`.

    Orbax casts to the wanted dtypes. With `casts`, arrays that it may cast count as if they had the
    wanted dtype already.
    """
    saved = describe_arrays(reader.metadata(path).item_metadata.state.tree)
    needed = describe_arrays(wanted)
    if casts:
        for name in saved:
            if _is_wider(needed.get(name, ""), saved[name]):
                saved[name] = needed[name]
    return describe_difference(saved, needed)


# The directories of steps


def find_steps(directory: AnyPath) -> list[tuple[int, str]]:
    """Returns (step, path) of the complete steps, with the latest step's latest directory first."""
    steps = []
    with _reading(directory):
        for folder in _step_folders(directory):
            if not _is_left_over(directory, folder.name):
                steps.append((folder.step, os.path.join(directory, folder.name)))
    return steps


def delete_step(path: str) -> None:
    """Deletes a step so that a kill halfway does not leave an incomplete step that counts.

    After a kill, the next save sweeps the remaining files.
    """
    if is_remote(path):
        storage.remove(os.path.join(path, COMMIT))
        storage.remove_tree(path)
    else:
        os.rename(path, f"{path}.deleted")
        storage.remove_tree(f"{path}.deleted")


def _step_folders(directory: AnyPath) -> list[_StepFolder]:
    """Returns all steps, complete or not, with the latest write of the latest step first."""
    folders = []
    for name in storage.names(directory, missing_ok=True):
        match = _STEP.fullmatch(name)
        if match:
            folders.append(_StepFolder(int(match[1]), int(match[2] or 0), name))
    return sorted(folders, reverse=True)


def _is_left_over(directory: AnyPath, name: str) -> bool:
    """Returns whether a name is of a step that was not completed, or not deleted completely."""
    if not is_remote(directory):
        return bool(_LEFTOVER.fullmatch(name))
    is_step = bool(_STEP.fullmatch(name))
    return is_step and not storage.exists(os.path.join(directory, name, COMMIT))


def _reading(directory: AnyPath) -> contextlib.AbstractContextManager[None]:
    message = (
        f"the checkpoint directory {directory} cannot be read (%s). "
        "It must be a directory that this user may read."
    )
    return rephrased(message, OSError, to=CheckpointError)


def find_damage(folder: AnyPath) -> str | None:
    """Compares the digests of all files.

    Returns None, `NO_DIGESTS`, or a clause that names a corrupted file.

    Raises `UserError` if object storage cannot be reached, so that nothing is known.
    """
    # The file that is looked at, for errors.
    name = DIGESTS
    path = os.path.join(folder, name)
    try:
        digests = storage.read_json(path)
        names = {os.path.relpath(file, folder) for file in storage.files_below(folder)} - {DIGESTS}
        # Hidden files do not count: others have made them.
        unlisted = names - digests.keys()
        if any(not os.path.basename(unknown).startswith(".") for unknown in unlisted):
            return NO_DIGESTS
        for name, digest in digests.items():
            path = os.path.join(folder, name)
            if name not in names:
                return f"the file {name} is missing"
            if storage.sha256(path) != digest:
                return f"the file {name} is corrupted (its sha256 is not the one in {DIGESTS})"
    except OSError as error:
        # An outage is not damage.
        if is_remote(folder) and not isinstance(error, FileNotFoundError):
            raise storage.access_error("read", path, error) from error
        if name == DIGESTS:
            return NO_DIGESTS
        return f"the file {name} cannot be read ({error.strerror})"
    except (ValueError, AttributeError):
        # Digests that cannot be read vouch for nothing.
        return NO_DIGESTS
    return None


# Trees of arrays


def describe_arrays(tree: Any) -> dict[str, str]:
    """Returns dtypes and shapes by the arrays' names, such as {"params/q": "float32[2, 3]"}."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        described[name] = f"{dtype}{list(np.shape(leaf))}"
    return described


def _is_wider(wanted: str, saved: str) -> bool:
    """Returns whether two array descriptions differ only in the size of their floats.

    The wanted array must have 64-bit floats where the saved array has 32-bit floats.
    """
    return saved.startswith("float32[") and wanted == saved.replace("float32[", "float64[", 1)


def describe_difference(saved: dict[str, str], wanted: dict[str, str]) -> str:
    """Returns one clause on how two trees differ, naming up to three arrays, or an empty string.

    If only the widths of numbers differ, it names the setting of JAX that decides them.
    """
    differences = []
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            saved_array = saved.get(name, "absent")
            wanted_array = wanted.get(name, "absent")
            differences.append(f"{name} is {saved_array} there and {wanted_array} here")
    if not differences:
        return ""

    description = ", ".join(differences[:_MOST_ARRAYS])
    if len(differences) > _MOST_ARRAYS:
        description += f", and {len(differences) - _MOST_ARRAYS} more"
    if _without_widths(saved) == _without_widths(wanted):
        state = "on" if jnp.result_type(float) == jnp.float64 else "off"
        description += f"; JAX_ENABLE_X64 is {state} here, unlike there"
    return description


def _without_widths(described: dict[str, str]) -> dict[str, str]:
    without = {}
    for name, array in described.items():
        without[name] = re.sub(r"^(float|u?int)(32|64)\b", r"\1", array)
    return without


def _drop_empty(tree: Any) -> Any:
    """Returns the tree with None for each array of size zero, which Orbax rejects.

    A memory without recurrence has size zero.
    """
    return jax.tree.map(lambda leaf: leaf if np.size(leaf) else None, tree)


def _restore_empty(tree: Any, abstract_tree: Any) -> Any:
    """Returns the tree with arrays of size zero again."""

    def with_empty(wanted: Any, restored: Any) -> Any:
        if np.size(wanted):
            return restored
        return jnp.zeros(wanted.shape, wanted.dtype, device=getattr(wanted, "sharding", None))

    return jax.tree.map(with_empty, abstract_tree, tree)


# Orbax


def _handler() -> ocp.CompositeCheckpointHandler:
    notes = ocp.JsonCheckpointHandler(_NOTES)
    return ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler(), notes=notes)


def _open_writer(name: str) -> ocp.AsyncCheckpointer:
    """Opens a writer.

    `name` keeps processes from meeting at the barriers of another writer that is open.
    """
    multiprocessing = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
    # Orbax gives a save 20 minutes of the time of day, and takes a clock that was set, or a
    # computer that slept, for a save that hangs. With several processes the limit stays: one that
    # fails leaves the others waiting at a barrier.
    timeout = {} if distributed.is_multiprocess() else {"timeout_secs": _SAVE_TIMEOUT_SECONDS}
    # Its threads wait for folders that are created asynchronously, with another such limit, which
    # cannot be set.
    asynchronous = ocp.options.AsyncOptions(create_directories_asynchronously=False, **timeout)
    return ocp.AsyncCheckpointer(
        _handler(), async_options=asynchronous, multiprocessing_options=multiprocessing
    )


def _short(error: BaseException) -> str:
    """Returns an error in one line.

    Orbax's errors fill pages, and name the system's reason far behind the paths.
    """
    code = re.search(r"\[os_error_code='?(\d+)", str(error))
    if code:
        return os.strerror(int(code[1]))
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[:_LONGEST_END]} ... {line[-_LONGEST_END:]}"


def quiet_orbax() -> None:
    """Hides Orbax's log lines, and Python's messages about writes that Orbax abandoned.

    Once one write has failed, Orbax does not wait for the others.

    `CheckpointError` and the `log` of a `Checkpointer` report it. A program calls this once at its
    start: it changes the process's log filters, warning filters and `sys.unraisablehook` for good,
    because abandoned writes outlive the save. With absl's verbosity at INFO or DEBUG all of Orbax's
    log lines are shown.
    """
    for name in ("absl", "asyncio"):
        # Adds no filter twice.
        logging.getLogger(name).addFilter(_is_wanted)
    warnings.filterwarnings(
        "ignore", r"coroutine '.*serialize.*' was never awaited", RuntimeWarning
    )
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _hide_closed_loops


def _is_wanted(record: logging.LogRecord) -> bool:
    """Filters out Orbax's log records, and asyncio's log records of failed writes.

    Orbax did not wait for these writes.
    """
    if record.name == "asyncio":
        return "os_error_code=" not in str(record.exc_info and record.exc_info[1])
    if absl.logging.get_verbosity() >= absl.logging.INFO:
        return True
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _hide_closed_loops(unraisable: Any) -> None:
    """Acts as `sys.unraisablehook`, but hides TensorStore's reports of abandoned writes.

    These writes end after Orbax gave up on the first of them.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
