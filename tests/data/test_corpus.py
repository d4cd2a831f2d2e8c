"""Tests from a config to three splits of ids: vocabularies made from a text, and the stores that
keep ids.
"""

import collections
import functools
import hashlib
import io
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import order
from support.encoded_text import in_blocks, joined, own_text, text_of, words_of
from support.miniature import arrange
from txl_jax.config import CorpusName, LineMark, Newlines, Tokenizer, TokenizerConfig, config_tree
from txl_jax.data import corpus, token_store
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import make_vocabulary, read_corpus
from txl_jax.data.published import default_data
from txl_jax.data.text import SPLITS, File, Text
from txl_jax.data.token_store import find_store, open_store
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def texts(corpus):
    """The three splits as bytes."""
    return [corpus.vocabulary.decode(ids) for ids in (corpus.train, corpus.valid, corpus.test)]


def stores(cache_dir):
    """Names of the stores in a cache."""
    return sorted(path.name for path in Path(cache_dir, "tokens").glob("[!.]*"))


@pytest.fixture
def read(tmp_path):
    """Reads a corpus whose published files do not exist, with a cache of this test."""

    def read_with_cache(config, **kwargs):
        return read_corpus(config, "nowhere", str(tmp_path / "cache"), **kwargs)

    return read_with_cache


@pytest.fixture
def poem(tmp_path):
    """Lists of files per split of an own text. Only its training text is counted."""
    lines = {
        "train": "The cat sat\nthe dog sat\n\nThe end",
        "valid": "a dog sat\n",
        "test": "THE END\nthe cat",
    }
    for split, text in lines.items():
        (tmp_path / split).write_text(text)
    return {split: (str(tmp_path / split),) for split in lines}


def test_a_text_is_encoded_once(poem, tmp_path, read, monkeypatch):
    """Also if its files have moved: the content counts, not the paths."""
    first = read(own_text(kind=Tokenizer.WORD, **poem))

    monkeypatch.setattr(corpus, "make_vocabulary", None)  # Counting again would fail.
    moved = tmp_path / "moved"
    moved.write_bytes((tmp_path / "train").read_bytes())
    again = read(own_text(kind=Tokenizer.WORD, **poem | {"train": (str(moved),)}))

    assert texts(again) == texts(first)
    assert again.vocabulary == first.vocabulary
    assert again.description == first.description
    assert again.digest == first.digest
    assert len(stores(tmp_path / "cache")) == 1


# Names of directories on users' disks. If a name changes, everyone's texts are encoded again (and
# published corpora prepared again), and the old copies stay behind unread. Change a name here only
# together with `token_store.VERSION` or `PublishedText.VERSION`, because the same text then has
# other ids or other records.
STORES = {
    "byte": "text-1b9cc8612cef1bfa",
    "char": "text-9b77f1dac69f94c2",
    "word": "text-c86e6f84fbf9ada3",
    "ptb": "ptb-83afbafa3f30eb47",
}
PENN_TREEBANK_DIGEST = "9cea65498fdb6345a4cf7306b661a9c5863765a365ac91f88de7fac76ccfd8bd"


@pytest.mark.parametrize("is_in_cache", [True, False], ids=["cache", "data"])
def test_stores_have_the_names_of_earlier_runs_in_the_cache_or_the_data(
    is_in_cache, poem, tmp_path, miniatures
):
    """Without a cache directory, the stores are in the data directory."""
    arrange(tmp_path, CorpusName.PTB)
    data_dir = tmp_path / "data"
    cache_dir = str(tmp_path / "cache") if is_in_cache else None
    expected_cache = tmp_path / "cache" if is_in_cache else data_dir / "prepared"

    for kind in ("byte", "char", "word"):
        read_corpus(own_text(kind=kind, **poem), str(data_dir), cache_dir)
    penn_treebank = read_corpus(default_data(CorpusName.PTB), str(data_dir), cache_dir)

    assert stores(expected_cache) == sorted(STORES.values())
    assert (expected_cache / "tfds" / "txl_ptb" / "1.0.0").is_dir()
    assert penn_treebank.digest == PENN_TREEBANK_DIGEST


