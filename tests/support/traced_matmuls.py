"""FLOPs of the matmuls of a traced program."""

import math
from typing import Any

import jax


def matmul_flops(jaxpr: Any) -> int:
    """Returns the FLOPs of the matmuls in a program and in its calls, at two per multiply-add.

    A matmul in a scan counts as often as the scan repeats it. One branch of a conditional counts,
    because all must have the same FLOPs. A `while` loop does not count, because the program does
    not say how often it runs.
    """
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _flops_of_dot(equation)
        elif name == "cond":
            branches = {matmul_flops(branch) for branch in equation.params["branches"]}
            (flops,) = branches
            total += flops
        elif name == "scan":
            total += equation.params["length"] * matmul_flops(equation.params["jaxpr"])
        elif name != "while":
            total += sum(map(matmul_flops, _called_programs(equation)))
    return total


def _flops_of_dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    n_term = math.prod(left[axis] for axis in contracted)
    return 2 * n_term * math.prod(equation.outvars[0].aval.shape)


def _called_programs(equation: Any) -> list[Any]:
    """Returns the programs among an equation's parameters, which `jit` and `checkpoint` have."""

    def is_program(leaf: Any) -> bool:
        return hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")

    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
    return [leaf for leaf in leaves if is_program(leaf)]
