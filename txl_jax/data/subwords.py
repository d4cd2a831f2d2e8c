"""Subword tokens, with the optional package tokenizers.

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

# Tokens that end a document in common tokenizers. An unprompted text follows the first of them that
# the file contains.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Largest size of a vocabulary. A file of a few bytes can claim any id, and tables have a row for
# each id.
_MOST_TOKENS = 1 << 22
# Characters of the longest text that is cut only between lines. Longer texts are cut between words.
_LONGEST_PARAGRAPH = 1 << 20
# Characters of the longest word for training. Merging the letters of a word takes time quadratic in
# its length, and text without white space (Chinese, DNA, base64) is a single word. The parts of
# 4 MB take as long as words of 80 letters.
_LONGEST_TRAINED_WORD = 1024
# The classes of characters that the words of byte-level BPE consist of: letters, digits, other
# characters, and white space.
_WORD_CLASSES = (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")
# Words that are too long, up to the character at which they are cut.
_LONG_WORDS = re.compile(
    "|".join(f"{characters}{{{_LONGEST_TRAINED_WORD}}}" for characters in _WORD_CLASSES)
)


def _byte_of_character() -> dict[str, bytes]:
    """Returns the byte that each character of a byte-level token encodes.

    Printable ASCII and Latin-1 stand for themselves. Other bytes, in order, are the characters from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {}
    for byte in printable:
        byte_of[chr(byte)] = bytes([byte])
    for code_point, byte in enumerate(others, start=256):
        byte_of[chr(code_point)] = bytes([byte])
    return byte_of


_BYTES = _byte_of_character()
# A token of one byte, in tokenizers that spell unknown characters in bytes.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class SubwordVocabulary(Vocabulary):
    """The tokens of a tokenizer.json."""

    # Content of the file.
    content: str = dataclasses.field(repr=False)
    # Characters that were checked, and are encoded.
    _encodable: set[str] = dataclasses.field(
        default_factory=set, init=False, repr=False, compare=False
    )

    kind: ClassVar[str] = "subword"

    def __post_init__(self) -> None:
        # A stranger's file can give a token any id, which would fill the memory with empty rows.
        require(
            0 < self.size <= _MOST_TOKENS,
            f"it must have ids below {_MOST_TOKENS:,}, got {self.size - 1:,}",
        )

    @functools.cached_property
    def size(self) -> int:
        """V, which is the largest id + 1. Some ids below may have no token."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def start(self) -> np.ndarray:
        """Returns the id of the token that ends documents, otherwise of the newline, or 0."""
        for name in _ENDS:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return np.array([token])
        # A newline may be more than one token, or none.
        return np.array(self._ids("\n")[-1:] or [0])

    @property
    def unknown_id(self) -> int | None:
        """Returns the id of the unknown token, or None.

        It is None if every text can be encoded, or if a text that cannot be encoded is an error.
        """
        model = self._settings["model"]
        name = model.get("unk_token")
        if not name:
            return model.get("unk_id")
        return self._tokenizer.token_to_id(name)

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, in blocks.

        Raises:
          UserError: If a character cannot be encoded. The error contains the file's name.
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
        # The package does not raise a narrower type.
        with rephrased("the tokenizer cannot encode the text (%s)", Exception):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _check_characters(self, text: str) -> None:
        """Raises `UserError` for a character that would vanish.

        BPE without an unknown token drops such characters.
        """
        model = self._settings["model"]
        # An unknown token, or tokens of single bytes, stand for all other characters.
        has_substitute = model.get("unk_token") is not None or model.get("byte_fallback")
        if model.get("type") != "BPE" or has_substitute:
            return
        normalizer = self._tokenizer.normalizer
        for character in sorted(set(text) - self._encodable):
            normalized = character
            if normalizer is not None:
                normalized = normalizer.normalize_str(character)
            ids = self._ids(character)
            # Tokenizers may drop white space, and characters that they normalize to nothing.
            if not normalized or normalized.isspace():
                continue
            # Byte tokens spell all bytes of a character or lose some of it.
            is_kept = bool(ids)
            if is_kept and self._byte_level:
                is_kept = self.decode(ids).endswith(normalized.encode())
            if not is_kept:
                raise UserError(
                    f"the tokenizer has no token for {character!r} (U+{ord(character):04X}), so "
                    "it would vanish. Pass another tokenizer, or remove the character from the "
                    "text."
                )
        self._encodable.update(text)

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """The file's settings without truncation, padding and dropout."""
        settings = json.loads(self.content)
        # The file may contain any JSON, so check the entries that are read below.
        require(
            isinstance(settings, dict) and isinstance(settings.get("model"), dict),
            "it contains no model",
        )
        added = settings.get("added_tokens") or []
        require(
            isinstance(added, list), f"its added_tokens must be a list, got {type(added).__name__}"
        )
        # The package drops a token without a text. Its id would have no token, and decoding it
        # would end in a KeyError.
        for token in added:
            has_text = isinstance(token, dict) and token.get("content")
            require(has_text, "its added tokens must each have a text, got one without")

        # Dropout would tokenize the same text differently each time.
        model = dict(settings["model"])
        if "dropout" in model:
            model["dropout"] = None
        # Templates may stay: texts are encoded without special tokens, so they are not applied.
        return settings | {"truncation": None, "padding": None, "model": model}

    @functools.cached_property
    def _tokenizer(self) -> Any:
        lib = package()
        settings = json.dumps(self._settings)
        with rephrased("%s", Exception):
            # Steps that let a text grow without bound would act already when the package normalizes
            # the added tokens.
            tokenizer_growth.check(self._settings, lib)
            return lib.Tokenizer.from_str(settings)

    @functools.cached_property
    def _byte_level(self) -> bool:
        """Whether the characters of a token encode bytes, as in GPT-2."""
        part = self._settings.get("decoder") or self._settings.get("pre_tokenizer")
        # The part may be a sequence of steps, one of which is this one.
        return '"ByteLevel"' in json.dumps([part])

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        """The bytes of each token when it follows another token.

        Another token comes first because decoders drop a space at a text's start.
        """
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        added = {}
        for settings in self._settings.get("added_tokens") or ():
            added[ids[settings["content"]]] = settings["content"]

        # The token that comes first, and its text, which is removed again.
        first_token = min(set(ids.values()) - added.keys(), default=None)
        first_text = ""
        if first_token is not None:
            first_text = self._tokenizer.decode([first_token], skip_special_tokens=False)

        texts = [b""] * self.size
        spells_bytes = self._settings["model"].get("byte_fallback")
        for name, token in ids.items():
            byte_token = _BYTE_TOKEN.fullmatch(name)
            if token in added:
                texts[token] = added[token].encode()
            elif self._byte_level:
                texts[token] = b"".join(_BYTES.get(char, char.encode()) for char in name)
            elif spells_bytes and byte_token:
                texts[token] = bytes([int(byte_token[1], 16)])
            else:
                both = self._tokenizer.decode([first_token, token], skip_special_tokens=False)
                texts[token] = both.removeprefix(first_text).encode()
        return texts


