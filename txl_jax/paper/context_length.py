"""The scores of a trained run by attention length: figure 4 of the paper.

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
from typing import Any, ClassVar

from txl_jax import cli
from txl_jax.config import ExperimentConfig, Network
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError
from txl_jax.metrics import Measure, Totals
from txl_jax.modules.positions import encoding_of
from txl_jax.paper import plots
from txl_jax.paper.study import Split
from txl_jax.runs.build import build
from txl_jax.runs.run import Run
from txl_jax.runs.score import score
from txl_jax.runs.validation import as_record, format_scores, with_duration
from txl_jax.runs.weights import load_to_score
from txl_jax.runtime import distributed, storage

_COLUMNS = ("attention_length", "tokens", "loss", "bpc", "perplexity", "seconds")
_COLUMN_OF = {Measure.BPC: "bpc", Measure.PPL: "perplexity"}


@dataclasses.dataclass(frozen=True)
class Plan(cli.TrainedRun):
    """The attention lengths and the text."""

    lengths: tuple[int, ...] = setting((64, 128, 256, 512, 1024, 2048), "Attention lengths.")
    split: Split = setting(Split.VALID, "Text that is scored.")
    stride: int | None = setting(
        None, "Without recurrence: scored tokens per window; 1: the published protocol.", at_least=1
    )

    stopped: ClassVar[str] = "the lengths before it are in context_length.csv"

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` for a run that cannot be scored so."""
        at_lengths(config, self.lengths, stride=self.stride)


@dataclasses.dataclass(frozen=True)
class LengthScore:
    """The score at one attention length.

    Attributes:
      attention_length: A.
      totals: sums over the text.
      seconds: time with compilation.
    """

    attention_length: int
    totals: Totals
    seconds: float

    def as_record(self) -> dict[str, float]:
        """Returns the columns of context_length.csv; the loss is in nats."""
        scored = {"attention_length": self.attention_length, **as_record(self.totals), "seconds": self.seconds}
        return {name: scored[name] for name in _COLUMNS}


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> list[LengthScore]:
    """Scores a text at each length; writes context_length.csv after each, and context_length.png at the end.

    Args:
      config: of the trained run.
      corpus: has the text.
      trained: the run; another text than its own may be read if its vocabulary is the same.
      plan: lengths, text and stride.
      log: takes lines for the user.
      stop_requested: whether to stop.

    Raises:
      UserError: as `at_lengths`, or the text has another vocabulary, or the workdir holds no checkpoint.
      Interrupted: a stop was requested; the rows before it are written.
    """
    plan.validate()
    split, stride, outputs = plan.split, plan.stride, trained.outputs
    configs = at_lengths(config, plan.lengths, stride=stride)
    _, step, params = load_to_score(config, corpus, trained, log=log)
    measure = corpus.vocabulary.measure
    rows: list[LengthScore] = []
    for length, changed in configs.items():
        name, began = f"{split} at attention length {length:,}", time.monotonic()
        parts = build(changed, vocab_size=corpus.vocabulary.size)
        tokens = getattr(corpus, split)
        totals = score(parts, params, tokens, name=name, measure=measure, log=log, stop_requested=stop_requested)
        rows.append(LengthScore(length, totals, time.monotonic() - began))
        log(with_duration(f"{name} {format_scores(totals, measure)}", rows[-1].seconds))
        distributed.broadcast_from_primary(lambda: storage.write(f"{outputs}/context_length.csv", _csv(rows).encode()))
    log(f"results   {outputs}/context_length.csv")
    how = "streaming with a memory" if stride is None else f"sliding windows, stride {stride:,}"
    title = f"{corpus.name} ({split}), step {step:,}, {how}"
    _draw(f"{outputs}/context_length.png", rows, measure, title=title, log=log)
    return rows


def at_lengths(config: ExperimentConfig, lengths: Sequence[int], *, stride: int | None) -> dict[int, ExperimentConfig]:
    """Returns the config that scores each length, shortest first; each length once.

    Raises:
      UserError: no length or one below 1; a stride that is missing, not needed or longer than a window; settings that
        do not fit a length.
    """
    require(
        lengths and min(lengths) >= 1,
        f"the attention lengths are {list(lengths)}; give numbers of tokens, each at least 1",
    )
    shortest = min(lengths)
    if is_recurrent(config) and stride is not None:
        raise UserError(
            f"a stride of {stride} is given and the model has a memory, so that it reads each token once; the stride "
            "is of windows, for models without recurrence"
        )
    if not is_recurrent(config) and stride is None:
        raise UserError(
            "the model has no memory to attend to, so that windows are scored; give the stride, the number of tokens "
            "that each of them scores (1: the published protocol, every token from a whole window)"
        )
    if stride is not None and not 1 <= stride <= shortest:
        raise UserError(
            f"the stride is {stride} and the shortest attention length {shortest}; it must be at least 1 and at most "
            "that, or tokens would be left out"
        )
    changed = {length: _at_length(config, length, stride) for length in sorted(set(lengths))}
    for each in changed.values():
        each.validate()
    return changed


def is_recurrent(config: ExperimentConfig) -> bool:
    """Returns whether the model was trained with a memory, and encodes positions relative to the query."""
    attends = config.model.network is Network.TRANSFORMER_XL  # A recurrent state reaches back however far it does.
    return attends and encoding_of(config.model).generates_by_token and config.train.mem_len > 0


def _at_length(config: ExperimentConfig, length: int, stride: int | None) -> ExperimentConfig:
    """Returns the config at one attention length, streaming or in windows."""
    if stride is None:
        segment_len = min(config.eval.segment_len, length)
        changes = {"mem_len": length, "same_length": True, "segment_len": segment_len, "stride": None}
    else:
        changes = {"mem_len": 0, "same_length": False, "segment_len": length, "stride": stride, "warmup_tokens": 0}
    return config_tree.replace(config, {f"eval.{name}": value for name, value in changes.items()})


def _csv(rows: Sequence[LengthScore]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_record() for row in rows)
    return text.getvalue()


def _draw(path: str, rows: Sequence[LengthScore], measure: Measure, *, title: str, log: Callable[[str], None]) -> None:
    if not distributed.broadcast_from_primary(plots.can_draw):
        log("no picture drawn: matplotlib is not installed (pip install '.[plots]')")
        return
    values = {row.attention_length: row.as_record()[_COLUMN_OF[measure]] for row in rows}
    distributed.broadcast_from_primary(lambda: plots.context_curve(values, path, title=title, measure=measure))
    log(f"picture   {path}")
