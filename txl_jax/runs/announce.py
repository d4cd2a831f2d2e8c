"""The beginning of a run's log: a startup summary, and a report of the built model."""

import jax

from txl_jax.config import EvalConfig, ModelConfig, Network, TrainConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.segments import SegmentReader
from txl_jax.runs import attention_choice, remat_choice
from txl_jax.runs.build import Built, Compilation
from txl_jax.runs.warm_start import WarmStart
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.log import RunLog
from txl_jax.sharding.mesh import num_slices


def startup_summary(
    built: Built, corpus: Corpus, reader: SegmentReader, pretrained: WarmStart | None
) -> list[str]:
    """Describes text, model, work per step, evaluation, devices and members, in lines.

    Args:
      built: The model and the devices.
      corpus: The text.
      reader: The training segments (for an ensemble, the first member's).
      pretrained: The model whose parameters a warm start begins with, or None.
    """
    config = built.config
    parameters = f"{config.model.dtype}: {built.num_parameters:,} parameters"
    lines = [
        f"text      {corpus.description}: {_tokens(corpus)}",
        f"model     {_sizes(config.model)}, {parameters}",
        f"training  {_work(config.train, reader)}",
        f"scoring   {_scoring(config.eval)}",
        f"devices   {_devices(built)}",
    ]
    if pretrained is not None:
        lines.extend(pretrained.lines)
    if built.members.names:
        names = "; ".join(built.members.names)
        lines.append(f"ensemble  {names}: trained together, losses in this order")
    return lines


def _tokens(corpus: Corpus) -> str:
    splits = (corpus.train, corpus.valid, corpus.test)
    lengths = " / ".join(f"{len(tokens):,}" for tokens in splits)
    text = f"{lengths} train / valid / test tokens, vocabulary {corpus.vocabulary.size:,}"
    unknown = f"{corpus.unknown_share:.2%}"
    if unknown != "0.00%":
        text += f", {unknown} of the tokens are unknown"
    return text


def _sizes(model: ModelConfig) -> str:
    if model.network is not Network.TRANSFORMER_XL:
        return f"{model.n_layer} {model.network.upper()} layers of {model.d_model} cells"
    text = (
        f"{model.n_layer} layers of size {model.d_model}, {model.n_head} heads x {model.d_head}, "
        f"inner size {model.d_inner}"
    )
    # The encoding is named only if it is not the default one.
    if model.encoding is not type(model).encoding:
        text += f", positions as {model.encoding}"
    return text


def _work(train: TrainConfig, reader: SegmentReader) -> str:
    context = f"memory {train.mem_len}"
    n_reread = train.segment_len - train.new_tokens
    if n_reread:
        context = f"after {n_reread} that are reread"
    n_token = train.batch_size * train.new_tokens
    per_step = f"batch {train.batch_size} x {train.new_tokens} tokens = {n_token:,} per step"
    n_epoch = train.steps / reader.n_segments
    epochs = (
        f"{train.steps:,} steps = {n_epoch:.2f} epochs of {reader.n_segments:,} steps "
        f"({reader.skipped_tokens:,} tokens at the end of an epoch are skipped)"
    )
    return f"{per_step}, {context}; {epochs}"


def _scoring(lengths: EvalConfig) -> str:
    if lengths.stride:
        text = f"the last {lengths.stride} of windows of {lengths.segment_len}"
    else:
        text = f"segments of {lengths.segment_len}, memory {lengths.mem_len}"
        if lengths.warmup_tokens:
            text += f", each row starting {lengths.warmup_tokens} tokens early"
    clamp = f"distances clamped at {lengths.clamp_len}" if lengths.clamp_len else "no clamp"
    return f"{text}, {clamp}, batch {lengths.batch_size}"


def _devices(built: Built) -> str:
    mesh = built.mesh
    text = f"{mesh.size} x {environment.device_kind()}"
    if mesh.size > 1:
        axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
        text += f" ({axes})"
    n_slice = num_slices(mesh)
    if n_slice > 1:
        text += f" in {n_slice} slices"
    if distributed.is_multiprocess():
        text += f" in {jax.process_count()} processes"
    return text


def report_build(
    built: Built, compilation: Compilation, log: RunLog, *, show_details: bool
) -> None:
    """Logs attention, remat, the estimated memory per device, and the compilation time.

    Args:
      built: The built model.
      compilation: The compiled training step.
      log: The run's open log.
      show_details: Whether details are printed too. Otherwise only log.txt has them.
    """
    if built.attention is not None:
        # A path that failed on this device is always shown.
        has_failed = any(chosen.replaces_failed for chosen in built.attention)
        log.print(
            f"attention {attention_choice.describe(built.attention)}",
            show=show_details or has_failed,
        )
    if built.remat is not None:
        log.print(f"remat     {remat_choice.describe(built.remat)}", show=show_details)

    n_member = len(built.members)
    sizes = {kind: n_member * n_byte for kind, n_byte in built.device_bytes().items()}
    if compilation.temporary_bytes is not None:
        sizes["activations and gradients"] = compilation.temporary_bytes
    total = environment.megabytes(sum(sizes.values()))
    by_kind = ", ".join(f"{kind} {environment.megabytes(n_byte)}" for kind, n_byte in sizes.items())
    log.print(f"memory    {total} per device, estimated (compiled in {compilation.seconds:.1f} s)")
    log.print(f"          {by_kind}", show=show_details)
