"""Scores the documents of an input, which are lines or paragraphs, as JSON records."""

import enum
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from txl_jax.config import EvalConfig
from txl_jax.data import encode
from txl_jax.data.text import BYTE_ORDER_MARK
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import rephrased
from txl_jax.metrics import Totals
from txl_jax.runs.documents import DocumentReader
from txl_jax.runs.dynamic import NamedDocument, check_can_learn, document_config
from txl_jax.runs.dynamic_statistics import learning_model
from txl_jax.runs.score import note_unknown
from txl_jax.runs.scoring_progress import check_finite
from txl_jax.runs.trained import TrainedModel
from txl_jax.runtime import remote
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import as_path, is_remote


class InputFormat(enum.StrEnum):
    """How an input is split into documents."""

    LINES = "lines"  # Each line is a document.
    DOCUMENTS = "documents"  # Documents are separated by empty lines.


def open_input(path: str) -> BinaryIO:
    """Opens a file, or a copy of a remote one. Raises `UserError` if it cannot be read."""
    hint = "For standard input, pass /dev/stdin." if path == "-" else "Check --input."
    with rephrased(f"cannot read the input {path} (%s). {hint}", OSError):
        if is_remote(path):
            # The copy is unlinked now, and its bytes are freed when the returned file is closed.
            with tempfile.NamedTemporaryFile() as copy:
                remote.download(as_path(path), copy.name)
                return open(copy.name, "rb")
        return open(path, "rb")


def documents(
    lines: Iterable[bytes], form: InputFormat, *, as_bytes: bool = False
) -> Iterator[tuple[int, bytes]]:
    r"""Yields each document after the number of its first line, counted from 1.

    Documents come without the newline at their end.

    Unless they are read `as_bytes`, the \r of that newline and the file's byte-order mark are
    dropped too.
    """
    if as_bytes:
        mark = b""
        newline = b"\n"
    else:
        mark = BYTE_ORDER_MARK.encode()
        newline = b"\r\n"
    numbered = _numbered(lines, mark)
    if form is InputFormat.LINES:
        for number, line in numbered:
            yield number, line.removesuffix(newline).removesuffix(b"\n")
        return

    # Successive lines that are not blank form one document.
    for has_text, group in itertools.groupby(numbered, lambda pair: bool(pair[1].strip())):
        if has_text:
            numbers, texts = zip(*group, strict=True)
            yield numbers[0], b"".join(texts).removesuffix(newline).removesuffix(b"\n")


