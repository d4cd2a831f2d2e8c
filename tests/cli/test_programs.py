"""Tests the commands as a user starts them: training, each mode of a trained model, the studies of
a trained run, and first mistakes.
"""

import errno
import gzip
import json
import re
import shutil
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import drawn_run, programs
from support.shared_builds import shared_builds
from txl_jax.cli import plans
from txl_jax.config import GenerateConfig, Network, NormPlace, config_tree
from txl_jax.config.experiment import preset
from txl_jax.runs.convert import convert
from txl_jax.runs.time_budget import FittingSteps
from txl_jax.runtime import stop

# A run of which only the files and lines matter.
SIMPLE_MODEL = ["--model.n_layer=1", "--model.dropout.rate=0"]
SHORT = [*programs.steps(2, every=2), *SIMPLE_MODEL]
LAYER_NORM = "model.layer_norm"
MINUTES_STEPS = 20  # Steps that --minutes gives here, without timing any.


def run(program, *flags):
    """Returns the exit code, the output and the errors of a command."""
    return programs.run(f"experiments.{program}", *flags)


def succeed(program, *flags):
    """Returns the output of a command that must succeed."""
    code, out, err = run(program, *flags)
    assert code == 0, err
    return out


def fail(program, *flags, code=1):
    """Returns the error of a command that must fail with an exit code."""
    actual_code, out, err = run(program, *flags)
    assert actual_code == code, out + err
    return err


def read_json(path):
    return json.loads(path.read_text())


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def notes_in(out):
    """Returns the texts of the notes in a command's output."""
    return re.findall(r"(?m)^note +(.*)", out)


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Lets the commands of this file share their compiled functions."""
    with shared_builds():
        yield


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """The flags of a run on 12,000 words. The last one names the directory of its caches."""
    path = programs.write_words(tmp_path_factory.mktemp("text"), 12_000)
    return [
        *programs.TINY,
        *programs.steps(100, every=50),
        f"--data.file={path}",
        f"--cache_dir={path.parent}",
    ]


@pytest.fixture(scope="module")
def undisturbed(own_text, tmp_path_factory):
    """The workdir of a finished run."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    succeed("text", *own_text, f"--workdir={workdir}")
    return workdir


@pytest.fixture(scope="module")
def short_run(own_text, tmp_path_factory):
    """(output of the command, parent of the workdir "run") of a run of two steps.

    The command was started in the directory "here" and names its workdir relative to it.
    """
    folder = tmp_path_factory.mktemp("short")
    (folder / "here").mkdir()
    data_dir = Path(own_text[-1].partition("=")[2]) / "data"
    flags = [*own_text, *SHORT, f"--data_dir={data_dir}", "--compilation_cache=off"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "here")
        out = succeed("text", *flags, "--workdir=../run")
    return out, folder


@pytest.fixture
def resumable(short_run, own_text, tmp_path, monkeypatch):
    """A copy of the run in a directory of its own, while another directory is the current one."""
    _, folder = short_run
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    yield tmp_path / "run"
    assert list((tmp_path / "there").iterdir()) == [], "nothing is written where it was started"


def test_a_finished_run_prints_the_commands_that_come_next(short_run):
    out, folder = short_run
    workdir = folder / "run"
    assert f"python -m experiments.text --mode=generate --workdir={workdir}\n" in out
    assert f"python -m experiments.report {workdir}\n" in out
    assert list((folder / "here").iterdir()) == [], "nothing is written where it was started"


def test_the_workdir_is_enough_to_resume_in_another_directory(resumable):
    out = succeed("text", f"--workdir={resumable}")
    assert re.search(r"(?m)^finished +already", out)


