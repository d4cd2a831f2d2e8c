r"""Tunes a trained run's dynamic evaluation on the validation split, then scores the test split.

    python -m experiments.tune_dynamic --workdir=runs/mine --eval.batch_size=1
    python -m experiments.tune_dynamic --workdir=runs/mine --rule=sgd --eval.batch_size=8 \
        --learning_rates=0.05,0.1,0.2 --decays=0,1e-3 --valid_tokens=100000

Dynamic evaluation learns from each segment after it has scored it (docs/dynamic.md). First the
validation split is scored without learning and, with the smallest decay, at each learning rate.
Then it is scored at each decay with the best rate. If the best value is the smallest or the
largest of its list, up to 8 more are tried beyond it. Finally the test split is scored once,
without learning and with the best values.

--rule is short for --eval.dynamic.rule, and is rmsprop if neither the run nor a flag sets it. Other
--eval settings come from the run, unless you pass them. Finished scores are stored in
tune_dynamic.json in the workdir: after Ctrl-C, or to try more values, rerun the command.
"""

import dataclasses
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from txl_jax import cli
from txl_jax.config import (
    CorpusName,
    DynamicConfig,
    DynamicRule,
    EvalConfig,
    ExperimentConfig,
    config_tree,
)
from txl_jax.config.config_tree import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.data.published import program_of
from txl_jax.errors import NonFiniteError, reading
from txl_jax.interop import leaves
from txl_jax.metrics import Totals
from txl_jax.runs.dynamic_statistics import digest_of_weights, learning_model
from txl_jax.runs.run import Run
from txl_jax.runs.score import as_result, score
from txl_jax.runs.score_splits import Kind, Split
from txl_jax.runs.trained import TrainedModel, load_to_score
from txl_jax.runtime import environment, storage
from txl_jax.runtime.output import say

FILE = "tune_dynamic.json"
RULE = "eval.dynamic.rule"
LEARNING_RATE = "eval.dynamic.learning_rate"
DECAY = "eval.dynamic.decay"
FOLDERS = ("data_dir", "cache_dir")
# Initial values by rule, measured on small models (benchmarks/dynamic.csv). rms used the squared
# gradients of 1,024 segments and an epsilon of 0.01. Its published rates for models with 18 and 24
# layers are lower.
LEARNING_RATES = {
    DynamicRule.SGD: (0.02, 0.05, 0.1, 0.2),
    DynamicRule.RMS: (0.008, 0.016, 0.032),
    DynamicRule.RMSPROP: (2.5e-4, 5e-4, 1e-3, 2e-3),
}
DECAYS = {
    DynamicRule.SGD: (0.0, 1e-3, 2e-3),
    DynamicRule.RMS: (0.0, 0.03, 0.12),
    DynamicRule.RMSPROP: (0.0, 1e-3, 2e-3),
}
MOST_FURTHER = 8  # Maximum number of values that are tried beyond an end of a list.


@dataclasses.dataclass(frozen=True)
class Plan(cli.TrainedRun):
    """The values to try, and how much of both splits is scored."""

    learning_rates: tuple[float, ...] = setting(
        (), "Initial learning rates. If empty, a few that suit the rule and a small model."
    )
    decays: tuple[float, ...] = setting(
        (), "Initial decays, tried at the best rate. If empty, 0 and two that suit the rule."
    )
    valid_tokens: int | None = setting(
        None, "Score only the first N tokens of the validation split. none scores all.", at_least=2
    )
    test_tokens: int | None = setting(
        None, "Score only the first N tokens of the test split. none scores all.", at_least=2
    )
    out: str | None = setting(None, f"Directory for {FILE}. none means the workdir.", path=True)

    stopped: ClassVar[str] = "finished scores are stored. Rerun the same command to continue"

    def validate(self) -> None:
        """Raises `UserError` if a number is out of range."""
        super().validate()
        rates = config_tree.format_value(self.learning_rates)
        require(
            all(rate > 0 and math.isfinite(rate) for rate in self.learning_rates),
            f"learning_rates must be above 0, such as 5e-4,1e-3, got {rates}",
        )
        decays = config_tree.format_value(self.decays)
        require(
            all(decay >= 0 and math.isfinite(decay) for decay in self.decays),
            f"decays must be at least 0, such as 0,1e-3, got {decays}",
        )


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The best values for the rule, and the scores with them and without learning."""

    settings: DynamicConfig
    # By split, then without learning (static) and with it (dynamic).
    scores: dict[Split, dict[Kind, Totals]]


def run(plan: Plan, job: cli.Job) -> None:
    """Reads the run and its text, tunes, and prints the command that scores with the result."""
    for name, flag in ((LEARNING_RATE, "--learning_rates"), (DECAY, "--decays")):
        if name in job.places:
            print(f"note      no effect: --{name}, which is tuned. Pass {flag} to choose values.")
    # The first call only checks the settings, before the text is read.
    config, corpus, trained = job.trained(with_rule)
    config = with_rule(config)
    with job.stop:
        tuned = tune(config, corpus, trained, plan, stop_requested=lambda: job.stop)
    folders = [f"--{name}={getattr(plan, name)}" for name in FOLDERS if name in job.places]
    print(f"\nnext      {command(tuned.settings, config, trained, folders)}")


def with_rule(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config with a rule (RMSprop by default) and defaults for the tuned values.

    The stored scores therefore do not depend on a learning rate or decay that no score uses.

    Raises:
      UserError: If other settings do not allow the model to learn.
    """
    defaults = DynamicConfig()
    changes: dict[str, Any] = {LEARNING_RATE: defaults.learning_rate, DECAY: defaults.decay}
    if config.eval.dynamic.rule is None:
        changes[RULE] = DynamicRule.RMSPROP
    changed = config_tree.replace(config, changes)
    changed.validate()
    return changed


