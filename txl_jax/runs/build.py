"""Model, optimizer, schedule and mesh of one config, and the compiled functions of training and evaluation."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from txl_jax import sharding
from txl_jax.config import CacheDType, EvalConfig, ExperimentConfig, Network, TrainConfig
from txl_jax.data import ready_ids
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.evaluation.sliding_window import WindowStep, make_window_step
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL, EvalStep, make_eval_step
from txl_jax.inference import scorer
from txl_jax.inference.cache import KVCache, cache_capacity
from txl_jax.inference.generate import Generator
from txl_jax.inference.prepare import check_devices
from txl_jax.inference.scorer import Scorer
from txl_jax.memory import Memory
from txl_jax.modules.language_model import LanguageModel
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import Implementation, Implementations, Problem, choose
from txl_jax.ops.attention.positions import table_length
from txl_jax.segments import Segments
from txl_jax.sharding import axes
from txl_jax.training import optimizer as optimizer_lib
from txl_jax.training.state import TrainState, init_state, state_from_params
from txl_jax.training.step import make_train_step

# The implementations of attention that a run uses, chosen once for its lengths and the devices of its mesh.


class Chosen(NamedTuple):
    """An implementation and the reason for it."""

    implementation: Implementation
    reason: str


class AttentionChoice(NamedTuple):
    """Implementations of a run: in updates, and in evaluation and generation, which read a KV cache."""

    training: Chosen
    evaluation: Chosen

    @property
    def implementations(self) -> Implementations:
        """Without the reasons."""
        return Implementations(self.training.implementation, self.evaluation.implementation)

    def record(self) -> dict[str, str]:
        """Returns the implementations by use, as config.json has them."""
        return {use: str(chosen.implementation) for use, chosen in self._asdict().items()}

    def describe(self, before: Mapping[str, str] | None = None) -> str:
        """Describes what was chosen and why, for people.

        Args:
          before: implementations by use; only what differs from them is described, nothing if all are the same.
        """
        clauses: dict[str, str] = {}
        for use, chosen in self._asdict().items():
            name = str(chosen.implementation)
            if before is None:
                clauses[f"{use} {name}"] = chosen.reason
            elif before.get(use, name) != name:
                clauses[f"{use} was {before[use]} and is now {name}"] = chosen.reason
        if len(set(clauses.values())) == 1:
            return f"{', '.join(clauses)} ({next(iter(clauses.values()))})"
        return "; ".join(f"{clause} ({reason})" for clause, reason in clauses.items())


def choose_attention(
    config: ExperimentConfig, mesh: Mesh | AbstractMesh, *, recorded: Implementations | None = None
) -> AttentionChoice:
    """Chooses the implementations of a run.

    Args:
      config: the lengths, the types, and `model.attention`.
      mesh: the devices; an abstract mesh has none, and counts as CPUs.
      recorded: an earlier choice of this run, kept where it can serve and is what `model.attention` asks for.

    Raises:
      UserError: `model.attention` names a path that cannot serve this run.
    """
    path = str(config.model.attention)
    kept = recorded or Implementations(path, path)
    return AttentionChoice(
        _choose(kept.training, path, training_problem(config, mesh)),
        _choose(kept.cached, path, evaluation_problem(config, mesh)),
    )


def training_problem(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes attention in an update, of one microbatch on one device."""
    train = config.train
    n_keys = train.mem_len + train.segment_len
    rows = train.batch_size // train.grad_accum_steps
    return dataclasses.replace(
        _of_model(config, mesh),
        batch=max(rows // sharding.num_batch_shards(mesh), 1),
        segment_len=train.segment_len,
        n_keys=n_keys,
        n_positions=_if_position_keys(config, n_keys),
        window=config.compat.window(train.mem_len, same_length=train.same_length),
        dropout=config.model.dropout.attention > 0,
    )


def evaluation_problem(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes attention in streaming evaluation, on one device."""
    lengths, rows = config.eval, config.eval.batch_size
    capacity = cache_capacity(mem_len=lengths.mem_len, segment_len=lengths.segment_len)
    n_positions = table_length(
        segment_len=lengths.segment_len, capacity=capacity, clamp_len=config.model.clamp(lengths.clamp_len)
    )
    split = sharding.batch_axes(mesh, rows) is not None
    return dataclasses.replace(
        _of_model(config, mesh),
        batch=rows // sharding.num_batch_shards(mesh) if split else rows,
        segment_len=lengths.segment_len,
        n_keys=capacity + lengths.segment_len,
        n_positions=_if_position_keys(config, n_positions),
        window=config.compat.window(lengths.mem_len, same_length=lengths.same_length),
        capacity=capacity,
        cache_dtype=None if lengths.cache_dtype is CacheDType.INT8 else str(lengths.cache_dtype or config.model.dtype),
    )


def _of_model(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes what training and evaluation have in common."""
    model, device = config.model, None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return Problem(
        platform="cpu" if device is None else device.platform,
        device_kind="" if device is None else device.device_kind,
        dtype=str(model.dtype),
        batch=1,
        n_head=model.n_head // mesh.shape[sharding.TENSOR],
        segment_len=1,
        n_keys=1,
        d_head=model.d_head,
        has_position_score=encoding_of(model, config.compat).has_position_score,
        documents=config.data.reset_at is not None,
    )


def _if_position_keys(config: ExperimentConfig, n_positions: int) -> int:
    """Returns the number of position keys, 0 if the encoding has none."""
    return n_positions if encoding_of(config.model, config.compat).products_per_key > 2 else 0


def _choose(kept: Implementation | str, path: str, problem: Problem) -> Chosen:
    if isinstance(kept, Implementation) and path in (choose.AUTO, kept.path) and choose.can_serve(kept, problem):
        return Chosen(kept, "as the run was begun")
    return Chosen(*choose.choose(path, problem))


# Shardings of batches and memories over a mesh, and their transfer to the devices.


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings of batches and memories over a mesh, and the transfer to the devices."""

    mesh: Mesh

    def own_rows(self, batch_size: int) -> np.ndarray:
        """Returns the row numbers of a batch that this process's devices hold, ascending: those that it must read.

        They need not be contiguous: where a mesh is laid over a torus, the chips of a host form a tile of it.

        Raises:
          UserError: they hold none, as the mesh does not include them.
        """
        placed = sharding.named_sharding(self.mesh, sharding.batch_axes(self.mesh, batch_size))
        own = placed.addressable_devices_indices_map((batch_size,))
        if not own:
            raise UserError(
                f"no device of process {jax.process_index()} is in the mesh {dict(self.mesh.shape)}; start fewer "
                "processes, or use all devices with --mesh.data=none"
            )
        return np.unique(np.concatenate([np.arange(batch_size)[index] for index in own.values()]))

    def place(self, segments: Segments, *, batch_size: int | None = None) -> Segments:
        """Transfers segments to the devices, with the rows sharded like those of the memory.

        Args:
          segments: the rows that this process reads (see `own_rows`).
          batch_size: B, over all processes; None: this process has read all rows.
        """
        own = np.arange(segments.inputs.shape[1]) if batch_size is None else self.own_rows(batch_size)
        batch_size = batch_size or len(own)

        def put(placed: NamedSharding, array: np.ndarray) -> jax.Array:
            def of_device(index: Any) -> Any:
                rows = np.arange(batch_size)[index[1]]
                return array[:, np.searchsorted(own, rows)]

            return jax.make_array_from_callback((array.shape[0], batch_size, *array.shape[2:]), placed, of_device)

        return jax.tree.map(put, self.segment_shardings(batch_size), segments)

    def memory_shardings(self, batch_size: int) -> Memory:
        """Returns the shardings of a training memory."""
        rows = sharding.batch_axes(self.mesh, batch_size)
        return Memory(hidden=self.named(axes.LAYERS, rows, axes.LENGTH, None), valid=self.named(rows))

    def segment_shardings(self, batch_size: int) -> Segments:
        """Returns the shardings of S segments."""
        rows = sharding.batch_axes(self.mesh, batch_size)
        tokens = self.named(None, rows, axes.LENGTH)
        return Segments(inputs=tokens, targets=tokens, weights=tokens, reset=self.named(None, rows))

    def named(self, *logical_axes: Any) -> Any:
        """Returns the sharding of an array by its logical axes, in place of the array in trees of shardings."""
        return sharding.named_sharding(self.mesh, *logical_axes)

    def abstract_segments(self, lengths: TrainConfig | EvalConfig) -> Segments:
        """Returns shapes, types and shardings of the segments that one call of the train or eval step takes."""
        per_call = lengths.segments_per_call if isinstance(lengths, TrainConfig) else SEGMENTS_PER_CALL
        shape = (per_call, lengths.batch_size, lengths.segment_len)
        shardings: Any = self.segment_shardings(lengths.batch_size)

        def abstract(name: str, shape: tuple[int, ...], dtype: str) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(shardings, name))

        return Segments(
            inputs=abstract("inputs", shape, "int32"),
            targets=abstract("targets", shape, "int32"),
            weights=abstract("weights", shape, "float32"),
            reset=abstract("reset", shape[:2], "bool"),
        )


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled program, ready to be called, and the seconds of its compilation, without tracing and lowering."""

    program: jax.stages.Compiled
    seconds: float

    @classmethod
    def of(cls, lowered: jax.stages.Lowered) -> "Compilation":
        """Compiles a program, or reads it from JAX's persistent cache."""
        began = time.monotonic()
        return cls(lowered.compile(), time.monotonic() - began)

    @functools.cached_property
    def temporary_bytes(self) -> int | None:
        """Bytes of activations and other scratch per device, or None if the backend does not report them."""
        analysis: Any = self.program.memory_analysis()
        return None if analysis is None else analysis.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class RunComponents:
    """Model, optimizer, schedule and mesh of one config.

    Their compiled functions, shapes and shardings are grouped by use: `training`, `evaluation`, `placement` of batches.
    """

    config: ExperimentConfig
    model: LanguageModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh
    attention: AttentionChoice | None = None  # None for a network without attention.

    @functools.cached_property
    def placement(self) -> Placement:
        """Shardings of batches and memories, and the transfer to the devices."""
        return Placement(self.mesh)

    @functools.cached_property
    def training(self) -> "TrainingFunctions":
        """The training state and the compiled train step."""
        return TrainingFunctions(self)

    @functools.cached_property
    def evaluation(self) -> "EvaluationFunctions":
        """The jitted functions of evaluation."""
        return EvaluationFunctions(self)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.training.abstract_state.params))

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Returns the jitted function; it enters the mesh whenever it is called or lowered, on any thread."""
        return sharding.bind_mesh(self.mesh, jax.jit(function, **options))


@dataclasses.dataclass(frozen=True)
class TrainingFunctions:
    """The training state of a run and its compiled train step."""

    components: RunComponents

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the training state; nothing is allocated."""
        config, mesh = self.components.config, self.components.mesh
        with sharding.use_mesh(mesh):
            boxed = jax.eval_shape(self._init_boxed)
        shardings = sharding.param_shardings(mesh, boxed)
        shardings = shardings.replace(memory=self.components.placement.memory_shardings(config.train.batch_size))
        return jax.tree.map(
            lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
            nn.unbox(boxed),
            shardings,
        )

    def init_state(self) -> TrainState:
        """Returns the state before the first update, initialized in place on the devices."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        state: TrainState = self.components.jit(lambda: nn.unbox(self._init_boxed()), out_shardings=shardings)()
        return state

    def state_from_params(self, params: Any) -> TrainState:
        """Returns the state before the first update of training that begins with these parameters."""
        components = self.components
        config = components.config
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        begin = functools.partial(
            state_from_params,
            components.model,
            components.optimizer,
            batch_size=config.train.batch_size,
            mem_len=config.train.mem_len,
            average=config.average,
        )
        return components.jit(begin, out_shardings=shardings)(params)

    def init_params(self) -> Any:
        """Returns the parameters before the first update, without optimizer state and memory."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state.params)
        return self.components.jit(lambda: nn.unbox(self._init_boxed().params), out_shardings=shardings)()

    def compile_step(self) -> Compilation:
        """Compiles the train step of S updates (`TrainStep`)."""
        self.check_batch_size()
        components = self.components
        step = make_train_step(components.model, components.optimizer, components.schedule, components.config)
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        # The state must come out as it went in, or the next call would not take it.
        shardings = state_shardings, sharding.named_sharding(components.mesh)
        jitted = components.jit(step, donate_argnums=0, out_shardings=shardings)
        segments = components.placement.abstract_segments(components.config.train)
        return Compilation.of(jitted.lower(self.abstract_state, segments))

    def check_batch_size(self) -> None:
        """Raises `UserError` if the training rows cannot be split evenly over devices and microbatches."""
        train, shards = self.components.config.train, sharding.num_batch_shards(self.components.mesh)
        multiple = shards * train.grad_accum_steps
        if train.batch_size % multiple:
            in_microbatches = (
                f", in {train.grad_accum_steps} microbatches (train.grad_accum_steps)"
                if train.grad_accum_steps > 1
                else ""
            )
            raise UserError(
                f"train.batch_size is {train.batch_size} and the rows are split over {shards} devices "
                f"(data x fsdp of the mesh){in_microbatches}; choose a multiple of {multiple}, or fewer devices with "
                "--mesh.data"
            )

    def _init_boxed(self) -> TrainState:
        config = self.components.config
        return init_state(
            self.components.model,
            self.components.optimizer,
            seed=config.seed,
            batch_size=config.train.batch_size,
            mem_len=config.train.mem_len,
            average=config.average,
        )


