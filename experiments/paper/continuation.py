"""Continuations of a text by the model, next to the original: appendix E of the paper.

    python -m experiments.paper.continuation --workdir=runs/wt103 --generate.length=1000
    python -m experiments.paper.continuation --workdir=runs/wt103 --starts=1000,52000 --context=500

The command writes a Markdown file, --out. For each start it contains the context, the model's
continuation, and the original continuation. --generate.* flags set the sampling (by default top-k
with k = 40, 500 tokens). The paper's contexts are parts of WikiText-103's test split, and it
sampled with k = 40 too.
"""

import dataclasses
import os
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from txl_jax import cli
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.run import Run
from txl_jax.runs.score_splits import Split
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import load_to_score
from txl_jax.runtime import distributed, environment, storage
from txl_jax.runtime.output import say


@dataclasses.dataclass(frozen=True)
class Plan(cli.TrainedRun):
    """The contexts to continue."""

    split: Split = setting(Split.TEST, "Split that contains the contexts.")
    starts: tuple[int, ...] = setting((0,), "Tokens of the split at which contexts begin.")
    context: int = setting(512, "Number of tokens of a context.", at_least=1)
    out: str | None = setting(
        None, "Markdown file to write. none means WORKDIR/continuation.md.", path=True
    )

    def validate(self) -> None:
        """Raises `UserError` if starts are empty, or a setting is out of range."""
        super().validate()
        require(
            self.starts, "starts must be one or more token positions, such as 1000,52000, got none"
        )


def run(plan: Plan, job: cli.Job) -> None:
    """Reads the run and its text, and continues it."""
    trained = job.trained(check_can_generate)
    with job.stop:
        write(*trained, plan, stop_requested=lambda: job.stop)


def write(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> None:
    """Writes a Markdown file with a context and its continuations for each start.

    Each context is followed by `generate.length` tokens from the model and from the text.

    The corpus may differ from the run's text if its vocabulary is the same. After `Interrupted`
    nothing is written.
    """
    check_can_generate(config)
    tokens = np.asarray(getattr(corpus, plan.split))
    length = config.generate.length
    context = plan.context
    last = len(tokens) - context - length
    for start in plan.starts:
        require(
            0 <= start <= last,
            f"starts must be 0 to {last:,}, so that a context of {context:,} tokens and "
            f"{length:,} after it are within the {len(tokens):,} of the {plan.split} "
            f"split, got {start:,}",
        )
    built, step, params = load_to_score(config, corpus, trained, log=say)
    generator = built.generator(built.prepare_params(params))
    lines = _head(config, corpus, plan, step)
    for start in plan.starts:
        end = start + context
        prompt = tokens[start:end]
        blocks = list(generator.tokens(prompt, config.generate, stop_requested=stop_requested))
        if stop_requested():
            raise Interrupted(f"the continuation of token {start:,}")
        samples = np.concatenate(blocks, axis=1)

        lines.append(f"## From token {start:,}\n")
        lines.append(_part("Context", corpus, prompt))
        for number, sample in enumerate(samples, start=1):
            title = "The model's continuation"
            if len(samples) > 1:
                title += f" {number}"
            lines.append(_part(title, corpus, sample))
        lines.append(_part("The text's own", corpus, tokens[end : end + length]))
        print(f"written   from token {start:,}: {len(samples)} x {length:,} tokens")

    path = plan.out or os.path.join(trained.outputs, "continuation.md")
    distributed.broadcast_from_primary(lambda: storage.write(path, "\n".join(lines).encode()))
    print(f"results   {path}")


def _head(config: ExperimentConfig, corpus: Corpus, plan: Plan, step: int) -> list[str]:
    """Returns the first lines of the file, which say how the model samples."""
    settings = config.generate
    sampled = "from all tokens"
    if settings.top_k is not None:
        sampled = f"with top-k, k = {settings.top_k}"
    facts = environment.describe()
    sampling = (
        f"sampled {sampled}, temperature {settings.temperature:g}, seed {settings.seed}, with a "
        f"memory of {config.eval.mem_len:,}"
    )
    return [
        f"# Continuations of {corpus.description} ({plan.split})\n",
        f"Step {step:,}; {sampling}; {facts['device']}, {facts['date']}.\n",
    ]


def _part(title: str, corpus: Corpus, ids: np.ndarray) -> str:
    """Returns tokens below a heading."""
    return f"### {title} ({len(ids):,} tokens)\n\n{quoted(corpus, ids)}\n"


def quoted(corpus: Corpus, ids: np.ndarray) -> str:
    """Returns tokens as an indented block in Markdown, which shows the text literally.

    Long lines are broken.
    """
    text = corpus.vocabulary.decode(ids).decode(errors="replace")
    wrapper = textwrap.TextWrapper(
        100, expand_tabs=False, replace_whitespace=False, drop_whitespace=False
    )
    lines = []
    for line in text.splitlines():
        # An empty line stays a line.
        lines += wrapper.wrap(line) or [""]
    return textwrap.indent("\n".join(lines), "    ")


if __name__ == "__main__":
    cli.main(
        run,
        Plan,
        config=ExperimentConfig(),
        groups=("data", "mesh", "eval", "generate"),
        hosts="join",
    )
