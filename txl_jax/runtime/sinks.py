"""Sinks, which receive a run's records: the protocol, TensorBoard, and Weights & Biases."""

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax.errors import UserError
from txl_jax.runtime import remote
from txl_jax.runtime.storage import AnyPath, is_remote, make_folder, names

# Values of a "train" record that the clock and the device decide: a resumed run repeats all others
# bit for bit.
MEASURED = (
    "tokens_per_second",
    "step_seconds",
    "host_wait_share",
    "model_flops_per_second",
    "peak_share",
    "device_memory_bytes",
)


class Sink:
    """A receiver of a run's records. Its methods do nothing: override the ones you need.

    A run calls them from its own thread, with several processes only in process 0. If a method
    raises, the run logs that in one line, stops calling the sink, and continues.
    """

    def settings(self, values: Mapping[str, Any]) -> None:
        """Takes the settings by dotted names, and metadata such as device and versions.

        Called first in every start.
        """

    def record(
        self, kind: str, step: int, values: Mapping[str, float], member: str | None = None
    ) -> None:
        """Takes one record, after `step` updates, in an ensemble about one member.

        `kind` is "train", "valid", "test" or a hook's own. `values` may be nan or infinite.
        """

    def text(self, step: int, tag: str, text: str) -> None:
        """Takes a text, such as a sample, after `step` updates."""

    def flush(self) -> None:
        """Makes earlier records durable. Called at each checkpoint, and before `close`."""

    def close(self) -> None:
        """Closes the sink. Called last, even when the run fails."""


def grouped_names(kind: str, values: Mapping[str, float], member: str | None) -> dict[str, float]:
    """Returns the values by the names that dashboards group at the slash.

    Examples are "train/loss" and "speed/tokens_per_second".

    >>> grouped_names("train", {"loss": 2.0, "tokens_per_second": 9.0}, None)
    {'train/loss': 2.0, 'speed/tokens_per_second': 9.0}
    >>> grouped_names("valid", {"loss": 2.0}, "seed=2")
    {'seed=2/valid/loss': 2.0}
    """
    prefix = "" if member is None else f"{member}/"
    named = {}
    for name, value in values.items():
        group = "speed" if name in MEASURED else kind
        named[f"{prefix}{group}/{name}"] = value
    return named


_NUMBERED = re.compile(r"events\.(\d+)\.")
# Columns of TensorBoard's table of settings (HPARAMS).
_RESULTS = ("valid/loss", "test/loss", "test/bpc", "test/bits_per_byte", "test/perplexity")


