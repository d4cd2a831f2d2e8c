"""The device mesh, the one table from logical axis names to its axes, and sharding constraints."""

from txl_jax.sharding.mesh import num_slices as num_slices
