"""Tests the programs as a user starts them: each mode, the studies of a trained run, first
mistakes, used models.
"""

import errno
import gzip
import json
import re
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import drawn_run, programs
from txl_jax.cli import plans
from txl_jax.config import GenerateConfig, Network, NormPlace, config_tree
from txl_jax.config.experiment import preset
from txl_jax.runs.convert import convert
from txl_jax.runs.time_budget import FittingSteps
from txl_jax.runtime import stop

SHORT = programs.steps(2, every=2)
LAYER_NORM = "model.layer_norm"


def run(program, *flags):
    return programs.run(f"experiments.{program}", *flags)


def succeed(program, *flags):
    code, out, err = run(program, *flags)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    path = programs.write_words(tmp_path_factory.mktemp("text"), 12_000)
    return [
        *programs.TINY,
        *programs.steps(100, every=50),
        f"--data.file={path}",
        f"--cache_dir={path.parent}",
    ]


@pytest.fixture(scope="module")
def undisturbed(own_text, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    succeed("text", *own_text, f"--workdir={workdir}")
    return workdir


def test_a_workdir_alone_resumes_with_its_settings_in_another_folder_and_with_more_steps(
    own_text, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    flags = [
        *own_text,
        *SHORT,
        f"--data_dir={own_text[-1].partition('=')[2]}/data",
        "--compilation_cache=off",
    ]
    out = succeed("text", *flags, "--workdir=../run")
    commands = ["experiments.text --mode=generate --workdir=", "experiments.report "]
    assert all(f"python -m {command}{tmp_path / 'run'}\n" in out for command in commands), (
        "what to do next"
    )
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    workdir = f"--workdir={tmp_path / 'run'}"
    assert re.search(r"(?m)^finished +already", succeed("text", workdir)), "nothing else is given"
    out = succeed("text", workdir, *flags[:3], "--train.steps=4", "--train.log_every=4")
    notes = [f"--train.{name} was 2 and is now 4" for name in ("steps", "log_every")]
    assert re.findall(r"(?m)^note +(--.*)", out) == notes
    now = json.loads((tmp_path / "run" / "config.json").read_text())
    assert now == recorded | {
        "config": recorded["config"] | {"train.steps": 4, "train.log_every": 4}
    }
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["changes"] == [{"step": 2, "name": "train.steps", "old": 2, "new": 4}]
    out = succeed(
        "text", workdir, "--mode=eval", "--train.mem_len=7", "--eval.mem_len=8", "--train.steps=4"
    )
    assert re.findall(r"(?m)^note +.*", out) == [
        "note      no effect with --mode=eval: --train.mem_len"
    ]
    assert not any((tmp_path / "there").iterdir()) and not any((tmp_path / "here").iterdir())
    code, _, err = run("text", workdir, "--train.steps=2", "--model.d_model=8")
    assert code == 1 and "--model.d_model was 16 and is now 8" in err and "fewer than the 4 " in err


def test_minutes_set_the_steps_at_the_first_start_alone(own_text, tmp_path, monkeypatch):
    """Over a flagfile's steps, warm-up and pre-norm; the same command finds them in the record."""
    asked = []
    monkeypatch.setattr(
        plans,
        "steps_in",
        lambda seconds, *given: (
            asked.append(seconds) or FittingSteps(20 * len(asked), 0.1, 30, 7, compilation=None)
        ),
    )
    (tmp_path / "mine.flags").write_text(
        "\n".join([*own_text, "--optimizer.warmup_steps=30", f"--{LAYER_NORM}=pre"])
    )
    words = [
        f"--flagfile={tmp_path / 'mine.flags'}",
        f"--workdir={tmp_path / 'run'}",
        "--minutes=0.5",
    ]
    succeed("text", *words)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (recorded["config"]["train.steps"], recorded["config"]["optimizer.warmup_steps"]) == (
        20,
        2,
    )
    assert recorded["config"][LAYER_NORM] == "post"
    assert re.search(r"(?m)^finished +already", succeed("text", *words)) and asked == [30]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == recorded
    code, _, err = run("text", *words, "--train.steps=40")
    assert code == 1 and "--minutes" in err and "--train.steps" in err
    code, _, err = run("text", *words, f"--{LAYER_NORM}=pre")
    assert code == 1 and f"--{LAYER_NORM} was post and is now pre" in err


@pytest.mark.parametrize(
    ("steps", "places", "changes", "expected"),
    [
        (plans.PRE_NORM_STEPS - 10, {}, {}, NormPlace.POST),
        (plans.PRE_NORM_STEPS, {}, {}, NormPlace.PRE),
        (20, {LAYER_NORM: "mine.flags, line 1: "}, {}, NormPlace.POST),
        (20, {LAYER_NORM: ""}, {}, NormPlace.PRE),
        (20, {}, {"init_from": "/runs/base"}, NormPlace.PRE),
        (20, {}, {"model.network": Network.LSTM}, NormPlace.PRE),
    ],
)
def test_minutes_for_few_steps_choose_post_norm(steps, places, changes, expected, monkeypatch):
    timed: Any = object()
    fitting = FittingSteps(steps, 0.1, 30, 7, compilation=timed)
    monkeypatch.setattr(plans, "steps_in", lambda *given: fitting)
    config = config_tree.replace(preset("own_bytes"), changes)
    new_run: Any = types.SimpleNamespace(is_new=True, notes=[])
    job: Any = types.SimpleNamespace(places=places)
    corpus: Any = None  # Only `steps_in` reads it.
    fitted, compiled = plans.TimedPlan(minutes=1).fit_steps(config, corpus, job, new_run)
    assert (fitted.model.layer_norm, fitted.train.steps) == (expected, steps)
    # The step that was timed is another program if the place changes.
    assert (compiled is timed) == (expected is NormPlace.PRE)
    is_noted = any(note.startswith(f"{LAYER_NORM} is post") for note in new_run.notes)
    assert is_noted == (expected is NormPlace.POST)


def test_minutes_never_replace_post_norm(monkeypatch):
    """The paper's place stays, however many steps fit."""
    timed: Any = object()
    fitting = FittingSteps(100_000, 0.1, 30, 7, compilation=timed)
    monkeypatch.setattr(plans, "steps_in", lambda *given: fitting)
    new_run: Any = types.SimpleNamespace(is_new=True, notes=[])
    job: Any = types.SimpleNamespace(places={})
    corpus: Any = None  # Only `steps_in` reads it.
    fitted, compiled = plans.TimedPlan(minutes=1).fit_steps(preset("small"), corpus, job, new_run)
    assert compiled is timed
    assert fitted.model.layer_norm is NormPlace.POST and len(new_run.notes) == 1


@pytest.mark.full
def test_another_text_is_scored_in_place_of_the_runs_own(undisturbed, tmp_path, monkeypatch):
    """Lists in place of one file; and the folder of the ids is not that of the run, which is only
    read.
    """
    (tmp_path / "other.txt").write_text("four three two one " * 50)
    flags = [f"--data.{split}={tmp_path / 'other.txt'}" for split in ("train", "valid", "test")]
    trained_on = json.loads((undisturbed / "config.json").read_text())["text"]
    recorded = Path(trained_on["cache_dir"]) / "tokens"
    before = sorted(recorded.iterdir())
    out = succeed(
        "enwik8", "--mode=eval", f"--workdir={undisturbed}", *flags, f"--cache_dir={tmp_path}"
    )
    assert re.search(r"(?m)^corpus +text\b.*\benwik8\)$", out), (
        "the run is that of another corpus' program"
    )
    assert trained_on["description"] in out and "949" in out, "both texts are named"
    assert (
        sorted(recorded.iterdir()) == before
        and len(list((tmp_path / "tokens").glob("text-*"))) == 1
    )
    monkeypatch.chdir(tmp_path)
    succeed("enwik8", "--mode=eval", f"--workdir={undisturbed}")
    assert not (tmp_path / "data").exists(), "its own ids are found where they are"


@pytest.mark.full
def test_a_trained_run_is_studied_without_a_flagfile(undisturbed, tmp_path):
    for program, flags, made in (
        ("attention", [f"--out={tmp_path}"], tmp_path / "attention.md"),
        ("continuation", ["--generate.length=5", "--context=40"], undisturbed / "continuation.md"),
        ("context_length", ["--lengths=32,8", "--split=test"], undisturbed / "context_length.csv"),
    ):
        assert (
            str(made.parent) in succeed(f"paper.{program}", f"--workdir={undisturbed}", *flags)
            and made.exists()
        )
    group = [
        f"--workdirs={undisturbed},{undisturbed}",
        "--names=ours,again",
        f"--out={tmp_path / 'recl'}",
    ]
    out = succeed("paper.recl", *group, "--lengths=4,12,4", "--stride=200")
    assert "| again | " in out and (tmp_path / "recl" / "recl.json").exists()


@pytest.mark.full
def test_an_ensemble_is_trained_a_member_scored_and_split_off(own_text, tmp_path):
    chosen = ["--ensemble_member=seed=1", "--ensemble_member=seed=2 optimizer.learning_rate=0.002"]
    own_text = [*own_text, *SHORT, "--data.corpus=text"]
    succeed("ensemble", *own_text, *chosen, f"--workdir={tmp_path / 'all'}")
    name = "seed=2+learning_rate=0.002"
    # A resume takes the members from the record.
    succeed("ensemble", f"--workdir={tmp_path / 'all'}")
    assert json.loads((tmp_path / "all" / "results.json").read_text())["members"].keys() == {
        "seed=1",
        name,
    }
    assert f"| {name} | " in succeed("report", str(tmp_path / "all"))
    member = [f"--workdir={tmp_path / 'all'}", f"--ensemble_member={name}"]
    succeed("text", "--mode=eval", *member)
    assert (tmp_path / "all" / "members" / name / "evaluation.json").exists()
    succeed("ensemble", "--mode=split", *member, f"--to={tmp_path / 'own'}")
    assert (tmp_path / "own" / "results.json").exists()


def test_first_mistakes_are_answered_in_one_line(tmp_path):
    for program, flags, code, expected in (
        ("ensemble", ["--workdir=WORK", "--mode=split"], 1, ["--ensemble_member"]),
        ("paper.recl", ["--workdirs=WORK,WORK/b", "--out=WORK"], 1, ["WORK", "config.json"]),
        # The settings are checked before the text, which does not exist.
        (
            "paper.ablation",
            ["--out=WORK", "--data.file=WORK/none", "--model.network=lstm"],
            1,
            ["model.network"],
        ),
        ("enwik8", ["--workdir=WORK", "--data_dir=WORK"], 1, ["enwik8.zip", "--data.file"]),
        (
            "enwik8",
            ["--workdir=WORK", "--flagfile=wt103_base"],
            1,
            ["data.corpus", "experiments.wikitext103"],
        ),
        ("text", ["--data.file=WORK/none", "--workdir=WORK"], 1, ["WORK/none"]),
        ("text", ["--workdir=WORK", "word"], 2, ["'word'"]),
        ("convert", ["--to=WORK/new"], 1, ["--from is required"]),
        ("text", ["--workdir=WORK", "--mode=generate"], 1, ["WORK", "config.json"]),
    ):
        got, _, err = run(program, *(flag.replace("WORK", str(tmp_path)) for flag in flags))
        assert got == code and err.startswith("error: ") and len(err.strip().splitlines()) == 1, err
        for words in expected:
            assert re.search(
                rf"(?<!\w){re.escape(words.replace('WORK', str(tmp_path)))}(?!\w)", err
            ), (words, err)


def test_a_compressed_text_is_trained_on_if_bytes_are_asked_for_by_name(tmp_path):
    packed = tmp_path / "book.txt.gz"
    packed.write_bytes(gzip.compress(np.random.default_rng(0).bytes(3000)))
    folders = [f"--cache_dir={tmp_path}", f"--workdir={tmp_path / 'run'}"]
    flags = [*programs.TINY, *SHORT, f"--data.file={packed}", *folders]
    for more in ([], ["--tokenizer=word"]):
        code, _, err = run("text", *flags, *more)
        assert (
            code == 1
            and "gzip" in err
            and "--tokenizer=byte" in err
            and not (tmp_path / "run").exists()
        )
    succeed("text", *flags, "--tokenizer=byte")
    succeed("text", *flags)  # The run's own record says so from then on.


def test_json_lines_are_trained_on_and_scored(tmp_path):
    path, field = tmp_path / "d.jsonl", "--data.json_field=text"
    path.write_text("".join(json.dumps({"text": f"one two {i}\nthree"}) + "\n" for i in range(200)))
    flags = [
        *programs.TINY,
        *SHORT,
        f"--data.file={path}",
        f"--cache_dir={tmp_path}",
        f"--workdir={tmp_path / 'run'}",
    ]
    succeed("text", *flags, field)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["text"].startswith(
        "own text, 3,490 bytes"
    )
    path.write_text('{"text": "one\\ntwo"}\n\n{"text": ""}\n{"no": 1}\n')
    score = ["--mode=score", f"--workdir={tmp_path / 'run'}", f"--input={path}"]
    code, out, err = run("text", *score)  # As in training.
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [6, 0]
    assert code == 1 and f"line 4 of {path}" in err
    out = succeed("text", *score, "--data.json_field=none")
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [19, 0, 11, 8]


def test_training_without_a_workdir_names_one_after_the_flagfile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, name in ((["--flagfile=small"], "small"), ([], "text")):
        code, out, err = run("text", *words, f"--data.file={tmp_path / 'none'}")
        assert (
            code == 1
            and f"workdir   {tmp_path / 'runs' / name} (" in out
            and str(tmp_path / "none") in err
        )
    code, _, err = run("text", "--mode=eval")
    assert code == 1 and "--workdir" in err and not (tmp_path / "runs").exists()


# Modes that use a trained model: of folders that may only be read, portable folders, and many
# prompts


TEXT = b"the cat sat on a mat\n" * 60


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """(workdir, flags of its text) of a run with drawn parameters on words."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"data__tokenizer__kind": "word", "generate": GenerateConfig(length=12, top_k=None)}
    config, corpus = drawn_run.on_text(folder, TEXT, **changes)
    drawn_run.make(folder / "run", config, corpus)
    return folder / "run", (f"--cache_dir={folder}", f"--data.file={folder / 'text'}")


@pytest.fixture(scope="module")
def portable(drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable")
    convert(drawn[0], folder / "model", log=lambda line: None)
    return folder / "model"


def use(mode, workdir, *flags, code=0):
    """The output of a mode, or the error where the exit code is not 0."""
    found, out, err = run("text", f"--mode={mode}", f"--workdir={workdir}", *flags)
    assert found == code, err
    return err if code else out


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(params=["run", "portable"])
def read_only(request, drawn, portable, monkeypatch):
    """A run or a portable folder that may only be read, also by root, for whom permissions mean
    nothing.
    """
    folder = drawn[0] if request.param == "run" else portable
    real = Path.write_bytes

    def write_bytes(path, data):
        if path.is_relative_to(folder):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    return folder


def test_a_model_that_may_only_be_read_is_evaluated_and_generates(drawn, read_only, tmp_path):
    before = content(read_only)
    scored = use("eval", read_only, *drawn[1])
    assert "Read-only file system" in scored and "--out" in scored and "test ppl" in scored
    written = use("generate", read_only, "--generate.prompt=the cat")
    assert (
        "Read-only file system" in written
        and "\nthe cat " in written
        and "sample-seed0" not in written
    )
    assert "--out" in use("score", read_only, *drawn[1], code=1), "its files are all that it makes"
    assert content(read_only) == before
    out = tmp_path / "out"
    for mode, flags in (("eval", drawn[1]), ("generate", ()), ("score", drawn[1])):
        assert str(out) in use(mode, read_only, *flags, f"--out={out}")
    assert set(content(out)) == {
        "evaluation.json",
        "sample-seed0.txt",
        "scores-valid.tsv",
        "scores-test.tsv",
    }


def test_a_portable_folder_names_no_text_and_cannot_be_trained_in(drawn, portable):
    assert "--data.file" in use("eval", portable, code=1)
    assert "tokenizer" in use("eval", portable, *drawn[1], "--tokenizer=byte", code=1)
    assert "--init_from" in use("train", portable, *drawn[1], code=1)


def test_an_out_that_cannot_be_written_to_is_refused_and_training_has_none(drawn, tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in use("generate", drawn[0], f"--out={tmp_path / 'file'}", code=1)
    error = use("train", tmp_path / "new", *drawn[1], f"--out={tmp_path / 'out'}", code=1)
    assert "--out" in error and not (tmp_path / "new").exists()


def test_prompts_of_a_file_become_records_on_the_output(drawn, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\n\nsat on a\n")
    flags = [f"--input={tmp_path / 'prompts.txt'}", "--generate.samples=2", "--eval.batch_size=4"]
    records = [json.loads(line) for line in use("generate", drawn[0], *flags).splitlines()]
    assert [(record["index"], record["sample"], record["prompt"]) for record in records] == [
        (index, sample, prompt)
        for index, prompt in enumerate(["the cat", "", "sat on a"])
        for sample in (0, 1)
    ]
    alone = use("generate", drawn[0], "--generate.prompt=the cat", f"--out={tmp_path}")
    assert f"\nthe cat {records[0]['text']}" in alone and len(records[0]["text"].split()) > 5
    assert "--input" in use("eval", drawn[0], *flags, code=1)
    (tmp_path / "prompts.txt").write_bytes(b"the\ncaf\xe9\n")
    assert re.search(r"line 2 of .*prompts\.txt.*0xe9", use("generate", drawn[0], *flags, code=1))
    assert "--out" in use("generate", drawn[0], *flags, f"--out={tmp_path}", code=1)


def test_a_stop_ends_a_file_of_documents_after_a_complete_record(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "_stop_requested", threading.Event())
    stop.request_stop("a test")
    (tmp_path / "in.txt").write_text("the cat\n" * 9)
    code, out, err = run(
        "text", "--mode=score", f"--workdir={drawn[0]}", f"--input={tmp_path / 'in.txt'}"
    )
    assert code == 143 and "stopped" in err and json.loads(out)["index"] == 0
