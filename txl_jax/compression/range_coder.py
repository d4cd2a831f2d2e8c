"""Codes bytes as bits with predicted probabilities, and back, with `constriction`'s range coder.

A range coder (Martin, 1979) writes a symbol of probability p in close to -log2(p) bits. Encoder and
decoder must have the same probabilities to the last bit. One function converts them to integers for
both directions, and the coder uses only integer arithmetic.
"""

import functools
import importlib
from typing import Any

import numpy as np

from txl_jax.errors import MissingPackageError, NonFiniteError, UserError

# Integer probabilities sum to 2**24, like the coder's.
TOTAL = 1 << 24


@functools.cache
def constriction() -> Any:
    """Returns the package. Raises `MissingPackageError` if it is not installed."""
    try:
        return importlib.import_module("constriction")
    except ImportError as error:
        raise MissingPackageError(
            "compression requires the package constriction. Run pip install constriction."
        ) from error


def integer_probabilities(log_probabilities: np.ndarray) -> np.ndarray:
    """Returns probabilities in units of 2**-24, as integers of at least 1 that sum to 2**24.

    Args:
      log_probabilities: Floats [n, V].

    Returns:
      int64 [n, V].

    Raises:
      NonFiniteError: If a logarithm is nan, or one of them is infinite and positive.
    """
    n_symbol = log_probabilities.shape[1]
    probabilities = np.exp(log_probabilities.astype(np.float64))
    cumulative = np.cumsum(probabilities, axis=1)
    total = cumulative[:, -1:]
    if not (np.isfinite(total) & (total > 0)).all():
        raise NonFiniteError(
            "a predicted probability is not a number, so the text cannot be coded. "
            "Lower --learning_rate."
        )
    # Each symbol gets one unit, and the rest is distributed by probability. Rounding the cumulative
    # sums, instead of the probabilities, keeps the total exact.
    shared = TOTAL - n_symbol
    bounds = np.floor(cumulative / total * shared).astype(np.int64)
    return np.diff(bounds, axis=1, prepend=0) + 1


def require_package() -> None:
    """Raises `MissingPackageError` if the package is missing, before hours of work."""
    constriction()


def fewest_bits(n_symbol: int) -> float:
    """Returns the bits of a symbol if all others have the minimum probability, 2**-24."""
    return float(-np.log2(1 - (n_symbol - 1) / TOTAL))


def _family_and_table(integers: np.ndarray) -> tuple[Any, np.ndarray]:
    """Returns the coder's arguments for symbols with these integer probabilities [n, V].

    The package takes floats. In its fast mode (`perfect=False`) it gives each symbol one unit, and
    distributes the other 2**24 - V units by the floats. Ours are integers that sum to 2**24 - V, so
    each symbol gets exactly its own integer.
    """
    family = constriction().stream.model.Categorical(perfect=False)
    return family, (integers - 1).astype(np.float64)


class Encoder:
    """Writes symbols."""

    def __init__(self) -> None:
        """Creates an encoder with empty content."""
        self._encoder = constriction().stream.queue.RangeEncoder()

    def encode(self, symbols: np.ndarray, integers: np.ndarray) -> None:
        """Writes symbols int [n] with `integer_probabilities` [n, V]."""
        family, table = _family_and_table(integers)
        self._encoder.encode(symbols.astype(np.int32), family, table)

    def content(self) -> bytes:
        """Returns the content so far: 32-bit words, little-endian."""
        return self._encoder.get_compressed().astype("<u4").tobytes()


class Decoder:
    """Reads symbols."""

    def __init__(self, content: bytes):
        """Begins at the start of an `Encoder`'s content, of a multiple of 4 bytes."""
        words = np.frombuffer(content, "<u4").astype(np.uint32)
        self._decoder = constriction().stream.queue.RangeDecoder(words)

    def decode(self, integers: np.ndarray) -> np.ndarray:
        """Reads symbols int32 [n] with `integer_probabilities` [n, V].

        Content written with other probabilities usually gives wrong symbols, not an error.

        Raises:
          UserError: If no encoder writes such content.
        """
        family, table = _family_and_table(integers)
        try:
            return self._decoder.decode(family, table)
        except AssertionError as error:
            # The package raises it for content that no encoder writes.
            raise UserError(
                "the coded bits do not match the model's predictions. They were written on a "
                "machine that computes other numbers, or not by experiments.compress."
            ) from error
