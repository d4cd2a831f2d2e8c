"""Refuses a tokenizer.json whose steps let a text grow without bound.

A file of 2 kB can ask for k normalizers that each replace "a" by "aa", which make 2^k characters of
one, in a library that Ctrl-C does not reach. So each step is first applied to short texts, one step
after the other, before the package sees all of them. `txl_jax.data.subwords` calls `check` for
every tokenizer, wherever it comes from.
"""

import base64
import json
import string
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from txl_jax.config.config_tree import require

# Parts of a tokenizer.json, the name of a sequence's steps, and how the package's object of the
# part is applied.
_PARTS: dict[str, tuple[str, Callable[[Any, str], Iterable[str]]]] = {
    "normalizer": ("normalizers", lambda normalizer, text: [normalizer.normalize_str(text)]),
    "pre_tokenizer": (
        "pretokenizers",
        lambda splitter, text: [part for part, _ in splitter.pre_tokenize_str(text)],
    ),
    "decoder": ("decoders", lambda decoder, text: [decoder.decode([text])]),
}
# Of one part. Published tokenizers have up to ten.
_MOST_STEPS = 32
# Characters from one. Unicode's NFKC makes up to 18 of one, and bytes as characters up to 4.
_MOST_GROWTH = 32
# Characters that steps may add to a text of any length, such as a space before it.
_MOST_ADDED = 256
# Of a text, so that what is added to each outweighs what is added once.
_REPEATS = 16
# Characters of a replacement. Published ones have up to ten.
_LONGEST_TEXT = 256
# Distinct ones in the steps, each of which is tried.
_MOST_CHARACTERS = 4096
# ASCII, a composed letter, one that is two in upper case, a wide one, one of four bytes, and one
# that NFKC makes 18.
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

    `settings` are a tokenizer.json's, and `lib` is the package tokenizers, any of whose exceptions
    may be raised.
    """
    for part, (of_sequence, apply) in _PARTS.items():
        steps = list(_steps(settings.get(part), of_sequence))
        require(
            len(steps) <= _MOST_STEPS,
            f"its {part} must have at most {_MOST_STEPS} steps, got {len(steps)}",
        )
        _check_contents(part, steps)
        grown = [(text * _REPEATS, text * _REPEATS) for text in _texts_of(part, steps)]
        for step in steps:
            tokenizer = lib.Tokenizer.from_str(json.dumps({**_NO_MODEL, part: step}))
            grown = [(first, _grow(first, text, part, tokenizer, apply)) for first, text in grown]


def _grow(
    first: str, text: str, part: str, tokenizer: Any, apply: Callable[[Any, str], Iterable[str]]
) -> str:
    """Returns a text after one more step.

    Raises `UserError` if it is too long compared with `first`, the text before all steps.
    """
    longer = "".join(apply(getattr(tokenizer, part), text))
    wrong = f"its {part} must not make a text more than {_MOST_GROWTH} times as long"
    is_short = len(longer) <= _MOST_GROWTH * len(first) + _MOST_ADDED
    require(is_short, f"{wrong}, got {len(longer):,} characters from {len(first):,}")
    return longer


def _check_contents(part: str, steps: list[Any]) -> None:
    """Raises `UserError` if one step may make a character arbitrarily long.

    A step can do this with a long text or with a table of texts.
    """
    tables = 0
    for step in filter(lambda step: isinstance(step, dict), steps):
        content = step.get("content")
        length = len(content) if isinstance(content, str) else 0
        table = step.get("precompiled_charsmap")
        # SentencePiece's: the size of a trie, the trie, and texts that end in a zero byte.
        if isinstance(table, str):
            tables += 1
            packed = base64.b64decode(table)
            texts = packed[4 + int.from_bytes(packed[:4], "little") :]
            length = max(map(len, texts.split(b"\0")))
        wrong = (
            f"a replacement of its {part} must have at most {_LONGEST_TEXT} "
            f"characters, got {length:,}"
        )
        require(length <= _LONGEST_TEXT, wrong)
    require(tables <= 1, f"its {part} must have at most one table of characters, got {tables}")


def _steps(step: Any, of_sequence: str) -> Iterator[Any]:
    """Yields the steps of a part in order, with sequences replaced by their own steps."""
    pending = [step]
    while pending:
        first = pending.pop()
        if isinstance(first, dict) and first.get("type") == "Sequence":
            pending += reversed(first.get(of_sequence) or ())
        elif first is not None:
            yield first


def _texts_of(part: str, steps: list[Any]) -> list[str]:
    """Returns the texts to try, short ones first.

    They are the texts in the steps, the characters of these texts, and some usual texts.

    Raises `UserError` if they are too many.
    """
    strings = set(_strings(steps))
    characters = set().union(*strings)
    many = f"the steps of its {part} must have at most {_MOST_CHARACTERS:,} different characters"
    require(len(characters) <= _MOST_CHARACTERS, f"{many}, got {len(characters):,}")
    found = {*_USUAL_TEXTS, *characters, *(text[:_LONGEST_TEXT] for text in strings)} - {""}
    # A step that makes a character long then ends the check before it is applied to a long text.
    return sorted(found, key=lambda text: (len(text), text))


def _strings(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value."""
    pending = [value]
    while pending:
        first = pending.pop()
        if isinstance(first, str):
            yield first
        elif isinstance(first, list | dict):
            pending += first.values() if isinstance(first, dict) else first
