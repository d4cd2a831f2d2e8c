"""Tests that the commands, settings, names and files in README and docs exist, and that the
examples run, in docstrings and docs/examples.

Each model of docs/examples solves a task that it cannot solve without the part that is shown.
"""

import ast
import configparser
import csv
import dataclasses
import doctest
import functools
import importlib
import importlib.util
import re
import runpy
import shlex

import numpy as np
import pytest

import txl_jax
from support import ROOT, drawn_run, programs
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import leaves
from txl_jax.config.experiment import evaluation_preset_names, preset_names

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "BUILD.md", ROOT / "CONTRIBUTING.md", *DOCS]
# Pages with names of code too.
PAGES_WITH_NAMES = [
    *PAGES,
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests" / "golden" / "README.md",
]
PLACEHOLDERS = {"FLAGS", "...", "NAME"}  # Words of the pages for what a reader fills in.
SETTINGS = {leaf.name for leaf in leaves(ExperimentConfig)}
SECTIONS = "model|data|optimizer|mesh|train|regularization|average|eval|generate"


def modules_with_examples():
    """Returns the paths of modules that have a doctest, relative to the root."""
    paths = []
    for package in ("txl_jax", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>>" in path.read_text():
                paths.append(path.relative_to(ROOT))
    assert len(paths) > 10, "examples are found"
    return paths


def commands(page):
    """Yields the words of each command that starts a program of this project.

    Without what follows a pipe or a redirection of errors.
    """
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m ((?:experiments|launch)\.[^\n`#]*)", text):
        if "$" not in line:  # Words that only a shell can read.
            yield shlex.split(re.split(r" 2>| \|", line)[0])


def test_commands_are_found_on_pages():
    """Else the next test passes on every page."""
    assert sum(len(list(commands(page))) for page in PAGES) > 60


@functools.cache
def flag_names(program, help_flag="--help"):
    """The flags that a program's --help or --helpfull lists, and the flags of every program."""
    _, out, _ = programs.run(program, help_flag)
    listed = re.findall(r"^ *--(?:\[no\])?([\w.]+)", out, flags=re.MULTILINE)
    return {*listed, "help", "helpfull", "flagfile"}


def flags_of(words):
    """Yields the words up to `--` that are flags. The others must not look like flags."""
    for word in words:
        if word == "--":
            return
        if word.startswith("--"):
            yield word
        else:
            assert word in PLACEHOLDERS or not word.startswith("-"), word


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page):
    flagfiles = preset_names() + evaluation_preset_names()
    for program, *words in commands(page):
        if program.startswith("launch.") or program == "experiments.NAME":
            continue  # tests/launch/test_docs.py runs those. NAME is a placeholder.
        for flag in flags_of(words):
            name, _, value = flag.removeprefix("--").partition("=")
            assert name in flag_names(program), (page.name, program, flag)
            if name == "flagfile" and value not in PLACEHOLDERS:
                assert value in flagfiles or "/" in value, (page.name, program, flag)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_setting_of_a_page_exists(page):
    """A page may also name a group of settings, such as `model.dropout`."""
    for name in re.findall(rf"--((?:{SECTIONS})\.[\w.]*\w)", page.read_text()):
        is_group = any(f"{name}." in setting for setting in SETTINGS)
        assert name in SETTINGS or is_group, name


PACKAGES = ("txl_jax", "experiments", "launch")
# Files that the pages name and this repository does not have.
FILES_ELSEWHERE = {
    "train.py": "the original release",
    "eval.py": "the original release",
    "argparse.py": "Python's standard library",
    "experiments/my_news.py": "the reader is to write it",
}


def inline_codes(page):
    """Yields each `code` of a page outside of its code blocks, up to an opening parenthesis."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        yield code.partition("(")[0]


@functools.cache
def modules_of_classes():
    """Returns the module of each class of txl_jax, by the class's name."""
    modules = {}
    for path in (ROOT / "txl_jax").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                modules[node.name] = module.removesuffix(".__init__")
    return modules


def has(value, name):
    """Returns whether a module or class has the name. A field without a default counts."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return hasattr(value, name) or name in {field.name for field in fields}


def class_has(class_name, name):
    """Returns whether a class of txl_jax has the name."""
    owner = getattr(importlib.import_module(modules_of_classes()[class_name]), class_name)
    return has(owner, name)


def name_exists(dotted):
    """Returns whether `package.module.name` is a module, or something in one."""
    parts = dotted.split(".")
    # Modules are only found, not run, because a program may need an extra.
    n_found = 1
    while n_found < len(parts):
        try:
            spec = importlib.util.find_spec(".".join(parts[: n_found + 1]))
        except ModuleNotFoundError:  # The name before is a module without submodules.
            break
        if spec is None:
            break
        n_found += 1
    if n_found == len(parts):
        return True

    value = importlib.import_module(".".join(parts[:n_found]))
    for name in parts[n_found:]:
        if not has(value, name):
            return False
        value = getattr(value, name, None)
    return True


def path_exists(path):
    """Returns whether a path of a page exists, from the root, from txl_jax or as a path's end."""
    # Words in capitals stand for any name.
    pattern = re.sub(r"\b[A-Z]{4,}\b", "*", path).rstrip("/")
    patterns = [pattern, f"txl_jax/{pattern}", f"txl_jax/{pattern}.py"]
    if path.endswith(".py"):
        # A list of files may name the directory only at its first one.
        patterns += [f"{folder}/**/{pattern}" for folder in (*PACKAGES, "docs", "tests")]
    return any(next(ROOT.glob(pattern), None) for pattern in patterns)


def names_something(code, *, folders):
    """Returns whether a code exists, or does not name a module, class or file of this project.

    Args:
      code: Text of a page, without an argument list.
      folders: Directories of the repository and of txl_jax.
    """
    in_folder = "/" in code and code.partition("/")[0] in folders
    if re.fullmatch(r"[\w./*-]+", code) and (in_folder or code.endswith(".py")):
        return path_exists(code)
    if not re.fullmatch(r"\w+(\.\w+)+", code) or code.endswith((".json", ".jsonl")):
        return True

    first, _, rest = code.partition(".")
    if first in PACKAGES:
        return name_exists(code)
    if first in modules_of_classes():
        return class_has(first, rest)
    if (ROOT / "txl_jax" / first).is_dir() or (ROOT / "txl_jax" / f"{first}.py").exists():
        # `memory.hidden` may be an attribute of an object of the class Memory.
        class_name = first.capitalize()
        is_attribute = class_name in modules_of_classes() and class_has(class_name, rest)
        return is_attribute or code in SETTINGS or name_exists(f"txl_jax.{code}")
    return True


def missing_names(page):
    """Yields each inline code of a page that names a module, class or file that does not exist."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    folders |= {path.name for path in (ROOT / "txl_jax").iterdir() if path.is_dir()}
    # Only the page about the structure of the code means packages by these names.
    if page.name != "architecture.md":
        folders -= {"runs", "data"}
    # A page may speak of a variable of its code blocks, such as `memory.valid`.
    variables = {code for code in inline_codes(page) if is_variable(code.partition(".")[0], page)}
    for code in inline_codes(page):
        if code in FILES_ELSEWHERE or code in variables:
            continue
        if not names_something(code, folders=folders):
            yield code


def is_variable(name, page):
    """Returns whether a code block of the page assigns a value to the name."""
    return re.search(rf"^ *(\w+, )*{re.escape(name)}(, \w+)* = ", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "page", PAGES_WITH_NAMES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_names_and_files_of_a_page_exist(page):
    """Modules, functions, methods and files in `code` that is not part of a code block."""
    assert list(missing_names(page)) == []


def anchors_of(page):
    """Returns the anchors of a page's headings, as forges make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        words = re.sub(r"[^\w\- ]", "", shown.strip().lower())
        anchors.add(words.replace(" ", "-"))
    return anchors


def missing_anchors(page):
    """Yields each link of a page to a heading of a Markdown file that does not exist."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", text):
        target = page.parent / path if path else page
        if target.suffix == ".md" and not (target.is_file() and anchor in anchors_of(target)):
            yield f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_that_a_page_links_to_exist(page):
    """`mkdocs build --strict` checks only links within docs, not to or from README."""
    assert list(missing_anchors(page)) == []


def test_a_link_to_a_heading_that_does_not_exist_is_noticed(tmp_path):
    (tmp_path / "README.md").write_text("# `txl_jax`\n\n## Install and [try it](a.md)!\n")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "[a](../README.md#install-and-try-it), [b](../README.md#install), [c](../README.md#txl_jax)"
        " [d](#here) [e](#there)\n## Here\n```sh\n# There\n```\n"
    )
    assert list(missing_anchors(page)) == ["../README.md#install", "#there"]


@pytest.mark.parametrize(
    "code",
    [
        "txl_jax.sharding.make_mesh",
        "txl_jax.sharding.meshes",
        "experiments.paper.table10",
        "Run.begin",
        "LanguageModel.tokens",
        "sharding.make_mesh(...)",
        "cli/runner.py",
        "tests/test_nothing.py",
        "no_such_file.py",
        "benchmarks/nothing.csv",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(code, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"Call `{code}` with `txl_jax.load` or `Run.read`, see `cli/app.py`.")
    assert list(missing_names(page)) == [code.partition("(")[0]]


# Abbreviated commits of other projects, which the pages and measurements name.
COMMITS_ELSEWHERE = {"44781ed", "dda9fd4", "40a186d", "3adf61e"}
MEASUREMENTS = sorted((ROOT / "benchmarks").glob("*.csv"))
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_no_page_measurement_or_message_names_a_commit():
    """A clone may not have it: the history before the first release is not published."""
    for path in [*PAGES_WITH_NAMES, *MEASUREMENTS, *SOURCES]:
        words = set(re.findall(r"\b[0-9a-f]{7,8}\b", path.read_text()))
        commits = {word for word in words if re.search("[a-f]", word) and re.search("[0-9]", word)}
        assert commits <= COMMITS_ELSEWHERE, path


def measured_commands(path):
    """Returns the commands of a file of measurements, which has a column for them.

    Commands that are marked as typed before 0.1, when programs had other names or numbers, are
    omitted.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    columns = [name for name in rows[0] if "command" in name]
    assert columns, path
    commands = {row[column] for row in rows for column in columns}
    return {command for command in commands if not command.startswith("before 0.1: ")}


def started_programs(command):
    """Yields the program (a module or a file) and the text behind it, of each in a command."""
    for start in re.split(r"(?=\bpython3? )", command):
        match = re.match(r"python3? (?:-m ([\w.]+)|(\S+\.py))(.*)", start, re.DOTALL)
        if match and match[1] not in ("venv", "pytest"):
            yield match[1] or match[2], match[3]


@pytest.mark.parametrize("path", MEASUREMENTS, ids=lambda path: path.stem)
def test_the_rows_of_measurements_have_all_columns(path):
    with path.open(newline="") as file:
        header, *rows = csv.reader(file, strict=True)
    assert len(set(header)) == len(header)
    for number, row in enumerate(rows, start=2):
        assert len(row) == len(header), f"line {number}"


@pytest.mark.parametrize("path", MEASUREMENTS, ids=lambda path: path.stem)
def test_commands_of_measurements_can_be_typed(path):
    """Each names a program that exists, and flags that it has."""
    for command in sorted(measured_commands(path)):
        for program, rest in started_programs(command):
            flags = re.findall(r"(?:^|\s)--([a-z][\w.]*)", rest.partition(" -- ")[0])
            if program.startswith("experiments."):
                assert name_exists(program), command
                assert set(flags) <= flag_names(program, "--helpfull"), command
            else:
                is_file = program.endswith(".py")
                source = ROOT / (program if is_file else f"{program.replace('.', '/')}.py")
                assert source.exists(), command
                for flag in flags:
                    assert f'"--{flag}"' in source.read_text(), command
        for name in re.findall(r"\b(?:txl_jax|experiments|launch)(?:\.\w+)+", command):
            assert name_exists(name), command


def test_a_command_of_a_program_that_is_gone_is_noticed(tmp_path):
    """Else the test before passes for every file."""
    path = tmp_path / "measurements.csv"
    for command in (
        "python -m experiments.bench.softmax --calls=3",
        "python -m experiments.bench.speed --vocab_size=3",
        "PYTHONPATH=. python tests/test_host_time.py",
        "python -m launch.sweep x.toml --halving=3",
        "python benchmarks/parity.py train --speed=3",
        "experiments.bench.speed.trainings of small",
    ):
        path.write_text(f'command,seconds\n"{command}",3\n')
        with pytest.raises(AssertionError):
            test_commands_of_measurements_can_be_typed(path)


def extras():
    """Returns the extras of the package, each with the names of its requirements."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return {
        extra: set(re.findall(r"^[\w-]+", requirements, re.MULTILINE))
        for extra, requirements in setup["options.extras_require"].items()
    }


def advice_to_install(package):
    """Yields the argument of each `pip install ARGUMENT` in the sources of a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text()
        for quoted, plain in re.findall(r"pip install (?:'([^']+)'|(\w[\w-]*))", text):
            yield quoted or plain


def test_the_library_advises_to_install_the_packages_of_its_extras():
    """No extra is named: the package is in no registry, and a user of the wheel has no clone."""
    known = set().union(*extras().values())
    advised = set(advice_to_install("txl_jax"))
    assert {"wandb", "tokenizers", "tensorflow-cpu"} <= advised
    assert advised <= known, advised - known


@pytest.mark.parametrize("package", ["experiments", "launch"])
def test_programs_advise_to_install_extras_of_the_clone(package):
    for argument in advice_to_install(package):
        if argument.startswith("."):
            for extra in argument.removeprefix(".[").removesuffix("]").split(","):
                assert extra in extras(), argument
        assert not argument.startswith("txl_jax"), argument


@pytest.mark.parametrize("path", modules_with_examples(), ids=str)
@pytest.mark.usefixtures("compiled_calls")
def test_examples_in_docstrings(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    assert doctest.testmod(module).failed == 0


def example(name):
    return runpy.run_path(str(ROOT / "docs" / "examples" / f"{name}.py"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["document_embeddings", "memory_policy", "speech_encoder"])
def test_an_example_runs(name):
    results = example(name)["main"](2)  # Two updates.
    assert len(results) == 2
    assert np.all(np.isfinite([*results.values()]))


@pytest.mark.full
def test_streamed_embeddings_are_means_of_the_hidden_states(tmp_path):
    model = txl_jax.load(drawn_run.of_words(tmp_path / "run").path)
    lines = drawn_run.TEXT[:400].splitlines(keepends=True)
    [hidden] = model.hidden_states([b"".join(lines)])
    assert len(hidden) > 5 * 9, "several passages of five tokens"

    embeddings = np.stack(list(example("document_embeddings")["stream"](model, lines, length=5)))

    expected = [hidden[first : first + 5].mean(axis=0) for first in range(0, len(hidden), 5)]
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=2e-5)


@pytest.mark.nightly(part="long")
@pytest.mark.parametrize(
    ("name", "least", "chance", "atol"),
    [
        # A mean over 20 updates, of some 4,100 episodes in all. Its standard deviation is 0.008.
        pytest.param("memory_policy", 0.97, 0.5, 0.03, id="memory_policy"),
        # A mean over 30 updates, of frames.
        pytest.param("speech_encoder", 0.85, 0.125, 0.015, id="speech_encoder"),
    ],
)
def test_only_the_whole_model_solves_the_task(name, least, chance, atol):
    """A model without the memory, or without the future, guesses."""
    whole, without = example(name)["main"]().values()
    assert whole > least
    assert without == pytest.approx(chance, abs=atol)


@pytest.mark.nightly(part="long")
def test_memory_finds_the_topic_as_far_back_as_it_reaches():
    module = example("document_embeddings")
    within, without = module["main"]().values()
    reach = module["CONFIG"].n_layer * module["MEM_LEN"] // module["PASSAGE"]
    chance = 1 / module["TOPICS"]

    assert within[: reach + 1].min() > 0.95
    # For 128 documents, a fraction of 1 in 8 has a standard deviation of 0.03. A document has the
    # same topic in all passages.
    assert within[reach + 1 :].mean() == pytest.approx(chance, abs=0.1)
    assert without[0] > 0.95
    assert without[1:].mean() == pytest.approx(chance, abs=0.1)
