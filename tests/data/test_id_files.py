"""Tests ready-made ids: types and files, splits, vocabulary sizes, the memory map, and every file
that is refused.
"""

import numpy as np
import pytest

from support import hf_tokenizers
from support.encoded_text import in_blocks, joined, own_text
from txl_jax.config import Tokenizer
from txl_jax.data.corpus import KINDS, read_corpus
from txl_jax.data.id_tokens import IdVocabulary
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.vocabulary import dumps, loads
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError

IDS = np.random.default_rng(0).integers(0, 200, 100)
IDS[70] = 211  # The largest one.


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def of(vocabulary=None, **fields):
        return read_corpus(
            own_text(kind=Tokenizer.ID, **fields), "nowhere", "cache", vocabulary=vocabulary
        )

    return of


def splits(corpus):
    return [split.tolist() for split in (corpus.train, corpus.valid, corpus.test)]


@pytest.mark.parametrize("dtype", ["u1", "i2", ">u2", "<i4", "u4", "i8", ">u8"])
def test_an_array_of_any_integer_type_is_split_by_position_and_mapped(read, dtype, tmp_path):
    np.save("ids.npy", IDS.astype(dtype))
    corpus = read(file="ids.npy")
    assert splits(corpus) == [IDS[:90].tolist(), IDS[90:95].tolist(), IDS[95:].tolist()]
    assert (
        corpus.vocabulary == IdVocabulary(size=212)
        and corpus.name == "ids"
        and corpus.sentences is None
    )
    for split in (corpus.train, corpus.valid, corpus.test):
        assert isinstance(split, np.memmap) and not split.flags.writeable
        assert split.filename == str(tmp_path / "ids.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["ids.npy"], "nothing was copied"


def test_plain_numbers_by_split_and_without_a_test_file(read):
    for name, ids in (("train", IDS[:80]), ("val", IDS[80:90]), ("test", IDS[90:])):
        ids.astype("<u2").tofile(f"{name}.bin")
    named = {"train": ("train.bin",), "valid": ("val.bin",)}
    corpus = read(**named)
    assert splits(corpus) == [IDS[:80].tolist(), IDS[80:90].tolist(), IDS[80:90].tolist()]
    tested = read(**named, test=("test.bin",))
    assert splits(tested) == [IDS[:80].tolist(), IDS[80:90].tolist(), IDS[90:].tolist()]
    assert tested.digest != corpus.digest and tested.description != corpus.description


def test_the_size_is_given_or_the_largest_id_and_one(read):
    np.save("ids.npy", IDS)
    assert read(file="ids.npy", vocab_size=500).vocabulary == IdVocabulary(size=500)
    assert read(file="ids.npy", vocab_size=212).vocabulary == IdVocabulary(size=212)
    with pytest.raises(UserError, match=r"\b211\b.*\b211\b.*--data\.tokenizer\.vocab_size\b"):
        read(file="ids.npy", vocab_size=211)
    np.array([1, 2, 3]).astype("<u2").tofile("train.bin")
    np.array([9, 2]).astype("<u2").tofile("val.bin")
    assert read(train=("train.bin",), valid=("val.bin",)).vocabulary.size == 10, (
        "the largest may be in any split"
    )


def test_a_tokenizer_beside_it_makes_text_of_ids(read, tmp_path):
    (tmp_path / "tokenizer.json").write_text(hf_tokenizers.byte_level())
    own = SubwordVocabulary(hf_tokenizers.byte_level())
    np.save("ids.npy", own.encode(b"one two three " * 20))
    corpus = read(file="ids.npy", hf_file="tokenizer.json")
    assert corpus.vocabulary == own and corpus.vocabulary.decode(corpus.train).startswith(
        b"one two three"
    )
    np.save("ids.npy", np.full(100, hf_tokenizers.SIZE))
    with pytest.raises(
        UserError, match=rf"\b{hf_tokenizers.SIZE}\b.*\b{hf_tokenizers.SIZE}\b.*hf_file"
    ):
        read(file="ids.npy", hf_file="tokenizer.json")


def test_ids_are_scored_in_the_vocabulary_of_a_run(read):
    np.save("ids.npy", IDS % 3)
    words = WordVocabulary(("<eos>", "a", "<unk>"))
    assert read(words, file="ids.npy").vocabulary == words
    np.save("ids.npy", IDS)
    with pytest.raises(UserError, match=r"\b3\b.*\b211\b"):
        read(words, file="ids.npy")


def test_the_digest_is_of_the_ids(read):
    digests = set()
    for ids in (IDS, IDS[::-1], IDS.astype(np.uint16)):
        np.save("ids.npy", ids)
        digests.add(read(file="ids.npy").digest)
    assert len(digests) == 3
    np.save("moved.npy", IDS.astype(np.uint16))
    assert read(file="moved.npy").digest in digests


def test_ids_as_tokens():
    own = IdVocabulary(size=300)
    assert own.size == 300 and own.encode(b"5 17\n299").tolist() == [5, 17, 299]
    assert (
        own.encode(b"").shape == (0,)
        and own.decode([5, 17]) == b"5 17 "
        and own.start.tolist() == [0]
    )
    assert joined(own.blocks([in_blocks(b"5 17 299")])) == [5, 17, 299] and own.names()[17] == b"17"
    assert loads(dumps(own), KINDS) == own
    for text, named in ((b"5 the", "'the'"), (b"300", r"\b300\b"), (b"-1", "-1")):
        with pytest.raises(UserError, match=named):
            own.encode(text)


# What is refused


def test_an_array_without_ids(read):
    for array, pattern in (
        (IDS.astype(float), "float64"),
        (IDS.reshape(10, 10), r"\(10, 10\)"),
        (IDS > 5, "bool"),
        (IDS.astype("m8[s]"), "timedelta64"),
        (IDS.astype("m8"), "timedelta64"),
        (IDS.astype("M8[s]"), "datetime64"),
        (np.array([{}, {}]), "Python objects"),
        (np.where(np.arange(100) == 60, -3, IDS), r"-3 at position 60\b"),
        (np.where(np.arange(100) == 61, 2**31 - 1, IDS), r"2147483647 at position 61\b"),
        (np.array([2**64 - 1, 1], np.uint64), r"18446744073709551615 at position 0\b"),
    ):
        np.save("ids.npy", array)
        with pytest.raises(UserError, match=pattern):
            read(file="ids.npy")


HEADERS = [b"", b"{'descr': '<u2', 'shape': (", b"(" * 200, b"{'descr': [" * 9, b"\\"]
ARRAYS = [b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header for header in HEADERS]


def test_a_file_without_ids(read, tmp_path):
    for name, content, pattern in (
        ("ids.bin", b"123", r"ids\.bin\b.*uint16"),
        ("ids.bin", b"", r"ids\.bin"),
        ("ids.txt", b"1 2 3", r"\.npy\b.*\.bin\b"),
        ("ids.npy", b"1 2 3", r"ids\.npy\b"),
        *(("ids.npy", content, r"ids\.npy\b") for content in ARRAYS),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=pattern):
            read(file=name)


# Frequent ids are small, as in a text.
TEXT_IDS = np.minimum(np.random.default_rng(5).zipf(1.3, 3000), 50_256)
LETTERS = np.frombuffer(
    b"the quick brown fox jumps over the lazy dog, and the cat sat on the mat\n" * 40, np.uint8
)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (TEXT_IDS.astype("<u4").tobytes(), "'<u4'"),
        (TEXT_IDS.astype(">u4").tobytes(), "'>u4'"),
        (TEXT_IDS.astype("<i8").tobytes(), "'<u8'"),
        # V > 65,536.
        (np.where(TEXT_IDS > 4, TEXT_IDS + 100_000, TEXT_IDS).astype("<u4").tobytes(), "'<u4'"),
        ((TEXT_IDS % 200).astype(">u2").tobytes(), "'>u2'"),
        ((np.random.default_rng(1).choice(LETTERS, 4000) - 10).tobytes(), "'u1'"),
        (b"\x93NUMPY\x01\x00" + IDS.astype("<u2").tobytes(), r"\.npy\b"),
        (np.array([20240520, 1, 100], "<i4").tobytes() + IDS.astype("<u2").tobytes(), r"llm\.c"),
        (np.array([20240801, 1, 100], "<i4").tobytes() + IDS.astype("<u4").tobytes(), r"llm\.c"),
        (b"MMIDIDX\0\0" + bytes(9), "Megatron"),
        (b"\x1f\x8b\x08\0" + IDS.astype("<u2").tobytes(), "gzip"),
    ],
    ids=[
        "<u4",
        ">u4",
        "<i8",
        "<u4 large",
        ">u2",
        "u1",
        "npy",
        "llm.c",
        "llm.c 32",
        "Megatron",
        "gzip",
    ],
)
def test_plain_numbers_of_another_width_or_with_a_header(read, tmp_path, content, named):
    (tmp_path / "ids.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"ids\.bin\b.*uint16\b.*{named}"):
        read(file="ids.bin")


@pytest.mark.parametrize(
    "ids",
    [
        TEXT_IDS,
        TEXT_IDS % 65,
        LETTERS,
        np.random.default_rng(0).integers(2**16, size=3000),
        np.zeros(3000, int),
        np.full(3000, 257),
        np.tile([40, 3, 41, 4], 800),  # Notes and lengths take turns.
    ],
    ids=["words", "few", "bytes", "random", "zeros", "one", "turns"],
)
def test_plain_numbers_of_uint16(read, ids):
    ids.astype("<u2").tofile("ids.bin")
    assert np.concatenate(splits(read(file="ids.bin"))).tolist() == ids.tolist()


def test_a_file_that_was_cut_off_and_several_of_a_split(read, tmp_path):
    np.save("ids.npy", IDS)
    content = (tmp_path / "ids.npy").read_bytes()
    (tmp_path / "ids.npy").write_bytes(content[:-9])
    with pytest.raises(UserError, match=r"ids\.npy\b"):
        read(file="ids.npy")
    for name in ("1.bin", "2.bin", "v.bin"):
        IDS.astype("<u2").tofile(name)
    with pytest.raises(UserError, match=r"--data\.train\b.*\b2 files\b"):
        read(train=("[12].bin",), valid=("v.bin",))
