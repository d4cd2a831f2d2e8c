"""The corpora's programs: their defaults, for programs that take any corpus."""

from absl import flags

from experiments import enwik8, lm1b, ptb, text, text8, wikitext103
from experiments.cli import flag_tree, runner
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.config import tree as config_tree

FLAGS = flags.FLAGS

# The defaults that a corpus is read with.
DEFAULTS = {
    program.DEFAULTS.data.corpus: program.DEFAULTS for program in (enwik8, text8, wikitext103, lm1b, ptb, text)
} | {CorpusName.WIKITEXT2: config_tree.replace(wikitext103.DEFAULTS, {"data.corpus": CorpusName.WIKITEXT2})}


# Sizes of the published vocabularies, for programs that read no text.
VOCABULARIES = {
    CorpusName.ENWIK8: 204,
    CorpusName.TEXT8: 27,
    CorpusName.WIKITEXT103: 267_735,
    CorpusName.WIKITEXT2: 33_278,
    CorpusName.PTB: 10_000,
    CorpusName.LM1B: 793_470,
}


def config_of_flags(flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    """Returns the defaults of the corpus's program with the flags applied; raises `UserError` for a conflict."""
    defaults = DEFAULTS.get(CorpusName(flag_values["data.corpus"].value), ExperimentConfig())
    config = runner.with_absolute_paths(flag_tree.build(defaults, flag_values))
    config.validate()
    return config
