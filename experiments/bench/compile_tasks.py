"""Compiles a configuration's tasks for devices that this machine does not have."""

from collections.abc import Callable
from typing import Any

import jax

from experiments.bench.compiled.cost import ProgramCost, cost_of
from experiments.bench.speed import check_streams, generation_arguments
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.decode import decode_block
from txl_jax.inference.generate import BLOCK
from txl_jax.runs.build import Built, abstract_arrays
from txl_jax.runs.generate import check_can_generate

TASKS = ("training", "evaluation", "generation")


def compile_task(built: Built, task: str) -> Any:
    """Compiles the train step, the eval step of streaming, or the step of 16 tokens.

    Raises:
      UserError: If the configuration cannot do the task.
    """
    compilers: dict[str, Callable[[Built], Any]] = {
        "training": _compile_training,
        "evaluation": _compile_evaluation,
        "generation": _compile_generation,
    }
    return compilers[task](built)


def cost_of_task(built: Built, task: str, program: Any) -> ProgramCost:
    """Returns the cost of a training step, a segment or a token in a compiled task."""
    text = program.as_text()
    if task == "training":
        return cost_of(text, steps=built.config.train.segments_per_call)
    if task == "evaluation":
        return cost_of(text, steps=SEGMENTS_PER_CALL)
    # The loop over tokens ends when all rows have stopped.
    return cost_of(text, steps=BLOCK, rounds=BLOCK)


def _compile_training(built: Built) -> Any:
    return built.lower_step().compile()


def _compile_evaluation(built: Built) -> Any:
    lengths = built.config.eval
    evaluation: Any = built  # Its functions are jitted, which their types do not show.
    prepared = _prepared_weights(built)
    check_streams(lengths)
    memory = _abstract_result(evaluation.init_memory, prepared)
    segments = built.abstract_segments(lengths)
    return evaluation.eval_step.lower(prepared, memory, segments).compile()


def _compile_generation(built: Built) -> Any:
    mem_len = built.config.eval.mem_len
    generate = built.config.generate
    prepared = _prepared_weights(built)
    check_can_generate(built.config)

    def for_tokens(prepared: Any) -> Any:
        return prepared.for_generation(mem_len=mem_len).for_single_tokens(mem_len=mem_len)

    def start(prepared: Any) -> Any:
        memory = built.scorer.init_memory(prepared)
        row = jax.tree.map(lambda array: array[:1] if array.ndim else array, memory)
        return cache_lib.repeat_rows(cache_lib.unrotate(row), generate.samples)

    tokens = _abstract_result(jax.jit(for_tokens), prepared)
    cache = _abstract_result(jax.jit(start), prepared)
    decode = built.jit(decode_block, static_argnames=("sampling", "count"), donate_argnums=1)
    return decode.lower(tokens, cache, *generation_arguments(generate), count=BLOCK).compile()


def _prepared_weights(built: Built) -> Any:
    """Returns the shapes and shardings of the prepared parameters that inference uses."""
    functions: Any = built  # Its functions are jitted, which their types do not show.
    return _abstract_result(functions.prepare_params, built.abstract_state.params)


def _abstract_result(function: Any, *arguments: Any) -> Any:
    """Returns the shapes, dtypes and compiler's shardings of a jitted function's result.

    The arguments of the function are abstract.
    """
    shapes = function.eval_shape(*arguments)
    shardings = function.lower(*arguments).compile().output_shardings
    return abstract_arrays(shapes, shardings)
