"""Tests that every test has one marker, of its place in the tree."""

import pytest

from support import ROOT

TESTS = ROOT / "tests"


@pytest.fixture
def conftest(request):
    """The module of the suite's settings."""
    return request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_every_test_has_exactly_one_marker(request, conftest):
    for item in request.session.items:
        assert len({mark.name for mark in item.iter_markers()} & set(conftest.MARKERS)) == 1, item.nodeid


def test_every_place_exists_and_is_named_once(conftest):
    for places in (conftest.INTEGRATION, conftest.QUICK):
        assert list(places) == sorted(set(places))
        assert all((TESTS / place).exists() for place in places)


@pytest.mark.parametrize(
    ("path", "marker"),
    [
        ("tests/config/test_config.py", "unit"),
        ("tests/config/test_every_setting.py", "integration"),
        ("tests/experiments/cli/test_programs.py", "integration"),
        ("tests/experiments/cli/test_flag_tree.py", "unit"),
        ("tests/faults/test_kills.py", "faults"),
        ("tests/launch/test_sweep.py", "launch"),
    ],
)
def test_a_place_has_a_marker(conftest, path, marker):
    assert conftest.marker_of(ROOT / path) == marker


def test_a_slow_test_is_nothing_else(pytestconfig, conftest, request):
    """`-m unit` never runs minutes: the marker of the place is not added to a test that has its own."""

    class Slow(pytest.Item):
        def runtest(self):
            """Does nothing."""

    item = Slow.from_parent(request.session, name="slow")
    item.add_marker("slow")
    conftest.pytest_collection_modifyitems([item])
    assert [mark.name for mark in item.iter_markers()] == ["slow"]
    item.add_marker("unit")
    with pytest.raises(AssertionError, match="slow, unit"):
        conftest.pytest_collection_modifyitems([item])
