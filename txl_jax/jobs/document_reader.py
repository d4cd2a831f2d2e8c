"""Documents read by a trained model: losses, greedy matches and hidden states, many documents side by side."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.assemble import RunComponents
from txl_jax.data.batches.document_rows import Document, DocumentRows
from txl_jax.errors import UserError
from txl_jax.evaluation.documents import Collect, make_document_step, read_documents
from txl_jax.memory import Memory
from txl_jax.metrics import Totals
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling


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
