"""Tests from a config to three splits of ids: vocabularies that a text gives rise to, shared stores, real text."""

import collections
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.encoded_text import text_of
from support.miniature import arrange
from support.own_text import own_text
from txl_jax.config import CorpusName, LineMark, Newlines, Tokenizer, TokenizerConfig
from txl_jax.data import corpus
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import make_vocabulary, read_corpus
from txl_jax.data.published import default_data
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def splits(corpus):
    return [corpus.train, corpus.valid, corpus.test]


def texts(corpus):
    return [corpus.vocabulary.decode(ids) for ids in splits(corpus)]


def stores(cache_dir):
    return sorted(path.name for path in Path(cache_dir, "tokens").glob("[!.]*"))


@pytest.fixture
def read(tmp_path):
    """Reads a corpus whose published files are nowhere; the cache is in a folder of this test."""
    return lambda config, **kwargs: read_corpus(config, "nowhere", str(tmp_path / "cache"), **kwargs)


@pytest.fixture
def poem(tmp_path):
    """Own text of words, lists of files per split; only the training text counts."""
    lines = {"train": "The cat sat\nthe dog sat\n\nThe end", "valid": "a dog sat\n", "test": "THE END\nthe cat"}
    for split, text in lines.items():
        (tmp_path / split).write_text(text)
    return {split: (str(tmp_path / split),) for split in lines}


# Own text


# Stores


def test_a_text_is_encoded_once(poem, tmp_path, read, monkeypatch):
    config = own_text(kind=Tokenizer.WORD, **poem)
    first = read(config)
    monkeypatch.setattr(corpus, "make_vocabulary", None)  # Nothing is counted any more,
    moved = tmp_path / "moved"
    moved.write_bytes((tmp_path / "train").read_bytes())
    again = read(own_text(kind=Tokenizer.WORD, **poem | {"train": (str(moved),)}))  # wherever the files are.
    assert texts(again) == texts(first) and again.vocabulary == first.vocabulary
    assert (again.description, again.digest) == (first.description, first.digest)
    assert len(stores(tmp_path / "cache")) == 1


# Names of folders on users' disks. A name that changes means that everyone's texts are encoded again (and published
# corpora prepared again), and that the old copies stay behind unread. Change a name here only together with
# `token_store.VERSION` or `PublishedText.VERSION`, because the same text now gives other ids or other records.
OWN_TEXT = {"byte": "text-4747fc6c9b5d0b33", "char": "text-696bb075fb89086c", "word": "text-0174f7f569583f44"}
PENN_TREEBANK = ["ptb-e45c1446c44263b6", "tfds/txl_ptb/1.0.0"]
PENN_TREEBANK_DIGEST = "9cea65498fdb6345a4cf7306b661a9c5863765a365ac91f88de7fac76ccfd8bd"


@pytest.mark.parametrize("kind", OWN_TEXT)
def test_the_folder_of_own_text_is_that_of_earlier_runs_in_the_cache_or_the_data(kind, poem, tmp_path):
    for cache in (str(tmp_path / "cache"), None):
        read_corpus(own_text(kind=kind, **poem), str(tmp_path / "data"), cache)
    assert stores(tmp_path / "cache") == stores(tmp_path / "data" / "prepared") == [OWN_TEXT[kind]]


def test_the_folders_of_a_published_corpus_are_those_of_earlier_runs(tmp_path, miniatures):
    arrange(tmp_path, CorpusName.PTB)
    cache = tmp_path / "cache"
    corpus = read_corpus(default_data(CorpusName.PTB), str(tmp_path / "data"), str(cache))
    (records,) = cache.glob("tfds/txl_*/*/")
    assert [*stores(cache), str(records.relative_to(cache))] == PENN_TREEBANK
    assert corpus.digest == PENN_TREEBANK_DIGEST


