"""Entry point of the data: reads the text of a config as three memory-mapped splits of token ids.

files -> Text (own_text, prepare) -> Vocabulary (KINDS) -> token_store -> Corpus
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

_TOKENS = "tokens"  # The directory of token stores in a cache.
KINDS = (ByteVocabulary, CharacterVocabulary, WordVocabulary, SubwordVocabulary, IdVocabulary)


@dataclasses.dataclass(frozen=True, eq=False)  # Arrays have no single truth value; compare digests.
class Corpus:
    """A text as token ids."""

    # Short, for a row of a table.
    name: str
    # One human-readable line: the text and its tokens.
    description: str
    # sha256 of the text, in hexadecimal.
    digest: str
    # Of the ids.
    vocabulary: Vocabulary
    # Integer ids, one axis, memory-mapped; so are the next two.
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    # int64 [n + 1]: the start of each line of `train`, and the end of the last.
    sentences: np.ndarray | None = None
    # Directory of its files; absolute, so that it is found again.
    data_dir: str = ""
    # Directory of the prepared text and ids; absolute.
    cache_dir: str = ""

    @property
    def unknown_share(self) -> float:
        """Returns the share of unknown tokens in all splits, 0 if the vocabulary has none."""
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
      read_only_cache: The `cache_dir` that a trained run's record names, which may be a stranger's,
        or None. Ids in
        this vocabulary that are prepared there, and match their digests, are used. Nothing is
        written to it, and nothing is copied from it.

    Raises:
      UserError: If a config, file or archive cannot be used, a file is missing, a split has fewer
        than 2 tokens, or `cache_dir` cannot be written to.
    """
    config.validate()
    check_file(config)
    # Prepared text goes to the cache, which is below data_dir by default. Your own files need no
    # data_dir, so their cache is local then.
    prepared_below = cache_dir
    if not cache_dir and not (config.file or config.train):
        prepared_below = data_dir
    advice = "It is memory-mapped: set --cache_dir to a directory on this machine."
    require(
        not is_remote(prepared_below or ""),
        f"prepared text must be in a local directory, got {prepared_below}. {advice}",
    )
    cache = Path(cache_dir or Path("data" if is_remote(data_dir) else data_dir, "prepared"))
    takes_json = config.corpus is CorpusName.TEXT and config.tokenizer.kind is not Tokenizer.ID
    wrong = "data.json_field is only for your own text files, not for a corpus or ids. Omit it."
    require(config.json_field is None or takes_json, wrong)
    # Remote files are copied first. `config` then names the copies, and `files_in` is the local
    # directory of a corpus's files.
    config, files_in = own_text.copied(config, data_dir, cache)
    if config.tokenizer.kind is Tokenizer.ID:
        corpus = Corpus(**read_ids(config, vocabulary=vocabulary))
    else:
        # A trained model's text may be prepared already, in the directory that its record names. A
        # run that starts has no vocabulary yet, and reads its text.
        recorded_cache = None
        prepared = None
        if vocabulary is not None and read_only_cache and not is_remote(read_only_cache):
            recorded_cache = read_only_cache
            prepared = _prepared_corpus(config, cache, Path(recorded_cache), vocabulary)
        if prepared is not None:
            corpus = prepared
        else:
            text = _read_text(config, files_in, cache)
            corpus = _encoded(config, text, cache, vocabulary, recorded_cache)
    for split in SPLITS:
        size = len(getattr(corpus, split))  # The first token is only an input, no target.
        needs = f"the {split} split must have at least 2 tokens, got {size} ({corpus.description})"
        require(size >= 2, f"{needs}. Pass a longer text, or each split by itself.")
    return dataclasses.replace(
        corpus,
        data_dir=data_dir if is_remote(data_dir) else os.path.abspath(data_dir),
        cache_dir=os.path.abspath(cache),
    )


def refuse_packed(corpus: Corpus) -> None:
    """Raises `UserError` if the training split begins like a compressed file or UTF-16.

    Only a split that is read as bytes is checked.
    """
    if isinstance(corpus.vocabulary, ByteVocabulary):
        found = packed_as(corpus.vocabulary.decode(corpus.train[:6]))
        advice = (
            "Unpack it or convert it to UTF-8, or pass --data.tokenizer.kind=byte to train on "
            "these bytes."
        )
        require(not found, f"the text ({corpus.description}) looks like {found}. {advice}")


