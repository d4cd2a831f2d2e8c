"""Ready-made token ids as a text: .npy arrays of any integer type, and .bin files of plain numbers, as nanoGPT's.

The files are memory-mapped where they are: they are read once for their digest and largest id, and nothing is copied.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from txl_jax.config import DataConfig
from txl_jax.data.sources.local_files import expanded, file_part
from txl_jax.data.sources.text import SPLITS, with_bar
from txl_jax.data.tokens.build_vocabulary import given_tokenizer
from txl_jax.data.tokens.id_vocabulary import IdVocabulary
from txl_jax.data.tokens.vocabulary import MIN_SPLIT_TOKENS, Vocabulary
from txl_jax.errors import UserError

_LARGEST_SIZE = 2**31 - 1  # Of a vocabulary: ids are int32 on a device.


@dataclasses.dataclass(frozen=True, eq=False)
class IdText:
    """Ids in three splits.

    Attributes:
      description: one line for people.
      digest: sha256 of the ids as they are stored, in hexadecimal.
      vocabulary: of the ids.
      splits: memory-mapped, read-only [T] each.
    """

    description: str
    digest: str
    vocabulary: Vocabulary
    splits: dict[str, np.ndarray]


def read_ids(config: DataConfig, *, vocabulary: Vocabulary | None = None) -> IdText:
    """Opens the user's files of ids: one, split 90/5/5 by position, or one per split.

    Without a test file the validation ids are the test text too.

    Args:
      config: names the files, and the vocabulary's size or a tokenizer.json.
      vocabulary: that of a trained run; None: the one of the config.

    Raises:
      UserError: a file that is absent or holds no ids, ids outside the vocabulary, or a split of fewer than 2.
    """
    named = {"file": (config.file,)} if config.file else {name: getattr(config, name) for name in SPLITS}
    arrays = {name: _open(_one_of(paths, name), config) for name, paths in named.items() if paths}
    digests, largest = [], -1
    for name, array in arrays.items():
        digest, its_largest = _scan(array, name)
        digests.append(digest)
        largest = max(largest, its_largest)
    vocabulary = vocabulary or _vocabulary(config, largest)
    if largest >= vocabulary.size:
        raise UserError(
            f"the largest id is {largest} and the vocabulary has {vocabulary.size} tokens, from 0 on; give the ids of "
            "this vocabulary, or another --data.tokenizer.vocab_size or --data.tokenizer.hf_file"
        )
    splits = _split(arrays["file"]) if config.file else {"test": arrays["valid"]} | arrays
    for name, ids in splits.items():
        if len(ids) < MIN_SPLIT_TOKENS:
            raise UserError(
                f"the {name} split has {len(ids)} ids and needs at least {MIN_SPLIT_TOKENS}; give a longer text"
            )
    sizes = " + ".join(f"{len(splits[name]):,}" for name in SPLITS)
    size_from = " (the largest id and one)" if isinstance(vocabulary, IdVocabulary) and _counted(config) else ""
    tested = "" if config.file or config.test else ", tested on the validation ids"
    return IdText(
        f"own ids, {sizes} in train + valid + test{tested}, of {vocabulary.size:,} tokens{size_from}",
        digests[0] if config.file else hashlib.sha256("".join(digests).encode()).hexdigest(),
        vocabulary,
        {name: splits[name] for name in SPLITS},
    )


def _counted(config: DataConfig) -> bool:
    """Returns whether the size follows from the ids."""
    return config.tokenizer.vocab_size is None


def _vocabulary(config: DataConfig, largest: int) -> Vocabulary:
    """Returns the tokens of a tokenizer.json if one is given, else ids without a text."""
    if config.tokenizer.hf_file:
        return given_tokenizer(config.tokenizer.hf_file)
    return IdVocabulary(largest + 1 if config.tokenizer.vocab_size is None else config.tokenizer.vocab_size)


def _one_of(paths: Sequence[str | None], name: str) -> str:
    """Returns the one file of a split."""
    found = expanded([path for path in paths if path], flag=f"--data.{name}")
    if len(found) > 1:
        raise UserError(
            f"--data.{name} names {len(found)} files and ids are mapped from one; concatenate them into one"
        )
    return found[0]


def _open(path: str, config: DataConfig) -> np.memmap:
    """Maps a file of ids."""
    match Path(path).suffix:
        case ".npy":
            return _open_npy(path)
        case ".bin":
            dtype = np.dtype(str(config.tokenizer.bin_type)).newbyteorder("<")
            size = Path(path).stat().st_size
            if size % dtype.itemsize:
                raise UserError(
                    f"{path} has {size} bytes, which is no whole number of {dtype.name} ids ({dtype.itemsize} bytes "
                    "each); give the whole file, or another --data.tokenizer.bin_type"
                )
            return np.memmap(path, dtype, mode="r")
    raise UserError(f"{path} is neither a .npy nor a .bin file; ids are read from these (--data.tokenizer.kind=id)")


def _open_npy(path: str) -> np.memmap:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is no whole .npy file ({error}); write it with numpy.save") from error
    if not isinstance(array, np.memmap) or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(
            f"{path} is an array of type {array.dtype} and shape {array.shape}; give integer ids along one axis"
        )
    return array


def _scan(array: np.memmap, name: str) -> tuple[str, int]:
    """Returns sha256 of a file's type and ids, and the largest id; raises `UserError` for one that cannot be any."""
    path, digest, largest, position = str(array.filename), hashlib.sha256(array.dtype.str.encode()), -1, 0
    for file in with_bar(f"reading {name}", [file_part(path, array.offset, array.offset + array.nbytes)]):
        for block in file.blocks():
            digest.update(block)
            ids = np.frombuffer(block, array.dtype)
            for foreign, found in ((ids.min() < 0, int(ids.argmin())), (ids.max() >= _LARGEST_SIZE, int(ids.argmax()))):
                if foreign:
                    raise UserError(
                        f"{path} holds {ids[found]} at position {position + found}; ids run from 0 to below 2^31 - 1"
                    )
            largest = max(largest, int(ids.max()))
            position += len(ids)
    return digest.hexdigest(), largest


def _split(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Splits ids into the first 90 %, the next 5 % and the last 5 %; borders are rounded down."""
    first, second = len(ids) * 90 // 100, len(ids) * 95 // 100
    return {"train": ids[:first], "valid": ids[first:second], "test": ids[second:]}
