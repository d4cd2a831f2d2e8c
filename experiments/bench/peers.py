"""Baselines for `speed` with our parameters, on the CPU in float32.

The baselines ("peers") are Hugging Face's class and the authors' PyTorch release.

They are used efficiently: a loss computes only the part of the softmax that it needs, and Adam is
fused.
"""

import enum
import functools
import hashlib
import itertools
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from experiments.bench import timing
from experiments.bench.timing import Task
from txl_jax.config import DType, Encoding, ExperimentConfig, MemoryStart, config_tree
from txl_jax.config.config_tree import require
from txl_jax.config.experiment import apply_preset
from txl_jax.config.training import ADAM_B1
from txl_jax.data.segments import evaluation_segments
from txl_jax.errors import rephrased
from txl_jax.interop import huggingface, original
from txl_jax.interop.original import Format
from txl_jax.runs.build import Built, build

# Largest difference of a token's nats that float32 explains over the compared segments. The
# measured difference is at most 1e-5.
TOLERANCE = 1e-4
_COMPARED_SEGMENTS = 4

# Repository of the release, its files in the order of their imports, the digest of all three, and
# the replaced lines.
REPOSITORY = "https://github.com/kimiyoung/transformer-xl"
_FILES = ("utils/log_uniform_sampler.py", "utils/proj_adaptive_softmax.py", "mem_transformer.py")
_DIGEST = "44dafac48196a4a52d2aa324c44846985b38214b7f59eaff84e27caf9fba5ff4"
_PATCHES = {
    b"sys.path.append('utils')": b"",
    # None without CUDA.
    b"torch.version.cuda": b"'0.0'",
    # masked_fill accepts only bool masks today.
    b".byte()": b".bool()",
    # The condition always holds for two or more tokens, and would split a compiled graph.
    b" and attn_mask.any().item()": b"",
}


class Peer(enum.StrEnum):
    """Implementations to compare with."""

    HUGGINGFACE = "hf"
    ORIGINAL = "original"


class TorchModel:
    """A peer.

    Evaluation, generation and training each have their own memory, which is kept between calls.

    A memory starts as M zeros that are attended to, as with the preset "hf" of `CompatConfig`.
    """

    format: ClassVar[Format]  # Names of the tensors.
    label = ""  # After a task's name in the table.

    def __init__(
        self, config: ExperimentConfig, params: Any, *, vocab_size: int, torch: Any
    ) -> None:
        """Creates the model with our parameters. Raises `UserError` if it is not supported."""
        config.expect(
            config.model.dtype is DType.FLOAT32,
            "model.dtype",
            "The peer computes in float32, so set --model.dtype=float32",
        )
        self._torch = torch
        self._config = config
        self._vocab_size = vocab_size
        self.versions = f"torch {torch.__version__}, threads {torch.get_num_threads()}"
        arrays = original.from_flax(
            jax.tree.map(np.asarray, params), config.model, format=self.format
        )
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._model = self._make_model(config.eval, tensors).eval()
        self._memory: dict[str, list[Any]] = {}  # By purpose.

    def evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Returns the losses [B, L] of a segment in nats. Inputs and targets are int [B, L]."""
        with self._torch.no_grad():
            return self._losses(self._model, "evaluation", inputs, targets).numpy()

    def train_step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Updates a second model, with dropout and the peak learning rate.

        The model is created in the first call. Returns mean nats.
        """
        model, adam = self._trained
        loss = self._losses(model, "training", inputs, targets).mean()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(model.parameters(), self._config.optimizer.clip_norm)
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    def fill_memory(self) -> None:
        """Fills the memories of evaluation, generation and training with random states.

        Each memory gets M states of unit variance.
        """
        generator = self._torch.Generator().manual_seed(0)
        # M, B for each use.
        lengths = self._config.eval
        train = self._config.train
        sizes = {
            "evaluation": (lengths.mem_len, lengths.batch_size),
            "generation": (lengths.mem_len, 1),
            "training": (train.mem_len, train.batch_size),
        }
        model = self._config.model
        # The authors' release also keeps the last layer's output.
        n_states = model.n_layer + (self.format is Format.ORIGINAL)
        for purpose, size in sizes.items():
            states = self._torch.randn((n_states, *size, model.d_model), generator=generator)
            self._memory[purpose] = list(states)

    def task(self, name: str, ours: Task, built: Built) -> Task:
        """Returns the counterpart of our task, with one segment per call."""
        # After another task's sizes it would compile for any sizes, which is slower.
        self._torch.compiler.reset()
        step: Callable[..., Any]
        if name == "training":
            step = self.train_step
            segments = timing.random_segments(built, self._config.train)
        else:
            step = self.evaluate
            segments = timing.random_segments(built, self._config.eval)
        pairs = zip(np.asarray(segments.inputs), np.asarray(segments.targets), strict=True)
        turns = itertools.cycle(list(pairs))
        return Task(f"{ours.name}{self.label}", segments.inputs[0].size, lambda: step(*next(turns)))

    def _losses(self, model: Any, purpose: str, inputs: np.ndarray, targets: np.ndarray) -> Any:
        """Returns nats [B, L] and updates the memory for this purpose."""
        tokens = self._torch.from_numpy(np.asarray(inputs, np.int64))
        labels = self._torch.from_numpy(np.asarray(targets, np.int64))
        nll, memory = self._score(model, tokens, labels, self._memory.get(purpose))
        self._memory[purpose] = memory
        return nll

    def _score(
        self, model: Any, tokens: Any, labels: Any, memory: list[Any] | None
    ) -> tuple[Any, list[Any]]:
        """Returns nats [B, L] and the next memory."""
        raise NotImplementedError

    @functools.cached_property
    def _trained(self) -> tuple[Any, Any]:
        """Returns the same model at the lengths of training, with dropout, and its optimizer."""
        optimizer = self._config.optimizer
        model = self._make_model(self._config.train, self._model.state_dict()).train()
        adam = self._torch.optim.Adam(
            model.parameters(),
            optimizer.learning_rate,
            betas=(ADAM_B1, optimizer.adam_b2),
            eps=optimizer.adam_eps,
            # On a CPU, fused Adam takes a quarter of the time of the other two kinds.
            fused=True,
        )
        return model, adam

    def _make_model(self, lengths: Any, tensors: Any) -> Any:
        """Creates the model at the lengths of training or evaluation."""
        raise NotImplementedError


