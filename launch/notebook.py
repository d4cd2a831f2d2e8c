"""Shared code of launch/notebooks: directories, devices, training, TensorBoard, and the download.

In Colab a directory can be in Google Drive, and the browser downloads a result. In any other
Jupyter both are local.
"""

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from txl_jax import plots
from txl_jax.cli import keep_compiled
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import require
from txl_jax.data.corpus import Corpus
from txl_jax.runs.convert import convert
from txl_jax.runs.run import Run
from txl_jax.runs.trainer import Outcome, train_run
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.stop import StopRequest
from txl_jax.runtime.storage import expand_home
from txl_jax.training.hooks import Hook, HookContext

DRIVE = Path("/content/drive")


def in_colab() -> bool:
    """Returns whether this Python is the kernel of a Colab notebook."""
    return "google.colab" in sys.modules


def open_folder(name: str, *, drive: bool) -> Path:
    """Creates the directory for a notebook's runs, and returns its absolute path.

    In Colab with `drive`, the directory is in My Drive.

    `name` is relative to the current directory or to My Drive. Compiled functions are cached
    elsewhere, because a directory that is shared must not contain code.
    """
    parent = Path.cwd()
    if drive and in_colab():
        from google.colab import drive as google_drive

        google_drive.mount(str(DRIVE))  # It asks for permission.
        parent = DRIVE / "MyDrive"
    folder = (parent / expand_home(name)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    keep_compiled()
    return folder


def device_settings() -> dict[str, object]:
    """Returns settings of a small model for these devices.

    Empty on a CPU. On TPU and GPU, these are the settings of a larger bfloat16 model.
    """
    if jax.default_backend() == "cpu":
        return {}
    sizes = {
        "n_layer": 6,
        "d_model": 512,
        "n_head": 8,
        "d_head": 64,
        "d_inner": 2048,
        "init_std": 0.02,
    }
    # A batch of 32 divides over one device or eight.
    lengths = {
        "train.batch_size": 32,
        "train.segment_len": 256,
        "train.mem_len": 256,
        "eval.segment_len": 256,
    }
    larger = {f"model.{name}": size for name, size in sizes.items()} | lengths
    return larger | {
        "model.dtype": "bfloat16",
        "optimizer.learning_rate": 2e-3,
        "eval.mem_len": 1024,
    }


def train(config: ExperimentConfig, corpus: Corpus, workdir: Path, *, title: str) -> Outcome:
    """Trains in a workdir, or resumes there, and returns the finished run's outcome.

    A live curve is shown below the cell.

    The curve is `learning_curve.png` in the workdir. Without matplotlib nothing is drawn. Raises
    SystemExit if training was stopped, because the cells below need a finished run.
    """
    interval = config.train.log_every
    # At most 60 drawings, which take some tenths of a second.
    interval *= max(config.train.steps // interval // 30, 1)
    hooks = [Hook(interval, _live_curve(workdir, title))] if plots.can_draw() else []
    with Run.open(workdir) as run, StopRequest() as stop:
        outcome = train_run(config, corpus, run, hooks=hooks, stop_requested=lambda: stop)
    if outcome.results is None:
        raise SystemExit("Run this cell again to resume. The cells below need a finished run.")
    return outcome


def _live_curve(workdir: Path, title: str) -> Callable[[HookContext], None]:
    """Returns the action of a hook that draws the learning curve.

    The curve is redrawn in the same place of the notebook.
    """
    path = workdir / "learning_curve.png"
    shown: Any = None

    def draw(_: HookContext) -> None:
        nonlocal shown
        from IPython.display import Image, display

        plots.learning_curve(read_metrics(workdir), path, title=title, levels={})
        if shown is None:
            shown = display(Image(path), display_id=True)
        else:
            shown.update(Image(path))

    return draw


def show_tensorboard(folder: Path) -> None:
    """Shows TensorBoard for all runs in a directory, or prints a line if it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        print("TensorBoard is not installed: pip install tensorboard")
        return
    from IPython import get_ipython

    get_ipython().run_line_magic("load_ext", "tensorboard")
    get_ipython().run_line_magic("tensorboard", f"--logdir '{folder}'")


def upload() -> Path:
    """Asks for a file in the browser, saves it in the current directory, and returns its path.

    Raises `UserError` if this is not Colab, or no file was chosen.
    """
    require(
        in_colab(), "TEXT must be the path of a file, because only Colab can upload, got 'upload'"
    )
    from google.colab import files

    names = list(files.upload())
    require(
        names,
        "no file was uploaded. Run the cell again and choose one, or set TEXT to the path "
        "of a file.",
    )
    return Path(names[0]).resolve()


def download_model(workdir: Path) -> Path:
    """Packs the best weights of a run as a zipped portable checkpoint.

    The archive is next to the run. In Colab it is also downloaded.

    `txl_jax.load` opens the unpacked directory, and `--init_from` accepts it. Returns the path of
    the archive.
    """
    with tempfile.TemporaryDirectory() as temporary:
        portable = Path(temporary) / workdir.name
        convert(workdir, portable)
        archive = Path(shutil.make_archive(str(workdir), "zip", temporary, workdir.name))
    if in_colab():
        from google.colab import files

        files.download(str(archive))
    else:
        print(f"written {archive}")
    return archive
