r"""Exports a trained model with jax.export, to run on CPU, TPU and GPU without this project.

    python -m experiments.export --from=runs/mine --to=mine-exported
    python -m experiments.export --from=runs/mine --to=mine-exported --rows=8

--from is a run's workdir or a portable checkpoint. --to is a new directory with functions for
scoring and generation as StableHLO, with the memory as argument and result, the weights as
safetensors, and a manifest. Lengths come from the run's eval settings. The files are read back and
compared with the model before the directory is renamed into place. docs/export.md shows how to run
them with only jax, numpy, safetensors and flatbuffers.
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

_CALLS = 3  # Calls of each function when the exported files are compared with the model.


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
    """Writes a model's scoring and generation step, and verifies what was written.

    Both steps are read back and compared with the model.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingPackageError(
            "jax.export requires the package flatbuffers. Run pip install '.[export]'."
        )
    target = as_path(plan.to)
    check_new_folder(target)
    found = open_weights(
        plan.from_,
        member=plan.ensemble_member,
        weight_dtype=plan.weight_dtype,
        cache_dtype=plan.cache_dtype,
    )
    if f"{target}/".startswith(f"{found.path}/"):
        raise UserError(
            f"--to={target} must be outside of --from={found.path}. Choose another directory."
        )
    built = _on_one_device(found.config, found.vocabulary, plan.rows)
    step, params = found.params(built, log=say)
    say(f"from      {found.description}, step {step:,}")
    model = _functions_of(built, params)
    lengths = built.config.eval
    metadata = {
        "description": found.description.partition(", ")[2],
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
        exported.write(folder, model, found.vocabulary, metadata)
        difference = _verify(folder, model, found.vocabulary.size)
        print(
            f"written   {', '.join(model.functions)}: "
            f"{sum(map(size, folder.iterdir())) / 1e6:,.1f} MB"
        )
    print(f"verified  read back, maximum difference {difference:.1g} on {jax.default_backend()}")
    print(f"to        {target}, for {', '.join(exported.PLATFORMS)}")


def _on_one_device(config: ExperimentConfig, vocabulary: Vocabulary, rows: int) -> Built:
    """Builds the model on one device, with attention in XLA's own operations.

    Kernels would belong to one platform.
    """
    changes: dict[str, Any] = {
        "eval.batch_size": rows,
        "eval.stride": None,
        "eval.warmup_tokens": 0,
    }
    changes |= {"mesh": MeshConfig(data=1), "model.attention": "reference"}
    config = config_tree.replace(config, changes)
    return build_for(config, vocabulary, mesh=make_mesh(config.mesh, jax.devices()[:1]))


def _functions_of(built: Built, params: Any) -> Functions:
    """Returns the model's functions, without a generation step if the model does not generate."""
    generates = True
    try:
        check_can_generate(built.config)
    except UserError as error:
        print(f"note      scoring only: {error}")
        generates = False
    weights = jax.device_get(built.prepare_params(params))
    return exported.functions_of(built.model, built.config.eval, weights, generates=generates)


def _verify(folder: Path, model: Functions, vocab_size: int) -> float:
    """Returns the exported functions' maximum difference from the model, on this machine's device.

    Raises `CheckpointError` if it is above 1e-6, relative for values above 1 (below float32, above
    a rounding).
    """
    _, weights, functions = exported.read(folder)
    largest = 0.0
    for name, function in model.functions.items():
        expected = _results(function.call, function, model.weights, model.memory, vocab_size)
        found = _results(functions[name].call, function, weights, model.memory, vocab_size)
        for (path, one), other in zip(
            jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
        ):
            is_float = jnp.issubdtype(one.dtype, jnp.floating)
            rounding = max(1e-6, float(jnp.finfo(one.dtype).eps)) if is_float else 0.0
            one, other = one.astype(np.float64), other.astype(np.float64)
            difference = np.abs(one - other).max(initial=0)
            if not difference <= rounding * np.abs(one).max(initial=1):
                what = jax.tree_util.keystr(path, simple=True, separator=" ")
                different = (
                    f"the {what} of the exported {name} differs from the model's by "
                    f"{difference:.3g}"
                )
                raise CheckpointError(f"{different}. Nothing was written.")
            largest = max(largest, float(difference))
    return largest


def _results(
    call: Callable[..., Any], function: Function, weights: Arrays, memory: Arrays, vocab_size: int
) -> list[Any]:
    """Calls a function with random tokens, starting from an empty memory. Returns all results."""
    rng, call = np.random.default_rng(0), jax.jit(call)
    state: Any = {name: np.zeros(array.shape, array.dtype) for name, array in memory.items()}
    placed, results = jax.device_put(weights), []
    for number in range(_CALLS):
        arguments = {
            name: rng.integers(vocab_size, size=array.shape).astype(array.dtype)
            for name, array in function.arguments.items()
        }
        arguments["reset"] = np.full_like(arguments["reset"], number == 0)
        *found, state = call(placed, state, *arguments.values())
        results.append((dict(zip(function.results, found, strict=True)), state))
    return jax.device_get(results)


if __name__ == "__main__":
    cli.main(run, Plan)
