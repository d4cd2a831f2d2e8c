"""Published corpora: files are found or downloaded, checked, and kept as records of tensorflow-datasets.

A record is a block of bytes. A split's records in order are its files, in the order in which they could be read.
(Lines would be the simpler record, but reading a million of them one by one takes seconds.) Next to the records,
metadata.json stores what was counted on the way:

sha256   by part: of its file, or of its files' sha256 in order
files    by split: name, bytes and records of each file, in the order of the records

Archives are read as streams. Nothing is unpacked, but an archive with a member that would leave its directory is
rejected all the same, because no corpus has one.
"""

import codecs
import contextlib
import dataclasses
import errno
import functools
import gzip
import hashlib
import itertools
import os
import posixpath
import re
import shutil
import stat
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from txl_jax.config import CorpusName, Heldout
from txl_jax.data.published import ARCHIVE_SUFFIXES, CORPORA, USE_PREFIX, Layout, PublishedCorpus, Remote
from txl_jax.data.text import File, Text, bar, digest_of
from txl_jax.errors import UserError
from txl_jax.runtime import storage

RECORD_BYTES = 1 << 16
SHARD_RECORDS = 1 << 10  # Records per file: tensorflow-datasets holds a file's records in memory while it writes.
_RECORDS_PER_BLOCK = 16  # Together a megabyte.


def read(name: CorpusName, *, data_dir: str, cache_dir: str, heldout: Heldout = Heldout.SEPARATE) -> Text:
    """Reads a published corpus, checked against its published facts.

    Unless it is prepared in the directory `tfds` of `cache_dir` already, its files are searched for in `data_dir`.
    Raises `UserError` if the files are missing and cannot be downloaded, or are not the published ones, if the prepared
    corpus is corrupted, or `cache_dir` cannot be written to.
    """
    corpus, folder = CORPORA[name], Path(cache_dir, "tfds").absolute()
    records = folder / f"txl_{name}" / str(PublishedText.VERSION)
    done = records / "dataset_info.json"  # It appears with the complete directory, which is renamed.
    if not done.is_file():
        find = find_files(corpus, Path(data_dir))
        with storage.writable(folder, what=corpus.title), storage.locked(folder / f".txl_{name}.lock"):
            if not done.is_file():  # Otherwise another process has prepared it while this one waited.
                _prepare(name, folder, find)
    try:
        return _open(name, folder, records, heldout)
    except Exception as error:  # Damage to the files beside the records raises nearly any type.
        raise _damaged(records, error) from error


def _prepare(name: CorpusName, folder: Path, find: "Find") -> None:
    """Writes the records. The caller holds the lock, so partial ones are left over from a killed process."""
    print(f"preparing {CORPORA[name].title} in {folder} (once)", flush=True)
    shutil.rmtree(folder / f"txl_{name}", ignore_errors=True)
    downloads = folder / f"txl_{name}_downloads"
    for leftover in downloads.rglob("*.tmp.*"):
        shutil.rmtree(leftover)
    try:
        BUILDERS[name](data_dir=folder, find=find).download_and_prepare(download_dir=downloads)
    except RuntimeError as error:  # ArrayRecord could not write: 'write() failed: No space left on device; ...'
        raise OSError(errno.EIO, str(error).partition(";")[0]) from error
    except ValueError:  # The download is not the corpus. After other errors, such as a full disk, it is kept.
        shutil.rmtree(downloads, ignore_errors=True)
        raise
    shutil.rmtree(downloads, ignore_errors=True)


def _open(name: CorpusName, folder: Path, records: Path, heldout: Heldout) -> Text:
    """Returns the text of prepared records."""
    builder, corpus, same = BUILDERS[name](data_dir=folder), CORPORA[name], heldout is Heldout.PUBLISHED
    metadata = builder.info.metadata
    # Both held-out shards are in the cache.
    stored = {"train": "train", "valid": "test" if same else "valid", "test": "test"}
    source = functools.cache(builder.as_data_source)  # Opened when a text is first read.
    splits = {
        split: tuple(_files(f"{name} {of}", metadata["files"][of], functools.partial(source, of), records))
        for split, of in stored.items()
    }
    sums = [metadata["sha256"][corpus.ranges()[of][0]] for of in stored.values()]
    digest = sums[0] if corpus.cuts else digest_of(sums)
    size = sum(file.size for split, of in stored.items() if split == of for file in splits[split])
    description = f"{corpus.title}, {size:,} bytes{', validation on the test text' if same else ''}"
    return Text(str(name), description, digest, splits, closed_alphabet=corpus.closed_alphabet)


