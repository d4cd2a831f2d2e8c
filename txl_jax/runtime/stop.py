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
# Set by `request_stop`, for the rest of the process.
_stop_requested = threading.Event()
# Set by `request_save`, until the next `save_requested`.
_save_requested = threading.Event()
# Set once this process waits for notices.
_watching = threading.Event()

# The metadata server answers after this time even if nothing has changed.
_WAIT_SECONDS = 60
_CONNECT_SECONDS = 5
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
    is_multiprocess = distributed.is_multiprocess()
    _print_now(reason, "saving and stopping", with_all=is_multiprocess)
    if is_multiprocess:
        # jax's own handler, which may be called any number of times.
        os.kill(os.getpid(), signal.SIGTERM)


def request_save(reason: str) -> None:
    """Makes the next `save_requested` true. Call it from any thread."""
    _save_requested.set()
    _print_now(reason, "saving and continuing", with_all=distributed.is_multiprocess())


def save_requested() -> bool:
    """Returns whether a checkpoint was requested since the last call, in any process.

    A collective.
    """
    answer = None
    if _save_requested.is_set():
        _save_requested.clear()
        answer = "requested"
    return distributed.first_error(answer) is not None


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
        # The signal that has arrived, or 0. Several processes always stop by SIGTERM.
        self.signal_number = 0
        self._only_defaults = only_defaults
        self._is_multiprocess = False
        # Whether SIGHUP is one of the signals.
        self._notes_hangups = False

    def __enter__(self) -> Self:
        self._is_multiprocess = distributed.is_multiprocess()
        numbers = [signal.SIGINT]
        # With several processes SIGTERM is left alone: jax has a handler of its own, below
        # Python's.
        if not self._is_multiprocess:
            numbers.insert(0, signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        if self._only_defaults:
            numbers = [number for number in numbers if _has_default_handler(number)]

        for number in numbers:
            before = signal.signal(number, self._note)
            self.callback(signal.signal, number, before)
        self._notes_hangups = signal.SIGHUP in numbers
        return self

    def __bool__(self) -> bool:
        if self.signal_number == 0 and self._is_requested():
            self.signal_number = signal.SIGTERM
        return self.signal_number != 0

    def _is_requested(self) -> bool:
        # With several processes all ask at the same steps, and get the same answer.
        if self._is_multiprocess:
            return multihost_utils.reached_preemption_sync_point(next(_sync_points))
        return _stop_requested.is_set()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        del frame
        if not self._is_multiprocess:
            self.signal_number = number
        # The handlers before this one act from now on.
        self.close()
        if self._notes_hangups:
            before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self.callback(signal.signal, signal.SIGHUP, before)
        _print_now(
            signal.Signals(number).name,
            "stopping",
            with_all=self._is_multiprocess,
            hint=(
                ". This usually takes seconds, or longer while a model is being compiled. "
                "A second signal stops immediately"
            ),
        )
        if self._is_multiprocess:
            os.kill(os.getpid(), signal.SIGTERM)


def _has_default_handler(number: signal.Signals) -> bool:
    """Returns whether a signal may be handled here without replacing a caller's own handler."""
    # Only the main thread can set handlers.
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def _print_now(reason: str, action: str, *, with_all: bool, hint: str = "") -> None:
    """Writes a line to the error stream.

    Not by print: a signal may have come in the middle of one. `with_all` says whether this process
    has joined others, which a handler of a signal must not ask JAX.
    """
    when = "with all processes" if with_all else "after the steps in progress"
    # Nobody may read the stream any more, as after Ctrl-C on `2>&1 | tee`.
    with contextlib.suppress(OSError):
        os.write(2, f"{reason}: {action} {when}{hint}\n".encode())


def act_on_notices() -> None:
    """On a machine of Google Cloud, starts to wait in the background for notices.

    Elsewhere it does nothing.

    Before maintenance that ends the machine the run saves and continues. A preemption stops it,
    like SIGTERM. (A machine that migrates continues.)
    """
    server = metadata_server()
    if not server:
        return
    _watch_in_background(server, "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", request_save)
    _watch_in_background(server, "preempted", "TRUE", request_stop)
    _watching.set()


def _watch_in_background(server: str, key: str, value: str, act: Callable[[str], None]) -> None:
    thread = threading.Thread(
        target=_watch, args=(server, key, value, act), name=f"notice of {key}", daemon=True
    )
    thread.start()


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


def _watch(server: str, key: str, value: str, act: Callable[[str], None]) -> None:
    """Calls `act` each time a key of the metadata server gets this value.

    Ends if the server has no such key.
    """
    url = f"http://{server}/computeMetadata/v1/instance/{key}"
    with requests.Session() as session:
        # A proxy has another machine's metadata, or none.
        session.trust_env = False
        session.headers["Metadata-Flavor"] = "Google"
        # Names the state that was seen last. The server answers once there is another one.
        etag = "0"
        before = ""
        while True:
            query: dict[str, str | int] = {
                "wait_for_change": "true",
                "timeout_sec": _WAIT_SECONDS,
                "last_etag": etag,
            }
            try:
                answer = session.get(
                    url, params=query, timeout=(_CONNECT_SECONDS, 2 * _WAIT_SECONDS)
                )
                if answer.status_code == requests.codes.not_found:
                    return
                answer.raise_for_status()
            except requests.RequestException:
                time.sleep(_RETRY_SECONDS)
                continue

            now = answer.text.strip().upper()
            if now == value and before != value:
                act(f"{key}={now}")
            etag = answer.headers.get("ETag", "0")
            before = now
            time.sleep(_PAUSE_SECONDS)
