"""Wires the parts of a run: model, optimiser, mesh, and the compiled functions with their shardings."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from txl_jax import sharding
from txl_jax.config import EvalConfig, ExperimentConfig, Network, TrainConfig
from txl_jax.evaluation.sliding_window import WindowStep, make_window_step
from txl_jax.evaluation.streaming import EvalStep, make_eval_step
from txl_jax.inference import scorer
from txl_jax.inference.cache import KVCache
from txl_jax.inference.scorer import Scorer
from txl_jax.memory import Memory
from txl_jax.modules.language_model import LanguageModel
from txl_jax.modules.lstm import LSTM
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.segments import Segments
from txl_jax.sharding import axes
from txl_jax.training import optimizer as optimizer_lib
from txl_jax.training.state import TrainState, init_state
from txl_jax.training.step import TrainStep, make_train_step


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a job is made of."""

    config: ExperimentConfig
    model: LanguageModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the training state; no memory is touched."""
        with sharding.use_mesh(self.mesh):
            boxed = jax.eval_shape(self._init_boxed)
        shardings = sharding.param_shardings(self.mesh, boxed)
        shardings = shardings.replace(memory=self._memory_shardings(self.config.train.batch_size))
        return jax.tree.map(
            lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
            nn.unbox(boxed),
            shardings,
        )

    @property
    def n_parameter(self) -> int:
        """Numbers that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    def init_state(self) -> TrainState:
        """The state before the first update, made in place on the devices."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        return self._jit(lambda: nn.unbox(self._init_boxed()), out_shardings=shardings)()

    def init_params(self) -> Any:
        """The parameters before the first update, without optimiser and memory."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state.params)
        return self._jit(lambda: nn.unbox(self._init_boxed().params), out_shardings=shardings)()

    def compile_train_step(self) -> tuple[TrainStep, "Compilation"]:
        """The compiled step of S updates, and what its compilation tells."""
        self.check_training_rows()
        step = make_train_step(self.model, self.optimizer, self.schedule, self.config)
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        # The state must come out as it went in, or the next call would not take it.
        jitted = self._jit(step, donate_argnums=0, out_shardings=(state_shardings, sharding.named_sharding(self.mesh)))
        lowered = jitted.lower(self.abstract_state, self.abstract_segments(self.config.train))
        began = time.monotonic()
        compiled = lowered.compile()
        analysis = compiled.memory_analysis()
        return compiled, Compilation(
            seconds=time.monotonic() - began,
            temporary_bytes=None if analysis is None else analysis.temp_size_in_bytes,
        )

    def check_training_rows(self) -> None:
        """Raises `ValueError` if the training rows do not divide among the devices."""
        train, devices = self.config.train, sharding.num_batch_shards(self.mesh)
        groups = devices * train.grad_accum_steps
        if train.batch_size % groups:
            chunks = (
                f", in {train.grad_accum_steps} chunks (train.grad_accum_steps)" if train.grad_accum_steps > 1 else ""
            )
            raise ValueError(
                f"train.batch_size is {train.batch_size} and the rows are spread over {devices} devices "
                f"(mesh.data x mesh.fsdp){chunks}; choose a multiple of {groups}, or fewer devices with --mesh.data"
            )

    @functools.cached_property
    def reader(self) -> Scorer:
        """What evaluation reads with."""
        return scorer.make_scorer(self.model, self.config.eval)

    @functools.cached_property
    def prepare_params(self) -> Callable[[Any], Any]:
        """The jitted function that lays parameters out for evaluation."""
        return self._jit(self.reader.prepare_params)

    @functools.cached_property
    def eval_step(self) -> EvalStep:
        """The jitted evaluation of S segments; the memory is donated."""
        return self._jit(make_eval_step(self.model, self.config.eval), donate_argnums=1)

    @functools.cached_property
    def window_step(self) -> WindowStep:
        """The jitted evaluation of windows."""
        span = self.config.eval
        step = make_window_step(self.model, clamp_len=span.clamp_len, temperature=span.temperature)
        return sharding.bind_mesh(self.mesh, step)

    def eval_memory(self, weights: Any) -> Any:
        """An empty memory of the evaluation's shape."""
        return self._jit(self.reader.init_memory, out_shardings=self.eval_memory_shardings)(weights)

    @property
    def eval_memory_shardings(self) -> Any:
        """Where the memory of the evaluation lies."""
        span = self.config.eval
        if isinstance(self.model, LSTM):
            return self._memory_shardings(span.batch_size)
        rows = sharding.batch_axes(self.mesh, span.batch_size)
        layers = (sharding.named_sharding(self.mesh, rows, axes.HEADS, None, None),) * self.config.model.n_layer
        return KVCache(
            keys=layers,
            values=layers,
            valid=sharding.named_sharding(self.mesh, rows),
            write_index=sharding.named_sharding(self.mesh),
            mem_len=span.mem_len,
        )

    @property
    def memory_dtype(self) -> jnp.dtype:
        """Type of stored keys and values."""
        return scorer.memory_dtype(self.model, self.config.eval)

    def own_rows(self, batch_size: int) -> np.ndarray:
        """Numbers of the rows of a batch that this process's devices hold, ascending, and that it therefore reads.

        They need not follow one another: where a mesh is laid over a torus, a host's chips are a tile of it.

        Raises:
          ValueError: they hold none, as the mesh does not reach them.
        """
        placed = sharding.named_sharding(self.mesh, sharding.batch_axes(self.mesh, batch_size))
        own = placed.addressable_devices_indices_map((batch_size,))
        if not own:
            raise ValueError(
                f"no device of process {jax.process_index()} is in the mesh {dict(self.mesh.shape)}; start fewer "
                "processes, or use all devices with --mesh.data=none"
            )
        return np.unique(np.concatenate([np.arange(batch_size)[index] for index in own.values()]))

    def place(self, segments: Segments, *, batch_size: int | None = None) -> Segments:
        """Puts segments on the devices, their rows spread as those of the memory.

        Args:
          segments: the rows that this process reads (see `own_rows`).
          batch_size: B, over all processes; None: this process has read them all.
        """
        own = np.arange(segments.inputs.shape[1]) if batch_size is None else self.own_rows(batch_size)
        batch_size = batch_size or len(own)

        def put(placed: NamedSharding, part: np.ndarray) -> jax.Array:
            def of_device(index: tuple[slice, ...]) -> np.ndarray:
                rows = np.arange(batch_size)[index[1]]
                return part[:, np.searchsorted(own, rows)]

            return jax.make_array_from_callback((part.shape[0], batch_size, *part.shape[2:]), placed, of_device)

        return jax.tree.map(put, self._segment_shardings(batch_size), segments)

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Returns the jitted function, which enters the mesh whenever it is called or lowered."""
        return sharding.bind_mesh(self.mesh, jax.jit(function, **options))

    def _init_boxed(self) -> TrainState:
        train = self.config.train
        return init_state(
            self.model,
            self.optimizer,
            seed=self.config.seed,
            batch_size=train.batch_size,
            mem_len=train.mem_len,
            average=self.config.average,
        )

    def _memory_shardings(self, batch_size: int) -> Memory:
        rows = sharding.batch_axes(self.mesh, batch_size)
        return Memory(
            hidden=sharding.named_sharding(self.mesh, axes.LAYERS, rows, axes.LENGTH, None),
            valid=sharding.named_sharding(self.mesh, rows),
        )

    def _segment_shardings(self, batch_size: int) -> Segments:
        rows = sharding.batch_axes(self.mesh, batch_size)
        tokens = sharding.named_sharding(self.mesh, None, rows, axes.LENGTH)
        return Segments(
            inputs=tokens, targets=tokens, weights=tokens, reset=sharding.named_sharding(self.mesh, None, rows)
        )

    def abstract_segments(self, span: TrainConfig | EvalConfig) -> Segments:
        """Shapes, types and shardings of what a call of the training or evaluation step reads."""
        shape = (span.segments_per_call, span.batch_size, span.segment_len)
        shapes = Segments(inputs=shape, targets=shape, weights=shape, reset=shape[:2])
        dtypes = Segments(inputs="int32", targets="int32", weights="float32", reset="bool")
        return Segments(
            *(
                jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
                for shape, dtype, placed in zip(shapes, dtypes, self._segment_shardings(span.batch_size), strict=True)
            )
        )


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What compiling a step told."""

    seconds: float
    temporary_bytes: int | None  # Activations and other scratch, per device; None: the backend does not say.


