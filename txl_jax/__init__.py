"""Transformer-XL (Dai et al., 2019) in JAX and Flax."""

__version__ = "0.1.0"
