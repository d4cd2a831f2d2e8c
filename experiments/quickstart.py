"""Train a small Transformer-XL on the source of Python's standard library, in minutes.

    python -m experiments.quickstart

Nothing is downloaded. It compares the model's bits per byte, with and without memory, with zlib's
and lzma's on the same test bytes, draws them, and prints a sample. --minutes=N trains as many steps
as fit into N minutes. After Ctrl-C, rerun the same command to resume.
"""

import dataclasses
import lzma
import math
import os
import shlex
import zlib
from typing import ClassVar, NamedTuple

import numpy as np

from txl_jax import cli, plots
from txl_jax.cli import setting
from txl_jax.config import (
    CorpusName,
    DataConfig,
    DropoutConfig,
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
from txl_jax.runs.generate import generate_text
from txl_jax.runs.run import Run
from txl_jax.runs.score import score
from txl_jax.runs.trained import load_parameters
from txl_jax.runs.trainer import train_run
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import is_remote

COMPRESSORS = {
    "zlib -9": lambda data: zlib.compress(data, 9),
    "lzma -9": lambda data: lzma.compress(data, preset=9),
}


CURVE_BYTES = 1 << 17  # Of the test split. All of it would take 20 s more on two cores.


class Comparison(NamedTuple):
    """Bits per byte of the test split."""

    # By name: the compressors, and the model without and with memory.
    bits: dict[str, float]
    # The model's two, at each of the L positions of a segment: of the first bytes.
    by_position: dict[str, list[float]]


def compare(config: ExperimentConfig, corpus: Corpus, run: Run, *, tested: float) -> Comparison:
    """Compresses the test split, and scores it without memory.

    `tested` are its bits with memory, from results.json.
    """
    text, lengths = corpus.vocabulary.decode(corpus.test), config.eval
    found = Comparison(
        {name: 8 * len(compress(text)) / len(text) for name, compress in COMPRESSORS.items()}, {}
    )
    without = f"without memory (segments of {lengths.segment_len})"
    memory = f"with a memory of {lengths.mem_len}"
    first = corpus.test[:CURVE_BYTES]
    reader = evaluation_segments(
        first, batch_size=lengths.batch_size, segment_len=lengths.segment_len
    )
    scored_LxSxB = np.moveaxis(reader.scored(0, reader.n_segments), -1, 0)
    for name, changes, known in (
        (without, {"eval.mem_len": 0, "eval.same_length": False}, None),
        (memory, {}, tested),
    ):
        built = build_for(config_tree.replace(config, changes), corpus.vocabulary)
        _, params = load_parameters(built, run, log=say)
        nats = np.zeros(len(first), np.float32)
        score(built, params, first, name=f"{name}, first bytes", log=say, token_nats=nats)
        means = (nats[scored[scored > 0]].mean(dtype="float64") for scored in scored_LxSxB)
        found.by_position[name] = [float(mean) / math.log(2) for mean in means]
        found.bits[name] = known or score(built, params, corpus.test, name=name, log=say).bpc
    return found


DEFAULTS = ExperimentConfig(
    data=DataConfig(corpus=CorpusName.PYTHON_STDLIB),
    # Wider initial weights than the paper's .02 suit so narrow a model.
    model=ModelConfig(
        n_layer=3,
        d_model=128,
        n_head=2,
        d_head=64,
        d_inner=512,
        dropout=DropoutConfig(rate=0.0),
        layer_norm=NormPlace.PRE,
        init_std=0.07,
    ),
    optimizer=OptimizerConfig(
        name=OptimizerName.MUON,
        learning_rate=0.01,
        # With 0.25 the test text takes 0.005 bits more, with own_bytes' 0.5 0.009.
        embedding_lr_multiplier=0.1,
        adam_b2=0.95,
        weight_decay=0.03,
        warmup_steps=30,
        schedule=Schedule.LINEAR,
        clip_norm=1.0,
    ),
    # 32 x 32 = 1,024 tokens per step: many rows read many places of the text (docs/training.md).
    train=TrainConfig(
        steps=2000,
        batch_size=32,
        segment_len=32,
        mem_len=32,
        segments_per_call=10,
        log_every=100,
        eval_every=500,
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
    """The directory, and the time."""

    workdir: str = setting("runs/quickstart", "Directory of the run.", path=True)

    caches_compiled: ClassVar[bool] = True


def run(plan: Plan, job: cli.Job) -> int | None:
    """Trains, compares, draws, prints a sample and what to try next."""
    if is_remote(plan.workdir):
        raise UserError(
            f"--workdir must be a local directory, which also stores the text, got {plan.workdir}"
        )
    prepared = os.path.join(plan.workdir, "prepared")
    with Run.open(plan.workdir) as run:
        config = plan.keep_steps(job.config(run), job, run)
        run.compare(config)
        corpus = read_corpus(config.data, data_dir="", cache_dir=prepared)
        config, timed_step = plan.fit_steps(config, corpus, job, run)
        with job.stop:
            outcome = train_run(
                config, corpus, run, compiled_step=timed_step, stop_requested=lambda: job.stop
            )
    if not outcome.finished or outcome.results is None:
        return None
    trained = Run.read(plan.workdir)
    found = compare(config, corpus, trained, tested=outcome.results["test"]["bpc"])
    print("\nbits per byte of the test split")
    for name, bpc in found.bits.items():
        print(f"  {name:<32} {bpc:.3f}")
    if plots.can_draw():
        path = os.path.join(trained.path, "quickstart.png")
        levels = {name: found.bits[name] for name in COMPRESSORS}
        title = "Transformer-XL on Python's standard library"
        records = read_metrics(trained.path)
        plots.learning_curve(
            records, path, title=title, levels=levels, by_position=found.by_position
        )
        print(f"picture {path}")
    print()
    generate_text(config, trained)
    place = shlex.quote(plan.workdir)
    print(
        f"\nnext  python -m experiments.text --mode=generate --workdir={place} "
        "--generate.prompt='class '\n"
        f"      python -m experiments.serve --model={place}\n"
        "      python -m experiments.text --flagfile=own_bytes --minutes=10 --workdir=runs/mine "
        "--data.file=YOUR.txt"
    )
    return 0


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=None)
