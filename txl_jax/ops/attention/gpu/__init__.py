"""Attention in Pallas kernels for NVIDIA GPUs, with cuDNN's where these cannot serve.

limits.py          what they can serve, their tiles, and which kernel; it imports no Pallas
attention.py       `gpu_attention`: [memory; segment], with gradients
cached.py          `gpu_cached_attention`: a KV cache, for inference
position_table.py  where position scores by distance lie, and the gradient of the position keys
chunks.py          chunks of the rows of a batch
padding.py         sizes of arrays
triton/            the kernels, on Triton; kernels for Hopper's own instructions would be another such folder
cudnn.py           cuDNN's attention, with position scores as a bias
"""
