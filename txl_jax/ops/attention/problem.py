"""Static description of one attention call, and the implementations that can serve it."""

import dataclasses
import re
from typing import NamedTuple

PATHS = ("reference", "tiled", "stored", "fused")
KERNELS = ("mosaic_roll", "mosaic_gather")
_GONE = re.compile(r"fused (triton( \d+x\d+)?|cudnn)")  # Kernels for GPUs, which versions before 0.3 recorded.


class Tile(NamedTuple):
    """Size of the piece of the scores that an implementation holds at a time."""

    query: int
    key: int

    def __str__(self) -> str:
        return f"{self.query}x{self.key}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Facts of a call that decide who can serve it, of one device.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      device_kind: the device's name in jax, such as "TPU v5 lite".
      dtype: type of queries, keys and values.
      batch: B.
      n_head: H.
      segment_len: L.
      n_keys: K; of a KV cache R + L.
      d_head: E.
      n_positions: P, position keys; 0: none.
      has_position_score: whether there is a score per distance.
      causal: whether keys behind the query are hidden.
      window: keys that a query sees at most; None: no limit.
      dropout: whether there is dropout on the probabilities.
      capacity: R, slots of the KV cache; None: training, with memory and segment in one array.
      cache_dtype: type of the stored keys and values; None: `dtype`.
      documents: whether documents are kept apart within a segment (`Visibility.document_start`).
    """

    platform: str
    device_kind: str
    dtype: str
    batch: int
    n_head: int
    segment_len: int
    n_keys: int
    d_head: int
    n_positions: int = 0
    has_position_score: bool = False
    causal: bool = True
    window: int | None = None
    dropout: bool = False
    capacity: int | None = None
    cache_dtype: str | None = None
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
    """A way to compute attention; `str` and `parse` are inverse.

    Attributes:
      path: one of `PATHS`.
      kernel: of "fused", what it is made of, one of `KERNELS`; None: plain XLA.
      tile: Size of a tile, or None for the paths without tiles.
      interpret: whether kernels are interpreted, on any device and slowly, as tests do.

    Raises:
      ValueError: an unknown path or kernel, a path without what it is made of, or an empty tile.
    """

    path: str
    kernel: str | None = None
    tile: Tile | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        """Refuses what no implementation could be made of; records of a run may be damaged."""
        wrong = None
        if self.path not in PATHS:
            wrong = f"the path must be of {', '.join(PATHS)}"
        elif (self.kernel in KERNELS) != (self.path == "fused"):
            wrong = f"fused has a kernel of {', '.join(KERNELS)}, other paths have none"
        elif self.tile is None and self.path in ("tiled", "fused"):
            wrong = "it needs a tile, such as 128x256"
        elif self.tile is not None and min(self.tile) < 1:
            wrong = "the sides of a tile are at least 1"
        if wrong is not None:
            raise ValueError(f"{str(self)!r} is no implementation of attention: {wrong}")

    def __str__(self) -> str:
        words = [self.path, self.kernel, self.tile, "interpreted" if self.interpret else None]
        return " ".join(str(word) for word in words if word is not None)

    @classmethod
    def parse(cls, text: str) -> "Implementation | None":
        """Returns the implementation that a string describes, or None for a kernel that is gone.

        Raises:
          ValueError: If the string describes no implementation.
        """
        if _GONE.fullmatch(text):
            return None
        found = re.fullmatch(r"(\w+)(?: ([a-z]\w*?))??(?: (\d+)x(\d+))?( interpreted)?", text)
        if not found:
            raise ValueError(f"{text!r} is no implementation of attention; expected such as 'tiled 128x256'")
        tile = Tile(int(found[3]), int(found[4])) if found[3] else None
        return cls(found[1], found[2], tile, bool(found[5]))


REFERENCE = Implementation("reference")


class Implementations(NamedTuple):
    """The implementations of a model: each a path, or what was chosen for its lengths and device."""

    training: Implementation | str
    cached: Implementation | str
