"""Tests that each flag of each program arrives in its plan or its config, typed or from a flagfile.

Programs start as from a shell, with a `run` that keeps what it gets. Values are derived from the
declared types: a new setting is covered at once, or its program refuses the derived value and this
file needs an entry in `CHOSEN`.
"""

import dataclasses
import enum
import os
import re
import runpy
from typing import Any

import pytest
from absl import flags

from experiments.__main__ import HEADINGS
from experiments.__main__ import programs as programs_in
from support import ROOT, programs, runs
from support.second_values import as_flags, second_values
from txl_jax import cli
from txl_jax.cli import app, flag_tree, other_hosts, precedence, train_command
from txl_jax.config import CorpusName, ExperimentConfig, config_tree
from txl_jax.config.experiment import apply_preset
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.published import default_data
from txl_jax.errors import UserError
from txl_jax.runs import score_input, score_splits
from txl_jax.runs.run import TextInfo
from txl_jax.runs.trainer import Outcome


def file_of(name):
    return (ROOT / name.replace(".", "/")).with_suffix(".py")


def uses_cli(name):
    """Returns whether `cli.main` reads a program's flags. Launchers have parsers of their own."""
    text = file_of(name).read_text()
    return "cli.main(" in text or "train_main(" in text


PROGRAMS = []
for folder in HEADINGS:
    PROGRAMS += filter(uses_cli, programs_in(folder))

# Values for plans that check theirs, by program and setting: typed values, and a flagfile's. All
# other values are made from numbers, which begin at another `start_at` for each source, so that a
# value shows where it is from.
CHOSEN = {}
IN_FILE = {}


def choose(name, *, typed, in_file):
    """Chooses values of a program's settings whose derived values its plan would refuse."""
    CHOSEN[f"experiments.{name}"] = typed
    IN_FILE[f"experiments.{name}"] = in_file


choose("paper.attention", typed={"heads": ("0.1", "1.0")}, in_file={"heads": ("1.1",)})
choose("paper.recl", typed={"lengths": (7, 29, 4)}, in_file={"lengths": (5, 30, 5)})
choose(
    "bench.device",
    typed={"tasks": ("evaluation",), "paths": ("tiled",), "tiles": ("8x16", "32x64")},
    in_file={"tasks": ("training",), "paths": ("stored",), "tiles": ("4x4",)},
)
choose(
    "bench.estimate",
    typed={"topology": ("v4:2x2x2",), "tasks": ("evaluation",), "configs": ("small",)},
    in_file={"topology": ("h200x8",), "tasks": ("training",), "configs": ("ptb", "small")},
)
choose(
    "bench.session",
    typed={"parts": ("peaks",), "inside": "step"},
    in_file={"parts": ("step", "step_12l"), "inside": "attention"},
)
# --peer_path, which also has a value, is only for this peer.
choose(
    "bench.speed",
    typed={"tasks": ("evaluation",), "peer": "original"},
    in_file={"tasks": ("training",), "peer": "original"},
)
choose(
    "tune_dynamic",
    typed={"learning_rates": (0.5, 0.25), "decays": (0.125,)},
    in_file={"learning_rates": (0.75,), "decays": (0.375, 0.5)},
)

# Settings that a plan requires by its own check.
NOT_EMPTY = {"experiments.bench.estimate": ("topology",)}
COMPAT = "nvidia"  # One of the presets of --compat. Typed settings win over it.
# The documented short names of flags.
ALIASES = {
    "experiments.prepare": {"corpus": "data.corpus"},
    "experiments.text": {
        "train": "data.train",
        "valid": "data.valid",
        "test": "data.test",
        "tokenizer": "data.tokenizer.kind",
    },
    "experiments.tune_dynamic": {"rule": "eval.dynamic.rule"},
}
# The flags of programs that run in multiple processes.
HOSTS = ("coordinator", "num_processes", "process_id")


@pytest.fixture
def declare(monkeypatch):
    """Returns the class of a program's plan, and the arguments of its `cli.main`."""

    def declare(name):
        calls = []

        def main(run, plan, **options):
            calls.append((plan, options))

        with monkeypatch.context() as patch, programs.own_flags():
            patch.setattr(cli, "main", main)
            patch.setattr(train_command, "main", main)
            runpy.run_path(str(file_of(name)), run_name="__main__")
        [(plan, options)] = calls
        return plan, options

    return declare


@dataclasses.dataclass
class Started:
    """What a program made of its command line."""

    plan: cli.Plan
    job: cli.Job
    config: ExperimentConfig | None
    flags: set[str]  # The project's own flags, without absl's.
    compiled_in: dict[str, Any]  # The arguments of `keep_compiled`.


