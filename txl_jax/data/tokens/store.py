"""Token stores: the ids of a text as memory-mapped arrays, made once and kept.

A store is a folder of plain .npy files beside the vocabulary and a summary:

train.npy, valid.npy, test.npy   ids, one axis, of the smallest type that holds them
sentences.npy                    int64 [n + 1]: where each line of the training text begins, and where the last ends
vocabulary.txt                   what the ids mean
store.json                       sizes and sha256 of the others, written last: a folder without it is no store

Its name holds the fingerprint of the text, of the tokens' settings and of `VERSION`, so another text or
setting never meets an old store. It is written under a temporary name and renamed, and a lock beside it
lets one process write while others wait. Every byte is checked when a store is opened (docs/faults.md has what that
costs): an id that was flipped on a disk would be learned, and no one would know.
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
from txl_jax.data.sources.text import SPLITS, Reading, Text, no_progress
from txl_jax.data.tokens.build_vocabulary import KINDS
from txl_jax.data.tokens.vocabulary import Vocabulary, dumps, id_type, loads
from txl_jax.runtime import files

VERSION = 1  # Of the tokens: raised whenever the same text and settings would give other ids.
MIN_SPLIT_TOKENS = 2  # The first token is only ever an input, so fewer leave nothing to predict.
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
    """What a store's name ends in; any change of text, settings or version changes it."""
    facts = json.dumps([VERSION, text.digest, settings], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def open_store(
    text: Text,
    settings: dict[str, Any],
    make_vocabulary: Callable[[], Vocabulary],
    *,
    folder: Path,
    reading: Reading = no_progress,
) -> TokenStore:
    """The store of a text in `folder`; made first if it is not there.

    Args:
      settings: everything beside the text that the ids depend on, as JSON.
      make_vocabulary: called if the store must be made.
      reading: may show how far files are read.

    Raises:
      ValueError: the text cannot be encoded.
      OSError: the folder cannot be written to.
    """
    path = _path(text, settings, folder)
    if not _is_whole(path):
        with files.writable(folder, what="the tokens of the text"), files.locked(folder / f".{path.name}.lock"):
            if not _is_whole(path):  # Else another process has made it meanwhile.
                if path.exists():
                    print(f"the tokens in {path} are damaged, or of an older version: they are made again", flush=True)
                _make(path, text, make_vocabulary(), reading)
    return _load(path)


def find_store(text: Text, settings: dict[str, Any], folder: Path) -> TokenStore | None:
    """The store that `open_store` would open, or None if it is yet to be made."""
    path = _path(text, settings, folder)
    return _load(path) if _is_whole(path) else None


def _path(text: Text, settings: dict[str, Any], folder: Path) -> Path:
    return folder / f"{text.name.replace(' ', '-')}-{fingerprint(text, settings)}"


def _is_whole(path: Path) -> bool:
    """Whether the folder is a store whose every byte is as it was written."""
    try:
        summary = json.loads((path / _SUMMARY).read_bytes())
        sizes, digests = summary["bytes"], summary["sha256"]
        if any((path / name).stat().st_size != size for name, size in sizes.items()):
            return False  # At once, where large files would be read for it.
        return {name: _sha256(path / name) for name in sizes} == digests
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(path: Path) -> TokenStore:
    sentences = path / _SENTENCES
    return TokenStore(
        loads((path / _VOCABULARY).read_text(encoding="utf-8"), KINDS),
        {split: np.load(path / f"{split}.npy", mmap_mode="r") for split in SPLITS},
        np.load(sentences, mmap_mode="r") if sentences.exists() else None,
    )


def _make(path: Path, text: Text, vocabulary: Vocabulary, reading: Reading) -> None:
    for leftover in path.parent.glob(f"{path.name}.*"):  # Of a process that was killed: the lock is ours.
        shutil.rmtree(leftover)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.mkdir()
    try:
        tokens = {split: _write_split(partial, split, text, vocabulary, reading) for split in SPLITS}
        (partial / _VOCABULARY).write_text(dumps(vocabulary), encoding="utf-8")
        files = sorted(partial.iterdir())
        summary = {
            "text": text.description,
            "digest": text.digest,
            "tokens": tokens,
            "bytes": {file.name: file.stat().st_size for file in files},
            "sha256": {file.name: _sha256(file) for file in files},
        }
        (partial / _SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        shutil.rmtree(path, ignore_errors=True)  # A damaged one.
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_split(folder: Path, split: str, text: Text, vocabulary: Vocabulary, reading: Reading) -> int:
    """Writes the ids of a split, and for training where its lines begin; returns their number."""
    with contextlib.ExitStack() as stack:
        ids = stack.enter_context(_npy(folder / f"{split}.npy", id_type(vocabulary.size)))
        starts = None
        if split == "train" and vocabulary.mark is not None:
            starts = stack.enter_context(_npy(folder / _SENTENCES, np.dtype(np.int64)))
            lines = _LineStarts(vocabulary)
        for block in vocabulary.blocks(reading(f"encoding {split}", text.splits[split])):
            if starts:
                starts.append(lines.within(block, ids.length))
            ids.append(block)
        if starts:
            starts.append(lines.end(ids.length))
    if ids.length < MIN_SPLIT_TOKENS:
        raise ValueError(
            f"the {split} split of {text.description} has {ids.length} tokens and needs at least {MIN_SPLIT_TOKENS}; "
            "give a longer text"
        )
    return ids.length


class _LineStarts:
    """Finds where lines begin in ids that come in blocks: after a mark, or, with two marks, at every other one."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.marks_seen = 0

    def within(self, block: np.ndarray, offset: int) -> np.ndarray:
        """The positions that `block`, which begins at `offset`, tells."""
        marks = offset + np.flatnonzero(block == self.vocabulary.mark)
        parity, self.marks_seen = self.marks_seen % 2, self.marks_seen + len(marks)
        match self.vocabulary.line_mark:
            case LineMark.DOUBLE_S:
                return marks[parity::2]
            case LineMark.EOS if offset == 0 and len(block):  # Nothing stands before the first line.
                return np.concatenate([[0], marks + 1])
        return marks + 1

    def end(self, length: int) -> np.ndarray:
        """What is missing after the last block."""
        return np.array([length] if self.vocabulary.line_mark is LineMark.DOUBLE_S else [], np.int64)


class _Npy:
    """A .npy array of one axis that grows."""

    def __init__(self, file: BinaryIO, dtype: np.dtype):
        self.file, self.dtype, self.length = file, dtype, 0

    def append(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values, self.dtype))
        self.length += len(values)

    def write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, header)  # Leaves room for any length, so its size is fixed.


@contextlib.contextmanager
def _npy(path: Path, dtype: np.dtype) -> Iterator[_Npy]:
    with open(path, "wb") as file:
        array = _Npy(file, dtype)
        array.write_header()
        yield array
        array.write_header()
        file.flush()
        os.fsync(file.fileno())  # Else a power cut after the renaming could leave a store with holes.
