"""What a run says of itself: the opening lines, and the facts that stand beside every result."""

import jax

from txl_jax.assemble import Compilation, RunComponents
from txl_jax.config import Encoding, EvalConfig, ModelConfig, Network
from txl_jax.data.batches.segment_reader import SegmentReader
from txl_jax.data.corpus import Corpus
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime import distributed
from txl_jax.runtime.environment import bytes_on_device, device_kind, duration, megabytes


def opening(parts: RunComponents, corpus: Corpus, reader: SegmentReader) -> list[str]:
    """Text, model, work per step, devices."""
    c, train = parts.config.model, parts.config.train
    tokens_per_step = train.batch_size * train.new_tokens
    epochs = train.steps / reader.n_segments
    return [
        f"text      {corpus.description}: {len(corpus.train):,} / {len(corpus.valid):,} / {len(corpus.test):,} tokens "
        f"to train / validate / test on, vocabulary {corpus.vocabulary.size:,}",
        f"model     {_sizes(c)}, {c.dtype}: {parts.num_parameters:,} parameters",
        f"training  {train.batch_size} rows x {train.new_tokens} = {tokens_per_step:,} tokens per step, "
        + (
            f"after {train.segment_len - train.stride} that are read again"
            if train.stride
            else f"memory {train.mem_len}"
        )
        + f"; {train.steps:,} steps = {epochs:.2f} epochs of {reader.n_segments:,} steps "
        f"({reader.skipped_tokens:,} tokens at the end of an epoch are skipped)",
        f"scoring   {_how_scored(parts.config.eval)}",
        f"devices   {parts.mesh.size} x {device_kind()} ({', '.join(f'{k} {n}' for k, n in parts.mesh.shape.items())})"
        + (f" in {jax.process_count()} processes" if distributed.is_multiprocess() else ""),
    ]


def _how_scored(span: EvalConfig) -> str:
    clamp = f"distances clamped at {span.clamp_len}" if span.clamp_len else "no clamp"
    if span.stride:
        return f"the last {span.stride} of windows of {span.segment_len}, {clamp}, {span.batch_size} windows at a time"
    early = f", each begun {span.warmup_tokens} tokens early" if span.warmup_tokens else ""
    rows = f"{span.batch_size} row{'s' if span.batch_size > 1 else ''}"
    return f"segments of {span.segment_len}, memory {span.mem_len}, {clamp}, {rows}{early}"


def _sizes(c: ModelConfig) -> str:
    if c.network is Network.LSTM:
        return f"{c.n_layer} LSTM layers of {c.d_model} cells"
    how = "" if c.encoding is Encoding.RELATIVE else f", positions as {c.encoding}"
    return f"{c.n_layer} layers of width {c.d_model}, {c.n_head} heads x {c.d_head}, inner width {c.d_inner}{how}"


def held(parts: RunComponents) -> dict[str, int]:
    """Bytes that lie on one device from update to update, by kind."""
    state = parts.training.abstract_state
    found = {
        "parameters": bytes_on_device(state.params),
        "optimiser": bytes_on_device(state.opt_state),
        "segment memory": bytes_on_device(state.memory),
    }
    if state.average is not None:
        found["mean of the weights"] = bytes_on_device(state.average)
    return found


def memory_line(parts: RunComponents, compilation: Compilation) -> str:
    """Estimated memory per device, and how long compiling took."""
    sizes = held(parts)
    if compilation.temporary_bytes is not None:
        sizes["activations and gradients"] = compilation.temporary_bytes
    parts_text = ", ".join(f"{name} {megabytes(size)}" for name, size in sizes.items())
    return (
        f"memory    {megabytes(sum(sizes.values()))} per device, estimated: {parts_text} "
        f"(compiled in {compilation.seconds:.1f} s)"
    )


def scores(totals: Totals, measure: Measure) -> str:
    """One line of a result, the usual measure first."""
    perplexity = f"  {totals.told(Measure.PPL)}" if measure is Measure.BPC else ""
    return f"{totals.told(measure)}  loss {totals.nll:.4f}{perplexity}  ({totals.tokens:,.0f} tokens)"


def timed(line: str, seconds: float) -> str:
    """A line with the time that it took."""
    return f"{line}  in {duration(seconds)}"
