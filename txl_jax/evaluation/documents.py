"""Reading of documents: the model reads many texts in the rows of a batch, each from an empty memory.

One program of fixed shape [S, B, L] reads any number of documents of any lengths; how they share its rows is in
`txl_jax.data.documents`. A document's results are those that it has alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.data.documents import Call, DocumentRows, Part
from txl_jax.inference.scorer import Scorer
from txl_jax.runtime import distributed
from txl_jax.segments import Segments

# (weights, hidden [B, L, D], targets int [B, L]) -> tree of arrays [B, L, ..]
Collect = Callable[[Any, jax.Array, jax.Array], Any]
# (weights, memory, segments, number of segments) -> (memory, tree of arrays [S, B, L, ..])
DocumentStep = Callable[[Any, Any, Segments, Any], tuple[Any, Any]]


def make_document_step(scorer: Scorer, collect: Collect) -> DocumentStep:
    """Returns a function that reads the first of S segments, ready for `jax.jit` with the memory donated.

    Args:
      scorer: the forward pass.
      collect: of the results to keep of each position.
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


def read_documents(
    step: DocumentStep, weights: Any, memory: Any, rows: DocumentRows, *, place: Callable[[Segments], Segments]
) -> Iterator[Any]:
    """Yields the results of each document, a tree of arrays [T, ..], in the order of the source.

    If the source raises `UserError`, the results of the documents before it come first.

    Args:
      step: compiled, of `make_document_step`.
      memory: any memory of the right shape; it is donated.
      place: puts segments on the devices.
    """
    finished: dict[int, Any] = {}
    kept: dict[int, list[Any]] = {}  # Of documents that are being read.
    pending: tuple[Call, Any] | None = None
    while True:
        call = rows.next_call()
        following = None
        if call is not None:
            memory, results = step(weights, memory, place(call.segments), np.int32(call.n_segments))
            following = call, results
        if pending is not None:  # Fetched one call late, so that the device never waits for the host.
            _finish(pending[0].parts, jax.tree.map(distributed.to_host, pending[1]), kept, finished)
            while rows.delivered in finished:
                rows.delivered += 1
                yield finished.pop(rows.delivered - 1)
        pending = following
        if pending is None and rows.ended:
            break
    if rows.error is not None:
        raise rows.error


def _finish(parts: list[Part], results: Any, kept: dict[int, list[Any]], finished: dict[int, Any]) -> None:
    """Moves the results [S, B, L, ..] of a call to their documents, and those that are complete to `finished`."""
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
