"""Documents that a trained model reads: losses, greedy matches and hidden states of many texts, in the rows of a batch.

Each document starts from an empty memory, and its results are the ones that it has alone. One program of fixed shape
[S, B, L] reads any number of documents of any lengths. How they share its rows is in `txl_jax.data.documents`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.data.documents import Call, Document, DocumentRows, Part
from txl_jax.errors import UserError
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.inference.scorer import Scorer
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling
from txl_jax.runs.build import RunComponents
from txl_jax.runtime import distributed
from txl_jax.segments import Segments


class Likeness(NamedTuple):
    """Losses of a document's targets [T], and which of them greedy decoding would have written."""

    nats: Any  # Floats [T].
    greedy: Any  # bool [T], whether the target is the most likely token. Of equally likely tokens, the lowest id is.


class DocumentReader:
    """The compiled functions that read documents with one model, at the evaluation lengths; each is compiled once.

    `eval.stride` and `eval.warmup_tokens` have no effect: a document is read once. The results come in the order of the
    documents. If the iterator of documents raises `UserError`, the results of the documents before it come first.
    """

    def __init__(self, components: RunComponents, weights: Any, *, batch_size: int):
        """Takes prepared parameters (`EvaluationFunctions.prepare_params`), and the number of documents side by side.

        Raises:
          UserError: If `batch_size` is below 1.
        """
        check_batch_size(batch_size)
        lengths = dataclasses.replace(components.config.eval, batch_size=batch_size, stride=None, warmup_tokens=0)
        config = dataclasses.replace(components.config, eval=lengths)
        self._components = dataclasses.replace(components, config=config)
        self._weights = weights

    def nats(self, tokens: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the nats [T - 1] of all tokens but the first of each document, ids [T]."""
        return self._read((Document(ids[:-1], ids[1:]) for ids in tokens), "nats")

    def likeness(self, tokens: Iterable[np.ndarray]) -> Iterator[Likeness]:
        """Yields the `Likeness` [T - 1] of all tokens but the first of each document, ids [T]."""
        return self._read((Document(ids[:-1], ids[1:]) for ids in tokens), "likeness")

    def hidden_states(self, inputs: Iterable[np.ndarray], *, vectors: bool = False) -> Iterator[np.ndarray]:
        """Yields the final hidden states [T, D] of each document, ids [T] or, with `vectors`, floats [T, D].

        Raises:
          UserError: If the inputs are vectors and the network takes only token ids.
        """
        if vectors:
            takes_embeddings(self._components)
        documents = (Document(each, np.zeros(len(each), np.int32)) for each in inputs)
        return self._read(documents, "hidden_states", vectors=vectors)

    def _read(self, source: Iterator[Document], what: str, *, vectors: bool = False) -> Iterator[Any]:
        """Yields the results of each document, a tree of arrays [T, ..]."""
        config, step = self._components.config, self._step(what)
        dtype = np.dtype(jnp.promote_types(jnp.float32, config.model.dtype))
        rows = DocumentRows(
            source,
            batch_size=config.eval.batch_size,
            segment_len=config.eval.segment_len,
            segments_per_call=SEGMENTS_PER_CALL,
            vectors=(config.model.d_model, dtype) if vectors else None,
        )
        memory = self._components.evaluation.init_memory(self._weights)
        finished: dict[int, Any] = {}
        kept: dict[int, list[Any]] = {}  # Documents that are being read.
        pending: tuple[Call, Any] | None = None
        while pending is not None or not rows.ended:
            call, following = rows.next_call(), None
            if call is not None:
                segments = self._components.placement.place(call.segments)
                memory, results = step(self._weights, memory, segments, np.int32(call.n_segments))
                following = call, results
            if pending is not None:  # Fetched one call late, so that the device never waits for the host.
                _finish(pending[0].parts, jax.tree.map(distributed.to_host, pending[1]), kept, finished)
                while rows.delivered in finished:
                    rows.delivered += 1
                    yield finished.pop(rows.delivered - 1)
            pending = following
        if rows.error is not None:
            raise rows.error

    @functools.cache  # noqa: B019 (a reader lives as long as its compiled programs)
    def _step(self, what: str) -> Callable[..., Any]:
        """Returns the compiled function of `_make_step`, with the memory donated."""
        scorer = self._components.evaluation.scorer
        collect: dict[str, Callable[[Any, jax.Array, jax.Array], Any]] = {
            "nats": scorer.nll,
            "likeness": lambda *of: Likeness(scorer.nll(*of), self._is_greedy(*of)),
            "hidden_states": lambda weights, hidden, targets: hidden,
        }
        return self._components.jit(_make_step(scorer, collect[what]), donate_argnums=1)

    def _is_greedy(self, weights: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns whether each target [B, L] is the most likely token after the hidden states [B, L, D]."""
        model: Any = self._components.model
        if isinstance(model, TransformerXL):
            flat = hidden.reshape(-1, hidden.shape[-1])
            likeliest = sampling.top_k_tokens(flat, weights.clusters, 1)[1].reshape(targets.shape)
        else:
            log_p = model.apply({"params": weights}, hidden, method=model.log_probabilities)
            likeliest = jnp.argmax(log_p, axis=-1)
        return likeliest == targets


def read_all(documents: Iterable[np.ndarray], read: Callable[[Iterator[np.ndarray]], Iterator[Any]]) -> list[Any]:
    """Returns the results of documents in their order. The longest are read first, so that rows end together."""
    listed = list(documents)
    order = sorted(range(len(listed)), key=lambda i: -len(listed[i]))
    found = dict(zip(order, read(listed[i] for i in order), strict=True))
    return [found[i] for i in range(len(listed))]


def check_batch_size(batch_size: int) -> None:
    """Raises `UserError` if a batch size is below 1."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; give the number of documents read side by side, at least 1")


def takes_embeddings(components: RunComponents) -> TransformerXL:
    """Returns the model, or raises `UserError` if it takes only token ids."""
    model = components.model
    if not isinstance(model, TransformerXL):
        raise UserError(f"model.network is {model.config.network}, which reads token ids and no embeddings")
    return model


def _make_step(scorer: Scorer, collect: Callable[[Any, jax.Array, jax.Array], Any]) -> Callable[..., tuple[Any, Any]]:
    """Returns (weights, memory, segments, their number) -> (memory, results [S, B, L, ..]).

    Args:
      scorer: The forward pass.
      collect: (weights, hidden states [B, L, D], targets [B, L]) -> the results to keep, a tree of arrays [B, L, ..].
    """

    def document_step(weights: Any, memory: Any, segments: Segments, count: Any) -> tuple[Any, Any]:
        def read(memory: Any, segment: Any) -> tuple[Any, Any]:
            memory = scorer.reset(weights, memory, segment.reset)
            hidden, memory = scorer.forward(weights, memory, segment.inputs)
            return memory, collect(weights, hidden, segment.targets)

        def body(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            memory, results = carry
            memory, found = read(memory, jax.tree.map(lambda array: array[i], segments))
            return memory, jax.tree.map(lambda kept, new: kept.at[i].set(new), results, found)

        n_segment = segments.targets.shape[0]
        _, shapes = jax.eval_shape(read, memory, jax.tree.map(lambda array: array[0], segments))
        results = jax.tree.map(lambda shape: jnp.zeros((n_segment, *shape.shape), shape.dtype), shapes)
        # A loop instead of a `lax.scan`: few documents fill few of the S segments, and the others take no time.
        memory, results = jax.lax.fori_loop(0, count, body, (memory, results))
        return memory, results

    return document_step


def _finish(parts: list[Part], results: Any, kept: dict[int, list[Any]], finished: dict[int, Any]) -> None:
    """Moves the results [S, B, L, ..] of a call to their documents, and complete documents to `finished`."""
    for part in parts:
        here = part.segment, part.row, slice(part.length)
        # Copied, or a short document's result would keep the whole array.
        found = jax.tree.map(lambda array, here=here: array[here].copy(), results)
        kept.setdefault(part.number, []).append(found)
        if part.ends:
            pieces = kept.pop(part.number)
            finished[part.number] = (
                pieces[0] if len(pieces) == 1 else jax.tree.map(lambda *each: np.concatenate(each), *pieces)
            )
