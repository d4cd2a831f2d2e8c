"""Settings, markers and fixtures of the whole suite."""

import functools
import gc
import os
import pathlib

from support.xla_flags import xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", xla_flags())

import hypothesis
import jax
import pytest

from support import tiny_run
from support.float64 import enable_x64
from txl_jax.runtime import executable_cache

# An array broadcast by accident is our likeliest bug: adding [L] to [B, L] raises in tests.
jax.config.update("jax_numpy_rank_promotion", "raise")

# A compilation inside an example can take seconds, so there is no time limit per example.
hypothesis.settings.register_profile("txl", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.load_profile("txl")


collect_ignore = ["support"]  # Helpers: some change the process when they are imported.

MARKERS = ("unit", "integration", "faults", "launch", "slow")
# Files and folders below tests/ that put parts together, or take more than some seconds.
INTEGRATION = (
    "bench/test_attention.py",
    "bench/test_huggingface_model.py",
    "bench/test_speed.py",
    "bench/test_throughput.py",
    "config/test_every_setting.py",
    "evaluation",
    "experiments",
    "inference",
    "jobs",
    "modules/test_dropout.py",
    "modules/test_recurrence_properties.py",
    "modules/test_transformer_xl.py",
    "paper",
    "runtime/test_two_hosts.py",
    "serving",
    "sharding/test_mesh.py",
    "test_docs.py",
    "test_golden.py",
    "test_public_api.py",
    "training",
)
# Parts of those that are quick.
QUICK = (
    "experiments/cli/test_flag_tree.py",
    "experiments/cli/test_help_text.py",
    "experiments/cli/test_runner.py",
    "experiments/cli/test_several_processes.py",
    "experiments/test_flagfiles.py",
    "experiments/test_list.py",
    "paper/test_detokenize.py",
    "paper/test_plots.py",
    "paper/test_recl_gains.py",
    "serving/test_sessions.py",
    "training/test_weight_averaging.py",
)


@functools.cache  # 5,000 tests are in 200 files.
def marker_of(path: pathlib.Path) -> str:
    """Returns the marker of a file's tests by its place in the tree."""

    def is_below(places: tuple[str, ...]) -> bool:
        return any(path.is_relative_to(pathlib.Path(__file__).parent / place) for place in places)

    for name in ("faults", "launch"):
        if is_below((name,)):
            return name
    return "integration" if is_below(INTEGRATION) and not is_below(QUICK) else "unit"


@pytest.hookimpl(tryfirst=True)  # Before -m selects.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives every test exactly one marker: its own, such as `slow`, or that of its place."""
    for item in items:
        own = {mark.name for mark in item.iter_markers()} & set(MARKERS)
        assert len(own) <= 1, f"{item.nodeid} has the markers {', '.join(sorted(own))}"
        if not own:
            item.add_marker(marker_of(item.path))


@pytest.fixture
def data_dir() -> pathlib.Path:
    """The folder of downloaded corpora that TXL_DATA_DIR names; without it the test is skipped."""
    name = os.environ.get("TXL_DATA_DIR")
    if not name:
        pytest.skip("TXL_DATA_DIR is not set: this test reads a downloaded corpus")
    return pathlib.Path(name)


@pytest.fixture
def x64():
    """float64 for this test; the rest of the suite runs in float32."""
    with enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="session")
def compilation_cache(tmp_path_factory):
    """Compiles a program once, though many tests jit it anew: the same binary, and the jobs' tests take a quarter."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compilation_cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def no_executables_are_kept():
    """Turns off what a program turned on in this process: its key knows of no function that a test replaces."""
    yield
    executable_cache.use(None)


@pytest.fixture(autouse=True, scope="module")
def free_executables():
    """Frees what a file compiled. A few thousand programs exhaust the mappings of a process (vm.max_map_count)."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def usual_emitters():
    """Compiles as outside of tests (`support.xla_flags`): then different programs round alike, to the last bit."""
    with pytest.MonkeyPatch.context() as patch:
        if "fusion_emitters" in os.environ["XLA_FLAGS"]:
            compile_quickly = jax.stages.Lowered.compile
            options = {"xla_cpu_use_fusion_emitters": True}
            patch.setattr(jax.stages.Lowered, "compile", lambda lowered: compile_quickly(lowered, options))
        tiny_run.compiled.cache_clear()
        yield
        tiny_run.compiled.cache_clear()


@pytest.fixture(scope="session")
def storage():
    """A server of object storage; one for the session, as gcsfs keeps its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # Read when gcsfs is imported.
        pytest.importorskip("gcsfs", reason="gs:// needs gcsfs (extra gcs)")
        pytest.importorskip("gcp_storage_emulator", reason="gs:// is tested with gcp-storage-emulator (extra test)")
        from support.object_storage import ObjectStorage

        with ObjectStorage() as server:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server


@pytest.fixture(scope="module")
def module_bucket(storage, request):
    """A folder in the bucket for the tests of a file."""
    from support.object_storage import BUCKET
    from txl_jax.runtime.paths import as_path

    return as_path(f"gs://{BUCKET}/{request.node.name.removesuffix('.py')}")


@pytest.fixture
def bucket(storage, request):
    """A folder in the bucket for one test; faults end with it."""
    from support.object_storage import BUCKET
    from txl_jax.runtime.paths import as_path

    yield as_path(f"gs://{BUCKET}/{request.node.name.partition('[')[0]}-{id(request)}")
    storage.calm()
    storage.is_up = True
