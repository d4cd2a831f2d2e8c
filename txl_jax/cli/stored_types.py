"""Flags for the types in which a trained model's weights and KV caches are held: those of quantization."""

from typing import Any

from absl import flags

from txl_jax.config import CacheDType, WeightDType

FLAGS = flags.FLAGS


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_enum(
        "weight_dtype",
        None,
        [str(each) for each in WeightDType],
        "Quantized type of the weights, in place of the saved one.",
    )
    flags.DEFINE_enum(
        "cache_dtype",
        None,
        [str(each) for each in CacheDType],
        "Type of KV caches, in place of the saved one.",
    )


def given() -> dict[str, Any]:
    """Returns the flags' values, as `txl_jax.load` takes them."""
    return {"weight_dtype": FLAGS.weight_dtype, "cache_dtype": FLAGS.cache_dtype}
