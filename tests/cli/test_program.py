"""Tests `main` by programs of the tests: plans, configs, exit codes, and the flags of configs."""

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import threading
from unittest import mock

import jax
import pytest

from experiments import text
from support import ON_PATH, ROOT, drawn_run, programs, runs
from support.encoded_text import data_config, own_text
from txl_jax import cli
from txl_jax.cli import app, flag_tree, other_hosts, precedence, setting, train_command
from txl_jax.cli.app import exit_code_for, guarded
from txl_jax.config import (
    COMPAT_PRESETS,
    CorpusName,
    ExperimentConfig,
    LineMark,
    ModelConfig,
    NormPlace,
    Order,
    Tokenizer,
    config_tree,
)
from txl_jax.config.config_tree import require
from txl_jax.config.experiment import apply_preset, evaluation_preset_names, preset, preset_names
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import read_corpus
from txl_jax.data.published import default_data
from txl_jax.errors import CheckpointError, RemoteProcessError, UserError, describe_system_error
from txl_jax.runs.run import Run, TextInfo, recorded_folders
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runtime import distributed, stop

# The error of a collective whose other process has ended.
GLOO = (
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection "
    "closed by peer"
)
SEVERAL = other_hosts.Processes(2, "a test", {})  # Two processes, without arguments for JAX.


@dataclasses.dataclass(frozen=True)
class Plan(cli.TextPlan):
    """The plan of the tests' programs: a list, a path that is required, and a repeated flag."""

    lengths: tuple[int, ...] = setting((1, 2), "Lengths.")
    from_: str = setting("", "Folder.", path=True, required=True)
    member: tuple[str, ...] = setting((), "Members.", repeated=True)

    def validate(self):
        require(self.lengths, "no length was given; give one")


@pytest.fixture
def start(monkeypatch):
    """Runs a program of the tests, by default one that does nothing, with a command line.

    Returns its exit code, and the plan and the job that it was called with, or None for both.
    """

    def start(*words, run=lambda plan, job: None, plan=Plan, **options):
        calls = []

        def noted_run(plan, job):
            calls.append((plan, job))
            return run(plan, job)

        monkeypatch.setattr(sys, "argv", ["program", *words])
        with programs.own_flags(), pytest.raises(SystemExit) as ended:
            cli.main(noted_run, plan, **options)
        if not calls:
            return ended.value.code, None
        [call] = calls
        return ended.value.code, call

    return start


