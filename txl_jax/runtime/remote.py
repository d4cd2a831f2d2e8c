"""Objects in buckets. Calls are retried after transient errors, and raise OSError.

`storage` calls these functions for a URL, such as gs://bucket/run, and its own for a local path.
Object storage has neither directories nor renames: an object appears whole when its upload ends,
and replaces the one of its name.
"""

import asyncio
import errno
import functools
import hashlib
import importlib.util
import logging
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from txl_jax.errors import UserError

# For the tries of one call. gcsfs tries six times within each, for about 20 s in all.
PATIENCE_SECONDS = 120.0
# The schemes that Orbax writes to as well, and the package that opens each.
SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}
_BLOCK_BYTES = 16 << 20
# A request without an answer is given up after this time, and tried again.
_ANSWER_SECONDS = 120
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 15.0
_PASSING_CODES = {408, 429, 500, 502, 503, 504}
_PASSING_ERRORS = re.compile(
    "Connect|Timeout|Disconnect|ProxyError|ClientOSError|ServerError|IncompleteRead|Payload"
)
_DENIED = re.compile(
    r"Forbidden|\b40[13]\b|Access ?Denied|Unauthorized|Invalid Credentials|Anonymous caller", re.I
)
# Every other error has the number EIO.
_FINAL_ERRORS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
}

T = TypeVar("T")
# A URL, or a path on this machine.
AnyPath = str | os.PathLike[str]


def as_url(text: str) -> str:
    """Returns a URL without needless slashes.

    Raises:
      UserError: If no installed package opens such a URL, or it names no bucket.
    """
    scheme, _, place = text.partition(":/")
    place = re.sub("/+", "/", place.strip("/"))
    if "://" not in text or scheme not in SCHEMES or not place:
        known = " or ".join(f"{scheme}://bucket/directory" for scheme in SCHEMES)
        raise UserError(f"the path must be a local directory or {known}, got {text}")
    package = SCHEMES[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"the path {text} needs the package {package}. Run pip install {package}.")
    return f"{scheme}://{place}"


# Reading


def kind(url: AnyPath) -> Any:
    """Returns "file" or "directory", or None if the URL does not exist.

    It does not use fsspec's `exists` and `isdir`, which return False after other errors too.
    """
    try:
        return call(url, "info")["type"]
    except FileNotFoundError:
        return None


def size(url: AnyPath) -> int:
    """Returns the size of an object in bytes."""
    return int(call(url, "info")["size"])


def modified(url: AnyPath) -> float:
    """Returns when an object was written, in whole seconds since 1970."""
    info = call(url, "info")
    # The first name is gcsfs's, the second s3fs's.
    written = info.get("mtime") or info["LastModified"]
    return int(written.timestamp())


def read(url: AnyPath) -> bytes:
    """Returns the bytes of an object."""
    return bytes(call(url, "cat_file"))


def sha256(url: AnyPath) -> str:
    """Returns the sha256 of an object's bytes in hexadecimal. It is read in blocks."""
    digest = hashlib.sha256()
    length = size(url)
    for start in range(0, length, _BLOCK_BYTES):
        end = min(start + _BLOCK_BYTES, length)
        digest.update(call(url, "cat_file", start=start, end=end))
    return digest.hexdigest()


def names(url: AnyPath) -> list[str]:
    """Returns the sorted names directly below a URL. Raises FileNotFoundError if it is missing."""
    paths = [path.rstrip("/") for path in call(url, "ls", detail=False)]
    # Object storage may list the directory itself.
    directory = os.fspath(url).partition("://")[2]
    return sorted(os.path.basename(path) for path in paths if path != directory)


def objects_below(url: AnyPath) -> list[str]:
    """Returns the sorted URLs of all objects below a URL."""
    return _urls(url, "find")


def matching(pattern: AnyPath) -> list[str]:
    """Returns the sorted URLs that match a URL with wildcards."""
    return _urls(pattern, "glob")


def _urls(url: AnyPath, method: str) -> list[str]:
    scheme = os.fspath(url).partition("://")[0]
    return sorted(f"{scheme}://{name}" for name in call(url, method))


def download(url: AnyPath, path: AnyPath) -> None:
    """Writes an object to a file on this machine."""
    call(url, "get_file", os.fspath(path))


# Writing


def write(url: AnyPath, data: bytes) -> None:
    """Replaces an object."""
    call(url, "pipe_file", data)