def test_a_run_resumes_with_its_recorded_settings_and_more_steps(resumable):
    workdir = f"--workdir={resumable}"
    recorded = read_json(resumable / "config.json")

    same_settings = ["--model.n_layer=1", "--model.d_model=16", "--model.n_head=2"]
    out = succeed("text", workdir, *same_settings, "--train.steps=4", "--train.log_every=4")

    assert [note for note in notes_in(out) if note.startswith("--")] == [
        "--train.steps was 2 and is now 4",
        "--train.log_every was 2 and is now 4",
    ]
    changed = {"train.steps": 4, "train.log_every": 4}
    expected = recorded | {"config": recorded["config"] | changed}
    assert read_json(resumable / "config.json") == expected
    results = read_json(resumable / "results.json")
    assert results["changes"] == [{"step": 2, "name": "train.steps", "old": 2, "new": 4}]

    err = fail("text", workdir, "--train.steps=2", "--model.d_model=8")
    assert "--model.d_model was 16 and is now 8" in err
    assert "fewer than the 4 " in err


def test_a_setting_of_training_has_no_effect_on_evaluation(resumable):
    flags = ["--train.mem_len=7", "--eval.mem_len=8", "--train.steps=2"]
    out = succeed("text", f"--workdir={resumable}", "--mode=eval", *flags)
    assert notes_in(out) == ["no effect with --mode=eval: --train.mem_len"]


def test_minutes_set_the_steps_at_the_first_start_alone(own_text, tmp_path, monkeypatch):
    """They win over a flagfile's steps, warm-up and pre-norm.

    The same command finds the steps in the record when it is started again.
    """
    asked = []

    def steps_in(seconds, *_):
        """Notes the time. A second call would find more steps."""
        asked.append(seconds)
        return FittingSteps(
            steps=MINUTES_STEPS * len(asked),
            update_seconds=0.1,
            advised_steps=30,
            advised_minutes=7,
            compilation=None,
        )

    monkeypatch.setattr(plans, "steps_in", steps_in)
    lines = [*own_text, *SIMPLE_MODEL, "--optimizer.warmup_steps=30", f"--{LAYER_NORM}=pre"]
    (tmp_path / "mine.flags").write_text("\n".join(lines))
    flags = [
        f"--flagfile={tmp_path / 'mine.flags'}",
        f"--workdir={tmp_path / 'run'}",
        "--minutes=0.5",
    ]

    succeed("text", *flags)
    recorded = read_json(tmp_path / "run" / "config.json")
    assert recorded["config"]["train.steps"] == MINUTES_STEPS
    # A tenth of the steps, which are too few for the flagfile's pre-norm.
    assert recorded["config"]["optimizer.warmup_steps"] == 2
    assert recorded["config"][LAYER_NORM] == "post"

    out = succeed("text", *flags)
    assert re.search(r"(?m)^finished +already", out)
    assert asked == [30], "seconds, asked for once"
    assert read_json(tmp_path / "run" / "config.json") == recorded

    err = fail("text", *flags, "--train.steps=40")
    assert "--minutes" in err
    assert "--train.steps" in err
    err = fail("text", *flags, f"--{LAYER_NORM}=pre")
    assert f"--{LAYER_NORM} was post and is now pre" in err


def fit_steps(monkeypatch, config, *, steps, places):
    """Fits a run into a minute, which is enough for a number of steps.

    `places` says where settings were written, by name. Returns the config, whether the step that
    was timed is used, and the notes.
    """
    timed: Any = object()
    fitting = FittingSteps(
        steps=steps, update_seconds=0.1, advised_steps=30, advised_minutes=7, compilation=timed
    )
    monkeypatch.setattr(plans, "steps_in", lambda *_: fitting)
    new_run: Any = types.SimpleNamespace(is_new=True, notes=[])
    job: Any = types.SimpleNamespace(places=places)
    corpus: Any = None  # Only `steps_in` reads it.
    fitted, compiled = plans.TimedPlan(minutes=1).fit_steps(config, corpus, job, new_run)
    return fitted, compiled is timed, new_run.notes


