"""LSTM language model, the baseline of the paper's first RECL group.

N layers of D cells between the same embedding and the same softmax, with dropout between layers and not in time
(Zaremba et al., 2014). It has the interface of `TransformerXL`, so that one training loop serves both. Its memory
holds the cells and outputs at the segment's end, in two slots. The arguments `clamp_len`, `same_length` and M are for
attention and have no effect here.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import CompatConfig, MemoryStart, ModelConfig
from txl_jax.memory import Memory
from txl_jax.modules.dropout import DropoutRates, dropout
from txl_jax.modules.embedding import Embedding
from txl_jax.modules.intermediates import keep_last
from txl_jax.modules.softmax import Softmax
from txl_jax.sharding import check_ambient_mesh


class LSTM(nn.Module):
    """LSTM language model with the interface of `TransformerXL`."""

    config: ModelConfig
    compat: CompatConfig
    vocab_size: int
    num_devices: int = 1  # As `TransformerXL`.
    rates: DropoutRates | None = None  # None: those of the config.

    def setup(self) -> None:
        """Creates the submodules."""
        check_ambient_mesh(self.num_devices)
        c = self.config
        self.embedding = Embedding(c, self.vocab_size, self.rates)
        dtype, param_dtype = jnp.dtype(c.dtype), jnp.result_type(float)
        self.layers = [
            nn.RNN(nn.OptimizedLSTMCell(c.d_model, dtype=dtype, param_dtype=param_dtype), return_carry=True)
            for _ in range(c.n_layer)
        ]
        self.softmax = Softmax(c, self.vocab_size)
        rates = self.rates or DropoutRates.of(c.dropout)
        self.drop = dropout(c, rates.rate)
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
        """Computes the outputs [B, L, D] of the last layer, and the states at the segment's end.

        Args:
          tokens: int [B, L].
          memory: the states before it.
          clamp_len: no effect.
          same_length: no effect.
          deterministic: no dropout; otherwise an rng named "dropout" is needed.
        """
        del clamp_len, same_length
        states = jnp.where(memory.valid[None, :, None, None] > 0, memory.hidden, 0)
        embedded = self.embedding(tokens, deterministic=deterministic)
        hidden, ends = self.drop_input(embedded, deterministic=deterministic), []
        for i, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if i:
                hidden = self.drop(hidden, deterministic=deterministic)
            end, hidden = layer(hidden, initial_carry=(state[:, 0], state[:, 1]))
            ends.append(jnp.stack(end, axis=1))
        keep_last(self, hidden)
        hidden = self.drop_output(hidden, deterministic=deterministic)
        if self.is_initializing():
            self.nll(hidden, tokens)  # Creates the softmax's parameters.
        return hidden, memory_lib.update(memory, jnp.stack(ends))

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Computes the nats of each target: [B, L, D] and int [B, L] -> [B, L]."""
        return self.softmax.nll(hidden, targets, self.embedding.tables, self.embedding.projections)

    def log_probabilities(self, hidden: jax.Array) -> jax.Array:
        """Computes the log probabilities (logprobs) of all tokens: [B, L, D] -> [B, L, V]."""
        return self.softmax.log_probabilities(hidden, self.embedding.tables, self.embedding.projections)

    def target_vectors(self, targets: jax.Array) -> jax.Array:
        """Returns the vectors of the targets in a full softmax: int [B, L] -> [B, L, D]."""
        return self.softmax.target_vectors(targets, self.embedding.tables)

    def init_memory(self, *, batch_size: int, mem_len: int) -> Memory:
        """Returns an empty memory; `mem_len` has no effect."""
        del mem_len
        c = self.config
        shape = {"n_layer": c.n_layer, "batch_size": batch_size, "mem_len": 2, "d_model": c.d_model}
        return memory_lib.init(**shape, dtype=jnp.dtype(c.dtype), start=MemoryStart.MASKED)
