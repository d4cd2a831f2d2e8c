"""Tests the wiring of a run: its first state, the size of the program, a refusal."""

import jax
import numpy as np
import pytest

from support import tiny_run
from txl_jax.config import DType
from txl_jax.training.step import make_train_step


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


def test_cutoffs_that_do_not_fit_the_vocabulary_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"model\.cutoffs\D*\b5,13\b\D*\b13\b"):
        tiny_run.parts(model__cutoffs=(5, 13))
