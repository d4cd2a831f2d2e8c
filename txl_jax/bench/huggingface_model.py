"""Hugging Face's `TransfoXLLMHeadModel` with our parameters, for comparing speed and numbers: on the CPU, in float32.

    peer = HuggingFaceModel(config, eval_config, params, vocab_size=204)
    peer.fill_memory(seed=0)
    nats = peer.evaluate_segment(inputs, targets)

torch and transformers are an optional extra, imported when a model is made. The model is used efficiently: a loss runs
only the part of the softmax that it needs, and Adam is the fused one. Its memory has M slots from the start, zeros that
are attended to: the preset "hf" of `CompatConfig` gives the same numbers.
"""

import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from txl_jax.config import DType, EvalConfig, ModelConfig, OptimizerConfig
from txl_jax.config.settings import require
from txl_jax.errors import UserError
from txl_jax.interop import huggingface

_OPTIMIZER = OptimizerConfig()


class HuggingFaceModel:
    """Hugging Face's model. Evaluation, generation and training each carry a memory of their own from call to call."""

    def __init__(
        self,
        config: ModelConfig,
        eval_config: EvalConfig,
        params: Mapping[str, Any],
        *,
        vocab_size: int,
        optimizer: OptimizerConfig = _OPTIMIZER,
    ):
        """Makes the model.

        Args:
          config: sizes, ties, and the dropout of training.
          eval_config: lengths, of training too; B of `fill_memory`.
          params: the tree that `model.init` gives below "params", without axis names; `final_norm` off.
          vocab_size: V.
          optimizer: settings of `train_step`, whose learning rate stays at the peak.

        Raises:
          UserError: a package is missing, or Hugging Face's class has no such model.
        """
        require(
            config.dtype is DType.FLOAT32,
            f"model.dtype is {config.dtype} and Hugging Face's model computes in {DType.FLOAT32}; "
            f"set --model.dtype={DType.FLOAT32}",
        )
        self._torch, self._transformers = _import_packages()
        self._config, self._eval_config, self._optimizer = config, eval_config, optimizer
        self._arguments = huggingface.config_of(config, eval_config, vocab_size=vocab_size)
        tensors = huggingface.from_flax(params, config)
        self._model = self._make_model(self._arguments)
        self._model.load_state_dict({name: self._torch.from_numpy(value) for name, value in tensors.items()})
        self._model.eval()
        self._trained: tuple[Any, Any] | None = None  # (model, optimizer) of `train_step`, from its first call on.
        # None: Hugging Face's start, zeros in every slot.
        self._evaluation_memory: list[Any] | None = None
        self._generation_memory: list[Any] | None = None
        self._training_memory: list[Any] | None = None
        self._token = self._torch.zeros((1, 1), dtype=self._torch.int64)
        self._draws = self._torch.Generator().manual_seed(0)

    def nll(self, tokens: np.ndarray) -> np.ndarray:
        """Scores all tokens but the first in segments from an empty memory: int [B, T + 1] -> nats, float32 [B, T]."""
        memory: list[Any] | None = None
        parts = []
        with self._torch.no_grad():
            for start in range(0, tokens.shape[1] - 1, self._eval_config.segment_len):
                segment = tokens[:, start : start + self._eval_config.segment_len + 1]
                nll, memory = self._losses(self._model, segment[:, :-1], segment[:, 1:], memory)
                parts.append(nll.numpy())
        return np.concatenate(parts, axis=1)

    def evaluate_segment(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Returns the summed nats of a segment; inputs and targets are int [B, L]."""
        with self._torch.no_grad():
            nll, self._evaluation_memory = self._losses(self._model, inputs, targets, self._evaluation_memory)
        return float(nll.sum())

    def generate_token(self, top_k: int | None) -> int:
        """Draws the token after the last one (at first: after token 0) among the `top_k` likeliest; None: among all.

        Computes what a step of `model.generate(do_sample=True, top_k=top_k)` does, without its bookkeeping.
        """
        torch = self._torch
        with torch.no_grad():
            output = self._model(self._token, mems=self._generation_memory)
            scores = output.prediction_scores[:, -1]
            if top_k is not None and top_k < scores.shape[-1]:
                smallest = scores.topk(top_k).values[:, -1:]
                scores = scores.masked_fill(scores < smallest, -torch.inf)
            self._token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._draws)
            self._generation_memory = output.mems
        return int(self._token)

    def train_step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Updates a second model, with dropout, on a segment (int [B, L] each); returns the mean nats before.

        The first call makes that model and the optimizer's state: do not time it.
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
        """Fills the memories of evaluation, generation and training with M random states of unit variance each."""
        torch, eval_config = self._torch, self._eval_config
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int) -> list[Any]:
            shape = (eval_config.mem_len, rows, self._config.d_model)
            return [torch.randn(shape, generator=generator) for _ in range(self._config.n_layer)]

        self._evaluation_memory = draw(eval_config.batch_size)
        self._generation_memory = draw(1)
        self._training_memory = draw(eval_config.batch_size)

    def versions(self) -> dict[str, str | int]:
        """Returns the versions and threads that a measurement depends on."""
        return {
            "torch": self._torch.__version__,
            "transformers": self._transformers.__version__,
            "threads": self._torch.get_num_threads(),
        }

    def _losses(
        self, model: Any, inputs: np.ndarray, targets: np.ndarray, memory: list[Any] | None
    ) -> tuple[Any, list[Any]]:
        """Returns nats [B, L] in the order of the targets, and the memory after them (detached by the model).

        `model(inputs, labels=...)` would score the targets within `inputs` only, one too few per segment.
        """
        torch = self._torch
        tokens, labels = (torch.from_numpy(np.asarray(part, np.int64)) for part in (inputs, targets))
        output = model.transformer(tokens, mems=memory)
        hidden = output.last_hidden_state
        if model.crit.n_clusters:
            # The head drops the last state and the first label, so each gets one more than it needs.
            hidden = torch.cat([hidden, hidden[:, -1:]], dim=1)
            padded = torch.cat([labels[:, :1], labels], dim=1)
            nll = model.crit(hidden, padded, keep_order=True)
        else:
            # Given labels, a head without clusters copies all log probabilities first: 1.2 to 2.6 times the time.
            nll = -model.crit(hidden).gather(1, labels.reshape(-1, 1))
        return nll.view(labels.shape), output.mems

    def _make_trained(self) -> tuple[Any, Any]:
        """Makes the same model with dropout, and its optimizer."""
        rates = {"dropout": self._config.dropout.rate, "dropatt": self._config.dropout.attention}
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
    """Imports torch and transformers.

    Raises:
      UserError: one of them is missing, or has no TransfoXL that can be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Of names that torch has renamed since.
            import torch
            import transformers
            from transformers import TransfoXLConfig, TransfoXLLMHeadModel  # noqa: F401
    except (ImportError, RuntimeError) as error:  # transformers turns a failed import within it into a RuntimeError.
        raise UserError(
            f"the comparison needs torch and a transformers with TransfoXL ({error}); "
            "pip install 'txl_jax[peer]' brings torch and transformers 4.35.2"
        ) from error
    return torch, transformers
