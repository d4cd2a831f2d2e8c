"""Builds a config's model, optimizer, schedule, mesh and attention, and compiles its functions."""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from txl_jax.config import EvalConfig, ExperimentConfig, Network, Remat, TrainConfig
from txl_jax.config.config_tree import require
from txl_jax.data import encode
from txl_jax.data.segments import SegmentReader, evaluation_segments
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.evaluation.sliding_window import WindowStep, make_window_step
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL, EvalStep, make_eval_step
from txl_jax.inference import scorer
from txl_jax.inference.cache import KVCache
from txl_jax.inference.generate import Generator
from txl_jax.inference.prepare import check_devices
from txl_jax.inference.scorer import Scorer
from txl_jax.memory import Memory
from txl_jax.modules import AnyModel
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import AttentionPaths, Implementation
from txl_jax.recurrence import Segments
from txl_jax.runs.attention_choice import ChosenPath, choose_attention
from txl_jax.runs.remat_choice import ChosenRemat, choose_remat
from txl_jax.runtime.environment import bytes_on_device
from txl_jax.sharding import axes
from txl_jax.sharding.axes import batch_axis, named_sharding, num_batch_shards, param_shardings
from txl_jax.sharding.mesh import FSDP, TENSOR, bind_mesh, make_mesh, use_mesh
from txl_jax.training import optimizer as optimizer_lib
from txl_jax.training.member_axis import Members
from txl_jax.training.optimizer import ScheduleLengths
from txl_jax.training.step import (
    TrainState,
    TrainStep,
    UpdateMetrics,
    init_params,
    init_state,
    make_train_step,
)


class Compilation(NamedTuple):
    """A compiled training step, ready to be called."""

    # The step of one run, with state and S segments as arguments.
    program: TrainStep
    # The compiled program. It takes the run's values (`Built.step_values`) before the state, so
    # that other runs can use it too.
    executable: jax.stages.Compiled
    # The program's text before compilation.
    text: str
    # Time of the compilation, without tracing and lowering.
    seconds: float
    # Activations and other scratch per device, or None if the backend does not report them.
    temporary_bytes: int | None

    @classmethod
    def of(
        cls,
        lowered: jax.stages.Lowered,
        values: tuple[Any, ...],
        earlier: "Compilation | None" = None,
    ) -> "Compilation":
        """Compiles a step, or reads it from JAX's persistent cache.

        Args:
          lowered: The step of `values`, state and segments.
          values: Its first arguments, which are bound in the run's step.
          earlier: Another compilation in this process, or None. Its executable is used if its
            program has the same text.
        """
        text = lowered.as_text()
        if earlier is not None and earlier.text == text:
            # The values are arguments of the program, so this run may have other values.
            return earlier._replace(program=functools.partial(earlier.executable, *values))

        began = time.monotonic()
        executable = lowered.compile()
        seconds = time.monotonic() - began

        analysis: Any = executable.memory_analysis()
        temporary_bytes = None if analysis is None else analysis.temp_size_in_bytes
        program = functools.partial(executable, *values)
        return cls(program, executable, text, seconds, temporary_bytes)


