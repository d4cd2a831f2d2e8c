"""Bits per byte of the test text: a trained run with and without its memory, beside two general compressors."""

import lzma
import zlib
from collections.abc import Callable

from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.jobs.restore import load_parameters
from txl_jax.jobs.score import score
from txl_jax.jobs.workdir import Workdir

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "zlib -9": lambda data: zlib.compress(data, 9),
    "lzma -9": lambda data: lzma.compress(data, preset=9),
}


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    with_memory: float,
    log: Callable[[str], None] = print,
) -> dict[str, float]:
    """Returns bits per byte by name, of the compressors and of the model.

    Args:
      config: of the trained run, on bytes.
      corpus: has the test text.
      workdir: of the run.
      with_memory: the run's own result on the test text.
      log: takes lines for the user.
    """
    text = corpus.vocabulary.decode(corpus.test)
    without = config_tree.replace(config, {"eval.mem_len": 0, "eval.same_length": False})
    components = assemble(without, vocab_size=corpus.vocabulary.size)
    _, params = load_parameters(components, workdir, log=log)
    totals = score(components, params, corpus.test, name="test without memory", log=log)
    return {
        **{name: 8 * len(compress(text)) / len(text) for name, compress in COMPRESSORS.items()},
        f"without memory (segments of {config.eval.segment_len})": totals.bpc,
        f"with a memory of {config.eval.mem_len}": with_memory,
    }