def assemble(config: ExperimentConfig, *, vocab_size: int, mesh: Mesh | None = None) -> Parts:
    """The parts of a run, over its own devices or another mesh's.

    Raises:
      ValueError: settings that do not fit each other, the vocabulary or the devices.
    """
    config.validate()
    config.model.validate_vocabulary(vocab_size)
    mesh = sharding.make_mesh(config.mesh) if mesh is None else mesh
    if jnp.zeros((), config.model.dtype).dtype != config.model.dtype:
        raise ValueError(f"model.dtype is {config.model.dtype} and jax runs without it; set JAX_ENABLE_X64=1")
    for name, axis in (("d_model", sharding.FSDP), ("n_head", sharding.TENSOR), ("d_inner", sharding.TENSOR)):
        size, devices = getattr(config.model, name), mesh.shape[axis]
        if size % devices:
            raise ValueError(f"model.{name} is {size} and mesh.{axis} is {devices}; the devices must divide it evenly")
    network = {Network.TRANSFORMER_XL: TransformerXL, Network.LSTM: LSTM}[config.model.network]
    return Parts(
        config=config,
        model=network(config.model, config.compat, vocab_size, mesh.size),
        optimizer=optimizer_lib.make_optimizer(config),
        schedule=optimizer_lib.learning_rate(config),
        mesh=mesh,
    )
