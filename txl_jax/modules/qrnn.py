"""A layer of a quasi-recurrent network (QRNN; Bradbury et al., 2017).

Candidates z, forget gates f and output gates o come from the inputs alone (equation 2, a convolution of width 1 or 2),
so all positions of a segment are computed at once. Only their pooling is recurrent (equation 4, "fo-pooling"), and it
is linear:

    c_t = f_t * c_{t-1} + (1 - f_t) * z_t
    h_t = o_t * c_t

A linear recurrence is an associative scan: log2(L) steps instead of L.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

State = tuple[jax.Array, jax.Array]  # The cells [B, D], and the newest input [B, D], which a window of 2 reads.


class QRNNLayer(nn.Module):
    """Convolution over the newest `window` inputs, then fo-pooling.

    Attributes:
      features: D, cells; the inputs are as wide.
      window: positions that a gate reads, 1 or 2.
      dtype: compute type of the convolution; the pooling is in float32 at least, as a cell sums over a whole text.
    """

    features: int
    window: int
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: jax.Array, initial_carry: State) -> tuple[State, jax.Array]:
        """Computes the state after inputs [B, L, D], and the outputs [B, L, D]; the interface of `nn.RNN`."""
        cell, newest = (part.astype(inputs.dtype) for part in initial_carry)
        seen = inputs
        if self.window == 2:
            before = jnp.concatenate([newest[:, None], inputs[:, :-1]], axis=1)
            seen = jnp.concatenate([before, inputs], axis=-1)
        gates = nn.Dense(3 * self.features, dtype=self.dtype, param_dtype=self.param_dtype, name="gates")(seen)
        z, f, o = jnp.split(gates.astype(jnp.promote_types(gates.dtype, jnp.float32)), 3, axis=-1)
        cells = fo_pool(nn.tanh(z), nn.sigmoid(f), cell.astype(z.dtype))
        outputs = (nn.sigmoid(o) * cells).astype(inputs.dtype)
        return (cells[:, -1].astype(inputs.dtype), inputs[:, -1]), outputs


def fo_pool(candidates: jax.Array, forget: jax.Array, cell: jax.Array) -> jax.Array:
    """Computes the cells c_t = f_t c_{t-1} + (1 - f_t) z_t of all positions.

    Args:
      candidates: z [B, L, D].
      forget: f [B, L, D].
      cell: c_0 [B, D].

    Returns:
      c_1 to c_L [B, L, D].
    """

    def after(first: State, second: State) -> State:
        """Joins the steps c -> a c + b of two parts of the segment, the first part's before the second's."""
        (a, b), (c, d) = first, second
        return a * c, c * b + d

    kept, added = jax.lax.associative_scan(after, (forget, (1 - forget) * candidates), axis=1)
    return kept * cell[:, None] + added
