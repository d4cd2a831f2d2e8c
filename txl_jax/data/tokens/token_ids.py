"""Token ids of documents that callers give: texts, or ids that are checked."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_jax.data.tokens.vocabulary import Vocabulary, unescape
from txl_jax.errors import UserError

Document = str | bytes | Sequence[int] | np.ndarray  # A text (bytes: UTF-8, or any for a model of bytes), or ids [T].
Token = str | bytes | int  # A token's text or id.


def encode(vocabulary: Vocabulary, text: str | bytes) -> np.ndarray:
    """Returns the token ids [T] of a text; raises `UserError` if it has characters that the vocabulary lacks."""
    content = _as_bytes(text)
    try:
        return vocabulary.encode(content)
    except ValueError as error:
        raise UserError(f"the text {content[:40]!r} cannot be read by this model: {error}") from None


def token_ids(vocabulary: Vocabulary, document: Document) -> np.ndarray:
    """Returns the token ids [T] of a text, or of the ids themselves.

    Raises:
      UserError: a text that cannot be encoded, or ids outside the vocabulary.
    """
    if isinstance(document, str | bytes):
        return encode(vocabulary, document)
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise UserError(
            f"a document is an array of type {ids.dtype} and shape {ids.shape}; give a text, or integer ids [T]"
        )
    check_range(vocabulary, ids)
    return ids.astype(np.int32)


def check_range(vocabulary: Vocabulary, ids: np.ndarray) -> None:
    """Raises `UserError` for ids outside the vocabulary."""
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary.size:
        raise UserError(
            f"the token ids go from {ids.min()} to {ids.max()} and those of the vocabulary from 0 to "
            f"{vocabulary.size - 1}"
        )


def one_token(vocabulary: Vocabulary, token: Token) -> np.ndarray:
    """Returns the ids [1] of a token given as its id or text; raises `UserError` for a text of another number."""
    ids = token_ids(vocabulary, token if isinstance(token, str | bytes) else [token])
    if len(ids) != 1:
        raise UserError(f"first is {token!r}, which this model reads as {len(ids)} tokens; give one token")
    return ids


def find_token(vocabulary: Vocabulary, text: str, *, name: str) -> int:
    r"""Returns the id of the token that a setting names by its text.

    The token that ends a line is given as a newline or as its own word, `<eos>`.

    Args:
      text: with \n and \r for line ends, as `escape` writes them.
      name: of the setting.

    Raises:
      UserError: the text is not exactly one token of the vocabulary.
    """
    content, names = os.fsencode(unescape(text)), vocabulary.names()
    # Not by `encode`, which puts two marks for a newline between sentences, and takes <S> in lower case for a word.
    if vocabulary.mark is not None and content in (b"\n", names[vocabulary.mark]):
        return vocabulary.mark
    try:
        ids = vocabulary.encode(content).tolist()
    except ValueError as error:
        raise UserError(f"{name} cannot be read by this model: {error}") from None
    if len(ids) == 1 and ids[0] != vocabulary.unknown_id:
        return int(ids[0])
    became = "its unknown token" if ids == [vocabulary.unknown_id] else f"{len(ids)} tokens"
    found = ", ".join(repr(names[token].decode(errors="backslashreplace")) for token in ids[:8])
    raise UserError(
        f"{name} is {text!r}, which this model reads as {became} ({found or 'nothing'}); give the text of one token of "
        "its vocabulary"
    )


def joined(vocabulary: Vocabulary, context: Document, continuation: Document) -> tuple[np.ndarray, int]:
    """Returns the ids [T] of a context and its continuation, and how many of them are the continuation's.

    Two texts are encoded together, so that a word may begin in the context; the continuation's ids are those after as
    many as the context has alone.
    """
    if isinstance(context, str | bytes) and isinstance(continuation, str | bytes):
        ids = encode(vocabulary, _as_bytes(context) + _as_bytes(continuation))
        return ids, max(len(ids) - len(encode(vocabulary, context)), 0)
    parts = token_ids(vocabulary, context), token_ids(vocabulary, continuation)
    return np.concatenate(parts), len(parts[1])


def refuse_single_text(texts: Any) -> None:
    """Raises `UserError` for a string in place of a list of documents: its characters would count as documents."""
    if isinstance(texts, str | bytes):
        raise UserError(f"a single text was given, {texts[:40]!r}; give a list of texts")


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
