"""Files on this machine and objects in a bucket, read and written by the same functions.

A path is a string: absolute for this machine, or a URL such as gs://bucket/run. `os.path` joins and
splits both. For a URL each function calls the one in `remote`. Every read error is an OSError with
one line of text. FileNotFoundError only means that it does not exist.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from txl_jax.errors import LogError, UserError
from txl_jax.runtime import remote
from txl_jax.runtime.output import say

# A parsed value takes up to 30 times as much memory.
_MAX_JSON_BYTES = 16 << 20
# Flags and prompts are far smaller, and a pipe may never end.
_MAX_PIPED_BYTES = 16 << 20
_PROBE_BYTES = 4096
# How a file system without hard links, such as FAT, answers link.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
# How a file system without locks answers flock.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_SECONDS_BETWEEN_LOCK_TRIES = 0.05

AnyPath = remote.AnyPath


def is_remote(path: AnyPath) -> bool:
    """Returns whether a path is a URL, such as gs://bucket/run."""
    return "://" in os.fspath(path)


def as_path(text: AnyPath) -> str:
    """Returns an absolute path, "~" expanded and links resolved, or a URL without needless slashes.

    Raises `UserError` if no installed package opens such a URL, or it names no bucket.
    """
    path = re.sub("^file://+", "/", os.fspath(text))
    # A scheme with one slash, as in gs:/bucket, is a mistyped URL and not a local path.
    if is_remote(path) or path.partition(":/")[0] in remote.SCHEMES:
        return remote.as_url(path)
    return str(Path(expand_home(path)).resolve())


