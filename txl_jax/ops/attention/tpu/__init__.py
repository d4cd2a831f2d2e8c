"""Attention in Pallas kernels for TPUs.

limits.py     what they can serve, and their tiles; it imports no Pallas
attention.py  `tpu_attention`: [memory; segment], with gradients
cached.py     `tpu_cached_attention`: a KV cache, for inference
"""
