"""Tests ready-made ids: dtypes and files, splits, vocabulary sizes, the memory map, and every file
that raises an error.
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
    """Reads ids from files in the working directory, with a cache next to them."""
    monkeypatch.chdir(tmp_path)

    def read_ids(vocabulary=None, **fields):
        config = own_text(kind=Tokenizer.ID, **fields)
        return read_corpus(config, "nowhere", "cache", vocabulary=vocabulary)

    return read_ids


def splits(corpus):
    return [split.tolist() for split in (corpus.train, corpus.valid, corpus.test)]


@pytest.mark.parametrize("dtype", ["u1", "i2", ">u2", "<i4", "u4", "i8", ">u8"])
def test_an_array_of_any_integer_type_is_split_by_position_and_mapped(read, dtype, tmp_path):
    np.save("ids.npy", IDS.astype(dtype))

    corpus = read(file="ids.npy")

    assert splits(corpus) == [IDS[:90].tolist(), IDS[90:95].tolist(), IDS[95:].tolist()]
    assert corpus.vocabulary == IdVocabulary(size=212)
    assert corpus.name == "ids"
    assert corpus.sentences is None
    for split in (corpus.train, corpus.valid, corpus.test):
        assert isinstance(split, np.memmap)
        assert not split.flags.writeable
        assert split.filename == str(tmp_path / "ids.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["ids.npy"], "nothing was copied"


def test_plain_numbers_by_split_and_without_a_test_file(read):
    """Without a test file, the validation split is also the test split."""
    for name, ids in (("train", IDS[:80]), ("val", IDS[80:90]), ("test", IDS[90:])):
        ids.astype("<u2").tofile(f"{name}.bin")
    lists = {"train": ("train.bin",), "valid": ("val.bin",)}

    corpus = read(**lists)
    assert splits(corpus) == [IDS[:80].tolist(), IDS[80:90].tolist(), IDS[80:90].tolist()]

    with_test = read(**lists, test=("test.bin",))
    assert splits(with_test) == [IDS[:80].tolist(), IDS[80:90].tolist(), IDS[90:].tolist()]
    assert with_test.digest != corpus.digest
    assert with_test.description != corpus.description


def test_the_size_is_the_setting_or_the_largest_id_plus_one(read):
    """The largest id may be in any split."""
    np.save("ids.npy", IDS)
    assert read(file="ids.npy", vocab_size=500).vocabulary == IdVocabulary(size=500)
    assert read(file="ids.npy", vocab_size=212).vocabulary == IdVocabulary(size=212)
    with pytest.raises(UserError, match=r"\b211\b.*\b211\b.*--data\.tokenizer\.vocab_size\b"):
        read(file="ids.npy", vocab_size=211)

    np.array([1, 2, 3]).astype("<u2").tofile("train.bin")
    np.array([9, 2]).astype("<u2").tofile("val.bin")
    assert read(train=("train.bin",), valid=("val.bin",)).vocabulary.size == 10


def test_a_tokenizer_next_to_the_ids_decodes_them(read, tmp_path):
    (tmp_path / "tokenizer.json").write_text(hf_tokenizers.byte_level())
    vocabulary = SubwordVocabulary(hf_tokenizers.byte_level())
    size = hf_tokenizers.SIZE

    np.save("ids.npy", vocabulary.encode(b"one two three " * 20))
    corpus = read(file="ids.npy", hf_file="tokenizer.json")
    assert corpus.vocabulary == vocabulary
    assert corpus.vocabulary.decode(corpus.train).startswith(b"one two three")

    np.save("ids.npy", np.full(100, size))
    with pytest.raises(UserError, match=rf"\b{size}\b.*\b{size}\b.*hf_file"):
        read(file="ids.npy", hf_file="tokenizer.json")


def test_ids_are_scored_in_the_vocabulary_of_a_run(read):
    words = WordVocabulary(("<eos>", "a", "<unk>"))

    np.save("ids.npy", IDS % 3)
    assert read(words, file="ids.npy").vocabulary == words

    np.save("ids.npy", IDS)
    with pytest.raises(UserError, match=r"\b3\b.*\b211\b"):
        read(words, file="ids.npy")


def test_the_digest_depends_on_order_and_dtype_of_the_ids_but_not_on_the_path(read):
    digests = set()
    for ids in (IDS, IDS[::-1], IDS.astype(np.uint16)):
        np.save("ids.npy", ids)
        digests.add(read(file="ids.npy").digest)
    assert len(digests) == 3

    np.save("moved.npy", IDS.astype(np.uint16))
    assert read(file="moved.npy").digest in digests


def test_ids_as_tokens():
    """Their text is the numbers, separated by spaces."""
    vocabulary = IdVocabulary(size=300)
    assert vocabulary.size == 300
    assert vocabulary.encode(b"5 17\n299").tolist() == [5, 17, 299]
    assert vocabulary.encode(b"").shape == (0,)
    assert vocabulary.decode([5, 17]) == b"5 17 "
    assert vocabulary.start.tolist() == [0]
    assert joined(vocabulary.blocks([in_blocks(b"5 17 299")])) == [5, 17, 299]
    assert vocabulary.names()[17] == b"17"
    assert loads(dumps(vocabulary), KINDS) == vocabulary


@pytest.mark.parametrize(
    ("text", "named"),
    [(b"5 the", "'the'"), (b"300", r"\b300\b"), (b"-1", "-1")],
    ids=["a word", "too large", "negative"],
)
def test_text_that_is_not_ids_is_named(text, named):
    with pytest.raises(UserError, match=named):
        IdVocabulary(size=300).encode(text)


# Errors


@pytest.mark.parametrize(
    ("array", "named"),
    [
        pytest.param(IDS.astype(float), "float64", id="floats"),
        pytest.param(IDS.reshape(10, 10), r"\(10, 10\)", id="two axes"),
        pytest.param(IDS > 5, "bool", id="booleans"),
        # NumPy's `issubdtype` takes durations for integers.
        pytest.param(IDS.astype("m8[s]"), "timedelta64", id="seconds"),
        pytest.param(IDS.astype("m8"), "timedelta64", id="durations without a unit"),
        pytest.param(IDS.astype("M8[s]"), "datetime64", id="dates"),
        pytest.param(np.array([{}, {}]), "Python objects", id="objects"),
        pytest.param(
            np.where(np.arange(100) == 60, -3, IDS), r"-3 at position 60\b", id="a negative id"
        ),
        # The size of the vocabulary, 2^31, would not be an int32.
        pytest.param(
            np.where(np.arange(100) == 61, 2**31 - 1, IDS),
            r"2147483647 at position 61\b",
            id="2^31 - 1",
        ),
        pytest.param(
            np.array([2**64 - 1, 1], np.uint64),
            r"18446744073709551615 at position 0\b",
            id="2^64 - 1",
        ),
    ],
)
def test_an_array_without_ids_is_an_error_that_names_its_type_shape_or_id(read, array, named):
    np.save("ids.npy", array)
    with pytest.raises(UserError, match=named):
        read(file="ids.npy")


def npy(header):
    """An .npy file with this header and no data."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        pytest.param("ids.bin", b"123", r"ids\.bin\b.*uint16", id="three bytes of uint16"),
        pytest.param("ids.bin", b"", r"ids\.bin", id="empty"),
        pytest.param("ids.txt", b"1 2 3", r"ids\.txt\b.*\.npy\b.*\.bin\b", id="text"),
        # Bytes of an even number can be read as uint16.
        pytest.param("ids.npz", b"PK\3\4", r"ids\.npz\b.*\.npy\b.*\.bin\b", id="npz"),
        pytest.param("a.mid", b"MThd", r"a\.mid\b.*MIDI\b.*\bdocs/music\.md\b", id="MIDI"),
        pytest.param("A.MIDI", b"MThd", r"A\.MIDI\b.*\bdocs/music\.md\b", id="MIDI in capitals"),
        pytest.param("ids.npy", b"1 2 3", r"ids\.npy\b", id="text called .npy"),
    ],
)
def test_a_file_without_ids_is_an_error_that_names_it_or_the_formats(
    read, tmp_path, name, content, named
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=named):
        read(file=name)


