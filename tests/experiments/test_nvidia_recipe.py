"""Tests that the optimizer of NVIDIA's flagfiles, scaled down, makes the updates of NVIDIA's own
LAMB.
"""

import jax
import numpy as np
import optax
import pytest

from experiments import wikitext103
from support import programs
from txl_jax.config import OptimizerName
from txl_jax.interop import original
from txl_jax.runs.build import build

V, WARMUP = 40, 50
# Deviations are such that norms lie on both sides of 10.
SCALED_DOWN = (
    "--model.n_layer=2 --model.d_model=16 --model.n_head=2 --model.d_head=6 --model.d_inner=20 "
    "--model.cutoffs=9,15,27 --model.init_std=0.6 --model.dtype=float64 --train.batch_size=4 "
    f"--train.segment_len=6 --train.mem_len=5 --train.steps=300 --optimizer.warmup_steps={WARMUP}"
).split()


def tensors_of(params, model):
    """NVIDIA's tensors, each once."""
    shared = {*original.aliases(model), original.FREQUENCIES}
    found = original.from_flax(jax.device_get(params), model)
    return {name: tensor for name, tensor in found.items() if name not in shared}


class Oracle:
    """LAMB as in lamb.py of DeepLearningExamples, after clipping, over a dict of tensors."""

    def __init__(self, tensors):
        self.tensors = {name: tensor.copy() for name, tensor in tensors.items()}
        self.first, self.second = (
            {name: np.zeros_like(tensors[name]) for name in tensors} for _ in range(2)
        )
        self.norms = []

    def step(self, grads, rate, *, clip=0.25, beta1=0.9, beta2=0.999, eps=1e-6):
        size = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
        for name, weight in self.tensors.items():
            grad = grads[name] * min(1, clip / size)
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * grad
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * grad**2
            step = self.first[name] / (np.sqrt(self.second[name]) + eps)
            weight_norm, step_norm = np.linalg.norm(weight), np.linalg.norm(step)
            self.norms.append(weight_norm)
            ratio = min(weight_norm, 10) / (step_norm + eps) if weight_norm and step_norm else 1
            self.tensors[name] = weight - rate * ratio * step


@pytest.mark.parametrize("div_val", [1, 2])
def test_updates_are_those_of_nvidias_lamb(div_val, x64):
    words = ["--flagfile=wt103_base_nvidia", *SCALED_DOWN, f"--model.div_val={div_val}"]
    config = programs.config_of(wikitext103.DEFAULTS, *words)
    assert (config.optimizer.name, config.optimizer.adam_eps) == (OptimizerName.LAMB_NVIDIA, 1e-6)
    made, rng = build(config, vocab_size=V), np.random.default_rng(0)

    @jax.jit
    def update(params, state, grads):
        updates, state = made.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = made.init_state()
    params, opt_state = state.params, state.opt_state
    oracle = Oracle(tensors_of(params, config.model))
    for count in range(12):
        grads = jax.tree.map(lambda leaf: 0.1 * rng.normal(size=leaf.shape), params)
        params, opt_state = update(params, opt_state, grads)
        oracle.step(tensors_of(grads, config.model), float(made.schedule(count)))
        for tensor, found in tensors_of(params, config.model).items():
            message = f"{count} {tensor}"
            np.testing.assert_allclose(
                found, oracle.tensors[tensor], rtol=1e-9, atol=1e-12, err_msg=message
            )
    norms = np.array(oracle.norms)
    assert 0.01 < np.mean(norms > 10) < 0.99 and (norms == 0).any()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float64"}
