"""Inference: prepared parameters, the KV cache, the forward pass that reads it, scoring and generation."""
