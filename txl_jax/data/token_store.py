"""Token stores: the ids of a text as memory-mapped arrays, written once and kept.

A store is a folder of plain .npy files beside the vocabulary and a summary:

train.npy, valid.npy, test.npy   ids, one axis, of the smallest type that holds them
sentences.npy                    int64 [n + 1]: the start of each line of the training text, and the end of the last
vocabulary.txt                   the vocabulary
store.json                       sizes and sha256 of the others, written last: a folder without it is no store

Its name holds the fingerprint of the text, of the tokens' settings and of `VERSION`, so another text or
setting never finds an old store. It is written under a temporary name and renamed, and a lock beside it
lets one process write while others wait. Every byte is checked when a store is opened (docs/faults.md has the
cost): a bit that flipped on a disk would be learned unnoticed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from txl_jax.config import LineMark
from txl_jax.data.text import SPLITS, Text, with_bar
from txl_jax.data.vocabulary import MIN_SPLIT_TOKENS, Vocabulary, dumps, id_type, loads
from txl_jax.errors import UserError
from txl_jax.runtime import storage

VERSION = 1  # Of the tokens: raise it whenever the same text and settings would give other ids.
_SUMMARY = "store.json"
_SENTENCES = "sentences.npy"
_VOCABULARY = "vocabulary.txt"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """A text as ids."""

    vocabulary: Vocabulary
    splits: dict[str, np.ndarray]  # Memory-mapped, read-only [T].
    sentences: np.ndarray | None  # Of the training text; None if its lines are not marked.


def fingerprint(text: Text, settings: dict[str, Any]) -> str:
    """Returns the end of a store's name, which any change of text, settings or version changes."""
    facts = json.dumps([VERSION, text.digest, settings], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def open_store(
    text: Text,
    settings: dict[str, Any],
    make_vocabulary: Callable[[], Vocabulary],
    *,
    folder: Path,
) -> TokenStore:
    """Opens the store of a text in `folder`; writes it first if it is not there.

    Args:
      settings: everything beside the text that the ids depend on, as JSON.
      make_vocabulary: called if the store must be written.

    Raises:
      UserError: the text cannot be encoded, or the folder cannot be written to.
    """
    path = _path(text, settings, folder)
    if not _is_whole(path):
        with storage.writable(folder, what="the tokens of the text"), storage.locked(folder / f".{path.name}.lock"):
            if not _is_whole(path):  # Else another process has written it while this one waited.
                if path.exists():
                    print(
                        f"the tokens in {path} are damaged, or of an older version: they are written again", flush=True
                    )
                _write(path, text, make_vocabulary())
    return _load(path)


def find_store(text: Text, settings: dict[str, Any], folder: Path) -> TokenStore | None:
    """Returns the store that `open_store` would open, or None if it is yet to be written."""
    path = _path(text, settings, folder)
    return _load(path) if _is_whole(path) else None


def _path(text: Text, settings: dict[str, Any], folder: Path) -> Path:
    return folder / f"{text.name.replace(' ', '-')}-{fingerprint(text, settings)}"


def _is_whole(path: Path) -> bool:
    """Returns whether the folder is a store whose every byte is as it was written."""
    try:
        summary = json.loads((path / _SUMMARY).read_bytes())
        sizes, digests = summary["bytes"], summary["sha256"]
        if any((path / name).stat().st_size != size for name, size in sizes.items()):
            return False  # Early, as the digests read the whole files.
        return {name: storage.sha256(path / name) for name in sizes} == digests
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _load(path: Path) -> TokenStore:
    from txl_jax.data.corpus import KINDS

    sentences = path / _SENTENCES
    return TokenStore(
        loads((path / _VOCABULARY).read_text(encoding="utf-8"), KINDS),
        {split: np.load(path / f"{split}.npy", mmap_mode="r") for split in SPLITS},
        np.load(sentences, mmap_mode="r") if sentences.exists() else None,
    )


def _write(path: Path, text: Text, vocabulary: Vocabulary) -> None:
    for leftover in path.parent.glob(f"{path.name}.*"):  # Of a process that was killed: the lock is ours.
        shutil.rmtree(leftover)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.mkdir()
    try:
        tokens = {split: _write_split(partial, split, text, vocabulary) for split in SPLITS}
        (partial / _VOCABULARY).write_text(dumps(vocabulary), encoding="utf-8")
        written = sorted(partial.iterdir())
        summary = {
            "text": text.description,
            "digest": text.digest,
            "tokens": tokens,
            "bytes": {file.name: file.stat().st_size for file in written},
            "sha256": {file.name: storage.sha256(file) for file in written},
        }
        (partial / _SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        shutil.rmtree(path, ignore_errors=True)  # A damaged one.
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_split(folder: Path, split: str, text: Text, vocabulary: Vocabulary) -> int:
    """Writes the ids of a split, and for training the starts of its lines; returns the number of ids."""
    with contextlib.ExitStack() as stack:
        ids = stack.enter_context(_npy(folder / f"{split}.npy", id_type(vocabulary.size)))
        starts, lines = None, _LineStarts(vocabulary)
        if split == "train" and vocabulary.mark is not None:
            starts = stack.enter_context(_npy(folder / _SENTENCES, np.dtype(np.int64)))
        for block in vocabulary.blocks(with_bar(f"encoding {split}", text.splits[split])):
            if starts is not None:
                starts.append(lines.within(block, ids.length))
            ids.append(block)
        if starts is not None:
            starts.append(lines.end(ids.length))
    if ids.length < MIN_SPLIT_TOKENS:
        raise UserError(
            f"the {split} split of {text.description} has {ids.length} tokens and needs at least {MIN_SPLIT_TOKENS}; "
            "give a longer text"
        )
    return ids.length


class _LineStarts:
    """Finds the starts of lines in ids that come in blocks: after a mark, or, with two marks, at every other one."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.marks_seen = 0

    def within(self, block: np.ndarray, offset: int) -> np.ndarray:
        """Returns the starts in `block`, which begins at `offset`."""
        marks = offset + np.flatnonzero(block == self.vocabulary.mark)
        parity, self.marks_seen = self.marks_seen % 2, self.marks_seen + len(marks)
        match self.vocabulary.line_mark:
            case LineMark.DOUBLE_S:
                return marks[parity::2]
            case LineMark.EOS if offset == 0 and len(block):  # There is no mark before the first line.
                return np.concatenate([[0], marks + 1])
        return marks + 1

    def end(self, length: int) -> np.ndarray:
        """Returns the starts that no block held: the end of the last line."""
        return np.array([length] if self.vocabulary.line_mark is LineMark.DOUBLE_S else [], np.int64)


class _Npy:
    """A growing .npy array of one axis."""

    def __init__(self, file: BinaryIO, dtype: np.dtype):
        self.file, self.dtype, self.length = file, dtype, 0

    def append(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += len(values)

    def write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, header)  # Its size is fixed: it can hold any length.


@contextlib.contextmanager
def _npy(path: Path, dtype: np.dtype) -> Iterator[_Npy]:
    with open(path, "wb") as file:
        array = _Npy(file, dtype)
        array.write_header()
        yield array
        array.write_header()
        file.flush()
        os.fsync(file.fileno())  # Else a power cut after the renaming could leave a store with holes.