def expand_home(path: str) -> str:
    """Returns a local path with "~" and "~USER" expanded.

    Raises `UserError` if the home directory does not exist.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise UserError(
            f"the home directory {user} of the path {path} is unknown. Pass a path without it."
        )
    return expanded


# Reading


def exists(path: AnyPath) -> bool:
    """Returns whether there is a file, a directory, an object, or an object below this name."""
    if is_remote(path):
        return remote.kind(path) is not None
    return Path(path).exists()


def is_dir(path: AnyPath) -> bool:
    """Returns whether a path is a directory, or there are objects below it."""
    if is_remote(path):
        return remote.kind(path) == "directory"
    return Path(path).is_dir()


def size(path: AnyPath) -> int:
    """Returns the size of a file in bytes."""
    if is_remote(path):
        return remote.size(path)
    return os.path.getsize(path)


def modified(path: AnyPath) -> float:
    """Returns when a file was written, in seconds since 1970 (an object's in whole seconds)."""
    if is_remote(path):
        return remote.modified(path)
    return os.path.getmtime(path)


def read(path: AnyPath) -> bytes:
    """Returns the bytes of a file."""
    if is_remote(path):
        return remote.read(path)
    return Path(_ending(path)).read_bytes()


def read_text(path: AnyPath) -> str:
    """Returns the text of a small file in UTF-8, without a byte-order mark.

    Editors on Windows write this mark.

    Raises OSError like `read_small`, or ValueError if it is not UTF-8.
    """
    return read_small(path).decode("utf-8-sig")


def read_small(path: AnyPath) -> bytes:
    """Returns the bytes of a small file that the user named, which may be a shell pipe.

    For example, the user can pass a pipe as `<(command)`.

    Raises OSError like `read`, or if a pipe has more than 16 MiB.
    """
    if not is_pipe(path):
        return read(path)
    with open(path, "rb") as pipe:
        content = pipe.read(_MAX_PIPED_BYTES + 1)
    if len(content) > _MAX_PIPED_BYTES:
        raise OSError(
            errno.EFBIG, f"a pipe must have at most {_MAX_PIPED_BYTES:,} bytes", os.fspath(path)
        )
    return content


def is_pipe(path: AnyPath) -> bool:
    """Returns whether a path is a pipe, whose content can be read once and has no size."""
    return not is_remote(path) and Path(path).is_fifo()


def _ending(path: AnyPath) -> AnyPath:
    """Returns a local path.

    Raises OSError for a device or a pipe, such as a stranger's link to /dev/zero.
    """
    if stat.S_IFMT(os.stat(path).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return path


def read_json(path: AnyPath) -> Any:
    """Returns the value in a JSON file.

    Raises ValueError if it is not JSON, nests too deeply, or exceeds 16 MiB.
    """
    if not is_remote(path):
        length = size(path)
        if length > _MAX_JSON_BYTES:
            raise ValueError(f"it must have at most {_MAX_JSON_BYTES:,} bytes, got {length:,}")
    try:
        return json.loads(read(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def sha256(path: AnyPath) -> str:
    """Returns the sha256 of a file's bytes in hexadecimal. An object is read in blocks."""
    if is_remote(path):
        return remote.sha256(path)
    with open(_ending(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def names(folder: AnyPath, *, missing_ok: bool = False) -> list[str]:
    """Returns the sorted names in a directory.

    A missing one is FileNotFoundError, or has no names if `missing_ok`.
    """
    try:
        if is_remote(folder):
            return remote.names(folder)
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        if not missing_ok:
            raise
        return []


def files_below(folder: AnyPath) -> list[str]:
    """Returns the sorted paths of the files in a directory and its subdirectories.

    The list is empty if the directory is missing.
    """
    if is_remote(folder):
        return remote.objects_below(folder)
    return sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())


def local_copy(path: AnyPath, owner: object) -> str:
    """Returns a copy of an object on this machine, removed together with `owner`.

    Returns a local path as it is.
    """
    if not is_remote(path):
        return os.fspath(path)
    folder = tempfile.mkdtemp(prefix="txl_jax-")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    copy = os.path.join(folder, os.path.basename(path))
    remote.download(path, copy)
    return copy


# Writing


def write(path: AnyPath, data: bytes) -> None:
    """Replaces a file, or leaves it as it was and raises `LogError`."""
    with _replacing(path) as temporary:
        temporary.write_bytes(data)


def check_new_file(path: AnyPath) -> None:
    """Raises an error unless a local file with this name can be made now.

    Raises:
      UserError: If a file or directory with this name exists already.
      LogError: If its directory is missing or cannot be written, or its name is too long.
    """
    parent = os.path.dirname(path) or "."
    with writing(path):
        # It raises errors of the name that `lexists` hides.
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)
            raise UserError(f"{path} exists, and nothing is overwritten. Pass another path.")
        if not os.path.isdir(parent):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", parent)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable", parent)


def write_new(path: AnyPath, data: bytes) -> None:
    """Writes a local file that gets its name when it is complete, and only if the name is free.

    Raises:
      UserError: If something has the name by then.
      LogError: If the file cannot be written.
    """
    parent = os.path.dirname(path) or "."
    # In a directory that others may write to, a name that can be guessed may be their link to
    # another file. Processes in two containers may have the same number.
    temporary = Path(parent, f".{secrets.token_hex(8)}.tmp")
    with writing(path):
        try:
            with open(temporary, "xb") as file:
                file.write(data)
            _sync(temporary)
            _name_new_file(temporary, path)
            _sync(parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _name_new_file(temporary: Path, path: AnyPath) -> None:
    """Gives a file its name. Raises `UserError` if something has the name."""
    try:
        # Unlike a renaming, a link never replaces a file that another process has made.
        os.link(temporary, path)
    except FileExistsError:
        check_new_file(path)
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Another process could make the file between these two lines, but a result of hours is not
        # thrown away because of the disk's format.
        check_new_file(path)
        os.rename(temporary, path)


def write_lines(path: AnyPath, lines: Iterable[str]) -> None:
    """Replaces a file by lines, each with its newline, like `write`.

    They need not fit in memory.
    """
    with _replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(lines)


def write_file(path: AnyPath, make: Callable[[Path], Any]) -> None:
    """Replaces a file by the one that `make` makes at a temporary path, like `write`."""
    with _replacing(path) as temporary:
        make(temporary)


def write_json(path: AnyPath, value: Any) -> None:
    """Replaces a file by a value as JSON, like `write`.

    Raises TypeError or ValueError if JSON cannot store it.
    """
    write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


@contextlib.contextmanager
def new_folder(folder: AnyPath) -> Iterator[Path]:
    """Yields an empty local directory that is renamed to `folder` when the block ends.

    It is renamed as a whole or not at all.

    To object storage the files are uploaded in the order in which they were made: the last one is
    there once all are. Raises `UserError` if `folder` exists and is not empty, `LogError` if it
    cannot be written.
    """
    check_new_folder(folder)
    with _replacing(folder) as temporary:
        remove_tree(temporary)  # A killed process with this number may have left it.
        temporary.mkdir(parents=True)
        yield temporary
        # Else a power cut after the renaming could leave a directory with empty files.
        for file in files_below(temporary):
            _sync(file)


def check_new_folder(folder: AnyPath) -> None:
    """Raises `UserError` unless a directory is missing or empty, so that it may be written."""
    refuse_wildcards(folder)
    if is_dir(folder):
        is_taken = bool(names(folder))
    else:
        # A link that leads nowhere does not exist, and would be written through.
        is_taken = exists(folder) or os.path.islink(folder)
    if is_taken:
        raise UserError(
            f"{folder} must be a new or empty directory, because nothing is overwritten. "
            "Pass another path."
        )


def _replacing(path: AnyPath) -> contextlib.AbstractContextManager[Path]:
    """Returns a context with a temporary path to create, which replaces `path` when it ends.

    If an error occurs, nothing is left behind.
    """
    return _replacing_object(path) if is_remote(path) else _replacing_file(path)


@contextlib.contextmanager
def _replacing_object(url: AnyPath) -> Iterator[Path]:
    with writing(url), tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made")
        yield made
        remote.upload(made, url)


@contextlib.contextmanager
def _replacing_file(path: AnyPath) -> Iterator[Path]:
    """As `_replacing`. The temporary name is `.NAME.PID.tmp`."""
    parent, name = os.path.split(path)
    temporary = Path(parent, f".{name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)  # Also over an empty directory.
            _sync(parent or ".")
        except BaseException:
            # Making the content may fail, or be interrupted.
            with contextlib.suppress(OSError):
                if temporary.is_dir():
                    shutil.rmtree(temporary)
                else:
                    temporary.unlink()
            raise


def _sync(path: AnyPath) -> None:
    """Makes the content of a file, or the names in a directory, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Turns an OSError of the block into a `LogError` that names the file."""
    try:
        yield
    except OSError as error:
        raise LogError(
            f"cannot write to {error.filename or path} ({error.strerror or error}). "
            "Free space or allow writing there, or pass another directory."
        ) from error


@contextlib.contextmanager
def writable(folder: AnyPath, *, what: str) -> Iterator[None]:
    """Makes a local directory. An OSError while writing `what` to it becomes a `UserError`."""
    try:
        os.makedirs(folder, exist_ok=True)
        yield
    except OSError as error:
        # The error of a full disk names no file.
        path = Path(str(error.filename or folder))
        is_here = path.is_relative_to(folder) or Path(folder).is_relative_to(path)
        # An error without a number is a library's own sentence.
        if error.errno is None or not is_here:
            raise
        raise UserError(
            f"cannot write {what} to {folder} ({error.strerror or error}). "
            "Set --cache_dir to a writable directory on a disk with free space."
        ) from error


def probe(folder: AnyPath) -> None:
    """Makes a directory, and writes and removes a file in it, `.probe-PID`."""
    make_folder(folder)
    path = os.path.join(folder, f".probe-{os.getpid()}")
    data = bytes(_PROBE_BYTES)
    if is_remote(path):
        remote.write(path, data)
    else:
        Path(path).write_bytes(data)
    # Another run that holds the lock may have swept it.
    remove(path)


def make_folder(folder: AnyPath) -> None:
    """Makes a directory and its parents.

    Object storage needs none, but its names must not have wildcards.
    """
    refuse_wildcards(folder)
    if not is_remote(folder):
        os.makedirs(folder, exist_ok=True)


def remove(path: AnyPath) -> None:
    """Removes a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            remote.remove(path)
        else:
            os.unlink(path)


def remove_tree(folder: AnyPath) -> None:
    """Removes a directory with everything in it, if it exists."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        remote.remove_tree(folder)


@contextlib.contextmanager
def without_wildcards(folder: str) -> Iterator[str]:
    """Yields a path of a directory that no library mistakes for a pattern.

    Orbax, for example, takes "runs/lr[0.1]" for a pattern, and needs the yielded path instead.

    It is the path itself or, for a local path with wildcards, a symbolic link to it, removed at the
    end. `refuse_wildcards` rejects URLs with wildcards.

    Raises:
      OSError: If the link cannot be made.
    """
    if is_remote(folder) or not glob.has_magic(folder):
        yield folder
        return
    # The directory for temporary files may be in the same directory as the run.
    parent = "/tmp" if glob.has_magic(tempfile.gettempdir()) else None
    with tempfile.TemporaryDirectory(prefix="txl_jax-", dir=parent) as temporary:
        link = os.path.join(temporary, "link")
        os.symlink(folder, link)
        yield link


def refuse_wildcards(path: AnyPath) -> None:
    """Raises `UserError` for a URL with wildcards that is not meant as a pattern.

    fsspec would delete everything that matches the URL.
    """
    if not is_remote(path):
        return
    wildcards = sorted(set("*?[]") & set(os.fspath(path)))
    if wildcards:
        raise UserError(
            "the URL of a directory must not contain the wildcards * ? "
            f"[ ], got {' '.join(wildcards)} in {path}. Pass another name."
        )


@contextlib.contextmanager
def locked(path: AnyPath) -> Iterator[bool]:
    """Holds an exclusive lock, after waiting for a process that has it.

    The lock always ends with its process.

    Yields whether there is a lock. On a file system without locks it prints a note, and the block
    runs without.
    """
    with open(path, "a") as handle:
        missing = None
        try:
            missing = lock_now(handle, seconds=0)
        except BlockingIOError:
            say(f"waiting   for another process, which holds the lock {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        if missing is not None:
            folder = os.path.dirname(path)
            say(
                f"note      {folder} is not locked, because {missing}: "
                "do not prepare the same text in it twice at the same time"
            )
        yield missing is None


def lock_now(handle: IO[str], *, seconds: float, shared: bool = False) -> str | None:
    """Locks an open file until it is closed.

    Returns None, or a clause with the reason why the file is not locked: some network drives, such
    as a Google Drive that is mounted in Colab, do not support locks. Raises BlockingIOError if
    another process keeps the lock.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return f"the file system has no locks ({error.strerror})"
        time.sleep(_SECONDS_BETWEEN_LOCK_TRIES)


def access_error(what: str, path: AnyPath, error: OSError) -> UserError:
    """Returns the error for a failed operation on a file or object.

    `what` is the operation, such as "read".
    """
    reason = error.strerror or str(error)
    if not is_remote(path):
        advice = "Check its permissions and the free space on its disk, or pass another --workdir."
    elif isinstance(error, FileNotFoundError):
        reason = "no such bucket or object"
        advice = "Create the bucket, or pass the name of an existing one."
    elif isinstance(error, PermissionError):
        advice = (
            "Log in with `gcloud auth application-default login`, or grant this "
            "machine's account the role Storage Object User on the bucket."
        )
    else:
        advice = "Start again once it can be reached."
    return UserError(f"cannot {what} {path} ({reason}). {advice}")