def test_a_plan_has_absolute_paths_and_the_job_what_was_typed(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.flags").write_text("--lengths=3,4\n")
    words = ["--from=here", "--member=a=1,2", "--member=b", "--flagfile=mine.flags", "word"]

    code, (plan, job) = start(*words, takes_words=True, config=ExperimentConfig())

    assert code == 0
    assert plan.lengths == (3, 4)
    assert plan.from_ == str(tmp_path / "here")
    # A flag that is repeated is not split at commas, which lists are.
    assert plan.member == ("a=1,2", "b")
    assert job.words == ["word"]
    assert job.flagfile == "mine"
    # Errors begin with the place of a setting, which is empty for a typed one.
    assert job.places == {"from": "", "member": "", "lengths": "mine.flags, line 1: "}


def test_a_plan_is_checked_before_anything_is_run(start):
    code, call = start("--from=x", "--lengths=")
    assert code == 1
    assert call is None


def test_the_config_is_the_flags_over_the_defaults(start):
    defaults = config_tree.replace(ExperimentConfig(), {"eval.mem_len": 7})
    configs = []

    def run(plan, job):
        configs.append(job.config())
        configs.append(job.config_of_flagfile("wt103_base"))

    code, _ = start("--from=x", "--model.n_layer=2", run=run, config=defaults)

    assert code == 0
    config, of_flagfile = configs
    assert config == config_tree.replace(defaults, {"model.n_layer": 2})
    # The typed flag wins over the flagfile's 16 layers. The other numbers are the flagfile's.
    assert of_flagfile.model.n_layer == 2
    assert of_flagfile.model.d_model == 410
    assert of_flagfile.eval.mem_len == 640


def test_a_corpus_brings_its_own_tokens(start):
    configs = []

    def run(plan, job):
        configs.append(job.config())

    words = ["--from=x", "--data.corpus=ptb"]
    code, _ = start(*words, run=run, config=ExperimentConfig(), by_corpus=True)

    assert code == 0
    [config] = configs
    assert config.data.corpus is CorpusName.PTB
    assert config.data.tokenizer.kind is Tokenizer.WORD


def test_a_study_prints_its_notes(start, capsys):
    def run(plan, job):
        job.config()

    words = ["--from=x", "--flagfile=small", "--train.steps=50"]
    code, _ = start(*words, run=run, config=ExperimentConfig())

    assert code == 0
    # A tenth of the 50 steps.
    assert "optimizer.warmup_steps is 5 instead of 100" in capsys.readouterr().out


def test_processes_agree_on_the_plan_but_for_its_paths(start, monkeypatch):
    """This process joins the others before the settings are compared."""
    done = []
    monkeypatch.setattr(other_hosts, "announced", lambda environment: SEVERAL)
    monkeypatch.setattr(other_hosts, "join", done.append)
    monkeypatch.setattr(distributed, "assert_same_on_all", lambda facts, advice: done.append(facts))

    code, _ = start("--from=here", "--coordinator=a:1", hosts="join")

    assert code == 0
    assert done == [SEVERAL, {"--lengths": "1,2", "--member": ""}]


def test_a_program_of_one_host_refuses_others_and_one_of_each_host_does_not_ask(
    start, monkeypatch, capsys
):
    monkeypatch.setattr(other_hosts, "announced", lambda environment: SEVERAL)

    code, call = start("--from=here")
    assert code == 1
    assert call is None
    assert re.search(r"single process.*\b2 processes", capsys.readouterr().err)

    code, _ = start("--from=here", hosts="each")
    assert code == 0


def interrupt(plan, job):
    """Ends as a program does that was asked to stop."""
    with job.stop:
        stop.request_stop("a test")
        raise Interrupted("the middle")


def test_the_exit_code_is_the_programs(start, capsys):
    code, _ = start("--from=x", run=lambda plan, job: 7)
    assert code == 7
    assert "stopped" not in capsys.readouterr().out


def test_the_exit_code_after_a_stop_is_the_signals(start, monkeypatch, capsys):
    # The request is made in an event of this test's own, because none can be taken back.
    monkeypatch.setattr(stop, "_stop_requested", threading.Event())
    code, _ = start("--from=x", run=interrupt)
    # 128 + SIGTERM, for which a request without a signal counts.
    assert code == 143
    assert "stopped   on request in the middle, rerun the same command" in capsys.readouterr().out


@pytest.mark.full
def test_devices_that_jax_cannot_use_are_an_error():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench.device"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "JAX_PLATFORMS is cuda" in done.stderr
    assert done.stderr.count("\n") == 1


# Settings of a run in a workdir


@pytest.fixture
def config_in(start, tmp_path):
    """Returns the config and the notes of a command line of experiments.text, in a workdir.

    The workdir is new or recorded. If the command fails, returns its exit code and no notes.
    """

    def config_in(*words, defaults=text.DEFAULTS, folder="new"):
        results = []
        workdir = tmp_path / folder

        def run(plan, job):
            with Run.open(workdir) as opened:
                results.append((job.config(opened), opened.notes))

        words = [f"--data.file={tmp_path / 'text'}", *words]
        code, _ = start(*words, run=run, config=defaults, plan=train_command.TrainPlan)
        if code:
            return code, []
        [(config, notes)] = results

        # A sweep checks the settings of its runs before they start, and must come to the same.
        if config.init_from is None:
            recorded = None
            if (workdir / "config.json").exists():
                recorded = Run.read(workdir).config
            in_a_sweep = precedence.config_of_words(defaults, ["text", *words], recorded=recorded)
            assert in_a_sweep == config
        return config, notes

    return config_in


def own_bytes():
    """Returns a text of bytes, to be recorded in a run."""
    return TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes())


SIZES = {"n_layer": 1, "d_model": 12, "n_head": 3, "d_head": 5, "d_inner": 14, "untie_r": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory, config) of a run on words with the numerics of another implementation.

    The directory has the text, and the run in "run".
    """
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text("one two three\n" * 200)
    config = ExperimentConfig(
        model=ModelConfig(**SIZES), data=own_text(file=str(folder / "text"), kind=Tokenizer.WORD)
    )
    config = apply_preset(config_tree.replace(config, {"model.dropout.rate": 0.3}), "hf")
    drawn_run.make(folder / "run", config, read_corpus(config.data, "nowhere", str(folder)))
    return folder, config


@pytest.fixture
def warm_start(trained, config_in, capsys):
    """Returns the config and the notes of a command line with --init_from.

    The error of a command that fails is raised.
    """
    folder, _ = trained

    def warm_start(*words, **options):
        files = [f"--data.file={folder / 'text'}", f"--init_from={folder / 'run'}"]
        config, notes = config_in(*files, *words, **options)
        if config == 1:
            raise UserError(capsys.readouterr().err)
        return config, notes

    return warm_start


def sizes_of(config):
    """Returns the model's sizes in a config, by the names in `SIZES`."""
    return {name: getattr(config.model, name) for name in SIZES}


