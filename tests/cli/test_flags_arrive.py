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


PROGRAMS = [name for folder in HEADINGS for name in programs_in(folder) if uses_cli(name)]

# Values for plans that check theirs, by program and setting: typed ones, and those of a flagfile.
CHOSEN = {
    "experiments.paper.attention": {"heads": ("0.1", "1.0")},
    "experiments.paper.recl": {"lengths": (7, 29, 4)},
    "experiments.bench.device": {
        "tasks": ("evaluation",),
        "paths": ("tiled",),
        "tiles": ("8x16", "32x64"),
    },
    "experiments.bench.estimate": {
        "topology": ("v4:2x2x2",),
        "tasks": ("evaluation",),
        "configs": ("small",),
    },
    "experiments.bench.session": {"parts": ("peaks",), "inside": "step"},
    "experiments.bench.speed": {"tasks": ("evaluation",), "peer": "original"},
    "experiments.tune_dynamic": {"learning_rates": (0.5, 0.25), "decays": (0.125,)},
}
IN_FILE = {
    "experiments.paper.attention": {"heads": ("1.1",)},
    "experiments.paper.recl": {"lengths": (5, 30, 5)},
    "experiments.bench.device": {"tasks": ("training",), "paths": ("stored",), "tiles": ("4x4",)},
    "experiments.bench.estimate": {
        "topology": ("h200x8",),
        "tasks": ("training",),
        "configs": ("ptb", "small"),
    },
    "experiments.bench.session": {"parts": ("step", "step_12l"), "inside": "attention"},
    "experiments.bench.speed": {"tasks": ("training",), "peer": "original"},
    "experiments.tune_dynamic": {"learning_rates": (0.75,), "decays": (0.375, 0.5)},
}
# Settings that a plan requires by its own check.
NOT_EMPTY = {"experiments.bench.estimate": ("topology",)}
COMPAT = "nvidia"
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
HOSTS = {"coordinator": "a:1", "num_processes": 3, "process_id": 2}


@pytest.fixture
def declare(monkeypatch):
    """Returns the class of a program's plan, and the arguments of its `cli.main`."""

    def declare(name):
        found = []

        def main(run, plan, **options):
            found.append((plan, options))

        with monkeypatch.context() as patch, programs.own_flags():
            for module in (cli, train_command):
                patch.setattr(module, "main", main)
            runpy.run_path(str(file_of(name)), run_name="__main__")
        [(plan, options)] = found
        return plan, options

    return declare


@dataclasses.dataclass
class Started:
    """What a program made of its command line."""

    plan: cli.Plan
    job: cli.Job
    config: ExperimentConfig | None
    flags: set[str]  # The project's own.
    compiled_in: dict[str, Any]  # The arguments of `keep_compiled`.


@pytest.fixture
def compiled_in(monkeypatch, tmp_path):
    """Runs programs that do not check whether settings go together.

    Returns the arguments of `keep_compiled`.
    """
    found = {}

    def keep_compiled(named, *, by_default):
        found.update(named=named, by_default=by_default)

    monkeypatch.setattr(app, "keep_compiled", keep_compiled)
    monkeypatch.setattr(precedence, "check_file", lambda data: None)
    monkeypatch.setattr(ExperimentConfig, "validate", lambda config: None)
    monkeypatch.chdir(tmp_path)
    return found


def own_flags():
    """Returns the project's own flags."""
    module_of = flags.FLAGS.find_module_defining_flag
    return {name for name in flags.FLAGS if "txl_jax.cli" in str(module_of(name))}


@pytest.fixture
def start(monkeypatch, compiled_in):
    """Returns what a program makes of a command line."""
    real = app.main
    found = []

    def main(_run, plan_class, **options):
        def run(plan, job):
            config = job.config() if options.get("config") else None
            found.append(Started(plan, job, config, own_flags(), compiled_in))

        real(run, plan_class, **options)

    def start(name, *words):
        code, _, errors = programs.run(name, *words)
        assert code == 0, f"{errors}For a derived value choose another in CHOSEN and IN_FILE."
        return found.pop()

    for module in (cli, train_command):
        monkeypatch.setattr(module, "main", main)
    return start


