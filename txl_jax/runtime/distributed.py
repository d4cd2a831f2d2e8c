"""Multiple processes that run the same program (usually one per host), each on its own devices.

Process 0, the primary, reads and writes the files of a run. Every function in this module except
`is_multiprocess`, `is_primary` and `is_known_to_all` is a collective: all processes must call it in
the same order, and each waits for the others. With a single process it is only the call that it
wraps.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from txl_jax.errors import RemoteProcessError, UserError
from txl_jax.runtime import storage

T = TypeVar("T")
# An attribute of exceptions: they keep their type, and builtin ones take no weak reference.
_KNOWN_TO_ALL = "known_to_all"
# Differences between processes that an error names.
_MOST_DIFFERENCES = 3
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclasses.dataclass(frozen=True)
class _Attempt(Generic[T]):
    """Outcome of a call: a result, or an error and its message."""

    result: T | None = None
    error: Exception | None = None
    failure: str | None = None


def is_multiprocess() -> bool:
    """Returns whether this process has joined others. If not, JAX touches no device."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_primary() -> bool:
    """Returns whether this process is process 0, which writes files."""
    return not is_multiprocess() or jax.process_index() == 0


def broadcast_from_primary(find: Callable[[], T]) -> T:
    """Runs `find` on process 0 and broadcasts its result as JSON.

    Because of JSON, the other processes get lists instead of the tuples returned by `find`.

    If it fails, process 0 raises its error, and the others `RemoteProcessError`.
    """
    if not is_multiprocess():
        return find()
    attempt: _Attempt[T] = _Attempt()
    if is_primary():
        attempt = _attempt(find)
    texts = gather_texts(json.dumps([attempt.result, attempt.failure]))
    result, failure = json.loads(texts[0])
    if failure is not None:
        raise _known_to_all(attempt.error or RemoteProcessError(f"process 0: {failure}"))
    return result


def run_on_all(act: Callable[[], T]) -> T:
    """Runs `act`, which must not be a collective, in every process.

    Returns its result once it succeeded in all.

    If it fails, the processes in which it did raise its error, and the others `RemoteProcessError`.
    """
    if not is_multiprocess():
        return act()
    attempt = _attempt(act)
    failure = first_error(attempt.failure)
    if failure is not None:
        raise _known_to_all(attempt.error or RemoteProcessError(failure))
    return attempt.result  # type: ignore[return-value]


def first_error(message: str | None) -> str | None:
    """Gathers each process's error message, or None if it succeeded.

    Returns the first, with its process's number, or None if all succeeded.
    """
    if not is_multiprocess():
        return message
    for number, error in enumerate(gather_texts(message or "")):
        if error:
            return f"process {number}: {error}"
    return None


def assert_same_on_all(facts: Mapping[str, Any], advice: str) -> None:
    """Raises `UserError` in all processes if facts, as JSON, differ from process 0's.

    Names the first that differ.
    """
    if not is_multiprocess():
        return
    first, *others = (json.loads(text) for text in gather_texts(json.dumps(facts)))
    for number, other in enumerate(others, start=1):
        names = [name for name in first | other if other.get(name) != first.get(name)]
        if names:
            differences = ", ".join(
                f"{name} must be {first.get(name)}, as in process 0, got {other.get(name)}"
                for name in names[:_MOST_DIFFERENCES]
            )
            raise _known_to_all(UserError(f"process {number}: {differences}. {advice}"))


def is_known_to_all(error: BaseException) -> bool:
    """Returns whether every process raises this error or its counterpart.

    If so, no process waits for another.
    """
    return getattr(error, _KNOWN_TO_ALL, False)


def check_seen_by_all(folder: str, complaint: str, *, seconds: float) -> None:
    """Raises `UserError` in a process that does not see process 0's directory in time.

    The error's message is `complaint`. A process has `seconds` seconds to see the directory.
    """
    if not is_multiprocess():
        return
    name = broadcast_from_primary(lambda: f".seen-by-all-{secrets.token_hex(8)}")
    marker = os.path.join(folder, name)
    broadcast_from_primary(lambda: storage.write(marker, b""))

    def wait() -> None:
        until = time.monotonic() + seconds
        while not storage.exists(marker):
            if time.monotonic() > until:
                raise UserError(complaint)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    try:
        run_on_all(wait)
    finally:
        if is_primary():
            # The other processes are past this point, so an error would end only process 0.
            with contextlib.suppress(OSError):
                storage.remove(marker)


def to_host(array: Any) -> np.ndarray:
    """Returns the whole array on the host.

    Gathers an array that is sharded over multiple processes.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _attempt(act: Callable[[], T]) -> _Attempt[T]:
    try:
        return _Attempt(result=act())
    except Exception as error:  # noqa: BLE001
        # Whatever it is, the others must not wait for this process.
        return _Attempt(error=error, failure=str(error) or type(error).__name__)


def _known_to_all(error: Exception) -> Exception:
    setattr(error, _KNOWN_TO_ALL, True)
    return error


def gather_texts(text: str) -> list[str]:
    """Returns every process's text, in the order of their numbers."""
    content = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(content))).tolist()
    longest = max(lengths)
    if longest == 0:
        return [""] * len(lengths)
    # All processes must pass arrays of one shape.
    padded = np.pad(content, (0, longest - len(content)))
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]