def command(
    best: DynamicConfig, config: ExperimentConfig, trained: Run, folders: Sequence[str] = ()
) -> str:
    """Returns the command that scores both splits with the best values.

    Args:
      best: The rule with the best values.
      config: The settings of the command that has found them.
      trained: The run.
      folders: Flags of the directories of the text.
    """
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, dynamic=best))
    program = program_of(config.data.corpus)
    if config.data.corpus is CorpusName.PYTHON_STDLIB:
        # The quickstart only trains.
        program = "text"
    words = [f"--workdir={trained.path}"]
    if trained.member:
        words.append(f"--ensemble_member={trained.member}")
    words += folders
    # The tuned settings are always named, even if the run has the same values.
    changed = [leaf.name for leaf, _, _ in config_tree.differences(trained.config, config)]
    for name in dict.fromkeys([*changed, RULE, LEARNING_RATE, DECAY]):
        words.append(f"--{name}={config_tree.format_value(config_tree.get(config, name))}")
    quoted = " ".join(map(shlex.quote, words))
    return f"python -m experiments.{program} --mode=eval {quoted}"


def tune(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> Tuned:
    """Chooses learning rate and decay on the validation split, then scores the test split.

    The test split is scored only with the chosen values. Scores are stored one by one.
    After `Interrupted` the finished ones are kept.
    """
    rule = config.eval.dynamic.rule
    assert rule is not None
    rates = sorted(set(plan.learning_rates or LEARNING_RATES[rule]))
    decays = sorted(set(plan.decays or DECAYS[rule]))
    scores = _Scores.open(config, corpus, trained, plan, stop_requested)
    # The smallest decay has already been scored with the rates.
    scores.expected = len(rates) + len(decays) - 1
    first_decay = decays[0]

    def settings_of(rate: float, decay: float) -> DynamicConfig:
        return dataclasses.replace(config.eval.dynamic, learning_rate=rate, decay=decay)

    def loss_of(rate: float, decay: float) -> float:
        return scores.find(Split.VALID, settings_of(rate, decay)).nll

    print(_row(*_COLUMNS), flush=True)
    static_valid = scores.find(Split.VALID, DynamicConfig())
    best_rate = search("learning_rates", rates, lambda rate: loss_of(rate, first_decay))
    require(
        math.isfinite(loss_of(best_rate, first_decay)),
        f"the loss is not finite at any learning rate (the lowest is {best_rate:g}). "
        "Pass lower --learning_rates.",
    )
    best_decay = search("decays", decays, lambda decay: loss_of(best_rate, decay))
    best = settings_of(best_rate, best_decay)
    dynamic_valid = scores.find(Split.VALID, best)
    print(f"best      learning rate {best_rate:g}, decay {best_decay:g}, on the validation split")
    if dynamic_valid.nll >= static_valid.nll:
        print("note      learning does not improve the score of the validation split")

    static_test = scores.find(Split.TEST, DynamicConfig())
    dynamic_test = scores.find(Split.TEST, best)
    tuned = Tuned(
        best,
        {
            Split.VALID: {Kind.STATIC: static_valid, Kind.DYNAMIC: dynamic_valid},
            Split.TEST: {Kind.STATIC: static_test, Kind.DYNAMIC: dynamic_test},
        },
    )
    scores.write(tuned)
    return tuned


def search(name: str, values: Sequence[float], loss_of: Callable[[float], float]) -> float:
    """Returns the value with the lowest loss.

    While the best value is the smallest or the largest, the next value beyond it is tried, in the
    same ratio, at most `MOST_FURTHER` times. Nothing below 0 is tried, and a single value is kept.

    Args:
      name: The name of the values' flag, for notes.
      values: The initial values, in ascending order.
      loss_of: Scores a value. A loss that is not finite counts as the worst.
    """
    losses = {value: loss_of(value) for value in values}
    for n_further in range(MOST_FURTHER + 1):
        best = min(losses, key=losses.__getitem__)
        further = beyond(sorted(losses), best)
        if further is None:
            return best
        if n_further < MOST_FURTHER:
            print(f"note      {best:g} is at the end of the {name}, so {further:g} is tried too")
            losses[further] = loss_of(further)
    print(f"note      {best:g} is still at the end of the {name}. Pass others with --{name}.")
    return best


def beyond(values: Sequence[float], best: float) -> float | None:
    """Returns the next value beyond `best`, or None if that is not at an end of sorted values.

    >>> beyond([1.0, 2.0, 4.0], 4.0), beyond([1.0, 2.0, 4.0], 1.0), beyond([0.0, 1.0], 1.0)
    (8.0, 0.5, 2.0)
    >>> beyond([1.0, 2.0, 4.0], 2.0), beyond([0.0, 1.0], 0.0), beyond([1.0], 1.0)
    (None, None, None)
    """
    if len(values) == 1:
        return None
    if best == values[-1] and values[-2] > 0:
        further = best * best / values[-2]
    elif best == values[-1]:
        further = 2 * best
    elif best == values[0] and best > 0:
        further = best * best / values[1]
    else:
        return None
    # Rounded, so that the value can be typed as it is printed.
    return float(f"{further:.6g}")


@dataclasses.dataclass
class _Scores:
    """The scores of a run, either computed or read from the file of an earlier command."""

    config: ExperimentConfig
    corpus: Corpus
    trained: TrainedModel
    plan: Plan
    stop_requested: Callable[[], Any]
    # The model without learning, and its parameters on the devices.
    built: Any
    params: Any
    # Everything that a score depends on, except the part of the text and the evaluation settings.
    identity: dict[str, Any]
    # Directory of the file and of the statistics of the rule rms, and the file's path.
    folder: str
    path: str
    # Finished scores, in the file's form.
    records: list[dict[str, Any]]
    # Result of this or an earlier command, in the file's form, or None.
    result: dict[str, Any] | None
    # Number of scores of the validation split with learning that this command expects.
    expected: int = 0
    # The settings whose scores of the validation split this command has.
    tried: set[DynamicConfig] = dataclasses.field(default_factory=set)

    @classmethod
    def open(
        cls,
        config: ExperimentConfig,
        corpus: Corpus,
        run: Run,
        plan: Plan,
        stop_requested: Callable[[], Any],
    ) -> "_Scores":
        """Loads the model, and the finished scores of an earlier command."""
        trained = dataclasses.replace(TrainedModel.of(run, config), out=plan.out)
        folder = trained.outputs(needed=True)
        assert folder is not None
        built, step, params = load_to_score(config, corpus, trained, log=say)
        path = os.path.join(folder, FILE)
        records: list[dict[str, Any]] = []
        earlier_result = None
        if storage.exists(path):
            with reading(path):
                content = storage.read_json(path)
                records = content["scores"]
                earlier_result = content.get("tuned")
        return cls(
            config=config,
            corpus=corpus,
            trained=trained,
            plan=plan,
            stop_requested=stop_requested,
            built=built,
            params=params,
            identity={
                "workdir": trained.path,
                # The members of an ensemble may have the same --out.
                "ensemble_member": run.member,
                "step": step,
                # A run that was trained again may be at the same step.
                "weights_sha256": digest_of_weights(leaves.from_tree(params)),
                "text_sha256": corpus.digest,
            },
            folder=folder,
            path=path,
            records=records,
            result=earlier_result,
        )

    def find(self, split: Split, settings: DynamicConfig) -> Totals:
        """Returns the losses of a split, which are infinite if learning diverged.

        They are computed unless this or an earlier command has done so.
        """
        is_shown = split is Split.VALID and settings in self.tried
        tokens = self._tokens(split)
        lengths = dataclasses.replace(self.config.eval, dynamic=settings)
        identity = {
            **self.identity,
            "split": str(split),
            "tokens": len(tokens) - 1,
            "eval": config_tree.to_dict(lengths),
        }
        record = self._stored(identity)
        note = "stored"
        is_new = record is None
        if record is None:
            began = time.monotonic()
            nats = self._nats(split, tokens, lengths)
            seconds = time.monotonic() - began
            record = {**identity, "nats": nats, "seconds": seconds, **environment.describe()}
            self.records.append(record)
            self.write()
            note = f"{record['tokens'] / seconds:,.0f} tokens/s"

        nats = math.inf if record["nats"] is None else record["nats"]
        n_byte = self.corpus.vocabulary.count_bytes(tokens[1:])
        totals = Totals(nats=nats, tokens=record["tokens"], bytes=n_byte)
        if split is Split.VALID:
            self.tried.add(settings)
        if is_new:
            # Stored scores take no time, so their time does not predict the remaining time.
            note += self._remaining(split, settings, record)
        if not is_shown:
            self._show(split, settings, totals, note)
        return totals

    def _tokens(self, split: Split) -> Any:
        """Returns the tokens of a split that are scored."""
        if split is Split.VALID:
            return self.corpus.valid[: self.plan.valid_tokens]
        return self.corpus.test[: self.plan.test_tokens]

    def _stored(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the finished score with these values, if any."""
        for record in self.records:
            if all(record.get(name) == value for name, value in identity.items()):
                return record
        return None

    def _nats(self, split: Split, tokens: Any, lengths: EvalConfig) -> float | None:
        """Computes the summed loss in nats, or None if learning diverged."""
        settings = lengths.dynamic
        name = str(split)
        if settings.rule is not None:
            name += f" at learning rate {settings.learning_rate:g}, decay {settings.decay:g}"
        options: dict[str, Any] = {
            "name": name,
            "measure": self.corpus.vocabulary.measure,
            "log": print,
            "stop_requested": self.stop_requested,
        }
        if settings.rule is None:
            return score(self.built, self.params, tokens, **options).nats

        config = dataclasses.replace(self.config, eval=lengths)
        model = learning_model(
            TrainedModel.of(self.trained, config),
            self.params,
            corpus=self.corpus,
            folder=self.folder,
            stop_requested=self.stop_requested,
        )
        try:
            return model.score(tokens, **options).nats
        except NonFiniteError:
            return None

    def _remaining(self, split: Split, settings: DynamicConfig, record: dict[str, Any]) -> str:
        """Returns the estimated time of the scores to come, after one with learning."""
        if split is Split.TEST or settings.rule is None:
            return ""
        n_token = max(self.expected - len(self.tried) + 1, 0) * record["tokens"]
        n_token += len(self._tokens(Split.TEST)) - 1
        seconds = n_token * record["seconds"] / record["tokens"]
        return f", ETA {environment.duration(seconds)}"

    def _show(self, split: Split, settings: DynamicConfig, totals: Totals, note: str) -> None:
        """Prints a row of the table."""
        score = "diverged"
        if math.isfinite(totals.nats):
            score = totals.format(self.corpus.vocabulary.measure)
        if settings.rule is None:
            print(_row(split, Kind.STATIC, "", "", score, note), flush=True)
            return
        rate = f"{settings.learning_rate:g}"
        print(_row(split, settings.rule, rate, f"{settings.decay:g}", score, note), flush=True)

    def write(self, tuned: Tuned | None = None) -> None:
        """Writes the file: all scores and, if tuning is finished, its result."""
        if tuned is not None:
            vocabulary = self.corpus.vocabulary
            lengths = dataclasses.replace(self.config.eval, dynamic=tuned.settings)
            results: dict[str, Any] = {"eval": config_tree.to_dict(lengths)}
            for split, kinds in tuned.scores.items():
                results[split] = {kind: as_result(kinds[kind], vocabulary) for kind in kinds}
            self.result = results
            print(f"results   {self.path}")

        content: dict[str, Any] = {"scores": self.records}
        # Until this command has a result, the result of an earlier one is kept.
        if self.result is not None:
            content["tuned"] = self.result
        storage.write_json(self.path, content)


_COLUMNS = ("split", "rule", "rate", "decay", "score", "speed with compilation")


def _row(*cells: str) -> str:
    """Returns a line of the table."""
    split, rule, rate, decay, score, note = cells
    return f"{split:<6} {rule:<8} {rate:<10} {decay:<10} {score:<22} {note}"


if __name__ == "__main__":
    cli.main(
        run,
        Plan,
        config=ExperimentConfig(),
        groups=("data", "mesh", "eval", "eval.dynamic"),
        aliases={"rule": RULE},
    )
