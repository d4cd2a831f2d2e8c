"""Tests the modes that use a trained model: of folders that may only be read, portable folders, and many prompts."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from support import drawn_run, programs
from txl_jax.config import GenerateConfig
from txl_jax.runs.convert import convert

TEXT = b"the cat sat on a mat\n" * 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(workdir, flags of its text) of a run with drawn parameters on words."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"data__tokenizer__kind": "word", "generate": GenerateConfig(length=12, top_k=None)}
    config, corpus = drawn_run.on_text(folder, TEXT, **changes)
    drawn_run.make(folder / "run", config, corpus)
    return folder / "run", (f"--cache_dir={folder}", f"--data.file={folder / 'text'}")


@pytest.fixture(scope="module")
def portable(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable")
    convert(run[0], folder / "model", log=lambda line: None)
    return folder / "model"


def use(mode, workdir, *flags, code=0):
    """The output of a mode, or the error where the exit code is not 0."""
    found, out, err = programs.run("experiments.text", f"--mode={mode}", f"--workdir={workdir}", *flags)
    assert found == code, err
    return err if code else out


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["run", "portable"])
def read_only(request, run, portable, monkeypatch):
    """A run or a portable folder that may only be read, also by root, for whom permissions mean nothing."""
    folder = run[0] if request.param == "run" else portable
    real = Path.write_bytes

    def write_bytes(path, data):
        if path.is_relative_to(folder):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    return folder


def test_a_model_that_may_only_be_read_is_evaluated_and_generates(run, read_only, tmp_path):
    before = content(read_only)
    scored = use("eval", read_only, *run[1])
    assert "Read-only file system" in scored and "--out" in scored and "test ppl" in scored
    drawn = use("generate", read_only, "--generate.prompt=the cat")
    assert "Read-only file system" in drawn and "\nthe cat " in drawn and "sample-seed0" not in drawn
    assert "--out" in use("score", read_only, *run[1], code=1), "its files are all that it makes"
    assert content(read_only) == before
    out = tmp_path / "out"
    for mode, flags in (("eval", run[1]), ("generate", ()), ("score", run[1])):
        assert str(out) in use(mode, read_only, *flags, f"--out={out}")
    assert set(content(out)) == {"evaluation.json", "sample-seed0.txt", "scores-valid.tsv", "scores-test.tsv"}


def test_a_portable_folder_has_the_scores_and_the_text_of_its_run(run, portable, tmp_path):
    workdir = shutil.copytree(run[0], tmp_path / "run")
    results = []
    for model in (workdir, portable):
        out = tmp_path / f"{model.name}-out"
        use("eval", model, *run[1], f"--out={out}")
        use("generate", model, "--generate.prompt=the cat", f"--out={out}")
        results.append((json.loads((out / "evaluation.json").read_text()), (out / "sample-seed0.txt").read_text()))
    (ours, text), (theirs, same) = results
    assert text == same and ours["text_sha256"] == theirs["text_sha256"]
    assert [ours[split] for split in ("valid", "test")] == [theirs[split] for split in ("valid", "test")]
    assert "--data.file" in use("eval", portable, code=1), "no text is named by a portable folder"
    assert "tokenizer" in use("eval", portable, *run[1], "--tokenizer=byte", code=1)
    assert "--init_from" in use("train", portable, *run[1], code=1), "a portable folder cannot be trained in"


def test_an_out_that_cannot_be_written_to_is_refused_and_training_has_none(run, tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in use("generate", run[0], f"--out={tmp_path / 'file'}", code=1)
    error = use("train", tmp_path / "new", *run[1], f"--out={tmp_path / 'out'}", code=1)
    assert "--out" in error and not (tmp_path / "new").exists()


def test_prompts_of_a_file_become_records_on_the_output(run, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\n\nsat on a\n")
    flags = [f"--input={tmp_path / 'prompts.txt'}", "--generate.samples=2", "--eval.batch_size=4"]
    records = [json.loads(line) for line in use("generate", run[0], *flags).splitlines()]
    assert [(record["index"], record["sample"], record["prompt"]) for record in records] == [
        (index, sample, prompt) for index, prompt in enumerate(["the cat", "", "sat on a"]) for sample in (0, 1)
    ]
    alone = use("generate", run[0], "--generate.prompt=the cat", f"--out={tmp_path}")
    assert f"\nthe cat {records[0]['text']}" in alone and len(records[0]["text"].split()) > 5
    assert "--input" in use("eval", run[0], *flags, code=1)
    assert "--out" in use("generate", run[0], *flags, f"--out={tmp_path}", code=1)