def _files(name: str, stored: list[tuple[str, int, int]], source: Callable[[], Any], records: Path) -> Iterator[File]:
    """Yields the files of a split in the order of their names, which may differ from the order of their records."""
    starts = itertools.accumulate((count for _, _, count in stored), initial=0)
    for (file, size, count), first in sorted(zip(stored, starts, strict=False)):
        blocks = functools.partial(_stored_blocks, source, range(first, first + count), records)
        yield File(f"{name}, {file}" if len(stored) > 1 else name, size, blocks)


def _stored_blocks(source: Callable[[], Any], numbers: range, records: Path) -> Iterator[bytes]:
    try:
        for start in range(0, len(numbers), _RECORDS_PER_BLOCK):
            yield b"".join(source()[i]["block"] for i in numbers[start : start + _RECORDS_PER_BLOCK])
    except Exception as error:  # Damage to the records raises nearly any type too.
        raise _damaged(records, error) from error


def _damaged(records: Path, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(
        f"the prepared text in {records} is corrupted ({reason}). Remove this directory to prepare it again"
    )


# Records


class PublishedText(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus as records of the files that `find` returns, written without TensorFlow.

    `ShardBasedBuilder` writes records as they come. `GeneratorBasedBuilder` sorts them first, for which it needs
    TensorFlow above 1 GB.
    """

    VERSION = tfds.core.Version("1.0.0")  # Raise it whenever the same corpus would give other records or metadata.
    NAME: ClassVar[CorpusName]

    def __init__(self, *, find: "Find | None" = None, **kwargs: Any):
        self._corpus, self._find = CORPORA[self.NAME], find
        self._tallies: dict[str, dict[str, Tally]] = {}  # By part and file.
        super().__init__(**({"file_format": "array_record"} | kwargs))

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self._corpus.title,
            features=tfds.features.FeaturesDict({"block": tfds.features.Tensor(shape=(), dtype=np.object_)}),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        self.info.metadata["files"] = {}  # `_records` fills it.
        super()._download_and_prepare(dl_manager, download_config)
        self.info.metadata["sha256"] = {part: digest(files) for part, files in self._tallies.items()}

    def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, list[Callable[[], Iterator[Any]]]]:
        assert self._find is not None, "a corpus is prepared by `read`"
        files = self._find(dl_manager)
        sizes = {name: place.size for name, place in files.places.items()}
        layout = fit(files, self._corpus.layouts + self._corpus.own_layouts)
        for part, names in layout.items():  # Before any is read.
            known, size = self._corpus.facts[part].size, sum(sizes[name] for name in names)
            if known not in (None, size):
                self._refuse(files, names, f"{size:,} bytes and {self._corpus.title} has exactly {known:,}")
        shards = {}
        for split, (part, first, last) in self._corpus.ranges().items():
            wanted = {name: len(range(sizes[name])[first:last]) for name in layout[part]}
            records = self._records(files, split, wanted)
            # All shards take from the same stream; the last one reaches its end, where the part is checked.
            take = functools.partial(itertools.islice, records, SHARD_RECORDS)
            n_full = max(sum(map(_n_record, wanted.values())) - 1, 0) // SHARD_RECORDS
            shards[split] = [take] * n_full + [functools.partial(iter, records)]
        return shards

    def _records(self, files: "Files", split: str, sizes: dict[str, int]) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yields a split's records and counts them; its part is checked once all of it was read."""
        part, first, last = self._corpus.ranges()[split]
        words = self._corpus.facts[part].tokens is not None
        tallies = self._tallies.setdefault(part, defaultdict(lambda: Tally(words=words)))
        names, keys = dict[str, None](), itertools.count()
        with bar(f"preparing {split}", sum(sizes.values())) as shown:
            for name, block in files.read(sizes, first):
                names[name] = None
                tallies[name].add(block)
                shown.update(len(block))
                if block:
                    yield next(keys), {"block": block}
        stored = [(posixpath.basename(name), sizes[name], _n_record(sizes[name])) for name in names]
        self.info.metadata["files"][split] = stored
        if last is None or split == list(self._corpus.cuts)[-1]:
            self._check(files, part)

    def _check(self, files: "Files", part: str) -> None:
        known, tallies = self._corpus.facts[part], self._tallies[part]
        of = self._corpus.title if self._corpus.cuts else f"the {part} split of {self._corpus.title}"
        for name, what in (("tokens", "tokens (words and line ends)"), ("lines", "lines")):
            expected, count = getattr(known, name), sum(getattr(tally, name) for tally in tallies.values())
            if expected not in (None, count):
                self._refuse(files, list(tallies), f"{count:,} {what} and {of} has exactly {expected:,}")
        if known.sha256 not in (None, found := digest(tallies)):
            if known.tokens is None:
                self._refuse(files, list(tallies), f"text of sha256 {found} and {of} has {known.sha256}")
            print(
                f"note: {of} in {files.holder} has as many tokens as the published one, but other bytes; scores are "
                "comparable only if just its white space differs",
                flush=True,
            )

    def _refuse(self, files: "Files", names: list[str], wrong: str) -> None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        prefix = f", or, to run on a part of it, {USE_PREFIX}" if self._corpus.cuts else ""
        place = files.places[names[0]]
        where = f"{place.member} in {place.path}" if place.member else place.path
        raise UserError(f"{where}{more} holds {wrong}; get it again from {place.url}{prefix}")

    def _log_download_bytes(self) -> None:
        """Does nothing: tensorflow-datasets would print that sizes are unknown."""

    _log_download_done = _log_download_bytes


BUILDERS = {  # Their names are those of the directories of records.
    name: type(f"Txl{name.value.title()}", (PublishedText,), {"NAME": name, "name": f"txl_{name}"}) for name in CORPORA
}


def _n_record(size: int) -> int:
    return -(-size // RECORD_BYTES)


# Where the files are: unpacked in the data directory, in archives there, or on the network


def find_files(corpus: PublishedCorpus, data_dir: Path) -> "Find":
    """Returns the first place that has the corpus's files, or the sources that answer.

    Raises `UserError`, which names files, directory and answers, if there are neither, or only some of the files.
    """
    places, partly = list(map(Path, corpus.places(str(data_dir)))), list[str]()
    for place in places:
        layouts = corpus.layouts + (corpus.own_layouts if place.name in corpus.folders else ())
        unpacked = [list(itertools.chain(*layout.values())) for layout in layouts]
        for names in [*unpacked, *corpus.packed]:
            paths = {name: str(place / name) for name in names}
            lacking = [name for name, path in paths.items() if not os.path.isfile(path)]
            if not lacking:
                holder = str(place) if names in unpacked else " and ".join(paths.values())
                return functools.partial(_open_local, corpus, holder, paths)
            if len(lacking) < len(names):
                there = next(name for name in names if name not in lacking)
                urls = " and ".join(dict.fromkeys(map(corpus.url_of, lacking)))
                partly.append(f"{place} has {there} but lacks {_some(lacking)} of {corpus.title}; add them from {urls}")
    if partly:
        raise UserError(partly[0])
    answers = {source: _ask(source[0].url) for source in corpus.sources}
    if all(answers.values()):
        raise UserError(_missing(corpus, places, answers))
    return functools.partial(_download, corpus, places, answers)


def _open_local(corpus: PublishedCorpus, holder: str, paths: dict[str, str], manager: Any) -> "Files":
    """Opens files of this machine; an archive of an official name must be the official file."""
    del manager
    official = {remote.file: remote for remote in itertools.chain(*corpus.sources) if remote.is_archive}
    for name in official.keys() & paths.keys():
        if wrong := _difference(paths[name], official[name]):
            raise UserError(f"{paths[name]} has {wrong} like {corpus.url_of(name)}; get it again from there")
    return open_files(holder, [(name, path, corpus.url_of(name)) for name, path in paths.items()])


def _difference(path: str, official: Remote) -> str:
    """Returns "12 bytes and not 10" if a file is not the official one, else an empty string."""
    if official.size not in (None, size := os.path.getsize(path)):
        return f"{size:,} bytes and not {official.size:,}"
    if official.sha256 is not None and (sha256 := storage.sha256(path)) != official.sha256:
        return f"sha256 {sha256} and not {official.sha256}"
    return ""


# Downloads, by tensorflow-datasets' download manager, which caches files

Source = tuple[Remote, ...]
_CONNECT_SECONDS, _ANSWER_SECONDS = 3, 10
_REASONS = (  # Without the layers of libraries. The first that fits counts.
    (requests.exceptions.ProxyError, "cannot be reached through the proxy"),
    (requests.Timeout, "does not answer in time"),
    (requests.exceptions.SSLError, "has no certificate that this machine trusts"),
    (requests.ConnectionError, "cannot be reached"),
    (NonMatchingChecksumError, "gave another file than tensorflow-datasets knows"),
)


def _ask(url: str) -> str:
    """Asks a server for a file, as the download manager retries for minutes; returns "URL fails so" or ""."""
    try:
        answer = requests.head(url, timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS), allow_redirects=True)
    except requests.RequestException as error:
        return f"{url} {_reason(error)}"
    return "" if answer.status_code < 400 else f"{url} answers with HTTP status {answer.status_code}"


def _download(corpus: PublishedCorpus, places: list[Path], answers: dict[Source, str], manager: Any) -> "Files":
    """Downloads the first source that can be, of those that answered; raises `UserError` if none can."""
    for source in [source for source, why in answers.items() if not why]:
        files: list[tuple[str, str, str]] = []
        try:
            for remote in source:  # One by one, so that the one that fails is known.
                files.append((remote.file, str(manager.download(remote.url)), remote.url))
                if wrong := _difference(files[-1][1], remote):
                    raise UserError(f"{remote.url} gave a file with {wrong}")
            return open_files(files[0][1] if len(source) == 1 else posixpath.dirname(source[0].url), files)
        except (tfds.download.DownloadError, NonMatchingChecksumError, requests.RequestException) as error:
            answers[source] = f"{remote.url} {_reason(error)}"
        except ValueError as error:  # The file has another size, or is not an archive, and the error has its path.
            answers[source] = str(error)
            for _, path, url in files:
                answers[source] = answers[source].replace(path, url)
    raise UserError(_missing(corpus, places, answers))


def _reason(error: Exception) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), f"failed ({error})")


