"""Miniatures of the published corpora: a few hundred kilobytes in the official layout, and a table
of their metadata.
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


def _official_file(name: CorpusName) -> str:
    """Returns the file of the first source that is one file: an archive, or the text itself.

    A corpus without such a source gets an archive named after it.
    """
    for source in _SHIPPED[name].sources:
        if len(source) == 1:
            return source[0].file
    return f"{name}.zip"


OFFICIAL = {name: _official_file(name) for name in NAMES}
PACKED = tuple(name for name, file in OFFICIAL.items() if file.endswith(published.ARCHIVE_SUFFIXES))


@functools.cache
def texts(name: CorpusName) -> dict[str, bytes]:
    """The text of each split. One Billion Word's training text is its shards' text in order."""
    if _SHIPPED[name].cuts:
        text = random.Random(name).randbytes(sum(CUTS.values()))
        train_end = CUTS["train"]
        valid_end = train_end + CUTS["valid"]
        return {
            "train": text[:train_end],
            "valid": text[train_end:valid_end],
            "test": text[valid_end:],
        }

    make = {CorpusName.PTB: _ptb, CorpusName.LM1B: _sentences}.get(name, _wikitext)
    # Both WikiTexts have the same validation and test splits.
    seed = "wikitext" if make is _wikitext else name
    splits = {}
    for split, lines in {"train": 6_000, "valid": 300, "test": 500}.items():
        splits[split] = make(random.Random(f"{seed} {split}"), lines)
    if name is CorpusName.WIKITEXT2:
        splits["train"] = _wikitext(random.Random(name), 2_000)
    return splits


@functools.cache
def files(name: CorpusName) -> dict[str, bytes]:
    """The corpus's files: the members of the official archive, if any.

    They are not sorted, and some archives have files that nobody needs.
    """
    by_split = texts(name)
    layout = _SHIPPED[name].layouts[0]
    if _SHIPPED[name].cuts:
        return {layout[published.WHOLE][0]: b"".join(by_split.values())}
    if name is CorpusName.PTB:
        folder = "./simple-examples/"
        members = {f"{folder}data/README": b"read me\n"}
        for split, text in by_split.items():
            members[f"{folder}data/ptb.{split}.txt"] = text
        members[f"{folder}data/ptb.char.train.txt"] = b"a b c\n"
        return members
    if name is CorpusName.LM1B:
        heldout = f"{R13}/heldout-monolingual.tokenized.shuffled"
        training = f"{R13}/training-monolingual.tokenized.shuffled"
        first, second, third = shards(by_split["train"])
        return {
            f"{R13}/README": b"read me\n",
            f"{training}/news.en-00002-of-00100": second,
            f"{heldout}/news.en.heldout-00001-of-00050": by_split["valid"],
            f"{training}/news.en-00003-of-00100": third,
            f"{heldout}/news.en.heldout-00002-of-00050": b"Nobody reads this .\n",
            f"{heldout}/news.en.heldout-00000-of-00050": by_split["test"],
            f"{training}/news.en-00001-of-00100": first,
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
    content = buffer.getvalue()
    if file.endswith(".tar"):
        return content
    return gzip.compress(content, 1, mtime=0)


@functools.cache
def official(name: CorpusName) -> bytes:
    file = OFFICIAL[name]
    if name in PACKED:
        return archive(file, files(name))
    return files(name)[file]


@functools.cache
def corpus(name: CorpusName, url: str = NOWHERE) -> PublishedCorpus:
    """The table's row for the miniature, whose only source is the official file at `url`."""
    row = _SHIPPED[name]
    if name is CorpusName.LM1B:
        layouts = tuple(dict(layout, train=layout["train"][:3]) for layout in row.layouts)
        row = dataclasses.replace(row, layouts=layouts)
    source = remote(OFFICIAL[name], official(name), url)
    cuts = CUTS if row.cuts else {}
    return dataclasses.replace(row, facts=facts(name), cuts=cuts, sources=((source,),))


def remote(file: str, content: bytes, url: str = NOWHERE) -> Remote:
    return Remote(url + file, size=len(content), sha256=hashlib.sha256(content).hexdigest())


@functools.cache
def facts(name: CorpusName) -> dict[str, Facts]:
    """Metadata of the miniature's parts, of the kinds that are known of the real corpus."""
    row = _SHIPPED[name]
    parts = texts(name)
    if row.cuts:
        parts = {published.WHOLE: b"".join(parts.values())}

    by_part = {}
    for part, text in parts.items():
        n_line = text.count(b"\n")
        values: dict[str, Any] = {
            "size": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
            "lines": n_line,
            "tokens": len(text.split()) + n_line,
        }
        for fact, known in dataclasses.asdict(row.facts[part]).items():
            if known is None:
                values.pop(fact, None)
        by_part[part] = Facts(**values)
    return by_part


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


# Ways in which a corpus's files may be arranged in the data directory.
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
    """Places the corpus's files in the directory `data`.

    If `how` is a suffix, the files are in an archive that the user made.
    """
    by_name = files(name)
    match how:
        case "official":
            members = {OFFICIAL[name]: official(name)}
        case "downloads/manual":
            members = {f"{how}/{OFFICIAL[name]}": official(name)}
        case "unpacked":
            members = by_name
        case "flat":  # Without the archive's directories.
            kept_levels = 2 if name is CorpusName.LM1B else 1
            members = {}
            for file, content in by_name.items():
                members["/".join([name, *file.split("/")[-kept_levels:]])] = content
        case "by split":
            folder = _SHIPPED[name].folders[-1]
            members = {f"{folder}/{split}.txt": text for split, text in texts(name).items()}
        case suffix:
            members = {f"{name}/{name}.{suffix}": archive(f".{suffix}", by_name)}
    place(tmp_path / "data", members)
