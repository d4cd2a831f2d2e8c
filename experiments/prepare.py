"""Reads, checks and encodes a corpus ahead of time, so that runs start immediately.

    python -m experiments.prepare --corpus=wikitext103 --data_dir=data
    python -m experiments.prepare --flagfile=lm1b_large --corpus=lm1b --cache_dir=/scratch/text

The corpus's own command does the same when it starts, with the same tokenizer, which you can change
with --data.* flags. Run this command on each host that has its own disk. If hosts share a disk, the
first one prepares the corpus and the others wait.
"""

import time
from pathlib import Path

import numpy as np

from txl_jax import cli
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.errors import UserError


def run(_plan: cli.TextPlan, job: cli.Job) -> None:
    """Reads a corpus and prints its sizes."""
    if not {"corpus", "data.corpus"} & job.places.keys():
        known = ", ".join(sorted(set(CorpusName) - {CorpusName.PYTHON_STDLIB}))
        raise UserError(f"--corpus is required. Pass --corpus=NAME, one of {known}.")
    config = job.config()
    start = time.monotonic()
    corpus = job.corpus(config)
    print(f"{'text':<12}{corpus.description}")
    print(f"{'sha256':<12}{corpus.digest}")
    for split in ("train", "valid", "test"):
        print(f"{split:<12}{len(getattr(corpus, split)):,} tokens")
    print(f"{'vocabulary':<12}{corpus.vocabulary.size:,}")
    assert isinstance(corpus.train, np.memmap) and corpus.train.filename
    tokens = Path(corpus.train.filename).parent
    records = tokens.parent.parent / "tfds" / f"txl_{config.data.corpus}"
    for label, folder in (("records", records), ("tokens", tokens)):
        if folder.is_dir():
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            print(f"{label:<12}{folder} ({size / 1e6:,.1f} MB)")
    print(f"{'time':<12}{time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    cli.main(
        run,
        cli.TextPlan,
        config=ExperimentConfig(),
        by_corpus=True,
        groups=("data", "data.tokenizer"),
        hosts="each",
        aliases={"corpus": "data.corpus"},
    )
