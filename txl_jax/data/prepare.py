"""Published corpora, stored as tensorflow-datasets records.

Their files are found or downloaded, checked, and kept as records.

A record is a block of a file's bytes (reading a million lines one by one takes seconds). Next to
the records, metadata.json stores each part's sha256, and by split the name, bytes and records of
each file in their order. Archives are read as streams and never unpacked.
"""

import codecs
import contextlib
import errno
import functools
import gzip
import hashlib
import itertools
import os
import posixpath
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from txl_jax.config import CorpusName, Heldout
from txl_jax.config.config_tree import require
from txl_jax.data.published import (
    ARCHIVE_SUFFIXES,
    CORPORA,
    WHOLE,
    Facts,
    Layout,
    PublishedCorpus,
    Remote,
)
from txl_jax.data.text import File, Text, bar, digest_of
from txl_jax.errors import UserError, first_line
from txl_jax.runtime import storage
from txl_jax.runtime.output import say

RECORD_BYTES = 1 << 16
# Records per file: tensorflow-datasets holds a file's records in memory while it writes.
SHARD_RECORDS = 1 << 10
# Together a megabyte.
_RECORDS_PER_BLOCK = 16
# To connect, and to answer.
_ASK_SECONDS = 3, 10
# It appears with the complete directory of records, which is renamed.
_DONE = "dataset_info.json"
# In the order in which they are checked.
_FACTS = {
    "size": "{:,} bytes instead of {:,}",
    "tokens": "{:,} tokens (words and line ends) instead of {:,}",
    "lines": "{:,} lines instead of {:,}",
    "sha256": "sha256 {} instead of {}",
}


def read(
    name: CorpusName, *, data_dir: str, cache_dir: str, heldout: Heldout = Heldout.SEPARATE
) -> Text:
    """Reads a published corpus from files in `data_dir`, or from downloaded files.

    The corpus is prepared in the directory `tfds` of `cache_dir`.

    Raises `UserError` if the files are missing, cannot be downloaded or are not the published ones,
    if the prepared corpus is corrupted, or if `cache_dir` cannot be written to.
    """
    corpus, folder = CORPORA[name], Path(cache_dir, "tfds").absolute()
    records = _records(name, folder)
    done = records / _DONE
    if not done.is_file():
        with (
            storage.writable(folder, what=corpus.title),
            storage.locked(folder / f".txl_{name}.lock"),
        ):
            # Otherwise another process has prepared it while this one waited.
            if not done.is_file():
                _prepare(name, folder, data_dir)
    with _reading_records(records):
        return _open(name, folder, records, same=heldout is Heldout.PUBLISHED)


def has_records(name: CorpusName, cache: Path) -> bool:
    """Returns whether the records of a corpus are in a directory of prepared text."""
    return (_records(name, cache / "tfds") / _DONE).is_file()


def _records(name: CorpusName, folder: Path) -> Path:
    return folder / f"txl_{name}" / str(PublishedText.VERSION)


def _prepare(name: CorpusName, folder: Path, data_dir: str) -> None:
    """Writes the records.

    The caller holds the lock, so partial ones are left over from a killed process.
    """
    say(f"preparing {CORPORA[name].title} in {folder} (once)")
    shutil.rmtree(folder / f"txl_{name}", ignore_errors=True)
    downloads = folder / f"txl_{name}_downloads"
    for leftover in downloads.rglob("*.tmp.*"):
        shutil.rmtree(leftover)
    try:
        PublishedText(name, data_dir=folder, files_in=data_dir).download_and_prepare(
            download_dir=downloads
        )
    except RuntimeError as error:
        # ArrayRecord could not write: 'write() failed: No space left on device; ...'
        raise OSError(errno.EIO, str(error).partition(";")[0]) from error
    except ValueError:
        # The download is not the corpus. After other errors, such as a full disk, it is kept.
        shutil.rmtree(downloads, ignore_errors=True)
        raise
    shutil.rmtree(downloads, ignore_errors=True)