def test_what_changes_the_tokens_is_another_store(poem, tmp_path, read):
    (tmp_path / "vocab.txt").write_text("the\ncat\n")
    changes = [
        {},
        {"newlines": Newlines.DROP},
        *({"kind": Tokenizer.CHAR, "min_count": count} for count in (1, 2)),
        *({"kind": Tokenizer.WORD, "line_mark": mark} for mark in (LineMark.EOS, LineMark.S)),
        {"kind": Tokenizer.WORD, "vocab_file": str(tmp_path / "vocab.txt")},
    ]
    for count, fields in enumerate(changes, start=1):
        read(own_text(**poem, **fields))
        assert len(stores(tmp_path / "cache")) == count, fields
    (tmp_path / "vocab.txt").write_text("the\nsat\n")  # The file is known by its content.
    corpus = read(own_text(**poem, **changes[-1]))
    assert corpus.vocabulary.words == ("<eos>", "the", "sat", "<unk>")
    (tmp_path / "train").write_text("another text\n")
    read(own_text(**poem))
    assert len(stores(tmp_path / "cache")) == len(changes) + 2


# A given vocabulary, as of a run that scores


def test_a_given_vocabulary_reads_another_text(poem, tmp_path, read):
    trained = read(own_text(kind=Tokenizer.WORD, **poem))
    again = read(own_text(kind=Tokenizer.WORD, **poem), vocabulary=trained.vocabulary)
    assert again.train.filename == trained.train.filename, "the text of the run needs no second store"
    (tmp_path / "other").write_text("the cow sat\n" * 40)
    config = own_text(kind=Tokenizer.WORD, file=str(tmp_path / "other"))
    before = read(config)
    other = read(config, vocabulary=trained.vocabulary)
    assert other.vocabulary == trained.vocabulary
    assert texts(other) == [b"the <unk> sat \n" * lines for lines in (36, 2, 2)]
    assert texts(before)[2] == b"the cow sat \n" * 2, "its own store is another"
    assert len(stores(tmp_path / "cache")) == 3
    assert read(config, vocabulary=trained.vocabulary).train.filename == other.train.filename
    third = read(config, vocabulary=WordVocabulary(("<eos>", "cow", "<unk>")))
    assert texts(third)[2] == b"<unk> cow <unk> \n" * 2 and len(stores(tmp_path / "cache")) == 4


@pytest.mark.full
def test_penn_treebank_as_own_text(data_dir, read):
    files = {split: (str(data_dir / "ptb" / f"ptb.{split}.txt"),) for split in ("train", "valid", "test")}
    corpus = read(own_text(kind=Tokenizer.WORD, **files))
    assert list(map(len, splits(corpus))) == [929_589, 73_760, 82_430]
    assert corpus.vocabulary.size == 10_000 and corpus.vocabulary.words[:3] == ("<eos>", "the", "<unk>")
    for split, ids in zip(files, splits(corpus), strict=True):
        assert corpus.vocabulary.decode(ids).split() == Path(*files[split]).read_bytes().split()
    assert len(corpus.sentences) == 42_068 + 1


# Vocabularies of a text


def words(text, **fields):
    return list(make_vocabulary(TokenizerConfig(kind=Tokenizer.WORD, **fields), text).words)


def characters(text, **fields):
    return make_vocabulary(TokenizerConfig(kind=Tokenizer.CHAR, **fields), text).characters


@pytest.mark.parametrize(("newlines", "symbols"), [(Newlines.KEEP, "\nabcxyé"), (Newlines.DROP, "abcxyé")])
def test_own_text_has_all_bytes_and_a_closed_alphabet_is_counted_over_all_splits(newlines, symbols):
    tokenizer, files = TokenizerConfig(newlines=newlines), (["cab\n", "é"], "bax", "y\n")
    assert make_vocabulary(tokenizer, text_of(*files)) == ByteVocabulary.all_bytes(newlines)
    closed = make_vocabulary(tokenizer, text_of(*files, closed_alphabet=True))
    assert closed == ByteVocabulary(bytes(sorted(symbols.encode())), newlines)


@given(
    texts=st.lists(st.lists(st.sampled_from(["a ", "b ", "B\n", "c\r\n", "\n", "日本\t", "<unk> "])).map("".join)),
    line_mark=st.sampled_from(LineMark),
    min_count=st.integers(1, 3),
    block=st.integers(1, 9),
)
@settings(max_examples=100)
def test_words_are_ranked_by_count_and_first_occurrence(texts, line_mark, min_count, block):
    found = [word for text in texts for word in text.split()]
    counts = collections.Counter(found)
    kept = [word for word in counts if counts[word] >= min_count]
    rare = sum(counts[word] for word in counts if word not in kept)
    ranks = {word: (-counts[word], place) for place, word in enumerate(kept)}
    ranks["<unk>"] = (-(counts["<unk>"] if "<unk>" in kept else 0) - rare, ranks.get("<unk>", (0, 99))[1])
    mark = {LineMark.EOS: ["<eos>"], LineMark.NONE: []}.get(line_mark, ["<S>"])
    got = words(text_of(texts, block=block), line_mark=line_mark, min_count=min_count)
    assert got == mark + sorted(ranks, key=ranks.get)


