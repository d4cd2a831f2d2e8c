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

GLOO = (
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection "
    "closed by peer"
)
SEVERAL = other_hosts.Processes(2, "a test", {})


@dataclasses.dataclass(frozen=True)
class Plan(cli.TextPlan):
    lengths: tuple[int, ...] = setting((1, 2), "Lengths.")
    from_: str = setting("", "Folder.", path=True, required=True)
    member: tuple[str, ...] = setting((), "Members.", repeated=True)

    def validate(self):
        require(self.lengths, "no length was given; give one")


@pytest.fixture
def start(monkeypatch):
    """Runs a program with a command line; returns its exit code, and the plan and the job that it
    was called with.
    """

    def start(*words, run=lambda plan, job: None, plan=Plan, **options):
        called = []
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with programs.own_flags(), pytest.raises(SystemExit) as ended:
            cli.main(lambda *given: called.append(given) or run(*given), plan, **options)
        return ended.value.code, *(called or [None])

    return start


def test_a_plan_has_absolute_paths_and_the_job_what_was_typed(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.flags").write_text("--lengths=3,4\n")
    words = ["--from=here", "--member=a=1,2", "--member=b", "--flagfile=mine.flags", "word"]
    code, (plan, job) = start(*words, takes_words=True, config=ExperimentConfig())
    assert code == 0 and (plan.lengths, plan.from_, plan.member) == (
        (3, 4),
        str(tmp_path / "here"),
        ("a=1,2", "b"),
    )
    assert job.words == ["word"] and job.flagfile == "mine"
    assert job.places == {"from": "", "member": "", "lengths": "mine.flags, line 1: "}
    assert start("--from=x", "--lengths=", run=pytest.fail)[0] == 1, (
        "the plan is checked before anything is run"
    )


def test_the_config_is_the_flags_over_the_defaults(start, capsys):
    defaults = config_tree.replace(ExperimentConfig(), {"eval.mem_len": 7})
    configs = []

    def run(plan, job):
        configs.append((job.config(), job.config_of_flagfile("wt103_base")))

    assert start("--from=x", "--model.n_layer=2", run=run, config=defaults)[0] == 0
    assert start("--from=x", "--data.corpus=ptb", run=run, config=defaults, by_corpus=True)[0] == 0
    (own, flagfile), (by_corpus, _) = configs
    assert own == config_tree.replace(defaults, {"model.n_layer": 2})
    assert (flagfile.model.n_layer, flagfile.model.d_model, flagfile.eval.mem_len) == (2, 410, 640)
    assert (
        by_corpus.data.corpus is CorpusName.PTB and by_corpus.data.tokenizer.kind is Tokenizer.WORD
    )
    words = ["--from=x", "--flagfile=small", "--train.steps=50"]
    assert start(*words, run=lambda plan, job: job.config() and None, config=defaults)[0] == 0
    assert "optimizer.warmup_steps is 5 instead of 100" in capsys.readouterr().out, (
        "a study prints its notes"
    )


def test_processes_agree_on_the_plan_but_for_its_paths(start, monkeypatch):
    done = []
    monkeypatch.setattr(other_hosts, "announced", lambda environment: SEVERAL)
    monkeypatch.setattr(other_hosts, "join", done.append)
    monkeypatch.setattr(distributed, "assert_same_on_all", lambda facts, advice: done.append(facts))
    assert start("--from=here", "--coordinator=a:1", hosts="join")[0] == 0
    assert done == [SEVERAL, {"--lengths": "1,2", "--member": ""}]


def test_a_program_of_one_host_refuses_others_and_one_of_each_host_does_not_ask(
    start, monkeypatch, capsys
):
    monkeypatch.setattr(other_hosts, "announced", lambda environment: SEVERAL)
    assert start("--from=here", run=pytest.fail)[0] == 1
    assert re.search(r"single process.*\b2 processes", capsys.readouterr().err)
    assert start("--from=here", hosts="each")[0] == 0


def interrupt(plan, job):
    with job.stop:
        stop.request_stop("a test")
        raise Interrupted("the middle")


@pytest.mark.parametrize(("run", "code"), [(interrupt, 143), (lambda plan, job: 7, 7)])
def test_the_exit_code_is_the_programs_or_that_of_the_signal(start, monkeypatch, capsys, run, code):
    monkeypatch.setattr(stop, "_stop_requested", threading.Event())
    assert start("--from=x", run=run)[0] == code
    assert (
        "stopped   on request in the middle, rerun the same command" in capsys.readouterr().out
    ) is (code == 143)


@pytest.mark.full
def test_devices_that_jax_cannot_use_are_an_error():
    command, environment = (
        [sys.executable, "-m", "experiments.bench.device"],
        os.environ | {"JAX_PLATFORMS": "cuda"},
    )
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (
        done.returncode == 1
        and "JAX_PLATFORMS is cuda" in done.stderr
        and done.stderr.count("\n") == 1
    )


# Settings of a run in a workdir


@pytest.fixture
def config_in(start, tmp_path):
    """Returns the config and the notes of a command line of experiments.text, in a workdir that is
    new or recorded.
    """

    def config_in(*words, defaults=text.DEFAULTS, folder="new"):
        found = []

        def run(plan, job):
            with Run.open(tmp_path / folder) as opened:
                found.append((job.config(opened), opened.notes))

        words = [f"--data.file={tmp_path / 'text'}", *words]
        code, *_ = start(*words, run=run, config=defaults, plan=train_command.TrainPlan)
        if code:
            return code, []
        # A sweep checks the settings of its runs before they start, and must come to the same.
        if found[0][0].init_from is None:
            recorded = (
                Run.read(tmp_path / folder).config
                if (tmp_path / folder / "config.json").exists()
                else None
            )
            assert (
                precedence.config_of_words(defaults, ["text", *words], recorded=recorded)
                == found[0][0]
            )
        return found[0]

    return config_in


SIZES = {"n_layer": 1, "d_model": 12, "n_head": 3, "d_head": 5, "d_inner": 14, "untie_r": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on words with the numerics of another implementation; returns its folder and its
    config.
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
def built(trained, config_in, capsys):
    """Returns the config of a command line with --init_from, and adds its notes to a list."""

    def built(*words, notes=None, **options):
        files = [f"--data.file={trained[0] / 'text'}", f"--init_from={trained[0] / 'run'}"]
        config, found = config_in(*files, *words, **options)
        if config == 1:
            raise UserError(capsys.readouterr().err)
        if notes is not None:
            notes += found
        return config

    return built


def test_sizes_and_compatibility_come_from_the_trained_model(trained, built):
    """And nothing else: dropout, tokens, lengths and optimizer are those of the program and the
    flags.
    """
    config = built("--train.mem_len=30")
    assert {name: getattr(config.model, name) for name in SIZES} == SIZES
    assert config.model.compat == trained[1].model.compat != ExperimentConfig().model.compat
    assert config.model.dropout == preset("small").model.dropout and config.train.batch_size == 16
    assert config.data.tokenizer.kind is Tokenizer.BYTE and config.train.mem_len == 30


def test_flags_of_the_same_model_may_be_given_and_others_are_named(built):
    assert built("--model.n_layer=1").model.n_layer == 1
    with pytest.raises(
        UserError, match=r"model\.n_layer is 4 instead of 1, model\.d_head is 6 instead of 5\. Omit"
    ):
        built("--model.n_layer=4", "--model.d_head=6")
    assert (
        built("--compat=tf").model.compat.layer_norm_eps
        == COMPAT_PRESETS["tf"]["model.compat.layer_norm_eps"]
    )


def test_sizes_of_a_flagfile_yield_to_the_trained_model(trained, built, tmp_path):
    """At the first start and at a later one, and nothing else of it does.

    Sizes that are typed are refused.
    """
    notes = []
    first = built("--flagfile=small", notes=notes)
    assert {name: getattr(first.model, name) for name in SIZES} == SIZES
    assert first.train == preset("small").train and first.optimizer == preset("small").optimizer
    [note] = notes
    assert all(
        f"model.{name} is" in note for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner")
    )
    with pytest.raises(UserError, match=r"model\.n_layer is 4 instead of 1\. Omit"):
        built("--flagfile=small", "--model.n_layer=4")
    (tmp_path / "mine.flags").write_text(
        "--compat=ours\n--model.layer_norm=pre\n--model.cutoffs=2\n"
    )
    model = built(f"--flagfile={tmp_path / 'mine.flags'}").model
    assert (model.layer_norm, model.cutoffs, model.compat.final_norm) == (NormPlace.POST, (), False)
    with pytest.raises(UserError, match=r"model\.layer_norm is pre instead of post"):
        built(f"--flagfile={tmp_path / 'mine.flags'}", "--model.layer_norm=pre")
    runs.record(tmp_path / "new", first, read_corpus(trained[1].data, "nowhere", str(trained[0])))
    assert built("--flagfile=small", notes=notes) == first and notes[1:] == [note]


def test_a_kept_vocabulary_brings_its_tokenizer(built):
    assert built("--init_vocabulary=kept").data.tokenizer.kind is Tokenizer.WORD
    for word, named in (
        ("--data.tokenizer.vocab_file=words", "vocab_file"),
        ("--init_from=none", "Set --init_from"),
    ):
        with pytest.raises(UserError, match=named):
            built("--init_vocabulary=kept", word)


def test_a_second_start_needs_the_workdir_alone(trained, built, tmp_path):
    """The folder of the weights may be gone, and flags left out: the record takes the place of the
    defaults.
    """
    first = built("--train.mem_len=30")
    runs.record(tmp_path / "new", first, read_corpus(trained[1].data, "nowhere", str(trained[0])))
    (trained[0] / "run").rename(trained[0] / "gone")
    try:
        assert built() == first
        assert built("--train.log_every=10").train.log_every == 10
        with pytest.raises(
            UserError, match=r"init_from is .*run, whose weights cannot be used: .* contains no run"
        ):
            built(folder="another")
    finally:
        (trained[0] / "gone").rename(trained[0] / "run")


def test_own_text_without_sizes_takes_the_small_model_and_says_so(config_in, tmp_path):
    small = config_tree.replace(preset("small"), {"data.file": str(tmp_path / "text")})
    config, [note] = config_in()
    assert config == small and "--flagfile=small" in note
    config, [note] = config_in("--train.batch_size=3", "--compat=tf")
    assert (
        config.train == dataclasses.replace(small.train, batch_size=3) and config.model.n_layer == 4
    )
    assert config == apply_preset(config, "tf")
    (tmp_path / "mine.flags").write_text("--train.batch_size=3\n")
    for words in (
        ["--model.n_layer=3"],
        ["--model.dropout.rate=0"],
        [f"--flagfile={tmp_path / 'mine.flags'}"],
    ):
        config, notes = config_in(*words)
        assert (
            config.model.d_model == ExperimentConfig().model.d_model
            and config.train.steps == 400_000
        )
        assert len(notes) == words[0].startswith("--model."), (
            "the paper's batch is named unless one was given"
        )
    for name in (CorpusName.ENWIK8, CorpusName.PTB):
        others = ExperimentConfig(data=default_data(name))
        assert config_in("--data.file=none", defaults=others) == (others, [])
    # A run that began with the paper's sizes keeps them.
    paper = ExperimentConfig(data=own_text(file=str(tmp_path / "text")))
    runs.record(
        tmp_path / "new", paper, TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes())
    )
    assert config_in() == (paper, [])


def test_a_warm_up_that_was_not_typed_becomes_a_tenth_of_the_steps(config_in, tmp_path):
    for words in (["--flagfile=small"], []):
        config, notes = config_in(*words, "--train.steps=100")
        assert (
            config.optimizer.warmup_steps == 10
            and "warm-up" in notes[-1]
            and "is 10 instead of 100" in notes[-1]
        )
        assert config_in(*words, "--train.steps=105")[0].optimizer.warmup_steps == 100
    assert (
        config_in("--flagfile=small", "--optimizer.warmup_steps=100", "--train.steps=100")[0] == 1
    )
    # A run that gets more steps keeps the warm-up that it had.
    runs.record(
        tmp_path / "new", config, TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes())
    )
    for steps in (100, 200, 800):
        longer, notes = config_in("--flagfile=small", f"--train.steps={steps}")
        assert longer == config_tree.replace(config, {"train.steps": steps}) and len(notes) == 1
    assert config_in("--optimizer.warmup_steps=7")[0].optimizer.warmup_steps == 7


