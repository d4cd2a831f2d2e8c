"""Notices of Google Cloud that a machine will be taken away: by maintenance of its host, or by preemption.

The metadata server of a machine (Compute Engine, TPU VM) answers a request with `wait_for_change` when the value has
changed. It gives notice of maintenance a minute to an hour ahead, and of a preemption half a minute.
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

import threading
import time
from collections.abc import Callable

import requests

# Keys of the metadata server, and the value with which the machine ends. (A machine that migrates goes on.)
NOTICES = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}

_WAIT_SECONDS = 60  # The server answers after this even if nothing has changed.
_RETRY_SECONDS = 10
_PAUSE_SECONDS = 0.5  # A server that answers at once all the same is not asked without a pause.


def watch(server: str, on_notice: Callable[[str], None]) -> None:
    """Starts daemon threads that wait for a notice; they end with the first one, or where the server has no such key.

    Args:
      server: host, or host:port, of the metadata server. One that does not answer is tried again.
      on_notice: called once, in another thread, with the key and the value, such as "preempted=TRUE".
    """
    first = _First(on_notice)
    for key, final in NOTICES.items():
        threading.Thread(target=_wait, args=(server, key, final, first), name=f"notice of {key}", daemon=True).start()


class _First:
    """A function that passes on only its first call, from any thread."""

    def __init__(self, function: Callable[[str], None]) -> None:
        self.done = threading.Event()
        self._function = function
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        with self._lock:
            if self.done.is_set():
                return
            self.done.set()
        self._function(text)


def _wait(server: str, key: str, final: str, on_notice: _First) -> None:
    """Asks for a key until it has its final value."""
    with requests.Session() as session:
        session.trust_env = False  # A proxy has another machine's metadata, or none.
        session.headers["Metadata-Flavor"] = "Google"
        url, etag = f"http://{server}/computeMetadata/v1/instance/{key}", "0"
        while not on_notice.done.is_set():
            query: dict[str, str | int] = {"wait_for_change": "true", "timeout_sec": _WAIT_SECONDS, "last_etag": etag}
            try:
                answer = session.get(url, params=query, timeout=(5, 2 * _WAIT_SECONDS))
            except requests.RequestException:
                answer = None
            if answer is not None and answer.status_code == requests.codes.not_found:
                return
            if answer is None or not answer.ok:
                time.sleep(_RETRY_SECONDS)
                continue
            if answer.text.strip().upper() == final:
                on_notice(f"{key}={final}")
                return
            etag = answer.headers.get("ETag", "0")
            time.sleep(_PAUSE_SECONDS)