def test_what_changes_the_tokens_is_another_store(poem, tmp_path, read):
    """Settings of the tokenizer, the content of its vocabulary file, and the text."""
    words = tmp_path / "vocab.txt"
    words.write_text("the\ncat\n")
    by_file = {"kind": Tokenizer.WORD, "vocab_file": str(words)}
    changes = [
        {},
        {"newlines": Newlines.DROP},
        {"kind": Tokenizer.CHAR, "min_count": 1},
        {"kind": Tokenizer.CHAR, "min_count": 2},
        {"kind": Tokenizer.WORD, "line_mark": LineMark.EOS},
        {"kind": Tokenizer.WORD, "line_mark": LineMark.S},
        by_file,
    ]
    for count, fields in enumerate(changes, start=1):
        read(own_text(**poem, **fields))
        assert len(stores(tmp_path / "cache")) == count, fields

    words.write_text("the\nsat\n")
    corpus = read(own_text(**poem, **by_file))
    assert corpus.vocabulary.words == ("<eos>", "the", "sat", "<unk>")

    (tmp_path / "train").write_text("another text\n")
    read(own_text(**poem))
    assert len(stores(tmp_path / "cache")) == len(changes) + 2


def content(folder):
    """The bytes of each file, by its path below the directory."""
    files = {}
    for path in Path(folder).rglob("*"):
        if path.is_file():
            files[path.relative_to(folder)] = path.read_bytes()
    return files