def _read_text(config: DataConfig, data_dir: str, cache: Path) -> Text:
    if config.corpus is CorpusName.PYTHON_STDLIB:
        return own_text.read_python_stdlib(config)
    if config.corpus is CorpusName.TEXT or config.file:
        # Of documents in JSON lines. Among words it needs white space around.
        end = unescape(config.reset_at or "\n")
        if config.tokenizer.kind is Tokenizer.WORD:
            end = "\n" if end in ("\n", MARKS.get(config.tokenizer.line_mark)) else f"\n{end} "
        return own_text.read_own_text(config, cache, document_end=end)
    from txl_jax.data import prepare  # Here: tensorflow-datasets takes half a second.

    return prepare.read(
        config.corpus, data_dir=data_dir, cache_dir=str(cache), heldout=config.heldout
    )


def _prepared_corpus(
    config: DataConfig, cache: Path, read_only: Path, vocabulary: Vocabulary
) -> Corpus | None:
    """Returns a published corpus whose records and ids are both in `read_only`, or None.

    Writes nothing.

    Records of a stranger are never encoded into `cache`, where the ids would pass for those of the
    published corpus.
    """
    if config.corpus not in CORPORA or config.file:
        return None
    from txl_jax.data import prepare  # Here: tensorflow-datasets takes half a second.

    if prepare.has_records(config.corpus, cache) or not prepare.has_records(
        config.corpus, read_only
    ):
        return None
    with contextlib.suppress(UserError):  # If they are corrupted, others are prepared.
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
    read_only: str | None,
) -> Corpus:
    """Returns the text as the ids of a store in one of the caches.

    The ids are in the text's own vocabulary or in the one passed.

    A new store is written to `cache`.
    """
    settings = _settings(config.tokenizer, ignore_missing=vocabulary is not None)
    store = None
    if vocabulary is not None:
        # The text that a run was trained on needs no second store.
        caches = [cache, Path(read_only)] if read_only else [cache]
        store = _find_store(config, text, caches, vocabulary)
        settings |= {"vocabulary": digest(vocabulary)}
    # A store with these settings is opened, or else made. Only then a vocabulary is made, if there
    # is none.
    store = store or token_store.open_store(
        text,
        settings,
        lambda: vocabulary or make_vocabulary(config.tokenizer, text),
        folder=cache / _TOKENS,
    )
    return _corpus(config, text, store, vocabulary)


def _find_store(
    config: DataConfig, text: Text, caches: Sequence[Path], vocabulary: Vocabulary
) -> token_store.TokenStore | None:
    """Returns the first whole store of a text's ids in a vocabulary, or None."""
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
    described = f"{text.description}, {_describe_tokens(config.tokenizer)}"
    vocabulary = vocabulary or loads(store.vocabulary, KINDS)
    train, valid, test = (store.splits[split] for split in SPLITS)
    return Corpus(
        text.name, described, text.digest, vocabulary, train, valid, test, store.sentences
    )


def _settings(tokenizer: TokenizerConfig, *, ignore_missing: bool) -> dict[str, Any]:
    """Returns the settings that the ids depend on. A file counts by its content."""
    fields = [
        field.name for field in dataclasses.fields(tokenizer) if setting_of(field).shapes_tokens
    ]
    settings = {name: value for name in fields if (value := getattr(tokenizer, name)) is not None}
    for name in ("vocab_file", "hf_file"):
        path = getattr(tokenizer, name)
        if path and not ignore_missing:
            checked(path, flag=f"--data.tokenizer.{name}")
        if path and os.path.isfile(path):
            settings[name] = storage.sha256(path)
    return settings


def _describe_tokens(tokenizer: TokenizerConfig) -> str:
    marks = {
        LineMark.EOS: "a mark after each line",
        LineMark.S: "one <S> between sentences",
        LineMark.DOUBLE_S: "<S> before and after each sentence",
        LineMark.NONE: "lines unmarked",
    }
    return {
        Tokenizer.BYTE: f"newlines {'dropped' if tokenizer.newlines is Newlines.DROP else 'kept'}",
        Tokenizer.CHAR: "as characters",
        Tokenizer.WORD: f"as words, {marks[tokenizer.line_mark]}",
        Tokenizer.SUBWORD: "as tokens of a tokenizer.json"
        if tokenizer.hf_file
        else "as subwords trained on it",
    }[tokenizer.kind]