def _open(name: CorpusName, folder: Path, records: Path, *, same: bool) -> Text:
    """Returns the text of prepared records.

    With `same` the test split is also the validation split.
    """
    builder, corpus = PublishedText(name, data_dir=folder), CORPORA[name]
    files, sums = builder.info.metadata["files"], builder.info.metadata["sha256"]
    stored = {"train": "train", "valid": "test" if same else "valid", "test": "test"}
    source = functools.cache(builder.as_data_source)  # Opened when a text is first read.

    def blocks(of: str, numbers: range) -> Iterator[bytes]:
        with _reading_records(records):
            for start in range(0, len(numbers), _RECORDS_PER_BLOCK):
                yield b"".join(
                    source(of)[i]["block"] for i in numbers[start : start + _RECORDS_PER_BLOCK]
                )

    splits = {
        split: tuple(_files(f"{name} {of}", files[of], functools.partial(blocks, of)))
        for split, of in stored.items()
    }
    digest = sums[WHOLE] if corpus.cuts else digest_of(sums[of] for of in stored.values())
    size = sum(file.size for split, of in stored.items() if split == of for file in splits[split])
    description = (
        f"{corpus.title}, {size:,} bytes{', validation on the test split' if same else ''}"
    )
    return Text(str(name), description, digest, splits, closed_alphabet=corpus.closed_alphabet)


def _files(
    name: str, stored: list[tuple[str, int, int]], blocks: Callable[[range], Iterator[bytes]]
) -> Iterator[File]:
    """Yields the files of a split in the order of their names.

    This order may differ from the order of their records.
    """
    starts = itertools.accumulate((count for _, _, count in stored), initial=0)
    for (file, size, count), first in sorted(zip(stored, starts, strict=False)):
        name_of = f"{name}, {file}" if len(stored) > 1 else name
        yield File(name_of, size, functools.partial(blocks, range(first, first + count)))


def _reading_records(folder: Path) -> contextlib.AbstractContextManager[None]:
    return _refusing_damage(
        f"the prepared text in {folder} is corrupted", "Remove this directory to prepare it again."
    )


def _reading(path: str, url: str) -> contextlib.AbstractContextManager[None]:
    advice = f"It may be corrupted or incomplete. Download it again from {url}"
    return _refusing_damage(f"{path} cannot be read", advice)


