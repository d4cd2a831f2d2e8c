"""Relative effective context length (RECL) of the models of a group: appendix C, table 8, figures 3 and 4 of the paper.

Every model scores the same tokens at the same context lengths, each loss with its context encoded from an empty memory.
The losses of each model and length are a file of their own, so that a stopped job resumes, and that other ratios and
thresholds need no new scores.
"""

import csv
import dataclasses
import functools
import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from txl_jax import cli
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError
from txl_jax.evaluation.context_losses import context_losses, positions
from txl_jax.metrics import Totals
from txl_jax.paper import plots, recl_gains
from txl_jax.paper.study import Split
from txl_jax.runs.run import Run
from txl_jax.runs.score import check_finite, progress_bar
from txl_jax.runs.validation import format_scores, with_duration
from txl_jax.runs.weights import load_to_score
from txl_jax.runtime import environment
from txl_jax.runtime.storage import as_path, exists, make_folder, read, write, write_json

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
class Plan(cli.TextPlan):
    """The models of the group, the contexts they are scored from, and the measure of gains."""

    workdirs: tuple[str, ...] = setting((), "Folders of the trained runs.", path=True)
    names: tuple[str, ...] = setting((), "Names of the runs; empty: those of their folders.")
    lengths: tuple[int, ...] = setting((100, 1000, 100), "Shortest context, longest, and step.")
    stride: int = setting(1, "Every s-th token is scored.", at_least=1)
    batch_size: int = setting(16, "Contexts per call.", at_least=1)
    ratios: tuple[float, ...] = setting((0.1, 0.5, 1.0), "r: fractions of the tokens, those with the largest loss.")
    threshold: float = setting(recl_gains.THRESHOLD, "Smallest relative gain that counts.", at_least=0)
    split: Split = setting(Split.TEST, "Text that is scored.")
    out: str | None = setting(None, "Folder of losses, table and plots. Created if missing.", path=True)

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context lengths c, c + d, c + 2 d, .."""
        shortest, longest, step = self.lengths
        return tuple(range(shortest, longest + 1, step))

    def validate(self) -> None:
        """Raises `UserError` for lengths that are no range of two or more, settings out of range, or no folder."""
        check_fields(self, "")
        require(
            len(self.lengths) == 3 and min(self.lengths) >= 1 and len(self.contexts) >= 2,
            f"lengths is {','.join(map(str, self.lengths))}; give the shortest context, the longest and the step of "
            "two or more, as 100,1000,100",
        )
        require(
            self.ratios and all(0 < ratio <= 1 for ratio in self.ratios),
            f"the ratios are {list(self.ratios)}; each must be above 0 and at most 1",
        )
        require(self.out, "no folder was given; set out to a folder for losses, table and plots")

    def load_runs(self) -> dict[str, Run]:
        """Reads the runs; returns them by their names.

        Raises:
          UserError: fewer than two runs, another number of names, or a folder that has no run.
        """
        require(
            len(self.workdirs) >= 2,
            f"workdirs has {len(self.workdirs)} folders; a relative context length compares models, so give two or "
            "more",
        )
        names = self.names or tuple(map(os.path.basename, self.workdirs))
        require(
            len(names) == len(self.workdirs),
            f"names has {len(names)} names and workdirs {len(self.workdirs)} folders; name each run, or none",
        )
        require(len(set(names)) == len(names), f"the models are called {', '.join(names)}; give them different names")
        return {name: Run.read(path) for name, path in zip(names, self.workdirs, strict=True)}


def run(
    runs: Mapping[str, Run],
    corpus: Corpus,
    plan: Plan,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, list[int | None]]:
    """Scores what is not scored yet and writes recl.json, .csv, .md and two plots into `plan.out`.

    Args:
      runs: the group, as `plan.load_runs` has it.
      corpus: has the text.
      plan: contexts, ratios and folder.
      log: takes lines for the user.
      stop_requested: whether to stop.

    Returns:
      For each model, RECL at each ratio; None: longer than the longest context.

    Raises:
      UserError: a group of one, equal names, a plan or a text that does not fit, losses of another plan in the folder,
        or a model without a checkpoint.
      Interrupted: a stop was requested; what was scored before stays.
    """
    plan.validate()
    require(len(runs) >= 2, f"the group has {len(runs)} model; a relative length compares models, so give two or more")
    tokens = getattr(corpus, plan.split)
    scored = positions(len(tokens), longest=plan.contexts[-1], stride=plan.stride)
    for each in runs.values():  # An error in the last is found before the first takes its hours.
        load_to_score(each.config, corpus, each, log=lambda line: None)
    losses: dict[int, list[np.ndarray]] = {length: [] for length in plan.contexts}
    for name, each in runs.items():
        found = _losses_of(name, each, corpus, tokens, scored, plan, log=log, stop_requested=stop_requested)
        for length, values in found.items():
            losses[length].append(values)
    return _write_results(list(runs), {c: np.stack(rows) for c, rows in losses.items()}, corpus, plan, log=log)


def _losses_of(
    name: str,
    run: Run,
    corpus: Corpus,
    tokens: np.ndarray,
    scored: np.ndarray,
    plan: Plan,
    *,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
) -> dict[int, np.ndarray]:
    """Returns the losses [n] of one model at every context length, from its files or computed."""
    parts, step, params = load_to_score(run.config, corpus, run, log=log)
    own = os.path.join(as_path(plan.out or ""), "losses", name)
    identity = {
        "workdir": run.path,
        "step": int(step),
        "text": corpus.digest,
        "split": plan.split,
        "clamp_len": run.config.eval.clamp_len,
        "temperature": run.config.eval.temperature,
        "first": int(scored[0]),
        "stride": plan.stride,
    }
    _check_identity(os.path.join(own, "scored.json"), identity)
    found = {}
    for length in plan.contexts:
        path, what = os.path.join(own, f"{length}.npy"), f"{name} from {length:,} tokens"
        if exists(path):
            found[length] = np.load(io.BytesIO(read(path)))
            continue
        began = time.monotonic()
        measure = corpus.vocabulary.measure
        progress = functools.partial(progress_bar, measure=measure, log=log, stop_requested=stop_requested)
        with progress(what, total=len(scored), unit="token") as show:
            found[length] = context_losses(
                parts.evaluation.window_step,
                params,
                tokens,
                scored,
                context=length,
                batch_size=plan.batch_size,
                after_call=lambda done: show(done, Totals()),
            )
        totals = Totals.of(found[length])
        check_finite(totals, what)
        _save(path, found[length])
        log(with_duration(f"{what} {format_scores(totals, measure)}", time.monotonic() - began))
    return found


def _check_identity(path: str, identity: dict[str, Any]) -> None:
    """Writes a description of the losses beside `path`; raises `UserError` if it has one that differs."""
    if not exists(path):
        make_folder(os.path.dirname(path))
        write_json(path, identity)
        return
    before = json.loads(read(path))
    differing = [
        f"{name} was {before.get(name)} and is {value}" for name, value in identity.items() if before.get(name) != value
    ]
    if differing:
        raise UserError(f"{os.path.dirname(path)} holds other losses ({'; '.join(differing)}); give another folder")


def _save(path: str, values: np.ndarray) -> None:
    """Writes an array."""
    data = io.BytesIO()
    np.save(data, values)
    write(path, data.getvalue())


def _write_results(
    names: Sequence[str], losses: dict[int, np.ndarray], corpus: Corpus, plan: Plan, *, log: Callable[[str], None]
) -> dict[str, list[int | None]]:
    """Writes gains, lengths and plots of the group's losses [models, n] per context length; returns the lengths."""
    folder, measure = as_path(plan.out or ""), corpus.vocabulary.measure
    gains = {ratio: recl_gains.gains(losses, ratio=ratio) for ratio in plan.ratios}
    lengths = {
        name: [recl_gains.effective_length(gains[ratio][i], threshold=plan.threshold) for ratio in plan.ratios]
        for i, name in enumerate(names)
    }
    means = {name: {c: Totals.of(rows[i]).value(measure) for c, rows in losses.items()} for i, name in enumerate(names)}
    n_scored = len(next(iter(losses.values()))[0])
    facts = {"text": corpus.description, "split": plan.split, "tokens": n_scored, **environment.describe()}
    steps = [
        {"model": name, "ratio": ratio, **gains[ratio][i][k]._asdict()}
        for ratio in plan.ratios
        for i, name in enumerate(names)
        for k in range(len(plan.contexts) - 1)
    ]
    shared = {field.name for field in dataclasses.fields(cli.TextPlan)}
    own = {name: value for name, value in dataclasses.asdict(plan).items() if name not in shared}
    results = {"plan": own, "recl": lengths, measure.value: means, "gains": steps}
    write_json(os.path.join(folder, "recl.json"), {**facts, **results})
    write(os.path.join(folder, "recl.csv"), _csv(steps).encode())
    table = _markdown(lengths, plan)
    write(os.path.join(folder, "recl.md"), f"{_caption(facts, plan)}\n\n{table}".encode())
    log(f"\n{table}")
    ratio = min(plan.ratios)
    curves = {name: {s.longer: s.perplexity for s in gains[ratio][i]} for i, name in enumerate(names)}
    _draw(curves, means, corpus, plan, log=log)
    log(f"results   {os.path.join(folder, 'recl.md')}")
    return lengths


