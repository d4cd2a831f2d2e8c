"""Settings of training: optimizer, mesh, recurrence, regularization, weight averaging."""

import dataclasses
import enum

from txl_jax.config.config_tree import Config, free_setting, setting

__all__ = [
    "AverageConfig",
    "LossPart",
    "MeshConfig",
    "OptimizerConfig",
    "OptimizerName",
    "RegularizationConfig",
    "ScheduleOffset",
    "TrainConfig",
]


class LossPart(enum.StrEnum):
    """Positions of a training segment that are scored (table 6 of the paper)."""

    FULL = "full"
    HALF = "half"  # The last L - L // 2 positions.


class ScheduleOffset(enum.StrEnum):
    """Step at which the cosine of the learning rate starts."""

    AFTER_WARMUP = "after_warmup"  # At the end of the warm-up: no jump.
    ORIGINAL = "original"  # At step 0, so the rate jumps down where the warm-up ends.


class OptimizerName(enum.StrEnum):
    """Rule by which a clipped gradient becomes an update."""

    ADAM = "adam"
    ADAMW = "adamw"  # Adam with decoupled weight decay.
    LAMB = "lamb"  # Adam, with each tensor's step as long as the tensor (You et al., 2020): optax.lamb.
    LAMB_NVIDIA = "lamb_nvidia"  # NVIDIA's: no bias correction, norms up to 10, one norm for each of their tensors.
    ADAFACTOR = "adafactor"  # Second moments by row and column, no first moment (Shazeer and Stern, 2018).
    LION = "lion"  # The sign of a momentum; b1 0.9, b2 0.99 (Chen et al., 2023).
    MUON = "muon"  # Layers' matrices by orthogonalized momentum (Jordan et al., 2024), all else by Adam.


