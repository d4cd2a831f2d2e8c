r"""Tables 6, 7 and 10 of the paper: recurrence, encoding, half or full loss, attention length.

    python -m experiments.paper.ablation --flagfile=wt103_128m --table=6 --out=runs/table6
    python -m experiments.paper.ablation --flagfile=ptb_small --train.steps=600 --out=runs/mini \
        --seeds=1,2,3 --lengths=16,32,64,128 --stride=16

Each row is a run in a directory of --out, trained with the flagfile's settings as changed by
its row, and then scored on the validation split at each of --lengths and at the attention length of
training. As in the paper, "init" is the score at the attention length of training, "best" the best
score at any length, and the length next to it the shortest that reaches it. The scores can take
longer than the training: pass few --lengths and a large --eval.batch_size. To resume, rerun the
same command. It writes ablation.md, a table with the paper's numbers, ablation.csv with the scores
of each run, and ablation.json with those at every length.
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

# Scores that differ by less count as equally good: a hundredth of a perplexity, as the paper prints
# it.
_TOLERANCE = {Measure.PPL: 0.01, Measure.BPC: 0.0005, Measure.BPB: 0.0005}


class Table(enum.StrEnum):
    """A table of the paper."""

    WIKITEXT103 = "6"
    LM1B = "7"
    EQUAL_MEMORY = "10"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table."""

    # Whether there is a memory.
    recurrence: bool
    encoding: Encoding
    loss: LossPart
    # The paper's init, best and length, None if not given.
    published: tuple[float | None, ...] = (None, None, None)
    # L of training, or None for the base's. Only table 10 has others.
    segment_len: int | None = None

    @property
    def name(self) -> str:
        """The name of the row's directory."""
        length = "" if self.segment_len is None else f"-{self.segment_len}"
        return f"{'recurrence' if self.recurrence else 'none'}-{self.encoding}-{self.loss}{length}"


_REL = Encoding.RELATIVE
_SHAW = Encoding.SHAW
_VASWANI = Encoding.VASWANI
_AL_RFOU = Encoding.AL_RFOU
_FULL, _HALF = LossPart.FULL, LossPart.HALF
TABLES = {
    # WikiText-103, 128M parameters: validation perplexities.
    Table.WIKITEXT103: (
        Row(True, _REL, _FULL, (27.02, 26.77, 500)),
        Row(True, _SHAW, _FULL, (27.94, None, None)),
        Row(True, _REL, _HALF, (28.69, 28.33, 460)),
        Row(False, _REL, _FULL, (29.59, 29.02, 260)),
        Row(False, _REL, _HALF, (30.10, None, None)),
        Row(False, _SHAW, _FULL, (29.75, None, None)),
        Row(False, _SHAW, _HALF, (30.50, None, None)),
        Row(False, _VASWANI, _HALF, (30.97, None, None)),
        Row(False, _AL_RFOU, _HALF, (31.16, None, None)),
    ),
    # One Billion Word: test perplexities.
    Table.LM1B: (
        Row(True, _REL, _FULL, (None, 25.2, None)),
        Row(True, _SHAW, _FULL, (None, 25.7, None)),
        Row(False, _REL, _FULL, (None, 27.1, None)),
    ),
    # WikiText-103: the same device memory for each.
    Table.EQUAL_MEMORY: (
        Row(True, _REL, _FULL, (27.02, 26.77, 500)),
        Row(True, _REL, _HALF, (28.69, 28.33, 460)),
        Row(False, _REL, _FULL, (28.43, 27.98, 400), segment_len=176),
        Row(False, _REL, _HALF, (28.83, 28.83, 120), segment_len=172),
    ),
}


def row_named(table: Table, name: str) -> Row:
    """Returns the row of a table, or any other row of the grid, for which the paper has no numbers.

    >>> row_named(Table.WIKITEXT103, "none-vaswani-full").published
    (None, None, None)
    """
    for row in TABLES[table]:
        if row.name == name:
            return row
    found = re.fullmatch(
        rf"(recurrence|none)-({'|'.join(Encoding)})-({'|'.join(LossPart)})(?:-([1-9]\d*))?", name
    )
    if found is None:
        raise UserError(
            f"a row must be one of table {table}'s "
            f"{', '.join(row.name for row in TABLES[table])}, or have the same parts, joined by "
            f"hyphens (recurrence or none, {' or '.join(Encoding)}, {' or '.join(LossPart)}, and "
            f"a segment length if it is not the flagfile's), got {name}"
        )
    recurrence, encoding, loss, length = found.groups()
    segment_len = int(length) if length else None
    return Row(
        recurrence == "recurrence", Encoding(encoding), LossPart(loss), segment_len=segment_len
    )


