"""A trained model with its vocabulary.

It provides scores of documents, generation, hidden states and log probabilities.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, Literal, NamedTuple, overload

import jax
import numpy as np

from txl_jax.config import (
    DynamicConfig,
    DynamicRule,
    ExperimentConfig,
    GenerateConfig,
    config_tree,
)
from txl_jax.config.config_tree import require
from txl_jax.data import encode
from txl_jax.data.encode import Document, Token, refuse_single_text
from txl_jax.data.vocabulary import Vocabulary, check_ids
from txl_jax.errors import UserError, rephrased
from txl_jax.evaluation.dynamic import training_config
from txl_jax.inference.generate import Generator
from txl_jax.memory import Memory
from txl_jax.metrics import Totals
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.documents import DocumentReader, check_batch_size, read_all, takes_embeddings
from txl_jax.runs.dynamic import DynamicModel, NamedDocument, built_with_rule, document_config
from txl_jax.runs.dynamic_statistics import learning_model
from txl_jax.runs.generate import check_can_generate, or_start, read_stop, start_ids
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runtime import distributed

Documents = Iterable[Document]
_BATCH_SIZE = 8  # Number of documents that are read in parallel.
# Error of `log_probabilities` inside a jax transformation.
_INSIDE_JAX = (
    "log_probabilities cannot be called inside a jax transformation such as jit or grad, because "
    "it checks ids on the host. Inside, use the module: net = "
    "txl_jax.TransformerXL(model.config.model, vocab_size=model.vocabulary.size); "
    "hidden, memory = net.apply({'params': model.params}, tokens, memory, "
    "clamp_len=model.config.eval.clamp_len, same_length=model.config.eval.same_length); "
    "log_p = net.apply({'params': model.params}, hidden, method=net.log_probabilities). "
    "docs/own-module.md shows gradients and training too"
)


def load(
    path: str | PathLike[str],
    *,
    member: str | None = None,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
) -> "LanguageModel":
    """Loads a portable checkpoint or a run's best parameters.

    If the run was not evaluated yet, its latest parameters are loaded.

    Args:
      path: The run's workdir, or a directory that `python -m experiments.convert` wrote.
      member: The ensemble member, as "seed=2", or None if the run is not an ensemble.
      weight_dtype: "int8" for quantized weights (`eval.weight_dtype`), or None for the saved dtype.
      cache_dtype: "bfloat16" or "int8" for the KV cache (`eval.cache_dtype`), or None for the saved
        dtype.

    Raises:
      UserError: If the run, member or checkpoint does not exist, the dtype is unknown, or a file
        cannot be read.
    """
    trained = open_weights(path, member=member, weight_dtype=weight_dtype, cache_dtype=cache_dtype)
    built = trained.build()
    step, params = trained.params(built)
    return LanguageModel(built, trained.vocabulary, params, step, trained.description, trained)


class Continuation(NamedTuple):
    """Score of a continuation after its context."""

    # Log probability in nats, summed over the continuation's tokens. At most 0.
    logprob: float
    # Whether greedy decoding after the context would have written the continuation. True if it is
    # empty.
    is_greedy: bool
    # Number of the continuation's tokens, or 0 if it is empty.
    tokens: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A trained model, created by `load`. `config.eval` contains its memory and segment lengths.

    A document is a text (str, or bytes of UTF-8, or any bytes for a byte model) or a sequence of
    token ids. Each starts from an empty memory, and its results do not depend on the others.
    `batch_size` documents are read in parallel, by one compiled function for any number and
    lengths of documents. Each needs a KV cache of `config.eval.mem_len` slots.
    """

    # The config, the Flax module and the mesh.
    components: Built
    # Text to token ids and back.
    vocabulary: Vocabulary
    # The parameters.
    params: Any
    # Training step at which the parameters were saved.
    step: int
    # Directory that the parameters were loaded from, and their training data, or empty.
    source: str = ""
    # Run or portable checkpoint that the model was loaded from, or None if created in memory.
    trained: TrainedModel | None = None

    def __repr__(self) -> str:
        """Returns one line: kind, sizes, parameters, vocabulary and the source of the weights."""
        model = self.config.model
        sizes = (
            f"{model.n_layer} layers, d_model {model.d_model}, "
            f"{self.components.num_parameters:,} parameters"
        )
        vocabulary = f"{self.vocabulary.size:,} {self.vocabulary.kind} tokens"
        return (
            f"<LanguageModel: {model.network}, {sizes}, {vocabulary}, step {self.step:,} of "
            f"{self.source or '?'}>"
        )

    @property
    def config(self) -> ExperimentConfig:
        """The settings of the run."""
        return self.components.config

    @overload
    def score(
        self,
        documents: Documents,
        *,
        first: Token | None = ...,
        batch_size: int = ...,
        dynamic: DynamicConfig | None = ...,
    ) -> list[Totals]: ...

    @overload
    def score(
        self,
        documents: Documents,
        *,
        per_token: Literal[True],
        first: Token | None = ...,
        batch_size: int = ...,
        dynamic: DynamicConfig | None = ...,
    ) -> list[np.ndarray]: ...

    def score(
        self,
        documents: Documents,
        *,
        per_token: bool = False,
        first: Token | None = None,
        batch_size: int = _BATCH_SIZE,
        dynamic: DynamicConfig | None = None,
    ) -> list[Totals] | list[np.ndarray]:
        """Computes the loss (negative log-likelihood) of each document, in nats.

        With `dynamic` the model learns while it reads: each segment of a document is scored first,
        and then one gradient step changes the parameters (`txl_jax.evaluation.dynamic`). Each
        document starts from an empty memory and the trained parameters. With
        `DynamicConfig(shared=True)` it starts from the parameters that the previous document left.
        `params` is not changed.

        Args:
          documents: Texts or token ids, of any lengths. They may be empty.
          per_token: Whether to return the losses of single tokens instead of sums.
          first: The token before each document, an id or the text of one token, so that all T
            tokens are scored, or None to score T - 1 tokens, all except the first.
          batch_size: Number of documents that are read in parallel. With `dynamic` it has no
            effect, because documents are read one after the other.
          dynamic: The rule to learn by, such as `DynamicConfig(rule="rmsprop",
            learning_rate=1e-3)`, or None for fixed parameters, even if `config.eval.dynamic` has a
            rule. One function is compiled for each `DynamicConfig`.

        Returns:
          For each document, the summed nats, the number of scored tokens and the number of their
          bytes. The bytes are 0 if they are unknown, because tokens have no text or more than 0.1 %
          of them are unknown words. Then `bits_per_byte` is nan. With `per_token`, the nats,
          floats [T - 1] or [T].

        Raises:
          UserError: If a text cannot be encoded, ids are outside the vocabulary (negative ids are
            not padding: documents may have any lengths), or `documents` is a single text. Also if
            `dynamic` is not valid, or if the model cannot learn because it has `eval.stride`, or
            quantized weights or caches.
          NonFiniteError: If a loss is nan or infinite with `dynamic`.
        """
        ids = self._with_first(documents, first)
        read = self._score_function(batch_size, per_token=per_token, dynamic=dynamic)
        if dynamic is not None:
            # In their own order, because each may start from the parameters that the previous one
            # left. All are encoded before the first is read, to find mistakes immediately.
            return list(read(iter(list(ids))))
        return read_all(ids, read)

    def score_stream(
        self,
        documents: Documents,
        *,
        per_token: bool = False,
        first: Token | None = None,
        batch_size: int = _BATCH_SIZE,
        dynamic: DynamicConfig | None = None,
    ) -> Iterator[Totals | np.ndarray]:
        """Yields the results of `score` in the order of the documents, which may be endless.

        At most 16 documents per row are buffered. If a document cannot be encoded, the results
        before it come first. With `dynamic`, each result is yielded before the next document is
        read.
        """
        read = self._score_function(batch_size, per_token=per_token, dynamic=dynamic)
        return read(self._with_first(documents, first))

    def _score_function(
        self, batch_size: int, *, per_token: bool, dynamic: DynamicConfig | None
    ) -> Callable[[Iterable[np.ndarray]], Iterator[Any]]:
        """Returns a function that yields the nats of each document, ids [T], or its totals.

        Raises:
          UserError: If an argument is not valid.
        """
        if dynamic is not None and not isinstance(dynamic, DynamicConfig):
            raise UserError(
                "dynamic must be a DynamicConfig, such as "
                f'txl_jax.DynamicConfig(rule="rmsprop"), got {dynamic!r}'
            )
        nats_of: Callable[[Iterable[np.ndarray]], Iterator[np.ndarray]]
        if dynamic is None:
            nats_of = self._reader(batch_size).nats
        else:
            check_batch_size(batch_size)
            nats_of = functools.partial(_nats_before_learning, self._dynamic_model(dynamic))

        if per_token:
            return nats_of
        return functools.partial(self._totals, nats_of)

    def _totals(
        self,
        nats_of: Callable[[Iterable[np.ndarray]], Iterator[np.ndarray]],
        documents: Iterable[np.ndarray],
    ) -> Iterator[Totals]:
        """Yields the totals of each document, ids [T], from the function of their nats."""
        # The ids are needed again when their nats arrive.
        documents, scored_documents = itertools.tee(documents)
        for nats, ids in zip(nats_of(documents), scored_documents, strict=True):
            n_bytes = self.vocabulary.count_bytes(ids[1:])
            yield dataclasses.replace(Totals.of(nats), bytes=n_bytes)

    def score_continuations(
        self,
        pairs: Iterable[tuple[Document, Document]],
        *,
        first: Token | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> list[Continuation]:
        """Computes the logprob of each continuation given its context.

        Also computes whether the continuation is the greedy one.

        Args:
          pairs: (context, continuation). Two texts are encoded together, so that a word may begin
            in the context. The continuation starts at the first token that differs from the tokens
            of the context itself. If this token spans the border, its logprob includes the end of
            the context.
          first: The token before a continuation without context, an id or the text of one token, or
            None for the token that generation without a prompt continues. It also precedes a
            context that ends inside its first token.

        Raises:
          UserError: If a text cannot be encoded, ids are outside the vocabulary, or a non-empty
            continuation does not add a token to its context, such as a space for a word model.
        """
        if first is None:
            before = start_ids(self.config, self.vocabulary)
        else:
            before = encode.one_token(self.vocabulary, first)

        # Ids of each context with its continuation, and the number of the continuation's tokens.
        joined = [
            encode.joined(self.vocabulary, context, continuation) for context, continuation in pairs
        ]

        # The first token of a document is not scored, so that a continuation without context needs
        # a token before it.
        documents = []
        for ids, length in joined:
            has_context = length < len(ids)
            if not has_context:
                ids = np.concatenate([before, ids])
            documents.append(ids)

        scores = []
        likenesses = read_all(documents, self._reader(batch_size).likeness)
        for likeness, (_, length) in zip(likenesses, joined, strict=True):
            first_scored = len(likeness.nats) - length
            nats = likeness.nats[first_scored:]
            is_greedy = likeness.greedy[first_scored:]
            scores.append(
                Continuation(
                    logprob=-Totals.of(nats).nats,
                    is_greedy=bool(is_greedy.all()),
                    tokens=length,
                )
            )
        return scores

    def hidden_states(
        self,
        documents: Documents | None = None,
        *,
        embeddings: Iterable[Any] | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> list[np.ndarray]:
        """Computes the hidden states of the last layer for each document.

        They are the softmax's inputs, as floats [T, D].

        Args:
          documents: Texts or token ids [T].
          embeddings: Floats [T, D] instead of documents, as `embed` returns.
          batch_size: Number of documents that are read in parallel.

        Raises:
          UserError: If both or neither are passed, if embeddings are not floats [T, D], or for the
            reasons of `score`.
        """
        if (documents is None) == (embeddings is None):
            raise UserError(
                "hidden_states requires either documents or embeddings, got both or neither"
            )
        reader = self._reader(batch_size)
        if documents is not None:
            refuse_single_text(documents)
            return read_all(map(self._ids, documents), reader.hidden_states)

        d_model = self.config.model.d_model
        vectors = [np.asarray(document) for document in embeddings or ()]
        for document in vectors:
            is_float = np.issubdtype(document.dtype, np.floating)
            if not is_float or document.ndim != 2 or document.shape[1] != d_model:
                raise UserError(
                    f"embeddings must be floats [T, {d_model}], got dtype {document.dtype} and "
                    f"shape {document.shape}"
                )
        return read_all(vectors, functools.partial(reader.hidden_states, vectors=True))

    def embed(self, document: Document) -> np.ndarray:
        """Returns the embeddings of a document's tokens, multiplied by sqrt(D).

        The embeddings are floats [T, D], without positions.
        """
        ids = self._ids(document)
        # Padded to a power of two, so that few lengths are compiled.
        padded_length = 1 << max(len(ids) - 1, 0).bit_length()
        padded = np.zeros((1, padded_length), np.int32)
        padded[0, : len(ids)] = ids
        embeddings = distributed.to_host(self._embed(self.params, padded))
        return embeddings[0, : len(ids)]

    def generate(
        self,
        prompts: Documents,
        settings: GenerateConfig | None = None,
        *,
        stop: str | Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> list[str]:
        """Generates one continuation of each prompt, without the prompt.

        A continuation does not depend on the other prompts.

        Args:
          prompts: Texts or token ids to continue, of any lengths. An empty prompt starts from an
            empty memory, after the token that ends a document if `data.reset_at` names one.
          settings: Length, temperature, top_k, top_p, stop and seed, or None for the run's
            `generate` settings.
          stop: Strings, which need not be single tokens. The first one generated ends a text, which
            does not include it.
          seeds: A seed for each prompt, or None for the settings' seed, with which equal prompts
            give equal texts.
          batch_size: Number of prompts that are continued in parallel.

        Raises:
          UserError: If the model cannot generate, the vocabulary lacks characters of a prompt or of
            the settings' stop, a stop string is empty, or the number of seeds differs from the
            number of prompts.
        """
        refuse_single_text(prompts)
        prompts = list(prompts)
        texts = [""] * len(prompts)
        pieces = self.generate_stream(
            prompts, settings, stop=stop, seeds=seeds, batch_size=batch_size
        )
        for number, piece in pieces:
            texts[number] += piece
        return texts

    def generate_stream(
        self,
        prompts: Documents,
        settings: GenerateConfig | None = None,
        *,
        stop: str | Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> Iterator[tuple[int, str]]:
        """Yields the number of a prompt and the next piece of its text, as generated.

        Otherwise like `generate`.
        """
        if settings is not None and not isinstance(settings, GenerateConfig):
            raise UserError(
                "settings must be a GenerateConfig, such as txl_jax.GenerateConfig(length=20), got "
                f"{settings!r}"
            )
        settings = dataclasses.replace(settings or self.config.generate, samples=1)
        settings.validate()
        check_can_generate(self.config)
        check_batch_size(batch_size)
        stop_strings = _stop_strings(stop)

        refuse_single_text(prompts)
        prompt_ids = [self._ids(prompt) for prompt in prompts]
        if seeds is None:
            seeds = [settings.seed] * len(prompt_ids)
        if len(seeds) != len(prompt_ids):
            raise UserError(
                f"seeds must have one entry for each of the {len(prompt_ids)} prompts, got "
                f"{len(seeds)}"
            )

        return self._generator.pieces(
            [or_start(ids, self.config, self.vocabulary) for ids in prompt_ids],
            settings,
            draws=[(seed, 0) for seed in seeds],
            decode=self.vocabulary.decode,
            ending=read_stop(settings, self.vocabulary),
            stop_strings=stop_strings,
            batch_size=batch_size,
        )

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the token ids [T] of a text.

        Raises:
          UserError: If the vocabulary lacks one of the text's characters.
        """
        return encode.token_ids(self.vocabulary, text)

    def decode(self, tokens: Any) -> str:
        """Returns the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        return self.vocabulary.decode(tokens).decode(errors="replace")

    def init_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Returns an empty memory of B rows and M positions, by default `config.eval.mem_len`."""
        if mem_len is None:
            mem_len = self.config.eval.mem_len
        return self.components.model.init_memory(batch_size=batch_size, mem_len=mem_len)

    def log_probabilities(self, tokens: Any, memory: Memory) -> tuple[jax.Array, Memory]:
        """Computes the log probabilities of each next token, and the new memory.

        `clamp_len` and `same_length` come from `config.eval`.

        Args:
          tokens: int [B, L].
          memory: Memory before these tokens, with B rows (`init_memory`).

        Returns:
          The log probabilities [B, L, V], and the memory after these tokens.

        Raises:
          UserError: If the tokens are not ids [B, L] of the vocabulary, or the call is inside a jax
            transformation.
        """
        leaves = jax.tree.leaves((tokens, memory))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise UserError(_INSIDE_JAX)

        advice = (
            "For documents of other lengths, use model.score, or pad the rows, ignore what follows "
            "their ends, and do not carry this memory on (docs/own-module.md)."
        )
        message = f"tokens must be ids [B, L] in rows of equal length (%s). {advice}"
        with rephrased(message, ValueError, TypeError):
            ids = np.asarray(tokens)
        require(
            ids.ndim == 2 and ids.dtype.kind in "iu",
            f"tokens must be integer ids [B, L], got {ids.dtype} of shape {ids.shape}. {advice}",
        )
        check_ids(ids, self.vocabulary.size)
        return self._log_probabilities(self.params, ids.astype(np.int32), memory)

    @functools.cached_property
    def _log_probabilities(self) -> Any:
        """Returns the compiled function that computes log probabilities.

        It maps (parameters, ids [B, L], memory) to log probabilities [B, L, V] and the new memory.
        """
        model: Any = self.components.model  # `apply` returns the result of its method.
        eval_config = self.config.eval

        def log_probabilities(
            params: Any, tokens: jax.Array, memory: Memory
        ) -> tuple[jax.Array, Memory]:
            hidden, memory = model.apply(
                {"params": params},
                tokens,
                memory,
                clamp_len=eval_config.clamp_len,
                same_length=eval_config.same_length,
            )
            log_p = model.apply({"params": params}, hidden, method=model.log_probabilities)
            return log_p, memory

        return self.components.jit(log_probabilities)

    @functools.cached_property
    def _embed(self) -> Any:
        """The compiled (parameters, ids [B, L]) -> embeddings [B, L, D]."""
        model = takes_embeddings(self.components)

        def embed(params: Any, ids: jax.Array) -> Any:
            return model.apply({"params": params}, ids, method=model.embed_tokens)

        return self.components.jit(embed)

    @functools.cached_property
    def _prepared(self) -> Any:
        return self.components.prepare_params(self.params)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a model lives as long as its compiled programs)
    def _reader(self, batch_size: int) -> DocumentReader:
        return DocumentReader(self.components, self._prepared, batch_size=batch_size)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a model lives as long as its compiled programs)
    def _dynamic_model(self, dynamic: DynamicConfig) -> DynamicModel:
        """Returns the model that learns from documents by a rule.

        Raises:
          UserError: If these settings are not valid, or the model's other settings rule them out.
        """
        require(
            dynamic.rule is not None,
            f"dynamic must have a rule, one of {', '.join(DynamicRule)}, got {dynamic!r}. "
            "Pass dynamic=None to score without learning.",
        )
        config = config_tree.replace(self.config, {"eval.dynamic": dynamic})
        config.validate()

        config = document_config(config)
        if self.trained is not None:
            trained = TrainedModel.of(self.trained, config)
            return learning_model(trained, self.params, log=lambda line: None)
        built = build_for(
            training_config(config), self.vocabulary, mesh=self.components.mesh, uses=["training"]
        )
        return DynamicModel(built_with_rule(built), self.params)

    @functools.cached_property
    def _generator(self) -> Generator:
        return self.components.generator(self._prepared)

    def _with_first(self, documents: Documents, first: Token | None) -> Iterator[np.ndarray]:
        """Returns the ids of each document, after the token `first` unless that is None."""
        refuse_single_text(documents)
        if first is None:
            return map(self._ids, documents)
        before = encode.one_token(self.vocabulary, first)
        return (np.concatenate([before, self._ids(document)]) for document in documents)

    def _ids(self, document: Document) -> np.ndarray:
        return encode.token_ids(self.vocabulary, document)


def _nats_before_learning(
    model: DynamicModel, documents: Iterable[np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields each document's nats [T - 1], with each segment scored before it is learned from."""
    named_documents = (
        NamedDocument(f"documents[{number}]", ids) for number, ids in enumerate(documents)
    )
    return model.score_documents(named_documents)


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings of `LanguageModel.generate`.

    Raises:
      UserError: If one of them is empty, or not a text that can be encoded.
    """
    stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop_strings):
        raise UserError(f"stop must be one or more non-empty strings, got {stop!r}")
    with rephrased(f"stop must be text, got {stop!r} (%s)", UnicodeEncodeError):
        "".join(stop_strings).encode()  # Half of a surrogate pair cannot be encoded.
    return stop_strings
