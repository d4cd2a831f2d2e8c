"""Batching: token ids are cut into rows and segments; imports nothing of sources and tokens."""
