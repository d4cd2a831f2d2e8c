"""Published corpora: prepared once by their tensorflow-datasets builders, then read from the cache as a `Text`."""

import codecs
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import gzip
import hashlib
import itertools
import lzma
import os
import posixpath
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, cast

import numpy as np
import requests
import tensorflow_datasets as tfds
import tqdm
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from txl_jax.config import CorpusName, Heldout
from txl_jax.data.published import CORPORA, USE_PREFIX, Facts, Layout, PublishedCorpus, Remote
from txl_jax.data.text import SPLITS, File, Text
from txl_jax.errors import UserError
from txl_jax.runtime import storage

# -- Checks of a corpus's files: counts and digests taken while they are read, compared with the published ones.

_END_BYTES = 1 << 12  # Length of a file's end that is searched for empty lines.


class Tally:
    """Counts of one file.

    Words are those of `str.split`, as for word tokens. They are only counted on request: that takes longer than all
    the rest.
    """

    def __init__(self, *, words: bool):
        self.size = 0
        self._newlines = 0
        self._digest = hashlib.sha256()
        self._end = b""
        self._words: int | None = 0 if words else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_word = False

    def add(self, block: bytes) -> None:
        """Counts the file's next bytes, at least one."""
        self.size += len(block)
        self._newlines += block.count(b"\n")
        self._digest.update(block)
        self._end = (self._end + block)[-_END_BYTES:]
        if self._words is not None:
            self._count_words(self._decoder.decode(block))

    @property
    def sha256(self) -> str:
        """Returns the digest of the bytes so far, in hexadecimal."""
        return self._digest.hexdigest()

    @property
    def lines(self) -> int:
        """Returns the number of lines; a last line without its newline is a line too."""
        return self._newlines + (not self._end.endswith(b"\n") and self.size > 0)

    @property
    def tokens(self) -> int | None:
        """Returns the number of words and line ends; None if words were not counted."""
        return None if self._words is None else self._words + self.lines

    @property
    def empty_lines(self) -> int:
        """Returns the number of empty lines at the end."""
        return max(self._end.count(b"\n", len(self._end.rstrip(b"\r\n"))) - 1, 0)

    def _count_words(self, text: str) -> None:
        if not text or self._words is None:
            return  # The block ended inside its only character.
        self._words += len(text.split()) - (self._in_word and not text[0].isspace())
        self._in_word = not text[-1].isspace()


def digest(tallies: list[Tally]) -> str:
    """Returns sha256 of a part: of its file's bytes, or, if it has several files, of their digests in order."""
    if len(tallies) == 1:
        return tallies[0].sha256
    return hashlib.sha256("".join(tally.sha256 for tally in tallies).encode()).hexdigest()


def difference(known: Facts, tallies: list[Tally], *, of: str) -> str:
    """Returns "12 lines and OF has exactly 10" where a part's files differ from its facts; else an empty string."""
    if known.size is not None and (size := sum(tally.size for tally in tallies)) != known.size:
        return f"{size:,} bytes and {of} has exactly {known.size:,}"
    for name, what in (("tokens", "tokens (words and line ends)"), ("lines", "lines")):
        expected = getattr(known, name)
        if expected is not None and (count := sum(getattr(tally, name) for tally in tallies)) != expected:
            empty = max(tally.empty_lines for tally in tallies)
            ends = f" (it ends in {empty} empty line{'s' if empty > 1 else ''}; remove them)" if empty else ""
            return f"{count:,} {what} and {of} has exactly {expected:,}{ends}"
    if known.tokens is None and other_bytes(known, tallies):
        return f"text of sha256 {digest(tallies)} and {of} has {known.sha256}"
    return ""


def other_bytes(known: Facts, tallies: list[Tally]) -> bool:
    """Returns whether a part's digest is known and another."""
    return known.sha256 is not None and digest(tallies) != known.sha256


# -- Containers of a corpus's files: plain files, a zip or a tar archive, all read as streams.
#
# Nothing is ever unpacked to the disk, so a member's name is only compared; an archive with a member that would
# leave its folder is refused all the same, as no corpus has one.

