"""The batch type: consecutive segments of the rows of a text."""

from typing import NamedTuple

import numpy as np


class Segments(NamedTuple):
    """S consecutive segments of L tokens for B rows of a batch (those of one process)."""

    inputs: np.ndarray  # int32 [S, B, L]; 0 in padding.
    targets: np.ndarray  # int32 [S, B, L], the token after each input; 0 in padding.
    weights: np.ndarray  # float32 [S, B, L]: 1 for a scored target; 0 for padding, warm-up and tokens read twice.
    reset: np.ndarray  # bool [S, B]: the row starts anew with this segment, so its memory is emptied first.
