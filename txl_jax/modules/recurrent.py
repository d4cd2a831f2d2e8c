"""Recurrent language models, LSTM or QRNN: the baselines of the paper's first RECL group.

N layers of D cells between the same embedding and the same softmax, with dropout between layers but
not over time (Zaremba et al., 2014). They have the interface of `TransformerXL`, so that one
training loop supports all models. The memory contains each layer's state at the segment's end in
two slots: cells, then outputs (LSTM) or the latest input (QRNN). The arguments `clamp_len`,
`same_length` and M are for attention and have no effect.

In a quasi-recurrent network (QRNN; Bradbury et al., 2017) candidates z, forget gates f and output
gates o come from the inputs alone (equation 2, a convolution of width 1 or 2), so all positions of
a segment are computed at once. Only their pooling is recurrent (equation 4, "fo-pooling"), and it
is linear:

    c_t = f_t * c_{t-1} + (1 - f_t) * z_t
    h_t = o_t * c_t

A linear recurrence is an associative scan: log2(L) steps instead of L.

Letters: N layers, B batch size, L segment length, D model size, V vocabulary size.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import ModelConfig, Network
from txl_jax.memory import Memory
from txl_jax.modules.attention import sow_if_asked
from txl_jax.modules.dropout import dropout
from txl_jax.modules.embedding import Embedding, Softmax

# A layer's cells [B, D], and its outputs [B, D] (LSTM) or latest input [B, D] (QRNN). This order is
# the carry of flax's LSTM cell in `nn.RNN`.
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

        The segment is tokens, int [B, L].

        `clamp_len` and `same_length` have no effect. Dropout needs an rng named "dropout".
        """
        del clamp_len, same_length
        # The layers' states at the end of the last segment, [N, B, 2, D]. A row whose memory is
        # still empty starts from zeros.
        is_filled = memory.valid[None, :, None, None] > 0
        states = jnp.where(is_filled, memory.hidden, 0)

        embedded = self.embedding(tokens, deterministic=deterministic)
        hidden = self.drop_input(embedded, deterministic=deterministic)
        end_states: list[jax.Array] = []
        for layer, state in zip(self.layers, states, strict=True):
            # The inputs of the first layer have had the input dropout.
            is_first = not end_states
            if not is_first:
                hidden = self.drop(hidden, deterministic=deterministic)
            end, hidden = layer(hidden, initial_carry=(state[:, 0], state[:, 1]))
            end_states.append(jnp.stack(end, axis=1))
        sow_if_asked(self, "activations", "last", hidden)
        hidden = self.drop_output(hidden, deterministic=deterministic)

        if self.is_initializing():
            self.nll(hidden, tokens)  # Creates the softmax's parameters.
        # The memory has two positions, which the two slots of a state replace.
        return hidden, memory_lib.update(memory, jnp.stack(end_states))

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
        return memory_lib.init(
            n_layer=self.config.n_layer,
            batch_size=batch_size,
            mem_len=2,  # The two slots of a state.
            d_model=self.config.d_model,
            dtype=jnp.dtype(self.config.dtype),
            # It does not matter to `__call__`, which reads slots that are not filled as zeros.
            start=self.config.compat.memory_start,
        )


def _make_layer(config: ModelConfig, number: int) -> nn.Module:
    """Returns one recurrent layer.

    The layer maps inputs [B, L, D] and a `State` to the state after the inputs, and outputs
    [B, L, D].
    """
    dtype = jnp.dtype(config.dtype)
    param_dtype = jnp.result_type(float)  # Like all parameters: float64 in a float64 run.
    if config.network is Network.QRNN:
        # A window of 2 in the first layer and of 1 in the others, like Merity et al. (2018) for
        # word models.
        window = 2 if number == 0 else 1
        return QRNNLayer(config.d_model, window=window, dtype=dtype, param_dtype=param_dtype)
    cell = nn.OptimizedLSTMCell(config.d_model, dtype=dtype, param_dtype=param_dtype)
    return nn.RNN(cell, return_carry=True)


class QRNNLayer(nn.Module):
    """Convolution over the latest `window` inputs, then fo-pooling."""

    # D, the number of cells and the size of an input.
    features: int
    # Positions that a gate reads, 1 or 2.
    window: int
    # Dtype of the convolution. Pooling has at least float32, because a cell sums over all positions
    # of a segment.
    dtype: jnp.dtype
    # Dtype of the parameters.
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: jax.Array, initial_carry: State) -> tuple[State, jax.Array]:
        """Computes the state after inputs [B, L, D], and the outputs [B, L, D].

        Same interface as `nn.RNN`.
        """
        # The model's memory has the inputs' dtype already. The casts are for other callers' states.
        cell, latest_input = initial_carry
        cell = cell.astype(inputs.dtype)
        latest_input = latest_input.astype(inputs.dtype)

        # A convolution of width 2 is a matmul with each input and the one before it.
        gate_inputs = inputs
        if self.window == 2:
            previous_inputs = jnp.concatenate([latest_input[:, None], inputs[:, :-1]], axis=1)
            gate_inputs = jnp.concatenate([previous_inputs, inputs], axis=-1)
        gates = nn.Dense(
            3 * self.features, dtype=self.dtype, param_dtype=self.param_dtype, name="gates"
        )(gate_inputs)

        # Candidates z, forget gates f and output gates o, [B, L, D] each.
        pooling_dtype = jnp.promote_types(gates.dtype, jnp.float32)
        z, f, o = jnp.split(gates.astype(pooling_dtype), 3, axis=-1)
        cells = fo_pool(nn.tanh(z), nn.sigmoid(f), cell.astype(pooling_dtype))
        outputs = (nn.sigmoid(o) * cells).astype(inputs.dtype)

        # Cells have the pooling dtype only within a segment. From one segment to the next they have
        # the dtype of the memory.
        end_state = (cells[:, -1].astype(inputs.dtype), inputs[:, -1])
        return end_state, outputs


class _LinearStep(NamedTuple):
    """The step c -> factor * c + term, from one position to a later one."""

    factor: jax.Array
    term: jax.Array


def fo_pool(candidates: jax.Array, forget: jax.Array, cell: jax.Array) -> jax.Array:
    """Computes c_t = f_t c_{t-1} + (1 - f_t) z_t for all positions of a segment.

    The candidates z and forget gates f are [B, L, D], and `cell`, c_0, is [B, D]. The result is c_1
    to c_L, [B, L, D].
    """
    steps = _LinearStep(factor=forget, term=(1 - forget) * candidates)
    # The step from the segment's start to each position.
    from_start = jax.lax.associative_scan(_compose, steps, axis=1)
    return from_start.factor * cell[:, None] + from_start.term


def _compose(first: _LinearStep, second: _LinearStep) -> _LinearStep:
    """Returns the step that is equivalent to `first` followed by `second`."""
    return _LinearStep(
        factor=first.factor * second.factor,
        term=second.factor * first.term + second.term,
    )
