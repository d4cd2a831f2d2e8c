"""Scores of a trained model: the losses of a text, of a corpus, and of many documents.

Both splits of a corpus are scored. Documents are scored side by side.
"""

import collections
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import EvalConfig, ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.data import ready_ids
from txl_jax.data.corpus import Corpus
from txl_jax.data.documents import Call, DocumentRows, Pairs
from txl_jax.data.text import BYTE_ORDER_MARK
from txl_jax.data.vocabulary import MOST_UNKNOWN, Vocabulary, escape
from txl_jax.errors import UserError, rephrased
from txl_jax.evaluation.sliding_window import evaluate_windows, window_batches
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL, evaluate
from txl_jax.metrics import Measure, Totals
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling
from txl_jax.recurrence import Segments
from txl_jax.runs.build import Built
from txl_jax.runs.dynamic import NamedDocument, document_config
from txl_jax.runs.dynamic_statistics import learning_model
from txl_jax.runs.run import Run
from txl_jax.runs.scoring_progress import check_finite, progress_bar
from txl_jax.runs.trained import TrainedModel, load_to_score
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import as_path, download, is_remote, write_json, write_lines

_TOKENS_PER_BLOCK = 1 << 16
# Control characters and line separators. A reader may end a line there, and a terminal may obey
# control characters.
_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}]")


class Split(enum.StrEnum):
    """A split that is scored."""

    VALID = "valid"
    TEST = "test"


