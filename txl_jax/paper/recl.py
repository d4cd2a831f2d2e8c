"""The RECL job: how far back each model of a group makes use of the text (appendix C, table 8, figures 3 and 4).

Every model scores the same tokens at the same context lengths, each loss with its context encoded from nothing. The
losses of each model and length are a file of their own, so that a job that is stopped goes on where it was, and that
ratios and thresholds are tried without scoring again.
"""

import csv
import dataclasses
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.evaluation.context_losses import context_losses, positions
from txl_jax.jobs import report
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import check_finite, progress_bar
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.metrics import Measure, Totals
from txl_jax.paper import plots, recl_gains
from txl_jax.runtime import environment
from txl_jax.runtime.files import write_json, write_text

# Table 8: r = 0.1, 0.5 and 1, of models trained on WikiText-103. The two groups are not comparable with each other.
PAPER = {
    "Transformer-XL, 151M": (900, 800, 700),
    "QRNN": (500, 400, 300),
    "LSTM": (400, 300, 200),
    "Transformer-XL, 128M": (700, 600, 500),
    "with Shaw et al.'s encoding": (400, 400, 300),
    "without recurrence": (300, 300, 300),
    "Transformer": (128, 128, 128),
}


@dataclasses.dataclass(frozen=True)
class Member:
    """A model of the group."""

    name: str
    config: ExperimentConfig
    trained_on: TextInfo
    workdir: Workdir


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is scored, and how the group is judged."""

    lengths: tuple[int, ...]  # c, c + d, c + 2 d, ..
    stride: int = 1  # Every stride-th token is scored.
    batch_size: int = 16  # Contexts per call.
    ratios: tuple[float, ...] = (0.1, 0.5, 1.0)  # r
    threshold: float = recl_gains.THRESHOLD
    split: str = "test"

    def validate(self) -> None:
        """Raises `ValueError` for lengths that are no even steps, or numbers that mean nothing."""
        steps = set(np.diff(self.lengths).tolist())
        if len(self.lengths) < 2 or min(self.lengths) < 1 or len(steps) != 1 or min(steps) < 1:
            raise ValueError(f"the context lengths are {list(self.lengths)}; give two or more, in even steps upwards")
        for name in ("stride", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"the {name} is {getattr(self, name)}; it must be at least 1")
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"the ratios are {list(self.ratios)}; each must be above 0 and at most 1")


def run(
    members: Sequence[Member],
    corpus: Corpus,
    plan: Plan,
    folder: Path,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, list[int | None]]:
    """Scores what is not scored yet and writes recl.json, .csv, .md and two pictures into `folder`.

    Returns:
      For each model, RECL at each ratio; None: longer than the longest context.

    Raises:
      ValueError: a group of one, names that are alike, a plan or a text that does not go, or losses in the folder that
        are of another plan.
      FileNotFoundError: a model has no checkpoint.
      Interrupted: a stop was requested; what was scored before stays.
    """
    plan.validate()
    names = [member.name for member in members]
    if len(names) < 2:
        raise ValueError(f"the group has {len(names)} model; a relative length compares models, so give two or more")
    if len(set(names)) < len(names):
        raise ValueError(f"the models are called {', '.join(names)}; give each a name of its own")
    tokens = getattr(corpus, plan.split)
    scored = positions(len(tokens), longest=plan.lengths[-1], stride=plan.stride)
    losses = {length: [] for length in plan.lengths}
    for member in members:  # What is wrong with the last is said before the first takes its hours.
        load_to_score(member.config, corpus, member.workdir, trained_on=member.trained_on, log=lambda line: None)
    for member in members:
        found = _losses_of(member, corpus, tokens, scored, plan, folder, log=log, stop_requested=stop_requested)
        for length, values in found.items():
            losses[length].append(values)
    return _judge(names, {c: np.stack(rows) for c, rows in losses.items()}, corpus, plan, folder, log=log)


def _losses_of(
    member: Member,
    corpus: Corpus,
    tokens: np.ndarray,
    scored: np.ndarray,
    plan: Plan,
    folder: Path,
    *,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
) -> dict[int, np.ndarray]:
    """The losses [n] of one model at every length, from its files or computed."""
    parts, step, params = load_to_score(member.config, corpus, member.workdir, trained_on=member.trained_on, log=log)
    own = folder / "losses" / member.name
    told = {
        "workdir": str(member.workdir.path),
        "step": int(step),
        "text": corpus.digest,
        "split": plan.split,
        "clamp_len": member.config.eval.clamp_len,
        "temperature": member.config.eval.temperature,
        "first": int(scored[0]),
        "stride": plan.stride,
    }
    _check_same(own / "scored.json", told)
    found = {}
    for length in plan.lengths:
        path, name = own / f"{length}.npy", f"{member.name} from {length:,} tokens"
        if path.exists():
            found[length] = np.load(path)
            continue
        began = time.monotonic()
        measure = corpus.vocabulary.measure
        watch = {"measure": measure, "log": log, "stop_requested": stop_requested}
        with progress_bar(name, total=len(scored), unit="token", **watch) as show:
            found[length] = context_losses(
                parts.evaluation.window_step,
                params,
                tokens,
                scored,
                context=length,
                batch_size=plan.batch_size,
                after_call=lambda done: show(done, Totals()),
            )
        totals = _mean(found[length])
        check_finite(totals, name)
        _save(path, found[length])
        log(report.timed(f"{name} {report.scores(totals, measure)}", time.monotonic() - began))
    return found


def _mean(losses: np.ndarray) -> Totals:
    return Totals(losses.sum(dtype=np.float64).item(), float(len(losses)))


def _check_same(path: Path, told: dict[str, Any]) -> None:
    """Notes what the losses beside `path` are of; raises `ValueError` if they are of something else."""
    if path.exists():
        before = json.loads(path.read_text())
        differs = [
            f"{name} was {before.get(name)} and is {value}" for name, value in told.items() if before.get(name) != value
        ]
        if differs:
            raise ValueError(
                f"{path.parent} holds losses of something else ({'; '.join(differs)}); give another folder"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, told)


def _save(path: Path, values: np.ndarray) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        np.save(file, values)
    part.replace(path)


def _judge(
    names: Sequence[str],
    losses: dict[int, np.ndarray],
    corpus: Corpus,
    plan: Plan,
    folder: Path,
    *,
    log: Callable[[str], None],
) -> dict[str, list[int | None]]:
    """Gains, lengths, files and pictures of the group's losses [models, n] per context length."""
    gains = {ratio: recl_gains.gains(losses, ratio=ratio) for ratio in plan.ratios}
    lengths = {
        name: [recl_gains.effective_length(gains[ratio][i], threshold=plan.threshold) for ratio in plan.ratios]
        for i, name in enumerate(names)
    }
    measure = corpus.vocabulary.measure
    means = {name: {c: _mean(rows[i]).value(measure) for c, rows in losses.items()} for i, name in enumerate(names)}
    n_scored = len(next(iter(losses.values()))[0])
    facts = {"text": corpus.description, "split": plan.split, "tokens": n_scored, **environment.describe()}
    steps = [
        {"model": name, "ratio": ratio, **gains[ratio][i][k]._asdict()}
        for ratio in plan.ratios
        for i, name in enumerate(names)
        for k in range(len(plan.lengths) - 1)
    ]
    plan_told = dataclasses.asdict(plan)
    write_json(
        folder / "recl.json", {**facts, "plan": plan_told, "recl": lengths, measure.value: means, "gains": steps}
    )
    write_text(folder / "recl.csv", _csv(steps))
    table = _markdown(lengths, plan)
    write_text(folder / "recl.md", f"{_caption(facts, plan)}\n\n{table}")
    log(f"\n{table}")
    if plots.can_draw():
        ratio = min(plan.ratios)
        curves = {name: {s.longer: s.perplexity for s in gains[ratio][i]} for i, name in enumerate(names)}
        title = f"{corpus.name} ({plan.split})"
        plots.curves(
            curves,
            folder / "gains.png",
            title=f"{title}: what {plan.lengths[1] - plan.lengths[0]} more tokens of context give, r = {ratio:g}",
            xlabel="context length c' (tokens)",
            ylabel="gain in perplexity over c",
        )
        label = {Measure.BPC: "bits per character", Measure.PPL: "perplexity"}[measure]
        plots.curves(means, folder / "context.png", title=title, xlabel="context length (tokens)", ylabel=label)
    else:
        log("no pictures: matplotlib is missing (pip install 'txl_jax[plots]')")
    log(f"results   {folder / 'recl.md'}")
    return lengths


def _caption(facts: dict[str, Any], plan: Plan) -> str:
    return (
        f"RECL on {facts['text']} ({facts['split']}), {facts['tokens']:,} tokens, one in {plan.stride}, contexts from "
        f"{plan.lengths[0]} to {plan.lengths[-1]} in steps of {plan.lengths[1] - plan.lengths[0]}, threshold "
        f"{plan.threshold:g}; {facts['device']}, {facts['date']}. The paper's lengths are of models on WikiText-103."
    )


def _markdown(lengths: dict[str, list[int | None]], plan: Plan) -> str:
    """Table 8, with the paper's below."""
    lines = [
        f"| model | {' | '.join(f'r = {ratio:g}' for ratio in plan.ratios)} |",
        "|---" * (len(plan.ratios) + 1) + "|",
    ]
    for name, found in lengths.items():
        cells = (f">= {plan.lengths[-1]:,}" if length is None else f"{length:,}" for length in found)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if plan.ratios == Plan(()).ratios:
        lines += [f"| *paper: {name}* | {' | '.join(map(str, found))} |" for name, found in PAPER.items()]
    return "\n".join(lines) + "\n"


def _csv(steps: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(steps[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(steps)
    return text.getvalue()
