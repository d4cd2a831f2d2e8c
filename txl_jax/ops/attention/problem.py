"""Arrays of one attention call, its static description, and implementations that can serve it."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax

PATHS = ("reference", "tiled", "stored", "fused")
KERNELS = ("mosaic_roll", "mosaic_gather")

# Queries, position keys and scores, as `cached_attention` describes them. Keys, and what is stored,
# may be `Int8`.
Position = tuple[jax.Array, Any, jax.Array | None] | None
Ring = tuple[Any, Any]  # Stored keys [B, H, E, R] and values [B, H, R, E].


class Operands(NamedTuple):
    """The arrays of attention over [memory; segment], or their gradients.

    Missing arrays are None.
    """

    query: Any  # [B, H, L, E]
    key: Any  # [B, H, K, E], memory first.
    value: Any  # [B, H, K, E]
    position_key: Any = None  # [H, P, E], of the distances K - 1, .. (`Visibility.n_positions`).
    content_bias: Any = None  # [H, E], u.
    position_bias: Any = None  # [H, E], v.
    position_score: Any = None  # [H, P], added before the division by sqrt(E).


class CachedOperands(NamedTuple):
    """The arrays of attention over a KV cache and the segment."""

    query: jax.Array  # [B, H, L, E], with u added and divided by sqrt(E).
    key: jax.Array  # [B, H, L, E], of the segment.
    value: jax.Array  # [B, H, L, E]
    ring: Ring
    position: Position


class Tile(NamedTuple):
    """Size of the piece of the scores that an implementation keeps at a time."""

    query: int
    key: int

    def __str__(self) -> str:
        return f"{self.query}x{self.key}"


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What decides which implementation can serve a call, on one device."""

    # "cpu", "gpu" or "tpu".
    platform: str
    # The device's name in jax, such as "TPU v5 lite".
    device_kind: str
    # Of queries, keys and values.
    dtype: str
    # B
    batch: int
    # H
    n_head: int
    # L
    segment_len: int
    # K, with a KV cache R + L.
    n_keys: int
    # E
    d_head: int
    # P, the number of position keys, which may be 0.
    n_positions: int = 0
    # Whether there is a score per distance.
    has_position_score: bool = False
    # Whether keys behind the query are hidden.
    causal: bool = True
    # Maximum keys that a query sees, or None for no limit.
    window: int | None = None
    # Whether there is dropout on the probabilities.
    dropout: bool = False
    # R, slots of the KV cache, or None in training, over [memory; segment].
    capacity: int | None = None
    # Of the stored keys and values, or None for `dtype`.
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
    """A way to compute attention.

    `str` and `parse` are inverse. Raises `ValueError` for invalid parts.
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
        """Checks that the parts match. A run's record may be corrupted."""
        wrong = None
        if self.path not in PATHS:
            wrong = f"the path must be one of {', '.join(PATHS)}"
        elif (self.kernel in KERNELS) != (self.path == "fused"):
            wrong = (
                f"fused must have one of the kernels {', '.join(KERNELS)}, and other "
                "paths no kernel"
            )
        elif self.tile is None and self.path in ("tiled", "fused"):
            wrong = "it must have a tile, such as 128x256"
        elif self.tile is not None and min(self.tile) < 1:
            wrong = "the sides of a tile must be at least 1"
        if wrong is not None:
            raise ValueError(f"{str(self)!r} is not an attention implementation: {wrong}")

    def __str__(self) -> str:
        words = [self.path, self.kernel, self.tile, "interpreted" if self.interpret else None]
        return " ".join(str(word) for word in words if word is not None)

    @classmethod
    def parse(cls, text: str) -> "Implementation":
        """Returns the implementation in a string. Raises `ValueError` if it is not one."""
        found = re.fullmatch(r"(\w+)(?: ([a-z]\w*?))??(?: (\d+)x(\d+))?( interpreted)?", text)
        if not found:
            raise ValueError(f"{text!r} is not an attention implementation such as 'tiled 128x256'")
        tile = Tile(int(found[3]), int(found[4])) if found[3] else None
        return cls(found[1], found[2], tile, bool(found[5]))


REFERENCE = Implementation("reference")


class AttentionPaths(NamedTuple):
    """The implementations of a model: each a path, or the choice for its lengths and device."""

    training: Implementation | str
    cached: Implementation | str


def default_device() -> jax.Device:
    """Returns the device that JAX places arrays on.

    A call of attention is for this device, because no mesh needs to be passed.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, jax.Device) else jax.devices()[0]
