"""Tokens per second of reading, training, evaluation and generation, for a flagfile or for settings given as flags.

    python -m experiments.bench.speed --flagfile=enwik8_12l
    python -m experiments.bench.speed --flagfile=small --speed_tasks=training,generation --speed_calls=10
    python -m experiments.bench.speed --flagfile=wt103_base --peer=hf --speed_tasks=evaluation,generation --speed_json=s.json

Tokens are random, as frequent as words are (`softmax_speed` prints the law), weights untrained, memories full. It
prints a markdown table: the median over calls, after warm-up, with the slowest and the fastest call. Evaluation and
generation read --eval.* and --generate.*, training --train.*.

Generation reads a tail of the adaptive softmax only when it may matter, which with untrained weights is almost never; so
it is timed a second time with weights of which every tail is read.

With --peer=hf Hugging Face's TransfoXLLMHeadModel (pip install '.[peer]') gets the same weights; that both give the
same losses is checked first, then the two take turns.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from experiments.cli import flag_tree, programs, runner
from txl_jax import flops
from txl_jax.assemble import RunComponents, assemble
from txl_jax.bench import compare_huggingface, throughput
from txl_jax.bench.throughput import Speed, Task
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.jobs.generate import check_can_generate
from txl_jax.runtime import environment
from txl_jax.runtime.files import write_json

FLAGS = flags.FLAGS
DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.PYTHON_STDLIB))  # Bytes, and no file is needed.
_TASKS = ("reading", "training", "evaluation", "generation")


def main() -> None:
    """Parses the flags and measures."""
    flag_tree.define(DEFAULTS)
    flags.DEFINE_integer("speed_warmup", 2, "Calls before the timed ones.", lower_bound=0)
    flags.DEFINE_integer("speed_calls", 5, "Timed calls, each of segments_per_call segments.", lower_bound=1)
    flags.DEFINE_integer("speed_vocab", None, "Size of the vocabulary; none: the corpus's, or 256.", lower_bound=2)
    flags.DEFINE_list("speed_tasks", None, f"What to time, with commas: {', '.join(_TASKS)}; none: all.")
    flags.DEFINE_string("speed_json", None, "File for all figures; none: only the table.")
    flags.DEFINE_enum("peer", None, ["hf"], "Compare with Hugging Face's TransfoXLLMHeadModel; not for reading.")
    flags.register_validator(
        "speed_tasks", lambda names: set(names or ()) <= set(_TASKS), f"has a task that is none of {', '.join(_TASKS)}"
    )
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    # Tokens are random, but an order that a corpus's program reads it in takes time.
    base = programs.DEFAULTS.get(CorpusName(FLAGS["data.corpus"].value), DEFAULTS)
    config = flag_tree.build(base)
    if FLAGS.peer:
        config = compare_huggingface.with_compat(config)
    vocab_size = FLAGS.speed_vocab or programs.VOCABULARIES.get(config.data.corpus, 256)
    if "generation" in (FLAGS.speed_tasks or _TASKS):
        check_can_generate(config)
    parts = assemble(config, vocab_size=vocab_size)
    facts = environment.describe()
    print(f"{parts.num_parameters:,} parameters, vocabulary {vocab_size:,}, {config.model.dtype}")
    print(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}\n")
    measure = _measure_beside_peer if FLAGS.peer else _measure
    found = measure(parts, facts)
    if FLAGS.speed_json:
        settings = {"vocab_size": vocab_size, "config": config_tree.to_dict(config), "argv": sys.argv[1:]}
        write_json(Path(FLAGS.speed_json), {**facts, **found, **settings})
        print(f"\nresults   {FLAGS.speed_json}")
    return 0


def _measure(parts: RunComponents, facts: dict[str, Any]) -> dict[str, Any]:
    """One table row per task."""
    print("| job | rows x segment | memory | tokens/s | slowest | fastest | compiled in | needs |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    speeds = []
    for name in FLAGS.speed_tasks or _TASKS:
        for task in _tasks(name, parts):
            [found] = throughput.take_turns([task], warmup=FLAGS.speed_warmup, calls=FLAGS.speed_calls)
            speeds.append(found)
            print(_row(found), flush=True)
    print()
    for found in speeds:
        for line in _remarks(found, parts, facts):
            print(line)
    return {"tasks": [found.as_record() for found in speeds]}


def _tasks(name: str, parts: RunComponents) -> Iterator[Task]:
    if name in ("reading", "training"):
        yield {"reading": throughput.reading, "training": throughput.training}[name](parts)
    elif name == "evaluation":
        yield throughput.evaluation(parts, parts.training.init_params())
    else:
        for every_tail in _tails(parts):
            yield throughput.generation(parts, parts.training.init_params(), every_tail=every_tail)


def _tails(parts: RunComponents) -> tuple[bool, ...]:
    """Generation reads a tail of the softmax when it may matter: timed where none does and where all do."""
    return (False, True) if parts.config.model.cutoffs else (False,)


def _measure_beside_peer(parts: RunComponents, facts: dict[str, Any]) -> dict[str, Any]:
    """One table row per task, ours beside the peer's."""
    names = FLAGS.speed_tasks or _TASKS[1:]
    if "reading" in names:
        raise ValueError("--speed_tasks has reading, and the peer reads no text; leave it out")
    if not FLAGS.speed_warmup:
        raise ValueError("--speed_warmup is 0, and the peer's first call makes what the others use; give at least 1")
    compare_huggingface.check_alike(parts.config)
    params = parts.training.init_params()
    peer = compare_huggingface.make_peer(parts, params, parts.config.eval)
    worst = compare_huggingface.check_same_numbers(parts, params, peer)
    versions = ", ".join(f"{name} {value}" for name, value in peer.versions().items())
    print(f"peer: {versions}; --compat=hf on both sides\nlargest difference of a token's loss: {worst:.1e} nats")
    if parts.evaluation.memory_dtype != parts.config.model.dtype:
        off = compare_huggingface.moved_by_storage(parts, params)
        print(
            f"by storing keys and values as {parts.evaluation.memory_dtype} a token's loss moves by up to {off:.1e} nats"
        )
    print()
    print("| job | rows x segment | memory | tokens/s | peer | times the peer | lowest | highest |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for name in names:
        for ours, theirs in _pairs(name, parts, params, peer):
            turns = throughput.take_turns((ours, theirs), warmup=FLAGS.speed_warmup, calls=FLAGS.speed_calls)
            rows.append(compare_huggingface.Beside(*turns))
            print(_row_beside(rows[-1]), flush=True)
    print()
    for beside in rows:
        for line in [_built(beside.ours.task), *_remarks(beside.ours, parts, facts)]:
            print(line)
    records = [
        {"ours": row.ours.as_record(), "peer": row.peer.as_record(), "ratio": row.ratio, "ratios": row.ratios}
        for row in rows
    ]
    return {"peer": peer.versions(), "largest_difference_nats": worst, "tasks": records}


def _pairs(name: str, parts: RunComponents, params: Any, peer: Any) -> Iterator[tuple[Task, Task]]:
    """Ours and the peer's."""
    if name == "training":
        yield compare_huggingface.training(parts, params)
    elif name == "evaluation":
        yield compare_huggingface.evaluation(parts, params, peer)
    else:
        for every_tail in _tails(parts):
            yield compare_huggingface.generation(parts, params, peer, every_tail=every_tail)


def _row_beside(beside: compare_huggingface.Beside) -> str:
    ours, ratios = beside.ours, beside.ratios
    return (
        f"| {ours.task.name} | {ours.task.shape} | {ours.task.mem_len} | {ours.median:,.4g} | {beside.peer.median:,.4g} | "
        f"{beside.ratio:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"
    )


def _built(task: Task) -> str:
    """What the table beside the peer has no room for."""
    needs = "" if task.memory_bytes is None else f", needs {environment.megabytes(task.memory_bytes)}"
    return f"{task.name}: compiled in {task.compile_seconds:.1f} s{needs}"


def _row(found: Speed) -> str:
    task, rates = found.task, found.rates
    compiled = "" if task.compile_seconds is None else f"{task.compile_seconds:.1f} s"
    needs = "" if task.memory_bytes is None else environment.megabytes(task.memory_bytes)
    return (
        f"| {task.name} | {task.shape} | {task.mem_len} | {found.median:,.4g} | {min(rates):,.4g} | {max(rates):,.4g} | "
        f"{compiled} | {needs} |"
    )


def _remarks(found: Speed, parts: RunComponents, facts: dict[str, Any]) -> list[str]:
    """What else is known of a task."""
    task, lines = found.task, []
    if task.first_token_seconds is not None:
        lines.append(
            f"{task.name}: first token {task.first_token_seconds:.3f} s after a prompt of {task.mem_len + 1} tokens"
        )
    if task.bytes_per_step is not None:
        moved = task.bytes_per_step * found.median / parts.config.generate.samples
        lines.append(f"{task.name}: {task.bytes_per_step:,} bytes read per step, {moved / 1e9:.1f} GB/s")
    if task.flops_per_token is not None and not facts["device"].startswith("CPU"):
        achieved, peak = task.flops_per_token * found.median / parts.mesh.size, flops.device_peak(facts["device"])
        lines.append(
            f"{task.name}: {task.flops_per_token / 1e6:,.1f} million operations per token, {achieved / 1e12:.1f} TFLOP/s "
            f"per device" + (f", {achieved / peak:.1%} of its peak in bfloat16" if peak else "")
        )
    return lines


if __name__ == "__main__":
    main()
