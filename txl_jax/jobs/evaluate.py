"""The evaluation job: a trained run's parameters on the validation and test text."""

import time
from collections.abc import Callable
from typing import Any

from txl_jax import config_tree, report
from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.jobs.parameters import load_parameters
from txl_jax.jobs.score import as_record, score
from txl_jax.run_log import write_json
from txl_jax.workdir import TextInfo, Workdir


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    trained_on: TextInfo,
    say: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Any]:
    """Scores both texts at the evaluation lengths of `config`; returns and writes evaluation.json.

    Args:
      trained_on: what the run was trained on; another text may be scored if its vocabulary is the same.

    Raises:
      ValueError: the text has another vocabulary.
      FileNotFoundError: the workdir holds no checkpoint.
      Interrupted: a stop was requested.
    """
    if corpus.vocabulary != trained_on.vocabulary:
        raise ValueError(
            f"the run was trained on {trained_on.description!r} with {trained_on.vocabulary.size} tokens, and "
            f"{corpus.description!r} was read with {corpus.vocabulary.size} or others; read it in the run's vocabulary"
        )
    if corpus.digest != trained_on.digest:
        say(f"note: this is not the text of training ({trained_on.description}), but {corpus.description}")
    workdir.create()
    parts = assemble(config, vocab_size=corpus.vocabulary.size)
    step, params = load_parameters(parts, workdir, say=say)
    results: dict[str, Any] = {
        "text": corpus.description,
        "text_sha256": corpus.digest,
        "step": step,
        "eval": config_tree.to_dict(config.eval),
        **report.environment(),
    }
    for name, tokens in (("valid", corpus.valid), ("test", corpus.test)):
        began = time.monotonic()
        measure = corpus.vocabulary.measure
        totals = score(parts, params, tokens, name=name, measure=measure, say=say, stop_requested=stop_requested)
        say(report.timed(f"{name} {report.scores(totals, measure)}", time.monotonic() - began))
        results[name] = as_record(totals)
    write_json(workdir.path / "evaluation.json", results)
    say(f"results   {workdir.path / 'evaluation.json'}")
    return results