_LONGEST_LINK = 4096  # Bytes that are read of the target of a link.
_DAMAGE = (  # All observed on damaged archives; OSError includes gzip's own.
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
    NotImplementedError,
    ValueError,
)


class Stream(Protocol):
    """A file that can be read from its start."""

    def read(self, size: int, /) -> bytes:
        """Returns the next `size` bytes, or fewer at the end."""


class Container(Protocol):
    """A collection of files that can be read as streams."""

    name: str  # For errors.

    @property
    def sizes(self) -> Mapping[str, int]:
        """Returns the bytes of each file, by name."""

    def where(self, file: str) -> str:
        """Returns the name of a file for errors."""

    def read(self, files: Collection[str]) -> Iterator[tuple[str, Stream]]:
        """Yields each file once, in the cheapest order; a stream is valid until the next one is yielded."""


class Files:
    """Files on this machine, by any names."""

    def __init__(self, name: str, paths: Mapping[str, str]):
        self.name, self.paths = name, paths
        self.sizes = {file: os.path.getsize(path) for file, path in paths.items()}

    def where(self, file: str) -> str:
        """Returns the name of a file for errors."""
        return self.paths[file]

    def read(self, files: Collection[str]) -> Iterator[tuple[str, Stream]]:
        """Yields each file once, in the order of their names."""
        for file in sorted(files):
            with open(self.paths[file], "rb") as stream:
                yield file, stream


class Zip:
    """A zip archive.

    Raises:
      UserError: it is damaged, or a member's name leads out of it. So does `read`.
    """

    def __init__(self, path: str, *, again: str):
        self.name, self._again = path, again
        with self._open() as archive:
            for member in archive.infolist():
                link = stat.S_ISLNK(member.external_attr >> 16)
                _check_safe(path, member.filename, _read_link(archive, member) if link else None)
            self.sizes = {member.filename: member.file_size for member in archive.infolist() if not member.is_dir()}

    def where(self, file: str) -> str:
        """Returns the name of a file for errors."""
        return f"{file} in {self.name}"

    def read(self, files: Collection[str]) -> Iterator[tuple[str, Stream]]:
        """Yields each file once, in the order of their names."""
        with self._open() as archive:
            for file in sorted(files):
                with archive.open(file) as stream:
                    yield file, _Checked(stream, self.sizes[file], self.name, self._again)

    @contextlib.contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        with _unpacking(self.name, self._again), zipfile.ZipFile(self.name) as archive:
            yield archive


class Tar:
    """A tar archive, plain or compressed by gzip. It can only be read from its start, in its own order.

    Raises:
      UserError: it is damaged, or a member's name leads out of it. So does `read`.
    """

    def __init__(self, path: str, *, again: str):
        self.name, self._again = path, again
        self.sizes: dict[str, int] = {}
        with self._open() as archive:
            for member in archive:
                _check_safe(path, member.name, _link_target(member))
                if member.ischr() or member.isblk() or member.isfifo():
                    raise UserError(f"{path} is refused: its member {member.name!r} is a device; a corpus has none")
                if member.isfile():
                    self.sizes.setdefault(member.name, member.size)  # `read` takes the first of two as well.

    def where(self, file: str) -> str:
        """Returns the name of a file for errors."""
        return f"{file} in {self.name}"

    def read(self, files: Collection[str]) -> Iterator[tuple[str, Stream]]:
        """Yields each file once, in the archive's order."""
        wanted = set(files)
        with self._open(to_the_end=False) as archive:
            for member in archive:
                if member.name in wanted and member.isfile():
                    wanted.remove(member.name)
                    stream = archive.extractfile(member)
                    assert stream is not None, "a regular file"
                    yield member.name, _Checked(stream, member.size, self.name, self._again)
                if not wanted:
                    return  # The rest need not be unpacked.

    @contextlib.contextmanager
    def _open(self, *, to_the_end: bool = True) -> Iterator[tarfile.TarFile]:
        with _unpacking(self.name, self._again), contextlib.ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(open(self.name, "rb"))
            if _is_gzip(file):
                # tarfile's own reader takes a cut gzip file for a whole one and does not verify its checksum.
                file = cast(IO[bytes], stack.enter_context(gzip.open(file)))
            yield stack.enter_context(tarfile.open(fileobj=file, mode="r|"))
            while to_the_end and file.read(1 << 20):  # gzip's checksum comes after the archive's end.
                pass


