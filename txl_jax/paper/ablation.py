"""The ablation job: the rows of tables 6, 7 and 10 of the paper, trained and scored at several attention lengths.

A row is a run of its own, in a folder of its own, that differs from the base in what its row says. It is trained like
any run, and so goes on where it was stopped; then the validation text is scored at each attention length (the protocol
of `txl_jax.paper.context_length`). As in the paper "init" is the score at the attention length of training, "best" the
best of all, and the length beside it the shortest that reaches it.
"""

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.assemble import assemble
from txl_jax.config import Encoding, EvalConfig, ExperimentConfig, LossPart, Network
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.jobs import train
from txl_jax.jobs.score import Interrupted
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.metrics import Measure
from txl_jax.paper import context_length
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.files import write_json, write_text

# Scores that differ by less count as equally good: a hundredth of a perplexity, as the paper prints it.
_AS_GOOD = {Measure.PPL: 0.01, Measure.BPC: 0.0005}


class Published(NamedTuple):
    """What the paper has in a row; None: nothing."""

    init: float | None
    best: float | None
    length: int | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table."""

    recurrence: bool
    encoding: Encoding
    loss: LossPart
    published: Published = Published(None, None, None)
    segment_len: int | None = None  # L of training, where it is not the base's (table 10).

    @property
    def name(self) -> str:
        """Of the row's folder."""
        length = "" if self.segment_len is None else f"-{self.segment_len}"
        return f"{'recurrence' if self.recurrence else 'none'}-{self.encoding}-{self.loss}{length}"


_REL, _SHAW, _VASWANI, _AL_RFOU = Encoding.RELATIVE, Encoding.SHAW, Encoding.VASWANI, Encoding.AL_RFOU
_FULL, _HALF = LossPart.FULL, LossPart.HALF
TABLES = {
    # WikiText-103, 128M parameters: validation perplexities.
    "6": (
        Row(True, _REL, _FULL, Published(27.02, 26.77, 500)),
        Row(True, _SHAW, _FULL, Published(27.94, None, None)),
        Row(True, _REL, _HALF, Published(28.69, 28.33, 460)),
        Row(False, _REL, _FULL, Published(29.59, 29.02, 260)),
        Row(False, _REL, _HALF, Published(30.10, None, None)),
        Row(False, _SHAW, _FULL, Published(29.75, None, None)),
        Row(False, _SHAW, _HALF, Published(30.50, None, None)),
        Row(False, _VASWANI, _HALF, Published(30.97, None, None)),
        Row(False, _AL_RFOU, _HALF, Published(31.16, None, None)),
    ),
    # One Billion Word: test perplexities.
    "7": (
        Row(True, _REL, _FULL, Published(None, 25.2, None)),
        Row(True, _SHAW, _FULL, Published(None, 25.7, None)),
        Row(False, _REL, _FULL, Published(None, 27.1, None)),
    ),
    # WikiText-103: as much memory of the device for each.
    "10": (
        Row(True, _REL, _FULL, Published(27.02, 26.77, 500)),
        Row(True, _REL, _HALF, Published(28.69, 28.33, 460)),
        Row(False, _REL, _FULL, Published(28.43, 27.98, 400), segment_len=176),
        Row(False, _REL, _HALF, Published(28.83, 28.83, 120), segment_len=172),
    ),
}


def row_named(table: str, name: str) -> Row:
    """The row of a table, or any other of the grid, of which the paper has no numbers.

    >>> row_named("6", "none-vaswani-full").published
    Published(init=None, best=None, length=None)

    Raises:
      ValueError: a name that says no row.
    """
    for row in TABLES[table]:
        if row.name == name:
            return row
    parts = name.split("-")
    try:
        recurrence = {"recurrence": True, "none": False}[parts[0]]
        encoding, loss = Encoding(parts[1]), LossPart(parts[2])
        segment_len = int(parts[3]) if len(parts) == 4 else None
        if len(parts) > 4 or (segment_len is not None and segment_len < 1):
            raise ValueError
    except (KeyError, ValueError, IndexError):
        raise ValueError(
            f"no row is called {name}; table {table} has {', '.join(row.name for row in TABLES[table])}, and others are "
            f"named alike: recurrence or none, {' or '.join(Encoding)}, {' or '.join(LossPart)}, and a segment length "
            "where it is not the flagfile's"
        ) from None
    return Row(recurrence, encoding, loss, segment_len=segment_len)


