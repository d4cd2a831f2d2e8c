r"""Relative effective context length (RECL) of a group of models: table 8 of the paper.

Appendix C of the paper defines it.

    python -m experiments.paper.recl --workdirs=runs/xl,runs/lstm --names=ours,LSTM \
        --out=runs/recl --lengths=100,1000,100 --stride=10

The runs must have the same vocabulary. The text is the first run's, or from --data_dir. Each scored
token is predicted from exactly c tokens, encoded from an empty memory, for every c. --stride=s
scores only every s-th token. The command writes recl.md (table 8), recl.json and recl.csv (all
gains), gains.png and context.png (figures 3 and 4) into --out. It also stores the losses there: to
resume, rerun the same command.
"""

import dataclasses
import io
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from txl_jax import cli, plots
from txl_jax.config.config_tree import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.evaluation.sliding_window import context_losses, positions
from txl_jax.metrics import Totals
from txl_jax.runs.run import Run
from txl_jax.runs.run_tables import csv_file
from txl_jax.runs.score import format_scores
from txl_jax.runs.score_splits import Split
from txl_jax.runs.scoring_progress import check_finite, progress_bar
from txl_jax.runs.trained import load_to_score
from txl_jax.runtime import environment
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import exists, make_folder, read, read_json, write, write_json

