"""Tests from a config to three splits of ids: vocabularies that a text gives rise to, and the
stores that keep ids.
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
    return [corpus.vocabulary.decode(ids) for ids in (corpus.train, corpus.valid, corpus.test)]


def stores(cache_dir):
    return sorted(path.name for path in Path(cache_dir, "tokens").glob("[!.]*"))


@pytest.fixture
def read(tmp_path):
    """Reads a corpus whose published files are nowhere; the cache is in a folder of this test."""
    return lambda config, **kwargs: read_corpus(
        config, "nowhere", str(tmp_path / "cache"), **kwargs
    )


@pytest.fixture
def poem(tmp_path):
    """Own text of words, lists of files per split; only the training text counts."""
    lines = {
        "train": "The cat sat\nthe dog sat\n\nThe end",
        "valid": "a dog sat\n",
        "test": "THE END\nthe cat",
    }
    for split, text in lines.items():
        (tmp_path / split).write_text(text)
    return {split: (str(tmp_path / split),) for split in lines}


def test_a_text_is_encoded_once(poem, tmp_path, read, monkeypatch):
    config = own_text(kind=Tokenizer.WORD, **poem)
    first = read(config)
    monkeypatch.setattr(corpus, "make_vocabulary", None)  # Nothing is counted any more,
    moved = tmp_path / "moved"
    moved.write_bytes((tmp_path / "train").read_bytes())
    # wherever the files are.
    again = read(own_text(kind=Tokenizer.WORD, **poem | {"train": (str(moved),)}))
    assert texts(again) == texts(first) and again.vocabulary == first.vocabulary
    assert (again.description, again.digest) == (first.description, first.digest)
    assert len(stores(tmp_path / "cache")) == 1


# Names of folders on users' disks. A name that changes means that everyone's texts are encoded
# again (and published corpora prepared again), and that the old copies stay behind unread. Change a
# name here only together with `token_store.VERSION` or `PublishedText.VERSION`, because the same
# text now gives other ids or other records.
STORES = {
    "byte": "text-1b9cc8612cef1bfa",
    "char": "text-9b77f1dac69f94c2",
    "word": "text-c86e6f84fbf9ada3",
}
STORES["ptb"] = "ptb-83afbafa3f30eb47"
PENN_TREEBANK_DIGEST = "9cea65498fdb6345a4cf7306b661a9c5863765a365ac91f88de7fac76ccfd8bd"


def test_folders_are_those_of_earlier_runs_in_the_cache_or_the_data(poem, tmp_path, miniatures):
    arrange(tmp_path, CorpusName.PTB)
    published = default_data(CorpusName.PTB)
    for cache_dir, cache in (
        (str(tmp_path / "cache"), tmp_path / "cache"),
        (None, tmp_path / "data" / "prepared"),
    ):
        for config in (
            *(own_text(kind=kind, **poem) for kind in ("byte", "char", "word")),
            published,
        ):
            corpus = read_corpus(config, str(tmp_path / "data"), cache_dir)
        assert (
            stores(cache) == sorted(STORES.values())
            and (cache / "tfds" / "txl_ptb" / "1.0.0").is_dir()
        )
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


def content(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def resealed(store):
    """Writes the sizes and digests of a store's files again, as somebody who changed them would."""
    path = store / "store.json"
    summary = json.loads(path.read_text())
    files = [file for file in store.iterdir() if file != path]
    summary["bytes"] = {file.name: file.stat().st_size for file in files}
    summary["sha256"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    path.write_text(json.dumps(summary))


def test_a_strangers_cache_is_only_read_and_its_ids_are_not_copied(poem, tmp_path):
    config = own_text(kind=Tokenizer.WORD, **poem)
    theirs, mine = str(tmp_path / "theirs"), str(tmp_path / "mine")
    trained = read_corpus(config, "nowhere", theirs)
    before = content(theirs)
    expected = texts(trained)

    def use(config=config, cache=mine):
        return read_corpus(
            config, "nowhere", cache, vocabulary=trained.vocabulary, read_only_cache=theirs
        )

    used = use()
    assert used.train.filename == trained.train.filename and texts(used) == expected
    assert not os.path.exists(mine) and used.cache_dir == mine
    (tmp_path / "other").write_text("the cow sat\n" * 40)
    use(own_text(kind=Tokenizer.WORD, file=str(tmp_path / "other")))
    assert len(stores(mine)) == 1 and content(theirs) == before

    # Ids that are corrupted, or are no ids although their digests fit, are made again in the user's
    # own cache.
    [name] = stores(theirs)
    store = Path(theirs, "tokens", name)
    corrupted = bytes(byte ^ 1 for byte in before[Path("tokens", name, "train.npy")])
    objects = io.BytesIO()
    np.save(objects, np.array([{}], object), allow_pickle=True)
    floats = io.BytesIO()
    np.save(floats, np.ones((2, 2)))
    for number, (data, seals) in enumerate(
        ((corrupted, False), (objects.getvalue(), True), (floats.getvalue(), True))
    ):
        (store / "train.npy").write_bytes(data)
        if seals:
            resealed(store)
        own = str(tmp_path / f"own-{number}")
        assert texts(use(cache=own)) == expected and len(stores(own)) == 1
        assert (store / "train.npy").read_bytes() == data


def test_records_of_a_stranger_serve_with_their_own_ids_alone(tmp_path, miniatures):
    """Else their content would be encoded as the published corpus, where the user's next training
    finds it.
    """
    arrange(tmp_path, CorpusName.PTB)
    config, data = default_data(CorpusName.PTB), str(tmp_path / "data")
    trained = read_corpus(config, data, str(tmp_path / "theirs"))
    options = {"vocabulary": trained.vocabulary, "read_only_cache": str(tmp_path / "theirs")}
    used = read_corpus(config, "nowhere", str(tmp_path / "mine"), **options)
    assert used.train.filename == trained.train.filename and not (tmp_path / "mine").exists()
    shutil.rmtree(tmp_path / "theirs" / "tokens")
    own = read_corpus(config, data, str(tmp_path / "mine"), **options)
    assert texts(own) == texts(trained)
    assert (tmp_path / "mine" / "tfds").is_dir() and not (tmp_path / "theirs" / "tokens").exists()


def test_a_given_vocabulary_reads_another_text(poem, tmp_path, read):
    trained = read(own_text(kind=Tokenizer.WORD, **poem))
    again = read(own_text(kind=Tokenizer.WORD, **poem), vocabulary=trained.vocabulary)
    assert again.train.filename == trained.train.filename, (
        "the text of the run needs no second store"
    )
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


# Vocabularies of a text


def ranked(found, unknown, min_count, first=()):
    """Tokens by count, and those of one count by first occurrence; rarer ones than `min_count` are
    the unknown. Those of `first` count as the others do, and are left out.
    """
    counts = collections.Counter(found)
    kept = [token for token in counts if counts[token] >= min_count]
    ranks = {token: (-counts[token], place) for place, token in enumerate(kept)}
    of_unknown = sum(counts[token] for token in counts if token not in kept or token == unknown)
    ranks[unknown] = (-of_unknown, ranks.get(unknown, (0, 99))[1])
    return [token for token in sorted(ranks, key=ranks.get) if token not in first]


@pytest.mark.parametrize(
    ("newlines", "symbols"), [(Newlines.KEEP, "\nabcxyé"), (Newlines.DROP, "abcxyé")]
)
def test_own_text_has_all_bytes_and_a_closed_alphabet_is_counted_over_all_splits(newlines, symbols):
    tokenizer, files = TokenizerConfig(newlines=newlines), (["cab\n", "é"], "bax", "y\n")
    assert make_vocabulary(tokenizer, text_of(*files)) == ByteVocabulary.all_bytes(newlines)
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
    mark = {LineMark.EOS: ["<eos>"], LineMark.NONE: []}.get(line_mark, ["<S>"])
    tokenizer = TokenizerConfig(kind=Tokenizer.WORD, line_mark=line_mark, min_count=min_count)
    words = [word for text in texts for word in text.split()]
    got = make_vocabulary(tokenizer, text_of(texts, block=block))
    assert list(got.words) == mark + ranked(words, "<unk>", min_count, first=mark)


@given(
    texts=st.lists(st.text("abcA \n\r\\é日😀\N{LINE SEPARATOR}" + UNKNOWN)),
    min_count=st.integers(1, 3),
)
@settings(max_examples=100)
def test_characters_are_ranked_by_count_and_first_occurrence(texts, min_count):
    got = make_vocabulary(
        TokenizerConfig(kind=Tokenizer.CHAR, min_count=min_count), text_of(texts, "xxx", "yyyy")
    )
    assert got.characters == "".join(ranked("".join(texts), UNKNOWN, min_count))


def given_words(path, content, line_mark=LineMark.EOS):
    path.write_bytes(content)
    tokenizer = TokenizerConfig(kind=Tokenizer.WORD, vocab_file=str(path), line_mark=line_mark)
    return make_vocabulary(tokenizer, text_of("never counted"))


def test_words_of_a_file_keep_their_order(tmp_path):
    for content, line_mark, expected in (
        ("the\ncat", LineMark.NONE, ["the", "cat", "<unk>"]),
        ("the\n<S>\n<unk>\ncat\n", LineMark.S, ["the", "<S>", "<unk>", "cat"]),
        ("the\n<unk>\n", LineMark.DOUBLE_S, ["<S>", "the", "<unk>"]),
        (
            "the 12\r\ncat\t7\r\n\r\n  日本  3\r\n",
            LineMark.EOS,
            ["<eos>", "the", "cat", "日本", "<unk>"],
        ),
        ("the\ncat 1\nthe 3\n", LineMark.EOS, ["<eos>", "the", "cat", "<unk>"]),
        ("the\n<UNK>\n", LineMark.EOS, ["<eos>", "the", "<UNK>"]),
    ):
        vocabulary = given_words(tmp_path / "vocab.txt", content.encode(), line_mark)
        assert list(vocabulary.words) == expected
        unknown = vocabulary.encode(b"never-seen").tolist()
        assert unknown == [expected.index("<unk>" if "<unk>" in expected else "<UNK>")]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("words", [{"the": 0, "cat": 1}, ["the", "cat"]], ids=["object", "list"])
def test_json_is_not_a_list_of_words(tmp_path, words, indent):
    with pytest.raises(UserError, match=r"vocab\.txt, which is JSON.*hf_file"):
        given_words(tmp_path / "vocab.txt", json.dumps(words, indent=indent).encode())
    for content in (b"[PAD]\nthe\n", b"{\nthe\n}\n"):
        assert "the" in given_words(tmp_path / "vocab.txt", content).words


def test_the_share_of_unknown_tokens(tmp_path, read):
    (tmp_path / "words").write_text("the\ncat\n")
    lists = {}
    for split, text in (("train", "the dog\n"), ("valid", "a cat\n"), ("test", "the cat\n")):
        (tmp_path / split).write_text(text)
        lists[split] = (str(tmp_path / split),)
    corpus = read(own_text(kind=Tokenizer.WORD, vocab_file=str(tmp_path / "words"), **lists))
    assert corpus.unknown_share == 2 / 9
    assert read(own_text(kind=Tokenizer.BYTE, **lists)).unknown_share == 0


def test_a_file_without_words_and_one_that_cannot_be_read_are_named(tmp_path):
    for content in (b"", b" \r\n\t\n", b"the\n\xff"):
        with pytest.raises(UserError, match=rf"{tmp_path}/vocab\.txt\b"):
            given_words(tmp_path / "vocab.txt", content)
    for path in (tmp_path / "absent", tmp_path):
        for kind, field in ((Tokenizer.WORD, "vocab_file"), (Tokenizer.SUBWORD, "hf_file")):
            with pytest.raises(UserError, match=rf"--data\.tokenizer\.{field}\b.*{path}\b"):
                make_vocabulary(TokenizerConfig(kind=kind, **{field: str(path)}), text_of("a"))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_without_a_target_is_named(split, poem, tmp_path, read):
    (tmp_path / split).write_bytes(b"x")
    with pytest.raises(UserError, match=rf"\b{split} split\b.*\b2\b.*\b1\b"):
        read(own_text(**poem))


# Stores of ids: contents, reuse, memory, and what errors, full disks and damage leave


SETTINGS = {"tokenizer": "word", "min_count": 1}
make_words = functools.partial(words_of, LineMark.EOS)


def never(*args, **kwargs):
    raise AssertionError("the store is there already")


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def assert_same(one, other):
    assert one.vocabulary == other.vocabulary
    for split in SPLITS:
        np.testing.assert_array_equal(one.splits[split], other.splits[split], strict=True)
    np.testing.assert_array_equal(one.sentences, other.sentences, strict=True)


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32)]
)
def test_ids_are_of_the_smallest_type(size, dtype, tmp_path):
    many = WordVocabulary(("<eos>", "<unk>", *map(str, range(2, size))))
    tokens = open_store(text_of(b"%d 3" % (size - 1)), SETTINGS, lambda: many, folder=tmp_path)
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
    """Each line in plain Python: its length, its marks, and the bytes before the first."""
    files = [[["the", "cat"], *files[0]], *files[1:]]
    contents = [
        b"".join(b" ".join(map(str.encode, line)) + b"\n" for line in lines) for lines in files
    ]
    if open_end and files[-1][-1]:
        contents[-1] = contents[-1].removesuffix(b"\n")
    marks = 2 if line_mark is LineMark.DOUBLE_S else 1
    expected = [1 if line_mark is LineMark.S else 0]
    for lines in files:
        for line in lines:
            expected.append(expected[-1] + len(line) + marks)
    folder = tmp_path_factory.mktemp("store")
    vocabulary = words_of(line_mark)
    tokens = open_store(text_of(contents, block=block), SETTINGS, lambda: vocabulary, folder=folder)
    assert tokens.sentences.tolist() == expected
    assert expected[-1] == len(tokens.splits["train"])
    assert tokens.splits["train"].tolist() == joined(vocabulary.blocks(map(in_blocks, contents)))


