"""The model's part of compression: it predicts the next byte of R streams, and learns from them.

Prediction is a step of one token over a KV cache, as in generation. After every L tokens of each
stream (`segment_len`), one update of dynamic evaluation (`evaluation.dynamic`) with the rule
RMSprop follows. It uses only tokens that the decoder also has by then. As published for dynamic
evaluation, keys and values of earlier tokens are not recomputed.

Both directions call the same compiled functions with the same numbers. Everything else that the
last bits depend on is fixed: one device, the reference attention, and no rematerialization. The
caller chooses the CPU and the number of XLA's threads (`runtime.cpu_threads`).
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.compression.file_format import Coding
from txl_jax.compression.range_coder import integer_probabilities
from txl_jax.config import (
    DynamicConfig,
    DynamicRule,
    ExperimentConfig,
    MeshConfig,
    Newlines,
    Remat,
    config_tree,
)
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.errors import UserError
from txl_jax.evaluation import dynamic
from txl_jax.inference import forward
from txl_jax.inference.cache import KVCache
from txl_jax.inference.prepare import DecodeParams, prepare_params
from txl_jax.interop import leaves
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import adaptive_softmax
from txl_jax.recurrence import Segments
from txl_jax.runs.build import build_for
from txl_jax.runs.dynamic import DynamicModel, built_with_rule
from txl_jax.runs.dynamic_statistics import digest_of_weights
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import TrainedModel
from txl_jax.sharding.mesh import make_mesh
from txl_jax.training.step import TrainState

# Segments of the probe: the second one is predicted after an update.
_PROBE_SEGMENTS = 2


class PredictorState(NamedTuple):
    """State of the predictor between two calls. A call donates the arrays that it replaces."""

    # Parameters, the rule's state, and the memory of the training forward pass.
    learner: TrainState
    # The same parameters, prepared for single tokens.
    prepared: DecodeParams
    # Keys and values of the latest tokens.
    cache: KVCache


class Predictor:
    """Predicts the next byte of R streams."""

    def __init__(self, trained: TrainedModel, coding: Coding, *, log: Callable[[str], None]):
        """Loads the parameters, and compiles nothing yet.

        Args:
          trained: The model.
          coding: Settings of the prediction. The number of threads is ignored.
          log: Receives a line about the parameters.

        Raises:
          UserError: If the model's tokens are not bytes, or it cannot predict token by token.
          CheckpointError: If the weights are corrupted.
        """
        self.vocabulary = _check_vocabulary(trained)
        config = _fixed_config(trained.config, coding)
        check_can_generate(config)
        self.coding = coding
        built = built_with_rule(
            build_for(
                dynamic.training_config(config),
                trained.vocabulary,
                mesh=make_mesh(config.mesh, jax.devices()[:1]),
                uses=["training", "evaluation"],
            )
        )
        self._built = built
        assert isinstance(built.model, TransformerXL)
        self._model = built.model
        _, self._params = trained.params(built, log=log)
        self._learner = DynamicModel(built, self._params)

        self._prepare: Callable[[Any], DecodeParams] = built.jit(self._prepare_params)
        self._init_cache: Callable[[DecodeParams], KVCache] = built.jit(self._empty_cache)
        self._predict = built.jit(_predict, donate_argnums=1)

    def weights_sha256(self) -> str:
        """Returns the SHA-256 of the parameters, in hexadecimal."""
        return digest_of_weights(leaves.from_tree(self._params))

    def start(self) -> PredictorState:
        """Returns the state before the first byte, with copies of the parameters."""
        prepared = self._prepare(self._params)
        return PredictorState(self._learner.start(), prepared, self._init_cache(prepared))

    def predict(
        self, state: PredictorState, tokens: np.ndarray
    ) -> tuple[PredictorState, np.ndarray]:
        """Reads the next token of each stream.

        Args:
          state: The state, whose cache is donated.
          tokens: Integers [R].

        Returns:
          The state, and the log probabilities float [R, V] of the tokens that follow.
        """
        tokens = np.asarray(tokens, np.int32)
        cache, log_probabilities = self._predict(state.prepared, state.cache, tokens)
        return state._replace(cache=cache), np.asarray(log_probabilities)

    def learn(
        self, state: PredictorState, tokens: np.ndarray, is_known: np.ndarray
    ) -> PredictorState:
        """Makes one update from the segment that was read last.

        Args:
          state: The state, whose learner is donated.
          tokens: Integers [R, L + 1], the tokens of the segment and the one after it.
          is_known: Bool [R, L + 1], False after the end of a stream.

        Returns:
          The state after the update.
        """
        # One segment, [1, R, L].
        segment = Segments(
            inputs=tokens[None, :, :-1].astype(np.int32),
            targets=tokens[None, :, 1:].astype(np.int32),
            weights=is_known[None, :, 1:].astype(np.float32),
            reset=np.zeros((1, len(tokens)), bool),
        )
        segment = self._built.place(segment)
        # The learner repeats the training forward pass with its own memory, and does not need
        # prepared parameters. The losses are already known from the predictions.
        learner, _losses = self._learner.step(None, state.learner, segment)

        # The next tokens are predicted with the new parameters. The cache keeps the keys and
        # values that the old parameters computed.
        return PredictorState(learner, self._prepare(learner.params), state.cache)

    def probe(self, *, stop_requested: Callable[[], Any] = lambda: False) -> str:
        """Returns the SHA-256, in hexadecimal, of the predictor's numbers for a fixed text.

        Where this differs, a text that was compressed with this model cannot be decoded.

        Args:
          stop_requested: Called before each token, because long segments take minutes.

        Raises:
          Interrupted: If a stop was requested.
        """
        n_stream = self.coding.streams
        segment_len = self.coding.segment_len
        # Squares, so that neighbouring tokens differ. They repeat soon, which is harmless: the same
        # operations run for each token. Do not change them: other tokens give another digest, and
        # existing files could no longer be decoded.
        n_token = n_stream * (_PROBE_SEGMENTS * segment_len + 1)
        tokens = (np.arange(n_token) ** 2 * 257 % self.vocabulary.size).reshape(n_stream, -1)
        is_known = np.ones((n_stream, segment_len + 1), bool)

        digest = hashlib.sha256()
        state = self.start()
        for number in range(_PROBE_SEGMENTS):
            segment = tokens[:, number * segment_len :][:, : segment_len + 1]
            for place in range(segment_len):
                if stop_requested():
                    raise Interrupted("the probe of this machine's numbers")
                state, log_probabilities = self.predict(state, segment[:, place])
                # The coder gets integers, and NumPy's exponentials may also differ by processor.
                # The logarithms show differences that rounding to integers hides in the probe, but
                # would not hide in a longer text.
                digest.update(integer_probabilities(log_probabilities).tobytes())
                digest.update(log_probabilities.tobytes())
            state = self.learn(state, segment, is_known)
        digest.update(digest_of_weights(leaves.from_tree(state.learner.params)).encode())
        return digest.hexdigest()

    def _prepare_params(self, params: Any) -> DecodeParams:
        """Prepares parameters for single tokens. To be jitted."""
        lengths = self._built.config.eval
        prepared = prepare_params(
            params,
            self._model,
            window=self._model.config.compat.window(
                lengths.mem_len, same_length=lengths.same_length
            ),
            segment_len=1,
            mem_len=lengths.mem_len,
            clamp_len=lengths.clamp_len,
        )
        return prepared.for_generation(mem_len=lengths.mem_len)

    def _empty_cache(self, prepared: DecodeParams) -> KVCache:
        """Returns the cache before the first token. To be jitted."""
        return forward.init_cache(
            prepared,
            batch_size=self.coding.streams,
            mem_len=self.coding.mem_len,
            segment_len=1,
        )


def _predict(
    prepared: DecodeParams, cache: KVCache, tokens: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Reads a token of each row. To be jitted, with the cache donated.

    Returns:
      The cache, and the log probabilities [R, V] of the next tokens.
    """
    hidden, cache = forward.forward(prepared, tokens[:, None], cache)
    return cache, adaptive_softmax.log_probabilities(hidden[:, 0], prepared.clusters, None)


