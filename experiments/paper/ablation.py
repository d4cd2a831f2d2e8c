r"""Tables 6, 7 and 10 of the paper: recurrence, encoding, half or full loss, attention length.

    python -m experiments.paper.ablation --flagfile=wt103_128m --table=6 --out=runs/table6
    python -m experiments.paper.ablation --flagfile=ptb_small --train.steps=600 --out=runs/mini \
        --seeds=1,2,3 --lengths=16,32,64,128 --stride=16

Each row is a run in a directory of --out. It is trained with the flagfile's settings, changed as
the row says, and then scored on the validation split at each of --lengths and at the attention
length of training, which is --train.segment_len plus --train.mem_len (--train.segment_len without
recurrence, and the window with --train.same_length). As in the paper, "init" is the score at the
attention length of training, "best" is the best score at any length, and the length next to it is
the shortest that reaches it. Scoring can take longer than training: pass few --lengths, a large
--stride and a large --eval.batch_size. To resume, rerun the same command. The output is
ablation.md, a table with the paper's numbers, ablation.csv, the scores of each run, and
ablation.json, the scores at every length. docs/reproduction.md has a small example, and results of
small models.
"""

import dataclasses
import enum
import json
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.paper import context_length
from txl_jax import cli
from txl_jax.cli.flag_tree import groups
from txl_jax.config import Encoding, ExperimentConfig, LossPart, Network, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError
from txl_jax.metrics import Measure
from txl_jax.runs.run import Run
from txl_jax.runs.run_tables import csv_file
from txl_jax.runs.score import score_with_line
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import load_to_score
from txl_jax.runs.trainer import train_run
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import exists, read, write, write_json

# Scores that differ by less count as equal: a hundredth of a perplexity, the paper's precision.
_TOLERANCE = {Measure.PPL: 0.01, Measure.BPC: 0.0005, Measure.BPB: 0.0005}


class Table(enum.StrEnum):
    """A table of the paper."""

    WIKITEXT103 = "6"
    LM1B = "7"
    EQUAL_MEMORY = "10"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table."""

    # Whether the model has a memory.
    recurrence: bool
    encoding: Encoding
    loss: LossPart
    # The paper's init, best and length, or None if the paper omits them.
    published: tuple[float | None, ...] = (None, None, None)
    # L of training, or None for the base's length. Only table 10 uses other lengths.
    segment_len: int | None = None

    @property
    def name(self) -> str:
        """The name of the row's directory."""
        recurrence = "recurrence" if self.recurrence else "none"
        name = f"{recurrence}-{self.encoding}-{self.loss}"
        if self.segment_len is None:
            return name
        return f"{name}-{self.segment_len}"


_REL = Encoding.RELATIVE
_SHAW = Encoding.SHAW
_VASWANI = Encoding.VASWANI
_AL_RFOU = Encoding.AL_RFOU
_FULL = LossPart.FULL
_HALF = LossPart.HALF
# Rows that tables 6 and 10 share.
_XL_FULL = Row(True, _REL, _FULL, (27.02, 26.77, 500))
_XL_HALF = Row(True, _REL, _HALF, (28.69, 28.33, 460))
TABLES: dict[Table, tuple[Row, ...]] = {}
# WikiText-103, 128M parameters: validation perplexities.
TABLES[Table.WIKITEXT103] = (
    _XL_FULL,
    Row(True, _SHAW, _FULL, (27.94, None, None)),
    _XL_HALF,
    Row(False, _REL, _FULL, (29.59, 29.02, 260)),
    Row(False, _REL, _HALF, (30.10, None, None)),
    Row(False, _SHAW, _FULL, (29.75, None, None)),
    Row(False, _SHAW, _HALF, (30.50, None, None)),
    Row(False, _VASWANI, _HALF, (30.97, None, None)),
    Row(False, _AL_RFOU, _HALF, (31.16, None, None)),
)
# One Billion Word: test perplexities.
TABLES[Table.LM1B] = (
    Row(True, _REL, _FULL, (None, 25.2, None)),
    Row(True, _SHAW, _FULL, (None, 25.7, None)),
    Row(False, _REL, _FULL, (None, 27.1, None)),
)
# WikiText-103: the same device memory for each.
TABLES[Table.EQUAL_MEMORY] = (
    _XL_FULL,
    _XL_HALF,
    Row(False, _REL, _FULL, (28.43, 27.98, 400), segment_len=176),
    Row(False, _REL, _HALF, (28.83, 28.83, 120), segment_len=172),
)


