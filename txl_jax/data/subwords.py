"""Subword tokens of the optional package tokenizers.

The tokens come from a Hugging Face tokenizer.json, which is loaded or trained on a text.

Padding, truncation, templates ("[CLS] ... [SEP]") and dropout in the file have no effect. A special
token in the text, such as <|endoftext|>, is that token.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from txl_jax.config.config_tree import require
from txl_jax.data import tokenizer_growth
from txl_jax.data.text import File, checked, text_blocks
from txl_jax.data.vocabulary import Vocabulary, escape, id_type
from txl_jax.errors import MissingPackageError, UserError, rephrased
from txl_jax.runtime import storage

# What ends a document in the usual tokenizers. An unprompted text follows the first that the file
# has.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# A few bytes could claim any id, and tables have a row for each id.
_MOST_TOKENS = 1 << 22
# Characters without a line that could be cut before; more are cut between words.
_LONGEST_PARAGRAPH = 1 << 20
# Characters of a word for training. Merging the letters of a word takes time with the square of its
# length, and text without white space (Chinese, DNA, base64) is one word. The parts of 4 MB take as
# long as words of 80 letters.
_LONGEST_TRAINED_WORD = 1024
# Runs of that many letters, digits, other characters or white space: the words of byte-level BPE.
_LONG_WORDS = re.compile(
    "|".join(
        f"{character}{{{_LONGEST_TRAINED_WORD}}}"
        for character in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")
    )
)
# The byte that each character of a byte-level token encodes. Printable ASCII and Latin-1 stand for
# themselves; other bytes, in order, are the characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): bytes([byte]) for byte in _PRINTABLE} | {
    chr(256 + i): bytes([b]) for i, b in enumerate(_OTHERS)
}
# Of tokenizers that spell unknown characters in bytes.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class SubwordVocabulary(Vocabulary):
    """The tokens of a tokenizer.json."""

    # Of the file.
    content: str = dataclasses.field(repr=False)
    # Were checked.
    _kept: set[str] = dataclasses.field(default_factory=set, init=False, repr=False, compare=False)

    kind: ClassVar[str] = "subword"

    def __post_init__(self) -> None:
        require(
            0 < self.size <= _MOST_TOKENS,
            f"it must have ids below {_MOST_TOKENS:,}, got {self.size - 1:,}",
        )

    @functools.cached_property
    def size(self) -> int:
        """V, the largest id + 1. Some ids below may have no token."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def start(self) -> np.ndarray:
        """Returns the token that ends documents, else the newline's, else the id 0."""
        ends = [token for name in _ENDS if (token := self._tokenizer.token_to_id(name)) is not None]
        return np.array((ends or self._ids("\n")[-1:] or [0])[:1])

    @property
    def unknown_id(self) -> int | None:
        """Returns the id of the unknown token, or None.

        It is None if every text can be encoded, or if a text that cannot be encoded is an error.
        """
        name, found = (
            self._settings["model"].get("unk_token"),
            self._settings["model"].get("unk_id"),
        )
        return self._tokenizer.token_to_id(name) if name else found

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, in blocks.

        Raises `UserError` for a character that cannot be encoded.
        """
        for file in files:
            for text in _paragraphs(text_blocks([file], close_lines=False)):
                try:
                    yield self._encode(text)
                except UserError as error:
                    raise UserError(f"{file.name}: {error}") from error

    def lines(self) -> list[str]:
        """Returns the file's content as one line."""
        return [escape(self.content)]

    def _encode(self, text: str) -> np.ndarray:
        self._check_characters(text)
        return np.array(self._ids(text), id_type(self.size))

    def _ids(self, text: str) -> list[int]:
        # The package raises nothing narrower.
        with rephrased("the tokenizer cannot encode the text (%s)", Exception):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _check_characters(self, text: str) -> None:
        """Raises `UserError` for a character that would vanish.

        BPE without an unknown token drops such characters.
        """
        model, normalizer = self._settings["model"], self._tokenizer.normalizer
        if (
            model.get("type") != "BPE"
            or model.get("unk_token") is not None
            or model.get("byte_fallback")
        ):
            return
        for character in sorted(set(text) - self._kept):
            normal = character if normalizer is None else normalizer.normalize_str(character)
            ids = self._ids(character)
            # Byte tokens spell all bytes of a character or lose some of it.
            spelt = not self._byte_level or self.decode(ids).endswith(normal.encode())
            if normal and not normal.isspace() and not (ids and spelt):
                missing = (
                    f"the tokenizer has no token for {character!r} (U+{ord(character):04X}), so "
                    "it would vanish"
                )
                raise UserError(
                    f"{missing}. Pass another tokenizer, or remove the character from the text."
                )
        self._kept.update(text)

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """The file's settings without those for other uses."""
        settings = json.loads(self.content)
        require(
            isinstance(settings, dict) and isinstance(settings.get("model"), dict),
            "it contains no model",
        )
        # The package drops such a token, but others may refer to its id.
        added = settings.get("added_tokens") or []
        require(
            isinstance(added, list), f"its added_tokens must be a list, got {type(added).__name__}"
        )
        are_texts = all(isinstance(token, dict) and token.get("content") for token in added)
        require(are_texts, "its added tokens must each have a text, got one without")
        model = settings["model"] | ({"dropout": None} if "dropout" in settings["model"] else {})
        return settings | {"truncation": None, "padding": None, "model": model}

    @functools.cached_property
    def _tokenizer(self) -> Any:
        lib, settings = package(), json.dumps(self._settings)
        with rephrased("%s", Exception):
            # Before the package normalizes the added tokens.
            tokenizer_growth.check(self._settings, lib)
            return lib.Tokenizer.from_str(settings)

    @functools.cached_property
    def _byte_level(self) -> bool:
        """Whether the characters of a token encode bytes, as in GPT-2."""
        return '"ByteLevel"' in json.dumps(
            [self._settings.get("decoder") or self._settings.get("pre_tokenizer")]
        )

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        """The bytes of each token when it follows another token.

        Another token comes first because decoders drop a space at a text's start.
        """
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        texts = [b""] * self.size
        added = {
            ids[token["content"]]: token["content"]
            for token in self._settings.get("added_tokens") or ()
        }
        before = min(set(ids.values()) - added.keys(), default=None)
        first = (
            "" if before is None else self._tokenizer.decode([before], skip_special_tokens=False)
        )
        for name, token in ids.items():
            if token in added:
                texts[token] = added[token].encode()
            elif self._byte_level:
                texts[token] = b"".join(
                    _BYTES.get(character, character.encode()) for character in name
                )
            elif self._settings["model"].get("byte_fallback") and (
                byte := _BYTE_TOKEN.fullmatch(name)
            ):
                texts[token] = bytes([int(byte[1], 16)])
            else:
                both = self._tokenizer.decode([before, token], skip_special_tokens=False)
                texts[token] = both.removeprefix(first).encode()
        return texts


