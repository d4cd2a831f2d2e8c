"""Tests that each flag of each program arrives in its plan or its config, from the command line and from a flagfile.

Programs start as from a shell, with a `run` that keeps what it gets. Values are derived from the declared types: a new
setting is covered at once, or its program refuses the derived value and this file needs an entry in `CHOSEN`.
"""

import dataclasses
import enum
import os
import re
import runpy

import pytest
from absl import flags

from experiments.__main__ import HEADINGS
from experiments.__main__ import programs as programs_in
from support import ROOT, programs, runs
from support.second_values import as_flags, second_values
from txl_jax import cli
from txl_jax.cli import flag_tree, other_hosts, program
from txl_jax.config import CorpusName, ExperimentConfig, config_tree
from txl_jax.config.experiment import apply_preset
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.published import default_data
from txl_jax.errors import UserError
from txl_jax.runs import score
from txl_jax.runs.run import TextInfo
from txl_jax.runs.trainer import Outcome


def file_of(name):
    return (ROOT / name.replace(".", "/")).with_suffix(".py")


def uses_cli(name):
    """Returns whether `cli.main` reads a program's flags. Launchers have parsers of their own."""
    text = file_of(name).read_text()
    return "cli.main(" in text or "train_main(" in text


PROGRAMS = [name for folder in HEADINGS for name in programs_in(folder) if uses_cli(name)]

# Values for plans that check theirs, by program and setting: on the command line, and in a flagfile.
CHOSEN = {
    "experiments.paper.recl": {"lengths": (7, 29, 4)},
    "experiments.bench.device": {"tasks": ("evaluation",), "paths": ("tiled",), "tiles": ("8x16", "32x64")},
    "experiments.bench.estimate": {"topology": ("v4:2x2x2",), "tasks": ("evaluation",), "configs": ("small",)},
    "experiments.bench.speed": {"tasks": ("evaluation",), "peer": "original"},
}
IN_FILE = {
    "experiments.paper.recl": {"lengths": (5, 30, 5)},
    "experiments.bench.device": {"tasks": ("training",), "paths": ("stored",), "tiles": ("4x4",)},
    "experiments.bench.estimate": {"topology": ("h200x8",), "tasks": ("training",), "configs": ("ptb", "small")},
    "experiments.bench.speed": {"tasks": ("training",), "peer": "original"},
}
NOT_EMPTY = {"experiments.bench.estimate": ("topology",)}  # Settings that a plan requires by its own check.
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
}
HOSTS = {"coordinator": "a:1", "num_processes": 3, "process_id": 2}


@pytest.fixture
def declare(monkeypatch):
    """Returns the class of a program's plan, and the arguments of its `cli.main`."""

    def declare(name):
        found = []
        with monkeypatch.context() as patch, programs.own_flags():
            for module in (cli, program):
                patch.setattr(module, "main", lambda run, plan, **options: found.append((plan, options)))
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
    compiled_in: dict[str, str | None]  # The arguments of `keep_compiled`.


@pytest.fixture
def compiled_in(monkeypatch, tmp_path):
    """Runs programs that do not check whether settings go together. Returns the arguments of `keep_compiled`."""
    found = {}

    def keep_compiled(data_dir, cache_dir, *, given):
        found.update(data_dir=data_dir, cache_dir=cache_dir, compilation_cache=given)

    monkeypatch.setattr(program, "keep_compiled", keep_compiled)
    monkeypatch.setattr(program, "check_file", lambda data: None)
    monkeypatch.setattr(ExperimentConfig, "validate", lambda config: None)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def start(monkeypatch, compiled_in):
    """Returns what a program makes of a command line."""
    real = program.main
    found = []

    def main(_run, plan_class, **options):
        def run(plan, job):
            config = job.config() if options.get("config") else None
            own = {name for name in flags.FLAGS if "txl_jax.cli" in str(flags.FLAGS.find_module_defining_flag(name))}
            found.append(Started(plan, job, config, own, compiled_in))

        real(run, plan_class, **options)

    def start(name, *words):
        code, _, errors = programs.run(name, *words)
        assert code == 0, f"{errors}If a derived value is refused, choose another in CHOSEN and IN_FILE."
        return found.pop()

    for module in (cli, program):
        monkeypatch.setattr(module, "main", main)
    return start


def absolute(kind, values):
    """Returns the values as a plan or a config has them: paths do not depend on the current directory."""
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


def assert_same(found, expected):
    """Compares the settings of a plan or a config with those of another, or of a dictionary, and names the others."""
    wanted = expected
    if not isinstance(expected, dict):
        wanted = {leaf.name: config_tree.get(expected, leaf.name) for leaf in config_tree.leaves(type(expected))}
    got = {leaf.name: config_tree.get(found, leaf.name) for leaf in config_tree.leaves(type(found))}
    different = [name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name)]
    assert {name: (got.get(name), wanted.get(name)) for name in different} == {}


def every_second(values):
    return dict(list(values.items())[::2])


