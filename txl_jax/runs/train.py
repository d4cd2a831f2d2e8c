"""The training job: from config and text to checkpoints and results.json.

A start goes in this order, so that the cheap failures come first and nothing is written before them:
  1. the model is built, with the attention of an earlier start, and the text is cut into segments: settings that do
     not fit fail here, and so do processes that do not have the same ones;
  2. the weights of a warm start are read, and the run is recorded in its directory;
  3. `txl_jax.runs.trainer` restores the latest sound checkpoint, or initializes the state, prints the opening lines,
     compiles the step, runs the loop, and scores the best parameters on the test split.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from txl_jax import sharding
from txl_jax.config import EvalConfig, ExperimentConfig, ModelConfig, Network, Order
from txl_jax.data.corpus import Corpus
from txl_jax.data.segments import SegmentReader, training_segments
from txl_jax.runs import warm_start
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.run import MemberSettings, Run, check_same_attention, check_same_text
from txl_jax.runs.trainer import Outcome, Trainer
from txl_jax.runtime import distributed, profiler
from txl_jax.runtime.environment import device_kind
from txl_jax.runtime.sinks import Sink
from txl_jax.training.hooks import Hook


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
    check_requests(config, hooks, profile_steps)
    run.compare(config)
    check_same_text(corpus)

    def prepare() -> tuple[Built, SegmentReader]:
        built = build_for(config, corpus.vocabulary, recorded=run.attention_for(config))
        built.check_batch_size()
        return built, training_reader(built, corpus, config.seed)

    built, reader = distributed.run_on_all(prepare)
    check_same_attention(built.attention)
    return begin_and_train(
        built,
        corpus,
        run,
        [reader],
        hooks=hooks,
        sinks=sinks,
        profile_steps=profile_steps,
        stop_requested=stop_requested,
    )


def begin_and_train(
    built: Built,
    corpus: Corpus,
    run: Run,
    readers: Sequence[SegmentReader],
    *,
    members: MemberSettings = (),
    opening: Sequence[str] = (),
    **requests: Any,
) -> Outcome:
    """Reads the weights of a warm start, records the run, and trains it; `requests` are the caller's, for `Trainer`."""
    weights = warm_start.load(built, corpus.vocabulary, run) if built.config.init_from else None
    record = weights and weights.record
    run.begin(built.config, corpus, attention=built.attention, weights=record, members=members)
    lines = [*_opening(built, corpus, readers[0]), *(weights.lines if weights else []), *opening]
    return Trainer(built, run, corpus, readers, begin=weights and weights.state, opening=lines, **requests).train()


def check_requests(config: ExperimentConfig, hooks: Sequence[Hook], profile_steps: tuple[int, int] | None) -> None:
    """Raises `UserError` if the run has no updates at which to run the hooks, or none of those to profile."""
    for hook in hooks:
        hook.check_interval(config.train.segments_per_call)
    if profile_steps is not None:
        profiler.check_steps(*profile_steps, steps=config.train.steps)


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
    """Trains a config as the programs do: reads its corpus, and starts or resumes the run in the directory `path`.

    The same call resumes a stopped run. For a finished run it returns the results.

    Args:
      config: All settings. Your own text is `DataConfig(corpus="text", file=...)`. The defaults of `TrainConfig` and
        `EvalConfig` are those of the 12-layer enwik8 model.
      path: The workdir, made if missing.
      data_dir: Directory of the corpora's own files.
      cache_dir: Directory for prepared tokens, or None for `prepared` in `data_dir`.
      hooks: As in `train_run`, like the other arguments.

    Raises:
      UserError: If settings, text and workdir do not fit together, or a file cannot be read or written.
      NonFiniteError: If a loss or gradient was not finite. The last checkpoint is from before it.
    """
    config = config.resolved()
    config.validate()
    with Run.open(path) as run:
        run.compare(config)
        corpus = warm_start.read_corpus(config, run, data_dir, cache_dir)
        return train_run(config, corpus, run, hooks=hooks, sinks=sinks, profile_steps=profile_steps)


def training_reader(built: Built, corpus: Corpus, seed: int) -> SegmentReader:
    """Cuts the text into segments in the config's order; raises `UserError` if it is too short for one."""
    data, train_config = built.config.data, built.config.train
    return training_segments(
        corpus.train,
        batch_size=train_config.batch_size,
        segment_len=train_config.segment_len,
        stride=train_config.stride,
        seed=seed,
        roll=data.roll,
        sentence_starts=corpus.sentences if data.order is Order.SENTENCES else None,
        own=built.own_rows(train_config.batch_size).tolist(),
    )


def _opening(built: Built, corpus: Corpus, reader: SegmentReader) -> list[str]:
    """Describes text, model, work per step, evaluation, devices and attention, one line each."""
    c, train = built.config.model, built.config.train
    context = f"memory {train.mem_len}"
    if train.stride:
        context = f"after {train.segment_len - train.stride} that are read again"
    slices, axes = sharding.num_slices(built.mesh), built.mesh.shape
    return [
        (
            f"text      {corpus.description}: {len(corpus.train):,} / {len(corpus.valid):,} / {len(corpus.test):,} "
            f"tokens to train / validate / test on, vocabulary {corpus.vocabulary.size:,}"
        ),
        f"model     {_sizes(c)}, {c.dtype}: {built.num_parameters:,} parameters",
        (
            f"training  {train.batch_size} rows x {train.new_tokens} = {train.batch_size * train.new_tokens:,} tokens "
            f"per step, {context}; {train.steps:,} steps = {train.steps / reader.n_segments:.2f} epochs of "
            f"{reader.n_segments:,} steps ({reader.skipped_tokens:,} tokens at the end of an epoch are skipped)"
        ),
        f"scoring   {_how_scored(built.config.eval)}",
        f"devices   {built.mesh.size} x {device_kind()} "
        f"({', '.join(f'{name} {size}' for name, size in axes.items())})"
        + (f" in {slices} slices" if slices > 1 else "")
        + (f" in {jax.process_count()} processes" if distributed.is_multiprocess() else ""),
        *([] if built.attention is None else [f"attention {built.attention.describe()}"]),
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
