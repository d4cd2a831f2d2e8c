"""Entry point of the data: reads the text of a config as three memory-mapped splits of token ids.

files -> Text (own_text, prepare) -> Vocabulary (KINDS) -> TokenStore (token_store) -> Corpus
files of ready-made ids (id_files) -> Corpus
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import CorpusName, DataConfig, LineMark, Newlines, Tokenizer, TokenizerConfig
from txl_jax.config.config_tree import require, setting_of
from txl_jax.config.data import DEFAULT_SUBWORDS
from txl_jax.data import own_text, subwords, token_store
from txl_jax.data.byte_tokens import ByteVocabulary, distinct
from txl_jax.data.id_files import read_ids
from txl_jax.data.id_tokens import IdVocabulary
from txl_jax.data.published import CORPORA, check_file
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.text import SPLITS, Text, checked, file_part, packed_as, text_blocks, with_bar
from txl_jax.data.vocabulary import MARKS, Vocabulary, digest, dumps, loads, unescape
from txl_jax.data.word_tokens import (
    UNKNOWN_CHARACTER,
    UNKNOWN_WORD,
    CharacterVocabulary,
    WordVocabulary,
)
from txl_jax.errors import UserError
from txl_jax.runtime import storage
from txl_jax.runtime.storage import is_remote

# The directory of token stores in a cache.
_TOKENS = "tokens"
# Number of bytes that identify a compressed file or UTF-16.
_HEAD_BYTES = 6
KINDS = (ByteVocabulary, CharacterVocabulary, WordVocabulary, SubwordVocabulary, IdVocabulary)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as token ids.

    Compare two corpora by their digests, because arrays do not have a single truth value.
    """

    # Short name, for a row of a table.
    name: str
    # One human-readable line: the text and its tokens.
    description: str
    # sha256 of the text, in hexadecimal.
    digest: str
    # The vocabulary of the ids.
    vocabulary: Vocabulary
    # Integer ids [T], memory-mapped, as are the ids of the next two splits.
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    # int64 [n + 1]: the start of each line of `train`, and the end of the last. None if lines are
    # not marked.
    sentences: np.ndarray | None = None
    # Absolute path of the directory of its files.
    data_dir: str = ""
    # Directory of the prepared text and ids, absolute.
    cache_dir: str = ""

    @property
    def unknown_share(self) -> float:
        """Returns the fraction of unknown tokens in all splits, or 0 if none can be unknown."""
        splits = (self.train, self.valid, self.test)
        return self.vocabulary.count_unknown(*splits) / sum(map(len, splits))


def read_corpus(
    config: DataConfig,
    data_dir: str,
    cache_dir: str | None = None,
    *,
    vocabulary: Vocabulary | None = None,
    read_only_cache: str | None = None,
) -> Corpus:
    """Reads the text of a config.

    Args:
      data_dir: Directory of the published corpora's files. If it is remote, this corpus's files are
        copied into `cache_dir`.
      cache_dir: Directory of this machine for the prepared text and ids, or None for `prepared` in
        `data_dir`.
      vocabulary: A trained run's vocabulary, to score another text, or None for the text's own.
      read_only_cache: The `cache_dir` that a trained run's record names, which may come from a
        stranger, or None. Prepared ids in this vocabulary are used if they match their digests.
        Nothing is written to this directory or copied from it.

    Raises:
      UserError: If a config, file or archive cannot be used, a file is missing, a split contains
        fewer than 2 tokens, or `cache_dir` cannot be written to.
    """
    config.validate()
    check_file(config)
    cache = _cache_folder(config, data_dir, cache_dir)
    is_own_text = config.corpus is CorpusName.TEXT and config.tokenizer.kind is not Tokenizer.ID
    require(
        config.json_field is None or is_own_text,
        "data.json_field is only for your own text files, not for a corpus or ids. Omit it.",
    )

    # Remote files are copied first. `config` then names the copies, and `files_in` is the local
    # directory of a corpus's files.
    config, files_in = own_text.copied(config, data_dir, cache)
    if config.tokenizer.kind is Tokenizer.ID:
        corpus = Corpus(**read_ids(config, vocabulary=vocabulary))
    else:
        corpus = _read_encoded(config, files_in, cache, vocabulary, read_only_cache)

    # The first token is only an input, not a target.
    for split in SPLITS:
        n_tokens = len(getattr(corpus, split))
        require(
            n_tokens >= 2,
            f"the {split} split must have at least 2 tokens, got {n_tokens} "
            f"({corpus.description}). Pass a longer text, or a file for each split.",
        )
    return dataclasses.replace(
        corpus,
        data_dir=data_dir if is_remote(data_dir) else os.path.abspath(data_dir),
        cache_dir=os.path.abspath(cache),
    )


