"""Transformer-XL: embedding, N layers that read the memory, softmax (Dai et al., 2019).

    variables = model.init(key, tokens, memory)
    hidden, memory = model.apply(variables, tokens, memory, clamp_len=None, same_length=False, deterministic=True)
    nll = model.apply(variables, hidden, targets, method=model.nll)

Parameters do not depend on lengths: L is `tokens.shape[1]`, M the memory's, and both may differ from
call to call.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import CompatConfig, Encoding, ModelConfig, NormPlace
from txl_jax.memory import Memory
from txl_jax.modules.block import LayerContext, Stack, layer_norm
from txl_jax.modules.dropout import DropoutRates, dropout
from txl_jax.modules.embedding import Embedding
from txl_jax.modules.intermediates import keep_last
from txl_jax.modules.softmax import Softmax
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.attention import masks, positions
from txl_jax.sharding import check_ambient_mesh


class TransformerXL(nn.Module):
    """The language model. The vanilla model is M = 0 with absolute positions (Al-Rfou et al.: learned in each layer)."""

    config: ModelConfig
    compat: CompatConfig
    vocab_size: int
    num_devices: int = 1  # Of the ambient mesh (`jax.set_mesh`); with another number every call raises.
    rates: DropoutRates | None = None  # None: those of the config.

    def setup(self) -> None:
        check_ambient_mesh(self.num_devices)
        c = self.config
        self.embedding = Embedding(c, self.vocab_size, self.rates)
        self.stack = Stack(c, self.compat, self.rates)
        if c.layer_norm is NormPlace.PRE and self.compat.final_norm:
            self.final_norm = layer_norm("final_norm", compat=self.compat, dtype=jnp.dtype(c.dtype))
        self.softmax = Softmax(c, self.vocab_size)
        rates = self.rates or DropoutRates.of(c.dropout)
        self.drop_input = dropout(c, rates.input)
        self.drop_output = dropout(c, rates.output)

    def __call__(
        self,
        tokens: jax.Array,
        memory: Memory,
        *,
        clamp_len: int | None = None,
        same_length: bool = False,
        deterministic: bool = True,
    ) -> tuple[jax.Array, Memory]:
        """Computes the hidden states of a segment.

        Args:
          tokens: int [B, L].
          memory: M slots before it.
          clamp_len: distances above this share one position code; None: off.
          same_length: every query sees the same number of keys, M (or M + 1, see `compat`).
          deterministic: no dropout; otherwise an rng named "dropout" is needed.

        Returns:
          Hidden states [B, L, D] of the last layer, and the memory moved on by L positions.
        """
        c, segment_len, mem_len = self.config, tokens.shape[1], memory.mem_len
        codes = None
        if c.encoding is Encoding.RELATIVE:
            codes = self.drop_input(self._codes(mem_len + segment_len, clamp_len), deterministic=deterministic)
        elif c.encoding.is_learned:
            codes = positions.key_distances(mem_len + segment_len, clamp_len=c.clamp(clamp_len))
        window = self.compat.window(mem_len, same_length=same_length)
        context = LayerContext(
            positions=codes,
            mask=masks.attention_mask(memory.valid, segment_len=segment_len, mem_len=mem_len, window=window),
            biases=None,
        )
        embedded = self.embed(tokens, clamp_len=clamp_len, deterministic=deterministic)
        inputs = self.drop_input(embedded, deterministic=deterministic)
        hidden, layer_inputs = self.stack(inputs, memory.hidden, context, deterministic=deterministic)
        hidden = self.finish(hidden)
        keep_last(self, hidden)
        hidden = self.drop_output(hidden, deterministic=deterministic)
        if self.is_initializing():
            self.nll(hidden, tokens)  # Creates the softmax's parameters.
        return hidden, memory_lib.update(memory, layer_inputs)

    def embed(self, tokens: jax.Array, *, clamp_len: int | None, deterministic: bool = True) -> jax.Array:
        """What the first layer reads, before `input_dropout`: int [B, L] -> [B, L, D].

        Sinusoids at the input are counted back from the segment's end: row i gets R(L - 1 - i), with distances above
        `clamp_len` set to it (the original's attn_type 2). Only a segment's own rows get a code. The memory is
        reused as it was stored (section 3.3), where the original adds another one to it in every segment.
        """
        embedded = self.embedding(tokens, deterministic=deterministic)
        if self.config.encoding is Encoding.VASWANI:
            embedded += self._codes(tokens.shape[1], clamp_len)[None]
        return embedded

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

    def clusters(self) -> list[adaptive_softmax.Cluster]:
        """The softmax's weights, joined and cut as `ops.adaptive` reads them."""
        return self.softmax.clusters(self.embedding.tables, self.embedding.projections)

    def target_vectors(self, targets: jax.Array) -> jax.Array:
        """The softmax's vector of each target, where it is full: int [B, L] -> [B, L, D]."""
        return self.softmax.target_vectors(targets, self.embedding.tables)

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

    def _codes(self, n_position: int, clamp_len: int | None) -> jax.Array:
        """R of the distances n - 1, .., 0: [n, D]."""
        distances = positions.key_distances(n_position, clamp_len=clamp_len)
        return positions.sinusoids(distances, self.config.d_model, jnp.dtype(self.config.dtype))