class Score(NamedTuple):
    """A row's scores on the validation text, for one seed."""

    init: float
    best: float
    length: int
    at: dict[int, float]  # By attention length.


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run."""

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]  # Attention lengths that are tried, beside that of training.
    stride: int = 1  # Tokens that a window scores, of models without recurrence.
    equal_memory: bool = False  # L of rows that have one of their own is what fits into the first row's device memory.

    def validate(self) -> None:
        """Raises `ValueError` for nothing to do."""
        if not self.rows or not self.seeds:
            raise ValueError(
                f"{len(self.rows)} rows and {len(self.seeds)} seeds were chosen; give at least one of each"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"the seeds are {list(self.seeds)}; each makes a run of its own, so give different ones")


def row_config(base: ExperimentConfig, row: Row, seed: int) -> ExperimentConfig:
    """The base as the row wants it.

    Without recurrence there is no memory, in training and in the evaluations on the way. Learned tables hold as many
    distances as training meets.
    """
    segment_len = row.segment_len or base.train.segment_len
    mem_len = base.train.mem_len if row.recurrence else 0
    changes: dict[str, Any] = {
        "seed": seed,
        "model.encoding": row.encoding,
        "model.num_positions": segment_len + mem_len if row.encoding.is_learned else None,
        "model.untie_r": base.model.untie_r and row.encoding is Encoding.RELATIVE,
        "model.tie_positions": base.model.tie_positions and row.encoding is Encoding.RELATIVE,
        "train.loss": row.loss,
        "train.segment_len": segment_len,
        "train.mem_len": mem_len,
    }
    if not row.recurrence:
        changes |= {"train.same_length": False, "eval.mem_len": 0, "eval.same_length": False}
        changes |= {"eval.segment_len": segment_len}
    return config_tree.replace(base, changes)


def check(base: ExperimentConfig, plan: Plan) -> None:
    """Raises `ValueError` for settings that do not go together in any row, at any length."""
    if base.model.network is not Network.TRANSFORMER_XL:
        raise ValueError(f"model.network is {base.model.network}; the rows are of {Network.TRANSFORMER_XL}")
    if plan.equal_memory and all(row.segment_len is None for row in plan.rows):
        raise ValueError("equal memory was asked for, and no row has a segment length of its own; that is table 10")
    for row in plan.rows:
        config = row_config(base, row, plan.seeds[0])
        config.validate()
        if row.recurrence and not config.train.mem_len:
            raise ValueError(f"the row {row.name} has recurrence and train.mem_len is 0; give the length of its memory")
        for length in _lengths(config, row, plan):
            context_length.at_lengths(config, [length], stride=_stride(config, plan, length))


def run(
    base: ExperimentConfig,
    corpus: Corpus,
    plan: Plan,
    folder: Path,
    *,
    table: str,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, list[Score]]:
    """Trains and scores what is not done yet; writes ablation.md, .csv and .json into `folder` after each run.

    Returns:
      Scores by row, one per seed.

    Raises:
      ValueError: settings that do not go together, in any row, before the first is trained.
      Interrupted: a stop was requested; the same call goes on from there.
    """
    plan.validate()
    check(base, plan)
    if plan.equal_memory:
        plan = _with_equal_memory(base, plan, corpus.vocabulary.size, log)
    found: dict[str, list[Score]] = {}
    for seed in plan.seeds:  # All rows of a seed before the next, so that an early table has every row.
        for row in plan.rows:
            config = row_config(base, row, seed)
            workdir = Workdir(folder / f"{row.name}-seed{seed}")
            log(f"\n=== {row.name}, seed {seed} ===")
            outcome = train.run(config, corpus, workdir, stop_requested=stop_requested)
            if not outcome.finished:
                raise Interrupted(f"{row.name}, seed {seed}")
            watch = {"log": log, "stop_requested": stop_requested}
            scores = _at_lengths(config, corpus, workdir, row, plan, outcome.step, **watch)
            found.setdefault(row.name, []).append(_judged(config, row, scores, corpus.vocabulary.measure))
            distributed.broadcast_from_primary(lambda: _write(folder, found, plan, corpus, table))
    log("\n" + distributed.broadcast_from_primary(lambda: (folder / "ablation.md").read_text()))
    log(f"results   {folder / 'ablation.md'}")
    return found


def training_bytes(config: ExperimentConfig, vocab_size: int) -> int:
    """Device memory of an update: parameters, optimiser, memory, and what the compiler adds.

    Raises:
      ValueError: the backend does not say.
    """
    parts = assemble(config, vocab_size=vocab_size)
    _, compilation = parts.training.compile_step()
    if compilation.temporary_bytes is None:
        raise ValueError("this backend does not say what an update needs, so equal memory cannot be found")
    return compilation.temporary_bytes + environment.bytes_on_device(parts.training.abstract_state)


def longest_segment(base: ExperimentConfig, row: Row, *, limit: int, vocab_size: int, step: int = 4) -> int:
    """The longest L of a row, a multiple of `step`, whose update needs at most `limit` bytes (table 10).

    Memory grows with L, so that bisection finds it: a compilation for each of a handful of lengths.

    Raises:
      ValueError: not even the shortest fits.
    """

    def fits(count: int) -> bool:
        changed = dataclasses.replace(row, segment_len=count * step)
        return training_bytes(row_config(base, changed, 0), vocab_size) <= limit

    low, high = 1, 2
    if not fits(low):
        raise ValueError(f"a segment of {step} tokens needs more than {limit:,} bytes in the row {row.name}")
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def _with_equal_memory(base: ExperimentConfig, plan: Plan, vocab_size: int, log: Callable[[str], None]) -> Plan:
    first = TABLES["10"][0]
    limit = training_bytes(row_config(base, first, 0), vocab_size)
    log(f"an update of {first.name} needs {environment.megabytes(limit)}")
    rows = []
    for row in plan.rows:
        if row.segment_len is not None:
            row = dataclasses.replace(row, segment_len=longest_segment(base, row, limit=limit, vocab_size=vocab_size))
            log(f"as much: {row.name}")
        rows.append(row)
    return dataclasses.replace(plan, rows=tuple(rows))


def _at_lengths(
    config: ExperimentConfig, corpus: Corpus, workdir: Workdir, row: Row, plan: Plan, step: int, **watch: Any
) -> dict[int, float]:
    """The validation measure at each attention length; what was scored before is in ablation.json of the run."""
    path, text = workdir.path / "ablation.json", TextInfo.of(corpus)
    evaluation = {name: value for name, value in config_tree.to_dict(config).items() if name.startswith("eval.")}
    told = {"step": step, "text": corpus.digest, "stride": plan.stride, **evaluation}
    kept = distributed.broadcast_from_primary(lambda: json.loads(path.read_text()) if path.exists() else {})
    defaults = {f"eval.{name}": value for name, value in config_tree.to_dict(EvalConfig()).items()}
    known = kept["scores"] if defaults | kept.get("of", {}) == json.loads(json.dumps(told)) else {}
    for length in _lengths(config, row, plan):
        if str(length) not in known:
            stride = _stride(config, plan, length)
            [found] = context_length.run(
                config, corpus, workdir, trained_on=text, lengths=[length], stride=stride, **watch
            )
            known[str(length)] = found.totals.value(corpus.vocabulary.measure)
            distributed.broadcast_from_primary(lambda: write_json(path, {"of": told, "scores": known}))
    return {length: known[str(length)] for length in _lengths(config, row, plan)}


def _lengths(config: ExperimentConfig, row: Row, plan: Plan) -> list[int]:
    return sorted({*plan.lengths, _trained_length(config, row)})


def _stride(config: ExperimentConfig, plan: Plan, length: int) -> int | None:
    """Tokens that a window of this length scores; None: the model streams."""
    return None if context_length.is_recurrent(config) else min(plan.stride, max(length, 1))


def _trained_length(config: ExperimentConfig, row: Row) -> int:
    """The attention length of training: the keys that the last query of a segment sees."""
    train = config.train
    window = config.compat.window(train.mem_len, same_length=train.same_length)
    return window or train.mem_len + train.segment_len


def _judged(config: ExperimentConfig, row: Row, scores: dict[int, float], measure: Measure) -> Score:
    best = min(scores.values())
    length = min(length for length, value in scores.items() if value <= best + _AS_GOOD[measure])
    return Score(scores[_trained_length(config, row)], best, length, scores)


def _write(folder: Path, found: dict[str, list[Score]], plan: Plan, corpus: Corpus, table: str) -> None:
    """The table so far."""
    measure = corpus.vocabulary.measure
    facts = {"text": corpus.description, "measure": measure.value, "table": table, **environment.describe()}
    records = [
        {"row": name, "seed": seed, **score._asdict()}
        for name, scores in found.items()
        for seed, score in zip(plan.seeds, scores, strict=False)
    ]
    settings = {"lengths": plan.lengths, "stride": plan.stride, "seeds": plan.seeds}
    write_json(folder / "ablation.json", {**facts, **settings, "scores": records})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["row", "seed", "init", "best", "length"], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(folder / "ablation.csv", text.getvalue())
    write_text(folder / "ablation.md", _markdown(found, plan, facts))


def _markdown(found: dict[str, list[Score]], plan: Plan, facts: dict[str, Any]) -> str:
    measure = facts["measure"]
    lines = [
        f"Table {facts['table']} in miniature or in full: {facts['text']}, validation {measure}; mean of the seeds (standard "
        f'deviation, number of seeds); "beside" is the best less that of the first row, seed by seed; windows of models without recurrence score {plan.stride} tokens each, or their '
        f"length; {facts['device']}, {facts['date']}. The paper's numbers are of the full size"
        + (", and of the test text." if facts["table"] == "7" else "."),
        "",
        f"| recurrence | encoding | loss | init {measure} | best {measure} | beside | attention length | paper: init | best | "
        "length |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in plan.rows:
        if row.name not in found:
            continue
        scores = found[row.name]
        shown = [_mean([getattr(score, field) for score in scores], measure) for field in ("init", "best")]
        first = [] if row is plan.rows[0] else found.get(plan.rows[0].name, [])
        beside = [score.best - other.best for score, other in zip(scores, first, strict=False)]
        lengths = ", ".join(f"{length:,}" for length in sorted({score.length for score in scores}))
        paper = ["" if value is None else f"{value:g}" for value in row.published]
        cells = [
            "yes" if row.recurrence else "no",
            row.encoding,
            row.loss,
            *shown,
            _mean(beside, measure, sign="+"),
            lengths,
            *paper,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_by_length(found, plan, measure)]) + "\n"


def _by_length(found: dict[str, list[Score]], plan: Plan, measure: str) -> list[str]:
    """The mean of the seeds at each attention length."""
    shown = sorted({length for scores in found.values() for length in scores[0].at})
    lines = [
        f"Validation {measure} by attention length:",
        "",
        f"| row | {' | '.join(f'{length:,}' for length in shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for row in plan.rows:
        if scores := found.get(row.name):
            values = [[score.at[length] for score in scores] if length in scores[0].at else [] for length in shown]
            lines.append(f"| {row.name} | {' | '.join(_mean(each, measure) for each in values)} |")
    return lines


def _mean(values: Sequence[float], measure: str, *, sign: str = "") -> str:
    digits = 2 if measure == Measure.PPL.value else 4
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:{sign}.{digits}f}"
    return f"{statistics.mean(values):{sign}.{digits}f} ({statistics.stdev(values):.{digits}f}, {len(values)})"
