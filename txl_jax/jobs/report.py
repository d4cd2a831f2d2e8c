"""Lines and facts about a run: sizes, work per step, memory per device."""

from typing import Any

import jax

from txl_jax import flops, sharding
from txl_jax.assemble import Compilation, RunComponents
from txl_jax.config import EvalConfig, ModelConfig, Network
from txl_jax.data.batches.segment_reader import SegmentReader
from txl_jax.data.corpus import Corpus
from txl_jax.jobs import attention_record
from txl_jax.runtime import distributed
from txl_jax.runtime.environment import bytes_on_device, device_kind, megabytes
from txl_jax.training.progress import StepCost


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
    attention = [] if components.attention is None else [attention_record.opening_line(components.attention)]
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