def test_a_note_about_a_recorded_warm_up_reads_forwards(config_in, tmp_path):
    recorded = config_tree.replace(
        preset("small"), {"optimizer.warmup_steps": 3, "data.file": str(tmp_path / "text")}
    )
    runs.record(
        tmp_path / "new",
        recorded,
        TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes()),
    )
    config, [note] = config_in("--flagfile=small")
    assert config.optimizer.warmup_steps == 3
    assert note == "the recorded run's warm-up is kept: optimizer.warmup_steps is 3 instead of 100"


def test_an_error_names_where_settings_come_from_that_nobody_typed(config_in, tmp_path, capsys):
    (tmp_path / "mine.flags").write_text("--train.segments_per_call=5\n--train.steps=100\n")
    flagfile = f"--flagfile={tmp_path / 'mine.flags'}"
    assert config_in(flagfile, "--train.steps=1")[0] == 1
    err = capsys.readouterr().err
    assert f"(train.segments_per_call comes from {tmp_path / 'mine.flags'}, line 1)" in err
    typed = ["--train.segments_per_call=5", "--train.steps=1", "--optimizer.warmup_steps=0"]
    assert config_in(flagfile, *typed)[0] == 1
    assert "comes from" not in capsys.readouterr().err
    assert (
        config_in("--optimizer.weight_decay=0.1", "--optimizer.name=adam", "--model.n_layer=1")[0]
        == 1
    )
    assert "comes from" not in capsys.readouterr().err
    assert config_in("--optimizer.weight_decay=0.1", "--model.n_layer=1")[0] == 1
    assert "(optimizer.name comes from the defaults)" in capsys.readouterr().err


