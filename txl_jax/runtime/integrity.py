"""Digests of a checkpoint's files: a flipped byte restores silently, so every file is checked before a restore.

`digests.json` holds the sha256 of every other file of a step. It is written last, so it vouches for all of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from txl_jax.runtime.files import file_sha256, write_json

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
    """
    try:
        digests = json.loads((folder / DIGESTS).read_bytes())
        expected = {name: str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, AttributeError):
        return NO_DIGESTS  # Digests that cannot be read vouch for nothing.
    for name, digest in expected.items():
        try:
            if file_sha256(folder / name) != digest:
                return f"the file {name} is damaged (its sha256 is not the one in {DIGESTS})"
        except OSError as error:
            return f"the file {name} cannot be read ({error.strerror})"
    return None


def _file_names(folder: Path) -> Iterator[str]:
    """Names of a folder's files relative to it, the digests left out."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file != folder / DIGESTS:
            yield file.relative_to(folder).as_posix()