# NumPy parses a header as a Python expression, so corrupted ones raise exceptions of many types.
@pytest.mark.parametrize(
    "header",
    [b"", b"{'descr': '<u2', 'shape': (", b"(" * 200, b"{'descr': [" * 9, b"\\"],
    ids=["empty", "cut", "deep", "nested", "a backslash"],
)
def test_an_array_with_a_corrupted_header_is_named(read, tmp_path, header):
    (tmp_path / "ids.npy").write_bytes(npy(header))
    with pytest.raises(UserError, match=r"ids\.npy\b"):
        read(file="ids.npy")


# Frequent ids are small, as in a text, and the largest possible one is GPT-2's.
TEXT_IDS = np.minimum(np.random.default_rng(5).zipf(1.3, 3000), 50_256)
LETTERS = np.frombuffer(
    b"the quick brown fox jumps over the lazy dog, and the cat sat on the mat\n" * 40, np.uint8
)


def dump(ids, dtype):
    """Numbers as the bytes of a headerless file."""
    return np.asarray(ids).astype(dtype).tobytes()


# Only ids up to 4 are also ids of uint16.
LARGE_IDS = np.where(TEXT_IDS > 4, TEXT_IDS + 100_000, TEXT_IDS)
# The letters in random order, as ids that begin at 0: the newline is byte 10.
SMALL_IDS = np.random.default_rng(1).choice(LETTERS, 4000) - 10


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param(dump(TEXT_IDS, "<u4"), "'<u4'", id="<u4"),
        pytest.param(dump(TEXT_IDS, ">u4"), "'>u4'", id=">u4"),
        pytest.param(dump(TEXT_IDS, "<i8"), "'<u8'", id="<i8"),
        pytest.param(dump(LARGE_IDS, "<u4"), "'<u4'", id="<u4 large"),
        # Ids of one byte, which are multiples of 256 if they are read in the other byte order.
        pytest.param(dump(TEXT_IDS % 200, ">u2"), "'>u2'", id=">u2"),
        # Pairs of them would be taken for one id.
        pytest.param(SMALL_IDS.tobytes(), "'u1'", id="u1"),
        pytest.param(b"\x93NUMPY\x01\x00" + dump(IDS, "<u2"), r"\.npy\b", id="npy"),
        # llm.c's header begins with a magic number, a version, and how many ids follow.
        pytest.param(dump([20240520, 1, 100], "<i4") + dump(IDS, "<u2"), r"llm\.c", id="llm.c"),
        pytest.param(dump([20240801, 1, 100], "<i4") + dump(IDS, "<u4"), r"llm\.c", id="llm.c 32"),
        pytest.param(b"MMIDIDX\0\0" + bytes(9), "Megatron", id="Megatron"),
        pytest.param(b"\x1f\x8b\x08\0" + dump(IDS, "<u2"), "gzip", id="gzip"),
    ],
)
def test_plain_numbers_of_another_width_or_with_a_header_are_an_error(
    read, tmp_path, content, named
):
    """A .bin file must have ids of uint16 and nothing else, and the error says what it has."""
    (tmp_path / "ids.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"ids\.bin\b.*uint16\b.*{named}"):
        read(file="ids.bin")


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(TEXT_IDS, id="words"),
        pytest.param(TEXT_IDS % 65, id="few"),
        pytest.param(LETTERS, id="bytes"),
        pytest.param(np.random.default_rng(0).integers(2**16, size=3000), id="random"),
        pytest.param(np.zeros(3000, int), id="zeros"),
        # Both bytes of 257 are 1.
        pytest.param(np.full(3000, 257), id="one"),
        # Notes and lengths take turns. Upper halves of ids of 32 bits are at most 3.
        pytest.param(np.tile([40, 3, 41, 4], 800), id="turns"),
    ],
)
def test_plain_numbers_of_uint16_are_not_taken_for_another_type(read, ids):
    ids.astype("<u2").tofile("ids.bin")
    assert np.concatenate(splits(read(file="ids.bin"))).tolist() == ids.tolist()


def test_an_array_that_was_cut_off_is_named(read, tmp_path):
    np.save("ids.npy", IDS)
    content = (tmp_path / "ids.npy").read_bytes()
    (tmp_path / "ids.npy").write_bytes(content[:-9])
    with pytest.raises(UserError, match=r"ids\.npy\b"):
        read(file="ids.npy")


def test_a_split_of_two_files_is_an_error_that_names_the_flag(read):
    for name in ("1.bin", "2.bin", "v.bin"):
        IDS.astype("<u2").tofile(name)
    with pytest.raises(UserError, match=r"--data\.train\b.*\b2 files\b.*--train\b.*--test\b"):
        read(train=("[12].bin",), valid=("v.bin",))


def test_a_pattern_of_midi_files_is_an_error_that_names_the_page_about_music(read, tmp_path):
    for name in ("1.mid", "2.mid"):
        (tmp_path / name).write_bytes(b"MThd")
    with pytest.raises(UserError, match=r"1\.mid\b.*\bdocs/music\.md\b"):
        read(file="*.mid")
