"""Codes texts as bits, and back: one loop drives predictor and range coder through a text.

A text of T bytes becomes R streams of N bytes, one after the other, the last ones shorter:

    streams = 3, text = "abcdefgh"      a b c
                                        d e f
                                        g h

The bits are in the order of the columns: a d g, b e h, c f. The first column is coded with equal
probabilities, and each later column with the predictions after the previous one.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from txl_jax.compression.predictor import Predictor
from txl_jax.compression.range_coder import TOTAL, Decoder, Encoder, integer_probabilities
from txl_jax.metrics import Totals

# Receives the number of bytes so far, and their summed losses. It may raise `Interrupted`.
Progress = Callable[[float, Totals], None]
# Takes the integer probabilities [n_active, V] of the next symbols, and returns these symbols
# [n_active]. The encoder takes them from the text and writes them. The decoder reads them.
_Coder = Callable[[np.ndarray], np.ndarray]


def compress(text: bytes, predictor: Predictor, *, progress: Progress) -> bytes:
    """Returns the coded bits of a text.

    Raises:
      UserError: If a byte is not in the model's vocabulary.
      NonFiniteError: If the model predicts nan, for example because the learning rate is too high.
    """
    symbols = predictor.vocabulary.encode(text)
    streams = _Streams(len(symbols), predictor.coding.streams)
    columns = streams.columns(symbols)
    encoder = Encoder()

    def encode(integers: np.ndarray) -> np.ndarray:
        column = next(columns)
        encoder.encode(column, integers)
        return column

    _code(streams, predictor, encode, progress)
    return encoder.content()


def decompress(
    payload: bytes, text_bytes: int, predictor: Predictor, *, progress: Progress
) -> bytes:
    """Returns the text of `text_bytes` bytes whose coded bits are `payload`.

    Bits from another text, model or machine give a wrong text, which usually only its digest shows.

    Raises:
      UserError: If no text has these bits.
      NonFiniteError: If the model predicts nan.
    """
    streams = _Streams(text_bytes, predictor.coding.streams)
    decoder = Decoder(payload)
    symbols = _code(streams, predictor, decoder.decode, progress)
    return predictor.vocabulary.decode(symbols)


class _Streams:
    """Division of T symbols into R streams of N symbols, of which the last ones are shorter."""

    def __init__(self, n_symbol: int, n_stream: int):
        self.n_symbol = n_symbol
        # N, the length of the longest stream.
        self.length = math.ceil(n_symbol / n_stream)
        # int [R], the lengths of the streams. They never increase.
        starts = np.arange(n_stream) * self.length
        self.lengths = np.clip(n_symbol - starts, 0, self.length)

    def n_active(self, place: int) -> int:
        """Returns the number of streams, always the first ones, with a symbol at this place."""
        return int(np.count_nonzero(self.lengths > place))

    def columns(self, symbols: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the symbols [n_active] of each place, of symbols [T]."""
        for place in range(self.length):
            yield symbols[np.arange(self.n_active(place)) * self.length + place]

    def join(self, blocks: list[np.ndarray]) -> np.ndarray:
        """Returns the symbols [T] of blocks [R, L] of consecutive places, the last one padded."""
        if not blocks:
            return np.zeros(0, np.uint8)
        rows = np.concatenate(blocks, axis=1)[:, : self.length]
        return rows.reshape(-1)[: self.n_symbol]


def _code(streams: _Streams, predictor: Predictor, code: _Coder, progress: Progress) -> np.ndarray:
    """Drives predictor and coder through all streams. Returns the symbols, uint8 [T].

    Both directions run this loop, so that they call the predictor in the same way.
    """
    n_stream = predictor.coding.streams
    segment_len = predictor.coding.segment_len
    vocab_size = predictor.vocabulary.size
    state = predictor.start()
    # Nothing precedes the first symbol of a stream, so all are equally likely.
    log_probabilities = np.full((n_stream, vocab_size), -math.log(vocab_size))
    # Segments [R, L] so far. Not allocated for the header's length, which may be wrong.
    blocks: list[np.ndarray] = []
    totals = Totals()

    for first in range(0, streams.length, segment_len):
        block = np.zeros((n_stream, segment_len), np.uint8)
        for place in range(min(segment_len, streams.length - first)):
            n_active = streams.n_active(first + place)
            integers = integer_probabilities(log_probabilities[:n_active])
            symbols = code(integers)
            block[:n_active, place] = symbols
            chosen = integers[np.arange(n_active), symbols]
            totals += Totals(nats=float(-np.log(chosen / TOTAL).sum()), tokens=n_active)

            if place == 0 and blocks:
                # Now the previous segment has all of its targets: this symbol is the last one.
                learned = np.concatenate([blocks[-1], block[:, :1]], axis=1)
                places = first - segment_len + np.arange(segment_len + 1)
                is_known = places < streams.lengths[:, None]
                state = predictor.learn(state, learned, is_known)
            state, log_probabilities = predictor.predict(state, block[:, place])
        blocks.append(block)
        progress(totals.tokens, totals)
    return streams.join(blocks)
