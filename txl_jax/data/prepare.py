"""Prepares published corpora as tensorflow-datasets records.

Their files are found or downloaded, checked, and stored as records.

A record is a block of a file's bytes (reading a million lines one by one takes seconds). Next to
the records, metadata.json stores the sha256 of each part and, for each split, the name, bytes and
records of its files in order.
"""

import codecs
import contextlib
import errno
import functools
import hashlib
import itertools
import posixpath
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

# Bytes of a record. The last record of a file may have fewer.
RECORD_BYTES = 1 << 16
# Records per file: tensorflow-datasets keeps a file's records in memory while it writes.
SHARD_RECORDS = 1 << 10
# Records that are read at a time, together a megabyte.
_RECORDS_PER_BLOCK = 16
# It appears with the complete directory of records, which is renamed.
_DONE = "dataset_info.json"


def read(
    name: CorpusName, *, data_dir: str, cache_dir: str, heldout: Heldout = Heldout.SEPARATE
) -> Text:
    """Reads a published corpus from files in `data_dir`, or from downloaded files.

    The corpus is prepared in the directory `tfds` of `cache_dir`.

    Raises:
      UserError: If the files are missing, cannot be downloaded or are not the published ones, if
        the prepared corpus is corrupted, or if `cache_dir` cannot be written to.
    """
    folder = Path(cache_dir, "tfds").absolute()
    records = _records_folder(name, folder)
    done = records / _DONE
    if not done.is_file():
        with (
            storage.writable(folder, what=CORPORA[name].title),
            storage.locked(folder / f".txl_{name}.lock"),
        ):
            # Another process may have prepared the corpus while this one waited for the lock.
            if not done.is_file():
                _prepare(name, folder, data_dir)
    with _reading_records(records):
        return _open(name, folder, is_test_valid_too=heldout is Heldout.PUBLISHED)


def has_records(name: CorpusName, cache: Path) -> bool:
    """Returns whether a directory of prepared text contains the records of a corpus."""
    return (_records_folder(name, cache / "tfds") / _DONE).is_file()


def _records_folder(name: CorpusName, folder: Path) -> Path:
    return folder / f"txl_{name}" / str(PublishedText.VERSION)


def _prepare(name: CorpusName, folder: Path, data_dir: str) -> None:
    """Writes the records of a corpus into a directory, of which the caller holds the lock."""
    say(f"preparing {CORPORA[name].title} with TensorFlow Datasets in {folder} (once)")
    # Incomplete records and downloads are from a killed process, because no other process writes.
    shutil.rmtree(folder / f"txl_{name}", ignore_errors=True)
    downloads = folder / f"txl_{name}_downloads"
    for leftover in downloads.rglob("*.tmp.*"):
        shutil.rmtree(leftover)

    builder = PublishedText(name, data_dir=folder, files_in=data_dir)
    try:
        builder.download_and_prepare(download_dir=downloads)
    except RuntimeError as error:
        # ArrayRecord could not write: 'write() failed: No space left on device; ...'
        raise OSError(errno.EIO, str(error).partition(";")[0]) from error
    except ValueError:
        # The download is not the corpus. After other errors, such as a full disk, it is kept.
        shutil.rmtree(downloads, ignore_errors=True)
        raise
    shutil.rmtree(downloads, ignore_errors=True)


def _open(name: CorpusName, folder: Path, *, is_test_valid_too: bool) -> Text:
    """Returns the text of prepared records.

    Args:
      folder: Directory of all prepared corpora.
      is_test_valid_too: Whether the test split is also the validation split.
    """
    corpus = CORPORA[name]
    builder = PublishedText(name, data_dir=folder)
    digests = builder.info.metadata["sha256"]

    # The stored split that each split is read from.
    sources = {"train": "train", "valid": "valid", "test": "test"}
    if is_test_valid_too:
        sources["valid"] = "test"

    # The records of a stored split are opened when its text is first read.
    open_split = functools.cache(builder.as_data_source)
    records = _records_folder(name, folder)
    splits = {}
    size = 0
    for split, source in sources.items():
        read_records = functools.partial(_read_records, open_split, records, source)
        stored_files = [StoredFile(*file) for file in builder.info.metadata["files"][source]]
        splits[split] = tuple(_files(f"{name} {source}", stored_files, read_records))
        # A split that is read twice counts once.
        if split == source:
            size += sum(file.size for file in splits[split])

    description = f"{corpus.title}, {size:,} bytes"
    if is_test_valid_too:
        description += ", validation on the test split"
    if corpus.cuts:
        digest = digests[WHOLE]
    else:
        digest = digest_of(digests[source] for source in sources.values())
    return Text(str(name), description, digest, splits, closed_alphabet=corpus.closed_alphabet)


