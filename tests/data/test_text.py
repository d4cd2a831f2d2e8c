"""Tests bytes to text: errors name file and offset; test_word_tokens has any cutting into blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.encoded_text import in_blocks
from txl_jax.data.text import text_blocks
from txl_jax.errors import UserError

# Every kind of white space that cuts, one that does not, and characters of one to four bytes.
TEXTS = st.text(
    st.sampled_from("ab \n\t\r\N{NO-BREAK SPACE}é日😀") | st.characters(codec="utf-8", exclude_characters="\0")
)
SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@pytest.mark.parametrize("character", ["a", "é", "日", "😀"])
def test_text_without_white_space_is_cut_between_characters(character):
    text, size = character * 100_000, 10_007  # A prime, so that every place in a character is met.
    blocks = list(text_blocks([in_blocks(text.encode(), [size])], close_lines=False))
    assert "".join(blocks) == text
    assert max(len(block.encode()) for block in blocks) < 100_000, "it is not held as a whole"


# Bytes that begin nothing, or a character whose other bytes are missing.
BAD = st.sampled_from([b"\xff", b"\0", *("é日😀".encode()[first:last] for first, last in ((0, 1), (2, 4), (5, 8)))])


@given(start=TEXTS, end=TEXTS, sizes=SIZES, offset=st.integers(0, 99), bad=BAD)
def test_a_byte_that_is_no_text_is_named_with_its_place_in_the_file(start, end, sizes, offset, bad):
    whole = in_blocks("日 ".encode(), sizes, name="other.txt")
    broken = in_blocks(start.encode() + bad + end.encode(), sizes, offset=offset)
    named = rf"\b{bad[0]:#04x}\b.*\b{offset + len(start.encode())}\b.*--data\.tokenizer\.kind=byte\b"
    with pytest.raises(UserError, match=rf"^some\.txt\b.*{named}"):
        list(text_blocks([whole, broken, whole], close_lines=False))


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_a_byte_order_mark_is_no_part_of_the_first_word(block):
    content = "\ufeffthe \ufeff cat"
    for offset, expected in ((0, content[1:]), (3, content)):  # A part that begins later has no mark.
        file = in_blocks(content.encode(), block, offset=offset)
        assert "".join(text_blocks([file], close_lines=False)) == expected
