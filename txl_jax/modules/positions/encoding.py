"""The interface of a positional encoding. Its defaults are for a model without positions.

Methods for training are called inside flax modules, in the order in which they are defined.
Parameters and dropouts that they create belong to the calling module.

Tables of learned encodings have one entry per distance 0, 1, .., n - 1 (`model.num_positions`).
Greater distances share the last entry (`ModelConfig.clamp`).

Letters: B batch size, L segment length, K = M + L keys of memory and segment, N layers, D model
size, H heads, E head size. At inference, P distances and R slots of the KV cache.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.ops.attention.distances import key_distances
from txl_jax.sharding import axes


class Projections(NamedTuple):
    """Projections of one attention layer, for encodings that project their codes."""

    # Projects codes [n, D] with the query matrix -> [H, n, E], and applies the dropout on queries,
    # keys and values. The second argument names this dropout.
    query: Callable[[jax.Array, str], jax.Array]
    # Does the same with the key matrix.
    key: Callable[[jax.Array, str], jax.Array]
    # Creates a matrix, which the second argument names, and projects with it. Without dropout.
    new_matrix: Callable[[jax.Array, str], jax.Array]


class PositionTerms(NamedTuple):
    """Terms of the training scores that come from positions, not yet divided by sqrt(E).

    A term is None if the encoding does not have it.

    Keys and biases have the compute dtype. Scores are added in at least float32 and may have that
    dtype: bfloat16 does not separate neighbouring distances above 256. An encoding with only a bias
    per distance has only `position_score`.
    """

    # [H, K, E], for the distances K - 1, .., 0.
    position_key: jax.Array | None = None
    # u, [H, E]. Requires `position_key`.
    content_bias: jax.Array | None = None
    # v, [H, E]. Requires `position_key`.
    position_bias: jax.Array | None = None
    # [H, K], added to the scores of the distances K - 1, .., 0 before the division by sqrt(E). Pass
    # sqrt(E) times the number that the softmax should get.
    position_score: jax.Array | None = None


class PositionKeys(flax.struct.PyTreeNode):
    """Precomputed terms of the decode-time scores at the distances P - 1, .., 0.

    The terms are `key`, `score` or both.
    """

    # v, [H, E], divided by sqrt(E). Added to the query before its product with `key`.
    bias: jax.Array | None
    # [H, E, P], an array or `Int8`. Not divided by sqrt(E), because the query is.
    key: Any
    # [H, P], added to the softmax's inputs: `PositionTerms.position_score` divided by sqrt(E).
    score: jax.Array | None


class DecodeTerms(NamedTuple):
    """Position terms of one layer at inference. A term is None if the encoding does not have it."""

    # u, [H, E], divided by sqrt(E).
    content_bias: jax.Array | None = None
    # Terms of the scores that depend on the distance.
    position_keys: PositionKeys | None = None
    # [L, D], added to the layer's inputs at the distances L - 1, .., 0 from the end.
    position_vectors: jax.Array | None = None


class OriginalTensor(NamedTuple):
    """A tensor of the authors' PyTorch release that contains parameters of an encoding."""

    # Name and shape in the release.
    name: str
    shape: tuple[int, ...]
    # Our parameter, as "a/b/c", and its shape.
    path: str
    path_shape: tuple[int, ...]
    # Whether the release starts with the greatest distance on the second axis. Ours starts with 0.
    reversed: bool


class Dimension(NamedTuple):
    """A dimension of a learned array."""

    size: int
    # Logical name of the axis (`sharding.axes`).
    axis: str


class Learned(nn.Module):
    """Learned arrays of an encoding, with one parameter for each name.

    Parameters are created in the order of `arrays`, which determines their initial values.
    """

    config: ModelConfig
    # The dimensions of each array, by its name.
    arrays: Mapping[str, Sequence[Dimension]]

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        """Returns the parameters by name."""
        parameters = {}
        for name, dimensions in self.arrays.items():
            shape = tuple(dimension.size for dimension in dimensions)
            logical_axes = tuple(dimension.axis for dimension in dimensions)
            init = axes.normal(self.config.init_std, *logical_axes)
            parameters[name] = self.param(name, init, shape)
        return parameters


