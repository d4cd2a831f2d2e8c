"""The ablation: the rows of tables 6, 7 and 10 of the paper, trained and scored at several attention lengths.

A row is a run of its own, in a folder of its own, with the base's settings except those of the row. It is trained like
any run, and so resumes where it was stopped; then the validation text is scored at each attention length (the protocol
of `txl_jax.paper.context_length`). As in the paper "init" is the score at the attention length of training, "best" the
best of all, and the length beside it the shortest that reaches it.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from txl_jax import cli
from txl_jax.config import EvalConfig, ExperimentConfig, Network
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.metrics import Measure
from txl_jax.paper import context_length
from txl_jax.paper.ablation_report import Score, write_tables
from txl_jax.paper.ablation_rows import TABLES, Row, Table, row_config, row_named
from txl_jax.paper.equal_memory import with_equal_memory
from txl_jax.runs.run import Run
from txl_jax.runs.score import Interrupted
from txl_jax.runs.train import train_run
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import as_path, exists, read, write_json

# Scores that differ by less count as equally good: a hundredth of a perplexity, as the paper prints it.
_TOLERANCE = {Measure.PPL: 0.01, Measure.BPC: 0.0005}


@dataclasses.dataclass(frozen=True)
class Plan(cli.TextPlan):
    """The rows, seeds and attention lengths."""

    table: Table = setting(Table.WIKITEXT103, "Table of the paper.")
    rows: tuple[str, ...] = setting((), "Rows by name; empty: the table's. Others of the grid too: none-vaswani-full.")
    seeds: tuple[int, ...] = setting((1111,), "Seeds; one run of each row per seed.")
    lengths: tuple[int, ...] = setting((64, 128, 256, 512), "Attention lengths scored, beside that of training.")
    stride: int = setting(1, "Scored tokens per window of models without recurrence.", at_least=1)
    equal_memory: bool = setting(False, "Table 10: the longest segments that fit into the first row's device memory.")
    out: str | None = setting(None, "Folder of the runs and of the table. Created if missing.", path=True)

    @property
    def chosen_rows(self) -> list[Row]:
        """The rows; raises `UserError` for the name of none."""
        return [row_named(self.table, name) for name in self.rows] or list(TABLES[self.table])

    def validate(self) -> None:
        """Raises `UserError` for an unknown row, no seed or equal ones, no folder, or a setting out of range."""
        check_fields(self, "")
        require(self.seeds, "no seed was given; give at least one")
        require(
            len(set(self.seeds)) == len(self.seeds),
            f"the seeds are {list(self.seeds)}; each makes a run of its own, so give different ones",
        )
        require(self.out, "no folder was given; set out to the folder of the runs and the table")
        require(
            not self.equal_memory or any(row.segment_len is not None for row in self.chosen_rows),
            "equal_memory is true and no row has a segment length of its own; that is table 10",
        )

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` for settings that do not fit together in any row, at any attention length."""
        require(
            config.model.network is Network.TRANSFORMER_XL,
            f"model.network is {config.model.network}; the rows are of {Network.TRANSFORMER_XL}",
        )
        for row in self.chosen_rows:
            changed = row_config(config, row, self.seeds[0])
            changed.validate()
            require(
                changed.train.mem_len or not row.recurrence,
                f"the row {row.name} has recurrence and train.mem_len is 0; give the length of its memory",
            )
            for length in _lengths(changed, self):
                context_length.at_lengths(changed, [length], stride=_stride(changed, self, length))


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    plan: Plan,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, list[Score]]:
    """Trains and scores what is not done yet; writes ablation.md, .csv and .json into `plan.out` after each run.

    Args:
      config: the base of all rows.
      corpus: has the text.
      plan: rows, seeds, attention lengths and folder.
      log: takes lines for the user.
      stop_requested: whether to stop.

    Returns:
      Scores by row, one per seed.

    Raises:
      UserError: settings that do not fit together, in any row, before the first is trained.
      Interrupted: a stop was requested; the same call resumes.
    """
    plan.validate()
    plan.check(config)
    rows, folder, measure = plan.chosen_rows, as_path(plan.out or ""), corpus.vocabulary.measure
    if plan.equal_memory:
        rows = with_equal_memory(config, rows, corpus.vocabulary.size, log=log)
    settings = {"table": plan.table, "lengths": plan.lengths, "stride": plan.stride, "seeds": plan.seeds}
    found: dict[str, list[Score]] = {}
    for seed in plan.seeds:  # All rows of a seed before the next, so that an early table has every row.
        for row in rows:
            of_row = row_config(config, row, seed)
            path = os.path.join(folder, f"{row.name}-seed{seed}")
            log(f"\n=== {row.name}, seed {seed} ===")
            with Run.open(path) as run:
                outcome = train_run(of_row, corpus, run, stop_requested=stop_requested)
            if not outcome.finished:
                raise Interrupted(f"{row.name}, seed {seed}")
            log_and_stop = {"log": log, "stop_requested": stop_requested}
            scores = _score_lengths(of_row, corpus, Run.read(path), plan, outcome.step, **log_and_stop)
            found.setdefault(row.name, []).append(_summarize(of_row, scores, measure))
            distributed.broadcast_from_primary(lambda: write_tables(folder, found, rows, corpus, settings))
    log("\n" + distributed.broadcast_from_primary(lambda: read(os.path.join(folder, "ablation.md")).decode()))
    log(f"results   {os.path.join(folder, 'ablation.md')}")
    return found


def _score_lengths(
    config: ExperimentConfig, corpus: Corpus, trained: Run, plan: Plan, step: int, **log_and_stop: Any
) -> dict[int, float]:
    """Returns the validation measure at each attention length; earlier scores are in ablation.json of the run."""
    path = os.path.join(trained.path, "ablation.json")
    evaluation = {name: value for name, value in config_tree.to_dict(config).items() if name.startswith("eval.")}
    identity = {"step": step, "text": corpus.digest, "stride": plan.stride, **evaluation}
    kept = distributed.broadcast_from_primary(lambda: json.loads(read(path)) if exists(path) else {})
    defaults = {f"eval.{name}": value for name, value in config_tree.to_dict(EvalConfig()).items()}
    known = kept["scores"] if defaults | kept.get("of", {}) == json.loads(json.dumps(identity)) else {}
    for length in _lengths(config, plan):
        if str(length) not in known:
            one = context_length.Plan(lengths=(length,), stride=_stride(config, plan, length))
            [found] = context_length.run(config, corpus, trained, one, **log_and_stop)
            known[str(length)] = found.totals.value(corpus.vocabulary.measure)
            distributed.broadcast_from_primary(lambda: write_json(path, {"of": identity, "scores": known}))
    return {length: known[str(length)] for length in _lengths(config, plan)}


def _lengths(config: ExperimentConfig, plan: Plan) -> list[int]:
    return sorted({*plan.lengths, _trained_length(config)})


def _stride(config: ExperimentConfig, plan: Plan, length: int) -> int | None:
    """Returns the scored tokens per window of this length; None: the model streams."""
    return None if context_length.is_recurrent(config) else min(plan.stride, max(length, 1))


def _trained_length(config: ExperimentConfig) -> int:
    """Returns the attention length of training: the keys that the last query of a segment sees."""
    train = config.train
    window = config.compat.window(train.mem_len, same_length=train.same_length)
    return window or train.mem_len + train.segment_len


def _summarize(config: ExperimentConfig, scores: dict[int, float], measure: Measure) -> Score:
    best = min(scores.values())
    length = min(length for length, value in scores.items() if value <= best + _TOLERANCE[measure])
    return Score(scores[_trained_length(config)], best, length, scores)
