"""Starts this project's programs: `command` in a new process, `run` in the process of the test."""

import contextlib
import importlib.util
import io
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from support import ON_PATH
from support.xla_flags import xla_flags
from txl_jax.cli import flag_tree
from txl_jax.config import ExperimentConfig

# A run of seconds.
TINY = [
    "--model.n_layer=2",
    "--model.d_model=16",
    "--model.n_head=2",
    "--model.d_head=8",
    "--model.d_inner=32",
    "--train.batch_size=4",
    "--train.segment_len=16",
    "--train.mem_len=16",
    "--train.segments_per_call=2",
    "--eval.batch_size=4",
    "--eval.segment_len=16",
    "--eval.mem_len=32",
    "--eval.clamp_len=none",
]


def steps(count: int, *, every: int) -> list[str]:
    """Returns the flags of a run of so many steps that logs, evaluates and saves every so many."""
    return [
        f"--train.steps={count}",
        f"--train.log_every={every}",
        f"--train.eval_every={every}",
        f"--train.checkpoint_every={every}",
    ]


def write_words(folder: Path, count: int) -> Path:
    """Writes a text of so many words, drawn from four, and returns its path."""
    text = " ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], count))
    (folder / "words.txt").write_text(text)
    return folder / "words.txt"


def config_of(
    defaults: ExperimentConfig, *words: str, base: ExperimentConfig | None = None
) -> ExperimentConfig:
    """Returns the config that a command line makes of a program's defaults.

    `base` is used instead of the defaults if it is passed.
    """
    values = flags.FlagValues()
    flag_tree.define(defaults, values)
    flag_tree.parse(["program", *words], values)
    return flag_tree.build(base or defaults, values)


def command(module: str, *words: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def run(module: str, *words: object) -> tuple[int, str, str]:
    """Runs a module as its command line does, without importing JAX again.

    Returns its exit code, output and errors.
    """
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    out = io.StringIO()
    err = io.StringIO()
    sigpipe = signal.getsignal(signal.SIGPIPE)
    with own_flags(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *map(str, words)])
        patch.setenv("NO_GCE_CHECK", "true")  # A notice would stop the tests as well.
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                pytest.raises(SystemExit) as ended,
            ):
                runpy.run_path(spec.origin, run_name="__main__")
        finally:
            signal.signal(signal.SIGPIPE, sigpipe)  # --help changes it.
    return ended.value.code, out.getvalue(), err.getvalue()


def on_eight_devices(*words: str, **variables: str) -> str:
    """Returns the output of Python with these words, on a host with eight CPU devices."""
    environment = os.environ | ON_PATH
    environment |= {"XLA_FLAGS": xla_flags(devices=8), "JAX_PLATFORMS": "cpu"}
    environment |= variables
    # Programs of eight CPU devices that jaxlib 0.10.2 reads from its cache write where they must
    # not: five of seven processes ended in "corrupted size vs. prev_size". Programs that it
    # compiles do not.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    result = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-5000:]
    # XLA writes this if it finds no way between two shardings except through the whole array.
    assert "full rematerialization" not in result.stderr
    return result.stdout


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
    """Removes the flags that a program defines, and restores the variables that it sets."""
    _forget_flags_of_programs()  # A test that calls parts of a program may have left some.
    environment = dict(os.environ)
    try:
        yield
    finally:
        _forget_flags_of_programs()
        flags.FLAGS.unparse_flags()
        os.environ.clear()
        os.environ.update(environment)


def _forget_flags_of_programs() -> None:
    for name in set(flags.FLAGS):
        # A program that is run by its path defines flags under that path.
        module = flags.FLAGS.find_module_defining_flag(name)
        if module.startswith(("experiments", "txl_jax.cli", "/")):
            delattr(flags.FLAGS, name)
