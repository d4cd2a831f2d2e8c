"""Environment of a process that compiles for TPUs without having one."""

import os

# libtpu searches for its chips, and for other processes that use them, unless these variables are set.
_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def set_environment() -> None:
    """Sets the variables that are not set; to be called before jax is imported."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
