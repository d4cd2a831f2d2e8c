"""Attention over tiles of queries and keys in plain XLA, in training and over a KV cache.

Scores are not written.
"""
