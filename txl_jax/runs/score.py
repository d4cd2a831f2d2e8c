"""Scoring a text: its loss at the evaluation lengths, with a progress bar or lines, and a way to stop."""

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.documents import Document, DocumentRows
from txl_jax.data.segments import SegmentReader, evaluation_segments
from txl_jax.data.vocabulary import Vocabulary, escape
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.evaluation.documents import Collect, make_document_step, read_documents
from txl_jax.evaluation.sliding_window import evaluate_windows
from txl_jax.evaluation.streaming import evaluate
from txl_jax.memory import Memory
from txl_jax.metrics import Measure, Totals
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling
from txl_jax.runs.build import RunComponents
from txl_jax.runs.run import Run
from txl_jax.runs.validation import as_result, format_scores, with_duration
from txl_jax.runs.weights import Weights, load_to_score
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.environment import duration
from txl_jax.runtime.storage import as_path, download, is_remote, write_json, write_lines

SPLITS = ("valid", "test")  # The texts that are scored.
_SECONDS_BETWEEN_LINES = 20.0


class Interrupted(Exception):  # noqa: N818 (a request, not an error)
    """A stop was requested while a text was being scored."""


def score(
    components: RunComponents,
    params: Any,
    tokens: Any,
    *,
    name: str,
    measure: Measure = Measure.BPC,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any] = lambda: False,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Computes the losses of a text [T]: streaming with a memory, or, with `eval.stride`, in a sliding window.

    Args:
      name: of the text, in the progress bar and in errors.
      token_nats: floats [T] that take the nats of each token; the first one is not scored and stays as it is.

    Raises:
      Interrupted: a stop was requested before the end.
      NonFiniteError: the loss is nan or infinite.
    """
    progress = functools.partial(progress_bar, name, measure=measure, log=log, stop_requested=stop_requested)
    score_text = _score_stream if components.config.eval.stride is None else _score_windows
    totals = score_text(components, params, tokens, token_nats=token_nats, progress=progress)
    check_finite(totals, name)
    return totals


_Progress = Callable[..., contextlib.AbstractContextManager[Callable[[float, Totals], None]]]


def _score_windows(
    components: RunComponents, params: Any, tokens: Any, *, token_nats: np.ndarray | None, progress: _Progress
) -> Totals:
    eval_config = components.config.eval
    assert eval_config.stride is not None
    with progress(len(tokens) - 1, unit="token") as show:
        return evaluate_windows(
            components.evaluation.window_step,
            params,
            tokens,
            attention_len=eval_config.segment_len,
            stride=eval_config.stride,
            batch_size=eval_config.batch_size,
            after_call=lambda so_far: show(so_far.tokens, so_far),
            token_nats=token_nats,
        )


def _score_stream(
    components: RunComponents, params: Any, tokens: Any, *, token_nats: np.ndarray | None, progress: _Progress
) -> Totals:
    eval_config = components.config.eval
    whole = evaluation_segments(
        tokens,
        batch_size=eval_config.batch_size,
        segment_len=eval_config.segment_len,
        warmup_tokens=eval_config.warmup_tokens,
    )
    # Each process reads the rows of its own devices.
    reader = dataclasses.replace(whole, own=components.placement.own_rows(eval_config.batch_size))
    weights = components.evaluation.prepare_params(params)
    with progress(reader.n_segments, unit="segment") as show:
        return evaluate(
            components.evaluation.eval_step,
            weights,
            components.evaluation.init_memory(weights),
            reader,
            segments_per_call=eval_config.segments_per_call,
            place=functools.partial(components.placement.place, batch_size=eval_config.batch_size),
            after_call=show,
            keep=None if token_nats is None else functools.partial(put_in_text_order, token_nats, whole),
        )


def score_split(
    components: RunComponents,
    params: Any,
    corpus: Corpus,
    split: str,
    *,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Scores the validation or the test text of a corpus as `score` does, and logs the result."""
    began, measure = time.monotonic(), corpus.vocabulary.measure
    totals = score(
        components,
        params,
        getattr(corpus, split),
        name=split,
        measure=measure,
        log=log,
        stop_requested=stop_requested,
        token_nats=token_nats,
    )
    log(with_duration(f"{split} {format_scores(totals, measure)}", time.monotonic() - began))
    return totals