# The parts of a row's name, for --help and the error of an unknown name.
_PARTS = (
    f"recurrence or none, {' or '.join(Encoding)}, {' or '.join(LossPart)}, and a segment length "
    "if it is not the flagfile's"
)


def _names(table: Table) -> str:
    """Returns the names of a table's rows, separated by commas."""
    return ", ".join(row.name for row in TABLES[table])


def row_named(table: Table, name: str) -> Row:
    """Returns the row of a table, or any other row of the grid, for which the paper has no numbers.

    >>> row_named(Table.WIKITEXT103, "none-vaswani-full").published
    (None, None, None)
    """
    for row in TABLES[table]:
        if row.name == name:
            return row
    parts = re.fullmatch(
        rf"(recurrence|none)-({'|'.join(Encoding)})-({'|'.join(LossPart)})(?:-([1-9]\d*))?", name
    )
    if parts is None:
        raise UserError(
            f"a row must be one of table {table}'s {_names(table)}, or have the same parts, joined "
            f"by hyphens ({_PARTS}), got {name}"
        )
    recurrence, encoding, loss, segment_len = parts.groups()
    return Row(
        recurrence=recurrence == "recurrence",
        encoding=Encoding(encoding),
        loss=LossPart(loss),
        segment_len=int(segment_len) if segment_len else None,
    )


def row_config(base: ExperimentConfig, row: Row, seed: int) -> ExperimentConfig:
    """Returns the base with the settings of a row.

    Without recurrence, training and the evaluations during it do not use a memory. Learned tables
    have as many distances as training.
    """
    segment_len = row.segment_len or base.train.segment_len
    changes: dict[str, Any] = {
        "seed": seed,
        "model": base.model.with_encoding(row.encoding),
        "train.loss": row.loss,
        "train.segment_len": segment_len,
    }
    if not row.recurrence:
        changes |= {"train.mem_len": 0, "train.same_length": False}
        changes |= {"eval.mem_len": 0, "eval.same_length": False, "eval.segment_len": segment_len}
    return config_tree.replace(base, changes).resolved()


