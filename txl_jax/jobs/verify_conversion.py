"""Verification of a conversion: the tensors that were written equal those that were read, and so do the losses."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import sharding
from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import ExperimentConfig, MeshConfig
from txl_jax.errors import CheckpointError
from txl_jax.interop import portable
from txl_jax.interop.leaves import Leaves
from txl_jax.runtime.array_trees import describe_difference

_SEGMENTS, _SEGMENT_LEN, _MEM_LEN = 3, 8, 12  # Memory is empty, filled in part, and full.


def check_same_tensors(read: Leaves, written: Leaves) -> None:
    """Compares two sets of parameters as float32, bit for bit, one array at a time.

    Raises:
      CheckpointError: they differ in names, shapes or values.
    """
    shapes = [{path: str(list(leaf.shape)) for path, leaf in leaves.items()} for leaves in (read, written)]
    if difference := describe_difference(shapes[1], shapes[0]):
        raise CheckpointError(f"what was written is not what was read ({difference})")
    for path, leaf in read.items():
        before, after = (np.asarray(each.read(), np.float32) for each in (leaf, written[path]))
        if not np.array_equal(before.view(np.uint32), after.view(np.uint32)):
            raise CheckpointError(f"parameter {path} is not written as it was read; check the disk and try again")


def losses(config: ExperimentConfig, leaves: Leaves, *, vocab_size: int) -> np.ndarray:
    """Computes losses in nats of drawn tokens, those of every cluster among them: float32 [S, L].

    The parameters are read one after another onto one device. Segments and memory are short; clamp and same_length are
    those of `config.eval`.
    """
    # Equal settings share one compiled program: what is read and what is written usually have them.
    score, components = _scorer(
        ExperimentConfig(model=config.model, compat=config.compat, eval=config.eval), vocab_size
    )
    params = portable.place(leaves, components.training.abstract_state.params)
    memory = components.model.init_memory(batch_size=1, mem_len=_MEM_LEN)
    tokens, found = _tokens(config, vocab_size), []
    for start in range(0, _SEGMENTS * _SEGMENT_LEN, _SEGMENT_LEN):
        nll, memory = score(params, memory, jnp.asarray(tokens[:, start : start + _SEGMENT_LEN + 1]))
        found.append(np.asarray(nll[0], np.float32))
    return np.stack(found)


@functools.lru_cache(maxsize=1)
def _scorer(config: ExperimentConfig, vocab_size: int) -> tuple[Callable[..., Any], RunComponents]:
    """Returns the jitted (params, memory, tokens [1, L + 1]) -> (losses [1, L], memory) of a model on one device."""
    one_device = MeshConfig(data=1)
    mesh = sharding.make_mesh(one_device, jax.devices()[:1])
    components = assemble(dataclasses.replace(config, mesh=one_device), vocab_size=vocab_size, mesh=mesh)
    model: Any = components.model  # `apply` returns what its method does.
    lengths = {"clamp_len": config.eval.clamp_len, "same_length": config.eval.same_length}

    def score(params: Any, memory: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        hidden, memory = model.apply({"params": params}, tokens[:, :-1], memory, **lengths)
        return model.apply({"params": params}, hidden, tokens[:, 1:], method=model.nll), memory

    return components.jit(score), components


def check_same_losses(expected: np.ndarray, found: np.ndarray) -> float:
    """Returns the greatest difference in nats.

    Raises:
      CheckpointError: losses are not finite, or differ by more than rounding.
    """
    if not np.isfinite(expected).all():
        raise CheckpointError("the weights give losses that are not finite; they are damaged, or of another model")
    difference = float(np.abs(expected - found).max())
    if not difference <= 1e-5 * max(1.0, float(np.abs(expected).max())):
        raise CheckpointError(f"the converted weights give other losses, by up to {difference:.3g} nats")
    return difference


def _tokens(config: ExperimentConfig, vocab_size: int) -> np.ndarray:
    """Draws token ids [1, S * L + 1]; the first and the last of every cluster are among them."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=_SEGMENTS * _SEGMENT_LEN + 1, dtype=np.int32)
    ends = [end for cutoff in (*config.model.cutoffs, vocab_size) for end in (cutoff - 1, cutoff % vocab_size)]
    ends = ends[: len(tokens) - 1]
    tokens[1 : len(ends) + 1] = ends
    return tokens[None]
