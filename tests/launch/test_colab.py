"""Tests the notebook: that its two files agree, and that it runs from top to bottom."""

import re
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
TINY = {
    "optimizer.warmup_steps": 5,
    "model.n_layer": 1,
    "model.d_model": 16,
    "model.n_head": 2,
    "model.d_head": 8,
    "model.d_inner": 32,
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
    "eval.segments_per_call": 2,
    "generate.length": 20,
}


@pytest.fixture
def notebook():
    return nbformat.read(LAUNCH / "colab.ipynb", as_version=4)


def test_the_notebook_and_its_text_agree(notebook):
    """After a change run `jupytext --to ipynb launch/colab.py`."""
    text = jupytext.read(LAUNCH / "colab.py")
    assert [_content(cell) for cell in notebook.cells] == [_content(cell) for cell in text.cells]


def _content(cell):
    return cell.cell_type, cell.source, cell.metadata.get("tags", [])


def test_no_output_is_committed(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_it_runs_from_top_to_bottom(notebook, tmp_path):
    (tmp_path / "words.txt").write_text("one two three four five six seven " * 800)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    given = {
        "TEXT": str(tmp_path / "words.txt"),
        "PROMPT": "one ",
        "WORKDIR": str(tmp_path / "run"),
        "PACKAGE": "",
        "SETTINGS": TINY,
    }
    assert set(re.findall(r"^(\w+)(?:: .*)? =", parameters.source, flags=re.MULTILINE)) == given.keys()
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(LAUNCH.parent)}}).execute()
    shown = "\n".join(cell["source"] + str(cell.get("outputs")) for cell in notebook.cells if cell.cell_type == "code")
    for words in ("words.txt", "27,200 bytes", "20/20", "zlib -9"):
        assert words in shown, words
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("image/png" in output["data"] for output in pictures) == 3
