"""Read, check and encode a corpus ahead of time, so that a run starts at once.

    python -m experiments.prepare --corpus=wikitext103 --data_dir=data
    python -m experiments.prepare --flagfile=lm1b_large --corpus=lm1b --cache_dir=/scratch/text

It does the same as the corpus's program at its start, with that program's tokenizer; --data.*
flags change it. Hosts that share no disk may each run it; where they share one, the first prepares
and the others wait.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from txl_jax import cli
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError


def run(plan: cli.TextPlan, job: cli.Job) -> None:
    """Reads, and prints what was read."""
    del plan
    if not {"corpus", "data.corpus"} & job.places.keys():
        known = ", ".join(sorted(set(CorpusName) - {CorpusName.PYTHON_STDLIB}))
        raise UserError(f"no corpus was given; set --corpus=NAME, one of {known}")
    config, start = job.config(), time.monotonic()
    corpus = job.corpus(config)
    for label, value in _summary(config.data.corpus, corpus):
        print(f"{label:<12}{value}")
    print(f"{'time':<12}{time.monotonic() - start:.1f} s")


def _summary(name: CorpusName, corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Yields what was read, and its folders."""
    yield "text", corpus.description
    yield "sha256", corpus.digest
    for split in ("train", "valid", "test"):
        yield split, f"{len(getattr(corpus, split)):,} tokens"
    yield "vocabulary", f"{corpus.vocabulary.size:,}"
    tokens = _folder(corpus.train)
    records = tokens.parent.parent / "tfds" / f"txl_{name}"
    if records.is_dir():
        yield "records", _with_size(records)
    yield "tokens", _with_size(tokens)


def _folder(array: np.ndarray) -> Path:
    """Returns the folder of a memory-mapped array."""
    assert isinstance(array, np.memmap) and array.filename
    return Path(array.filename).parent


def _with_size(folder: Path) -> str:
    """Formats a folder with its size."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{folder} ({size / 1e6:,.1f} MB)"


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
