"""Trains a small Transformer-XL on the source of Python's standard library, in minutes.

    python -m experiments.quickstart

Nothing is downloaded. The command prints and plots the bits per byte of the test split for the
trained model, for the model that learns while it reads, and for lzma, and prints a sample.
--minutes=N trains as many steps as fit into N minutes. After Ctrl-C, rerun the same command to
resume.
"""

import dataclasses
import functools
import importlib.util
import lzma
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from txl_jax import cli, plots
from txl_jax.cli import setting
from txl_jax.config import (
    CorpusName,
    DataConfig,
    DropoutConfig,
    DynamicRule,
    EvalConfig,
    ExperimentConfig,
    GenerateConfig,
    ModelConfig,
    NormPlace,
    OptimizerConfig,
    OptimizerName,
    Schedule,
    TrainConfig,
    config_tree,
)
from txl_jax.data.corpus import Corpus, read_corpus
from txl_jax.data.segments import evaluation_segments
from txl_jax.errors import UserError
from txl_jax.runs.build import build_for
from txl_jax.runs.dynamic_statistics import learning_model
from txl_jax.runs.generate import generate_text
from txl_jax.runs.run import Run
from txl_jax.runs.score import score
from txl_jax.runs.trained import TrainedModel, load_parameters
from txl_jax.runs.trainer import train_run
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import is_remote

# Dynamic evaluation of the test split, with settings chosen on the validation split
# (benchmarks/singles.csv). A smaller batch needs fewer bits on the test split: 1.637 with eight
# rows, 1.594 with four and 1.532 with two, whose learning rate or decay differ too. A single row
# would need even fewer bits, but more time.
LEARNING = {
    "eval.batch_size": 2,
    "eval.segment_len": 32,
    "eval.dynamic.rule": DynamicRule.RMSPROP,
    "eval.dynamic.learning_rate": 7e-4,
    "eval.dynamic.decay": 2e-3,
}
# Settings with which a model can be scored, but cannot learn while it is scored.
WITHOUT_LEARNING = ("eval.stride", "eval.weight_dtype", "eval.cache_dtype")
# What `pip install '.[serve]'` installs for the server.
SERVER_PACKAGES = ("prometheus_client", "pydantic", "starlette", "uvicorn")
# lzma -9 refers back to at most this many bytes.
LZMA_WINDOW = 64 << 20


class Reading(NamedTuple):
    """Number of bits that the model needs to predict the test split."""

    # Bits per byte of the whole split.
    bits: float
    # float64 [S]. Bits per byte of all text up to the end of each segment.
    curve: np.ndarray


class Comparison(NamedTuple):
    """Bits per byte of the test split, as numbers and as curves."""

    # Number of bytes in the split.
    n_bytes: int
    # Length of the model's memory.
    mem_len: int
    # The trained model. Without a memory, each segment starts without context.
    without_memory: Reading
    with_memory: Reading
    # The model is trained on each segment after it has scored it.
    learning: Reading
    # lzma -9 of the split, and its additional bits after the training split.
    lzma_alone: float
    lzma_after_training: float
    # float64 [S], the bytes read at each point of the curves.
    bytes_read: np.ndarray

    def lines(self) -> list[str]:
        """Returns a sentence for each number, and one about the compressors that need more bits."""
        memory = f"with a memory of {self.mem_len} ({self.without_memory.bits:.3f} without memory)"
        lines = [
            f"bits per byte of the test split ({self.n_bytes:,} bytes that were not trained on)",
            f"  {self.with_memory.bits:.3f}  The trained model reads it {memory}.",
            f"  {self.learning.bits:.3f}  The same model learns from each segment it has read.",
            f"  {self.lzma_alone:.3f}  lzma -9 compresses the test split alone.",
            f"  {self.lzma_after_training:.3f}  lzma -9 compresses it after the training split.",
        ]
        # A run with other settings may need more bits than a compressor, so compare its numbers.
        worse = []
        if self.learning.bits < self.lzma_alone:
            worse.append("lzma -9")
        if self.learning.bits < self.lzma_after_training:
            worse.append("lzma -9 after the training split")
        if worse:
            lines.append(f"Learning, the model needs fewer bits than {' and '.join(worse)}.")
        return lines

    def draw(self, records: Sequence[Mapping[str, Any]], path: str, *, title: str) -> None:
        """Draws the learning curve of these records, and the curves over the test split."""
        plots.training_and_reading(
            records,
            path,
            title=title,
            bytes_read=self.bytes_read,
            curves={
                "without memory": self.without_memory.curve,
                "with memory": self.with_memory.curve,
                "with memory and learning": self.learning.curve,
            },
            levels={
                "lzma -9": self.lzma_alone,
                "lzma -9 after training split": self.lzma_after_training,
            },
        )