def score(
    built: Built,
    params: Any,
    tokens: Any,
    *,
    name: str,
    measure: Measure = Measure.BPC,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any] = lambda: False,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Computes the losses of a text, either streaming or in a sliding window.

    The text is streamed with a memory or, with `eval.stride`, scored in a sliding window. The first
    token is not scored.

    Args:
      built: The model, with the evaluation lengths.
      params: Its parameters, as in training.
      tokens: Ids [T] of the text.
      name: Name of the text, for progress and errors.
      measure: The measure in which progress is shown.
      log: Takes a line of progress.
      stop_requested: Is asked after each call.
      token_nats: Floats [T] that receive each token's loss in nats, or None.

    Returns:
      The sum of the losses, and the number of scored tokens.

    Raises:
      Interrupted: If a stop was requested.
      NonFiniteError: If the loss is nan or infinite.
    """
    lengths = built.config.eval
    progress = functools.partial(
        progress_bar, name, measure=measure, log=log, stop_requested=stop_requested
    )
    if lengths.stride is not None:
        with progress(len(tokens) - 1, unit="token") as show:
            batches = window_batches(
                tokens,
                attention_len=lengths.segment_len,
                stride=lengths.stride,
                batch_size=lengths.batch_size,
            )
            totals = evaluate_windows(
                built.window_step,
                params,
                batches,
                after_call=lambda so_far: show(so_far.tokens, so_far),
                token_nats=token_nats,
            )
    else:
        reader = built.evaluation_reader(tokens)
        prepared = built.prepare_params(params)
        with progress(reader.n_segments, unit="segment") as show:
            totals = evaluate(
                built.eval_step,
                prepared,
                built.init_memory(prepared),
                reader,
                place=functools.partial(built.place, batch_size=lengths.batch_size),
                after_call=show,
                token_nats=token_nats,
            )
    check_finite(totals, name)
    return totals


def score_with_line(
    built: Built,
    params: Any,
    tokens: Any,
    *,
    name: str,
    vocabulary: Vocabulary,
    **options: Any,
) -> tuple[Totals, str]:
    """Scores a text like `score`. Returns the totals, and a line about them and the time they took.

    The totals include the number of bytes of the text if the vocabulary knows it.
    """
    score_text = functools.partial(score, built, params)
    return _with_line(score_text, tokens, name=name, vocabulary=vocabulary, **options)


def _with_line(
    score_text: Callable[..., Totals],
    tokens: Any,
    *,
    name: str,
    vocabulary: Vocabulary,
    **options: Any,
) -> tuple[Totals, str]:
    """Scores a text by `score_text`, and else does what `score_with_line` does.

    `score_text` takes tokens and options as `score` does after the parameters.
    """
    began = time.monotonic()
    measure = vocabulary.measure
    totals = score_text(tokens, name=name, measure=measure, **options)
    totals = dataclasses.replace(totals, bytes=vocabulary.count_bytes(tokens[1:]))
    line = f"{name} {format_scores(totals, measure)}"
    if totals.bytes and measure is Measure.PPL:
        line += f"  {vocabulary.per_byte.replace('_', ' ')} {totals.bits_per_byte:.4f}"
    line += f"  in {environment.duration(time.monotonic() - began)}"
    return totals, line


class Kind(enum.StrEnum):
    """How a split is scored, where both ways are reported side by side."""

    STATIC = "static"  # With the parameters as they were trained.
    DYNAMIC = "dynamic"  # Learning from each segment after it was scored (`runs.dynamic`).


def evaluate_splits(
    config: ExperimentConfig,
    corpus: Corpus,
    model: Run | TrainedModel,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Any]:
    """Scores both splits at the evaluation lengths of `config`. Returns and writes evaluation.json.

    With `eval.dynamic.rule` they are scored twice, static and dynamic, and the results are below
    these two keys.

    The text may differ from the training text if its vocabulary is the same. After `Interrupted`
    nothing is written.
    """
    trained = TrainedModel.of(model, config)
    _check_dynamic(trained)
    folder = trained.outputs()
    built, step, params = load_to_score(config, corpus, trained, log=say)
    results: dict[str, Any] = {
        "text": corpus.description,
        "text_sha256": corpus.digest,
        "step": step,
        "eval": config_tree.to_dict(config.eval),
        **environment.describe(),
    }

    def results_of(score_text: Callable[..., Totals], kind: Kind | None) -> dict[str, Any]:
        scored_splits = _score_splits(score_text, trained, corpus, stop_requested, kind=kind)
        return {
            str(scored.split): as_result(scored.totals, corpus.vocabulary)
            for scored in scored_splits
        }

    static = functools.partial(score, built, params)
    if config.eval.dynamic.rule is None:
        results |= results_of(static, None)
    else:
        # Before the first score, because a text that cannot be learned from is an error.
        dynamic_model = learning_model(
            trained, params, corpus=corpus, folder=folder, stop_requested=stop_requested
        )
        results[Kind.STATIC] = results_of(static, Kind.STATIC)
        results[Kind.DYNAMIC] = results_of(dynamic_model.score, Kind.DYNAMIC)

    if folder is not None:
        path = os.path.join(folder, "evaluation.json")
        distributed.broadcast_from_primary(lambda: write_json(path, results))
        print(f"results   {path}")
    return results


def _check_dynamic(trained: TrainedModel) -> None:
    """Raises `UserError` if a member of an ensemble would learn from averaged checkpoints."""
    settings = trained.config.eval
    is_member = isinstance(trained.source, Run) and trained.source.member is not None
    require(
        settings.dynamic.rule is None or not settings.average_checkpoints or not is_member,
        f"eval.average_checkpoints must be none for eval.dynamic.rule={settings.dynamic.rule} with "
        f"a member of an ensemble, got {settings.average_checkpoints}. Split the member off first "
        "(python -m experiments.ensemble --mode=split).",
    )


def score_tokens(
    config: ExperimentConfig,
    corpus: Corpus,
    model: Run | TrainedModel,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Totals]:
    r"""Scores both splits like `evaluate_splits`.

    With `eval.dynamic.rule` each token's loss is the one before it was learned.

    Writes scores-valid.tsv and scores-test.tsv, each when it is done.

        index	token	nats
        1	h	2.3841858
        2	\n	0.017624786

    There is a line for each token but the first, in the order of the text, with its name as
    `printable` escapes it. `nats` is minus its logprob, and reads back as exactly the number that
    was computed. It depends on the evaluation lengths and on `eval.batch_size`: every row of the
    batch begins with an empty memory.
    """
    totals: dict[str, Totals] = {}
    trained = TrainedModel.of(model, config)
    _check_dynamic(trained)
    folder = trained.outputs(needed=True) or ""
    built, _, params = load_to_score(config, corpus, trained, log=say)
    if config.eval.dynamic.rule is None:
        kind = None
        score_text: Callable[..., Totals] = functools.partial(score, built, params)
    else:
        kind = Kind.DYNAMIC
        dynamic_model = learning_model(
            trained, params, corpus=corpus, folder=folder, stop_requested=stop_requested
        )
        score_text = dynamic_model.score

    # Each file is written before the next split is scored.
    scored_splits = _score_splits(
        score_text, trained, corpus, stop_requested, kind=kind, per_token=True
    )
    for scored in scored_splits:
        totals[scored.split] = scored.totals
        path = os.path.join(folder, f"scores-{scored.split}.tsv")
        lines = token_lines(getattr(corpus, scored.split), scored.nats, corpus.vocabulary)
        distributed.broadcast_from_primary(functools.partial(write_lines, path, lines))
        print(f"scores    {path}")
    return totals


class _ScoredSplit(NamedTuple):
    """The scores of one split."""

    split: Split
    totals: Totals
    # Floats [T], the nats of the split's tokens, or None if they were not asked for.
    nats: Any


def _score_splits(
    score_text: Callable[..., Totals],
    trained: TrainedModel,
    corpus: Corpus,
    stop_requested: Callable[[], Any],
    *,
    kind: Kind | None,
    per_token: bool = False,
) -> Iterator[_ScoredSplit]:
    """Scores each split when it is asked for.

    Args:
      score_text: Scores tokens, as `score` does after the parameters.
      trained: The model.
      corpus: The splits.
      stop_requested: Asked while a split is scored.
      kind: Named in the lines about the scores, or None for no name.
      per_token: Whether to return the nats of tokens.
    """
    vocabulary = corpus.vocabulary
    scored: _ScoredSplit | None = None
    line = ""
    suffix = f" {kind}" if kind else ""
    for split in Split:
        tokens = getattr(corpus, split)
        if scored is not None and np.array_equal(corpus.valid, tokens):
            scores = line.removeprefix(Split.VALID).rpartition("  in ")[0]  # Without the time.
            print(f"{split}{scores}")
            print(
                f"note      {split} is the same text as {Split.VALID}, so it was not scored again"
            )
            yield scored._replace(split=split)
            continue

        nats = None
        if per_token:
            dtype = jnp.promote_types(jnp.float32, trained.config.model.dtype)
            nats = np.zeros(len(tokens), dtype)
        totals, line = _with_line(
            score_text,
            tokens,
            name=f"{split}{suffix}",
            vocabulary=vocabulary,
            log=print,
            stop_requested=stop_requested,
            token_nats=nats,
        )
        print(line)
        if not totals.bytes:
            note_unknown(
                vocabulary.count_unknown(tokens[1:]),
                len(tokens) - 1,
                "so bits per byte cannot be computed",
            )
        scored = _ScoredSplit(split, totals, nats)
        yield scored


def note_unknown(unknown: int, tokens: int, consequence: str) -> None:
    """Prints a note about unknown tokens if there are more than one in a thousand."""
    if unknown > MOST_UNKNOWN * tokens:
        print(
            f"note      {unknown / tokens:.2%} of the tokens are unknown, {consequence}", flush=True
        )


class Likeness(NamedTuple):
    """Losses of a document's targets [T], and which of them greedy decoding would have written."""

    # Floats [T].
    nats: Any
    # bool [T], whether the target is the most likely token. If tokens are equally likely, it is the
    # one with the lowest id.
    greedy: Any