def upload(path: AnyPath, url: AnyPath) -> None:
    """Replaces an object with a local file, or objects with all files of a directory.

    The oldest files are uploaded first.
    """
    source = os.fspath(path)
    target = os.fspath(url)
    if not os.path.isdir(source):
        system = target.partition("://")[0]
        patiently(lambda: file_system(system).put_file(source, target), target)
        return
    files = sorted(str(file) for file in Path(source).rglob("*") if file.is_file())
    for file in sorted(files, key=lambda file: os.stat(file).st_mtime_ns):
        upload(file, f"{target}{file.removeprefix(source)}")


def remove(url: AnyPath) -> None:
    """Removes an object. Raises FileNotFoundError if it is missing."""
    call(url, "rm_file")


def remove_tree(url: AnyPath) -> None:
    """Removes all objects below a URL. Raises FileNotFoundError if it is missing."""
    call(url, "rm", recursive=True)


# Calls


@functools.cache
def file_system(scheme: str) -> Any:
    """Returns fsspec's file system of a scheme.

    It caches no listings: other processes and TensorStore write too.
    """
    import fsspec

    limits = {"requests_timeout": _ANSWER_SECONDS} if scheme == "gs" else {}
    return fsspec.filesystem(scheme, use_listings_cache=False, **limits)


def call(url: AnyPath, method: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a URL's file system with the URL."""
    target = os.fspath(url)
    scheme = target.partition("://")[0]
    return patiently(lambda: getattr(file_system(scheme), method)(target, *args, **kwargs), target)


def patiently(act: Callable[[], T], url: str) -> T:
    """Runs `act`, and retries after transient errors for `PATIENCE_SECONDS`.

    Its errors become OSError.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return act()
        except Exception as error:
            if not _is_passing(error) or time.monotonic() + pause > until:
                raise _as_os_error(error, url) from error
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


@functools.cache
def make_gcsfs_patient() -> None:
    """Makes gcsfs retry each request for `PATIENCE_SECONDS`.

    This is for the calls that Orbax makes without `patiently`.

    gcsfs gives up after half a minute, and its number of tries is fixed when its classes are made.
    An outage that began while Orbax made a step's directory ended the run, and with several
    processes left the others at a barrier.

    Calls of this module go through `patiently`, on a file system of their own: they would wait
    twice as long. If gcsfs no longer has the method, Orbax is as impatient as gcsfs.
    """
    import gcsfs

    request = getattr(gcsfs.GCSFileSystem, "_request", None)
    if request is None:
        return

    @functools.wraps(request)
    async def patient_request(system: Any, *args: Any, **kwargs: Any) -> Any:
        if system is file_system("gs"):
            return await request(system, *args, **kwargs)
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await request(system, *args, **kwargs)
            except Exception as error:
                if not _is_passing(error) or time.monotonic() > until:
                    raise
            # The pause is short, because gcsfs has waited between its own tries.
            await asyncio.sleep(random.uniform(0.5, 1.0))

    gcsfs.GCSFileSystem._request = patient_request  # noqa: SLF001


# Errors


def _is_passing(error: BaseException) -> bool:
    """Returns whether an error may be gone at the next try: 408, 429, 5xx, or no connection."""
    code = getattr(error, "code", getattr(error, "status", None))
    if code is not None and str(code).isdigit():
        return int(code) in _PASSING_CODES
    if isinstance(error, tuple(_FINAL_ERRORS)):
        return False
    return bool(_PASSING_ERRORS.search(type(error).__name__))


def _as_os_error(error: Exception, url: str) -> OSError:
    """Returns the error in one line, with the type that the system's would have."""
    line = " ".join(str(error).split())[:200] or type(error).__name__
    for kind_of_error, number in _FINAL_ERRORS.items():
        if isinstance(error, kind_of_error):
            if number in (errno.ENOENT, errno.EEXIST):
                line = os.strerror(number)
            return OSError(number, line, url)
    if _DENIED.search(line):
        return OSError(errno.EACCES, f"permission denied: {line}", url)
    return OSError(errno.EIO, line, url)


def shorten_storage_logs() -> None:
    """Shows each message of gcsfs, s3fs and Google's login only once, in one line.

    These libraries log every try, and gcsfs adds its traceback.
    """
    shown = set()

    def is_first(record: logging.LogRecord) -> bool:
        line = record.getMessage().partition("\n")[0]
        is_new = line not in shown
        shown.add(line)
        # Only this line is shown of the record.
        record.msg = line
        record.args = None
        record.exc_info = None
        return is_new

    for name in [*SCHEMES.values(), "google.auth._default"]:
        logging.getLogger(name).addFilter(is_first)