def _missing(corpus: PublishedCorpus, places: list[Path], answers: dict[Source, str]) -> str:
    """Describes which files belong where, and why they were not downloaded."""
    sized = {each: f" ({each.size:,} bytes)" if each.size else "" for each in itertools.chain(*corpus.sources)}
    wanted = ", or ".join(" and ".join(each.url + sized[each] for each in source) for source in corpus.sources)
    packed = ", packed or unpacked," if any(remote.is_archive for remote in sized) else ""
    prefix = f", or, to run on a part of it, {USE_PREFIX}" if corpus.cuts else ""
    return (
        f"{corpus.title} is in none of {', '.join(map(str, places))}, and downloading it failed "
        f"({'; '.join(answers.values())}); put {wanted}{packed} into {places[0]} (--data_dir){prefix}"
    )


# Files and archives as streams


class Place(NamedTuple):
    """Where a file is."""

    path: str  # Of the file, or of the archive that it is a member of.
    member: str  # Its name in the archive; empty for a plain file.
    size: int  # Bytes.
    url: str  # To get the file or the archive from again.


@dataclasses.dataclass(frozen=True)
class Files:
    """A corpus's files: plain ones, and the members of archives."""

    holder: str  # Archive or directory, for errors.
    places: dict[str, Place]  # By name.

    def read(self, sizes: Mapping[str, int], first: int = 0) -> Iterator[tuple[str, bytes]]:
        """Yields the bytes of files, so many of each from byte `first` on, in blocks of a record after the file's name.

        Plain files come in the order of their names, members in the order of their archive, which is read no further
        than needed. The first block of each is empty, so that a file without bytes is counted too. Raises `UserError`
        if an archive is damaged, or a file became shorter.
        """
        wanted: dict[tuple[str, str], dict[str, str]] = {}
        for name in sorted(sizes):
            place = self.places[name]
            wanted.setdefault((place.path, place.url), {})[place.member] = name
        for (path, url), names in wanted.items():
            with _reading(path, url):
                for member, _, open_member in members(path):
                    if member in names:
                        name = names.pop(member)
                        with open_member() as stream:
                            for _ in _blocks(stream, first):  # They belong to another split.
                                pass
                            yield name, b""
                            yield from ((name, block) for block in _blocks(stream, sizes[name]))
                    if not names:
                        break


