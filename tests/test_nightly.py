"""Tests `.ci/nightly`: its table, the order in which parts are due, and which parts `.ci/run`
starts.
"""

import configparser
import dataclasses
import importlib.machinery
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import ROOT

NIGHTLY = ROOT / ".ci" / "nightly"
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def load_script():
    """Imports `.ci/nightly`, whose name has no suffix, and the module next to it."""
    loader = importlib.machinery.SourceFileLoader("nightly", str(NIGHTLY))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("nightly", loader))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(NIGHTLY.parent))
        patch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(module)
    return module


script = load_script()
PARTS, MACHINES = script.nightly_parts.read_parts()
MARK = re.compile(r"""nightly\(part=(?:'|")(\w+)(?:'|")\)""")


def marks_of_tests():
    """Returns the names of nightly parts that the tests' marks have."""
    names = set()
    for file in (ROOT / "tests").rglob("*.py"):
        if file != Path(__file__):
            names.update(MARK.findall(file.read_text()))
    return names


def test_each_mark_has_its_parts_and_each_part_its_mark():
    selected = set()
    for part in PARTS:
        if mark := MARK.fullmatch(part.select or ""):
            selected.add(mark[1])
    marks = marks_of_tests()
    assert len(marks) > 10
    assert selected == marks


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_row_of_the_table_is_whole(part):
    assert 0 < part.minutes <= script.nightly_parts.MAX_MINUTES
    assert part.install or part.constraints
    assert part.covers
    for pattern in part.covers:
        assert list(ROOT.glob(pattern.removesuffix("/**"))), f"{pattern} matches no file"
    for path in part.paths:
        assert (ROOT / path.partition("::")[0]).exists(), path


def split_parts():
    """Yields the parts with the same tests, apart from their paths, if there is more than one."""
    groups = {}
    for part in PARTS:
        environment = tuple(sorted(part.environment.items()))
        tests = (part.select, environment, part.constraints, part.python)
        groups.setdefault(tests, []).append(part)
    for group in groups.values():
        if len(group) > 1:
            yield pytest.param(group, id=group[0].name)


@pytest.mark.parametrize("group", list(split_parts()))
def test_the_parts_of_a_split_have_all_its_tests_once(group):
    """All parts but one name paths, and that one has the rest. So a new test is in exactly one
    part.
    """
    [rest] = [part for part in group if not part.paths]
    paths = []
    for part in group:
        paths.extend(part.paths)
    assert sorted(paths) == sorted(rest.rest_of)
    for path in paths:
        inside = [other for other in paths if other != path and other.startswith(path)]
        assert inside == [], path


def test_the_newest_python_is_the_one_that_the_readme_names():
    readme = (ROOT / "README.md").read_text()
    [(oldest, newest)] = re.findall(r"Python (3\.\d+) to (3\.\d+)", readme)

    by_name = {part.name: part for part in PARTS}
    assert by_name["newest"].python == newest

    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    classifiers = re.findall(r"Python :: (3\.\d+)", settings["metadata"]["classifiers"])
    assert classifiers[0] == oldest
    assert classifiers[-1] == newest

    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    [matrix] = re.findall(r"python-version: (\[.*\])", workflow)
    assert json.loads(matrix) == classifiers


@dataclasses.dataclass
class FakeHistory:
    """Commits named by how far they are behind HEAD, and the files that changed since the oldest
    commit.
    """

    changed: tuple[str, ...] = ()

    def commits_since(self, commit):
        return float(commit) if commit.isdigit() else math.inf

    def has_changed(self, commit, patterns):
        assert commit.isdigit()
        return bool(set(patterns) & set(self.changed))


def part(name, *, passed="1", covers=("file",), minutes=5.0):
    return script.Part(
        name=name,
        about=name,
        minutes=minutes,
        machine="here",
        passed=passed,
        covers=covers,
        install=((name,),),
    )


def test_changed_parts_come_first_and_then_those_that_passed_farthest_back():
    rows = [
        part("recent", passed="2", covers=("same",)),
        part("old", passed="30", covers=("same",)),
        part("changed_recently", passed="1", covers=("same", "file")),
        part("changed_long_ago", passed="20"),
        part("also_changed_long_ago", passed="20"),
        part("never", passed="never", covers=("same",)),
    ]
    order = script.nightly_parts.due_order(rows, FakeHistory(changed=("file",)))
    names = [due.part.name for due in order]
    assert names == [
        "never",
        "changed_long_ago",
        "also_changed_long_ago",
        "changed_recently",
        "old",
        "recent",
    ]


