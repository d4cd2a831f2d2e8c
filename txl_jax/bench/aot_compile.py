"""Ahead-of-time (AOT) compilation of a run's programs for devices that are not at hand: memory and collectives.

The devices are those of a topology (`jax.experimental.topologies`). The programs are compiled as they would be there,
so what does not shard or does not fit fails here. Neither numbers nor speed come out of it.
"""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from txl_jax import flops, sharding
from txl_jax.bench.collectives import Collective, collectives, crossings
from txl_jax.bench.roofline import Work
from txl_jax.config import Remat
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.generator import Context, Generator
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.runs.build import RunComponents
from txl_jax.runs.train import device_bytes

BLOCK = 16  # Tokens that generation writes per call.


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's figures of one program, per device.

    Attributes:
      peak_bytes: peak memory.
      scratch_bytes: peak memory without arguments: activations, gradients, gathered weights.
      seconds: compile time.
      collectives: those of one call, within a slice of TPUs where there are several.
      crossings: what a call sends between slices.
    """

    peak_bytes: int
    scratch_bytes: int
    seconds: float
    collectives: list[Collective]
    crossings: list[Collective]


class DoesNotFitError(UserError):
    """A program needs more memory than a device has; the message gives both numbers."""


def work_per_update(components: RunComponents, *, compiled: Compiled | None) -> Work:
    """Estimates the work of one device in an update, for the roofline.

    Operations: those of `txl_jax.flops`. Memory traffic: weights in the compute dtype once forward and once backward,
    parameters and moments read and written, gradients written and read, the segment memory read twice and written once,
    scratch written and read. Sent: as compiled, within a slice; 0 without `compiled`.
    """
    config, train = components.config, components.config.train
    lengths: Any = {"segment_len": train.segment_len, "mem_len": train.mem_len, "same_length": train.same_length}
    vocab_size = components.model.vocab_size
    per_token = flops.of_training(config.model, vocab_size=vocab_size, **lengths)
    if config.model.remat is Remat.FULL:
        per_token += flops.of_recomputing(config.model, vocab_size=vocab_size, **lengths)
    sizes = device_bytes(components)
    tensor_shards = components.mesh.shape[sharding.TENSOR]
    weights = components.num_parameters * jnp.dtype(config.model.dtype).itemsize / tensor_shards
    traffic = (
        2 * weights * train.grad_accum_steps
        + 2 * (sizes["parameters"] + sizes["optimizer"])
        + 2 * sizes["parameters"]
        + 3 * sizes["segment memory"]
        + (2 * compiled.scratch_bytes if compiled else 0)
    )
    sent = sum(one.bytes_sent * one.times for one in compiled.collectives) if compiled else 0
    return Work(
        flops=per_token * train.batch_size * train.segment_len / components.mesh.size,
        hbm_bytes=traffic,
        sent_bytes=sent / train.segments_per_call,
    )


def compile_training(components: RunComponents, *, memory_bytes: float) -> Compiled:
    """Compiles the train step of S updates; raises `DoesNotFitError` if a device's memory is too small."""
    return _compile(components, lambda: components.training.compile_step().program, memory_bytes)


def compile_evaluation(components: RunComponents, *, memory_bytes: float) -> Compiled:
    """Compiles the eval step, streaming or in sliding windows; raises `DoesNotFitError` as training does."""
    evaluation: Any = components.evaluation  # Its functions are jitted, which their types do not show.
    eval_config = components.config.eval
    params = components.training.abstract_state.params
    if eval_config.stride:
        replicated = sharding.named_sharding(components.mesh)
        shapes = [(eval_config.batch_size, length) for length in (eval_config.segment_len, eval_config.stride)]
        tokens, targets = (jax.ShapeDtypeStruct(shape, "int32", sharding=replicated) for shape in shapes)
        return _compile(
            components, lambda: evaluation.window_step.lower(params, tokens, targets).compile(), memory_bytes
        )
    weights = _abstract_result(evaluation.prepare_params, params)
    init = jax.jit(evaluation.scorer.init_memory, out_shardings=evaluation.memory_shardings)
    memory = _abstract_result(init, weights)
    segments = components.placement.abstract_segments(eval_config)
    return _compile(components, lambda: evaluation.eval_step.lower(weights, memory, segments).compile(), memory_bytes)


def compile_generation(components: RunComponents, *, memory_bytes: float) -> Compiled:
    """Compiles the step that generates 16 tokens; raises `DoesNotFitError`.

    Args:
      components: those of a model that can generate (`jobs.generate.check_can_generate`).
      memory_bytes: size of a device's memory.
    """
    config, samples = components.config, components.config.generate.samples
    generator = Generator(
        cast(TransformerXL, components.model),
        config.eval,
        config.generate,
        memory_dtype=components.evaluation.memory_dtype,
        mesh=components.mesh,
    )
    weights = _abstract_result(generator.prepare_segment, components.training.abstract_state.params)
    tokens = _abstract_result(jax.jit(generator.for_tokens), weights)

    def start(weights: Any) -> Context:
        memory = cache_lib.unrotate(generator.empty(weights))
        memory = jax.tree.map(lambda array: array.repeat(samples, axis=0) if array.ndim else array, memory)
        return Context(memory, jnp.zeros(samples, jnp.int32), jnp.zeros(samples, bool))

    context = _abstract_result(jax.jit(start), weights)
    return _compile(
        components, lambda: generator.write.lower(tokens, context, 0, BLOCK, count=BLOCK).compile(), memory_bytes
    )


def _abstract_result(function: Any, *arguments: Any) -> Any:
    """Returns shapes, types and the compiler's shardings of the result of a jitted function of abstract arguments."""
    compiled = function.lower(*arguments).compile()
    return jax.tree.map(
        lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
        function.eval_shape(*arguments),
        compiled.output_shardings,
    )


def _compile(components: RunComponents, compile_: Callable[[], Any], memory_bytes: float) -> Compiled:
    start = time.monotonic()
    try:
        compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(_needed_and_available(str(error))) from None
    sizes = compiled.memory_analysis()
    if sizes.peak_memory_in_bytes > memory_bytes:  # The compiler for GPUs does not refuse what is too large.
        raise DoesNotFitError(f"needs {sizes.peak_memory_in_bytes / 2**30:.2f}GiB of {memory_bytes / 2**30:.2f}GiB")
    text, num_slices = compiled.as_text(), sharding.num_slices(components.mesh)
    return Compiled(
        # Not the sum of arguments, results and scratch, which share buffers: it can be more than a device has.
        peak_bytes=sizes.peak_memory_in_bytes,
        scratch_bytes=sizes.peak_memory_in_bytes - sizes.argument_size_in_bytes,
        seconds=time.monotonic() - start,
        collectives=collectives(text),
        crossings=crossings(text, num_slices) if num_slices > 1 else [],
    )


def _needed_and_available(error: str) -> str:
    """Extracts the two sizes from a message of the compiler that is pages long."""
    found = re.search(
        r"Used ([\d.]+\w) of ([\d.]+\w) hbm|temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", error
    )
    if not found:
        return error.partition("\n")[0][:200]
    needed, available = filter(None, found.groups())
    return f"needs {needed}iB of {available}iB"