def _numbered(lines: Iterable[bytes], mark: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields lines with their numbers, counted from 1, and drops the mark before the first."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            yield number, line.removeprefix(mark)
        else:
            yield number, line


def score_documents(
    model: TrainedModel,
    texts: Iterable[tuple[int, bytes]],
    *,
    name: str,
    per_token: bool,
    write: Callable[[str], Any],
) -> None:
    r"""Writes the JSON records of each document as soon as it is scored.

    There is one record per document or, with `per_token`, one per token:

        {"index": 0, "nats": 35.17, "tokens": 14, "bytes": 14}

        {"index": 0, "position": 1, "token": "h", "nats": 2.3841858}

    `index` counts the documents, which `DocumentReader` reads. With `eval.dynamic.rule`,
    `DynamicModel.score_documents` reads them one after the other, and each loss is computed before
    it is learned. The first token of each document is not scored. `bytes` is missing if the
    vocabulary does not know the bytes of its tokens. `token` is its name in the vocabulary, with
    \xNN for a byte that is not a whole character. `nats` is the negative logprob, and reads back as
    exactly the number that was computed. At the end a note is printed if more than one in a
    thousand tokens are unknown.

    Args:
      model: The trained model.
      texts: The documents, each after the number of its line.
      name: Name of the input. Errors name it and the number of the line.
      per_token: Whether to write a record per token instead of one per document.
      write: Receives a document's records, lines with their newlines. It also gets the records
        before an error.

    Raises:
      UserError: If the model has no checkpoint, or a document cannot be encoded.
      NonFiniteError: If the loss of a document is nan or infinite.
    """
    vocabulary = model.vocabulary
    # The second iterator stores only the documents that are being read.
    to_read, to_report = itertools.tee(_encoded(texts, vocabulary, name=name))
    losses = _document_losses(model, to_read, name=name)
    token_names: list[str] = []
    if per_token:
        token_names = [token.decode(errors="backslashreplace") for token in vocabulary.names()]

    n_unknown = 0
    n_token = 0
    for index, (nats, document) in enumerate(zip(losses, to_report, strict=True)):
        targets = document.ids[1:]
        n_unknown += vocabulary.count_unknown(targets)
        n_token += len(nats)
        totals = Totals.of(nats)
        check_finite(totals, f"line {document.line} of {name}")
        records: Iterable[dict[str, Any]]
        if per_token:
            records = _token_records(index, targets, nats, token_names)
        else:
            records = [_document_record(index, totals, vocabulary.count_bytes(targets))]
        write("".join(json.dumps(record) + "\n" for record in records))
    note_unknown(
        n_unknown,
        n_token,
        "which makes them look likely. Check that the text suits the model.",
    )


def _document_losses(
    model: TrainedModel, documents: Iterable["_Document"], *, name: str
) -> Iterator[np.ndarray]:
    """Loads the model, and returns an iterator of each document's nats [T - 1].

    Errors name the input `name` and the line.
    """
    built = model.build(log=say)
    lengths = built.config.eval
    if lengths.dynamic.rule is None:
        _, params = model.params(built, log=say)
        prepared = built.prepare_params(params)
        reader = DocumentReader(built, prepared, batch_size=lengths.batch_size)
        return reader.nats(document.ids for document in documents)

    check_can_learn(model)
    _, params = model.params(built, log=say)
    at_document_lengths = TrainedModel.of(model, document_config(model.config))
    dynamic_model = learning_model(at_document_lengths, params)
    named_documents = (
        NamedDocument(f"line {document.line} of {name}", document.ids) for document in documents
    )
    return _noting_short(dynamic_model.score_documents(named_documents), lengths)


def _noting_short(losses: Iterator[np.ndarray], lengths: EvalConfig) -> Iterator[np.ndarray]:
    """Yields the nats [T - 1] of documents, and at the end prints a note if nothing was learned."""
    longest = 0
    for nats in losses:
        longest = max(longest, len(nats))
        yield nats
    if not lengths.dynamic.shared and longest <= lengths.segment_len:
        print(
            "note      nothing was learned before it was scored, because no document is longer "
            f"than a segment ({lengths.segment_len} tokens). To learn from the documents before, "
            "pass --eval.dynamic.shared=true.",
            flush=True,
        )


class _Document(NamedTuple):
    """A document of an input."""

    line: int  # Number of its first line, from 1.
    ids: np.ndarray  # int32 [T].


def _encoded(
    texts: Iterable[tuple[int, bytes]], vocabulary: Vocabulary, *, name: str
) -> Iterator[_Document]:
    """Encodes each document when it is needed. Errors name the input `name` and the line."""
    for line, text in texts:
        yield _Document(line, encode.token_ids(vocabulary, text, name=f"line {line} of {name}"))


def _document_record(index: int, totals: Totals, n_byte: int) -> dict[str, Any]:
    """Returns the record of a document. The number of its bytes is 0 if unknown."""
    record = {"index": index, "nats": totals.nats, "tokens": int(totals.tokens)}
    if n_byte:
        record["bytes"] = n_byte
    return record


def _token_records(
    index: int, targets: np.ndarray, nats: np.ndarray, token_names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the records of a document's targets [T] and their nats [T]."""
    # numpy writes the fewest digits that reproduce the number.
    values = map(float, nats.astype(str).tolist())
    for position, (token, value) in enumerate(zip(targets.tolist(), values, strict=True), start=1):
        yield {"index": index, "position": position, "token": token_names[token], "nats": value}
