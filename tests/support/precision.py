"""Computations of a program in dtypes of fewer than 32 bits, by the primitives of its jaxpr."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from support import tiny

# Primitives that call an inner program, whose equations are counted themselves.
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "shard_map",
    "pallas_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "scan",
    "while",
    "cond",
    "platform_index",
}
# Primitives that move numbers or choose among them, without rounding.
_MOVES = {
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "rev",
    "concatenate",
    "stack",
    "slice",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "scatter",
    "select_n",
    "split",
    "stop_gradient",
    "bitcast_convert_type",
    "optimization_barrier",
    "iota",
    "get",
    "swap",
    "masked_load",
    "copy_p",
    "roll",
    "load",
    "masked_swap",
    "empty",
    "broadcast",
    "pad",
    "copy",
    "name",  # `checkpoint_name` makes it.
}
# A conversion to fewer bits. It is the last step of an array that is stored in 16 bits.
ROUNDED = "convert_element_type"


def narrow(function: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    """Counts the equations of a traced function whose results have fewer than 32 bits, by the
    primitive's name.

    Conversions are counted as `ROUNDED` only from wider dtypes. Primitives that move numbers do not
    count, nor do booleans. A sum into a buffer (`addupdate` of a kernel) counts by the buffer's
    dtype.
    """
    counts: collections.Counter[str] = collections.Counter()
    for equation in tiny.equations(jax.make_jaxpr(function)(*arguments)):
        name = equation.primitive.name
        if name in _CALLS or name in _MOVES:
            continue
        # A primitive without results changes its first operand.
        results = equation.outvars or equation.invars[:1]
        if not any(_is_narrow(result) for result in results):
            continue
        if name == ROUNDED and not _bits(equation.invars[0]) > _bits(equation.outvars[0]):
            continue
        counts[name] += 1
    return dict(counts)


def _bits(variable: Any) -> int:
    """Returns the bits of the numbers in a variable, or in the buffer that it refers to."""
    dtype = getattr(variable.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.number):
        return 64
    return 8 * jnp.dtype(dtype).itemsize


def _is_narrow(variable: Any) -> bool:
    return _bits(variable) < 32
