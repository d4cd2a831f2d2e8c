"""Attention in Pallas kernels for TPUs.

geometry.py  sizes of calls, what the kernels can serve, their tiles. It imports no Pallas
kernels.py   `tpu_attention`: [memory; segment], with gradients
cached.py    `tpu_cached_attention`: a KV cache, for inference
"""