def test_typed_flags_that_a_mode_does_not_read_are_named_once(start, capsys):
    trained = config_tree.replace(ExperimentConfig(), {"train.steps": 24})

    def run(plan, job):
        config = flag_tree.build(trained)
        train_command._note_unread(plan, job, config, trained if plan.mode != "train" else config)

    for words, named in (
        (["--mode=eval", "--train.mem_len=9", "--eval.mem_len=9"], "train.mem_len"),
        (["--mode=eval", "--generate.length=7"], "generate.length"),
        (["--mode=score", "--seed=3", "--per_token"], "seed per_token"),
        (["--mode=score", "--input=in", "--per_token", "--data.order=sentences"], "data.order"),
        (["--mode=generate", "--generate.length=3", "--data.roll=rows"], "data.roll"),
        # As recorded; and what a flagfile says.
        (["--mode=eval", "--train.steps=24", "--flagfile=small"], ""),
        (["--input_format=lines"], "input_format"),
        (["--train.mem_len=9", "--generate.length=7"], ""),
    ):
        start(*words, run=run, config=ExperimentConfig(), plan=train_command.TrainPlan)
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
        found = [re.findall(r"--([\w.]+)(?!=)", note.partition(":")[2]) for note in notes]
        assert found == ([named.split()] if named else [])