def test_the_same_text_and_settings_are_not_encoded_again(tmp_path, monkeypatch):
    assert find_store(text_of(), SETTINGS, tmp_path) is None
    path = token_store._path(text_of(), SETTINGS, tmp_path)
    path.with_name(f"{path.name}.123").mkdir()  # Left by a killed process.
    made = open_store(text_of(), SETTINGS, make_words, folder=tmp_path)
    again = text_of(b"never read", digest="d")
    monkeypatch.setattr(os, "mkdir", never)  # A folder that may only be read is enough.
    assert_same(open_store(again, dict(reversed(SETTINGS.items())), never, folder=tmp_path), made)
    assert_same(find_store(again, SETTINGS, tmp_path), made)
    assert names(tmp_path) == [path.name]
    monkeypatch.setattr(token_store, "VERSION", token_store.VERSION + 1)
    assert find_store(text_of(), SETTINGS, tmp_path) is None


@pytest.mark.parametrize(
    "name", ["train.npy", "test.npy", "sentences.npy", "vocabulary.txt", "store.json"]
)
@pytest.mark.parametrize("damage", ["cut", "gone", "longer", "flipped"])
def test_a_damaged_store_is_made_again(name, damage, tmp_path, capsys):
    expected = open_store(text_of(), SETTINGS, make_words, folder=tmp_path / "undamaged")
    open_store(text_of(), SETTINGS, make_words, folder=tmp_path / "tokens")
    folder = tmp_path / "tokens" / names(tmp_path / "tokens")[0]
    path = folder / name
    match damage:
        case "cut":
            os.truncate(path, path.stat().st_size - 2)
        case "gone":
            path.unlink()
        case "longer":
            path.write_bytes(path.read_bytes() + b"more")
        case "flipped":
            data = bytearray(path.read_bytes())
            data[
                -1
                if name.endswith(".npy")
                else data.rindex(b"sentences" if name == "store.json" else b"sat")
            ] ^= 1
            path.write_bytes(data)
    assert find_store(text_of(), SETTINGS, tmp_path / "tokens") is None
    assert_same(open_store(text_of(), SETTINGS, make_words, folder=tmp_path / "tokens"), expected)
    assert names(tmp_path / "tokens") == [folder.name] and len(names(folder)) == 6
    assert str(folder) in capsys.readouterr().out


