"""Hugging Face's `TransfoXLLMHeadModel` with our parameters, as the peer of `speed`: on the CPU, in float32.

torch and transformers are an optional extra, imported when a model is made. The model is used efficiently: a loss runs
only the part of the softmax that it needs, and Adam is the fused one.
"""

import functools
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.bench import timing
from experiments.bench.timing import Task
from txl_jax.config import DType, EvalConfig, ExperimentConfig, MemoryStart, config_tree
from txl_jax.config.config_tree import require
from txl_jax.config.experiment import apply_preset
from txl_jax.config.training import ADAM_B1
from txl_jax.data.segments import evaluation_segments
from txl_jax.errors import UserError
from txl_jax.interop import huggingface, original
from txl_jax.interop.original import Format
from txl_jax.runs.build import Built, build

# Largest difference of a token's nats that float32 explains over the segments compared; measured: 1e-5 and less.
TOLERANCE = 1e-4
_COMPARED_SEGMENTS = 4


class HuggingFaceModel:
    """Hugging Face's model. Evaluation, generation and training each carry a memory of their own from call to call.

    A memory has M slots from the start, zeros that are attended to: the preset "hf" of `CompatConfig` gives the same
    numbers.
    """

    def __init__(self, config: ExperimentConfig, params: Any, *, vocab_size: int) -> None:
        """Makes the model with our parameters, the tree below "params" without axis names (`final_norm` off).

        The learning rate of `train_step` stays at the peak.

        Raises:
          UserError: If a package is missing, or Hugging Face's class does not support the model.
        """
        require(
            config.model.dtype is DType.FLOAT32,
            f"model.dtype is {config.model.dtype} and Hugging Face's model computes in float32; "
            "set --model.dtype=float32",
        )
        torch, transformers = self._torch, self._transformers = _import_packages()
        self.versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self.versions += f", threads {torch.get_num_threads()}"
        self._config, self._vocab_size = config, vocab_size
        arrays = original.from_flax(jax.tree.map(np.asarray, params), config.model, format=Format.HUGGINGFACE)
        tensors = {name: self._torch.from_numpy(array) for name, array in arrays.items()}
        self._model = self._make_model(config.eval, tensors).eval()
        self._memory: dict[str, list[Any] | None] = {}  # By use; without one, Hugging Face starts with zeros.
        self._token = self._torch.zeros((1, 1), dtype=self._torch.int64)
        self._draws = self._torch.Generator().manual_seed(0)

    def evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Returns the nats [B, L] of a segment; inputs and targets are int [B, L]."""
        with self._torch.no_grad():
            return self._losses(self._model, "evaluation", inputs, targets).numpy()

    def generate_token(self, top_k: int | None) -> int:
        """Draws the token after the last one (first after token 0) among the `top_k` most likely, or among all if None.

        Computes what a step of `model.generate(do_sample=True, top_k=top_k)` does, without its bookkeeping.
        """
        torch = self._torch
        with torch.no_grad():
            output = self._model(self._token, mems=self._memory.get("generation"))
            scores = output.prediction_scores[:, -1]
            if top_k is not None and top_k < scores.shape[-1]:
                smallest = scores.topk(top_k).values[:, -1:]
                scores = scores.masked_fill(scores < smallest, -torch.inf)
            self._token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._draws)
            self._memory["generation"] = output.mems
        return int(self._token)

    def train_step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Updates a second model, with dropout, on a segment (int [B, L] each); returns the mean nats before.

        The first call makes that model and the optimizer's state: do not time it.
        """
        model, adam = self._trained
        loss = self._losses(model, "training", inputs, targets).mean()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(model.parameters(), self._config.optimizer.clip_norm)
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    def fill_memory(self) -> None:
        """Fills the memories of evaluation, generation and training with M random states of unit variance each."""
        generator, model = self._torch.Generator().manual_seed(0), self._config.model
        lengths, train = self._config.eval, self._config.train
        sizes = {"evaluation": (lengths.mem_len, lengths.batch_size), "generation": (lengths.mem_len, 1)}
        for use, (mem_len, rows) in (sizes | {"training": (train.mem_len, train.batch_size)}).items():
            shape = (mem_len, rows, model.d_model)
            self._memory[use] = [self._torch.randn(shape, generator=generator) for _ in range(model.n_layer)]

    def _losses(self, model: Any, use: str, inputs: np.ndarray, targets: np.ndarray) -> Any:
        """Returns nats [B, L] in the order of the targets; moves the memory of that use on (the model detaches it).

        `model(inputs, labels=...)` would score the targets within `inputs` only, one too few per segment.
        """
        torch = self._torch
        tokens, labels = (torch.from_numpy(np.asarray(part, np.int64)) for part in (inputs, targets))
        output = model.transformer(tokens, mems=self._memory.get(use))
        hidden, self._memory[use] = output.last_hidden_state, output.mems
        if model.crit.n_clusters:
            # The head drops the last state and the first label, so each gets one more than it needs.
            hidden = torch.cat([hidden, hidden[:, -1:]], dim=1)
            padded = torch.cat([labels[:, :1], labels], dim=1)
            nll = model.crit(hidden, padded, keep_order=True)
        else:
            # Given labels, a head without clusters copies all log probabilities first: 1.2 to 2.6 times the time.
            nll = -model.crit(hidden).gather(1, labels.reshape(-1, 1))
        return nll.view(labels.shape)

    @functools.cached_property
    def _trained(self) -> tuple[Any, Any]:
        """The same model at the lengths of training, with dropout, and its optimizer."""
        dropout, optimizer, train = self._config.model.dropout, self._config.optimizer, self._config.train
        shared = ("batch_size", "segment_len", "mem_len", "clamp_len", "same_length")
        lengths = EvalConfig(**{name: getattr(train, name) for name in shared})
        tensors = self._model.state_dict()
        model = self._make_model(lengths, tensors, dropout=dropout.rate, dropatt=dropout.attention)
        adam = self._torch.optim.Adam(
            model.parameters(),
            lr=optimizer.learning_rate,
            betas=(ADAM_B1, optimizer.adam_b2),
            eps=optimizer.adam_eps,
            fused=True,  # On a CPU a quarter of the time of the other two kinds.
        )
        return model.train(), adam

    def _make_model(self, lengths: EvalConfig, tensors: Mapping[str, Any], **rates: Any) -> Any:
        arguments = huggingface.config_of(self._config.model, lengths, vocab_size=self._vocab_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # About a tuple's order; results are read by name.
            config = self._transformers.TransfoXLConfig(**arguments | rates)
            model = self._transformers.TransfoXLLMHeadModel(config)
        model.load_state_dict(tensors)
        return model


def _import_packages() -> tuple[Any, Any]:
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


def with_peer_compat(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config with the peer's attention window and layer norms.

    The memory is masked at the start instead of zeros, which only affects `print_difference`.

    Raises:
      UserError: If the peer's step of generation does not have its settings.
    """
    for name, default in (("samples", 1), ("temperature", 1.0), ("top_p", 1.0)):
        value = getattr(config.generate, name)
        require(
            value == default,
            f"generate.{name} is {value} and the peer's is {default}; leave it out, or benchmark without --peer",
        )
    return config_tree.replace(apply_preset(config, "hf"), {"model.compat.memory_start": MemoryStart.MASKED})


def checked_peer(components: Built) -> HuggingFaceModel:
    """Returns the peer with our untrained parameters and full memories, once its losses were found to be ours."""
    params = components.init_params()
    peer = HuggingFaceModel(components.config, params, vocab_size=components.model.vocab_size)
    print_difference(components, params, peer)
    peer.fill_memory()
    return peer


def print_difference(components: Built, params: Any, peer: HuggingFaceModel) -> float:
    """Scores the same tokens with both models, from zeros in the memory; prints and returns the largest difference.

    Raises:
      UserError: If a token's loss differs by more nats than rounding explains.
    """
    config = apply_preset(components.config, "hf")
    config = config_tree.replace(config, {"eval.cache_dtype": None, "eval.batch_size": 1})
    parts = build(config, vocab_size=components.model.vocab_size)
    tokens = timing.draw_tokens(components.model.vocab_size, config.eval.segment_len * _COMPARED_SEGMENTS + 1)
    reader = evaluation_segments(tokens, batch_size=1, segment_len=config.eval.segment_len)
    segments = reader.segments(0, _COMPARED_SEGMENTS)
    weights = parts.prepare_params(params)
    memory = parts.init_memory(weights)
    _, scores = parts.eval_step(weights, memory, parts.place(segments))
    theirs = [peer.evaluate(*each) for each in zip(segments.inputs, segments.targets, strict=True)]
    worst = float(np.abs(np.ravel(scores.nll) - np.ravel(theirs)).max())
    require(
        worst <= TOLERANCE,
        f"the peer's losses differ by up to {worst:.2g} nats, more than {TOLERANCE:g}, so the two do not compute "
        "the same function; nothing was timed",
    )
    print(f"peer: {peer.versions}; --compat=hf on both sides")
    print(f"largest difference of a token's loss: {worst:.1e} nats\n")
    return worst


def peer_task(name: str, ours: Task, components: Built, peer: HuggingFaceModel) -> Task:
    """Returns the peer's counterpart of our task "training", "evaluation" or "generation", one segment or token a call.

    Generation always reads every tail.
    """
    config = components.config
    if name == "generation":
        return Task(f"{ours.name}, peer", 1, lambda: peer.generate_token(config.generate.top_k))
    step = peer.train_step if name == "training" else peer.evaluate
    segments = timing.random_segments(components, config.train if name == "training" else config.eval)
    turns = itertools.cycle(list(zip(np.asarray(segments.inputs), np.asarray(segments.targets), strict=True)))
    return Task(f"{ours.name}, peer", segments.inputs[0].size, lambda: step(*next(turns)))