def _blocks(stream: IO[bytes], size: int) -> Iterator[bytes]:
    for left in range(size, 0, -RECORD_BYTES):
        block = stream.read(min(left, RECORD_BYTES))
        if len(block) < min(left, RECORD_BYTES):
            raise EOFError(f"it ends {left - len(block):,} bytes early")
        yield block


def open_files(holder: str, files: Sequence[tuple[str, str, str]]) -> Files:
    """Opens files, given by name, path and URL, and of archives their members; a member of several is archive/member.

    Raises `UserError` if an archive is damaged or empty, or a member's name leads out of it.
    """
    places: dict[str, Place] = {}
    for file, path, url in files:
        with _reading(path, url):
            for member, size, _ in members(path):
                called = f"{file}/{member}" if member and len(files) > 1 else member or file
                places.setdefault(called, Place(path, member, size, url))  # `read` takes the first of two as well.
    if not places:
        raise UserError(f"{holder} holds nothing; get it again from {' and '.join(url for _, _, url in files)}")
    return Files(holder, places)


Members = Iterator[tuple[str, int, Callable[[], Any]]]


def members(path: str) -> Members:
    """Yields the files of a zip or tar archive: name, bytes, and a function that opens it until the next one comes.

    Another file is its own only member, without a name. Raises `UserError` if a member's name leads out of the archive,
    or it is a device, and nearly any exception if the archive is damaged.
    """
    if path.endswith(".zip"):
        yield from _zip_members(path)
    elif path.endswith(ARCHIVE_SUFFIXES):
        yield from _tar_members(path)
    else:
        yield "", os.path.getsize(path), functools.partial(open, path, "rb")


