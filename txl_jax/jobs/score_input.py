r"""The job that scores documents of an input as they come: a record of JSON per document, or per token.

    {"index": 0, "nats": 35.17, "tokens": 14}
    {"index": 1, "nats": 0.0, "tokens": 0}

    {"index": 0, "position": 1, "token": "h", "nats": 2.3841858}

`index` counts the documents from 0 on. The first token of a document is not scored. `token` is its name in the
vocabulary, with \xNN for a byte that is no character by itself; `nats` is minus the logprob of the token and reads back
as exactly the number that was computed. `eval.batch_size` documents are read side by side, each from an empty memory,
so that a document's scores are those that it has alone. Memory stays the same however long the input becomes.
"""

import collections
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from txl_jax.data.batches.document_rows import Document, End, Source
from txl_jax.data.sources.input_text import InputReader, InputText
from txl_jax.data.tokens.vocabulary import Vocabulary
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.jobs.document_reader import DocumentReader, to_score, totals
from txl_jax.jobs.pretrained import Pretrained


def run(
    pretrained: Pretrained,
    reader: InputReader,
    *,
    name: str,
    per_token: bool,
    write: Callable[[str], Any],
    log: Callable[[str], None] = print,
) -> int:
    """Writes the records of each document as soon as it is scored, in the order of the input; returns their number.

    Args:
      pretrained: the trained model; its config has the evaluation lengths.
      reader: of the input.
      name: of the input, in errors.
      per_token: a record per token instead of one per document.
      write: takes the records of a document: lines, each with its newline.

    Raises:
      UserError: there is no checkpoint; a document cannot be encoded. The records before it are written.
      NonFiniteError: the loss of a document is nan or infinite.
    """
    components, vocabulary = pretrained.assemble(log=log), pretrained.vocabulary
    _, params = pretrained.load_params(components, log=log)
    weights = components.evaluation.prepare_params(params)
    documents = DocumentReader(components, weights, batch_size=components.config.eval.batch_size)
    read: collections.deque[tuple[int, np.ndarray]] = collections.deque()  # (line, ids), until they are written.
    names = [token.decode(errors="backslashreplace") for token in vocabulary.names()] if per_token else []
    count = 0
    for nats in documents.nats(_source(reader, vocabulary, name, read)):
        line, ids = read.popleft()
        total = totals(nats)
        if not math.isfinite(total.nats):
            raise NonFiniteError(
                f"line {line} of {name}: the summed loss is {total.nats}, so these parameters cannot be used"
            )
        if per_token:
            write("".join(_token_records(count, ids, nats, names)))
        else:
            write(json.dumps({"index": count, "nats": total.nats, "tokens": int(total.tokens)}) + "\n")
        count += 1
    return count


def _source(
    reader: InputReader, vocabulary: Vocabulary, name: str, read: collections.deque[tuple[int, np.ndarray]]
) -> Source:
    """Returns the source of the input's documents; it adds what it returns to `read`."""

    def take(wait: bool) -> Document | type[End] | None:
        found = reader.next(wait=wait)
        if found is None:
            return End if reader.ended else None
        ids = _encode(vocabulary, found, name)
        read.append((found.line, ids))
        return to_score(ids)

    return take


def _encode(vocabulary: Vocabulary, found: InputText, name: str) -> np.ndarray:
    try:
        return vocabulary.encode(found.text)
    except ValueError as error:
        raise UserError(f"line {found.line} of {name} cannot be read by this model: {error}") from None


def _token_records(index: int, ids: np.ndarray, nats: np.ndarray, names: list[str]) -> Iterator[str]:
    """Yields the records of the tokens [T] of a document, which have nats [T - 1]; the first token is left out."""
    # numpy writes the fewest digits that give the number back.
    values = map(float, nats.astype(str).tolist())
    for position, (token, value) in enumerate(zip(ids[1:].tolist(), values, strict=True), start=1):
        record = {"index": index, "position": position, "token": names[token], "nats": value}
        yield json.dumps(record) + "\n"
