"""Trains, evaluates and samples on enwik8, the first 1e8 bytes of an English Wikipedia dump.

    python -m experiments.enwik8 --flagfile=enwik8_12l --workdir=runs/enwik8_12l --data_dir=data

--data_dir must contain enwik8 or enwik8.zip (http://mattmahoney.net/dc/enwik8.zip). To use a part
of the corpus, pass --data.file=PATH.
"""

from txl_jax.cli.train_command import train_main
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import default_data

DEFAULTS = ExperimentConfig(data=default_data(CorpusName.ENWIK8))

if __name__ == "__main__":
    train_main(DEFAULTS)
