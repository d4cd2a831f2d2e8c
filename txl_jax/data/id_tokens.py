"""Ready-made token ids as tokens, for ids and weights that come without a vocabulary."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from txl_jax.config.config_tree import require
from txl_jax.data.vocabulary import Vocabulary, check_ids, id_type
from txl_jax.errors import UserError

# Largest size of a vocabulary: ids are int32 on a device.
LARGEST_SIZE = 2**31 - 1
# Maximum number of digits of an id in a text. Such a number fits in an int64.
_MOST_DIGITS = 9
# Maximum number of characters of a text that an error shows.
_SHOWN_CHARACTERS = 40


@dataclasses.dataclass(frozen=True)
class IdVocabulary(Vocabulary):
    """Token ids as tokens, for ids or weights without a vocabulary.

    The tokens are the numbers from 0 to V - 1, with white space between them.

    >>> IdVocabulary(size=20).encode(b"5 17").tolist()
    [5, 17]
    """

    # Ids have no text to save.
    tokens: tuple[()] = ()
    # V. Without this default the dataclass would take the property of `Vocabulary` for a default.
    size: int = 0

    kind: ClassVar[str] = "id"
    join: ClassVar[Any] = tuple

    def __post_init__(self) -> None:
        # In a saved vocabulary this may be any JSON value. `True` is also an `int`.
        is_size = type(self.size) is int and 1 <= self.size <= LARGEST_SIZE
        require(
            is_size,
            f"a vocabulary of ids must have a size from 1 to {LARGEST_SIZE}, got {self.size!r}",
        )

    @property
    def start(self) -> np.ndarray:
        """Returns the id 0."""
        return np.zeros(1, id_type(self.size))

    def names(self) -> list[bytes]:
        """Returns the number of each token."""
        return [str(token).encode() for token in range(self.size)]

    def decode(self, ids: Any) -> bytes:
        """Returns each number and a space."""
        return "".join(f"{token} " for token in check_ids(ids, self.size).tolist()).encode()

    def _encode(self, text: str) -> np.ndarray:
        words = text.split()
        for word in words:
            is_number = word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS
            if not is_number:
                raise UserError(
                    f"{[word[:_SHOWN_CHARACTERS]]} is not a token id. This model has no "
                    f"vocabulary: pass ids from 0 to {self.size - 1}, separated by spaces."
                )
        return check_ids(np.array(words, dtype=np.int64), self.size).astype(id_type(self.size))
