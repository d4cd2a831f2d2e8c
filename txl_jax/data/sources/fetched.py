"""Copies of remote texts on this machine: ids are memory-mapped, and archives are read at random, so files are local.

    <cache_dir>/fetched/<digest of URL, size and time>/<name>
    <cache_dir>/fetched/<digest of data_dir>/                  a published corpus, its files in the folders of data_dir

An object that was replaced is copied anew. Copies of single objects are not removed; the folder may be deleted at any
time.
"""

import dataclasses
import glob
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from txl_jax.config import DataConfig
from txl_jax.data.sources.corpus_row import PublishedCorpus
from txl_jax.errors import UserError
from txl_jax.runtime.paths import as_path, is_remote, modified, remote_error, size

_FOLDER = "fetched"


def local_config(config: DataConfig, cache: Path) -> DataConfig:
    """Returns a config whose files are all on this machine; remote ones are copied into the cache.

    Raises:
      UserError: a file cannot be read.
    """

    def one(path: str | None) -> str | None:
        return path and _copies(path, cache)[0]

    def each(paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(copy for path in paths for copy in _copies(path, cache))

    tokenizer = config.tokenizer
    return dataclasses.replace(
        config,
        file=one(config.file),
        train=each(config.train),
        valid=each(config.valid),
        test=each(config.test),
        tokenizer=dataclasses.replace(
            tokenizer,
            vocab_file=one(tokenizer.vocab_file),
            hf_file=one(tokenizer.hf_file),
        ),
    )


def local_folder(corpus: PublishedCorpus, data_dir: str, cache: Path) -> str:
    """Returns a folder on this machine with what a remote one has of a corpus.

    Raises:
      UserError: the folder cannot be read.
    """
    root = as_path(data_dir)
    places = [root, *(root / name for name in corpus.folders), root / "downloads" / "manual"]
    layouts = [*corpus.layouts, *corpus.own_layouts]
    wanted = {file for layout in layouts for files in layout.values() for file in files} | set(corpus.archives)
    target = cache / _FOLDER / hashlib.sha256(data_dir.encode()).hexdigest()[:16]
    try:
        for place in places:
            for name in wanted & _names_in(place, wanted):
                local = target / (place / name).relative_to(root)
                if not _is_copy(local, place / name):
                    _fetch(place / name, local)
    except OSError as error:
        raise remote_error("read", root, error) from error
    target.mkdir(parents=True, exist_ok=True)
    return str(target)


def check_cache(cache_dir: str | None, data_dir: str) -> None:
    """Raises `UserError` if the folder for prepared text would be remote: ids are memory-mapped."""
    if is_remote(cache_dir or data_dir):
        raise UserError(
            f"the folder for prepared text would be {cache_dir or data_dir}, and prepared text is memory-mapped: give "
            "--cache_dir=... a folder of this machine"
        )


def _names_in(place: Path, wanted: Iterable[str]) -> set[str]:
    """Names of files, with the folders above them, relative to a place."""
    found: set[str] = set()
    for folder in {os.path.dirname(name) for name in wanted}:
        try:
            found |= {os.path.join(folder, path.name) for path in (place / folder).iterdir()}
        except FileNotFoundError:
            continue
    return found


def _copies(path: str, cache: Path) -> list[str]:
    """The local files of a path or pattern, in the order of their names; a local path as it is."""
    if not is_remote(path):
        return [path]
    url = as_path(path)
    try:
        urls = [url]
        if glob.has_magic(path):
            bucket = as_path("/".join(path.split("/", 3)[:3]))
            urls = list(bucket.glob(path.split("/", 3)[3]))
            if not urls:
                raise UserError(f"no object matches {path}; check the pattern")
        return [str(_copy(each, cache)) for each in urls]
    except OSError as error:
        raise remote_error("read", url, error) from error


def _copy(url: Path, cache: Path) -> Path:
    identity = f"{url} {size(url)} {modified(url)}"
    local = cache / _FOLDER / hashlib.sha256(identity.encode()).hexdigest()[:16] / url.name
    if not local.exists():
        _fetch(url, local)
    return local


def _is_copy(local: Path, url: Path) -> bool:
    """Returns whether a file is what `_fetch` made of the object as it is now, by size and time."""
    if not local.exists():
        return False
    found = local.stat()
    return (found.st_size, found.st_mtime) == (size(url), modified(url))


def _fetch(url: Path, local: Path) -> None:
    """Downloads under a temporary name first; the copy gets the object's time."""
    local.parent.mkdir(parents=True, exist_ok=True)
    part = local.with_name(f".{local.name}.{os.getpid()}.tmp")
    try:
        time = modified(url)  # Before the download: an object that is replaced meanwhile is copied again.
        url.download(part)  # type: ignore[attr-defined]
        os.utime(part, (time, time))
        os.replace(part, local)
    finally:
        part.unlink(missing_ok=True)
