"""Signals and Google Cloud notices as requests to stop or to save, in all processes together.

The signals are SIGTERM, SIGHUP and Ctrl-C.

The metadata server of a machine of Google Cloud gives notice of maintenance a minute to an hour
ahead, and of a preemption half a minute.
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Self

import requests
from jax.experimental import multihost_utils

from txl_jax.runtime import distributed

# Counts the calls of `reached_preemption_sync_point` in this process. They are jax's step numbers:
# all processes make the same calls, so that the same number is the same point of the program in
# each.
_sync_points = itertools.count(1)
_stop_requested = threading.Event()  # Set by `request_stop`, for the rest of the process.
_save_requested = threading.Event()
_watching = threading.Event()  # Set once this process waits for notices.

_WAIT_SECONDS = 60  # The metadata server answers after this even if nothing has changed.
_RETRY_SECONDS = 10
# A server that answers at once all the same is not asked without a pause.
_PAUSE_SECONDS = 0.5
# The metadata server of machines on Google Cloud, unless a variable names another one.
METADATA_SERVER = "metadata.google.internal"
# The machine's name in its firmware: "Google Compute Engine".
_PRODUCT = Path("/sys/class/dmi/id/product_name")


def request_stop(reason: str) -> None:
    """Makes the active `StopRequest`, or the next, true, like SIGTERM. Call it from any thread.

    It is not a signal, so that the SIGTERM of a machine that is shut down afterwards is the first
    one and does not end the process while it saves. The reason, such as "preempted=TRUE", is
    printed on the error stream.
    """
    _stop_requested.set()
    everywhere = distributed.is_multiprocess()
    _print_now(reason, "saving and stopping", everywhere)
    if everywhere:
        # jax's own handler, which may be called any number of times.
        os.kill(os.getpid(), signal.SIGTERM)


def request_save(reason: str) -> None:
    """Makes the next `save_requested` true. Call it from any thread."""
    _save_requested.set()
    _print_now(reason, "saving and continuing", distributed.is_multiprocess())


def save_requested() -> bool:
    """Returns whether a checkpoint was requested since the last call, in any process.

    A collective.
    """
    own = _save_requested.is_set()
    if own:
        _save_requested.clear()
    return distributed.first_error("requested" if own else None) is not None


def is_watched_by_all() -> bool:
    """Returns whether all processes wait for notices, so that `save_requested` may become true.

    A collective.
    """
    return distributed.first_error(None if _watching.is_set() else "not watched") is None


class StopRequest(contextlib.ExitStack):
    """A context that notes the first SIGTERM, SIGINT or SIGHUP, after which it is true.

    A second one acts as usual.

    SIGHUP means that the terminal was closed. It is left alone if it was ignored before, as by
    nohup. After the first signal it is ignored: a shell and the system may both send it, and
    service managers send it right after SIGTERM.

    With several processes a signal to any of them stops all: JAX agrees on a step at which all
    processes stop (`reached_preemption_sync_point`). Every process must ask for the truth value at
    the same sequence of steps. A second SIGTERM changes nothing then.

    With `only_defaults` it does not replace the caller's own handlers, nor any handler outside the
    main thread.
    """

    def __init__(self, *, only_defaults: bool = False) -> None:
        super().__init__()
        # The signal that has arrived. Several processes always stop by SIGTERM.
        self.signal_number = 0
        self._only_defaults = only_defaults
        self._is_multiprocess = False
        self._notes_hangups = False  # Whether SIGHUP is one of the signals.

    def __enter__(self) -> Self:
        self._is_multiprocess = distributed.is_multiprocess()
        # With several processes SIGTERM is left alone: jax has a handler of its own, below
        # Python's.
        numbers = [signal.SIGINT] if self._is_multiprocess else [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        if self._only_defaults:
            is_main = threading.current_thread() is threading.main_thread()
            replaced = (signal.SIG_DFL, signal.default_int_handler) if is_main else ()
            numbers = [number for number in numbers if signal.getsignal(number) in replaced]
        for number in numbers:
            self.callback(signal.signal, number, signal.signal(number, self._note))
        self._notes_hangups = signal.SIGHUP in numbers
        return self

    def __bool__(self) -> bool:
        if not self.signal_number and (
            multihost_utils.reached_preemption_sync_point(next(_sync_points))
            if self._is_multiprocess
            else _stop_requested.is_set()
        ):
            self.signal_number = signal.SIGTERM
        return self.signal_number != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self._is_multiprocess:
            self.signal_number = number
        self.close()  # The handlers before this one act from now on.
        if self._notes_hangups:
            self.callback(
                signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN)
            )
        _print_now(
            signal.Signals(number).name,
            "stopping",
            self._is_multiprocess,
            ". A second one stops at once",
        )
        if self._is_multiprocess:
            os.kill(os.getpid(), signal.SIGTERM)


def _print_now(reason: str, what: str, everywhere: bool, more: str = "") -> None:
    """Writes a line to the error stream.

    Not by print: a signal may have come in the middle of one.
    """
    when = "with all processes" if everywhere else "after the steps in progress"
    # The reader of it may be gone, as after Ctrl-C on `2>&1 | tee`.
    with contextlib.suppress(OSError):
        os.write(2, f"{reason}: {what} {when}{more}\n".encode())


def act_on_notices() -> None:
    """On a machine of Google Cloud, starts to wait in the background for notices.

    Elsewhere it does nothing.

    Before maintenance that ends the machine the run saves and continues. A preemption stops it,
    like SIGTERM. (A machine that migrates continues.)
    """
    if server := metadata_server():
        maintenance = "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", request_save
        for notice in (maintenance, ("preempted", "TRUE", request_stop)):
            threading.Thread(
                target=_watch, args=(server, *notice), name=f"notice of {notice[0]}", daemon=True
            ).start()
        _watching.set()


def metadata_server() -> str | None:
    """Returns host, or host:port, of this machine's metadata server, or None. Uses no network.

    Google's own libraries read NO_GCE_CHECK too.
    """
    if os.environ.get("NO_GCE_CHECK", "").lower() == "true":
        return None
    server = named_metadata_server(os.environ)
    if server:
        return server
    with contextlib.suppress(OSError):
        if _PRODUCT.read_text().startswith("Google"):
            return METADATA_SERVER
    return None


def named_metadata_server(environment: Mapping[str, str]) -> str | None:
    """Returns host, or host:port, of the metadata server that environment variables name, or None.

    Google's own libraries read the first variable, and JAX the second.
    """
    return environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP")


def _watch(server: str, key: str, final: str, act: Callable[[str], None]) -> None:
    """Calls `act` each time a value of the metadata server becomes `final`.

    Ends if the server has no such key.
    """
    with requests.Session() as session:
        session.trust_env = False  # A proxy has another machine's metadata, or none.
        session.headers["Metadata-Flavor"] = "Google"
        url, etag, before = f"http://{server}/computeMetadata/v1/instance/{key}", "0", ""
        while True:
            query: dict[str, str | int] = {
                "wait_for_change": "true",
                "timeout_sec": _WAIT_SECONDS,
                "last_etag": etag,
            }
            try:
                answer = session.get(url, params=query, timeout=(5, 2 * _WAIT_SECONDS))
                if answer.status_code == requests.codes.not_found:
                    return
                answer.raise_for_status()
            except requests.RequestException:
                time.sleep(_RETRY_SECONDS)
                continue
            value = answer.text.strip().upper()
            if value == final != before:
                act(f"{key}={value}")
            etag, before = answer.headers.get("ETag", "0"), value
            time.sleep(_PAUSE_SECONDS)