ADAM_B1 = 0.9  # Adam beta 1, of every rule: decay of the first moment.
# Optimizers that hold Adam's two moments, of all parameters or of some.
_WITH_ADAM = tuple(name for name in OptimizerName if name not in (OptimizerName.ADAFACTOR, OptimizerName.LION))
_WITH_DECAY = tuple(name for name in OptimizerName if name is not OptimizerName.ADAM)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Config, prefix="optimizer."):
    """The optimizer, with linear warm-up, cosine decay and clipping by the global norm."""

    name: OptimizerName = setting(OptimizerName.ADAM, "Optimizer; muon: of the layers' matrices, with Adam elsewhere.")
    learning_rate: float = setting(2.5e-4, "Peak learning rate.", above=0)
    warmup_steps: int = setting(0, "Updates of linear warm-up.", at_least=0)
    schedule_offset: ScheduleOffset = setting(
        ScheduleOffset.AFTER_WARMUP, "Step at which the cosine starts.", flag=False
    )
    adam_b2: float = setting(
        0.999, "Adam beta 2: decay of the second moment.", at_least=0, below=1, only_with={"name": _WITH_ADAM}
    )
    adam_eps: float = setting(1e-8, "Adam epsilon: added to the root of the second moment.", above=0, flag=False)
    clip_norm: float = setting(0.25, "Gradient clipping: largest global norm.", above=0)
    decay_steps: int | None = setting(
        None, "Updates after which the rate stays at its minimum; none: train.steps.", at_least=1
    )
    min_lr_ratio: float = setting(0.0, "Minimum learning rate, as a fraction of the peak.", at_least=0, at_most=1)
    l2: float = setting(
        0.0,
        "L2 penalty: this times the parameters is added to the clipped gradient (PyTorch's Adam).",
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
        1.0, "Peak learning rate of the embedding, as a multiple of the others'.", above=0
    )

    def validate(self) -> None:
        """Raises `UserError` for a setting out of its range, or AdamW without a weight decay."""
        super().validate()
        self.expect(
            self.name is not OptimizerName.ADAMW or self.weight_decay,
            "name weight_decay",
            "that is adam: give a weight decay, as --optimizer.weight_decay=0.01, or --optimizer.name=adam",
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig(Config, prefix="mesh."):
    """Devices along each axis of the mesh. They change no number but by rounding."""

    data: int | None = free_setting(
        None, "Data-parallel replicas in each slice; none: all remaining devices.", at_least=1
    )
    fsdp: int = free_setting(1, "FSDP: devices that share the parameters of a replica.", at_least=1)
    tensor: int = free_setting(1, "Tensor parallel: devices that share heads, inner width and vocabulary.", at_least=1)


class Recurrence(Config):
    """Base of the lengths of training and of evaluation."""

    segment_len: int
    mem_len: int
    stride: int | None
    same_length: bool

    def validate(self) -> None:
        """Raises `UserError` for a setting out of its range, or lengths that cannot go together."""
        super().validate()
        self.expect(
            (self.stride or 1) <= self.segment_len, "stride segment_len", "the stride is at most that, or none for all"
        )
        self.expect(self.mem_len or not self.same_length, "same_length mem_len", "the window would be empty")


@dataclasses.dataclass(frozen=True)
class TrainConfig(Recurrence, prefix="train."):
    """The training recurrence and its intervals. Intervals count updates, one per segment."""

    steps: int = setting(400_000, "Number of updates; a resumed run may get more.", at_least=1, may_grow=True)
    batch_size: int = setting(22, "B, rows over all devices.", at_least=1)
    grad_accum_steps: int = setting(1, "Gradient accumulation: microbatches per update.", at_least=1)
    segment_len: int = setting(512, "L, tokens per row and update (tgt_len).", at_least=1)
    mem_len: int = setting(512, "M, memory length.", at_least=0)
    stride: int | None = setting(
        None,
        "Sliding window, without memory: new, scored tokens at a segment's end; none: all.",
        at_least=1,
        not_with=("mem_len",),
    )
    clamp_len: int | None = setting(None, "Distances above this share one position code; none: off.", at_least=1)
    same_length: bool = setting(False, "Every query sees the same number of keys.")
    loss: LossPart = setting(LossPart.FULL, "Positions of the segment that are scored.", flag=False)
    segments_per_call: int = setting(1, "S, steps per dispatch; any S gives the same numbers.", at_least=1)
    log_every: int = free_setting(200, "Updates between progress lines.", at_least=1)
    eval_every: int = free_setting(4000, "Updates between evaluations on the validation text.", at_least=1)
    checkpoint_every: int = free_setting(4000, "Updates between checkpoints.", at_least=1)
    keep_checkpoints: int = free_setting(2, "Newest checkpoints kept, beside the best.", at_least=1)
    sample_every: int | None = free_setting(
        None, "Updates between samples of text, by the generate settings; none: off.", at_least=1
    )
    patience: int | None = free_setting(
        None, "Early stopping: evaluations in a row without a better loss; none: off.", at_least=1
    )

    @property
    def new_tokens(self) -> int:
        """Tokens of a row that an update reads for the first time."""
        return self.stride or self.segment_len

    def validate(self) -> None:
        """Raises `UserError` for a setting out of its range, or settings that cannot go together."""
        super().validate()
        self.expect(
            not self.stride or self.loss is LossPart.FULL, "stride loss", "the stride decides which tokens are scored"
        )
        self.expect(
            self.batch_size % self.grad_accum_steps == 0, "batch_size grad_accum_steps", "the rows must divide evenly"
        )
        for name in ("steps", "log_every", "eval_every", "checkpoint_every"):
            is_multiple = getattr(self, name) % self.segments_per_call == 0
            self.expect(is_multiple, f"{name} segments_per_call", "the former must be a multiple of the latter")
        comes_after = "a sample follows an evaluation, so the former must be a multiple of the latter"
        self.expect((self.sample_every or 0) % self.eval_every == 0, "sample_every eval_every", comes_after)


@dataclasses.dataclass(frozen=True)
class RegularizationConfig(Config, prefix="regularization."):
    """Penalties that are added to the loss."""

    activation_l2: float = setting(
        0.0, "Activation regularization (AR): factor on the mean square of the last layer's outputs.", at_least=0
    )
    temporal_l2: float = setting(
        0.0,
        "Temporal activation regularization (TAR): factor on their mean squared change between positions.",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class AverageConfig(Config, prefix="average."):
    """Weight averaging (EMA, SWA, NT-ASGD): a mean over updates, which is evaluated and kept as the best."""

    start_step: int | None = setting(
        None, "Updates before averaging starts; none: off.", at_least=0, not_with=("nt_asgd_patience",)
    )
    nt_asgd_patience: int | None = setting(
        None,
        "NT-ASGD: start averaging when the last N evaluations brought no improvement (AWD-LSTM: 5); none: off.",
        at_least=1,
    )
    lr_scale: float = setting(1.0, "Factor on the learning rate from start_step on.", above=0)
    ema_decay: float | None = setting(
        None, "EMA decay per update; none: a uniform mean since the start.", above=0, below=1
    )

    @property
    def on(self) -> bool:
        """Returns whether a mean is kept at all."""
        return self.start_step is not None or self.nt_asgd_patience is not None

    def validate(self) -> None:
        """Raises `UserError` for a setting out of its range, or settings that cannot go together."""
        super().validate()
        self.expect(
            self.start_step is not None or self.lr_scale == 1, "lr_scale start_step", "the factor applies from there on"
        )
        self.expect(
            self.on or self.ema_decay is None,
            "ema_decay start_step nt_asgd_patience",
            "nothing starts averaging, so give one of the latter two",
        )
