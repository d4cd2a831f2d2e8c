"""Relative positions with sinusoid codes, the paper's own (Dai et al., 2019, section 3.3).

Position keys are W_R R of each distance; u and v replace the query where the score does not depend
on it. With `model.tie_positions` the position keys use the key matrix, and u and v are the query of
distance 0. Nothing is added to the embedding or to the layers' inputs: those hooks of
`PositionEncoding` keep their defaults.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from txl_jax.errors import UserError
from txl_jax.modules.positions.encoding import (
    DecodeTerms,
    Learned,
    OriginalTensor,
    PositionEncoding,
    PositionKeys,
    PositionTerms,
    Projections,
)
from txl_jax.ops.attention.distances import key_distances, sinusoids, table_length
from txl_jax.sharding import axes


class RelativePositions(PositionEncoding):
    """The paper's encoding."""

    generates_by_token = True
    has_four_terms = True
    products_per_key = 3
    projects_codes = True
    original_type = 0
    original_projections: ClassVar[Mapping[str, Sequence[str]]] = {
        "qkv_net": ("query", "key", "value"),
        "r_net": ("position_key",),
    }

    def shared_codes(
        self, n_keys: int, *, clamp_len: int | None, drop: Callable[[jax.Array], jax.Array]
    ) -> jax.Array | None:
        """Returns R of the distances K - 1, .., 0, with dropout: [K, D]."""
        c = self.config
        distances = key_distances(n_keys, clamp_len=clamp_len)
        return drop(sinusoids(distances, c.d_model, jnp.dtype(c.dtype)))

    def shared_parameters(self) -> Any:
        """Creates u and v of all layers."""
        return None if self.config.untie_r or self.config.tie_positions else self._biases()

    def layer_parameters(self, shared: Any) -> Any:
        """Creates u and v of one layer with `untie_r`."""
        return self._biases() if self.config.untie_r else shared

    def _biases(self) -> dict[str, jax.Array]:
        """Creates the biases u (content) and v (position), both [H, E].

        In the original, u is named r_w_bias and v is named r_r_bias.
        """
        c = self.config
        heads = (c.n_head, axes.HEADS), (c.d_head, axes.HEAD_DIM)
        return Learned(c, {"content": heads, "position": heads}, name="biases")()

    def position_terms(
        self, codes: jax.Array | None, parameters: Any, projections: Projections, dtype: jnp.dtype
    ) -> PositionTerms:
        """Returns position keys, u and v."""
        assert codes is not None, (
            "codes are None; expected the sinusoids that `shared_codes` returns"
        )
        if self.config.tie_positions:
            position_key = projections.key(codes, "position_key")
            own = projections.query(codes[-1:], "position_query")[:, 0]
            return PositionTerms(position_key, own, own)
        position_key = projections.own(codes, "position_key")
        content_bias, position_bias = (
            parameters[name].astype(dtype) for name in ("content", "position")
        )
        return PositionTerms(position_key, content_bias, position_bias)

    def decode_terms(
        self, layer: Any, shared: Any, *, segment_len: int, capacity: int, clamp_len: int | None
    ) -> DecodeTerms:
        """Computes position keys once for the P distances that segment and cache need."""
        c, attention, biases = self.config, layer["attention"], layer.get("biases", shared)
        scale, dtype = c.d_head**-0.5, jnp.dtype(c.dtype)
        n_position = table_length(segment_len=segment_len, capacity=capacity, clamp_len=clamp_len)
        codes = sinusoids(key_distances(n_position), c.d_model, dtype)
        if c.tie_positions:
            own = jnp.einsum("d,dhe->he", codes[-1], (attention["query"] * scale).astype(dtype))
            content_bias, position_bias, kernel = own, own, attention["key"]
        else:
            content_bias, position_bias = (
                (biases[name] * scale).astype(dtype) for name in ("content", "position")
            )
            kernel = attention["position_key"]
        key = jnp.einsum("pd,dhe->hep", codes, kernel.astype(dtype))
        return DecodeTerms(content_bias, PositionKeys(bias=position_bias, key=key, score=None))

    def original_tensors(self) -> list[OriginalTensor]:
        """Returns u and v: [H, E], or [N, H, E] if each layer has its own."""
        c = self.config
        if c.tie_positions:
            wrong = (
                "model.tie_positions must be off: other implementations have u, v and a "
                "matrix of positions"
            )
            raise UserError(f"{wrong}. Train with it off.")
        shape = (*((c.n_layer,) if c.untie_r else ()), c.n_head, c.d_head)
        parent = "stack/layers/biases" if c.untie_r else "stack/biases"
        names = {"r_w_bias": "content", "r_r_bias": "position"}
        return [
            OriginalTensor(name, shape, f"{parent}/{ours}", shape, False)
            for name, ours in names.items()
        ]
