"""Trains, evaluates and samples on WikiText-103: Wikipedia articles, 103,227,021 training words.

    python -m experiments.wikitext103 --flagfile=wt103_base --workdir=runs/wt103 --data_dir=data

--data_dir must contain wikitext-103-v1.zip. `python -m experiments.prepare --corpus=wikitext103`
prepares it.

With --data.corpus=wikitext2 the same command reads WikiText-2 (wikitext-2-v1.zip), which has the
same validation and test splits and a fiftieth of the training split. Its vocabulary is smaller
(33,278 words), and cutoffs must be less than that.
"""

from txl_jax.cli.train_command import train_main
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import default_data

DEFAULTS = ExperimentConfig(data=default_data(CorpusName.WIKITEXT103))

if __name__ == "__main__":
    train_main(DEFAULTS)
