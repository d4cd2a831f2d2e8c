"""Attention in Pallas kernels on Triton; all that is Triton's is here.

positions.py  `position_scores`: the table of scores by distance
forward.py    `forward`
backward.py   `backward_keys`, `backward_queries`
tiles.py      tiles of the scores, which these share
cached.py     `cached_forward`, over a KV cache
"""