@pytest.fixture
def repository(tmp_path):
    """A repository with three commits: to a.py, to b.py, and to a file of a subdirectory.

    Returns its directory, the commits, and a commit of another branch.
    """

    def git(*words):
        identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.com"]
        done = subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    commits = []
    for name in ("a.py", "b.py", "room/deep/c.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
        git("add", ".")
        git("commit", "--quiet", "--message", name)
        commits.append(git("rev-parse", "HEAD"))
    git("branch", "side", commits[0])
    git("checkout", "--quiet", "side")
    (tmp_path / "d.py").write_text("d")
    git("add", ".")
    git("commit", "--quiet", "--message", "d.py")
    off_branch = git("rev-parse", "HEAD")
    git("checkout", "--quiet", "-")
    return tmp_path, commits, off_branch


@needs_git
def test_git_tells_what_changed_since_a_part_passed(repository):
    folder, commits, off_branch = repository
    history = script.Git(folder)

    assert [history.commits_since(commit) for commit in commits] == [2, 1, 0]
    for missing in (off_branch, "0" * 40, "never"):
        assert math.isinf(history.commits_since(missing)), missing

    assert history.has_changed(commits[0], ["b.py"])
    assert not history.has_changed(commits[0], ["a.py"])
    assert history.has_changed(commits[0], ["a.py", "room/**"])
    assert not history.has_changed(commits[2], ["**"])

    (folder / "a.py").write_text("not committed")
    assert history.has_changed(commits[2], ["a.py"])


@needs_git
def test_a_part_is_recorded_at_a_commit_of_the_history_only(repository):
    folder, commits, off_branch = repository
    history = script.Git(folder)
    assert history.commit(commits[1][:8]) == commits[1]
    for unknown in (off_branch, "0" * 40, "nothing"):
        with pytest.raises(ValueError, match="--at"):
            history.commit(unknown)


def test_recording_changes_the_named_rows_only():
    text = script.TABLE.read_text()
    expected = list(PARTS)
    for number in (0, 1):
        expected[number] = dataclasses.replace(PARTS[number], passed="c0ffee")
    names = [PARTS[0].name, PARTS[1].name]

    changed = script.nightly_parts.record_passed(text, names, "c0ffee")

    parts, machines = script.nightly_parts.read_parts(changed)
    assert list(parts) == expected
    assert machines == MACHINES
    assert len(changed.splitlines()) == len(text.splitlines())


@dataclasses.dataclass
class FakeRuns:
    """Runs of parts that take their minutes on a clock of their own."""

    codes: dict[str, list[int | None]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    started: list[str] = dataclasses.field(default_factory=list)

    def clock(self):
        return self.seconds

    def run(self, part, output, seconds):
        self.started.append(part.name)
        number = self.started.count(part.name)
        output.write(f"test of {part.name}, start {number}\n")
        self.seconds += 60 * part.minutes
        codes = self.codes.get(part.name, [0])
        return codes[number - 1]

    def in_turns(self, parts, *, at_minute, test_minutes=10.0, missing=()):
        self.seconds = 60.0 * at_minute
        # That the code changed, and how far back a part passed, decide the order, which is given.
        order = [script.Due(part, 1, True) for part in parts]
        return script.run_in_turns(
            order,
            {"here": 10.0},
            began=0.0,
            test_seconds=60 * test_minutes,
            run=self.run,
            why_not=lambda part: "it is missing" if part.name in missing else None,
            clock=self.clock,
        )


def test_parts_start_as_long_as_they_end_before_the_last_minute(capsys):
    """That is minute 70. A part that would end later is passed over for a shorter one."""
    runs = FakeRuns()
    rows = [
        part("one", minutes=12),
        part("two", minutes=15),
        part("long", minutes=15),
        part("short", minutes=2),
    ]

    assert runs.in_turns(rows, at_minute=40) == 0

    assert runs.started == ["one", "two", "short"]
    out = capsys.readouterr().out
    assert "ran       one, two, short\n" in out
    assert re.findall(r"^due +(.*)$", out, re.MULTILINE) == ["long: would end at minute 82"]
    assert "--passed one two short --at" in out


def test_the_first_part_always_starts():
    """Also if it would end after minute 70, so that every run has a part."""
    runs = FakeRuns()
    assert runs.in_turns([part("one"), part("two")], at_minute=69) == 0
    assert runs.started == ["one"]


def test_a_slower_machine_starts_fewer_parts():
    """The test command took twice as long as where the minutes were recorded.

    So each part is expected to take twice its minutes: the second would end at minute 73, the third
    at minute 69.
    """
    runs = FakeRuns()
    rows = [part("one", minutes=1), part("two", minutes=12), part("three", minutes=10)]
    assert runs.in_turns(rows, at_minute=48, test_minutes=20.0) == 0
    assert runs.started == ["one", "three"]


def test_what_the_machine_cannot_run_is_passed_over_and_not_recorded(capsys):
    runs = FakeRuns()
    rows = [part("original"), part("two")]

    assert runs.in_turns(rows, at_minute=69, missing=("original",)) == 0

    assert runs.started == ["two"]
    out = capsys.readouterr().out
    assert re.findall(r"^due +(.*)$", out, re.MULTILINE) == ["original: not run: it is missing"]
    assert "--passed two --at" in out


# The number of the attempt, and the first line of what the part wrote.
SHOWN_OUTPUT = r"===== output of one, attempt (\d) =====\n(.*)\n"


def test_a_part_that_fails_once_is_repeated_and_its_output_shown(capsys):
    runs = FakeRuns(codes={"one": [1, 0]})
    assert runs.in_turns([part("one"), part("two")], at_minute=30) == 0
    assert runs.started == ["one", "one", "two"]
    outputs = re.findall(SHOWN_OUTPUT, capsys.readouterr().out)
    assert outputs == [("1", "test of one, start 1")]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param(
            [1, 2],
            [("1", "test of one, start 1"), ("2", "test of one, start 2")],
            id="fails twice",
        ),
        pytest.param([None], [("1", "test of one, start 1")], id="hangs"),
    ],
)
def test_a_part_that_fails_twice_or_hangs_fails_the_run_with_its_outputs(capsys, codes, expected):
    runs = FakeRuns(codes={"one": codes})

    assert runs.in_turns([part("one"), part("two")], at_minute=30) == 1

    assert runs.started == ["one"] * len(expected)
    out = capsys.readouterr().out
    assert re.findall(SHOWN_OUTPUT, out) == expected
    assert "--passed" not in out