@dataclasses.dataclass(frozen=True)
class Built:
    """A config's model, mesh and attention, and its functions.

    Each function is compiled for this model on this mesh.
    """

    # The run's settings.
    config: ExperimentConfig
    # The Flax module, with the implementations of attention.
    model: AnyModel
    # All devices, with the axes of `sharding.mesh`.
    mesh: Mesh
    # The implementations of attention and their reasons, or None for a network without attention.
    attention: AttentionPaths[ChosenPath] | None = None
    # What the backward pass recomputes and why, or None for a model that is not trained by this
    # command, or that has no attention. The model's config contains it instead of `Remat.AUTO`.
    remat: ChosenRemat | None = None
    # Configs of an ensemble's members by name. Empty for a single run.
    configs: Mapping[str, ExperimentConfig] = dataclasses.field(default_factory=dict)

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Jits a function, which enters the mesh when it is called or lowered, on any thread.

        On one device this is `jax.jit`. `options` are passed on to it.
        """
        return bind_mesh(self.mesh, jax.jit(function, **options))

    # Training

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer that updates the parameters."""
        return optimizer_lib.make_optimizer(self.config)

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """The learning rate by update."""
        return optimizer_lib.learning_rate(self.config)

    @property
    def members(self) -> Members:
        """Members of an ensemble. For a single run they have no names and do not change trees."""
        return Members(tuple(self.configs))

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the training state. Nothing is allocated."""
        with use_mesh(self.mesh):
            boxed = jax.eval_shape(lambda: self.traced_state(self._first_params()))

        # On a mesh each parameter is in a box with its logical axes, which its initializer names,
        # and which decide its sharding (`sharding.axes`). The memory has no boxes.
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
        trees = {
            "parameters": state.params,
            "optimizer": state.opt_state,
            "segment memory": state.memory,
            "averaged parameters": state.average,
        }
        return {name: bytes_on_device(tree) for name, tree in trees.items() if tree is not None}

    def init_params(self) -> Any:
        """Returns the parameters before the first update, initialized in place on the devices."""
        make_params = self.jit(
            lambda: nn.unbox(self._first_params()),
            out_shardings=shardings_of(self.abstract_state.params),
        )
        return make_params()

    def init_state(self, warm_state: Callable[[Any], TrainState] | None = None) -> TrainState:
        """Returns the state before the first update, created on the devices.

        For a warm start `warm_state` creates it from the initialized parameters.
        """
        if warm_state is not None:
            return warm_state(self.init_params())
        make_state = self.jit(
            lambda: nn.unbox(self.traced_state(self._first_params())),
            out_shardings=shardings_of(self.abstract_state),
        )
        return make_state()

    def state_from_params(self, params: Any) -> TrainState:
        """Returns the state before the first update of a training that begins with `params`."""
        make_state = self.jit(self.traced_state, out_shardings=shardings_of(self.abstract_state))
        return make_state(params)

    def _first_params(self) -> Any:
        """Returns the initial parameters, on a mesh in boxes that hold their logical axes."""
        return init_params(self.model, jax.random.key(self.config.seed))

    def traced_state(self, params: Any) -> TrainState:
        """Returns the state before the first update, with boxes where `params` have them.

        Must be called in a jitted function.
        """
        return init_state(self.model, self.optimizer, self.config, params)

    def compile_step(self, earlier: Compilation | None = None) -> Compilation:
        """Compiles the train step of S updates (`TrainStep`). The state is donated.

        Args:
          earlier: A step that this process has compiled, or None. If it is the same program, which
            does not depend on the schedule's lengths, it is used instead of compiling again.
        """
        return Compilation.of(self.lower_step(), self.step_values(), earlier)

    def lower_step(self) -> jax.stages.Lowered:
        """Lowers the train step, as a function of `step_values`, the state and S segments.

        It is lowered before the first call, for the shapes and shardings of its arguments, also for
        devices that this machine does not have.
        """
        self.check_batch_size()

        def step(
            lengths: ScheduleLengths, state: TrainState, segments: Segments
        ) -> tuple[TrainState, UpdateMetrics]:
            # If the lengths were constants, the program would change and be compiled again when
            # train.steps is raised, and after --minutes has set it.
            train_step = make_train_step(
                self.model,
                optimizer_lib.make_optimizer(self.config, lengths=lengths),
                optimizer_lib.learning_rate(self.config, lengths=lengths),
                self.config,
            )
            return train_step(state, segments)

        # The state must keep its shardings, otherwise the next call would reject it. The metrics
        # are replicated.
        replicated = named_sharding(self.mesh)
        shardings = (shardings_of(self.abstract_state), replicated)
        jitted = self.jit(step, donate_argnums=1, out_shardings=shardings)
        lengths = ScheduleLengths.of(self.config)
        abstract_lengths = abstract_arrays(lengths, jax.tree.map(lambda _: replicated, lengths))
        segments = self.abstract_segments(self.config.train)
        return jitted.lower(abstract_lengths, self.abstract_state, segments)

    def step_values(self) -> tuple[Any, ...]:
        """Returns the values that this run's step takes as data, on all devices.

        They are the lengths of the schedule.
        """
        replicated = named_sharding(self.mesh)

        def put(length: np.generic) -> jax.Array:
            return jax.make_array_from_process_local_data(replicated, np.asarray(length), ())

        return (jax.tree.map(put, ScheduleLengths.of(self.config)),)

    def check_batch_size(self) -> None:
        """Checks that the training rows can be split evenly over devices and microbatches.

        Raises:
          UserError: If they cannot.
        """
        train = self.config.train
        shards = num_batch_shards(self.mesh)
        multiple = shards * train.grad_accum_steps
        require(
            train.batch_size % multiple == 0,
            f"train.batch_size must be a multiple of {multiple} (data x fsdp of the mesh: "
            f"{shards}, microbatches: {train.grad_accum_steps}), got {train.batch_size}. "
            "Change it, --train.grad_accum_steps or --mesh.data.",
        )

    # Batches

    def own_rows(self, batch_size: int) -> np.ndarray:
        """Returns the numbers of the batch rows that this process must read, in ascending order.

        The process's devices hold these rows. They need not be contiguous: if a mesh is mapped to a
        torus, the chips of a host form a tile of it.

        Raises:
          UserError: If no device of the process is in the mesh.
        """
        all_rows = np.arange(batch_size)
        if jax.process_count() == 1:
            return all_rows

        sharding = self._sharding(batch_axis(self.mesh, batch_size))
        slices = sharding.addressable_devices_indices_map((batch_size,))
        if not slices:
            raise UserError(
                f"process {jax.process_index()} has no device in the mesh {dict(self.mesh.shape)}. "
                "Start fewer processes, or pass --mesh.data=none to use all devices."
            )
        # Devices that differ only in other axes of the mesh hold the same rows.
        rows = [all_rows[device_slice] for device_slice in slices.values()]
        return np.unique(np.concatenate(rows))

    def place(self, segments: Segments, *, batch_size: int | None = None) -> Segments:
        """Transfers segments to the devices, with the rows sharded like the memory's.

        Args:
          segments: The segments, with the `own_rows` of this process. In an ensemble they have a
            leading member axis.
          batch_size: Rows over all processes. None means that the segments have all rows.
        """
        if self.mesh.size == 1:
            return jax.device_put(segments, named_sharding(self.mesh))
        n_row = segments.inputs.shape[1] if batch_size is None else batch_size

        def put(sharding: NamedSharding, array: np.ndarray) -> jax.Array:
            shape = (array.shape[0], n_row, *array.shape[2:])
            return jax.make_array_from_process_local_data(sharding, array, shape)

        return jax.tree.map(put, self._segment_shardings(n_row), segments)

    def abstract_segments(self, lengths: TrainConfig | EvalConfig) -> Segments:
        """Returns shapes, dtypes and shardings of the segments that a call of a step takes.

        The step is the train step for a `TrainConfig`, and the eval step for an `EvalConfig`.
        """
        if isinstance(lengths, TrainConfig):
            per_call = lengths.segments_per_call
        else:
            per_call = SEGMENTS_PER_CALL
        rows = (per_call, lengths.batch_size)
        tokens = (*rows, lengths.segment_len)
        shardings = self._segment_shardings(lengths.batch_size)

        def abstract(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        return Segments(
            inputs=abstract(tokens, "int32", shardings.inputs),
            targets=abstract(tokens, "int32", shardings.targets),
            weights=abstract(tokens, "float32", shardings.weights),
            reset=abstract(rows, "bool", shardings.reset),
        )

    def _segment_shardings(self, batch_size: int) -> Any:
        """Returns `Segments` of shardings."""
        rows = batch_axis(self.mesh, batch_size)
        tokens = self._sharding(None, rows, axes.LENGTH)
        return Segments(
            inputs=tokens, targets=tokens, weights=tokens, reset=self._sharding(None, rows)
        )

    def _memory_shardings(self, batch_size: int) -> Any:
        """Returns a training `Memory` of shardings."""
        rows = batch_axis(self.mesh, batch_size)
        return Memory(
            hidden=self._sharding(axes.LAYERS, rows, axes.LENGTH, None),
            valid=self._sharding(rows),
            start=self.config.model.compat.memory_start,
        )

    def _sharding(self, *logical_axes: str | None) -> Any:
        """Returns the sharding of an array by its logical axes.

        Its type is `Any`, because it replaces an array in trees of shardings.
        """
        return named_sharding(self.mesh, *logical_axes)

    # Evaluation

    def evaluation_reader(self, tokens: Any) -> SegmentReader:
        """Cuts a text, ids [T], into segments at the lengths of evaluation.

        Each process reads the rows of its own devices.

        Raises:
          UserError: If the text has fewer than 2 tokens.
        """
        lengths = self.config.eval
        return evaluation_segments(
            tokens,
            batch_size=lengths.batch_size,
            segment_len=lengths.segment_len,
            warmup_tokens=lengths.warmup_tokens,
            own=self.own_rows(lengths.batch_size),
        )

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The forward pass of evaluation."""
        return scorer.make_scorer(self.model, self.config.eval)

    @functools.cached_property
    def prepare_params(self) -> Callable[[Any], Any]:
        """The jitted function that prepares parameters for evaluation and generation.

        It casts, scales and lays them out once (`inference.prepare`). An RNN's stay the same.
        """
        return self.jit(self.scorer.prepare_params)

    @functools.cached_property
    def eval_step(self) -> EvalStep:
        """The jitted evaluation of S segments. The memory is donated."""
        step = make_eval_step(self.model, self.config.eval)
        return self.jit(step, donate_argnums=1)

    @functools.cached_property
    def window_step(self) -> WindowStep:
        """The jitted evaluation of windows."""
        lengths = self.config.eval
        step = make_window_step(
            self.model, clamp_len=lengths.clamp_len, temperature=lengths.temperature
        )
        # It is jitted already.
        return bind_mesh(self.mesh, step)

    @functools.cached_property
    def init_memory(self) -> Callable[[Any], Any]:
        """The jitted function that creates an empty evaluation memory from prepared parameters."""
        lengths = self.config.eval
        shardings: Any
        if isinstance(self.model, RecurrentModel):
            shardings = self._memory_shardings(lengths.batch_size)
        else:
            rows = batch_axis(self.mesh, lengths.batch_size)
            layer = self._sharding(rows, axes.HEADS, None, None)
            layers = (layer,) * self.config.model.n_layer
            shardings = KVCache(
                keys=layers,
                values=layers,
                valid=self._sharding(rows),
                write_index=self._sharding(),
                mem_len=lengths.mem_len,
            )
        return self.jit(self.scorer.init_memory, out_shardings=shardings)

    def generator(self, prepared: Any) -> Generator:
        """Returns the generator of a model that can generate, from `prepare_params`' result."""
        return Generator(prepared, self.config.eval, mesh=self.mesh)


