"""Tests of the range coder: integers that both directions share, and their number of bits."""

import sys

import numpy as np
import pytest

from txl_jax.compression import range_coder
from txl_jax.compression.range_coder import Decoder, Encoder, integer_probabilities
from txl_jax.errors import MissingPackageError, NonFiniteError, UserError

TOTAL = 1 << 24  # The coder's integers are probabilities in units of 2**-24.


def log_softmax(logits):
    """Returns log probabilities float32 [N, V]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)


@pytest.fixture
def predictions():
    """Log probabilities [600, 256]: 200 flat rows, 200 peaked ones, and 200 almost certain ones.

    So integers occur from one unit to nearly all of them.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(600, 256))
    logits[200:400] *= 12
    logits[400:] *= 300
    return log_softmax(logits)


def test_integers_sum_to_the_total_and_give_each_symbol_a_share(predictions):
    integers = integer_probabilities(predictions)
    assert integers.shape == (600, 256)
    assert (integers.sum(axis=1) == TOTAL).all()
    assert integers.min() == 1
    # A certain symbol has everything except one unit for each other symbol.
    assert integers.max() == TOTAL - 255


def test_integers_follow_the_probabilities():
    integers = integer_probabilities(np.log(np.array([[0.5, 0.25, 0.125, 0.125]])))
    # They are shares of 2**24 - 4 units, plus one unit each. Their sums are rounded down, so the
    # third, a share of 2097151.5, loses half a unit to the last.
    assert integers.tolist() == [[8388607, 4194304, 2097152, 2097153]]


def test_the_coder_uses_exactly_these_integers(predictions):
    """The content is as long as they say, to two words, and comes back only with them."""
    rng = np.random.default_rng(1)
    integers = integer_probabilities(predictions)
    # Likely symbols and, at every tenth place, any.
    symbols = integers.argmax(axis=1)
    symbols[::10] = rng.integers(256, size=60)

    # A text is coded in parts, and decoded in any others.
    encoder = Encoder()
    encoder.encode(symbols[:1], integers[:1])
    encoder.encode(symbols[1:], integers[1:])
    content = encoder.content()

    chosen = integers[np.arange(600), symbols]
    bits = -np.log2(chosen / TOTAL).sum()
    assert bits < 8 * len(content) < bits + 64

    decoder = Decoder(content)
    np.testing.assert_array_equal(decoder.decode(integers[:599]), symbols[:599])
    np.testing.assert_array_equal(decoder.decode(integers[599:]), symbols[599:])

    # Other integers of one symbol, which shift the places of the others, give other symbols.
    others = integers.copy()
    others[0, 0] += 1000
    others[0, -1] -= 1000
    assert (Decoder(content).decode(others) != symbols).any()


def test_content_that_no_encoder_writes_is_an_error(predictions):
    """Its first number is the largest, behind the shares of all symbols: the coder leaves a rest of
    its range to none of them.
    """
    integers = integer_probabilities(predictions)
    with pytest.raises(UserError, match="do not match"):
        Decoder(b"\xff" * 4000).decode(integers)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "all impossible"])
def test_predictions_that_are_not_probabilities_are_an_error(value):
    with pytest.raises(NonFiniteError, match="learning_rate"):
        integer_probabilities(np.full((2, 5), value, np.float32))


def test_a_missing_package_is_named(monkeypatch):
    # The package is kept once it was imported, so this test must begin and end without it.
    range_coder.constriction.cache_clear()
    monkeypatch.setitem(sys.modules, "constriction", None)
    try:
        with pytest.raises(MissingPackageError, match="constriction"):
            Encoder()
    finally:
        range_coder.constriction.cache_clear()
