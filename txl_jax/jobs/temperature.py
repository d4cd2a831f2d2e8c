"""The temperature job: the one that suits a trained run best, found on the validation text.

A model that was regularised much is less sure of itself than it should be, or surer; dividing its logits by one number
mends some of that. The number is chosen on the validation text, and the test text scored once at it and once at 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import score_split
from txl_jax.training.scores import as_record
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.files import write_json


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    trained_on: TextInfo,
    temperatures: Sequence[float],
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Any]:
    """Scores the validation text at each temperature and the test text at the best; returns and writes temperature.json.

    Raises:
      ValueError: no temperature, or one that is none; a softmax that takes none; a text of another vocabulary.
      FileNotFoundError: the workdir holds no checkpoint.
      Interrupted: a stop was requested; nothing is written.
    """
    configs = at_temperatures(config, temperatures)
    _, step, params = load_to_score(config, corpus, workdir, trained_on=trained_on, log=log)
    watch = {"log": log, "stop_requested": stop_requested}

    def scored(temperature: float, split: str) -> dict[str, float]:
        log(f"temperature {temperature:g}")
        parts = assemble(configs[temperature], vocab_size=corpus.vocabulary.size)
        return as_record(score_split(parts, params, corpus, split, **watch))

    valid = {temperature: scored(temperature, "valid") for temperature in configs}
    best = min(valid, key=lambda temperature: valid[temperature]["loss"])
    results = {
        "text": corpus.description,
        "step": step,
        "best": best,
        "valid": {f"{temperature:g}": scores for temperature, scores in valid.items()},
        "test": {f"{temperature:g}": scored(temperature, "test") for temperature in dict.fromkeys((1.0, best))},
        **environment.describe(),
    }
    distributed.broadcast_from_primary(lambda: write_json(workdir.path / "temperature.json", results))
    if best in (min(configs), max(configs)) and best != 1:
        log(f"note      {best:g} is the last temperature that was tried; try others beyond it")
    log(f"results   {workdir.path / 'temperature.json'}")
    return results


def at_temperatures(config: ExperimentConfig, temperatures: Sequence[float]) -> dict[float, ExperimentConfig]:
    """The config at each temperature, lowest first, 1 among them; raises `ValueError` for one that is none."""
    if not temperatures:
        raise ValueError("no temperature was given; give numbers above 0, as 1,1.05,1.1")
    found = {t: config_tree.replace(config, {"eval.temperature": t}) for t in sorted({1.0, *temperatures})}
    for each in found.values():
        each.validate()
    return found
