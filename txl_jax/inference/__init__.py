"""Inference: the KV cache, the forward pass that reads it, the scorer of evaluation, and the generator.

cache.py      `KVCache`, a ring of projected keys and values
forward.py    prepared parameters and the forward pass, the twin of `modules.transformer_xl`
scorer.py     `Scorer`, the functions that evaluation scores a model with
generator.py  `Generator`, which reads a prompt and draws tokens
batch_generator.py  `BatchGenerator`, which does so for different prompts in the rows of a batch
"""