@pytest.mark.parametrize(
    ("steps", "places", "changes", "expected"),
    [
        pytest.param(plans.PRE_NORM_STEPS - 10, {}, {}, NormPlace.POST, id="few steps"),
        pytest.param(plans.PRE_NORM_STEPS, {}, {}, NormPlace.PRE, id="enough steps"),
        pytest.param(
            20, {LAYER_NORM: "mine.flags, line 1: "}, {}, NormPlace.POST, id="set by a flagfile"
        ),
        pytest.param(20, {LAYER_NORM: ""}, {}, NormPlace.PRE, id="typed"),
        pytest.param(20, {}, {"init_from": "/runs/base"}, NormPlace.PRE, id="pretrained weights"),
        pytest.param(20, {}, {"model.network": Network.LSTM}, NormPlace.PRE, id="an LSTM"),
    ],
)
def test_minutes_for_few_steps_choose_post_norm(steps, places, changes, expected, monkeypatch):
    # The preset has pre-norm.
    config = config_tree.replace(preset("own_bytes"), changes)
    fitted, uses_timed_step, notes = fit_steps(monkeypatch, config, steps=steps, places=places)

    assert fitted.model.layer_norm == expected
    assert fitted.train.steps == steps
    # If the place changes, the step that was timed is another program.
    assert uses_timed_step == (expected is NormPlace.PRE)
    is_noted = any(note.startswith(f"{LAYER_NORM} is post") for note in notes)
    assert is_noted == (expected is NormPlace.POST)


def test_minutes_never_replace_post_norm(monkeypatch):
    """The paper's place stays, however many steps fit."""
    fitted, uses_timed_step, notes = fit_steps(
        monkeypatch, preset("small"), steps=100_000, places={}
    )
    assert uses_timed_step
    assert fitted.model.layer_norm is NormPlace.POST
    assert len(notes) == 1, "only the number of steps"


@pytest.mark.full
def test_another_text_is_scored_in_place_of_the_runs_own(undisturbed, tmp_path, monkeypatch):
    """The text is three lists of files instead of one file.

    Its token ids are written to another directory than the run's, which is only read.
    """
    other = tmp_path / "other.txt"
    other.write_text("four three two one " * 50)
    flags = [f"--data.train={other}", f"--data.valid={other}", f"--data.test={other}"]
    trained_on = read_json(undisturbed / "config.json")["text"]
    recorded = Path(trained_on["cache_dir"]) / "tokens"
    before = sorted(recorded.iterdir())
    evaluate = ["--mode=eval", f"--workdir={undisturbed}"]

    out = succeed("enwik8", *evaluate, *flags, f"--cache_dir={tmp_path}")

    assert re.search(r"(?m)^corpus +text\b.*\benwik8\)$", out), (
        "the run belongs to another corpus's command"
    )
    assert trained_on["description"] in out, "the run's own text is named"
    assert "(949 tokens)" in out, "of the other text's 950 bytes, all except the first are scored"
    assert sorted(recorded.iterdir()) == before
    assert len(list((tmp_path / "tokens").glob("text-*"))) == 1

    monkeypatch.chdir(tmp_path)
    succeed("enwik8", *evaluate)
    assert not (tmp_path / "data").exists(), "the run's own ids are read where they are"


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "flags", "file"),
    [
        ("attention", ["--out=OUT"], "OUT/attention.md"),
        ("continuation", ["--generate.length=5", "--context=40"], "WORKDIR/continuation.md"),
        ("context_length", ["--lengths=32,8", "--split=test"], "WORKDIR/context_length.csv"),
    ],
    ids=["attention", "continuation", "context_length"],
)
def test_a_trained_run_is_studied_without_a_flagfile(undisturbed, tmp_path, program, flags, file):
    flags = [flag.replace("OUT", str(tmp_path)) for flag in flags]
    path = Path(file.replace("OUT", str(tmp_path)).replace("WORKDIR", str(undisturbed)))

    out = succeed(f"paper.{program}", f"--workdir={undisturbed}", *flags)

    assert str(path.parent) in out
    assert path.exists()


@pytest.mark.full
def test_trained_runs_are_compared_by_their_context_lengths(undisturbed, tmp_path):
    flags = [
        f"--workdirs={undisturbed},{undisturbed}",
        "--names=ours,again",
        f"--out={tmp_path / 'recl'}",
        "--lengths=4,12,4",
        "--stride=200",
    ]
    out = succeed("paper.recl", *flags)
    assert "| again | " in out
    assert (tmp_path / "recl" / "recl.json").exists()


