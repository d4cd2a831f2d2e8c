"""Settings of the network.

Letters: N layers, D model size, H heads, E head size, F feed-forward size, C clusters of the
adaptive softmax.
"""

import dataclasses
import enum
from typing import Any

from txl_jax.config.config_tree import (
    Config,
    format_value,
    free_setting,
    leaves,
    replace,
    require,
    setting,
    shape_setting,
)
from txl_jax.errors import UserError

__all__ = [
    "AttentionPath",
    "AttentionWindow",
    "CompatConfig",
    "DType",
    "DropoutConfig",
    "Encoding",
    "MemoryStart",
    "ModelConfig",
    "Network",
    "NormPlace",
    "Remat",
    "ShawTerms",
]


class DType(enum.StrEnum):
    """Dtype of activations, memory and matmuls."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"  # For checks against reference values; needs JAX_ENABLE_X64.


class Encoding(enum.StrEnum):
    """Positional encoding."""

    RELATIVE = "relative"  # The paper's: the distance enters the attention scores.
    SHAW = "shaw"  # A learned key for each distance, per layer and head (Shaw et al., 2018).
    VASWANI = "vaswani"  # Sinusoids added to the embedding (Vaswani et al., 2017).
    AL_RFOU = "al_rfou"  # Learned vectors added before each layer (Al-Rfou et al., 2018).

    @property
    def is_learned(self) -> bool:
        """Returns whether positions have a learned table, so that parameters depend on its size."""
        return self in (Encoding.SHAW, Encoding.AL_RFOU)


class Network(enum.StrEnum):
    """The layers between embedding and softmax."""

    # The paper's network, and its variants.
    TRANSFORMER_XL = "transformer_xl"
    # Two baselines of N layers with D cells. They ignore the attention settings, and all lengths
    # except L.
    LSTM = "lstm"
    # An RNN whose gates read only inputs (Bradbury et al., 2017).
    QRNN = "qrnn"


class NormPlace(enum.StrEnum):
    """Placement of the layer norm in a residual branch."""

    POST = "post"  # LN(x + f(x)), like the paper.
    PRE = "pre"  # x + f(LN(x)).


class Remat(enum.StrEnum):
    """Rematerialization: values that the backward pass of a layer recomputes instead of storing."""

    AUTO = "auto"  # none on CPUs, dots on accelerators, or full if dots would not fit.
    NONE = "none"
    DOTS = "dots"  # Store matmuls with weights and attention's outputs, recompute the rest.
    FULL = "full"  # Store only each layer's input.


class AttentionPath(enum.StrEnum):
    """Attention implementation. All compute the same function."""

    AUTO = "auto"  # The fastest that supports the platform, the lengths and the dtype.
    REFERENCE = "reference"  # Stores all scores. The other implementations are tested against it.
    TILED = "tiled"  # XLA loops over tiles of the scores.
    STORED = "stored"  # Probabilities of all pairs, stored once: for training on GPUs.
    FUSED = "fused"  # Kernels for TPUs.


class MemoryStart(enum.StrEnum):
    """Contents of a row's memory before its first segment."""

    MASKED = "masked"  # Unfilled slots take no part in the softmax.
    ZEROS = "zeros"  # Zero rows that are attended to.


class ShawTerms(enum.StrEnum):
    """Terms of the score in a model with `Encoding.SHAW`."""

    # (a) and (b): content, and content with distance.
    PAPER = "paper"
    # Also u with content, (c), and a learned number per distance instead of (d).
    ORIGINAL = "original"


class AttentionWindow(enum.StrEnum):
    """Number of keys that a query attends to under same_length, itself included."""

    MEM_LEN = "mem_len"
    MEM_LEN_PLUS_ONE = "mem_len_plus_one"


@dataclasses.dataclass(frozen=True)
class DropoutConfig(Config, prefix="model.dropout."):
    """Dropout rates, at least 0 and below 1."""

    rate: float = setting(
        0.1,
        "Dropout on embedding, positions, attention output, both feed-forward layers and "
        "the last layer.",
        at_least=0,
        below=1,
    )
    attention: float = setting(
        0.0, "Dropout on the attention probabilities (dropatt).", at_least=0, below=1
    )
    input: float | None = setting(
        None,
        "Dropout on embedding and positions. none means model.dropout.rate.",
        at_least=0,
        below=1,
    )
    output: float | None = setting(
        None, "Dropout before softmax. none means model.dropout.rate.", at_least=0, below=1
    )
    locked: bool = setting(
        False, "Variational (locked) dropout: one mask for all positions of a row's segment."
    )
    qkv: float = setting(0.0, "Dropout on queries, keys and values.", at_least=0, below=1)
    embedding: float = setting(
        0.0, "Embedding dropout: whole words dropped from a batch.", at_least=0, below=1
    )

    @property
    def input_rate(self) -> float:
        """Rate on embedding and positions."""
        return self.rate if self.input is None else self.input

    @property
    def output_rate(self) -> float:
        """Rate before the softmax."""
        return self.rate if self.output is None else self.output

    @property
    def on(self) -> bool:
        """Returns whether any rate is above 0, so that training samples masks."""
        rates = (self.rate, self.attention, self.input, self.output, self.qkv, self.embedding)
        return any(rates)


