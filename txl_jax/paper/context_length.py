"""The context-length job: how well a trained run scores when it may look back less far, or further (the paper's figure 4).

Every token is predicted at each of several attention lengths A. With recurrence the memory has A slots and every query
sees the same number of keys, A (A + 1 with `compat.same_length_window=mem_len_plus_one`); the text is read in the
segments of evaluation, or in shorter ones where A is shorter. A model without recurrence encodes windows of A tokens
(`txl_jax.evaluation.sliding_window`). All other evaluation settings are as given, the clamp among them.
"""

import csv
import dataclasses
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig, Network
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.training.scores import format_scores, with_duration
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import score
from txl_jax.training.scores import as_record
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.metrics import Measure, Totals
from txl_jax.paper import plots
from txl_jax.runtime import distributed
from txl_jax.runtime.files import write_text

_COLUMNS = ("attention_length", "tokens", "loss", "bpc", "perplexity", "seconds")
_COLUMN_OF = {Measure.BPC: "bpc", Measure.PPL: "perplexity"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One attention length."""

    attention_length: int  # A
    totals: Totals
    seconds: float  # With compiling.

    def as_record(self) -> dict[str, float]:
        """The columns of context_length.csv; the loss is in nats."""
        scored = {"attention_length": self.attention_length, **as_record(self.totals), "seconds": self.seconds}
        return {name: scored[name] for name in _COLUMNS}


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    trained_on: TextInfo,
    lengths: Sequence[int],
    split: str = "valid",
    stride: int | None = None,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> list[Row]:
    """Scores a text at each length; writes context_length.csv after each of them, and at the end context_length.png.

    Args:
      trained_on: what the run was trained on; another text may be scored if its vocabulary is the same.
      lengths: A of each row, as `at_lengths` takes them.
      split: "valid" or "test".
      stride: tokens that a window scores, for a model without recurrence; None: the model has one.

    Raises:
      ValueError: as `at_lengths`, or the text has another vocabulary.
      FileNotFoundError: the workdir holds no checkpoint.
      Interrupted: a stop was requested; the rows before it are written.
    """
    configs = at_lengths(config, lengths, stride=stride)
    _, step, params = load_to_score(config, corpus, workdir, trained_on=trained_on, log=log)
    rows, measure = [], corpus.vocabulary.measure
    watch = {"measure": measure, "log": log, "stop_requested": stop_requested}
    for length, changed in configs.items():
        name, began = f"{split} at attention length {length:,}", time.monotonic()
        parts = assemble(changed, vocab_size=corpus.vocabulary.size)
        tokens = getattr(corpus, split)
        totals = score(parts, params, tokens, name=name, **watch)
        rows.append(Row(length, totals, time.monotonic() - began))
        log(with_duration(f"{name} {format_scores(totals, measure)}", rows[-1].seconds))
        distributed.broadcast_from_primary(lambda: write_text(workdir.path / "context_length.csv", _csv(rows)))
    log(f"results   {workdir.path / 'context_length.csv'}")
    how = "streaming with a memory" if stride is None else f"windows moved on by {stride:,}"
    title = f"{corpus.name} ({split}), step {step:,}, {how}"
    _draw(workdir.path / "context_length.png", rows, measure, title=title, log=log)
    return rows


def at_lengths(config: ExperimentConfig, lengths: Sequence[int], *, stride: int | None) -> dict[int, ExperimentConfig]:
    """The config that scores each length, shortest first; each length once.

    Raises:
      ValueError: no length or one below 1; a stride that is missing, not needed or longer than a window; settings that
        do not fit a length.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"the attention lengths are {list(lengths)}; give numbers of tokens, each at least 1")
    shortest = min(lengths)
    if is_recurrent(config) and stride is not None:
        raise ValueError(
            f"a stride of {stride} is given and the model has a memory, so that it reads each token once; the stride is "
            "of windows, for models without recurrence"
        )
    if not is_recurrent(config) and stride is None:
        raise ValueError(
            "the model has no memory to attend to, so that windows are scored; say with --context_stride how many tokens each "
            "of them scores (1: the published protocol, every token from a whole window)"
        )
    if stride is not None and not 1 <= stride <= shortest:
        raise ValueError(
            f"the stride is {stride} and the shortest attention length {shortest}; it must be at least 1 and at most "
            "that, or tokens would be left out"
        )
    changed = {length: _at_length(config, length, stride) for length in sorted(set(lengths))}
    for each in changed.values():
        each.validate()
    return changed


def is_recurrent(config: ExperimentConfig) -> bool:
    """Whether the model was trained to read a memory, and tells positions in a way that reaches across segments."""
    attends = config.model.network is Network.TRANSFORMER_XL  # An LSTM's state reaches back however far it does.
    return attends and config.model.encoding.is_relative and config.train.mem_len > 0


def _at_length(config: ExperimentConfig, length: int, stride: int | None) -> ExperimentConfig:
    """The config of evaluation at one attention length, streaming or in windows."""
    if stride is None:
        segment_len = min(config.eval.segment_len, length)
        span = {"mem_len": length, "same_length": True, "segment_len": segment_len, "stride": 0}
    else:
        span = {"mem_len": 0, "same_length": False, "segment_len": length, "stride": stride, "warmup_tokens": 0}
    return config_tree.replace(config, {f"eval.{name}": value for name, value in span.items()})


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_record() for row in rows)
    return text.getvalue()


def _draw(path: Path, rows: Sequence[Row], measure: Measure, *, title: str, log: Callable[[str], None]) -> None:
    if not distributed.broadcast_from_primary(plots.can_draw):
        log("no picture drawn: matplotlib is not installed (pip install '.[plots]')")
        return
    values = {row.attention_length: row.as_record()[_COLUMN_OF[measure]] for row in rows}
    distributed.broadcast_from_primary(lambda: plots.context_curve(values, path, title=title, measure=measure))
    log(f"picture   {path}")
