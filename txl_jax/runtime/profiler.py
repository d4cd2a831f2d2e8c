"""A profile of some training steps: a trace that TensorBoard and xprof open."""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from txl_jax.errors import UserError, first_line
from txl_jax.runtime import distributed, remote
from txl_jax.runtime.storage import is_remote

PROFILE = "profile"


def check_steps(profile_steps: Sequence[int], *, steps: int) -> None:
    """Raises `UserError` unless `profile_steps` are the first and last of some updates.

    The updates are counted from 1, and must be in a run of `steps` updates.
    """
    if len(profile_steps) != 2 or not 1 <= profile_steps[0] <= profile_steps[1] <= steps:
        wrong = (
            "--profile_steps must be the first and last step to profile, such as 10,15, from "
            f"1 to {steps}"
        )
        got = ",".join(map(str, profile_steps))
        raise UserError(f"{wrong}, got {got}")


@dataclasses.dataclass(eq=False, repr=False)
class StepProfiler(contextlib.AbstractContextManager["StepProfiler"]):
    """A training step that profiles some of its calls.

    As a context manager it ends a trace that is still open.

    The calls that contain one of the updates `profile_steps` are profiled, and each is marked with
    the number of its first update, so that tools show the steps of a trace. Only process 0 writes.
    A trace that cannot be written is reported, and the run continues.
    """

    train_step: Callable[[Any, Any], tuple[Any, Any]]
    folder: str  # A directory or a URL.
    _: dataclasses.KW_ONLY
    done: int  # Updates before the next call.
    segments_per_call: int
    profile_steps: tuple[int, int]  # First and last update, counted from 1.
    log: Callable[[str], None]
    exclude: Callable[[float], None]  # Takes the seconds that starting and writing a trace took.

    def __post_init__(self) -> None:
        self._window = self.profile_steps if distributed.is_primary() else None
        self._traced_from: int | None = None  # Set while a trace is open.
        self._trace = contextlib.ExitStack()
        if self._window is not None and self._window[1] <= self.done:
            self.log(f"no profile in this start: step {self._window[1]} is already done")
            self._window = None

    def __exit__(self, *error: object) -> None:
        self._end()

    def __call__(self, state: Any, segments: Any) -> tuple[Any, Any]:
        """Makes the updates of one call."""
        first, self.done = self.done + 1, self.done + self.segments_per_call
        if self._window is not None and self._traced_from is None and self._window[0] <= self.done:
            jax.block_until_ready(state)  # The profile leaves out what was dispatched before.
            if self._attempt(lambda: self._trace.enter_context(_traced(self.folder))):
                self._traced_from = first
        with jax.profiler.StepTraceAnnotation("train", step_num=first):
            state, metrics = self.train_step(state, segments)
        if self._window is not None and self._window[1] <= self.done:
            jax.block_until_ready(metrics)
            self._end()
        return state, metrics

    def _end(self) -> None:
        first, self._window, self._traced_from = self._traced_from, None, None
        if first is not None and self._attempt(self._trace.close):
            self.log(f"profile of steps {first} to {self.done} written to {self.folder}")

    def _attempt(self, act: Callable[[], Any]) -> bool:
        began = time.monotonic()
        try:
            act()
        except Exception as error:  # noqa: BLE001
            # Jax raises RuntimeErrors of its own, and OSErrors.
            self._window = None
            self.log(f"no profile in {self.folder} ({first_line(error)}). The run continues.")
            return False
        finally:
            self.exclude(time.monotonic() - began)
        return True


@contextlib.contextmanager
def _traced(folder: str) -> Iterator[None]:
    """Profiles the block into a directory or a URL."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Each Python call, which is most of a trace and slows the run.
    place = (
        tempfile.TemporaryDirectory(prefix="profile-")
        if is_remote(folder)
        else contextlib.nullcontext(folder)
    )
    with place as local:
        jax.profiler.start_trace(local, profiler_options=options)
        yield
        jax.profiler.stop_trace()
        if is_remote(folder):
            remote.upload(local, folder)
