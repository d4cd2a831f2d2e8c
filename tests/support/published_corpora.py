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


# Ways in which a corpus's files may lie in the data directory.
ARRANGEMENTS = ("official", "downloads/manual", "unpacked", "flat", "by split", "zip", "tar.gz", "tgz", "tar")


def arrange(tmp_path, name, how="official"):
    """Places the corpus's files in the folder `data`: packed by its user if `how` is a suffix."""
    files = miniature.files(name)
    match how:
        case "official":
            members = {miniature.OFFICIAL[name]: miniature.official(name)}
        case "downloads/manual":
            members = {f"{how}/{miniature.OFFICIAL[name]}": miniature.official(name)}
        case "unpacked":
            members = files
        case "flat":  # Without the archive's folders.
            keep = 2 if name is CorpusName.LM1B else 1
            members = {"/".join([name, *file.split("/")[-keep:]]): content for file, content in files.items()}
        case "by split":
            texts = miniature.texts(name).items()
            members = {f"{TABLE[name].folders[-1]}/{split}.txt": text for split, text in texts}
        case suffix:
            members = {f"{name}/{name}.{suffix}": miniature.archive(f".{suffix}", files)}
    place(tmp_path / "data", members)


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