def test_training_goes_on_in_the_recorded_folders_and_other_modes_write_to_none_of_them(
    start, tmp_path, monkeypatch
):
    """On another machine they may not exist.

    A flag counts more. Compiled functions are not in them at all.
    """
    kept = []
    monkeypatch.setattr(
        app, "keep_compiled", lambda *named, **options: kept.append((named, options))
    )
    there = [tmp_path / "there", tmp_path / "there" / "prepared"]
    info = TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes(), *map(str, there))
    runs.record(tmp_path / "run", ExperimentConfig(data=own_text(file="a")), info)
    monkeypatch.chdir(tmp_path)

    def folders(*words):
        code, (plan, _) = start(
            f"--workdir={tmp_path / 'run'}", *words, plan=train_command.TrainPlan
        )
        assert code == 0 and kept.pop() == ((None,), {"by_default": True})
        return plan.data_dir, plan.cache_dir

    here = str(tmp_path / "data")
    assert folders() == (here, None), "they do not exist"
    there[1].mkdir(parents=True)
    assert folders() == tuple(map(str, there))
    assert folders("--data_dir=data") == (here, None)
    assert folders("--cache_dir=x") == (str(there[0]), str(tmp_path / "x"))
    for words in (
        ["--mode=eval"],
        ["--mode=score"],
        ["--mode=generate"],
        ["--mode=score", "--input=a"],
    ):
        assert folders(*words) == (here, None), words
    (tmp_path / "run" / "config.json").write_text("{")
    assert folders() == (here, None)


