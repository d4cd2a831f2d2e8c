"""Opens files and archives as streams, checks them for corruption, and reads them in blocks.

Archives come from the network or from strangers. Nothing is unpacked: a member's name is only
compared with the names of a corpus's files, and is never used as a path.
"""

import contextlib
import functools
import gzip
import itertools
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, Self

from txl_jax.data.published import ARCHIVE_SUFFIXES
from txl_jax.errors import UserError, first_line

# First bytes of a gzip file.
_GZIP_MAGIC = b"\x1f\x8b"
# Maximum bytes of a name or of attributes in a tar. `tarfile` reads them whole, and before Python
# 3.11.10 and 3.12.6 it searches attributes in quadratic time, 0.2 s at this length. The longest
# path on Linux has half as many.
_MAX_ATTRIBUTES = 8 << 10
# Bytes that are read at a time when their content is not needed.
_SKIPPED_BYTES = 1 << 20


class Place(NamedTuple):
    """Location of a file: in a directory, or in an archive."""

    # Path of the file below some directory, or in its archive.
    name: str
    # Number of bytes.
    size: int
    # Path of the file itself, or of the archive that it is a member of.
    path: str
    # Name of the member in the archive, or "" for a file that is not in an archive.
    member: str
    # URL to download the file or the archive from again.
    url: str


class Member(NamedTuple):
    """A file in an archive. A file that is not an archive is its own only member."""

    # Name in the archive, of any kind, or "" if the file is not an archive.
    name: str
    # Number of bytes.
    size: int
    # Opens the member for reading bytes. It works until the next member is requested.
    open: Callable[[], Any]


def open_files(files: Sequence[tuple[str, str, str]]) -> list[Place]:
    """Returns the places of files, and of the members of archives.

    Args:
      files: The name, path and URL of each file or archive.

    Raises:
      UserError: If a file cannot be read, or an archive is corrupted.
    """
    places: dict[str, Place] = {}
    for file, path, url in files:
        with _reading(path, url):
            listed = [(member.name, member.size) for member in members(path)]
            # A tar that contains only zeros, for example after an interrupted download, reads as an
            # archive without members. It must not pass for a complete archive of another corpus.
            if not listed:
                raise EOFError("it is empty")

        for member, size in listed:
            # A file that is not an archive keeps the name that it was listed by.
            name = member or file
            # Two members may have the same name, so that one is checked and the other is read. The
            # first one counts, as in `read_files`.
            if name not in places:
                places[name] = Place(name, size, path, member, url)
    return list(places.values())


def read_files(
    pieces: Mapping[Place, Sequence[int]], block_bytes: int
) -> Iterator[tuple[Place, bytes]]:
    """Yields the bytes of files, each block with the file that it comes from.

    An archive is read once for all of its files in `pieces`, and no further than needed.

    Args:
      pieces: The sizes in bytes of the consecutive pieces to read of each file. Files of one
        archive follow one another, in the archive's order.
      block_bytes: Size of a block. The last block of a piece may be shorter.

    Raises:
      UserError: If an archive is corrupted, or a file became shorter.
    """
    for (path, url), places in itertools.groupby(pieces, key=lambda place: (place.path, place.url)):
        remaining = {place.member: place for place in places}
        with _reading(path, url):
            for member in members(path):
                # After the first member with a name, others with this name are not read.
                place = remaining.pop(member.name, None)
                if place is not None:
                    with member.open() as stream:
                        for block in _blocks(stream, pieces[place], block_bytes):
                            yield place, block
                if not remaining:
                    break


def _blocks(stream: IO[bytes], sizes: Sequence[int], block_bytes: int) -> Iterator[bytes]:
    """Yields the bytes of consecutive pieces of a stream in blocks that end where a piece ends."""
    for size in sizes:
        for remaining in range(size, 0, -block_bytes):
            expected = min(remaining, block_bytes)
            block = stream.read(expected)
            # A header may claim more bytes than follow it, and a file may have been cut since it
            # was opened. The corpus would silently lack its end.
            if len(block) < expected:
                raise EOFError(f"it ends {remaining - len(block):,} bytes early")
            yield block


def members(path: str) -> Iterator[Member]:
    """Yields the files of a zip or tar archive, or the file itself if it is not an archive.

    Raises nearly any exception if the archive is corrupted.
    """
    if path.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    open_entry = functools.partial(archive.open, entry)
                    yield Member(entry.filename, entry.file_size, open_entry)
    elif path.endswith(ARCHIVE_SUFFIXES):
        yield from _tar_members(path)
    else:
        yield Member("", os.path.getsize(path), functools.partial(open, path, "rb"))


class _Header(tarfile.TarInfo):
    """A header that raises if `tarfile` would read data of unlimited size into memory after it."""

    @staticmethod
    def _refuse(*_: Any) -> None:
        raise ValueError(
            f"it has a sparse file, or a name or attributes above {_MAX_ATTRIBUTES >> 10} KiB"
        )

    # tarfile's reader for the list of holes in a newer kind of sparse file. The file determines the
    # length of the list: a megabyte of gzip becomes a gigabyte of numbers.
    _proc_gnusparse_10 = _refuse

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        # The older kind of sparse file also has a list of holes of unlimited length.
        if header.type == tarfile.GNUTYPE_SPARSE:
            cls._refuse()
        # Long names and attributes are read into memory whole, however large their header says
        # they are, and attributes are searched in quadratic time.
        if not header.isreg() and header.size > _MAX_ATTRIBUTES:
            cls._refuse()
        return header


def _tar_members(path: str) -> Iterator[Member]:
    """Yields the files of a tar archive, either plain or compressed by gzip.

    The archive can only be read in its own order.
    """
    with open(path, "rb") as file:
        stream: Any = file
        # tarfile's own gzip reader accepts a truncated file as complete, and does not
        # verify its checksum.
        if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
            stream = gzip.GzipFile(fileobj=file)
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            for member in archive:
                # A link may lead out of the archive, and a device may never end.
                if member.isfile():
                    open_member = functools.partial(archive.extractfile, member)
                    yield Member(member.name, member.size, open_member)
        # gzip's checksum comes after the archive's end. It is verified when it is read.
        while stream.read(_SKIPPED_BYTES):
            pass


def _reading(path: str, url: str) -> contextlib.AbstractContextManager[None]:
    """Turns any error of the block into a `UserError` with the URL to download the file from."""
    return refusing_damage(
        f"{path} cannot be read", f"It may be corrupted or incomplete. Download it again from {url}"
    )


@contextlib.contextmanager
def refusing_damage(problem: str, advice: str) -> Iterator[None]:
    """Turns any error of the block into a `UserError` of one line.

    Corrupted archives and records raise nearly any type of error. A `UserError` is kept, because it
    is more specific.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem} ({first_line(error)}). {advice}") from error
