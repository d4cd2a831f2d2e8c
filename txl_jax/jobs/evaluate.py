"""The evaluation job: scores the validation and test text with a trained run's parameters."""

from collections.abc import Callable
from typing import Any

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import SPLITS, score_split
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.files import write_json
from txl_jax.training.scores import as_result


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    trained_on: TextInfo,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Any]:
    """Scores both texts at the evaluation lengths of `config`; returns and writes evaluation.json.

    Args:
      trained_on: what the run was trained on; another text may be scored if its vocabulary is the same.

    Raises:
      UserError: the text has another vocabulary, or the workdir holds no checkpoint.
      Interrupted: a stop was requested.
    """
    components, step, params = load_to_score(config, corpus, workdir, trained_on=trained_on, log=log)
    results: dict[str, Any] = {
        "text": corpus.description,
        "text_sha256": corpus.digest,
        "step": step,
        "eval": config_tree.to_dict(config.eval),
        **environment.describe(),
    }
    for split in SPLITS:
        results[split] = as_result(
            score_split(components, params, corpus, split, log=log, stop_requested=stop_requested)
        )
    distributed.broadcast_from_primary(lambda: write_json(workdir.outputs / "evaluation.json", results))
    log(f"results   {workdir.outputs / 'evaluation.json'}")
    return results