def test_a_relative_folder_in_a_record_is_none_of_this_machine(tmp_path, monkeypatch):
    """Records have absolute ones. The current directory is not the one that they meant."""
    (tmp_path / "cache").mkdir()
    monkeypatch.chdir(tmp_path)
    here = {"data_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    for recorded, found in ((here, here), ({"data_dir": ".", "cache_dir": "cache"}, {})):
        (tmp_path / "config.json").write_text(json.dumps({"text": recorded}))
        assert recorded_folders(tmp_path) == found


# Errors


def having(error, **attributes):
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError(GLOO), True),  # Raised where an array is fetched.
        (jax.errors.JaxRuntimeError(GLOO), True),
        (
            having(
                CheckpointError("step 3 was not written"),
                __cause__=RuntimeError("UNAVAILABLE: barrier"),
            ),
            True,
        ),
        # Of a disk, or of a download.
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (
            having(
                ConnectionError("they did not come together"), __cause__=RuntimeError("UNAVAILABLE")
            ),
            False,
        ),
        (
            having(RemoteProcessError("process 1: Connection reset by peer"), known_to_all=True),
            False,
        ),
    ],
)
def test_a_lost_process_is_distinguished_from_mistakes(monkeypatch, capsys, error, lost):
    assert not other_hosts.lost_another(error), "a process by itself has no other to lose"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "is_multiprocess", lambda: False)
    monkeypatch.setattr(other_hosts, "SECONDS_TO_NAME", 0)
    assert (exit_code_for(error) == other_hosts.LOST == 75) is lost
    err = capsys.readouterr().err
    said = describe_system_error(error) if type(error) is ConnectionResetError else error
    assert err.startswith("error: ") and (err == f"error: {said}\n") is not lost


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 213364827424 bytes."
        ),
        # Of a CPU, while a function runs.
        jax.errors.JaxRuntimeError(
            "INTERNAL: Error dispatching computation: Out of memory allocating 30720000000 bytes."
        ),
        # NumPy's is one of its own, below MemoryError.
        MemoryError("Unable to allocate 30 GiB for an array"),
    ],
)
def test_out_of_memory_is_a_sentence_with_advice_on_each_device(capsys, error):
    assert exit_code_for(error) == 1
    err = capsys.readouterr().err
    assert (
        err.startswith("error: out of device memory (")
        and "--train.batch_size" in err
        and err.count("\n") == 1
    )
    assert exit_code_for(jax.errors.JaxRuntimeError("INTERNAL: a bug")) is None


@pytest.mark.full
def test_a_run_that_a_cpu_cannot_hold_ends_with_a_sentence(tmp_path):
    """A memory of 31 GB, where a process may have 24 GiB: nothing is allocated, because the system
    refuses at once.
    """
    path = programs.write_words(tmp_path, 3_000)
    words = [
        *programs.TINY,
        *programs.steps(2, every=2),
        "--train.mem_len=120000000",
        "--train.segments_per_call=1",
    ]
    words += [f"--data.file={path}", f"--cache_dir={tmp_path}", f"--workdir={tmp_path / 'run'}"]
    limited = [
        "bash",
        "-c",
        'ulimit -v 25165824; exec "$@"',
        "bash",
        *programs.command("experiments.text", *words),
    ]
    environment = os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        limited, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended
    assert ended.stderr.splitlines()[-1].startswith("error: out of device memory ("), ended.stderr
    assert "Traceback" not in ended.stderr


