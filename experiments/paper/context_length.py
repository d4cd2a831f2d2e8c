"""Scores of a trained run by attention length: figure 4 of the paper.

    python -m experiments.paper.context_length --workdir=runs/mine --lengths=64,128,256,512
    python -m experiments.paper.context_length --workdir=runs/vanilla --lengths=128,512 --stride=16

The command writes context_length.csv and, with matplotlib, context_length.png into the workdir. At
attention length A the memory has A slots and every token attends to the same number of keys
(--eval.mem_len and --eval.same_length are set, and segments are at most A long). The other --eval
settings come from the run, unless you pass them: a run trained with --eval.clamp_len still clamps.

The text is split into --eval.batch_size rows, each of which should be many times as long as A: for
a short text pass --eval.batch_size=1. A model without recurrence (--model.encoding=vaswani, or
trained with --train.mem_len=0) reads windows of A tokens, --eval.batch_size in parallel. --stride
is the number of tokens that each window scores.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from txl_jax import cli, plots
from txl_jax.config import ExperimentConfig, Network, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.metrics import Totals
from txl_jax.modules.positions import encoding_of
from txl_jax.runs.build import build_for
from txl_jax.runs.run import Run
from txl_jax.runs.run_tables import csv_file
from txl_jax.runs.score import as_record, score_with_line
from txl_jax.runs.score_splits import Split
from txl_jax.runs.trained import load_to_score
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.output import say


@dataclasses.dataclass(frozen=True)
class Plan(cli.TrainedRun):
    """The attention lengths and the split."""

    lengths: tuple[int, ...] = setting((64, 128, 256, 512, 1024, 2048), "Attention lengths.")
    split: Split = setting(Split.VALID, "Split to score.")
    stride: int | None = setting(
        None,
        "Scored tokens per window, without recurrence. 1 is the published protocol.",
        at_least=1,
    )

    stopped: ClassVar[str] = "the lengths before it are in context_length.csv"

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` if the run cannot be scored with these settings."""
        at_lengths(config, self.lengths, stride=self.stride)


def run(plan: Plan, job: cli.Job) -> None:
    """Reads the run and its text, and scores it at each length."""
    trained = job.trained(plan.check)
    with job.stop:
        score_lengths(*trained, plan, stop_requested=lambda: job.stop)


def score_lengths(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[int, Totals]:
    """Scores a split at each length.

    Writes context_length.csv after each, and context_length.png at the end.

    The corpus may differ from the run's text if its vocabulary is the same. After `Interrupted` the
    rows so far are written.
    """
    configs = at_lengths(config, plan.lengths, stride=plan.stride)
    _, step, params = load_to_score(config, corpus, trained, log=say)
    vocabulary = corpus.vocabulary
    tokens = getattr(corpus, plan.split)

    table = f"{trained.outputs}/context_length.csv"
    scores: dict[int, Totals] = {}
    rows: list[dict[str, Any]] = []
    for length, changed in configs.items():
        began = time.monotonic()
        built = build_for(changed, vocabulary)
        totals, line = score_with_line(
            built,
            params,
            tokens,
            name=f"{plan.split} at attention length {length:,}",
            vocabulary=vocabulary,
            log=print,
            stop_requested=stop_requested,
        )
        print(line)
        scores[length] = totals
        seconds = time.monotonic() - began  # With compilation.
        rows.append(
            {"attention_length": length, **as_record(totals, vocabulary), "seconds": seconds}
        )
        distributed.broadcast_from_primary(
            lambda: storage.write(table, csv_file(list(rows[0]), rows))
        )
    print(f"results   {table}")

    if distributed.broadcast_from_primary(plots.can_draw):
        how = "streaming with a memory"
        if plan.stride is not None:
            how = f"sliding windows, stride {plan.stride:,}"
        picture = f"{trained.outputs}/context_length.png"
        values = {length: totals.value(vocabulary.measure) for length, totals in scores.items()}
        distributed.broadcast_from_primary(
            lambda: plots.curves(
                {str(plan.split): values},
                picture,
                title=f"{corpus.name} ({plan.split}), step {step:,}, {how}",
                xlabel="attention length (tokens)",
                ylabel=plots.UNITS[vocabulary.measure],
                log_x=True,
            )
        )
        print(f"picture   {picture}")
    return scores


def at_lengths(
    config: ExperimentConfig, lengths: Sequence[int], *, stride: int | None
) -> dict[int, ExperimentConfig]:
    """Returns the configs that score the lengths, in ascending order without duplicates.

    Raises `UserError` if a length is invalid.
    """
    are_lengths = lengths and min(lengths) >= 1
    require(
        are_lengths,
        f"the attention lengths must be numbers of tokens, each at least 1, got {list(lengths)}",
    )
    recurrent = is_recurrent(config)
    if recurrent:
        needed = "none, because a model with a memory reads each token once"
    else:
        needed = (
            "set for a model without memory: 1, the published protocol, or more scored "
            "tokens per window"
        )
    require((stride is None) == recurrent, f"the stride must be {needed}, got {stride}")
    require(
        stride is None or 1 <= stride <= min(lengths),
        "the stride must be at least 1 and at most the shortest attention length, or tokens would "
        f"be skipped, got stride {stride} and length {min(lengths)}",
    )
    configs = {}
    for length in sorted(set(lengths)):
        if stride is None:
            changes = {
                "eval.mem_len": length,
                "eval.same_length": True,
                "eval.segment_len": min(config.eval.segment_len, length),
                "eval.stride": None,
            }
        else:
            changes = {
                "eval.mem_len": 0,
                "eval.same_length": False,
                "eval.segment_len": length,
                "eval.stride": stride,
                "eval.warmup_tokens": 0,
            }
        configs[length] = config_tree.replace(config, changes)
        configs[length].validate()
    return configs


def is_recurrent(config: ExperimentConfig) -> bool:
    """Returns whether the model was trained with a memory and encodes relative positions.

    The positions must be relative to the query.
    """
    # The reach of a recurrent state is not limited by a length.
    attends = config.model.network is Network.TRANSFORMER_XL
    return attends and encoding_of(config.model).generates_by_token and config.train.mem_len > 0


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("data", "mesh", "eval"), hosts="join")
