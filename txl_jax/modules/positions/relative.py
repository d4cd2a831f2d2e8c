"""The paper's relative positional encoding, with sinusoids (Dai et al., 2019, section 3.3).

The position key of a distance is W_R R, where R is its sinusoidal encoding. u and v replace the
query where the score does not depend on it. With `model.tie_positions` the position keys use the
key matrix, and u and v are the query of distance 0. Nothing is added to the embedding or to the
layers' inputs: those methods of `PositionEncoding` keep their defaults.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from txl_jax.errors import UserError
from txl_jax.modules.positions.encoding import (
    DecodeTerms,
    Dimension,
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
    original_type = 0
    original_projections: ClassVar[Mapping[str, Sequence[str]]] = {
        "qkv_net": ("query", "key", "value"),
        "r_net": ("position_key",),
    }

    def num_projected_codes(self, n_keys: int) -> int:
        """Returns K, the number of position keys, plus 1 with `tie_positions`.

        The additional encoding is for distance 0, from which u and v are projected.
        """
        if self.config.tie_positions:
            return n_keys + 1
        return n_keys

    def shared_codes(
        self, n_keys: int, *, clamp_len: int | None, drop: Callable[[jax.Array], jax.Array]
    ) -> jax.Array | None:
        """Returns R of the distances K - 1, .., 0, with dropout: [K, D]."""
        c = self.config
        distances = key_distances(n_keys, clamp_len=clamp_len)
        codes = sinusoids(distances, c.d_model, jnp.dtype(c.dtype))
        return drop(codes)

    def shared_parameters(self) -> Any:
        """Creates u and v if all layers share them."""
        if self.config.untie_r or self.config.tie_positions:
            return None
        return self._create_biases()

    def layer_parameters(self, shared: Any) -> Any:
        """Creates u and v of one layer with `untie_r`, or returns the shared ones."""
        if self.config.untie_r:
            return self._create_biases()
        return shared

    def _create_biases(self) -> dict[str, jax.Array]:
        """Creates the biases u ("content") and v ("position"), both [H, E].

        In the original, u is named r_w_bias and v is named r_r_bias.
        """
        c = self.config
        heads = (Dimension(c.n_head, axes.HEADS), Dimension(c.d_head, axes.HEAD_DIM))
        # Flax puts the parameters into the module whose method calls this: the layer or the stack.
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
            # The last code is that of distance 0.
            zero_query = projections.query(codes[-1:], "position_query")[:, 0]
            return PositionTerms(position_key, content_bias=zero_query, position_bias=zero_query)
        return PositionTerms(
            position_key=projections.new_matrix(codes, "position_key"),
            content_bias=parameters["content"].astype(dtype),
            position_bias=parameters["position"].astype(dtype),
        )

    def decode_terms(
        self, layer: Any, shared: Any, *, segment_len: int, capacity: int, clamp_len: int | None
    ) -> DecodeTerms:
        """Computes u, v and the position keys of the P distances that segment and cache need."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        attention = layer["attention"]
        # P: one more than the largest distance, which is the clamp at most.
        n_position = table_length(segment_len=segment_len, capacity=capacity, clamp_len=clamp_len)
        # The distances P - 1, .., 0 end at the clamp already.
        distances = key_distances(n_position)
        codes = sinusoids(distances, c.d_model, dtype)

        # u and v are divided by sqrt(E) before they are cast.
        scale = c.d_head**-0.5
        if c.tie_positions:
            w_query = (attention["query"] * scale).astype(dtype)
            content_bias = jnp.einsum("d,dhe->he", codes[-1], w_query)
            position_bias = content_bias
            w_position_key = attention["key"]
        else:
            # With `untie_r` a layer has its own biases.
            biases = layer.get("biases", shared)
            content_bias = (biases["content"] * scale).astype(dtype)
            position_bias = (biases["position"] * scale).astype(dtype)
            w_position_key = attention["position_key"]

        key = jnp.einsum("pd,dhe->hep", codes, w_position_key.astype(dtype))
        return DecodeTerms(
            content_bias=content_bias,
            position_keys=PositionKeys(bias=position_bias, key=key, score=None),
        )

    def original_tensors(self) -> list[OriginalTensor]:
        """Returns u and v: [H, E], or [N, H, E] if each layer has its own."""
        c = self.config
        if c.tie_positions:
            raise UserError(
                "model.tie_positions must be off: other implementations have u, v and a matrix of "
                "positions. Train with it off."
            )
        shape: tuple[int, ...]
        if c.untie_r:
            shape = (c.n_layer, c.n_head, c.d_head)
            parent = "stack/layers/biases"
        else:
            shape = (c.n_head, c.d_head)
            parent = "stack/biases"
        return [
            OriginalTensor("r_w_bias", shape, f"{parent}/content", shape, reversed=False),
            OriginalTensor("r_r_bias", shape, f"{parent}/position", shape, reversed=False),
        ]
