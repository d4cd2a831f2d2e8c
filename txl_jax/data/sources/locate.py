"""Locates a corpus's files: unpacked in the data folder, in an archive there, or on the network."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from txl_jax.data.sources.archives import Container, Files, open_archive
from txl_jax.data.sources.corpora import USE_PREFIX
from txl_jax.data.sources.corpus_row import PublishedCorpus, Remote
from txl_jax.errors import UserError

Find = Callable[[Any], Container]  # Download manager -> the corpus's files.


def find(corpus: PublishedCorpus, data_dir: Path) -> Find:
    """Returns the first place that has the corpus's files, or all sources that answer.

    Raises:
      UserError: no place has them (the message names the files, their folder, and the answers of the sources), or a
        folder has some of the files and lacks others.
    """
    places = [data_dir, *(data_dir / name for name in corpus.folders), data_dir / "downloads" / "manual"]
    found = next((here for place in places for here in _in_place(corpus, place)), None)
    if found is not None:
        return found
    for place in places:
        _refuse_a_part(corpus, place)
    return _on_the_network(corpus, places)


def _in_place(corpus: PublishedCorpus, place: Path) -> Iterator[Find]:
    """Yields everything in a folder that may be the corpus."""
    for paths in _layouts(corpus, place):
        if all(map(os.path.isfile, paths.values())):
            yield functools.partial(_open_files, str(place), paths)
    for name, remote in corpus.archives.items():
        if (place / name).is_file():
            yield functools.partial(_open_archive, str(place / name), remote, corpus.url)


def _open_files(folder: str, paths: dict[str, str], manager: Any) -> Container:
    del manager
    return Files(folder, paths)


def _layouts(corpus: PublishedCorpus, place: Path) -> Iterator[dict[str, str]]:
    """Yields the paths that the files may have in a folder, by their names."""
    for layout in corpus.layouts + (corpus.own_layouts if place.name in corpus.folders else ()):
        yield {file: str(place / file) for files in layout.values() for file in files}


def _open_archive(path: str, official: Remote | None, url: str, manager: Any) -> Container:
    """Opens the archive at `path`; one of the official name must be the official file."""
    del manager
    size = os.path.getsize(path)
    if official and official.size not in (None, size):
        raise UserError(f"{path} has {size:,} bytes and {official.url} has {official.size:,}; get it again from there")
    if official and official.sha256 is not None:
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != official.sha256:
            raise UserError(
                f"{path} has sha256 {sha256} and {official.url} has {official.sha256}; get it again from there"
            )
    return open_archive(path, again=official.url if official else url)


def _refuse_a_part(corpus: PublishedCorpus, place: Path) -> None:
    """Raises `UserError` for a folder that has some of the corpus's files and lacks others."""
    for paths in _layouts(corpus, place):
        lacking = [file for file, path in paths.items() if not os.path.isfile(path)]
        if len(lacking) < len(paths):
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            there = next(file for file in paths if file not in lacking)
            raise UserError(
                f"{place} has {there} but lacks {', '.join(lacking[:3])}{more} of {corpus.title}; add what is missing "
                f"(from {corpus.url})"
            )


def _on_the_network(corpus: PublishedCorpus, places: list[Path]) -> Find:
    from txl_jax.data.sources import download  # Imported here: it takes half a second.

    answers = download.ask(corpus.sources)
    there = [source for source, answer in answers.items() if not answer]
    if not there:
        raise UserError(_missing(corpus, places, answers))

    def fetch(manager: Any) -> Container:
        try:
            return download.fetch(there, manager, failed=answers.__setitem__)
        except download.NoSourceError:
            raise UserError(_missing(corpus, places, answers)) from None

    return fetch


def _missing(corpus: PublishedCorpus, places: list[Path], answers: dict[tuple[Remote, ...], str]) -> str:
    """Describes which files belong where, and why they were not downloaded."""
    failures = "; ".join(f"{source[0].url} {answer}" for source, answer in answers.items())
    prefix = f", or, to run on a part of it, {USE_PREFIX}" if corpus.cuts else ""
    archives = any(source[0].is_archive for source in corpus.sources)
    return (
        f"{corpus.title} is in none of {', '.join(map(str, places))}, and downloading it failed ({failures}); put "
        f"{_wanted(corpus)}{', packed or unpacked,' if archives else ''} into {places[0]} (--data_dir){prefix}"
    )


def _wanted(corpus: PublishedCorpus) -> str:
    """Describes the files of each source, with their sizes and URLs."""
    folders: dict[str, list[str]] = {}
    for source in corpus.sources:
        sizes = [remote.size for remote in source if remote.size is not None]
        size = f"{sum(sizes):,} bytes, " if len(sizes) == len(source) else ""
        files = f"{', '.join(remote.file for remote in source)} ({size}from "
        folders.setdefault(files, []).append(source[0].url.rpartition("/")[0] + "/")
    return " or ".join(f"{files}{' or '.join(urls)})" for files, urls in folders.items())