def open_archive(path: str, *, again: str) -> Container:
    """Opens the archive at `path`; its name's ending decides the kind.

    Args:
      again: URL to name if it is damaged.

    Raises:
      UserError: it is damaged, or a member's name leads out of it.
    """
    return (Zip if path.endswith(".zip") else Tar)(path, again=again)


def fit(container: Container, layouts: Sequence[Layout], *, again: str) -> dict[str, list[str]]:
    """Returns the files of each part, by the first layout whose files are all in the container.

    A file is found by the end of its path: 'data/a.txt' is also './old/data/a.txt'.

    Raises:
      UserError: no layout fits (names what is missing and what is there), or a file is there twice.
    """
    missing: list[list[str]] = []
    for layout in layouts:
        found = {part: [_matches(container, tail) for tail in tails] for part, tails in layout.items()}
        lacking = [tail for part in layout for tail, names in zip(layout[part], found[part], strict=True) if not names]
        if not lacking:
            return {part: [_only(container, names) for names in lists] for part, lists in found.items()}
        missing.append(lacking)
    raise UserError(
        f"{container.name} has no {_some(min(missing, key=len))} (it holds {_some(list(container.sizes)) or 'nothing'}"
        f"); get it again from {again}"
    )


class _Checked:
    """A stream of an archive's member; its errors name the archive as damaged."""

    def __init__(self, stream: Stream, size: int, path: str, again: str):
        self._stream, self._left, self._path, self._again = stream, size, path, again

    def read(self, size: int, /) -> bytes:
        with _unpacking(self._path, self._again):
            block = self._stream.read(size)
            self._left -= len(block)
            if not block and size and self._left:
                raise EOFError(f"it ends {self._left:,} bytes early")
        return block


@contextlib.contextmanager
def _unpacking(path: str, again: str) -> Iterator[None]:
    """Turns the errors of damaged archives into a `UserError`."""
    try:
        yield
    except (UserError, PermissionError):
        raise
    except _DAMAGE as error:
        raise UserError(
            f"{path} cannot be unpacked ({error}); it may be damaged or only partly downloaded, get it again from "
            f"{again}"
        ) from error


def _is_gzip(file: IO[bytes]) -> bool:
    start = file.read(2)
    file.seek(0)
    return start == b"\x1f\x8b"


def _check_safe(path: str, name: str, link_target: str | None) -> None:
    """Refuses a member whose name, or a link whose target, leads out of the archive's folder."""
    places = [name]
    if link_target is not None:  # It is relative to the folder of the link.
        places += (
            [link_target] if _is_absolute(link_target) else [f"{posixpath.dirname(name)}/{link_target}".lstrip("/")]
        )
    if ".." in _slashes(name).split("/") or any(map(_leads_out, places)):
        link = f", a link to {link_target!r}," if link_target is not None else ""
        raise UserError(
            f"{path} is refused: its member {name!r}{link} leads out of the archive's own folder, as no corpus's does; "
            "get the archive from another place"
        )


def _leads_out(place: str) -> bool:
    return _is_absolute(place) or posixpath.normpath(_slashes(place)).split("/")[0] == ".."


def _is_absolute(place: str) -> bool:
    drive = place[:1].isalpha() and place[1:2] == ":"
    return drive or _slashes(place).startswith("/")


def _slashes(name: str) -> str:
    """Returns a path with forward slashes, if Windows wrote it."""
    return name.replace("\\", "/")