@pytest.fixture
def record(trained, tmp_path):
    """Records a config as the run in the workdir."""
    folder, trained_config = trained

    def record(config):
        corpus = read_corpus(trained_config.data, "nowhere", str(folder))
        runs.record(tmp_path / "new", config, corpus)

    return record


def test_sizes_and_compatibility_come_from_the_trained_model(trained, warm_start):
    """The program and the flags decide about dropout, tokens, lengths and the optimizer."""
    _, trained_config = trained
    config, _ = warm_start("--train.mem_len=30")
    assert sizes_of(config) == SIZES
    assert config.model.compat == trained_config.model.compat
    assert config.model.compat != ExperimentConfig().model.compat

    # A text without sizes takes the settings of the small model, with a batch of 16.
    assert config.model.dropout == preset("small").model.dropout
    assert config.train.batch_size == 16
    assert config.data.tokenizer.kind is Tokenizer.BYTE
    assert config.train.mem_len == 30


def test_flags_of_the_same_model_may_be_given_and_others_are_named(warm_start):
    config, _ = warm_start("--model.n_layer=1")
    assert config.model.n_layer == 1
    message = r"model\.n_layer is 4 instead of 1, model\.d_head is 6 instead of 5\. Omit"
    with pytest.raises(UserError, match=message):
        warm_start("--model.n_layer=4", "--model.d_head=6")

    config, _ = warm_start("--compat=tf")
    epsilon = COMPAT_PRESETS["tf"]["model.compat.layer_norm_eps"]
    assert config.model.compat.layer_norm_eps == epsilon


def test_sizes_of_a_flagfile_yield_to_the_trained_model_and_nothing_else_does(warm_start, record):
    """They do so at the first start and at a later one."""
    first, [note] = warm_start("--flagfile=small")
    assert sizes_of(first) == SIZES
    assert first.train == preset("small").train
    assert first.optimizer == preset("small").optimizer
    for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner"):
        assert f"model.{name} is" in note, name

    record(first)
    assert warm_start("--flagfile=small") == (first, [note])


def test_typed_sizes_of_another_model_are_refused(warm_start, tmp_path):
    """They are refused behind a flagfile as well, whose own settings of the model yield."""
    with pytest.raises(UserError, match=r"model\.n_layer is 4 instead of 1\. Omit"):
        warm_start("--flagfile=small", "--model.n_layer=4")

    flagfile = tmp_path / "mine.flags"
    flagfile.write_text("--compat=ours\n--model.layer_norm=pre\n--model.cutoffs=2\n")
    config, _ = warm_start(f"--flagfile={flagfile}")
    # The trained model's settings.
    assert config.model.layer_norm is NormPlace.POST
    assert config.model.cutoffs == ()
    assert not config.model.compat.final_norm
    with pytest.raises(UserError, match=r"model\.layer_norm is pre instead of post"):
        warm_start(f"--flagfile={flagfile}", "--model.layer_norm=pre")


def test_a_kept_vocabulary_brings_its_tokenizer(warm_start):
    config, _ = warm_start("--init_vocabulary=kept")
    assert config.data.tokenizer.kind is Tokenizer.WORD
    with pytest.raises(UserError, match="vocab_file"):
        warm_start("--init_vocabulary=kept", "--data.tokenizer.vocab_file=words")
    with pytest.raises(UserError, match="Set --init_from"):
        warm_start("--init_vocabulary=kept", "--init_from=none")


def test_a_second_start_needs_the_workdir_alone(trained, warm_start, record):
    """The directory of the weights may be gone, and flags may be omitted.

    The record takes the place of the defaults.
    """
    folder, _ = trained
    first, _ = warm_start("--train.mem_len=30")
    record(first)
    (folder / "run").rename(folder / "gone")
    try:
        config, _ = warm_start()
        assert config == first
        config, _ = warm_start("--train.log_every=10")
        assert config.train.log_every == 10

        message = r"init_from is .*run, whose weights cannot be used: .* contains no run"
        with pytest.raises(UserError, match=message):
            warm_start(folder="another")
    finally:
        (folder / "gone").rename(folder / "run")