# Vocabularies


def make_vocabulary(tokenizer: TokenizerConfig, text: Text) -> Vocabulary:
    """Builds a text's vocabulary from its training split, or reads the one the config names."""
    match tokenizer.kind:
        case Tokenizer.BYTE if text.closed_alphabet:  # Counted over all splits, as in the original.
            files = (
                file
                for split in SPLITS
                for file in with_bar(f"counting {split}", text.splits[split])
            )
            found = {
                value for file in files for block in file.blocks() for value in distinct(block)
            }
            return ByteVocabulary.of(bytes(found), tokenizer.newlines)
        case Tokenizer.BYTE:
            return ByteVocabulary.all_bytes(tokenizer.newlines)
        case Tokenizer.CHAR:
            ranked = rank(
                _count(text, iter), min_count=tokenizer.min_count, unknown=UNKNOWN_CHARACTER
            )
            return CharacterVocabulary("".join(ranked))
        case Tokenizer.WORD:
            unknown, mark = (
                UNKNOWN_WORD,
                [MARKS[tokenizer.line_mark]] if tokenizer.line_mark in MARKS else [],
            )
            if tokenizer.vocab_file:
                words, unknown = _given_words(tokenizer.vocab_file, mark)
            else:
                words = rank(
                    _count(text, str.split),
                    min_count=tokenizer.min_count,
                    unknown=unknown,
                    first=mark,
                )
            return WordVocabulary(tuple(words), tokenizer.line_mark, unknown=unknown)
        case Tokenizer.SUBWORD if tokenizer.hf_file:
            return subwords.given_tokenizer(tokenizer.hf_file)
        case Tokenizer.SUBWORD:
            size = tokenizer.vocab_size or DEFAULT_SUBWORDS
            return subwords.train(with_bar("counting", text.splits["train"]), size=size)
    raise AssertionError(f"no vocabulary for {tokenizer.kind}")


def _given_words(path: str, mark: list[str]) -> tuple[list[str], str]:
    """Reads the first word of each line, in order.

    Adds the line mark before and <unk> after them if missing.
    """
    file = file_part(checked(path, flag="--data.tokenizer.vocab_file"))
    content = "".join(text_blocks([file], close_lines=True))
    lists = "A tokenizer.json is --data.tokenizer.hf_file, with --data.tokenizer.kind=subword."
    wrong = (
        f"--data.tokenizer.vocab_file must have a word on each line, got {path}, which is JSON. "
        f"{lists}"
    )
    require(not _is_json(content), wrong)
    lines = content.split("\n")
    words = list(dict.fromkeys(fields[0] for fields in map(str.split, lines) if fields))
    require(
        words,
        f"--data.tokenizer.vocab_file must have a word on each line, got {path}, which "
        "has no words",
    )
    unknown = next(
        (word for word in (UNKNOWN_WORD, UNKNOWN_WORD.upper()) if word in words), UNKNOWN_WORD
    )
    return [m for m in mark if m not in words] + words + [
        u for u in [unknown] if u not in words
    ], unknown


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
    blocks = text_blocks(with_bar("counting", text.splits["train"]), close_lines=False)
    return collections.Counter(itertools.chain.from_iterable(map(split, blocks)))


def rank(
    counts: Mapping[str, int], *, min_count: int, unknown: str, first: Sequence[str] = ()
) -> list[str]:
    """Ranks tokens: `first`, then by decreasing count.

    Tokens with equal counts are in the order in which they were counted.

    Tokens rarer than `min_count` count as `unknown`, which is always there. So do those of `first`,
    although their ids are their own: another count would rank the tokens of earlier runs anew.

    >>> rank(collections.Counter("abracadabra"), min_count=2, unknown="?")
    ['a', 'b', 'r', '?']
    """
    kept = collections.Counter(
        {token: count for token, count in counts.items() if count >= min_count}
    )
    kept[unknown] += sum(count for count in counts.values() if count < min_count)
    return [*first] + [token for token, _ in kept.most_common() if token not in first]
