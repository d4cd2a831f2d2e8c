"""The training step, the optimizer, hooks, progress, and the update of an ensemble."""