def test_own_text_without_sizes_takes_the_small_model_and_says_so(config_in, tmp_path):
    small = config_tree.replace(preset("small"), {"data.file": str(tmp_path / "text")})
    config, [note] = config_in()
    assert config == small
    assert "--flagfile=small" in note

    config, [note] = config_in("--train.batch_size=3", "--compat=tf")
    assert config.train == dataclasses.replace(small.train, batch_size=3)
    assert config.model.n_layer == 4
    assert config == apply_preset(config, "tf")


@pytest.mark.parametrize("word", ["--model.n_layer=3", "--model.dropout.rate=0"])
def test_own_text_with_a_setting_of_the_model_takes_the_papers_and_says_so(config_in, word):
    config, notes = config_in(word)
    assert config.model.d_model == ExperimentConfig().model.d_model
    assert config.train.steps == 400_000, "the paper's"
    assert len(notes) == 1, "the paper's batch is named"


def test_own_text_with_a_flagfile_takes_the_papers_model(config_in, tmp_path):
    (tmp_path / "mine.flags").write_text("--train.batch_size=3\n")
    config, notes = config_in(f"--flagfile={tmp_path / 'mine.flags'}")
    assert config.model.d_model == ExperimentConfig().model.d_model
    assert config.train.steps == 400_000
    assert notes == [], "the batch was set"


@pytest.mark.parametrize("name", [CorpusName.ENWIK8, CorpusName.PTB])
def test_a_published_corpus_keeps_the_papers_model(config_in, name):
    defaults = ExperimentConfig(data=default_data(name))
    assert config_in("--data.file=none", defaults=defaults) == (defaults, [])


def test_a_run_that_began_with_the_papers_sizes_keeps_them(config_in, tmp_path):
    paper = ExperimentConfig(data=own_text(file=str(tmp_path / "text")))
    runs.record(tmp_path / "new", paper, own_bytes())
    assert config_in() == (paper, [])


@pytest.mark.parametrize("words", [["--flagfile=small"], []], ids=["a flagfile", "no flagfile"])
def test_a_warm_up_that_was_not_typed_becomes_a_tenth_of_the_steps(config_in, words):
    config, notes = config_in(*words, "--train.steps=100")
    assert config.optimizer.warmup_steps == 10
    assert "warm-up" in notes[-1]
    assert "is 10 instead of 100" in notes[-1]

    # More steps than the default warm-up of 100 need no change.
    config, _ = config_in(*words, "--train.steps=105")
    assert config.optimizer.warmup_steps == 100


def test_a_warm_up_that_was_typed_must_be_shorter_than_the_training(config_in):
    code, _ = config_in("--flagfile=small", "--optimizer.warmup_steps=100", "--train.steps=100")
    assert code == 1


def test_a_run_that_gets_more_steps_keeps_its_warm_up(config_in, tmp_path):
    """Its record has 10, a tenth of its first steps, and the flagfile has 100."""
    config, _ = config_in("--train.steps=100")
    runs.record(tmp_path / "new", config, own_bytes())
    for steps in (100, 200, 800):
        longer, notes = config_in("--flagfile=small", f"--train.steps={steps}")
        assert longer == config_tree.replace(config, {"train.steps": steps}), steps
        assert len(notes) == 1, steps

    # A typed one wins over the record.
    config, _ = config_in("--optimizer.warmup_steps=7")
    assert config.optimizer.warmup_steps == 7


def test_a_note_about_a_recorded_warm_up_reads_forwards(config_in, tmp_path):
    """It names the recorded number, which is kept, before the flagfile's."""
    recorded = config_tree.replace(
        preset("small"), {"optimizer.warmup_steps": 3, "data.file": str(tmp_path / "text")}
    )
    runs.record(
        tmp_path / "new",
        recorded,
        own_bytes(),
    )
    config, [note] = config_in("--flagfile=small")
    assert config.optimizer.warmup_steps == 3
    assert note == "the recorded run's warm-up is kept: optimizer.warmup_steps is 3 instead of 100"


def test_an_error_names_where_settings_come_from_that_nobody_typed(config_in, tmp_path, capsys):
    (tmp_path / "mine.flags").write_text("--train.segments_per_call=5\n--train.steps=100\n")
    flagfile = f"--flagfile={tmp_path / 'mine.flags'}"

    def error_of(*words):
        code, _ = config_in(*words)
        assert code == 1
        return capsys.readouterr().err

    err = error_of(flagfile, "--train.steps=1")
    assert f"(train.segments_per_call comes from {tmp_path / 'mine.flags'}, line 1)" in err
    err = error_of("--optimizer.weight_decay=0.1", "--model.n_layer=1")
    assert "(optimizer.name comes from the defaults)" in err

    # The settings that do not go together are all typed.
    typed = ["--train.segments_per_call=5", "--train.steps=1", "--optimizer.warmup_steps=0"]
    assert "comes from" not in error_of(flagfile, *typed)
    typed = ["--optimizer.weight_decay=0.1", "--optimizer.name=adam", "--model.n_layer=1"]
    assert "comes from" not in error_of(*typed)