def _read_records(
    open_split: Callable[[str], Any], folder: Path, split: str, numbers: range
) -> Iterator[bytes]:
    """Yields the bytes of the records of a stored split with these numbers, in blocks.

    Args:
      open_split: Returns the records of a stored split by its name.
      folder: Directory of the records, for errors.
    """
    with _reading_records(folder):
        for start in range(0, len(numbers), _RECORDS_PER_BLOCK):
            records = open_split(split)
            block_numbers = numbers[start : start + _RECORDS_PER_BLOCK]
            yield b"".join(records[number]["block"] for number in block_numbers)


def _files(
    name: str,
    stored_files: Sequence["StoredFile"],
    read_records: Callable[[range], Iterator[bytes]],
) -> Iterator[File]:
    """Yields the files of a split in the order of their names.

    Args:
      name: Name of the corpus and the split, for errors.
      stored_files: In the order of their records, which is the order in an archive.
      read_records: Yields the bytes of the records with these numbers, in blocks.
    """
    numbered = []
    first = 0
    for file in stored_files:
        numbered.append((file, range(first, first + file.n_records)))
        first += file.n_records

    # By name, then by size, then by the first record.
    numbered.sort(key=lambda pair: (pair[0], pair[1].start))
    for file, numbers in numbered:
        file_name = f"{name}, {file.name}" if len(stored_files) > 1 else name
        yield File(file_name, file.size, functools.partial(read_records, numbers))