def row_config(base: ExperimentConfig, row: Row, seed: int) -> ExperimentConfig:
    """Returns the base with the settings of a row.

    Without recurrence there is no memory, in training and in the evaluations during it. Learned
    tables have as many distances as training.
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
        "Rows by name, also others of the grid such as none-vaswani-full. "
        "If empty, the rows of the table.",
    )
    seeds: tuple[int, ...] = setting((1111,), "Seeds. Each row is trained once per seed.")
    lengths: tuple[int, ...] = setting(
        (64, 128, 256, 512), "Attention lengths scored, in addition to training's."
    )
    stride: int = setting(1, "Scored tokens per window of models without recurrence.", at_least=1)
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
    plan.check(config)  # Before a text is read.
    corpus = job.corpus(config)
    with job.stop:
        train_and_score(config, corpus, plan, stop_requested=lambda: job.stop)


class Score(NamedTuple):
    """A row's scores on the validation split, for one seed."""

    init: float  # At the attention length of training.
    best: float  # The best at any attention length.
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
    rows, page = plan.chosen_rows, ""
    found: dict[str, list[Score]] = {}
    # All rows of a seed before the next, so that an early table has every row.
    for seed in plan.seeds:
        for row in rows:
            own = row_config(config, row, seed)
            path = os.path.join(plan.out, f"{row.name}-seed{seed}")
            print(f"\n=== {row.name}, seed {seed} ===")
            with Run.open(path) as run:
                outcome = train_run(own, corpus, run, stop_requested=stop_requested)
            if not outcome.finished:
                raise Interrupted(f"{row.name}, seed {seed}")
            scores = _score_lengths(own, corpus, Run.read(path), plan, outcome.step, stop_requested)
            found.setdefault(row.name, []).append(
                _summarize(own, scores, corpus.vocabulary.measure)
            )
            page = distributed.broadcast_from_primary(
                lambda: _write_tables(found, rows, corpus, plan)
            )
    print(f"\n{page}")
    print(f"results   {os.path.join(plan.out, 'ablation.md')}")
    return found


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
    kept = distributed.broadcast_from_primary(
        lambda: json.loads(read(path)) if exists(path) else {}
    )
    known = kept["scores"] if kept.get("of") == json.loads(json.dumps(identity)) else {}
    for length in _lengths(config, plan):
        if str(length) not in known:
            [one] = context_length.at_lengths(
                config, [length], stride=_stride(config, plan, length)
            ).values()
            built, _, params = load_to_score(one, corpus, trained, log=say)
            options: dict[str, Any] = {
                "name": f"valid at attention length {length:,}",
                "log": print,
            }
            options |= {"vocabulary": corpus.vocabulary, "stop_requested": stop_requested}
            totals, line = score_with_line(built, params, corpus.valid, **options)
            print(line)
            known[str(length)] = totals.value(corpus.vocabulary.measure)
            distributed.broadcast_from_primary(
                lambda: write_json(path, {"of": identity, "scores": known})
            )
    return {length: known[str(length)] for length in _lengths(config, plan)}


def _lengths(config: ExperimentConfig, plan: Plan) -> list[int]:
    return sorted({*plan.lengths, _trained_length(config)})


def _stride(config: ExperimentConfig, plan: Plan, length: int) -> int | None:
    """Returns the scored tokens per window of this length, or None if the model streams."""
    return None if context_length.is_recurrent(config) else min(plan.stride, max(length, 1))


def _trained_length(config: ExperimentConfig) -> int:
    """Returns the attention length of training.

    This is the number of keys that the last query of a segment attends to.
    """
    train = config.train
    window = config.model.compat.window(train.mem_len, same_length=train.same_length)
    return window or train.mem_len + train.segment_len


