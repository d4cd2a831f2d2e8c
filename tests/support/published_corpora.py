"""Places and forms of the files of published corpora, in miniature, and reading them."""

import hashlib

import pytest
import requests

from support import miniature
from txl_jax.config import CorpusName
from txl_jax.data import prepare
from txl_jax.data.published import CORPORA

TABLE = dict(CORPORA)  # As it is shipped.
ONE_FILE = tuple(name for name, row in TABLE.items() if row.cuts)
WORDS = tuple(name for name, row in TABLE.items() if all(facts.tokens for facts in row.facts.values()))


def refuse(url, **kwargs):
    raise requests.ConnectionError(f"no route to {url}")


def read(name, tmp_path, **options):
    """Reads from the folder `data`."""
    return prepare.read(name, data_dir=str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), **options)


def contents(text):
    """The bytes of each split."""
    return {split: b"".join(b"".join(file.blocks()) for file in files) for split, files in text.splits.items()}


def place(folder, members):
    for name, content in members.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def place_official(tmp_path, name):
    place(tmp_path / "data", miniature.officials(name))


def unpacked(tmp_path, name):
    place(tmp_path / "data", miniature.files(name))


def flat(tmp_path, name):
    """Files without the archive's folders."""
    keep = 2 if name is CorpusName.LM1B else 1
    members = {"/".join(file.split("/")[-keep:]): content for file, content in miniature.files(name).items()}
    place(tmp_path / "data" / str(name), members)


def by_split(tmp_path, name):
    texts = miniature.texts(name)
    place(tmp_path / "data" / TABLE[name].folders[-1], {f"{split}.txt": text for split, text in texts.items()})


def official_in_the_manual_folder(tmp_path, name):
    place(tmp_path / "data" / "downloads" / "manual", miniature.officials(name))


def own_archive(suffix):
    def write(tmp_path, name):
        file = f"{name}.{suffix}"
        place(tmp_path / "data" / str(name), {file: miniature.archive(file, miniature.files(name))})

    write.__name__ = f"own_{suffix}"
    return write


def expected_digest(name):
    parts = miniature.texts(name)
    sums = {split: hashlib.sha256(text).hexdigest() for split, text in parts.items()}
    if name in ONE_FILE:
        return hashlib.sha256(b"".join(parts.values())).hexdigest()
    if name is CorpusName.LM1B:
        files = "".join(hashlib.sha256(shard).hexdigest() for shard in miniature.shards(parts["train"]))
        sums["train"] = hashlib.sha256(files.encode()).hexdigest()
    return hashlib.sha256("".join(sums.values()).encode()).hexdigest()


def refusal(name, tmp_path, error=ValueError):
    """The error that reading gives; nothing is left that a later start would take for the corpus."""
    with pytest.raises(error) as caught:
        read(name, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.array_record*"))
    assert not list((tmp_path / "cache").rglob("incomplete*"))
    assert "\n" not in str(caught.value)
    return str(caught.value)
