"""A model's jitted functions, kept between the starts of runs in one process.

Every start of a run builds its model, and traces and lowers its functions again. That takes a
second or two, most of a tiny run's time. Starts with the same settings get the same jitted
functions here. That another start makes the same program is tested in
tests/runs/test_compilations.py, and with real processes in tests/faults.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from txl_jax.config import config_tree
from txl_jax.runs.build import Built
from txl_jax.runs.dynamic import BuiltToLearn

# Functions that nothing but the built model decides on. Others, such as the transfer of a warm
# start, also close over other values.
_DECIDED_BY_THE_MODEL = {
    "Built.init_params.<locals>.<lambda>",
    "Built.init_state.<locals>.<lambda>",
    "Built.lower_step.<locals>.step",
    "Built.traced_state",
    "DocumentReader._step.<locals>.document_step",
    "DynamicModel._make_state.<locals>.make_state",
    "_of_recurrent.<locals>.init_memory",
    "init_cache",
    "make_dynamic_step.<locals>.dynamic_step",
    "make_eval_step.<locals>.eval_step",
    "prepare_params",
}
for _name in _DECIDED_BY_THE_MODEL:
    # A method with another name would be traced again for each start, unnoticed but slowly.
    if _name.startswith("Built."):
        assert hasattr(Built, _name.split(".")[1]), f"Built has no {_name} any more"

# Settings that decide when something is done, or where a text is from, and are in no program
# (tests/training/test_schedule_lengths.py). What the text decides on, V and the end token, is in
# the model.
_IN_NO_PROGRAM = {
    "init_from",
    "init_vocabulary",
    "train.checkpoint_every",
    "train.eval_every",
    "train.log_every",
    "train.patience",
    "train.sample_every",
    "train.steps",
}
# Jitted functions and abstract states by all that they depend on.
_kept: dict[Any, Any] = {}
_jit = Built.jit
_abstract_state = Built.abstract_state.func  # Behind a cached property.


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keeps the jitted functions of models that are built inside, for later ones too."""

    def jit_once(built: Built, function: Any, **options: Any) -> Any:
        # What `functools.partial` binds comes from the model and the settings too.
        named = getattr(function, "func", function)
        name = named.__qualname__
        if name not in _DECIDED_BY_THE_MODEL:
            return _jit(built, function, **options)
        # A reader of documents has a step for each kind of result.
        kind = inspect.getclosurevars(named).nonlocals.get("kind")
        leaves, structure = jax.tree.flatten(options)
        key = (*_facts(built, name), kind, tuple(leaves), structure)
        if key not in _kept:
            _kept[key] = _jit(built, function, **options)
        return _kept[key]

    def abstract_state_once(built: Built) -> Any:
        key = _facts(built, "abstract_state")
        if key not in _kept:
            _kept[key] = _abstract_state(built)
        return _kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Built, "jit", jit_once)
        patch.setattr(Built, "abstract_state", property(abstract_state_once))
        yield


def _facts(built: Built, name: str) -> tuple[Any, ...]:
    """Returns all that a function of a model depends on, but for options of `jax.jit`."""
    settings = config_tree.to_dict(built.config)
    for setting in list(settings):
        if setting in _IN_NO_PROGRAM or setting.startswith(("data.", "generate.")):
            del settings[setting]
    # Validation decides when the mean begins. Whether there is a mean is in the program.
    settings["average.nt_asgd_patience"] = settings["average.nt_asgd_patience"] is None
    rule = None
    if isinstance(built, BuiltToLearn):
        rule = built.rule.update.__qualname__
    parts = [name, type(built), rule, settings, built.model, built.configs]
    return repr(parts), jax.config.jax_enable_x64, built.mesh
