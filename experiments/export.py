r"""Exports a trained model with jax.export, for programs without this project, on CPU, TPU and GPU.

    python -m experiments.export --from=runs/mine --to=mine-exported
    python -m experiments.export --from=runs/mine --to=mine-exported --rows=8

--from is a run's workdir or a portable folder. --to is a new folder: scoring of segments and a generation step as
StableHLO, with the memory as argument and result, the weights as safetensors, and a manifest. The lengths are those of
eval in the run's settings. What was written is read back and compared with the model before the folder gets its name.
docs/export.md has a program that runs it with jax, numpy, safetensors and flatbuffers alone.
"""

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from txl_jax import cli, sharding
from txl_jax.cli import setting
from txl_jax.config import ExperimentConfig, MeshConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import CheckpointError, UserError
from txl_jax.inference.flat_functions import Arrays, FlatFunction, FlatModel, flat_model
from txl_jax.interop import exported_folder
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.weights import open_weights
from txl_jax.runtime.storage import as_path, check_new_folder, new_folder, size
from txl_jax.version import __version__

_CALLS = 3  # Of each function, when what was written is compared.


def export_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    rows: int = 1,
    member: str | None = None,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Writes a trained model's scoring and generation step, reads them back and compares them with the model.

    The lengths are those of `config.eval`. Attention is the reference's: its operations are XLA's own, so that one file
    serves all platforms, where kernels belong to one. A model that does not generate is exported for scoring only.
    The directory appears under its name when it has been verified. After an error nothing of it remains.

    Args:
      source: A run's workdir, or a portable checkpoint.
      target: A directory that is missing or empty.
      rows: B, the batch size, fixed in the export.
      member: The ensemble member, if `source` is an ensemble's workdir.
      weight_dtype: Replaces `eval.weight_dtype`, or None for the saved dtype.
      cache_dtype: Replaces `eval.cache_dtype`, or None for the saved dtype.
      log: Takes one line.

    Raises:
      UserError: If the model cannot be read, `target` cannot be written, flatbuffers is missing, or rows is below 1.
      CheckpointError: If the exported functions give other numbers than the model.
    """
    exported_folder.check_flatbuffers()
    if rows < 1:
        raise UserError(f"--rows={rows}; give the number of rows of a batch, at least 1")
    target = as_path(target)
    check_new_folder(target)
    found = open_weights(source, member=member, weight_dtype=weight_dtype, cache_dtype=cache_dtype)
    if f"{target}/".startswith(f"{found.path}/"):
        raise UserError(f"--to={target} lies in --from={found.path}; give a folder outside of it")
    components = _on_one_device(found.config, rows, vocab_size=found.vocabulary.size)
    step, params = found.params(components, log=log)
    log(f"from      {found.description}, step {step:,}")
    model = _flat(components, params, log)
    lengths = components.config.eval
    facts = {
        "description": found.description.partition(", ")[2],
        "step": step,
        "versions": {"txl_jax": __version__, "jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")},
        "rows": rows,
        "segment_len": lengths.segment_len,
        "mem_len": lengths.mem_len,
    }
    with new_folder(target) as folder:
        exported_folder.write(folder, model, found.vocabulary, facts)
        difference = _verify(folder, model, found.vocabulary.size)
        log(f"written   {', '.join(model.functions)}: {sum(map(size, folder.iterdir())) / 1e6:,.1f} MB")
    log(f"verified  read back, largest difference {difference:.1g} on {jax.default_backend()}")
    log(f"to        {target}, for {', '.join(exported_folder.PLATFORMS)}")


def _on_one_device(config: ExperimentConfig, rows: int, *, vocab_size: int) -> RunComponents:
    """Assembles the model on one device, with attention of XLA's own operations."""
    lengths = dataclasses.replace(config.eval, batch_size=rows, stride=None, warmup_tokens=0)
    config = dataclasses.replace(config, eval=lengths, mesh=MeshConfig(data=1))
    config = config_tree.replace(config, {"model.attention": "reference"})
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    return build(config, vocab_size=vocab_size, mesh=mesh)


def _flat(components: RunComponents, params: Any, log: Callable[[str], None]) -> FlatModel:
    """Returns the functions of the model, without a generation step where it does not generate."""
    generates = True
    try:
        check_can_generate(components.config)
    except UserError as error:
        log(f"note      scoring only: {error}")
        generates = False
    weights = jax.device_get(components.evaluation.prepare_params(params))
    return flat_model(components.model, components.config.eval, weights, generates=generates)


def _verify(folder: Path, model: FlatModel, vocab_size: int) -> float:
    """Compares the exported functions with the model's own on this machine's device; returns the largest difference.

    Raises:
      CheckpointError: If they differ by more than 1e-6, relative for values above 1 (below float32, by a rounding).
    """
    exported, largest = exported_folder.read(folder), 0.0
    for name, function in model.functions.items():
        expected = _results(function.call, function, model.weights, model.memory, vocab_size)
        found = _results(exported.functions[name].call, function, exported.weights, model.memory, vocab_size)
        for (path, one), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
            difference, allowed = _difference(one, other)
            if not difference <= allowed:
                what = jax.tree_util.keystr(path, simple=True, separator=" ")
                raise CheckpointError(
                    f"the exported {name} gives another {what} than the model, by {difference:.3g}; nothing is written"
                )
            largest = max(largest, difference)
    return largest


def _results(
    call: Callable[..., Any], function: FlatFunction, weights: Arrays, memory: Arrays, vocab_size: int
) -> list[Any]:
    """Calls a function with random tokens, from an empty memory on; returns all results."""
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


def _difference(expected: Any, found: Any) -> tuple[float, float]:
    """Returns the largest difference of two arrays, and what rounding explains."""
    if not expected.size:
        return 0.0, 0.0
    one, other = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    rounding = 0.0
    if jax.numpy.issubdtype(expected.dtype, jax.numpy.floating):
        rounding = max(1e-6, float(jax.numpy.finfo(expected.dtype).eps)) * max(1.0, float(np.abs(one).max()))
    return float(np.abs(one - other).max()), rounding


@dataclasses.dataclass(frozen=True)
class Plan(cli.StoredTypes):
    """What is exported, and where to."""

    from_: str = setting("", "What is exported: a workdir or a portable folder.", path=True, required=True)
    to: str = setting("", "The new folder.", path=True, required=True)
    rows: int = setting(1, "Rows of a batch, fixed in what is exported.")
    ensemble_member: str | None = setting(None, "Member of an ensemble, if --from is the workdir of one.")


def run(plan: Plan, job: cli.Job) -> None:
    """Exports."""
    del job
    export_model(
        plan.from_,
        plan.to,
        rows=plan.rows,
        member=plan.ensemble_member,
        weight_dtype=plan.weight_dtype,
        cache_dtype=plan.cache_dtype,
    )


if __name__ == "__main__":
    cli.main(run, Plan)