def wait_until_ended(pid):
    """Waits until a process is gone, or a zombie that its new parent has not waited for yet.

    A killed process may still run for a moment, on a busy machine.
    """
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still running (state {state})")


def test_a_part_that_hangs_is_stopped_and_its_environment_removed(tmp_path, monkeypatch):
    """A stand-in for the script starts a process, like tests do. It must end too."""
    hanging = tmp_path / "hanging"
    hanging.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(script, "__file__", str(hanging))
    monkeypatch.setattr(script.nightly_parts, "ROOT", tmp_path)
    stopped = part("one")
    stopped.folder.mkdir()
    with open(tmp_path / "output", "w+") as output:
        # Three seconds, so that a busy machine has started both processes by then.
        assert script.run_and_clean_up(stopped, output, 3.0) is None
        output.seek(0)
        assert output.read() == "started\n"
    assert not stopped.folder.exists()
    wait_until_ended(int((tmp_path / "child").read_text()))


def test_the_original_is_not_run_without_a_clone_or_a_bundle(tmp_path, monkeypatch, capsys):
    [original] = [row for row in PARTS if row.needs_original]
    monkeypatch.delenv("TXL_ORIGINAL", raising=False)
    monkeypatch.setattr(script, "BUNDLE", tmp_path / "original.bundle")
    assert script.run_part(original, [], with_debian=False) == script.NOT_RUN
    assert capsys.readouterr().out.startswith("not run: original: ")
    (tmp_path / "original.bundle").touch()
    assert script.why_not_run(original) is None
    (tmp_path / "original.bundle").unlink()
    monkeypatch.setenv("TXL_ORIGINAL", str(tmp_path))
    assert script.why_not_run(original) is None
