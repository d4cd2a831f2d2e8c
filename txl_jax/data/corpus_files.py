"""Finds the files of a published corpus: unpacked, in archives, or on the network.

`find_files` lists the files of the corpus, wherever they are, and `fit` assigns them to the splits.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from txl_jax.data.archives import Place, open_files
from txl_jax.data.published import Facts, Layout, PublishedCorpus, Remote
from txl_jax.errors import UserError
from txl_jax.runtime import storage

# Timeouts in seconds for connecting to a server, and for its answer.
_ASK_SECONDS = 3, 10
# The facts to compare, in order, and the description of a difference.
_FACTS = {
    "size": "{:,} bytes instead of {:,}",
    "tokens": "{:,} tokens (words and line ends) instead of {:,}",
    "lines": "{:,} lines instead of {:,}",
    "sha256": "sha256 {} instead of {}",
}
# Maximum number of names that an error lists.
_LISTED_NAMES = 5


def find_files(corpus: PublishedCorpus, data_dir: str, manager: Any) -> list[Place]:
    """Opens the corpus's files in the first directory that has all of them, or downloads them.

    Args:
      data_dir: Directory of the user's files. The corpus's own directory may be in it.
      manager: The download manager of tensorflow-datasets.

    Raises:
      UserError: If a directory has only some of the files, if no directory has any and they cannot
        be downloaded, or if an archive is not the official one.
    """
    folders = corpus.places(data_dir)
    incomplete = ""
    for folder in folders:
        for names in corpus.file_sets(os.path.basename(folder)):
            files = []
            lacking = []
            for name in names:
                path = os.path.join(folder, name)
                files.append((name, path, corpus.url_of(name)))
                if not os.path.isfile(path):
                    lacking.append(name)
            if not lacking:
                _check_archives(corpus, files)
                return open_files(files)

            # The first incomplete set of files is an error, unless another set is complete.
            if len(lacking) < len(names) and not incomplete:
                present = min(set(names) - set(lacking))
                urls = " and ".join(dict.fromkeys(map(corpus.url_of, lacking)))
                incomplete = (
                    f"{folder} has {present}, but not {_list_some(lacking)} of {corpus.title}. "
                    f"Download it from {urls}"
                )
    if incomplete:
        raise UserError(incomplete)
    return _download(corpus, folders, manager)


def _check_archives(corpus: PublishedCorpus, files: Sequence[tuple[str, str, str]]) -> None:
    """Raises `UserError` if a file has the name of an official archive, but other content.

    Args:
      files: The name, path and URL of each file.
    """
    for name, path, _ in files:
        for remote in itertools.chain(*corpus.sources):
            if remote.is_archive and remote.file == name:
                _check_official(path, remote)


def _check_official(path: str, official: Remote) -> None:
    # A proxy's page or an interrupted download often has the name of the file, and a manipulated
    # archive may also have its size.
    sha256 = None
    if official.sha256 is not None:
        sha256 = storage.sha256(path)
    mismatch = difference(official, Facts(size=os.path.getsize(path), sha256=sha256))
    if mismatch:
        raise UserError(
            f"{path} does not match the official file: {mismatch}. "
            f"Download it again from {official.url}"
        )


def _download(corpus: PublishedCorpus, folders: list[str], manager: Any) -> list[Place]:
    """Downloads the corpus from the first source that works.

    Args:
      folders: The directories that do not have the files, for the error.
      manager: The download manager of tensorflow-datasets.

    Raises:
      UserError: If no source works.
    """
    failures = []
    for source in corpus.sources:
        files = list[tuple[str, str, str]]()
        remote = source[0]
        try:
            # A request shows within seconds whether the server answers. The manager would retry for
            # minutes.
            requests.head(remote.url, timeout=_ASK_SECONDS, allow_redirects=True).raise_for_status()
            # After an error, `remote` is the file that failed.
            for remote in source:
                path = str(manager.download(remote.url))
                _check_official(path, remote)
                files.append((remote.file, path, remote.url))
            return open_files(files)
        except (
            tfds.download.DownloadError,
            NonMatchingChecksumError,
            requests.RequestException,
            UserError,
        ) as error:
            # Other errors have multiple lines, from layers of libraries.
            reason = type(error).__name__
            if isinstance(error, tfds.download.DownloadError | requests.HTTPError | UserError):
                reason = str(error)
            failures.append(f"{remote.url} failed ({reason})")

    alternatives = []
    for source in corpus.sources:
        alternatives.append(" and ".join(remote.url for remote in source))
    raise UserError(
        f"{corpus.title} is not in {' or '.join(folders)}, and downloading it failed "
        f"({'; '.join(failures)}). Put {', or '.join(alternatives)} into {folders[0]} "
        f"(--data_dir){corpus.advice}"
    )


def fit(places: Sequence[Place], layouts: Sequence[Layout]) -> dict[str, list[Place]]:
    """Returns the files of each part, by the first layout whose files are all present.

    A file is found by the end of its path: 'data/a.txt' is also './old/data/a.txt'. The files of a
    part are in the order of `places`, in which an archive is read.

    Raises:
      UserError: If no layout matches, or the choice of a file is ambiguous.
    """
    # The places of each file, and the files that each layout lacks.
    matches: dict[str, list[Place]] = {}
    lacking = []
    for layout in layouts:
        files = list(itertools.chain(*layout.values()))
        for file in files:
            matches[file] = [place for place in places if _is_at(place, file)]
        lacking.append([file for file in files if not matches[file]])

    # The error names the files of the layout that lacks the fewest.
    fewest = min(lacking, key=len)
    paths = " and ".join(dict.fromkeys(place.path for place in places))
    if fewest:
        contents = _list_some([place.name for place in places])
        urls = " and ".join(dict.fromkeys(place.url for place in places))
        raise UserError(
            f"{paths} has no {_list_some(fewest)} (it contains {contents}). "
            f"Download it again from {urls}"
        )

    layout = layouts[lacking.index(fewest)]
    for file in itertools.chain(*layout.values()):
        # For example, an old copy of a file next to the file itself: either could be the corpus.
        if len(matches[file]) > 1:
            both = " and ".join(place.name for place in matches[file])
            raise UserError(f"{paths} has both {both}, so it is ambiguous. Remove one.")

    parts = {}
    for part, names in layout.items():
        parts[part] = sorted((matches[name][0] for name in names), key=places.index)
    return parts


def _is_at(place: Place, file: str) -> bool:
    """Returns whether the name of a place ends in the path of a file.

    Archives that were made on Windows may have backslashes in their names.
    """
    return f"/{place.name}".replace("\\", "/").endswith(f"/{file}")


def _list_some(names: Sequence[str]) -> str:
    """Returns the first names as a list for a sentence, and the number of the others."""
    listed = ", ".join(names[:_LISTED_NAMES])
    if len(names) > _LISTED_NAMES:
        listed += f" and {len(names) - _LISTED_NAMES} more"
    return listed


def difference(known: Facts | Remote, actual: Facts) -> str:
    """Describes the first known fact that differs from the actual one: "12 bytes instead of 10".

    Returns "" if no known fact differs.
    """
    for fact, description in _FACTS.items():
        # For a remote file, only the size and sha256 are known.
        expected = getattr(known, fact, None)
        value = getattr(actual, fact)
        if expected is not None and value is not None and expected != value:
            return description.format(value, expected)
    return ""
