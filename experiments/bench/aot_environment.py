"""Environment of a process that compiles for TPUs or GPUs without having one."""

import os

_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    # libtpu searches for its chips, and for other processes that use them, unless these are set.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # The CUDA plugin searches for its GPUs, and complains that there is no driver.
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def set_environment() -> None:
    """Sets the variables that are not set; to be called before jax is imported."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
