"""Whether masks are random: p-values of chi-squared tests, small if they are not."""

import numpy as np
from scipy.special import gammaincc

# A test with a fixed seed passes or fails for ever. One with good masks fails once in a million.
SMALLEST = 1e-6


def p_value(normal) -> float:
    """The chance that as many independent normal numbers have a larger sum of squares."""
    normal = np.asarray(normal, np.float64)
    return float(gammaincc(normal.size / 2, np.sum(normal**2) / 2))


def kept_p(mask: np.ndarray, rate: float) -> float:
    """The p-value of the number of kept elements."""
    deviation = np.count_nonzero(mask) - mask.size * (1 - rate)
    return p_value(deviation / np.sqrt(mask.size * rate * (1 - rate)))


def pair_p(first: np.ndarray, second: np.ndarray, rate: float) -> float:
    """The p-value of the correlation of two masks, element by element."""
    both = np.count_nonzero(first & second)
    kept = np.count_nonzero(first) + np.count_nonzero(second)
    keep = 1 - rate
    covariance = both - keep * kept + first.size * keep**2
    return p_value(covariance / (np.sqrt(first.size) * keep * rate))


def sums_p(mask: np.ndarray, rate: float, axis: int) -> float:
    """The p-value of the numbers of kept elements along an axis.

    They should vary like sums of independent draws.
    """
    length = mask.shape[axis]
    deviations = mask.sum(axis) - length * (1 - rate)
    return p_value(deviations / np.sqrt(length * rate * (1 - rate)))
