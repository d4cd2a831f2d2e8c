"""Tests the compilation cache of the programs: where it is, that a second start reads it, and what turns it off."""

import os
import subprocess
import sys

import pytest
from absl import flags

from support import ROOT
from txl_jax.cli import compilation_cache
from txl_jax.runtime import distributed

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from txl_jax.cli import runner

def job():
    heavy = jax.jit(lambda x: sum(jnp.sin(x * i).sum() for i in range(100)))
    events = []
    jax.monitoring.register_event_listener(lambda name, **unused: events.append(name))
    found = heavy.lower(jnp.zeros(5)).compile()(jnp.arange(5.0))
    hits = [name for name in events if name.endswith("compilation_cache/cache_hits")]
    print(found, "hit" if hits else "miss")
    return 0

runner.define_data_folders()
runner.parse_or_exit()
sys.exit(runner.guarded(job))
"""


def start(*words, **environment):
    """Starts a program that compiles one function; returns the function's value, "hit" or "miss", and the errors."""
    own = ("JAX_COMPILATION", "JAX_PERSISTENT", "XLA_")  # With the flags of tests it compiles too fast to be kept.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return *done.stdout.split(), done.stderr


@pytest.mark.full
def test_a_second_start_reads_what_the_first_compiled(tmp_path):
    value, found, _ = start(f"--data_dir={tmp_path}")
    assert found == "miss" and list((tmp_path / "prepared" / "compilation").rglob("*-cache"))
    assert start(f"--data_dir={tmp_path}") == (value, "hit", "")


@pytest.mark.nightly(part="faults")
def test_it_may_be_in_a_bucket(bucket, storage):
    flag = f"--compilation_cache={bucket}"
    value, found, _ = start(flag, **storage.environment)
    assert found == "miss" and any(name.endswith("-cache") for name in storage.names())
    assert start(flag, **storage.environment) == (value, "hit", "")


@pytest.mark.nightly(part="faults")
def test_a_damaged_entry_costs_a_warning(tmp_path):
    value, _, _ = start(f"--data_dir={tmp_path}")
    for path in tmp_path.rglob("*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    damaged, found, err = start(f"--data_dir={tmp_path}")
    assert (damaged, found) == (value, "miss") and "compilation cache" in err


@pytest.fixture
def settings(monkeypatch):
    """Keeps this process's own cache, and returns what `enable` sets."""
    found = {}
    monkeypatch.setattr(compilation_cache.jax.config, "update", lambda name, value: found.update({name: value}))
    monkeypatch.setattr(compilation_cache, "_current", lambda: found.get("jax_compilation_cache_dir"))
    return found


@pytest.fixture
def given(monkeypatch):
    """Defines the flags with these words."""

    def define(*words, folders=True):
        values = flags.FlagValues()
        monkeypatch.setattr(compilation_cache, "FLAGS", values)
        flags.DEFINE_string(compilation_cache.FLAG, None, "", flag_values=values)
        if folders:
            flags.DEFINE_string("data_dir", "data", "", flag_values=values)
            flags.DEFINE_string("cache_dir", None, "", flag_values=values)
        values(["program", *words])

    return define


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["--data_dir=/a"], "/a/prepared/compilation/"),
        (["--data_dir=/a", "--cache_dir=/b"], "/b/compilation/"),
        (["--data_dir=/a", "--compilation_cache=/c"], "/c/"),
        (["--compilation_cache=gs://bucket/c"], "gs://bucket/c/"),
    ],
)
def test_where_it_is(settings, given, words, folder):
    given(*words)
    compilation_cache.enable()
    found = settings["jax_compilation_cache_dir"]
    assert found.startswith(folder) and "/" not in found.removeprefix(folder), found


@pytest.mark.parametrize("word", ["--compilation_cache=off", "--compilation_cache=", "--data_dir=gs://bucket/a"])
def test_off(settings, given, word):
    given(word)
    compilation_cache.enable()
    assert settings == {}


def test_a_program_without_a_text_has_none_unless_it_is_given(settings, given, tmp_path):
    given(folders=False)
    compilation_cache.enable()
    assert settings == {}
    compilation_cache.enable(tmp_path / "prepared")
    assert settings["jax_compilation_cache_dir"].startswith(f"{tmp_path}/prepared/compilation/")


def test_the_environment_comes_before_the_default_and_the_flag_before_the_environment(settings, given, monkeypatch):
    monkeypatch.setattr(compilation_cache, "_current", lambda: "/of/the/user")
    given()
    compilation_cache.enable()
    assert settings == {}
    given("--compilation_cache=/c")
    compilation_cache.enable()
    assert settings["jax_compilation_cache_dir"].startswith("/c/")


def test_a_folder_that_cannot_be_used_is_one_line(settings, given, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given(f"--compilation_cache={tmp_path / 'file' / 'inner'}")
    compilation_cache.enable()
    line = capsys.readouterr().out
    assert settings == {} and line.count("\n") == 1 and f"{tmp_path / 'file'}, which is a file" in line
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_is_made_before_something_is_compiled(settings, given, tmp_path):
    given(f"--data_dir={tmp_path / 'a-typo'}")
    compilation_cache.enable()
    assert settings and os.listdir(tmp_path) == []


@pytest.mark.parametrize("seen", [True, False])
def test_a_folder_that_another_process_does_not_see_is_not_used(seen, settings, given, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "is_multiprocess", lambda: True)
    monkeypatch.setattr(distributed, "is_primary", lambda: True)
    monkeypatch.setattr(distributed, "broadcast_from_primary", lambda find: find())
    answers = iter([None, None if seen else "process 1: missing"])
    monkeypatch.setattr(distributed, "first_error", lambda own: next(answers, None))
    given(f"--compilation_cache={tmp_path}")
    compilation_cache.enable()
    assert bool(settings) is seen and not list(tmp_path.rglob(".seen*"))
    assert ("is not the same folder for all processes" in capsys.readouterr().out) is not seen
