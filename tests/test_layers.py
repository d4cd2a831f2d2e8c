"""Tests of the architecture: imports point down the layers, without cycles, and the library has no global effects."""

import ast
import collections
import functools
import graphlib
import json
import os
import subprocess
import sys

import pytest

from support import ROOT

PACKAGE = ROOT / "txl_jax"
# From the bottom up, as in docs/architecture.md: a file imports only from its own layer or from below.
LAYERS = (
    ("errors", "version"),
    ("config",),
    ("segments", "metrics"),
    ("runtime",),
    ("data",),
    ("losses",),
    ("memory", "recurrence"),
    ("sharding",),
    ("ops",),
    ("modules",),
    ("inference", "interop", "flops"),
    ("training",),
    ("evaluation",),
    ("assemble", "attention_choice", "placement"),
    ("jobs",),
    ("trained_model", "lm_eval_model"),
    ("serving",),
    ("bench",),
    ("paper",),
    ("run_report",),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
# The public API and `python -m txl_jax` are above all layers; nothing imports them.
ROOT_MODULES = ("txl_jax", "txl_jax.__main__")

# Folders that can be read by themselves, with all that they import.
SELF_CONTAINED = {
    "txl_jax.data.batches": ("txl_jax.config", "txl_jax.errors", "txl_jax.segments"),
    "txl_jax.data.sources": ("txl_jax.config", "txl_jax.errors", "txl_jax.runtime", "txl_jax.version"),
    "txl_jax.ops.attention": (
        "txl_jax.config",
        "txl_jax.errors",
        "txl_jax.ops.quantized",
        "txl_jax.ops.row_product",
        "txl_jax.sharding",
    ),
    "txl_jax.config": ("txl_jax.errors",),
    "txl_jax.runtime": ("txl_jax.errors", "txl_jax.version"),
}

# A folder of implementations in folders of their own, with what chooses among them and what they share.
IMPLEMENTATIONS = "txl_jax.ops.attention"

# Names of modules that occur twice, and why.
TWICE: dict[str, str] = {
    "attention": "the module in modules, the benchmark in bench",
    "dropout": "the hash of probabilities in ops/attention, the modules in modules",
    "relative": "the mathematics in ops/attention, the parameters in modules/positions",
    "ensemble": "the vmapped step in training, the whole run in jobs",
}


def module_name(path):
    """The dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_names(path):
    """The dotted names that a file imports, wherever in the file: `a.b` for `import a.b` and for `from a import b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_modules(path):
    """The modules of this package that a file imports."""
    for name in imported_names(path):
        if name.partition(".")[0] == "txl_jax":
            while name not in PATHS:
                name = name.rpartition(".")[0]
            yield name


@functools.cache
def imports():
    """The modules that each module imports. Not made when tests are collected: it parses every file."""
    return {name: set(imported_modules(path)) for name, path in PATHS.items()}


def test_every_file_belongs_to_a_layer():
    found = {name.split(".")[1] for name in PATHS if name not in ROOT_MODULES}
    assert found <= set(LAYER_OF)
    assert set(LAYER_OF) <= found, "a layer without files"


@pytest.mark.parametrize("name", [name for name in PATHS if name not in ROOT_MODULES])
def test_imports_point_down(name):
    own = name.split(".")[1]
    for other in sorted(imports()[name]):
        assert other not in ROOT_MODULES, f"{name} imports the public API"
        layer = other.split(".")[1]
        assert LAYER_OF[layer] <= LAYER_OF[own], f"{name} imports {other}, which is above it"


def test_no_imports_in_a_circle():
    list(graphlib.TopologicalSorter(imports()).static_order())  # Raises CycleError with the modules of a cycle.


def folder_of(path):
    """The dotted name of a file's folder; implementations count with the folder that chooses among them."""
    folder = ".".join(path.parent.relative_to(ROOT).parts)
    return IMPLEMENTATIONS if folder.startswith(f"{IMPLEMENTATIONS}.") else folder


def test_no_circle_of_folders():
    """A folder inside another counts by itself: `data.batches` beside `data`."""
    folder = {name: folder_of(path) for name, path in PATHS.items()}
    graph = collections.defaultdict(set)
    for name, others in imports().items():
        if name not in ROOT_MODULES:
            graph[folder[name]] |= {folder[other] for other in others} - {folder[name], "txl_jax"}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("folder", SELF_CONTAINED)
def test_a_self_contained_folder_imports_little(folder):
    allowed = (folder, *SELF_CONTAINED[folder])
    for name in PATHS:
        if name == folder or name.startswith(f"{folder}."):
            for other in imports()[name]:
                assert any(other == known or other.startswith(f"{known}.") for known in allowed), f"{name}: {other}"


def test_each_module_has_a_name_of_its_own():
    """But for implementations of the same thing, which have the same parts."""
    names = {name: path for name, path in PATHS.items() if name.count(".") < 4}
    count = collections.Counter(path.stem for path in names.values())
    twice = {stem for stem, number in count.items() if number > 1} - {"__init__", "__main__"}
    assert twice == set(TWICE)


def test_the_library_imports_no_program():
    for path in PATHS.values():
        assert not {name.partition(".")[0] for name in imported_names(path)} & {"experiments", "launch"}, path


def test_programs_know_nothing_of_who_launches_them():
    for path in (ROOT / "experiments").rglob("*.py"):
        assert "launch" not in {name.partition(".")[0] for name in imported_names(path)}, path


def dotted(node):
    """`a.b.c` of an attribute; empty if it is none of names alone."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


# Reading them makes a library depend on how a program was started.
INPUTS = {"sys.argv", "os.environ", "os.getenv", "os.environb"}
# Calling or setting them changes the whole process; only programs may.
GLOBALS = {
    "atexit.register",
    "faulthandler.enable",
    "jax.config.update",
    "locale.setlocale",
    "logging.basicConfig",
    "os.chdir",
    "os.putenv",
    "os.umask",
    "signal.signal",
    "socket.setdefaulttimeout",
    "sys.excepthook",
    "sys.setrecursionlimit",
    "sys.unraisablehook",
    "threading.excepthook",
    "warnings.filterwarnings",
    "warnings.simplefilter",
}
METHODS = {"addFilter", "addHandler", "setLevel", "basicConfig"}  # Of loggers.


def effects(path):
    """Names in a file that read the command line or the environment, or change the process."""
    tree = ast.parse(path.read_text())
    # A filter of warnings inside `with warnings.catch_warnings()` ends with it.
    passing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any(dotted(getattr(item.context_expr, "func", None)) == "warnings.catch_warnings" for item in node.items)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        if name in INPUTS or (name in GLOBALS and id(node) not in passing):
            yield name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield node.func.attr


# Packages without which a module cannot be imported.
OPTIONAL = {"lm_eval", "matplotlib", "prometheus_client", "sentencepiece", "starlette", "tokenizers", "torch"}
OPTIONAL |= {"transformers"}

# Effects that a program asks for: `with StopRequest()` puts the handlers back, the two that change logs are for good.
FOR_PROGRAMS = {
    "txl_jax/runtime/preemption.py": {"signal.signal"},
    "txl_jax/runtime/orbax_io.py": {"addFilter", "warnings.filterwarnings", "sys.unraisablehook"},
    "txl_jax/runtime/paths.py": {"addFilter"},
}
ONLY_PROGRAMS_CALL = {"StopRequest", "quiet_orbax", "shorten_storage_logs"}


@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_library_reads_no_flags_and_changes_nothing_global(path):
    assert set(effects(path)) == FOR_PROGRAMS.get(path.relative_to(ROOT).as_posix(), set())
    assert not {name for name in imported_names(path) if name.startswith("absl.flags") or name == "absl.app"}
    called = {
        dotted(node.func).rpartition(".")[2]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert not called & ONLY_PROGRAMS_CALL


def test_effects_are_found(tmp_path):
    """The check above can fail."""
    path = tmp_path / "example.py"
    path.write_text(
        "import os, signal, sys, warnings\n"
        "sys.excepthook = print\n"
        "a = os.environ['A']\n"
        "signal.signal(2, print)\n"
        "logger.addFilter(print)\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n"
        "warnings.filterwarnings('error')\n"
    )
    expected = {"sys.excepthook", "os.environ", "signal.signal", "addFilter", "warnings.filterwarnings"}
    assert set(effects(path)) == expected


IMPORT_ALL = """
import importlib, json, signal, sys
import jax

def state():
    handlers = {str(number): str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    return {name: str(value) for name, value in jax.config.values.items()} | handlers | {"hook": str(sys.excepthook)}

before, skipped = state(), []
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError as error:
        skipped.append(error.name)
# A setting may be new: jax 0.7 declares those of Pallas when that is imported.
changed = {name: [before[name], value] for name, value in state().items() if before.get(name, value) != value}
from jax._src import xla_bridge
print(json.dumps({"changed": changed, "skipped": skipped, "backends": list(xla_bridge._backends)}))
"""


def test_importing_the_library_changes_no_setting_of_jax_and_starts_no_device():
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps([name for name in PATHS if name != "txl_jax.__main__"])]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["changed"] == {} and found["backends"] == []
    assert set(found["skipped"]) <= OPTIONAL
