"""Tests the ablation: the settings of each row, the best score, resuming after a stop."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from experiments.paper import ablation
from experiments.paper.ablation import TABLES, Plan, Row, Table, row_config, row_named
from support import tiny_run
from txl_jax.config import Encoding, LossPart, config_tree
from txl_jax.metrics import Measure
from txl_jax.runs.scoring_progress import Interrupted

SIX = Table.WIKITEXT103  # Table 6 of the paper.
RECURRENT, SHAW = TABLES[SIX][:2]
VANILLA, AL_RFOU = TABLES[SIX][-2:]
L = tiny_run.L
M = tiny_run.M


@pytest.fixture(scope="module")
def base(make_run, tmp_path_factory):
    """(config, corpus)."""
    return make_run(tmp_path_factory.mktemp("base"))[:2]


def plan_of(*rows, seeds=(1,), lengths=(4,), **others):
    """Returns a plan of some rows of the table."""
    names = tuple(row.name for row in rows)
    return Plan(rows=names, seeds=seeds, lengths=lengths, out="unused", **others)


def run(base, plan, folder, **others):
    """Trains and scores the rows of a plan, with results in a directory."""
    return ablation.train_and_score(*base, dataclasses.replace(plan, out=str(folder)), **others)


def test_a_row_outside_the_table_is_known_by_its_name():
    """A name has the row's settings, and at its end a segment length that is not the base's."""
    assert row_named(SIX, RECURRENT.name) is RECURRENT
    row = row_named(SIX, "recurrence-al_rfou-half-24")
    assert row == Row(True, Encoding.AL_RFOU, LossPart.HALF, segment_len=24)
    assert row.name == "recurrence-al_rfou-half-24"
    with pytest.raises(ValueError, match="none-shaw-full-8-8"):
        row_named(SIX, "none-shaw-full-8-8")


EVERY_ROW = list(itertools.chain.from_iterable(TABLES.values()))


@pytest.mark.parametrize("row", EVERY_ROW, ids=lambda row: row.name)
def test_every_row_is_a_legal_run_that_differs_as_declared(row):
    config = row_config(tiny_run.CONFIG, row, 5)
    config.validate()
    assert config.seed == 5
    assert config.model.encoding == row.encoding
    assert config.train.loss == row.loss
    assert (config.train.mem_len > 0) == row.recurrence
    assert (config.eval.mem_len > 0) == row.recurrence
    assert config.train.segment_len == (row.segment_len or L)
    if row.encoding.is_learned:
        assert config.model.num_positions == config.train.segment_len + config.train.mem_len


PLAN = plan_of(RECURRENT, VANILLA, seeds=(1, 2), lengths=(4,), stride=2)


@pytest.mark.full
def test_rows_are_trained_scored_and_reported(base, tmp_path, monkeypatch):
    results = run(base, PLAN, tmp_path)

    assert list(results) == [RECURRENT.name, VANILLA.name]
    for row, trained_length in ((RECURRENT, L + M), (VANILLA, L)):
        for seed, score in zip((1, 2), results[row.name], strict=True):
            case = f"{row.name}-seed{seed}"
            stored = json.loads((tmp_path / case / "ablation.json").read_text())["scores"]
            assert {int(length): value for length, value in stored.items()} == score.at, case
            assert set(score.at) == {4, trained_length}, case
            assert score.init == score.at[trained_length], case
            assert score.best == min(score.at.values()), case
            # As good as the best, to the bits per byte that count as equal.
            assert score.at[score.length] <= score.best + 0.0005, case

    record = json.loads((tmp_path / "ablation.json").read_text())
    assert len(record["scores"]) == 4, "two rows with two seeds"
    assert record["seeds"] == [1, 2]
    header, *rows = (tmp_path / "ablation.csv").read_text().splitlines()
    assert header == "row,seed,init,best,length"
    assert len(rows) == 4
    # The page has the mean and the deviation of what the second row scores more than the first.
    differences = []
    for recurrent, vanilla in zip(results[RECURRENT.name], results[VANILLA.name], strict=True):
        differences.append(vanilla.best - recurrent.best)
    mean = np.mean(differences)
    deviation = np.std(differences, ddof=1)
    page = (tmp_path / "ablation.md").read_text()
    assert f" | {mean:+.4f} ({deviation:.4f}, 2) | " in page

    # Nothing is scored again: there is no function to score with.
    monkeypatch.setattr(ablation, "score_with_line", None)
    assert run(base, PLAN, tmp_path) == results


@pytest.mark.nightly(part="long")
def test_a_stopped_job_goes_on(base, tmp_path, capsys):
    """It is stopped in training, and then while lengths are scored.

    The length that was scored stays, until windows have another stride.
    """
    plan = plan_of(RECURRENT, AL_RFOU, lengths=(4, 12), stride=2)
    printed = []

    def scored():
        """Returns the lines of scores at attention length 4 so far, of all commands.

        As a request to stop, it holds once the first of these lines is printed.
        """
        printed.append(capsys.readouterr().out)
        return re.findall(r"length\D*\b4\b.*\bbits per byte\b", "".join(printed))

    with pytest.raises(Interrupted):
        run(base, plan, tmp_path, stop_requested=lambda: True)
    with pytest.raises(Interrupted):
        run(base, plan, tmp_path, stop_requested=scored)
    results = run(base, plan, tmp_path)
    assert run(base, plan, tmp_path) == results
    assert len(scored()) == 2, "each row once"

    run(base, dataclasses.replace(plan, stride=4), tmp_path)
    assert len(scored()) == 4


def test_the_shortest_length_that_is_as_good():
    """Perplexities may differ by 0.01, and bits by 0.0005. The best is at the trained length."""
    config = row_config(tiny_run.CONFIG, RECURRENT, 1)
    scores = {4: 9.0, 8: 5.005, L + M: 5.0, 40: 5.001}
    assert ablation._summarize(config, scores, Measure.PPL) == (5.0, 5.0, 8, scores)
    assert ablation._summarize(config, scores, Measure.BPC) == (5.0, 5.0, L + M, scores)


def test_the_whole_table_follows_from_a_base_with_tied_positions(base):
    """Settings that a row cannot have are reset: tied positions except for the relative encoding,
    and tokens of warm-up for windows.
    """
    tied = config_tree.replace(base[0], {"model.tie_positions": True, "eval.warmup_tokens": 3})
    Plan(lengths=(4,), stride=2, out="unused").check(tied)
    assert row_config(tied, RECURRENT, 1).model.tie_positions
    assert not row_config(tied, SHAW, 1).model.tie_positions