@dataclasses.dataclass(frozen=True)
class Plan(cli.TextPlan):
    """The rows, seeds and attention lengths."""

    table: Table = setting(Table.WIKITEXT103, "Table of the paper.")
    rows: tuple[str, ...] = setting(
        (),
        "Rows by name. If empty, the rows of the table. "
        + "".join(f"Table {table} has {_names(table)}. " for table in TABLES)
        + f"Other rows have the same parts, joined by hyphens ({_PARTS}), such as "
        "none-vaswani-full.",
    )
    seeds: tuple[int, ...] = setting((1111,), "Seeds. Each row is trained once per seed.")
    lengths: tuple[int, ...] = setting(
        (64, 128, 256, 512),
        "Attention lengths to score, in addition to the attention length of training: "
        "--train.segment_len plus --train.mem_len, or --train.segment_len without recurrence.",
    )
    stride: int = setting(
        1,
        "Scored tokens per window of models without recurrence, the last ones of each window.",
        at_least=1,
    )
    out: str = setting(
        "", "Directory for the runs and the table. Created if missing.", path=True, required=True
    )

    @property
    def chosen_rows(self) -> list[Row]:
        """The rows. Raises `UserError` if a name is unknown."""
        return [row_named(self.table, name) for name in self.rows] or list(TABLES[self.table])

    def validate(self) -> None:
        """Raises `UserError` if seeds are empty or equal, or a setting is out of range."""
        super().validate()
        require(
            len(set(self.seeds)) == len(self.seeds) > 0,
            "seeds must be one or more different numbers, because each has its own run, got "
            f"{list(self.seeds)}",
        )

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` if settings are incompatible in any row, at any attention length."""
        is_transformer = config.model.network is Network.TRANSFORMER_XL
        config.expect(
            is_transformer, "model.network", f"It must be {Network.TRANSFORMER_XL} for these rows"
        )
        for row in self.chosen_rows:
            changed = row_config(config, row, self.seeds[0])
            changed.validate()
            has_memory = changed.train.mem_len or not row.recurrence
            changed.expect(
                has_memory,
                "train.mem_len",
                f"It must be above 0 for the row {row.name} (recurrence)",
            )
            for length in _lengths(changed, self):
                context_length.at_lengths(changed, [length], stride=_stride(changed, self, length))


def run(plan: Plan, job: cli.Job) -> None:
    """Trains and scores the rows."""
    config = job.config()
    plan.check(config)  # Checked before a text is read.
    corpus = job.corpus(config)
    with job.stop:
        train_and_score(config, corpus, plan, stop_requested=lambda: job.stop)


class Score(NamedTuple):
    """A row's scores on the validation split, for one seed."""

    init: float  # Score at the attention length of training.
    best: float  # Best score at any attention length.
    length: int  # The shortest attention length that reaches the best.
    at: dict[int, float]  # By attention length.


def train_and_score(
    config: ExperimentConfig,
    corpus: Corpus,
    plan: Plan,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, list[Score]]:
    """Trains and scores the unfinished runs.

    Writes ablation.md, .csv and .json into `plan.out` after each run.

    Returns the scores by row, one per seed. After `Interrupted` the same call resumes.
    """
    rows = plan.chosen_rows
    measure = corpus.vocabulary.measure
    scores_by_row: dict[str, list[Score]] = {}
    page = ""
    # All rows of a seed come before the next seed, so that an early table has every row.
    for seed in plan.seeds:
        for row in rows:
            path = os.path.join(plan.out, f"{row.name}-seed{seed}")
            print(f"\n=== {row.name}, seed {seed} ===")
            row_settings = row_config(config, row, seed)
            with Run.open(path) as opened:
                outcome = train_run(row_settings, corpus, opened, stop_requested=stop_requested)
            if not outcome.finished:
                raise Interrupted(f"{row.name}, seed {seed}")

            trained = Run.read(path)
            by_length = _score_lengths(
                row_settings, corpus, trained, plan, outcome.step, stop_requested
            )
            score = _summarize(row_settings, by_length, measure)
            scores_by_row.setdefault(row.name, []).append(score)
            page = distributed.broadcast_from_primary(
                lambda: _write_tables(scores_by_row, rows, corpus, plan)
            )
    print(f"\n{page}")
    print(f"results   {os.path.join(plan.out, 'ablation.md')}")
    return scores_by_row


def _score_lengths(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    step: int,
    stop_requested: Callable[[], Any],
) -> dict[int, float]:
    """Returns the validation measure at each attention length.

    Earlier scores are in ablation.json of the run.
    """
    path = os.path.join(trained.path, "ablation.json")
    evaluation = {
        name: value
        for name, value in config_tree.to_dict(config).items()
        if name.startswith("eval.")
    }
    identity = {"step": step, "text": corpus.digest, "stride": plan.stride, **evaluation}
    recorded = distributed.broadcast_from_primary(
        lambda: json.loads(read(path)) if exists(path) else {}
    )
    # The record is JSON, in which tuples are lists and enums are texts.
    scores: dict[str, float] = {}
    if recorded.get("of") == json.loads(json.dumps(identity)):
        scores = recorded["scores"]

    lengths = _lengths(config, plan)
    for length in lengths:
        if str(length) in scores:
            continue
        stride = _stride(config, plan, length)
        name = f"valid at attention length {length:,}"
        if stride is not None:
            name += f" (stride {stride:,})"
        [config_at_length] = context_length.at_lengths(config, [length], stride=stride).values()
        built, _, params = load_to_score(config_at_length, corpus, trained, log=say)
        totals, line = score_with_line(
            built,
            params,
            corpus.valid,
            name=name,
            vocabulary=corpus.vocabulary,
            log=print,
            stop_requested=stop_requested,
        )
        print(line)
        scores[str(length)] = totals.value(corpus.vocabulary.measure)
        distributed.broadcast_from_primary(
            lambda: write_json(path, {"of": identity, "scores": scores})
        )
    return {length: scores[str(length)] for length in lengths}


def _lengths(config: ExperimentConfig, plan: Plan) -> list[int]:
    return sorted({*plan.lengths, _trained_length(config)})


def _stride(config: ExperimentConfig, plan: Plan, length: int) -> int | None:
    """Returns the scored tokens per window of this length, or None if the model streams."""
    if context_length.is_recurrent(config):
        return None
    return min(plan.stride, max(length, 1))


def _trained_length(config: ExperimentConfig) -> int:
    """Returns the attention length of training.

    This is the number of keys that the last query of a segment attends to: segment and memory, or
    the window of `train.same_length`.
    """
    train = config.train
    window = config.model.compat.window(train.mem_len, same_length=train.same_length)
    return window or train.mem_len + train.segment_len


def _summarize(config: ExperimentConfig, scores: dict[int, float], measure: Measure) -> Score:
    best = min(scores.values())
    length = min(length for length, value in scores.items() if value <= best + _TOLERANCE[measure])
    return Score(scores[_trained_length(config)], best, length, scores)


def _write_tables(
    scores_by_row: Mapping[str, Sequence[Score]], rows: Sequence[Row], corpus: Corpus, plan: Plan
) -> str:
    """Writes ablation.json, .csv and .md of the scores so far.

    Returns the page. The first row is the baseline.
    """
    measure = corpus.vocabulary.measure
    path = os.path.join(plan.out, "ablation")
    facts = {"text": corpus.description, "measure": measure.value, **environment.describe()}
    for name in ("table", "lengths", "stride", "seeds"):
        facts[name] = getattr(plan, name)
    records: list[dict[str, Any]] = []
    for name, scores in scores_by_row.items():
        # Later seeds have no scores yet.
        for seed, score in zip(plan.seeds, scores, strict=False):
            records.append({"row": name, "seed": seed, **score._asdict()})
    write_json(f"{path}.json", {**facts, "scores": records})

    columns = ("row", "seed", "init", "best", "length")
    csv_rows = []
    for record in records:
        csv_rows.append({name: record[name] for name in columns})
    write(f"{path}.csv", csv_file(columns, csv_rows))

    test_text = ", on the test split" if plan.table == Table.LM1B else ""
    caption = (
        f"The models of table {plan.table} on {corpus.description}: validation {measure.value}, "
        'mean over seeds (standard deviation, number of seeds). "vs. first row" is best minus the '
        "first row's best, seed by seed. "
        f"Windows of models without recurrence score {plan.stride} tokens each, or their length. "
        f"{facts['device']}, {facts['date']}. "
        f"The paper's perplexities are for its own model and corpus{test_text}."
    )
    lines = [caption, "", *_by_row(scores_by_row, rows, measure), ""]
    lines += [f"Validation {measure.value} by attention length:", ""]
    lines += [*_by_length(scores_by_row, rows, measure), ""]
    page = "\n".join(lines)
    write(f"{path}.md", page.encode())
    return page


def _by_row(
    scores_by_row: Mapping[str, Sequence[Score]], rows: Sequence[Row], measure: Measure
) -> Iterator[str]:
    """Yields the table with the paper's numbers."""
    columns = ["recurrence", "encoding", "loss"]
    columns += [f"init {measure.value}", f"best {measure.value}", "vs. first row"]
    columns += ["attention length", "paper: init ppl", "paper: best ppl", "paper: length"]
    baseline = scores_by_row.get(rows[0].name, [])
    lines = []
    for row in rows:
        scores = scores_by_row.get(row.name)
        if scores:
            cells = ["yes" if row.recurrence else "no", row.encoding, row.loss]
            cells += _cells_of_scores(scores, baseline, measure)
            for published in row.published:
                cells.append("" if published is None else f"{published:g}")
            lines.append(cells)
    return environment.table(columns, lines)


def _cells_of_scores(
    scores: Sequence[Score], baseline: Sequence[Score], measure: Measure
) -> list[str]:
    """Returns a row's init, best, difference from the baseline, and attention lengths."""
    differences = ""
    if scores is not baseline:
        # A stopped run may have fewer seeds than the baseline.
        pairs = zip(scores, baseline, strict=False)
        differences = _mean([score.best - first.best for score, first in pairs], measure, sign="+")
    lengths = sorted({score.length for score in scores})
    return [
        _mean([score.init for score in scores], measure),
        _mean([score.best for score in scores], measure),
        differences,
        ", ".join(f"{length:,}" for length in lengths),
    ]


def _by_length(
    scores_by_row: Mapping[str, Sequence[Score]], rows: Sequence[Row], measure: Measure
) -> Iterator[str]:
    """Yields the table of the seeds' mean at each attention length."""
    lengths: set[int] = set()
    for scores in scores_by_row.values():
        for score in scores:
            lengths |= score.at.keys()
    columns = sorted(lengths)

    lines = []
    for row in rows:
        scores_of_row = scores_by_row.get(row.name)
        if scores_of_row:
            cells = [row.name]
            for length in columns:
                values = [score.at[length] for score in scores_of_row if length in score.at]
                cells.append(_mean(values, measure))
            lines.append(cells)
    return environment.table(["row", *(f"{length:,}" for length in columns)], lines)


def _mean(values: Sequence[float], measure: Measure, *, sign: str = "") -> str:
    """Formats the mean, with standard deviation and number for multiple values."""
    if not values:
        return ""
    digits = 2 if measure is Measure.PPL else 4
    mean = f"{statistics.mean(values):{sign}.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({statistics.stdev(values):.{digits}f}, {len(values)})"


if __name__ == "__main__":
    cli.main(
        run,
        Plan,
        config=ExperimentConfig(),
        by_corpus=True,
        groups=[group for group in groups() if group != "generate"],
        hosts="join",
    )
