"""The device mesh, the one table from logical axis names to its axes, and sharding constraints."""
