"""Defaults by corpus, for programs that take any corpus."""

from absl import flags

from experiments.cli import flag_tree, runner
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.sources.corpora import CORPORA, check_file, default_data

FLAGS = flags.FLAGS

# Defaults of the program of each corpus.
DEFAULTS = {name: ExperimentConfig(data=default_data(name)) for name in (*CORPORA, CorpusName.TEXT)}


def config_of_flags(flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    """Returns the defaults of the corpus's program with the flags applied; raises `UserError` for a conflict."""
    corpus = CorpusName(str(flag_values["data.corpus"].value))
    defaults = ExperimentConfig(data=default_data(corpus))
    config = runner.with_absolute_paths(flag_tree.build(defaults, flag_values))
    config.validate()
    check_file(config.data)
    return config
