"""Paths that a user gives: of a file or folder on this machine, or a URL of object storage such as gs://bucket/run.

Object storage has neither folders nor renames: an object appears whole when its upload ends, and replaces one of the
same name. What depends on that asks `is_remote`. The library of a scheme (gcsfs for gs://) is imported with the first
path of that scheme.
"""

import importlib.util
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from txl_jax.errors import UserError

# The schemes that Orbax writes to as well: the module that opens each, and the extra that installs it.
_SCHEMES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_COLLAPSED = re.compile(rf"({'|'.join(_SCHEMES)}):/+[^/]")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, such as gs://bucket/run.

    >>> is_remote("gs://bucket/run"), is_remote("runs/one")
    (True, False)
    """
    return "://" in os.fspath(path)


def as_path(text: str | os.PathLike[str]) -> Path:
    """Returns an absolute path for what a user gave.

    Returns:
      A `pathlib.Path` with "~" expanded and links resolved; for a URL an `etils.epath.Path`, which has the methods of
      `pathlib.Path` (but not `stat().st_size`; see `size`) and whose errors are all OSError.

    Raises:
      UserError: nothing here can open such a URL.
    """
    name = os.fspath(text)
    if not is_remote(name):
        if _COLLAPSED.match(name):
            raise UserError(f"the path {name} is a URL without its second slash; write it as gs://bucket/folder")
        return Path(name).expanduser().resolve()
    scheme, _, rest = name.partition("://")
    if scheme == "file":
        return as_path(f"/{rest.lstrip('/')}")
    if scheme not in _SCHEMES:
        known = ", ".join(f"{each}://" for each in _SCHEMES)
        raise UserError(f"the path {name} has the scheme {scheme}://; give a folder of this machine, or one of {known}")
    if not rest.strip("/"):
        raise UserError(f"the path {name} names no bucket; write it as {scheme}://bucket/folder")
    module, extra = _SCHEMES[scheme]
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the path {name} needs the package {module}; install it with: pip install 'txl_jax[{extra}]'")
    from txl_jax.runtime.remote_path import RemotePath

    return cast(Path, RemotePath(name.rstrip("/")))


class _FirstTime(logging.Filter):
    """Passes the first line of each message once, without its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage().partition("\n")[0]
        is_new = line not in self._seen
        self._seen.add(line)
        record.msg, record.args, record.exc_info = line, None, None
        return is_new


_FIRST_TIME = _FirstTime()


def shorten_storage_logs() -> None:
    """Shows what gcsfs, s3fs and Google's login log once, in a line: they log every try, gcsfs with its traceback.

    The error itself is an OSError. A program calls this once at its start; called again it changes nothing.
    """
    for name in (*(module for module, _ in _SCHEMES.values()), "google.auth._default"):
        logging.getLogger(name).addFilter(_FIRST_TIME)


def as_given(text: str | os.PathLike[str]) -> Path:
    """Returns what `as_path` does for a URL; a local path as it was given, relative, and itself if it is a link."""
    return as_path(text) if is_remote(text) else Path(text)


def size(path: Path) -> int:
    """Returns the bytes of a file; raises OSError if there is none."""
    found = path.stat()
    return int(found.length if is_remote(path) else found.st_size)  # type: ignore[attr-defined]


def modified(path: Path) -> float:
    """Returns when a file was written, in seconds since 1970; raises OSError if there is none."""
    found = path.stat()
    return float(found.mtime if is_remote(path) else found.st_mtime)  # type: ignore[attr-defined]


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and in the folders below it, in the order of their names; none if it is missing."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def local_copy(path: Path, owner: object) -> Path:
    """Returns a copy of a remote file, made on this machine and removed with `owner`; a local path as it is.

    Raises:
      OSError: it cannot be read.
    """
    if not is_remote(path):
        return path
    folder = Path(tempfile.mkdtemp(prefix="txl_jax-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    path.download(folder / path.name)  # type: ignore[attr-defined]
    return folder / path.name


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that is in it; one that is missing is no error."""
    if is_remote(folder):
        folder.rmtree(missing_ok=True)  # type: ignore[attr-defined]
    else:
        shutil.rmtree(folder, ignore_errors=True)


def remote_error(what: str, path: Path, error: OSError) -> UserError:
    """Returns the sentence for an error of object storage.

    Args:
      what: what cannot be done, such as "read".
    """
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason, advice = "no such bucket or object", "make the bucket, or give the name of one that is there"
    elif isinstance(error, PermissionError):
        advice = (
            "log in with `gcloud auth application-default login`, or give the account of this machine the role Storage "
            "Object User on the bucket"
        )
    else:
        advice = "start again once it can be reached"
    return UserError(f"cannot {what} {path} ({reason}); {advice}")