@dataclasses.dataclass(frozen=True)
class CompatConfig(Config, prefix="model.compat."):
    """Differences between implementations of the same model.

    `COMPAT_PRESETS` names the combinations.
    """

    memory_start: MemoryStart = setting(
        MemoryStart.MASKED, "Contents of the memory before the first segment.", flag=False
    )
    same_length_window: AttentionWindow = setting(
        AttentionWindow.MEM_LEN, "Keys that a query attends to under same_length.", flag=False
    )
    layer_norm_eps: float = setting(
        1e-5, "Layer norm epsilon: added to the variance.", above=0, flag=False
    )
    shaw_terms: ShawTerms = setting(
        ShawTerms.PAPER,
        "Terms of the attention score with model.encoding=shaw.",
        flag=False,
        shapes_params=True,
    )
    final_norm: bool = setting(
        True,
        "Layer norm after the last layer, with model.layer_norm=pre. Other implementations do not "
        "have it: to convert the model to their formats later, train with false.",
        shapes_params=True,
    )

    def window(self, mem_len: int, *, same_length: bool) -> int | None:
        """Returns the maximum number of keys that a query attends to, or None for no limit.

        Without `same_length` queries attend to the whole memory and to all earlier tokens of the
        segment. The query itself is included.
        """
        if not same_length:
            return None
        if self.same_length_window is AttentionWindow.MEM_LEN_PLUS_ONE:
            return mem_len + 1
        return mem_len


_MAX_CUTOFFS = 1000  # Published models have 3.
_RELATIVE = {"encoding": (Encoding.RELATIVE,)}
_LEARNED = {"encoding": tuple(encoding for encoding in Encoding if encoding.is_learned)}
_TRANSFORMER = {"network": (Network.TRANSFORMER_XL,)}


