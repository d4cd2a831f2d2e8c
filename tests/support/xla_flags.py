"""XLA's flags for tests: most of the suite's time goes into compiling, and these make it a fifth."""

import importlib.metadata

# Without LLVM's optimisations, and with the older emitters of fused operations, which jaxlib has up to 0.10. A training
# step of the tiny model compiles in 14 s of processor time without them, in 6 s with the first, in 2 s with both.
_QUICK = ["--xla_backend_optimization_level=0"]
_JAXLIB = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
if _JAXLIB < (0, 11):
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")
if _JAXLIB == (0, 7):
    # On processors with bfloat16 instructions 0.7.2 fails in products of bfloat16 with a float32 result.
    _QUICK.append("--xla_cpu_max_isa=AVX512")


def xla_flags(*, devices: int | None = None) -> str:
    """Returns the value of XLA_FLAGS: programs compile quickly; `devices`: the host has so many CPU devices."""
    count = [] if devices is None else [f"--xla_force_host_platform_device_count={devices}"]
    return " ".join([*count, *_QUICK])
