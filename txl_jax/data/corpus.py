"""Entry point of the data: reads the text of a config as three memory-mapped splits of token ids.

files -> Text (sources) -> Vocabulary (tokens/build_vocabulary) -> token store (tokens/store) -> Corpus
files of ready-made ids (tokens/id_files) -> Corpus
"""

import dataclasses
import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import CorpusName, DataConfig, LineMark, Newlines, Tokenizer
from txl_jax.config.settings import setting_of
from txl_jax.data.sources import fetched, local_files, published
from txl_jax.data.sources.corpora import CORPORA, check_file
from txl_jax.data.sources.text import SPLITS, Text
from txl_jax.data.tokens import build_vocabulary, store
from txl_jax.data.tokens.id_files import read_ids
from txl_jax.data.tokens.vocabulary import Vocabulary, digest
from txl_jax.errors import UserError
from txl_jax.runtime.paths import is_remote

# Files that the ids depend on too; the store's name holds the digest of their contents.
_NAMED_FILES = ("vocab_file", "hf_file")


@dataclasses.dataclass(frozen=True, eq=False)  # Arrays have no single truth value; compare digests.
class Corpus:
    """A text as token ids."""

    name: str  # Short, for a row of a table.
    description: str  # One line for people: the text and its tokens.
    digest: str  # sha256 of the text, in hexadecimal.
    vocabulary: Vocabulary  # Of the ids.
    train: np.ndarray  # Integer ids, one axis, memory-mapped; so are the next two.
    valid: np.ndarray
    test: np.ndarray
    sentences: np.ndarray | None = None  # int64 [n + 1]: the start of each line of `train`, and the end of the last.
    data_dir: str = ""  # Folder of its files; absolute, so that it is found again.
    cache_dir: str = ""  # Folder of the prepared text and ids; absolute.


def read_corpus(
    config: DataConfig, data_dir: str, cache_dir: str | None = None, *, vocabulary: Vocabulary | None = None
) -> Corpus:
    """Reads the text of a config.

    Args:
      config: the text and its tokens.
      data_dir: folder of the published corpora's files; on gs:// those of this corpus are copied into `cache_dir`.
      cache_dir: folder of this machine for the prepared text and ids; None: `prepared` in `data_dir`.
      vocabulary: that of a trained run, to score another text; None: the text's own.

    Raises:
      UserError: a config, file or archive that cannot be used, a missing file, a split with fewer than 2 tokens, or a
        `cache_dir` that cannot be written to.
    """
    config.validate()
    check_file(config)
    fetched.check_cache(cache_dir, "" if config.file or config.train else data_dir)
    cache = Path(cache_dir or Path("data" if is_remote(data_dir) else data_dir, "prepared"))
    config = fetched.local_config(config, cache)
    if config.tokenizer.kind is Tokenizer.ID:
        ids = read_ids(config, vocabulary=vocabulary)
        train, valid, test = (ids.splits[split] for split in SPLITS)
        corpus = Corpus("ids", ids.description, ids.digest, ids.vocabulary, train, valid, test)
    else:
        corpus = _encoded(config, _read_text(config, data_dir, str(cache)), cache / "tokens", vocabulary)
    return dataclasses.replace(
        corpus,
        data_dir=data_dir if is_remote(data_dir) else os.path.abspath(data_dir),
        cache_dir=os.path.abspath(cache),
    )


def _encoded(config: DataConfig, text: Text, folder: Path, vocabulary: Vocabulary | None) -> Corpus:
    """Returns the text as the ids of a store in `folder`."""
    tokens = _tokens(config, text, folder, vocabulary)
    train, valid, test = (tokens.splits[split] for split in SPLITS)
    described = f"{text.description}, {_describe_tokens(config)}"
    return Corpus(text.name, described, text.digest, tokens.vocabulary, train, valid, test, tokens.sentences)


def _read_text(config: DataConfig, data_dir: str, cache_dir: str) -> Text:
    match config.corpus:
        case CorpusName.TEXT:
            return local_files.read_own_text(config)
        case CorpusName.PYTHON_STDLIB:
            return local_files.read_python_stdlib(config)
    if config.file:
        return local_files.read_prefix(config)
    if is_remote(data_dir):
        data_dir = fetched.local_folder(CORPORA[config.corpus], data_dir, Path(cache_dir))
    return published.read(config.corpus, data_dir=data_dir, cache_dir=cache_dir, heldout=config.heldout)


def _tokens(config: DataConfig, text: Text, folder: Path, vocabulary: Vocabulary | None) -> store.TokenStore:
    """Returns the text's ids in its own vocabulary, or in a given one."""
    own = _settings(config, ignore_missing=vocabulary is not None)
    if vocabulary is None:
        make = partial(build_vocabulary.make_vocabulary, config, text)
        return store.open_store(text, own, make, folder=folder)
    # The text that a run was trained on needs no second store.
    found = store.find_store(text, own, folder)
    if found is not None and found.vocabulary == vocabulary:
        return found
    given = own | {"vocabulary": digest(vocabulary)}
    return store.open_store(text, given, lambda: vocabulary, folder=folder)


def _settings(config: DataConfig, *, ignore_missing: bool) -> dict[str, Any]:
    """Returns the settings that the ids depend on; a file counts by its content."""
    settings = {
        field.name: getattr(config.tokenizer, field.name)
        for field in dataclasses.fields(config.tokenizer)
        if setting_of(field).shapes_tokens and getattr(config.tokenizer, field.name) is not None
    }
    settings["sentencepiece_vocab"] = 8000  # It was a setting: without it every text would be encoded again.
    for name in _NAMED_FILES:
        if path := getattr(config.tokenizer, name):
            try:
                settings[name] = hashlib.sha256(
                    build_vocabulary.read_named(path, flag=f"--data.tokenizer.{name}")
                ).hexdigest()
            except UserError:
                if not ignore_missing:
                    raise
    return settings


def _describe_tokens(config: DataConfig) -> str:
    """Describes the tokens, for people."""
    if config.tokenizer.kind is Tokenizer.BYTE:
        return f"newlines {'dropped' if config.tokenizer.newlines is Newlines.DROP else 'kept'}"
    if config.tokenizer.kind is Tokenizer.SUBWORD:
        return "as tokens of a tokenizer.json" if config.tokenizer.hf_file else "as subwords trained on it"
    kinds = {Tokenizer.CHAR: "characters", Tokenizer.WORD: "words"}
    marks = {
        LineMark.EOS: ", a mark after each line",
        LineMark.S: ", one <S> between sentences",
        LineMark.DOUBLE_S: ", <S> before and after each sentence",
        LineMark.NONE: ", lines unmarked",
    }
    marked = "" if config.tokenizer.kind is Tokenizer.CHAR else marks[config.tokenizer.line_mark]
    return f"as {'lower-case ' if config.tokenizer.lower_case else ''}{kinds[config.tokenizer.kind]}{marked}"
