"""Hugging Face's `TransfoXLLMHeadModel` with our parameters, to compare speed and numbers with: on the CPU, in float32.

    peer = HuggingFacePeer(config, span, params, vocab_size=204)
    peer.fill_memory(seed=0)
    nats = peer.evaluate_segment(inputs, targets)

torch and transformers are an extra, so they are imported when a peer is made. The model is used as somebody would
who knows it: a loss takes only the softmax work that it needs, and Adam is the fused one. Its memory has M slots from
the start, zeros that are attended to: the preset "hf" of `CompatConfig` gives the same numbers.
"""

import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from txl_jax.config import DType, EvalConfig, ModelConfig, OptimizerConfig
from txl_jax.interop import huggingface

_OPTIMIZER = OptimizerConfig()


class HuggingFacePeer:
    """The peer. Evaluation, generation and training each carry a memory of their own from call to call.

    Args:
      config: sizes, ties, and the dropout of training.
      span: lengths, of training too; B of `fill_memory`.
      params: the tree that `model.init` gives below "params", without axis names; `final_norm` off.
      vocab_size: V.
      optimizer: settings of `train_step`, which keeps to the peak learning rate.

    Raises:
      ValueError: a package is missing, or the model is none that Hugging Face's class can be.
    """

    def __init__(
        self,
        config: ModelConfig,
        span: EvalConfig,
        params: Mapping[str, Any],
        *,
        vocab_size: int,
        optimizer: OptimizerConfig = _OPTIMIZER,
    ):
        if config.dtype is not DType.FLOAT32:
            raise ValueError(f"model.dtype is {config.dtype} and the peer computes in {DType.FLOAT32}; give that")
        self._torch, self._transformers = _import_packages()
        self._config, self._span, self._optimizer = config, span, optimizer
        self._arguments = huggingface.config_of(config, span, vocab_size=vocab_size)
        tensors = huggingface.from_flax(params, config)
        self._model = self._make_model(self._arguments)
        self._model.load_state_dict({name: self._torch.from_numpy(value) for name, value in tensors.items()})
        self._model.eval()
        self._trained = None  # (model, optimiser) of `train_step`, from its first call on.
        # None: Hugging Face's start, zeros in every slot.
        self._evaluation_memory = self._generation_memory = self._training_memory = None
        self._token = self._torch.zeros((1, 1), dtype=self._torch.int64)
        self._draws = self._torch.Generator().manual_seed(0)

    def nll(self, tokens: np.ndarray) -> np.ndarray:
        """Nats of all tokens but the first, read in segments from the start: int [B, T + 1] -> float32 [B, T]."""
        memory, parts = None, []
        with self._torch.no_grad():
            for start in range(0, tokens.shape[1] - 1, self._span.segment_len):
                segment = tokens[:, start : start + self._span.segment_len + 1]
                nll, memory = self._losses(self._model, segment[:, :-1], segment[:, 1:], memory)
                parts.append(nll.numpy())
        return np.concatenate(parts, axis=1)

    def evaluate_segment(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Summed nats of a segment, int [B, L] each."""
        with self._torch.no_grad():
            nll, self._evaluation_memory = self._losses(self._model, inputs, targets, self._evaluation_memory)
        return float(nll.sum())

    def generate_token(self, top_k: int | None) -> int:
        """Draws the token after the last one (at first: after token 0) among the `top_k` likeliest; None: among all.

        What a step of `model.generate(do_sample=True, top_k=top_k)` computes, without its bookkeeping.
        """
        torch = self._torch
        with torch.no_grad():
            found = self._model(self._token, mems=self._generation_memory)
            scores = found.prediction_scores[:, -1]
            if top_k is not None and top_k < scores.shape[-1]:
                smallest = scores.topk(top_k).values[:, -1:]
                scores = scores.masked_fill(scores < smallest, -torch.inf)
            self._token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._draws)
            self._generation_memory = found.mems
        return int(self._token)

    def train_step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Updates a second model, with dropout, on a segment (int [B, L] each); returns the mean nats before.

        The first call makes that model, and the optimiser's state: leave it out of a timing.
        """
        if self._trained is None:
            self._trained = self._make_trained()
        model, adam = self._trained
        nll, self._training_memory = self._losses(model, inputs, targets, self._training_memory)
        loss = nll.mean()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(model.parameters(), self._optimizer.clip_norm)
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    def fill_memory(self, seed: int) -> None:
        """Gives every walk a memory of random states of the size that a layer norm leaves, M slots each."""
        torch, span = self._torch, self._span
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int) -> list:
            shape = (span.mem_len, rows, self._config.d_model)
            return [torch.randn(shape, generator=generator) for _ in range(self._config.n_layer)]

        self._evaluation_memory = draw(span.batch_size)
        self._generation_memory = draw(1)
        self._training_memory = draw(span.batch_size)

    def versions(self) -> dict[str, str | int]:
        """What a measurement depends on."""
        return {
            "torch": self._torch.__version__,
            "transformers": self._transformers.__version__,
            "threads": self._torch.get_num_threads(),
        }

    def _losses(self, model: Any, inputs: np.ndarray, targets: np.ndarray, memory: list | None) -> tuple[Any, list]:
        """Nats [B, L] in the order of the targets, and the memory after them (detached by the model).

        `model(inputs, labels=...)` would score the targets within `inputs` only, one too few per segment.
        """
        torch = self._torch
        tokens, targets = (torch.from_numpy(np.asarray(part, np.int64)) for part in (inputs, targets))
        read = model.transformer(tokens, mems=memory)
        hidden = read.last_hidden_state
        if model.crit.n_clusters:
            # The head drops the last state and the first label, so each gets one more than it needs.
            hidden = torch.cat([hidden, hidden[:, -1:]], dim=1)
            labels = torch.cat([targets[:, :1], targets], dim=1)
            nll = model.crit(hidden, labels, keep_order=True)
        else:
            # Given labels, a head without clusters copies all log probabilities first: 1.2 to 2.6 times the time.
            nll = -model.crit(hidden).gather(1, targets.reshape(-1, 1))
        return nll.view(targets.shape), read.mems

    def _make_trained(self) -> tuple[Any, Any]:
        """The same model with dropout, and its optimiser."""
        rates = {"dropout": self._config.dropout, "dropatt": self._config.dropout.attention}
        model = self._make_model(self._arguments | rates)
        model.load_state_dict(self._model.state_dict())
        settings = self._optimizer
        adam = self._torch.optim.Adam(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.adam_b1, settings.adam_b2),
            eps=settings.adam_eps,
            fused=True,  # On a CPU a quarter of the time of the other two kinds.
        )
        return model.train(), adam

    def _make_model(self, arguments: dict[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # About a tuple's order; results are read by name.
            return self._transformers.TransfoXLLMHeadModel(self._transformers.TransfoXLConfig(**arguments))


def _import_packages() -> tuple[ModuleType, ModuleType]:
    """(torch, transformers).

    Raises:
      ValueError: one of them is missing, or has no TransfoXL that can be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Of names that torch has renamed since.
            import torch
            import transformers
            from transformers import TransfoXLConfig, TransfoXLLMHeadModel  # noqa: F401
    except (ImportError, RuntimeError) as error:  # transformers turns a failed import within it into a RuntimeError.
        raise ValueError(
            f"the comparison needs torch and a transformers with TransfoXL ({error}); "
            "pip install 'txl_jax[peer]' brings torch and transformers 4.35.2"
        ) from error
    return torch, transformers
