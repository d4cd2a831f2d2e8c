"""A parsed command line, and the config, text and run that follow from it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from txl_jax.cli import flag_tree
from txl_jax.cli.precedence import SMALL, apply_flags, config_of_words, names_no_sizes
from txl_jax.config import (
    CorpusName,
    ExperimentConfig,
    config_tree,
)
from txl_jax.config.config_tree import require
from txl_jax.config.experiment import preset
from txl_jax.data.corpus import Corpus, read_corpus
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.runs import warm_start
from txl_jax.runs.run import Run
from txl_jax.runs.trained import TrainedModel
from txl_jax.runtime import distributed, output
from txl_jax.runtime.stop import StopRequest


@dataclasses.dataclass(frozen=True)
class Job:
    """A parsed command line, and what follows from it."""

    plan: Any
    # The config that the flags change.
    defaults: ExperimentConfig
    # The words that are not flags.
    words: list[str]
    # Where each flag was set: "" for the command line, else "FILE, line N: ".
    places: Mapping[str, str]
    # The name of the last flagfile, without directory and suffix, if any.
    flagfile: str | None
    # A request to stop, by a signal or a notice. `with job.stop:` begins to wait for it.
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)

    def config(self, run: Run | None = None) -> ExperimentConfig:
        """Returns the flags applied to the defaults, or to a run's recorded config.

        All processes call it.

        For a new run with `init_from`, the trained model's settings replace the same defaults.
        Notes of the run list the settings of a flagfile that yield (`apply_flags`). Raises
        `UserError` if settings are incompatible, or describe another model than the weights.
        """
        recorded = None if run is None or run.is_new else run.config
        base, weights, notes = recorded or self.defaults, None, list[str]()
        if run is not None and run.is_new:
            asked = distributed.run_on_all(lambda: flag_tree.build(base))
            if names_no_sizes(base, self.places):
                base = preset(SMALL)
                but = " and the sizes of the weights" if asked.init_from else ""
                notes.append(
                    f"no flag sets a model size, so this run uses --flagfile={SMALL} "
                    f"with your flags{but}"
                )
            if asked.init_from is not None:
                trained = warm_start.basis(asked.init_from, run)
                base, weights = (
                    warm_start.with_trained_settings(base, trained, asked.init_vocabulary),
                    trained.config,
                )
            sized = {"train.batch_size", "train.segment_len"} & self.places.keys()
            if (
                not sized
                and asked.data.corpus is CorpusName.TEXT
                and base.train == ExperimentConfig().train
            ):
                usual = f"{base.train.batch_size} x {base.train.segment_len} tokens per step"
                notes.append(
                    f"settings without a flag are the paper's ({usual}). "
                    f"--flagfile={SMALL} suits one machine."
                )
        config = distributed.run_on_all(
            lambda: apply_flags(
                base, self.places, is_recorded=recorded is not None, weights=weights, notes=notes
            )
        )
        for note in notes:
            if run is None:
                output.say(f"note      {note}")
            else:
                run.notes.append(note)
        return config

    def config_of_flagfile(self, name: str) -> ExperimentConfig:
        """Returns the config of another flagfile, for its corpus.

        The settings on this command line are applied to it.
        """
        typed = [
            f"--{leaf}={config_tree.format_value(value)}"
            for leaf, value in flag_tree.given().items()
        ]
        return config_of_words(
            self.defaults, ["flagfile", f"--flagfile={name}", *typed], by_corpus=True
        )

    def config_of(self, trained: Run | TrainedModel) -> ExperimentConfig:
        """Returns the flags applied to a trained model's settings.

        Raises `UserError` if model or tokens change.
        """

        def over_trained() -> ExperimentConfig:
            config = apply_flags(trained.config, self.places, is_recorded=True)
            refused = [
                config_tree.describe_change(leaf, old, new)
                for leaf, old, new in config_tree.differences(trained.config, config)
                if (leaf.name.startswith("model.") and not leaf.setting.free_on_resume)
                or leaf.setting.shapes_tokens
            ]
            other = f"the run in {trained.path} was trained with another model or other tokens"
            require(not refused, f"{other}: {', '.join(refused)}. Omit these flags.")
            return config

        return distributed.run_on_all(over_trained)

    def trained(
        self, check: Callable[[ExperimentConfig], Any] = lambda config: None
    ) -> tuple[ExperimentConfig, Corpus, Run]:
        """Reads the run of a `TrainedRun` plan.

        Returns its settings with the flags applied, its text, and the run itself.

        `check` is called with the settings, before the text is read.
        """
        run = Run.read(self.plan.workdir, member=self.plan.ensemble_member)
        config = self.config_of(run)
        check(config)
        return config, self.corpus(config, run), run

    def corpus(
        self, config: ExperimentConfig, run: Run | None = None, vocabulary: Vocabulary | None = None
    ) -> Corpus:
        """Reads the text of a config, for a trained run with its vocabulary.

        A trained run may be a stranger's. So what is prepared in the directory that its record
        names is only read, and what is missing there is prepared in the command's own directories.
        """
        folders = self.plan.data_dir, self.plan.cache_dir
        if run is not None and run.is_open and config.init_from is not None:
            return warm_start.read_corpus(config, run, *folders)
        recorded = None
        if run is not None and not run.is_open:
            vocabulary = run.text.vocabulary
            if "data_dir" not in self.places:
                recorded = run.text.cache_dir
        return distributed.run_on_all(
            lambda: read_corpus(
                config.data, *folders, vocabulary=vocabulary, read_only_cache=recorded
            )
        )
