"""Encodes the arguments of callers: documents and prompts (texts or ids), and tokens by name."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_jax.config.config_tree import require
from txl_jax.data.vocabulary import Vocabulary, check_ids, unescape
from txl_jax.errors import UserError, rephrased

# A text (bytes: UTF-8, or any for a model of bytes), or ids [T].
Document = str | bytes | Sequence[int] | np.ndarray
# A token's text or id.
Token = str | bytes | int
# Maximum number of characters of a text that an error shows.
_SHOWN_CHARACTERS = 40
# Maximum number of tokens that an error names.
_SHOWN_TOKENS = 8


def token_ids(vocabulary: Vocabulary, document: Document, *, name: str = "") -> np.ndarray:
    """Returns the token ids [T] of a document.

    Args:
      name: Name of a text for errors, or "" for its first characters.

    Raises:
      UserError: If the text cannot be encoded, or the document is neither a text nor integer ids
        of the vocabulary. An empty one has 0 ids.
    """
    if isinstance(document, str | bytes):
        text_name = name or f"the text {document[:_SHOWN_CHARACTERS]!r}"
        with rephrased(f"{text_name} cannot be read by this model: %s", ValueError):
            return vocabulary.encode(_bytes(document))

    ids = np.asarray(document)
    # An empty list is an array of floats.
    is_ids = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
    require(
        is_ids,
        f"a document must be a text or integer ids [T], got {ids.dtype} of shape {ids.shape}",
    )
    return check_ids(ids, vocabulary.size).astype(np.int32)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def one_token(vocabulary: Vocabulary, token: Token) -> np.ndarray:
    """Returns the ids [1] of a token by its id or text.

    Raises:
      UserError: If a text is not exactly one token.
    """
    document = token if isinstance(token, str | bytes) else [token]
    ids = token_ids(vocabulary, document)
    require(
        len(ids) == 1,
        f"first must be one token, got {token!r}, which this model encodes as {len(ids)} tokens",
    )
    return ids


def find_tokens(
    vocabulary: Vocabulary, text: str, *, name: str, several: bool = False
) -> list[int]:
    r"""Returns the ids of the token that a setting names by its text.

    In the text, \n, \r and \t stand for white space. The token that ends a line is named by a
    newline or by its own word, `<eos>`.

    Args:
      text: The setting's value.
      name: The setting's name, for errors.
      several: Whether the text may be more than one token.

    Raises:
      UserError: If the text is not exactly one token of the vocabulary, or, with `several`, one or
        more.
    """
    content = os.fsencode(unescape(text))
    names = vocabulary.names()
    # `encode` is not used, because it inserts two marks for a newline between sentences, and treats
    # a lower-case <S> as a word.
    if vocabulary.mark is not None and content in (b"\n", names[vocabulary.mark]):
        return [vocabulary.mark]

    with rephrased(f"{name} cannot be read by this model: %s", ValueError):
        ids: list[int] = vocabulary.encode(content).tolist()
    has_right_length = len(ids) == 1 or (several and len(ids) > 1)
    if not has_right_length or vocabulary.unknown_id in ids:
        number = "tokens" if several else "one token"
        shown = [names[token].decode(errors="backslashreplace") for token in ids[:_SHOWN_TOKENS]]
        raise UserError(
            f"{name} must be the text of {number} of the vocabulary, got {text!r}, "
            f"which this model reads as {len(ids)} tokens, {shown}"
        )
    return ids


def joined(
    vocabulary: Vocabulary, context: Document, continuation: Document
) -> tuple[np.ndarray, int]:
    """Returns the ids [T] of a context and its continuation, and the continuation's number of ids.

    Two texts are encoded together, because a token may begin in the context and end in the
    continuation. The continuation's ids start at the first id that differs from the ids of the
    context by itself. An empty continuation has 0 ids.

    Raises:
      UserError: If a document cannot be encoded, or a non-empty continuation does not add a token
        to its context.
    """
    if isinstance(context, str | bytes) and isinstance(continuation, str | bytes):
        ids = token_ids(vocabulary, _bytes(context) + _bytes(continuation))
        # Counting the ids beyond the context's would give 0 for a continuation that only lengthens
        # its last token.
        count = len(ids) - _common_length(ids, token_ids(vocabulary, context))
    else:
        continuation_ids = token_ids(vocabulary, continuation)
        ids = np.concatenate([token_ids(vocabulary, context), continuation_ids])
        count = len(continuation_ids)

    if not len(continuation):
        return ids, 0
    # Without a token of its own, its logprob would be 0, and it would win every comparison.
    if not count:
        raise UserError(
            "a continuation must add a token to its context, "
            f"got {continuation[:_SHOWN_CHARACTERS]!r} after {context[-_SHOWN_CHARACTERS:]!r}, "
            "which this model reads as the same tokens. Pass another continuation."
        )
    return ids, count


def _common_length(ids: np.ndarray, others: np.ndarray) -> int:
    """Returns the length of the common prefix of two arrays of ids [T]."""
    shorter = min(len(ids), len(others))
    differences = np.flatnonzero(ids[:shorter] != others[:shorter])
    return int(differences[0]) if len(differences) else shorter


def refuse_single_text(texts: Any) -> None:
    """Raises `UserError` for a string instead of a list of documents.

    Otherwise, the string's characters would count as documents.
    """
    if isinstance(texts, str | bytes):
        raise UserError(
            f"texts must be a list of texts, got {texts[:_SHOWN_CHARACTERS]!r}. Write [text]."
        )
