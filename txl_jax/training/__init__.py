"""Optimiser, state, step, and the loop that drives them."""
