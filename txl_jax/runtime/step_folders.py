"""The folders of steps that a `Checkpointer` has in its directory: which count, where one is written, how one goes.

On this machine a folder gets its name when it is complete, and is renamed before it is deleted:

    200/  200.replaced-1/  100.deleted/

Object storage has no rename. A folder there is complete once Orbax has written `commit_success.txt`, which is the last
object that it writes and the first that is deleted; a step that is there already is written beside it:

    200/  200.again-1/
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from txl_jax.errors import CheckpointError
from txl_jax.runtime.paths import is_remote, remove_tree

COMMIT = "commit_success.txt"  # Orbax's name.
_NAME = re.compile(r"(0|[1-9]\d*)(?:\.(replaced|again)-(\d+))?")
_LEFTOVERS = ("*.orbax-checkpoint-tmp*", "*.deleted")


class StepFolder(NamedTuple):
    """A step on disk; the same step may be there twice, if a run fell back past it and came to it again."""

    step: int
    path: Path


def find(directory: Path) -> list[StepFolder]:
    """Returns the complete steps, newest first; of one step the one that was written last.

    Raises:
      CheckpointError: the directory cannot be read.
    """
    try:
        if is_remote(directory):
            names = [path.name for path in _steps(directory) if (path / COMMIT).exists()]
        else:
            names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint directory {directory} cannot be read ({error.strerror}); "
            "it must be a folder that this user may read"
        ) from error
    found = [(int(match[1]), _rank(match), name) for name in names if (match := _NAME.fullmatch(name))]
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    return [StepFolder(step, directory / name) for step, _, name in found]


def is_replaced(path: Path) -> bool:
    """Returns whether a step was renamed because its number is written anew."""
    return ".replaced-" in path.name


def new(directory: Path, step: int) -> Path:
    """Returns where a step is to be written; on this machine an earlier one of that number is renamed."""
    path = directory / str(step)
    if is_remote(directory):
        found = (_NAME.fullmatch(each.name) for each in _steps(directory))
        taken = [int(match[3] or 0) for match in found if match and int(match[1]) == step]
        # Above all that are there: a free number below them would be the name of an earlier folder.
        return directory / (f"{step}.again-{max(taken) + 1}" if taken else str(step))
    if path.exists():
        replaced = (int(other.name.rpartition("-")[2]) for other in directory.glob(f"{step}.replaced-*"))
        path.rename(f"{path}.replaced-{max(replaced, default=0) + 1}")
    return path


def delete(path: Path) -> None:
    """Deletes a step; a kill halfway does not leave half a step that counts."""
    if is_remote(path):
        (path / COMMIT).unlink(missing_ok=True)
        remove_tree(path)
    else:
        shutil.rmtree(path.rename(f"{path}.deleted"))


def sweep(directory: Path) -> None:
    """Deletes what killed runs left behind."""
    if is_remote(directory):
        for path in _steps(directory):
            if not (path / COMMIT).exists():
                remove_tree(path)
        return
    for pattern in _LEFTOVERS:
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _steps(directory: Path) -> Iterator[Path]:
    """Yields all folders on object storage that are named by steps, complete or not."""
    try:
        yield from (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    except FileNotFoundError:
        return


def _rank(match: re.Match[str]) -> int:
    """The order of folders of one step: `again` before the first, the last of them first; `replaced` after it."""
    number = int(match[3] or 0)
    return -number if match[2] == "again" else number
