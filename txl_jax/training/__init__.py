"""Optimizer, state, train step, loop and trainer."""
