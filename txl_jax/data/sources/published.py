"""Published corpora: prepared once by their tensorflow-datasets builders, then read from the cache as a `Text`."""

import dataclasses
import errno
import functools
import hashlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from txl_jax.config import CorpusName, Heldout
from txl_jax.data.sources import locate
from txl_jax.data.sources.corpora import CORPORA
from txl_jax.data.sources.text import SPLITS, File, Text
from txl_jax.errors import UserError
from txl_jax.runtime import files

_RECORDS_PER_BLOCK = 16  # Together a megabyte.


def read(corpus: CorpusName, *, data_dir: str, cache_dir: str, heldout: Heldout = Heldout.SEPARATE) -> Text:
    """Reads a published corpus, checked against its published facts.

    Args:
      data_dir: folder in which its files are searched for, unless it is prepared already.
      cache_dir: folder for the prepared corpus, which is kept in its `tfds`.
      heldout: the held-out shard that validates.

    Raises:
      UserError: the files are not there and cannot be downloaded, are not the published ones, or what was prepared from
        them is damaged; or `cache_dir` cannot be written to.
    """
    folder = Path(cache_dir, "tfds").absolute()
    if not _is_prepared(corpus, folder):
        find = locate.find(CORPORA[corpus], Path(data_dir))
        with files.writable(folder, what=CORPORA[corpus].title), files.locked(folder / f".txl_{corpus}.lock"):
            if not _is_prepared(corpus, folder):  # Else another process has prepared it while this one waited.
                _prepare(corpus, folder, find)
    try:
        return _open(corpus, folder, heldout)
    except Exception as error:  # Damage to the files beside the records raises nearly any type.
        raise _damaged(_records_folder(corpus, folder), error) from error


def _prepare(corpus: CorpusName, folder: Path, find: locate.Find) -> None:
    """Writes the folder of records. The caller holds the lock, so a partial one is left over from a killed process."""
    print(f"preparing {CORPORA[corpus].title} in {folder} (once)", flush=True)
    shutil.rmtree(_records_folder(corpus, folder).parent, ignore_errors=True)
    downloads = folder / f"txl_{corpus}_downloads"
    for leftover in downloads.rglob("*.tmp.*"):
        shutil.rmtree(leftover)
    try:
        _builder(corpus)(data_dir=folder, find=find).download_and_prepare(download_dir=downloads)
    except RuntimeError as error:  # ArrayRecord could not write: 'write() failed: No space left on device; ...'
        raise OSError(errno.EIO, str(error).partition(";")[0]) from error
    except ValueError:  # The download is not the corpus. After other errors, such as a full disk, it is kept.
        shutil.rmtree(downloads, ignore_errors=True)
        raise
    shutil.rmtree(downloads, ignore_errors=True)


def _is_prepared(corpus: CorpusName, folder: Path) -> bool:
    """Returns whether the folder of records is there; it gets its name once it is complete."""
    return (_records_folder(corpus, folder) / "dataset_info.json").is_file()


def _records_folder(corpus: CorpusName, folder: Path) -> Path:
    return folder / f"txl_{corpus}" / str(_builder(corpus).VERSION)


def _builder(corpus: CorpusName) -> Any:
    """Returns the builder's class. Imported here as that takes half a second, which runs on other texts save."""
    from txl_jax.data.sources.tfds_builders import BUILDERS

    return BUILDERS[corpus]


def _open(corpus: CorpusName, folder: Path, heldout: Heldout) -> Text:
    """Returns the text of a folder of records."""
    builder, known = _builder(corpus)(data_dir=folder), CORPORA[corpus]
    metadata = builder.info.metadata
    stored = {split: split for split in SPLITS}
    same = heldout is Heldout.PUBLISHED
    if same:
        stored["valid"] = "test"  # Both held-out shards are in the cache.
    splits = {}
    for split, source in stored.items():
        records = _Records(builder, source, _records_folder(corpus, folder))
        splits[split] = tuple(_files(f"{corpus} {source}", records, metadata["files"][source]))
    sums = [metadata["sha256"][known.ranges()[source][0]] for source in stored.values()]
    digest = sums[0] if known.cuts else hashlib.sha256("".join(sums).encode()).hexdigest()
    size = sum(file.size for source in set(stored.values()) for file in splits[source])
    return Text(
        str(corpus),
        f"{known.title}, {size:,} bytes{', validation on the test text' if same else ''}",
        digest,
        splits,
        closed_alphabet=known.closed_alphabet,
    )


def _damaged(folder: Path, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(
        f"the prepared text in {folder} is damaged ({reason}); remove this folder, and it is prepared again"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Records:
    """The records of a split."""

    builder: Any
    split: str
    folder: Path

    def read(self, first: int, count: int) -> Iterator[bytes]:
        """Yields the text of `count` records from record `first` on."""
        try:
            for start in range(first, first + count, _RECORDS_PER_BLOCK):
                block = range(start, min(start + _RECORDS_PER_BLOCK, first + count))
                yield b"".join(self._source[i]["block"] for i in block)
        except Exception as error:  # Damage to the records raises nearly any type too.
            raise _damaged(self.folder, error) from error

    @functools.cached_property
    def _source(self) -> Any:
        return self.builder.as_data_source(self.split)


def _files(name: str, records: _Records, stored: list[tuple[str, int, int]]) -> Iterator[File]:
    """Yields the files of a split in the order of their names, which need not be that of their records."""
    starts = itertools.accumulate((count for _, _, count in stored), initial=0)
    for (file, size, count), first in sorted(zip(stored, starts, strict=False)):
        yield File(f"{name}, {file}" if len(stored) > 1 else name, size, functools.partial(records.read, first, count))
