"""Trains, evaluates and samples on Mikolov's Penn Treebank: 929,589 training words, 10,000 types.

    python -m experiments.ptb --flagfile=ptb       --workdir=runs/ptb --data_dir=data
    python -m experiments.ptb --flagfile=ptb_small --workdir=runs/ptb_small --data_dir=data  # CPU

--data_dir must contain ptb.train.txt, ptb.valid.txt and ptb.test.txt, or their archive,
simple-examples.tgz (http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz). `python -m
experiments.prepare --corpus=ptb` prepares it.
"""

from txl_jax.cli.train_command import train_main
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import default_data

DEFAULTS = ExperimentConfig(data=default_data(CorpusName.PTB))

if __name__ == "__main__":
    train_main(DEFAULTS)