class TensorBoard(Sink):
    """A TensorBoard file, made in a directory when first used.

    It hides steps after `first_step` in earlier files.

    tensorboardX's SummaryWriter is not used: it writes from a thread, which dies on a full disk;
    ten records later its queue is full and the training loop waits forever. Names contain numbers
    because TensorBoard reads files in the order of their names, also if a run is resumed within the
    same second or after the clock went back.

    Files for object storage are written on this machine, and uploaded by `flush`. Every method
    raises OSError if the file cannot be written.
    """

    def __init__(self, folder: str, *, first_step: int):
        self._folder = folder
        # The directory on this machine in which the files are written.
        self._local = folder
        self._first_step = first_step
        # Number of the latest file, or 0 if nothing was written yet.
        self._number = 0
        # tensorboardX's writer of the file that is open.
        self._file: Any = None
        # Settings that are not written yet.
        self._settings: Mapping[str, Any] | None = None
        # Removes the directory on this machine of files for object storage.
        self._cleanup = contextlib.ExitStack()

    def settings(self, values: Mapping[str, Any]) -> None:
        """Keeps the settings until there is something else to write.

        This way a run's first step does not wait for an import.
        """
        self._settings = values

    def record(
        self, kind: str, step: int, values: Mapping[str, float], member: str | None = None
    ) -> None:
        """Adds a scalar for each value.

        "=" in a member's name becomes "_", because TensorBoard requires it.
        """
        scalar = _tensorboard("summary").scalar
        # It warns about each NaN, in addition to our own lines.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        named = grouped_names(kind, values, member)
        self._write(step, [scalar(name, value) for name, value in named.items()])

    def text(self, step: int, tag: str, text: str) -> None:
        """Adds a text as a block of code, so that each character is kept.

        TensorBoard shows texts as Markdown.
        """
        code = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(step, [_tensorboard("summary").text(tag, code)])

    def flush(self) -> None:
        """Writes the settings, and uploads files for object storage.

        A local file is written already.
        """
        self._write_settings()
        if is_remote(self._folder) and self._file is not None:
            self._file.close()
            self._file = None
            remote.upload(self._local, self._folder)
            for name in names(self._local):
                os.unlink(os.path.join(self._local, name))

    def close(self) -> None:
        """Closes the file, without a flush."""
        with self._cleanup:
            if self._file is not None:
                self._file.close()

    def _write_settings(self) -> None:
        """Adds the settings twice: as a text, and for the table of settings (HPARAMS)."""
        values = self._settings
        self._settings = None
        if values is None:
            return
        summary = _tensorboard("summary")
        rows = "".join(f"| {name} | {value} |\n" for name, value in values.items())
        table = summary.text("settings", f"| setting | value |\n|---|---|\n{rows}")

        # The plugin takes numbers, booleans and strings.
        plain = {}
        for name, value in values.items():
            plain[name] = value if isinstance(value, bool | int | float) else str(value)
        experiment, start, _ = summary.hparams(plain, dict.fromkeys(_RESULTS, 0.0))
        self._write(self._first_step, [table, experiment, start])

    def _write(self, step: int, summaries: Sequence[Any]) -> None:
        self._write_settings()
        if self._file is None:
            self._open()
        values = []
        for summary in summaries:
            values += summary.value
        self._add(step=step, summary=_tensorboard("proto.summary_pb2").Summary(value=values))

    def _open(self) -> None:
        """Begins the next file. The first one of a start hides the later steps of earlier files."""
        is_first = self._number == 0
        if is_first:
            if is_remote(self._folder):
                self._local = self._cleanup.enter_context(
                    tempfile.TemporaryDirectory(prefix="tensorboard-")
                )
            make_folder(self._local)
            # Files of earlier starts come before this one.
            for name in names(self._folder, missing_ok=True):
                match = _NUMBERED.match(name)
                if match:
                    self._number = max(self._number, int(match[1]))
        self._number += 1
        prefix = os.path.join(self._local, f"events.{self._number:06}")
        self._file = _tensorboard("event_file_writer").EventsWriter(prefix)
        if is_first:
            session = _tensorboard("proto.event_pb2").SessionLog
            self._add(step=self._first_step + 1, session_log=session(status=session.START))

    def _add(self, **fields: Any) -> None:
        event = _tensorboard("proto.event_pb2").Event(wall_time=time.time(), **fields)
        self._file.write_event(event)
        self._file.flush()


def _tensorboard(module: str) -> Any:
    """Imports a module of tensorboardX.

    The import is slow, and also imports PyTorch if it is installed.
    """
    return importlib.import_module(f"tensorboardX.{module}")


class WeightsAndBiases(Sink):
    """One run of a W&B project (extra `wandb`), named after its workdir.

    The same workdir continues the same run.

    wandb's own variables decide where it sends it (WANDB_MODE=offline, WANDB_API_KEY, WANDB_ENTITY,
    WANDB_BASE_URL). Its files go to `wandb/` in the workdir, or `./wandb/` if that is a URL. Raises
    `UserError` if wandb is not installed.
    """

    def __init__(self, project: str, workdir: AnyPath):
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                f"--wandb_project is {project!r}, but wandb is not installed. "
                "Run pip install wandb, or omit --wandb_project."
            )
        self._project = project
        self._workdir = os.fspath(workdir)
        self._run: Any = None

    def settings(self, values: Mapping[str, Any]) -> None:
        """Begins the run, or continues it, with the settings as its config."""
        import wandb

        self._run = wandb.init(
            project=self._project,
            name=os.path.basename(self._workdir),
            id=hashlib.sha256(self._workdir.encode()).hexdigest()[:16],
            resume="allow",
            dir=None if is_remote(self._workdir) else self._workdir,
            config=dict(values),
            # log.txt has the lines; wandb would replace sys.stdout.
            settings=wandb.Settings(console="off"),
        )
        # By default W&B counts calls, and drops what a resumed run repeats.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def record(
        self, kind: str, step: int, values: Mapping[str, float], member: str | None = None
    ) -> None:
        """Adds the values at their step."""
        self._run.log({"step": step, **grouped_names(kind, values, member)})

    def text(self, step: int, tag: str, text: str) -> None:
        """Adds a text as a table of one row."""
        import wandb

        table = wandb.Table(columns=["step", "text"], data=[[step, text]])
        self._run.log({"step": step, tag: table})

    def close(self) -> None:
        """Ends the run, once all is sent."""
        if self._run is not None:
            self._run.finish()