def test_an_unknown_word_and_a_mark_in_the_text_are_those_tokens():
    assert words(text_of("a <unk> b <unk>\n")) == ["<eos>", "<unk>", "a", "b"]
    assert words(text_of("a <eos> b <eos>")) == ["<eos>", "a", "b", "<unk>"]
    assert words(text_of("a <S> b <eos>"), line_mark=LineMark.S) == ["<S>", "a", "b", "<eos>", "<unk>"]


@given(texts=st.lists(st.text("abcA \n\r\\é日😀\N{LINE SEPARATOR}" + UNKNOWN)))
@settings(max_examples=100)
def test_characters_are_ranked_by_count_and_first_occurrence(texts):
    text = "".join(texts)
    ranked = sorted(dict.fromkeys(text), key=lambda character: -text.count(character))
    expected = ranked if UNKNOWN in ranked else [*ranked, UNKNOWN]
    assert characters(text_of(texts)) == "".join(expected)


def test_rarer_characters_count_for_the_unknown():
    assert characters(text_of("aaabbcdé", "xxx", "yyyy"), min_count=2) == f"a{UNKNOWN}b"
    assert characters(text_of("a\n"), min_count=1) == f"a\n{UNKNOWN}", "no newline is added where lines are not marked"
    assert characters(text_of("ab")) == f"ab{UNKNOWN}"


def given_words(path, content, line_mark=LineMark.EOS):
    path.write_bytes(content)
    tokenizer = TokenizerConfig(kind=Tokenizer.WORD, vocab_file=str(path), line_mark=line_mark)
    return make_vocabulary(tokenizer, text_of("never counted"))


@pytest.mark.parametrize(
    ("content", "line_mark", "expected"),
    [
        ("the\ncat", LineMark.NONE, ["the", "cat", "<unk>"]),
        ("the\n<S>\n<unk>\ncat\n", LineMark.S, ["the", "<S>", "<unk>", "cat"]),
        ("the\n<unk>\n", LineMark.DOUBLE_S, ["<S>", "the", "<unk>"]),
        ("the 12\r\ncat\t7\r\n\r\n  日本  3\r\n", LineMark.EOS, ["<eos>", "the", "cat", "日本", "<unk>"]),
        ("the\ncat 1\nthe 3\n", LineMark.EOS, ["<eos>", "the", "cat", "<unk>"]),
        ("the\n<UNK>\n", LineMark.EOS, ["<eos>", "the", "<UNK>"]),
    ],
)
def test_words_of_a_file_keep_their_order(content, line_mark, expected, tmp_path):
    vocabulary = given_words(tmp_path / "vocab.txt", content.encode(), line_mark)
    assert list(vocabulary.words) == expected
    unknown = vocabulary.encode(b"never-seen").tolist()
    assert unknown == [expected.index("<unk>" if "<unk>" in expected else "<UNK>")]


@pytest.mark.parametrize("content", [b"", b" \r\n\t\n", b"the\n\xff"])
def test_a_file_without_words_is_named(content, tmp_path):
    with pytest.raises(UserError, match=rf"{tmp_path}/vocab\.txt\b"):
        given_words(tmp_path / "vocab.txt", content)


def test_a_file_that_cannot_be_read_is_named_with_its_flag(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        for kind, field in ((Tokenizer.WORD, "vocab_file"), (Tokenizer.SUBWORD, "hf_file")):
            with pytest.raises(UserError, match=rf"--data\.tokenizer\.{field}\b.*{path}\b"):
                make_vocabulary(TokenizerConfig(kind=kind, **{field: str(path)}), text_of("a"))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_without_a_target_is_named(split, poem, tmp_path, read):
    (tmp_path / split).write_bytes(b"x")
    with pytest.raises(UserError, match=rf"\b{split} split\b.*\b2\b.*\b1\b"):
        read(own_text(**poem))
