"""Computes the cost of a compiled program from its text. The entry point is `cost.cost_of`."""
