"""Compiled programs kept as executables (ahead of time, AOT): a later start neither traces nor lowers them.

JAX's persistent compilation cache is keyed by the lowered program, so a start must trace the model before it can look
there. That takes longer than all the rest where compilation is read from disk. Here the key is what a program is made
from: settings, devices, options of JAX and XLA, and every line of Python that could take part.

Nothing is kept until a program calls `use`: one whose settings are all in the config, and that replaces no part of the
library. A start that finds nothing compiles as without it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pickle
import sys
import sysconfig
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import flax
import jax
import jaxlib.version
import optax
from jax.experimental import serialize_executable

from txl_jax.runtime import distributed
from txl_jax.runtime.files import write_bytes
from txl_jax.runtime.paths import as_path

T = TypeVar("T")

_FORMAT = 1
_PACKAGE = Path(__file__).resolve().parents[1]
_DIGEST_BYTES = hashlib.sha256().digest_size
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
# Settings of JAX that shape no program: where its own cache is, what is printed, and what differs between processes on
# one machine (the devices that they see are in the key).
_UNRELATED = frozenset(
    f"jax_{name}"
    for name in (
        *("compilation_cache_dir", "log_compiles", "logging_level", "traceback_filtering"),
        *("cuda_visible_devices", "rocm_visible_devices", "cross_host_transfer_socket_address"),
    )
)
# Packages that compile for accelerators. (A CPU's compiler is jaxlib.)
_COMPILERS = (
    *("libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"),
)

_current: "ExecutableCache | None" = None
_num_hits = 0  # Programs that JAX's own cache had.


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled program, and how it came to be.

    Attributes:
      program: ready to be called.
      seconds: of compilation, without tracing and lowering, or of waiting for the compiled program to be read.
      was_kept: it was read from this cache.
    """

    program: jax.stages.Compiled
    seconds: float
    was_kept: bool = False

    @functools.cached_property
    def temporary_bytes(self) -> int | None:
        """Activations and other scratch, per device; None: the backend does not report it."""
        analysis: Any = self.program.memory_analysis()
        return None if analysis is None else analysis.temp_size_in_bytes


def use(
    folder: str | os.PathLike[str] | None,
    *,
    options: Mapping[str, str] | None = None,
    started: float = float("inf"),
) -> None:
    """Keeps the programs of this process in a folder from now on; all processes call it with the same one.

    Args:
      folder: a path or a URL, made when it is first written to; None: nothing is kept any more.
      options: what else decides how a program is compiled, such as XLA_FLAGS.
      started: a time (`time.time()`) before this process imported its code. If any of it was changed later, nothing is
        kept: the digest would be of other code than what runs.

    Raises:
      UserError: nothing here can open such a URL.
    """
    global _current
    _current = None if folder is None else ExecutableCache(as_path(folder), options or {}, started)
    if _current is not None:
        _listen_for_hits()


def prefetch(parts: Callable[[], Mapping[str, Any]], devices: Sequence[jax.Device]) -> None:
    """Begins to read a program in another thread, which `compile_or_load` takes it from; both as there."""
    if (cache := _cache_for(devices)) is not None and (key := cache.key(parts())) is not None:
        cache.prefetch(key, devices)


def compile_or_load(
    lower: Callable[[], jax.stages.Lowered],
    parts: Callable[[], Mapping[str, Any]],
    devices: Sequence[jax.Device],
) -> Compilation:
    """Returns a compiled program, from disk if every process finds it there; a collective.

    Args:
      lower: traces and lowers the program.
      parts: returns all that it is made from besides code and versions, its name included, as JSON can hold it.
      devices: that it runs on.
    """
    cache = _cache_for(devices)
    if cache is None:
        return _compile(lower())
    key, began = cache.key(parts()), time.monotonic()
    found = None if key is None else cache.executable(key, devices)
    # Compiling is no collective, but running is: half of the processes must not wait in it for the others to compile.
    missing = distributed.first_error("missing" if found is None else None)
    if found is not None and missing is None:
        return Compilation(found, time.monotonic() - began, was_kept=True)
    hits = _num_hits
    compilation = _compile(lower())
    # What JAX read from its own cache cannot be written again: on a CPU, what is loaded then lacks its functions.
    if key is not None and hits == _num_hits and distributed.is_primary():
        cache.keep_executable(key, compilation.program)
    return compilation


def compute_or_load(compute: Callable[[], T], parts: Callable[[], Mapping[str, Any]]) -> T:
    """Returns a value that tracing finds, such as shapes, from disk if it is there; `parts` as for a program."""
    cache = _current
    if cache is None or (key := cache.key(parts())) is None:
        return compute()
    kept: T | None = cache.read(key)
    if kept is not None:
        return kept
    value = compute()
    if distributed.is_primary():
        cache.write(key, value)
    return value


def _cache_for(devices: Sequence[jax.Device]) -> "ExecutableCache | None":
    """Returns the cache; None: nothing is kept, or it is compiled for devices that are not here."""
    return _current if set(devices) <= set(jax.devices()) else None