def test_one_that_is_lost_at_the_end_is_reported_unless_a_mistake_was(monkeypatch):
    ended = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(other_hosts.os, "_exit", ended.append)
    monkeypatch.setattr(distributed, "run_on_all", mock.Mock(side_effect=ValueError(GLOO)))
    with pytest.raises(ValueError, match="Gloo"):
        other_hosts.leave(0, together=True)
    other_hosts.leave(1, together=True)
    assert ended == [1]


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
def test_an_error_of_a_user_is_one_line_and_a_bug_keeps_its_traceback(capsys, error, printed):
    with pytest.raises(SystemExit, match="1"), guarded():
        raise error
    line = capsys.readouterr().err
    assert line.startswith(f"error: {printed}") and line.count("\n") == 1 and "Errno" not in line
    with pytest.raises(ValueError, match="shapes"), guarded():
        raise ValueError("shapes differ")
    assert capsys.readouterr().err == ""


def test_errors_name_flags_by_the_short_names_that_the_command_has(start, capsys):
    def fail(plan, job):
        raise UserError(
            "pass --data.tokenizer.kind=byte, not --data.tokenizer.kinds or --data.tokenizer.kind.x"
        )

    aliases = {"tokenizer": "data.tokenizer.kind"}
    assert start("--from=x", run=fail, config=ExperimentConfig(), aliases=aliases)[0] == 1
    shown = "pass --tokenizer=byte, not --data.tokenizer.kinds or --data.tokenizer.kind.x"
    assert capsys.readouterr().err == f"error: {shown}\n"
    assert start("--from=x", run=fail, config=ExperimentConfig())[0] == 1
    assert "pass --data.tokenizer.kind=byte" in capsys.readouterr().err


# Flags that are made from the config tree, and how a command line becomes a config


def parsed(*words, base=None):
    return programs.config_of(ExperimentConfig(), *words, base=base)


def test_what_was_not_given_stays_as_the_base_or_a_preset_has_it():
    base = config_tree.replace(ExperimentConfig(), {"model.n_layer": 5, "model.n_head": 2})
    config = parsed("--model.n_layer=12", base=base)  # 12 is the default, but it was given.
    assert (config.model.n_layer, config.model.n_head) == (12, 2)
    assert parsed("--optimizer.min_lr_ratio=0.5", "--compat=tf").optimizer.min_lr_ratio == 0.5, (
        "a flag wins"
    )
    assert parsed("--compat=tf").optimizer.min_lr_ratio == 0.01


def test_another_kind_of_token_drops_what_the_program_sets_for_its_own():
    words = data_config(
        kind=Tokenizer.WORD, line_mark=LineMark.S, min_count=3, order=Order.SENTENCES
    )
    base = ExperimentConfig(data=words)
    assert parsed(base=base) == base
    assert parsed("--data.tokenizer.kind=byte", base=base).data == data_config()
    characters = parsed(
        "--data.tokenizer.kind=char", "--data.tokenizer.min_count=2", base=base
    ).data
    assert characters == data_config(kind=Tokenizer.CHAR, min_count=2)
    from_file = config_tree.replace(
        base, {"data.tokenizer.vocab_file": "/words", "data.tokenizer.min_count": 1}
    )
    assert parsed("--data.tokenizer.vocab_file=/words", base=base) == from_file


def test_mistakes_are_named():
    for words, pattern in (
        (["--model.n_layers=3"], r"--model\.n_layers\b.*\bmodel\.n_layer\b"),
        (["--model.n_layer=three"], r"model\.n_layer=three\b"),
        (["--model.layer_norm=middle"], "post"),
        (["--model.n_layer=none"], "none"),
        (["--eval.clamp_len="], r"eval\.clamp_len\b.*''"),  # It may be none, which is a word.
        (["--model.cutoffs=20,x"], r"--model\.cutoffs\b.*'x'"),
        (["--flagfile=enwik8_12"], r"\bsmall\b.*'enwik8_12'.*\benwik8_12l\b"),
    ):
        with pytest.raises(UserError, match=pattern):
            parsed(*words)


