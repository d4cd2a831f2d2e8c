"""Train, evaluate and sample on enwik8, the first 100,000,000 bytes of an English Wikipedia dump.

    python -m experiments.enwik8 --flagfile=enwik8_12l --workdir=runs/enwik8_12l --data_dir=data

`data_dir` holds enwik8 or enwik8.zip (http://mattmahoney.net/dc/enwik8.zip). A part of it runs
with --data.file=PATH.
"""

from experiments.cli import runner
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, Newlines, TokenizerConfig

# The published numbers are for enwik8 without its newlines (V = 204).
DEFAULTS = ExperimentConfig(
    data=DataConfig(corpus=CorpusName.ENWIK8, tokenizer=TokenizerConfig(newlines=Newlines.DROP))
)

if __name__ == "__main__":
    runner.run(DEFAULTS)