def _read_link(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """Returns the target of a symbolic link in a zip, which is its content."""
    with archive.open(member) as stream:
        return stream.read(_LONGEST_LINK).decode("utf-8", "replace")


def _link_target(member: tarfile.TarInfo) -> str | None:
    """Returns the target of a link, relative to its folder; None for what is no link."""
    if member.issym():
        return member.linkname
    if member.islnk():  # A hard link is relative to the archive's root.
        absolute = posixpath.isabs(member.linkname)
        return (
            member.linkname if absolute else posixpath.relpath(member.linkname, posixpath.dirname(member.name) or ".")
        )
    return None


def _matches(container: Container, tail: str) -> list[str]:
    return [name for name in container.sizes if f"/{_slashes(name)}".endswith(f"/{tail}")]


def _only(container: Container, names: list[str]) -> str:
    if len(names) > 1:
        raise UserError(f"{container.name} holds {names[0]} and {names[1]}; remove one, as both could be meant")
    return names[0]


def _some(names: Sequence[str]) -> str:
    """Lists the first few names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- Downloads of corpora by tensorflow-datasets' download manager, which caches files and checks their digests.
#
# Its downloader retries for minutes where there is no network, so every source is asked first.

Source = tuple[Remote, ...]

_CONNECT_SECONDS, _ANSWER_SECONDS = 3, 10


class NoSourceError(Exception):
    """No source could be downloaded."""


def url_infos(corpus: PublishedCorpus) -> dict[str, UrlInfo]:
    """Returns the download manager's records of files whose size and checksum are both known."""
    return {
        remote.url: UrlInfo(size=remote.size, checksum=remote.sha256, filename=remote.file)
        for source in corpus.sources
        for remote in source
        if remote.size is not None and remote.sha256 is not None
    }


def ask(sources: Iterable[Source]) -> dict[Source, str]:
    """Asks all sources at the same time for their first file; returns why one is not there, "" for one that is."""
    sources = list(sources)
    with concurrent.futures.ThreadPoolExecutor(len(sources)) as pool:
        return dict(zip(sources, pool.map(_ask, sources), strict=True))


def fetch(
    sources: Iterable[Source],
    manager: tfds.download.DownloadManager,
    failed: Callable[[Source, str], object] = lambda source, why: None,
) -> Container:
    """Downloads the first of `sources` that can be; `failed` is called with the reason for each one before it.

    Raises:
      NoSourceError: none can.
    """
    for source in sources:
        try:
            return _download(source, manager)
        except NonMatchingChecksumError as error:
            failed(source, _other_file(error))
        except (tfds.download.DownloadError, requests.RequestException) as error:
            failed(source, _reason(error))
        except ValueError as error:  # The file has another size, or is no archive.
            failed(source, str(error))
    raise NoSourceError


def _ask(source: Source) -> str:
    try:
        answer = requests.head(source[0].url, timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS), allow_redirects=True)
    except requests.RequestException as error:
        return _reason(error)
    return "" if answer.status_code < 400 else f"answers with HTTP status {answer.status_code}"


def _download(source: Source, manager: tfds.download.DownloadManager) -> Container:
    paths = {file: str(path) for file, path in manager.download({remote.file: remote.url for remote in source}).items()}
    files = Files(source[0].url.rpartition("/")[0], paths)
    for remote in source:
        if remote.size not in (None, files.sizes[remote.file]):
            raise UserError(f"gave {files.sizes[remote.file]:,} bytes and not {remote.size:,}")
    return open_archive(paths[source[0].file], again=source[0].url) if source[0].is_archive else files


def _other_file(error: NonMatchingChecksumError) -> str:
    """Shortens an error of several lines to its two checksums."""
    sums = re.findall(r"checksum='(\w+)'", str(error))
    return f"gave a file of sha256 {sums[1]} and not {sums[0]}" if len(sums) == 2 else "gave another file"


def _reason(error: Exception) -> str:
    """Describes why a download failed, without the layers of libraries."""
    if isinstance(error, requests.exceptions.ProxyError):
        return "cannot be reached through the proxy"
    if isinstance(error, requests.Timeout):
        return "does not answer in time"
    if isinstance(error, requests.exceptions.SSLError):
        return "has no certificate that this machine trusts"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached"
    return f"failed ({error})"