@contextlib.contextmanager
def progress_bar(
    name: str,
    total: int,
    *,
    unit: str,
    measure: Measure,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
) -> Iterator[Callable[[float, Totals], None]]:
    """Shows the progress of scoring: on a terminal a bar, elsewhere a line every 20 seconds.

    Yields:
      A function to call with how much of `total` is done and the scores so far. It raises `Interrupted` once a stop is
      requested.
    """
    began = last_line = time.monotonic()
    # disable=None: no bar unless the error stream is a terminal. leave=False: the result's line takes its place.
    with tqdm.tqdm(total=total, desc=name, unit=unit, leave=False, disable=None) as bar:

        def show(done: float, totals: Totals) -> None:
            nonlocal last_line
            if stop_requested():
                raise Interrupted(name)
            now = time.monotonic()
            # While only warm-up tokens have been read, and for what is no scoring, there is no score to show.
            score_so_far = totals.format(measure) if totals.tokens else ""
            if not bar.disable:
                bar.set_postfix_str(score_so_far, refresh=False)
                bar.update(done - bar.n)
            elif now - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = now
                remaining = (now - began) / done * (total - done) if done else math.nan
                shown_score = f"  {score_so_far} so far" if score_so_far else ""
                log(f"{name}: {done / total:.0%}{shown_score}  ETA {duration(remaining)}")

        yield show


def put_in_text_order(token_nats: np.ndarray, reader: SegmentReader, first: int, nll: np.ndarray) -> None:
    """Writes the nats [S, B, L] of the segments from number `first` on to their tokens' places in floats [T]."""
    scored = reader.scored(first, len(nll))
    token_nats[scored[scored > 0]] = nll[scored > 0]


def check_finite(totals: Totals, name: str) -> None:
    """Raises `NonFiniteError` if the loss of a text is nan or infinite."""
    if not math.isfinite(totals.nats):
        raise NonFiniteError(f"{name}: the summed loss is {totals.nats}, so these parameters cannot be used")


# Documents read by a trained model: losses, greedy matches and hidden states, many documents side by side.


class Likeness(NamedTuple):
    """Losses of a document and whether greedy decoding would have written it."""

    nats: Any  # [T], of each target.
    greedy: Any  # bool [T], whether the target is the likeliest token; of equally likely ones, the lowest id.


class Continuation(NamedTuple):
    """Score of a continuation after its context."""

    logprob: float  # Nats, summed over its tokens; at most 0.
    is_greedy: bool  # Whether greedy decoding after the context would have written it; true of one without tokens.
    tokens: int  # Their number.

    @staticmethod
    def of(found: Likeness, count: int) -> "Continuation":
        """Returns the score of a document's last `count` tokens."""
        nats, greedy = (each[len(each) - count :] for each in found)
        return Continuation(-nats.sum(dtype="float64").item(), bool(greedy.all()), count)


class DocumentReader:
    """The compiled functions that read documents with one model, at the evaluation lengths; each compiled once.

    `eval.stride` and `eval.warmup_tokens` have no effect: a document is read once, from an empty memory.
    """

    def __init__(self, components: RunComponents, weights: Any, *, batch_size: int):
        """Compiles nothing yet.

        Args:
          components: of the run.
          weights: `components.evaluation.prepare_params` of its parameters.
          batch_size: B, documents read side by side.

        Raises:
          UserError: a batch size below 1.
        """
        check_batch_size(batch_size)
        lengths = dataclasses.replace(components.config.eval, batch_size=batch_size, stride=None, warmup_tokens=0)
        config = dataclasses.replace(components.config, eval=lengths)
        self._components = dataclasses.replace(components, config=config)
        self._weights = weights

    def nats(self, source: Iterator[Document]) -> Iterator[np.ndarray]:
        """Yields the nats [T] of each document's targets, in the order of the source."""
        return self._read(source, "nats")

    def likeness(self, source: Iterator[Document]) -> Iterator[Likeness]:
        """Yields the `Likeness` of each document, in the order of the source."""
        return self._read(source, "likeness")

    def hidden_states(self, source: Iterator[Document], *, vectors: bool = False) -> Iterator[np.ndarray]:
        """Yields the final hidden states [T, D] of each document, the softmax's inputs.

        Args:
          source: of documents whose targets are not read.
          vectors: the documents' inputs are vectors [T, D], not ids.

        Raises:
          UserError: vectors for a network that takes token ids only.
        """
        if vectors:
            _takes_embeddings(self._components)
        return self._read(source, "hidden_states", vectors=vectors)

    def _read(self, source: Iterator[Document], what: str, *, vectors: bool = False) -> Iterator[Any]:
        config = self._components.config
        dtype = np.dtype(jnp.promote_types(jnp.float32, config.model.dtype))
        rows = DocumentRows(
            source,
            batch_size=config.eval.batch_size,
            segment_len=config.eval.segment_len,
            segments_per_call=config.eval.segments_per_call,
            vectors=(config.model.d_model, dtype) if vectors else None,
        )
        memory = self._components.evaluation.init_memory(self._weights)
        return read_documents(self._step(what), self._weights, memory, rows, place=self._components.placement.place)

    @functools.cache  # noqa: B019 (a reader lives as long as its compiled programs)
    def _step(self, what: str) -> Callable[..., Any]:
        scorer = self._components.evaluation.scorer
        collect: dict[str, Collect] = {
            "nats": scorer.nll,
            "likeness": lambda *of: Likeness(scorer.nll(*of), self._is_greedy(*of)),
            "hidden_states": lambda weights, hidden, targets: hidden,
        }
        return self._components.jit(make_document_step(scorer, collect[what]), donate_argnums=1)

    def _is_greedy(self, weights: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns whether each target [B, L] is the likeliest token after the hidden states [B, L, D]."""
        model: Any = self._components.model
        if isinstance(model, TransformerXL):
            flat = hidden.reshape(-1, hidden.shape[-1])
            likeliest = sampling.top_k_tokens(flat, weights.clusters, 1)[1].reshape(targets.shape)
        else:
            log_p = model.apply({"params": weights}, hidden, method=model.log_probabilities)
            likeliest = jnp.argmax(log_p, axis=-1)
        return likeliest == targets


def check_batch_size(batch_size: int) -> None:
    """Raises `UserError` for a number of rows below 1."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; give the number of documents read side by side, at least 1")


