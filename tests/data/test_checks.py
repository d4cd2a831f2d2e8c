"""Tests counting what passes by in blocks, against counting the whole at once."""

import hashlib
import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from txl_jax.data.prepare import Tally, difference
from txl_jax.data.published import Facts

PIECES = st.sampled_from(["a", "bc", " ", "\n", "\r\n", "\n\n", "é", "\u3000", "\u00a0", "日本", "\t"])


def tally(text: bytes, *cuts: int) -> Tally:
    """The tally of a text that comes in blocks."""
    counted = Tally(words=True)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for first, last in itertools.pairwise(borders):
        if first < last:
            counted.add(text[first:last])
    return counted


@given(st.lists(PIECES, max_size=30).map("".join), st.lists(st.integers(0, 60), max_size=6))
def test_blocks_count_as_the_whole(text, cuts):
    counted = tally(text.encode(), *cuts)
    lines = text.count("\n") + (bool(text) and not text.endswith("\n"))
    assert counted.lines == lines
    assert counted.tokens == len(text.split()) + lines
    assert counted.size == len(text.encode())
    assert counted.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_differences_have_both_numbers():
    two = [tally(b"a b\n"), tally(b"c\n\n\n")]
    assert difference(Facts(), two, of="it") == difference(Facts(size=8, lines=4, tokens=7), two, of="it") == ""
    for known, made, numbers in (
        (Facts(size=10), two, ["8", "10"]),
        (Facts(lines=2), two, ["4", "2", "2"]),  # The last: its empty lines.
        (Facts(tokens=1006), [*two[:1], tally(b"c\n.\n")], ["7", "1,006"]),
    ):
        assert re.findall(r"\d[\d,]*", difference(known, made, of="it")) == numbers
    one, known = [tally(b"text")], hashlib.sha256(b"else").hexdigest()
    assert re.search(rf"\b{one[0].sha256}\b.*\b{known}\b", difference(Facts(sha256=known), one, of="it"))
    assert difference(Facts(sha256=one[0].sha256), one, of="it") == ""
