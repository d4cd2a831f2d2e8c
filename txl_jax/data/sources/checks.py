"""Checks of a corpus's files: counts and digests taken while they are read, compared with the published ones."""

import codecs
import hashlib

from txl_jax.data.sources.corpus_row import Facts

_END_BYTES = 1 << 12  # Length of a file's end that is searched for empty lines.


class Tally:
    """Counts of one file.

    Words are those of `str.split`, as for word tokens. They are only counted on request: that takes longer than all
    the rest.
    """

    def __init__(self, *, words: bool):
        self.size = 0
        self._newlines = 0
        self._digest = hashlib.sha256()
        self._end = b""
        self._words: int | None = 0 if words else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_word = False

    def add(self, block: bytes) -> None:
        """Counts the file's next bytes, at least one."""
        self.size += len(block)
        self._newlines += block.count(b"\n")
        self._digest.update(block)
        self._end = (self._end + block)[-_END_BYTES:]
        if self._words is not None:
            self._count_words(self._decoder.decode(block))

    @property
    def sha256(self) -> str:
        """Returns the digest of the bytes so far, in hexadecimal."""
        return self._digest.hexdigest()

    @property
    def lines(self) -> int:
        """Returns the number of lines; a last line without its newline is a line too."""
        return self._newlines + (not self._end.endswith(b"\n") and self.size > 0)

    @property
    def tokens(self) -> int | None:
        """Returns the number of words and line ends; None if words were not counted."""
        return None if self._words is None else self._words + self.lines

    @property
    def empty_lines(self) -> int:
        """Returns the number of empty lines at the end."""
        return max(self._end.count(b"\n", len(self._end.rstrip(b"\r\n"))) - 1, 0)

    def _count_words(self, text: str) -> None:
        if not text or self._words is None:
            return  # The block ended inside its only character.
        self._words += len(text.split()) - (self._in_word and not text[0].isspace())
        self._in_word = not text[-1].isspace()


def digest(tallies: list[Tally]) -> str:
    """Returns sha256 of a part: of its file's bytes, or, if it has several files, of their digests in order."""
    if len(tallies) == 1:
        return tallies[0].sha256
    return hashlib.sha256("".join(tally.sha256 for tally in tallies).encode()).hexdigest()


def difference(known: Facts, tallies: list[Tally], *, of: str) -> str:
    """Returns "12 lines and OF has exactly 10" where a part's files differ from its facts; else an empty string."""
    if known.size is not None and (size := sum(tally.size for tally in tallies)) != known.size:
        return f"{size:,} bytes and {of} has exactly {known.size:,}"
    for name, what in (("tokens", "tokens (words and line ends)"), ("lines", "lines")):
        expected = getattr(known, name)
        if expected is not None and (count := sum(getattr(tally, name) for tally in tallies)) != expected:
            empty = max(tally.empty_lines for tally in tallies)
            ends = f" (it ends in {empty} empty line{'s' if empty > 1 else ''}; remove them)" if empty else ""
            return f"{count:,} {what} and {of} has exactly {expected:,}{ends}"
    if known.tokens is None and other_bytes(known, tallies):
        return f"text of sha256 {digest(tallies)} and {of} has {known.sha256}"
    return ""


def other_bytes(known: Facts, tallies: list[Tally]) -> bool:
    """Returns whether a part's digest is known and another."""
    return known.sha256 is not None and digest(tallies) != known.sha256
