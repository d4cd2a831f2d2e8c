"""Downloads of corpora by tensorflow-datasets' download manager, which caches files and checks their digests.

Its downloader retries for minutes where there is no network, so every source is asked first.
"""

import concurrent.futures
import re
from collections.abc import Callable, Iterable

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from txl_jax.data.sources.archives import Container, Files, open_archive
from txl_jax.data.sources.corpus_row import PublishedCorpus, Remote
from txl_jax.errors import UserError

Source = tuple[Remote, ...]

_CONNECT_SECONDS, _ANSWER_SECONDS = 3, 10


class NoSourceError(Exception):
    """No source could be downloaded."""


def url_infos(corpus: PublishedCorpus) -> dict[str, UrlInfo]:
    """Returns the download manager's records of files whose size and checksum are both known."""
    return {
        remote.url: UrlInfo(size=remote.size, checksum=remote.sha256, filename=remote.file)
        for source in corpus.sources
        for remote in source
        if remote.size is not None and remote.sha256 is not None
    }


def ask(sources: Iterable[Source]) -> dict[Source, str]:
    """Asks all sources at the same time for their first file; returns why one is not there, "" for one that is."""
    sources = list(sources)
    with concurrent.futures.ThreadPoolExecutor(len(sources)) as pool:
        return dict(zip(sources, pool.map(_ask, sources), strict=True))


def fetch(
    sources: Iterable[Source],
    manager: tfds.download.DownloadManager,
    failed: Callable[[Source, str], object] = lambda source, why: None,
) -> Container:
    """Downloads the first of `sources` that can be; `failed` is called with the reason for each one before it.

    Raises:
      NoSourceError: none can.
    """
    for source in sources:
        try:
            return _download(source, manager)
        except NonMatchingChecksumError as error:
            failed(source, _other_file(error))
        except (tfds.download.DownloadError, requests.RequestException) as error:
            failed(source, _reason(error))
        except ValueError as error:  # The file has another size, or is no archive.
            failed(source, str(error))
    raise NoSourceError


def _ask(source: Source) -> str:
    try:
        answer = requests.head(source[0].url, timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS), allow_redirects=True)
    except requests.RequestException as error:
        return _reason(error)
    return "" if answer.status_code < 400 else f"answers with HTTP status {answer.status_code}"


def _download(source: Source, manager: tfds.download.DownloadManager) -> Container:
    paths = {file: str(path) for file, path in manager.download({remote.file: remote.url for remote in source}).items()}
    files = Files(source[0].url.rpartition("/")[0], paths)
    for remote in source:
        if remote.size not in (None, files.sizes[remote.file]):
            raise UserError(f"gave {files.sizes[remote.file]:,} bytes and not {remote.size:,}")
    return open_archive(paths[source[0].file], again=source[0].url) if source[0].is_archive else files


def _other_file(error: NonMatchingChecksumError) -> str:
    """Shortens an error of several lines to its two checksums."""
    sums = re.findall(r"checksum='(\w+)'", str(error))
    return f"gave a file of sha256 {sums[1]} and not {sums[0]}" if len(sums) == 2 else "gave another file"


def _reason(error: Exception) -> str:
    """Describes why a download failed, without the layers of libraries."""
    if isinstance(error, requests.exceptions.ProxyError):
        return "cannot be reached through the proxy"
    if isinstance(error, requests.Timeout):
        return "does not answer in time"
    if isinstance(error, requests.exceptions.SSLError):
        return "has no certificate that this machine trusts"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached"
    return f"failed ({error})"
