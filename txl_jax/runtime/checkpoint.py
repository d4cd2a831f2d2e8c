"""Checkpoints that a run can trust after any kind of stop.

Orbax writes and reads the arrays: asynchronously, sharded, under a temporary name until all is there. What it does not
do is done here, because a flipped byte in its files restores silently and nothing falls back by itself:

    <directory>/200/state/...          arrays, as Orbax lays them out
    <directory>/200/notes/...          a small JSON object
    <directory>/200/digests.json       sha256 of every other file of the step; written last, so it vouches for them
    <directory>/200.replaced-1/        the earlier 200, while a run that fell back past it writes 200 again
    <directory>/100.deleted/           a step on its way out

Old steps go only after the new one has its digests, so at no time is there less to go back to than before the save.
That is why Orbax's CheckpointManager is not used: it deletes right after the commit, and its list of steps goes stale
when steps are replaced. Opening a directory and restoring from it write nothing: that is safe beside a running job.
"""

import concurrent.futures
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from txl_jax.errors import CheckpointError
from txl_jax.runtime import distributed
from txl_jax.runtime.files import write_json

DIGESTS = "digests.json"
_STEP_NAME = re.compile(r"(0|[1-9]\d*)(\.replaced-\d+)?")
_LEFTOVERS = ("*.orbax-checkpoint-tmp*", "*.deleted")
_NO_DIGESTS = "it has no digests"
_SECONDS_OF_A_SAVE = 30 * 86400


class _Candidate(NamedTuple):
    """A step on disk; the same step may lie there twice, once as replaced."""

    step: int
    path: Path


