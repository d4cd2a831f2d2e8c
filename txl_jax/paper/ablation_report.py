"""The files of the ablation: the table beside the paper's, as markdown, CSV and JSON."""

import csv
import io
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from txl_jax.data.corpus import Corpus
from txl_jax.metrics import Measure
from txl_jax.paper.ablation_rows import Row, Table
from txl_jax.runtime import environment
from txl_jax.runtime.storage import write, write_json


class Score(NamedTuple):
    """A row's scores on the validation text, for one seed.

    Attributes:
      init: at the attention length of training.
      best: the best at any attention length.
      length: the shortest attention length that reaches the best.
      at: by attention length.
    """

    init: float
    best: float
    length: int
    at: dict[int, float]


def write_tables(
    folder: str,
    found: Mapping[str, Sequence[Score]],
    rows: Sequence[Row],
    corpus: Corpus,
    settings: Mapping[str, Any],
) -> None:
    """Writes ablation.md, .csv and .json of the scores so far.

    Args:
      folder: of the files.
      found: scores by the name of the row, one per seed.
      rows: all rows, the first of which the others are compared with.
      corpus: has the text.
      settings: table, lengths, stride and seeds.
    """
    measure = corpus.vocabulary.measure
    facts = {"text": corpus.description, "measure": measure.value, **environment.describe()}
    records = [
        {"row": name, "seed": seed, **score._asdict()}
        for name, scores in found.items()
        for seed, score in zip(settings["seeds"], scores, strict=False)
    ]
    write_json(os.path.join(folder, "ablation.json"), {**facts, **settings, "scores": records})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["row", "seed", "init", "best", "length"], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write(os.path.join(folder, "ablation.csv"), text.getvalue().encode())
    lines = [_caption({**facts, **settings}), "", *_by_row(found, rows, measure), "", *_by_length(found, rows, measure)]
    write(os.path.join(folder, "ablation.md"), ("\n".join(lines) + "\n").encode())


def _caption(facts: Mapping[str, Any]) -> str:
    test_text = ", and of the test text" if facts["table"] == Table.LM1B else ""
    return (
        f"Table {facts['table']} in miniature or in full: {facts['text']}, validation {facts['measure']}; mean of the "
        'seeds (standard deviation, number of seeds); "beside" is the difference of the best to that of the first row, '
        f"seed by seed; windows of models without recurrence score {facts['stride']} tokens each, or their length; "
        f"{facts['device']}, {facts['date']}. The paper's numbers are of the full size{test_text}."
    )


def _by_row(found: Mapping[str, Sequence[Score]], rows: Sequence[Row], measure: Measure) -> list[str]:
    """Returns the table beside the paper's."""
    columns = ["recurrence", "encoding", "loss", f"init {measure.value}", f"best {measure.value}", "beside"]
    columns += ["attention length", "paper: init", "best", "length"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        if row.name not in found:
            continue
        scores = found[row.name]
        first = [] if row is rows[0] else found.get(rows[0].name, [])
        beside = [score.best - other.best for score, other in zip(scores, first, strict=False)]
        cells = [
            "yes" if row.recurrence else "no",
            row.encoding,
            row.loss,
            _mean([score.init for score in scores], measure),
            _mean([score.best for score in scores], measure),
            _mean(beside, measure, sign="+"),
            ", ".join(f"{length:,}" for length in sorted({score.length for score in scores})),
            *("" if value is None else f"{value:g}" for value in row.published),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _by_length(found: Mapping[str, Sequence[Score]], rows: Sequence[Row], measure: Measure) -> list[str]:
    """Returns the table of the seeds' mean at each attention length."""
    shown = sorted({length for scores in found.values() for length in scores[0].at})
    lines = [
        f"Validation {measure.value} by attention length:",
        "",
        f"| row | {' | '.join(f'{length:,}' for length in shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for row in rows:
        if scores := found.get(row.name):
            values = [[score.at[length] for score in scores] if length in scores[0].at else [] for length in shown]
            lines.append(f"| {row.name} | {' | '.join(_mean(each, measure) for each in values)} |")
    return lines


def _mean(values: Sequence[float], measure: Measure, *, sign: str = "") -> str:
    """Formats the mean, with standard deviation and number where there are several values."""
    digits = 2 if measure is Measure.PPL else 4
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:{sign}.{digits}f}"
    return f"{statistics.mean(values):{sign}.{digits}f} ({statistics.stdev(values):.{digits}f}, {len(values)})"
