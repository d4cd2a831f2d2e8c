"""Files of ready-made token ids, read as a text.

Files are memory-mapped in place: they are read once for their digest and largest id, and are not
copied.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_jax.config import DataConfig
from txl_jax.data.id_tokens import LARGEST_SIZE, IdVocabulary
from txl_jax.data.subwords import given_tokenizer
from txl_jax.data.text import BLOCK_BYTES, SPLITS, digest_of, expanded, file_part, with_bar
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError, rephrased

# First bytes of files that are not plain ids. All have at least three, because two may be an id.
_HEADERS = {
    b"\x93NUMPY": "the header of a .npy file. Rename it to .npy.",
    (20240520).to_bytes(
        4, "little"
    ): "llm.c's header. Save the ids after its 1,024 bytes, which are uint16, as .npy.",
    (20240801).to_bytes(
        4, "little"
    ): "llm.c's header. Save the ids after its 1,024 bytes, which are uint32, as .npy.",
    b"MMIDIDX": "the header of a Megatron index. Save the ids of its .bin file as .npy.",
    b"TNTIDX": "the header of a fairseq index. Save the ids of its .bin file as .npy.",
    b"\x89HDF": "the header of an HDF5 file. Save its ids as .npy.",
    b"PAR1": "the header of a Parquet file. Save its ids as .npy.",
    b"ARROW1": "the header of an Arrow file. Save its ids as .npy.",
    b"PK\3\4": "the header of a zip archive. Unpack it, or save its ids as .npy.",
    b"\x1f\x8b\x08": "the header of a gzip file. Unpack it.",
    b"\xfd7zXZ": "the header of an xz file. Unpack it.",
    b"(\xb5/\xfd": "the header of a zstd file. Unpack it.",
}
# 32-bit ids below 2^18, as in the largest vocabularies in use, have an upper half of at most 3.
_LARGEST_UPPER_HALF = 3
# With fewer ids, every other one may be small by chance.
_FEWEST_HALVES = 32
# With fewer ids, their upper and lower bytes may be equal by chance.
_FEWEST_BYTES = 1024
# Overlap of the distributions of upper and lower bytes. It is 1 for one-byte ids, and below 1/2 for
# uint16 ids of text, whose frequent ids are small.
_ALIKE = 0.8
# Ends of the names of files of ids, and of files that musicians may pass instead.
_SUFFIXES = (".npy", ".bin")
_MIDI_SUFFIXES = (".mid", ".midi")
_FORMATS = (
    "A file of ids must be .npy (numpy.save) with integers along one axis, or .bin with uint16."
)


def read_ids(config: DataConfig, *, vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """Opens the user's files of ids as the fields of a `Corpus`.

    There is either one file, split 90/5/5 by position, or one file per split. Without a test file
    the validation ids are the test split too.

    Args:
      vocabulary: A trained run's vocabulary, or None for the config's.

    Raises:
      UserError: If a file is missing or has no ids, or an id is outside the vocabulary.
    """
    arrays: dict[str, Any] = {}
    if config.file:
        arrays["file"] = _open("file", (config.file,))
    else:
        for split in SPLITS:
            paths = getattr(config, split)
            if paths:
                arrays[split] = _open(split, paths)

    digests = []
    largest = -1
    for name, array in arrays.items():
        digest, largest_in_file = _scan(array, name)
        digests.append(digest)
        largest = max(largest, largest_in_file)

    tokenizer = config.tokenizer
    if vocabulary is None and tokenizer.hf_file:
        vocabulary = given_tokenizer(tokenizer.hf_file)
    elif vocabulary is None:
        vocabulary = IdVocabulary(size=tokenizer.vocab_size or largest + 1)
    if largest >= vocabulary.size:
        raise UserError(
            f"token ids must be less than {vocabulary.size} (the vocabulary size), got {largest}. "
            "Pass ids of this vocabulary, or change --data.tokenizer.vocab_size or "
            "--data.tokenizer.hf_file."
        )

    if config.file:
        ids = arrays["file"]
        valid_start = len(ids) * 90 // 100
        test_start = len(ids) * 95 // 100
        splits = {
            "train": ids[:valid_start],
            "valid": ids[valid_start:test_start],
            "test": ids[test_start:],
        }
        digest = digests[0]
    else:
        splits = {split: arrays.get(split, arrays["valid"]) for split in SPLITS}
        digest = digest_of(digests)

    sizes = " + ".join(f"{len(ids):,}" for ids in splits.values())
    description = f"own ids, {sizes} in train + valid + test"
    if not config.file and not config.test:
        description += ", test on the validation ids"
    description += f", of {vocabulary.size:,} tokens"
    if isinstance(vocabulary, IdVocabulary) and tokenizer.vocab_size is None:
        description += " (the largest id + 1)"
    return splits | {
        "name": "ids",
        "description": description,
        "digest": digest,
        "vocabulary": vocabulary,
    }


def _open(name: str, paths: Sequence[str]) -> np.memmap:
    """Opens the file of a split, or of all splits, without reading its ids.

    Args:
      name: Setting below `data` that names the file, for errors.
      paths: The setting's names and patterns.
    """
    path, *others = expanded(paths, flag=f"--data.{name}")
    if path.lower().endswith(_MIDI_SUFFIXES):
        raise UserError(
            f"{path} must have token ids, got a MIDI file. docs/music.md shows how to convert it."
        )
    if not path.endswith(_SUFFIXES):
        raise UserError(f"{path} is not a file of ids. {_FORMATS}")
    if others:
        raise UserError(
            f"--data.{name} must name one file of ids, got {1 + len(others)} files. "
            "Concatenate them, or pass one file per split with --train, --valid and --test."
        )

    array: Any
    # NumPy parses a header as a Python expression, so a corrupted one raises nearly any exception.
    # An array of objects, whose pickles could run code, is an error too.
    with rephrased(f"{path} cannot be read (%s). {_FORMATS}", Exception):
        if path.endswith(".npy"):
            array = np.load(path, mmap_mode="r")
        else:
            array = np.memmap(path, "<u2", "r")

    # A renamed .npz is not an array, and other arrays are not ids. Not by `np.issubdtype`, which
    # takes durations (timedelta64) for integers.
    is_ids = isinstance(array, np.memmap) and array.ndim == 1 and array.dtype.kind in "iu"
    if not is_ids:
        content = type(array).__name__
        if isinstance(array, np.ndarray):
            content = f"type {array.dtype} and shape {array.shape}"
        raise UserError(f"{path} has {content}. {_FORMATS}")
    if path.endswith(".bin"):
        _check_plain(path, array[: BLOCK_BYTES // array.itemsize])
    return array


def _check_plain(path: str, ids: np.ndarray) -> None:
    """Raises `UserError` if the first ids [T] of a .bin file are not plain uint16 ids.

    The ids were read as uint16, but may be a header or ids of another width. Training on them would
    not show that they are not the user's ids.
    """
    content = ids.tobytes()
    for header, meaning in _HEADERS.items():
        if content.startswith(header):
            raise UserError(f"{path} must contain only uint16 ids, but it begins with {meaning}")
    other_width = _other_width(ids)
    if other_width is not None:
        anomaly, dtype = other_width
        raise UserError(
            f"{path} must contain uint16 ids, but {anomaly}, as in ids of {dtype}. "
            "Save them as .npy, which records their dtype: "
            f"numpy.save('ids.npy', numpy.fromfile({path!r}, {dtype!r})), with 'uint16' if they "
            "are uint16 after all."
        )


def _other_width(ids: np.ndarray) -> tuple[str, str] | None:
    """Detects ids [T] that were read as uint16 but seem to have another dtype.

    Returns:
      A description of the anomaly and the dtype that the ids seem to have, or None if they look
      like uint16.
    """
    if len(ids) >= _FEWEST_HALVES:
        even = ids[0::2]
        odd = ids[1::2]
        # Little-endian ids have their upper half after the lower one, big-endian ids before it.
        for upper, lower, order in ((odd, even, "<"), (even, odd, ">")):
            if upper.max() <= _LARGEST_UPPER_HALF < lower.max():
                is_64_bit = not upper.any() and not lower[1::2].any()
                dtype = f"{order}u8" if is_64_bit else f"{order}u4"
                largest = f"at most {upper.max()}" if upper.any() else "0"
                return f"every other one of the first {len(ids):,} is {largest}", dtype

    if len(ids) >= _FEWEST_BYTES:
        pairs = ids.astype("<u2").view(np.uint8).reshape(-1, 2)
        lower_counts = np.bincount(pairs[:, 0], minlength=256)
        upper_counts = np.bincount(pairs[:, 1], minlength=256)
        if not lower_counts[1:].any() and upper_counts[1:].any():
            return f"the first {len(ids):,} are multiples of 256", ">u2"

        alike = np.minimum(lower_counts, upper_counts).sum() / len(ids)
        # If all byte values occur, the ids may be random. If one does, a single id is repeated.
        if alike > _ALIKE and 1 < np.count_nonzero(lower_counts) < 256:
            anomaly = f"the two bytes of the first {len(ids):,} have the same values equally often"
            return anomaly, "u1"
    return None


def _scan(array: np.memmap, name: str) -> tuple[str, int]:
    """Reads a file of ids once, with a bar of this name.

    Returns:
      sha256 of the file's dtype and ids, and the largest id.

    Raises:
      UserError: If an id is out of range.
    """
    path = str(array.filename)
    digest = hashlib.sha256(array.dtype.str.encode())
    largest = -1
    # Position of the block's first id in the file.
    position = 0
    content = file_part(path, array.offset, array.offset + array.nbytes)
    for file in with_bar(f"reading {name}", [content]):
        for block in file.blocks():
            digest.update(block)
            ids = np.frombuffer(block, array.dtype)
            # Ids are int32 on a device, where larger ids would silently change.
            foreign = np.flatnonzero((ids < 0) | (ids >= LARGEST_SIZE))
            if foreign.size:
                raise UserError(
                    f"ids must be from 0 to below 2^31 - 1, got {ids[foreign[0]]} "
                    f"at position {position + foreign[0]} of {path}"
                )
            largest = max(largest, int(ids.max()))
            position += len(ids)
    return digest.hexdigest(), largest
