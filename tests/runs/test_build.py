"""Tests the wiring of a run: parameter counts, state without memory, the size of the program, refusals."""

import jax
import numpy as np
import pytest

from support import tiny_run
from txl_jax.config import DType, ExperimentConfig, ModelConfig
from txl_jax.runs.build import build
from txl_jax.training.step import make_train_step


def test_a_large_model_is_put_together_without_its_arrays():
    held = sum(array.nbytes for array in jax.live_arrays())
    made = build(ExperimentConfig(model=ModelConfig(n_layer=24, d_model=1024, d_inner=3072)), vocab_size=204)
    assert sum(array.nbytes for array in jax.live_arrays()) == held and made.num_parameters > 1e8
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(made.abstract_state))


def test_the_initial_state_is_as_announced():
    made = tiny_run.parts(model__dtype=DType.BFLOAT16)
    state = made.init_state()
    announced = jax.tree.leaves(made.abstract_state)
    for (path, found), expected in zip(jax.tree.leaves_with_path(state), announced, strict=True):
        for name in ("shape", "dtype", "sharding"):
            assert getattr(found, name) == getattr(expected, name), jax.tree_util.keystr(path)
    assert state.step == 0 and state.memory.hidden.dtype == "bfloat16"
    assert made.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(state.params))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * made.num_parameters
    assert not any(leaf.any() for leaf in moments)
    assert np.std(state.params["stack"]["layers"]["attention"]["query"]) == pytest.approx(0.4, rel=0.2)


def test_the_training_program_does_not_grow_with_the_layers():
    def lowered_size(n_layer):
        made = tiny_run.parts(model__n_layer=n_layer)
        step = make_train_step(made.model, made.optimizer, made.schedule, made.config)
        return len(jax.jit(step).lower(made.abstract_state, tiny_run.text().segments(0, 1)).as_text())

    assert lowered_size(24) <= 1.01 * lowered_size(2)  # One per cent for longer numbers.


def test_settings_that_do_not_fit_are_refused_with_both_numbers():
    for changes, message in (
        ({"model__cutoffs": (5, 13)}, r"model\.cutoffs\D*\b5,13\b\D*\b13\b"),
        ({"mesh__fsdp": 97}, r"\b97\b"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_run.parts(**changes)