# -- Locates a corpus's files: unpacked in the data folder, in an archive there, or on the network.

Find = Callable[[Any], Container]  # Download manager -> the corpus's files.


def find_files(corpus: PublishedCorpus, data_dir: Path) -> Find:
    """Returns the first place that has the corpus's files, or all sources that answer.

    Raises:
      UserError: no place has them (the message names the files, their folder, and the answers of the sources), or a
        folder has some of the files and lacks others.
    """
    places = [data_dir, *(data_dir / name for name in corpus.folders), data_dir / "downloads" / "manual"]
    found = next((here for place in places for here in _in_place(corpus, place)), None)
    if found is not None:
        return found
    for place in places:
        _refuse_a_part(corpus, place)
    return _on_the_network(corpus, places)


def _in_place(corpus: PublishedCorpus, place: Path) -> Iterator[Find]:
    """Yields everything in a folder that may be the corpus."""
    for paths in _layouts(corpus, place):
        if all(map(os.path.isfile, paths.values())):
            yield functools.partial(_open_files, str(place), paths)
    for name, remote in corpus.archives.items():
        if (place / name).is_file():
            yield functools.partial(_open_archive, str(place / name), remote, corpus.url)


def _open_files(folder: str, paths: dict[str, str], manager: Any) -> Container:
    del manager
    return Files(folder, paths)


def _layouts(corpus: PublishedCorpus, place: Path) -> Iterator[dict[str, str]]:
    """Yields the paths that the files may have in a folder, by their names."""
    for layout in corpus.layouts + (corpus.own_layouts if place.name in corpus.folders else ()):
        yield {file: str(place / file) for files in layout.values() for file in files}


def _open_archive(path: str, official: Remote | None, url: str, manager: Any) -> Container:
    """Opens the archive at `path`; one of the official name must be the official file."""
    del manager
    size = os.path.getsize(path)
    if official and official.size not in (None, size):
        raise UserError(f"{path} has {size:,} bytes and {official.url} has {official.size:,}; get it again from there")
    if official and official.sha256 is not None:
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != official.sha256:
            raise UserError(
                f"{path} has sha256 {sha256} and {official.url} has {official.sha256}; get it again from there"
            )
    return open_archive(path, again=official.url if official else url)


def _refuse_a_part(corpus: PublishedCorpus, place: Path) -> None:
    """Raises `UserError` for a folder that has some of the corpus's files and lacks others."""
    for paths in _layouts(corpus, place):
        lacking = [file for file, path in paths.items() if not os.path.isfile(path)]
        if len(lacking) < len(paths):
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            there = next(file for file in paths if file not in lacking)
            raise UserError(
                f"{place} has {there} but lacks {', '.join(lacking[:3])}{more} of {corpus.title}; add what is missing "
                f"(from {corpus.url})"
            )


def _on_the_network(corpus: PublishedCorpus, places: list[Path]) -> Find:

    answers = ask(corpus.sources)
    there = [source for source, answer in answers.items() if not answer]
    if not there:
        raise UserError(_missing(corpus, places, answers))

    def fetch_one(manager: Any) -> Container:
        try:
            return fetch(there, manager, failed=answers.__setitem__)
        except NoSourceError:
            raise UserError(_missing(corpus, places, answers)) from None

    return fetch_one


def _missing(corpus: PublishedCorpus, places: list[Path], answers: dict[tuple[Remote, ...], str]) -> str:
    """Describes which files belong where, and why they were not downloaded."""
    failures = "; ".join(f"{source[0].url} {answer}" for source, answer in answers.items())
    prefix = f", or, to run on a part of it, {USE_PREFIX}" if corpus.cuts else ""
    archives = any(source[0].is_archive for source in corpus.sources)
    return (
        f"{corpus.title} is in none of {', '.join(map(str, places))}, and downloading it failed ({failures}); put "
        f"{_wanted(corpus)}{', packed or unpacked,' if archives else ''} into {places[0]} (--data_dir){prefix}"
    )


