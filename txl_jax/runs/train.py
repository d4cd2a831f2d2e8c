"""The training job: from config and text to checkpoints and results.json.

Starting goes in this order, so that the cheap failures come first and nothing is written before them:
  1. the components are built, with the attention of an earlier start, and the text is cut into segments: settings
     that do not fit fail here, and so do processes that do not have the same ones;
  2. weights to begin with are read; the run is recorded in its folder;
  3. the newest sound checkpoint is restored, or the state initialized;
  4. the opening lines are printed, and the step is compiled;
  5. the loop runs, with evaluation and checkpoints as hooks;
  6. the best parameters are scored on the test text.
Steps 3 to 6 are in `txl_jax.runs.trainer`.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from txl_jax import flops, sharding
from txl_jax.config import EvalConfig, ExperimentConfig, ModelConfig, Network, Order
from txl_jax.config import tree as config_tree
from txl_jax.data import ready_ids
from txl_jax.data.corpus import Corpus
from txl_jax.data.segments import SegmentReader, training_segments
from txl_jax.metrics import Totals
from txl_jax.runs import warm_start
from txl_jax.runs.build import Compilation, RunComponents, build
from txl_jax.runs.run import Run, TextInfo, check_same_attention, check_same_settings, check_same_text
from txl_jax.runs.score import Interrupted, score
from txl_jax.runs.trainer import Outcome, Trainer
from txl_jax.runs.validation import TrainTask
from txl_jax.runs.warm_start import WarmStart
from txl_jax.runtime import distributed, profiler
from txl_jax.runtime.environment import bytes_on_device, device_kind, megabytes
from txl_jax.runtime.sinks import Sink
from txl_jax.segments import Segments
from txl_jax.training.loop import Hook
from txl_jax.training.members import Members
from txl_jax.training.progress import StepCost
from txl_jax.training.state import TrainState
from txl_jax.training.step import TrainStep


def train_run(
    config: ExperimentConfig,
    corpus: Corpus,
    run: Run,
    *,
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    profile_steps: tuple[int, int] | None = None,
    stop_requested: Callable[[], Any] = lambda: False,
) -> Outcome:
    """Trains an open run to the end, or until a stop is requested; a recorded one resumes where that stopped.

    Args:
      hooks: The caller's, run after evaluation and before the checkpoint of a step. To train N updates of a longer
        schedule, pass one that calls `HookContext.request_stop` at update N, a multiple of `train.eval_every`.
      sinks: The caller's, in addition to metrics.jsonl and TensorBoard's files.
      profile_steps: First and last update, counted from 1, of a profile in the workdir's `profile`, or None for no
        profile.

    Raises:
      UserError: If settings, text and workdir do not go together, or the workdir cannot be used.
      NonFiniteError: If a loss or gradient was not finite. The last checkpoint is from before it.
      CheckpointError: If there are checkpoints, but none can be read.
      RemoteProcessError: If another process could not continue.
    """
    for hook in hooks:
        hook.check_interval(config.train.segments_per_call)
    if profile_steps is not None:
        profiler.check_steps(*profile_steps, steps=config.train.steps)
    config = with_end_token(config, corpus)
    check_same_settings(config)
    check_same_text(corpus)
    recorded = run.attention_for(config)

    def prepare() -> tuple[RunComponents, SegmentReader]:
        components = build(config, vocab_size=corpus.vocabulary.size, recorded=recorded)
        components.training.check_batch_size()
        return components, training_reader(components, corpus)

    components, reader = distributed.run_on_all(prepare)
    check_same_attention(components.attention)
    weights = warm_start.load(components, corpus.vocabulary, run)
    run.begin(config, TextInfo.of(corpus), attention=components.attention, weights=weights and weights.record)
    stop_requested = run.stopping(stop_requested)
    return Trainer(
        _task(components, corpus, reader, stop_requested, weights or warm_start.of_earlier_start(run)),
        run.path,
        hooks=hooks,
        sinks=sinks,
        profile_steps=profile_steps,
        stop_requested=stop_requested,
        confirm=run.confirm,
    ).run(run.notes)


def train(
    config: ExperimentConfig,
    path: str | os.PathLike[str],
    *,
    data_dir: str = "data",
    cache_dir: str | None = None,
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    profile_steps: tuple[int, int] | None = None,
) -> Outcome:
    """Trains a config as the programs do: reads its corpus, and starts or resumes the run in the folder `path`.

    The same call resumes a stopped run; of a finished run it returns the results.

    Args:
      config: all settings; text of your own is `DataConfig(corpus="text", file=...)`. The defaults of `TrainConfig` and
        `EvalConfig` are those of the 12-layer enwik8 model.
      path: the workdir; made if missing.
      data_dir: folder of the corpora's own files.
      cache_dir: folder for prepared tokens; None: `prepared` in `data_dir`.
      hooks: actions at intervals of updates, run after evaluation and before the checkpoint of a step.
      sinks: receivers of settings, records and texts, beside metrics.jsonl and TensorBoard's files.
      profile_steps: first and last update, counted from 1, of a profile in the workdir's `profile`; None: none.

    Raises:
      UserError: settings, text and workdir do not fit together, or a file cannot be read or written.
      NonFiniteError: a loss or gradient was not finite; the last checkpoint is from before it.
    """
    config = config.resolved()
    config.validate()
    with Run.open(path) as run:
        run.compare(config)
        corpus = warm_start.read_corpus(config, run, data_dir, cache_dir)
        return train_run(config, corpus, run, hooks=hooks, sinks=sinks, profile_steps=profile_steps)


def with_end_token(config: ExperimentConfig, corpus: Corpus) -> ExperimentConfig:
    """Returns the config with the id of the token that ends a document, as `data.reset_at` names it.

    Raises:
      UserError: If the text is not one token of the vocabulary.
    """
    text, end_token = config.data.reset_at, None
    if text is not None:
        end_token = ready_ids.find_token(corpus.vocabulary, text, name="data.reset_at")
    return config_tree.replace(config, {"model.end_token": end_token})


def training_reader(components: RunComponents, corpus: Corpus, *, seed: int | None = None) -> SegmentReader:
    """Cuts the training text into segments in the config's order.

    Args:
      seed: The seed of the order, or None for the config's.

    Raises:
      UserError: If the text is too short for one segment.
    """
    data, train_config = components.config.data, components.config.train
    return training_segments(
        corpus.train,
        batch_size=train_config.batch_size,
        segment_len=train_config.segment_len,
        stride=train_config.stride,
        seed=components.config.seed if seed is None else seed,
        roll=data.roll,
        sentence_starts=corpus.sentences if data.order is Order.SENTENCES else None,
        epoch_memory=data.epoch_memory,
        own=components.placement.own_rows(train_config.batch_size).tolist(),
    )


def _task(
    components: RunComponents,
    corpus: Corpus,
    reader: SegmentReader,
    stop_requested: Callable[[], Any],
    weights: WarmStart | None,
) -> TrainTask:
    def init_state() -> TrainState:
        training = components.training
        return training.init_state() if weights is None else weights.state(training.init_params())

    def compile_step() -> tuple[TrainStep, str]:
        compilation = components.training.compile_step()
        return compilation.program, memory_line(components, compilation)

    def segments(first: int, count: int) -> Segments:
        return components.placement.place(reader.segments(first, count), batch_size=components.config.train.batch_size)

    return TrainTask(
        config=components.config,
        members=Members(),
        measure=corpus.vocabulary.measure,
        facts=facts(components, corpus) | warm_start.facts(weights),
        opening=[*opening(components, corpus, reader), *warm_start.opening(weights)],
        cost=step_cost(components),
        segments_per_epoch=reader.n_segments,
        abstract_state=components.training.abstract_state,
        abstract_params=components.training.abstract_state.params,
        init_state=init_state,
        compile_step=compile_step,
        segments=segments,
        score=functools.partial(score_or_stop, components, corpus, stop_requested),
    )


def score_or_stop(
    components: RunComponents,
    corpus: Corpus,
    stop_requested: Callable[[], Any],
    params: Any,
    split: str,
    name: str,
    log: Callable[[str], None],
) -> Totals | None:
    """Scores the "valid" or "test" text while a run trains; None: a stop was requested meanwhile."""
    tokens = corpus.test if split == "test" else corpus.valid[: components.config.eval.valid_tokens]
    try:
        return score(
            components,
            params,
            tokens,
            name=name,
            measure=corpus.vocabulary.measure,
            log=log,
            stop_requested=stop_requested,
        )
    except Interrupted:
        return None


# Lines and facts about a run: sizes, work per step, memory per device.


def facts(components: RunComponents, corpus: Corpus) -> dict[str, Any]:
    """Returns text and size of a run, as results.json begins."""
    return {"corpus": corpus.name, "text": corpus.description, "parameters": components.num_parameters}


def step_cost(components: RunComponents) -> StepCost:
    """Returns the work of one update of one run or member, and the peak of all devices of the mesh."""
    train, peak = components.config.train, flops.device_peak(jax.devices()[0].device_kind)
    per_token = flops.of_training(
        components.config.model,
        vocab_size=components.model.vocab_size,
        segment_len=train.segment_len,
        mem_len=train.mem_len,
        same_length=train.same_length,
    )
    return StepCost(
        tokens=train.batch_size * train.new_tokens,
        flops=per_token * train.batch_size * train.segment_len,
        peak_flops=None if peak is None else peak * components.mesh.size,
    )


def opening(components: RunComponents, corpus: Corpus, reader: SegmentReader) -> list[str]:
    """Describes text, model, work per step, evaluation and devices, one line each."""
    c, train = components.config.model, components.config.train
    tokens_per_step = train.batch_size * train.new_tokens
    epochs = train.steps / reader.n_segments
    attention = [] if components.attention is None else [f"attention {components.attention.describe()}"]
    axes = ", ".join(f"{name} {size}" for name, size in components.mesh.shape.items())
    return [
        (
            f"text      {corpus.description}: {len(corpus.train):,} / {len(corpus.valid):,} / {len(corpus.test):,} "
            f"tokens to train / validate / test on, vocabulary {corpus.vocabulary.size:,}"
        ),
        f"model     {_sizes(c)}, {c.dtype}: {components.num_parameters:,} parameters",
        f"training  {train.batch_size} rows x {train.new_tokens} = {tokens_per_step:,} tokens per step, "
        + (
            f"after {train.segment_len - train.stride} that are read again"
            if train.stride
            else f"memory {train.mem_len}"
        )
        + f"; {train.steps:,} steps = {epochs:.2f} epochs of {reader.n_segments:,} steps "
        f"({reader.skipped_tokens:,} tokens at the end of an epoch are skipped)",
        f"scoring   {_how_scored(components.config.eval)}",
        f"devices   {components.mesh.size} x {device_kind()} ({axes})"
        + (f" in {slices} slices" if (slices := sharding.num_slices(components.mesh)) > 1 else "")
        + (f" in {jax.process_count()} processes" if distributed.is_multiprocess() else ""),
        *attention,
    ]


def _how_scored(eval_config: EvalConfig) -> str:
    clamp = f"distances clamped at {eval_config.clamp_len}" if eval_config.clamp_len else "no clamp"
    if eval_config.stride:
        return (
            f"the last {eval_config.stride} of windows of {eval_config.segment_len}, {clamp}, {eval_config.batch_size} "
            "windows at a time"
        )
    early = f", each begun {eval_config.warmup_tokens} tokens early" if eval_config.warmup_tokens else ""
    rows = f"{eval_config.batch_size} row{'s' if eval_config.batch_size > 1 else ''}"
    return f"segments of {eval_config.segment_len}, memory {eval_config.mem_len}, {clamp}, {rows}{early}"


def _sizes(c: ModelConfig) -> str:
    if c.network is not Network.TRANSFORMER_XL:
        return f"{c.n_layer} {c.network.upper()} layers of {c.d_model} cells"
    how = "" if c.encoding is type(c).encoding else f", positions as {c.encoding}"
    return f"{c.n_layer} layers of width {c.d_model}, {c.n_head} heads x {c.d_head}, inner width {c.d_inner}{how}"


def device_bytes(components: RunComponents) -> dict[str, int]:
    """Returns the persistent bytes per device: parameters, optimizer state, memory."""
    state = components.training.abstract_state
    found = {
        "parameters": bytes_on_device(state.params),
        "optimizer": bytes_on_device(state.opt_state),
        "segment memory": bytes_on_device(state.memory),
    }
    if state.average is not None:
        found["averaged parameters"] = bytes_on_device(state.average)
    return found


def memory_line(components: RunComponents, compilation: Compilation, *, count: int = 1) -> str:
    """Describes the estimated memory per device and the time of compilation; `count`: ensemble members."""
    sizes = {name: count * size for name, size in device_bytes(components).items()}
    if compilation.temporary_bytes is not None:
        sizes["activations and gradients"] = compilation.temporary_bytes
    by_kind = ", ".join(f"{name} {megabytes(size)}" for name, size in sizes.items())
    return (
        f"memory    {megabytes(sum(sizes.values()))} per device, estimated: {by_kind} "
        f"(compiled in {compilation.seconds:.1f} s)"
    )
