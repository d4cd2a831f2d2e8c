"""JAX's persistent cache for tests: one directory for all workers, which survives between runs."""

import hashlib
import os
import pathlib
import platform

import jax
from jax._src import lru_cache


def key() -> str:
    """Returns a name for the versions, flags and processor that compiled programs depend on.

    JAX's own keys lack them.
    """
    parts = [jax.__version__, jax.lib.__version__, os.environ["XLA_FLAGS"], _processor_features()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _processor_features() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.machine()


def cache_in(folder: pathlib.Path) -> dict[str, str]:
    """Returns environment variables with which a program is compiled only once.

    A process that is killed may leave half a file behind.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def keep_in(folder: pathlib.Path) -> None:
    """Keeps every compiled program of this process in a directory that other workers share.

    Processes that tests start have a directory inside it: they write in place, and warn of an entry
    that they read half.
    """
    os.environ.update(cache_in(folder / "processes"))
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lru_cache.LRUCache.put = _put


def _put(cache: lru_cache.LRUCache, name: str, value: bytes) -> None:
    """Writes an entry under another name first.

    JAX writes in place, so that a second worker can read half of it.
    """
    path = os.path.join(cache.path, f"{name}-cache")
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(value)
    os.replace(file.name, path)
