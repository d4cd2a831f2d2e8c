"""Tests the notebooks: Colab finds what it reads, and they run from top to bottom."""

import os
import re
import subprocess
import sys
import types
import zipfile
from importlib.metadata import version

import pytest

import txl_jax
from launch import notebook as shared
from support import ROOT
from txl_jax.runtime import environment

FOLDER = ROOT / "launch" / "notebooks"
NAMES = ("train", "fine_tune")
# Settings of a run that takes seconds.
TINY = {
    "model.n_layer": 1,
    "model.d_model": 16,
    "model.n_head": 2,
    "model.d_head": 8,
    "model.d_inner": 32,
    "optimizer.warmup_steps": 5,
    "train.batch_size": 4,
    "train.segment_len": 16,
    "train.mem_len": 16,
    "train.segments_per_call": 2,
    "train.steps": 20,
    "train.log_every": 10,
    "train.eval_every": 10,
    "train.checkpoint_every": 10,
    "eval.batch_size": 2,
    "eval.segment_len": 16,
    "eval.mem_len": 32,
    "generate.length": 20,
}
WORDS = "one two three four five six seven " * 800


def read(name):
    """A notebook of the repository."""
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook):
    """The cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
    """The one cell with a tag."""
    [cell] = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
    return cell


def with_parameters(notebook, values):
    """Adds a cell with other values after the parameters, all of which must exist."""
    import nbformat

    parameters = tagged(notebook, "parameters")
    names = re.findall(r"(?m)^(\w+) = .*# @param \{type:\"\w+\"\}$", parameters.source)
    assert values.keys() <= set(names)
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    cell = nbformat.v4.new_code_cell("\n".join(lines))
    notebook.cells.insert(notebook.cells.index(parameters) + 1, cell)
    return notebook


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """A function that runs a notebook's code here, which takes a third of a kernel's time, and
    returns its variables.
    """

    def run(name, values):
        variables = {"__name__": name}
        for cell in code(with_parameters(read(name), values)):
            exec(compile(cell.source, f"{name}.ipynb", "exec"), variables)
        return variables

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # A notebook may add its clone.
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    return run


@pytest.fixture
def colab(monkeypatch, tmp_path):
    """Colab's modules, git and pip, which record their calls: a namespace of lists."""
    calls = types.SimpleNamespace(commands=[], mounted=[], downloads=[])

    def upload():
        (tmp_path / "book.txt").write_text(WORDS)
        return {"book.txt": WORDS.encode()}

    run = subprocess.run

    def recorded_run(words, **options):
        if "pip" in words or "clone" in words:
            calls.commands.append(words)
            return None
        return run(words, **options)  # The standard library calls it too.

    modules = types.SimpleNamespace(
        drive=types.SimpleNamespace(mount=calls.mounted.append),
        files=types.SimpleNamespace(upload=upload, download=calls.downloads.append),
    )
    monkeypatch.setitem(sys.modules, "google.colab", modules)
    monkeypatch.setattr(subprocess, "run", recorded_run)
    monkeypatch.setattr(shared, "DRIVE", tmp_path / "drive")
    return calls


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_no_output_of_a_notebook_is_committed(name):
    for cell in code(read(name)):
        assert cell.outputs == [], cell.source
        assert cell.execution_count is None, cell.source


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_colab_runs_it_on_a_tpu(name):
    metadata = read(name).metadata
    assert metadata.accelerator == "TPU"
    assert metadata.colab.gpuType == "V5E1"


@pytest.mark.full
def test_train(in_this_process, tmp_path):
    """The archive that it makes is a whole run."""
    (tmp_path / "words.txt").write_text(WORDS)
    values = {"TEXT": "words.txt", "PROMPT": "one ", "TENSORBOARD": False, "SETTINGS": TINY}

    variables = in_this_process("train", values)

    runs = tmp_path / "runs"
    assert f"{len(WORDS):,} bytes" in variables["corpus"].description
    assert variables["outcome"].step == 20
    assert (runs / "train" / "results.json").exists()
    assert variables["archive"] == runs / "train.zip"
    with zipfile.ZipFile(variables["archive"]) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert txl_jax.load(tmp_path / "unpacked" / "train").step == 20


@pytest.fixture
def small_library(monkeypatch, tmp_path):
    """Python's library is one file. The notebook trains on it before it is tuned to a text."""
    library = tmp_path / "lib"
    library.mkdir()
    source = "import sys\n\n\ndef name():\n    return sys.platform\n"
    (library / "os.py").write_text(source * 300)
    monkeypatch.setattr(os, "__file__", str(library / "os.py"))


@pytest.mark.nightly(part="notebooks")
@pytest.mark.usefixtures("small_library")
def test_fine_tune_in_colab(in_this_process, colab, tmp_path):
    """With an uploaded text, in Google Drive, and with a download."""
    values = {
        "TEXT": "upload",
        "PROMPT": "import ",
        "DRIVE": True,
        "TENSORBOARD": False,
        "STEPS": 40,
        "REPOSITORY": "https://host/txl_jax",
        "SETTINGS": TINY | {"train.steps": 40},
    }

    variables = in_this_process("fine_tune", values)

    runs = tmp_path / "drive" / "MyDrive" / "runs"
    assert colab.mounted == [str(tmp_path / "drive")]
    assert {path.name for path in runs.iterdir()} >= {"base", "tuned", "source.txt", "tuned.zip"}
    assert variables["config"].init_from == str(runs / "base")
    assert variables["text"] == tmp_path / "book.txt"
    # The weights are of the best evaluation, at any step.
    assert variables["tuned"].step <= 40
    assert variables["after"].nll < variables["before"].nll
    assert colab.downloads == [str(runs / "tuned.zip")]

    clone, pip = colab.commands
    repository = pip[-1]
    assert clone[:2] == ["git", "clone"]
    assert clone[-2:] == ["https://host/txl_jax", repository]
    assert pip[1:4] == ["-m", "pip", "install"]
    assert pip[-2] == "--editable"
    assert sys.path[0] == repository
    assert f"jax=={version('jax')}\n" in (tmp_path / "constraints.txt").read_text()


@pytest.mark.full
def test_without_colab_there_is_no_upload():
    with pytest.raises(txl_jax.UserError, match="path of a file"):
        shared.upload()


@pytest.mark.nightly(part="notebooks")
@pytest.mark.parametrize("name", NAMES)
def test_in_a_kernel(name, tmp_path):
    """Whole notebooks in Jupyter, on the default texts, over eight devices."""
    import nbclient

    settings = TINY | {"train.batch_size": 8, "eval.batch_size": 8, "eval.segment_len": 64}
    notebook = with_parameters(read(name), {"TENSORBOARD": False, "SETTINGS": settings})
    # Jupyter starts a kernel in the directory of its notebook, two below the clone, where the
    # notebook finds the packages.
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    for package in ("experiments", "launch", "txl_jax"):
        (tmp_path / package).symlink_to(ROOT / package)
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    environ.pop("PYTHONPATH", None)  # The notebook itself finds the packages.

    client = nbclient.NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environ)

    printed = ""
    for cell in code(notebook):
        for output in cell.outputs:
            printed += output.get("text", "")
    assert f"8 x {environment.device_kind()}, jax {version('jax')}, " in printed
