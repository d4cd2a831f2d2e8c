"""Weights & Biases: the records of a run in a project there (extra `wandb`).

Where it writes to, and whether over a network at all, is decided by wandb's own variables: WANDB_MODE=offline,
WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL.
"""

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_jax.errors import UserError
from txl_jax.runtime.sinks.sink import Sink, grouped_names


class WandbSink(Sink):
    """One run of a W&B project; the same workdir continues the same run.

    Args:
      project: made if missing.
      workdir: of the run; its name is the run's, and wandb's own files go into its folder `wandb` (on object storage
        into that of the current folder).

    Raises:
      UserError: wandb is not installed.
    """

    def __init__(self, project: str, workdir: Path):
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                f"the W&B project is {project!r} and wandb is not installed; pip install 'txl_jax[wandb]', or leave "
                "--wandb_project out"
            )
        self._project = project
        self._workdir = workdir
        self._run: Any = None

    def settings(self, values: Mapping[str, Any]) -> None:
        """Begins the run, or continues it, with the settings as its config."""
        import wandb

        self._run = wandb.init(
            project=self._project,
            name=self._workdir.name,
            id=hashlib.sha256(str(self._workdir).encode()).hexdigest()[:16],
            resume="allow",
            dir=None if "://" in str(self._workdir) else str(self._workdir),
            config=dict(values),
            settings=wandb.Settings(console="off"),  # log.txt has the lines; wandb would replace sys.stdout.
        )
        # By default W&B counts calls, and drops what a resumed run repeats.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def record(self, kind: str, step: int, values: Mapping[str, float], member: str | None = None) -> None:
        """Adds the values at their step."""
        self._run.log({"step": step, **grouped_names(kind, values, member)})

    def text(self, step: int, tag: str, text: str) -> None:
        """Adds a text as a table of one row."""
        import wandb

        self._run.log({"step": step, tag: wandb.Table(columns=["step", "text"], data=[[step, text]])})

    def close(self) -> None:
        """Ends the run, once all is sent."""
        if self._run is not None:
            self._run.finish()
