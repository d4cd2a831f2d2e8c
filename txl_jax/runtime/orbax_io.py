"""Orbax as checkpoints use it: its writer and readers, its errors in a few words, and its log lines kept back."""

import logging
import os
import re
import sys
import warnings
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp

from txl_jax.runtime import distributed

_SAVE_TIMEOUT_SECONDS = 30 * 86400


def open_writer(name: str) -> ocp.AsyncCheckpointer:
    """An asynchronous writer.

    Args:
      name: distinguishes writers that are open at the same time: processes must not meet at each other's barriers.
    """
    multiprocessing = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
    # Orbax gives a save 20 minutes of the time of day, and takes a clock that was set, or a computer that slept, for a
    # save that hangs. With several processes the limit stays: one that fails leaves the others waiting at a barrier.
    timeout = {} if distributed.is_multiprocess() else {"timeout_secs": _SAVE_TIMEOUT_SECONDS}
    # Its threads wait for folders that are created asynchronously, with another such limit, which cannot be set.
    asynchronous = ocp.options.AsyncOptions(create_directories_asynchronously=False, **timeout)
    return ocp.AsyncCheckpointer(_handler(), async_options=asynchronous, multiprocessing_options=multiprocessing)


def open_reader(*, alone: bool = False) -> ocp.Checkpointer:
    """A reader that all processes read with; `alone`: one that waits for no other process."""
    own = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own}) if alone else None
    return ocp.Checkpointer(_handler(), multiprocessing_options=options or ocp.options.MultiprocessingOptions())


def short_error(error: BaseException) -> str:
    """An error in one line: Orbax's go on for pages, and name the system's reason far behind the paths."""
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


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler(), notes=ocp.JsonCheckpointHandler())


def _is_wanted(record: logging.LogRecord) -> bool:
    """A filter for absl's log without Orbax's lines."""
    return absl.logging.get_verbosity() >= absl.logging.INFO or f"{os.sep}orbax{os.sep}" not in record.pathname


def _is_no_failed_write(record: logging.LogRecord) -> bool:
    """A filter for asyncio's log, which reports each of several failed writes that Orbax did not wait for."""
    error = record.exc_info[1] if record.exc_info else None
    return "os_error_code=" not in str(error)


def _hide_closed_loops(unraisable: Any) -> None:
    """sys.unraisablehook without TensorStore's reports of writes that end after Orbax gave up on the first of them."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
