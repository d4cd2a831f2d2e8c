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
SIZES = {
    "model": {"n_layer": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
    "train": {
        "batch_size": 4,
        "segment_len": 16,
        "mem_len": 16,
        "segments_per_call": 2,
        "steps": 20,
    },
    "eval": {"batch_size": 2, "segment_len": 16, "mem_len": 32},
}
TINY = {f"{group}.{name}": value for group, sizes in SIZES.items() for name, value in sizes.items()}
TINY |= {"optimizer.warmup_steps": 5, "generate.length": 20}
TINY |= {f"train.{name}_every": 10 for name in ("log", "eval", "checkpoint")}
WORDS = "one two three four five six seven " * 800


def read(name):
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
    [cell] = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
    return cell


def with_parameters(notebook, given):
    """Adds a cell with other values after the parameters, all of which must be there."""
    import nbformat

    names = re.findall(
        r"^(\w+) = .*# @param \{type:\"\w+\"\}$",
        tagged(notebook, "parameters").source,
        re.MULTILINE,
    )
    assert given.keys() <= set(names)
    cell = nbformat.v4.new_code_cell(
        "\n".join(f"{name} = {value!r}" for name, value in given.items())
    )
    notebook.cells.insert(notebook.cells.index(tagged(notebook, "parameters")) + 1, cell)
    return notebook


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """A function that runs a notebook's code here, which takes a third of a kernel's time; returns
    its variables.
    """

    def run(name, given):
        variables = {"__name__": name}
        for cell in code(with_parameters(read(name), given)):
            exec(compile(cell.source, f"{name}.ipynb", "exec"), variables)
        return variables

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    return run


@pytest.fixture
def colab(monkeypatch, tmp_path):
    """Colab's modules, git and pip, which record their calls: a namespace of lists."""
    calls = types.SimpleNamespace(commands=[], mounted=[], downloads=[])

    def upload():
        (tmp_path / "book.txt").write_text(WORDS)
        return {"book.txt": WORDS.encode()}

    modules = types.SimpleNamespace(
        drive=types.SimpleNamespace(mount=calls.mounted.append),
        files=types.SimpleNamespace(upload=upload, download=calls.downloads.append),
    )
    monkeypatch.setitem(sys.modules, "google.colab", modules)
    run = subprocess.run  # The standard library calls it too.
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda words, **how: (
            calls.commands.append(words) if {"pip", "clone"} & set(words) else run(words, **how)
        ),
    )
    monkeypatch.setattr(shared, "DRIVE", tmp_path / "drive")
    return calls


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_no_output_of_a_notebook_is_committed(name):
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code(read(name)))
    assert read(name).metadata.accelerator == "TPU" and read(name).metadata.colab.gpuType == "V5E1"


@pytest.mark.full
def test_train(in_this_process, tmp_path):
    (tmp_path / "words.txt").write_text(WORDS)
    found = in_this_process(
        "train", {"TEXT": "words.txt", "PROMPT": "one ", "TENSORBOARD": False, "SETTINGS": TINY}
    )
    workdir = tmp_path / "runs" / "train"
    assert "27,200 bytes" in found["corpus"].description
    assert found["outcome"].step == 20 and (workdir / "results.json").exists()
    assert found["archive"] == tmp_path / "runs" / "train.zip"
    with zipfile.ZipFile(found["archive"]) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert txl_jax.load(tmp_path / "unpacked" / "train").step == found["outcome"].step


@pytest.mark.nightly(part="notebooks")
def test_fine_tune_in_colab(in_this_process, colab, monkeypatch, tmp_path):
    """With an uploaded text, in Google Drive, and with a download; the library is a small one."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "os.py").write_text(
        "import sys\n\n\ndef name():\n    return sys.platform\n" * 300
    )
    monkeypatch.setattr(os, "__file__", str(tmp_path / "lib" / "os.py"))
    given = {
        "TEXT": "upload",
        "PROMPT": "import ",
        "DRIVE": True,
        "TENSORBOARD": False,
        "STEPS": 40,
        "REPOSITORY": "https://host/txl_jax",
    }
    sizes = {name: value for name, value in TINY.items() if name != "train.steps"} | {
        "train.log_every": 10
    }
    found = in_this_process("fine_tune", given | {"SETTINGS": sizes | {"train.steps": 40}})
    folder = tmp_path / "drive" / "MyDrive" / "runs"
    assert colab.mounted == [str(tmp_path / "drive")]
    assert {path.name for path in folder.iterdir()} >= {"base", "tuned", "source.txt", "tuned.zip"}
    assert found["config"].init_from == str(folder / "base") and found["tuned"].step <= 40
    assert found["text"] == tmp_path / "book.txt"
    assert found["after"].nll < found["before"].nll
    assert colab.downloads == [str(folder / "tuned.zip")]
    clone, pip = colab.commands
    assert clone[:2] == ["git", "clone"] and clone[-2:] == ["https://host/txl_jax", pip[-1]]
    assert (
        pip[1:4] == ["-m", "pip", "install"] and pip[-2] == "--editable" and sys.path[0] == pip[-1]
    )
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

    tiny = {**TINY, "train.batch_size": 8, "eval.batch_size": 8, "eval.segment_len": 64}
    notebook = with_parameters(read(name), {"TENSORBOARD": False, "SETTINGS": tiny})
    # Jupyter starts a kernel in the directory of its notebook, two below the clone.
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    for package in ("experiments", "launch", "txl_jax"):
        (tmp_path / package).symlink_to(ROOT / package)
    client = nbclient.NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(folder)}}
    )
    unset = ("JAX_COMPILATION_CACHE_DIR", "PYTHONPATH")
    own = {variable: value for variable, value in os.environ.items() if variable not in unset}
    client.execute(env=own | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    printed = "".join(output.get("text", "") for cell in code(notebook) for output in cell.outputs)
    assert f"8 x {environment.device_kind()}, jax {version('jax')}, " in printed