def compare(config: ExperimentConfig, corpus: Corpus, run: Run) -> Comparison:
    """Reads the test split without memory, with memory and learning, and compresses it.

    The model learns by `eval.dynamic` of the config, or, if that has no rule, by `LEARNING`.
    """
    learning_config = config
    if config.eval.dynamic.rule is None:
        # Learning was not requested, so incompatible settings must not fail a finished training.
        changes = dict.fromkeys(WITHOUT_LEARNING) | LEARNING
        learning_config = config_tree.replace(config, changes)
    # A cache requires a memory.
    no_memory = {"eval.mem_len": 0, "eval.same_length": False, "eval.cache_dtype": None}
    no_memory_config = config_tree.replace(config, no_memory)

    built = build_for(config, corpus.vocabulary)
    built_without_memory = build_for(no_memory_config, corpus.vocabulary)
    _, params = load_parameters(built, run, log=say)
    learning_trained = TrainedModel.of(run, learning_config)
    learner = learning_model(learning_trained, params, corpus=corpus)

    # The model that learns reads multiple rows of the text in parallel. All curves have a point
    # after each of its segments, so that they cover the same bytes.
    reader = evaluation_segments(
        corpus.test,
        batch_size=learning_config.eval.batch_size,
        segment_len=learning_config.eval.segment_len,
    )
    scored_SxBxL = reader.scored(0, reader.n_segments)
    read_S = np.cumsum(np.count_nonzero(scored_SxBxL, axis=(1, 2)))

    say("reading   the test split without memory, with memory, and learning")
    readings = []
    for name, score_text in (
        ("without memory", functools.partial(score, built_without_memory, params)),
        ("with memory", functools.partial(score, built, params)),
        ("learning", learner.score),
    ):
        nats = np.zeros(len(corpus.test), np.float32)
        totals = score_text(
            corpus.test,
            name=name,
            measure=corpus.vocabulary.measure,
            log=say,
            token_nats=nats,
        )
        # Positions that score nothing have index 0, where the nats are 0: the first token has none.
        nats_S = np.cumsum(nats[scored_SxBxL].sum(axis=(1, 2), dtype=np.float64))
        n_bytes = corpus.vocabulary.count_bytes(corpus.test[1:])
        bits = dataclasses.replace(totals, bytes=n_bytes).bits_per_byte
        # The curve has the shape of the nats per token, and ends at the bits of the whole split. It
        # is therefore in bits per byte even if tokens are not bytes.
        readings.append(Reading(bits, bits * (nats_S / read_S) / totals.nll))
    without_memory, with_memory, learning = readings

    text = corpus.vocabulary.decode(corpus.test)
    lzma_alone, lzma_after_training = lzma_bytes(corpus)
    return Comparison(
        n_bytes=len(text),
        mem_len=config.eval.mem_len,
        without_memory=without_memory,
        with_memory=with_memory,
        learning=learning,
        lzma_alone=8 * lzma_alone / len(text),
        lzma_after_training=8 * lzma_after_training / len(text),
        bytes_read=len(text) * read_S / read_S[-1],
    )


def lzma_bytes(corpus: Corpus) -> tuple[int, int]:
    """Returns lzma -9's bytes for the test split: by itself, and after the training split.

    For the standard library this takes 12 s on one core of an Intel Xeon, and 0.7 GB of memory. Of
    a longer training split it only compresses the end, which is as far as it can refer back.
    """
    test = corpus.vocabulary.decode(corpus.test)
    train = corpus.vocabulary.decode(corpus.train[-LZMA_WINDOW:])
    alone = len(lzma.compress(test, preset=9))
    before = len(lzma.compress(train, preset=9))
    both = len(lzma.compress(train + test, preset=9))
    return alone, both - before


