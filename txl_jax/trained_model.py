"""A trained model with its vocabulary: scores of documents, generation, hidden states, log probabilities."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, Literal, overload

import jax
import numpy as np

from txl_jax.config import ExperimentConfig, GenerateConfig
from txl_jax.data import ready_ids
from txl_jax.data.ready_ids import Document, Token, refuse_single_text
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.inference.batch_generator import BatchGenerator
from txl_jax.inference.forward import for_single_tokens
from txl_jax.inference.generator import Weights
from txl_jax.memory import Memory
from txl_jax.metrics import Totals
from txl_jax.runs.build import RunComponents
from txl_jax.runs.generate import Ends, check_can_generate, check_stop, generate_pieces, make_generator, read_stop
from txl_jax.runs.score import (
    Continuation,
    DocumentReader,
    check_batch_size,
    checked_embeddings,
    make_embed,
    make_log_probabilities,
    read_all,
    to_read,
    to_score,
    totals,
)
from txl_jax.runs.weights import open_weights
from txl_jax.runtime import distributed

_BATCH_SIZE = 8  # Documents read side by side.


def load(
    path: str | PathLike[str],
    *,
    member: str | None = None,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
) -> "LanguageModel":
    """Loads a portable folder, or the best parameters of a run, or the latest where nothing was evaluated yet.

    Args:
      path: the run's workdir, or a folder that `python -m experiments.convert` wrote.
      member: the member of an ensemble, as "seed=2"; None: the run is none.
      weight_dtype: "int8" for quantized weights (`eval.weight_dtype`); None: as the model was saved.
      cache_dtype: "bfloat16" or "int8" for the KV cache (`eval.cache_dtype`); None: as the model was saved.

    Raises:
      UserError: there is no such run, member, checkpoint or type, or it cannot be read.
    """
    found = open_weights(path, member=member, weight_dtype=weight_dtype, cache_dtype=cache_dtype)
    components = found.build()
    step, params = found.params(components)
    return LanguageModel(components, found.vocabulary, params, step)


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A trained model; made by `load`. Memory and segment lengths are those of `config.eval`.

    A document is a text (str, or bytes of UTF-8; a model of bytes takes any bytes) or a sequence of token ids. Each
    starts from an empty memory, and its results are those that it has alone. `batch_size` documents are read side by
    side, in one compiled program for any number and lengths; each needs a KV cache of `config.eval.mem_len` slots.

    Attributes:
      components: the config, the Flax module and the mesh.
      vocabulary: text to token ids and back.
      params: the parameters.
      step: number of updates after which they were saved.
    """

    components: RunComponents
    vocabulary: Vocabulary
    params: Any
    step: int

    @property
    def config(self) -> ExperimentConfig:
        """The settings of the run."""
        return self.components.config

    @overload
    def score(
        self,
        documents: Iterable[Document],
        *,
        per_token: Literal[False] = ...,
        first: Token | None = ...,
        batch_size: int = ...,
    ) -> list[Totals]: ...

    @overload
    def score(
        self,
        documents: Iterable[Document],
        *,
        per_token: Literal[True],
        first: Token | None = ...,
        batch_size: int = ...,
    ) -> list[np.ndarray]: ...

    def score(
        self,
        documents: Iterable[Document],
        *,
        per_token: bool = False,
        first: Token | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> list[Totals] | list[np.ndarray]:
        """Computes the loss in nats, minus the logprob, of each document.

        Args:
          documents: texts or token ids, of any lengths, also empty.
          per_token: returns the losses of single tokens instead of sums.
          first: the token that precedes each document, an id or the text of one token; then all T tokens are scored.
            None: the first token is not scored, and T - 1 are.
          batch_size: documents read side by side.

        Returns:
          Per document the summed nats and the number of scored tokens; or an array of their nats, floats [T - 1] ([T]
          with `first`).

        Raises:
          UserError: a text that cannot be encoded, ids outside the vocabulary, or a single text instead of a list.
        """
        refuse_single_text(documents)
        tokens = self._with_first(map(self._ids, documents), first)
        scored = read_all(map(to_score, tokens), self._reader(batch_size).nats)
        return scored if per_token else list(map(totals, scored))

    def score_stream(
        self,
        documents: Iterable[Document],
        *,
        per_token: bool = False,
        first: Token | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> Iterator[Totals | np.ndarray]:
        """Yields what `score` returns, in the order of the documents, which may be without end.

        At most 16 documents per row are held. If one cannot be encoded, the results before it come first.

        Raises:
          UserError: as `score`.
        """
        refuse_single_text(documents)
        tokens = self._with_first(map(self._ids, documents), first)
        scored = self._reader(batch_size).nats(map(to_score, tokens))
        return scored if per_token else map(totals, scored)

    def score_continuations(
        self,
        pairs: Iterable[tuple[Document, Document]],
        *,
        first: Token | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> list[Continuation]:
        """Computes the logprob of each continuation given its context, and whether it is the greedy one.

        Args:
          pairs: (context, continuation). Two texts are encoded together, so that a word may begin in the context; the
            continuation's tokens are those after as many as the context has alone.
          first: the token that precedes a continuation without context, an id or the text of one token; None: the one
            that generation without a prompt continues.
          batch_size: pairs read side by side.

        Raises:
          UserError: as `score`.
        """
        before = self.vocabulary.start if first is None else ready_ids.one_token(self.vocabulary, first)
        documents: list[np.ndarray] = []
        lengths: list[int] = []
        for context, continuation in pairs:
            ids, count = ready_ids.joined(self.vocabulary, context, continuation)
            lengths.append(count)
            documents.append(ids if count < len(ids) else np.concatenate([before, ids]))
        found = read_all(map(to_score, documents), self._reader(batch_size).likeness)
        return [Continuation.of(each, count) for each, count in zip(found, lengths, strict=True)]

    def hidden_states(
        self,
        documents: Iterable[Document] | None = None,
        *,
        embeddings: Iterable[Any] | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> list[np.ndarray]:
        """Computes the hidden states of the last layer, the softmax's inputs, of each document.

        Args:
          documents: texts or token ids [T].
          embeddings: in place of documents: floats [T, D], as `embed` returns.
          batch_size: documents read side by side.

        Returns:
          Floats [T, D] per document.

        Raises:
          UserError: documents and embeddings are both given or both not; embeddings of another width; as `score`.
        """
        if (documents is None) == (embeddings is None):
            raise UserError("hidden_states reads either documents or embeddings; give one of them")
        reader = self._reader(batch_size)
        if documents is not None:
            refuse_single_text(documents)
            return read_all(map(to_read, map(self._ids, documents)), reader.hidden_states)
        width = self.config.model.d_model
        vectors = [checked_embeddings(each, width) for each in embeddings or ()]
        return read_all(map(to_read, vectors), functools.partial(reader.hidden_states, vectors=True))

    def embed(self, document: Document) -> np.ndarray:
        """Returns the embeddings of a document's tokens, multiplied by sqrt(D), without positions: floats [T, D].

        Raises:
          UserError: as `score`.
        """
        ids = self._ids(document)
        padded = np.zeros((1, 1 << max(len(ids) - 1, 0).bit_length()), np.int32)  # Lengths that few programs serve.
        padded[0, : len(ids)] = ids
        return distributed.to_host(self._embed(self.params, padded))[0, : len(ids)]

    def generate(
        self,
        prompts: Iterable[Document],
        settings: GenerateConfig | None = None,
        *,
        stop: str | Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        stream: Callable[[int, str], None] | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> list[str]:
        """Generates one continuation of each prompt, without the prompt; the same text that the prompt gives alone.

        Args:
          prompts: texts or token ids to continue, of any lengths; an empty one starts from an empty memory.
          settings: length, temperature, top_k, top_p, stop (one token) and seed; None: those of the run's config.
          stop: strings of which the first that is written ends a text, which does not include it. They are found in
            the text, whatever its tokens are.
          seeds: a seed for each prompt; None: all have that of the settings, and equal prompts give equal texts.
          stream: called with the number of a prompt and the next piece of its text as it comes.
          batch_size: prompts that are continued side by side.

        Raises:
          UserError: a model that cannot generate; a prompt or a stop token that the vocabulary lacks; an empty stop
            string; seeds of another number.
        """
        refuse_single_text(prompts)
        listed = list(prompts)
        texts = [""] * len(listed)
        for number, text in self.generate_stream(listed, settings, stop=stop, seeds=seeds, batch_size=batch_size):
            texts[number] += text
            if stream is not None:
                stream(number, text)
        return texts

    def generate_stream(
        self,
        prompts: Iterable[Document],
        settings: GenerateConfig | None = None,
        *,
        stop: str | Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> Iterator[tuple[int, str]]:
        """Yields the number of a prompt and the next piece of its text, as they come; otherwise as `generate`."""
        settings = dataclasses.replace(settings or self.config.generate, samples=1)
        settings.validate()
        check_can_generate(self.config)
        check_batch_size(batch_size)
        ends = Ends(settings.length, read_stop(settings, self.vocabulary), check_stop(stop))
        refuse_single_text(prompts)
        given = [self._ids(prompt) for prompt in prompts]
        if seeds is not None and len(seeds) != len(given):
            raise UserError(f"{len(seeds)} seeds and {len(given)} prompts were given; give one for each prompt")
        pieces = generate_pieces(
            self._generator(settings.temperature, settings.top_k, settings.top_p),
            Weights(self._weights, for_single_tokens(self._weights, mem_len=self.config.eval.mem_len)),
            [ids if len(ids) else self.vocabulary.start for ids in given],
            seeds=[settings.seed] * len(given) if seeds is None else seeds,
            ends=ends,
            vocabulary=self.vocabulary,
            segment_len=self.config.eval.segment_len,
            batch_size=batch_size,
        )
        return ((piece.number, piece.text) for piece in pieces if piece.text)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the token ids [T] of a text; raises `UserError` if it has characters that the vocabulary lacks."""
        return ready_ids.encode(self.vocabulary, text)

    def decode(self, tokens: Any) -> str:
        """Returns the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.vocabulary.decode(tokens).decode(errors="replace")

    def init_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Returns an empty memory of M positions for B rows; None: `config.eval.mem_len`."""
        mem_len = self.config.eval.mem_len if mem_len is None else mem_len
        return self.components.model.init_memory(batch_size=batch_size, mem_len=mem_len)

    def log_probabilities(self, tokens: Any, memory: Memory) -> tuple[jax.Array, Memory]:
        """Computes log probabilities of each next token: int [B, L] -> [B, L, V], and the new memory.

        Clamp and same_length are those of `config.eval`.

        Raises:
          UserError: token ids that the vocabulary lacks, or a memory of other rows.
        """
        ids = np.asarray(tokens)
        ready_ids.check_range(self.vocabulary, ids)
        return self._log_probabilities(self.params, ids.astype(np.int32), memory)

    @functools.cached_property
    def _log_probabilities(self) -> Any:
        return make_log_probabilities(self.components)

    @functools.cached_property
    def _embed(self) -> Any:
        return make_embed(self.components)

    @functools.cached_property
    def _weights(self) -> Any:
        return self.components.evaluation.prepare_params(self.params)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a model lives as long as its compiled programs)
    def _reader(self, batch_size: int) -> DocumentReader:
        return DocumentReader(self.components, self._weights, batch_size=batch_size)

    def _with_first(self, documents: Iterable[np.ndarray], first: Token | None) -> Iterator[np.ndarray]:
        """Yields each document after the token `first`; as it is if that is None."""
        before = None if first is None else ready_ids.one_token(self.vocabulary, first)
        return (ids if before is None else np.concatenate([before, ids]) for ids in documents)

    def _ids(self, document: Document) -> np.ndarray:
        return ready_ids.token_ids(self.vocabulary, document)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a model lives as long as its compiled programs)
    def _generator(self, temperature: float, top_k: int | None, top_p: float) -> BatchGenerator:
        config = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
        return make_generator(self.components, config)