class Checkpointer:
    """The checkpoints in one directory. Use it as a context manager, in every process of a run alike.

    Only `latest_step` and `notes` may be asked by one process alone.

    Args:
      directory: on a file system that all processes see; made by the first save.
      keep: how many steps stay, the newest; at least 1.
      report: takes one line for people, such as what was wrong with a step that was passed over.

    Raises:
      ValueError: keep is below 1, or the directory is a URL.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int, report: Callable[[str], None]):
        if keep < 1:
            raise ValueError(f"keep is {keep} and must be at least 1: the newest checkpoint always stays")
        if "://" in str(directory):
            raise ValueError(f"the checkpoint directory {directory} is a URL; mount it and give the path")
        self._directory = Path(os.path.abspath(directory))
        self._keep = keep
        self._report = report
        self._writer: ocp.AsyncCheckpointer | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "checkpoint_digests")
        self._pending: tuple[int, concurrent.futures.Future] | None = None
        self._failed = False
        self._quiet = _QuietOrbax()
        logging.getLogger("absl").addFilter(self._quiet)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.close()
        except CheckpointError as second:
            if error is None:
                raise
            self._report(str(second))  # Raised, it would hide the error that ended the block.

    def close(self) -> None:
        """Waits for the save under way, and frees the threads; nothing happens the second time.

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
            if not self._failed:  # Else threads of Orbax may still tell of it, at length.
                logging.getLogger("absl").removeFilter(self._quiet)

    # Writing

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Starts writing a step; returns once the arrays are out of the caller's reach, so they may be donated.

        A step that is there already is replaced, and steps after it are dropped, once the new one is verified: they
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
        distributed.broadcast_from_primary(lambda: self._make_way(step))
        try:
            if self._writer is None:
                self._writer = _open_writer(self._directory.name)
            # Orbax refuses arrays of size zero (the memory of a model without recurrence). They hold nothing to save.
            state_args = ocp.args.StandardSave(jax.tree.map(lambda leaf: leaf if np.size(leaf) else None, state))
            args = ocp.args.Composite(state=state_args, notes=ocp.args.JsonSave(notes))
            self._writer.save(self._directory / str(step), args=args)
        except Exception as error:
            self._writer = None
            raise self._not_written(step, error) from error
        self._pending = step, self._threads.submit(self._finish, self._writer, step)

    def sweep(self) -> None:
        """Removes what killed runs left behind; for the one that writes here, while it does not."""
        if distributed.is_primary():
            for pattern in _LEFTOVERS:
                for path in self._directory.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)

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

    def _make_way(self, step: int) -> None:
        """Sweeps what killed runs left behind, and moves an earlier checkpoint of the same step aside."""
        try:
            self._make_way_or_fail(step)
        except (OSError, CheckpointError) as error:
            raise self._not_written(step, error) from error

    def _make_way_or_fail(self, step: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.sweep()
        if newer := sorted({other.step for other in self._candidates() if other.step > step}):
            self._report(
                f"checkpoints of steps {', '.join(map(str, newer))} in {self._directory} come after step {step} that is "
                "being saved: they are of a run that was given up, and go when the new one is verified"
            )
        path = self._directory / str(step)
        if path.exists():
            taken = (int(other.name.rpartition("-")[2]) for other in self._directory.glob(f"{step}.replaced-*"))
            path.rename(f"{path}.replaced-{max(taken, default=0) + 1}")

    def _finish(self, writer: ocp.AsyncCheckpointer, step: int) -> None:
        """In the background: waits for the commit, writes the digests, then drops what is no longer kept."""
        writer.wait_until_finished()
        if not distributed.is_primary():
            return
        path = self._directory / str(step)
        write_json(path / DIGESTS, {name: _digest(path / name) for name in _files(path)})
        older = [other for other in self._candidates() if other.step < step and other.path.name == str(other.step)]
        # Steps without digests are the first to go.
        older.sort(key=lambda other: ((other.path / DIGESTS).exists(), other.step), reverse=True)
        kept = {path, *(other.path for other in older[: self._keep - 1])}
        for other in self._candidates():
            if other.path not in kept:
                # Renamed first: a kill halfway must not leave half a step under a step's name.
                shutil.rmtree(other.path.rename(f"{other.path}.deleted"))

    def _not_written(self, step: int, error: BaseException) -> CheckpointError:
        self._failed = True
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._directory} ({_brief(error)}); "
            "free space or allow writing there, then resume: earlier checkpoints are untouched"
        )

    # Reading

    def latest_step(self) -> int | None:
        """The newest step on disk, verified or not; None if there is none."""
        self.wait()
        return max((candidate.step for candidate in self._candidates()), default=None)

    def notes(self, step: int) -> dict[str, Any]:
        """The notes of a step, without reading its arrays.

        Raises:
          CheckpointError: there is no such step, or its notes cannot be read.
        """
        self.wait()
        for candidate in self._candidates():
            if candidate.step == step:
                args = ocp.args.Composite(notes=ocp.args.JsonRestore())
                try:
                    return _open_reader(alone=True).restore(candidate.path, args=args).notes
                except Exception as error:
                    raise CheckpointError(
                        f"the notes of checkpoint {candidate.path} cannot be read ({_brief(error)}); use another step"
                    ) from error
        found = sorted({candidate.step for candidate in self._candidates()})
        raise CheckpointError(f"there is no checkpoint of step {step} in {self._directory}; there are {found}")

    def restore(self, abstract_state: Any, *, before: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores the newest step that is whole: verified steps first, then those without digests.

        Each step passed over is reported in a line. Nothing on disk is changed.

        Args:
          abstract_state: a pytree like the saved one, of jax.ShapeDtypeStruct with shardings, or of arrays.
          before: only steps before this one; None: any.

        Returns:
          The step, the state, placed as `abstract_state` says, and the notes; None if there is no step at all.

        Raises:
          CheckpointError: there are steps and none restores, or they are of another model.
        """
        distributed.run_on_all(self.wait)
        # As the first process finds them: all must try the same ones.
        found = distributed.broadcast_from_primary(lambda: [(each.step, each.path.name) for each in self._candidates()])
        candidates = [
            _Candidate(step, self._directory / name) for step, name in found if before is None or step < before
        ]
        if not candidates:
            return None
        unverified, tried = [], []
        for candidate in candidates:
            # One reader of every byte will do, and all must restore the same step.
            fault = distributed.broadcast_from_primary(lambda path=candidate.path: _fault(path))
            if fault == _NO_DIGESTS:
                unverified.append(candidate)
                self._report(f"checkpoint {candidate.path} is unverified ({fault}): looking for a verified one first")
            elif fault is not None:
                self._pass_over(candidate, fault, tried)
            elif restored := self._attempt(candidate, abstract_state, tried):
                return restored
        for candidate in unverified:
            self._report(f"no verified checkpoint could be restored: trying the unverified {candidate.path}")
            if restored := self._attempt(candidate, abstract_state, tried):
                return restored
        raise CheckpointError(
            f"none of the checkpoints in {self._directory} can be restored ({'; '.join(tried)}); "
            "bring back a copy of one, or move them away to start anew"
        )

    def _pass_over(self, candidate: _Candidate, fault: str, tried: list[str]) -> None:
        tried.append(f"{candidate.path.name}: {fault}")
        self._report(f"checkpoint {candidate.path} is passed over for an older one: {fault}")

    def _attempt(
        self, candidate: _Candidate, abstract_state: Any, tried: list[str]
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """A step restored; None if Orbax cannot. Another model's step raises: an older one would be no better."""
        reader = _open_reader()
        wanted = jax.tree.map(lambda leaf: leaf if np.size(leaf) else None, abstract_state)
        restored, difference, trouble = None, "", None
        try:
            saved = reader.metadata(candidate.path).item_metadata.state.tree
            difference = _difference(_described(saved), _described(wanted))
            if not difference:
                args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), notes=ocp.args.JsonRestore())
                restored = reader.restore(candidate.path, args=args)
        except Exception as error:  # noqa: BLE001 (damage shows as nearly any type)
            trouble = _brief(error)
        if trouble := distributed.first_error(trouble):
            self._pass_over(candidate, f"Orbax cannot restore it ({trouble})", tried)
            return None
        if restored is not None:
            return candidate.step, _with_empty(restored.state, abstract_state), restored.notes
        raise CheckpointError(
            f"checkpoint {candidate.path} is of another model ({difference}); "
            "use the configuration that it was saved with, or another directory"
        )

    def _candidates(self) -> list[_Candidate]:
        """Steps on disk, newest first; of one step, the committed before the replaced."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint directory {self._directory} cannot be read ({error.strerror}); "
                "it must be a folder that this user may read"
            ) from error
        found = [(int(match[1]), match[2] or "", name) for name in names if (match := _STEP_NAME.fullmatch(name))]
        found.sort(key=lambda entry: (-entry[0], entry[1]))
        return [_Candidate(step, self._directory / name) for step, _, name in found]


# Orbax


class _QuietOrbax(logging.Filter):
    """Keeps Orbax's log lines back: what matters of them is said in one sentence by CheckpointError or `report`.

    Who asks for absl's INFO or DEBUG gets all of them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return absl.logging.get_verbosity() >= absl.logging.INFO or f"{os.sep}orbax{os.sep}" not in record.pathname


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler(), notes=ocp.JsonCheckpointHandler())