def absolute(kind, values):
    """Returns the values as a plan or a config has them, with absolute paths."""
    made = dict(values)
    for leaf in config_tree.leaves(kind):
        value = made.get(leaf.name)
        if not leaf.setting.path or not value:
            continue
        if isinstance(value, tuple):
            made[leaf.name] = tuple(os.path.abspath(entry) for entry in value)
        else:
            made[leaf.name] = os.path.abspath(value)
    return made


def settings_of(config):
    names = [leaf.name for leaf in config_tree.leaves(type(config))]
    return {name: config_tree.get(config, name) for name in names}


def assert_same(found, expected):
    """Names the settings of a plan or a config that differ from the expected ones."""
    wanted = expected if isinstance(expected, dict) else settings_of(expected)
    got = settings_of(found)
    different = [name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name)]
    assert {name: (got.get(name), wanted.get(name)) for name in different} == {}


def every_second(values):
    return dict(list(values.items())[::2])


def unlike(kind, values, typed, defaults=None):
    """Returns the values of a flagfile, with the default where the same value is typed."""
    made = dict(values)
    for leaf in config_tree.leaves(kind):
        if leaf.name in typed and typed[leaf.name] == made[leaf.name]:
            made[leaf.name] = config_tree.get(defaults, leaf.name) if defaults else leaf.default
    return made


