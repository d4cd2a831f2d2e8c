"""The batch type: consecutive segments of the rows of a text."""

from typing import NamedTuple

import numpy as np


class Segments(NamedTuple):
    """S consecutive segments of L tokens for B rows of a batch (those of one process).

    Attributes:
      inputs: int32 [S, B, L]; 0 in padding.
      targets: int32 [S, B, L], the token after each input; 0 in padding.
      weights: float32 [S, B, L]: 1 for a scored target; 0 for padding, warm-up and tokens read twice.
      reset: bool [S, B]: the row starts anew with this segment, so its memory is emptied first.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    reset: np.ndarray