def _zip_members(path: str) -> Members:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            target = None
            if stat.S_ISLNK(entry.external_attr >> 16):  # Its content is the target.
                with archive.open(entry) as stream:
                    target = stream.read(4096).decode("utf-8", "replace")
            _check_safe(path, entry.filename, target, posixpath.dirname(entry.filename))
        for entry in map(archive.getinfo, sorted(set(archive.namelist()))):
            if not entry.is_dir():
                yield entry.filename, entry.file_size, functools.partial(archive.open, entry)


def _tar_members(path: str) -> Members:
    """Yields the files of a tar archive, plain or compressed by gzip, which can only be read in its own order."""
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open(path, "rb"))
        if file.peek(2)[:2] == b"\x1f\x8b":
            # tarfile's own reader takes a cut gzip file for a whole one and does not verify its checksum.
            file = stack.enter_context(gzip.open(file))
        for member in (archive := stack.enter_context(tarfile.open(fileobj=file, mode="r|"))):
            target = member.linkname if member.issym() or member.islnk() else None
            # A hard link is relative to the archive's root.
            _check_safe(path, member.name, target, "" if member.islnk() else posixpath.dirname(member.name))
            if member.ischr() or member.isblk() or member.isfifo():
                raise UserError(f"{path} is refused: its member {member.name!r} is a device; a corpus has none")
            if member.isfile():
                yield member.name, member.size, functools.partial(archive.extractfile, member)
        while file.read(1 << 20):  # gzip's checksum comes after the archive's end.
            pass


