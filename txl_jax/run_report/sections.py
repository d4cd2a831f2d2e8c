"""The sections of a report, as HTML: results, time, settings, samples, sources."""

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from txl_jax.config import tree as config_tree
from txl_jax.paper.published_results import PublishedResult, published_for
from txl_jax.run_report.curves import best_valid_score
from txl_jax.run_report.html_table import breakable, breakable_command, folded, table
from txl_jax.run_report.run_records import RunRecords, swept_settings
from txl_jax.run_report.seed_groups import SeedGroup, format_score
from txl_jax.runtime.environment import brief_number, duration, megabytes

_MOST_IN_ORDER = 8  # Runs that are listed as they were given; more are listed by their scores.
_MOST_SETTINGS = 4  # Columns of the table of results; the section on settings has all.


def results(groups: Sequence[SeedGroup]) -> str:
    """Returns the scores of all runs, with the means over seeds, beside the paper's."""
    runs = [run for group in groups for run in group.runs]
    corpora = {run.config.data.corpus: run.corpus for run in runs}
    published = [result for corpus in corpora for result in published_for(corpus)]
    notes = [f"Text: {'; '.join(dict.fromkeys(run.text for run in runs))}."]
    notes.append("Test scores are those of the parameters of the best validation.")
    if published:
        tables = " and ".join(sorted({f"{result.table}" for result in published}))
        notes.append(
            f"The paper's rows (Dai et al., 2019, table {tables}) are test scores on the whole of "
            f"{' and '.join(dict.fromkeys(corpora[result.corpus] for result in published))}, of models of the sizes "
            "given."
        )
    if any(len(group.runs) > 1 for group in groups):
        own = folded(f"All {len(runs)} runs", _by_run(runs, []), rows=len(runs))
        parts = [_means(groups, published), own]
        notes.append("± is the standard deviation over seeds.")
    else:
        parts = [_by_run(runs, published)]
    return "\n".join([*parts, f'<p class="note">{html.escape(" ".join(notes))}</p>'])


def _by_run(runs: Sequence[RunRecords], published: Sequence[PublishedResult]) -> str:
    """One row for each run, and for each of the paper's scores."""
    measure, swept = runs[0].measure, swept_settings(runs)
    shown = swept if len(swept) <= _MOST_SETTINGS else []
    rows = []
    for run in runs if len(runs) <= _MOST_IN_ORDER else sorted(runs, key=_best):
        values = [config_tree.format_value(config_tree.get(run.config, name)) for name in shown]
        best = run.best_valid
        scores = ["", ""] if best is None else [format_score(best[1], measure), f"{best[0]:,}"]
        rows.append([run.name, *values, *scores, _test(run), _parameters(run), run.state])
    rows += [[_paper(each), *[""] * (len(shown) + 2), each.score, each.parameters, ""] for each in published]
    return table(
        ["run", *shown, f"best valid {measure}", "at update", f"test {measure}", "parameters", "state"],
        rows,
        classes=_classes(rows, published),
        text=["state", *shown],
    )


def _means(groups: Sequence[SeedGroup], published: Sequence[PublishedResult]) -> str:
    """One row for each group of seeds, and for each of the paper's scores."""
    measure = groups[0].runs[0].measure
    rows = []
    for group in groups:
        valid, test = group.mean(best_valid_score), group.mean(lambda run: run.test)
        cells = ["" if mean is None else mean.format(measure, count=False) for mean in (valid, test)]
        parameters = {_parameters(run) for run in group.runs} - {""}
        rows.append([group.name or "all runs", *cells, f"{len(group.runs)}", ", ".join(parameters)])
    rows += [[_paper(each), "", each.score, "", each.parameters] for each in published]
    columns = ["settings", f"best valid {measure}", f"test {measure}", "seeds", "parameters"]
    return table(columns, rows, classes=_classes(rows, published))


def _paper(result: PublishedResult) -> str:
    return f"paper, {result.layers} layers ({result.flagfile})"


def _classes(rows: Sequence[Sequence[str]], published: Sequence[PublishedResult]) -> list[str]:
    """The paper's rows are the last."""
    return [""] * (len(rows) - len(published)) + ["paper"] * len(published)


def _best(run: RunRecords) -> float:
    score = best_valid_score(run)
    return math.inf if score is None else score


