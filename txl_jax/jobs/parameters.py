"""Finding the parameters of a trained run."""

from collections.abc import Callable
from typing import Any

from txl_jax.assemble import Parts
from txl_jax.checkpoint import Checkpointer, CheckpointError
from txl_jax.workdir import Workdir


def load_parameters(parts: Parts, workdir: Workdir, *, say: Callable[[str], None]) -> tuple[int, Any]:
    """The best parameters of a run, or, before its first evaluation, the latest: (step, parameters).

    Raises:
      FileNotFoundError: the run has no checkpoint.
      CheckpointError: it has, but none can be read.
    """
    if workdir.best.exists():
        try:
            with Checkpointer(workdir.best, keep=1, report=say) as best:
                restored = best.restore({"params": parts.abstract_state.params})
            if restored is not None:
                return restored[0], restored[1]["params"]
        except CheckpointError as error:
            if not workdir.latest.exists():
                raise
            say(str(error))
    if workdir.latest.exists():
        with Checkpointer(workdir.latest, keep=parts.config.train.keep_checkpoints, report=say) as latest:
            restored = latest.restore(parts.abstract_state)
        if restored is not None:
            say("no best checkpoint to be had; these are the latest parameters")
            return restored[0], restored[1].params
    raise FileNotFoundError(f"{workdir.path} has no checkpoint yet; train it first (--mode=train)")
