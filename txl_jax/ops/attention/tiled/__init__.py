"""Attention over tiles of queries and keys in plain XLA: the scores [B, H, L, K] are never written.

training.py  `tiled_attention`, forward and backward
cached.py    `tiled_cached_attention`, a KV cache instead of the memory, for inference
"""
