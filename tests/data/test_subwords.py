"""Tests subwords: the package's own ids, the bytes of each token, what is trained, and files that cannot be used."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from support import hf_tokenizers as made
from support.encoded_text import in_blocks, joined
from txl_jax.data.corpus import KINDS
from txl_jax.data.subwords import SubwordVocabulary, given_tokenizer, train
from txl_jax.data.vocabulary import digest, dumps, loads
from txl_jax.errors import UserError

END = "<|endoftext|>"
LINES = ("Once upon a time\n", "the café  was\tshut.\n", "\n", "  indented\n", "日本 😀\n", END, "\n\n\n", "x" * 40)


@pytest.fixture(scope="module")
def own():
    return SubwordVocabulary(made.byte_level())


@pytest.fixture(scope="module")
def package():
    return tokenizers.Tokenizer.from_str(made.byte_level())


@given(lines=st.lists(st.sampled_from(LINES)), size=st.integers(1, 30))
def test_the_ids_are_those_of_the_package_in_blocks_too(own, package, lines, size):
    text = "".join(lines)
    expected = package.encode(text, add_special_tokens=False).ids
    assert own.encode(text.encode()).tolist() == joined(own.blocks([in_blocks(text.encode(), size)])) == expected
    assert own.encode(b"one").dtype == np.uint16 and own.size == package.get_vocab_size() == made.SIZE
    assert (own.mark, own.unknown_id, own.kind, own.start.tolist()) == (None, None, "hf", [0])


@given(text=st.text())
def test_every_text_comes_back_also_token_by_token(own, text):
    ids = own.encode(text.encode())
    assert own.decode(ids) == text.encode() and own.count_bytes(ids) == len(text.encode())
    assert b"".join(own.decode([token]) for token in ids) == text.encode()


def test_what_is_for_other_uses_has_no_effect(package):
    changed = tokenizers.Tokenizer.from_str(made.byte_level())
    changed.enable_truncation(max_length=3)
    changed.enable_padding(length=50)
    changed.model.dropout = 0.9
    changed.post_processor = tokenizers.processors.TemplateProcessing(f"{END} $A {END}", special_tokens=[(END, 0)])
    text = "".join(LINES)
    for _ in range(3):
        assert SubwordVocabulary(changed.to_str()).encode(text.encode()).tolist() == package.encode(text).ids


def test_pieces_of_words_are_spelt_as_in_a_text():
    for content, text, expected in (
        (made.word_pieces(), b"banana do unseen", b" banana do [UNK]"),
        (made.meta_space(), "ban é".encode(), " ban é".encode()),
        (made.whole_words(), b"ba  do", b" ba do"),
    ):
        own = SubwordVocabulary(content)
        assert own.decode(own.encode(text)) == expected
        assert b"".join(own.decode([token]) for token in own.encode(text)) == expected
    assert SubwordVocabulary(made.byte_level(special=())).start.tolist() == [made.ALPHABET.index("Ċ")]
    pieces = SubwordVocabulary(made.word_pieces())
    assert pieces.start.tolist() == [0] and pieces.names()[pieces.unknown_id] == b" [UNK]"


# Trained here


TEXT = "".join(made.TEXT)


def trained(content=TEXT, *, size=290, block=1000):
    return train([in_blocks(content.encode(), block)], size=size)


def test_training_has_all_bytes_and_frequent_words_and_any_text_comes_back():
    own = trained()
    assert own.size == 290 and set(range(256)) == {name[0] for name in own.names() if len(name) == 1}
    assert len(own.encode(b"once upon a time")) < 16 / 2
    text = " unseen\r\n\n\t日本 😀\x00".encode()
    assert own.decode(own.encode(text)) == text
    assert trained("a\n", size=1000).size == 256  # Nothing to merge.


def test_hosts_learn_the_same_bytes():
    """In other processes, on other threads and in other blocks; Python's and Rust's hashes differ between processes."""
    words = "import sys; from data.test_subwords import trained; sys.stdout.write(trained(block=77).content)"
    found = set()
    for threads in ("1", "2"):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment |= {"TOKENIZERS_PARALLELISM": str(threads == "2").lower()}
        found.add(
            subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, check=True).stdout
        )
    assert found == {trained().content.encode()}


def test_what_cannot_be_trained_on_is_named():
    with pytest.raises(UserError, match=r"vocab_size must be at least 256.*255"):
        trained(size=255)
    with pytest.raises(UserError, match=r"^some\.txt\b.*\b2\b"):
        train([in_blocks(b"ab\xff", 9)], size=290)


# The saved form


def test_the_saved_form_is_two_lines_and_keeps_the_file(own):
    for content in (made.byte_level(), made.byte_level(pretty=True), made.byte_level().replace("<|", "\\u003c|")):
        vocabulary = SubwordVocabulary(content)
        text = dumps(vocabulary)
        assert text.count("\n") == 2
        assert loads(text, KINDS) == vocabulary and loads(text, KINDS).content == content
    assert digest(own) != digest(SubwordVocabulary(made.byte_level(pretty=True)))
    title, content = dumps(own).splitlines()
    for damaged in ("", "{}", content[: len(content) // 2]):
        with pytest.raises(UserError, match="'txl_jax vocabulary hf "):
            loads(f"{title}\n{damaged}\n", KINDS)


# What cannot be used


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_what_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "old.model").write_bytes(content)
    with pytest.raises(UserError, match=rf"--data\.tokenizer\.hf_file\b.*{tmp_path}/old\.model\b"):
        given_tokenizer(str(tmp_path / "old.model"))


def test_a_character_that_would_vanish_is_refused_with_the_file():
    own = SubwordVocabulary(made.few_letters())
    assert own.decode(own.encode(b"ab ba")) == b"abba"
    with pytest.raises(UserError, match=r"'c' \(U\+0063\)"):
        own.encode(b"abc")
    with pytest.raises(UserError, match=r"^some\.txt: .*'é' \(U\+00E9\)"):
        list(own.blocks([in_blocks("ab é".encode(), 3)]))
    with pytest.raises(UserError, match=r"^some\.txt: .*UNK"):
        list(SubwordVocabulary(made.whole_words(unknown=None)).blocks([in_blocks(b"ba zebra", 99)]))