@pytest.mark.parametrize(
    ("command", "unread"),
    [
        ("--mode=eval --train.mem_len=9 --eval.mem_len=9", ["train.mem_len"]),
        ("--mode=eval --generate.length=7", ["generate.length"]),
        ("--mode=score --seed=3 --per_token", ["seed", "per_token"]),
        ("--mode=score --input=in --per_token --data.order=sentences", ["data.order"]),
        ("--mode=generate --generate.length=3 --data.roll=rows", ["data.roll"]),
        ("--input_format=lines", ["input_format"]),
        # A value that the record has too, and the settings of a flagfile, are not noted.
        ("--mode=eval --train.steps=24 --flagfile=small", []),
        ("--train.mem_len=9 --generate.length=7", []),
    ],
)
def test_typed_flags_that_a_mode_does_not_read_are_named_once(start, capsys, command, unread):
    trained = config_tree.replace(ExperimentConfig(), {"train.steps": 24})

    def run(plan, job):
        """Notes what is unread as the command of a corpus does, without a run."""
        config = flag_tree.build(trained)
        recorded = trained
        if plan.mode == "train":
            recorded = config
        train_command._note_unread(plan, job, config, recorded)

    start(*command.split(), run=run, config=ExperimentConfig(), plan=train_command.TrainPlan)

    notes = re.findall(r"(?m)^note .*?:(.*)", capsys.readouterr().out)
    if not unread:
        assert notes == []
        return
    [note] = notes
    assert re.findall(r"--([\w.]+)(?!=)", note) == unread


def test_training_resumes_in_the_recorded_directories_and_other_modes_write_to_none_of_them(
    start, tmp_path, monkeypatch
):
    """On another machine they may not exist.

    A flag wins over the record. Compiled functions are not in them at all.
    """
    keep_compiled = mock.Mock()
    monkeypatch.setattr(app, "keep_compiled", keep_compiled)
    there = tmp_path / "there"
    prepared = there / "prepared"
    info = TextInfo(
        "text", "own text", "d" * 64, ByteVocabulary.all_bytes(), str(there), str(prepared)
    )
    runs.record(tmp_path / "run", ExperimentConfig(data=own_text(file="a")), info)
    monkeypatch.chdir(tmp_path)

    def folders(*words):
        """Returns the directories of data and of caches that a command uses."""
        keep_compiled.reset_mock()
        code, (plan, _) = start(
            f"--workdir={tmp_path / 'run'}", *words, plan=train_command.TrainPlan
        )
        assert code == 0
        keep_compiled.assert_called_once_with(None, by_default=True)
        return plan.data_dir, plan.cache_dir

    defaults = (str(tmp_path / "data"), None)
    assert folders() == defaults, "the recorded ones do not exist"

    prepared.mkdir(parents=True)
    assert folders() == (str(there), str(prepared))
    assert folders("--data_dir=data") == defaults
    assert folders("--cache_dir=x") == (str(there), str(tmp_path / "x"))

    assert folders("--mode=eval") == defaults
    assert folders("--mode=score") == defaults
    assert folders("--mode=generate") == defaults
    assert folders("--mode=score", "--input=a") == defaults

    # Directories of a record that cannot be read are not used.
    (tmp_path / "run" / "config.json").write_text("{")
    assert folders() == defaults


def test_a_relative_directory_in_a_record_is_not_used(tmp_path, monkeypatch):
    """Records have absolute ones. The current directory may differ from the run's."""
    (tmp_path / "cache").mkdir()
    monkeypatch.chdir(tmp_path)

    here = {"data_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "config.json").write_text(json.dumps({"text": here}))
    assert recorded_folders(tmp_path) == here

    relative = {"data_dir": ".", "cache_dir": "cache"}
    (tmp_path / "config.json").write_text(json.dumps({"text": relative}))
    assert recorded_folders(tmp_path) == {}


# Errors


def caused_by(error, cause):
    """Returns an error as it is raised from another one."""
    error.__cause__ = cause
    return error


# The error of JAX's coordination service about a process that did not come.
UNAVAILABLE = RuntimeError("UNAVAILABLE: barrier")


@pytest.fixture
def one_of_several_processes(monkeypatch):
    """Makes this process one of several.

    It neither talks to the others, nor waits until it is known which one is lost.
    """
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "is_multiprocess", lambda: False)
    monkeypatch.setattr(other_hosts, "SECONDS_TO_NAME", 0)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ValueError(GLOO), id="where an array is fetched"),
        pytest.param(jax.errors.JaxRuntimeError(GLOO), id="in a collective"),
        pytest.param(
            caused_by(CheckpointError("step 3 was not written"), UNAVAILABLE), id="at a barrier"
        ),
    ],
)
def test_a_lost_process_has_an_exit_code_of_its_own(request, capsys, error):
    assert not other_hosts.lost_another(error), "a process by itself has no other to lose"
    request.getfixturevalue("one_of_several_processes")

    # EX_TEMPFAIL: the same command may succeed.
    assert exit_code_for(error) == other_hosts.LOST == 75

    err = capsys.readouterr().err
    assert err.startswith("error: ")
    # The library's text is not all that is printed.
    assert err != f"error: {error}\n"


