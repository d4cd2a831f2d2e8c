"""Tests the cache of executables: what a later start reads without tracing, and what makes it compile anew."""

import importlib
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import ROOT, processes
from txl_jax.errors import LogError
from txl_jax.runtime import executable_cache

pytestmark = pytest.mark.full
_numbers = itertools.count(os.getpid())  # A constant of its own for each program: JAX's cache has none of them.


class Program:
    """A program that counts how often it is lowered."""

    def __init__(self):
        self.constant, self.lowered = float(next(_numbers)), 0
        self.state = {"a": jnp.arange(3.0), "b": (jnp.ones((2, 5)), None)}

    def lower(self):
        def step(state, x):
            return jax.tree.map(lambda leaf: leaf * self.constant + x, state), x

        self.lowered += 1
        return jax.jit(step, donate_argnums=0).lower(self.state, jnp.zeros(()))

    def start(self, **parts):
        """Returns the compilation, and the result of the program on its state."""
        found = executable_cache.compile_or_load(self.lower, lambda: {"program": "step", **parts}, jax.devices()[:1])
        return found, found.program(jax.tree.map(jnp.copy, self.state), jnp.float32(0.5))


@pytest.fixture
def program():
    return Program()


@pytest.fixture
def folder(tmp_path):
    executable_cache.use(tmp_path / "kept")
    return tmp_path / "kept"


def restart(folder, **options):
    executable_cache.use(folder, options=options)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.structure(one) == jax.tree.structure(other)


def test_a_later_start_does_not_trace(program, folder):
    first, result = program.start()
    assert not first.was_kept and program.lowered == 1 and len(os.listdir(folder)) == 1
    restart(folder)
    second, again = program.start()
    assert second.was_kept and program.lowered == 1
    same(result, again)
    assert second.temporary_bytes == first.temporary_bytes


def test_what_was_donated_is_so_again(program, folder):
    program.start()
    kept, _ = program.start()
    state = jax.tree.map(jnp.copy, program.state)
    kept.program(state, jnp.float32(0.0))
    assert kept.was_kept and state["b"][0].is_deleted()


def test_it_may_be_read_ahead(program, folder, monkeypatch):
    program.start()
    executable_cache.prefetch(lambda: {"program": "step"}, jax.devices()[:1])
    [upcoming] = executable_cache._current._upcoming.values()
    assert upcoming.result() is not None
    monkeypatch.setattr(executable_cache.ExecutableCache, "_load", pytest.fail)
    found, _ = program.start()
    assert found.was_kept and program.lowered == 1


