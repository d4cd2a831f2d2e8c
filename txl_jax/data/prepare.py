"""Published corpora, stored as tensorflow-datasets records.

Their files are found or downloaded, checked, and kept as records.

A record is a block of a file's bytes (reading a million lines one by one takes seconds). Next to
the records, metadata.json stores each part's sha256, and by split the name, bytes and records of
each file in their order. Archives are read as streams and never unpacked.
"""

import codecs
import contextlib
import errno
import functools
import hashlib
import itertools
import posixpath
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from txl_jax.config import CorpusName, Heldout
from txl_jax.data.archives import Place, read_files, refusing_damage
from txl_jax.data.corpus_files import difference, find_files, fit
from txl_jax.data.published import CORPORA, WHOLE, Facts
from txl_jax.data.text import File, Text, bar, digest_of
from txl_jax.errors import UserError
from txl_jax.runtime import storage
from txl_jax.runtime.output import say

RECORD_BYTES = 1 << 16
# Records per file: tensorflow-datasets holds a file's records in memory while it writes.
SHARD_RECORDS = 1 << 10
# Together a megabyte.
_RECORDS_PER_BLOCK = 16
# It appears with the complete directory of records, which is renamed.
_DONE = "dataset_info.json"


def read(
    name: CorpusName, *, data_dir: str, cache_dir: str, heldout: Heldout = Heldout.SEPARATE
) -> Text:
    """Reads a published corpus from files in `data_dir`, or from downloaded files.

    The corpus is prepared in the directory `tfds` of `cache_dir`.

    Raises `UserError` if the files are missing, cannot be downloaded or are not the published ones,
    if the prepared corpus is corrupted, or if `cache_dir` cannot be written to.
    """
    corpus, folder = CORPORA[name], Path(cache_dir, "tfds").absolute()
    records = _records(name, folder)
    done = records / _DONE
    if not done.is_file():
        with (
            storage.writable(folder, what=corpus.title),
            storage.locked(folder / f".txl_{name}.lock"),
        ):
            # Otherwise another process has prepared it while this one waited.
            if not done.is_file():
                _prepare(name, folder, data_dir)
    with _reading_records(records):
        return _open(name, folder, records, same=heldout is Heldout.PUBLISHED)


def has_records(name: CorpusName, cache: Path) -> bool:
    """Returns whether the records of a corpus are in a directory of prepared text."""
    return (_records(name, cache / "tfds") / _DONE).is_file()


def _records(name: CorpusName, folder: Path) -> Path:
    return folder / f"txl_{name}" / str(PublishedText.VERSION)


def _prepare(name: CorpusName, folder: Path, data_dir: str) -> None:
    """Writes the records.

    The caller holds the lock, so partial ones are left over from a killed process.
    """
    say(f"preparing {CORPORA[name].title} in {folder} (once)")
    shutil.rmtree(folder / f"txl_{name}", ignore_errors=True)
    downloads = folder / f"txl_{name}_downloads"
    for leftover in downloads.rglob("*.tmp.*"):
        shutil.rmtree(leftover)
    try:
        PublishedText(name, data_dir=folder, files_in=data_dir).download_and_prepare(
            download_dir=downloads
        )
    except RuntimeError as error:
        # ArrayRecord could not write: 'write() failed: No space left on device; ...'
        raise OSError(errno.EIO, str(error).partition(";")[0]) from error
    except ValueError:
        # The download is not the corpus. After other errors, such as a full disk, it is kept.
        shutil.rmtree(downloads, ignore_errors=True)
        raise
    shutil.rmtree(downloads, ignore_errors=True)


def _open(name: CorpusName, folder: Path, records: Path, *, same: bool) -> Text:
    """Returns the text of prepared records.

    With `same` the test split is also the validation split.
    """
    builder, corpus = PublishedText(name, data_dir=folder), CORPORA[name]
    files, sums = builder.info.metadata["files"], builder.info.metadata["sha256"]
    stored = {"train": "train", "valid": "test" if same else "valid", "test": "test"}
    source = functools.cache(builder.as_data_source)  # Opened when a text is first read.

    def blocks(of: str, numbers: range) -> Iterator[bytes]:
        with _reading_records(records):
            for start in range(0, len(numbers), _RECORDS_PER_BLOCK):
                yield b"".join(
                    source(of)[i]["block"] for i in numbers[start : start + _RECORDS_PER_BLOCK]
                )

    splits = {
        split: tuple(_files(f"{name} {of}", files[of], functools.partial(blocks, of)))
        for split, of in stored.items()
    }
    digest = sums[WHOLE] if corpus.cuts else digest_of(sums[of] for of in stored.values())
    size = sum(file.size for split, of in stored.items() if split == of for file in splits[split])
    description = (
        f"{corpus.title}, {size:,} bytes{', validation on the test split' if same else ''}"
    )
    return Text(str(name), description, digest, splits, closed_alphabet=corpus.closed_alphabet)


def _files(
    name: str, stored: list[tuple[str, int, int]], blocks: Callable[[range], Iterator[bytes]]
) -> Iterator[File]:
    """Yields the files of a split in the order of their names.

    This order may differ from the order of their records.
    """
    starts = itertools.accumulate((count for _, _, count in stored), initial=0)
    for (file, size, count), first in sorted(zip(stored, starts, strict=False)):
        name_of = f"{name}, {file}" if len(stored) > 1 else name
        yield File(name_of, size, functools.partial(blocks, range(first, first + count)))


