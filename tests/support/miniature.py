"""Miniatures of the published corpora: the official layout, a few hundred kilobytes, and a table
that fits them.
"""

import dataclasses
import functools
import gzip
import hashlib
import io
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from txl_jax.config import CorpusName
from txl_jax.data import published
from txl_jax.data.published import Facts, PublishedCorpus, Remote

NOWHERE = "http://127.0.0.1:9/"  # Port 9, discard: nothing listens.
R13 = "1-billion-word-language-modeling-benchmark-r13output"
CUTS = {"train": 200_001, "valid": 70_000, "test": 30_007}  # No multiples of a record.
_SHIPPED = dict(published.CORPORA)
NAMES = tuple(_SHIPPED)
# The first source that is one file: an archive, or the text itself. A corpus without one gets an
# archive of its own.
OFFICIAL = {
    name: next((source[0].file for source in row.sources if len(source) == 1), f"{name}.zip")
    for name, row in _SHIPPED.items()
}
PACKED = tuple(name for name, file in OFFICIAL.items() if file.endswith(published.ARCHIVE_SUFFIXES))


@functools.cache
def texts(name: CorpusName) -> dict[str, bytes]:
    """The text of each split. One Billion Word's training text is that of its shards in order."""
    if _SHIPPED[name].cuts:
        text = random.Random(name).randbytes(sum(CUTS.values()))
        ends = (CUTS["train"], CUTS["train"] + CUTS["valid"])
        return {"train": text[: ends[0]], "valid": text[ends[0] : ends[1]], "test": text[ends[1] :]}
    make = {CorpusName.PTB: _ptb, CorpusName.LM1B: _sentences}.get(name, _wikitext)
    sizes = {"train": 6_000, "valid": 300, "test": 500}
    # Both WikiTexts share what they are tested on.
    seed = "wikitext" if make is _wikitext else name
    found = {split: make(random.Random(f"{seed} {split}"), lines) for split, lines in sizes.items()}
    return found | (
        {"train": _wikitext(random.Random(name), 2_000)} if name is CorpusName.WIKITEXT2 else {}
    )


@functools.cache
def files(name: CorpusName) -> dict[str, bytes]:
    """The corpus's files: the members of the official archive if there is one.

    Their order is not the alphabet's, and some archives have files that nobody needs.
    """
    by_split, layout = texts(name), _SHIPPED[name].layouts[0]
    if _SHIPPED[name].cuts:
        return {layout[published.WHOLE][0]: b"".join(by_split.values())}
    if name is CorpusName.PTB:
        folder = "./simple-examples/"
        wanted = {f"{folder}data/ptb.{split}.txt": text for split, text in by_split.items()}
        return {
            f"{folder}data/README": b"read me\n",
            **wanted,
            f"{folder}data/ptb.char.train.txt": b"a b c\n",
        }
    if name is CorpusName.LM1B:
        heldout, training = (
            f"{R13}/{part}-monolingual.tokenized.shuffled" for part in ("heldout", "training")
        )
        one, two, three = shards(by_split["train"])
        return {
            f"{R13}/README": b"read me\n",
            f"{training}/news.en-00002-of-00100": two,
            f"{heldout}/news.en.heldout-00001-of-00050": by_split["valid"],
            f"{training}/news.en-00003-of-00100": three,
            f"{heldout}/news.en.heldout-00002-of-00050": b"Nobody reads this .\n",
            f"{heldout}/news.en.heldout-00000-of-00050": by_split["test"],
            f"{training}/news.en-00001-of-00100": one,
        }
    return {layout[split][0]: by_split[split] for split in ("test", "valid", "train")}


def shards(text: bytes) -> list[bytes]:
    lines = text.splitlines(keepends=True)
    return [b"".join(lines[:1000]), b"".join(lines[1000:4100]), b"".join(lines[4100:])]


