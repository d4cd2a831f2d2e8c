"""Flax linen modules: they own parameters and call `txl_jax.ops`."""