def _wanted(corpus: PublishedCorpus) -> str:
    """Describes the files of each source, with their sizes and URLs."""
    folders: dict[str, list[str]] = {}
    for source in corpus.sources:
        sizes = [remote.size for remote in source if remote.size is not None]
        size = f"{sum(sizes):,} bytes, " if len(sizes) == len(source) else ""
        files = f"{', '.join(remote.file for remote in source)} ({size}from "
        folders.setdefault(files, []).append(source[0].url.rpartition("/")[0] + "/")
    return " or ".join(f"{files}{' or '.join(urls)})" for files, urls in folders.items())


# -- tensorflow-datasets builders of the published corpora, which need no TensorFlow.
#
# A record is a block of bytes; a split's records in order are its files in the order in which their container
# could be read. Lines would be the simpler record, but a million of them take seconds to read one by one.
# The metadata hold the counts taken on the way:
#
# sha256   by part: of its file, or of its files' sha256 in order
# files    by split: name, bytes and records of each file, in the order of the records
#
# `ShardBasedBuilder` writes records as they come. `GeneratorBasedBuilder` sorts them first, for which it needs
# TensorFlow above 1 GB.

RECORD_BYTES = 1 << 16
SHARD_RECORDS = 1 << 10  # Records per file: tensorflow-datasets holds a file's records in memory while it writes.