@contextlib.contextmanager
def _refusing_damage(what: str, advice: str) -> Iterator[None]:
    """Turns any error into a `UserError` of one line.

    Corrupted archives and records raise nearly any type of error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} ({first_line(error)}). {advice}") from error


# Records


class PublishedText(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus as records of its files, written without TensorFlow.

    The files come from `files_in`, or are downloaded.

    `ShardBasedBuilder` writes records as they come. `GeneratorBasedBuilder` sorts them first, for
    which it needs TensorFlow above 1 GB.
    """

    # Raise it whenever the same corpus would give other records or metadata.
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, name: CorpusName, *, data_dir: Path, files_in: str = ""):
        self.name, self._corpus, self._files_in = f"txl_{name}", CORPORA[name], files_in
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self._corpus.title,
            features=tfds.features.FeaturesDict(
                {"block": tfds.features.Tensor(shape=(), dtype=np.object_)}
            ),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        self.info.metadata["sha256"] = {part: self._checked_digest(part) for part in self._tallies}

    def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, Any]:
        corpus, stored, shards = self._corpus, {}, {}
        layout = fit(
            find_files(corpus, self._files_in, dl_manager), corpus.layouts + corpus.own_layouts
        )
        self._tallies = {
            part: {place: Tally() for place in places} for part, places in layout.items()
        }
        for part, places in layout.items():
            # Before any is read.
            self._check(part, Facts(size=sum(place.size for place in places)))
            sizes = {place: tuple(corpus.cuts.values()) or (place.size,) for place in places}
            records = self._records(part, sizes)
            for split, of_files in zip(
                corpus.cuts or [part], zip(*sizes.values(), strict=True), strict=True
            ):
                counts = [-(-size // RECORD_BYTES) for size in of_files]
                names = (posixpath.basename(place.name) for place in places)
                stored[split] = [*zip(names, of_files, counts, strict=True)]
                # A split has at least one file of records.
                lefts = range(sum(counts), 0, -SHARD_RECORDS) or [0]
                shards[split] = [
                    functools.partial(itertools.islice, records, min(SHARD_RECORDS, n))
                    for n in lefts
                ]
        self.info.metadata["files"] = stored
        return shards

    def _records(
        self, part: str, sizes: "dict[Place, tuple[int, ...]]"
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yields the records of a part's splits, one split after the other, and counts them."""
        counts_words = self._corpus.facts[part].tokens is not None
        with bar(f"preparing {part}", sum(map(sum, sizes.values()))) as shown:
            for number, (place, block) in enumerate(read_files(sizes)):
                self._tallies[part][place].add(block, words=counts_words)
                shown.update(len(block))
                yield number, {"block": block}

    def _checked_digest(self, part: str) -> str:
        """Returns a part's sha256.

        Raises `UserError` if it, or a count, is not the published one.
        """
        tallies, known = self._tallies[part], self._corpus.facts[part]
        sums = sorted(
            (posixpath.basename(place.name), tally.sha256.hexdigest())
            for place, tally in tallies.items()
        )
        digest = sums[0][1] if len(sums) == 1 else digest_of(sha256 for _, sha256 in sums)
        lines, words = (
            sum(getattr(tally, count) for tally in tallies.values()) for count in ("lines", "words")
        )
        self._check(
            part,
            Facts(
                tokens=words + lines, lines=lines, sha256=digest if known.tokens is None else None
            ),
        )
        if known.tokens is not None and known.sha256 not in (None, digest):
            say(
                f"note: the {part} split of {self._corpus.title} in {next(iter(tallies)).path} "
                "has as many tokens as the published one, but other bytes. "
                "Scores are comparable only if the difference is white space.",
            )
        return digest

    def _check(self, part: str, found: Facts) -> None:
        """Raises `UserError` if a fact of a part is known and another was found."""
        if wrong := _difference(self._corpus.facts[part], found):
            place, *others = self._tallies[part]
            where = f"{place.member} in {place.path}" if place.member else place.path
            more = f" and {len(others)} more" if others else ""
            of = (
                self._corpus.title
                if self._corpus.cuts
                else f"the {part} split of {self._corpus.title}"
            )
            advice = f"Download it again from {place.url}{self._corpus.advice}"
            raise UserError(f"{where}{more} does not match {of}: {wrong}. {advice}")

    def _log_download_bytes(self) -> None:
        """Does nothing: tensorflow-datasets would print that sizes are unknown."""

    _log_download_done = _log_download_bytes


def _difference(known: Facts | Remote, found: Facts) -> str:
    """Describes the first known fact that was found to differ: "12 bytes instead of 10".

    Returns "" if no known fact differs.
    """
    for fact, shown in _FACTS.items():
        expected, value = getattr(known, fact, None), getattr(found, fact)
        if None not in (expected, value) and expected != value:
            return shown.format(value, expected)
    return ""


class Tally:
    """Counts of a file whose blocks are added one by one."""

    def __init__(self) -> None:
        self.sha256, self.lines, self.words = hashlib.sha256(), 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_line = self._in_word = False

    def add(self, block: bytes, *, words: bool) -> None:
        """Counts the next bytes, at least one.

        Words, as of `str.split`, are counted on request: that takes longer.
        """
        self.sha256.update(block)
        # Also a last one without its newline.
        self.lines += block.count(b"\n", 0, -1) + (not self._in_line)
        self._in_line = not block.endswith(b"\n")
        if words and (text := self._decoder.decode(block)):  # Else it ended inside a character.
            self.words += len(text.split()) - (self._in_word and not text[0].isspace())
            self._in_word = not text[-1].isspace()


# Where the files are: unpacked in the data directory, in archives there, or on the network


class Place(NamedTuple):
    """Where a file is."""

    name: str  # Its path below a directory, or in its archive.
    size: int  # Bytes.
    path: str  # Of the file, or of the archive that it is a member of.
    member: str  # Its name in the archive; empty for a plain file.
    url: str  # To get the file or the archive from again.


def find_files(corpus: PublishedCorpus, data_dir: str, manager: Any) -> list[Place]:
    """Opens the corpus's files, in the first directory that has all of them, or downloaded.

    Raises `UserError` if only some of them are there, or none and they cannot be downloaded, or
    they are not official.
    """
    folders, partly = corpus.places(data_dir), ""
    for folder in folders:
        for names in corpus.file_sets(os.path.basename(folder)):
            paths = {name: os.path.join(folder, name) for name in names}
            lacking = [name for name, path in paths.items() if not os.path.isfile(path)]
            if not lacking:
                for official in itertools.chain(*corpus.sources):
                    if official.is_archive and official.file in paths:
                        _check_official(paths[official.file], official)
                return open_files(
                    [(name, path, corpus.url_of(name)) for name, path in paths.items()]
                )
            if len(lacking) < len(names):
                there, urls = (
                    min(set(names) - set(lacking)),
                    " and ".join(dict.fromkeys(map(corpus.url_of, lacking))),
                )
                lacks = (
                    f"{folder} has {there}, but not {_some(lacking)} of {corpus.title}. "
                    f"Download it from {urls}"
                )
                partly = partly or lacks
    require(not partly, partly)
    return _download(corpus, folders, manager)


def _check_official(path: str, official: Remote) -> None:
    found = Facts(size=os.path.getsize(path), sha256=official.sha256 and storage.sha256(path))
    wrong = _difference(official, found)
    require(
        not wrong,
        f"{path} does not match the official file: {wrong}. Download it again from {official.url}",
    )


def _download(corpus: PublishedCorpus, folders: list[str], manager: Any) -> list[Place]:
    """Downloads the first source that can be. Raises `UserError` if none can."""
    failed = []
    for source in corpus.sources:
        files, remote = list[tuple[str, str, str]](), source[0]
        try:
            # Asked first, as the manager retries for minutes.
            requests.head(remote.url, timeout=_ASK_SECONDS, allow_redirects=True).raise_for_status()
            for remote in source:  # One by one, so that the one that fails is known.
                files.append((remote.file, str(manager.download(remote.url)), remote.url))
                _check_official(files[-1][1], remote)
            return open_files(files)
        except (
            tfds.download.DownloadError,
            NonMatchingChecksumError,
            requests.RequestException,
            UserError,
        ) as error:
            # Others have several lines, of layers of libraries.
            is_short = isinstance(
                error, tfds.download.DownloadError | requests.HTTPError | UserError
            )
            failed.append(f"{remote.url} failed ({error if is_short else type(error).__name__})")
    wanted = ", or ".join(
        " and ".join(remote.url for remote in source) for source in corpus.sources
    )
    missing = (
        f"{corpus.title} is not in {' or '.join(folders)}, and downloading it failed "
        f"({'; '.join(failed)})"
    )
    raise UserError(f"{missing}. Put {wanted} into {folders[0]} (--data_dir){corpus.advice}")


def fit(places: Sequence[Place], layouts: Sequence[Layout]) -> dict[str, list[Place]]:
    """Returns the files of each part, by the first layout whose files are all there.

    A file is found by the end of its path: 'data/a.txt' is also './old/data/a.txt'. Raises
    `UserError` if no layout fits, or a file is there twice.
    """
    holder = " and ".join(dict.fromkeys(place.path for place in places))
    urls = " and ".join(dict.fromkeys(place.url for place in places))
    found = {
        tail: [
            place for place in places if f"/{place.name}".replace("\\", "/").endswith(f"/{tail}")
        ]
        for tail in itertools.chain(*(names for layout in layouts for names in layout.values()))
    }
    lacking = [
        [tail for tail in itertools.chain(*layout.values()) if not found[tail]]
        for layout in layouts
    ]
    least, there = _some(min(lacking, key=len)), _some([place.name for place in places])
    require(
        not least, f"{holder} has no {least} (it contains {there}). Download it again from {urls}"
    )
    layout = layouts[lacking.index([])]
    for tail in itertools.chain(*layout.values()):
        both = " and ".join(place.name for place in found[tail])
        require(len(found[tail]) == 1, f"{holder} has both {both}, so it is ambiguous. Remove one.")
    return {
        part: sorted((found[tail][0] for tail in tails), key=places.index)
        for part, tails in layout.items()
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# Files and archives as streams


def open_files(files: Sequence[tuple[str, str, str]]) -> list[Place]:
    """Opens files, given by name, path and URL, and the members of archives.

    Raises `UserError` for a corrupted one.
    """
    places: dict[str, Place] = {}
    for file, path, url in files:
        with _reading(path, url):
            found = [(member, size) for member, size, _ in members(path)]
            if not found:
                raise EOFError("it is empty")
        for member, size in found:
            name = member or file
            # `read_files` takes the first too.
            places.setdefault(name, Place(name, size, path, member, url))
    return list(places.values())


def read_files(sizes: Mapping[Place, Sequence[int]]) -> Iterator[tuple[Place, bytes]]:
    """Yields the bytes of files in pieces of these sizes, each in blocks of a record.

    The last block may be shorter.

    An archive is read no further than needed. Raises `UserError` if it is corrupted, or a file
    became shorter.
    """
    for (path, url), places in itertools.groupby(sizes, key=lambda place: (place.path, place.url)):
        wanted = {place.member: place for place in places}
        with _reading(path, url):
            for member, _, open_member in members(path):
                if place := wanted.pop(member, None):
                    with open_member() as stream:
                        for size in sizes[place]:
                            yield from ((place, block) for block in _blocks(stream, size))
                if not wanted:
                    break


def _blocks(stream: IO[bytes], size: int) -> Iterator[bytes]:
    for left in range(size, 0, -RECORD_BYTES):
        block = stream.read(min(left, RECORD_BYTES))
        if len(block) < min(left, RECORD_BYTES):
            raise EOFError(f"it ends {left - len(block):,} bytes early")
        yield block


Members = Iterator[tuple[str, int, Callable[[], Any]]]


def members(path: str) -> Members:
    """Yields the files of a zip or tar archive.

    Each file is a tuple: its name, its size in bytes, and a function that opens it. The function
    works until the next file is yielded.

    Nothing is unpacked, so names may be of any kind. Another file is its own only member, without a
    name. Raises nearly any exception if the archive is corrupted.
    """
    if path.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    yield entry.filename, entry.file_size, functools.partial(archive.open, entry)
    elif path.endswith(ARCHIVE_SUFFIXES):
        yield from _tar_members(path)
    else:
        yield "", os.path.getsize(path), functools.partial(open, path, "rb")


# Bytes of a name or of attributes in a tar. `tarfile` reads them whole, and before Python 3.11.10
# and 3.12.6 it searches attributes in quadratic time, 0.2 s at this length. The longest path of
# Linux has half as many.
_MAX_ATTRIBUTES = 8 << 10


class _Header(tarfile.TarInfo):
    """A header that is an error if `tarfile` would read data of any size after it into memory."""

    @staticmethod
    def _refuse(*_: Any) -> None:
        raise ValueError(
            f"it has a sparse file, or a name or attributes above {_MAX_ATTRIBUTES >> 10} KiB"
        )

    # tarfile's reader of the list of holes in a newer kind of sparse file.
    _proc_gnusparse_10 = _refuse

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type == tarfile.GNUTYPE_SPARSE or (
            not header.isreg() and header.size > _MAX_ATTRIBUTES
        ):
            cls._refuse()
        return header


def _tar_members(path: str) -> Members:
    """Yields the files of a tar archive, either plain or compressed by gzip.

    The archive can only be read in its own order.
    """
    with open(path, "rb") as file:
        # tarfile's own reader takes a cut gzip file for a whole one and does not verify its
        # checksum.
        stream: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            for member in archive:
                if member.isfile():
                    yield member.name, member.size, functools.partial(archive.extractfile, member)
        while stream.read(1 << 20):  # gzip's checksum comes after the archive's end.
            pass
