"""JAX's persistent cache for tests: one folder for all workers, which survives between runs."""

import hashlib
import os
import pathlib
import platform

import jax
from jax._src import lru_cache


def key() -> str:
    """Returns a name for what compiled programs depend on and JAX's own keys leave out: versions,
    flags, processor.
    """
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
    )
    parts = [jax.__version__, jax.lib.__version__, os.environ["XLA_FLAGS"], features]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def cache_in(folder: pathlib.Path) -> dict[str, str]:
    """Environment variables of programs that are compiled once; killed ones may leave half a file
    behind.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def keep_in(folder: pathlib.Path) -> None:
    """Keeps every compiled program of this process in a folder that other workers read and write
    too.

    Processes that tests start have a folder inside it: they write in place, and warn of an entry
    that they read half.
    """
    os.environ.update(cache_in(folder / "processes"))
    for name, value in cache_in(folder).items():
        jax.config.update(name.lower(), int(value) if value.lstrip("-").isdigit() else value)
    lru_cache.LRUCache.put = _put


def _put(cache: lru_cache.LRUCache, name: str, value: bytes) -> None:
    """Writes an entry under another name first.

    JAX writes in place, so that a second worker can read half of it.
    """
    path = os.path.join(cache.path, f"{name}-cache")
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(value)
    os.replace(file.name, path)
