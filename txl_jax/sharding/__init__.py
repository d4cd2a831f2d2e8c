"""The device mesh, the table from logical axis names to mesh axes, and sharding constraints."""
