r"""The job that scores the documents of a file: a record of JSON per document, or per token.

    {"index": 0, "nats": 35.17, "tokens": 14}
    {"index": 1, "nats": 0.0, "tokens": 0}

    {"index": 0, "position": 1, "token": "h", "nats": 2.3841858}

`index` counts the documents from 0 on. The first token of a document is not scored. `token` is its name in the
vocabulary, with \xNN for a byte that is no character by itself; `nats` is minus the logprob of the token and reads back
as exactly the number that was computed. `eval.batch_size` documents are read side by side, each from an empty memory,
so that a document's scores are those that it has alone. Memory does not grow with the length of the file.
"""

import collections
import enum
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from txl_jax.data.batches.document_rows import Document
from txl_jax.data.tokens.vocabulary import Vocabulary
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.jobs.document_reader import DocumentReader, to_score, totals
from txl_jax.jobs.pretrained import Pretrained
from txl_jax.runtime.paths import as_path, is_remote


class InputFormat(enum.StrEnum):
    """What a document of an input is."""

    LINES = "lines"  # Each line.
    DOCUMENTS = "documents"  # The lines between empty ones.


def open_input(path: str) -> BinaryIO:
    """Opens a file, or a copy of a remote one.

    Raises:
      UserError: If it cannot be read.
    """
    try:
        if is_remote(path):
            with tempfile.NamedTemporaryFile() as copy:  # Its name goes; its bytes go with the descriptor.
                as_path(path).download(copy.name)  # type: ignore[attr-defined]
                return open(copy.name, "rb")
        return open(path, "rb")
    except OSError as error:
        hint = "give /dev/stdin for standard input" if path == "-" else "check --input"
        raise UserError(f"cannot read the input {path} ({error.strerror}); {hint}") from None


def documents(lines: Iterable[bytes], form: InputFormat) -> Iterator[tuple[int, bytes]]:
    """Yields the documents, without the newline at their end, each after the number of its first line, from 1 on."""
    held: list[bytes] = []  # The lines of a document whose end was not read yet.
    number = 0
    for number, line in enumerate(lines, start=1):
        if form is InputFormat.LINES:
            yield number, line.removesuffix(b"\n")
        elif line.strip():
            held.append(line)
        elif held:
            yield number - len(held), b"".join(held).removesuffix(b"\n")
            held = []
    if held:
        yield number - len(held) + 1, b"".join(held).removesuffix(b"\n")


def run(
    pretrained: Pretrained,
    texts: Iterable[tuple[int, bytes]],
    *,
    name: str,
    per_token: bool,
    write: Callable[[str], Any],
    log: Callable[[str], None] = print,
) -> int:
    """Writes the records of each document as soon as it is scored, in the order of the input; returns their number.

    Args:
      pretrained: the trained model; its config has the evaluation lengths.
      texts: the documents, each after the number of its line.
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
    reader = DocumentReader(components, weights, batch_size=components.config.eval.batch_size)
    read: collections.deque[tuple[int, np.ndarray]] = collections.deque()  # (line, ids), until they are written.
    names = [token.decode(errors="backslashreplace") for token in vocabulary.names()] if per_token else []
    count = 0
    for nats in reader.nats(_encoded(texts, vocabulary, name, read)):
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


def _encoded(
    texts: Iterable[tuple[int, bytes]],
    vocabulary: Vocabulary,
    name: str,
    read: collections.deque[tuple[int, np.ndarray]],
) -> Iterator[Document]:
    """Yields the documents to score; adds the line and the ids of each to `read`."""
    for line, text in texts:
        try:
            ids = vocabulary.encode(text)
        except ValueError as error:
            raise UserError(f"line {line} of {name} cannot be read by this model: {error}") from None
        read.append((line, ids))
        yield to_score(ids)


def _token_records(index: int, ids: np.ndarray, nats: np.ndarray, names: list[str]) -> Iterator[str]:
    """Yields the records of the tokens [T] of a document, which have nats [T - 1]; the first token is left out."""
    # numpy writes the fewest digits that give the number back.
    values = map(float, nats.astype(str).tolist())
    for position, (token, value) in enumerate(zip(ids[1:].tolist(), values, strict=True), start=1):
        record = {"index": index, "position": position, "token": names[token], "nats": value}
        yield json.dumps(record) + "\n"
