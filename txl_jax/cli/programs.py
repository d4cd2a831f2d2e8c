"""Defaults by corpus, for programs that take any corpus."""

from absl import flags

from txl_jax.cli import flag_tree, training_config
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import CORPORA, check_file, default_data
from txl_jax.runs.run import Workdir

FLAGS = flags.FLAGS

# Defaults of the program of each corpus.
DEFAULTS = {name: ExperimentConfig(data=default_data(name)) for name in (*CORPORA, CorpusName.TEXT)}


def config_of_flags(flag_values: flags.FlagValues = FLAGS, *, workdir: Workdir | None = None) -> ExperimentConfig:
    """Returns the defaults of the corpus's program with the flags applied; raises `UserError` for a conflict.

    Args:
      workdir: of the run that is to be trained, for --init_from; None: nothing is trained.
    """
    corpus = CorpusName(str(flag_values["data.corpus"].value))
    defaults = ExperimentConfig(data=default_data(corpus))
    if workdir is None:
        config = training_config.with_absolute_paths(flag_tree.build(defaults, flag_values))
        config.validate()
    else:
        config = training_config.build(defaults, workdir, flag_values)
    check_file(config.data)
    return config
