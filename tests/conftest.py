"""Settings, markers and fixtures of the whole suite."""

import asyncio
import functools
import gc
import hashlib
import json
import os
import pathlib

from support.xla_flags import xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", xla_flags())

import flax.linen
import hypothesis
import jax
import pytest

from support import BUCKET, compiled_programs, programs, tiny_run
from support.remote import Remote
from support.tiny import enable_x64
from txl_jax.runtime.storage import locked

# An array broadcast by accident is our likeliest bug: adding [L] to [B, L] raises in tests.
jax.config.update("jax_numpy_rank_promotion", "raise")

# A compilation inside an example can take seconds, so there is no time limit per example.
hypothesis.settings.register_profile("txl", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.load_profile("txl")

gc.set_threshold(200_000, 50, 100)  # Searches among JAX's many objects find little.
MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPPINGS = 30_000  # A module of tests may add as many before it is looked at again.
collect_ignore = ["support"]  # Helpers: some change the process when they are imported.


@pytest.fixture
def data_dir() -> pathlib.Path:
    """The directory of real texts that TXL_DATA_DIR names. Without it the test is skipped."""
    name = os.environ.get("TXL_DATA_DIR")
    if not name:
        pytest.skip("TXL_DATA_DIR is not set: this test reads real text")
    return pathlib.Path(name)


@pytest.fixture
def x64():
    """float64 for this test. The rest of the suite runs in float32."""
    with enable_x64(True):
        yield


@pytest.fixture
def compiled_calls(monkeypatch):
    """Computes each `init` and `apply` of a module in one compiled program.

    Otherwise JAX compiles each of their operations by itself, which takes seconds.
    """

    def in_one_program(call):
        def compile_and_call(module, *arguments, **options):
            return jax.jit(functools.partial(call, module, **options))(*arguments)

        return compile_and_call

    for name in ("init", "apply"):
        call = getattr(flax.linen.Module, name)
        monkeypatch.setattr(flax.linen.Module, name, in_one_program(call))


@pytest.fixture(autouse=True, scope="session")
def compilation_cache(request):
    """Compiles a program once, for both workers and for later runs: a warm cache saves most of the
    suite's time.
    """
    compiled_programs.keep_in(request.config.cache.mkdir(f"jax-{compiled_programs.key()}"))


@pytest.fixture(autouse=True, scope="module")
def free_executables():
    """Frees compiled programs before they exhaust the mappings of the process (vm.max_map_count,
    usually 65,530).
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def usual_emitters():
    """Compiles as outside of tests (`support.xla_flags`): then different programs round alike, to
    the last bit.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "fusion_emitters" in os.environ["XLA_FLAGS"]:
            compile_quickly = jax.stages.Lowered.compile
            options = {"xla_cpu_use_fusion_emitters": True}
            patch.setattr(
                jax.stages.Lowered, "compile", lambda lowered: compile_quickly(lowered, options)
            )
        tiny_run.compiled.cache_clear()
        yield
        tiny_run.compiled.cache_clear()


@pytest.fixture(scope="session")
def storage():
    """A server of object storage, one for the session, because gcsfs keeps its address."""
    with pytest.MonkeyPatch.context() as patch:
        # The server does not have these kinds of buckets. Read when gcsfs is imported.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        from support.object_storage import ObjectStorage

        with ObjectStorage() as server:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server


@pytest.fixture
def bucket(storage, request):
    """A directory in the bucket for one test. The storage's faults end with the test."""
    yield Remote(f"gs://{BUCKET}/{request.node.name.partition('[')[0]}-{id(request)}")
    storage.calm()
    storage.is_up = True


@pytest.fixture
def impatient(monkeypatch):
    """Gives up failing calls of object storage after 0.3 s, with short pauses between the tries."""
    sleep = asyncio.sleep
    monkeypatch.setattr("asyncio.sleep", lambda seconds, *rest: sleep(min(seconds, 0.01), *rest))
    monkeypatch.setattr("txl_jax.runtime.remote.PATIENCE_SECONDS", 0.3)


@pytest.fixture(scope="session")
def on_eight_devices(tmp_path_factory, testrun_uid):
    """Returns the JSON that a Python program prints. Each program runs once for all tests of all
    workers.
    """
    folder = tmp_path_factory.getbasetemp().parent / f"eight-devices-{testrun_uid}"
    folder.mkdir(exist_ok=True)

    def run(*arguments, **variables):
        path = folder / hashlib.sha256(repr((arguments, variables)).encode()).hexdigest()
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                path.write_text(programs.on_eight_devices(*arguments, **variables))
        return json.loads(path.read_text())

    return run
