"""Containers of a corpus's files: plain files, a zip or a tar archive, all read as streams.

Nothing is ever unpacked to the disk, so a member's name is only compared; an archive with a member that would
leave its folder is refused all the same, as no corpus has one.
"""

import contextlib
import gzip
import lzma
import os
import posixpath
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, Protocol, cast

from txl_jax.data.sources.corpus_row import Layout
from txl_jax.errors import UserError

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