@pytest.fixture
def compiled_in(monkeypatch, tmp_path):
    """Lets programs start with values that do not go together, and files that do not exist.

    Returns the arguments of `keep_compiled`, which stores no compiled functions here.
    """
    arguments = {}

    def keep_compiled(named, *, by_default):
        arguments.update(named=named, by_default=by_default)

    monkeypatch.setattr(app, "keep_compiled", keep_compiled)
    monkeypatch.setattr(precedence, "check_file", lambda data: None)
    monkeypatch.setattr(ExperimentConfig, "validate", lambda config: None)
    monkeypatch.chdir(tmp_path)
    return arguments


def own_flags():
    """Returns the project's own flags, without absl's."""
    module_of = flags.FLAGS.find_module_defining_flag
    return {name for name in flags.FLAGS if "txl_jax.cli" in str(module_of(name))}


@pytest.fixture
def start(monkeypatch, compiled_in):
    """Returns what a program makes of a command line."""
    main_of_app = app.main
    started = []

    def main(_run, plan_class, **options):
        def run(plan, job):
            config = None
            if options.get("config"):
                config = job.config()
            started.append(Started(plan, job, config, own_flags(), compiled_in))

        main_of_app(run, plan_class, **options)

    def start(name, *words):
        code, _, errors = programs.run(name, *words)
        assert code == 0, f"{errors}Replace a derived value with one in CHOSEN and IN_FILE."
        return started.pop()

    monkeypatch.setattr(cli, "main", main)
    monkeypatch.setattr(train_command, "main", main)
    return start


def absolute(kind, values):
    """Returns the values as a plan or a config has them, with absolute paths."""
    values = dict(values)
    for leaf in config_tree.leaves(kind):
        value = values.get(leaf.name)
        if not leaf.setting.path or not value:
            continue
        if isinstance(value, tuple):
            values[leaf.name] = tuple(map(os.path.abspath, value))
        else:
            values[leaf.name] = os.path.abspath(value)
    return values


def settings_of(config):
    """Returns the values of a plan or a config, by setting."""
    return {
        leaf.name: config_tree.get(config, leaf.name) for leaf in config_tree.leaves(type(config))
    }


def assert_same(config, expected):
    """Names the settings of a plan or a config that differ from the expected values.

    `expected` has the values by setting.
    """
    values = settings_of(config)
    assert values.keys() == expected.keys()
    different = {}
    for name, value in values.items():
        if value != expected[name]:
            different[name] = f"is {value!r} instead of {expected[name]!r}"
    assert different == {}


def every_second(values):
    return dict(list(values.items())[::2])


def defaults_of(kind):
    """Returns the defaults of a plan's class, by setting."""
    return {leaf.name: leaf.default for leaf in config_tree.leaves(kind)}


def unlike(values, typed, defaults):
    """Returns the values of a flagfile, with the default where the same value is typed.

    So both differ also for settings with two values, such as true and false.
    """
    values = dict(values)
    for name in values.keys() & typed.keys():
        if values[name] == typed[name]:
            values[name] = defaults[name]
    return values


