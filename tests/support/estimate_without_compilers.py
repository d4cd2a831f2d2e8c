"""`experiments.bench.estimate` where no compiler of TPUs or GPUs is found; run as a program by its tests."""

import importlib.util
import runpy

COMPILERS = ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin")

if __name__ == "__main__":
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name in COMPILERS else find_spec(name, *rest)
    runpy.run_module("experiments.bench.estimate", run_name="__main__")