def _cache_folder(config: DataConfig, data_dir: str, cache_dir: str | None) -> Path:
    """Returns the local directory of the prepared text and ids.

    Raises:
      UserError: If it would be in a remote directory.
    """
    if cache_dir:
        prepared_below = cache_dir
    elif config.file or config.train:
        # Your own files do not need data_dir. If it is remote, their cache is in the local `data`.
        prepared_below = ""
    else:
        prepared_below = data_dir
    require(
        not is_remote(prepared_below),
        f"prepared text must be in a local directory, got {prepared_below}. "
        "It is memory-mapped: set --cache_dir to a directory on this machine.",
    )
    if cache_dir:
        return Path(cache_dir)
    local_data_dir = "data" if is_remote(data_dir) else data_dir
    return Path(local_data_dir, "prepared")


def refuse_packed(corpus: Corpus) -> None:
    """Raises `UserError` if the training split begins like a compressed file or UTF-16.

    Only a split that is read as bytes is checked, because others must be UTF-8.
    """
    if not isinstance(corpus.vocabulary, ByteVocabulary):
        return
    kind = packed_as(corpus.vocabulary.decode(corpus.train[:_HEAD_BYTES]))
    require(
        not kind,
        f"the text ({corpus.description}) looks like {kind}. Unpack it or convert it to UTF-8, or "
        "pass --data.tokenizer.kind=byte to train on these bytes.",
    )


def _read_encoded(
    config: DataConfig,
    files_in: str,
    cache: Path,
    vocabulary: Vocabulary | None,
    read_only_cache: str | None,
) -> Corpus:
    """Returns the ids of a text, which is prepared and encoded first if needed.

    Args:
      files_in: Local directory of a published corpus's files.
      cache: Local directory for the prepared text and ids.
      vocabulary: As in `read_corpus`.
      read_only_cache: As in `read_corpus`.
    """
    # A trained model's text may already be prepared in the directory that its record names. A new
    # run has no vocabulary yet, and reads its text.
    recorded_cache = None
    if vocabulary is not None and read_only_cache and not is_remote(read_only_cache):
        recorded_cache = Path(read_only_cache)
        prepared = _prepared_corpus(config, cache, recorded_cache, vocabulary)
        if prepared is not None:
            return prepared
    text = _read_text(config, files_in, cache)
    return _encoded(config, text, cache, vocabulary, recorded_cache)


def _read_text(config: DataConfig, data_dir: str, cache: Path) -> Text:
    if config.corpus is CorpusName.PYTHON_STDLIB:
        return own_text.read_python_stdlib(config)
    if config.corpus is CorpusName.TEXT or config.file:
        return own_text.read_own_text(config, cache, document_end=_document_end(config))
    from txl_jax.data import prepare  # Imported late: tensorflow-datasets takes half a second.

    return prepare.read(
        config.corpus, data_dir=data_dir, cache_dir=str(cache), heldout=config.heldout
    )


def _document_end(config: DataConfig) -> str:
    """Returns the text that follows each document of JSON lines."""
    end = unescape(config.reset_at or "\n")
    if config.tokenizer.kind is not Tokenizer.WORD:
        return end
    # A newline becomes the mark. Another end is a word on a line of its own, with white space
    # around it.
    if end in ("\n", MARKS.get(config.tokenizer.line_mark)):
        return "\n"
    return f"\n{end} "


def _prepared_corpus(
    config: DataConfig, cache: Path, read_only: Path, vocabulary: Vocabulary
) -> Corpus | None:
    """Returns a published corpus whose records and ids are both in `read_only`, or None.

    Writes nothing.

    A stranger's records are never encoded into `cache`, where the ids would pass for the published
    corpus.
    """
    if config.corpus not in CORPORA or config.file:
        return None
    from txl_jax.data import prepare  # Imported late: tensorflow-datasets takes half a second.

    # Records in `cache`, which were checked, are used instead.
    if prepare.has_records(config.corpus, cache):
        return None
    if not prepare.has_records(config.corpus, read_only):
        return None
    # If the records are corrupted, the corpus is prepared again.
    with contextlib.suppress(UserError):
        text = prepare.read(
            config.corpus, data_dir="", cache_dir=str(read_only), heldout=config.heldout
        )
        store = _find_store(config, text, [read_only], vocabulary)
        return None if store is None else _corpus(config, text, store, vocabulary)
    return None