@pytest.mark.full
def test_an_ensemble_is_trained_a_member_scored_and_split_off(own_text, tmp_path):
    ensemble = tmp_path / "all"
    name = "seed=2+learning_rate=0.002"
    flags = [
        *own_text,
        *SHORT,
        "--data.corpus=text",
        "--ensemble_member=seed=1",
        "--ensemble_member=seed=2 optimizer.learning_rate=0.002",
    ]
    succeed("ensemble", *flags, f"--workdir={ensemble}")

    # A resumed run takes the members from its record.
    succeed("ensemble", f"--workdir={ensemble}")
    assert read_json(ensemble / "results.json")["members"].keys() == {"seed=1", name}
    assert f"| {name} | " in succeed("report", str(ensemble))

    member = [f"--workdir={ensemble}", f"--ensemble_member={name}"]
    succeed("text", "--mode=eval", *member)
    assert (ensemble / "members" / name / "evaluation.json").exists()
    succeed("ensemble", "--mode=split", *member, f"--to={tmp_path / 'own'}")
    assert (tmp_path / "own" / "results.json").exists()


# Commands, their exit codes, and words of the error. WORK is an empty directory.
MISTAKES = {
    "no member to split off": (
        "ensemble --workdir=WORK --mode=split",
        1,
        ["--ensemble_member"],
    ),
    "an ensemble of a file that may belong to any corpus": (
        "ensemble --workdir=WORK/new --data.file=WORK/book.txt --ensemble_member=seed=1",
        1,
        ["--data.corpus=text"],
    ),
    "directories without runs": (
        "paper.recl --workdirs=WORK,WORK/b --out=WORK",
        1,
        ["WORK", "config.json"],
    ),
    # The settings are checked before the text, which does not exist.
    "an ablation of an LSTM": (
        "paper.ablation --out=WORK --data.file=WORK/none --model.network=lstm",
        1,
        ["model.network"],
    ),
    "a corpus that is not downloaded": (
        "enwik8 --workdir=WORK --data_dir=WORK",
        1,
        ["enwik8.zip", "--data.file"],
    ),
    "another corpus's flagfile": (
        "enwik8 --workdir=WORK --flagfile=wt103_base",
        1,
        ["data.corpus", "experiments.wikitext103"],
    ),
    "a missing text": ("text --data.file=WORK/none --workdir=WORK", 1, ["WORK/none"]),
    "a word instead of a flag": ("text --workdir=WORK word", 2, ["'word'"]),
    "nothing to convert": ("convert --to=WORK/new", 1, ["--from is required"]),
    "no model": ("text --workdir=WORK --mode=generate", 1, ["WORK", "config.json"]),
}


@pytest.mark.parametrize(("command", "code", "words"), MISTAKES.values(), ids=MISTAKES)
def test_first_mistakes_are_answered_in_one_line(tmp_path, command, code, words):
    program, *flags = command.replace("WORK", str(tmp_path)).split()

    err = fail(program, *flags, code=code)

    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1, err
    for word in words:
        as_a_word = rf"(?<!\w){re.escape(word.replace('WORK', str(tmp_path)))}(?!\w)"
        assert re.search(as_a_word, err), f"{word} is not in: {err}"


def test_a_compressed_text_is_trained_on_if_bytes_are_asked_for_by_name(tmp_path):
    packed = tmp_path / "book.txt.gz"
    packed.write_bytes(gzip.compress(np.random.default_rng(0).bytes(3000)))
    flags = [
        *programs.TINY,
        *SHORT,
        f"--data.file={packed}",
        f"--cache_dir={tmp_path}",
        f"--workdir={tmp_path / 'run'}",
    ]
    for tokenizer in ([], ["--tokenizer=word"]):
        err = fail("text", *flags, *tokenizer)
        assert "gzip" in err
        assert "--tokenizer=byte" in err
        assert not (tmp_path / "run").exists()

    succeed("text", *flags, "--tokenizer=byte")
    # From then on the run's record says that its tokens are bytes.
    succeed("text", *flags)