# The digest of some tokens, by the version that made them.
GOLDEN = {1: "d70ace50e92a79a4"}


def test_ids_are_those_of_this_version(tmp_path):
    """A store of old ids would still be opened if ids changed under the old version."""
    content = "The cat sat\n\nthe cät,\tthe 😀\r\n The end".encode()
    text, found = text_of(content, content, content), hashlib.sha256()
    marked = (
        TokenizerConfig(kind=Tokenizer.WORD, line_mark=line_mark, min_count=2)
        for line_mark in LineMark
    )
    for tokenizer in (TokenizerConfig(), TokenizerConfig(kind=Tokenizer.CHAR), *marked):
        make = functools.partial(make_vocabulary, tokenizer, text)
        tokens = open_store(text, config_tree.to_dict(tokenizer), make, folder=tmp_path)
        found.update(tokens.vocabulary.encode())
        ids = [
            *(ids.tolist() for ids in tokens.splits.values()),
            np.array(tokens.sentences).tolist(),
        ]
        found.update(str(ids).encode())
    assert found.hexdigest()[:16] == GOLDEN[token_store.VERSION], (
        "the same text gives other tokens than before; if that is meant, raise "
        "token_store.VERSION and add its digest"
    )


@pytest.mark.full
def test_memory_is_that_of_a_block(tmp_path):
    block, times = b"the cat sat\n" * 500, 1000  # 6 MB, of 2 million ids.
    repeated = File(
        "large.txt", len(block) * times, lambda: (bytes(bytearray(block)) for _ in range(times))
    )
    large = Text("own text", "made up", "d", text_of().splits | {"train": (repeated,)})
    open_store(text_of(), {"first": True}, make_words, folder=tmp_path)  # Tables of the vocabulary.
    tracemalloc.start()
    try:
        tokens = open_store(large, SETTINGS, make_words, folder=tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tokens.splits["train"]) > 1.9e6
    assert peak < 1.5e6


def test_text_that_cannot_be_read_leaves_no_store(tmp_path):
    for error in (ValueError("some.txt is not UTF-8"), KeyboardInterrupt()):

        def blocks(error=error):
            yield b"the cat\n"
            raise error

        broken = Text(
            "own text",
            "made up",
            "d",
            text_of().splits | {"valid": (File("some.txt", 99, blocks),)},
        )
        with pytest.raises(type(error)) as caught:
            open_store(broken, SETTINGS, make_words, folder=tmp_path)
        assert caught.value is error, "nothing else is reported"
        assert names(tmp_path) == []
    assert len(open_store(text_of(), SETTINGS, make_words, folder=tmp_path).splits["train"]) == 5
