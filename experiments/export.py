r"""Exports a trained model with jax.export, to run on CPU, TPU and GPU without this project.

    python -m experiments.export --from=runs/mine --to=mine-exported
    python -m experiments.export --from=runs/mine --to=mine-exported --rows=8

--from is a run's workdir or a portable checkpoint. --to is a new directory with functions for
scoring and generation as StableHLO (the memory is an argument and a result), the weights as
safetensors, and a manifest. Lengths come from the run's eval settings. The files are read back and
compared with the model before the directory is renamed into place. docs/export.md shows how to run
them with only jax, numpy, safetensors and flatbuffers.
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.config import ExperimentConfig, MeshConfig, config_tree
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import CheckpointError, MissingPackageError, UserError
from txl_jax.interop import exported
from txl_jax.interop.exported import Arrays, Function, Functions
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.trained import open_weights
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import as_path, check_new_folder, new_folder, size
from txl_jax.sharding.mesh import make_mesh
from txl_jax.version import __version__

# Number of calls per function when the exported files are compared with the model.
_CALLS = 3
# Largest difference, relative for values above 1. In dtypes below float32 it is a rounding error.
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Plan(cli.StoredTypes):
    """Source and target of the export."""

    from_: str = setting(
        "", "Model to export: a workdir or a portable checkpoint.", path=True, required=True
    )
    to: str = setting("", "Directory to create.", path=True, required=True)
    rows: int = setting(1, "Batch size, which is fixed in the exported functions.", at_least=1)
    ensemble_member: str | None = setting(
        None, "Name of the ensemble member, if --from is an ensemble's workdir."
    )


def run(plan: Plan, _job: cli.Job) -> None:
    """Writes a model's functions for scoring and generation, and verifies the files.

    The functions are read back and compared with the model.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingPackageError(
            "jax.export requires the package flatbuffers. Run pip install '.[export]'."
        )
    target = as_path(plan.to)
    check_new_folder(target)
    trained = open_weights(
        plan.from_,
        member=plan.ensemble_member,
        weight_dtype=plan.weight_dtype,
        cache_dtype=plan.cache_dtype,
    )
    if f"{target}/".startswith(f"{trained.path}/"):
        raise UserError(
            f"--to={target} must be outside of --from={trained.path}. Choose another directory."
        )
    built = _on_one_device(trained.config, trained.vocabulary, plan.rows)
    step, params = trained.params(built, log=say)
    say(f"from      {trained.description}, step {step:,}")
    model = _functions_of(built, params)

    lengths = built.config.eval
    metadata = {
        "description": trained.description.partition(", ")[2],
        "step": step,
        "versions": {
            "txl_jax": __version__,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
        },
        "rows": plan.rows,
        "segment_len": lengths.segment_len,
        "mem_len": lengths.mem_len,
    }
    with new_folder(target) as folder:
        exported.write(folder, model, trained.vocabulary, metadata)
        difference = _verify(folder, model, trained.vocabulary.size)
        megabytes = sum(map(size, folder.iterdir())) / 1e6
        print(f"written   {', '.join(model.functions)}: {megabytes:,.1f} MB")
    print(f"verified  read back, maximum difference {difference:.1g} on {jax.default_backend()}")
    print(f"to        {target}, for {', '.join(exported.PLATFORMS)}")


def _on_one_device(config: ExperimentConfig, vocabulary: Vocabulary, rows: int) -> Built:
    """Builds the model on one device, with attention in XLA's own operations.

    Kernels would restrict the export to one platform.
    """
    config = config_tree.replace(
        config,
        {
            "eval.batch_size": rows,
            "eval.stride": None,
            "eval.warmup_tokens": 0,
            "mesh": MeshConfig(data=1),
            "model.attention": "reference",
        },
    )
    return build_for(config, vocabulary, mesh=make_mesh(config.mesh, jax.devices()[:1]))


def _functions_of(built: Built, params: Any) -> Functions:
    """Returns the model's functions, without a generation step if the model does not generate."""
    try:
        check_can_generate(built.config)
        generates = True
    except UserError as error:
        print(f"note      scoring only: {error}")
        generates = False
    weights = jax.device_get(built.prepare_params(params))
    return exported.functions_of(built.model, built.config.eval, weights, generates=generates)


def _verify(folder: Path, model: Functions, vocab_size: int) -> float:
    """Returns the exported functions' maximum difference from the model, on this machine's device.

    Raises:
      CheckpointError: If it is above 1e-6, relative for values above 1 (for dtypes below float32,
        above a rounding error).
    """
    read_back = exported.read(folder)
    largest = 0.0
    for name, function in model.functions.items():
        expected = _results(function.call, function, model.weights, model.memory, vocab_size)
        actual = _results(
            read_back.functions[name].call, function, read_back.weights, model.memory, vocab_size
        )
        paths = [path for path, _ in jax.tree.leaves_with_path(expected)]
        for path, expected_array, actual_array in zip(
            paths, jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True
        ):
            difference = _difference(expected_array, actual_array)
            if not difference.is_rounding:
                result = jax.tree_util.keystr(path, simple=True, separator=" ")
                raise CheckpointError(
                    f"the {result} of the exported {name} differs from the model's by "
                    f"{difference.maximum:.3g}. Nothing was written."
                )
            largest = max(largest, difference.maximum)
    return largest


class _Difference(NamedTuple):
    """Difference between an array and the expected one."""

    maximum: float
    is_rounding: bool  # Whether it is below the tolerance. False for nan.


def _difference(expected: np.ndarray, actual: np.ndarray) -> _Difference:
    tolerance = 0.0  # Tokens must be equal.
    if jnp.issubdtype(expected.dtype, jnp.floating):
        tolerance = max(_TOLERANCE, float(jnp.finfo(expected.dtype).eps))
    expected = expected.astype(np.float64)
    actual = actual.astype(np.float64)
    maximum = float(np.abs(expected - actual).max(initial=0))
    scale = float(np.abs(expected).max(initial=1))
    return _Difference(maximum, is_rounding=maximum <= tolerance * scale)


def _results(
    call: Callable[..., Any], function: Function, weights: Arrays, memory: Arrays, vocab_size: int
) -> list[Any]:
    """Calls a function with random tokens, starting from an empty memory.

    Args:
      call: The function of the model, or the exported one.
      function: Its arguments and results.
      weights: Arrays by name.
      memory: Shapes and dtypes of the memory by name.
      vocab_size: Number of tokens.

    Returns:
      The results by name, and the memory, of each call.
    """
    generator = np.random.default_rng(0)
    compiled = jax.jit(call)
    state: Any = {name: np.zeros(array.shape, array.dtype) for name, array in memory.items()}
    placed_weights = jax.device_put(weights)
    calls: list[Any] = []
    for number in range(_CALLS):
        arguments = {}
        for name, array in function.arguments.items():
            integers = generator.integers(vocab_size, size=array.shape)
            arguments[name] = integers.astype(array.dtype)
        # Only the first call starts from an empty memory.
        arguments["reset"] = np.full_like(arguments["reset"], number == 0)
        *results, state = compiled(placed_weights, state, *arguments.values())
        calls.append((dict(zip(function.results, results, strict=True)), state))
    return jax.device_get(calls)


if __name__ == "__main__":
    cli.main(run, Plan)