def reseal(store):
    """Writes the sizes and digests of a store's files again, as somebody who changed them would."""
    path = store / "store.json"
    summary = json.loads(path.read_text())
    for file in store.iterdir():
        if file != path:
            summary["bytes"][file.name] = file.stat().st_size
            summary["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    path.write_text(json.dumps(summary))


def as_npy(array):
    """An array as the bytes of an .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


class StrangersCache:
    """A cache that somebody else's training wrote, and reads of the same text with it."""

    def __init__(self, tmp_path, poem):
        self.config = own_text(kind=Tokenizer.WORD, **poem)
        self.path = str(tmp_path / "theirs")
        self.trained = read_corpus(self.config, "nowhere", self.path)

    def read(self, cache_dir, config=None):
        """Reads a text (by default theirs) in their vocabulary, with a cache of the user's."""
        return read_corpus(
            config or self.config,
            "nowhere",
            str(cache_dir),
            vocabulary=self.trained.vocabulary,
            read_only_cache=self.path,
        )


@pytest.fixture
def strangers(tmp_path, poem):
    return StrangersCache(tmp_path, poem)


def test_a_strangers_cache_is_only_read_and_its_ids_are_not_copied(strangers, tmp_path):
    before = content(strangers.path)
    mine = tmp_path / "mine"

    used = strangers.read(mine)
    assert used.train.filename == strangers.trained.train.filename
    assert texts(used) == texts(strangers.trained)
    assert used.cache_dir == str(mine)
    assert not mine.exists()

    # Another text is encoded in the user's own cache.
    (tmp_path / "other").write_text("the cow sat\n" * 40)
    strangers.read(mine, own_text(kind=Tokenizer.WORD, file=str(tmp_path / "other")))
    assert len(stores(mine)) == 1
    assert content(strangers.path) == before


@pytest.mark.parametrize("kind", ["corrupted", "objects", "floats"])
def test_a_strangers_bad_ids_are_made_again_in_the_users_cache(kind, strangers, tmp_path):
    """Corrupted ids, and arrays that are not ids although their digests fit."""
    expected = texts(strangers.trained)
    [name] = stores(strangers.path)
    store = Path(strangers.path, "tokens", name)
    path = store / "train.npy"
    match kind:
        case "corrupted":
            data = bytes(byte ^ 1 for byte in path.read_bytes())
            path.write_bytes(data)
        case "objects":
            data = as_npy(np.array([{}], object))
            path.write_bytes(data)
            reseal(store)
        case "floats":
            data = as_npy(np.ones((2, 2)))
            path.write_bytes(data)
            reseal(store)

    mine = tmp_path / "mine"
    assert texts(strangers.read(mine)) == expected
    assert len(stores(mine)) == 1
    assert path.read_bytes() == data, "the stranger's file is not repaired"


def test_records_of_a_stranger_are_used_only_with_their_own_ids(tmp_path, miniatures):
    """Otherwise their content would be encoded as the published corpus, where the user's next
    training finds it.
    """
    arrange(tmp_path, CorpusName.PTB)
    config = default_data(CorpusName.PTB)
    data = str(tmp_path / "data")
    theirs = tmp_path / "theirs"
    mine = tmp_path / "mine"
    trained = read_corpus(config, data, str(theirs))
    options = {"vocabulary": trained.vocabulary, "read_only_cache": str(theirs)}

    used = read_corpus(config, "nowhere", str(mine), **options)
    assert used.train.filename == trained.train.filename
    assert not mine.exists()

    # Without the ids, the corpus is prepared from the user's own files.
    shutil.rmtree(theirs / "tokens")
    prepared = read_corpus(config, data, str(mine), **options)
    assert texts(prepared) == texts(trained)
    assert (mine / "tfds").is_dir()
    assert not (theirs / "tokens").exists()


def test_a_trained_vocabulary_reads_another_text(poem, tmp_path, read):
    run_text = own_text(kind=Tokenizer.WORD, **poem)
    trained = read(run_text)
    again = read(run_text, vocabulary=trained.vocabulary)
    assert again.train.filename == trained.train.filename, (
        "the text of the run needs no second store"
    )

    (tmp_path / "other").write_text("the cow sat\n" * 40)
    other_text = own_text(kind=Tokenizer.WORD, file=str(tmp_path / "other"))
    in_own_words = read(other_text)
    other = read(other_text, vocabulary=trained.vocabulary)
    assert other.vocabulary == trained.vocabulary
    expected = b"the <unk> sat \n"
    assert texts(other) == [expected * 36, expected * 2, expected * 2]
    assert texts(in_own_words)[2] == b"the cow sat \n" * 2, "its own store is another"
    assert len(stores(tmp_path / "cache")) == 3
    repeated = read(other_text, vocabulary=trained.vocabulary)
    assert repeated.train.filename == other.train.filename

    third = read(other_text, vocabulary=WordVocabulary(("<eos>", "cow", "<unk>")))
    assert texts(third)[2] == b"<unk> cow <unk> \n" * 2
    assert len(stores(tmp_path / "cache")) == 4


# Vocabularies of a text


def ranked(tokens, unknown, min_count, mark=None):
    """The tokens of a vocabulary by count, and for equal counts by first occurrence.

    Tokens rarer than `min_count` count as the unknown token. Their counts also include the mark's
    if it is rare. The mark itself is left out.
    """
    counts = collections.Counter(tokens)
    n_unknown = 0
    places = {}
    for place, (token, count) in enumerate(counts.items()):
        if count < min_count or token == unknown:
            n_unknown += count
        if count >= min_count:
            places[token] = place
    # Without an occurrence of its own, the unknown token comes after all others of its count.
    places.setdefault(unknown, len(counts))
    counts[unknown] = n_unknown

    order = sorted(places, key=lambda token: (-counts[token], places[token]))
    return [token for token in order if token != mark]


@pytest.mark.parametrize(
    ("newlines", "symbols"), [(Newlines.KEEP, "\nabcxyé"), (Newlines.DROP, "abcxyé")]
)
def test_own_text_has_all_bytes_and_a_closed_alphabet_is_counted_over_all_splits(newlines, symbols):
    tokenizer = TokenizerConfig(newlines=newlines)
    files = (["cab\n", "é"], "bax", "y\n")

    vocabulary = make_vocabulary(tokenizer, text_of(*files))
    assert vocabulary == ByteVocabulary.all_bytes(newlines)

    closed = make_vocabulary(tokenizer, text_of(*files, closed_alphabet=True))
    assert closed == ByteVocabulary(bytes(sorted(symbols.encode())), newlines)


WORDS_AND_ENDS = ["a ", "b ", "B\n", "c\r\n", "\n", "日本\t", "<unk> ", "<eos> ", "<S> "]


@given(
    texts=st.lists(st.lists(st.sampled_from(WORDS_AND_ENDS)).map("".join)),
    line_mark=st.sampled_from(LineMark),
    min_count=st.integers(1, 3),
    block=st.integers(1, 9),
)
# The mark is rare in the text.
@example(texts=["a a b B\n<eos> "], line_mark=LineMark.EOS, min_count=2, block=1)
@settings(max_examples=100)
def test_words_are_ranked_by_count_and_first_occurrence_after_the_mark(
    texts, line_mark, min_count, block
):
    mark = {LineMark.EOS: "<eos>", LineMark.NONE: None}.get(line_mark, "<S>")
    words = []
    for text in texts:
        words += text.split()
    expected = ranked(words, "<unk>", min_count, mark)
    if mark is not None:
        expected = [mark, *expected]

    tokenizer = TokenizerConfig(kind=Tokenizer.WORD, line_mark=line_mark, min_count=min_count)
    vocabulary = make_vocabulary(tokenizer, text_of(texts, block=block))
    assert list(vocabulary.words) == expected


@given(
    texts=st.lists(st.text("abcA \n\r\\é日😀\N{LINE SEPARATOR}" + UNKNOWN)),
    min_count=st.integers(1, 3),
)
@settings(max_examples=100)
def test_characters_are_ranked_by_count_and_first_occurrence(texts, min_count):
    """Only the training text is counted."""
    tokenizer = TokenizerConfig(kind=Tokenizer.CHAR, min_count=min_count)
    vocabulary = make_vocabulary(tokenizer, text_of(texts, "xxx", "yyyy"))
    assert vocabulary.characters == "".join(ranked("".join(texts), UNKNOWN, min_count))


def vocabulary_of_file(path, content, line_mark=LineMark.EOS):
    """The vocabulary whose words are a file with this content."""
    path.write_bytes(content)
    tokenizer = TokenizerConfig(kind=Tokenizer.WORD, vocab_file=str(path), line_mark=line_mark)
    return make_vocabulary(tokenizer, text_of("never counted"))


@pytest.mark.parametrize(
    ("content", "line_mark", "expected"),
    [
        pytest.param("the\ncat", LineMark.NONE, ["the", "cat", "<unk>"], id="no mark"),
        pytest.param(
            "the\n<S>\n<unk>\ncat\n",
            LineMark.S,
            ["the", "<S>", "<unk>", "cat"],
            id="mark and unknown in the file",
        ),
        pytest.param("the\n<unk>\n", LineMark.DOUBLE_S, ["<S>", "the", "<unk>"], id="mark added"),
        pytest.param(
            "the 12\r\ncat\t7\r\n\r\n  日本  3\r\n",
            LineMark.EOS,
            ["<eos>", "the", "cat", "日本", "<unk>"],
            id="counts and white space",
        ),
        pytest.param(
            "the\ncat 1\nthe 3\n", LineMark.EOS, ["<eos>", "the", "cat", "<unk>"], id="a word twice"
        ),
        pytest.param(
            "the\n<UNK>\n", LineMark.EOS, ["<eos>", "the", "<UNK>"], id="unknown in capitals"
        ),
    ],
)
def test_words_of_a_file_keep_their_order(content, line_mark, expected, tmp_path):
    vocabulary = vocabulary_of_file(tmp_path / "vocab.txt", content.encode(), line_mark)

    assert list(vocabulary.words) == expected
    unknown = "<UNK>" if "<UNK>" in expected else "<unk>"
    assert vocabulary.encode(b"never-seen").tolist() == [expected.index(unknown)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("words", [{"the": 0, "cat": 1}, ["the", "cat"]], ids=["object", "list"])
def test_json_is_not_a_list_of_words(tmp_path, words, indent):
    content = json.dumps(words, indent=indent).encode()
    with pytest.raises(UserError, match=r"vocab\.txt, which is JSON.*hf_file"):
        vocabulary_of_file(tmp_path / "vocab.txt", content)


@pytest.mark.parametrize("content", [b"[PAD]\nthe\n", b"{\nthe\n}\n"])
def test_words_that_only_begin_like_json_are_read(tmp_path, content):
    assert "the" in vocabulary_of_file(tmp_path / "vocab.txt", content).words


def test_the_share_of_unknown_tokens(tmp_path, read):
    """Over all splits, with marks: two of nine tokens."""
    (tmp_path / "words").write_text("the\ncat\n")
    lists = {}
    for split, text in (("train", "the dog\n"), ("valid", "a cat\n"), ("test", "the cat\n")):
        (tmp_path / split).write_text(text)
        lists[split] = (str(tmp_path / split),)

    words = read(own_text(kind=Tokenizer.WORD, vocab_file=str(tmp_path / "words"), **lists))
    assert words.unknown_share == 2 / 9
    assert read(own_text(kind=Tokenizer.BYTE, **lists)).unknown_share == 0


@pytest.mark.parametrize(
    "content", [b"", b" \r\n\t\n", b"the\n\xff"], ids=["empty", "white space", "not UTF-8"]
)
def test_a_file_without_words_is_named(content, tmp_path):
    with pytest.raises(UserError, match=rf"{tmp_path}/vocab\.txt\b"):
        vocabulary_of_file(tmp_path / "vocab.txt", content)


@pytest.mark.parametrize("name", ["absent", "."], ids=["absent", "directory"])
@pytest.mark.parametrize(
    ("kind", "field"), [(Tokenizer.WORD, "vocab_file"), (Tokenizer.SUBWORD, "hf_file")]
)
def test_a_vocabulary_file_that_cannot_be_read_is_named_with_its_flag(kind, field, name, tmp_path):
    path = tmp_path / name
    tokenizer = TokenizerConfig(kind=kind, **{field: str(path)})
    with pytest.raises(UserError, match=rf"--data\.tokenizer\.{field}\b.*{path}\b"):
        make_vocabulary(tokenizer, text_of("a"))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_without_a_target_is_named(split, poem, tmp_path, read):
    (tmp_path / split).write_bytes(b"x")
    with pytest.raises(UserError, match=rf"\b{split} split\b.*\b2\b.*\b1\b"):
        read(own_text(**poem))


# Stores of ids: contents, reuse, memory, and what errors and corruption leave


SETTINGS = {"tokenizer": "word", "min_count": 1}
make_words = functools.partial(words_of, LineMark.EOS)


def never(*args, **kwargs):
    raise AssertionError("the store is there already")


def names(folder):
    """Names of the visible files and directories in a directory."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def assert_same(tokens, expected):
    """Asserts that two stores have the same vocabulary, ids and sentences."""
    assert tokens.vocabulary == expected.vocabulary
    for split in SPLITS:
        np.testing.assert_array_equal(
            tokens.splits[split], expected.splits[split], err_msg=split, strict=True
        )
    np.testing.assert_array_equal(
        tokens.sentences, expected.sentences, err_msg="sentences", strict=True
    )


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32)]
)
def test_ids_are_of_the_smallest_type(size, dtype, tmp_path):
    # From 2 on, the words are their own ids.
    vocabulary = WordVocabulary(("<eos>", "<unk>", *map(str, range(2, size))))
    text = text_of(b"%d 3" % (size - 1))
    tokens = open_store(text, SETTINGS, lambda: vocabulary, folder=tmp_path)
    assert tokens.splits["train"].dtype == dtype
    assert tokens.splits["train"].tolist() == [size - 1, 3, 0]


# Lines of words known and unknown, some empty.
LINES = st.lists(
    st.lists(st.sampled_from(["the", "cat", "dog"]), max_size=3), min_size=1, max_size=6
)


@pytest.mark.parametrize("line_mark", [mark for mark in LineMark if mark is not LineMark.NONE])
@given(
    files=st.lists(LINES, min_size=1, max_size=3), block=st.integers(1, 9), open_end=st.booleans()
)
@settings(max_examples=50)
def test_sentences_are_where_lines_begin(line_mark, files, block, open_end, tmp_path_factory):
    """Each line in plain Python: its length, its marks, and the mark before the first."""
    # A text without a target would be an error, so the first line has two words.
    files = [[["the", "cat"], *files[0]], *files[1:]]
    n_marks = 2 if line_mark is LineMark.DOUBLE_S else 1
    contents = []
    expected = [1 if line_mark is LineMark.S else 0]
    for lines in files:
        content = ""
        for line in lines:
            content += " ".join(line) + "\n"
            expected.append(expected[-1] + len(line) + n_marks)
        contents.append(content.encode())
    # An empty line that is open would not be a line.
    if open_end and files[-1][-1]:
        contents[-1] = contents[-1].removesuffix(b"\n")

    folder = tmp_path_factory.mktemp("store")
    vocabulary = words_of(line_mark)
    with pytest.MonkeyPatch.context() as patch:
        # Ids are searched for marks in blocks. Texts this short would be one block.
        patch.setattr(token_store, "_BLOCK_IDS", 4)
        tokens = open_store(
            text_of(contents, block=block), SETTINGS, lambda: vocabulary, folder=folder
        )
    assert tokens.sentences.tolist() == expected
    assert expected[-1] == len(tokens.splits["train"])
    assert tokens.splits["train"].tolist() == joined(vocabulary.blocks(map(in_blocks, contents)))


def test_the_same_text_and_settings_are_not_encoded_again(tmp_path, monkeypatch):
    assert find_store(text_of(), SETTINGS, tmp_path) is None
    path = token_store._path(text_of(), SETTINGS, tmp_path)
    path.with_name(f"{path.name}.123").mkdir()  # Left by a killed process.
    made = open_store(text_of(), SETTINGS, make_words, folder=tmp_path)

    # The digest and the settings, in any order, identify the store. A directory that may only be
    # read is enough.
    same_text = text_of(b"never read", digest="d")
    same_settings = dict(reversed(SETTINGS.items()))
    monkeypatch.setattr(os, "mkdir", never)
    assert_same(open_store(same_text, same_settings, never, folder=tmp_path), made)
    assert_same(find_store(same_text, SETTINGS, tmp_path), made)
    assert names(tmp_path) == [path.name]

    monkeypatch.setattr(token_store, "VERSION", token_store.VERSION + 1)
    assert find_store(text_of(), SETTINGS, tmp_path) is None


def test_the_ids_of_a_store_last_before_its_name(tmp_path, monkeypatch):
    """A power cut could otherwise leave a store with holes under its final name."""
    store = token_store._path(text_of(), SETTINGS, tmp_path).name
    events = order.record(monkeypatch, tmp_path)

    open_store(text_of(), SETTINGS, make_words, folder=tmp_path)

    synced = {Path(name).name for what, name in events if what == "sync"}
    assert synced >= {"train.npy", "valid.npy", "test.npy", "sentences.npy"}
    renamed = events.index(("rename", store))
    assert all(what != "sync" for what, _ in events[renamed:])


def flip_a_bit(path):
    """Changes a bit of the last id, of a word of the vocabulary, or of a name in the summary."""
    data = bytearray(path.read_bytes())
    places = {"store.json": data.rfind(b"sentences"), "vocabulary.txt": data.rfind(b"sat")}
    data[places.get(path.name, -1)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["train.npy", "test.npy", "sentences.npy", "vocabulary.txt", "store.json"]
)
@pytest.mark.parametrize("damage", ["cut", "gone", "longer", "flipped"])
def test_a_corrupted_store_is_made_again(name, damage, tmp_path, capsys):
    expected = open_store(text_of(), SETTINGS, make_words, folder=tmp_path / "intact")
    tokens_dir = tmp_path / "tokens"
    open_store(text_of(), SETTINGS, make_words, folder=tokens_dir)
    [store_name] = names(tokens_dir)
    path = tokens_dir / store_name / name
    match damage:
        case "cut":
            os.truncate(path, path.stat().st_size - 2)
        case "gone":
            path.unlink()
        case "longer":
            path.write_bytes(path.read_bytes() + b"more")
        case "flipped":
            flip_a_bit(path)

    assert find_store(text_of(), SETTINGS, tokens_dir) is None
    assert_same(open_store(text_of(), SETTINGS, make_words, folder=tokens_dir), expected)
    assert names(tokens_dir) == [store_name]
    assert names(tokens_dir / store_name) == names(tmp_path / "intact" / store_name)
    assert str(tokens_dir / store_name) in capsys.readouterr().out


# The digest of some tokens, by the version that made them.
GOLDEN = {1: "d70ace50e92a79a4"}


def test_ids_are_those_of_this_version(tmp_path):
    """A store of old ids would still be opened if ids changed under the old version."""
    content = "The cat sat\n\nthe cät,\tthe 😀\r\n The end".encode()
    text = text_of(content, content, content)
    tokenizers = [TokenizerConfig(), TokenizerConfig(kind=Tokenizer.CHAR)]
    for line_mark in LineMark:
        tokenizers.append(TokenizerConfig(kind=Tokenizer.WORD, line_mark=line_mark, min_count=2))

    digest = hashlib.sha256()
    for tokenizer in tokenizers:
        make = functools.partial(make_vocabulary, tokenizer, text)
        tokens = open_store(text, config_tree.to_dict(tokenizer), make, folder=tmp_path)
        ids = [split.tolist() for split in tokens.splits.values()]
        ids.append(np.array(tokens.sentences).tolist())
        digest.update(tokens.vocabulary.encode())
        digest.update(str(ids).encode())

    assert digest.hexdigest()[:16] == GOLDEN[token_store.VERSION], (
        "the same text gives other tokens than before. If that is meant, raise "
        "token_store.VERSION and add its digest"
    )


@pytest.mark.full
def test_encoding_takes_the_memory_of_a_block(tmp_path):
    block = b"the cat sat\n" * 500
    n_blocks = 1000  # 6 MB, of 2 million ids: three words and a mark in each line.

    def blocks():
        return (bytes(bytearray(block)) for _ in range(n_blocks))

    repeated = File("large.txt", len(block) * n_blocks, blocks)
    large = Text("own text", "made up", "d", text_of().splits | {"train": (repeated,)})
    # Fills the tables of the vocabulary.
    open_store(text_of(), {"first": True}, make_words, folder=tmp_path)

    tracemalloc.start()
    try:
        tokens = open_store(large, SETTINGS, make_words, folder=tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(tokens.splits["train"]) == 2_000_000
    assert peak < 1.5e6, "less than the ids of a byte each, and much less than the text"


@pytest.mark.parametrize(
    "error", [ValueError("some.txt is not UTF-8"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_text_that_cannot_be_read_leaves_no_store(error, tmp_path):
    def blocks():
        yield b"the cat\n"
        raise error

    splits = text_of().splits | {"valid": (File("some.txt", 99, blocks),)}
    broken = Text("own text", "made up", "d", splits)
    with pytest.raises(type(error)) as caught:
        open_store(broken, SETTINGS, make_words, folder=tmp_path)
    assert caught.value is error, "nothing else is reported"
    assert names(tmp_path) == []

    # The same text without the error is encoded: two words and one word, each with a mark.
    tokens = open_store(text_of(), SETTINGS, make_words, folder=tmp_path)
    assert len(tokens.splits["train"]) == 5
