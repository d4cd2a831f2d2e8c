"""Vocabulary sizes and random tokens for benchmarks, which read no text.

Tokens are as frequent as words are, by the law of Zipf and Mandelbrot: p(rank) ~ 1 / (rank + SHIFT)^EXPONENT. An
adaptive softmax takes as long for a tail as it has tokens.
"""

import numpy as np

from txl_jax.config import CorpusName
from txl_jax.data.published import CORPORA

SHIFT, EXPONENT = 2.7, 1.1


def default_vocab_size(corpus: CorpusName) -> int:
    """Returns the vocabulary size of a published corpus; 256, of bytes, for own texts."""
    return CORPORA[corpus].vocab_size if corpus in CORPORA else 256


def probabilities(vocab_size: int) -> np.ndarray:
    """Computes p of each token, most frequent first: [V]."""
    weights = (np.arange(1, vocab_size + 1) + SHIFT) ** -EXPONENT
    return weights / weights.sum()


def draw_tokens(vocab_size: int, n_tokens: int) -> np.ndarray:
    """Draws tokens, the same ones in every call: int32 [n_tokens]."""
    drawn = np.random.default_rng(0).choice(vocab_size, size=n_tokens, p=probabilities(vocab_size))
    return drawn.astype(np.int32)
