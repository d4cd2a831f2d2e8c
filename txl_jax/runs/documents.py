"""Reads many documents in parallel with one model: losses, likely tokens, hidden states."""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config.config_tree import require
from txl_jax.data.documents import Call, DocumentRows, Pairs
from txl_jax.errors import UserError
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling
from txl_jax.recurrence import Segments
from txl_jax.runs.build import Built
from txl_jax.runtime import distributed


class Likeness(NamedTuple):
    """Losses of a document's targets [T], and whether greedy decoding would choose each target."""

    # Floats [T].
    nats: Any
    # bool [T], whether the target is the most likely token. If tokens are equally likely, the one
    # with the lowest id counts.
    greedy: Any


class _Kind(enum.Enum):
    """Kind of result that is computed at each position of a document."""

    NATS = enum.auto()
    LIKENESS = enum.auto()
    HIDDEN_STATES = enum.auto()


class _RunningCall(NamedTuple):
    """A call whose results have not been fetched from the device."""

    call: Call
    results: Any  # Tree of arrays [S, B, L, ..].


class _Carry(NamedTuple):
    """State that the reading of one segment passes to the next."""

    memory: Any
    results: Any  # Tree of arrays [S, B, L, ..], zero for segments that were not read.


class DocumentReader:
    """Runs one model over documents, each from an empty memory.

    It reads at the evaluation lengths, without stride or warm-up.

    One compiled function of fixed shape [S, B, L] reads any number of documents of any lengths, and
    a document's results are the same as by itself. They come in order. If the documents' iterator
    raises, the results before the error come first.
    """

    def __init__(self, built: Built, prepared: Any, *, batch_size: int):
        """Takes prepared parameters and the number of documents to read in parallel.

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
        """Yields the nats [T - 1] of all tokens except the first of each document, ids [T]."""
        return self._read(map(_inputs_and_targets, tokens), _Kind.NATS)

    def likeness(self, tokens: Iterable[np.ndarray]) -> Iterator[Likeness]:
        """Yields the `Likeness` [T - 1] of all tokens except the first of each document [T]."""
        return self._read(map(_inputs_and_targets, tokens), _Kind.LIKENESS)

    def hidden_states(
        self, inputs: Iterable[np.ndarray], *, vectors: bool = False
    ) -> Iterator[np.ndarray]:
        """Yields the final hidden states [T, D] of each document.

        A document is passed as ids [T] or, with `vectors`, as floats [T, D].
        """
        if vectors:
            takes_embeddings(self._built)
        # Targets do not matter for hidden states, but a document needs as many as it has inputs.
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

            # A loop instead of a `lax.scan`, so that segments without documents take no time.
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
        # Copied, because otherwise a short document's result would keep the whole array in memory.
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

    The longest documents are read first, so that rows end together.
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
            f"embeddings require a Transformer-XL, got model.network={model.config.network}, which "
            "takes only token ids."
        )
    return model