# The paper's values.
RATIOS = (0.1, 0.5, 1.0)  # r: fractions of the tokens, those with the largest loss.
THRESHOLD = 0.01  # Smallest relative gain that counts.
# Table 8 by ratio, for models trained on WikiText-103. Lengths are comparable only within a group.
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
    """The models of the group, and the context lengths."""

    workdirs: tuple[str, ...] = setting((), "Directories of the trained runs.", path=True)
    names: tuple[str, ...] = setting(
        (), "Names of the runs. If empty, the names of their directories."
    )
    lengths: tuple[int, ...] = setting((100, 1000, 100), "Shortest context, longest, and step.")
    stride: int = setting(1, "Score only every s-th token.", at_least=1)
    batch_size: int = setting(16, "Contexts per call.", at_least=1)
    split: Split = setting(Split.TEST, "Split to score.")
    out: str = setting(
        "", "Directory for losses, table and plots. Created if missing.", path=True, required=True
    )

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context lengths c, c + d, c + 2 d, .."""
        shortest, longest, step = self.lengths
        return tuple(range(shortest, longest + 1, step))

    def validate(self) -> None:
        """Raises `UserError` if lengths are not a range of two or more.

        Also raises it if a setting is out of range.
        """
        super().validate()
        require(
            len(self.lengths) == 3 and min(self.lengths) >= 1 and len(self.contexts) >= 2,
            "lengths must be the shortest context, the longest and the step of two or more "
            f"contexts, such as 100,1000,100, got {','.join(map(str, self.lengths))}",
        )

    def load_runs(self) -> dict[str, Run]:
        """Reads the runs by name.

        Raises `UserError` unless there are two or more runs, each with its own name.
        """
        names = self.names
        if not names:
            names = tuple(os.path.basename(path.rstrip("/")) for path in self.workdirs)
        require(
            len(names) == len(self.workdirs),
            f"names must name each of the {len(self.workdirs)} workdirs, or none, got "
            f"{len(names)} names",
        )
        # Each name is the name of a directory in --out.
        are_names = all(name and not name.startswith(".") and "/" not in name for name in names)
        require(
            are_names,
            "names must not be empty, begin with a dot or contain a slash, because each names a "
            f"directory in --out, got {', '.join(map(repr, names))}",
        )
        require(
            len(set(names)) == len(names),
            f"the names of the models must differ, got {', '.join(names)}",
        )
        require(
            len(names) >= 2,
            f"workdirs must be two or more, because RECL compares models, got {len(names)}",
        )
        paths = dict(zip(names, self.workdirs, strict=True))
        return {name: Run.read(path) for name, path in paths.items()}


def run(plan: Plan, job: cli.Job) -> None:
    """Scores the runs of the group on the text of the first."""
    runs = plan.load_runs()
    first = next(iter(runs.values()))
    corpus = job.corpus(first.config, first)
    with job.stop:
        compare(runs, corpus, plan, stop_requested=lambda: job.stop)


def compare(
    runs: Mapping[str, Run],
    corpus: Corpus,
    plan: Plan,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, list[int | None]]:
    """Scores the unfinished lengths and writes recl.json, .csv, .md and two plots into `plan.out`.

    Returns, for each model, RECL at each ratio, or None if it is longer than the longest context.
    After `Interrupted` finished scores are kept.
    """
    scored = positions(
        len(getattr(corpus, plan.split)), longest=plan.contexts[-1], stride=plan.stride
    )
    # An error in the last run is found before the first run takes its hours.
    for trained in runs.values():
        load_to_score(trained.config, corpus, trained, log=lambda line: None)

    by_model = []
    for name, trained in runs.items():
        by_model.append(_losses_of(name, trained, corpus, scored, plan, stop_requested))
    losses = {}
    for context in plan.contexts:
        losses[context] = np.stack([losses_of_model[context] for losses_of_model in by_model])

    all_gains = {ratio: gains(losses, ratio=ratio) for ratio in RATIOS}
    lengths = {}
    for i, name in enumerate(runs):
        lengths[name] = [effective_length(all_gains[ratio][i]) for ratio in RATIOS]
    _write_results(lengths, all_gains, losses, corpus, plan)
    return lengths


def _losses_of(
    name: str,
    trained: Run,
    corpus: Corpus,
    scored: np.ndarray,
    plan: Plan,
    stop_requested: Callable[[], Any],
) -> dict[int, np.ndarray]:
    """Returns the losses [n] of one model at every context length, from its files or computed.

    Each length is a file, so that a stopped command resumes.
    """
    built, step, params = load_to_score(trained.config, corpus, trained, log=say)
    measure = corpus.vocabulary.measure
    folder = os.path.join(plan.out, "losses", name)
    identity = {
        "workdir": trained.path,
        "step": int(step),
        "text": corpus.digest,
        "split": plan.split,
        "clamp_len": trained.config.eval.clamp_len,
        "temperature": trained.config.eval.temperature,
        "first": int(scored[0]),
        "stride": plan.stride,
    }
    _check_same_losses(folder, identity)

    losses = {}
    for length in plan.contexts:
        path = os.path.join(folder, f"{length}.npy")
        if exists(path):
            losses[length] = np.load(io.BytesIO(read(path)))
            continue

        what = f"{name} from {length:,} tokens"
        began = time.monotonic()
        with progress_bar(
            what,
            total=len(scored),
            unit="token",
            measure=measure,
            log=print,
            stop_requested=stop_requested,
        ) as show:
            losses[length] = context_losses(
                built.window_step,
                params,
                getattr(corpus, plan.split),
                scored,
                context=length,
                batch_size=plan.batch_size,
                after_call=lambda so_far: show(so_far.tokens, so_far),
            )
        totals = Totals.of(losses[length])
        check_finite(totals, what)
        data = io.BytesIO()
        np.save(data, losses[length])
        write(path, data.getvalue())
        seconds = time.monotonic() - began
        print(f"{what} {format_scores(totals, measure)}  in {environment.duration(seconds)}")
    return losses


def _check_same_losses(folder: str, identity: Mapping[str, Any]) -> None:
    """Raises `UserError` if a directory contains losses of another model or text.

    If the directory is missing, it is created, with a record of the model and the text.
    """
    path = os.path.join(folder, "scored.json")
    if not exists(path):
        make_folder(folder)
        write_json(path, identity)
    recorded = read_json(path)
    changes = []
    for key, value in identity.items():
        if recorded.get(key) != value:
            changes.append(f"{key} was {recorded.get(key)} and is {value}")
    require(
        not changes,
        f"{folder} contains other losses ({', '.join(changes)}). Choose another directory.",
    )


# From losses to lengths. l_i(c, t) is the loss of model i at token t when it has read the c tokens
# before it and nothing else. For models in one group, and a step d,
#
#     b(c, t)    = min over i of l_i(c, t)                             the baseline
#     f_i(c, c') = mean over t in T of min(b(c, t), l_i(c', t))        the relative loss, c' = c + d
#     g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)    the relative gain
#
# where T is the fraction r of all positions with the largest b(c, t): the positions that a short
# context predicts worst. RECL is the first c, in steps of d, from which one more step gains less
# than the threshold. Losses above the baseline do not count, so that a model that is worse
# everywhere does not gain from a longer context.


class Gain(NamedTuple):
    """The gain of a model from a longer context."""

    context: int  # c
    longer: int  # c'
    relative: float  # g_i(c, c')
    perplexity: float  # exp f_i(c, c) - exp f_i(c, c'), as in figure 3.


def gains(losses: Mapping[int, np.ndarray], *, ratio: float) -> list[list[Gain]]:
    """Computes, for each model, the gain of every step from a context length to the next.

    `losses` are [models, T] by context length, in increasing order, and `ratio` is r, above 0 and
    at most 1.
    """
    n_models = len(next(iter(losses.values())))
    by_model: list[list[Gain]] = [[] for _ in range(n_models)]
    for context, longer in itertools.pairwise(losses):
        baseline = losses[context].min(axis=0)
        where = hardest(baseline, ratio)
        for model, steps in enumerate(by_model):
            before = np.exp(_relative_loss(baseline, losses[context][model], where))
            after = np.exp(_relative_loss(baseline, losses[longer][model], where))
            relative = float((before - after) / before)
            steps.append(Gain(context, longer, relative, float(before - after)))
    return by_model


def hardest(baseline: np.ndarray, ratio: float) -> np.ndarray:
    """Returns the positions, in order, of the `ratio` of [T] with the largest baseline.

    Returns at least one position.
    """
    count = max(round(ratio * len(baseline)), 1)
    # A stable sort, so that the earlier of equal positions is taken.
    return np.sort(np.argsort(-baseline, kind="stable")[:count])


def _relative_loss(baseline: np.ndarray, losses: np.ndarray, where: np.ndarray) -> float:
    """Computes f_i in nats from one model's losses [T]."""
    return float(np.minimum(baseline, losses)[where].mean(dtype=np.float64))