def train(files: Iterable[File], *, size: int) -> SubwordVocabulary:
    """Trains byte-level BPE (Radford et al., 2019) of V = `size` tokens, or fewer on short texts.

    The tokens include the 256 bytes.

    It finds the same merges each time, on any number of threads, so all hosts get the same
    vocabulary. Raises `UserError` if size is below 256 or the text is not UTF-8.
    """
    require(
        size >= 256,
        f"data.tokenizer.vocab_size must be at least 256 for subwords (all bytes), got {size}",
    )
    lib = package()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    paragraphs = _paragraphs(text_blocks(files, close_lines=False))
    tokenizer.train_from_iterator(
        itertools.chain.from_iterable(map(_cut_words, paragraphs)), trainer
    )
    return SubwordVocabulary(tokenizer.to_str())


def _cut_words(text: str) -> Iterator[str]:
    """Yields a text in parts without longer words than training can merge in time."""
    first = 0
    for word in _LONG_WORDS.finditer(text):
        yield text[first : word.end()]
        first = word.end()
    yield text[first:]


def _paragraphs(blocks: Iterable[str]) -> Iterator[str]:
    """Yields a text cut at single newlines between characters that are not white space."""
    # Tokenizers may read newlines, or a newline and the spaces around it, as one token.
    text = ""
    for block in blocks:
        text += block
        cut = text.rfind("\n", 0, max(len(text) - 1, 0)) + 1
        while cut and (text[cut].isspace() or text[cut - 2 : cut - 1].isspace()):
            cut = text.rfind("\n", 0, cut - 1) + 1
        if not cut and len(text) > _LONGEST_PARAGRAPH:
            cut = max(text.rfind(" "), 0) or len(text)
        if cut:
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def package() -> ModuleType:
    """Imports the package tokenizers. Raises `MissingPackageError` if it is not installed."""
    missing = (
        "subwords and tokenizer.json files need the package tokenizers. "
        "Run pip install '.[tokenizers]'"
    )
    with rephrased(missing, ImportError, to=MissingPackageError):
        import tokenizers
    return tokenizers


def given_tokenizer(path: str) -> SubwordVocabulary:
    """Reads a tokenizer.json. Raises `UserError` if the file is not one."""
    checked(path, flag="--data.tokenizer.hf_file")
    wrong = (
        "--data.tokenizer.hf_file must be a tokenizer.json of the package tokenizers, "
        f"got {path} (%s)"
    )
    advice = (
        "Pass the tokenizer.json from its save() or, for SentencePiece, from transformers' "
        "save_pretrained()."
    )
    with rephrased(f"{wrong}. {advice}", ValueError):
        return SubwordVocabulary(storage.read_text(path))
