"""Builds a config's model, optimizer, schedule, mesh, attention and compiled functions.

The functions are compiled for these parts.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from txl_jax.config import CacheDType, EvalConfig, ExperimentConfig, Network, TrainConfig
from txl_jax.config.config_tree import require
from txl_jax.data import ready_ids
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.evaluation.sliding_window import WindowStep, make_window_step
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL, EvalStep, make_eval_step
from txl_jax.inference import scorer
from txl_jax.inference.cache import KVCache, cache_capacity
from txl_jax.inference.generate import Generator
from txl_jax.inference.prepare import check_devices
from txl_jax.inference.scorer import Scorer
from txl_jax.memory import Memory
from txl_jax.modules import AnyModel
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import Implementation, Implementations, Problem, choose
from txl_jax.ops.attention.distances import table_length
from txl_jax.recurrence import Segments
from txl_jax.runs import first_contact
from txl_jax.runtime.environment import bytes_on_device
from txl_jax.sharding import axes
from txl_jax.sharding.axes import batch_axes, named_sharding, num_batch_shards, param_shardings
from txl_jax.sharding.mesh import FSDP, TENSOR, bind_mesh, make_mesh, use_mesh
from txl_jax.training import optimizer as optimizer_lib
from txl_jax.training.member_axis import Members
from txl_jax.training.step import TrainState, init_params, init_state, make_train_step


class Chosen(NamedTuple):
    """An implementation of attention and the reason for it."""

    implementation: Implementation
    reason: str
    failed: bool = False  # Whether a path that comes first failed on this device.


class AttentionChoice(NamedTuple):
    """The implementations of attention that a run uses.

    They are chosen once, for the run's lengths and the devices of its mesh.
    """

    training: Chosen
    evaluation: Chosen  # Of generation too: both read a KV cache.

    def record(self) -> dict[str, str]:
        """Returns the implementations by use, as config.json has them."""
        return {use: str(chosen.implementation) for use, chosen in self._asdict().items()}

    def describe(self, before: Mapping[str, str] | None = None) -> str:
        """Describes the choice and its reasons, for the log.

        With `before`, only the uses that differ from it.
        """
        clauses: dict[str, list[str]] = {}  # By reason.
        for use, name in self.record().items():
            reasoned = clauses.setdefault(getattr(self, use).reason, [])
            if before is None:
                reasoned.append(f"{use} {name}")
            elif before.get(use, name) != name:
                reasoned.append(f"{use} was {before[use]} and is now {name}")
        return "; ".join(
            f"{', '.join(uses)} ({reason})" for reason, uses in clauses.items() if uses
        )


def training_problem(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes attention in an update, of one microbatch on one device."""
    train = config.train
    n_keys = train.mem_len + train.segment_len
    rows = train.batch_size // train.grad_accum_steps
    return Problem(
        **_of_both(config, mesh, n_position=n_keys),
        batch=max(rows // num_batch_shards(mesh), 1),
        segment_len=train.segment_len,
        n_keys=n_keys,
        window=config.model.compat.window(train.mem_len, same_length=train.same_length),
        dropout=config.model.dropout.attention > 0,
    )


def evaluation_problem(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes attention in streaming evaluation, on one device."""
    lengths, rows = config.eval, config.eval.batch_size
    capacity = cache_capacity(mem_len=lengths.mem_len, segment_len=lengths.segment_len)
    n_position = table_length(
        segment_len=lengths.segment_len,
        capacity=capacity,
        clamp_len=config.model.clamp(lengths.clamp_len),
    )
    if batch_axes(mesh, rows) is not None:
        rows //= num_batch_shards(mesh)
    return Problem(
        **_of_both(config, mesh, n_position=n_position),
        batch=rows,
        segment_len=lengths.segment_len,
        n_keys=capacity + lengths.segment_len,
        window=config.model.compat.window(lengths.mem_len, same_length=lengths.same_length),
        capacity=capacity,
        cache_dtype=None
        if lengths.cache_dtype is CacheDType.INT8
        else str(lengths.cache_dtype or config.model.dtype),
    )


def _of_both(
    config: ExperimentConfig, mesh: Mesh | AbstractMesh, *, n_position: int
) -> dict[str, Any]:
    """Describes what both problems state alike.

    An abstract mesh has no devices, and counts as CPUs.
    """
    model, device = config.model, None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return {
        "platform": "cpu" if device is None else device.platform,
        "device_kind": "" if device is None else device.device_kind,
        "dtype": str(model.dtype),
        "n_head": model.n_head // mesh.shape[TENSOR],
        "d_head": model.d_head,
        "n_positions": n_position if encoding_of(model).products_per_key > 2 else 0,
        "has_position_score": encoding_of(model).has_position_score,
        "documents": config.data.reset_at is not None,
    }


def _choose(before: Implementation | str, path: str, problem: Problem, *, runs: bool) -> Chosen:
    """Chooses as `path` asks.

    An earlier start's implementation stays if it can serve and is still asked for.

    If a path that `runs` fails on the device (`first_contact`), the next one replaces it, unless
    the user asked for that path, which raises `UserError`.
    """
    failed: dict[str, str] = {}  # Paths, and why.
    while True:
        chosen = None
        if (
            isinstance(before, Implementation)
            and path in (choose.AUTO, before.path)
            and before.path not in failed
        ):
            chosen = (
                Chosen(before, "as in earlier starts")
                if choose.can_serve(before, problem)
                else None
            )
        chosen = chosen or Chosen(*choose.choose(path, problem, failed))
        finding = (
            first_contact.compare(chosen.implementation, problem)
            if runs
            else first_contact.Finding(False, "")
        )
        if not finding.failed:
            reasons = filter(None, [*(failed.values() or [chosen.reason]), finding.sentence])
            return chosen._replace(reason="; ".join(reasons), failed=bool(failed))
        advice = f"choose another --model.attention, or {choose.AUTO}"
        require(path != chosen.implementation.path, f"{finding.sentence}; {advice}")
        failed[chosen.implementation.path] = finding.sentence


class Compilation(NamedTuple):
    """A compiled program, ready to be called."""

    # A `jax.stages.Compiled`, perhaps with its first argument bound.
    program: Callable[..., Any]
    # Of the compilation, without tracing and lowering.
    seconds: float
    # Activations and other scratch per device, or None if the backend reports none.
    temporary_bytes: int | None

    @classmethod
    def of(cls, lowered: jax.stages.Lowered) -> "Compilation":
        """Compiles a program, or reads it from JAX's persistent cache."""
        began = time.monotonic()
        program = lowered.compile()
        seconds = time.monotonic() - began
        analysis: Any = program.memory_analysis()
        return cls(program, seconds, None if analysis is None else analysis.temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class Built:
    """A config's model, optimizer, schedule, mesh, attention and compiled functions.

    The functions are compiled for these parts.
    """

    config: ExperimentConfig
    model: AnyModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh
    # None for a network without attention.
    attention: AttentionChoice | None = None
    # Of an ensemble's members.
    configs: Mapping[str, ExperimentConfig] = dataclasses.field(default_factory=dict)

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Jits a function, which enters the mesh at each call, on any thread.

        On one device this is `jax.jit`.
        """
        return bind_mesh(self.mesh, jax.jit(function, **options))

    # Training

    @property
    def members(self) -> Members:
        """Members of an ensemble. One run has no names, and `Members` hands on what it gets."""
        return Members(tuple(self.configs))

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the training state. Nothing is allocated."""
        with use_mesh(self.mesh):
            boxed = jax.eval_shape(lambda: self._first_state(self._first_params()))
        shardings = param_shardings(self.mesh, boxed)
        shardings = shardings.replace(memory=self._memory_shardings(self.config.train.batch_size))
        return abstract_arrays(nn.unbox(boxed), shardings)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    def device_bytes(self) -> dict[str, int]:
        """Returns the persistent bytes per device: parameters, optimizer state, memory."""
        state = self.abstract_state
        parts = {
            "parameters": state.params,
            "optimizer": state.opt_state,
            "segment memory": state.memory,
            "averaged parameters": state.average,
        }
        return {name: bytes_on_device(tree) for name, tree in parts.items() if tree is not None}

    def init_params(self) -> Any:
        """Returns the parameters before the first update, initialized in place on the devices."""
        return self.jit(
            lambda: nn.unbox(self._first_params()),
            out_shardings=_shardings(self.abstract_state.params),
        )()

    def init_state(self, warm_state: Callable[[Any], TrainState] | None = None) -> TrainState:
        """Returns the state before the first update, made on the devices.

        A warm start makes it from the parameters.
        """
        if warm_state is not None:
            return warm_state(self.init_params())
        shardings = _shardings(self.abstract_state)
        return self.jit(
            lambda: nn.unbox(self._first_state(self._first_params())), out_shardings=shardings
        )()

    def state_from_params(self, params: Any) -> TrainState:
        """Returns the state before the first training step.

        Training begins with the parameters `params`.
        """
        return self.jit(self._first_state, out_shardings=_shardings(self.abstract_state))(params)

    def _first_params(self) -> Any:
        return init_params(self.model, jax.random.key(self.config.seed))

    def _first_state(self, params: Any) -> TrainState:
        return init_state(self.model, self.optimizer, self.config, params)

    def compile_step(self) -> Compilation:
        """Compiles the train step of S updates (`TrainStep`)."""
        self.check_batch_size()
        step = make_train_step(self.model, self.optimizer, self.schedule, self.config)
        # The state must come out as it went in, or the next call would not take it.
        shardings = _shardings(self.abstract_state), named_sharding(self.mesh)
        jitted = self.jit(step, donate_argnums=0, out_shardings=shardings)
        return Compilation.of(
            jitted.lower(self.abstract_state, self.abstract_segments(self.config.train))
        )

    def check_batch_size(self) -> None:
        """Raises `UserError` if the training rows cannot be split evenly.

        They are split over devices and microbatches.
        """
        train, shards = self.config.train, num_batch_shards(self.mesh)
        multiple = shards * train.grad_accum_steps
        require(
            train.batch_size % multiple == 0,
            f"train.batch_size must be a multiple of {multiple} (data x fsdp of the mesh: "
            f"{shards}, microbatches: {train.grad_accum_steps}), got {train.batch_size}. "
            "Change it, --train.grad_accum_steps or --mesh.data.",
        )

    # Batches

    def own_rows(self, batch_size: int) -> np.ndarray:
        """Returns the ascending numbers of the batch rows that this process must read.

        The process's devices hold these rows.

        They need not be contiguous: where a mesh is laid over a torus, the chips of a host form a
        tile of it. Raises `UserError` if no device of the process is in the mesh.
        """
        if jax.process_count() == 1:
            return np.arange(batch_size)
        placed = self._sharding(batch_axes(self.mesh, batch_size))
        own = placed.addressable_devices_indices_map((batch_size,))
        where = f"process {jax.process_index()} has no device in the mesh {dict(self.mesh.shape)}"
        require(
            own, f"{where}. Start fewer processes, or pass --mesh.data=none to use all devices."
        )
        return np.unique(np.concatenate([np.arange(batch_size)[index] for index in own.values()]))

    def place(self, segments: Segments, *, batch_size: int | None = None) -> Segments:
        """Transfers segments to the devices, with the rows sharded like the memory's.

        They have the `own_rows` of this process, out of `batch_size` rows over all processes, or
        all rows if that is None. In an ensemble they have a leading member axis.
        """
        if self.mesh.size == 1:
            return jax.device_put(segments, named_sharding(self.mesh))
        batch_size = batch_size or segments.inputs.shape[1]

        def put(placed: NamedSharding, array: np.ndarray) -> jax.Array:
            shape = array.shape[0], batch_size, *array.shape[2:]
            return jax.make_array_from_process_local_data(placed, array, shape)

        return jax.tree.map(put, self._segment_shardings(batch_size), segments)

    def abstract_segments(self, lengths: TrainConfig | EvalConfig) -> Segments:
        """Returns the shapes, dtypes and shardings of the segments for one call.

        One call of the train or eval step takes these segments.
        """
        per_call = (
            lengths.segments_per_call if isinstance(lengths, TrainConfig) else SEGMENTS_PER_CALL
        )
        tokens = (per_call, lengths.batch_size, lengths.segment_len)
        kinds = (tokens, "int32"), (tokens, "int32"), (tokens, "float32"), (tokens[:2], "bool")
        pairs = zip(kinds, self._segment_shardings(lengths.batch_size), strict=True)
        arrays = [jax.ShapeDtypeStruct(*kind, sharding=placed) for kind, placed in pairs]
        return Segments(*arrays)  # type: ignore[arg-type]

    def _segment_shardings(self, batch_size: int) -> Any:
        rows = batch_axes(self.mesh, batch_size)
        tokens = self._sharding(None, rows, axes.LENGTH)
        return Segments(tokens, tokens, tokens, self._sharding(None, rows))

    def _memory_shardings(self, batch_size: int) -> Any:
        rows = batch_axes(self.mesh, batch_size)
        return Memory(self._sharding(axes.LAYERS, rows, axes.LENGTH, None), self._sharding(rows))

    def _sharding(self, *logical_axes: str | None) -> Any:
        """Returns the sharding of an array by its logical axes.

        It replaces the array in trees of shardings.
        """
        return named_sharding(self.mesh, *logical_axes)

    # Evaluation

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The forward pass of evaluation."""
        return scorer.make_scorer(self.model, self.config.eval)

    @functools.cached_property
    def prepare_params(self) -> Callable[[Any], Any]:
        """The jitted function that makes parameters ready for evaluation. An RNN's already are."""
        return self.jit(self.scorer.prepare_params)

    @functools.cached_property
    def eval_step(self) -> EvalStep:
        """The jitted evaluation of S segments. The memory is donated."""
        return self.jit(make_eval_step(self.model, self.config.eval), donate_argnums=1)

    @functools.cached_property
    def window_step(self) -> WindowStep:
        """The jitted evaluation of windows."""
        lengths = self.config.eval
        step = make_window_step(
            self.model, clamp_len=lengths.clamp_len, temperature=lengths.temperature
        )
        return bind_mesh(self.mesh, step)

    @functools.cached_property
    def init_memory(self) -> Callable[[Any], Any]:
        """The jitted function that makes an empty evaluation memory from prepared parameters."""
        lengths = self.config.eval
        shardings: Any = self._memory_shardings(lengths.batch_size)
        if not isinstance(self.model, RecurrentModel):
            rows = batch_axes(self.mesh, lengths.batch_size)
            layers = (self._sharding(rows, axes.HEADS, None, None),) * self.config.model.n_layer
            shardings = KVCache(
                keys=layers,
                values=layers,
                valid=self._sharding(rows),
                write_index=self._sharding(),
                mem_len=lengths.mem_len,
            )
        return self.jit(self.scorer.init_memory, out_shardings=shardings)

    def generator(self, weights: Any) -> Generator:
        """Returns the generator of a model that can generate. `weights` are prepared parameters."""
        return Generator(weights, self.config.eval, mesh=self.mesh)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def abstract_arrays(arrays: Any, shardings: Any) -> Any:
    """Returns the shapes and dtypes of a tree of arrays, with these shardings."""
    return jax.tree.map(
        lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
        arrays,
        shardings,
    )


def build(
    config: ExperimentConfig,
    *,
    vocab_size: int,
    end_token: int | None = None,
    mesh: Mesh | None = None,
    recorded: Implementations | None = None,
    uses: Collection[str] = ("training", "evaluation"),
) -> Built:
    """Builds a config's model. Raises `UserError` if settings, V and the devices are incompatible.

    `end_token` is the id of the token that `data.reset_at` names. `mesh` is the config's if None.
    `recorded` are the implementations of attention of an earlier start, chosen again where they can
    serve. `uses` names where attention will run, "training" or "evaluation": on an accelerator it
    is compared with the reference there first.
    """
    config.validate()
    config.model.validate_vocabulary(vocab_size)
    reset_at = config.data.reset_at
    is_there = (
        end_token is None
        if reset_at is None
        else end_token is not None and 0 <= end_token < vocab_size
    )
    require(
        is_there,
        f"end_token must be the id of data.reset_at ({reset_at!r}) among {vocab_size} "
        f"tokens, got {end_token}",
    )
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    check_devices(config.eval.weight_dtype, mesh.size)
    dtype = config.model.dtype
    is_supported = jax.dtypes.canonicalize_dtype(dtype) == dtype
    require(
        is_supported, f"model.dtype is {dtype}, which JAX supports only if JAX_ENABLE_X64=1 is set"
    )
    for name, axis in (("d_model", FSDP), ("n_head", TENSOR), ("d_inner", TENSOR)):
        size, devices = getattr(config.model, name), mesh.shape[axis]
        require(
            size % devices == 0,
            f"model.{name} must be a multiple of mesh.{axis} ({devices}), got {size}",
        )
    model: AnyModel
    attention = None
    if config.model.network is not Network.TRANSFORMER_XL:
        model = RecurrentModel(config.model, vocab_size)
    else:
        path = str(config.model.attention)
        # In training, auto is fused on TPU, stored on GPU, and on CPU tiled or, for small sizes,
        # the reference.
        before = recorded or Implementations(path, path)
        attention = AttentionChoice(
            _choose(before.training, path, training_problem(config, mesh), runs="training" in uses),
            _choose(
                before.cached, path, evaluation_problem(config, mesh), runs="evaluation" in uses
            ),
        )
        chosen = Implementations(
            attention.training.implementation, attention.evaluation.implementation
        )
        model = TransformerXL(config.model, vocab_size, end_token, attention=chosen)
    optimizer, schedule = optimizer_lib.make_optimizer(config), optimizer_lib.learning_rate(config)
    return Built(config, model, optimizer, schedule, mesh, attention)


def build_for(config: ExperimentConfig, vocabulary: Vocabulary, **options: Any) -> Built:
    """Calls `build` for this vocabulary.

    Raises `UserError` too if `data.reset_at` is not the text of one token.
    """
    end = config.data.reset_at
    end_token = (
        None if end is None else ready_ids.find_tokens(vocabulary, end, name="data.reset_at")[0]
    )
    return build(config, vocab_size=vocabulary.size, end_token=end_token, **options)