def config_with(options, values):
    """Returns the settings of a command line that also has `--compat`."""
    base = apply_preset(options["config"], COMPAT)
    return settings_of(config_tree.replace(base, absolute(ExperimentConfig, values)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_typed_flag_arrives(declare, start, name):
    kind, options = declare(name)
    values = second_values(kind, chosen=CHOSEN.get(name), start_at=100)
    words = as_flags(kind, values)
    known = {flag_tree.flag_name(leaf) for leaf in config_tree.leaves(kind)}
    known |= ALIASES.get(name, {}).keys()
    if options.get("config"):
        settings = second_values(ExperimentConfig, start_at=1000)
        words += [*as_flags(ExperimentConfig, settings), f"--compat={COMPAT}"]
        known |= {"compat", *settings}
    if options.get("hosts") == "join":
        known |= set(HOSTS)  # `test_processes_that_flags_announce_are_joined` has them.

    started = start(name, *words)

    assert_same(started.plan, absolute(kind, values))
    assert set(started.job.places.values()) == {""}, "each flag was typed"
    if options.get("config"):
        assert_same(started.config, config_with(options, settings))
    assert started.flags == known, "each flag has a value here"
    # By default, compiled functions are kept by the programs that read a text.
    assert started.compiled_in == {
        "named": started.plan.compilation_cache,
        "by_default": hasattr(started.plan, "data_dir") or name == "experiments.quickstart",
    }


# Code that another program has left in these places is run. A flagfile may be a stranger's.
LOADS_CODE = {"compilation_cache"}
LOADS_CODE_OF_PROGRAM = {
    "experiments.bench.speed": {"peer_path"},
    "experiments.lm_eval": {"include_path"},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_flagfile_may_not_name_code(declare, name):
    kind, _ = declare(name)
    leaves = list(config_tree.leaves(kind))
    loads_code = {leaf.name for leaf in leaves if leaf.setting.loads_code}
    expected = LOADS_CODE & {leaf.name for leaf in leaves}
    assert loads_code == expected | LOADS_CODE_OF_PROGRAM.get(name, set())


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_flag_of_a_file_arrives_unless_it_is_typed_behind_it(declare, start, tmp_path, name):
    """The file gives every flag a value, and every second flag is typed as well, with another."""
    kind, options = declare(name)
    # A file may not set the settings that load code, so these are typed.
    not_in_files = {leaf.name for leaf in config_tree.leaves(kind) if leaf.setting.loads_code}
    values = second_values(kind, chosen=CHOSEN.get(name), start_at=100)
    typed = every_second(values)
    for setting in not_in_files:
        typed[setting] = values[setting]
    in_file = second_values(kind, chosen=IN_FILE.get(name), start_at=200)
    in_file = unlike(in_file, typed, defaults_of(kind))
    for setting in not_in_files:
        del in_file[setting]
    lines = as_flags(kind, in_file)
    words = as_flags(kind, typed)
    if options.get("config"):
        typed_settings = every_second(second_values(ExperimentConfig, start_at=1000))
        settings = second_values(ExperimentConfig, start_at=2000)
        settings = unlike(settings, typed_settings, settings_of(options["config"]))
        lines += [*as_flags(ExperimentConfig, settings), f"--compat={COMPAT}"]
        words += as_flags(ExperimentConfig, typed_settings)
    (tmp_path / "mine.flags").write_text("\n".join(lines))

    started = start(name, "--flagfile=mine.flags", *words)

    expected = in_file | typed
    for leaf in config_tree.leaves(kind):
        # Each repeated flag adds an entry, to those of the file too.
        if leaf.setting.repeated and leaf.name in typed:
            expected[leaf.name] = in_file[leaf.name] + typed[leaf.name]
    assert_same(started.plan, absolute(kind, expected))
    assert started.job.flagfile == "mine"
    if options.get("config"):
        assert_same(started.config, config_with(options, settings | typed_settings))


def required(kind):
    """Returns the names of the settings that a plan requires."""
    return [leaf.name for leaf in config_tree.leaves(kind) if leaf.setting.required]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_setting_that_is_not_passed_has_its_default(declare, start, name):
    kind, options = declare(name)
    values = second_values(kind, chosen=CHOSEN.get(name), start_at=100)
    needed = [*required(kind), *NOT_EMPTY.get(name, ())]
    passed = {setting: values[setting] for setting in needed}

    started = start(name, *as_flags(kind, passed))

    assert_same(started.plan, absolute(kind, defaults_of(kind) | passed))
    if options.get("config"):
        config = options["config"]
        if options.get("by_corpus"):
            config = dataclasses.replace(config, data=default_data(config.data.corpus))
        assert_same(started.config, settings_of(config))


EVERY_ALIAS = []
for program, aliases in ALIASES.items():
    for alias in aliases:
        EVERY_ALIAS.append((program, alias))


@pytest.mark.parametrize(("name", "alias"), EVERY_ALIAS)
def test_an_alias_sets_its_own_setting_alone(declare, start, name, alias):
    """The settings of the program's other aliases keep their defaults."""
    kind, options = declare(name)
    setting = ALIASES[name][alias]
    value = second_values(ExperimentConfig, start_at=1000)[setting]
    words = [f"--{required_setting}=run" for required_setting in required(kind)]

    started = start(name, f"--{alias}={config_tree.format_value(value)}", *words)

    expected = absolute(ExperimentConfig, {setting: value})[setting]
    assert config_tree.get(started.config, setting) == expected
    for other in set(ALIASES[name].values()) - {setting}:
        default = config_tree.get(options["config"], other)
        assert config_tree.get(started.config, other) == default, other


# Programs that take the usual settings of the corpus that their flags name. Others belong to a
# corpus, or to a run.
BY_CORPUS = (
    "experiments.ensemble",
    "experiments.prepare",
    "experiments.paper.ablation",
    "experiments.bench.estimate",
    "experiments.bench.serving",
    "experiments.bench.speed",
)


@pytest.mark.parametrize("name", BY_CORPUS)
def test_a_corpus_that_is_named_brings_its_usual_settings(start, name):
    # Flags without which these programs do not start.
    needed = {
        "experiments.ensemble": ["--workdir=run"],
        "experiments.paper.ablation": ["--out=out"],
        "experiments.bench.estimate": ["--topology=h200"],
    }
    started = start(name, "--data.corpus=lm1b", *needed.get(name, ()))
    assert_same(started.config.data, settings_of(default_data(CorpusName.LM1B)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_word_that_is_not_a_flag_is_an_error_but_for_the_files_of_two_programs(start, name):
    if name == "experiments.compress":
        assert start(name, "text", "--out=text.txl").job.words == ["text"]
        return
    if name == "experiments.report":
        assert start(name, "runs/a", "runs/b").job.words == ["runs/a", "runs/b"]
        return

    code, _, errors = programs.run(name, "word")
    assert code == 2, errors
    assert "'word'" in errors


def test_processes_that_flags_announce_are_joined(start, monkeypatch):
    joined = []
    monkeypatch.setattr(other_hosts, "join", joined.append)
    # There are no other processes to compare the plan with.
    monkeypatch.setattr(other_hosts, "check_same", lambda plan: None)

    start("experiments.enwik8", "--coordinator=a:1", "--num_processes=3", "--process_id=2")

    [processes] = joined
    assert processes.arguments["coordinator_address"] == "a:1"
    assert processes.arguments["num_processes"] == 3
    assert processes.arguments["process_id"] == 2


@pytest.mark.parametrize("value", ["", "none"])
def test_a_value_that_is_not_of_the_settings_type_is_refused(value):
    """An empty value is a text or an empty list. Only optional settings may be none, and choices
    that have this name.
    """
    values = flags.FlagValues()
    flag_tree.define(ExperimentConfig(), values)
    tried = 0
    for leaf in flag_tree.setting_leaves(ExperimentConfig):
        is_choice = issubclass(leaf.type.kind, enum.Enum) and value in list(leaf.type.kind)
        may_be_none = value == "none" and leaf.type.is_optional
        is_empty_list = leaf.type.is_list and not value
        if leaf.type.kind is str or is_choice or may_be_none or is_empty_list:
            continue
        with pytest.raises(UserError, match=rf"{re.escape(leaf.name)}\b"):
            flag_tree.parse(["program", f"--{leaf.name}={value}"], values)
        tried += 1
    assert tried > 50, "most settings refuse it"


# A recorded run: typed settings win over its record, and the others are as recorded.


SETTINGS = list(flag_tree.setting_leaves(ExperimentConfig))
FREE = [leaf for leaf in SETTINGS if leaf.setting.free_on_resume]
# A trained run is used with its own vocabulary, whose files are not free then.
FREE_IN_USE = [leaf for leaf in FREE if not leaf.setting.shapes_tokens]
MAY_GROW = [leaf for leaf in SETTINGS if leaf.setting.may_grow]


@pytest.fixture
def recorded(compiled_in, tmp_path):
    """The config of a recorded run in the directory "run". Few settings have their default."""
    values = second_values(ExperimentConfig, start_at=3000)
    values["data.corpus"] = CorpusName.TEXT
    del values["data.tokenizer.min_count"]  # A vocabulary's file resets it.
    config = config_tree.replace(ExperimentConfig(), absolute(ExperimentConfig, values))
    text = TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes())
    return runs.record(tmp_path / "run", config, text).config


@pytest.fixture
def calls(monkeypatch):
    """Replaces what a corpus's command calls. Returns the positional arguments by function."""
    arguments_of = {}

    def replace(module, name, result=None):
        def keep(*arguments, **_):
            arguments_of[name] = arguments
            return result

        monkeypatch.setattr(module, name, keep)

    replace(train_command, "generate_text")
    replace(train_command, "continue_prompts")
    replace(score_splits, "evaluate_splits")
    replace(score_splits, "score_tokens")
    replace(score_input, "score_documents")
    replace(train_command, "train_run", Outcome(finished=False, step=1, results=None))
    monkeypatch.setattr(cli.Job, "corpus", lambda job, config, *rest: None)
    return arguments_of


def run_text(*words):
    code, _, errors = programs.run("experiments.text", "--workdir=run", *words)
    assert code == 0, errors


MODES = {
    "train": ("train_run", [*FREE, *MAY_GROW]),
    "eval": ("evaluate_splits", FREE_IN_USE),
    "score": ("score_tokens", FREE_IN_USE),
    "generate": ("generate_text", FREE_IN_USE),
}


@pytest.mark.parametrize("mode", MODES)
def test_typed_settings_win_over_the_record_of_a_run(recorded, calls, mode):
    function, leaves = MODES[mode]
    values = second_values(ExperimentConfig, start_at=4000)
    typed = {}
    for leaf in leaves:
        typed[leaf.name] = values[leaf.name]
        # Of two choices the second was recorded, and the first is typed.
        if config_tree.get(recorded, leaf.name) == typed[leaf.name]:
            typed[leaf.name] = leaf.default

    run_text(f"--mode={mode}", *as_flags(ExperimentConfig, typed))
    config, *_ = calls[function]
    expected = config_tree.replace(recorded, absolute(ExperimentConfig, typed))
    assert_same(config, settings_of(expected))
    changed = {leaf.name for leaf, *_ in config_tree.differences(recorded, config)}
    assert changed == typed.keys(), "each has another value than the record"

    run_text(f"--mode={mode}")
    config, *_ = calls[function]
    assert_same(config, settings_of(recorded))


OF_DOCUMENTS = [("score", "score_documents"), ("generate", "continue_prompts")]


@pytest.mark.parametrize(("mode", "function"), OF_DOCUMENTS)
def test_typed_settings_win_for_documents_of_a_file(recorded, calls, tmp_path, mode, function):
    values = second_values(ExperimentConfig, start_at=4000)
    typed = {}
    for leaf in FREE_IN_USE:
        if leaf.name.startswith(("eval.", "generate.")):
            typed[leaf.name] = values[leaf.name]
    (tmp_path / "in").write_text("")

    run_text(f"--mode={mode}", "--input=in", *as_flags(ExperimentConfig, typed))

    weights, _ = calls[function]
    expected = config_tree.replace(recorded, absolute(ExperimentConfig, typed))
    assert_same(weights.config, settings_of(expected))


@pytest.fixture
def own_run(compiled_in, tmp_path):
    """A recorded run in the directory "run", and the empty file "in"."""
    own = {"data.corpus": CorpusName.TEXT, "data.file": str(tmp_path / "book")}
    text = TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes())
    runs.record(tmp_path / "run", config_tree.replace(ExperimentConfig(), own), text)
    (tmp_path / "in").write_text("")


# Modes of a trained run with the flags of learning that are typed, without their group
# "eval.dynamic.", and the flags among them that have no effect. Only scoring learns, and `shared`
# is about documents of --input.
LEARNING_NOTES = {
    "--mode=train --rule=sgd --decay=0.5": {"rule", "decay"},
    "--mode=generate --rule=sgd": {"rule"},
    "--mode=generate --input=in --rule=sgd": {"rule"},
    "--mode=eval --rule=sgd --shared=true": {"shared"},
    "--mode=score --rule=sgd --shared=true": {"shared"},
    # A rate without a rule. Another one than the default would be an error.
    "--mode=eval --learning_rate=0.001": {"learning_rate"},
    "--mode=eval --rule=none": set(),
    "--mode=score --input=in --rule=sgd --shared=true": set(),
}


@pytest.mark.parametrize(("flags_of_learning", "unread"), LEARNING_NOTES.items())
@pytest.mark.usefixtures("own_run", "calls")
def test_flags_of_learning_have_no_effect_where_nothing_is_scored(flags_of_learning, unread):
    words = re.sub(r"--(?!mode|input)", "--eval.dynamic.", flags_of_learning).split()

    code, out, err = programs.run("experiments.text", "--workdir=run", *words)

    assert code == 0, err
    notes = re.findall(r"(?m)^note +no effect with .*", out + err)
    assert set(re.findall(r"--eval\.dynamic\.(\w+)", "".join(notes))) == unread


@pytest.mark.parametrize(("rule", "unread"), [("none", False), ("sgd", True)])
@pytest.mark.usefixtures("own_run", "calls")
def test_the_batch_has_no_effect_on_documents_that_are_learned(rule, unread):
    """They are learned one by one. Without a rule they are scored in batches."""
    words = [f"--eval.dynamic.rule={rule}", "--eval.batch_size=4"]

    code, out, err = programs.run(
        "experiments.text", "--workdir=run", "--mode=score", "--input=in", *words
    )

    assert code == 0, err
    assert bool(re.search(r"(?m)^note +no effect with .*--eval\.batch_size", out + err)) == unread