def train(files: Iterable[File], *, size: int) -> SubwordVocabulary:
    """Trains byte-level BPE (Radford et al., 2019) of V = `size` tokens, or fewer on short texts.

    The tokens include the 256 bytes. The merges are the same each time, on any number of threads,
    so all hosts get the same vocabulary.

    Raises:
      UserError: If size is below 256 or the text is not UTF-8.
    """
    require(
        size >= 256,
        f"data.tokenizer.vocab_size must be at least 256 for subwords (all bytes), got {size}",
    )
    lib = package()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    paragraphs = _paragraphs(text_blocks(files, close_lines=False))
    texts = itertools.chain.from_iterable(map(_cut_words, paragraphs))
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordVocabulary(tokenizer.to_str())


def _cut_words(text: str) -> Iterator[str]:
    """Yields a text in parts without words that are too long to merge in time."""
    first = 0
    for word in _LONG_WORDS.finditer(text):
        yield text[first : word.end()]
        first = word.end()
    yield text[first:]


def _paragraphs(blocks: Iterable[str]) -> Iterator[str]:
    """Yields a text cut at single newlines between characters that are not white space.

    Tokenizers may read newlines, or a newline and the spaces around it, as one token.
    """
    text = ""
    for block in blocks:
        text += block
        # After the last newline, unless that is the last character: white space may follow it.
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
    """Imports the package tokenizers.

    Raises:
      MissingPackageError: If it is not installed.
    """
    missing = (
        "subwords and tokenizer.json files require the package tokenizers. "
        "Run pip install tokenizers."
    )
    with rephrased(missing, ImportError, to=MissingPackageError):
        import tokenizers
    return tokenizers


def given_tokenizer(path: str) -> SubwordVocabulary:
    """Reads a tokenizer.json.

    Raises:
      UserError: If the file is not a tokenizer.json.
    """
    checked(path, flag="--data.tokenizer.hf_file")
    with rephrased(
        "--data.tokenizer.hf_file must be a tokenizer.json of the package tokenizers, "
        f"got {path} (%s). Pass the tokenizer.json from its save() or, for SentencePiece, from "
        "transformers' save_pretrained().",
        ValueError,
    ):
        return SubwordVocabulary(storage.read_text(path))
