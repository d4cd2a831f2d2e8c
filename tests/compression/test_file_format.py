"""Tests of the format of compressed files: written files are read, and all others are rejected."""

import dataclasses
import hashlib
import json

import pytest

from txl_jax.compression import file_format
from txl_jax.compression.file_format import Coding, Environment, Header, dump, load
from txl_jax.errors import UserError

CODING = Coding(
    streams=3,
    segment_len=32,
    mem_len=64,
    learning_rate=7e-4,
    decay=2e-3,
    epsilon=1e-8,
    threads=2,
)
ENVIRONMENT = Environment(device="CPU (a)", processor="x86_64-1", versions="jax 1")
HEADER = Header(
    text_bytes=100,
    text_sha256="ab",
    coding=CODING,
    environment=ENVIRONMENT,
    weights_sha256="cd",
    probe_sha256="ef",
)
PAYLOAD = bytes(range(40))  # Ten words of 4 bytes, as the coder writes.


def changed(content: bytes, change) -> bytes:
    """Returns a file whose header was changed, with the SHA-256 that fits.

    A file has 8 bytes that mark the format, 4 with the header's length, the header, the payload,
    and a SHA-256 of 32 bytes.
    """
    length = int.from_bytes(content[8:12], "little")
    payload = content[12 + length : -32]
    values = json.loads(content[12 : 12 + length])
    change(values)
    head = json.dumps(values).encode()
    return signed(content[:8] + len(head).to_bytes(4, "little") + head + payload)


def signed(body: bytes) -> bytes:
    """Returns a file's content with its SHA-256 at the end."""
    return body + hashlib.sha256(body).digest()


def test_a_file_that_was_written_is_read():
    assert load(dump(HEADER, PAYLOAD), name="a.txl") == (HEADER, PAYLOAD)


def test_a_stored_text_is_read():
    header = Header.of_stored(b"some text")
    assert header.is_stored
    assert load(dump(header, b"some text"), name="a.txl") == (header, b"some text")


def test_a_file_with_a_flipped_bit_is_an_error():
    """In each byte, the lowest and the highest bit. The error names the file."""
    content = dump(HEADER, PAYLOAD)
    for place in range(len(content)):
        for bit in (0, 7):
            corrupted = bytearray(content)
            corrupted[place] ^= 1 << bit
            with pytest.raises(UserError, match=r"^a\.txl\b"):
                load(bytes(corrupted), name="a.txl")


def test_a_file_that_is_cut_or_continued_is_an_error():
    """Cut at any place, also before the end of the format's mark or of the header's length."""
    content = dump(HEADER, PAYLOAD)
    for length in range(len(content)):
        with pytest.raises(UserError, match=r"^a\.txl\b"):
            load(content[:length], name="a.txl")
    with pytest.raises(UserError, match="cut or changed"):
        load(content + b"\n", name="a.txl")


# Values that a stranger may write, with a right SHA-256. Sizes and rates go to the model, so one of
# these could allocate too much, or fail far from here. First the integers.
STRANGE = {
    "no streams": {"streams": 0},
    "a million streams": {"streams": 10**6},
    "half a stream": {"streams": 1.5},
    "true": {"streams": True},  # An int in Python.
    "a long segment": {"segment_len": 10**9},
    "a long memory": {"mem_len": 10**9},
    "no memory": {"mem_len": 0},
    "many threads": {"threads": 10**6},
}
# Numbers of the learning rule.
STRANGE |= {
    "a text": {"learning_rate": "1e-3"},
    "not a number": {"decay": float("nan")},
    "below 0": {"epsilon": -1.0},
    "beyond 32 bits": {"epsilon": 1e39},  # The largest float32 is 3.4e38.
    "infinite": {"learning_rate": float("inf")},
    "an integer beyond all floats": {"learning_rate": 10**400},
    "another key": {"seed": 1},
}
# Each number by itself is within its limit, but not the positions of memory and segment in all
# streams (1024 * 257, above 2**18), or the pairs of these with a segment's (8500 * 8000, above
# 2**25).
STRANGE |= {
    "too many positions": {"streams": 1024, "segment_len": 1, "mem_len": 256},
    "too many pairs": {"streams": 1, "segment_len": 8000, "mem_len": 500},
}


