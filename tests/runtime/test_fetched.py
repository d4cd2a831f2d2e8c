"""Tests remote texts: they are copied to this machine once, and again when they change."""

import pathlib
import time

import pytest

from support import miniature
from txl_jax.config import CorpusName, DataConfig
from txl_jax.data import own_text
from txl_jax.data.corpus import read_corpus
from txl_jax.data.published import CORPORA
from txl_jax.errors import UserError

pytestmark = pytest.mark.full


def read(data, cache, **settings):
    return read_corpus(DataConfig(corpus=CorpusName.TEXT, **settings), str(data), str(cache))


def test_patterns_and_lists(bucket, tmp_path):
    for name in ("a.txt", "b.txt", "valid.dat"):
        (bucket / name).write_bytes(name.encode() * 100)
    valid = str(bucket / "valid.dat")
    corpus = read("data", tmp_path, train=(str(bucket / "*.txt"),), valid=(valid,), test=(valid,))
    assert bytes(corpus.vocabulary.decode(corpus.train[:5])) == b"a.txt" and corpus.train.size == 1000
    (bucket / "valid.dat").unlink()
    for name in ("*.txt", ""):  # Two files are one text, split by position.
        corpus = read("data", tmp_path, file=str(bucket / name))
        assert bytes(corpus.vocabulary.decode(corpus.test[-5:])) == b"b.txt" and corpus.train.size == 900
    with pytest.raises(UserError, match="no object matches"):
        read("data", tmp_path, train=(str(bucket / "*.no"),), valid=(valid,), test=(valid,))


def test_a_folder_of_corpora_is_copied_and_a_file_again_when_it_changes(bucket, tmp_path, storage):
    name, corpus = miniature.OFFICIAL[CorpusName.PTB], CORPORA[CorpusName.PTB]
    for each in (name, f"ptb/{name}"):
        (bucket / each).write_bytes(b"first text")
    (bucket / "unrelated.bin").write_bytes(b"1")
    (bucket / "book.txt").write_bytes(bytes(range(32, 127)) * 40)
    local = own_text.local_folder(corpus, str(bucket), tmp_path)
    found = sorted(str(path.relative_to(local)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == sorted([name, f"ptb/{name}"])
    book = read("data", tmp_path, file=str(bucket / "book.txt"))
    requests = len(storage.requests)
    assert own_text.local_folder(corpus, str(bucket), tmp_path) == local
    assert read("data", tmp_path, file=str(bucket / "book.txt")).digest == book.digest
    assert not any("media" in path for _, path in storage.requests[requests:]), "it was downloaded again"
    time.sleep(1.1)  # Times of objects are read in whole seconds.
    (bucket / name).write_bytes(b"other text")  # As long as the first.
    own_text.local_folder(corpus, str(bucket), tmp_path)
    assert pathlib.Path(local, name).read_bytes() == b"other text"
    (bucket / "book.txt").write_bytes(bytes(range(32, 127)) * 41)
    assert read("data", tmp_path, file=str(bucket / "book.txt")).digest != book.digest


def test_what_cannot_be_read_is_refused(bucket, tmp_path, storage):
    with pytest.raises(UserError, match="cannot read gs://"):
        read("data", tmp_path, file=str(bucket / "missing.txt"))
    with pytest.raises(UserError, match="--cache_dir"):
        read("data", bucket, file="book.txt")
    with pytest.raises(UserError, match="--cache_dir"):
        read_corpus(DataConfig(corpus=CorpusName.PTB), str(bucket))
    (bucket / "secret.txt").write_bytes(b"1")
    storage.refuse("GET .*secret")
    with pytest.raises(UserError, match="gcloud"):
        read("data", tmp_path, file=str(bucket / "secret.txt"))