@dataclasses.dataclass(frozen=True)
class PositionEncoding:
    """Base class of the encodings."""

    config: ModelConfig

    # Whether scores depend only on distances, so that a model can prefill and decode one token at a
    # time.
    generates_by_token: ClassVar[bool] = False
    # Whether scores have the terms (a) to (d) of the paper, which attention then stores for
    # `mutable=["attention"]`.
    has_four_terms: ClassVar[bool] = False
    # Matmuls per query and key: content, value, and position score if any.
    products_per_key: ClassVar[int] = 2
    # The original's attn_type, or None if it does not have this encoding.
    original_type: ClassVar[int | None] = None
    # Attention's inward projections in the original: the names of its matrices, and the parameters
    # that the rows of each contain.
    original_projections: ClassVar[Mapping[str, Sequence[str]]] = {
        "q_net": ("query",),
        "kv_net": ("key", "value"),
    }

    @property
    def has_position_score(self) -> bool:
        """Whether scores have a number per distance (`PositionTerms.position_score`)."""
        return False

    def num_projected_codes(self, n_keys: int) -> int:
        """Returns the number of encodings that training projects with a matrix [D, H, E].

        They are projected in every layer and forward pass, once for all rows.
        """
        return 0

    # Training, in the order of the forward pass.

    def shared_codes(
        self, n_keys: int, *, clamp_len: int | None, drop: Callable[[jax.Array], jax.Array]
    ) -> jax.Array | None:
        """Returns the codes [K, D] of the distances K - 1, .., 0 for all layers, or None.

        With a learned table the codes are the distances themselves, int [K], clamped to the table.

        Args:
          n_keys: K.
          clamp_len: Distances above this share its encoding. None disables clamping. The encoding
            applies the clamp in this method.
          drop: The input dropout, for an encoding whose codes are dropped.
        """
        if not self.config.encoding.is_learned:
            return None
        return key_distances(n_keys, clamp_len=self.config.clamp(clamp_len))

    def add_to_embedding(self, embedded: jax.Array, *, clamp_len: int | None) -> jax.Array:
        """Adds positions to the input of the first layer, [B, L, D]."""
        return embedded

    def shared_parameters(self) -> Any:
        """Creates parameters that all layers share, in the module of the stack.

        Inference finds them as "biases".
        """
        return None

    def layer_parameters(self, shared: Any) -> Any:
        """Creates parameters of one layer, or returns the shared ones.

        Called in the module of the layer.
        """
        return shared

    def add_to_layer_inputs(self, inputs: jax.Array, codes: jax.Array | None) -> jax.Array:
        """Adds positions to the inputs of a layer, [B, L, D]. Called in the module of the layer."""
        return inputs

    def position_terms(
        self, codes: jax.Array | None, parameters: Any, projections: Projections, dtype: jnp.dtype
    ) -> PositionTerms:
        """Returns the terms of a layer's scores. Called in the attention's module.

        Args:
          codes: From `shared_codes`.
          parameters: From `layer_parameters`.
          projections: The layer's projections, for an encoding that projects its codes.
          dtype: Dtype of keys and biases.
        """
        return PositionTerms()

    # Inference: the same equations with parameters that do not change.

    def decode_terms(
        self, layer: Any, shared: Any, *, segment_len: int, capacity: int, clamp_len: int | None
    ) -> DecodeTerms:
        """Computes one layer's position terms for inference.

        They are computed once, for segments of up to L tokens and a cache of R slots.

        `position_keys` belong to the P distances P - 1, .., 0, where P is
        `ops.attention.distances.table_length(segment_len=, capacity=, clamp_len=)`. That applies
        the clamp: they end at `clamp_len`, and attention uses the largest distance for all beyond.
        A learned encoding passes `config.clamp(clamp_len)`. The distances of `position_vectors` are
        clamped by the encoding itself.

        Args:
          layer: The layer's parameters.
          shared: Parameters that `shared_parameters` created, or None.
          segment_len: L.
          capacity: R.
          clamp_len: As in `shared_codes`.
        """
        return DecodeTerms()

    # Names in other implementations' checkpoints.

    def original_tensors(self) -> Sequence[OriginalTensor]:
        """Returns how the encoding's parameters correspond to the original's tensors.

        Parameters that `original_projections` covers are not included.

        Raises:
          UserError: If other implementations do not support the config's model.
        """
        return ()
