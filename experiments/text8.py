"""Trains, evaluates and samples on text8: 100,000,000 letters and spaces of English Wikipedia.

    python -m experiments.text8 --flagfile=text8_12l --workdir=runs/text8_12l --data_dir=data

--data_dir must contain text8 or text8.zip (http://mattmahoney.net/dc/text8.zip). To use a part of
the corpus, pass --data.file=PATH. `python -m experiments.prepare --corpus=text8` prepares it.
"""

from txl_jax.cli.train_command import train_main
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import default_data

DEFAULTS = ExperimentConfig(data=default_data(CorpusName.TEXT8))

if __name__ == "__main__":
    train_main(DEFAULTS)