def test_a_midi_file_is_an_error_that_names_the_page_about_music(tmp_path):
    path = tmp_path / "song.mid"
    path.write_bytes(b"MThd" + np.random.default_rng(0).bytes(3000))
    for tokenizer in ([], ["--tokenizer=word"], ["--tokenizer=id"]):
        err = fail(
            "text",
            *programs.TINY,
            *SHORT,
            f"--data.file={path}",
            f"--cache_dir={tmp_path}",
            f"--workdir={tmp_path / 'run'}",
            *tokenizer,
        )
        assert "MIDI" in err
        assert "docs/music.md" in err
        assert not (tmp_path / "run").exists()


def test_json_lines_are_trained_on_and_scored(tmp_path):
    path = tmp_path / "d.jsonl"
    documents = [{"text": f"one two {number}\nthree"} for number in range(200)]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    flags = [
        *programs.TINY,
        *SHORT,
        f"--data.file={path}",
        f"--cache_dir={tmp_path}",
        f"--workdir={tmp_path / 'run'}",
    ]
    succeed("text", *flags, "--data.json_field=text")
    # 3,290 bytes of 200 texts, and the end of each.
    text = read_json(tmp_path / "run" / "results.json")["text"]
    assert text.startswith("own text, 3,490 bytes")

    # Documents are read as in training, from the same field. Of 7 bytes the first has no score. An
    # empty line is not a document, and the last document has no such field.
    path.write_text('{"text": "one\\ntwo"}\n\n{"text": ""}\n{"no": 1}\n')
    score = ["--mode=score", f"--workdir={tmp_path / 'run'}", f"--input={path}"]
    code, out, err = run("text", *score)
    assert [record["tokens"] for record in json_lines(out)] == [6, 0]
    assert code == 1
    assert f"line 4 of {path}" in err

    # Without a field, each line is a document, also an empty one.
    out = succeed("text", *score, "--data.json_field=none")
    assert [record["tokens"] for record in json_lines(out)] == [19, 0, 11, 8]


def test_training_without_a_workdir_names_one_after_the_flagfile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "none"
    for flags, name in ((["--flagfile=small"], "small"), ([], "text")):
        code, out, err = run("text", *flags, f"--data.file={missing}")
        assert code == 1
        assert f"workdir   {tmp_path / 'runs' / name} (" in out
        assert str(missing) in err

    assert "--workdir" in fail("text", "--mode=eval")
    assert not (tmp_path / "runs").exists()


# Modes that use a trained model: from directories that may only be read, from portable checkpoints,
# and with many prompts


TEXT = b"the cat sat on a mat\n" * 60


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """(workdir, flags of its text) of a run with drawn parameters on words."""
    folder = tmp_path_factory.mktemp("run")
    changes = {
        "model__n_layer": 1,
        "data__tokenizer__kind": "word",
        "generate": GenerateConfig(length=12, top_k=None),
    }
    config, corpus = drawn_run.on_text(folder, TEXT, **changes)
    drawn_run.make(folder / "run", config, corpus)
    return folder / "run", (f"--cache_dir={folder}", f"--data.file={folder / 'text'}")


@pytest.fixture(scope="module")
def portable(drawn, tmp_path_factory):
    """The same model as a portable checkpoint."""
    folder = tmp_path_factory.mktemp("portable")
    convert(drawn[0], folder / "model", log=lambda line: None)
    return folder / "model"


def use(mode, workdir, *flags):
    """Returns the output of a mode of a trained model, which must succeed."""
    return succeed("text", f"--mode={mode}", f"--workdir={workdir}", *flags)


def fail_to_use(mode, workdir, *flags):
    """Returns the error of a mode of a trained model, which must fail."""
    return fail("text", f"--mode={mode}", f"--workdir={workdir}", *flags)


