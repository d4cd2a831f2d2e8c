"""Tests bytes as tokens, against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.encoded_text import in_blocks, joined
from txl_jax.config import Newlines
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.errors import UserError

SIZES = st.integers(1, 9)


@given(st.binary(min_size=1))
def test_text_survives_encoding_with_its_own_vocabulary(text):
    own = ByteVocabulary.of(text)
    ids = own.encode(text)
    assert ids.dtype == np.uint8 and ids.shape == (len(text),)
    assert own.symbols == bytes(sorted(set(text))), "ids are ranks"
    assert own.symbols[ids.max()] == max(text) and own.decode(ids) == text


@given(text=st.binary(), size=SIZES)
def test_newlines_may_be_dropped(text, size):
    text += b"a\n\na"
    for kept in (ByteVocabulary.all_bytes(Newlines.DROP), ByteVocabulary(bytes(sorted({*text} - {10})), Newlines.DROP)):
        assert kept.decode(joined(kept.blocks([in_blocks(text, size)] * 2))) == 2 * text.replace(b"\n", b"")
        assert kept.decode(kept.encode(text)) == text.replace(b"\n", b"")


@given(start=st.binary().map(lambda start: start.replace(b"x", b"")), size=SIZES, offset=st.integers(0, 99))
def test_a_foreign_byte_of_a_file_is_named_with_its_place(start, size, offset):
    others = ByteVocabulary(bytes(set(range(256)) - {ord("x")}))
    files = [in_blocks(b"ab", size, name="other.txt"), in_blocks(start + b"xax", size, offset=offset)]
    with pytest.raises(UserError, match=rf"^some\.txt\b.*\b120\b.*\b{offset + len(start)}\b.*\b255\b"):
        joined(others.blocks(files))