def config_with(options, values):
    """Returns the config of a command line that also has `--compat`."""
    base = apply_preset(options["config"], COMPAT)
    return config_tree.replace(base, absolute(ExperimentConfig, values))


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

    found = start(name, *words)
    assert_same(found.plan, absolute(kind, values))
    assert all(place == "" for place in found.job.places.values())
    if options.get("config"):
        assert_same(found.config, config_with(options, settings))
    assert found.flags == known, "each flag has a value here"
    assert found.compiled_in == {
        "named": found.plan.compilation_cache,
        "by_default": hasattr(found.plan, "data_dir") or name == "experiments.quickstart",
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_flag_of_a_file_arrives_unless_it_is_typed_behind_it(declare, start, tmp_path, name):
    """The file gives every flag a value, and every second flag is typed as well, with another."""
    kind, options = declare(name)
    code = {leaf.name for leaf in config_tree.leaves(kind) if leaf.setting.loads_code}
    values = second_values(kind, chosen=CHOSEN.get(name), start_at=100)
    # A file may not set these.
    typed = every_second(values) | {name: values[name] for name in code}
    values = second_values(kind, chosen=IN_FILE.get(name), start_at=200)
    values = unlike(kind, values, typed)
    lines = as_flags(kind, {name: value for name, value in values.items() if name not in code})
    words = as_flags(kind, typed)
    if options.get("config"):
        typed_settings = every_second(second_values(ExperimentConfig, start_at=1000))
        settings = second_values(ExperimentConfig, start_at=2000)
        settings = unlike(ExperimentConfig, settings, typed_settings, options["config"])
        lines += [*as_flags(ExperimentConfig, settings), f"--compat={COMPAT}"]
        words += as_flags(ExperimentConfig, typed_settings)
    (tmp_path / "mine.flags").write_text("\n".join(lines))

    found = start(name, "--flagfile=mine.flags", *words)
    for leaf in config_tree.leaves(kind):
        if leaf.setting.repeated and leaf.name in typed:  # Each flag adds an entry.
            typed[leaf.name] = values[leaf.name] + typed[leaf.name]
    assert_same(found.plan, absolute(kind, values | typed))
    assert found.job.flagfile == "mine"
    if options.get("config"):
        assert_same(found.config, config_with(options, settings | typed_settings))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_not_passed_has_its_default(declare, start, name):
    kind, options = declare(name)
    values = second_values(kind, chosen=CHOSEN.get(name), start_at=100)
    needed = [leaf.name for leaf in config_tree.leaves(kind) if leaf.setting.required]
    needed += NOT_EMPTY.get(name, ())
    defaults = {leaf.name: leaf.default for leaf in config_tree.leaves(kind)}
    values = {name: values[name] for name in needed}
    found = start(name, *as_flags(kind, values))
    assert_same(found.plan, absolute(kind, defaults | values))
    if options.get("config"):
        config = options["config"]
        if options.get("by_corpus"):
            config = dataclasses.replace(config, data=default_data(config.data.corpus))
        assert_same(found.config, config)


EVERY_ALIAS = [(name, alias) for name in ALIASES for alias in ALIASES[name]]


@pytest.mark.parametrize(("name", "alias"), EVERY_ALIAS)
def test_an_alias_sets_its_own_setting_alone(declare, start, name, alias):
    kind, options = declare(name)
    setting = ALIASES[name][alias]
    value = second_values(ExperimentConfig, start_at=1000)[setting]
    needed = [leaf.name for leaf in config_tree.leaves(kind) if leaf.setting.required]
    words = [f"--{name}=run" for name in needed]
    found = start(name, f"--{alias}={config_tree.format_value(value)}", *words)
    [given] = absolute(ExperimentConfig, {setting: value}).values()
    assert config_tree.get(found.config, setting) == given
    for other in set(ALIASES[name].values()) - {setting}:
        assert config_tree.get(found.config, other) == config_tree.get(options["config"], other)


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
    needed = {
        "experiments.ensemble": ["--workdir=run"],
        "experiments.paper.ablation": ["--out=out"],
        "experiments.bench.estimate": ["--topology=h200"],
    }
    found = start(name, "--data.corpus=lm1b", *needed.get(name, ()))
    assert_same(found.config.data, default_data(CorpusName.LM1B))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_word_that_is_not_a_flag_is_an_error_but_for_the_files_of_two_programs(start, name):
    if name == "experiments.compress":
        assert start(name, "text", "--out=text.txl").job.words == ["text"]
        return
    if name == "experiments.report":
        assert start(name, "runs/a", "runs/b").job.words == ["runs/a", "runs/b"]
        return
    code, _, errors = programs.run(name, "word")
    assert code == 2 and "'word'" in errors


def test_processes_that_flags_announce_are_joined(start, monkeypatch):
    joined = []
    monkeypatch.setattr(other_hosts, "join", joined.append)
    monkeypatch.setattr(other_hosts, "check_same", lambda plan: None)
    start("experiments.enwik8", *(f"--{name}={value}" for name, value in HOSTS.items()))
    [several] = joined
    expected = {"coordinator_address": "a:1", "num_processes": 3, "process_id": 2}
    assert expected.items() <= several.arguments.items()


@pytest.mark.parametrize("value", ["", "none"])
def test_a_value_that_is_not_of_the_settings_type_is_refused(value):
    """An empty value is a text or an empty list. Only optional settings may be none."""
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
    assert tried > 50


# A recorded run: typed settings win over its record, and the others are as recorded.


FREE = [leaf for leaf in flag_tree.setting_leaves(ExperimentConfig) if leaf.setting.free_on_resume]
# A trained run is used with its own vocabulary, whose files are not free then.
FREE_IN_USE = [leaf for leaf in FREE if not leaf.setting.shapes_tokens]
MAY_GROW = [leaf for leaf in flag_tree.setting_leaves(ExperimentConfig) if leaf.setting.may_grow]


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
    """Replaces what a corpus's command calls. Returns the arguments by function."""
    found = {}

    def replace(module, name, result=None):
        def keep(*arguments, **named):
            found[name] = (arguments, named)
            return result

        monkeypatch.setattr(module, name, keep)

    for name in ("generate_text", "continue_prompts"):
        replace(train_command, name)
    replace(score_splits, "evaluate_splits")
    replace(score_splits, "score_tokens")
    replace(score_input, "score_documents")
    replace(train_command, "train_run", Outcome(finished=False, step=1, results=None))
    monkeypatch.setattr(cli.Job, "corpus", lambda job, config, *rest: None)
    return found


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
    # Of two choices the second was recorded, and the first is typed.
    typed = {leaf.name: values[leaf.name] for leaf in leaves}
    for leaf in leaves:
        if config_tree.get(recorded, leaf.name) == typed[leaf.name]:
            typed[leaf.name] = leaf.default
    run_text(f"--mode={mode}", *as_flags(ExperimentConfig, typed))
    (config, *_), _ = calls[function]
    expected = config_tree.replace(recorded, absolute(ExperimentConfig, typed))
    assert_same(config, expected)
    changed = {leaf.name for leaf, *_ in config_tree.differences(recorded, config)}
    assert changed == typed.keys(), "each has another value than the record"

    run_text(f"--mode={mode}")
    (config, *_), _ = calls[function]
    assert_same(config, recorded)


OF_DOCUMENTS = [("score", "score_documents"), ("generate", "continue_prompts")]


@pytest.mark.parametrize(("mode", "function"), OF_DOCUMENTS)
def test_typed_settings_win_for_documents_of_a_file(recorded, calls, tmp_path, mode, function):
    values = second_values(ExperimentConfig, start_at=4000)
    names = [leaf.name for leaf in FREE_IN_USE if leaf.name.startswith(("eval.", "generate."))]
    typed = {name: values[name] for name in names}
    (tmp_path / "in").write_text("")
    run_text(f"--mode={mode}", "--input=in", *as_flags(ExperimentConfig, typed))
    (weights, _), _ = calls[function]
    expected = config_tree.replace(recorded, absolute(ExperimentConfig, typed))
    assert_same(weights.config, expected)


@pytest.fixture
def own_run(compiled_in, tmp_path):
    """A recorded run in the directory "run", and the empty file "in"."""
    own = {"data.corpus": CorpusName.TEXT, "data.file": str(tmp_path / "book")}
    text = TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes())
    runs.record(tmp_path / "run", config_tree.replace(ExperimentConfig(), own), text)
    (tmp_path / "in").write_text("")