@pytest.mark.parametrize("values", STRANGE.values(), ids=STRANGE.keys())
def test_a_strange_value_of_the_coding_is_an_error(values):
    content = changed(dump(HEADER, PAYLOAD), lambda header: header["coding"].update(values))
    with pytest.raises(UserError, match=r"a header that experiments\.compress does not write"):
        load(content, name="a.txl")


# Strange values of the header outside of the coding.
OTHERS = {
    "text_bytes": {"text_bytes": -1},
    "a digest": {"text_sha256": 5},
    "no environment": {"environment": None},
    "a number": {"probe_sha256": 1},
    "another key": {"comment": "x"},
}


@pytest.mark.parametrize("values", OTHERS.values(), ids=OTHERS.keys())
def test_another_strange_value_of_the_header_is_an_error(values):
    content = changed(dump(HEADER, PAYLOAD), lambda header: header.update(values))
    with pytest.raises(UserError, match=r"a header that experiments\.compress does not write"):
        load(content, name="a.txl")


@pytest.mark.parametrize(
    "head", [b"[]", b"7", b"{}", b"{", b"\xff", b"[" * 9000], ids=lambda head: str(head[:4])
)
def test_a_header_that_is_not_an_object_with_a_version_is_an_error(head):
    """The last one is nested too deeply for Python's parser, though within the header's length."""
    body = file_format.MAGIC + len(head).to_bytes(4, "little") + head
    with pytest.raises(UserError, match=r"a header that experiments\.compress does not write"):
        load(signed(body), name="a.txl")


def test_a_length_beyond_the_file_is_an_error():
    # The largest length that its 4 bytes can hold.
    body = file_format.MAGIC + (2**32 - 1).to_bytes(4, "little") + b"{}"
    with pytest.raises(UserError, match="a header of 4294967295 bytes"):
        load(signed(body), name="a.txl")


def test_a_text_that_is_longer_than_its_bits_allow_is_an_error():
    """At most 4.5 billion symbols can come from 40 bytes.

    A symbol of two has a probability of at most 1 - 2**-24, so it takes at least 8.6e-8 bits.
    Besides the payload's 320 bits, the decoder can read 64.
    """
    content = dump(dataclasses.replace(HEADER, text_bytes=10**10), PAYLOAD)
    with pytest.raises(UserError, match="cannot be a text of 10,000,000,000 bytes"):
        load(content, name="a.txl")


def test_a_larger_vocabulary_allows_fewer_symbols():
    """At most 17.5 million symbols of 256 come from 40 bytes: the 255 others have 2**-24 each."""
    header = dataclasses.replace(HEADER, text_bytes=17_000_000)
    file_format.check_length(header, PAYLOAD, name="a.txl", vocab_size=256)

    # `load` does not know the vocabulary, and allows what two symbols would.
    header = dataclasses.replace(HEADER, text_bytes=18_000_000)
    file_format.check_length(header, PAYLOAD, name="a.txl")
    with pytest.raises(UserError, match="cannot be a text of 18,000,000 bytes"):
        file_format.check_length(header, PAYLOAD, name="a.txl", vocab_size=256)


def test_content_that_is_not_whole_words_is_an_error():
    """The coder writes words of 4 bytes."""
    with pytest.raises(UserError, match="39 bytes of content"):
        load(dump(HEADER, PAYLOAD[:39]), name="a.txl")


def test_a_stored_text_of_another_length_is_an_error():
    with pytest.raises(UserError, match="8 bytes of content"):
        load(dump(Header.of_stored(b"some text"), b"some tex"), name="a.txl")


def test_another_version_is_named():
    content = changed(dump(HEADER, PAYLOAD), lambda header: header.update(version=2))
    with pytest.raises(UserError, match="format version 1, got 2"):
        load(content, name="a.txl")


def test_differences_of_environments_are_named_with_both_values():
    other = dataclasses.replace(ENVIRONMENT, versions="jax 2")
    assert ENVIRONMENT.differences(other) == ["versions: jax 2 there, jax 1 here"]
    assert ENVIRONMENT.differences(ENVIRONMENT) == []
