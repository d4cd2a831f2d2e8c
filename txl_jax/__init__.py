"""Transformer-XL (Dai et al., 2019) in JAX and Flax."""

from txl_jax.version import __version__

__all__ = ["__version__"]