def test_a_flag_that_a_flagfile_overrides_is_a_warning(capsys):
    assert (
        parsed(
            "--train.batch_size=3", "--model.n_layer=2", "--flagfile=enwik8_12l"
        ).train.batch_size
        == 22
    )
    first, second = sorted(capsys.readouterr().err.splitlines())
    assert (
        "--model.n_layer=2" in first
        and "--train.batch_size=3" in second
        and "--train.batch_size=22" in second
    )
    assert "enwik8_12l.flags, line " in second
    assert (
        parsed("--seed=3", "--flagfile", "enwik8_12l", "--train.batch_size=3").train.batch_size == 3
    )
    assert capsys.readouterr().err == ""


def test_a_flagfile_inside_a_flagfile_and_errors_with_file_and_line(tmp_path):
    path = tmp_path / "mine.flags"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"mine\.flags"):
        parsed(f"--flagfile={path}")
    path.write_text(
        "--flagfile=enwik8_12l\n\n# a comment\n  // "
        "another\n--notrain.same_length\n--train.batch_size=5\n"
    )
    config = parsed(f"--flagfile={path}")
    assert (config.model.n_layer, config.train.batch_size, config.train.same_length) == (
        12,
        5,
        False,
    )
    mistakes = (
        ("--model.n_layers=3", r"mine\.flags, line 2: .*n_layers"),
        ("--model.n_layer=x", r"line 2: .*n_layer=x"),
    )
    files = ("--flagfile=none", "line 2: .*'none'"), (f"--flagfile={path}", "line 2: .*itself")
    for line, pattern in (*mistakes, *files):
        path.write_text(f"--seed=1\n{line}\n")
        with pytest.raises(UserError, match=pattern):
            parsed(f"--flagfile={path}")


def test_a_flagfile_of_windows_and_one_from_a_pipe(tmp_path):
    (tmp_path / "mine.flags").write_bytes(b"\xef\xbb\xbf--seed=3\r\n--train.batch_size=5\r\n")
    config = parsed(f"--flagfile={tmp_path}/mine.flags")
    assert (config.seed, config.train.batch_size) == (3, 5)
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(
        target=(tmp_path / "pipe").write_text, args=["--seed=4\n"], daemon=True
    ).start()
    assert parsed(f"--flagfile={tmp_path}/pipe").seed == 4


def test_flagfiles_that_include_the_next_twice_are_refused(tmp_path):
    """Thirty of them would be read a thousand million times, even without a flag in the last."""
    for number in range(30):
        (tmp_path / f"f{number}").write_text(f"--flagfile={tmp_path}/f{number + 1}\n" * 2)
    (tmp_path / "f30").write_text("")
    with pytest.raises(UserError, match=r"f\d+, line \d: .*at most 100 flagfiles.*f\d+"):
        parsed(f"--flagfile={tmp_path}/f0")
    assert parsed(*[f"--flagfile={tmp_path}/f30"] * 100).seed == parsed().seed


# Help


def test_help_has_the_flags_that_a_program_reads_once_each_in_groups_and_the_flagfiles():
    def headings(text):
        return re.findall(r"(?m)^([a-z. ]+):$", text)

    _, out, _ = programs.run("experiments.paper.table9", "--help")
    assert headings(out)[-2:] == ["model", "eval"] and "--helpfull" in out and "--seed=" not in out
    code, out, err = programs.run("experiments.enwik8", "--help")
    assert code == 0 and not err
    for words in ("python -m experiments.enwik8", *preset_names(), *evaluation_preset_names()):
        assert words in out
    usages = re.findall(r"(?m)^  --([\w.]+)=(\S*)", out)
    defaults = dict(usages)
    assert len(defaults) == len(usages)
    assert {leaf.name for leaf in flag_tree.setting_leaves(ExperimentConfig)} <= defaults.keys()
    assert (defaults["mode"], defaults["model.n_layer"], defaults["model.d_embed"]) == (
        "train",
        "12",
        "none",
    )
    assert (defaults["coordinator"], defaults["model.cutoffs"], defaults["model.tie_weight"]) == (
        "",
        "",
        "true",
    )
    assert headings(out) == ["command", "multiple hosts", *flag_tree.groups()]
