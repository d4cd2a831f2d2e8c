"""The persistent compilation cache of JAX: a program that was compiled once is read from disk at the next start.

It is on unless the user turns it off. It never ends a run: entries that cannot be read or written are warnings, and a
directory that cannot be used is one line.
"""

import hashlib
import os
import platform
import secrets
import time
from pathlib import Path

import jax
from absl import flags

from txl_jax.runtime import distributed

FLAGS = flags.FLAGS
FLAG = "compilation_cache"
_FOLDER = "compilation"
# Programs that compile for less would gain little, and a run compiles dozens of them.
_MIN_COMPILE_SECONDS = 0.1
# How long a folder on a network may take to show the other processes a new file.
_SECONDS_TO_APPEAR = 10


def define_flag() -> None:
    """Defines the flag."""
    flags.DEFINE_string(
        FLAG,
        None,
        "Folder of compiled programs, which a second start reads; default: compilation in the cache_dir, if there is "
        "one; off: none.",
    )


def enable(prepared: str | os.PathLike[str] | None = None) -> None:
    """Turns the cache on, in the folder of the flag or beside the prepared text; all processes call it.

    Where the environment names a folder already (JAX_COMPILATION_CACHE_DIR) the flag alone changes it.

    Args:
      prepared: folder of the prepared text; None: that of the program's flags, if it has them.
    """
    folder = _folder(prepared) if FLAG in FLAGS else None
    # All or none: the variable may be set on one host alone, and what follows is collective.
    if distributed.first_error(None if folder else "off") is None and folder is not None:
        if reason := distributed.broadcast_from_primary(lambda: _unusable(folder)) or _not_shared(folder):
            print(
                f"note      compiled programs are not kept: {folder} {reason}; give --{FLAG}=PATH, or off", flush=True
            )
            return
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)


def _is_off() -> bool:
    return FLAG in FLAGS and FLAGS[FLAG].value in ("", "off", "none")


def _folder(prepared: str | os.PathLike[str] | None) -> str | None:
    """Returns the folder; None: the cache is off, or is not ours to set."""
    if _is_off():
        return None
    given: str | None = FLAGS[FLAG].value
    if given is not None:
        return _of_this_processor(given)
    if _current():
        return None
    if prepared is None and "data_dir" in FLAGS:
        prepared = FLAGS["cache_dir"].value or os.path.join(str(FLAGS["data_dir"].value), "prepared")
    if prepared is None or "://" in str(prepared):  # Object storage is paid by the request.
        return None
    return _of_this_processor(os.path.join(prepared, _FOLDER))


def _current() -> str | None:
    """Returns the folder that JAX uses already."""
    folder: str | None = jax.config.values["jax_compilation_cache_dir"]
    return folder


def _of_this_processor(folder: str) -> str:
    """Returns a folder for programs that this kind of processor can run.

    XLA compiles for the processor that it finds, and JAX's keys do not name it: on a disk that machines share, one
    would read programs with instructions that it lacks.
    """
    inner = f"{folder}/{_processor()}"
    return inner if "://" in folder else os.path.abspath(os.path.expanduser(inner))


def _processor() -> str:
    """Returns a name for the instructions of this processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _unusable(folder: str) -> str | None:
    """Returns why a folder cannot be written to; None: it can, as far as can be seen. JAX makes it when it is used."""
    if "://" in folder:
        return None
    nearest = Path(folder)
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"lies below {nearest}, which is a file"
    return None if os.access(nearest, os.W_OK | os.X_OK) else "cannot be written to"


def _not_shared(folder: str) -> str | None:
    """Returns why several processes cannot use a folder; None: they can.

    JAX writes in process 0 alone. Elsewhere the others would compile what it reads, and on GPUs they would wait for its
    part of the autotuning forever.
    """
    if not distributed.is_multiprocess() or "://" in folder:
        return None
    name = distributed.broadcast_from_primary(lambda: f".seen-by-all-{secrets.token_hex(8)}")
    marker = Path(folder, name)

    def touch() -> str | None:
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        except OSError as error:
            return f"cannot be written to ({error.strerror})"
        return None

    if reason := distributed.broadcast_from_primary(touch):
        return reason
    until = time.monotonic() + _SECONDS_TO_APPEAR
    while not marker.exists() and time.monotonic() < until:
        time.sleep(0.1)
    missing = distributed.first_error(None if marker.exists() else "missing")
    if distributed.is_primary():
        marker.unlink(missing_ok=True)
    return missing and "is not the same folder for all processes"