def _hide_closed_loops(unraisable: Any) -> None:
    """sys.unraisablehook without what TensorStore tells of writes that end after Orbax gave up on the first of them."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _is_no_failed_write(record: logging.LogRecord) -> bool:
    """A filter for asyncio's log, which tells of each of several failed writes that Orbax did not wait for."""
    error = record.exc_info[1] if record.exc_info else None
    return "os_error_code=" not in str(error)


def _hide_failed_writes() -> None:
    """Keeps back what Python tells of writes that Orbax did not wait for, or did not even begin, once one has failed.

    For good: those writes outlive the save.
    """
    logging.getLogger("asyncio").addFilter(_is_no_failed_write)
    warnings.filterwarnings("ignore", r"coroutine '.*serialize.*' was never awaited", RuntimeWarning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _hide_closed_loops


def _open_writer(name: str) -> ocp.AsyncCheckpointer:
    _hide_failed_writes()
    # The prefix: two directories are written at the same time, and processes must not meet at each other's barriers.
    multiprocessing = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
    # Orbax gives a save 20 minutes of the time of day, and takes a clock that was set, or a computer that slept, for a
    # save that hangs. With several processes it stays so: one that fails leaves the others waiting at a barrier.
    patience = {} if distributed.is_multiprocess() else {"timeout_secs": _SECONDS_OF_A_SAVE}
    # Its threads wait for folders that are made aside, with another such limit, which cannot be set.
    asynchronous = ocp.options.AsyncOptions(create_directories_asynchronously=False, **patience)
    return ocp.AsyncCheckpointer(_handler(), async_options=asynchronous, multiprocessing_options=multiprocessing)


def _open_reader(*, alone: bool = False) -> ocp.Checkpointer:
    """A reader that all processes read with; `alone`: one that waits for no other process."""
    own = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own}) if alone else None
    return ocp.Checkpointer(_handler(), multiprocessing_options=options or ocp.options.MultiprocessingOptions())


def _brief(error: BaseException) -> str:
    """An error in a few words: those of Orbax go on for pages, and name the system's reason far behind the paths."""
    if reason := re.search(r": ([^:]+) \[os_error_code=", str(error)):
        return reason[1]
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}"


# Digests


def _files(path: Path) -> Iterator[str]:
    """Names of a step's files relative to it, the digests left out."""
    for file in sorted(path.rglob("*")):
        if file.is_file() and file != path / DIGESTS:
            yield file.relative_to(path).as_posix()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fault(path: Path) -> str | None:
    """What is wrong with a step's files; None if all are as they were written."""
    try:
        digests = json.loads((path / DIGESTS).read_bytes())
        expected = {name: str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, AttributeError):
        return _NO_DIGESTS  # Unreadable vouches for as much as absent.
    for name, digest in expected.items():
        try:
            if _digest(path / name) != digest:
                return f"the file {name} is damaged (its sha256 is not the one in {DIGESTS})"
        except OSError as error:
            return f"the file {name} cannot be read ({error.strerror})"
    return None


# Trees


def _described(tree: Any) -> dict[str, str]:
    """From an array's name to its type and shape, such as {"params/q": "float32[2, 3]"}."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        described[jax.tree_util.keystr(path, simple=True, separator="/")] = f"{dtype}{list(np.shape(leaf))}"
    return described


def _difference(saved: dict[str, str], wanted: dict[str, str]) -> str:
    """One clause on how two trees differ, naming a few arrays; empty if they do not."""
    differ = [
        f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
    return ", ".join(differ[:3]) + more


def _with_empty(restored: Any, abstract_state: Any) -> Any:
    """Puts arrays of size zero back where `save` left them out."""
    leaves = iter(jax.tree.leaves(restored))
    return jax.tree.map(lambda leaf: next(leaves) if np.size(leaf) else _empty(leaf), abstract_state)


def _empty(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