@pytest.mark.parametrize("change", ["parts", "options", "settings of jax", "code"])
def test_what_a_program_is_made_from_decides(change, program, folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_the_user.py").write_text("rate = 1\n")
    importlib.import_module("of_the_user")
    restart(folder)
    program.start()
    if change == "settings of jax":
        jax.config.update("jax_default_matmul_precision", "highest")
    if change == "code":
        (tmp_path / "of_the_user.py").write_text("rate = 2\n")
    try:
        restart(folder, **({"XLA_FLAGS": "--new"} if change == "options" else {}))
        found, _ = program.start(**({"seed": 2} if change == "parts" else {}))
    finally:
        jax.config.update("jax_default_matmul_precision", None)
        del sys.modules["of_the_user"]
    assert not found.was_kept and program.lowered == 2


def test_all_code_that_builds_a_program_counts():
    names = [name for name, _ in executable_cache._code_files()]
    for expected in (
        "txl_jax/training/step.py",
        "txl_jax/ops/attention/relative.py",
        "jax/_src/lax/lax.py",
        "flax/linen/linear.py",
        "optax/_src/transform.py",
    ):
        assert names.count(expected) == 1, expected
    assert "tests.conftest" in names or "conftest" in names
    assert not any(name.startswith(("numpy", "json")) for name in names)


def test_code_that_was_changed_since_the_start_keeps_nothing(program, folder, tmp_path, monkeypatch):
    """Of a file that is saved while a process starts, the digest is another than that of the code that runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited.py").write_text("rate = 1\n")
    importlib.import_module("edited")
    os.utime(tmp_path / "edited.py", (2e9, 2e9))
    executable_cache.use(folder, started=2e9 + 1)
    program.start()
    assert len(list(folder.iterdir())) == 1
    executable_cache.use(folder, started=2e9)
    assert not program.start()[0].was_kept
    del sys.modules["edited"]


def test_a_file_that_cannot_be_read_is_no_error(program, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(executable_cache, "_PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / ".#step.py").symlink_to("somebody@somewhere.1234")  # As Emacs locks a file.
    restart(folder)
    program.start()
    restart(folder)
    assert program.start()[0].was_kept


def test_an_entry_that_cannot_be_loaded_is_a_warning(program, folder):
    program.start()
    [path] = folder.iterdir()
    executable_cache._current.write(path.name, (b"no executable", None, None))
    with pytest.warns(UserWarning, match="cannot load the compiled program"):
        assert not program.start()[0].was_kept


@pytest.mark.parametrize(
    ("name", "value"), [("jax_cuda_visible_devices", "1"), ("jax_default_matmul_precision", "high")]
)
def test_the_key_is_the_same_for_processes_that_share_a_machine(name, value, folder):
    key, before = executable_cache._current.key({}), jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert (executable_cache._current.key({}) == key) is ("devices" in name)
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("damage", ["empty", "short", "a flipped bit"])
def test_a_damaged_file_is_a_warning_once(damage, program, folder):
    _, result = program.start()
    [path] = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes({"empty": b"", "short": content[:2000], "a flipped bit": content}[damage])
    with pytest.warns(UserWarning, match=f"{path.name} was damaged"):
        found, again = program.start()
    assert not found.was_kept and not list(folder.iterdir())
    same(result, again)
    assert not program.start()[0].was_kept


def test_it_may_be_in_a_bucket(program, bucket):
    restart(f"{bucket}/kept")
    assert not program.start()[0].was_kept
    restart(f"{bucket}/kept")
    assert program.start()[0].was_kept and program.lowered == 1


def test_what_jaxs_own_cache_had_is_not_kept(program, folder):
    """On a CPU it could be written, and read, and would fail when it is called."""
    executable_cache.use(None)
    program.start()
    jax.clear_caches()
    restart(folder)
    found, _ = program.start()
    assert not found.was_kept and not folder.exists()


def test_a_folder_that_cannot_be_written_to_is_a_warning(program, tmp_path, monkeypatch):
    def full(path, data):
        raise LogError(f"cannot write to {path} (No space left on device)")

    monkeypatch.setattr(executable_cache, "write_bytes", full)
    restart(tmp_path / "kept")
    with pytest.warns(UserWarning, match=r"not kept in .*/kept .*No space"):
        assert not program.start()[0].was_kept


def test_nothing_is_kept_unless_a_program_asks_for_it(program, tmp_path):
    executable_cache.use(None)
    assert not program.start()[0].was_kept and not program.start()[0].was_kept
    assert program.lowered == 2 and not os.listdir(tmp_path)


def test_shapes_are_kept_with_their_structure(folder):
    calls = []

    def compute():
        calls.append(1)
        return jax.eval_shape(lambda: {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": (jnp.ones(4, jnp.int32),)})

    first = executable_cache.compute_or_load(compute, lambda: {"value": "shapes"})
    restart(folder)
    second = executable_cache.compute_or_load(compute, lambda: {"value": "shapes"})
    assert first == second and len(calls) == 1
    assert executable_cache.compute_or_load(compute, lambda: {"value": "others"}) == first and len(calls) == 2


PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.cli import hosts, runner
from txl_jax.runtime import executable_cache

hosts.define_flags()
runner.define_data_folders()
runner.parse_or_exit(sys.argv[:1])
for name in sys.argv[2:]:
    __import__(name)

def job():
    executable_cache.use(sys.argv[1])
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_callback((8,), rows, lambda index: np.arange(8.0)[index])
    step = jax.jit(lambda x: (x * 2, x.sum()))
    found = executable_cache.compile_or_load(
        lambda: step.lower(x), lambda: {"program": "step"}, list(mesh.devices.flat)
    )
    print("kept" if found.was_kept else "compiled", float(found.program(x)[1]), file=sys.stderr)
    return 0

sys.exit(runner.guarded(job, begin=hosts.join))
"""


def test_several_processes_read_it_only_together(tmp_path):
    """The second process reads what process 0 wrote; with other code in one of them all compile."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start(*of_second):
        started = processes.start(program, tmp_path / "shared", of_process=lambda number: of_second if number else ())
        ended = processes.finish(started)
        assert [code for code, _, _ in ended] == [0, 0], ended
        return [errors.split() for _, _, errors in ended]

    assert start() == [["compiled", "28.0"]] * 2
    assert start() == [["kept", "28.0"]] * 2
    (tmp_path / "of_one.py").write_text("patched = True\n")
    assert start("of_one") == [["compiled", "28.0"]] * 2


SMALL = (
    "--model.n_layer=2 --model.d_model=16 --model.n_head=2 --model.d_head=8 --model.d_inner=32 --train.steps=4 "
    "--train.batch_size=2 --train.segment_len=8 --train.mem_len=8 --train.log_every=1 --train.eval_every=2 "
    "--train.checkpoint_every=2 --eval.batch_size=1 --eval.segment_len=8 --eval.mem_len=8 --eval.clamp_len=none"
)


def test_a_run_that_reads_its_train_step_has_the_same_numbers(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)

    def train(name, *words):
        command = [
            sys.executable,
            "-m",
            "experiments.text",
            *SMALL.split(),
            f"--workdir={name}",
            "--data.file=text.txt",
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
        done = subprocess.run(
            [*command, *words],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        losses = [line.split("loss")[1][:12] for line in done.stdout.splitlines() if " loss " in line]
        return "read from the cache" in done.stdout, losses

    first, second, other = train("first"), train("second"), train("other", "--seed=7")
    assert not first[0] and second[0] and not other[0]
    assert first[1] == second[1] != other[1] and len(first[1]) >= 4
    stopped, resumed = train("resumed", "--stop_after=2"), train("resumed")
    assert stopped[0] and resumed[0] and len(resumed[1]) >= 2 and resumed[1] == first[1][-len(resumed[1]) :]
