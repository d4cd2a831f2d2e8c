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
    has_two = len(profile_steps) == 2
    if not has_two or not 1 <= profile_steps[0] <= profile_steps[1] <= steps:
        raise UserError(
            "--profile_steps must be the first and last step to profile, such as 10,15, from "
            f"1 to {steps}, got {','.join(map(str, profile_steps))}"
        )


@dataclasses.dataclass(eq=False, repr=False)
class StepProfiler(contextlib.AbstractContextManager["StepProfiler"]):
    """A training step that profiles some of its calls.

    As a context manager it ends a trace that is still open.

    The calls that contain one of the updates `profile_steps` are profiled, and each is marked with
    the number of its first update, so that tools show the steps of a trace. Only process 0 writes.
    A trace that cannot be written is reported, and the run continues.
    """

    train_step: Callable[[Any, Any], tuple[Any, Any]]
    # A directory or a URL.
    folder: str
    _: dataclasses.KW_ONLY
    # Updates before the next call.
    done: int
    segments_per_call: int
    # First and last update, counted from 1.
    profile_steps: tuple[int, int]
    log: Callable[[str], None]
    # Takes the seconds that starting and writing a trace took.
    exclude: Callable[[float], None]

    def __post_init__(self) -> None:
        self._first, self._last = self.profile_steps
        # Whether some of these updates are still to be profiled.
        self._is_wanted = distributed.is_primary()
        # The first update of the trace that is open, if any.
        self._traced_from: int | None = None
        self._trace = contextlib.ExitStack()
        if self._is_wanted and self._last <= self.done:
            self.log(f"no profile in this start: step {self._last} is already done")
            self._is_wanted = False

    def __exit__(self, *error: object) -> None:
        self._end()

    def __call__(self, state: Any, segments: Any) -> tuple[Any, Any]:
        """Makes the updates of one call."""
        first = self.done + 1
        self.done += self.segments_per_call
        if self._is_wanted and self._traced_from is None and self._first <= self.done:
            # The profile omits work that was dispatched before.
            jax.block_until_ready(state)
            if self._attempt(lambda: self._trace.enter_context(_traced(self.folder))):
                self._traced_from = first
        with jax.profiler.StepTraceAnnotation("train", step_num=first):
            state, metrics = self.train_step(state, segments)
        if self._is_wanted and self._last <= self.done:
            jax.block_until_ready(metrics)
            self._end()
        return state, metrics

    def _end(self) -> None:
        """Writes the trace that is open, if any."""
        first = self._traced_from
        self._traced_from = None
        self._is_wanted = False
        if first is not None and self._attempt(self._trace.close):
            self.log(f"profile of steps {first} to {self.done} written to {self.folder}")

    def _attempt(self, act: Callable[[], Any]) -> bool:
        """Starts or writes a trace. Returns whether that worked."""
        began = time.monotonic()
        try:
            act()
        except Exception as error:  # noqa: BLE001
            # Jax raises RuntimeErrors of its own, and OSErrors.
            self._is_wanted = False
            self.log(f"no profile in {self.folder} ({first_line(error)}). The run continues.")
            return False
        finally:
            self.exclude(time.monotonic() - began)
        return True


@contextlib.contextmanager
def _traced(folder: str) -> Iterator[None]:
    """Profiles the block into a directory or a URL."""
    if not is_remote(folder):
        with _traced_here(folder):
            yield
        return
    with tempfile.TemporaryDirectory(prefix="profile-") as local:
        with _traced_here(local):
            yield
        remote.upload(local, folder)


@contextlib.contextmanager
def _traced_here(folder: str) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    # Each Python call is most of a trace, and slows the run.
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)
    yield
    jax.profiler.stop_trace()
