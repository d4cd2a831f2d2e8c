"""The settings of commands: dataclasses whose fields are flags, for a command's own `Plan`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from txl_jax.cli.job import Job
from txl_jax.cli.precedence import NORM_PLACE, WARMUP
from txl_jax.config import (
    CacheDType,
    ExperimentConfig,
    Network,
    NormPlace,
    WeightDType,
    config_tree,
)
from txl_jax.config.config_tree import Config, setting
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError
from txl_jax.runs.build import Compilation
from txl_jax.runs.run import Run, recorded_folders
from txl_jax.runs.time_budget import steps_in
from txl_jax.runtime import distributed
from txl_jax.runtime.sinks import Sink, WeightsAndBiases

# With fewer training steps, post-norm models score better than pre-norm models. With more, they
# score worse (benchmarks/norm_place.csv).
PRE_NORM_STEPS = 700


@dataclasses.dataclass(frozen=True)
class Plan(Config):
    """A command's own settings: a dataclass of `setting` fields, each a flag without prefix.

    Help, absolute paths, and the comparison between hosts are derived from the fields.
    """

    compilation_cache: str | None = setting(
        None,
        "Directory that caches compiled functions for later starts. "
        "The default for a single process of a command that reads a text is ~/.cache/txl_jax. "
        "off disables the cache.",
        loads_code=True,
    )

    # Whether the cache is enabled if no flag sets its directory.
    caches_compiled: ClassVar[bool] = False
    # Printed when a signal ends the command.
    stopped: ClassVar[str] = "rerun the same command to resume"


@dataclasses.dataclass(frozen=True)
class TextPlan(Plan):
    """Settings of a command that reads a text."""

    data_dir: str = setting("data", "Directory of the original corpus files.", path=True)
    cache_dir: str | None = setting(
        None, "Directory for records and token files. By default 'prepared' in data_dir.", path=True
    )

    caches_compiled: ClassVar[bool] = True

    @property
    def trains(self) -> bool:
        """Whether the run in the workdir is trained.

        If so, it continues in the directories that its record names.
        """
        return False


@dataclasses.dataclass(frozen=True)
class TrainedRun(TextPlan):
    """Settings of a command that reads a trained run and a text."""

    workdir: str = setting("", "Directory of the run.", path=True, required=True)
    ensemble_member: str | None = setting(None, "Name of the ensemble member to use.")

    stopped: ClassVar[str] = "nothing was written"


@dataclasses.dataclass(frozen=True)
class StoredTypes(Plan):
    """Dtypes of a trained model's weights and KV caches, for quantization."""

    weight_dtype: WeightDType | None = setting(
        None, "Quantized dtype of the weights, instead of the saved one."
    )
    cache_dtype: CacheDType | None = setting(None, "Dtype of KV caches, instead of the saved one.")


@dataclasses.dataclass(frozen=True)
class WatchPlan(Plan):
    """Settings for watching a training run."""

    profile_steps: tuple[int, ...] = setting(
        (),
        "First and last training step of a profile for TensorBoard in the workdir, such as 10,15.",
    )
    wandb_project: str | None = setting(None, "Weights & Biases project to log to as well.")
    verbose: bool = setting(
        False, "Print details of attention and memory, which log.txt always contains."
    )

    def watch(self, run: Run) -> dict[str, Any]:
        """Returns keyword arguments for `train_run`: sinks, profile_steps, verbose.

        Raises:
          UserError: If W&B is missing.
        """
        sinks: list[Sink] = []
        if self.wandb_project:
            sinks.append(WeightsAndBiases(self.wandb_project, run.path))
        return {
            "sinks": sinks,
            "profile_steps": self.profile_steps or None,
            "verbose": self.verbose,
        }


