"""Token stores: the ids of a text as memory-mapped arrays, written once and kept.

A store is a directory:

train.npy, valid.npy, test.npy  ids, one axis, of the smallest type that holds them
sentences.npy                   int64 [n + 1]: where each training line starts, and the last ends
vocabulary.txt                  the vocabulary
store.json                      sizes and sha256 of the others, written last

Its name has the fingerprint of the text, of the tokens' settings and of `VERSION`, so another text
or setting never finds an old store. Every byte is checked when a store is opened, since a flipped
bit would be learned unnoticed.
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

VERSION = 1  # Of the tokens: raise it whenever the same text and settings would give other ids.
_SUMMARY = "store.json"
_SENTENCES = "sentences.npy"
_VOCABULARY = "vocabulary.txt"
_BLOCK_IDS = 1 << 16  # Ids that are searched for marks at a time.


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """A text as ids."""

    # In its saved form.
    vocabulary: str
    # Memory-mapped, read-only [T].
    splits: dict[str, np.ndarray]
    # Starts of the training text's lines, or None if they are not marked.
    sentences: np.ndarray | None


def open_store(
    text: Text, settings: dict[str, Any], make_vocabulary: Callable[[], Vocabulary], *, folder: Path
) -> TokenStore:
    """Opens the store of a text in `folder`, writing it first if needed.

    A new store is written with the vocabulary that `make_vocabulary` returns.

    `settings` are everything but the text that the ids depend on, as JSON. Raises `UserError` if
    the text cannot be encoded, or the directory cannot be written to.
    """
    path = _path(text, settings, folder)
    if not _is_whole(path):
        with (
            storage.writable(folder, what="the tokens of the text"),
            storage.locked(folder / f".{path.name}.lock") as is_locked,
        ):
            if not _is_whole(path):  # Else another process has written it while this one waited.
                if path.exists():
                    say(f"the tokens in {path} are corrupted or outdated, and are written again")
                if is_locked:  # Else another process may be writing them.
                    _remove_leftovers(path)
                _write(path, text, make_vocabulary())
    return _load(path)


def find_store(text: Text, settings: dict[str, Any], folder: Path) -> TokenStore | None:
    """Returns the store that `open_store` would open, or None if it is yet to be written.

    The directory may be a stranger's, whose digests fit and whose arrays are not ids: then it is
    None too.
    """
    path = _path(text, settings, folder)
    if not _is_whole(path):
        return None
    try:
        store = _load(path)
    except (OSError, ValueError):  # NumPy refuses other headers, and objects.
        return None
    arrays = list(store.splits.values())
    if store.sentences is not None:
        arrays.append(store.sentences)
    are_ids = all(array.ndim == 1 and np.issubdtype(array.dtype, np.integer) for array in arrays)
    return store if are_ids else None


def _path(text: Text, settings: dict[str, Any], folder: Path) -> Path:
    facts = json.dumps([VERSION, text.digest, settings], sort_keys=True)
    return (
        folder / f"{text.name.replace(' ', '-')}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    )


def _is_whole(path: Path) -> bool:
    """Returns whether the directory is a store whose every byte is as it was written."""
    try:
        summary = storage.read_json(path / _SUMMARY)
        sizes, digests = summary["bytes"], summary["sha256"]
        is_listed = sizes.keys() == set(storage.names(path)) - {_SUMMARY}
        if not is_listed or any(
            (path / name).stat().st_size != size for name, size in sizes.items()
        ):
            return False  # Early, as the digests read the whole files.
        return {name: storage.sha256(path / name) for name in sizes} == digests
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _load(path: Path) -> TokenStore:
    sentences = path / _SENTENCES
    return TokenStore(
        (path / _VOCABULARY).read_text(encoding="utf-8"),
        {split: np.load(path / f"{split}.npy", mmap_mode="r") for split in SPLITS},
        np.load(sentences, mmap_mode="r") if sentences.exists() else None,
    )


def _remove_leftovers(path: Path) -> None:
    """Removes what killed processes left of a store. The caller holds its lock."""
    for leftover in path.parent.glob(f"{path.name}.*"):
        shutil.rmtree(leftover)


def _write(path: Path, text: Text, vocabulary: Vocabulary) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.mkdir()
    try:
        tokens = {}
        for split in SPLITS:
            blocks = vocabulary.blocks(with_bar(f"encoding {split}", text.splits[split]))
            tokens[split] = _write_array(partial / f"{split}.npy", id_type(vocabulary.size), blocks)
        if vocabulary.mark is not None:
            starts = _line_starts(np.load(partial / "train.npy", mmap_mode="r"), vocabulary)
            _write_array(partial / _SENTENCES, np.dtype(np.int64), starts)
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
        shutil.rmtree(path, ignore_errors=True)  # A corrupted one.
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_array(path: Path, dtype: np.dtype, blocks: Iterable[np.ndarray]) -> int:
    """Writes blocks as one .npy array of one axis. Returns its length."""
    with open(path, "wb") as file:
        length = 0
        _write_header(file, dtype, length)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
            length += len(block)
        file.seek(0)
        _write_header(file, dtype, length)
        file.flush()
        # Else a power cut after the renaming could leave a store with holes.
        os.fsync(file.fileno())
    return length


def _write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (length,),
    }
    np.lib.format.write_array_header_1_0(file, header)  # Its size is fixed: it can hold any length.


def _line_starts(ids: np.ndarray, vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    """Yields the starts of lines, in blocks, and the end of the last one."""
    double, seen = vocabulary.line_mark is LineMark.DOUBLE_S, 0
    if vocabulary.line_mark is LineMark.EOS:  # There is no mark before the first line.
        yield np.array([0])
    for first in range(0, len(ids), _BLOCK_IDS):
        marks = first + np.flatnonzero(ids[first : first + _BLOCK_IDS] == vocabulary.mark)
        # With two marks per line, a line starts at every other.
        yield marks[seen % 2 :: 2] if double else marks + 1
        seen += len(marks)
    if double:
        yield np.array([len(ids)])