def archive(file: str, members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    if file.endswith(".zip"):
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, content in members.items():
                zipped.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w") as tarred:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tarred.addfile(info, io.BytesIO(content))
    return (
        buffer.getvalue() if file.endswith(".tar") else gzip.compress(buffer.getvalue(), 1, mtime=0)
    )


@functools.cache
def official(name: CorpusName) -> bytes:
    file, members = OFFICIAL[name], files(name)
    return archive(file, members) if name in PACKED else members[file]


@functools.cache
def corpus(name: CorpusName, url: str = NOWHERE) -> PublishedCorpus:
    """The table's row for the miniature; its only source is the official file at `url`."""
    row = _SHIPPED[name]
    if name is CorpusName.LM1B:
        layouts = tuple(dict(layout, train=layout["train"][:3]) for layout in row.layouts)
        row = dataclasses.replace(row, layouts=layouts)
    source = remote(OFFICIAL[name], official(name), url)
    return dataclasses.replace(
        row, facts=facts(name), cuts=CUTS if row.cuts else {}, sources=((source,),)
    )


def remote(file: str, content: bytes, url: str = NOWHERE) -> Remote:
    return Remote(url + file, size=len(content), sha256=hashlib.sha256(content).hexdigest())


@functools.cache
def facts(name: CorpusName) -> dict[str, Facts]:
    """Facts of the miniature's parts, of the kinds that are known of the corpus's own."""
    by_split, row, found = texts(name), _SHIPPED[name], {}
    for part, text in (
        {published.WHOLE: b"".join(by_split.values())} if row.cuts else by_split
    ).items():
        lines, known = text.count(b"\n"), dataclasses.asdict(row.facts[part])
        every: dict[str, Any] = {
            "size": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
            "lines": lines,
        }
        every["tokens"] = len(text.split()) + lines
        found[part] = Facts(
            **{fact: value for fact, value in every.items() if known[fact] is not None}
        )
    return found


def install(url: str = NOWHERE) -> None:
    """Makes the miniatures count as the corpora, for the rest of this process."""
    published.CORPORA.update({name: corpus(name, url) for name in NAMES})


def _ptb(rng: random.Random, lines: int) -> bytes:
    return b"".join(b" " + _words(rng, b"mr. <unk> N said it 's a") + b" \n" for _ in range(lines))


def _wikitext(rng: random.Random, lines: int) -> bytes:
    kinds = (
        lambda: b"",
        lambda: b"= Title = ",
        lambda: _words(rng, "text <unk> @-@ , München .".encode()) + b" ",
    )
    # As the original, it ends in lines that hold a space.
    return b"".join(b" " + rng.choice(kinds)() + b"\n" for _ in range(lines)) + b" \n \n"


def _sentences(rng: random.Random, lines: int) -> bytes:
    return b"".join(
        _words(rng, "The U.S. said on Monday that café prices rose .".encode()) + b"\n"
        for _ in range(lines)
    )


def _words(rng: random.Random, words: bytes) -> bytes:
    return b" ".join(rng.choices(words.split(), k=rng.randint(1, 40)))


def place(folder: Path, members: dict[str, bytes]) -> None:
    for name, content in members.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


# Ways in which a corpus's files may lie in the data directory.
ARRANGEMENTS = (
    "official",
    "downloads/manual",
    "unpacked",
    "flat",
    "by split",
    "zip",
    "tar.gz",
    "tgz",
    "tar",
)


def arrange(tmp_path: Path, name: CorpusName, how: str = "official") -> None:
    """Places the corpus's files in the folder `data`: packed by its user if `how` is a suffix."""
    by_name = files(name)
    match how:
        case "official":
            members = {OFFICIAL[name]: official(name)}
        case "downloads/manual":
            members = {f"{how}/{OFFICIAL[name]}": official(name)}
        case "unpacked":
            members = by_name
        case "flat":  # Without the archive's folders.
            keep = 2 if name is CorpusName.LM1B else 1
            members = {
                "/".join([name, *file.split("/")[-keep:]]): content
                for file, content in by_name.items()
            }
        case "by split":
            members = {
                f"{_SHIPPED[name].folders[-1]}/{split}.txt": text
                for split, text in texts(name).items()
            }
        case suffix:
            members = {f"{name}/{name}.{suffix}": archive(f".{suffix}", by_name)}
    place(tmp_path / "data", members)
