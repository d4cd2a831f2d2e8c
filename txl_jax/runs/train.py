"""Training: from config and text to checkpoints and results.json.

In this order cheap failures come first, and nothing is written before them: the model is built and
the text cut into segments, the weights of a warm start are read, the run is recorded, and
`txl_jax.runs.trainer` restores or initializes the state and trains.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from txl_jax import flops
from txl_jax.config import ExperimentConfig, Network, Order
from txl_jax.config.config_tree import require
from txl_jax.data.corpus import Corpus
from txl_jax.data.segments import SegmentReader, training_segments
from txl_jax.runs import attention_check, ensemble, warm_start
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.generate import make_sampler
from txl_jax.runs.run import MemberSettings, Run, check_same_attention, check_same_text
from txl_jax.runs.trainer import Outcome, Trainer
from txl_jax.runtime import distributed, profiler
from txl_jax.runtime.environment import device_kind
from txl_jax.runtime.sinks import Sink
from txl_jax.runtime.stop import StopRequest
from txl_jax.sharding.mesh import num_slices
from txl_jax.training.hooks import Hook, check_hooks

_SECONDS_TO_TIME = 5.0  # Updates are timed for so long before their number is set.


def train_run(
    config: ExperimentConfig,
    corpus: Corpus,
    run: Run,
    *,
    members: MemberSettings = (),
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    profile_steps: tuple[int, int] | None = None,
    verbose: bool = False,
    stop_requested: Callable[[], Any] = lambda: False,
) -> Outcome:
    """Trains an open run to the end, or until a stop is requested.

    A recorded run resumes where it stopped.

    Args:
      members: The settings in which the members of an ensemble differ (see `runs.ensemble`), or
        empty for one run.
      hooks: Run after evaluation and before the checkpoint of a step. To train N updates of a
        longer schedule, pass
        one that calls `HookContext.request_stop` at update N, a multiple of `train.eval_every`.
      sinks: Get the records in addition to metrics.jsonl and TensorBoard's files.
      profile_steps: First and last update, from 1, of a profile in the workdir's `profile`, or None
        for no profile.
      verbose: Whether to print details of attention and memory that on one device only log.txt has.

    Raises:
      UserError: If settings, members, text and workdir are incompatible, or the workdir cannot be
        used.
      NonFiniteError: If a loss or gradient was not finite. The last checkpoint is from before it.
      CheckpointError: If none of the run's checkpoints can be read.
      RemoteProcessError: If another process could not continue.
    """
    check_hooks(hooks, config.train.segments_per_call)
    if profile_steps is not None:
        profiler.check_steps(profile_steps, steps=config.train.steps)
    members = [ensemble.in_order(member) for member in members]
    run.compare(config, members)
    if distributed.is_multiprocess():
        check_same_text(corpus)

    def build_and_cut() -> tuple[Built, list[SegmentReader]]:
        # `attention_for` returns what an earlier start chose. A first start: model.attention.
        built = build_for(config, corpus.vocabulary, recorded=run.attention_for(config))
        built.check_batch_size()
        if not members:
            return built, [training_reader(built, corpus, config.seed)]
        built = ensemble.Ensemble.of(built, members)
        return built, [training_reader(built, corpus, each.seed) for each in built.configs.values()]

    built, readers = attention_check.build_on_all(build_and_cut)
    if distributed.is_multiprocess():
        check_same_attention(built.attention)
    sampler = make_sampler(config, corpus.vocabulary) if config.train.sample_every else None
    weights = None
    if config.init_from is not None:
        weights = warm_start.load(built, corpus.vocabulary, run)
    run.record_start(
        config,
        corpus,
        attention=built.attention,
        warm_start=weights and weights.record,
        members=members,
    )
    opening = _opening(built, corpus, readers[0]) + (weights.lines if weights else [])
    if members:
        opening.append(
            f"ensemble  {'; '.join(built.members.names)}: trained together, losses in this order"
        )
    return Trainer(
        built,
        run,
        corpus,
        readers,
        warm_state=weights and weights.state,
        opening=opening,
        hooks=hooks,
        sinks=sinks,
        profile_steps=profile_steps,
        sampler=sampler,
        verbose=verbose,
        stop_requested=stop_requested,
    ).train()


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
    """Trains a config, starting or resuming the run in the directory `path`.

    It reads the corpus of the config and then trains, as the scripts do.

    The same call resumes a stopped run. For a finished run it returns the results. It raises as
    `train_run` does.

    Ctrl-C and SIGTERM save the run, and then raise KeyboardInterrupt or SystemExit(143). Signals
    with your own handler, and all signals outside the main thread, are not handled: use a hook that
    calls `HookContext.request_stop`.

    Args:
      config: All settings. Your own text is `DataConfig(corpus="text", file=...)`. The defaults of
        `TrainConfig` and `EvalConfig` are for the 12-layer enwik8 model.
      path: The workdir, made if missing.
      data_dir: Directory of the corpora's own files.
      cache_dir: Directory for prepared tokens, or None for `prepared` in `data_dir`.
      hooks: As in `train_run`, like the other arguments.
    """
    advice = 'Pass txl_jax.preset("small"), for example.'
    require(
        isinstance(config, ExperimentConfig),
        f"config must be an ExperimentConfig, got {config!r:.40}. {advice}",
    )
    config = config.resolved()
    config.validate()
    # Before a text is read, which may take minutes.
    check_hooks(hooks, config.train.segments_per_call)
    with Run.open(path) as run:
        run.compare(config)
        corpus = warm_start.read_corpus(config, run, data_dir, cache_dir)
        options: dict[str, Any] = {"hooks": hooks, "sinks": sinks, "profile_steps": profile_steps}
        with StopRequest(only_defaults=True) as stop:
            outcome = train_run(config, corpus, run, stop_requested=lambda: stop, **options)
    if stop.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if stop.signal_number:
        raise SystemExit(128 + stop.signal_number)
    return outcome


def training_reader(built: Built, corpus: Corpus, seed: int) -> SegmentReader:
    """Cuts the text into segments in the config's order.

    Raises `UserError` if it is too short for one segment.
    """
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


def steps_in(
    seconds: float,
    config: ExperimentConfig,
    corpus: Corpus,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, float]:
    """Measures updates.

    Returns how many fit into the time together with their evaluations, and the seconds per update.

    The timed updates are discarded. Compilation does not count, and evaluations count by their
    FLOPs. Raises `UserError` if the text cannot be trained on, or evaluations leave no time for
    updates.
    """
    built = build_for(config, corpus.vocabulary)
    built.check_batch_size()
    train, reader = config.train, training_reader(built, corpus, config.seed)
    step, state = built.compile_step().program, built.init_state()
    times = [clock()]  # The start, and the end of each call.
    while len(times) < 3 or times[-1] - times[1] < _SECONDS_TO_TIME:
        segments = reader.segments(
            (len(times) - 1) * train.segments_per_call, train.segments_per_call
        )
        state, metrics = step(state, built.place(segments, batch_size=train.batch_size))
        jax.block_until_ready(metrics)
        times.append(clock())
    each = (times[-1] - times[1]) / ((len(times) - 2) * train.segments_per_call)
    sizes = {"vocab_size": built.model.vocab_size}
    work = flops.of_step(config, **sizes, n_device=built.mesh.size).flops or math.inf
    per_token = each * flops.of_inference(config.model, config.eval, **sizes) / work
    validation = per_token * len(corpus.valid[: config.eval.valid_tokens])
    # The last update is evaluated too, whether it is a multiple of eval_every or not.
    scoring = validation + per_token * len(corpus.test)
    of_step = each + validation / train.eval_every
    steps = int((seconds - scoring) / of_step)
    steps -= steps % train.segments_per_call
    found = f"a step takes {each:.3g} s, and scoring the validation and test splits {scoring:.3g} s"
    advice = (
        f"Pass at least {math.ceil((scoring + 100 * of_step) / 60)} minutes for 100 steps, or a "
        "smaller model."
    )
    require(steps > 0, f"{seconds / 60:g} minutes are too few to train: {found}. {advice}")
    return steps, each


def _opening(built: Built, corpus: Corpus, reader: SegmentReader) -> list[str]:
    """Describes text, model, work per step, evaluation and devices, one line each."""
    c, train, lengths, mesh = built.config.model, built.config.train, built.config.eval, built.mesh
    sizes = (
        f"{c.n_layer} layers of size {c.d_model}, {c.n_head} heads x {c.d_head}, "
        f"inner size {c.d_inner}"
    )
    if c.network is not Network.TRANSFORMER_XL:
        sizes = f"{c.n_layer} {c.network.upper()} layers of {c.d_model} cells"
    elif c.encoding is not type(c).encoding:
        sizes += f", positions as {c.encoding}"
    reread = train.segment_len - train.new_tokens
    context = f"after {reread} that are reread" if reread else f"memory {train.mem_len}"
    scoring = f"segments of {lengths.segment_len}, memory {lengths.mem_len}"
    if lengths.warmup_tokens:
        scoring += f", each row starting {lengths.warmup_tokens} tokens early"
    if lengths.stride:
        scoring = f"the last {lengths.stride} of windows of {lengths.segment_len}"
    clamp = f"distances clamped at {lengths.clamp_len}" if lengths.clamp_len else "no clamp"
    devices = f"{mesh.size} x {device_kind()}"
    if mesh.size > 1:
        devices += f" ({', '.join(f'{name} {size}' for name, size in mesh.shape.items())})"
    if (slices := num_slices(mesh)) > 1:
        devices += f" in {slices} slices"
    if distributed.is_multiprocess():
        devices += f" in {jax.process_count()} processes"
    splits = " / ".join(f"{len(tokens):,}" for tokens in (corpus.train, corpus.valid, corpus.test))
    tokens = f"{splits} train / valid / test tokens, vocabulary {corpus.vocabulary.size:,}"
    unknown = f"{corpus.unknown_share:.2%}"
    if unknown != "0.00%":
        tokens += f", {unknown} of the tokens are unknown"
    work = (
        f"batch {train.batch_size} x {train.new_tokens} tokens = "
        f"{train.batch_size * train.new_tokens:,} per step, {context}; "
        f"{train.steps:,} steps = {train.steps / reader.n_segments:.2f} epochs of "
        f"{reader.n_segments:,} steps ({reader.skipped_tokens:,} tokens at the end of an epoch "
        "are skipped)"
    )
    return [
        f"text      {corpus.description}: {tokens}",
        f"model     {sizes}, {c.dtype}: {built.num_parameters:,} parameters",
        f"training  {work}",
        f"scoring   {scoring}, {clamp}, batch {lengths.batch_size}",
        f"devices   {devices}",
    ]
