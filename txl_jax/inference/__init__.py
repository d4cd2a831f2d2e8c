"""Inference: prepared parameters, KV cache, the forward pass that reads it, scoring and generation.

prepare.py    `DecodeParams`, a model's parameters, prepared once
cache.py      `KVCache`, a ring of projected keys and values
forward.py    the forward pass, the twin of `modules.transformer_xl`
scorer.py     `Scorer`, the functions with which evaluation scores a model
decode.py     the step that samples a token of each row, for generation and for the server
generate.py   `Generator`, from prompts to pieces of text
"""