def content(folder):
    """Returns the bytes of all files in a directory, by path."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


@pytest.fixture(params=["run", "portable"])
def read_only(request, drawn, portable, monkeypatch):
    """A run or a portable checkpoint that may only be read.

    Permissions would not stop root, so writing itself fails here.
    """
    folder = portable
    if request.param == "run":
        folder, _ = drawn
    write_to_disk = Path.write_bytes

    def write_bytes(path, data):
        if path.is_relative_to(folder):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return write_to_disk(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    return folder


def test_a_model_that_may_only_be_read_is_evaluated_and_generates(drawn, read_only, tmp_path):
    _, of_text = drawn
    before = content(read_only)

    evaluated = use("eval", read_only, *of_text)
    assert "Read-only file system" in evaluated
    assert "--out" in evaluated
    assert "test ppl" in evaluated

    generated = use("generate", read_only, "--generate.prompt=the cat")
    assert "Read-only file system" in generated
    assert "\nthe cat " in generated
    assert "sample-seed0" not in generated

    # Files are all that the mode score makes, so it needs a place for them.
    assert "--out" in fail_to_use("score", read_only, *of_text)
    assert content(read_only) == before


def test_out_receives_the_files_of_a_model_that_may_only_be_read(drawn, read_only, tmp_path):
    _, of_text = drawn
    before = content(read_only)
    out = tmp_path / "out"

    assert str(out) in use("eval", read_only, *of_text, f"--out={out}")
    assert str(out) in use("generate", read_only, f"--out={out}")
    assert str(out) in use("score", read_only, *of_text, f"--out={out}")

    assert content(out).keys() == {
        "evaluation.json",
        "sample-seed0.txt",
        "scores-valid.tsv",
        "scores-test.tsv",
    }
    assert content(read_only) == before


def test_a_portable_folder_names_no_text_and_cannot_be_trained_in(drawn, portable):
    _, of_text = drawn
    assert "--data.file" in fail_to_use("eval", portable)
    assert "tokenizer" in fail_to_use("eval", portable, *of_text, "--tokenizer=byte")
    assert "--init_from" in fail_to_use("train", portable, *of_text)


def test_an_out_that_cannot_be_written_to_is_refused_and_training_has_none(drawn, tmp_path):
    workdir, of_text = drawn
    (tmp_path / "file").write_text("")
    err = fail_to_use("generate", workdir, f"--out={tmp_path / 'file'}")
    assert str(tmp_path / "file") in err

    err = fail_to_use("train", tmp_path / "new", *of_text, f"--out={tmp_path / 'out'}")
    assert "--out" in err
    assert not (tmp_path / "new").exists()


def test_prompts_of_a_file_become_records_on_the_output(drawn, tmp_path):
    workdir, _ = drawn
    prompts = tmp_path / "prompts.txt"
    # A byte order mark, and line ends of Windows and of Unix.
    prompts.write_bytes(b"\xef\xbb\xbfthe cat\r\n\nsat on a\n")
    flags = [f"--input={prompts}", "--generate.samples=2", "--eval.batch_size=4"]

    records = json_lines(use("generate", workdir, *flags))
    places = [(record["index"], record["sample"], record["prompt"]) for record in records]
    assert places == [
        (0, 0, "the cat"),
        (0, 1, "the cat"),
        (1, 0, ""),
        (1, 1, ""),
        (2, 0, "sat on a"),
        (2, 1, "sat on a"),
    ]

    # The first sample is the text that the prompt alone gets. Its length is 12 words.
    text = records[0]["text"]
    assert len(text.split()) > 5
    generated = use("generate", workdir, "--generate.prompt=the cat", f"--out={tmp_path}")
    assert f"\nthe cat {text}" in generated

    assert "--input" in fail_to_use("eval", workdir, *flags)
    assert "--out" in fail_to_use("generate", workdir, *flags, f"--out={tmp_path}")
    prompts.write_bytes(b"the\ncaf\xe9\n")
    assert re.search(r"line 2 of .*prompts\.txt.*0xe9", fail_to_use("generate", workdir, *flags))


def test_a_stop_ends_a_file_of_documents_after_a_complete_record(drawn, tmp_path, monkeypatch):
    # The request is made in an event of this test's own, because none can be taken back.
    monkeypatch.setattr(stop, "_stop_requested", threading.Event())
    stop.request_stop("a test")
    (tmp_path / "in.txt").write_text("the cat\n" * 9)
    flags = ["--mode=score", f"--workdir={drawn[0]}", f"--input={tmp_path / 'in.txt'}"]

    code, out, err = run("text", *flags)

    # 128 + SIGTERM, for which the request counts.
    assert code == 143, err
    assert "stopped" in err
    # The output is one record, of the first document.
    assert json.loads(out)["index"] == 0
