"""Tests of the loop through the streams, with a predictor that records its calls."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from txl_jax.compression import codec
from txl_jax.data.byte_tokens import ByteVocabulary

TEXT = b"abcdefgh"
VOCABULARY = ByteVocabulary.of(TEXT)
V = len(TEXT)  # Number of symbols: the letters of TEXT all differ, and a is symbol 0.


class Recorder:
    """Replaces the model. Predictions depend on everything that was read and learned before."""

    vocabulary = VOCABULARY

    def __init__(self, *, streams, segment_len):
        self.coding = SimpleNamespace(streams=streams, segment_len=segment_len)
        self.calls = []

    def start(self):
        return 0

    def predict(self, state, tokens):
        self.calls.append(("read", tokens.tolist()))
        state = hash((state, tuple(tokens.tolist())))
        logits = np.random.default_rng(abs(state)).normal(size=(len(tokens), V))
        return state, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def learn(self, state, tokens, is_known):
        self.calls.append(("learn", tokens.tolist(), is_known.tolist()))
        return hash((state, tuple(tokens.ravel().tolist())))


def no_progress(done, totals):
    pass


def test_each_segment_is_read_and_then_learned():
    """Three streams, a b c, d e f and g h, are read in segments of two."""
    predictor = Recorder(streams=3, segment_len=2)

    codec.compress(TEXT, predictor, progress=no_progress)
    assert predictor.calls == [
        ("read", [0, 3, 6]),
        ("read", [1, 4, 7]),
        # The segment's last targets are the symbols of the next column, where g h has ended: the 0
        # in its place is padding, and not known.
        (
            "learn",
            [[0, 1, 2], [3, 4, 5], [6, 7, 0]],
            [[True, True, True], [True, True, True], [True, True, False]],
        ),
        # No column follows, so this segment has no last targets, and is not learned.
        ("read", [2, 5, 0]),
    ]


@pytest.mark.parametrize("streams", [1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("n_bytes", [0, 1, 2, 6, 7, 8, 64, 101])
def test_each_text_comes_back(streams, n_bytes):
    """It may have any length, also so short that some streams are shorter than others, or empty.

    Both directions make the same calls, so a model predicts and learns the same in both.
    """
    symbols = np.random.default_rng(n_bytes).integers(V, size=n_bytes)
    text = VOCABULARY.decode(symbols)
    encoding = Recorder(streams=streams, segment_len=4)
    payload = codec.compress(text, encoding, progress=no_progress)

    decoding = Recorder(streams=streams, segment_len=4)
    assert codec.decompress(payload, n_bytes, decoding, progress=no_progress) == text
    assert decoding.calls == encoding.calls


def test_progress_counts_bytes_and_their_bits():
    """It is called after each segment. The last numbers describe the whole text, whose bits are the
    payload's.
    """
    text = VOCABULARY.decode(np.random.default_rng(0).integers(V, size=1000))
    predictor = Recorder(streams=3, segment_len=10)
    progress = mock.Mock()

    payload = codec.compress(text, predictor, progress=progress)

    (first, _), (second, _), *_, (last, totals) = (call.args for call in progress.call_args_list)
    # Three streams in segments of ten.
    assert first == 30
    assert second == 60
    assert last == totals.tokens == 1000
    # The coder rounds up to words of 4 bytes, of which the last two may hold few bits.
    assert totals.bits_per_token * 1000 / 8 == pytest.approx(len(payload), abs=8)


def test_a_forged_length_allocates_nothing():
    """The length comes from a header that a stranger may have written. Memory is allocated segment
    by segment: an array for a petabyte would fail before the first call of `progress`.
    """

    class Enough(Exception):  # noqa: N818 (an end, not an error)
        """Ten symbols were decoded, so the decoder had started."""

    def stop_at_ten(done, totals):
        if done >= 10:
            raise Enough

    predictor = Recorder(streams=1, segment_len=4)
    with pytest.raises(Enough):
        codec.decompress(bytes(8), 10**15, predictor, progress=stop_at_ten)
