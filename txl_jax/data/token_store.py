"""Token stores: the ids of a text as memory-mapped arrays, written once and kept.

A store is a directory:

train.npy, valid.npy, test.npy  ids, one axis, of the smallest type that holds them
sentences.npy                   int64 [n + 1]: where each training line starts, and the last ends
vocabulary.txt                  the vocabulary
store.json                      sizes and sha256 of the others, written last

Its name contains the fingerprint of the text, of the tokens' settings and of `VERSION`, so another
text or setting never finds an old store. Every byte is checked when a store is opened, because a
flipped bit would be learned unnoticed.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from txl_jax.config import LineMark
from txl_jax.data.text import SPLITS, Text, with_bar
from txl_jax.data.vocabulary import Vocabulary, dumps, id_type
from txl_jax.runtime import storage
from txl_jax.runtime.output import say

# Version of the tokens: raise it whenever the same text and settings would give other ids.
VERSION = 1
_SUMMARY = "store.json"
_SENTENCES = "sentences.npy"
_VOCABULARY = "vocabulary.txt"
# Hexadecimal digits of a fingerprint in the name of a store.
_FINGERPRINT_DIGITS = 16
# Number of ids that are searched for marks at a time.
_BLOCK_IDS = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """A text as ids."""

    # The vocabulary in its saved form.
    vocabulary: str
    # Ids [T] of each split, memory-mapped, read-only.
    splits: dict[str, np.ndarray]
    # int64 [n + 1]: starts of the training text's lines and the end of the last, memory-mapped, or
    # None if lines are not marked.
    sentences: np.ndarray | None


def open_store(
    text: Text, settings: dict[str, Any], make_vocabulary: Callable[[], Vocabulary], *, folder: Path
) -> TokenStore:
    """Opens the store of a text in `folder`, writing it first if needed.

    Args:
      settings: Everything that the ids depend on, except the text, as JSON.
      make_vocabulary: Returns the vocabulary with which a new store is written.

    Raises:
      UserError: If the text cannot be encoded, or the directory cannot be written to.
    """
    path = _path(text, settings, folder)
    if not _is_whole(path):
        with (
            storage.writable(folder, what="the tokens of the text"),
            storage.locked(folder / f".{path.name}.lock") as is_locked,
        ):
            # Another process may have written it while this one waited for the lock.
            if not _is_whole(path):
                if path.exists():
                    say(f"the tokens in {path} are corrupted or outdated, and are written again")
                # On a file system without locks another process may be writing them.
                if is_locked:
                    _remove_leftovers(path)
                _write(path, text, make_vocabulary())
    return _load(path)


def find_store(text: Text, settings: dict[str, Any], folder: Path) -> TokenStore | None:
    """Returns the store that `open_store` would open, or None if it has not been written.

    Also returns None if the arrays are not ids although their digests match, because the directory
    may come from a stranger.
    """
    path = _path(text, settings, folder)
    if not _is_whole(path):
        return None
    try:
        store = _load(path)
    except (OSError, ValueError):
        # NumPy refuses corrupted headers, and arrays of objects, whose pickles could run code.
        return None
    arrays = list(store.splits.values())
    if store.sentences is not None:
        arrays.append(store.sentences)
    # Another dtype or number of axes would cause an error in the middle of a run.
    are_ids = all(array.ndim == 1 and np.issubdtype(array.dtype, np.integer) for array in arrays)
    return store if are_ids else None


def _path(text: Text, settings: dict[str, Any], folder: Path) -> Path:
    facts = json.dumps([VERSION, text.digest, settings], sort_keys=True)
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:_FINGERPRINT_DIGITS]
    return folder / f"{text.name.replace(' ', '-')}-{fingerprint}"


def _is_whole(path: Path) -> bool:
    """Returns whether the directory is a store in which no byte has changed."""
    try:
        summary = storage.read_json(path / _SUMMARY)
        sizes = summary["bytes"]
        # A file that is not listed would not be checked, such as a stranger's sentences.npy.
        if sizes.keys() != set(storage.names(path)) - {_SUMMARY}:
            return False
        # Sizes come first, because the digests read the whole files.
        for name, size in sizes.items():
            if (path / name).stat().st_size != size:
                return False
        return {name: storage.sha256(path / name) for name in sizes} == summary["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # The summary is missing, or is any JSON but the one that `_write` made.
        return False


def _load(path: Path) -> TokenStore:
    vocabulary = (path / _VOCABULARY).read_text(encoding="utf-8")
    splits = {split: np.load(path / f"{split}.npy", mmap_mode="r") for split in SPLITS}
    sentences = None
    if (path / _SENTENCES).exists():
        sentences = np.load(path / _SENTENCES, mmap_mode="r")
    return TokenStore(vocabulary, splits, sentences)


def _remove_leftovers(path: Path) -> None:
    """Removes incomplete stores of killed processes. The caller holds the store's lock."""
    for leftover in path.parent.glob(f"{path.name}.*"):
        shutil.rmtree(leftover)


def _write(path: Path, text: Text, vocabulary: Vocabulary) -> None:
    """Writes a store in a directory of another name, which is renamed when it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.mkdir()
    try:
        n_tokens = {}
        dtype = id_type(vocabulary.size)
        for split in SPLITS:
            blocks = vocabulary.blocks(with_bar(f"encoding {split}", text.splits[split]))
            n_tokens[split] = _write_array(partial / f"{split}.npy", dtype, blocks)
        if vocabulary.mark is not None:
            starts = _line_starts(np.load(partial / "train.npy", mmap_mode="r"), vocabulary)
            _write_array(partial / _SENTENCES, np.dtype(np.int64), starts)
        (partial / _VOCABULARY).write_text(dumps(vocabulary), encoding="utf-8")

        sizes = {}
        digests = {}
        for file in sorted(partial.iterdir()):
            sizes[file.name] = file.stat().st_size
            digests[file.name] = storage.sha256(file)
        summary = {
            "text": text.description,
            "digest": text.digest,
            "tokens": n_tokens,
            "bytes": sizes,
            "sha256": digests,
        }
        (partial / _SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        # A corrupted store may have this name.
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_array(path: Path, dtype: np.dtype, blocks: Iterable[np.ndarray]) -> int:
    """Writes blocks as one .npy array of one axis. Returns its length."""
    with open(path, "wb") as file:
        # The length is known only at the end. The header is then rewritten in the same place.
        length = 0
        _write_header(file, dtype, length)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
            length += len(block)
        file.seek(0)
        _write_header(file, dtype, length)
        file.flush()
        # Otherwise a power cut after the renaming could leave a store with holes.
        os.fsync(file.fileno())
    return length


def _write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (length,),
    }
    # NumPy leaves room in the header for any length, so its size is fixed.
    np.lib.format.write_array_header_1_0(file, header)


def _line_starts(ids: np.ndarray, vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    """Yields the starts of lines, in blocks, and the end of the last one."""
    has_two_marks = vocabulary.line_mark is LineMark.DOUBLE_S
    # There is no mark before the first line.
    if vocabulary.line_mark is LineMark.EOS:
        yield np.array([0])

    n_marks = 0
    for first in range(0, len(ids), _BLOCK_IDS):
        marks = first + np.flatnonzero(ids[first : first + _BLOCK_IDS] == vocabulary.mark)
        if has_two_marks:
            # A line begins with every other mark, counted from the first mark of the text.
            yield marks[n_marks % 2 :: 2]
        else:
            # A line begins after the mark of the line before.
            yield marks + 1
        n_marks += len(marks)
    if has_two_marks:
        yield np.array([len(ids)])