class HuggingFaceModel(TorchModel):
    """Hugging Face's `TransfoXLLMHeadModel`."""

    format = Format.HUGGINGFACE

    def __init__(self, config: ExperimentConfig, params: Any, *, vocab_size: int) -> None:
        """Makes the model with our parameters.

        Raises `UserError` if a package is missing or the class lacks it.
        """
        torch, self._transformers = _import_packages()
        super().__init__(config, params, vocab_size=vocab_size, torch=torch)
        self.versions += f", transformers {self._transformers.__version__}"
        self._token = torch.zeros((1, 1), dtype=torch.int64)
        self._draws = torch.Generator().manual_seed(0)

    def task(self, name: str, ours: Task, built: Built) -> Task:
        """Returns the counterpart of our task, with one segment or token per call."""
        if name != "generation":
            return super().task(name, ours, built)
        return Task(ours.name, 1, lambda: self.generate_token(self._config.generate.top_k))

    def generate_token(self, top_k: int | None) -> int:
        """Samples the next token as `model.generate(do_sample=True, top_k=top_k)` does.

        The first token is sampled after token 0.
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

    def _score(
        self, model: Any, tokens: Any, labels: Any, memory: list[Any] | None
    ) -> tuple[Any, list[Any]]:
        # `model(tokens, labels=...)` scores one token fewer.
        output = model.transformer(tokens, mems=memory)
        hidden = output.last_hidden_state
        if model.crit.n_clusters:
            # The head drops the last state and the first label, so each gets one more entry than it
            # needs.
            hidden = self._torch.cat([hidden, hidden[:, -1:]], dim=1)
            shifted_labels = self._torch.cat([labels[:, :1], labels], dim=1)
            nll = model.crit(hidden, shifted_labels, keep_order=True)
        else:
            # With labels, a head without clusters first copies all log probabilities, which takes
            # 1.2 to 2.6 times as long.
            nll = -model.crit(hidden).gather(1, labels.reshape(-1, 1))
        return nll.view(labels.shape), output.mems

    def _make_model(self, lengths: Any, tensors: Any) -> Any:
        arguments = huggingface.config_of(self._config.model, lengths, vocab_size=self._vocab_size)
        rates = self._config.model.dropout
        arguments |= {"dropout": rates.rate, "dropatt": rates.attention}
        with warnings.catch_warnings():
            # It warns about a tuple's order. Results are read by name.
            warnings.simplefilter("ignore", DeprecationWarning)
            config = self._transformers.TransfoXLConfig(**arguments)
            model = self._transformers.TransfoXLLMHeadModel(config)
        model.load_state_dict(tensors)
        return model


class OriginalModel(TorchModel):
    """The authors' `MemTransformerLM` from a clone of their repository.

    It runs eagerly or compiled by torch.compile.
    """

    format = Format.ORIGINAL

    def __init__(
        self, config: ExperimentConfig, params: Any, *, vocab_size: int, path: str, compiled: bool
    ) -> None:
        """Makes the model with our parameters.

        Raises `UserError` for another directory or model, or without torch.
        """
        has_both = config.model.encoding is Encoding.RELATIVE and not config.model.untie_r
        config.expect(
            has_both,
            "model.encoding model.untie_r",
            "--peer=original has only relative, and untie_r off",
        )
        self._class, torch = import_original(Path(path, "pytorch"))
        self._compiled = compiled
        self.label = ", compiled" if compiled else ", eager"
        super().__init__(config, params, vocab_size=vocab_size, torch=torch)

    def _score(
        self, model: Any, tokens: Any, labels: Any, memory: list[Any] | None
    ) -> tuple[Any, list[Any]]:
        size = (model.mem_len, len(tokens), model.d_model)
        memory = memory or [self._torch.zeros(size) for _ in range(model.n_layer + 1)]
        nll, *memory = model(tokens.T.contiguous(), labels.T.contiguous(), *memory)
        return nll.T, memory

    def _make_model(self, lengths: Any, tensors: Any) -> Any:
        model = self._class(
            **original.arguments_of(self._config.model, lengths, vocab_size=self._vocab_size)
        )
        model.load_state_dict(tensors)
        model.crit.keep_order = True  # Otherwise losses are in the order of clusters.
        if self._compiled:
            # Layer by layer: torch 2.13 fuses across three layers or more, and losses of enwik8_12l
            # are wrong by 6.
            for layer in model.layers:
                layer.compile()
        return model


def import_original(folder: Path, *, flag: str = "--peer_path") -> tuple[Any, Any]:
    """Returns the release's class, patched in memory for current versions of torch, and torch.

    Args:
      folder: The directory `pytorch` of a clone.
      flag: The flag that names the clone, for the error.

    Raises:
      UserError: If the directory has other files, or torch is missing.
    """
    sources = {}
    for name in _FILES:
        file = folder / name
        if file.is_file():
            sources[file.stem] = file.read_bytes()
    require(
        hashlib.sha256(b"".join(sources.values())).hexdigest() == _DIGEST,
        f"{flag} must be a clone of {REPOSITORY}, got {folder.parent}. Clone that address.",
    )
    with rephrased("the comparison requires torch (%s). Run pip install '.[peer]'.", ImportError):
        import torch
    for name, source in sources.items():
        for old, new in _PATCHES.items():
            source = source.replace(old, new)
        module = types.ModuleType(name)
        # The files and torch.compile import it by this name.
        sys.modules[name] = module
        exec(compile(source, name, "exec"), vars(module))
    return module.MemTransformerLM, torch


def _import_packages() -> tuple[Any, Any]:
    missing = (
        "the comparison requires torch and a transformers with TransfoXL (%s). "
        "Run pip install '.[peer]' for torch and transformers 4.35.2."
    )
    # transformers turns a failed import within it into a RuntimeError.
    with warnings.catch_warnings(), rephrased(missing, ImportError, RuntimeError):
        # torch warns about names that it has renamed since.
        warnings.simplefilter("ignore", FutureWarning)
        import torch
        import transformers
        from transformers import TransfoXLConfig, TransfoXLLMHeadModel  # noqa: F401
    return torch, transformers


def with_peer_compat(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config with the peer's --compat, except for a masked memory.

    Raises `UserError` for sampling settings that the peer does not support.
    """
    for name, only_value in (("samples", 1), ("temperature", 1.0), ("top_p", 1.0)):
        value = getattr(config.generate, name)
        require(
            value == only_value, f"generate.{name} must be {only_value} with --peer, got {value}"
        )
    return config_tree.replace(
        apply_preset(config, "hf"), {"model.compat.memory_start": MemoryStart.MASKED}
    )


