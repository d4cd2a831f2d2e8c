"""Tests that imports never point up: the floors are those of BUILD.md's map."""

import ast

import pytest

from support import ROOT

FLOORS = [
    ["config", "config_tree", "axes"],
    ["ops", "memory", "losses", "metrics", "flops"],
    ["modules"],
    ["recurrence", "inference", "readers", "sharding", "data", "checkpoint", "run_log", "processes"],
    ["training", "evaluation", "generation", "analysis", "interop"],
    ["assemble", "report", "workdir"],
    ["jobs"],
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in (ROOT / "txl_jax").rglob("*.py") if path != ROOT / "txl_jax" / "__init__.py")


def rooms_imported(path):
    """The parts of txl_jax that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "txl_jax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([node.module.split(".")[1]] if node.module.startswith("txl_jax.") else [])
            assert not node.module.startswith(("experiments", "launch")), f"{path.name} imports a program"
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("txl_jax."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path):
    own = path.relative_to(ROOT / "txl_jax").parts[0].removesuffix(".py")
    for room in rooms_imported(path):
        assert FLOOR_OF[room] <= FLOOR_OF[own], f"{own} (floor {FLOOR_OF[own]}) imports {room} (floor {FLOOR_OF[room]})"


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda path: path.name)
def test_programs_know_nothing_of_who_launches_them(path):
    for node in ast.walk(ast.parse(path.read_text())):
        named = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
        )
        assert not any((name or "").partition(".")[0] == "launch" for name in named)


def test_the_library_reads_no_flags_and_no_environment():
    for path in FILES:
        text = path.read_text()
        for word in ("absl.flags", "from absl import flags", "sys.argv", "os.environ"):
            assert word not in text, f"{path.name} has {word}"
