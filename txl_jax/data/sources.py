"""Where bytes come from: one reader per source, each returning the bytes of three splits.

Readers split by position and leave newlines alone: `corpus` drops them afterwards, so that a split
holds the same part of the text either way.
"""

import dataclasses
import hashlib
import os
import platform
import sysconfig
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

ENWIK8_SPLITS = (90_000_000, 5_000_000, 5_000_000)  # Bytes of train, valid and test, in file order.
ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
PREFIX_HINT = "to run on a prefix of it, name the file with --data.file=PATH"

# Tests are more text than the library itself, and installed packages differ from machine to machine.
STDLIB_SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Source:
    """Bytes as read."""

    name: str  # Short: what a table's row is called.
    description: str  # One line for people, without the word on newlines.
    digest: str  # sha256 of what was read, in hexadecimal.
    splits: tuple[bytes, bytes, bytes]  # Train, valid, test.
    own_vocabulary: bool = False  # Tokens are the byte values that occur, instead of all 256.


def read_enwik8(data_dir: str) -> Source:
    """The first 100,000,000 bytes of an English Wikipedia dump, split 90M / 5M / 5M.

    Reads `enwik8`, or the member `enwik8` of `enwik8.zip`, in `data_dir` or in a folder `enwik8` there.

    Raises:
      FileNotFoundError: none of these files is there.
      ValueError: the file has another size, or the archive is damaged.
    """
    candidates = [Path(data_dir, folder, file) for folder in ("", "enwik8") for file in ("enwik8", "enwik8.zip")]
    path = next((path for path in candidates if path.is_file()), None)
    size = sum(ENWIK8_SPLITS)
    if path is None:
        raise FileNotFoundError(
            f"enwik8 is in none of {', '.join(map(str, candidates))}; get it from {ENWIK8_URL} "
            f"({size:,} bytes unpacked) into the folder of --data_dir, or {PREFIX_HINT}"
        )
    text = _read_enwik8_zip(path) if path.suffix == ".zip" else _read_enwik8_file(path)
    train, valid, _ = ENWIK8_SPLITS
    return Source(
        name="enwik8",
        description=f"enwik8, {size:,} bytes",
        digest=_sha256(text),
        splits=(text[:train], text[train : train + valid], text[train + valid :]),
        own_vocabulary=True,
    )


def read_enwik8_prefix(path: str) -> Source:
    """A file of any size, split 90/5/5. All 256 bytes are tokens: a prefix may lack values that others hold."""
    text = _read_file(path, flag="--data.file")
    return Source(
        name="enwik8 prefix",
        description=f"prefix of {len(text)} bytes of {Path(path).name}",
        digest=_sha256(text),
        splits=split_by_position(text),
    )


def read_one_text(path: str) -> Source:
    """The user's own file, split 90/5/5."""
    text = _read_file(path, flag="--data.file")
    return Source(
        name="text",
        description=f"own text, {len(text):,} bytes of {Path(path).name}",
        digest=_sha256(text),
        splits=split_by_position(text),
    )


def read_three_texts(*, train: Sequence[str], valid: Sequence[str], test: Sequence[str]) -> Source:
    """The user's own splits, each the files of one list joined in the order given.

    The digest is the sha256 of the splits' own digests, so that moving a file to another split changes it.
    """
    named = {"train": train, "valid": valid, "test": test}
    splits = tuple(b"".join(_read_file(path, flag=f"--data.{name}") for path in paths) for name, paths in named.items())
    return Source(
        name="text",
        description="own text, " + " + ".join(f"{len(text):,}" for text in splits) + " bytes in train + valid + test",
        digest=_sha256("".join(map(_sha256, splits)).encode()),
        splits=splits,
    )


def read_python_stdlib() -> Source:
    """The modules of the standard library of the running Python, joined in the order of their paths, split 90/5/5.

    Raises:
      FileNotFoundError: the library is not there as source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = _python_files(root)
    if not paths:
        raise FileNotFoundError(
            f"the standard library at {root} holds no .py files (it may be packed in an archive); "
            "use a Python that is installed as source files, or another --data.corpus"
        )
    text = b"".join(path.read_bytes() for path in paths)
    return Source(
        name="python_stdlib",
        description=f"standard library of Python {platform.python_version()}, {len(paths)} files, {len(text):,} bytes",
        digest=_sha256(text),
        splits=split_by_position(text),
    )


def split_by_position(text: bytes) -> tuple[bytes, bytes, bytes]:
    """The first 90 %, the next 5 % and the last 5 % of the bytes; borders are rounded down."""
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return text[:first], text[first:second], text[second:]


def _read_enwik8_file(path: Path) -> bytes:
    _check_enwik8_size(path, path.stat().st_size)
    return path.read_bytes()


def _read_enwik8_zip(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            if "enwik8" not in archive.namelist():
                raise ValueError(
                    f"{path} has no member enwik8 (it holds {', '.join(archive.namelist()[:5]) or 'nothing'}); "
                    f"get the archive from {ENWIK8_URL}"
                )
            _check_enwik8_size(path, archive.getinfo("enwik8").file_size)
            return archive.read("enwik8")
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:  # All seen on damaged files.
        raise ValueError(
            f"{path} cannot be unpacked ({error}); it may be damaged or only partly downloaded, get it again from "
            f"{ENWIK8_URL}"
        ) from error


def _check_enwik8_size(path: Path, size: int) -> None:
    if size != sum(ENWIK8_SPLITS):
        raise ValueError(
            f"{path} holds {size:,} bytes and enwik8 has exactly {sum(ENWIK8_SPLITS):,}; "
            f"get it again from {ENWIK8_URL}, or {PREFIX_HINT}"
        )


def _read_file(path: str, *, flag: str) -> bytes:
    """Bytes of a file that the user named with `flag`; raises if it is missing, a directory or empty."""
    if os.path.isdir(path):
        raise ValueError(f"{flag} names {path}, which is a directory; give the files in it one by one")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{flag} names {path}, which does not exist; give the path of a text file")
    text = Path(path).read_bytes()
    if not text:
        raise ValueError(f"{flag} names {path}, which is empty; give a file that holds text")
    return text


def _python_files(root: Path) -> list[Path]:
    """Modules below `root` in the order of their relative paths, without tests and installed packages."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED_DIRS]
        # is_file: some distributions leave dangling links behind.
        found += [path for name in files if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
