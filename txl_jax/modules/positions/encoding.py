"""The interface of a positional encoding. Its defaults are for a model without positions.

Methods of the training pass are called inside flax modules, in this order; parameters and dropouts
that they create belong to the calling module.

Tables of learned encodings have one entry per distance 0, 1, .., n - 1 (`model.num_positions`);
greater distances share the last one (`ModelConfig.clamp`).
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

    # [n, D] and a name for its dropout -> [H, n, E].
    query: Callable[[jax.Array, str], jax.Array]
    # The same with the key matrix.
    key: Callable[[jax.Array, str], jax.Array]
    # The same with a matrix of that name, without dropout.
    own: Callable[[jax.Array, str], jax.Array]


class PositionTerms(NamedTuple):
    """Terms of the training scores that come from positions, not yet divided by sqrt(E).

    None means no such term.

    Keys and biases have the compute type. Scores are added in at least float32 and may have that
    type: bfloat16 does not separate neighbouring distances above 256. A bias per distance is only
    `position_score`.
    """

    position_key: jax.Array | None = None  # [H, K, E], of the distances K - 1, .., 0.
    content_bias: jax.Array | None = None  # u, [H, E]; needs `position_key`.
    position_bias: jax.Array | None = None  # v, [H, E]; needs `position_key`.
    # [H, K], added to the scores of the distances K - 1, .., 0 before these are divided by sqrt(E):
    # give sqrt(E) times what the softmax is to see.
    position_score: jax.Array | None = None


class PositionKeys(flax.struct.PyTreeNode):
    """Precomputed terms of the decode-time scores at the distances P - 1, .., 0.

    The terms are `key`, `score` or both.
    """

    # v, [H, E], added to the query before its product with `key`; divided by sqrt(E).
    bias: jax.Array | None
    # [H, E, P], not divided: the query is; perhaps `Int8`.
    key: Any
    # [H, P], what the softmax is to see: `PositionTerms.position_score` divided by sqrt(E).
    score: jax.Array | None


class DecodeTerms(NamedTuple):
    """Position terms of one layer at inference. None means no such term."""

    # u, [H, E], divided by sqrt(E).
    content_bias: jax.Array | None = None
    position_keys: PositionKeys | None = None
    # [L, D], added to inputs at the distances L - 1, .., 0 from the end.
    position_vectors: jax.Array | None = None


class OriginalTensor(NamedTuple):
    """A tensor of the authors' PyTorch release with parameters of an encoding."""

    name: str
    shape: tuple[int, ...]
    path: str  # Our parameter, "a/b/c",
    path_shape: tuple[int, ...]  # and its shape.
    reversed: bool  # The release begins with the greatest distance, we with 0 (second axis).


class Learned(nn.Module):
    """Learned arrays of an encoding, with one parameter for each name.

    A parameter is created from the size and logical axis of each of its dimensions.
    """

    config: ModelConfig
    arrays: Mapping[str, Sequence[tuple[int, str]]]

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        """Returns the parameters by name."""
        found = {}
        for name, dimensions in self.arrays.items():
            shape, names = zip(*dimensions, strict=True)
            found[name] = self.param(name, axes.normal(self.config.init_std, *names), shape)
        return found


@dataclasses.dataclass(frozen=True)
class PositionEncoding:
    """Base class of the encodings."""

    config: ModelConfig

    # Whether scores depend only on distances, so that text can be read and written one token at a
    # time.
    generates_by_token: ClassVar[bool] = False
    # Whether scores have the terms (a) to (d) of the paper, which attention then stores for
    # `mutable=["attention"]`.
    has_four_terms: ClassVar[bool] = False
    # Matmuls per query and key: content, value, and position score if any.
    products_per_key: ClassVar[int] = 2
    # Whether training projects all K codes, in every layer and segment.
    projects_codes: ClassVar[bool] = False
    # The original's attn_type, or None if it has no such encoding.
    original_type: ClassVar[int | None] = None
    # Attention's inward projections in the original: its matrices, and the parameters that their
    # rows hold.
    original_projections: ClassVar[Mapping[str, Sequence[str]]] = {
        "q_net": ("query",),
        "kv_net": ("key", "value"),
    }

    @property
    def has_position_score(self) -> bool:
        """Returns whether scores have a number per distance (`PositionTerms.position_score`)."""
        return False

    # Training, in the order of the forward pass.

    def shared_codes(
        self, n_keys: int, *, clamp_len: int | None, drop: Callable[[jax.Array], jax.Array]
    ) -> jax.Array | None:
        """Returns all layers' encoding of the distances K - 1, .., 0: codes [K, D], or None.

        Distances above `clamp_len` get the code of `clamp_len`: the encoding applies the clamp
        here. With a learned table the codes are the distances themselves, int [K], clamped to the
        table.
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
        """Returns the terms of a layer's scores, keys and biases of type `dtype`.

        Called in the attention's module.
        """
        return PositionTerms()

    # Inference: the same mathematics with parameters that do not change.

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

        `layer` has the layer's parameters, `shared` the ones that `shared_parameters` created, or
        None.
        """
        return DecodeTerms()

    # Names in other implementations' checkpoints.

    def original_tensors(self) -> Sequence[OriginalTensor]:
        """Returns how the encoding's parameters correspond to the original's tensors.

        Parameters that `original_projections` covers are not included.

        Raises `UserError` if other implementations do not support the config's model.
        """
        return ()
