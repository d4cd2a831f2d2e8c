"""Train, evaluate and sample on your own text, byte by byte.

    python -m experiments.text --flagfile=small --workdir=runs/mine --data.file=book.txt
    python -m experiments.text --flagfile=small --workdir=runs/mine \\
        --data.train=a.txt,b.txt --data.valid=c.txt --data.test=d.txt

One file is split 90/5/5 by position.
"""

from experiments import runner
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig

DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.TEXT))

if __name__ == "__main__":
    runner.run(DEFAULTS)