LEARNING_NOTES = [
    # Mode, typed flags, and those without effect.
    ("train", {"rule": "sgd", "decay": "0.5"}, {"rule", "decay"}),
    ("generate", {"rule": "sgd"}, {"rule"}),
    ("generate --input=in", {"rule": "sgd"}, {"rule"}),
    ("eval", {"rule": "sgd", "shared": "true"}, {"shared"}),
    ("score", {"rule": "sgd", "shared": "true"}, {"shared"}),
    # The default rate, so that it is no error.
    ("eval", {"learning_rate": "0.001"}, {"learning_rate"}),
    ("eval", {"rule": "none"}, set()),
    ("score --input=in", {"rule": "sgd", "shared": "true"}, set()),
]


@pytest.mark.parametrize(("mode", "typed", "unread"), LEARNING_NOTES)
@pytest.mark.usefixtures("own_run", "calls")
def test_flags_of_learning_have_no_effect_where_nothing_is_scored(mode, typed, unread):
    words = [f"--eval.dynamic.{name}={value}" for name, value in typed.items()]

    code, out, err = programs.run(
        "experiments.text", "--workdir=run", *f"--mode={mode}".split(), *words
    )

    assert code == 0, err
    notes = re.findall(r"(?m)^note +no effect with .*", out + err)
    assert set(re.findall(r"--eval\.dynamic\.(\w+)", "".join(notes))) == unread


@pytest.mark.parametrize(("rule", "unread"), [("none", False), ("sgd", True)])
@pytest.mark.usefixtures("own_run", "calls")
def test_the_batch_has_no_effect_on_documents_that_are_learned(rule, unread):
    words = [f"--eval.dynamic.rule={rule}", "--eval.batch_size=4"]

    code, out, err = programs.run(
        "experiments.text", "--workdir=run", "--mode=score", "--input=in", *words
    )

    assert code == 0, err
    assert bool(re.search(r"(?m)^note +no effect with .*--eval\.batch_size", out + err)) == unread
