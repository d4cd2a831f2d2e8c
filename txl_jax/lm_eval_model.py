"""Adapter for EleutherAI's lm-evaluation-harness: a trained model as its model "txl_jax".

    python -m experiments.lm_eval --model_path=runs/mine --tasks=lambada_openai

The harness (the extra `lm-eval`) sends three kinds of requests, for documents that each start from
an empty memory:

  loglikelihood          nats of a continuation given its context, and whether it is the greedy one
  loglikelihood_rolling  nats of all T tokens of a document. One token (`first`) is read before them
                         and not scored, by default the token that unprompted generation continues:
                         the mark of a line's end, or a newline
  generate_until         greedy text, or a sample, up to the first stop string

The memory does not limit the context, so documents are not cut into windows. Distances above
`eval.clamp_len` share one encoding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from txl_jax.config import GenerateConfig
from txl_jax.data import encode
from txl_jax.errors import UserError
from txl_jax.runs.generate import start_ids
from txl_jax.runtime import distributed
from txl_jax.trained_model import load

# Supported generation settings of a task.
_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed"}
_DEFAULT_BATCH_SIZE = 8
# Number of characters that an error shows from the end of a context.
_SHOWN_CONTEXT = 40


class _Generation(NamedTuple):
    """Generation settings of a request. Requests with equal settings are generated together."""

    settings: GenerateConfig
    stop: tuple[str, ...]  # Strings that end the text.


@register_model("txl_jax")
class HarnessModel(LM):
    """A trained model with the methods that the harness calls.

    Args:
      path: A run's workdir or a portable checkpoint, as for `txl_jax.load`.
      member: Name of the ensemble member, if the run is an ensemble.
      batch_size: Documents that are scored or continued together. "auto" means `max_batch_size`, or
        8.
      max_batch_size: The batch size if `batch_size` is "auto".
      device: Must be None, because JAX chooses the device.
      first: Text of the token before a document and before a continuation without context, or None
        for `Vocabulary.start`.
      max_gen_toks: Maximum number of tokens of a text, for tasks that do not specify it.

    Raises:
      UserError: If the model cannot be read, an argument is not valid, or more than one process is
        running.
    """

    def __init__(
        self,
        path: str,
        *,
        member: str | None = None,
        batch_size: int | str = _DEFAULT_BATCH_SIZE,
        max_batch_size: int | None = None,
        device: str | None = None,
        first: str | None = None,
        max_gen_toks: int = 256,
    ):
        super().__init__()
        if distributed.is_multiprocess():
            raise UserError(
                "the harness requires a single process, which may use all devices of a host"
            )
        if device is not None:
            raise UserError(
                f"device must be None, got {device!r}. Choose one with JAX_PLATFORMS=cpu or cuda."
            )
        if str(batch_size).startswith("auto"):
            batch_size = max_batch_size or _DEFAULT_BATCH_SIZE
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UserError(f"batch_size must be auto or at least 1, got {batch_size!r}")
        self.model = load(path, member=member)
        self._batch_size = int(batch_size)
        self._max_gen_toks = max_gen_toks

        vocabulary = self.model.vocabulary
        first_tokens = start_ids(self.model.config, vocabulary)
        if first is not None:
            first_tokens = encode.one_token(vocabulary, first)
        self._first = int(first_tokens[0])

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, is greedy) of each continuation after its context.

        Raises:
          UserError: If a continuation is empty. Its probability of 1 would win every comparison.
        """
        pairs = [request.args for request in requests]
        for context, continuation in pairs:
            if not continuation:
                raise UserError(
                    "a task's continuation must not be empty, got '' after "
                    f"{context[-_SHOWN_CONTEXT:]!r}"
                )
        scores = self.model.score_continuations(
            pairs, first=self._first, batch_size=self._batch_size
        )
        results = [(score.logprob, score.is_greedy) for score in scores]
        self._cache("loglikelihood", requests, results)
        return results

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Returns the log-likelihood in nats of all tokens of each document."""
        texts = [request.args[0] for request in requests]
        scores = self.model.score(texts, first=self._first, batch_size=self._batch_size)
        results = [-float(totals.nats) for totals in scores]
        self._cache("loglikelihood_rolling", requests, results)
        return results

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Returns the text that continues each context, up to the first of its stop strings."""
        indices_by_generation: dict[_Generation, list[int]] = {}
        for index, request in enumerate(requests):
            generation = self._generation(request.args[1])
            indices_by_generation.setdefault(generation, []).append(index)

        # Each request belongs to one group, so that all texts are filled in.
        results = [""] * len(requests)
        for generation, indices in indices_by_generation.items():
            prompts = [requests[index].args[0] for index in indices]
            texts = self.model.generate(
                prompts, generation.settings, stop=generation.stop, batch_size=self._batch_size
            )
            for index, text in zip(indices, texts, strict=True):
                results[index] = text
        self._cache("generate_until", requests, results)
        return results

    def _generation(self, options: dict[str, Any]) -> _Generation:
        """Returns the generation settings of a request. Without do_sample it is greedy.

        Args:
          options: The task's settings, by the harness's names.

        Raises:
          UserError: If a setting is unknown, or its value is not valid.
        """
        # Ignoring a setting would give scores that differ from the task's definition.
        unknown = sorted(set(options) - _GENERATION)
        if unknown:
            raise UserError(
                f"generation settings of a task must be of {', '.join(sorted(_GENERATION))}, "
                f"got {', '.join(unknown)}"
            )

        stop = options.get("until") or ()
        if isinstance(stop, str):
            stop = (stop,)
        temperature = float(options.get("temperature") or 0)
        length = int(options.get("max_gen_toks", self._max_gen_toks))
        seed = int(options.get("seed", 0))
        # Tasks that only set a temperature expect sampling.
        if options.get("do_sample", temperature > 0):
            settings = GenerateConfig(
                length=length,
                temperature=float(options.get("temperature") or 1),
                top_k=options.get("top_k"),
                top_p=float(options.get("top_p") or 1),
                seed=seed,
            )
        else:
            settings = GenerateConfig(
                length=length, temperature=0.0, top_k=None, top_p=1.0, seed=seed
            )
        settings.validate()
        return _Generation(settings, tuple(text for text in stop if text))

    def _cache(self, kind: str, requests: Sequence[Instance], results: Sequence[Any]) -> None:
        """Passes results to the harness's cache, in the order of the requests."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)
