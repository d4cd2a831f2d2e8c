"""Transformer-XL: embedding, N layers that read the memory, softmax (Dai et al., 2019).

    hidden, memory = model.apply(variables, tokens, memory, clamp_len=0, same_length=False,
                                 deterministic=True, method=model.encode)
    nll = model.apply(variables, hidden, targets, method=model.nll)

Parameters do not depend on lengths: L is `tokens.shape[1]`, M the memory's, and both may differ from
call to call.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import CompatConfig, ModelConfig, NormPlace, Window
from txl_jax.memory import Memory
from txl_jax.modules.block import LayerContext, Stack, layer_norm
from txl_jax.modules.embedding import Embedding
from txl_jax.modules.softmax import Softmax
from txl_jax.ops import masks, positions


class TransformerXL(nn.Module):
    """The language model. The vanilla model is M = 0."""

    config: ModelConfig
    compat: CompatConfig
    vocab_size: int
    row_groups: int = 1  # Parts of a batch's rows that lie on devices of their own; changes no number.

    def setup(self) -> None:
        c = self.config
        self.embedding = Embedding(c, self.vocab_size)
        self.stack = Stack(c, self.compat)
        if c.layer_norm is NormPlace.PRE and self.compat.final_norm:
            self.final_norm = layer_norm("final_norm", compat=self.compat, dtype=jnp.dtype(c.dtype))
        self.softmax = Softmax(c, self.vocab_size, self.row_groups)
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, tokens: jax.Array, targets: jax.Array, memory: Memory) -> jax.Array:
        """Touches every parameter, for `init`; returns the losses [B, L]."""
        hidden, _ = self.encode(tokens, memory, clamp_len=0, same_length=False, deterministic=True)
        return self.nll(hidden, targets)

    def encode(
        self, tokens: jax.Array, memory: Memory, *, clamp_len: int, same_length: bool, deterministic: bool
    ) -> tuple[jax.Array, Memory]:
        """Reads a segment.

        Args:
          tokens: int [B, L].
          memory: M slots before it.
          clamp_len: distances above this share one position code; 0: off.
          same_length: every query sees the same number of keys, M (or M + 1, see `compat`).
          deterministic: no dropout; otherwise an rng named "dropout" is needed.

        Returns:
          Hidden states [B, L, D] of the last layer, and the memory moved on by L positions.
        """
        c, segment_len, mem_len = self.config, tokens.shape[1], memory.mem_len
        codes = positions.sinusoids(
            positions.key_distances(mem_len + segment_len, clamp_len=clamp_len), c.d_model, jnp.dtype(c.dtype)
        )
        window = mem_len + (self.compat.same_length_window is Window.MEM_LEN_PLUS_ONE) if same_length else None
        context = LayerContext(
            position_codes=self.drop(codes, deterministic=deterministic),
            mask=masks.attention_mask(memory.valid, segment_len=segment_len, mem_len=mem_len, window=window),
            biases=None,
        )
        inputs = self.drop(self.embed(tokens), deterministic=deterministic)
        hidden, layer_inputs = self.stack(inputs, memory.hidden, context, deterministic=deterministic)
        hidden = self.drop(self.finish(hidden), deterministic=deterministic)
        return hidden, memory_lib.update(memory, layer_inputs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What the first layer reads, without dropout: int [B, L] -> [B, L, D]."""
        return self.embedding(tokens)

    def finish(self, hidden: jax.Array) -> jax.Array:
        """What the softmax reads of the last layer's outputs [B, L, D], without dropout."""
        if self.config.layer_norm is NormPlace.PRE and self.compat.final_norm:
            return self.final_norm(hidden)
        return hidden

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Nats of each target: [B, L, D] and int [B, L] -> [B, L]."""
        return self.softmax.nll(hidden, targets, self.embedding.tables, self.embedding.projections)

    def log_probabilities(self, hidden: jax.Array) -> jax.Array:
        """Log probabilities of all tokens: [B, L, D] -> [B, L, V]."""
        return self.softmax.log_probabilities(hidden, self.embedding.tables, self.embedding.projections)

    def init_memory(self, *, batch_size: int, mem_len: int) -> Memory:
        """The memory before the first segment, in the compute type."""
        return memory_lib.init(
            n_layer=self.config.n_layer,
            batch_size=batch_size,
            mem_len=mem_len,
            d_model=self.config.d_model,
            dtype=jnp.dtype(self.config.dtype),
            start=self.compat.memory_start,
        )
