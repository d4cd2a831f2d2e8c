"""Files and archives as streams: they are opened, checked for damage, and read in blocks.

Nothing is unpacked.
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


class Place(NamedTuple):
    """Where a file is."""

    name: str  # Its path below a directory, or in its archive.
    size: int  # Bytes.
    path: str  # Of the file, or of the archive that it is a member of.
    member: str  # Its name in the archive; empty for a plain file.
    url: str  # To get the file or the archive from again.


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


def read_files(
    sizes: Mapping[Place, Sequence[int]], block_bytes: int
) -> Iterator[tuple[Place, bytes]]:
    """Yields the bytes of files in pieces of these sizes, each in blocks of `block_bytes`.

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
                            yield from (
                                (place, block) for block in _blocks(stream, size, block_bytes)
                            )
                if not wanted:
                    break


def _blocks(stream: IO[bytes], size: int, block_bytes: int) -> Iterator[bytes]:
    for left in range(size, 0, -block_bytes):
        block = stream.read(min(left, block_bytes))
        if len(block) < min(left, block_bytes):
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


def _reading(path: str, url: str) -> contextlib.AbstractContextManager[None]:
    advice = f"It may be corrupted or incomplete. Download it again from {url}"
    return refusing_damage(f"{path} cannot be read", advice)


@contextlib.contextmanager
def refusing_damage(what: str, advice: str) -> Iterator[None]:
    """Turns any error into a `UserError` of one line.

    Corrupted archives and records raise nearly any type of error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} ({first_line(error)}). {advice}") from error