@contextlib.contextmanager
def _reading(path: str, again: str) -> Iterator[None]:
    """Turns the errors of damaged archives, and of a file that became shorter, into a `UserError`."""
    try:
        yield
    except (UserError, PermissionError):
        raise
    except Exception as error:  # Damaged archives raise nearly any type.
        if path.endswith(ARCHIVE_SUFFIXES):
            raise UserError(
                f"{path} cannot be unpacked ({error}); it may be damaged or only partly downloaded, get it again from "
                f"{again}"
            ) from error
        if isinstance(error, EOFError):
            raise UserError(f"{path} became shorter while it was read; leave it alone while a run starts") from error
        raise


def _check_safe(path: str, name: str, target: str | None, folder: str) -> None:
    """Refuses a member whose name, or a link whose target, seen from `folder`, leads out of the archive's folder."""
    member, aim = (text.replace("\\", "/") for text in (name, target or ""))  # Windows may have written it.
    is_absolute = any(re.match("/|[A-Za-z]:", place) for place in (member, aim))
    leads_out = ".." in (*member.split("/"), posixpath.normpath(posixpath.join(folder, aim)).split("/")[0])
    if is_absolute or leads_out:
        link = f", a link to {target!r}," if target is not None else ""
        raise UserError(
            f"{path} is refused: its member {name!r}{link} leads out of the archive's own folder, as no corpus's does; "
            "get the archive from another place"
        )


def fit(files: Files, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    """Returns the files of each part, by the first layout whose files are all there.

    A file is found by the end of its path: 'data/a.txt' is also './old/data/a.txt'. Raises `UserError` if no layout
    fits (it names what is missing and what is there), or a file is there twice.
    """
    missing: list[list[str]] = []
    for layout in layouts:
        found = {
            tail: [name for name in files.places if f"/{name}".replace("\\", "/").endswith(f"/{tail}")]
            for tail in itertools.chain(*layout.values())
        }
        missing.append([tail for tail, names in found.items() if not names])
        if missing[-1]:
            continue
        if twice := next((names for names in found.values() if len(names) > 1), None):
            raise UserError(f"{files.holder} holds {twice[0]} and {twice[1]}; remove one, as both could be meant")
        return {part: [found[tail][0] for tail in tails] for part, tails in layout.items()}
    urls = " and ".join(dict.fromkeys(place.url for place in files.places.values()))
    raise UserError(
        f"{files.holder} has no {_some(min(missing, key=len))} (it holds {_some(list(files.places))}); get it again "
        f"from {urls}"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


Find = Callable[[Any], Files]  # From a download manager to the corpus's files.


# Counts, taken while files are read


class Tally:
    """Counts of one file. Words, as of `str.split`, are only counted on request: that takes longer than the rest."""

    def __init__(self, *, words: bool):
        self._digest, self._newlines, self._last = hashlib.sha256(), 0, b""
        self._words, self._in_word, self._counts_words = 0, False, words
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, block: bytes) -> None:
        """Counts the file's next bytes."""
        self._digest.update(block)
        self._newlines += block.count(b"\n")
        self._last = block[-1:] or self._last
        if self._counts_words and (text := self._decoder.decode(block)):  # Else it ended inside a character.
            self._words += len(text.split()) - (self._in_word and not text[0].isspace())
            self._in_word = not text[-1].isspace()

    @property
    def sha256(self) -> str:
        """Returns the digest of the bytes so far, in hexadecimal."""
        return self._digest.hexdigest()

    @property
    def lines(self) -> int:
        """Returns the number of lines; a last line without its newline is a line too."""
        return self._newlines + (self._last not in (b"", b"\n"))

    @property
    def tokens(self) -> int:
        """Returns the number of words and line ends."""
        return self._words + self.lines


def digest(tallies: Mapping[str, Tally]) -> str:
    """Returns sha256 of a part: of its file's bytes, or, if it has several files, of their digests in order of name."""
    sums = [tallies[name].sha256 for name in sorted(tallies, key=posixpath.basename)]
    return sums[0] if len(sums) == 1 else digest_of(sums)