def _test(run: RunRecords) -> str:
    return "" if run.test is None else format_score(run.test, run.measure)


def _parameters(run: RunRecords) -> str:
    return f"{run.results['parameters']:,}" if run.results and "parameters" in run.results else ""


def efficiency(runs: Sequence[RunRecords]) -> str:
    """Returns time and use of the devices: what the train records of each run have."""
    columns: dict[str, Callable[[RunRecords], str]] = {
        "training time": lambda run: duration(run.training_seconds) if run.training_seconds else "",
        "tokens per second": lambda run: _median(run, "tokens_per_second", lambda value: f"{value:,.0f}"),
        "time per update": _step_time,
        "FLOP/s": lambda run: _median(run, "model_flops_per_second", brief_number),
        "of the peak": lambda run: _median(run, "peak_share", _percent),
        "waiting for the host": lambda run: _median(run, "host_wait_share", _percent),
        "device memory": lambda run: _median(run, "device_memory_bytes", megabytes),
    }
    cells = {name: [cell(run) for run in runs] for name, cell in columns.items()}
    shown = [name for name, column in cells.items() if any(column)]
    rows = [[run.name, *(cells[name][i] for name in shown)] for i, run in enumerate(runs)]
    measured = {f"{found['device']}, {found['date']}" for run in runs if _is_dated(found := run.results or {})}
    note = (f"{'; '.join(sorted(measured))}. " if measured else "") + (
        "Medians over the train records of metrics.jsonl. Training time is that of the updates at their recorded "
        "rates, without start, evaluation and checkpoints."
    )
    content = folded(f"All {len(runs)} runs", table(["run", *shown], rows), rows=len(rows))
    return "\n".join([content, f'<p class="note">{html.escape(note)}</p>'])


def _is_dated(results: Mapping[str, Any]) -> bool:
    return {"device", "date"} <= results.keys()


def _median(run: RunRecords, field: str, text: Callable[[float], str]) -> str:
    value = run.median(field)
    return "" if value is None else text(value)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _step_time(run: RunRecords) -> str:
    rate = run.median("tokens_per_second")
    seconds = run.median("step_seconds") or (run.tokens_per_step / rate if rate else None)
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def settings(runs: Sequence[RunRecords]) -> str:
    """Returns the settings in which runs differ; empty if there are none that the results do not show."""
    names = swept_settings(runs, all_settings=True)
    if not names or (len(names) <= _MOST_SETTINGS and names == swept_settings(runs)):
        return ""
    by_run = [[config_tree.format_value(config_tree.get(run.config, name)) for name in names] for run in runs]
    if len(names) > len(runs):  # The longer side goes down the page.
        rows = [[name, *(column[i] for column in by_run)] for i, name in enumerate(names)]
        return table(["setting", *(run.name for run in runs)], rows)
    by_name = table(["run", *names], [[run.name, *row] for run, row in zip(runs, by_run, strict=True)])
    return folded(f"All {len(runs)} runs", by_name, rows=len(runs))


def samples(runs: Sequence[RunRecords]) -> str:
    """Returns generated texts, each with its file; empty if there are none."""
    return "\n".join(_samples(runs))


def _samples(runs: Sequence[RunRecords]) -> Iterator[str]:
    for run in runs:
        for name, text in run.samples.items():
            yield f"<h3>{breakable(run.name)}</h3>"
            yield f'<pre class="sample">{html.escape(text)}</pre>'
            yield f'<p class="source">{html.escape(name)}</p>'


def sources(runs: Sequence[RunRecords]) -> str:
    """Returns the folder of each run and a command with its settings."""
    note = (
        "Every number is read from the files of the runs: scores, rates and curves from metrics.jsonl, test scores, "
        "device and date from results.json, settings from config.json. The command of each run trains one with the "
        "same settings; in its own folder it resumes it."
    )
    parts = [f"<p>{note}</p>"]
    for run in runs:
        parts += [
            f"<details{' open' if len(runs) == 1 else ''}><summary>{breakable(run.name)}</summary>",
            f'<p class="path">{html.escape(run.path)}</p>',
            f"<pre>{breakable_command(run.command)}</pre>",
            "</details>",
        ]
    return "\n".join(parts)
