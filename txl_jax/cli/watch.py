"""Flags for a closer view of a training run: a profile of some steps, and a project of Weights & Biases."""

from typing import Any

from absl import flags

from txl_jax.errors import UserError
from txl_jax.runs.run import Workdir
from txl_jax.runtime.sinks import WeightsAndBiases

FLAGS = flags.FLAGS
FLAG_NAMES = ("profile_steps", "wandb_project")


def define_flags() -> None:
    """Defines the flags of a program that trains."""
    flags.DEFINE_string(
        "profile_steps", None, "First and last update of a profile for TensorBoard, in the workdir: 10,15."
    )
    flags.DEFINE_string("wandb_project", None, "Project of Weights & Biases that gets the records too.")


def given(workdir: Workdir) -> dict[str, Any]:
    """Returns the arguments of `train.run` that the flags give: `sinks` and `profile_steps`.

    Raises:
      UserError: --profile_steps is no pair of numbers, or wandb is not installed.
    """
    sinks = [WeightsAndBiases(FLAGS.wandb_project, workdir.path)] if FLAGS.wandb_project else []
    return {"sinks": sinks, "profile_steps": _profile_steps(FLAGS.profile_steps)}


def _profile_steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, last = map(int, text.split(","))
    except ValueError:
        raise UserError(f"--profile_steps is {text!r}; give the first and the last update, as 10,15") from None
    return first, last
