"""A corpus: three splits of token ids, and what is needed to know the text again."""

import dataclasses

import numpy as np

from txl_jax.config import CorpusName, DataConfig, Newlines
from txl_jax.data import sources
from txl_jax.data.vocabulary import ByteVocabulary

MIN_SPLIT_TOKENS = 2  # The first token is only ever an input, so fewer leave nothing to predict.


@dataclasses.dataclass(frozen=True, eq=False)  # Arrays have no single truth value; compare digests.
class Corpus:
    """A text ready to be dealt out in segments."""

    name: str  # Short: what a table's row is called.
    description: str  # One line for people: what was read and how.
    digest: str  # sha256 of what was read, in hexadecimal, before newlines were dropped.
    vocabulary: ByteVocabulary  # What the ids mean.
    train: np.ndarray  # uint8 ids, one axis; so are the next two.
    valid: np.ndarray
    test: np.ndarray


def read_corpus(config: DataConfig, data_dir: str) -> Corpus:
    """Reads the text that a config asks for.

    Args:
      config: which text, and what becomes of its newlines.
      data_dir: folder that holds the published corpora; only enwik8 without `config.file` looks there.

    Raises:
      ValueError: a config, file or archive that cannot be used, or a split with fewer than 2 tokens.
      FileNotFoundError: a file that is not there.
    """
    config.validate()
    source = _read_source(config, data_dir)
    drop = config.newlines == Newlines.DROP
    splits = [text.replace(b"\n", b"") if drop else text for text in source.splits]
    vocabulary = ByteVocabulary.of(b"".join(splits)) if source.own_vocabulary else ByteVocabulary.all_bytes()
    for name, text in zip(("train", "valid", "test"), splits, strict=True):
        _check_split(name, text, source.description)
    return Corpus(
        source.name,
        f"{source.description}, newlines {'dropped' if drop else 'kept'}",
        source.digest,
        vocabulary,
        *(vocabulary.encode(text) for text in splits),
    )


def _read_source(config: DataConfig, data_dir: str) -> sources.Source:
    match config.corpus:
        case CorpusName.ENWIK8 if config.file:
            return sources.read_enwik8_prefix(config.file)
        case CorpusName.ENWIK8:
            return sources.read_enwik8(data_dir)
        case CorpusName.TEXT if config.file:
            return sources.read_one_text(config.file)
        case CorpusName.TEXT:
            return sources.read_three_texts(train=config.train, valid=config.valid, test=config.test)
        case CorpusName.PYTHON_STDLIB:
            return sources.read_python_stdlib()
    raise AssertionError(f"no reader for {config.corpus}")


def _check_split(name: str, text: bytes, description: str) -> None:
    if len(text) < MIN_SPLIT_TOKENS:
        raise ValueError(
            f"the {name} split of {description} has {len(text)} tokens and needs at least {MIN_SPLIT_TOKENS}; "
            "give a longer text"
        )
