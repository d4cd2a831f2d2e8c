"""Where the files of a published corpus are: unpacked, in archives, or on the network."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from txl_jax.config.config_tree import require
from txl_jax.data.archives import Place, open_files
from txl_jax.data.published import Facts, Layout, PublishedCorpus, Remote
from txl_jax.errors import UserError
from txl_jax.runtime import storage

# To connect, and to answer.
_ASK_SECONDS = 3, 10
# In the order in which they are checked.
_FACTS = {
    "size": "{:,} bytes instead of {:,}",
    "tokens": "{:,} tokens (words and line ends) instead of {:,}",
    "lines": "{:,} lines instead of {:,}",
    "sha256": "sha256 {} instead of {}",
}


def find_files(corpus: PublishedCorpus, data_dir: str, manager: Any) -> list[Place]:
    """Opens the corpus's files, in the first directory that has all of them, or downloaded.

    Raises `UserError` if only some of them are there, or none and they cannot be downloaded, or
    they are not official.
    """
    folders, partly = corpus.places(data_dir), ""
    for folder in folders:
        for names in corpus.file_sets(os.path.basename(folder)):
            paths = {name: os.path.join(folder, name) for name in names}
            lacking = [name for name, path in paths.items() if not os.path.isfile(path)]
            if not lacking:
                for official in itertools.chain(*corpus.sources):
                    if official.is_archive and official.file in paths:
                        _check_official(paths[official.file], official)
                return open_files(
                    [(name, path, corpus.url_of(name)) for name, path in paths.items()]
                )
            if len(lacking) < len(names):
                there, urls = (
                    min(set(names) - set(lacking)),
                    " and ".join(dict.fromkeys(map(corpus.url_of, lacking))),
                )
                lacks = (
                    f"{folder} has {there}, but not {_some(lacking)} of {corpus.title}. "
                    f"Download it from {urls}"
                )
                partly = partly or lacks
    require(not partly, partly)
    return _download(corpus, folders, manager)


def _check_official(path: str, official: Remote) -> None:
    found = Facts(size=os.path.getsize(path), sha256=official.sha256 and storage.sha256(path))
    wrong = difference(official, found)
    require(
        not wrong,
        f"{path} does not match the official file: {wrong}. Download it again from {official.url}",
    )


def _download(corpus: PublishedCorpus, folders: list[str], manager: Any) -> list[Place]:
    """Downloads the first source that can be. Raises `UserError` if none can."""
    failed = []
    for source in corpus.sources:
        files, remote = list[tuple[str, str, str]](), source[0]
        try:
            # Asked first, as the manager retries for minutes.
            requests.head(remote.url, timeout=_ASK_SECONDS, allow_redirects=True).raise_for_status()
            for remote in source:  # One by one, so that the one that fails is known.
                files.append((remote.file, str(manager.download(remote.url)), remote.url))
                _check_official(files[-1][1], remote)
            return open_files(files)
        except (
            tfds.download.DownloadError,
            NonMatchingChecksumError,
            requests.RequestException,
            UserError,
        ) as error:
            # Others have several lines, of layers of libraries.
            is_short = isinstance(
                error, tfds.download.DownloadError | requests.HTTPError | UserError
            )
            failed.append(f"{remote.url} failed ({error if is_short else type(error).__name__})")
    wanted = ", or ".join(
        " and ".join(remote.url for remote in source) for source in corpus.sources
    )
    missing = (
        f"{corpus.title} is not in {' or '.join(folders)}, and downloading it failed "
        f"({'; '.join(failed)})"
    )
    raise UserError(f"{missing}. Put {wanted} into {folders[0]} (--data_dir){corpus.advice}")


def fit(places: Sequence[Place], layouts: Sequence[Layout]) -> dict[str, list[Place]]:
    """Returns the files of each part, by the first layout whose files are all there.

    A file is found by the end of its path: 'data/a.txt' is also './old/data/a.txt'. Raises
    `UserError` if no layout fits, or a file is there twice.
    """
    holder = " and ".join(dict.fromkeys(place.path for place in places))
    urls = " and ".join(dict.fromkeys(place.url for place in places))
    found = {
        tail: [
            place for place in places if f"/{place.name}".replace("\\", "/").endswith(f"/{tail}")
        ]
        for tail in itertools.chain(*(names for layout in layouts for names in layout.values()))
    }
    lacking = [
        [tail for tail in itertools.chain(*layout.values()) if not found[tail]]
        for layout in layouts
    ]
    least, there = _some(min(lacking, key=len)), _some([place.name for place in places])
    require(
        not least, f"{holder} has no {least} (it contains {there}). Download it again from {urls}"
    )
    layout = layouts[lacking.index([])]
    for tail in itertools.chain(*layout.values()):
        both = " and ".join(place.name for place in found[tail])
        require(len(found[tail]) == 1, f"{holder} has both {both}, so it is ambiguous. Remove one.")
    return {
        part: sorted((found[tail][0] for tail in tails), key=places.index)
        for part, tails in layout.items()
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def difference(known: Facts | Remote, found: Facts) -> str:
    """Describes the first known fact that was found to differ: "12 bytes instead of 10".

    Returns "" if no known fact differs.
    """
    for fact, shown in _FACTS.items():
        expected, value = getattr(known, fact, None), getattr(found, fact)
        if None not in (expected, value) and expected != value:
            return shown.format(value, expected)
    return ""
