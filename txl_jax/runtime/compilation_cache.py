"""JAX's compilation cache: a function compiled once is read from disk at the next start.

An entry is machine code that runs in this process, without any verification. The directory is
therefore a per-user directory in which only that user may write, or one that the user names. A
run's record or a flagfile never names it.
"""

import grp
import hashlib
import os
import platform
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from txl_jax.errors import UserError
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import is_remote

# JAX compiles dozens of functions for a run. Caching faster ones would gain little.
_MIN_COMPILE_SECONDS = 0.1
# Linux follows at most this many links in one path.
_MAX_LINKS = 40
# Values of --compilation_cache that disable the cache.
_NO_CACHE = ("", "off", "none")


def check_outside(named: str | None, runs: Iterable[str | None]) -> None:
    """Checks that the cache that the user names is not inside a run.

    Otherwise the code in the cache would be passed on with the run.

    Args:
      named: The cache's directory, a value that disables the cache, or None.
      runs: Directories of runs. None entries are skipped.

    Raises:
      UserError: If the cache is a run's directory or inside of it, by links too.
    """
    if named is None or named in _NO_CACHE:
        return
    for run in runs:
        if not run or is_remote(run) != is_remote(named):
            continue
        if f"{_resolved(named)}/".startswith(f"{_resolved(run)}/"):
            raise UserError(
                f"the compilation cache must be outside of {run}, because code is loaded from it, "
                f"got {named}. Pass another directory."
            )


def _resolved(path: str) -> str:
    if is_remote(path):
        return path.rstrip("/")
    return os.path.realpath(os.path.expanduser(path))


def keep_compiled(named: str | None = None, *, by_default: bool = True) -> None:
    """Enables JAX's compilation cache.

    A cache that cannot be used, or is not safe, is a note and never ends a run.

    Args:
      named: The directory that the user passed, or "off". None means the one that
        JAX_COMPILATION_CACHE_DIR names, or else the user's own (`user_folder`).
      by_default: Whether the user's own is used if none is named. With multiple processes it never
        is: only process 0 writes there, and on GPUs the others would wait forever for its part of
        the autotuning.
    """
    if named in _NO_CACHE:
        return
    if named is None:
        is_set = jax.config.values["jax_compilation_cache_dir"] is not None
        if is_set or not by_default or distributed.is_multiprocess():
            return
    parent = user_folder() if named is None else named
    if parent is None:
        _note_not_cached("the home directory is unknown")
        return

    # XLA compiles for the processor that it finds, and JAX's keys do not name it: on a disk that
    # machines share, one would read programs with instructions that it lacks.
    if is_remote(parent):
        folder = os.path.join(parent, processor())
    else:
        folder = os.path.join(os.path.abspath(os.path.expanduser(parent)), processor())
        try:
            _make_private(folder)
            danger = why_unsafe(folder)
        except OSError as error:
            _note_not_cached(f"cannot use {folder} ({error.strerror or error})")
            return
        if danger is not None and named is None:
            _note_not_cached(f"{danger}, so its content may not be yours")
            return
        if danger is not None:
            print(
                f"note      code is loaded from --compilation_cache={named}, but {danger}",
                file=sys.stderr,
                flush=True,
            )
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)


def user_folder() -> str | None:
    """Returns the user's own cache, $XDG_CACHE_HOME/txl_jax/compilation.

    Returns None if the home directory is unknown.
    """
    parent = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard says to ignore a relative path.
    if not os.path.isabs(parent):
        parent = os.path.expanduser("~/.cache")
    # Without a home directory the ~ is still there.
    if not os.path.isabs(parent):
        return None
    return os.path.join(parent, "txl_jax", "compilation")


def why_unsafe(folder: str) -> str | None:
    """Returns which part of an existing directory's path others may change.

    The directory must be the user's. Directories and links on the way must belong to the user or
    the system. None of them may be writable by others, except directories like /tmp, in which
    nobody can replace what others have made.

    Returns:
      The reason, as in "/srv/cache belongs to another user", or None if only this user may change
      the path.
    """
    user = os.getuid()
    # Inside of a container the owner of / may have another number than 0.
    system = (0, os.stat("/").st_uid)

    parts = list(_walked(folder))
    for part in parts:
        info = os.lstat(part)
        is_last = part == parts[-1]
        if info.st_uid != user and (is_last or info.st_uid not in system):
            return f"{part} belongs to another user"

        # A link's permissions mean nothing. Whoever may replace it owns it, or writes to its
        # directory.
        if stat.S_ISLNK(info.st_mode):
            continue

        group_may_write = info.st_mode & stat.S_IWGRP and not _is_own_group(info.st_gid)
        others_may_write = group_may_write or info.st_mode & stat.S_IWOTH
        # With the sticky bit, as in /tmp, only an entry's owner can replace it. In the cache itself
        # others could still add entries.
        only_owners_replace = info.st_mode & stat.S_ISVTX and not is_last
        if others_may_write and not only_owners_replace:
            return f"other users may write to {part}"
    return None


def _walked(path: str) -> Iterator[str]:
    """Yields the directories and links that lead to a path, from / to the last one.

    They are followed as the system follows them.
    """
    reached = "/"
    yield reached
    names = path.split("/")
    links = 0
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            reached = os.path.dirname(reached)
            continue
        part = os.path.join(reached, name)
        yield part
        if not os.path.islink(part):
            reached = part
            continue

        # The link's target takes its place in front of the names that remain.
        links += 1
        if links > _MAX_LINKS:
            return
        target = os.readlink(part)
        names = target.split("/") + names
        if target.startswith("/"):
            reached = "/"


def _is_own_group(number: int) -> bool:
    """Returns whether a group is the user's private one.

    A private group is named like the user and has no other members.
    """
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _make_private(folder: str) -> None:
    """Makes a directory and its parents, if missing, for this user only.

    Raises:
      OSError: If the directory, or the one to make it in, is a file or not writable.
    """
    missing = []
    parent = folder
    # `exists` is False too where a directory above may not be entered.
    while not os.path.exists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)):
        raise PermissionError(f"{parent} is a file or not writable")
    for name in reversed(missing):
        # `exist_ok`, because another process may make it at the same time.
        Path(name).mkdir(mode=0o700, exist_ok=True)


def _note_not_cached(reason: str) -> None:
    # Standard output may be a command's result, such as a compressed file.
    print(
        f"note      compiled functions are not cached: {reason}. "
        "Set --compilation_cache=PATH, or off.",
        file=sys.stderr,
        flush=True,
    )


def processor() -> str:
    """Returns a name for this machine's kind of processor and its instructions."""
    features = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            # The first core's instructions: x86 lists them as flags, ARM as Features.
            if line.startswith(("flags", "Features")):
                features = line
                break
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