def _reading_records(folder: Path) -> contextlib.AbstractContextManager[None]:
    return refusing_damage(
        f"the prepared text in {folder} is corrupted", "Remove this directory to prepare it again."
    )


class PublishedText(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus as records of its files, written without TensorFlow.

    The files come from `files_in`, or are downloaded.

    `ShardBasedBuilder` writes records as they come. `GeneratorBasedBuilder` sorts them first, for
    which it needs TensorFlow above 1 GB.
    """

    # Raise it whenever the same corpus would give other records or metadata.
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, name: CorpusName, *, data_dir: Path, files_in: str = ""):
        self.name, self._corpus, self._files_in = f"txl_{name}", CORPORA[name], files_in
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self._corpus.title,
            features=tfds.features.FeaturesDict(
                {"block": tfds.features.Tensor(shape=(), dtype=np.object_)}
            ),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        self.info.metadata["sha256"] = {part: self._checked_digest(part) for part in self._tallies}

    def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, Any]:
        corpus, stored, shards = self._corpus, {}, {}
        layout = fit(
            find_files(corpus, self._files_in, dl_manager), corpus.layouts + corpus.own_layouts
        )
        self._tallies = {
            part: {place: Tally() for place in places} for part, places in layout.items()
        }
        for part, places in layout.items():
            # Before any is read.
            self._check(part, Facts(size=sum(place.size for place in places)))
            sizes = {place: tuple(corpus.cuts.values()) or (place.size,) for place in places}
            records = self._records(part, sizes)
            for split, of_files in zip(
                corpus.cuts or [part], zip(*sizes.values(), strict=True), strict=True
            ):
                counts = [-(-size // RECORD_BYTES) for size in of_files]
                names = (posixpath.basename(place.name) for place in places)
                stored[split] = [*zip(names, of_files, counts, strict=True)]
                # A split has at least one file of records.
                lefts = range(sum(counts), 0, -SHARD_RECORDS) or [0]
                shards[split] = [
                    functools.partial(itertools.islice, records, min(SHARD_RECORDS, n))
                    for n in lefts
                ]
        self.info.metadata["files"] = stored
        return shards

    def _records(
        self, part: str, sizes: "dict[Place, tuple[int, ...]]"
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yields the records of a part's splits, one split after the other, and counts them."""
        counts_words = self._corpus.facts[part].tokens is not None
        with bar(f"preparing {part}", sum(map(sum, sizes.values()))) as shown:
            for number, (place, block) in enumerate(read_files(sizes, RECORD_BYTES)):
                self._tallies[part][place].add(block, words=counts_words)
                shown.update(len(block))
                yield number, {"block": block}

    def _checked_digest(self, part: str) -> str:
        """Returns a part's sha256.

        Raises `UserError` if it, or a count, is not the published one.
        """
        tallies, known = self._tallies[part], self._corpus.facts[part]
        sums = sorted(
            (posixpath.basename(place.name), tally.sha256.hexdigest())
            for place, tally in tallies.items()
        )
        digest = sums[0][1] if len(sums) == 1 else digest_of(sha256 for _, sha256 in sums)
        lines, words = (
            sum(getattr(tally, count) for tally in tallies.values()) for count in ("lines", "words")
        )
        self._check(
            part,
            Facts(
                tokens=words + lines, lines=lines, sha256=digest if known.tokens is None else None
            ),
        )
        if known.tokens is not None and known.sha256 not in (None, digest):
            say(
                f"note: the {part} split of {self._corpus.title} in {next(iter(tallies)).path} "
                "has as many tokens as the published one, but other bytes. "
                "Scores are comparable only if the difference is white space.",
            )
        return digest

    def _check(self, part: str, found: Facts) -> None:
        """Raises `UserError` if a fact of a part is known and another was found."""
        if wrong := difference(self._corpus.facts[part], found):
            place, *others = self._tallies[part]
            where = f"{place.member} in {place.path}" if place.member else place.path
            more = f" and {len(others)} more" if others else ""
            of = (
                self._corpus.title
                if self._corpus.cuts
                else f"the {part} split of {self._corpus.title}"
            )
            advice = f"Download it again from {place.url}{self._corpus.advice}"
            raise UserError(f"{where}{more} does not match {of}: {wrong}. {advice}")

    def _log_download_bytes(self) -> None:
        """Does nothing: tensorflow-datasets would print that sizes are unknown."""

    _log_download_done = _log_download_bytes


class Tally:
    """Counts of a file whose blocks are added one by one."""

    def __init__(self) -> None:
        self.sha256, self.lines, self.words = hashlib.sha256(), 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_line = self._in_word = False

    def add(self, block: bytes, *, words: bool) -> None:
        """Counts the next bytes, at least one.

        Words, as of `str.split`, are counted on request: that takes longer.
        """
        self.sha256.update(block)
        # Also a last one without its newline.
        self.lines += block.count(b"\n", 0, -1) + (not self._in_line)
        self._in_line = not block.endswith(b"\n")
        if words and (text := self._decoder.decode(block)):  # Else it ended inside a character.
            self.words += len(text.split()) - (self._in_word and not text[0].isspace())
            self._in_word = not text[-1].isspace()
