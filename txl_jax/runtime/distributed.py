"""Several processes that walk as one: what the first finds out all are told, and what one cannot do stops all.

Each process (one per host, as a rule) runs the same program on its own devices. The first one, number 0, reads and
writes the files of a run. Every other function here must be called by all processes in the same order: it waits for the
others. With one process each is the plain call that it wraps.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from txl_jax.errors import RemoteProcessError

T = TypeVar("T")


def is_multiprocess() -> bool:
    """Whether this process has joined others; jax touches no device to answer no."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_primary() -> bool:
    """Whether this process is the one that writes files."""
    return not is_multiprocess() or jax.process_index() == 0


def broadcast_from_primary(find: Callable[[], T]) -> T:
    """What `find` returns in the first process, in all of them; it is called in no other.

    Args:
      find: returns what JSON can hold; other processes get lists for tuples.

    Raises:
      RemoteProcessError: it failed there. In the first process its own error is raised.
    """
    if not is_multiprocess():
        return find()
    found, error = _attempt(find) if is_primary() else (None, None)
    told = json.loads(_of_first(json.dumps({"found": found, "error": error and _described(error)})))
    if told["error"] is not None:
        raise _known_to_all(error or RemoteProcessError(f"process 0: {told['error']}"))
    return told["found"]


def run_on_all(act: Callable[[], T]) -> T:
    """What `act` returns in this process, once it has succeeded in all of them; it must not itself wait for others.

    Raises:
      RemoteProcessError: it failed in another process. Where it failed, its own error is raised.
    """
    if not is_multiprocess():
        return act()
    result, error = _attempt(act)
    trouble = first_error(error and _described(error))
    if trouble is not None:
        raise _known_to_all(error or RemoteProcessError(trouble))
    return result


def first_error(own: str | None) -> str | None:
    """What went wrong in the first of the processes that had trouble, and which it was; None: all is well."""
    if not is_multiprocess():
        return own
    troubles = _of_each(own or "")
    return next((f"process {number}: {told}" for number, told in enumerate(troubles) if told), None)


def assert_same_on_all(value: str, complaint: Callable[[str, str], str]) -> None:
    """Compares what the processes hold.

    Args:
      complaint: a sentence for what the first process holds, and what another does.

    Raises:
      ValueError: one holds another value than the first; in all of them, naming it.
    """
    if not is_multiprocess():
        return
    values = _of_each(value)
    for number, other in enumerate(values):
        if other != values[0]:
            raise _known_to_all(ValueError(f"process {number}: {complaint(values[0], other)}"))


def is_known_to_all(error: BaseException) -> bool:
    """Whether every process raises this error or its counterpart, so that none waits for another."""
    return getattr(error, "known_to_all", False)


def to_host(array: Any) -> np.ndarray:
    """The whole of an array, gathered if it is spread over the devices of several processes."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:  # noqa: BLE001 (whatever it is, the others must not wait for this process)
        return None, error


def _described(error: Exception) -> str:
    return str(error) or type(error).__name__


def _known_to_all(error: Exception) -> Exception:
    error.known_to_all = True
    return error


def _of_first(text: str) -> str:
    """The first process's text."""
    own = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(own))))
    sent = own if is_primary() else np.zeros(length, np.uint8)
    return multihost_utils.broadcast_one_to_all(sent).tobytes().decode()


def _of_each(text: str) -> list[str]:
    """Every process's text, in the order of their numbers."""
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(own))).tolist()
    padded = np.pad(own, (0, max(lengths) - len(own)))
    texts = multihost_utils.process_allgather(padded) if len(padded) else np.zeros((len(lengths), 0), np.uint8)
    return [row[:length].tobytes().decode() for row, length in zip(texts, lengths, strict=True)]