def error_known_to_all():
    """Returns an error that all processes have, so that none of them is lost."""
    error = RemoteProcessError("process 1: Connection reset by peer")
    error.known_to_all = True
    return error


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ConnectionResetError(104, "Connection reset by peer"), id="of a download"),
        pytest.param(
            caused_by(ConnectionError("they did not come together"), UNAVAILABLE), id="at the start"
        ),
        pytest.param(error_known_to_all(), id="known to all"),
    ],
)
def test_other_lost_connections_are_not_a_lost_process(request, capsys, error):
    assert not other_hosts.lost_another(error)
    request.getfixturevalue("one_of_several_processes")
    message = error
    if isinstance(error, ConnectionResetError):
        message = describe_system_error(error)

    assert exit_code_for(error) != other_hosts.LOST
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory allocating 213364827424 bytes."
            ),
            id="an accelerator",
        ),
        pytest.param(
            jax.errors.JaxRuntimeError(
                "INTERNAL: Error dispatching computation: Out of memory allocating 30720000000 "
                "bytes."
            ),
            id="a function on a CPU",
        ),
        # NumPy raises a class of its own, below MemoryError.
        pytest.param(MemoryError("Unable to allocate 30 GiB for an array"), id="NumPy"),
    ],
)
def test_out_of_memory_is_an_error_with_advice_on_each_device(capsys, error):
    assert exit_code_for(error) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: out of device memory (")
    assert "--train.batch_size" in err
    assert err.count("\n") == 1


def test_a_bug_in_xla_is_not_out_of_memory():
    assert exit_code_for(jax.errors.JaxRuntimeError("INTERNAL: a bug")) is None


@pytest.mark.full
def test_a_run_that_a_cpu_cannot_hold_ends_with_an_error(tmp_path):
    """The model's memory of 120 million tokens has 31 GB, and the process may have 24 GiB.

    Nothing is allocated, because the system refuses at once.
    """
    path = programs.write_words(tmp_path, 3_000)
    command = programs.command(
        "experiments.text",
        *programs.TINY,
        *programs.steps(2, every=2),
        "--train.mem_len=120000000",
        "--train.segments_per_call=1",
        f"--data.file={path}",
        f"--cache_dir={tmp_path}",
        f"--workdir={tmp_path / 'run'}",
    )
    ended = subprocess.run(
        # 24 GiB in KiB.
        ["bash", "-c", 'ulimit -v 25165824; exec "$@"', "bash", *command],
        cwd=ROOT,
        env=os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended
    assert ended.stderr.splitlines()[-1].startswith("error: out of device memory ("), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_process_lost_at_the_end_is_reported_unless_a_mistake_was(monkeypatch):
    """At the end processes wait for each other. A command that failed ends with its own code."""
    exits = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(other_hosts.os, "_exit", exits.append)
    monkeypatch.setattr(distributed, "run_on_all", mock.Mock(side_effect=ValueError(GLOO)))

    with pytest.raises(ValueError, match="Gloo"):
        other_hosts.leave(0, together=True)
    other_hosts.leave(1, together=True)
    assert exits == [1]


# An error of the system as Python raises it for a path.
READ_ONLY = OSError(errno.EROFS, "Read-only file system", "/mnt/report")


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (UserError("lengths is 0; give more"), "lengths is 0; give more"),
        (FileNotFoundError(2, "No such file", "a.txt"), "cannot use a.txt (No such file). "),
        (READ_ONLY, "cannot use /mnt/report (Read-only file system). Check the path"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "cannot use the disk (No space left on device). ",
        ),
        (OSError("a library's own sentence"), "a library's own sentence"),
    ],
)
def test_an_error_of_a_user_is_one_line(capsys, error, printed):
    with pytest.raises(SystemExit, match="1"), guarded():
        raise error
    line = capsys.readouterr().err
    assert line.startswith(f"error: {printed}")
    assert line.count("\n") == 1
    assert "Errno" not in line


