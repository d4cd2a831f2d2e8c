"""The page of a report: one HTML file that loads nothing."""

import datetime
import html
import importlib.resources
from collections.abc import Sequence

from txl_jax.errors import UserError
from txl_jax.run_report import sections
from txl_jax.run_report.curves import learning_curves, small_charts
from txl_jax.run_report.html_table import breakable_command
from txl_jax.run_report.run_records import RunRecords
from txl_jax.run_report.seed_groups import seed_groups
from txl_jax.run_report.settings_charts import setting_charts
from txl_jax.version import __version__


def make_page(runs: Sequence[RunRecords], *, command: str, date: str | None = None) -> str:
    """Returns the HTML of a report.

    Args:
      runs: at least one, all of one measure.
      command: that makes the page.
      date: of the page; None: today.

    Raises:
      UserError: runs of different measures.
    """
    _check_one_measure(runs)
    groups = seed_groups(runs)
    runs = [run for group in groups for run in group.runs]
    by_setting = _grid([chart.html() for chart in setting_charts(groups)])
    shown = {
        "Learning curves": "\n".join(
            [learning_curves(groups).html(), _grid([chart.html() for chart in small_charts(groups)])]
        ),
        "Results": sections.results(groups),
        "By setting": by_setting,
        "Time and efficiency": sections.efficiency(runs),
        "Differences in settings": sections.settings(runs),
        "Samples": sections.samples(runs),
        "Sources": sections.sources(runs),
    }
    body = "\n".join(f"<section>\n<h2>{name}</h2>\n{content}\n</section>" for name, content in shown.items() if content)
    title = _title(runs)
    made = f"Written on {date or datetime.date.today().isoformat()} by txl_jax {__version__}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{_resource("page.css")}</style>
</head>
<body>
<main>
<header>
<h1>{html.escape(title)}</h1>
<p class="lead">{html.escape(_lead(runs))}</p>
</header>
{body}
<footer><p>{html.escape(made)}:</p><pre>{breakable_command(command)}</pre></footer>
</main>
<script>
{_resource("page.js")}</script>
</body>
</html>
"""


def _check_one_measure(runs: Sequence[RunRecords]) -> None:
    by_measure = {run.measure: run.name for run in runs}
    if len(by_measure) > 1:
        found = " and ".join(f"{name} has {measure}" for measure, name in by_measure.items())
        raise UserError(f"{found}, which one curve cannot compare; make a report of each kind of run")


def _title(runs: Sequence[RunRecords]) -> str:
    corpora = " and ".join(dict.fromkeys(run.corpus for run in runs))
    return f"{runs[0].name}: {corpora}" if len(runs) == 1 else f"{len(runs)} runs on {corpora}"


def _lead(runs: Sequence[RunRecords]) -> str:
    """The sizes of the runs, one value or the range of each."""
    models = [run.config.model for run in runs]
    layers, widths = _range([model.n_layer for model in models]), _range([model.d_model for model in models])
    steps, tokens = (
        _range([run.last_step for run in runs]),
        _range([run.last_step * run.tokens_per_step for run in runs]),
    )
    ended = sum(run.results is not None for run in runs)
    some = f" {ended} of {len(runs)} have finished." if len(runs) > 1 else " Not finished."
    state = "" if ended == len(runs) else some
    return f"Models of {layers} layers and width {widths}, {steps} updates on {tokens} tokens.{state}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _grid(charts: Sequence[str]) -> str:
    return "\n".join(['<div class="grid">', *charts, "</div>"]) if charts else ""


def _resource(name: str) -> str:
    return importlib.resources.files("txl_jax.run_report").joinpath(name).read_text(encoding="utf-8")
