"""The one door to a text: from a config to three splits of token ids, memory-mapped.

files -> Text (own_text, published) -> Vocabulary (counting) -> token store (store) -> Corpus
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from txl_jax.config import CorpusName, DataConfig, LineMark, Newlines, Tokenizer
from txl_jax.config.settings import setting_of
from txl_jax.data.sources import local_files, published
from txl_jax.data.sources.text import File, Text
from txl_jax.data.tokens import build_vocabulary, store
from txl_jax.data.tokens.vocabulary import Vocabulary, digest

# Files that the ids depend on too; the store's name holds the digest of what is in them.
_NAMED_FILES = ("vocab_file", "sentencepiece_model")


@dataclasses.dataclass(frozen=True, eq=False)  # Arrays have no single truth value; compare digests.
class Corpus:
    """A text ready to be dealt out in segments."""

    name: str  # Short: what a table's row is called.
    description: str  # One line for people: what was read and how.
    digest: str  # sha256 of what was read, in hexadecimal.
    vocabulary: Vocabulary  # What the ids mean.
    train: np.ndarray  # Integer ids, one axis, memory-mapped; so are the next two.
    valid: np.ndarray
    test: np.ndarray
    sentences: np.ndarray | None = None  # int64 [n + 1]: where each line of `train` begins, and where the last ends.
    data_dir: str = ""  # Where it was read from,
    cache_dir: str = ""  # and where its ids lie; both absolute, so that it is found again.


def read_corpus(
    config: DataConfig, data_dir: str, cache_dir: str | None = None, *, vocabulary: Vocabulary | None = None
) -> Corpus:
    """Reads the text that a config asks for.

    Args:
      config: which text, and what its tokens are.
      data_dir: folder of the published corpora's files.
      cache_dir: folder for what is made of them; None: `prepared` in `data_dir`.
      vocabulary: that of a trained run, to score another text with; None: the text's own.

    Raises:
      ValueError: a config, file or archive that cannot be used, or a split with fewer than 2 tokens.
      FileNotFoundError: a file that is not there.
      OSError: `cache_dir` cannot be written to.
    """
    config.validate()
    cache = Path(cache_dir or Path(data_dir, "prepared"))
    text = _read_text(config, data_dir, str(cache))
    tokens = _tokens(config, text, cache / "tokens", vocabulary)
    return Corpus(
        name=text.name,
        description=f"{text.description}, {_described(config)}",
        digest=text.digest,
        vocabulary=tokens.vocabulary,
        **tokens.splits,
        sentences=tokens.sentences,
        data_dir=os.path.abspath(data_dir),
        cache_dir=os.path.abspath(cache),
    )


def _read_text(config: DataConfig, data_dir: str, cache_dir: str) -> Text:
    match config.corpus:
        case CorpusName.TEXT:
            return local_files.read_own_text(config, reading=_watched)
        case CorpusName.PYTHON_STDLIB:
            return local_files.read_python_stdlib(config, reading=_watched)
        case CorpusName.ENWIK8 | CorpusName.TEXT8 if config.file:
            return local_files.read_prefix(config, reading=_watched)
    return published.read(config.corpus, data_dir=data_dir, cache_dir=cache_dir, heldout=config.heldout)


def _tokens(config: DataConfig, text: Text, folder: Path, vocabulary: Vocabulary | None) -> store.TokenStore:
    """The text's ids in its own vocabulary, or in a given one."""
    own = _settings(config, ignore_missing=vocabulary is not None)
    if vocabulary is None:
        make = partial(build_vocabulary.make_vocabulary, config, text, reading=_watched)
        return store.open_store(text, own, make, folder=folder, reading=_watched)
    # The text that a run was trained on needs no second store.
    found = store.find_store(text, own, folder)
    if found is not None and found.vocabulary == vocabulary:
        return found
    given = own | {"vocabulary": digest(vocabulary)}
    return store.open_store(text, given, lambda: vocabulary, folder=folder, reading=_watched)


def _settings(config: DataConfig, *, ignore_missing: bool) -> dict[str, Any]:
    """Everything beside the text that its ids depend on. A file counts by its content."""
    settings = {
        field.name: getattr(config.tokenizer, field.name)
        for field in dataclasses.fields(config.tokenizer)
        if setting_of(field).shapes_tokens
    }
    for name in _NAMED_FILES:
        if path := getattr(config.tokenizer, name):
            try:
                settings[name] = hashlib.sha256(
                    build_vocabulary.read_named(path, flag=f"--data.tokenizer.{name}")
                ).hexdigest()
            except FileNotFoundError:
                if not ignore_missing:
                    raise
    return settings


def _described(config: DataConfig) -> str:
    """How the text was read, for people."""
    if config.tokenizer.kind is Tokenizer.BYTE:
        return f"newlines {'dropped' if config.tokenizer.newlines is Newlines.DROP else 'kept'}"
    kinds = {Tokenizer.CHAR: "characters", Tokenizer.WORD: "words", Tokenizer.SENTENCEPIECE: "pieces"}
    marks = {
        LineMark.EOS: ", a mark after each line",
        LineMark.S: ", one <S> between sentences",
        LineMark.DOUBLE_S: ", <S> before and after each sentence",
        LineMark.NONE: ", lines unmarked",
    }
    marked = "" if config.tokenizer.kind is Tokenizer.CHAR else marks[config.tokenizer.line_mark]
    return f"as {'lower-case ' if config.tokenizer.lower_case else ''}{kinds[config.tokenizer.kind]}{marked}"


def _watched(doing: str, files: Iterable[File]) -> Iterator[File]:
    """Passes files on, with a bar over their bytes if they take more than a second to read, on a terminal."""
    files = list(files)
    size = sum(file.size for file in files)
    with tqdm.tqdm(total=size, desc=doing, unit="B", unit_scale=True, delay=1, disable=None) as bar:
        for file in files:
            yield dataclasses.replace(file, blocks=partial(_counted, file, bar))


def _counted(file: File, bar: tqdm.tqdm) -> Iterator[bytes]:
    for block in file.blocks():
        yield block
        bar.update(len(block))
