"""Recurrent language models, LSTM or QRNN: the baselines of the paper's first RECL group.

N layers of D cells between the same embedding and the same softmax, with dropout between layers and not in time
(Zaremba et al., 2014). They have the interface of `TransformerXL`, so that one training loop serves all. The memory
holds each layer's state at the segment's end in two slots: cells, then outputs (LSTM) or the newest input (QRNN). The
arguments `clamp_len`, `same_length` and M are for attention and have no effect here.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import CompatConfig, MemoryStart, ModelConfig, Network
from txl_jax.memory import Memory
from txl_jax.modules.dropout import DropoutRates, dropout
from txl_jax.modules.embedding import Embedding
from txl_jax.modules.intermediates import keep_last
from txl_jax.modules.qrnn import QRNNLayer
from txl_jax.modules.softmax import Softmax
from txl_jax.sharding import check_ambient_mesh


class RecurrentModel(nn.Module):
    """Language model of LSTM or QRNN layers with the interface of `TransformerXL`."""

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
        self.layers = [_make_layer(c, i) for i in range(c.n_layer)]
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

    def init_memory(self, *, batch_size: int, mem_len: int) -> Memory:
        """Returns an empty memory; `mem_len` has no effect."""
        del mem_len
        c = self.config
        shape = {"n_layer": c.n_layer, "batch_size": batch_size, "mem_len": 2, "d_model": c.d_model}
        return memory_lib.init(**shape, dtype=jnp.dtype(c.dtype), start=MemoryStart.MASKED)


def _make_layer(config: ModelConfig, number: int) -> nn.Module:
    """Returns a layer: inputs [B, L, D] and a state of two [B, D] to the state after them and outputs [B, L, D]."""
    types: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.result_type(float)}
    if config.network is Network.QRNN:
        # A window of 2 in the first layer and of 1 in the others, as Merity et al. (2018) use it for word models.
        return QRNNLayer(config.d_model, window=1 if number else 2, **types)
    return nn.RNN(nn.OptimizedLSTMCell(config.d_model, **types), return_carry=True)
