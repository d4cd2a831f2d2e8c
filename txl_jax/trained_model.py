"""A trained model with its vocabulary: scores of texts, generation, log probabilities."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import ExperimentConfig, GenerateConfig
from txl_jax.data.batches.segment_reader import evaluation_segments
from txl_jax.data.tokens.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.evaluation.streaming import evaluate
from txl_jax.inference.generator import Generator
from txl_jax.jobs.generate import check_can_generate, read_stop, until_stop
from txl_jax.jobs.restore import load_parameters
from txl_jax.jobs.workdir import Workdir
from txl_jax.memory import Memory
from txl_jax.metrics import Totals
from txl_jax.modules.transformer_xl import TransformerXL


def load(path: str | os.PathLike[str], *, member: str | None = None) -> "LanguageModel":
    """Loads the best parameters of a run, or the latest where nothing was evaluated yet.

    Args:
      path: the run's workdir.
      member: the member of an ensemble, as "seed=2"; None: the run is none.

    Raises:
      UserError: there is no such run, member or checkpoint, or it cannot be read.
    """
    workdir = Workdir(Path(path).expanduser().resolve(), member)
    config, text = workdir.load()
    components = assemble(config, vocab_size=text.vocabulary.size)
    step, params = load_parameters(components, workdir, log=lambda line: None)
    return LanguageModel(components, text.vocabulary, params, step)


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A trained model; made by `load`. Memory and segment lengths are those of `config.eval`.

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

    def score(self, texts: Sequence[str | bytes]) -> list[Totals]:
        """Returns the summed loss in nats and the number of scored tokens of each text.

        Each text starts from an empty memory; its first token is not scored. A text of fewer than two tokens has none.

        Raises:
          UserError: a text has characters that the vocabulary lacks, or a single text was given instead of a list.
        """
        _refuse_single_text(texts)
        return [self._score(self.encode(text)) for text in texts]

    def generate(self, prompts: Sequence[str | bytes], settings: GenerateConfig | None = None) -> list[str]:
        """Generates one continuation of each prompt, without the prompt.

        Args:
          prompts: texts to continue; an empty one starts from an empty memory.
          settings: length, temperature, top_k, top_p, stop and seed; None: those of the run's config.

        Raises:
          UserError: a model that cannot generate, or a prompt or stop that the vocabulary lacks.
        """
        _refuse_single_text(prompts)
        settings = dataclasses.replace(settings or self.config.generate, samples=1)
        settings.validate()
        check_can_generate(self.config)
        generator, params = self._generator(settings)
        stop = read_stop(settings, self.vocabulary)
        texts = []
        for prompt in prompts:
            ids = self.encode(prompt)
            blocks = list(generator.tokens(params, ids if len(ids) else self.vocabulary.start))
            tokens = until_stop(stop, np.concatenate(blocks, axis=1)[0])
            texts.append(self.decode(tokens))
        return texts

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the token ids [T] of a text; raises `UserError` if it has characters that the vocabulary lacks."""
        content = text.encode() if isinstance(text, str) else text
        try:
            return self.vocabulary.encode(content)
        except ValueError as error:
            raise UserError(f"the text {content[:40]!r} cannot be read by this model: {error}") from None

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
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary.size:
            raise UserError(
                f"the token ids go from {ids.min()} to {ids.max()} and those of the vocabulary from 0 to "
                f"{self.vocabulary.size - 1}"
            )
        return self._log_probabilities(self.params, ids.astype(np.int32), memory)

    @functools.cached_property
    def _log_probabilities(self) -> Any:
        model: Any = self.components.model  # `apply` returns what its method does.
        eval_config = self.config.eval

        def log_probabilities(params: Any, tokens: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
            variables = {"params": params}
            lengths = {"clamp_len": eval_config.clamp_len, "same_length": eval_config.same_length}
            hidden, memory = model.apply(variables, tokens, memory, **lengths)
            return model.apply(variables, hidden, method=model.log_probabilities), memory

        return self.components.jit(log_probabilities)

    @functools.cached_property
    def _prepared(self) -> Any:
        return self._streaming.evaluation.prepare_params(self.params)

    @functools.cached_property
    def _streaming(self) -> RunComponents:
        """The components that score one text at a time, in one stream."""
        one_row = dataclasses.replace(self.config.eval, batch_size=1, stride=None, warmup_tokens=0)
        config = dataclasses.replace(self.config, eval=one_row)
        return dataclasses.replace(self.components, config=config)

    def _score(self, tokens: np.ndarray) -> Totals:
        if len(tokens) < 2:
            return Totals()
        components = self._streaming
        eval_config = components.config.eval
        return evaluate(
            components.evaluation.eval_step,
            self._prepared,
            components.evaluation.init_memory(self._prepared),
            evaluation_segments(tokens, batch_size=1, segment_len=eval_config.segment_len),
            segments_per_call=eval_config.segments_per_call,
            place=components.placement.place,
        )

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a model lives as long as its compiled programs)
    def _generator(self, settings: GenerateConfig) -> tuple[Generator, Any]:
        stop = read_stop(settings, self.vocabulary)
        cache_dtype = self.components.evaluation.memory_dtype
        model = self.components.model
        assert isinstance(model, TransformerXL)  # `check_can_generate`
        generator = Generator(
            model, self.config.eval, settings, memory_dtype=cache_dtype, mesh=self.components.mesh, stop_token=stop
        )
        return generator, generator.prepare_params(self.params)


def _refuse_single_text(texts: Sequence[str | bytes]) -> None:
    """Raises `UserError` for a string, whose characters would count as texts."""
    if isinstance(texts, str | bytes):
        raise UserError(f"a single text was given, {texts[:40]!r}; give a list of texts")