class _Kind(enum.Enum):
    """What is computed at each position of a document."""

    NATS = enum.auto()
    LIKENESS = enum.auto()
    HIDDEN_STATES = enum.auto()


class _RunningCall(NamedTuple):
    """A call whose results have not been fetched from the device."""

    call: Call
    results: Any  # Tree of arrays [S, B, L, ..].


class _Carry(NamedTuple):
    """What the reading of one segment hands to the next."""

    memory: Any
    results: Any  # Tree of arrays [S, B, L, ..], zero for segments that were not read.


class DocumentReader:
    """Reader that runs one model over documents, each from an empty memory.

    It reads at the evaluation lengths, without stride or warm-up.

    One compiled function of fixed shape [S, B, L] reads any number of documents of any lengths, and
    a document's results are the same as by itself. They come in order, also before an error of the
    documents' iterator.
    """

    def __init__(self, built: Built, prepared: Any, *, batch_size: int):
        """Takes prepared parameters and the number of documents to read side by side.

        `Built.prepare_params` prepares the parameters.
        """
        check_batch_size(batch_size)
        lengths = dataclasses.replace(
            built.config.eval, batch_size=batch_size, stride=None, warmup_tokens=0
        )
        config = dataclasses.replace(built.config, eval=lengths)
        self._built = dataclasses.replace(built, config=config)
        self._prepared = prepared

    def nats(self, tokens: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the nats [T - 1] of all tokens but the first of each document, ids [T]."""
        return self._read(map(_inputs_and_targets, tokens), _Kind.NATS)

    def likeness(self, tokens: Iterable[np.ndarray]) -> Iterator[Likeness]:
        """Yields the `Likeness` [T - 1] of all tokens but the first of each document, ids [T]."""
        return self._read(map(_inputs_and_targets, tokens), _Kind.LIKENESS)

    def hidden_states(
        self, inputs: Iterable[np.ndarray], *, vectors: bool = False
    ) -> Iterator[np.ndarray]:
        """Yields the final hidden states [T, D] of each document.

        A document is passed as ids [T] or, with `vectors`, as floats [T, D].
        """
        if vectors:
            takes_embeddings(self._built)
        # Targets do not matter here, but a document needs as many as it has inputs.
        documents = (Pairs(document, np.zeros(len(document), np.int32)) for document in inputs)
        return self._read(documents, _Kind.HIDDEN_STATES, vectors=vectors)

    def _read(
        self, source: Iterator[Pairs], kind: _Kind, *, vectors: bool = False
    ) -> Iterator[Any]:
        """Yields the results of each document, a tree of arrays [T, ..]."""
        config = self._built.config
        step = self._step(kind)
        # Size D and dtype of inputs that are vectors. Ids need neither.
        inputs_form: tuple[int, np.dtype] | None = None
        if vectors:
            dtype = np.dtype(jnp.promote_types(jnp.float32, config.model.dtype))
            inputs_form = (config.model.d_model, dtype)
        rows = DocumentRows(
            source,
            batch_size=config.eval.batch_size,
            segment_len=config.eval.segment_len,
            segments_per_call=SEGMENTS_PER_CALL,
            vectors=inputs_form,
        )
        memory = self._built.init_memory(self._prepared)

        # Results of parts, by the number of their document, until its last part is read.
        pieces: dict[int, list[Any]] = collections.defaultdict(list)
        # Results of whole documents, by number, until those before them are delivered.
        finished: dict[int, Any] = {}
        running: _RunningCall | None = None
        while running is not None or not rows.ended:
            following: _RunningCall | None = None
            call = rows.next_call()
            if call is not None:
                segments = self._built.place(call.segments)
                memory, results = step(self._prepared, memory, segments, np.int32(call.n_segments))
                following = _RunningCall(call, results)
            # Results are fetched one call late, so that the device never waits for the host.
            if running is not None:
                _fetch(running, pieces, finished)
                while rows.delivered in finished:
                    rows.delivered += 1
                    yield finished.pop(rows.delivered - 1)
            running = following
        if rows.error is not None:
            raise rows.error

    @functools.cache  # noqa: B019 (a reader lives as long as its compiled programs)
    def _step(self, kind: _Kind) -> Callable[..., Any]:
        """Returns a compiled function that reads segments, starting from a memory.

        It maps (prepared parameters, memory, segments, number of segments) to (memory, results
        [S, B, L, ..]). The memory is donated.
        """
        scorer = self._built.scorer

        def document_step(
            prepared: Any, memory: Any, segments: Segments, count: Any
        ) -> tuple[Any, Any]:
            def read(memory: Any, segment: Any) -> tuple[Any, Any]:
                memory = scorer.reset(prepared, memory, segment.reset)
                hidden, memory = scorer.forward(prepared, memory, segment.inputs)
                return memory, self._results(kind, prepared, hidden, segment.targets)

            def read_segment(i: jax.Array, carry: _Carry) -> _Carry:
                segment = jax.tree.map(lambda array: array[i], segments)
                memory, new = read(carry.memory, segment)
                results = jax.tree.map(
                    lambda whole, part: whole.at[i].set(part), carry.results, new
                )
                return _Carry(memory, results)

            # Zeros in the shapes of the results of all segments.
            n_segment = segments.targets.shape[0]
            first = jax.tree.map(lambda array: array[0], segments)
            _, shapes = jax.eval_shape(read, memory, first)
            results = jax.tree.map(
                lambda shape: jnp.zeros((n_segment, *shape.shape), shape.dtype), shapes
            )

            # A loop instead of a `lax.scan`: few documents fill few of the S segments, and the
            # others take no time.
            carry = jax.lax.fori_loop(0, count, read_segment, _Carry(memory, results))
            return carry.memory, carry.results

        return self._built.jit(document_step, donate_argnums=1)

    def _results(self, kind: _Kind, prepared: Any, hidden: jax.Array, targets: jax.Array) -> Any:
        """Returns the results of one segment, a tree of arrays [B, L, ..].

        They are computed from the hidden states [B, L, D] and the targets [B, L].
        """
        if kind is _Kind.HIDDEN_STATES:
            return hidden
        nats = self._built.scorer.nll(prepared, hidden, targets)
        if kind is _Kind.NATS:
            return nats
        return Likeness(nats, self._is_greedy(prepared, hidden, targets))

    def _is_greedy(self, prepared: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns whether each target [B, L] is the most likely token after the hidden states.

        The hidden states are [B, L, D].
        """
        model: Any = self._built.model
        if isinstance(model, TransformerXL):
            flat = hidden.reshape(-1, hidden.shape[-1])
            _, tokens = sampling.top_k_tokens(flat, prepared.clusters, 1)
            most_likely = tokens.reshape(targets.shape)
        else:
            log_p = model.apply({"params": prepared}, hidden, method=model.log_probabilities)
            most_likely = jnp.argmax(log_p, axis=-1)
        return most_likely == targets


def _inputs_and_targets(ids: np.ndarray) -> Pairs:
    return Pairs(ids[:-1], ids[1:])


def _fetch(running: _RunningCall, pieces: dict[int, list[Any]], finished: dict[int, Any]) -> None:
    """Fetches a call's results: adds parts to `pieces`, and moves whole documents to `finished`."""
    results = jax.tree.map(distributed.to_host, running.results)
    for part in running.call.parts:
        place = (part.segment, part.row, slice(part.length))
        # Copied, or a short document's result would keep the whole array.
        piece = jax.tree.map(lambda array, place=place: array[place].copy(), results)
        pieces[part.number].append(piece)
        if part.ends:
            document_pieces = pieces.pop(part.number)
            finished[part.number] = jax.tree.map(
                lambda *arrays: np.concatenate(arrays), *document_pieces
            )


def read_all(
    documents: Iterable[np.ndarray], read: Callable[[Iterator[np.ndarray]], Iterator[Any]]
) -> list[Any]:
    """Returns the results of documents in their order.

    The longest are read first, so that rows end together.
    """
    listed = list(documents)
    order = sorted(range(len(listed)), key=lambda number: -len(listed[number]))
    results: list[Any] = [None] * len(listed)
    in_order = read(listed[number] for number in order)
    for number, result in zip(order, in_order, strict=True):
        results[number] = result
    return results


def check_batch_size(batch_size: int) -> None:
    """Raises `UserError` if a batch size is below 1."""
    require(
        batch_size >= 1,
        f"batch_size (documents read in parallel) must be at least 1, got {batch_size}",
    )


def takes_embeddings(built: Built) -> TransformerXL:
    """Returns the model, or raises `UserError` if it takes only token ids."""
    model = built.model
    if not isinstance(model, TransformerXL):
        raise UserError(
            f"model.network is {model.config.network}, which takes only token ids, not embeddings"
        )
    return model


class InputFormat(enum.StrEnum):
    """How an input is split into documents."""

    LINES = "lines"  # Each line.
    DOCUMENTS = "documents"  # The lines between empty ones.


def open_input(path: str) -> BinaryIO:
    """Opens a file, or a copy of a remote one. Raises `UserError` if it cannot be read."""
    hint = "For standard input, pass /dev/stdin." if path == "-" else "Check --input."
    with rephrased(f"cannot read the input {path} (%s). {hint}", OSError):
        if is_remote(path):
            # The copy loses its name here, and its bytes when the returned file is closed.
            with tempfile.NamedTemporaryFile() as copy:
                download(as_path(path), copy.name)
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

    # Lines in succession that are not blank are one document.
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

    `index` counts the documents, which are read as by `DocumentReader`. With `eval.dynamic.rule`
    they are read one after the other as by `DynamicModel.score_documents`, and each loss is the one
    before it was learned. The first token of each is not scored. `bytes` is missing if the
    vocabulary does not know the bytes of its tokens. `token` is its name in the vocabulary, with
    \xNN for a byte that is not a whole character. `nats` is minus the logprob, and reads back as
    exactly the number that was computed. At the end a note is printed if more than one in a
    thousand tokens are unknown.

    Args:
      model: The trained model.
      texts: The documents, each after the number of its line.
      name: Name of the input. Errors name it and the number of the line.
      per_token: Whether to write a record per token instead of one per document.
      write: Takes a document's records, lines with their newlines. It gets the records before an
        error too.

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
        "which makes them look likely. Check that the text is of the model's kind.",
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

    _check_dynamic(model)
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
    """Encodes each document when it is asked for. Errors name the input `name` and the line."""
    for line, text in texts:
        yield _Document(line, ready_ids.token_ids(vocabulary, text, name=f"line {line} of {name}"))


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
    # numpy writes the fewest digits that give the number back.
    values = map(float, nats.astype(str).tolist())
    for position, (token, value) in enumerate(zip(targets.tolist(), values, strict=True), start=1):
        yield {"index": index, "position": position, "token": token_names[token], "nats": value}


def as_record(totals: Totals, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the fields of a result in metrics.jsonl and results.json."""
    record = totals.per_token(vocabulary.measure)
    if totals.bytes:
        record |= {vocabulary.per_byte: totals.bits_per_byte}
    return record | {"tokens": totals.tokens}


def as_result(totals: Totals, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns `as_record` for a JSON file, with null for a perplexity that is too large.

    A perplexity is too large if it is above the largest float, which happens in a run that
    diverged.
    """
    record: dict[str, Any] = as_record(totals, vocabulary)
    if math.isfinite(record["perplexity"]):
        return record
    return record | {
        "perplexity": None,
        "note": "the loss is too large for a perplexity: exp(loss) overflows",
    }


def format_scores(totals: Totals, measure: Measure) -> str:
    """Formats one line of a result, the usual measure first."""
    perplexity = f"  {totals.format(Measure.PPL)}" if measure.is_bits else ""
    return (
        f"{totals.format(measure)}  loss {totals.nll:.4f}{perplexity}  "
        f"({totals.tokens:,.0f} tokens)"
    )


def token_lines(tokens: np.ndarray, nats: np.ndarray, vocabulary: Vocabulary) -> Iterator[str]:
    """Yields the lines of scores-*.tsv for ids [T] and their nats [T].

    The first token is omitted.
    """
    names = list(map(printable, vocabulary.names()))
    yield "index\ttoken\tnats\n"
    for first in range(1, len(tokens), _TOKENS_PER_BLOCK):
        block = slice(first, first + _TOKENS_PER_BLOCK)
        block_tokens = tokens[block].tolist()
        # numpy writes the fewest digits that give the number back.
        values = nats[block].astype(str).tolist()
        for offset, (token, value) in enumerate(zip(block_tokens, values, strict=True)):
            yield f"{first + offset}\t{names[token]}\t{value}\n"


def printable(name: bytes) -> str:
    r"""Escapes special characters in a token's name so that it can be printed on one line.

    It escapes tabs, line breaks, control characters, invalid UTF-8, and a quotation mark at the
    start of the name.

    >>> printable(b"a\tb"), printable("\n\N{LINE SEPARATOR}".encode()), printable("é".encode()[:1])
    ('a\\tb', '\\n\\u2028', '\\xc3')
    >>> printable(b'"a"')
    '\\u0022a"'
    """
    text = escape(name.decode(errors="surrogateescape")).replace("\t", "\\t")
    text = _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    # Readers of tables take a quotation mark for the start of a cell that may have several lines.
    if text.startswith('"'):
        text = f"\\u{ord(text[0]):04x}{text[1:]}"
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
