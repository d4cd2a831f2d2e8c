"""Recurrent language models, LSTM or QRNN: the baselines of the paper's first RECL group.

N layers of D cells between the same embedding and the same softmax, with dropout between layers and
not in time (Zaremba et al., 2014). They have the interface of `TransformerXL`, so that one training
loop serves all. The memory holds each layer's state at the segment's end in two slots: cells, then
outputs (LSTM) or the latest input (QRNN). The arguments `clamp_len`, `same_length` and M are for
attention and have no effect here.

In a quasi-recurrent network (QRNN; Bradbury et al., 2017) candidates z, forget gates f and output
gates o come from the inputs alone (equation 2, a convolution of width 1 or 2), so all positions of
a segment are computed at once. Only their pooling is recurrent (equation 4, "fo-pooling"), and it
is linear:

    c_t = f_t * c_{t-1} + (1 - f_t) * z_t
    h_t = o_t * c_t

A linear recurrence is an associative scan: log2(L) steps instead of L.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import MemoryStart, ModelConfig, Network
from txl_jax.memory import Memory
from txl_jax.modules.attention import keep
from txl_jax.modules.dropout import dropout
from txl_jax.modules.embedding import Embedding, Softmax

# Of a layer: cells [B, D], and outputs [B, D] (LSTM) or the latest input (QRNN).
State = tuple[jax.Array, jax.Array]


class RecurrentModel(nn.Module):
    """Language model of LSTM or QRNN layers with the interface of `TransformerXL`."""

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Creates the submodules."""
        c = self.config
        self.embedding = Embedding(c, self.vocab_size)
        self.layers = [_make_layer(c, i) for i in range(c.n_layer)]
        self.softmax = Softmax(c, self.vocab_size)
        self.drop = dropout(c, c.dropout.rate)
        self.drop_input = dropout(c, c.dropout.input_rate)
        self.drop_output = dropout(c, c.dropout.output_rate)

    def __call__(
        self,
        tokens: jax.Array,
        memory: Memory,
        *,
        clamp_len: int | None = None,
        same_length: bool = False,
        deterministic: bool = True,
    ) -> tuple[jax.Array, Memory]:
        """Computes the last layer's outputs [B, L, D] and the states at the segment's end.

        The segment is tokens [B, L].

        `clamp_len` and `same_length` have no effect. Dropout needs an rng named "dropout".
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
        keep(self, "activations", "last", hidden)
        hidden = self.drop_output(hidden, deterministic=deterministic)
        if self.is_initializing():
            self.nll(hidden, tokens)  # Creates the softmax's parameters.
        return hidden, memory_lib.update(memory, jnp.stack(ends))

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Computes each target's loss in nats: [B, L, D] and int [B, L] -> [B, L].

        Negative targets are ignored: their loss is 0. For a mean, divide the sum by the number of
        other targets. A target of V or more has the loss nan.
        """
        return self.softmax.nll(hidden, targets, self.embedding)

    def log_probabilities(self, hidden: jax.Array) -> jax.Array:
        """Computes the log probabilities (logprobs) of all tokens: [B, L, D] -> [B, L, V]."""
        return self.softmax.log_probabilities(hidden, self.embedding)

    def init_memory(self, *, batch_size: int, mem_len: int) -> Memory:
        """Returns an empty memory. `mem_len` has no effect."""
        del mem_len
        c = self.config
        shape = {"n_layer": c.n_layer, "batch_size": batch_size, "mem_len": 2, "d_model": c.d_model}
        return memory_lib.init(**shape, dtype=jnp.dtype(c.dtype), start=MemoryStart.MASKED)


def _make_layer(config: ModelConfig, number: int) -> nn.Module:
    """Returns one recurrent layer, with inputs and outputs [B, L, D].

    The layer maps the inputs and a state of two arrays [B, D] to the state after the inputs and the
    outputs.
    """
    types: dict[str, Any] = {
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.result_type(float),
    }
    if config.network is Network.QRNN:
        # A window of 2 in the first layer and of 1 in the others, as Merity et al. (2018) use it
        # for word models.
        return QRNNLayer(config.d_model, window=1 if number else 2, **types)
    return nn.RNN(nn.OptimizedLSTMCell(config.d_model, **types), return_carry=True)


class QRNNLayer(nn.Module):
    """Convolution over the latest `window` inputs, then fo-pooling."""

    # D, cells; the inputs are as wide.
    features: int
    # Positions that a gate reads, 1 or 2.
    window: int
    # Of the convolution. The pooling has float32 at least, as a cell sums over a whole text.
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: jax.Array, initial_carry: State) -> tuple[State, jax.Array]:
        """Computes the state after inputs [B, L, D], and the outputs [B, L, D].

        Same interface as `nn.RNN`.
        """
        cell, newest = (part.astype(inputs.dtype) for part in initial_carry)
        seen = inputs
        if self.window == 2:
            before = jnp.concatenate([newest[:, None], inputs[:, :-1]], axis=1)
            seen = jnp.concatenate([before, inputs], axis=-1)
        gates = nn.Dense(
            3 * self.features, dtype=self.dtype, param_dtype=self.param_dtype, name="gates"
        )(seen)
        z, f, o = jnp.split(gates.astype(jnp.promote_types(gates.dtype, jnp.float32)), 3, axis=-1)
        cells = fo_pool(nn.tanh(z), nn.sigmoid(f), cell.astype(z.dtype))
        outputs = (nn.sigmoid(o) * cells).astype(inputs.dtype)
        return (cells[:, -1].astype(inputs.dtype), inputs[:, -1]), outputs


def fo_pool(candidates: jax.Array, forget: jax.Array, cell: jax.Array) -> jax.Array:
    """Computes c_t = f_t c_{t-1} + (1 - f_t) z_t for all positions of a segment.

    z and f are [B, L, D], and c_0 is [B, D]. The result is c_1 to c_L, [B, L, D].
    """

    def after(first: State, second: State) -> State:
        """Joins the steps c -> a c + b of two parts of the segment.

        The first part's steps come before the second part's.
        """
        (a, b), (c, d) = first, second
        return a * c, c * b + d

    kept, added = jax.lax.associative_scan(after, (forget, (1 - forget) * candidates), axis=1)
    return kept * cell[:, None] + added
