"""Tests counting what passes by in blocks, against counting the whole at once."""

import hashlib
import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from txl_jax.data.sources.checks import Tally, difference, digest
from txl_jax.data.sources.corpus_row import Facts

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


def test_characters_cut_into_single_bytes():
    text = "é 日本\u3000本\n\u00a0é".encode()
    assert tally(text, *range(len(text))).tokens == 4 + 2


def test_empty_lines_at_the_end_hold_nothing_at_all():
    for text, empty in (
        (b"a\n", 0),
        (b"a", 0),
        (b"a\n\n", 1),
        (b"a\n\n\n", 2),
        (b"a\n \n \n", 0),
        (b"\n\n", 1),
        (b"", 0),
    ):
        assert tally(text).empty_lines == empty, text
    assert tally(b"a\n\n\n", 1, 2, 3).empty_lines == 2
    assert tally(b"a\r\n\r\n").empty_lines == 1


def test_the_digest_of_one_file_is_its_own():
    one, two = tally(b"one"), tally(b"two")
    assert digest([one]) == hashlib.sha256(b"one").hexdigest()
    assert digest([one, two]) == hashlib.sha256((one.sha256 + two.sha256).encode()).hexdigest()
    assert digest([two, one]) != digest([one, two])


def numbers(message):
    return re.findall(r"\d[\d,]*", message)


def test_messages_of_differences_have_both_numbers():
    two = [tally(b"a b\n"), tally(b"c\n\n\n")]
    assert difference(Facts(), two, of="it") == ""
    assert difference(Facts(size=8, lines=4, tokens=7), two, of="it") == ""
    message = difference(Facts(size=10), two, of="the text of Ann")
    assert numbers(message) == ["8", "10"] and "the text of Ann" in message
    assert numbers(difference(Facts(lines=2), two, of="it")) == ["4", "2", "2"], "the last: its empty lines"
    assert numbers(difference(Facts(tokens=1006), [*two[:1], tally(b"c\n.\n")], of="it")) == ["7", "1,006"]
    one = [tally(b"text")]
    known = hashlib.sha256(b"else").hexdigest()
    assert re.search(rf"\b{one[0].sha256}\b.*\b{known}\b", difference(Facts(sha256=known), one, of="it"))
    assert difference(Facts(sha256=one[0].sha256), one, of="it") == ""