DEFAULTS = ExperimentConfig(
    data=DataConfig(corpus=CorpusName.PYTHON_STDLIB),
    # Larger initial weights than the paper's .02 suit such a small model.
    model=ModelConfig(
        n_layer=3,
        d_model=128,
        n_head=2,
        d_head=64,
        d_inner=512,
        dropout=DropoutConfig(rate=0.0),
        # Pre-norm scores better from about 700 steps on (benchmarks/norm_place.csv).
        layer_norm=NormPlace.PRE,
        init_std=0.07,
    ),
    optimizer=OptimizerConfig(
        name=OptimizerName.MUON,
        learning_rate=0.01,
        # With 0.25 the test split takes 0.005 bits more, and with own_bytes' value 0.5, 0.009 more.
        embedding_lr_multiplier=0.1,
        adam_b2=0.95,
        weight_decay=0.03,
        warmup_steps=30,
        schedule=Schedule.LINEAR,
        clip_norm=1.0,
    ),
    # 32 x 32 = 1,024 tokens per step: many rows read many places of the text (docs/training.md).
    # 1,500 steps take 1:35 minutes on two quiet cores of an Intel Xeon, and the whole command 3:24.
    train=TrainConfig(
        steps=1500,
        batch_size=32,
        segment_len=32,
        mem_len=32,
        segments_per_call=10,
        log_every=100,
        eval_every=250,
        checkpoint_every=500,
    ),
    eval=EvalConfig(
        batch_size=16,
        segment_len=64,
        mem_len=64,
        clamp_len=None,
        same_length=True,
        valid_tokens=50_000,
    ),
    generate=GenerateConfig(prompt="def ", length=400, temperature=0.8),
)


@dataclasses.dataclass(frozen=True)
class Plan(cli.TimedPlan):
    """The directory and the training time."""

    workdir: str = setting("runs/quickstart", "Directory of the run.", path=True)

    caches_compiled: ClassVar[bool] = True


def run(plan: Plan, job: cli.Job) -> int | None:
    """Trains, compares, draws, and prints a sample and the commands to try next."""
    if is_remote(plan.workdir):
        raise UserError(
            f"--workdir must be a local directory, which also stores the text, got {plan.workdir}"
        )
    prepared = os.path.join(plan.workdir, "prepared")
    with Run.open(plan.workdir) as opened:
        config = plan.keep_steps(job.config(opened), job, opened)
        opened.compare(config)
        corpus = read_corpus(config.data, data_dir="", cache_dir=prepared)
        config, timed_step = plan.fit_steps(config, corpus, job, opened)
        with job.stop:
            outcome = train_run(
                config, corpus, opened, compiled_step=timed_step, stop_requested=lambda: job.stop
            )
    if not outcome.finished or outcome.results is None:
        return None
    trained = Run.read(plan.workdir)
    comparison = compare(config, corpus, trained)
    print("\n" + "\n".join(comparison.lines()))
    if plots.can_draw():
        path = os.path.join(trained.path, "quickstart.png")
        title = "Transformer-XL on Python's standard library"
        comparison.draw(read_metrics(trained.path), path, title=title)
        print(f"picture {path}")
    print()
    generate_text(config, trained)
    print("\nnext  " + "\n      ".join(next_commands(plan.workdir)))
    return 0


def next_commands(workdir: str) -> list[str]:
    """Returns commands to try next, except those whose packages are not installed."""
    place = shlex.quote(workdir)
    commands = [
        f"python -m experiments.text --mode=generate --workdir={place} --generate.prompt='class '"
    ]
    if all(importlib.util.find_spec(package) for package in SERVER_PACKAGES):
        commands.append(f"python -m experiments.serve --model={place}")
    commands.append(
        "python -m experiments.text --flagfile=own_bytes --minutes=10 --workdir=runs/mine "
        "--data.file=YOUR.txt"
    )
    return commands


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=None)
