"""Tests of benchmarks/log_anomalies.py: what is planted, and how alerts are counted."""

import math
import zlib

import numpy as np
import pytest

from benchmarks import log_anomalies
from benchmarks.log_anomalies import AFTER, BURST, KINDS, NORMAL, PER_BYTE, PER_KIND, PER_LINE, Log

STEPS = (
    b"install %s <none> 1.%d\n",
    b"status half-installed %s 1.%d\n",
    b"status unpacked %s 1.%d\n",
    b"configure %s 1.%d <none>\n",
    b"status half-configured %s 1.%d\n",
    b"status installed %s 1.%d\n",
)


@pytest.fixture(scope="module")
def lines():
    """A log of 150 packages."""
    return [step % (b"lib%d:amd64" % n, n % 7) for n in range(150) for step in STEPS]


def test_each_kind_is_planted_and_the_rest_stays(lines):
    log = log_anomalies.plant(lines, seed=1)

    assert sorted(log.kinds) == sorted(list(KINDS) * PER_KIND)
    assert len(log.lines) == len(log.anomaly)
    # Each anomaly's lines are together, and the next line is marked.
    for number, kind in enumerate(log.kinds):
        [places] = np.nonzero(log.anomaly == number)
        assert len(places) == (BURST - 1 if kind == "burst" else 1)
        assert places[-1] - places[0] == len(places) - 1
        assert log.anomaly[places[-1] + 1] == AFTER

    # A garbled line and an unknown action replace one line, a missing line takes two.
    n_replaced = 4 * PER_KIND
    kept = [line for line, number in zip(log.lines, log.anomaly, strict=True) if number < 0]
    assert len(kept) == len(lines) - n_replaced
    assert set(kept) <= set(lines)


def test_seeds_decide_what_is_planted(lines):
    assert log_anomalies.plant(lines, seed=1).lines == log_anomalies.plant(lines, seed=1).lines
    assert log_anomalies.plant(lines, seed=1).lines != log_anomalies.plant(lines, seed=2).lines


def test_an_anomaly_is_found_by_any_of_its_lines():
    kinds = ["burst", "garbled", "downgrade"]
    anomaly = np.array([NORMAL, 0, 0, AFTER, 1, AFTER, NORMAL, 2, NORMAL, NORMAL])
    scores = np.array([1.0, 0, 5, 9, 2, 9, 4, 3, 1, 1])

    result = log_anomalies.result_of(Log([], anomaly, kinds), scores, threshold=3.0)

    # The downgrade is at the threshold, not above it. Lines after anomalies do not count.
    assert result.found == pytest.approx(1 / 3)
    assert result.of_kind["burst"] == 1
    assert sum(result.of_kind.values()) == 1
    assert result.false_alarms == 1 / 4


def test_rates_of_false_alarms_are_kept():
    rng = np.random.default_rng(0)
    log = Log([], np.full(1000, NORMAL), [])
    scores = rng.random(1000)
    values = dict(log_anomalies.thresholds(log, scores, rng.random(500)))
    for rate in log_anomalies.RATES:
        assert np.mean(scores > values[f"test rate {rate}"]) == rate


def test_zlib_refers_to_the_lines_before(lines):
    method = log_anomalies.ZlibMethod(b"", window=32 << 10)
    first, second = method.read([lines[0], lines[0]])[PER_LINE]
    assert first == pytest.approx(8 * math.log(2) * (len(zlib.compress(lines[0], 9)) - 6))
    assert second < first / 3

    alone = log_anomalies.ZlibMethod(b"", window=0)
    scores = alone.read([lines[0], lines[0]])
    assert scores[PER_LINE].tolist() == [first, first]
    assert scores[PER_BYTE].tolist() == [first / len(lines[0])] * 2


def test_templates_are_counted_in_pairs(lines):
    method = log_anomalies.TemplateMethod.of(lines)
    usual, unseen = method.fork().read([lines[0], lines[5]])[PER_LINE]
    # `install` followed each of the 149 earlier packages, and nothing else did.
    assert usual == pytest.approx(-math.log(149.5 / 150))
    assert unseen == pytest.approx(-math.log(0.5 / 151))
