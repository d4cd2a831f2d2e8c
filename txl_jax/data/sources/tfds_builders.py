"""tensorflow-datasets builders of the published corpora, which need no TensorFlow.

A record is a block of bytes; a split's records in order are its files in the order in which their container
could be read. Lines would be the simpler record, but a million of them take seconds to read one by one.
The metadata hold the counts taken on the way:

sha256   by part: of its file, or of its files' sha256 in order
files    by split: name, bytes and records of each file, in the order of the records

`ShardBasedBuilder` writes records as they come. `GeneratorBasedBuilder` sorts them first, for which it needs
TensorFlow above 1 GB.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
import tqdm

from txl_jax.config import CorpusName
from txl_jax.data.sources import archives, checks, download
from txl_jax.data.sources.archives import Container, Stream
from txl_jax.data.sources.checks import Tally
from txl_jax.data.sources.corpora import CORPORA, USE_PREFIX
from txl_jax.data.sources.corpus_row import PublishedCorpus
from txl_jax.errors import UserError

RECORD_BYTES = 1 << 16
SHARD_RECORDS = 1 << 10  # Records per file: tensorflow-datasets holds a file's records in memory while it writes.


class PublishedText(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus as records.

    Args:
      find: returns the corpus's files; None: downloads them.
    """

    VERSION = tfds.core.Version("1.0.0")  # Raise it whenever the same corpus would give other records or metadata.
    NAME: ClassVar[CorpusName]

    def __init__(self, *, find: Callable[[tfds.download.DownloadManager], Container] | None = None, **kwargs: Any):
        super().__init__(**({"file_format": "array_record"} | kwargs))
        self._find = find or functools.partial(download.fetch, self.corpus.sources)
        self._tallies: dict[str, dict[str, Tally]] = {}  # By part and file.
        self._files: dict[str, list[tuple[str, int, int]]] = {}

    @property
    def corpus(self) -> PublishedCorpus:
        """Returns the corpus's row of the table."""
        return CORPORA[self.NAME]

    @property
    def url_infos(self) -> dict[str, Any]:
        """Returns the records of downloads, in place of a file of checksums."""
        return download.url_infos(self.corpus)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.corpus.title,
            features=tfds.features.FeaturesDict({"block": tfds.features.Tensor(shape=(), dtype=np.object_)}),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        self.info.metadata["files"] = self._files
        self.info.metadata["sha256"] = {part: checks.digest(_in_order(files)) for part, files in self._tallies.items()}

    def _shard_iterators_per_split(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, list[Callable[[], Iterator[Any]]]]:
        container = self._find(dl_manager)
        layouts = self.corpus.layouts + self.corpus.own_layouts
        layout = archives.fit(container, layouts, again=self.corpus.url)
        self._check_sizes(container, layout)
        shards = {}
        for split, (part, first, last) in self.corpus.ranges().items():
            sizes = {file: len(range(container.sizes[file])[first:last]) for file in layout[part]}
            records = self._records(container, split, sizes)
            n_record = sum(_n_record(size) for size in sizes.values())
            # All shards take from the same stream; the last one reaches its end, where the part is checked.
            take = functools.partial(itertools.islice, records, SHARD_RECORDS)
            shards[split] = [take] * (max(n_record - 1, 0) // SHARD_RECORDS) + [functools.partial(iter, records)]
        return shards

    def _check_sizes(self, container: Container, layout: dict[str, list[str]]) -> None:
        """Refuses at once files of a wrong size."""
        for part, files in layout.items():
            known, size = self.corpus.facts[part].size, sum(container.sizes[file] for file in files)
            if known not in (None, size):
                self._refuse(container, files, f"{size:,} bytes and {self.corpus.title} has exactly {known:,}")
            if empty := [file for file in files if not container.sizes[file]]:
                self._refuse(container, empty, "nothing")

    def _records(
        self, container: Container, split: str, sizes: dict[str, int]
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yields a split's records and counts them; its part is checked once all of it was read."""
        part, first, last = self.corpus.ranges()[split]
        words = self.corpus.facts[part].tokens is not None
        tallies = self._tallies.setdefault(part, {})
        keys = itertools.count()
        self._files[split] = []
        with tqdm.tqdm(
            total=sum(sizes.values()), desc=f"preparing {split}", unit="B", unit_scale=True, delay=1, disable=None
        ) as bar:
            for file, stream in container.read(sizes):
                self._files[split].append((file.rpartition("/")[2], sizes[file], _n_record(sizes[file])))
                counted = tallies.setdefault(file, Tally(words=words))
                for block in _blocks(stream, first, sizes[file]):
                    counted.add(block)
                    bar.update(len(block))
                    yield next(keys), {"block": block}
        if last is None or split == list(self.corpus.cuts)[-1]:
            self._check(container, part)

    def _check(self, container: Container, part: str) -> None:
        tallies, title = self._tallies[part], self.corpus.title
        of = title if self.corpus.cuts else f"the {part} split of {title}"
        if wrong := checks.difference(self.corpus.facts[part], _in_order(tallies), of=of):
            self._refuse(container, list(tallies), wrong)
        if checks.other_bytes(self.corpus.facts[part], _in_order(tallies)):
            print(
                f"note: {of} in {container.name} has as many tokens as the published one, but other bytes; scores are "
                "comparable only if just its white space differs",
                flush=True,
            )

    def _refuse(self, container: Container, files: list[str], wrong: str) -> None:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        prefix = f", or, to run on a part of it, {USE_PREFIX}" if self.corpus.cuts else ""
        raise UserError(f"{container.where(files[0])}{more} holds {wrong}; get it again from {self.corpus.url}{prefix}")

    def _log_download_bytes(self) -> None:
        """Does nothing: tensorflow-datasets would print that sizes are unknown."""

    def _log_download_done(self) -> None:
        """Does nothing: the program prints it."""


def _builder(name: CorpusName) -> type[PublishedText]:
    """Returns the builder's class of a corpus; its name gives the folder of records, txl_NAME."""
    return type(f"Txl{name.value.title()}", (PublishedText,), {"NAME": name, "name": f"txl_{name}"})


BUILDERS = {name: _builder(name) for name in CORPORA}


def _in_order(tallies: dict[str, Tally]) -> list[Tally]:
    """Returns tallies in the order of the files' names, not that of reading."""
    return [tallies[file] for file in sorted(tallies, key=lambda file: file.rpartition("/")[2])]


def _n_record(size: int) -> int:
    return -(-size // RECORD_BYTES)


def _blocks(stream: Stream, first: int, size: int) -> Iterator[bytes]:
    """Yields `size` bytes of a stream from byte `first` on, in records."""
    for left, wanted in ((first, False), (size, True)):
        while left:
            block = stream.read(min(left, RECORD_BYTES))
            if not block:
                raise UserError("a corpus's file became shorter while it was read; leave it alone while a run starts")
            left -= len(block)
            if wanted:
                yield block
