"""A parsed command line, and the config, text and run that result from it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from txl_jax.cli import flag_tree, precedence
from txl_jax.cli.precedence import apply_flags
from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.data.corpus import Corpus, read_corpus
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.runs import warm_start
from txl_jax.runs.run import Run
from txl_jax.runs.trained import TrainedModel
from txl_jax.runtime import distributed, output
from txl_jax.runtime.stop import StopRequest


@dataclasses.dataclass(frozen=True)
class Job:
    """A parsed command line, with methods for the config, text and run that it selects."""

    plan: Any
    # The config that the flags change.
    defaults: ExperimentConfig
    # Words that are not flags.
    words: list[str]
    # Where each flag was set: "" for the command line, else "FILE, line N: ".
    places: Mapping[str, str]
    # The name of the last flagfile, without directory and suffix, if any.
    flagfile: str | None
    # A request to stop, by a signal or a notice. `with job.stop:` begins to wait for it.
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)

    def config(self, run: Run | None = None) -> ExperimentConfig:
        """Returns the flags applied to the defaults, or to a run's recorded config.

        All processes call it. `precedence` documents which settings take precedence. For each
        setting of a flagfile that yields, a line is added to the run's notes, or printed if `run`
        is None.

        Raises:
          UserError: If settings are incompatible, or describe another model than the weights that
            the run starts from.
        """
        if run is None:
            config, notes = distributed.run_on_all(lambda: apply_flags(self.defaults, self.places))
            for note in notes:
                output.say(f"note      {note}")
            return config

        if run.is_new:
            config, notes = self._config_of_new(run)
        else:
            recorded = run.config
            config, notes = distributed.run_on_all(
                lambda: apply_flags(recorded, self.places, is_recorded=True)
            )
        run.notes.extend(notes)
        return config

    def _config_of_new(self, run: Run) -> tuple[ExperimentConfig, list[str]]:
        """Returns the config of a run that has no record, and the notes about it.

        With `init_from`, the trained model's settings replace the defaults of the same settings.
        """
        # The flags over the defaults say which weights and which text are meant. If they are wrong
        # in one process, all processes end here.
        flagged = distributed.run_on_all(lambda: flag_tree.build(self.defaults))
        init_from = flagged.init_from

        # The preset `small` is only for your own text, not for a published corpus. The defaults
        # contain the corpus: a command for one corpus starts from that corpus, and a command for
        # all starts from the corpus of the flags (`precedence.defaults_of_corpus`). In training,
        # a flag for another command's corpus is an error later (`train_command.check_program`).
        base, small_note = precedence.small_if_no_sizes(
            self.defaults, self.places, has_weights=init_from is not None
        )
        trained_config = None
        if init_from is not None:
            # The model at `init_from`, because this run has no record. Opening it is a collective,
            # so it must not be within `run_on_all`.
            trained = warm_start.basis(init_from, run)
            base = warm_start.with_trained_settings(base, trained, flagged.init_vocabulary)
            # Sizes in flagfiles yield to this model's sizes. Typed sizes must match them.
            trained_config = trained.config
        steps_note = precedence.note_of_large_steps(base, self.places, flagged.data.corpus)

        config, notes = distributed.run_on_all(
            lambda: apply_flags(base, self.places, trained=trained_config)
        )
        first_notes = [note for note in (small_note, steps_note) if note is not None]
        return config, first_notes + notes

    def config_of_flagfile(self, name: str) -> ExperimentConfig:
        """Returns the config of another flagfile, for its corpus.

        The settings on this command line are applied to it. For commands of one process.
        """
        words = ["flagfile", f"--flagfile={name}"]
        for setting, value in flag_tree.passed_settings().items():
            words.append(f"--{setting}={config_tree.format_value(value)}")
        return precedence.config_of_words(self.defaults, words, by_corpus=True)

    def config_of(self, trained: Run | TrainedModel) -> ExperimentConfig:
        """Returns the flags applied to a trained model's settings. All processes call it.

        Raises:
          UserError: If settings are incompatible, or model or tokens change.
        """
        return distributed.run_on_all(lambda: _config_over(trained, self.places))

    def trained(
        self, check: Callable[[ExperimentConfig], Any] = lambda config: None
    ) -> tuple[ExperimentConfig, Corpus, Run]:
        """Reads the run of a `TrainedRun` plan. All processes call it.

        Args:
          check: Called with the settings, before the text is read, to raise their errors early.

        Returns:
          The run's settings with the flags applied, its text, and the run itself.
        """
        run = Run.read(self.plan.workdir, member=self.plan.ensemble_member)
        config = self.config_of(run)
        check(config)
        return config, self.corpus(config, run), run

    def corpus(
        self, config: ExperimentConfig, run: Run | None = None, vocabulary: Vocabulary | None = None
    ) -> Corpus:
        """Reads the text of a config, for a trained run with its vocabulary. All processes call it.

        A trained run may come from a stranger. Prepared files in the directory that its record
        names are therefore only read, and missing files are prepared in the command's directories.
        """
        data_dir = self.plan.data_dir
        cache_dir = self.plan.cache_dir
        # An open run is being trained. Other runs are only used. A warm start may read the text in
        # the vocabulary of the weights.
        if run is not None and run.is_open and config.init_from is not None:
            return warm_start.read_corpus(config, run, data_dir, cache_dir)

        read_only_cache = None
        if run is not None and not run.is_open:
            vocabulary = run.text.vocabulary
            # --data_dir sets where the text is read from. Files that were prepared in the record's
            # directory are then not used.
            if "data_dir" not in self.places:
                read_only_cache = run.text.cache_dir
        return distributed.run_on_all(
            lambda: read_corpus(
                config.data,
                data_dir,
                cache_dir,
                vocabulary=vocabulary,
                read_only_cache=read_only_cache,
            )
        )


def _config_over(trained: Run | TrainedModel, places: Mapping[str, str]) -> ExperimentConfig:
    """Returns a trained model's settings with the flags applied.

    Raises:
      UserError: If the flags change the model or its tokens.
    """
    config, _ = apply_flags(trained.config, places, is_recorded=True)
    changes = []
    for leaf, before, after in config_tree.differences(trained.config, config):
        # Settings such as model.attention may change: the parameters stay valid.
        changes_model = leaf.name.startswith("model.") and not leaf.setting.free_on_resume
        if changes_model or leaf.setting.shapes_tokens:
            changes.append(config_tree.describe_change(leaf, before, after))
    if changes:
        raise UserError(
            f"the run in {trained.path} was trained with another model or other tokens: "
            f"{', '.join(changes)}. Omit these flags."
        )
    return config