def test_a_bug_keeps_its_traceback(capsys):
    with pytest.raises(ValueError, match="shapes"), guarded():
        raise ValueError("shapes differ")
    assert capsys.readouterr().err == ""


def test_errors_name_flags_by_the_short_names_that_the_command_has(start, capsys):
    """Longer names that only begin with the same words stay."""

    def fail(plan, job):
        raise UserError(
            "pass --data.tokenizer.kind=byte, not --data.tokenizer.kinds or --data.tokenizer.kind.x"
        )

    aliases = {"tokenizer": "data.tokenizer.kind"}
    code, _ = start("--from=x", run=fail, config=ExperimentConfig(), aliases=aliases)
    assert code == 1
    shown = "pass --tokenizer=byte, not --data.tokenizer.kinds or --data.tokenizer.kind.x"
    assert capsys.readouterr().err == f"error: {shown}\n"

    # Without aliases the names stay.
    code, _ = start("--from=x", run=fail, config=ExperimentConfig())
    assert code == 1
    assert "pass --data.tokenizer.kind=byte" in capsys.readouterr().err


# Flags that are made from the config tree, and how a command line becomes a config


def parsed(*words, base=None):
    """Returns the config of a command line, over a base or the defaults."""
    return programs.config_of(ExperimentConfig(), *words, base=base)


def test_a_setting_without_a_flag_stays_as_the_base_has_it():
    base = config_tree.replace(ExperimentConfig(), {"model.n_layer": 5, "model.n_head": 2})
    config = parsed("--model.n_layer=12", base=base)
    assert config.model.n_layer == 12, "the default was typed"
    assert config.model.n_head == 2


def test_a_flag_wins_over_a_compatibility_preset():
    assert parsed("--compat=tf").optimizer.min_lr_ratio == 0.01
    config = parsed("--optimizer.min_lr_ratio=0.5", "--compat=tf")
    assert config.optimizer.min_lr_ratio == 0.5


def test_another_kind_of_token_drops_what_the_program_sets_for_its_own():
    words = data_config(
        kind=Tokenizer.WORD, line_mark=LineMark.S, min_count=3, order=Order.SENTENCES
    )
    base = ExperimentConfig(data=words)
    assert parsed(base=base) == base

    config = parsed("--data.tokenizer.kind=byte", base=base)
    assert config.data == data_config()
    config = parsed("--data.tokenizer.kind=char", "--data.tokenizer.min_count=2", base=base)
    assert config.data == data_config(kind=Tokenizer.CHAR, min_count=2)

    # A vocabulary's file says which words count, so the least count becomes 1.
    from_file = config_tree.replace(
        base, {"data.tokenizer.vocab_file": "/words", "data.tokenizer.min_count": 1}
    )
    assert parsed("--data.tokenizer.vocab_file=/words", base=base) == from_file


@pytest.mark.parametrize(
    ("word", "pattern"),
    [
        ("--model.n_layers=3", r"--model\.n_layers\b.*\bmodel\.n_layer\b"),
        ("--model.n_layer=three", r"model\.n_layer=three\b"),
        ("--model.layer_norm=middle", "post"),
        ("--model.n_layer=none", "none"),
        ("--eval.clamp_len=", r"eval\.clamp_len\b.*''"),  # It may be none, which is a word.
        ("--model.cutoffs=20,x", r"--model\.cutoffs\b.*'x'"),
        ("--flagfile=enwik8_12", r"\bsmall\b.*'enwik8_12'.*\benwik8_12l\b"),
    ],
)
def test_mistakes_are_named(word, pattern):
    with pytest.raises(UserError, match=pattern):
        parsed(word)


def test_a_flag_that_a_flagfile_overrides_is_a_warning(capsys):
    """The last one wins, and here the file comes last. The warning names the line of the file."""
    config = parsed("--train.batch_size=3", "--model.n_layer=2", "--flagfile=enwik8_12l")
    assert config.train.batch_size == 22
    first, second = sorted(capsys.readouterr().err.splitlines())
    assert "--model.n_layer=2" in first
    assert "--train.batch_size=3" in second
    assert "--train.batch_size=22" in second
    assert "enwik8_12l.flags, line " in second


def test_a_flag_behind_a_flagfile_wins_without_a_warning(capsys):
    config = parsed("--seed=3", "--flagfile", "enwik8_12l", "--train.batch_size=3")
    assert config.train.batch_size == 3
    assert capsys.readouterr().err == ""