def to_score(tokens: np.ndarray) -> Document:
    """Returns the document whose targets are all tokens [T] but the first."""
    return Document(tokens[:-1], tokens[1:])


def to_read(inputs: np.ndarray) -> Document:
    """Returns the document of inputs, ids [T] or vectors [T, D], without targets."""
    return Document(inputs, np.zeros(len(inputs), np.int32))


def read_all(documents: Iterable[Document], read: Callable[[Iterator[Document]], Iterator[Any]]) -> list[Any]:
    """Returns the results of documents, in their order; they are read the longest first, so that rows end together."""
    listed = list(documents)
    order = sorted(range(len(listed)), key=lambda i: -len(listed[i].inputs))
    results: list[Any] = [None] * len(listed)
    found = read(listed[i] for i in order)
    for i, result in zip(order, found, strict=True):
        results[i] = result
    return results


def totals(nats: np.ndarray) -> Totals:
    """Returns the sum of nats, in double precision, and their number."""
    return Totals(nats.sum(dtype="float64").item(), float(len(nats)))


def checked_embeddings(vectors: Any, width: int) -> np.ndarray:
    """Returns embeddings as an array; raises `UserError` unless they are floats [T, D]."""
    array = np.asarray(vectors)
    if array.ndim != 2 or array.shape[1] != width or not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"embeddings are of type {array.dtype} and shape {array.shape}; give floats [T, {width}]")
    return array


def make_embed(components: RunComponents) -> Callable[[Any, Any], jax.Array]:
    """Returns the compiled (parameters, ids [B, L]) -> embeddings [B, L, D].

    Raises:
      UserError: a network that takes token ids only.
    """
    model = _takes_embeddings(components)
    return components.jit(lambda params, ids: model.apply({"params": params}, ids, method=model.embed_tokens))


