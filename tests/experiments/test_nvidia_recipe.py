"""Tests that the optimizer of NVIDIA's flagfiles, scaled down, makes the updates of NVIDIA's own
LAMB.
"""

import jax
import numpy as np
import optax
import pytest

from experiments import wikitext103
from support import programs, tiny_run
from txl_jax.config import OptimizerName
from txl_jax.interop import original
from txl_jax.runs.build import build

V = 40
WARMUP = 50
UPDATES = 12  # Within the warm-up, so that each has another learning rate.
# Factor of the drawn parameters. With it, norms lie on both sides of 10, the bound in LAMB.
SCALE = 1.4
SCALED_DOWN = [
    "--model.n_layer=2",
    "--model.d_model=16",
    "--model.n_head=2",
    "--model.d_head=6",
    "--model.d_inner=20",
    "--model.cutoffs=9,15,27",
    "--model.dtype=float64",
    "--train.batch_size=4",
    "--train.segment_len=6",
    "--train.mem_len=5",
    "--train.steps=300",
    f"--optimizer.warmup_steps={WARMUP}",
]


def tensors_of(params, model):
    """Returns NVIDIA's tensors by name, each once."""
    shared = {*original.aliases(model), original.FREQUENCIES}
    tensors = original.from_flax(jax.device_get(params), model)
    return {name: tensor for name, tensor in tensors.items() if name not in shared}


class Oracle:
    """LAMB as in lamb.py of DeepLearningExamples, after clipping, over a dict of tensors."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)
        self.first = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
        self.second = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
        self.norms = []

    def step(self, grads, rate, *, clip=0.25, beta1=0.9, beta2=0.999, eps=1e-6):
        """Makes one update. `grads` has a gradient of each tensor."""
        squares = [np.sum(grad**2) for grad in grads.values()]
        global_norm = np.sqrt(sum(squares))
        for name, weight in self.tensors.items():
            grad = grads[name] * min(1, clip / global_norm)
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * grad
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * grad**2
            step = self.first[name] / (np.sqrt(self.second[name]) + eps)

            weight_norm = np.linalg.norm(weight)
            step_norm = np.linalg.norm(step)
            self.norms.append(weight_norm)
            ratio = 1
            if weight_norm and step_norm:
                ratio = min(weight_norm, 10) / (step_norm + eps)
            self.tensors[name] = weight - rate * ratio * step


# 1 has one embedding table, and 2 a table and a projection for each cluster.
@pytest.mark.parametrize("div_val", [1, 2])
def test_updates_are_those_of_nvidias_lamb(div_val, x64):
    words = ["--flagfile=wt103_base_nvidia", *SCALED_DOWN, f"--model.div_val={div_val}"]
    config = programs.config_of(wikitext103.DEFAULTS, *words)
    assert config.optimizer.name is OptimizerName.LAMB_NVIDIA
    assert config.optimizer.adam_eps == 1e-6
    built = build(config, vocab_size=V)

    @jax.jit
    def update(params, state, grads):
        updates, state = built.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tiny_run.state(built)
    params = jax.tree.map(lambda leaf: SCALE * leaf, state.params)
    opt_state = state.opt_state
    oracle = Oracle(tensors_of(params, config.model))
    rng = np.random.default_rng(0)
    for count in range(UPDATES):
        # Their common norm is above 0.25, so they are clipped.
        grads = jax.tree.map(lambda leaf: 0.1 * rng.normal(size=leaf.shape), params)
        params, opt_state = update(params, opt_state, grads)
        oracle.step(tensors_of(grads, config.model), float(built.schedule(count)))

        for name, tensor in tensors_of(params, config.model).items():
            message = f"{name} after {count + 1} updates"
            np.testing.assert_allclose(
                tensor, oracle.tensors[name], rtol=1e-9, atol=1e-12, err_msg=message
            )

    # The updates met all cases of the ratio: norms above and below the bound, and biases of 0.
    norms = np.array(oracle.norms)
    assert 0.01 < np.mean(norms > 10) < 0.99
    assert (norms == 0).any()
    for path, leaf in jax.tree.leaves_with_path(params):
        assert leaf.dtype == np.float64, jax.tree_util.keystr(path)
