"""XLA's flags for tests, with which compiling takes a fifth of the time.

With TXL_USUAL_COMPILER=1 the tests compile with the options that users get (`.ci/nightly
compiler`).
"""

import importlib.metadata
import os

_JAXLIB = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
_FLAGS = []
if not os.environ.get("TXL_USUAL_COMPILER"):
    # Without LLVM's optimizations, in one part (the default is 32, on as many threads), and with
    # the older emitters of fused operations, which jaxlib has up to 0.10. A training step of the
    # tiny model compiles in 14 s of processor time without them, in 6 s with the first, in 2 s with
    # the first and the last. One part saves a third of the rest.
    _FLAGS += ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if _JAXLIB < (0, 11):
        _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if _JAXLIB == (0, 7):
    # On processors with bfloat16 instructions 0.7.2 fails in products of bfloat16 with a float32
    # result.
    _FLAGS.append("--xla_cpu_max_isa=AVX512")


def xla_flags(*, devices: int | None = None) -> str:
    """Returns the value of XLA_FLAGS for tests.

    If `devices` is set, the host has that many CPU devices.
    """
    flags = [*_FLAGS]
    if devices is not None:
        flags.insert(0, f"--xla_force_host_platform_device_count={devices}")
    return " ".join(flags)
