"""Text of tokens as they come, up to a stop string."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any


class TextStream:
    r"""The text of one sequence of tokens, piece by piece, up to the first of several stop strings.

    A stop string is found in the text, whatever tokens it is made of; the one that is complete first counts. A piece
    that may be the beginning of one is held back, and so are the bytes of a character that is not complete.

    >>> stream = TextStream(bytes, ["\n\n", "end"])
    >>> [stream.add(b"one\n"), stream.add(b"two\ne"), stream.add(b"n"), stream.add(b"ough end."), stream.ended]
    ['one', '\ntwo\n', '', 'enough ', True]
    """

    def __init__(self, decode: Callable[[Any], bytes], stop: Sequence[str]):
        """Begins an empty text.

        Args:
          decode: returns the bytes of ids; those of successive ids may be concatenated.
          stop: strings that are not empty.
        """
        self._decode = decode
        self._stop = [text.encode() for text in stop]
        self._held = b""
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.ended = False  # Whether a stop string was found.

    def add(self, ids: Any) -> str:
        """Returns the text that is certain now that `ids` have come; it does not include a stop string."""
        if self.ended:
            return ""
        self._held += self._decode(ids)
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.ended = True
            self._held = self._held[: min(found)[1]]
            return self.finish()
        certain = len(self._held) - self._begun()
        piece, self._held = self._held[:certain], self._held[certain:]
        return self._characters.decode(piece)

    def finish(self) -> str:
        """Returns what was held back, as no more tokens come; bytes that are no UTF-8 become U+FFFD."""
        piece, self._held = self._held, b""
        return self._characters.decode(piece, final=True)

    def _begun(self) -> int:
        """Returns the length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in ends if any(stop.startswith(self._held[-n:]) for stop in self._stop)), 0)