def test_a_flagfile_inside_a_flagfile_and_comments(tmp_path):
    path = tmp_path / "mine.flags"
    lines = [
        "--flagfile=enwik8_12l",
        "",
        "# a comment",
        "  // another",
        "--notrain.same_length",
        "--train.batch_size=5",
    ]
    path.write_text("\n".join(lines) + "\n")
    config = parsed(f"--flagfile={path}")
    assert config.model.n_layer == 12
    assert config.train.batch_size == 5
    assert config.train.same_length is False


def test_a_flagfile_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "mine.flags"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"mine\.flags"):
        parsed(f"--flagfile={path}")


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("--model.n_layers=3", r"mine\.flags, line 2: .*n_layers"),
        ("--model.n_layer=x", "line 2: .*n_layer=x"),
        ("--flagfile=none", "line 2: .*'none'"),
        ("--flagfile=ITSELF", "line 2: .*itself"),
    ],
)
def test_a_mistake_in_a_flagfile_is_named_with_file_and_line(tmp_path, line, pattern):
    path = tmp_path / "mine.flags"
    path.write_text(f"--seed=1\n{line.replace('ITSELF', str(path))}\n")
    with pytest.raises(UserError, match=pattern):
        parsed(f"--flagfile={path}")


def test_a_flagfile_of_windows(tmp_path):
    (tmp_path / "mine.flags").write_bytes(b"\xef\xbb\xbf--seed=3\r\n--train.batch_size=5\r\n")
    config = parsed(f"--flagfile={tmp_path}/mine.flags")
    assert config.seed == 3
    assert config.train.batch_size == 5


def test_a_flagfile_from_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=["--seed=4\n"], daemon=True).start()
    assert parsed(f"--flagfile={pipe}").seed == 4


def test_flagfiles_that_include_the_next_twice_are_refused(tmp_path):
    """Thirty of them would be read 2**30 times, even without a flag in the last.

    The limit is 100 flagfiles. So many are read.
    """
    for number in range(30):
        (tmp_path / f"f{number}").write_text(f"--flagfile={tmp_path}/f{number + 1}\n" * 2)
    (tmp_path / "f30").write_text("")
    with pytest.raises(UserError, match=r"f\d+, line \d: .*at most 100 flagfiles.*f\d+"):
        parsed(f"--flagfile={tmp_path}/f0")
    assert parsed(*[f"--flagfile={tmp_path}/f30"] * 100).seed == parsed().seed


# Help


def headings(text):
    """Returns the headings of groups of flags in a help text."""
    return re.findall(r"(?m)^([a-z. ]+):$", text)


def test_help_has_only_the_flags_that_a_program_reads():
    _, out, _ = programs.run("experiments.paper.table9", "--help")
    assert headings(out)[-2:] == ["model", "eval"]
    assert "--helpfull" in out
    assert "--seed=" not in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Your own text gets the preset `small` unless a flag sets a size.
        (["experiments.text"], {"model.n_layer": "4", "train.steps": "800"}),
        (["experiments.text", "--flagfile=own_bytes"], {"optimizer.name": "muon"}),
        (["experiments.enwik8"], {"model.n_layer": "12", "train.steps": "400000"}),
        # An ensemble's text may be any corpus.
        (["experiments.ensemble"], {"model.n_layer": "12"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_has_the_defaults_that_a_run_without_further_flags_has(words, expected):
    code, out, err = programs.run(*words, "--help")
    assert code == 0, err
    for name, default in expected.items():
        assert f"--{name}={default} " in out, name
    assert ("--flagfile=small is used" in out) == (words == ["experiments.text"])


def test_help_has_each_setting_once_in_groups_and_the_flagfiles():
    code, out, err = programs.run("experiments.enwik8", "--help")
    assert code == 0
    assert not err
    for words in ("python -m experiments.enwik8", *preset_names(), *evaluation_preset_names()):
        assert words in out
    assert headings(out) == ["command", "multiple hosts", *flag_tree.groups()]

    usages = re.findall(r"(?m)^  --([\w.]+)=(\S*)", out)
    defaults = dict(usages)
    assert len(defaults) == len(usages)
    for leaf in flag_tree.setting_leaves(ExperimentConfig):
        assert leaf.name in defaults
    assert defaults["mode"] == "train"
    assert defaults["model.n_layer"] == "12"
    assert defaults["model.d_embed"] == "none"
    assert defaults["coordinator"] == ""
    assert defaults["model.cutoffs"] == ""
    assert defaults["model.tie_weight"] == "true"
