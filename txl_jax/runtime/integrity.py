"""Digests of a checkpoint's files: a flipped byte restores silently, so every file is checked before a restore.

`digests.json` holds the sha256 of every other file of a step. It is written last, so it vouches for all of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from txl_jax.errors import UserError
from txl_jax.runtime.files import file_sha256, write_json
from txl_jax.runtime.paths import files_below, is_remote

DIGESTS = "digests.json"
NO_DIGESTS = "it has no digests"


def write_digests(folder: Path) -> None:
    """Writes the digests of all files in a folder, which makes it a verified checkpoint."""
    write_json(folder / DIGESTS, {name: file_sha256(folder / name) for name in _file_names(folder)})


def is_verified(folder: Path) -> bool:
    """Returns whether a folder has digests; the files themselves are not read."""
    return (folder / DIGESTS).exists()


def find_damage(folder: Path) -> str | None:
    """Reads every file of a checkpoint and compares its digest.

    Returns:
      None if all files are as they were written, `NO_DIGESTS` if that cannot be known, else one clause that names the
      damaged file.

    Raises:
      UserError: object storage cannot be reached, so that nothing is known.
    """
    try:
        digests = json.loads((folder / DIGESTS).read_bytes())
        expected = {name: str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, AttributeError) as error:
        _raise_if_out_of_reach(folder / DIGESTS, error)
        return NO_DIGESTS  # Digests that cannot be read vouch for nothing.
    for name, digest in expected.items():
        try:
            if file_sha256(folder / name) != digest:
                return f"the file {name} is damaged (its sha256 is not the one in {DIGESTS})"
        except OSError as error:
            _raise_if_out_of_reach(folder / name, error)
            return f"the file {name} cannot be read ({error.strerror})"
    return None


def _raise_if_out_of_reach(path: Path, error: Exception) -> None:
    """Raises if an object could not be read for another reason than that it is missing: it is no damage."""
    if is_remote(path) and isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        raise UserError(f"cannot read {path} ({error.strerror}); start again once it can be reached") from error


def _file_names(folder: Path) -> Iterator[str]:
    """Names of a folder's files relative to it, the digests left out."""
    for file in files_below(folder):
        if file != folder / DIGESTS:
            yield file.relative_to(folder).as_posix()
