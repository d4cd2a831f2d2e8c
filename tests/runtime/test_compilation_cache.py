"""Tests where compiled functions are kept: JAX loads code only from this user's directory or from a
directory that was typed.
"""

import os
import stat
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from experiments import lm_eval
from experiments.bench import speed
from support import ROOT, programs
from txl_jax import cli
from txl_jax.cli import train_command
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.runtime import compilation_cache, distributed
from txl_jax.runtime.compilation_cache import check_outside, keep_compiled, user_folder, why_unsafe


@pytest.fixture
def kept_in(monkeypatch, tmp_path):
    """Returns the directory that `keep_compiled` sets, or None.

    It sets it in a stand-in for JAX, because this process keeps its own cache. `already` is the
    directory that was set before, and `processes` the number of processes.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    # Every directory is safe. Other tests are about `why_unsafe`.
    monkeypatch.setattr(compilation_cache, "why_unsafe", lambda folder: None)

    def kept_in(*arguments, already=None, processes=1, **options):
        updates = []
        values = {**jax.config.values, "jax_compilation_cache_dir": already}
        config = mock.Mock(values=values, update=lambda name, value: updates.append(value))
        monkeypatch.setattr(compilation_cache, "jax", mock.Mock(config=config))
        monkeypatch.setattr(distributed, "is_multiprocess", lambda: processes > 1)
        keep_compiled(*arguments, **options)
        return updates[0] if updates else None  # The directory is the first of the settings.

    return kept_in


@pytest.mark.parametrize(
    ("options", "parent"),
    [
        pytest.param({}, "{tmp_path}/home/txl_jax/compilation", id="by default"),
        pytest.param({"named": "{tmp_path}/c"}, "{tmp_path}/c", id="named"),
        pytest.param({"named": "gs://bucket/c"}, "gs://bucket/c", id="a bucket"),
        pytest.param(
            {"named": "{tmp_path}/c", "already": "/of/the/user", "processes": 2},
            "{tmp_path}/c",
            id="named, two processes, set before",
        ),
        pytest.param(
            {"named": "{tmp_path}/c", "by_default": False},
            "{tmp_path}/c",
            id="named, off by default",
        ),
    ],
)
def test_where_compiled_programs_are_kept(kept_in, tmp_path, options, parent):
    """In a subdirectory for this kind of processor."""
    if "named" in options:
        options = options | {"named": options["named"].format(tmp_path=tmp_path)}
    assert os.path.dirname(kept_in(**options)) == parent.format(tmp_path=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"named": "off"},
        {"named": ""},
        {"already": "/of/the/user"},
        {"processes": 2},
        {"by_default": False},
    ],
    ids=str,
)
def test_when_no_cache_is_set(kept_in, options):
    assert kept_in(**options) is None


@pytest.mark.parametrize(
    ("xdg", "home", "expected"),
    [
        pytest.param("", "/home/me", "/home/me/.cache/txl_jax/compilation", id="home"),
        pytest.param("relative", "/home/me", "/home/me/.cache/txl_jax/compilation", id="relative"),
        pytest.param("/scratch/me", "/home/me", "/scratch/me/txl_jax/compilation", id="scratch"),
        # A user of a container may have no entry.
        pytest.param("", "~", None, id="no home"),
    ],
)
def test_the_users_own_is_in_the_home_directory(monkeypatch, xdg, home, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", home)
    assert user_folder() == expected


def test_directories_are_made_for_this_user_alone(kept_in, tmp_path):
    before = os.umask(0o002)  # With it, new directories are usually open to the group.
    try:
        made = kept_in()
    finally:
        os.umask(before)
    while made != str(tmp_path):
        assert stat.S_IMODE(os.stat(made).st_mode) == 0o700, made
        made = os.path.dirname(made)


def test_a_folder_that_cannot_be_used_is_one_line_and_none_is_made(kept_in, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert kept_in(str(tmp_path / "file" / "inner")) is None
    out, line = capsys.readouterr()
    # Standard output may be a command's result.
    assert out == ""
    assert line.count("\n") == 1
    assert f"{tmp_path / 'file'} is a file" in line
    assert os.listdir(tmp_path) == ["file"]


def test_an_unsafe_folder_is_not_used_by_default_and_noted_if_it_was_typed(
    kept_in, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        compilation_cache, "why_unsafe", lambda folder: f"{folder} belongs to another user"
    )
    assert kept_in() is None
    assert "not cached" in capsys.readouterr().err
    assert kept_in(str(tmp_path / "c")).startswith(f"{tmp_path}/c/")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "--compilation_cache" in err
    assert "another user" in err


OTHER = os.getuid() + 1  # Another user.
OTHER_GROUP = 99_999  # A group without an entry, so that nobody knows its members.


@pytest.fixture
def owned(monkeypatch):
    """Changes who owns a path, and its permissions, as `os.lstat` has them."""
    changed = {}
    real_lstat = os.lstat

    def lstat(path):
        info = real_lstat(path)
        changes = changed.get(os.fspath(path), {})
        return SimpleNamespace(
            st_uid=changes.get("owner", info.st_uid),
            st_gid=changes.get("group", info.st_gid),
            st_mode=changes.get("mode", info.st_mode),
        )

    monkeypatch.setattr(compilation_cache.os, "lstat", lstat)
    return changed


def test_a_directory_is_safe_if_only_this_user_can_change_what_it_contains(
    tmp_path, owned, monkeypatch
):
    cache = tmp_path / "home" / "cache"
    cache.mkdir(parents=True)
    for part in (tmp_path, tmp_path / "home", cache):
        part.chmod(0o700)
    assert why_unsafe(str(cache)) is None

    # With S_ISVTX, nobody can replace what others have made in a directory.
    directory = stat.S_IFDIR
    for path, facts, is_safe in (
        (cache, {"owner": OTHER}, False),
        (cache, {"mode": directory | 0o777}, False),
        (cache, {"mode": directory | stat.S_ISVTX | 0o777}, False),  # Others could add entries.
        (cache, {"mode": directory | 0o770, "group": OTHER_GROUP}, False),
        (cache, {"mode": directory | 0o755}, True),
        (tmp_path / "home", {"owner": OTHER}, False),
        (tmp_path / "home", {"owner": 0}, True),  # Root can change everything anyway.
        (tmp_path / "home", {"mode": directory | 0o777}, False),
        (tmp_path / "home", {"mode": directory | stat.S_ISVTX | 0o777}, True),  # As /tmp.
    ):
        owned.clear()
        owned[str(path)] = facts
        assert (why_unsafe(str(cache)) is None) is is_safe, (path, facts)

    # Some systems give each user a group, and let it write. Here the group has an entry.
    owned.clear()
    owned[str(cache)] = {"mode": directory | 0o770, "group": OTHER_GROUP}
    monkeypatch.setattr(
        compilation_cache.pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="me")
    )
    for name, members, is_safe in (
        ("me", [], True),
        ("me", ["me", "other"], False),
        ("users", [], False),
    ):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(compilation_cache.grp, "getgrgid", lambda number, group=group: group)
        assert (why_unsafe(str(cache)) is None) is is_safe, (name, members)


def test_links_are_followed_to_every_directory_on_the_way(tmp_path, owned):
    """A link of this user is safe. A link is not if others may replace it or anything behind it."""
    for name in ("real/cache", "middle", "home"):
        (tmp_path / name).mkdir(parents=True, mode=0o700)
    tmp_path.chmod(0o700)
    (tmp_path / "middle" / "link").symlink_to("../real")
    (tmp_path / "home" / "cache").symlink_to(tmp_path / "middle" / "link" / "cache")
    path = str(tmp_path / "home" / "cache")
    (tmp_path / "real").chmod(0o700)
    assert why_unsafe(path) is None
    for part in ("home", "home/cache", "middle", "middle/link", "real", "real/cache"):
        owned.clear()
        owned[str(tmp_path / part)] = {"owner": OTHER}
        assert str(tmp_path / part) in why_unsafe(path), part
    owned.clear()
    (tmp_path / "loop").symlink_to("loop")
    assert why_unsafe(str(tmp_path / "loop")) is None, "it ends"


def test_a_cache_inside_of_a_run_is_an_error(tmp_path):
    workdir = str(tmp_path / "run")
    (tmp_path / "link").symlink_to(workdir)
    for cache, run in (
        (workdir, workdir),
        (f"{workdir}/cache", workdir),
        (f"{tmp_path}/link/cache", workdir),
        (f"{workdir}/cache", f"{tmp_path}/link"),
        ("gs://b/run/cache", "gs://b/run"),
    ):
        with pytest.raises(UserError, match="the compilation cache must be outside"):
            check_outside(cache, [None, run])


@pytest.mark.parametrize(
    ("cache", "run"),
    [(None, "/run"), ("off", "/run"), ("/run2", "/run"), ("gs://b/run", "/gs/b")],
)
def test_a_cache_outside_of_a_run_is_accepted(cache, run):
    check_outside(cache, [None, run])


COMPILE = """
import jax
from txl_jax import cli
from txl_jax.runtime import compilation_cache
jax.monitoring.register_event_listener(lambda name, **_: "cache_hits" in name and print("hit"))
compilation_cache._MIN_COMPILE_SECONDS = 0  # So that this fast function is kept.
cli.main(lambda plan, job: print(jax.jit(lambda x: x + 1)(1)), cli.TextPlan)
"""


@pytest.mark.full
def test_a_second_start_reads_what_the_first_compiled(tmp_path):
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", COMPILE, f"--data_dir={tmp_path / 'data'}"]
    # JAX's variables of the cache would disable it or change what is kept.
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION", "JAX_PERS"))
    }
    variables["XDG_CACHE_HOME"] = str(tmp_path)

    first = subprocess.check_output(command, env=variables, cwd=ROOT, text=True)
    second = subprocess.check_output(command, env=variables, cwd=ROOT, text=True)

    assert first.split() == ["2"]
    assert second.split() == ["hit", "2"]
    assert list((tmp_path / "txl_jax" / "compilation").rglob("*-cache"))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("by_flag", [False, True])
def test_a_program_refuses_a_cache_in_its_workdir(tmp_path, monkeypatch, capsys, by_flag):
    cache = str(tmp_path / "run" / "cache")
    words = [f"--compilation_cache={cache}"] if by_flag else []
    if not by_flag:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", cache)
    monkeypatch.setattr(sys, "argv", ["program", f"--workdir={tmp_path / 'run'}", *words])
    with programs.own_flags(), pytest.raises(SystemExit, match="1"):
        cli.main(pytest.fail, cli.TrainedRun)  # Fails if the program begins.
    assert "must be outside" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("value", "code"), [("/c", 1), ("off", 0)], ids=["a directory", "off"])
def test_a_flagfile_brings_no_code(tmp_path, monkeypatch, capsys, value, code):
    (tmp_path / "mine.flags").write_text(f"--compilation_cache={value}\n")
    monkeypatch.setattr(sys, "argv", ["program", f"--flagfile={tmp_path / 'mine.flags'}"])

    with programs.own_flags(), pytest.raises(SystemExit) as ended:
        cli.main(lambda plan, job: 0, cli.TextPlan)

    assert ended.value.code == code
    error = "mine.flags, line 1: --compilation_cache must be typed"
    assert (error in capsys.readouterr().err) == (code == 1)


def test_settings_that_name_code():
    """Paths from which a library imports or JAX loads machine code."""
    names = set()
    for plan in (lm_eval.Plan, speed.Plan, train_command.TrainPlan):
        for leaf in config_tree.leaves(plan):
            if leaf.setting.loads_code:
                names.add(leaf.name)
    assert names == {"compilation_cache", "include_path", "peer_path"}
