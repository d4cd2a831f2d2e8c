"""Attention over tiles of queries and keys in plain XLA, in training and over a KV cache.

The scores of all pairs are never written.
"""
