"""Attention in Pallas kernels for TPUs.

geometry.py  sizes of calls, the calls that the kernels support, their tiles. Imports no Pallas
kernels.py   `tpu_attention`: [memory; segment], with gradients
cached.py    `tpu_cached_attention`: a KV cache, for inference
"""
