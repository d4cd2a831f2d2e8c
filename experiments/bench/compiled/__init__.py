"""Reads what a compiled program costs from its text. `cost.cost_of` is the way in."""
