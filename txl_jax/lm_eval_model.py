"""Adapter for EleutherAI's lm-evaluation-harness: a trained model as its model "txl_jax".

    python -m experiments.lm_eval --model_path=runs/mine --tasks=lambada_openai

The harness (the extra `lm-eval`) asks for three things, each for documents that start from an empty
memory:

  loglikelihood          nats of a continuation given its context, and whether it is the greedy one
  loglikelihood_rolling  nats of all T tokens of a document. One token (`first`) is read before them
                         and not scored, by default the token that unprompted generation continues:
                         the mark of a line's end, or a newline
  generate_until         greedy text, or a sample, up to the first of some strings

A memory has no maximum context, so nothing is cut into windows. Distances above `eval.clamp_len`
share one encoding.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from txl_jax.config import GenerateConfig
from txl_jax.data import encode
from txl_jax.errors import UserError
from txl_jax.runtime import distributed
from txl_jax.trained_model import load

_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed"}


@register_model("txl_jax")
class HarnessModel(LM):
    """A trained model, as `txl_jax.load` takes it, as the harness calls it.

    The batch size "auto" means `max_batch_size`, or 8. `device` must be None, because JAX chooses
    it. `first` is the text of the token before a document and before a continuation without
    context, or None for `Vocabulary.start`. `max_gen_toks` is for tasks that do not specify it.
    """

    def __init__(
        self,
        path: str,
        *,
        member: str | None = None,
        batch_size: int | str = 8,
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
            batch_size = max_batch_size or 8
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UserError(f"batch_size must be auto or at least 1, got {batch_size!r}")
        self.model = load(path, member=member)
        self._batch_size = int(batch_size)
        self._max_gen_toks = max_gen_toks
        vocabulary = self.model.vocabulary
        self._first = int(
            (vocabulary.start if first is None else encode.one_token(vocabulary, first))[0]
        )

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, is greedy) of each continuation after its context.

        Raises `UserError` for an empty continuation, which is certain and so would win every
        comparison.
        """
        pairs = [request.args for request in requests]
        for context, continuation in pairs:
            if not continuation:
                raise UserError(
                    f"a task's continuation must not be empty, got '' after {context[-40:]!r}"
                )
        scored = self.model.score_continuations(
            pairs, first=self._first, batch_size=self._batch_size
        )
        return self._cached(
            "loglikelihood", requests, [(each.logprob, each.is_greedy) for each in scored]
        )

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Returns the log-likelihood in nats of all tokens of each document."""
        texts = [request.args[0] for request in requests]
        scored = self.model.score(texts, first=self._first, batch_size=self._batch_size)
        return self._cached(
            "loglikelihood_rolling", requests, [-float(totals.nats) for totals in scored]
        )

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Returns the text that continues each context, up to the first of its stop strings."""
        found: list[str | None] = [None] * len(requests)
        groups: dict[tuple[GenerateConfig, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self._generation(request.args[1]), []).append(index)
        for (settings, stop), indices in groups.items():
            prompts = [requests[index].args[0] for index in indices]
            texts = self.model.generate(prompts, settings, stop=stop, batch_size=self._batch_size)
            for index, text in zip(indices, texts, strict=True):
                found[index] = text
        return self._cached("generate_until", requests, found)

    def _generation(self, given: dict[str, Any]) -> tuple[GenerateConfig, tuple[str, ...]]:
        """Returns settings and stop strings of a request. Without do_sample the text is greedy."""
        if unknown := sorted(set(given) - _GENERATION):
            known = ", ".join(sorted(_GENERATION))
            raise UserError(
                f"generation settings of a task must be of {known}, got {', '.join(unknown)}"
            )
        until = given.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(until)
        greedy = not given.get("do_sample", float(given.get("temperature") or 0) > 0)
        settings = GenerateConfig(
            length=int(given.get("max_gen_toks", self._max_gen_toks)),
            temperature=0.0 if greedy else float(given.get("temperature") or 1),
            top_k=None if greedy else given.get("top_k"),
            top_p=1.0 if greedy else float(given.get("top_p") or 1),
            seed=int(given.get("seed", 0)),
        )
        settings.validate()
        return settings, tuple(text for text in stop if text)

    def _cached(self, kind: str, requests: Sequence[Instance], found: Sequence[Any]) -> list[Any]:
        """Passes results to the harness' cache, and returns them."""
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)
        return list(found)
