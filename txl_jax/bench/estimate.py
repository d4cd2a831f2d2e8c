"""What a configuration needs on devices that are not at hand: from the shapes of its arrays, and from the compiler.

The compiler's part takes a topology's devices (`jax.experimental.topologies`): the programs of a run are compiled for
them as they would be there, so that what does not shard, or does not fit, fails here. It shows neither numbers nor speed.
"""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax import flops, sharding
from txl_jax.assemble import RunComponents
from txl_jax.bench.collectives import Collective, collectives
from txl_jax.bench.roofline import Work
from txl_jax.config import Remat
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.generator import Context, Generator
from txl_jax.jobs import report

BLOCK = 16  # Tokens that generation writes per call.


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, for one device."""

    needed: int  # Bytes at the fullest moment.
    scratch: int  # Bytes of those that are no arguments: activations, gradients, gathered weights.
    seconds: float  # That compiling took.
    collectives: list[Collective]  # Of a whole call.


class DoesNotFitError(ValueError):
    """The compiler found that a program needs more memory than a device has; the message gives both numbers."""


def update_work(parts: RunComponents, *, compiled: Compiled | None) -> Work:
    """What one device does in an update.

    Operations: those of `txl_jax.flops`. Memory: weights in the compute type once each way, parameters and moments read
    and written, gradients written and read, the segment memory read twice and written once, scratch written and read.
    Sent: as compiled; without it 0.
    """
    config, train = parts.config, parts.config.train
    lengths = {"segment_len": train.segment_len, "mem_len": train.mem_len, "same_length": train.same_length}
    per_token = flops.of_training(config.model, vocab_size=parts.model.vocab_size, **lengths)
    if config.model.remat is Remat.FULL:
        per_token += flops.of_recomputing(config.model, vocab_size=parts.model.vocab_size, **lengths)
    sizes = report.device_bytes(parts)
    weights = parts.num_parameters * jnp.dtype(config.model.dtype).itemsize / parts.mesh.shape[sharding.TENSOR]
    moved = (
        2 * weights * train.grad_accum_steps
        + 2 * (sizes["parameters"] + sizes["optimizer"])
        + 2 * sizes["parameters"]
        + 3 * sizes["segment memory"]
        + (2 * compiled.scratch if compiled else 0)
    )
    sent = sum(one.sent * one.times for one in compiled.collectives) / train.segments_per_call if compiled else 0
    return Work(per_token * train.batch_size * train.segment_len / parts.mesh.size, moved, sent)


def training(parts: RunComponents) -> Compiled:
    """The step of S updates; raises `DoesNotFitError`."""
    return _measured(lambda: parts.training.compile_step()[0])


def evaluation(parts: RunComponents) -> Compiled:
    """The step of evaluation, streaming or in windows; raises `DoesNotFitError`."""
    span = parts.config.eval
    if span.stride:
        shape = (span.batch_size, span.segment_len)
        whole = sharding.named_sharding(parts.mesh)
        tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=whole)
        targets = jax.ShapeDtypeStruct((span.batch_size, span.stride), "int32", sharding=whole)
        return _measured(
            lambda: parts.evaluation.window_step.lower(parts.training.abstract_state.params, tokens, targets).compile()
        )
    weights = _placed(parts.evaluation.prepare_params, parts.training.abstract_state.params)
    init = jax.jit(parts.evaluation.scorer.init_memory, out_shardings=parts.evaluation.memory_shardings)
    memory = _placed(init, weights)
    segments = parts.placement.abstract_segments(span)
    return _measured(lambda: parts.evaluation.eval_step.lower(weights, memory, segments).compile())


def generation(parts: RunComponents) -> Compiled:
    """The step that writes 16 tokens, of a model that can (`jobs.generate.check_can_generate`); raises `DoesNotFitError`."""
    span, samples = parts.config.eval, parts.config.generate.samples
    generator = Generator(
        parts.model, span, parts.config.generate, memory_dtype=parts.evaluation.memory_dtype, mesh=parts.mesh
    )
    weights = _placed(generator.prepare_segment, parts.training.abstract_state.params)
    tokens = _placed(jax.jit(generator.for_tokens), weights)

    def start(weights: Any) -> Context:
        memory = cache_lib.unrotate(generator.empty(weights))
        memory = jax.tree.map(lambda array: array.repeat(samples, axis=0) if array.ndim else array, memory)
        return Context(memory, jnp.zeros(samples, jnp.int32), jnp.zeros(samples, bool))

    context = _placed(jax.jit(start), weights)
    return _measured(lambda: generator.write.lower(tokens, context, 0, BLOCK, count=BLOCK).compile())


def _placed(function: Any, *arguments: Any) -> Any:
    """What a jitted function of abstract arguments returns: shapes, types, and where the compiler puts it."""
    compiled = function.lower(*arguments).compile()
    return jax.tree.map(
        lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
        function.eval_shape(*arguments),
        compiled.output_shardings,
    )


def _measured(compile_: Callable[[], Any]) -> Compiled:
    began = time.monotonic()
    try:
        compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(_told(str(error))) from None
    sizes = compiled.memory_analysis()
    return Compiled(
        # Not the sum of arguments, results and scratch, which share places: it can be more than a device has.
        needed=sizes.peak_memory_in_bytes,
        scratch=sizes.peak_memory_in_bytes - sizes.argument_size_in_bytes,
        seconds=time.monotonic() - began,
        collectives=collectives(compiled.as_text()),
    )


def _told(error: str) -> str:
    """The compiler's two numbers, of a message that goes on for pages."""
    found = re.search(
        r"Used ([\d.]+\w) of ([\d.]+\w) hbm|temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", error
    )
    if not found:
        return error.partition("\n")[0][:200]
    needed, there = filter(None, found.groups())
    return f"needs {needed}iB of {there}iB"