def _summarize(config: ExperimentConfig, scores: dict[int, float], measure: Measure) -> Score:
    best = min(scores.values())
    length = min(length for length, value in scores.items() if value <= best + _TOLERANCE[measure])
    return Score(scores[_trained_length(config)], best, length, scores)


def _write_tables(
    found: Mapping[str, Sequence[Score]], rows: Sequence[Row], corpus: Corpus, plan: Plan
) -> str:
    """Writes ablation.json, .csv and .md of the scores so far.

    Returns the page. The first row is the baseline.
    """
    measure, path = corpus.vocabulary.measure, os.path.join(plan.out, "ablation")
    facts = {"text": corpus.description, "measure": measure.value, **environment.describe()}
    facts |= {name: getattr(plan, name) for name in ("table", "lengths", "stride", "seeds")}
    records = [
        {"row": name, "seed": seed, **score._asdict()}
        for name, scores in found.items()
        for seed, score in zip(plan.seeds, scores, strict=False)
    ]
    write_json(f"{path}.json", {**facts, "scores": records})
    columns = ("row", "seed", "init", "best", "length")
    in_columns = [{name: record[name] for name in columns} for record in records]
    write(f"{path}.csv", csv_file(columns, in_columns))
    test_text = ", on the test split" if plan.table == Table.LM1B else ""
    caption = (
        f"The models of table {plan.table} on {corpus.description}: validation {measure.value}, "
        'mean over seeds (standard deviation, number of seeds). "vs. first row" is best minus the '
        "first row's best, seed by seed. "
        f"Windows of models without recurrence score {plan.stride} tokens each, or their length. "
        f"{facts['device']}, {facts['date']}. "
        f"The paper's numbers are for its own model and corpus{test_text}."
    )
    lines = [caption, "", *_by_row(found, rows, measure), ""]
    lines += [
        f"Validation {measure.value} by attention length:",
        "",
        *_by_length(found, rows, measure),
        "",
    ]
    page = "\n".join(lines)
    write(f"{path}.md", page.encode())
    return page


def _by_row(
    found: Mapping[str, Sequence[Score]], rows: Sequence[Row], measure: Measure
) -> Iterator[str]:
    """Yields the table with the paper's numbers."""
    columns = [
        "recurrence",
        "encoding",
        "loss",
        f"init {measure.value}",
        f"best {measure.value}",
        "vs. first row",
    ]
    columns += ["attention length", "paper: init", "best", "length"]
    lines, firsts = [], found.get(rows[0].name, [])
    for row in rows:
        if scores := found.get(row.name):
            differences = [
                score.best - first.best for score, first in zip(scores, firsts, strict=False)
            ]
            lines.append(
                [
                    "yes" if row.recurrence else "no",
                    row.encoding,
                    row.loss,
                    _mean([score.init for score in scores], measure),
                    _mean([score.best for score in scores], measure),
                    "" if row is rows[0] else _mean(differences, measure, sign="+"),
                    ", ".join(
                        f"{length:,}" for length in sorted({score.length for score in scores})
                    ),
                    *("" if value is None else f"{value:g}" for value in row.published),
                ]
            )
    return environment.table(columns, lines)


def _by_length(
    found: Mapping[str, Sequence[Score]], rows: Sequence[Row], measure: Measure
) -> Iterator[str]:
    """Yields the table of the seeds' mean at each attention length."""
    shown, lines = sorted({length for scores in found.values() for length in scores[0].at}), []
    for row in rows:
        if scores := found.get(row.name):
            values = (
                [score.at[length] for score in scores if length in score.at] for length in shown
            )
            lines.append([row.name, *(_mean(each, measure) for each in values)])
    return environment.table(["row", *(f"{length:,}" for length in shown)], lines)


def _mean(values: Sequence[float], measure: Measure, *, sign: str = "") -> str:
    """Formats the mean, with standard deviation and number for multiple values."""
    if not values:
        return ""
    digits = 2 if measure is Measure.PPL else 4
    mean = f"{statistics.mean(values):{sign}.{digits}f}"
    return (
        mean
        if len(values) == 1
        else f"{mean} ({statistics.stdev(values):.{digits}f}, {len(values)})"
    )


if __name__ == "__main__":
    cli.main(
        run,
        Plan,
        config=ExperimentConfig(),
        by_corpus=True,
        groups=[group for group in groups() if group != "generate"],
        hosts="join",
    )