class PublishedText(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus as records.

    Args:
      find: returns the corpus's files; None: downloads them.
    """

    VERSION = tfds.core.Version("1.0.0")  # Raise it whenever the same corpus would give other records or metadata.
    NAME: ClassVar[CorpusName]

    def __init__(self, *, find: Callable[[tfds.download.DownloadManager], Container] | None = None, **kwargs: Any):
        super().__init__(**({"file_format": "array_record"} | kwargs))
        self._find = find or functools.partial(fetch, self.corpus.sources)
        self._tallies: dict[str, dict[str, Tally]] = {}  # By part and file.
        self._files: dict[str, list[tuple[str, int, int]]] = {}

    @property
    def corpus(self) -> PublishedCorpus:
        """Returns the corpus's row of the table."""
        return CORPORA[self.NAME]

    @property
    def url_infos(self) -> dict[str, Any]:
        """Returns the records of downloads, in place of a file of checksums."""
        return url_infos(self.corpus)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.corpus.title,
            features=tfds.features.FeaturesDict({"block": tfds.features.Tensor(shape=(), dtype=np.object_)}),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        self.info.metadata["files"] = self._files
        self.info.metadata["sha256"] = {part: digest(_in_order(files)) for part, files in self._tallies.items()}

    def _shard_iterators_per_split(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, list[Callable[[], Iterator[Any]]]]:
        container = self._find(dl_manager)
        layouts = self.corpus.layouts + self.corpus.own_layouts
        layout = fit(container, layouts, again=self.corpus.url)
        self._check_sizes(container, layout)
        shards = {}
        for split, (part, first, last) in self.corpus.ranges().items():
            sizes = {file: len(range(container.sizes[file])[first:last]) for file in layout[part]}
            records = self._records(container, split, sizes)
            n_record = sum(_n_record(size) for size in sizes.values())
            # All shards take from the same stream; the last one reaches its end, where the part is checked.
            take = functools.partial(itertools.islice, records, SHARD_RECORDS)
            shards[split] = [take] * (max(n_record - 1, 0) // SHARD_RECORDS) + [functools.partial(iter, records)]
        return shards

    def _check_sizes(self, container: Container, layout: dict[str, list[str]]) -> None:
        """Refuses at once files of a wrong size."""
        for part, files in layout.items():
            known, size = self.corpus.facts[part].size, sum(container.sizes[file] for file in files)
            if known not in (None, size):
                self._refuse(container, files, f"{size:,} bytes and {self.corpus.title} has exactly {known:,}")
            if empty := [file for file in files if not container.sizes[file]]:
                self._refuse(container, empty, "nothing")

    def _records(
        self, container: Container, split: str, sizes: dict[str, int]
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yields a split's records and counts them; its part is checked once all of it was read."""
        part, first, last = self.corpus.ranges()[split]
        words = self.corpus.facts[part].tokens is not None
        tallies = self._tallies.setdefault(part, {})
        keys = itertools.count()
        self._files[split] = []
        with tqdm.tqdm(
            total=sum(sizes.values()), desc=f"preparing {split}", unit="B", unit_scale=True, delay=1, disable=None
        ) as bar:
            for file, stream in container.read(sizes):
                self._files[split].append((file.rpartition("/")[2], sizes[file], _n_record(sizes[file])))
                counted = tallies.setdefault(file, Tally(words=words))
                for block in _blocks(stream, first, sizes[file]):
                    counted.add(block)
                    bar.update(len(block))
                    yield next(keys), {"block": block}
        if last is None or split == list(self.corpus.cuts)[-1]:
            self._check(container, part)

    def _check(self, container: Container, part: str) -> None:
        tallies, title = self._tallies[part], self.corpus.title
        of = title if self.corpus.cuts else f"the {part} split of {title}"
        if wrong := difference(self.corpus.facts[part], _in_order(tallies), of=of):
            self._refuse(container, list(tallies), wrong)
        if other_bytes(self.corpus.facts[part], _in_order(tallies)):
            print(
                f"note: {of} in {container.name} has as many tokens as the published one, but other bytes; scores are "
                "comparable only if just its white space differs",
                flush=True,
            )

    def _refuse(self, container: Container, files: list[str], wrong: str) -> None:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        prefix = f", or, to run on a part of it, {USE_PREFIX}" if self.corpus.cuts else ""
        raise UserError(f"{container.where(files[0])}{more} holds {wrong}; get it again from {self.corpus.url}{prefix}")

    def _log_download_bytes(self) -> None:
        """Does nothing: tensorflow-datasets would print that sizes are unknown."""

    def _log_download_done(self) -> None:
        """Does nothing: the program prints it."""


def _builder_class(name: CorpusName) -> type[PublishedText]:
    """Returns the builder's class of a corpus; its name gives the folder of records, txl_NAME."""
    return type(f"Txl{name.value.title()}", (PublishedText,), {"NAME": name, "name": f"txl_{name}"})


BUILDERS = {name: _builder_class(name) for name in CORPORA}


def _in_order(tallies: dict[str, Tally]) -> list[Tally]:
    """Returns tallies in the order of the files' names, not that of reading."""
    return [tallies[file] for file in sorted(tallies, key=lambda file: file.rpartition("/")[2])]


def _n_record(size: int) -> int:
    return -(-size // RECORD_BYTES)


def _blocks(stream: Stream, first: int, size: int) -> Iterator[bytes]:
    """Yields `size` bytes of a stream from byte `first` on, in records."""
    for left, wanted in ((first, False), (size, True)):
        while left:
            block = stream.read(min(left, RECORD_BYTES))
            if not block:
                raise UserError("a corpus's file became shorter while it was read; leave it alone while a run starts")
            left -= len(block)
            if wanted:
                yield block


_RECORDS_PER_BLOCK = 16  # Together a megabyte.


def read(corpus: CorpusName, *, data_dir: str, cache_dir: str, heldout: Heldout = Heldout.SEPARATE) -> Text:
    """Reads a published corpus, checked against its published facts.

    Args:
      data_dir: folder in which its files are searched for, unless it is prepared already.
      cache_dir: folder for the prepared corpus, which is kept in its `tfds`.
      heldout: the held-out shard that validates.

    Raises:
      UserError: the files are not there and cannot be downloaded, are not the published ones, or what was prepared from
        them is damaged; or `cache_dir` cannot be written to.
    """
    folder = Path(cache_dir, "tfds").absolute()
    if not _is_prepared(corpus, folder):
        find = find_files(CORPORA[corpus], Path(data_dir))
        with storage.writable(folder, what=CORPORA[corpus].title), storage.locked(folder / f".txl_{corpus}.lock"):
            if not _is_prepared(corpus, folder):  # Else another process has prepared it while this one waited.
                _prepare(corpus, folder, find)
    try:
        return _open(corpus, folder, heldout)
    except Exception as error:  # Damage to the files beside the records raises nearly any type.
        raise _damaged(_records_folder(corpus, folder), error) from error


def _prepare(corpus: CorpusName, folder: Path, find: Find) -> None:
    """Writes the folder of records. The caller holds the lock, so a partial one is left over from a killed process."""
    print(f"preparing {CORPORA[corpus].title} in {folder} (once)", flush=True)
    shutil.rmtree(_records_folder(corpus, folder).parent, ignore_errors=True)
    downloads = folder / f"txl_{corpus}_downloads"
    for leftover in downloads.rglob("*.tmp.*"):
        shutil.rmtree(leftover)
    try:
        _builder(corpus)(data_dir=folder, find=find).download_and_prepare(download_dir=downloads)
    except RuntimeError as error:  # ArrayRecord could not write: 'write() failed: No space left on device; ...'
        raise OSError(errno.EIO, str(error).partition(";")[0]) from error
    except ValueError:  # The download is not the corpus. After other errors, such as a full disk, it is kept.
        shutil.rmtree(downloads, ignore_errors=True)
        raise
    shutil.rmtree(downloads, ignore_errors=True)


def _is_prepared(corpus: CorpusName, folder: Path) -> bool:
    """Returns whether the folder of records is there; it gets its name once it is complete."""
    return (_records_folder(corpus, folder) / "dataset_info.json").is_file()


def _records_folder(corpus: CorpusName, folder: Path) -> Path:
    return folder / f"txl_{corpus}" / str(_builder(corpus).VERSION)


def _builder(corpus: CorpusName) -> Any:
    """Returns the builder's class. Imported here as that takes half a second, which runs on other texts save."""
    return BUILDERS[corpus]


def _open(corpus: CorpusName, folder: Path, heldout: Heldout) -> Text:
    """Returns the text of a folder of records."""
    builder, known = _builder(corpus)(data_dir=folder), CORPORA[corpus]
    metadata = builder.info.metadata
    stored = {split: split for split in SPLITS}
    same = heldout is Heldout.PUBLISHED
    if same:
        stored["valid"] = "test"  # Both held-out shards are in the cache.
    splits = {}
    for split, source in stored.items():
        records = _Records(builder, source, _records_folder(corpus, folder))
        splits[split] = tuple(_files(f"{corpus} {source}", records, metadata["files"][source]))
    sums = [metadata["sha256"][known.ranges()[source][0]] for source in stored.values()]
    digest = sums[0] if known.cuts else hashlib.sha256("".join(sums).encode()).hexdigest()
    size = sum(file.size for source in set(stored.values()) for file in splits[source])
    return Text(
        str(corpus),
        f"{known.title}, {size:,} bytes{', validation on the test text' if same else ''}",
        digest,
        splits,
        closed_alphabet=known.closed_alphabet,
    )


def _damaged(folder: Path, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(
        f"the prepared text in {folder} is damaged ({reason}); remove this folder, and it is prepared again"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Records:
    """The records of a split."""

    builder: Any
    split: str
    folder: Path

    def read(self, first: int, count: int) -> Iterator[bytes]:
        """Yields the text of `count` records from record `first` on."""
        try:
            for start in range(first, first + count, _RECORDS_PER_BLOCK):
                block = range(start, min(start + _RECORDS_PER_BLOCK, first + count))
                yield b"".join(self._source[i]["block"] for i in block)
        except Exception as error:  # Damage to the records raises nearly any type too.
            raise _damaged(self.folder, error) from error

    @functools.cached_property
    def _source(self) -> Any:
        return self.builder.as_data_source(self.split)


def _files(name: str, records: _Records, stored: list[tuple[str, int, int]]) -> Iterator[File]:
    """Yields the files of a split in the order of their names, which need not be that of their records."""
    starts = itertools.accumulate((count for _, _, count in stored), initial=0)
    for (file, size, count), first in sorted(zip(stored, starts, strict=False)):
        yield File(f"{name}, {file}" if len(stored) > 1 else name, size, functools.partial(records.read, first, count))
