"""Settings of training: optimizer, mesh, recurrence, regularization, weight averaging."""

import dataclasses
import enum

from txl_jax.config.config_tree import Config, free_setting, require, setting

__all__ = [
    "AverageConfig",
    "LossPart",
    "MeshConfig",
    "OptimizerConfig",
    "OptimizerName",
    "RegularizationConfig",
    "Schedule",
    "ScheduleOffset",
    "TrainConfig",
]


class LossPart(enum.StrEnum):
    """Scored positions of a training segment (table 6 of the paper)."""

    FULL = "full"
    HALF = "half"  # The last L - L // 2 positions.


class Schedule(enum.StrEnum):
    """Shape of the learning rate's decay after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"  # Falls at a constant slope (Defazio et al., 2023; Bergsma et al., 2025).


class ScheduleOffset(enum.StrEnum):
    """Step at which the decay of the learning rate starts."""

    # At the end of the warm-up, so that the rate does not jump.
    AFTER_WARMUP = "after_warmup"
    # At step 0, so the rate jumps down where the warm-up ends. The first update is at the peak.
    ORIGINAL = "original"


class OptimizerName(enum.StrEnum):
    """Rule that turns a clipped gradient into an update."""

    ADAM = "adam"
    # Adam with decoupled weight decay.
    ADAMW = "adamw"
    # Adam, with each tensor's step scaled to the norm of the tensor (You et al., 2020): optax.lamb.
    LAMB = "lamb"
    # NVIDIA's LAMB: no bias correction, norms up to 10, one norm for each of NVIDIA's tensors.
    LAMB_NVIDIA = "lamb_nvidia"
    # Second moments by row and column, no first moment (Shazeer and Stern, 2018).
    ADAFACTOR = "adafactor"
    # The sign of a momentum, with b1 0.9 and b2 0.99 (Chen et al., 2023).
    LION = "lion"
    # Layers' matrices by orthogonalized momentum (Jordan et al., 2024), everything else by Adam.
    MUON = "muon"


ADAM_B1 = 0.9  # Adam beta 1, the decay of the first moment, for every rule with Adam.
# Optimizers that keep Adam's two moments, for all parameters or for some.
_WITH_ADAM = tuple(
    name for name in OptimizerName if name not in (OptimizerName.ADAFACTOR, OptimizerName.LION)
)
_WITH_DECAY = tuple(name for name in OptimizerName if name is not OptimizerName.ADAM)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Config, prefix="optimizer."):
    """The optimizer, with linear warm-up, decay and clipping by global norm."""

    name: OptimizerName = setting(
        OptimizerName.ADAM, "Optimizer. muon updates layers' matrices, and Adam the rest."
    )
    learning_rate: float = setting(2.5e-4, "Peak learning rate.", above=0)
    warmup_steps: int = setting(0, "Linear warm-up, in training steps.", at_least=0)
    schedule: Schedule = setting(Schedule.COSINE, "Decay of the learning rate after the warm-up.")
    schedule_offset: ScheduleOffset = setting(
        ScheduleOffset.AFTER_WARMUP, "Step at which the decay starts.", flag=False
    )
    adam_b2: float = setting(
        0.999,
        "Adam beta 2: decay of the second moment.",
        at_least=0,
        below=1,
        only_with={"name": _WITH_ADAM},
    )
    adam_eps: float = setting(
        1e-8, "Adam epsilon: added to the root of the second moment.", above=0, flag=False
    )
    clip_norm: float = setting(0.25, "Gradient clipping: maximum global norm.", above=0)
    clip_eps: float = setting(
        0.0, "Gradient clipping epsilon: added to the global norm.", at_least=0, flag=False
    )
    decay_steps: int | None = setting(
        None,
        "Training steps after which the rate stays at its minimum. none means train.steps.",
        at_least=1,
    )
    min_lr_ratio: float = setting(
        0.0, "Minimum learning rate, as a fraction of the peak.", at_least=0, at_most=1
    )
    l2: float = setting(
        0.0,
        "L2 penalty: this factor times the parameters is added to the clipped gradient "
        "(like in PyTorch's Adam).",
        at_least=0,
        only_with={"name": (OptimizerName.ADAM, OptimizerName.ADAMW)},
    )
    weight_decay: float = setting(
        0.0,
        "Decoupled weight decay of matrices (AdamW), times the learning rate.",
        at_least=0,
        only_with={"name": _WITH_DECAY},
    )
    embedding_lr_multiplier: float = setting(
        1.0,
        "Peak learning rate of the embedding, as a multiple of optimizer.learning_rate.",
        above=0,
    )

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or AdamW has no weight decay."""
        super().validate()
        require(
            self.name is not OptimizerName.ADAMW or self.weight_decay,
            f"optimizer.weight_decay must be above 0 for optimizer.name={self.name}, got "
            f"{self.weight_decay}. Set a weight decay, such as --optimizer.weight_decay=0.01, or "
            f"--optimizer.name={OptimizerName.ADAM}.",
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig(Config, prefix="mesh."):
    """Devices along each axis of the mesh. They change results only by rounding."""

    data: int | None = free_setting(
        None, "Data-parallel replicas in each slice. none uses all remaining devices.", at_least=1
    )
    fsdp: int = free_setting(1, "FSDP: devices that shard the parameters of a replica.", at_least=1)
    tensor: int = free_setting(
        1, "Tensor parallelism: devices that shard heads, F and the vocabulary.", at_least=1
    )


class Recurrence(Config):
    """Base class for the lengths of training and evaluation."""

    segment_len: int
    mem_len: int
    stride: int | None
    same_length: bool

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or lengths are incompatible."""
        super().validate()
        require(
            self.stride is None or self.stride <= self.segment_len,
            f"{self.prefix}stride must be at most {self.prefix}segment_len ({self.segment_len}), "
            f"got {self.stride}",
        )
        require(
            self.mem_len or not self.same_length,
            f"{self.prefix}same_length must be false for {self.prefix}mem_len=0, got true. "
            f"Set --{self.prefix}same_length=false.",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig(Recurrence, prefix="train."):
    """The training recurrence and its intervals.

    Intervals are in training steps, one per segment.
    """

    steps: int = setting(
        400_000,
        "Number of training steps. You can raise it when you resume a run.",
        at_least=1,
        may_grow=True,
    )
    batch_size: int = setting(22, "B, batch size over all devices.", at_least=1)
    grad_accum_steps: int = setting(
        1, "Gradient accumulation: microbatches per training step.", at_least=1
    )
    segment_len: int = setting(
        512, "L, segment length: tokens per row and training step (tgt_len).", at_least=1
    )
    mem_len: int = setting(512, "M, memory length.", at_least=0)
    stride: int | None = setting(
        None,
        "Sliding window, without memory: number of new tokens at the end of each segment. Only "
        "these are scored. none scores all.",
        at_least=1,
        not_with=("mem_len",),
    )
    clamp_len: int | None = setting(
        None, "Clamp distances to at most this. none disables clamping.", at_least=1
    )
    same_length: bool = setting(False, "Every query attends to the same number of keys.")
    loss: LossPart = setting(LossPart.FULL, "Scored positions of a segment.", flag=False)
    segments_per_call: int = setting(
        1, "S, training steps per compiled call. It does not change results.", at_least=1
    )
    log_every: int = free_setting(200, "Training steps between progress lines.", at_least=1)
    eval_every: int = free_setting(
        4000, "Training steps between evaluations on the validation split.", at_least=1
    )
    checkpoint_every: int = free_setting(4000, "Training steps between checkpoints.", at_least=1)
    keep_checkpoints: int = free_setting(
        2, "Number of latest checkpoints kept, in addition to the best.", at_least=1
    )
    sample_every: int | None = free_setting(
        None,
        "Training steps between text samples (see the generate settings). none disables them.",
        at_least=1,
    )
    patience: int | None = free_setting(
        None,
        "Stop after this many evaluations without improvement. none disables early stopping.",
        at_least=1,
    )

    @property
    def new_tokens(self) -> int:
        """Tokens of a row that a training step reads for the first time."""
        return self.stride or self.segment_len

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or settings are incompatible."""
        super().validate()
        require(
            self.stride is None or self.loss is LossPart.FULL,
            f"train.loss must be {LossPart.FULL} for train.stride={self.stride}, got {self.loss}. "
            "A stride selects the scored tokens itself.",
        )
        require(
            self.batch_size % self.grad_accum_steps == 0,
            "train.batch_size must be a multiple of train.grad_accum_steps "
            f"({self.grad_accum_steps}), got {self.batch_size}",
        )
        for name in ("steps", "log_every", "eval_every", "checkpoint_every"):
            steps = getattr(self, name)
            require(
                steps % self.segments_per_call == 0,
                f"train.{name} must be a multiple of train.segments_per_call "
                f"({self.segments_per_call}), got {steps}",
            )
        require(
            self.sample_every is None or self.sample_every % self.eval_every == 0,
            f"train.sample_every must be a multiple of train.eval_every ({self.eval_every}), "
            f"because samples follow evaluations, got {self.sample_every}",
        )


@dataclasses.dataclass(frozen=True)
class RegularizationConfig(Config, prefix="regularization."):
    """Penalties added to the loss."""

    activation_l2: float = setting(
        0.0,
        "Activation regularization (AR): coefficient of the last layer's mean squared outputs.",
        at_least=0,
    )
    temporal_l2: float = setting(
        0.0,
        "Temporal activation regularization (TAR): coefficient of their mean squared change "
        "between positions.",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class AverageConfig(Config, prefix="average."):
    """Weight averaging (EMA, SWA, NT-ASGD).

    The average is a mean over training steps, which is evaluated and kept as the best.
    """

    start_step: int | None = setting(
        None,
        "Training steps before averaging starts. none disables it.",
        at_least=0,
        not_with=("nt_asgd_patience",),
    )
    nt_asgd_patience: int | None = setting(
        None,
        "NT-ASGD: start averaging after N evaluations without improvement (5 in AWD-LSTM). "
        "none disables it.",
        at_least=1,
    )
    lr_scale: float = setting(
        1.0, "Factor on the learning rate, starting at average.start_step.", above=0
    )
    ema_decay: float | None = setting(
        None,
        "EMA decay per training step. none means a uniform mean since the start.",
        above=0,
        below=1,
    )

    @property
    def on(self) -> bool:
        """Returns whether weights are averaged at all."""
        return self.start_step is not None or self.nt_asgd_patience is not None

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or settings are incompatible."""
        super().validate()
        require(
            self.start_step is not None or self.lr_scale == 1,
            f"average.lr_scale must be 1 if average.start_step is none, got {self.lr_scale}. "
            "The factor requires a start step.",
        )
        require(
            self.on or self.ema_decay is None,
            "average.ema_decay must be none if average.start_step and average.nt_asgd_patience are "
            f"none, got {self.ema_decay}. Set one of them to start averaging.",
        )
