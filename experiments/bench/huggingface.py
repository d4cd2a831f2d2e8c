"""Hugging Face's `TransfoXLLMHeadModel` with our parameters, as the peer of `speed`: on the CPU, in float32.

It is used efficiently: a loss runs only the part of the softmax that it needs, and Adam is the fused one.
"""

import functools
import itertools
import warnings
from typing import Any

import jax
import numpy as np

from experiments.bench import timing
from experiments.bench.timing import Task
from txl_jax.config import DType, ExperimentConfig, MemoryStart, config_tree
from txl_jax.config.config_tree import require
from txl_jax.config.experiment import apply_preset
from txl_jax.config.training import ADAM_B1
from txl_jax.data.segments import evaluation_segments
from txl_jax.errors import rephrased
from txl_jax.interop import huggingface, original
from txl_jax.runs.build import Built, build

# Largest difference of a token's nats that float32 explains over the segments compared; measured: 1e-5 and less.
TOLERANCE = 1e-4
_COMPARED_SEGMENTS = 4


class HuggingFaceModel:
    """Hugging Face's model. Evaluation, generation and training each carry a memory of their own from call to call.

    A memory starts as M zeros that are attended to, as with the preset "hf" of `CompatConfig`.
    """

    def __init__(self, config: ExperimentConfig, params: Any, *, vocab_size: int) -> None:
        """Makes the model with our parameters; raises `UserError` if a package is missing or the class lacks it."""
        require(
            config.model.dtype is DType.FLOAT32,
            f"model.dtype must be float32, in which Hugging Face's model computes, got {config.model.dtype}",
        )
        torch, transformers = self._torch, self._transformers = _import_packages()
        self.versions = (
            f"torch {torch.__version__}, transformers {transformers.__version__}, threads {torch.get_num_threads()}"
        )
        self._config, self._vocab_size = config, vocab_size
        numbers = jax.tree.map(np.asarray, params)
        arrays = original.from_flax(numbers, config.model, format=original.Format.HUGGINGFACE)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._model = self._make_model(config.eval, tensors).eval()
        self._memory: dict[str, list[Any] | None] = {}  # By use. Without one, Hugging Face starts with zeros.
        self._token = torch.zeros((1, 1), dtype=torch.int64)
        self._draws = torch.Generator().manual_seed(0)

    def evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Returns the nats [B, L] of a segment; inputs and targets are int [B, L]."""
        with self._torch.no_grad():
            return self._losses(self._model, "evaluation", inputs, targets).numpy()

    def generate_token(self, top_k: int | None) -> int:
        """Samples the next token, the first after token 0, as `model.generate(do_sample=True, top_k=top_k)` does."""
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
        """Updates a second model, made in the first call, with dropout at the peak learning rate; returns mean nats."""
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
        for use, size in (sizes | {"training": (train.mem_len, train.batch_size)}).items():
            states = (self._torch.randn((*size, model.d_model), generator=generator) for _ in range(model.n_layer))
            self._memory[use] = list(states)

    def _losses(self, model: Any, use: str, inputs: np.ndarray, targets: np.ndarray) -> Any:
        """Returns nats [B, L] and updates the memory of that use. `model(inputs, labels=...)` scores one token less."""
        torch = self._torch
        tokens, labels = (torch.from_numpy(np.asarray(part, np.int64)) for part in (inputs, targets))
        output = model.transformer(tokens, mems=self._memory.get(use))
        hidden, self._memory[use] = output.last_hidden_state, output.mems
        if model.crit.n_clusters:
            # The head drops the last state and the first label, so each gets one more than it needs.
            hidden = torch.cat([hidden, hidden[:, -1:]], dim=1)
            nll = model.crit(hidden, torch.cat([labels[:, :1], labels], dim=1), keep_order=True)
        else:
            # Given labels, a head without clusters copies all log probabilities first: 1.2 to 2.6 times the time.
            nll = -model.crit(hidden).gather(1, labels.reshape(-1, 1))
        return nll.view(labels.shape)

    @functools.cached_property
    def _trained(self) -> tuple[Any, Any]:
        """The same model at the lengths of training, with dropout, and its optimizer."""
        dropout, optimizer = self._config.model.dropout, self._config.optimizer
        rates = {"dropout": dropout.rate, "dropatt": dropout.attention}
        model = self._make_model(self._config.train, self._model.state_dict(), **rates).train()
        rules = {"betas": (ADAM_B1, optimizer.adam_b2), "eps": optimizer.adam_eps}
        # On a CPU, the fused Adam takes a quarter of the time of the other two kinds.
        return model, self._torch.optim.Adam(model.parameters(), optimizer.learning_rate, **rules, fused=True)

    def _make_model(self, lengths: Any, tensors: Any, **rates: float) -> Any:
        """Makes the model at the lengths of training or evaluation."""
        arguments = huggingface.config_of(self._config.model, lengths, vocab_size=self._vocab_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # About a tuple's order; results are read by name.
            config = self._transformers.TransfoXLConfig(**arguments | rates)
            model = self._transformers.TransfoXLLMHeadModel(config)
        model.load_state_dict(tensors)
        return model


def _import_packages() -> tuple[Any, Any]:
    missing = "the comparison needs torch and a transformers with TransfoXL (%s)"
    advice = "pip install 'txl_jax[peer]' brings torch and transformers 4.35.2"
    # transformers turns a failed import within it into a RuntimeError.
    with warnings.catch_warnings(), rephrased(f"{missing}; {advice}", ImportError, RuntimeError):
        warnings.simplefilter("ignore", FutureWarning)  # Of names that torch has renamed since.
        import torch
        import transformers
        from transformers import TransfoXLConfig, TransfoXLLMHeadModel  # noqa: F401
    return torch, transformers


def with_peer_compat(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config with the peer's compat, but a masked memory; raises `UserError` for sampling that it lacks."""
    for name, peers in (("samples", 1), ("temperature", 1.0), ("top_p", 1.0)):
        given = getattr(config.generate, name)
        require(given == peers, f"generate.{name} is {given} and must be {peers} with --peer")
    return config_tree.replace(apply_preset(config, "hf"), {"model.compat.memory_start": MemoryStart.MASKED})