def _encoded(
    config: DataConfig,
    text: Text,
    cache: Path,
    vocabulary: Vocabulary | None,
    read_only: Path | None,
) -> Corpus:
    """Returns the text as the ids of a store in one of the caches.

    The ids are in the text's own vocabulary or in the one passed. A new store is written to
    `cache`.
    """
    settings = _settings(config.tokenizer, ignore_missing=vocabulary is not None)
    store = None
    if vocabulary is not None:
        # The text that a run was trained on does not need a second store.
        caches = [cache]
        if read_only is not None:
            caches.append(read_only)
        store = _find_store(config, text, caches, vocabulary)
        settings |= {"vocabulary": digest(vocabulary)}
    if store is None:
        # The function is called only if there is no store with these settings.
        store = token_store.open_store(
            text,
            settings,
            lambda: vocabulary or make_vocabulary(config.tokenizer, text),
            folder=cache / _TOKENS,
        )
    return _corpus(config, text, store, vocabulary)


def _find_store(
    config: DataConfig, text: Text, caches: Sequence[Path], vocabulary: Vocabulary
) -> token_store.TokenStore | None:
    """Returns the first complete store of a text's ids in a vocabulary, or None."""
    saved = dumps(vocabulary)
    as_trained = _settings(config.tokenizer, ignore_missing=True)
    as_other_text = as_trained | {"vocabulary": digest(vocabulary)}
    for cache in caches:
        for settings in (as_trained, as_other_text):
            store = token_store.find_store(text, settings, cache / _TOKENS)
            if store is not None and store.vocabulary == saved:
                return store
    return None


def _corpus(
    config: DataConfig, text: Text, store: token_store.TokenStore, vocabulary: Vocabulary | None
) -> Corpus:
    """Returns the corpus of a store, in its own vocabulary unless another object is passed."""
    return Corpus(
        name=text.name,
        description=f"{text.description}, {_describe_tokens(config.tokenizer)}",
        digest=text.digest,
        vocabulary=vocabulary or loads(store.vocabulary, KINDS),
        train=store.splits["train"],
        valid=store.splits["valid"],
        test=store.splits["test"],
        sentences=store.sentences,
    )


def _settings(tokenizer: TokenizerConfig, *, ignore_missing: bool) -> dict[str, Any]:
    """Returns the settings that the ids depend on. A file is represented by its content.

    Args:
      ignore_missing: Whether a missing file is represented by its name. Otherwise it is an error.
    """
    settings = {}
    for field in dataclasses.fields(tokenizer):
        value = getattr(tokenizer, field.name)
        if setting_of(field).shapes_tokens and value is not None:
            settings[field.name] = value
    for name in ("vocab_file", "hf_file"):
        path = getattr(tokenizer, name)
        if path and not ignore_missing:
            checked(path, flag=f"--data.tokenizer.{name}")
        if path and os.path.isfile(path):
            settings[name] = storage.sha256(path)
    return settings


def _describe_tokens(tokenizer: TokenizerConfig) -> str:
    match tokenizer.kind:
        case Tokenizer.BYTE if tokenizer.newlines is Newlines.DROP:
            return "newlines dropped"
        case Tokenizer.BYTE:
            return "newlines kept"
        case Tokenizer.CHAR:
            return "as characters"
        case Tokenizer.WORD:
            marks = {
                LineMark.EOS: "a mark after each line",
                LineMark.S: "one <S> between sentences",
                LineMark.DOUBLE_S: "<S> before and after each sentence",
                LineMark.NONE: "lines unmarked",
            }
            return f"as words, {marks[tokenizer.line_mark]}"
        case Tokenizer.SUBWORD if tokenizer.hf_file:
            return "as tokens of a tokenizer.json"
        case Tokenizer.SUBWORD:
            return "as subwords trained on it"
    raise AssertionError(f"no description of {tokenizer.kind}")


# Vocabularies