def checked_peers(built: Built, path: str | None) -> list[TorchModel]:
    """Returns the peers with our untrained parameters and full memories.

    Prints the losses' largest differences.

    They are the release in the clone at `path`, eager and compiled, or else Hugging Face's model.
    Raises `UserError` if a token's loss, scored from zeros in the memory, differs by more than
    rounding.
    """
    params = built.init_params()
    vocab_size = built.model.vocab_size
    peers: list[TorchModel]
    if path:
        peers = [
            OriginalModel(built.config, params, vocab_size=vocab_size, path=path, compiled=compiled)
            for compiled in (False, True)
        ]
    else:
        peers = [HuggingFaceModel(built.config, params, vocab_size=vocab_size)]

    # Our model with the peers' --compat, including the memory of zeros, on one row.
    config = apply_preset(built.config, "hf")
    length = config.eval.segment_len
    tokens = timing.draw_tokens(vocab_size, length * _COMPARED_SEGMENTS + 1)
    reader = evaluation_segments(tokens, batch_size=1, segment_len=length)
    segments = reader.segments(0, _COMPARED_SEGMENTS)
    ours = build(
        config_tree.replace(config, {"eval.cache_dtype": None, "eval.batch_size": 1}),
        vocab_size=vocab_size,
    )
    prepared = ours.prepare_params(params)
    _, scores = ours.eval_step(prepared, ours.init_memory(prepared), ours.place(segments))

    print(f"peer: {peers[0].versions}; --compat=hf on both sides")
    for peer in peers:
        pairs = zip(segments.inputs, segments.targets, strict=True)
        peer_nll = [peer.evaluate(inputs, targets) for inputs, targets in pairs]
        difference = float(np.abs(np.ravel(scores.nll) - np.ravel(peer_nll)).max())
        require(
            difference <= TOLERANCE,
            f"the peer's losses must match ours to {TOLERANCE:g} nats, got a difference of "
            f"{difference:.2g}. The models do not compute the same function, so nothing was timed.",
        )
        print(f"largest difference of a token's loss{peer.label}: {difference:.1e} nats")
        peer.fill_memory()
    print()
    return peers