def checked_peer(components: Built) -> HuggingFaceModel:
    """Returns the peer with our untrained parameters and full memories, and prints the losses' largest difference.

    Raises `UserError` if a token's loss, scored from zeros in the memory, differs by more than rounding.
    """
    config, vocab_size = apply_preset(components.config, "hf"), components.model.vocab_size
    ours = build(config_tree.replace(config, {"eval.cache_dtype": None, "eval.batch_size": 1}), vocab_size=vocab_size)
    params, length = components.init_params(), config.eval.segment_len
    peer = HuggingFaceModel(components.config, params, vocab_size=vocab_size)
    tokens = timing.draw_tokens(vocab_size, length * _COMPARED_SEGMENTS + 1)
    segments = evaluation_segments(tokens, batch_size=1, segment_len=length).segments(0, _COMPARED_SEGMENTS)
    weights = ours.prepare_params(params)
    _, scores = ours.eval_step(weights, ours.init_memory(weights), ours.place(segments))
    theirs = [peer.evaluate(*each) for each in zip(segments.inputs, segments.targets, strict=True)]
    worst = float(np.abs(np.ravel(scores.nll) - np.ravel(theirs)).max())
    require(
        worst <= TOLERANCE,
        f"the peer's losses must be ours to {TOLERANCE:g} nats, got a difference of {worst:.2g}: the two do not "
        "compute the same function, and nothing was timed",
    )
    print(f"peer: {peer.versions}; --compat=hf on both sides")
    print(f"largest difference of a token's loss: {worst:.1e} nats\n")
    peer.fill_memory()
    return peer


def peer_task(name: str, ours: Task, components: Built, peer: HuggingFaceModel) -> Task:
    """Returns the peer's counterpart of our task, one segment or token a call."""
    config = components.config
    if name == "generation":
        return Task(f"{ours.name}, peer", 1, lambda: peer.generate_token(config.generate.top_k))
    step = peer.train_step if name == "training" else peer.evaluate
    segments = timing.random_segments(components, config.train if name == "training" else config.eval)
    turns = itertools.cycle(list(zip(np.asarray(segments.inputs), np.asarray(segments.targets), strict=True)))
    return Task(f"{ours.name}, peer", segments.inputs[0].size, lambda: step(*next(turns)))
