"""Rejects a tokenizer.json whose steps let a text grow without bound.

A 2 kB file can specify k normalizers that each replace "a" with "aa", which turn one character into
2^k, in a library that Ctrl-C does not reach. Each step is therefore first applied to short texts,
one step after the other, before the package gets all of them. `txl_jax.data.subwords` calls `check`
for every tokenizer, wherever it comes from.
"""

import base64
import json
import string
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from txl_jax.config.config_tree import require


class _TokenizerPart(NamedTuple):
    """A part of a tokenizer.json, and of the package's object."""

    # Name of the list of steps, if the part is a sequence.
    steps_name: str
    # Returns the texts that the package's object of the part makes of a text.
    apply: Callable[[Any, str], Iterable[str]]


def _normalize(normalizer: Any, text: str) -> list[str]:
    return [normalizer.normalize_str(text)]


def _split(pre_tokenizer: Any, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _decode(decoder: Any, text: str) -> list[str]:
    return [decoder.decode([text])]


_PARTS = {
    "normalizer": _TokenizerPart("normalizers", _normalize),
    "pre_tokenizer": _TokenizerPart("pretokenizers", _split),
    "decoder": _TokenizerPart("decoders", _decode),
}
# Maximum number of steps of a part. Published tokenizers have up to ten.
_MOST_STEPS = 32
# Maximum number of characters that one character may become. Unicode's NFKC makes up to 18, and
# bytes as characters up to 4.
_MOST_GROWTH = 32
# Maximum number of characters that steps may add to a text of any length, such as a space.
_MOST_ADDED = 256
# Number of copies of each text, one after the other, so that growth of each copy outweighs
# characters that are added once.
_REPEATS = 16
# Maximum number of characters of a replacement. Published ones have up to ten.
_LONGEST_TEXT = 256
# Maximum number of distinct characters in the steps, each of which is tried.
_MOST_CHARACTERS = 4096
# Texts that are always tried: ASCII, a composed letter, a letter that is two in upper case, a wide
# letter, a letter of four bytes, one that NFKC turns into 18, SentencePiece's space, and two words.
_USUAL_TEXTS = (
    *string.printable,
    "\u00e9",
    "\u00df",
    "\u4e2d",
    "\U0001f600",
    "\ufdfa",
    "\u2581",
    "a b",
)
_NO_MODEL = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


def check(settings: dict[str, Any], lib: ModuleType) -> None:
    """Raises `UserError` if a part of a tokenizer makes a text more than 32 times as long.

    The parts are the normalizer, the pre-tokenizer and the decoder.

    Args:
      settings: A tokenizer.json.
      lib: The package tokenizers, any of whose exceptions may be raised.
    """
    for part_name, part in _PARTS.items():
        steps = list(_steps(settings.get(part_name), part.steps_name))
        # Each step is applied to every text that is tried, so this check itself would take long.
        require(
            len(steps) <= _MOST_STEPS,
            f"its {part_name} must have at most {_MOST_STEPS} steps, got {len(steps)}",
        )
        _check_contents(part_name, steps)

        originals = [text * _REPEATS for text in _texts_to_try(part_name, steps)]
        grown = originals
        for step in steps:
            tokenizer = lib.Tokenizer.from_str(json.dumps({**_NO_MODEL, part_name: step}))
            package_part = getattr(tokenizer, part_name)
            longer = []
            for original, text in zip(originals, grown, strict=True):
                result = "".join(part.apply(package_part, text))
                _check_growth(part_name, original, result)
                longer.append(result)
            grown = longer


def _check_growth(part_name: str, original: str, text: str) -> None:
    """Raises `UserError` if a text after some steps is too long compared with the original one.

    It is called after each step, so that a text is never much longer than allowed.
    """
    require(
        len(text) <= _MOST_GROWTH * len(original) + _MOST_ADDED,
        f"its {part_name} must not make a text more than {_MOST_GROWTH} times as long, "
        f"got {len(text):,} characters from {len(original):,}",
    )


def _check_contents(part_name: str, steps: list[Any]) -> None:
    """Raises `UserError` if one step may make a character arbitrarily long.

    A step can do this with a long text or with a table of texts.
    """
    n_tables = 0
    for step in steps:
        if not isinstance(step, dict):
            continue
        length = 0
        content = step.get("content")
        if isinstance(content, str):
            length = len(content)
        # SentencePiece's table: the size of a trie, the trie, and texts that end in a zero byte.
        table = step.get("precompiled_charsmap")
        if isinstance(table, str):
            n_tables += 1
            packed = base64.b64decode(table)
            trie_bytes = int.from_bytes(packed[:4], "little")
            texts = packed[4 + trie_bytes :]
            length = max(length, *map(len, texts.split(b"\0")))
        # One replacement of a megabyte makes a gigabyte of a thousand characters.
        require(
            length <= _LONGEST_TEXT,
            f"a replacement of its {part_name} must have at most {_LONGEST_TEXT} "
            f"characters, got {length:,}",
        )
    # The characters that a table replaces are not among those that are tried, so two tables could
    # multiply each other's lengths unnoticed.
    require(
        n_tables <= 1, f"its {part_name} must have at most one table of characters, got {n_tables}"
    )


def _steps(step: Any, steps_name: str) -> Iterator[Any]:
    """Yields the steps of a part in order, with sequences replaced by their own steps.

    Sequences may be in sequences. A list of pending steps, the next one last, has no limit like the
    stack of Python, which a file could exceed.
    """
    pending = [step]
    while pending:
        following = pending.pop()
        if isinstance(following, dict) and following.get("type") == "Sequence":
            pending += reversed(following.get(steps_name) or ())
        elif following is not None:
            yield following


def _texts_to_try(part_name: str, steps: list[Any]) -> list[str]:
    """Returns the texts to try, short ones first.

    They are the texts in the steps, the characters of these texts, and some common texts.

    Raises:
      UserError: If they are too many.
    """
    strings = set(_strings(steps))
    characters = set().union(*strings)
    # Each character is tried in each step, so this check itself would take long.
    require(
        len(characters) <= _MOST_CHARACTERS,
        f"the steps of its {part_name} must have at most {_MOST_CHARACTERS:,} different "
        f"characters, got {len(characters):,}",
    )
    texts = {*_USUAL_TEXTS, *characters}
    texts |= {text[:_LONGEST_TEXT] for text in strings}
    texts.discard("")
    # A step that makes a character long then ends the check before it is applied to a long text.
    return sorted(texts, key=lambda text: (len(text), text))


def _strings(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            pending += part.values()
