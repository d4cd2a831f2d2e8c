"""The batch type: consecutive segments of the rows of a text."""

from typing import NamedTuple

import numpy as np


class Segments(NamedTuple):
    """S consecutive segments of B rows (of one process) and L places."""

    inputs: np.ndarray  # int32 [S, B, L]; 0 in padding.
    targets: np.ndarray  # int32 [S, B, L]; 0 in padding.
    weights: np.ndarray  # float32 [S, B, L]: 1 for a place that counts, 0 for padding, warm-up, what is read again.
    reset: np.ndarray  # bool [S, B]: the row starts anew here, so its memory is emptied first.