def shardings_of(tree: Any) -> Any:
    """Returns the shardings of a tree of arrays, or of their abstract forms."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def abstract_arrays(arrays: Any, shardings: Any) -> Any:
    """Returns the shapes and dtypes of a tree of arrays, with these shardings."""
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        arrays,
        shardings,
    )


def build(
    config: ExperimentConfig,
    *,
    vocab_size: int,
    end_token: int | None = None,
    mesh: Mesh | None = None,
    recorded: AttentionPaths[Implementation | str] | None = None,
    remat: Remat | None = None,
    n_member: int = 1,
    uses: Collection[str] = ("training", "evaluation"),
) -> Built:
    """Builds a config's model.

    Args:
      config: The settings.
      vocab_size: V.
      end_token: Id of the token that `data.reset_at` names, or None if it is not set.
      mesh: The devices. None means the config's mesh.
      recorded: Attention implementations of an earlier start, chosen again if they are supported,
        or the requested path on a first start, such as auto.
      remat: `Run.remat_for`, the choice of an earlier start. None means the config's `model.remat`.
      n_member: Members of the ensemble that is trained, or 1.
      uses: Where attention will run, "training" or "evaluation". On an accelerator, these uses are
        compared with the reference first.

    Raises:
      UserError: If settings, V and the devices are incompatible.
    """
    config.validate()
    config.model.validate_vocabulary(vocab_size)
    _check_end_token(end_token, reset_at=config.data.reset_at, vocab_size=vocab_size)
    if mesh is None:
        mesh = make_mesh(config.mesh)
    _check_mesh(mesh, config)

    # Recurrent networks have no attention.
    model: AnyModel
    attention = None
    if config.model.network is Network.TRANSFORMER_XL:
        # In training, auto is fused on TPU, stored on GPU, and on CPU tiled or, for small sizes,
        # the reference. Evaluation attends over a KV cache, with a separate implementation.
        attention = choose_attention(config, mesh, recorded=recorded, uses=uses)
        model = TransformerXL(
            config.model,
            vocab_size,
            end_token,
            attention=AttentionPaths(
                training=attention.training.implementation,
                cached=attention.cached.implementation,
            ),
        )
    else:
        model = RecurrentModel(config.model, vocab_size)
    built = Built(
        config=config,
        model=model,
        mesh=mesh,
        attention=attention,
    )
    if "training" not in uses:
        return built
    return _with_remat(built, remat or config.model.remat, n_member=n_member)


def _with_remat(built: Built, asked: Remat, *, n_member: int) -> Built:
    """Returns the model with a choice of what the backward pass recomputes.

    Args:
      built: Everything else.
      asked: The choice that was made before, or `Remat.AUTO`.
      n_member: Members of the ensemble, or 1.
    """
    # Recurrent networks keep everything.
    if not isinstance(built.model, TransformerXL) or built.attention is None:
        return built
    chosen = choose_remat(
        asked,
        config=built.config,
        mesh=built.mesh,
        implementation=built.attention.training.implementation,
        device_bytes=built.device_bytes,
        vocab_size=built.model.vocab_size,
        n_member=n_member,
    )
    model_config = dataclasses.replace(built.model.config, remat=chosen.remat)
    model = built.model.clone(config=model_config)
    return dataclasses.replace(built, model=model, remat=chosen)


def _check_end_token(end_token: int | None, *, reset_at: str | None, vocab_size: int) -> None:
    """Raises `UserError` unless the end token is an id exactly if `data.reset_at` names one."""
    if reset_at is None:
        fits = end_token is None
    else:
        fits = end_token is not None and 0 <= end_token < vocab_size
    require(
        fits,
        f"end_token must be the id of data.reset_at ({reset_at!r}) among {vocab_size} "
        f"tokens, got {end_token}",
    )


def _check_mesh(mesh: Mesh, config: ExperimentConfig) -> None:
    """Raises `UserError` if the mesh's devices do not support the config's dtypes and sizes."""
    check_devices(config.eval.weight_dtype, mesh.size)

    # JAX would compute in 32 bits instead.
    dtype = config.model.dtype
    require(
        jax.dtypes.canonicalize_dtype(dtype) == dtype,
        f"model.dtype must be a dtype that JAX supports, got {dtype}. Set JAX_ENABLE_X64=1.",
    )

    # Sizes that are sharded over an axis of the mesh.
    for name, axis in (("d_model", FSDP), ("n_head", TENSOR), ("d_inner", TENSOR)):
        size = getattr(config.model, name)
        devices = mesh.shape[axis]
        require(
            size % devices == 0,
            f"model.{name} must be a multiple of mesh.{axis} ({devices}), got {size}",
        )


def build_for(config: ExperimentConfig, vocabulary: Vocabulary, **options: Any) -> Built:
    """Calls `build` for this vocabulary. `options` are its other arguments.

    Raises:
      UserError: As `build`, or if `data.reset_at` is not the text of one token.
    """
    end_token = None
    if config.data.reset_at is not None:
        [end_token] = encode.find_tokens(vocabulary, config.data.reset_at, name="data.reset_at")
    return build(config, vocab_size=vocabulary.size, end_token=end_token, **options)
