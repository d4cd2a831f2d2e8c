"""Read, check and encode a corpus ahead of time, so that a run starts at once.

    python -m experiments.prepare --corpus=wikitext103 --data_dir=data
    python -m experiments.prepare --flagfile=lm1b_large --corpus=lm1b --data_dir=data --cache_dir=/scratch/text

It does what the corpus's program would do at its start, with that program's tokens; --data.* flags change them. Hosts that
share no disk may each run it; where they share one, the first prepares and the others wait.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from absl import flags

from experiments.cli import flag_tree, hosts, runner
from experiments.cli.programs import DEFAULTS
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.corpus import Corpus, read_corpus

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and reads."""
    runner.define_data_folders()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_alias("corpus", "data.corpus")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run, begin=hosts.each))


def _run() -> int:
    name = CorpusName(FLAGS["data.corpus"].value)
    if not FLAGS["data.corpus"].present or name not in DEFAULTS:
        raise ValueError(f"say what to prepare with --corpus=NAME, one of {', '.join(DEFAULTS)}")
    config = runner.with_absolute_paths(flag_tree.build(DEFAULTS[name]))
    start = time.monotonic()
    corpus = read_corpus(config.data, FLAGS.data_dir, FLAGS.cache_dir)
    for label, value in _summary(name, corpus):
        print(f"{label:<12}{value}")
    print(f"{'time':<12}{time.monotonic() - start:.1f} s")
    return 0


def _summary(name: CorpusName, corpus: Corpus) -> Iterator[tuple[str, str]]:
    """What was read, and where it lies."""
    yield "text", corpus.description
    yield "sha256", corpus.digest
    for split in ("train", "valid", "test"):
        yield split, f"{len(getattr(corpus, split)):,} tokens"
    yield "vocabulary", f"{corpus.vocabulary.size:,}"
    tokens = _folder(corpus.train)
    records = tokens.parent.parent / "tfds" / f"txl_{name}"
    if records.is_dir():
        yield "records", _described(records)
    yield "tokens", _described(tokens)


def _folder(array: np.ndarray) -> Path:
    """Where a memory-mapped array lies."""
    assert isinstance(array, np.memmap)
    return Path(array.filename).parent


def _described(folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{folder} ({size / 1e6:,.1f} MB)"


if __name__ == "__main__":
    main()
