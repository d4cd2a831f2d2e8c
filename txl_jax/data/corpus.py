"""Entry point of the data: reads the text of a config as three memory-mapped splits of token ids.

files -> Text (sources) -> Vocabulary (tokens/build_vocabulary) -> token store (tokens/store) -> Corpus
files of ready-made ids (tokens/id_files) -> Corpus
"""

import collections
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import CorpusName, DataConfig, LineMark, Newlines, Tokenizer
from txl_jax.config.data import DEFAULT_SUBWORDS
from txl_jax.config.settings import setting_of
from txl_jax.data import own_text, subwords, token_store
from txl_jax.data.byte_tokens import ByteVocabulary, distinct, text_blocks
from txl_jax.data.published import CORPORA, check_file
from txl_jax.data.ready_ids import IdVocabulary, read_ids
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.text import SPLITS, File, Text, with_bar
from txl_jax.data.vocabulary import MARKS, Vocabulary, digest, read_named
from txl_jax.data.word_tokens import UNKNOWN_CHARACTER, UNKNOWN_WORD, CharacterVocabulary, WordVocabulary
from txl_jax.errors import UserError
from txl_jax.runtime.storage import is_remote

# -- Builds the vocabulary of a text from its training split alone.

KINDS: tuple[type[Vocabulary], ...] = (
    ByteVocabulary,
    CharacterVocabulary,
    WordVocabulary,
    SubwordVocabulary,
    IdVocabulary,
)


def make_vocabulary(config: DataConfig, text: Text) -> Vocabulary:
    """Builds the vocabulary of a text, or reads a given one.

    Raises:
      UserError: the training text, or a file that the config names, cannot be read or used.
    """
    match config.tokenizer.kind:
        case Tokenizer.BYTE:
            return _bytes_of(config, text)
        case Tokenizer.CHAR:
            counts = _count(with_bar("counting", text.splits["train"]), config, split=iter)
            ranked = rank(counts, min_count=config.tokenizer.min_count, unknown=UNKNOWN_CHARACTER)
            return CharacterVocabulary("".join(ranked), config.tokenizer.lower_case)
        case Tokenizer.WORD:
            return _words_of(config, text)
        case Tokenizer.SUBWORD if config.tokenizer.hf_file:
            return subwords.given_tokenizer(config.tokenizer.hf_file)
        case Tokenizer.SUBWORD:
            size = config.tokenizer.vocab_size or DEFAULT_SUBWORDS
            return subwords.train(with_bar("counting", text.splits["train"]), size=size)
    raise AssertionError(f"no vocabulary for {config.tokenizer.kind}")


def _bytes_of(config: DataConfig, text: Text) -> ByteVocabulary:
    """Returns all 256 values, or, for a whole published corpus, those of all splits, as the original counts."""
    if not text.closed_alphabet:
        return ByteVocabulary.all_bytes(config.tokenizer.newlines)
    found: set[int] = set()
    for split in SPLITS:
        for file in with_bar(f"counting {split}", text.splits[split]):
            for block in file.blocks():
                found.update(distinct(block))
    return ByteVocabulary.of(bytes(found), config.tokenizer.newlines)


def _words_of(config: DataConfig, text: Text) -> WordVocabulary:
    mark = [MARKS[config.tokenizer.line_mark]] if config.tokenizer.line_mark in MARKS else []
    if config.tokenizer.vocab_file:
        words, unknown = _given_words(config.tokenizer.vocab_file, mark)
    else:
        counts = _count(with_bar("counting", text.splits["train"]), config, split=str.split)
        unknown = UNKNOWN_WORD
        words = rank(counts, min_count=config.tokenizer.min_count, unknown=unknown, first=mark)
    return WordVocabulary(tuple(words), config.tokenizer.line_mark, config.tokenizer.lower_case, unknown)


def _given_words(path: str, mark: list[str]) -> tuple[list[str], str]:
    """Reads the first word of each line, in order; adds the line mark before and <unk> after them if missing."""
    text = read_named(path, flag="--data.tokenizer.vocab_file")
    whole = File(path, len(text), functools.partial(iter, [text]))
    lines = "".join(text_blocks([whole], close_lines=True)).split("\n")
    words = list(dict.fromkeys(fields[0] for fields in map(str.split, lines) if fields))
    if not words:
        raise UserError(
            f"--data.tokenizer.vocab_file names {path}, which holds no words; give a file with a word on each line"
        )
    unknown = next((word for word in (UNKNOWN_WORD, UNKNOWN_WORD.upper()) if word in words), UNKNOWN_WORD)
    return [m for m in mark if m not in words] + words + [u for u in [unknown] if u not in words], unknown


def _count(
    files: Iterable[File], config: DataConfig, *, split: Callable[[str], Iterable[str]]
) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for block in text_blocks(files, close_lines=False):
        counts.update(split(block.lower() if config.tokenizer.lower_case else block))
    return counts


def rank(counts: collections.Counter[str], *, min_count: int, unknown: str, first: Iterable[str] = ()) -> list[str]:
    """Ranks tokens: `first`, then by decreasing count, equal ones in the order in which they were counted.

    Tokens rarer than `min_count` count as `unknown`, which is always there.

    >>> rank(collections.Counter("abracadabra"), min_count=2, unknown="?")
    ['a', 'b', 'r', '?']
    """
    kept = collections.Counter({token: count for token, count in counts.items() if count >= min_count})
    kept[unknown] += sum(count for token, count in counts.items() if count < min_count)
    first = list(first)
    return first + [token for token, _ in kept.most_common() if token not in first]


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
    own_text.check_cache(cache_dir, "" if config.file or config.train else data_dir)
    cache = Path(cache_dir or Path("data" if is_remote(data_dir) else data_dir, "prepared"))
    config = own_text.local_config(config, cache)
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
            return own_text.read_own_text(config)
        case CorpusName.PYTHON_STDLIB:
            return own_text.read_python_stdlib(config)
    if config.file:
        return own_text.read_prefix(config)
    if is_remote(data_dir):
        data_dir = own_text.local_folder(CORPORA[config.corpus], data_dir, Path(cache_dir))
    from txl_jax.data import prepare  # Here: tensorflow-datasets takes half a second.

    return prepare.read(config.corpus, data_dir=data_dir, cache_dir=cache_dir, heldout=config.heldout)


def _tokens(config: DataConfig, text: Text, folder: Path, vocabulary: Vocabulary | None) -> token_store.TokenStore:
    """Returns the text's ids in its own vocabulary, or in a given one."""
    own = _settings(config, ignore_missing=vocabulary is not None)
    if vocabulary is None:
        make = partial(make_vocabulary, config, text)
        return token_store.open_store(text, own, make, folder=folder)
    # The text that a run was trained on needs no second store.
    found = token_store.find_store(text, own, folder)
    if found is not None and found.vocabulary == vocabulary:
        return found
    given = own | {"vocabulary": digest(vocabulary)}
    return token_store.open_store(text, given, lambda: vocabulary, folder=folder)


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
                settings[name] = hashlib.sha256(read_named(path, flag=f"--data.tokenizer.{name}")).hexdigest()
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