class ExecutableCache:
    """A folder with a file for each program: the digest of its content, then the compressed pickle.

    Whoever can write to the folder can run code here, as with JAX's own cache.
    """

    def __init__(self, folder: Path, options: Mapping[str, str], started: float) -> None:
        self._folder = folder
        self._options = dict(options)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executables")
        self._code = self._reader.submit(_digest, _code_files(), started)
        self._upcoming: dict[str, Future[jax.stages.Compiled | None]] = {}

    def key(self, parts: Mapping[str, Any]) -> str | None:
        """Returns the name of a program's file; None: the code of this process is not known any more."""
        code = self._code.result()
        if code is None:
            return None
        client = jax.devices()[0].client
        settings = {name: repr(value) for name, value in jax.config.values.items() if name not in _UNRELATED}
        environment = {
            "format": _FORMAT,
            "code": code,
            "jaxlib": jaxlib.version.__version__,
            "python": sys.version,
            "platform": [client.platform, client.platform_version, _num_cores()],
            "compilers": {} if client.platform == "cpu" else dict(map(_version, _COMPILERS)),
            "settings of jax": settings,
            "options": self._options,
            "devices": [_describe(device) for device in jax.devices()],
        }
        text = json.dumps({"environment": environment, "parts": parts}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def prefetch(self, key: str, devices: Sequence[jax.Device]) -> None:
        """Begins to load a program: the loader holds no lock of Python's, and takes 0.2 s where 12 layers are read."""
        self._upcoming[key] = self._reader.submit(self._load, key, devices)

    def executable(self, key: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """Returns a kept program, ready to run on these devices; None: there is none that can be used."""
        upcoming = self._upcoming.pop(key, None)
        return self._load(key, devices) if upcoming is None else upcoming.result()

    def _load(self, key: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        entry = self.read(key)
        if entry is None:
            return None
        serialized, in_tree, out_tree = entry
        try:
            return serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, backend=devices[0].client, execution_devices=list(devices)
            )
        except Exception as error:  # noqa: BLE001 (of any kind: the compiler decides, and the program can be compiled)
            _warn(f"cannot load the compiled program in {self._folder / key} ({_first_line(error)})")
            return None

    def keep_executable(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Writes a program, unless this kind of device cannot."""
        try:
            entry = serialize_executable.serialize(compiled)
        except Exception:  # noqa: BLE001 (it was not meant to be kept: by a backend without serialization, for example)
            return
        self.write(key, entry)

    def read(self, key: str) -> Any:
        """Returns the entry of a key; None: there is none, or it is damaged."""
        path = self._folder / key
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(f"cannot read {path} ({error.strerror or error})")
            return None
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            _warn(f"{path} was damaged and is removed")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        try:
            return pickle.loads(zlib.decompress(content))
        except Exception as error:  # noqa: BLE001 (whatever it holds, the program can be compiled)
            _warn(f"cannot read {path} ({_first_line(error)})")
            return None

    def write(self, key: str, entry: Any) -> None:
        """Writes an entry, whole or not at all; a folder that cannot be written to is a warning."""
        try:
            content = zlib.compress(pickle.dumps(entry), 1)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self._folder / key, hashlib.sha256(content).digest() + content)
        except Exception as error:  # noqa: BLE001 (a full disk, or a tree that cannot be pickled: the run needs neither)
            _warn(f"a compiled program is not kept in {self._folder} ({_first_line(error)})")


def _code_files() -> list[tuple[str, str]]:
    """Returns all Python code that a program could be made from: (name, path).

    It is that of this library, of the packages that it builds programs with, and of loaded modules that were not
    installed.
    """
    packages = [_PACKAGE, *(Path(str(package.__file__)).resolve().parent for package in (jax, jaxlib, flax, optax))]
    return [*(path for package in packages for path in _python_files(package)), *_own_modules(packages)]


def _digest(files: Sequence[tuple[str, str]], started: float) -> str | None:
    """Returns the digest of named files, of all code, 18 MB in 1,200 files, in 40 ms; None: one was changed later."""
    found = hashlib.sha256()
    for name, path in files:
        try:
            with open(path, "rb") as file:
                content = file.read()
                changed = os.fstat(file.fileno()).st_mtime
        except OSError as error:  # No code that runs: an editor's lock, a module in an archive.
            content, changed = str(error.strerror).encode(), 0.0
        if changed >= started:
            return None
        found.update(f"{name}\n{len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def _python_files(package: Path) -> list[tuple[str, str]]:
    """Returns the modules of a package: (path in the package, path), sorted."""
    start = len(str(package.parent)) + 1
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(package) for name in names)
    return sorted((path[start:], path) for path in paths if path.endswith(".py"))


def _own_modules(packages: Sequence[Path]) -> list[tuple[str, str]]:
    """Returns the loaded modules that are neither installed nor in these packages: (name, path), sorted."""
    paths = sysconfig.get_paths()
    known = (*(paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")), *map(str, packages))
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return sorted(
        (name, file) for name, file in files.items() if file and file.endswith(".py") and not file.startswith(known)
    )


def _describe(device: jax.Device) -> list[Any]:
    place = [getattr(device, name, None) for name in ("coords", "core_on_chip", "slice_index")]
    return [device.id, device.process_index, device.platform, device.device_kind, *place]


def _num_cores() -> int | None:
    """Returns the cores that this process may use: a CPU's program is cut into as many parts."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _version(package: str) -> tuple[str, str | None]:
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package, None


def _compile(lowered: jax.stages.Lowered) -> Compilation:
    began = time.monotonic()
    compiled = lowered.compile()
    return Compilation(compiled, time.monotonic() - began)


@functools.cache
def _listen_for_hits() -> None:
    def count(event: str, **_: Any) -> None:
        global _num_hits
        _num_hits += event == _CACHE_HIT

    jax.monitoring.register_event_listener(count)


def _warn(text: str) -> None:
    warnings.warn(f"{text}; the run goes on without it", stacklevel=3)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