def make_vocabulary(tokenizer: TokenizerConfig, text: Text) -> Vocabulary:
    """Builds a text's vocabulary from its training split, or reads the one the config names."""
    match tokenizer.kind:
        case Tokenizer.BYTE if text.closed_alphabet:
            return ByteVocabulary.of(_occurring_bytes(text), tokenizer.newlines)
        case Tokenizer.BYTE:
            return ByteVocabulary.all_bytes(tokenizer.newlines)
        case Tokenizer.CHAR:
            counts = _count(text, iter)
            characters = rank(counts, min_count=tokenizer.min_count, unknown=UNKNOWN_CHARACTER)
            return CharacterVocabulary("".join(characters))
        case Tokenizer.WORD:
            marks = []
            if tokenizer.line_mark in MARKS:
                marks.append(MARKS[tokenizer.line_mark])
            if tokenizer.vocab_file:
                words, unknown = _given_words(tokenizer.vocab_file, marks)
            else:
                unknown = UNKNOWN_WORD
                counts = _count(text, str.split)
                words = rank(counts, min_count=tokenizer.min_count, unknown=unknown, first=marks)
            return WordVocabulary(tuple(words), tokenizer.line_mark, unknown=unknown)
        case Tokenizer.SUBWORD if tokenizer.hf_file:
            return subwords.given_tokenizer(tokenizer.hf_file)
        case Tokenizer.SUBWORD:
            size = tokenizer.vocab_size or DEFAULT_SUBWORDS
            return subwords.train(with_bar("counting", text.splits["train"]), size=size)
    raise AssertionError(f"no vocabulary for {tokenizer.kind}")


def _occurring_bytes(text: Text) -> bytes:
    """Returns the byte values that occur in any split, like the original."""
    values: set[int] = set()
    for split in SPLITS:
        for file in with_bar(f"counting {split}", text.splits[split]):
            for block in file.blocks():
                values.update(distinct(block))
    return bytes(values)


def _given_words(path: str, marks: list[str]) -> tuple[list[str], str]:
    """Reads a vocabulary file: the first word of each line, in order.

    Args:
      marks: The line mark, if any. It is added before the words if it is missing.

    Returns:
      The words, and the word that encodes unknown words: <unk> or <UNK>. If both are missing, <unk>
      is added after the words.
    """
    file = file_part(checked(path, flag="--data.tokenizer.vocab_file"))
    content = "".join(text_blocks([file], close_lines=True))
    # A tokenizer's vocab.json would be read as a few words of punctuation.
    require(
        not _is_json(content),
        f"--data.tokenizer.vocab_file must have a word on each line, got {path}, which is JSON. "
        "For a tokenizer.json, pass --data.tokenizer.hf_file and --data.tokenizer.kind=subword.",
    )
    # Words in a dict stay in order, and each occurs once.
    first_words: dict[str, None] = {}
    for line in content.split("\n"):
        fields = line.split()
        if fields:
            first_words[fields[0]] = None
    require(
        first_words,
        f"--data.tokenizer.vocab_file must have a word on each line, got {path}, which "
        "has no words",
    )

    unknown = UNKNOWN_WORD
    if unknown not in first_words and unknown.upper() in first_words:
        unknown = unknown.upper()
    words = [mark for mark in marks if mark not in first_words]
    words += first_words
    if unknown not in first_words:
        words.append(unknown)
    return words, unknown


def _is_json(content: str) -> bool:
    """Returns whether a text is a JSON object or list, such as the vocab.json of a tokenizer."""
    if not content.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _count(text: Text, split: Callable[[str], Iterable[str]]) -> collections.Counter[str]:
    """Counts the tokens of the training split, in the order of their first occurrence.

    Args:
      split: Returns the tokens of a block of text.
    """
    blocks = text_blocks(with_bar("counting", text.splits["train"]), close_lines=False)
    return collections.Counter(itertools.chain.from_iterable(map(split, blocks)))


def rank(
    counts: Mapping[str, int], *, min_count: int, unknown: str, first: Sequence[str] = ()
) -> list[str]:
    """Ranks tokens: `first`, then by decreasing count.

    Tokens with equal counts are in the order in which they were counted.

    Tokens rarer than `min_count` count as `unknown`, which is always included. Rare tokens of
    `first` also count as `unknown`, although they keep their own ids: with another count of
    `unknown`, the tokens of earlier runs would get other ids.

    >>> rank(collections.Counter("abracadabra"), min_count=2, unknown="?")
    ['a', 'b', 'r', '?']
    """
    kept: collections.Counter[str] = collections.Counter()
    n_rare = 0
    for token, count in counts.items():
        if count >= min_count:
            kept[token] = count
        else:
            n_rare += count
    kept[unknown] += n_rare
    # Equal counts stay in their order.
    return [*first] + [token for token, _ in kept.most_common() if token not in first]