def effective_length(steps: Sequence[Gain]) -> int | None:
    """Returns RECL, the context from which the next step gains less than the threshold.

    Returns None if no step does.
    """
    for step in steps:
        if step.relative < THRESHOLD:
            return step.context
    return None


def _write_results(
    lengths: Mapping[str, list[int | None]],
    all_gains: Mapping[float, list[list[Gain]]],
    losses: Mapping[int, np.ndarray],
    corpus: Corpus,
    plan: Plan,
) -> None:
    """Writes recl.json, recl.csv, recl.md and the plots, and prints the table.

    Args:
      lengths: RECL at each ratio by model, or None if it is longer than the longest context.
      all_gains: Gains of each model by ratio.
      losses: Losses [models, T] by context length.
      corpus: The text that was scored.
      plan: Settings of the comparison.
    """
    measure = corpus.vocabulary.measure
    means: dict[str, dict[int, float]] = {}
    for i, name in enumerate(lengths):
        means[name] = {
            context: Totals.of(of_models[i]).value(measure) for context, of_models in losses.items()
        }
    facts = {
        "text": corpus.description,
        "split": plan.split,
        "tokens": len(losses[plan.contexts[0]][0]),
        **environment.describe(),
    }
    steps = []
    for ratio in RATIOS:
        for name, gains_of_model in zip(lengths, all_gains[ratio], strict=True):
            for step in gains_of_model:
                steps.append({"model": name, "ratio": ratio, **step._asdict()})

    # Flags with the directories of texts do not belong to the results.
    names_of_text_flags = {field.name for field in dataclasses.fields(cli.TextPlan)}
    settings = {
        name: value
        for name, value in dataclasses.asdict(plan).items()
        if name not in names_of_text_flags
    }
    unit = "bpc" if measure.is_bits else str(measure)
    results = {"plan": settings, "recl": lengths, unit: means, "gains": steps}
    write_json(os.path.join(plan.out, "recl.json"), {**facts, **results})
    write(os.path.join(plan.out, "recl.csv"), csv_file(list(steps[0]), steps))

    page = _table(lengths, longest=plan.contexts[-1])
    caption = (
        f"RECL on {corpus.description} ({plan.split}), {facts['tokens']:,} tokens, one in "
        f"{plan.stride}, contexts from {plan.contexts[0]} to {plan.contexts[-1]} in steps of "
        f"{plan.lengths[2]}, threshold {THRESHOLD:g}; {facts['device']}, {facts['date']}. "
        "The paper's lengths are of models on WikiText-103."
    )
    path = os.path.join(plan.out, "recl.md")
    write(path, f"{caption}\n\n{page}".encode())
    print(f"\n{page}")
    if plots.can_draw():
        hardest_ratio = min(RATIOS)
        gains_of_models = dict(zip(lengths, all_gains[hardest_ratio], strict=True))
        _draw(gains_of_models, hardest_ratio, means, corpus, plan)
    print(f"results   {path}")


def _table(lengths: Mapping[str, list[int | None]], *, longest: int) -> str:
    """Returns table 8: RECL of each model at each ratio, and the paper's."""
    rows = []
    for name, of_ratios in lengths.items():
        row = [name]
        for length in of_ratios:
            row.append(f">= {longest:,}" if length is None else f"{length:,}")
        rows.append(row)
    for name, published in PAPER.items():
        rows.append([f"*paper: {name}*", *map(str, published)])
    columns = ["model", *(f"r = {ratio:g}" for ratio in RATIOS)]
    return "\n".join([*environment.table(columns, rows), ""])


def _draw(
    gains_of_models: Mapping[str, Sequence[Gain]],
    ratio: float,
    means: Mapping[str, Mapping[int, float]],
    corpus: Corpus,
    plan: Plan,
) -> None:
    """Draws gains.png (figure 3), the gains at a ratio, and context.png (figure 4), the means."""
    title = f"{corpus.name} ({plan.split})"
    perplexities = {}
    for name, steps in gains_of_models.items():
        perplexities[name] = {step.longer: step.perplexity for step in steps}
    plots.curves(
        perplexities,
        os.path.join(plan.out, "gains.png"),
        title=f"{title}: gain of {plan.lengths[2]} more tokens of context, r = {ratio:g}",
        xlabel="context length c' (tokens)",
        ylabel="gain in perplexity over c",
    )
    plots.curves(
        means,
        os.path.join(plan.out, "context.png"),
        title=title,
        xlabel="context length (tokens)",
        ylabel=plots.UNITS[corpus.vocabulary.measure],
    )


if __name__ == "__main__":
    cli.main(run, Plan)
