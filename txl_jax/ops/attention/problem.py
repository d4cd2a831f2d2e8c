"""Arrays of one attention call, its static description, and implementations that can serve it."""

import dataclasses
import re
from typing import Any, Generic, NamedTuple, TypeVar

import jax

PATHS = ("reference", "tiled", "stored", "fused")
KERNELS = ("mosaic_roll", "mosaic_gather")

# Queries, position keys and scores, as `cached_attention` describes them. Position keys may be
# `Int8`.
Position = tuple[jax.Array, Any, jax.Array | None] | None
# Stored keys [B, H, E, R] and values [B, H, R, E], as arrays or as `Int8`.
Ring = tuple[Any, Any]


class Operands(NamedTuple):
    """The arrays of attention over [memory; segment], or their gradients.

    Missing arrays are None.
    """

    # [B, H, L, E]
    query: Any
    # [B, H, K, E], memory first.
    key: Any
    # [B, H, K, E]
    value: Any
    # [H, P, E], for the distances K - 1, .. (`Visibility.n_positions`).
    position_key: Any = None
    # [H, E], u.
    content_bias: Any = None
    # [H, E], v.
    position_bias: Any = None
    # [H, P], added before the division by sqrt(E).
    position_score: Any = None


class CachedOperands(NamedTuple):
    """The arrays of attention over a KV cache and the segment."""

    # [B, H, L, E], with u added and divided by sqrt(E).
    query: jax.Array
    # [B, H, L, E], the segment's keys.
    key: jax.Array
    # [B, H, L, E], the segment's values.
    value: jax.Array
    # Keys and values in the KV cache.
    ring: Ring
    # Queries, keys and scores by distance, or None without relative positions.
    position: Position


class Tile(NamedTuple):
    """Size of the piece of the scores that an implementation keeps at a time."""

    query: int
    key: int

    def __str__(self) -> str:
        return f"{self.query}x{self.key}"


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Static description of one call of attention, on one device.

    It decides which implementations can serve the call.
    """

    # "cpu", "gpu" or "tpu".
    platform: str
    # The device's name in jax, such as "TPU v5 lite".
    device_kind: str
    # Dtype of queries, keys and values.
    dtype: str
    # B, rows on this device.
    batch: int
    # H, heads on this device.
    n_head: int
    # L, queries.
    segment_len: int
    # K, keys: M + L, or R + L with a KV cache.
    n_keys: int
    # E, the size of a head.
    d_head: int
    # P, the number of position keys, which may be 0.
    n_positions: int = 0
    # Whether a score is added for each distance.
    has_position_score: bool = False
    # Whether keys behind the query are hidden.
    causal: bool = True
    # Maximum keys that a query attends to, or None for no limit.
    window: int | None = None
    # Whether probabilities are dropped.
    dropout: bool = False
    # R, slots of the KV cache, or None in training, over [memory; segment].
    capacity: int | None = None
    # Dtype of the stored keys and values, or None for `dtype`.
    cache_dtype: str | None = None
    # Whether documents are kept apart within a segment (`Visibility.document_start`).
    documents: bool = False

    @property
    def cached(self) -> bool:
        """Returns whether the memory is a KV cache."""
        return self.capacity is not None

    @property
    def is_one_token(self) -> bool:
        """Returns whether a single token reads a KV cache, as in generation."""
        return self.cached and self.segment_len == 1


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute attention. `str` and `parse` are inverse.

    Raises:
      ValueError: If the fields do not match each other.
    """

    # One of `PATHS`.
    path: str
    # One of `KERNELS` for "fused", otherwise None.
    kernel: str | None = None
    # None for the paths without tiles.
    tile: Tile | None = None
    # Whether kernels are interpreted, on any device and slowly, as tests do.
    interpret: bool = False

    def __post_init__(self) -> None:
        """Checks that the fields match. A run's record may be corrupted."""
        text = repr(str(self))
        if self.path not in PATHS:
            raise ValueError(
                f"{text} is not an attention implementation: the path must be one of "
                f"{', '.join(PATHS)}"
            )
        has_kernel = self.kernel in KERNELS
        if has_kernel != (self.path == "fused"):
            raise ValueError(
                f"{text} is not an attention implementation: fused must have one of the kernels "
                f"{', '.join(KERNELS)}, and other paths no kernel"
            )
        if self.tile is None and self.path in ("tiled", "fused"):
            raise ValueError(
                f"{text} is not an attention implementation: it must have a tile, such as 128x256"
            )
        if self.tile is not None and min(self.tile) < 1:
            raise ValueError(
                f"{text} is not an attention implementation: the sides of a tile must be at least 1"
            )

    def __str__(self) -> str:
        # A field of a wrong type must not fail here, since `__post_init__` names it in its error.
        words = [str(self.path)]
        if self.kernel is not None:
            words.append(str(self.kernel))
        if self.tile is not None:
            words.append(str(self.tile))
        if self.interpret:
            words.append("interpreted")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> "Implementation":
        """Returns the implementation in a string, such as "fused mosaic_roll 128x256".

        Raises:
          ValueError: If the string is not an implementation.
        """
        match = re.fullmatch(
            r"(?P<path>\w+)"
            r"(?: (?P<kernel>[a-z]\w*?))??"
            r"(?: (?P<query>\d+)x(?P<key>\d+))?"
            r"(?P<interpreted> interpreted)?",
            text,
        )
        if match is None:
            raise ValueError(f"{text!r} is not an attention implementation such as 'tiled 128x256'")

        tile = None
        if match["query"] is not None:
            tile = Tile(int(match["query"]), int(match["key"]))
        return cls(
            path=match["path"],
            kernel=match["kernel"],
            tile=tile,
            interpret=match["interpreted"] is not None,
        )


REFERENCE = Implementation("reference")

PathT = TypeVar("PathT", covariant=True)


class AttentionPaths(NamedTuple, Generic[PathT]):
    """How a model computes attention: in training and over a KV cache.

    A model has paths to choose from in each call, such as "auto", or implementations. A run has
    implementations with the reasons for them (`runs.attention_choice`).
    """

    # Over [memory; segment].
    training: PathT
    # Over a KV cache, in evaluation and generation.
    cached: PathT


def default_device() -> jax.Device:
    """Returns the device that JAX places arrays on.

    A call of attention is for this device, because no mesh needs to be passed.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, jax.Device):
        return device
    return jax.devices()[0]
