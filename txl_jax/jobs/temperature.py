"""Temperature scaling: finds the softmax temperature with the lowest validation loss of a trained run.

A strongly regularized model is less confident than it should be, or more; dividing its logits by one number corrects
some of that (calibration). The number is chosen on the validation text; the test text is scored at it and at 1.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import score_split
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.files import write_json
from txl_jax.training.scores import as_result


@dataclasses.dataclass(frozen=True)
class Plan:
    """The temperatures that are compared."""

    temperatures: tuple[float, ...] = setting(
        tuple(round(1 + k / 50, 2) for k in range(-5, 11)),  # 0.9, 0.92, .., 1.2
        "Temperatures tried on the validation text, beside 1.",
    )

    def validate(self) -> None:
        """Raises `UserError` for no temperature."""
        require(self.temperatures, "no temperature was given; give numbers above 0, as 1,1.05,1.1")

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` for a temperature that the run cannot be scored at."""
        at_temperatures(config, self.temperatures)


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    plan: Plan,
    *,
    trained_on: TextInfo,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Any]:
    """Scores the validation text at each temperature, the test text at the best; returns and writes temperature.json.

    Raises:
      UserError: no temperature was given, or one that is not above 0; the softmax takes none; the text has another
        vocabulary; the workdir holds no checkpoint.
      Interrupted: a stop was requested; nothing is written.
    """
    plan.validate()
    configs = at_temperatures(config, plan.temperatures)
    parts, step, params = load_to_score(config, corpus, workdir, trained_on=trained_on, log=log)

    def scored(temperature: float, split: str) -> dict[str, float]:
        log(f"temperature {temperature:g}")
        recorded = parts.attention and parts.attention.implementations
        components = assemble(configs[temperature], vocab_size=corpus.vocabulary.size, recorded_attention=recorded)
        return as_result(score_split(components, params, corpus, split, log=log, stop_requested=stop_requested))

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
    distributed.broadcast_from_primary(lambda: write_json(workdir.outputs / "temperature.json", results))
    if best in (min(configs), max(configs)) and best != 1:
        log(f"note      {best:g} is the last temperature that was tried; try others beyond it")
    log(f"results   {workdir.outputs / 'temperature.json'}")
    return results


def at_temperatures(config: ExperimentConfig, temperatures: Sequence[float]) -> dict[float, ExperimentConfig]:
    """Returns the config at each temperature, lowest first, 1 among them; raises `UserError` for an invalid one."""
    found = {t: config_tree.replace(config, {"eval.temperature": t}) for t in sorted({1.0, *temperatures})}
    for each in found.values():
        each.validate()
    return found