def _fixed_config(config: ExperimentConfig, coding: Coding) -> ExperimentConfig:
    """Returns settings with which a trained model predicts and learns reproducibly to the bit."""
    return config_tree.replace(
        config,
        {
            "mesh": MeshConfig(data=1),
            "model.attention": "reference",
            "model.remat": Remat.NONE,
            "eval.batch_size": coding.streams,
            "eval.segment_len": coding.segment_len,
            "eval.mem_len": coding.mem_len,
            # The memory is carried from token to token, over the whole text.
            "eval.stride": None,
            "eval.warmup_tokens": 0,
            "eval.temperature": 1.0,
            # Only a model in its own dtype can learn.
            "eval.weight_dtype": None,
            "eval.cache_dtype": None,
            "eval.dynamic": DynamicConfig(
                rule=DynamicRule.RMSPROP,
                learning_rate=coding.learning_rate,
                decay=coding.decay,
                epsilon=coding.epsilon,
            ),
        },
    )


def _check_vocabulary(trained: TrainedModel) -> ByteVocabulary:
    """Returns the model's vocabulary. Raises `UserError` unless its tokens are bytes.

    All other vocabularies lose a part of some texts, such as unknown characters or spaces.
    """
    vocabulary = trained.vocabulary
    if not isinstance(vocabulary, ByteVocabulary):
        raise UserError(
            f"compression requires byte tokens, because others cannot encode every text, got "
            f"{vocabulary.size:,} {vocabulary.kind} tokens in {trained.path}. Train a model with "
            "--flagfile=own_bytes."
        )
    if vocabulary.newlines is not Newlines.KEEP or vocabulary.size < 2:
        raise UserError(
            "compression requires byte tokens that include newlines, got "
            f"data.tokenizer.newlines={vocabulary.newlines} and {vocabulary.size} byte values in "
            f"{trained.path}. Train a model with --flagfile=own_bytes."
        )
    return vocabulary