@dataclasses.dataclass(frozen=True)
class ModelConfig(Config, prefix="model."):
    """Sizes and parts of the network.

    Lengths are not included, because the parameters do not depend on them.
    """

    network: Network = shape_setting(
        Network.TRANSFORMER_XL, "Layers between embedding and softmax."
    )
    n_layer: int = shape_setting(12, "N, number of layers.", at_least=1)
    d_model: int = shape_setting(512, "D, model size.", at_least=1, at_most=1 << 20)
    n_head: int = shape_setting(
        8, "H, number of attention heads. H * E may differ from D.", at_least=1
    )
    d_head: int = shape_setting(64, "E, size of an attention head.", at_least=1)
    d_inner: int = shape_setting(2048, "F, inner size of the feed-forward layers.", at_least=1)
    d_embed: int | None = shape_setting(
        None, "Embedding size of the first cluster. none means d_model.", at_least=1
    )
    dropout: DropoutConfig = DropoutConfig()
    layer_norm: NormPlace = shape_setting(
        NormPlace.POST, "Layer norm placement: post- or pre-norm."
    )
    encoding: Encoding = shape_setting(
        Encoding.RELATIVE,
        "Positional encoding: the paper's (relative) or a baseline's.",
        only_with=_TRANSFORMER,
    )
    num_positions: int | None = shape_setting(
        None,
        "Table size of a learned encoding. Larger distances share the last entry. "
        "none means train.segment_len + train.mem_len.",
        at_least=2,
        flag=False,
        only_with=_LEARNED,
    )
    untie_r: bool = shape_setting(
        False,
        "Separate biases u and v (r_w_bias, r_r_bias) for each layer, instead of shared ones.",
        only_with=_RELATIVE,
    )
    tie_positions: bool = shape_setting(
        False,
        "Position keys use the key matrix, and u and v are the query of distance 0.",
        only_with=_RELATIVE | _TRANSFORMER,
        not_with=("untie_r",),
    )
    tie_weight: bool = shape_setting(
        True, "Weight tying: embedding and softmax share their tables."
    )
    cutoffs: tuple[int, ...] = shape_setting(
        (),
        "First token of each tail cluster of the adaptive softmax. If empty, the softmax is full.",
    )
    div_val: int = shape_setting(
        1,
        "Adaptive embedding: cluster c has size d_embed // div_val**c.",
        at_least=1,
        at_most=1 << 20,
    )
    tie_projs: tuple[bool, ...] = shape_setting(
        (), "For each cluster, whether softmax and embedding share a projection. If empty, none do."
    )
    init_std: float = setting(0.02, "Standard deviation of initial weights.", at_least=0)
    projection_init_std: float = setting(
        0.01,
        "Standard deviation of initial projections of embedding and softmax.",
        at_least=0,
        flag=False,
    )
    dtype: DType = setting(DType.FLOAT32, "Compute dtype. Parameters stay float32.")
    attention: AttentionPath = free_setting(
        AttentionPath.AUTO, "Attention implementation. All give the same results."
    )
    remat: Remat = free_setting(
        Remat.AUTO,
        "Rematerialization (activation checkpointing): what the backward pass recomputes "
        "instead of storing it.",
    )
    compat: CompatConfig = CompatConfig()

    @property
    def embed_width(self) -> int:
        """Embedding size of the first cluster."""
        return self.d_embed or self.d_model

    @property
    def n_cluster(self) -> int:
        """C: the head and the tails."""
        return len(self.cutoffs) + 1

    @property
    def has_projections(self) -> bool:
        """Returns whether embeddings are projected to d_model.

        With div_val > 1 they always are, otherwise only if the sizes differ.
        """
        return self.div_val > 1 or self.embed_width != self.d_model

    @property
    def table_size(self) -> int:
        """Entries in the table of a learned encoding: `num_positions`.

        Raises `UserError` if it is None.
        """
        if self.num_positions is None:
            raise UserError(
                f"model.num_positions must be set for model.encoding={self.encoding}, got none. "
                "Set it, or use ExperimentConfig.resolved()."
            )
        return self.num_positions

    def clamp(self, clamp_len: int | None) -> int | None:
        """Returns the maximum distance, as limited by `clamp_len` and the table's size, or None."""
        if not self.encoding.is_learned:
            return clamp_len
        longest = self.table_size - 1
        if clamp_len is None:
            return longest
        return min(clamp_len, longest)

    def cluster_width(self, cluster: int) -> int:
        """Embedding size of a cluster."""
        return self.embed_width // self.div_val**cluster

    def with_encoding(self, encoding: Encoding) -> "ModelConfig":
        """Returns a copy with this encoding, and defaults for the settings that it does not use.

        The table size of a learned encoding follows from the training lengths again:
        `ExperimentConfig.resolved`.
        """
        values: dict[str, Any] = {}
        for leaf in leaves(ModelConfig):
            encodings = leaf.setting.only_with.get("encoding", tuple(Encoding))
            if encoding not in encodings:
                values[leaf.name] = leaf.default
        values["encoding"] = encoding
        values["num_positions"] = None
        return replace(self, values)

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or settings are incompatible."""
        # Checked first, because the other errors print the cutoffs, and cluster sizes are powers of
        # their number.
        require(
            len(self.cutoffs) <= _MAX_CUTOFFS,
            f"model.cutoffs must have at most {_MAX_CUTOFFS:,} entries, got {len(self.cutoffs):,}",
        )
        super().validate()
        require(
            self.d_model % 2 == 0,
            f"model.d_model must be even, because sinusoids come in pairs, got {self.d_model}",
        )
        require(
            self.network is Network.TRANSFORMER_XL or not self.dropout.qkv,
            f"model.dropout.qkv must be 0 for model.network={self.network}, got "
            f"{self.dropout.qkv}. Only --model.network={Network.TRANSFORMER_XL} has queries, keys "
            "and values.",
        )

        is_increasing = list(self.cutoffs) == sorted(set(self.cutoffs))
        require(
            is_increasing and min(self.cutoffs, default=1) > 0,
            f"model.cutoffs must be positive and increase, got {format_value(self.cutoffs)}",
        )
        require(
            len(self.tie_projs) in (0, self.n_cluster),
            f"model.tie_projs must be empty or have an entry for each of {self.n_cluster} "
            f"clusters of model.cutoffs, got {len(self.tie_projs)} entries",
        )
        require(
            self.div_val == 1 or self.cutoffs,
            f"model.div_val must be 1 if model.cutoffs is empty, got {self.div_val}. "
            "Smaller tails require cutoffs.",
        )
        last = self.n_cluster - 1
        require(
            self.cluster_width(last) >= 1,
            f"model.div_val is too large, got {self.div_val}: cluster {last} would have size 0 of "
            f"{self.embed_width}",
        )

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Raises `UserError` if the clusters do not match a vocabulary of `vocab_size` tokens."""
        require(
            not self.cutoffs or self.cutoffs[-1] < vocab_size,
            f"model.cutoffs must be less than the vocabulary size ({vocab_size}), got "
            f"{format_value(self.cutoffs)}. Lower the last cutoff.",
        )
