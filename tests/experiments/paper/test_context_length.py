"""Tests scores by attention length: each row against an evaluation at its settings, windows,
files.
"""

import csv
import re
from pathlib import Path

import pytest

from experiments.paper import context_length
from experiments.paper.context_length import Plan
from support import tiny_run
from txl_jax import plots
from txl_jax.config import Encoding, config_tree
from txl_jax.evaluation.sliding_window import evaluate_windows, make_window_step, window_batches
from txl_jax.runs import score_splits
from txl_jax.runs.score_splits import Split
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.validation import as_record

# Settings of evaluation that differ from the defaults. A sweep must set the first, and keep the
# others.
GIVEN = {"eval.same_length": False, "eval.clamp_len": 4, "eval.batch_size": 2}


@pytest.fixture(scope="module")
def recurrent(make_run, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("recurrent"), GIVEN)


def sweep(run, lengths, *, stride=None, split=Split.VALID, **others):
    """Returns the totals by length, and the rows of the table as numbers."""
    plan = Plan(lengths=tuple(lengths), split=split, stride=stride)
    return context_length.score_lengths(*run, plan, **others), table(run)


def table(run):
    """Returns the rows of a run's table as numbers."""
    _, _, workdir = run
    rows = []
    with open(Path(workdir.path, "context_length.csv"), newline="") as file:
        for row in csv.DictReader(file):
            rows.append({name: float(value) for name, value in row.items()})
    return rows


def lengths_of(rows):
    return [row["attention_length"] for row in rows]


@pytest.mark.full
@pytest.mark.parametrize("split", Split)
def test_each_row_is_an_evaluation_at_that_length(recurrent, split):
    config, corpus, workdir = recurrent

    totals_of, rows = sweep(recurrent, [12, 3, 12], split=split)

    # The shortest is first, and each is scored once.
    assert list(totals_of) == [3, 12]
    assert lengths_of(rows) == [3, 12]
    # Segments have evaluation's 5 tokens, or fewer for a shorter attention length.
    for length, segment_len, row in zip((3, 12), (3, 5), rows, strict=True):
        changed = {
            "eval.mem_len": length,
            "eval.same_length": True,
            "eval.segment_len": segment_len,
        }
        scores = score_splits.evaluate_splits(config_tree.replace(config, changed), corpus, workdir)
        assert as_record(totals_of[length], corpus.vocabulary) == scores[split]
        assert scores[split].items() <= row.items()
        assert row["seconds"] > 0
    assert totals_of[3].nats != totals_of[12].nats
    assert Path(workdir.path, "context_length.png").exists() == plots.can_draw()


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{"model.encoding": Encoding.VASWANI}, {"train.mem_len": 0}], ids=str
)
def test_without_recurrence_windows_are_scored(make_run, tmp_path, changes):
    config, corpus, _ = run = make_run(tmp_path, GIVEN | changes)
    totals_of, rows = sweep(run, [9, 4], stride=3)

    assert list(totals_of) == [4, 9]
    assert lengths_of(rows) == [4, 9]
    model = context_length.build_for(config, corpus.vocabulary).model
    step = make_window_step(model, clamp_len=4)
    params = tiny_run.params(model)
    for length, totals in totals_of.items():
        batches = window_batches(corpus.valid, attention_len=length, stride=3, batch_size=1)
        expected = evaluate_windows(step, params, batches)
        assert totals.tokens == len(corpus.valid) - 1, length
        assert expected.tokens == totals.tokens, length
        assert totals.nats == pytest.approx(expected.nats, rel=1e-6), length


@pytest.mark.full
def test_a_stop_leaves_the_rows_before_it(recurrent, capsys):
    """It is stopped while the second of two lengths is scored."""
    printed = []

    def first_is_printed():
        printed.append(capsys.readouterr().out)
        return re.search(r"(?m)^valid\b\D*\b5\b", "".join(printed))

    config, *others = recurrent
    # With short segments a split takes several calls, between which a stop is noticed.
    config = config_tree.replace(config, {"eval.segment_len": 2})
    with pytest.raises(Interrupted, match=r"\b8\b"):
        sweep((config, *others), [5, 8], stop_requested=first_is_printed)
    assert lengths_of(table(recurrent)) == [5]