@dataclasses.dataclass(frozen=True)
class EvaluationFunctions:
    """The jitted functions of evaluation."""

    components: RunComponents

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The forward pass of evaluation."""
        return scorer.make_scorer(self.components.model, self.components.config.eval)

    @functools.cached_property
    def prepare_params(self) -> Callable[[Any], Any]:
        """The jitted function that prepares parameters for evaluation."""
        return self.components.jit(self.scorer.prepare_params)

    @functools.cached_property
    def eval_step(self) -> EvalStep:
        """The jitted evaluation of S segments; the memory is donated."""
        step = make_eval_step(self.components.model, self.components.config.eval)
        return self.components.jit(step, donate_argnums=1)

    @functools.cached_property
    def window_step(self) -> WindowStep:
        """The jitted evaluation of windows."""
        eval_config = self.components.config.eval
        step = make_window_step(
            self.components.model, clamp_len=eval_config.clamp_len, temperature=eval_config.temperature
        )
        return sharding.bind_mesh(self.components.mesh, step)

    def init_memory(self, weights: Any) -> Any:
        """Returns an empty evaluation memory; `weights` are prepared parameters."""
        return self.components.jit(self.scorer.init_memory, out_shardings=self.memory_shardings)(weights)

    def generator(self, weights: Any) -> Generator:
        """Returns the generator of a model that can generate; `weights` are prepared parameters."""
        return Generator(weights, self.components.config.eval, mesh=self.components.mesh)

    @property
    def memory_shardings(self) -> Any:
        """Shardings of the evaluation memory."""
        config, mesh = self.components.config, self.components.mesh
        if isinstance(self.components.model, RecurrentModel):
            return self.components.placement.memory_shardings(config.eval.batch_size)
        rows = sharding.batch_axes(mesh, config.eval.batch_size)
        named = self.components.placement.named
        layers = (named(rows, axes.HEADS, None, None),) * config.model.n_layer
        return KVCache(keys=layers, values=layers, valid=named(rows), write_index=named(), mem_len=config.eval.mem_len)

    @property
    def memory_dtype(self) -> jnp.dtype:
        """Type of stored keys and values."""
        return scorer.memory_dtype(self.components.model, self.components.config.eval)


def build(
    config: ExperimentConfig,
    *,
    vocab_size: int,
    end_token: int | None = None,
    mesh: Mesh | None = None,
    recorded: Implementations | None = None,
) -> RunComponents:
    """Assembles the components of a run.

    Args:
      config: The settings.
      vocab_size: V.
      end_token: Id of the token that `data.reset_at` names.
      mesh: The devices, or None for the mesh of the config.
      recorded: The implementations of attention of an earlier start (`choose_attention`).

    Raises:
      UserError: If settings do not fit each other, the vocabulary or the devices.
    """
    config.validate()
    config.model.validate_vocabulary(vocab_size)
    if (config.data.reset_at is None) != (end_token is None) or not 0 <= (end_token or 0) < vocab_size:
        raise UserError(
            f"end_token must be the id of the token data.reset_at ({config.data.reset_at!r}) in a vocabulary of "
            f"{vocab_size} tokens, got {end_token}"
        )
    mesh = sharding.make_mesh(config.mesh) if mesh is None else mesh
    check_devices(config.eval.weight_dtype, mesh.size)
    if jax.dtypes.canonicalize_dtype(config.model.dtype) != config.model.dtype:
        raise UserError(f"model.dtype is {config.model.dtype} and jax runs without it; set JAX_ENABLE_X64=1")
    for name, axis in (("d_model", sharding.FSDP), ("n_head", sharding.TENSOR), ("d_inner", sharding.TENSOR)):
        size, devices = getattr(config.model, name), mesh.shape[axis]
        if size % devices:
            raise UserError(f"model.{name} is {size} and mesh.{axis} is {devices}; the devices must divide it evenly")
    model: LanguageModel
    attention = None
    if config.model.network is not Network.TRANSFORMER_XL:
        model = RecurrentModel(config.model, config.compat, vocab_size, mesh.size)
    else:
        attention = choose_attention(config, mesh, recorded=recorded)
        model = TransformerXL(
            config.model,
            config.compat,
            vocab_size,
            end_token,
            num_devices=mesh.size,
            attention=attention.implementations,
        )
    return RunComponents(
        config=config,
        model=model,
        optimizer=optimizer_lib.make_optimizer(config),
        schedule=optimizer_lib.learning_rate(config),
        mesh=mesh,
        attention=attention,
    )


def build_for(config: ExperimentConfig, vocabulary: Vocabulary, **options: Any) -> RunComponents:
    """Assembles the components of a run with this vocabulary; `options` are the other arguments of `build`.

    Raises:
      UserError: As `build`, or if `data.reset_at` is not the text of one token.
    """
    end = config.data.reset_at
    end_token = None if end is None else ready_ids.find_token(vocabulary, end, name="data.reset_at")
    return build(config, vocab_size=vocabulary.size, end_token=end_token, **options)