def _draw(
    gains: dict[str, dict[int, float]],
    means: dict[str, dict[int, float]],
    corpus: Corpus,
    plan: Plan,
    *,
    log: Callable[[str], None],
) -> None:
    """Draws figure 3 (gains by context length) and figure 4 (the measure by context length)."""
    if not plots.can_draw():
        log("no plots: matplotlib is missing (pip install 'txl_jax[plots]')")
        return
    folder, step, title = as_path(plan.out or ""), plan.lengths[2], f"{corpus.name} ({plan.split})"
    plots.curves(
        gains,
        os.path.join(folder, "gains.png"),
        title=f"{title}: gain of {step} more tokens of context, r = {min(plan.ratios):g}",
        xlabel="context length c' (tokens)",
        ylabel="gain in perplexity over c",
    )
    label = plots.UNITS[corpus.vocabulary.measure]
    plots.curves(
        means, os.path.join(folder, "context.png"), title=title, xlabel="context length (tokens)", ylabel=label
    )


def _caption(facts: dict[str, Any], plan: Plan) -> str:
    return (
        f"RECL on {facts['text']} ({facts['split']}), {facts['tokens']:,} tokens, one in {plan.stride}, contexts from "
        f"{plan.contexts[0]} to {plan.contexts[-1]} in steps of {plan.lengths[2]}, threshold "
        f"{plan.threshold:g}; {facts['device']}, {facts['date']}. The paper's lengths are of models on WikiText-103."
    )


def _markdown(lengths: dict[str, list[int | None]], plan: Plan) -> str:
    """Returns table 8, with the paper's rows below."""
    lines = [
        f"| model | {' | '.join(f'r = {ratio:g}' for ratio in plan.ratios)} |",
        "|---" * (len(plan.ratios) + 1) + "|",
    ]
    for name, found in lengths.items():
        cells = (f">= {plan.contexts[-1]:,}" if length is None else f"{length:,}" for length in found)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if plan.ratios == Plan().ratios:
        lines += [f"| *paper: {name}* | {' | '.join(map(str, found))} |" for name, found in PAPER.items()]
    return "\n".join(lines) + "\n"


def _csv(steps: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(steps[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(steps)
    return text.getvalue()