def config_with(options, values):
    """Returns the config of a program's defaults and the settings of a command line that also has `--compat`."""
    base = apply_preset(options["config"], COMPAT)
    return config_tree.replace(base, absolute(ExperimentConfig, values))


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_typed_flag_arrives(declare, start, name):
    kind, options = declare(name)
    values = second_values(kind, chosen=CHOSEN.get(name), start_at=100)
    words = as_flags(kind, values)
    known = {flag_tree.flag_name(leaf) for leaf in config_tree.leaves(kind)} | ALIASES.get(name, {}).keys()
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
    folders = {name: getattr(found.plan, name, None) for name in ("data_dir", "cache_dir", "compilation_cache")}
    assert found.compiled_in == folders


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_flag_of_a_flagfile_arrives_unless_it_is_typed_behind_the_file(declare, start, tmp_path, name):
    """The file gives every flag a value, and every second flag is typed as well, with another value."""
    kind, options = declare(name)
    values = second_values(kind, chosen=IN_FILE.get(name), start_at=200)
    typed = every_second(second_values(kind, chosen=CHOSEN.get(name), start_at=100))
    lines = as_flags(kind, values)
    words = as_flags(kind, typed)
    if options.get("config"):
        settings = second_values(ExperimentConfig, start_at=2000)
        typed_settings = every_second(second_values(ExperimentConfig, start_at=1000))
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


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name in ALIASES for alias in ALIASES[name]])
def test_an_alias_sets_its_own_setting_alone(declare, start, name, alias):
    _, options = declare(name)
    setting = ALIASES[name][alias]
    value = second_values(ExperimentConfig, start_at=1000)[setting]
    found = start(name, f"--{alias}={config_tree.format_value(value)}")
    [given] = absolute(ExperimentConfig, {setting: value}).values()
    assert config_tree.get(found.config, setting) == given
    for other in set(ALIASES[name].values()) - {setting}:
        assert config_tree.get(found.config, other) == config_tree.get(options["config"], other)


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
    """An empty value is a text or an empty list, and does not mean none. Only optional settings may be none."""
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
# A trained run is used with its own vocabulary, so that the files of a vocabulary are not free then.
FREE_IN_USE = [leaf for leaf in FREE if not leaf.setting.shapes_tokens]
MAY_GROW = [leaf for leaf in flag_tree.setting_leaves(ExperimentConfig) if leaf.setting.may_grow]


@pytest.fixture
def recorded(compiled_in, tmp_path):
    """The recorded config of a run in the current directory's "run". Nearly all of its settings have other values."""
    values = second_values(ExperimentConfig, start_at=3000)
    values["data.corpus"] = CorpusName.TEXT
    del values["data.tokenizer.min_count"]  # A vocabulary's file resets it.
    config = config_tree.replace(ExperimentConfig(), absolute(ExperimentConfig, values))
    text = TextInfo("text", "own text", "d" * 64, ByteVocabulary.all_bytes())
    return runs.record(tmp_path / "run", config, text).config


@pytest.fixture
def calls(monkeypatch):
    """Replaces what a corpus's command calls. Returns the arguments of each such function by its name."""
    found = {}

    def replace(module, name, result=None):
        def keep(*arguments, **named):
            found[name] = (arguments, named)
            return result

        monkeypatch.setattr(module, name, keep)

    for name in ("generate_text", "continue_prompts"):
        replace(program, name)
    for name in ("evaluate_splits", "score_tokens", "score_documents"):
        replace(score, name)
    replace(program, "train_run", Outcome(finished=False, step=1, results=None))
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
    defaults = {leaf.name: leaf.default for leaf in leaves if config_tree.get(recorded, leaf.name) == values[leaf.name]}
    typed = {leaf.name: values[leaf.name] for leaf in leaves} | defaults
    run_text(f"--mode={mode}", *as_flags(ExperimentConfig, typed))
    (config, *_), _ = calls[function]
    expected = config_tree.replace(recorded, absolute(ExperimentConfig, typed))
    assert_same(config, expected)
    changed = {leaf.name for leaf, *_ in config_tree.differences(recorded, config)}
    assert changed == typed.keys(), "each has another value than the record"

    run_text(f"--mode={mode}")
    (config, *_), _ = calls[function]
    assert_same(config, recorded)


@pytest.mark.parametrize(("mode", "function"), [("score", "score_documents"), ("generate", "continue_prompts")])
def test_typed_settings_win_over_the_record_for_documents_of_a_file(recorded, calls, tmp_path, mode, function):
    values = second_values(ExperimentConfig, start_at=4000)
    typed = {leaf.name: values[leaf.name] for leaf in FREE_IN_USE if leaf.name.startswith(("eval.", "generate."))}
    (tmp_path / "in").write_text("")
    run_text(f"--mode={mode}", "--input=in", *as_flags(ExperimentConfig, typed))
    (weights, _), _ = calls[function]
    expected = config_tree.replace(recorded, absolute(ExperimentConfig, typed))
    assert_same(weights.config, expected)