@dataclasses.dataclass(frozen=True)
class TimedPlan(Plan):
    """Setting for training for a given time."""

    minutes: float | None = setting(
        None,
        "Minutes to train and evaluate, without compilation. At the first start this sets "
        "train.steps from the measured speed, and post-norm instead of pre-norm if few steps fit.",
        above=0,
    )

    def keep_steps(self, config: ExperimentConfig, job: Job, run: Run) -> ExperimentConfig:
        """Returns the config with the steps that --minutes set at the first start.

        This applies if the run has started already.

        Raises:
          UserError: If --train.steps is typed too, or with multiple processes, whose clocks differ.
        """
        if self.minutes is None:
            return config
        if job.places.get("train.steps") == "":
            raise UserError(
                "--minutes and --train.steps both set how long to train. Omit one of them."
            )
        if distributed.is_multiprocess():
            raise UserError("--minutes requires a single process. Pass --train.steps instead.")
        if run.is_new:
            return config
        run.notes.append(
            "train.steps stays as --minutes set it at the first start. "
            "Pass --train.steps to change it."
        )
        return config_tree.replace(config, {"train.steps": run.config.train.steps})

    def fit_steps(
        self, config: ExperimentConfig, corpus: Corpus, job: Job, run: Run
    ) -> tuple[ExperimentConfig, Compilation | None]:
        """Returns the config with as many steps as fit into --minutes, at the first start of a run.

        At most a tenth of the steps are warm-up, unless the warm-up is typed. With few steps a
        model with pre-norm gets post-norm, unless pre-norm is typed or comes with the weights. If
        the steps are few, the run's notes say so.

        Returns:
          (the config, the training step that was timed, for `train_run`). At later starts, and
          without --minutes, the config is unchanged and the step is None.

        Raises:
          UserError: If the text cannot be trained on, or the minutes are too few for one step.
        """
        if self.minutes is None or not run.is_new:
            return config, None
        print(
            "speed     compiling, then timing some steps, to set train.steps by --minutes",
            flush=True,
        )
        fitting = steps_in(60 * self.minutes, config, corpus)
        steps = fitting.steps
        warmup = config.optimizer.warmup_steps
        if job.places.get(WARMUP) != "":
            warmup = min(warmup, steps // 10)
        run.notes.append(
            f"--minutes={self.minutes:g} gives {steps:,} steps of {fitting.update_seconds:.3g} s, "
            f"{warmup} of warm-up"
        )
        if steps < fitting.advised_steps:
            run.notes.append(
                f"{steps} steps are few to learn from. Other work on this machine may have slowed "
                f"them down. {fitting.advised_steps} steps would take about "
                f"{fitting.advised_minutes} minutes. To train longer, rerun the command with "
                "--train.steps instead of --minutes."
            )
        fitted = config_tree.replace(config, {"train.steps": steps, WARMUP: warmup})

        # The place of a typed flag is empty. Trained weights bring their own norms.
        is_free = job.places.get(NORM_PLACE) != "" and config.init_from is None
        has_pre_norm = (
            config.model.network is Network.TRANSFORMER_XL
            and config.model.layer_norm is NormPlace.PRE
        )
        if is_free and has_pre_norm and steps < PRE_NORM_STEPS:
            run.notes.append(
                f"{NORM_PLACE} is post instead of pre, because pre scores better only from about "
                f"{PRE_NORM_STEPS} steps on. Pass --{NORM_PLACE}=pre to keep it."
            )
            # The steps were timed with pre-norm. A step with post-norm takes the same time, but is
            # another compiled function, so training compiles a second time in this case only.
            return config_tree.replace(fitted, {NORM_PLACE: NormPlace.POST}), None
        return fitted, fitting.compilation


def with_recorded_folders(plan: Any, places: Mapping[str, str]) -> Any:
    """Returns a plan that trains, with the directories of the run in its workdir as defaults.

    This applies to the directories that exist on this machine and that no flag sets.

    Training continues in these directories. Plans that only use a run may read a stranger's run,
    and never write to the directories that it names (`Job.corpus`).
    """
    workdir = getattr(plan, "workdir", None)
    if not workdir or not isinstance(plan, TextPlan) or not plan.trains or "data_dir" in places:
        return plan
    folders = recorded_folders(workdir)
    unset = {name: folder for name, folder in folders.items() if name not in places}
    return dataclasses.replace(plan, **unset)
