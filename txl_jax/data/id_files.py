"""Files of ready-made token ids, read as a text.

Files are memory-mapped where they are: they are read once for their digest and largest id, and
nothing is copied.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_jax.config import DataConfig
from txl_jax.config.config_tree import require
from txl_jax.data.id_tokens import LARGEST_SIZE, IdVocabulary
from txl_jax.data.subwords import given_tokenizer
from txl_jax.data.text import BLOCK_BYTES, SPLITS, digest_of, expanded, file_part, with_bar
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError, rephrased

# First bytes of files that are not plain ids. All have at least three, as two may be an id.
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
# Ids of 32 bits below 2^18, of the largest vocabularies in use, have an upper half of at most 3.
_LARGEST_UPPER_HALF = 3
_FEWEST_HALVES = 32  # In fewer ids every other one may be small by chance.
_FEWEST_BYTES = 1024  # In fewer ids their upper and lower bytes may be alike by chance.
# Share of their distributions that upper and lower bytes have in common. It is 1 for ids of one
# byte, and below a half for uint16 ids of text, whose frequent ids are small.
_ALIKE = 0.8


def read_ids(config: DataConfig, *, vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """Opens the user's files of ids as the fields of a `Corpus`.

    There is either one file, split 90/5/5 by position, or one file per split.

    Without a test file the validation ids are the test split too. `vocabulary` is a trained run's,
    or None for the config's. Raises `UserError` if a file is missing or has no ids, or an id is
    outside the vocabulary.
    """
    tokenizer = config.tokenizer
    named = (
        {"file": (config.file,)}
        if config.file
        else {split: getattr(config, split) for split in SPLITS}
    )
    arrays: dict[str, Any] = {name: _open(name, paths) for name, paths in named.items() if paths}
    digests, each_largest = zip(
        *(_scan(array, name) for name, array in arrays.items()), strict=True
    )
    largest = max(each_largest)
    if vocabulary is None and tokenizer.hf_file:
        vocabulary = given_tokenizer(tokenizer.hf_file)
    vocabulary = vocabulary or IdVocabulary(size=tokenizer.vocab_size or largest + 1)
    advice = (
        "Pass ids of this vocabulary, or change --data.tokenizer.vocab_size or "
        "--data.tokenizer.hf_file."
    )
    found = f"token ids must be less than {vocabulary.size} (the vocabulary size), got {largest}"
    require(largest < vocabulary.size, f"{found}. {advice}")
    if config.file:
        borders = [len(arrays["file"]) * percent // 100 for percent in (90, 95)]
        arrays = dict(zip(SPLITS, np.split(arrays["file"], borders), strict=True))
    splits = {split: arrays.get(split, arrays["valid"]) for split in SPLITS}
    sizes = " + ".join(f"{len(ids):,}" for ids in splits.values())
    is_counted = isinstance(vocabulary, IdVocabulary) and tokenizer.vocab_size is None
    counted = " (the largest id + 1)" if is_counted else ""
    tested = "" if config.file or config.test else ", test on the validation ids"
    return splits | {
        "name": "ids",
        "description": (
            f"own ids, {sizes} in train + valid + test{tested}, of {vocabulary.size:,} "
            f"tokens{counted}"
        ),
        "digest": digests[0] if config.file else digest_of(digests),
        "vocabulary": vocabulary,
    }


def _open(name: str, paths: Sequence[str]) -> np.memmap:
    path, *others = expanded(paths, flag=f"--data.{name}")
    require(
        not others,
        f"--data.{name} must name one file of ids, got {1 + len(others)} files. Concatenate them.",
    )
    known = (
        "A file of ids must be .npy (numpy.save) with integers along one axis, or .bin with uint16."
    )
    # NumPy parses headers as Python.
    with rephrased(f"{path} cannot be read (%s). {known}", Exception):
        array: Any = (
            np.load(path, mmap_mode="r") if path.endswith(".npy") else np.memmap(path, "<u2", "r")
        )
    # Not `np.issubdtype`, which takes durations (timedelta64) for integers.
    is_ids = isinstance(array, np.memmap) and array.ndim == 1 and array.dtype.kind in "iu"
    if not path.endswith((".npy", ".bin")) or not is_ids:
        found = (
            f"type {array.dtype} and shape {array.shape}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise UserError(f"{path} has {found}. {known}")
    if path.endswith(".bin"):
        _check_plain(path, array[: BLOCK_BYTES // array.itemsize])
    return array


def _check_plain(path: str, ids: np.ndarray) -> None:
    """Raises `UserError` if the first ids [T] of a .bin file are not plain uint16 ids.

    The ids were read as uint16, but may be a header or ids of another width.

    They would be trained on without a sign that they are not the user's ids.
    """
    content = ids.tobytes()
    for magic, meaning in _HEADERS.items():
        if content.startswith(magic):
            raise UserError(
                f"{path} must have ids of uint16 and nothing else, but it begins with {meaning}"
            )
    found = _other_width(ids)
    if found is not None:
        what, dtype = found
        save = f"numpy.save('ids.npy', numpy.fromfile({path!r}, {dtype!r}))"
        advice = (
            f"Save them as .npy, which records their type: {save}, with 'uint16' if they are "
            "uint16 all the same."
        )
        raise UserError(
            f"{path} must have ids of uint16, but {what}, as in ids of {dtype}. {advice}"
        )


def _other_width(ids: np.ndarray) -> tuple[str, str] | None:
    """Detects ids [T] that were read as uint16 but seem to have another dtype.

    Returns a description of the anomaly and the dtype that the ids seem to have, or None if they
    look like uint16.
    """
    if len(ids) >= _FEWEST_HALVES:
        even, odd = ids[0::2], ids[1::2]
        for upper, lower, order in ((odd, even, "<"), (even, odd, ">")):
            if upper.max() <= _LARGEST_UPPER_HALF < lower.max():
                is_64_bit = not upper.any() and not lower[1::2].any()
                at_most = f"at most {upper.max()}" if upper.any() else "0"
                return (
                    f"every other one of the first {len(ids):,} is {at_most}",
                    f"{order}u{8 if is_64_bit else 4}",
                )

    if len(ids) >= _FEWEST_BYTES:
        pairs = ids.astype("<u2").view(np.uint8).reshape(-1, 2)
        lower_counts = np.bincount(pairs[:, 0], minlength=256)
        upper_counts = np.bincount(pairs[:, 1], minlength=256)
        if not lower_counts[1:].any() and upper_counts[1:].any():
            return f"the first {len(ids):,} are multiples of 256", ">u2"
        alike = np.minimum(lower_counts, upper_counts).sum() / len(ids)
        # With all values of a byte they may be random ids. One value is a single id, repeated.
        if alike > _ALIKE and 1 < np.count_nonzero(lower_counts) < 256:
            return (
                f"the two bytes of the first {len(ids):,} have the same values equally often",
                "u1",
            )
    return None


def _scan(array: np.memmap, name: str) -> tuple[str, int]:
    """Returns sha256 of a file's dtype and ids, and the largest id.

    Raises `UserError` for an id out of range.
    """
    path, digest, largest, position = (
        str(array.filename),
        hashlib.sha256(array.dtype.str.encode()),
        -1,
        0,
    )
    for file in with_bar(
        f"reading {name}", [file_part(path, array.offset, array.offset + array.nbytes)]
    ):
        for block in file.blocks():
            digest.update(block)
            ids = np.frombuffer(block, array.dtype)
            if (foreign := np.flatnonzero((ids < 0) | (ids >= LARGEST_SIZE))).size:
                found = f"{ids[foreign[0]]} at position {position + foreign[0]} of {path}"
                raise UserError(f"ids must be from 0 to below 2^31 - 1, got {found}")
            largest = max(largest, int(ids.max()))
            position += len(ids)
    return digest.hexdigest(), largest