def _reading_records(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turns any error of the block into a `UserError` that tells how to prepare the text again."""
    return refusing_damage(
        f"the prepared text in {folder} is corrupted", "Remove this directory to prepare it again."
    )


class StoredFile(NamedTuple):
    """A file of a split, as metadata.json lists it."""

    name: str  # Name without its directory.
    size: int  # Bytes.
    n_records: int


class PublishedText(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus as records of its files, written without TensorFlow.

    The files come from `files_in`, or are downloaded.

    `ShardBasedBuilder` writes records as they come. `GeneratorBasedBuilder` sorts them first, for
    which it needs TensorFlow above 1 GB.
    """

    # Raise this version whenever the same corpus would give other records or metadata.
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, name: CorpusName, *, data_dir: Path, files_in: str = ""):
        self.name = f"txl_{name}"
        self._corpus = CORPORA[name]
        self._files_in = files_in
        # The counts of each file, by part.
        self._tallies: dict[str, dict[Place, Tally]] = {}
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        block = tfds.features.Tensor(shape=(), dtype=np.object_)
        return tfds.core.DatasetInfo(
            builder=self,
            description=self._corpus.title,
            features=tfds.features.FeaturesDict({"block": block}),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    # tensorflow-datasets calls the next two methods.

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        # All records are written, so all files are counted.
        self.info.metadata["sha256"] = {part: self._checked_digest(part) for part in self._tallies}

    def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, Any]:
        corpus = self._corpus
        layout = fit(
            find_files(corpus, self._files_in, dl_manager), corpus.layouts + corpus.own_layouts
        )
        self._tallies = {}
        stored: dict[str, list[StoredFile]] = {}
        shards: dict[str, list[Any]] = {}
        for part, places in layout.items():
            self._tallies[part] = {place: Tally() for place in places}
            # Sizes are compared before any file is read. The rest is known after the last one.
            self._check(part, Facts(size=sum(place.size for place in places)))
            if corpus.cuts:
                # All splits are cut from one file, one after the other.
                [place] = places
                records = self._records(part, {place: tuple(corpus.cuts.values())})
                for split, size in corpus.cuts.items():
                    stored[split] = [_stored_file(place, size)]
                    shards[split] = _shards(records, stored[split])
            else:
                # A part is a split, and all of its files belong to it.
                records = self._records(part, {place: (place.size,) for place in places})
                stored[part] = [_stored_file(place, place.size) for place in places]
                shards[part] = _shards(records, stored[part])
        self.info.metadata["files"] = stored
        return shards

    def _records(
        self, part: str, pieces: dict[Place, tuple[int, ...]]
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yields the records of a part with their numbers, and counts them.

        Args:
          pieces: The sizes in bytes of the consecutive pieces to read of each file. A record ends
            where a piece ends.
        """
        tallies = self._tallies[part]
        counts_words = self._corpus.facts[part].tokens is not None
        with bar(f"preparing {part}", sum(map(sum, pieces.values()))) as progress:
            for number, (place, block) in enumerate(read_files(pieces, RECORD_BYTES)):
                tallies[place].add(block, words=counts_words)
                progress.update(len(block))
                yield number, {"block": block}

    def _checked_digest(self, part: str) -> str:
        """Returns a part's sha256.

        Raises:
          UserError: If the sha256 or a count is not the published one.
        """
        tallies = self._tallies[part]
        known = self._corpus.facts[part]
        digests = []
        n_lines = 0
        n_words = 0
        for place, tally in tallies.items():
            digests.append((posixpath.basename(place.name), tally.sha256.hexdigest()))
            n_lines += tally.lines
            n_words += tally.words

        # In the order of the names, because an archive may have the files in any order.
        digests.sort()
        if len(digests) == 1:
            [(_, digest)] = digests
        else:
            digest = digest_of(sha256 for _, sha256 in digests)

        # Where the number of tokens is known, it decides. Other bytes are only noted.
        sha256 = digest if known.tokens is None else None
        self._check(part, Facts(tokens=n_words + n_lines, lines=n_lines, sha256=sha256))
        if known.tokens is not None and known.sha256 not in (None, digest):
            first = next(iter(tallies))
            say(
                f"note: the {part} split of {self._corpus.title} in {first.path} "
                "has as many tokens as the published one, but other bytes. "
                "Scores are comparable only if the difference is white space.",
            )
        return digest

    def _check(self, part: str, actual: Facts) -> None:
        """Raises `UserError` if a fact of a part is known and the actual one is another."""
        mismatch = difference(self._corpus.facts[part], actual)
        if not mismatch:
            return
        place, *others = self._tallies[part]
        files = f"{place.member} in {place.path}" if place.member else place.path
        if others:
            files += f" and {len(others)} more"
        expected = self._corpus.title
        if not self._corpus.cuts:
            expected = f"the {part} split of {expected}"
        raise UserError(
            f"{files} does not match {expected}: {mismatch}. "
            f"Download it again from {place.url}{self._corpus.advice}"
        )

    def _log_download_bytes(self) -> None:
        """Does nothing: tensorflow-datasets would print that sizes are unknown."""

    _log_download_done = _log_download_bytes


def _stored_file(place: Place, size: int) -> StoredFile:
    """Returns the entry of a file, of which a split has `size` bytes."""
    n_records = -(-size // RECORD_BYTES)
    return StoredFile(posixpath.basename(place.name), size, n_records)


def _shards(records: Iterator[Any], stored_files: Sequence[StoredFile]) -> list[Any]:
    """Returns functions, one per file of records, that take a split's records from an iterator.

    They must be called in order.
    """
    n_records = sum(file.n_records for file in stored_files)
    shards = []
    for remaining in range(n_records, 0, -SHARD_RECORDS):
        n_taken = min(SHARD_RECORDS, remaining)
        shards.append(functools.partial(itertools.islice, records, n_taken))
    # An empty split has a file of records too.
    return shards or [functools.partial(itertools.islice, records, 0)]


class Tally:
    """Counts of a file whose blocks are added one by one."""

    def __init__(self) -> None:
        # Digest of the bytes so far.
        self.sha256 = hashlib.sha256()
        # Lines that have begun.
        self.lines = 0
        # Words that have begun.
        self.words = 0
        # Keeps the bytes of a character that continues in the next block.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Whether the next byte continues a line, and the next character a word.
        self._in_line = False
        self._in_word = False

    def add(self, block: bytes, *, words: bool) -> None:
        """Counts the next bytes, at least one.

        Words, as separated by `str.split`, are counted on request, because that takes longer.
        """
        self.sha256.update(block)
        # A line begins after each newline, but after the block's last byte only with another block.
        self.lines += block.count(b"\n", 0, -1)
        # The block's first line may have begun in the block before.
        if not self._in_line:
            self.lines += 1
        self._in_line = not block.endswith(b"\n")

        if not words:
            return
        text = self._decoder.decode(block)
        # The block may end inside its first character.
        if not text:
            return
        self.words += len(text.split())
        # The first word was counted already if it began in the block before.
        if self._in_word and not text[0].isspace():
            self.words -= 1
        self._in_word = not text[-1].isspace()