def make_log_probabilities(components: RunComponents) -> Callable[[Any, Any, Memory], tuple[jax.Array, Memory]]:
    """Returns the compiled (parameters, ids [B, L], memory) -> log probabilities [B, L, V] and the new memory."""
    model: Any = components.model  # `apply` returns what its method does.
    eval_config = components.config.eval

    def log_probabilities(params: Any, tokens: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        variables = {"params": params}
        lengths = {"clamp_len": eval_config.clamp_len, "same_length": eval_config.same_length}
        hidden, memory = model.apply(variables, tokens, memory, **lengths)
        return model.apply(variables, hidden, method=model.log_probabilities), memory

    return components.jit(log_probabilities)


def _takes_embeddings(components: RunComponents) -> TransformerXL:
    """Returns the model; raises `UserError` for one that reads token ids only."""
    model = components.model
    if not isinstance(model, TransformerXL):
        raise UserError(f"model.network is {model.config.network}, which reads token ids and no embeddings")
    return model


# Documents of a file: a record of JSON per document, or per token.
#
#     {"index": 0, "nats": 35.17, "tokens": 14}
#     {"index": 1, "nats": 0.0, "tokens": 0}
#
#     {"index": 0, "position": 1, "token": "h", "nats": 2.3841858}
#
# `index` counts the documents from 0 on. The first token of a document is not scored. `token` is its name in the
# vocabulary, with \xNN for a byte that is no character by itself; `nats` is minus the logprob of the token and reads
# back as exactly the number that was computed. `eval.batch_size` documents are read side by side, each from an empty
# memory, so that a document's scores are those that it has alone. Memory does not grow with the length of the file.


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
                download(as_path(path), copy.name)
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


def score_documents(
    model: Weights,
    texts: Iterable[tuple[int, bytes]],
    *,
    name: str,
    per_token: bool,
    write: Callable[[str], Any],
    log: Callable[[str], None] = print,
) -> int:
    """Writes the records of each document as soon as it is scored, in the order of the input; returns their number.

    Args:
      model: a trained model; its config has the evaluation lengths.
      texts: the documents, each after the number of its line.
      name: of the input, in errors.
      per_token: a record per token instead of one per document.
      write: takes the records of a document: lines, each with its newline.

    Raises:
      UserError: there is no checkpoint; a document cannot be encoded. The records before it are written.
      NonFiniteError: the loss of a document is nan or infinite.
    """
    components, vocabulary = model.build(log=log), model.vocabulary
    _, params = model.params(components, log=log)
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


def evaluate_splits(
    config: ExperimentConfig,
    corpus: Corpus,
    run: Run,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Any]:
    """Scores both texts at the evaluation lengths of `config`; returns and writes evaluation.json.

    Another text than that of the training may be scored if its vocabulary is the same.

    Raises:
      UserError: the text has another vocabulary, or the run has no checkpoint.
      Interrupted: a stop was requested.
    """
    components, step, params = load_to_score(config, corpus, run, log=log)
    results: dict[str, Any] = {
        "text": corpus.description,
        "text_sha256": corpus.digest,
        "step": step,
        "eval": config_tree.to_dict(config.eval),
        **environment.describe(),
    }
    for split in SPLITS:
        results[split] = as_result(
            score_split(components, params, corpus, split, log=log, stop_requested=stop_requested)
        )
    path = os.path.join(run.outputs, "evaluation.json")
    distributed.broadcast_from_primary(lambda: write_json(path, results))
    log(f"results   {path}")
    return results


# Tokens: the negative log-likelihood (logprob) of every token of the validation and test text, as TSV.
#
#     index	token	nats
#     1	h	2.3841858
#     2	\n	0.017624786
#
# One line per token but the first, in the order of the text, whatever rows and segments it was read in. `token` is its
# name in the vocabulary with the vocabulary's own escapes, \\ \n \r; further \t, \uNNNN for any other control character
# or line separator, and \xNN for a byte that is no character by itself. `nats` is minus the logprob of the token; it
# reads back as exactly the number that was computed. Like all scores it depends on the evaluation lengths and on
# `eval.batch_size`: every row of the batch begins with an empty memory.

_TOKENS_PER_BLOCK = 1 << 16
# Control characters and line separators: a reader may end a line there, and a terminal may obey them.
_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}]")


def score_tokens(
    config: ExperimentConfig,
    corpus: Corpus,
    run: Run,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Totals]:
    """Scores both texts as `evaluate_splits` does; writes scores-valid.tsv and scores-test.tsv, each when it is done.

    Another text than that of the training may be scored if its vocabulary is the same.

    Raises:
      UserError: the text has another vocabulary, or the run has no checkpoint.
      Interrupted: a stop was requested.
    """
    components, _, params = load_to_score(config, corpus, run, log=log)
    totals = {}
    for split in SPLITS:
        tokens = getattr(corpus, split)
        nats = np.zeros(len(tokens), jnp.promote_types(jnp.float32, config.model.dtype))
        totals[split] = score_split(
            components, params, corpus, split, log=log, stop_requested=stop_requested, token_nats=nats
        )
        path = scores_file(run, split)
        text = lines(tokens, nats, corpus.vocabulary)
        distributed.broadcast_from_primary(functools.partial(write_lines, path, text))
        log(f"scores    {path}")
    return totals


def scores_file(run: Run, split: str) -> str:
    """Returns the path of a text's scores."""
    return os.path.join(run.outputs, f"scores-{split}.tsv")


def lines(tokens: np.ndarray, nats: np.ndarray, vocabulary: Vocabulary) -> Iterator[str]:
    """Yields the lines of the file for integer ids [T] and the nats [T] of each; the first token is left out."""
    names = list(map(printable, vocabulary.names()))
    yield "index\ttoken\tnats\n"
    for first in range(1, len(tokens), _TOKENS_PER_BLOCK):
        block = slice(first, first + _TOKENS_PER_BLOCK)
        # numpy writes the fewest digits that give the number back.
        rows = zip(itertools.count(first), tokens[block].tolist(), nats[block].astype(str).tolist(), strict=False)
        yield from (f"{index}\t{names[token]}\t{value}\n" for index, token, value in rows)


def printable(name: bytes) -> str:
    r"""Escapes tabs, line breaks, control characters and invalid UTF-8 in a token's name.

    >>> printable(b"a\tb"), printable("\n\N{LINE SEPARATOR}".encode()), printable("é".encode()[:1])
    ('a\\tb', '\\n\\u2028', '\\xc3')
    """
    text = escape(name.decode(errors="surrogateescape")).replace("\t", "\\t")
    text = _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
