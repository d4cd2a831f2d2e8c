"""A run in place of a trained one: a workdir with parameters that were drawn, in a second instead of a minute."""

import jax

from support import tiny_run
from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime.checkpoint import Checkpointer

STEP = 7


def make(folder, config: ExperimentConfig, corpus: Corpus) -> tuple[Workdir, RunComponents]:
    """The workdir, and the parts of its model; `tiny_run.params` are its parameters."""
    parts = assemble(config, vocab_size=corpus.vocabulary.size)
    workdir = Workdir(folder).create()
    workdir.record(config, TextInfo.of(corpus))
    with Checkpointer(workdir.best, keep=1, log=print) as best:
        best.save(STEP, {"params": jax.device_put(tiny_run.params(parts.model))}, {})
        best.wait()
    return workdir, parts
