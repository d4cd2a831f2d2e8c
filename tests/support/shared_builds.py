"""Shares compiled functions between commands that run in one process."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from txl_jax.config import DataConfig, EvalConfig, ExperimentConfig, GenerateConfig
from txl_jax.runs import build

# They follow from the model, its mesh and the settings of evaluation.
FUNCTIONS_OF_EVALUATION = ("prepare_params", "init_memory", "eval_step")


def settings_of_training(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config without settings that the training step does not depend on.

    They are those of texts, evaluation and generation, and the numbers of steps.
    """
    train = dataclasses.replace(
        config.train, steps=1, log_every=1, eval_every=1, checkpoint_every=1
    )
    return dataclasses.replace(
        config,
        data=DataConfig(),
        eval=EvalConfig(),
        generate=GenerateConfig(),
        train=train,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=0),
    )


@contextlib.contextmanager
def shared_builds() -> Iterator[None]:
    """Gives builds of the same model the same training step and functions of evaluation.

    Otherwise each command traces and compiles its own, which takes a test most of its time. What a
    command reads, computes and writes is the same.
    """
    build_with_new_functions = build.build
    lower_new_step = build.Built.lower_step
    first_builds: dict[Any, build.Built] = {}
    steps: dict[Any, jax.stages.Lowered] = {}

    def build_with_shared_functions(config: ExperimentConfig, **options: Any) -> build.Built:
        built = build_with_new_functions(config, **options)
        first = first_builds.setdefault((built.model, built.mesh, config.eval), built)
        for name in FUNCTIONS_OF_EVALUATION:
            # They are cached properties.
            vars(built)[name] = getattr(first, name)
        return built

    def lower_step_once(built: build.Built) -> jax.stages.Lowered:
        key = (built.model, built.mesh, settings_of_training(built.config))
        if key not in steps:
            steps[key] = lower_new_step(built)
        return steps[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build", build_with_shared_functions)
        patch.setattr(build.Built, "lower_step", lower_step_once)
        yield
