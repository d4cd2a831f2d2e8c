"""Measures the throughput of training, evaluation and generation, in tokens per second.

The configuration comes from a flagfile or other flags.

    python -m experiments.bench.speed --flagfile=enwik8_12l
    python -m experiments.bench.speed --flagfile=small --tasks=training,generation --calls=10
    python -m experiments.bench.speed --flagfile=wt103_base --peer=hf --tasks=evaluation,generation
    python -m experiments.bench.speed --flagfile=own_bytes --tasks=dynamic --eval.batch_size=1

Tokens are random with the frequencies of words, weights are untrained, and memories are full. The
table shows the median over calls, and the slowest and the fastest call. Generation skips tails of
the adaptive softmax that cannot change the result. Untrained weights skip nearly all of them, so a
second row is timed with weights that force every tail to be read.

The task dynamic is timed only if you name it. It times dynamic evaluation (docs/dynamic.md) with
--eval.dynamic.rule (default: rmsprop), and training with Adam at the lengths and batch size of
evaluation. Their calls are interleaved.

With --peer=hf, Hugging Face's TransfoXLLMHeadModel (pip install '.[peer]') gets the same weights.
--peer=original uses the authors' PyTorch release from a clone, --peer_path, both eager and compiled
by torch.compile. The losses are compared first, then all calls are interleaved. The table shows the
speedup.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import peers, timing
from experiments.bench.peers import Peer, TorchModel
from experiments.bench.timing import Task
from txl_jax import cli, flops
from txl_jax.config import (
    CorpusName,
    DataConfig,
    DynamicRule,
    EvalConfig,
    ExperimentConfig,
    GenerateConfig,
    OptimizerConfig,
    config_tree,
)
from txl_jax.config.config_tree import require, setting
from txl_jax.evaluation import dynamic
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.inference.decode import BlockRows, Sampling, row_key
from txl_jax.inference.generate import BLOCK
from txl_jax.runs.build import Built, build
from txl_jax.runs.dynamic import DynamicModel, built_with_rule
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime import environment

# Byte tokens, so that no file is needed.
DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.PYTHON_STDLIB))
GROUPS = ("data", "model", "train", "eval", "generate", "mesh")
TASKS = ("training", "evaluation", "generation")
# Dynamic evaluation. It is timed only if it is named.
DYNAMIC = "dynamic"
PEERS_TASKS = {None: (*TASKS, DYNAMIC), Peer.HUGGINGFACE: TASKS, Peer.ORIGINAL: TASKS[:2]}
_COLUMNS = "task | rows x segment | memory | tokens/s | slowest | fastest"
_COLUMNS_WITH_PEER = (
    "task | rows x segment | memory | tokens/s | peer's | speedup | lowest | highest"
)


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    tasks: tuple[str, ...] = setting(
        (), f"Tasks to time, separated by commas ({', '.join(TASKS)}), or {DYNAMIC}. If empty, all."
    )
    calls: int = setting(
        5,
        "Timed calls of each task: train.segments_per_call or 8 segments, or 16 tokens.",
        at_least=1,
    )
    warmup: int = setting(2, "Warm-up calls before the timed ones.", at_least=1)
    peer: Peer | None = setting(
        None, "Compare with Hugging Face's TransfoXLLMHeadModel or the authors' PyTorch code."
    )
    peer_path: str | None = setting(
        None, f"With --peer=original: a clone of {peers.REPOSITORY}.", path=True, loads_code=True
    )

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """Tasks to time."""
        if self.tasks:
            return self.tasks
        return tuple(name for name in PEERS_TASKS[self.peer] if name != DYNAMIC)

    def validate(self) -> None:
        """Raises `UserError` if a task is unknown or not supported by the peer.

        Also raises it if the path of the peer's code is missing.
        """
        super().validate()
        setting_name = f"with --peer={self.peer}, tasks" if self.peer else "tasks"
        timing.check_names(setting_name, self.chosen_tasks, PEERS_TASKS[self.peer])
        has_both_or_neither = (self.peer is Peer.ORIGINAL) == bool(self.peer_path)
        require(
            has_both_or_neither,
            f"--peer=original and --peer_path require each other, got {self.peer} and "
            f"{self.peer_path}. Pass both or neither.",
        )


def run(plan: Plan, job: cli.Job) -> None:
    """Measures the tasks and prints a table.

    Raises `UserError` if a task is impossible, or the peer's losses differ.
    """
    config = job.config()
    if plan.peer:
        config = peers.with_peer_compat(config)
    if "generation" in plan.chosen_tasks:
        check_can_generate(config)
    built = build(config, vocab_size=timing.vocab_size_of(config.data))
    timing.print_head(built)
    models = peers.checked_peers(built, plan.peer_path) if plan.peer else []
    timed: list[Task] = []
    columns = _COLUMNS_WITH_PEER if models else _COLUMNS
    timing.print_table(columns, _rows(plan, built, models, timed))
    if jax.default_backend() != "cpu":
        print()
        _print_utilization(timed, n_device=built.mesh.size)


def _print_utilization(timed: Sequence[Task], *, n_device: int) -> None:
    """Prints the operations per second and device of the tasks with known FLOPs."""
    peak = flops.device_peak(environment.device_kind())
    for task in timed:
        if not task.flops_per_token:
            continue
        achieved = task.flops_per_token * statistics.median(task.rates) / n_device
        fraction = f", {achieved / peak:.1%} of its peak in bfloat16 (MFU)" if peak else ""
        print(
            f"{task.name}: {task.flops_per_token / 1e6:,.1f} million operations per token, "
            f"{achieved / 1e12:.1f} TFLOP/s per device{fraction}"
        )


def _rows(
    plan: Plan, built: Built, models: Sequence[TorchModel], timed: list[Task]
) -> Iterator[list[str]]:
    """Times the tasks and yields their rows, one per peer. Appends our tasks to `timed`."""
    for name in plan.chosen_tasks:
        if name == DYNAMIC:
            yield from _dynamic_rows(plan, built)
            continue
        for task in tasks(name, built):
            peer_tasks = [model.task(name, task, built) for model in models]
            timing.time_in_turns([task, *peer_tasks], warmup=plan.warmup, calls=plan.calls)
            timed.append(task)
            lengths = task.lengths
            sizes = [f"{lengths.batch_size} x {lengths.segment_len}", str(lengths.mem_len)]
            if not peer_tasks:
                yield [task.name, *sizes, *task.cells]
            for peer_task in peer_tasks:
                ratios = task.speedups(peer_task)
                summary = (statistics.median(ratios), min(ratios), max(ratios))
                medians = [task.cells[0], peer_task.cells[0]]
                yield [peer_task.name, *sizes, *medians, *(f"{ratio:.2f}" for ratio in summary)]


def _dynamic_rows(plan: Plan, built: Built) -> Iterator[list[str]]:
    """Times dynamic evaluation and training of the same shape, interleaved. Yields their rows."""
    pair = dynamic_and_training(built)
    timing.time_in_turns(pair, warmup=plan.warmup, calls=plan.calls)
    for task in pair:
        sizes = f"{task.lengths.batch_size} x {task.lengths.segment_len}"
        yield [task.name, sizes, str(task.lengths.mem_len), *task.cells]
    learning_task, training_task = pair
    ratio = training_task.speedup(learning_task)
    print(
        f"\nA token of dynamic evaluation takes {ratio:.2f} times as long as one of training, "
        "by the median over pairs of calls."
    )


def tasks(name: str, built: Built) -> Iterator[Task]:
    """Yields the tasks of a name.

    Generation skips tails that cannot matter. For a model with tails it yields both extremes.
    """
    makers = {"training": training, "evaluation": evaluation, "generation": generation}
    yield makers[name](built)
    if name == "generation" and built.config.model.cutoffs:
        yield generation(built, every_tail=True)


def training(built: Built) -> Task:
    """Runs whole training steps: forward, backward, optimizer and memory.

    Tokens that are read again (stride) do not count.
    """
    config = built.config
    train = config.train
    cost = flops.of_step(config, vocab_size=built.model.vocab_size, n_device=built.mesh.size)
    compilation = built.compile_step()
    segments = timing.random_segments(built, train)
    call = timing.repeated(compilation.program, built.init_state(), segments)
    return Task(
        "training",
        tokens=cost.tokens * train.segments_per_call,
        call=call,
        lengths=train,
        # None if the FLOPs are not known.
        flops_per_token=cost.flops and cost.flops / cost.tokens,
        program=compilation.executable,
    )


def evaluation(built: Built) -> Task:
    """Runs streaming evaluation with a full memory.

    Raises `UserError` if the config asks for sliding windows.
    """
    lengths = built.config.eval
    check_streams(lengths)
    prepared = built.prepare_params(built.init_params())
    # A full memory that is not reset. Arithmetic on the arrays keeps their shardings.
    memory = built.init_memory(prepared)
    memory = memory.replace(valid=memory.valid * 0 + lengths.mem_len)
    segments = timing.random_segments(built, lengths)
    segments = segments._replace(reset=segments.reset & False)
    eval_step: Any = built.eval_step  # It is jitted, which its type does not show.
    step = eval_step.lower(prepared, memory, segments).compile()
    tokens = lengths.batch_size * lengths.segment_len * SEGMENTS_PER_CALL
    per_token = flops.of_inference(built.config.model, lengths, vocab_size=built.model.vocab_size)
    call = timing.repeated(functools.partial(step, prepared), memory, segments)
    return Task("evaluation", tokens, call, lengths, per_token, program=step)


def dynamic_and_training(built: Built) -> list[Task]:
    """Returns two tasks: dynamic evaluation, and training with the same lengths and batch size.

    Training uses Adam with its defaults, and the dropout of the config. Evaluation has no dropout.
    """
    config = built.config
    if config.eval.dynamic.rule is None:
        config = config_tree.replace(config, {"eval.dynamic.rule": DynamicRule.RMSPROP})
    config.validate()
    vocab_size = built.model.vocab_size
    learning = build(dynamic.training_config(config), vocab_size=vocab_size, uses=["training"])
    params = learning.init_params()
    statistics = None
    if config.eval.dynamic.rule is DynamicRule.RMS:
        # Their values do not change the time.
        statistics = jax.tree.map(jnp.ones_like, params)
    model = DynamicModel(built_with_rule(learning), params, statistics)
    lengths = learning.config.eval
    learning_task = Task(
        f"dynamic evaluation, {config.eval.dynamic.rule}",
        lengths.batch_size * lengths.segment_len * SEGMENTS_PER_CALL,
        timing.repeated(
            functools.partial(model.step, None),
            model.start(),
            timing.random_segments(learning, lengths),
        ),
        lengths,
    )

    train_config = dataclasses.replace(learning.config, optimizer=OptimizerConfig())
    training_task = training(build(train_config, vocab_size=vocab_size))
    training_task.name = "training with Adam"
    return [learning_task, training_task]


def check_streams(lengths: EvalConfig) -> None:
    """Raises `UserError` for sliding windows."""
    require(
        not lengths.stride,
        f"eval.stride must be none for this command, got {lengths.stride}. Omit it.",
    )


def generation(built: Built, *, every_tail: bool = False) -> Task:
    """Generates successive tokens from a full memory with the settings in `config.generate`.

    All samples are generated in parallel.
    """
    lengths = built.config.eval
    how = built.config.generate
    vocab_size = built.model.vocab_size
    params = built.init_params()
    name = "generation"
    if every_tail:
        params = timing.with_every_tail(params)
        name += ", every tail read"
    generator = built.generator(built.prepare_params(params))
    cache, *_ = generator.read(timing.draw_tokens(vocab_size, lengths.mem_len + 1), how)
    rows, sampling = generation_arguments(how)
    decode = generator.decode.lower(
        generator.for_tokens, cache, rows, sampling, count=BLOCK
    ).compile()
    call = timing.repeated(functools.partial(decode, generator.for_tokens), cache, rows)
    single = dataclasses.replace(lengths, batch_size=how.samples, segment_len=1)
    per_token = flops.of_inference(built.config.model, single, vocab_size=vocab_size)
    return Task(name, how.samples * BLOCK, call, single, per_token, program=decode)


def generation_arguments(config: GenerateConfig) -> tuple[BlockRows, Sampling]:
    """Returns the arguments of a call that generates `BLOCK` tokens of each sample."""
    keys = np.stack([row_key(0, i) for i in range(config.samples)])
    zeros = np.zeros(config.samples, np.int32)
    rows = BlockRows(zeros[:, None], zeros, zeros + BLOCK, keys, np.int32(-1))
    return rows, Sampling.of(config)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=GROUPS)
