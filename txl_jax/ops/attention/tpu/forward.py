"""The forward kernel: an online softmax over the tiles of keys (Dao et al., 2022), with the term by distance."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.ops.attention.tpu import calls
from txl_jax.ops.attention.tpu.calls import Kernel, Operands, Scalars, Step
from txl_jax.ops.attention.tpu.geometry import Geometry
from txl_jax.ops.attention.tpu.scores import HIDDEN, NN, dot, lane_sums, widen
from txl_jax.ops.attention.tpu.skew import LANES


class _Scratch(NamedTuple):
    """Arrays that stay in VMEM over the tiles of keys."""

    content_query: Any  # [n, E], with u.
    position_query: Any  # [n, E], with v; None: no position keys.
    top: Any  # float32 [n, 128], the largest score so far, in every lane.
    total: Any  # float32 [n, 128], sums of exp(score - top), each lane its own part.
    weighted: Any  # float32 [n, E], sum of exp(score - top) * value.


def forward(geometry: Geometry, operands: Operands, scalars: Scalars) -> tuple[jax.Array, jax.Array]:
    """Returns the attention [B, H, L, E] and the logarithms of its sums, [B, H, tiles of queries, 1, n] in float32.

    A query that sees no key gets zeros, and a logarithm so large that its probabilities come out as 0.
    """
    rows, width, blocks = geometry.tile.query, geometry.width, calls.make_blocks(geometry)
    dtype, wide = operands.query.dtype, jnp.float32
    scratch = _Scratch(
        content_query=pltpu.VMEM((rows, width), dtype),
        position_query=pltpu.VMEM((rows, width), dtype) if geometry.n_positions else None,
        top=pltpu.VMEM((rows, LANES), wide),
        total=pltpu.VMEM((rows, LANES), wide),
        weighted=pltpu.VMEM((rows, width), wide),
    )
    kernel = Kernel(
        functools.partial(_kernel, geometry),
        in_specs=(calls.operand_blocks(blocks, operands),),
        out_specs=(blocks.query, blocks.log_sum),
        out_shape=(calls.queries_shape(geometry, dtype), calls.log_sum_shape(geometry)),
        scratch=(scratch,),
        backward=False,
        n_product=2,
        n_position_product=1,
        name="relative_attention_forward",
    )
    out, log_sum = calls.run(kernel, geometry, scalars, calls.pad_operands(geometry, operands))
    return out[:, :, : geometry.segment_len], log_sum


def _kernel(
    geometry: Geometry, scalars: Scalars, operands: Operands, out_ref: Any, log_sum_ref: Any, scratch: _Scratch
) -> None:
    step = Step.current(scalars)
    _begin(geometry, step, operands, scratch)

    @pl.when(step.is_needed(geometry))
    def _() -> None:
        scores = calls.tile_scores(geometry, step, operands, scratch.content_query, scratch.position_query)
        scores = jnp.where(step.visible(geometry), scores, HIDDEN)
        _add(geometry, step, scores, operands.value[0, 0], scratch)

    _end(geometry, step, out_ref, log_sum_ref, scratch)


def _begin(geometry: Geometry, step: Step, operands: Operands, scratch: _Scratch) -> None:
    """Prepares a tile of queries."""

    @pl.when(step.key_tile == 0)
    def _() -> None:
        calls.bias_queries(geometry, operands, scratch.content_query, scratch.position_query)
        scratch.top[...] = jnp.full_like(scratch.top, HIDDEN)
        scratch.total[...] = jnp.zeros_like(scratch.total)
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)


def _add(geometry: Geometry, step: Step, scores: jax.Array, value: jax.Array, scratch: _Scratch) -> None:
    """Adds the keys of a tile to the running sums; 1s that a row sums before its first visible key fade to 0 then."""
    old_top = scratch.top[...]
    top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - widen(top, geometry.tile.key))
    fade = jnp.exp(old_top - top)
    scratch.top[...] = top
    scratch.total[...] = fade * scratch.total[...] + lane_sums(weights)
    if geometry.n_drawn_head is not None:
        weights = jnp.where(step.kept(geometry), weights, 0)
    added = dot(weights.astype(value.dtype), value, NN)
    scratch.weighted[...] = widen(fade, geometry.width) * scratch.weighted[...] + added


def _end(geometry: Geometry, step: Step, out_ref: Any, log_sum_ref: Any, scratch: _Scratch) -> None:
    """Divides the sums of a tile of queries after its last keys, and writes them."""

    @pl.when(step.key_tile == geometry.n_key_tile - 1)
    def _() -> None:
        top = scratch.top[...]
        total = jnp.broadcast_to(jnp.sum(scratch.total[...], axis=1, keepdims=True), top.shape)
        sees = top > HIDDEN
        inverse = jnp.where(sees, step.scalars.keep[1] / total, 0)
        out_ref[0, 0] = (scratch.weighted[...] * widen(inverse, geometry.width)).astype(out_ref.dtype)
        log_sum = jnp.where(sees, top + jnp.log(total), -HIDDEN)
        log_sum_ref[0, 0, 0] = log_sum.T[:1]  # One number per row: 128 equal ones were most of the temporary memory.
