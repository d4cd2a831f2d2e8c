"""The whole truth of a run: a tree of frozen dataclasses, and the relations its fields must keep.

Nothing here imports jax. `ExperimentConfig` is the root (`txl_jax.config_tree` walks it); `experiments.flag_tree` turns
every leaf into a flag `--group.leaf` whose help text is the comment beside the field, so users read the comments here.
`validate()` raises `ValueError` with both numbers of a conflict, before any work starts.

Letters: B batch, L segment length, M memory length, K = M + L keys, D model width, H heads, E head
width, F inner width, V vocabulary, N layers, C clusters of the adaptive softmax, S segments per call.
"""

import dataclasses
import enum
from typing import Any


class DType(enum.StrEnum):
    """Type of the activations, of the memory and of the matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"  # For checks against reference values; needs JAX_ENABLE_X64.


class Encoding(enum.StrEnum):
    """How the model knows where a token stands."""

    RELATIVE = "relative"  # The paper's: the distance enters the attention scores.
    SHAW = "shaw"  # A learned key for each distance, per layer and head (Shaw et al., 2018).
    VASWANI = "vaswani"  # Sinusoids added to the embedding (Vaswani et al., 2017).
    AL_RFOU = "al_rfou"  # Learned vectors added before each layer (Al-Rfou et al., 2018).

    @property
    def is_relative(self) -> bool:
        """Whether scores tell how far a key is; else a token has a place in its segment, and none beyond it."""
        return self in (Encoding.RELATIVE, Encoding.SHAW)

    @property
    def is_learned(self) -> bool:
        """Whether there is a table of positions, of a size that the parameters have."""
        return self in (Encoding.SHAW, Encoding.AL_RFOU)


class Network(enum.StrEnum):
    """What stands between embedding and softmax."""

    TRANSFORMER_XL = "transformer_xl"
    LSTM = "lstm"  # N layers of D cells, a baseline; it reads no setting of attention, and no length but L.


class NormPlace(enum.StrEnum):
    """Where the layer norm of a residual branch stands."""

    POST = "post"  # LN(x + f(x)), as the paper.
    PRE = "pre"  # x + f(LN(x)).


class Remat(enum.StrEnum):
    """What the backward pass of a layer recomputes instead of keeping."""

    NONE = "none"
    DOTS = "dots"  # Keep matrix products with weights, recompute the rest.
    FULL = "full"  # Keep only each layer's input.


class LossPart(enum.StrEnum):
    """Which positions of a training segment are scored (table 6 of the paper)."""

    FULL = "full"
    HALF = "half"  # The last L - L // 2 positions.


class MemoryStart(enum.StrEnum):
    """What a row's memory holds before its first segment."""

    MASKED = "masked"  # Unfilled slots take no part in the softmax.
    ZEROS = "zeros"  # Zero rows that are attended to.


class MemoryType(enum.StrEnum):
    """Type of the keys and values that evaluation and generation store."""

    COMPUTED = "computed"  # As they are computed: model.dtype.
    BFLOAT16 = "bfloat16"  # Half the memory of float32; each stored number moves by up to one part in 256.


class ShawTerms(enum.StrEnum):
    """Which terms of the score a model with `Encoding.SHAW` has."""

    PAPER = "paper"  # (a) and (b): content, and content with distance.
    ORIGINAL = "original"  # Also u with content, (c), and a learned number per distance in place of (d).


class Window(enum.StrEnum):
    """How many keys a query sees under same_length, itself included."""

    MEM_LEN = "mem_len"
    MEM_LEN_PLUS_ONE = "mem_len_plus_one"


class ScheduleOffset(enum.StrEnum):
    """Where the cosine of the learning rate starts."""

    AFTER_WARMUP = "after_warmup"  # At the end of the warm-up: no jump.
    ORIGINAL = "original"  # At step 0, so the rate jumps down where the warm-up ends.


class CorpusName(enum.StrEnum):
    """Where the text comes from."""

    ENWIK8 = "enwik8"
    TEXT8 = "text8"
    WIKITEXT103 = "wikitext103"
    WIKITEXT2 = "wikitext2"
    PTB = "ptb"
    LM1B = "lm1b"  # One Billion Word.
    TEXT = "text"  # The user's own files.
    PYTHON_STDLIB = "python_stdlib"  # Source text of the standard library of this Python.


class Newlines(enum.StrEnum):
    """What becomes of newline bytes."""

    KEEP = "keep"
    DROP = "drop"  # As the original's preparation of enwik8 (V = 204 instead of 205).


class Tokenizer(enum.StrEnum):
    """What a token is."""

    BYTE = "byte"
    CHAR = "char"  # A Unicode character of UTF-8 text.
    WORD = "word"  # What stands between white space.
    SENTENCEPIECE = "sentencepiece"  # Pieces of words; needs the package sentencepiece.


class LineMark(enum.StrEnum):
    """Which token stands for the end of a line, where tokens are words or pieces."""

    EOS = "eos"  # <eos> after each line: WikiText and PTB.
    S = "s"  # One <S> between sentences: One Billion Word, as the original PyTorch scores it.
    DOUBLE_S = "double_s"  # <S> before and after each: the original TensorFlow, which scores <S> after <S> too.
    NONE = "none"  # A line's end is white space.


class EmptyEnd(enum.StrEnum):
    """What becomes of empty lines at the end of own text, each of which would be scored as a line mark."""

    REFUSE = "refuse"
    KEEP = "keep"  # WikiText's files end so.


class Heldout(enum.StrEnum):
    """Which shards of One Billion Word's held-out text validate; the first one is always the test text."""

    SEPARATE = "separate"  # The second shard: nothing is chosen on the test text.
    PUBLISHED = "published"  # The first one too, as both original releases.


class Order(enum.StrEnum):
    """How the training text is strung together in an epoch."""

    STREAM = "stream"  # As it stands.
    SENTENCES = "sentences"  # Lines in another order each epoch: One Billion Word, whose lines have no order.


class Roll(enum.StrEnum):
    """What is turned round by a random number of tokens in each epoch, so that segments begin elsewhere."""

    NONE = "none"
    STREAM = "stream"  # The whole training text, before it is cut into rows.
    ROWS = "rows"  # Each row by itself: the partial shuffle of Press (2019).


class EpochMemory(enum.StrEnum):
    """What the memory holds where an epoch begins again."""

    EMPTIED = "emptied"  # Nothing: the original PyTorch.
    CARRIED = "carried"  # The end of the epoch before: the original TensorFlow.


# A field marked so may differ when a run is resumed: it does not touch the training trajectory.
FREE_ON_RESUME = {"free_on_resume": True}


def free(default: Any) -> Any:
    """A field that a resumed run may change."""
    return dataclasses.field(default=default, metadata=FREE_ON_RESUME)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and parts of the network. Lengths are not here: the parameters do not depend on them."""

    network: Network = Network.TRANSFORMER_XL  # What stands between embedding and softmax.
    n_layer: int = 12  # N, layers.
    d_model: int = 512  # D, width of the residual stream.
    n_head: int = 8  # H, attention heads; H * E need not be D.
    d_head: int = 64  # E, width of a head.
    d_inner: int = 2048  # F, inner width of the feed-forward part.
    d_embed: int = 0  # Width of the first cluster's embedding; 0: d_model.
    dropout: float = 0.1  # On embedding, positions, attention output, both feed-forward layers, last layer.
    attention_dropout: float = 0.0  # On the attention probabilities (the original's dropatt).
    input_dropout: float = -1.0  # On embedding and positions; below 0: as dropout.
    output_dropout: float = -1.0  # On what the softmax reads; below 0: as dropout.
    locked_dropout: bool = False  # One mask for all positions of a row's segment, except on attention probabilities.
    qkv_dropout: float = 0.0  # On queries, keys and values.
    embedding_dropout: float = 0.0  # Part of the words that are left out wherever they stand in a batch.
    weight_dropout: float = 0.0  # Part of the weights of attention and feed-forward that are left out of an update.
    layer_norm: NormPlace = NormPlace.POST  # Where the layer norm stands.
    encoding: Encoding = Encoding.RELATIVE  # How positions are told: the paper's way, or one of those it compares with.
    n_position: int = 0  # shaw, al_rfou: distances that their tables hold; greater ones share the last.
    untie_r: bool = False  # u and v (r_w_bias, r_r_bias) per layer instead of shared by all.
    tie_positions: bool = False  # Position codes go through the key's matrix; u and v are the query of distance 0.
    tie_weight: bool = True  # Embedding and softmax share their tables.
    cutoffs: tuple[int, ...] = ()  # First token of each tail cluster of the adaptive softmax; empty: full softmax.
    div_val: int = 1  # Cluster c is embedded in d_embed // div_val**c numbers.
    tie_projs: tuple[bool, ...] = ()  # Per cluster: softmax shares the embedding's projection; empty: none does.
    init_std: float = 0.02  # Standard deviation of initial weights.
    projection_init_std: float = 0.01  # The same for the projections of embedding and softmax.
    dtype: DType = DType.FLOAT32  # Compute type; parameters stay float32.
    remat: Remat = Remat.NONE  # What the backward pass recomputes to save memory.

    @property
    def embed_width(self) -> int:
        return self.d_embed or self.d_model

    @property
    def n_cluster(self) -> int:
        """C: the head and the tails."""
        return len(self.cutoffs) + 1

    @property
    def has_projections(self) -> bool:
        """Whether embeddings are projected to d_model; with div_val > 1 they are, even where the width is d_model."""
        return self.div_val > 1 or self.embed_width != self.d_model

    @property
    def input_rate(self) -> float:
        """Dropout on embedding and positions."""
        return self.dropout if _is_unset(self.input_dropout) else self.input_dropout

    @property
    def output_rate(self) -> float:
        """Dropout on what the softmax reads."""
        return self.dropout if _is_unset(self.output_dropout) else self.output_dropout

    def clamp(self, clamp_len: int) -> int:
        """The distance that all above it share with it, as `clamp_len` and the tables' size limit it; 0: none."""
        if not self.encoding.is_learned:
            return clamp_len
        longest = self.n_position - 1
        return min(clamp_len, longest) if clamp_len > 0 else longest

    def cluster_width(self, cluster: int) -> int:
        """Width of a cluster's embedding."""
        return self.embed_width // self.div_val**cluster

    def validate(self) -> None:
        for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "div_val"):
            _require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}; it must be at least 1")
        _require(self.d_model % 2 == 0, f"model.d_model is {self.d_model}; sinusoids come in pairs, so it must be even")
        _require(self.d_embed >= 0, f"model.d_embed is {self.d_embed}; give a width, or 0 for d_model")
        for name in ("dropout", "attention_dropout", "qkv_dropout", "embedding_dropout", "weight_dropout"):
            rate = getattr(self, name)
            _require(0 <= rate < 1, f"model.{name} is {rate}; it must be at least 0 and below 1")
        for name in ("input_dropout", "output_dropout"):
            rate = getattr(self, name)
            _require(rate < 1, f"model.{name} is {rate}; it must be below 1, or below 0 for model.dropout")
        _require(
            self.network is Network.TRANSFORMER_XL or self.encoding is Encoding.RELATIVE,
            f"model.encoding is {self.encoding} and model.network is {self.network}, which has none; leave it out",
        )
        for name in ("qkv_dropout", "weight_dropout", "tie_positions"):
            _require(
                self.network is Network.TRANSFORMER_XL or not getattr(self, name),
                f"model.{name} is {getattr(self, name)} and model.network is {self.network}, which has none",
            )
        _require(
            list(self.cutoffs) == sorted(set(self.cutoffs)) and all(c > 0 for c in self.cutoffs),
            f"model.cutoffs are {list(self.cutoffs)}; they must be positive and increase",
        )
        _require(
            len(self.tie_projs) in (0, self.n_cluster),
            f"model.tie_projs has {len(self.tie_projs)} entries and model.cutoffs make {self.n_cluster} clusters; "
            "give one entry per cluster, or none",
        )
        _require(
            self.div_val == 1 or self.cutoffs,
            f"model.div_val is {self.div_val} and model.cutoffs is empty; narrower tails need cutoffs",
        )
        _require(
            self.encoding is Encoding.RELATIVE or not self.untie_r,
            f"model.untie_r is on and model.encoding is {self.encoding}, which has no u and v",
        )
        _require(
            not self.tie_positions or (self.encoding is Encoding.RELATIVE and not self.untie_r),
            f"model.tie_positions is on, model.encoding is {self.encoding} and model.untie_r is {self.untie_r}; it goes "
            f"with {Encoding.RELATIVE}, and leaves no u and v to untie",
        )
        _require(
            self.n_position >= 2 if self.encoding.is_learned else self.n_position == 0,
            f"model.n_position is {self.n_position} and model.encoding is {self.encoding}; a learned table needs at "
            "least 2 distances (segment and memory of training together), and the other encodings have none, 0",
        )
        last = self.n_cluster - 1
        _require(
            self.cluster_width(last) >= 1,
            f"model.div_val {self.div_val} leaves cluster {last} no width of the embedding's {self.embed_width}",
        )

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Raises `ValueError` if the clusters do not fit a vocabulary of `vocab_size` tokens."""
        if self.cutoffs:
            _require(
                self.cutoffs[-1] < vocab_size,
                f"model.cutoffs end at {self.cutoffs[-1]} and the vocabulary has {vocab_size} tokens; "
                "the last cutoff must lie below that",
            )


@dataclasses.dataclass(frozen=True)
class CompatConfig:
    """What differs between implementations of the same model; `COMPAT_PRESETS` names the combinations."""

    memory_start: MemoryStart = MemoryStart.MASKED  # What the memory holds before the first segment.
    same_length_window: Window = Window.MEM_LEN  # Keys that a query sees under same_length.
    layer_norm_eps: float = 1e-5  # Added to the variance.
    shaw_terms: ShawTerms = ShawTerms.PAPER  # encoding=shaw: which terms the score has.
    final_norm: bool = True  # With layer_norm=pre: a layer norm after the last layer.
    schedule_offset: ScheduleOffset = ScheduleOffset.AFTER_WARMUP  # Where the cosine starts.
    lr_floor: float = 0.0  # Last learning rate as a fraction of the peak.

    def window(self, mem_len: int, *, same_length: bool) -> int | None:
        """Keys that a query sees at most, itself included; None: as many as there are."""
        return mem_len + (self.same_length_window is Window.MEM_LEN_PLUS_ONE) if same_length else None

    def validate(self) -> None:
        _require(self.layer_norm_eps > 0, f"compat.layer_norm_eps is {self.layer_norm_eps}; it must be positive")
        _require(0 <= self.lr_floor <= 1, f"compat.lr_floor is {self.lr_floor}; it is a fraction of the peak, 0 to 1")


COMPAT_PRESETS = {
    "ours": CompatConfig(),
    # The authors' PyTorch release.
    "pytorch": CompatConfig(shaw_terms=ShawTerms.ORIGINAL, final_norm=False, schedule_offset=ScheduleOffset.ORIGINAL),
    # The authors' TensorFlow release, as run on TPU.
    "tf": CompatConfig(
        memory_start=MemoryStart.ZEROS,
        same_length_window=Window.MEM_LEN_PLUS_ONE,
        layer_norm_eps=1e-12,
        final_norm=False,
        lr_floor=0.01,
    ),
    # Hugging Face's TransfoXLLMHeadModel.
    "hf": CompatConfig(memory_start=MemoryStart.ZEROS, final_norm=False),
}


# Settings of DataConfig that make the ids of a text what they are: a trained run keeps them.
TOKEN_SETTINGS = ("tokenizer", "newlines", "lower_case", "line_mark", "min_count", "sentencepiece_vocab")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, and how it is read."""

    corpus: CorpusName = CorpusName.ENWIK8  # Where the text comes from.
    # Paths may change when a run is resumed: the digest of the text decides whether it is the same.
    file: str = free("")  # One file, split 90/5/5 by position; with enwik8 and text8: a part of the corpus.
    train: tuple[str, ...] = free(())  # Own text: training files, read in this order.
    valid: tuple[str, ...] = free(())  # Own text: validation files.
    test: tuple[str, ...] = free(())  # Own text: test files.
    tokenizer: Tokenizer = Tokenizer.BYTE  # What a token is.
    newlines: Newlines = Newlines.KEEP  # Byte tokens: what becomes of newline bytes.
    lower_case: bool = False  # Character, word and piece tokens: A is read as a.
    line_mark: LineMark = LineMark.EOS  # Word and piece tokens: which token stands for the end of a line.
    empty_end: EmptyEnd = EmptyEnd.REFUSE  # Own text with line marks: what becomes of empty lines at its end.
    min_count: int = 1  # Character and word tokens: rarer ones in the training text become <unk>.
    vocab_file: str = free("")  # Word tokens: take the words from this file, one a line; none: count the training text.
    sentencepiece_model: str = free("")  # Piece tokens: a trained model; none: one is trained on the training text.
    sentencepiece_vocab: int = 8000  # Piece tokens: vocabulary of a model that is trained here.
    heldout: Heldout = Heldout.SEPARATE  # One Billion Word: which held-out shard validates.
    order: Order = Order.STREAM  # How the training text is strung together in an epoch.
    roll: Roll = Roll.NONE  # What is turned round by a random number of tokens in each epoch.
    epoch_memory: EpochMemory = EpochMemory.EMPTIED  # What the memory holds where an epoch begins again.

    def validate(self) -> None:
        own = {name: getattr(self, name) for name in ("train", "valid", "test")}
        given = [f"data.{name}" for name, files in own.items() if files]
        missing = [f"data.{name}" for name, files in own.items() if not files]
        if self.corpus is CorpusName.TEXT:
            _require(
                bool(self.file) != bool(given),
                f"own text is one file (data.file is {self.file!r}) or three lists (given: {', '.join(given) or 'none'});"
                " give exactly one of the two, --data.file=PATH or --data.train=... --data.valid=... --data.test=...",
            )
            _require(not given or not missing, f"{', '.join(given)} given without {', '.join(missing)}")
        else:
            _require(not given, f"{', '.join(given)} given, but data.corpus is {self.corpus}; they go with text")
            _require(
                not self.file or self.corpus in (CorpusName.ENWIK8, CorpusName.TEXT8),
                f"data.file is {self.file!r}, but data.corpus is {self.corpus}; a part of a corpus is read for enwik8 "
                "and text8, and any other file with --data.corpus=text",
            )
        for name, usual, corpus in (
            ("empty_end", EmptyEnd.REFUSE, CorpusName.TEXT),
            ("heldout", Heldout.SEPARATE, CorpusName.LM1B),
        ):
            _require(
                getattr(self, name) == usual or self.corpus is corpus,
                f"data.{name} is {getattr(self, name)} and data.corpus is {self.corpus}; it goes with {corpus}",
            )
        self._validate_tokens()

    def _validate_tokens(self) -> None:
        """Options of one kind of token are refused beside another, where nothing would read them."""
        lines = self.tokenizer in (Tokenizer.WORD, Tokenizer.SENTENCEPIECE)
        for name, usual, readers in (
            ("newlines", Newlines.KEEP, (Tokenizer.BYTE,)),
            ("line_mark", LineMark.EOS, (Tokenizer.WORD, Tokenizer.SENTENCEPIECE)),
            ("empty_end", EmptyEnd.REFUSE, (Tokenizer.WORD, Tokenizer.SENTENCEPIECE)),
            ("sentencepiece_vocab", 8000, (Tokenizer.SENTENCEPIECE,)),
            ("lower_case", False, (Tokenizer.CHAR, Tokenizer.WORD, Tokenizer.SENTENCEPIECE)),
            ("min_count", 1, (Tokenizer.CHAR, Tokenizer.WORD)),
            ("vocab_file", "", (Tokenizer.WORD,)),
            ("sentencepiece_model", "", (Tokenizer.SENTENCEPIECE,)),
        ):
            _require(
                getattr(self, name) == usual or self.tokenizer in readers,
                f"data.{name} is {getattr(self, name)} and data.tokenizer is {self.tokenizer}, which does not read it; "
                f"it goes with {', '.join(readers)}",
            )
        for name in ("min_count", "sentencepiece_vocab"):
            _require(getattr(self, name) >= 1, f"data.{name} is {getattr(self, name)}; it must be at least 1")
        _require(
            self.tokenizer is not Tokenizer.SENTENCEPIECE or self.line_mark in (LineMark.EOS, LineMark.NONE),
            f"data.line_mark is {self.line_mark} and data.tokenizer is {self.tokenizer}, whose models know one mark, "
            f"{LineMark.EOS}; give that, or {LineMark.NONE}",
        )
        _require(
            not self.sentencepiece_model or self.sentencepiece_vocab == 8000,
            f"data.sentencepiece_vocab is {self.sentencepiece_vocab} and data.sentencepiece_model is "
            f"{self.sentencepiece_model!r}; a model is trained here or given, not both",
        )
        _require(
            not self.vocab_file or self.min_count == 1,
            f"data.min_count is {self.min_count} and data.vocab_file is {self.vocab_file!r}; words are counted or "
            "given, not both",
        )
        _require(
            self.order is not Order.SENTENCES or (lines and self.line_mark is not LineMark.NONE),
            f"data.order is {self.order} and there are no line marks (data.tokenizer {self.tokenizer}, data.line_mark "
            f"{self.line_mark}); sentences are found by them",
        )
        _require(
            self.order is not Order.SENTENCES or self.roll is Roll.NONE,
            f"data.order is {self.order} and data.roll is {self.roll}; shuffled sentences need no roll",
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam with linear warm-up, cosine decay and clipping by the global norm."""

    learning_rate: float = 2.5e-4  # Peak learning rate.
    warmup_steps: int = 0  # Updates over which the rate rises linearly from 0.
    adam_b1: float = 0.9  # Decay of the first moment.
    adam_b2: float = 0.999  # Decay of the second moment.
    adam_eps: float = 1e-8  # Added to the root of the second moment.
    clip_norm: float = 0.25  # Largest global norm of the gradient.
    decay_steps: int = 0  # Updates after which the rate is at its floor, and stays there; 0: train.steps.
    l2: float = 0.0  # This times the parameters is added to the clipped gradient: the weight decay of PyTorch's Adam.
    weight_decay: float = 0.0  # Times the learning rate: the part by which matrices shrink in an update (AdamW's).
    embedding_rate: float = 1.0  # The embedding's peak learning rate, as a multiple of all others'; one floor for all.

    def validate(self) -> None:
        for name in ("learning_rate", "adam_eps", "clip_norm"):
            _require(getattr(self, name) > 0, f"optimizer.{name} is {getattr(self, name)}; it must be positive")
        for name in ("adam_b1", "adam_b2"):
            decay = getattr(self, name)
            _require(0 <= decay < 1, f"optimizer.{name} is {decay}; it must be at least 0 and below 1")
        for name in ("decay_steps", "l2", "weight_decay"):
            _require(getattr(self, name) >= 0, f"optimizer.{name} is {getattr(self, name)}; it cannot be negative")
        _require(self.embedding_rate > 0, f"optimizer.embedding_rate is {self.embedding_rate}; it must be positive")
        _require(self.warmup_steps >= 0, f"optimizer.warmup_steps is {self.warmup_steps}; it cannot be negative")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh, in all those in use. They change no number but by rounding."""

    data: int = free(0)  # Copies of the model, each with its rows of the batch; 0: all devices that the others leave.
    fsdp: int = free(1)  # Devices that share the parameters of one copy.
    model: int = free(1)  # Devices that share heads, inner width and vocabulary.

    def validate(self) -> None:
        _require(self.data >= 0, f"mesh.data is {self.data}; give a number of devices, or 0 for all")
        for name in ("fsdp", "model"):
            _require(getattr(self, name) >= 1, f"mesh.{name} is {getattr(self, name)}; it must be at least 1")


def _validate_span(group: str, span: "TrainConfig | EvalConfig") -> None:
    """The checks that training and evaluation lengths share."""
    for name in ("batch_size", "segment_len", "segments_per_call"):
        _require(getattr(span, name) >= 1, f"{group}.{name} is {getattr(span, name)}; it must be at least 1")
    for name in ("mem_len", "clamp_len"):
        _require(getattr(span, name) >= 0, f"{group}.{name} is {getattr(span, name)}; it cannot be negative")
    _require(
        0 <= span.stride <= span.segment_len,
        f"{group}.stride is {span.stride} and {group}.segment_len is {span.segment_len}; the stride lies between 1 and "
        "that, or is 0 for all of it",
    )
    _require(
        not (span.stride and span.mem_len),
        f"{group}.stride is {span.stride} and {group}.mem_len is {span.mem_len}; what a segment reads again is not to be "
        "remembered too, so give one of them",
    )
    _require(
        not span.same_length or span.mem_len > 0,
        f"{group}.same_length is on and {group}.mem_len is {span.mem_len}; the window would be empty",
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training walk, and what happens how often. All intervals count updates, one per segment."""

    steps: int = 400_000  # Updates in all.
    batch_size: int = 22  # B, rows over all devices.
    batch_chunks: int = 1  # Parts of the rows that go through the model in turn (gradient accumulation).
    segment_len: int = 512  # L, tokens per row and update (the original's tgt_len, and with a stride its ext_len too).
    mem_len: int = 512  # M, slots of memory.
    stride: int = 0  # Tokens of a segment that are new and scored, at its end; those before are read again; 0: all.
    clamp_len: int = 0  # Distances above this share one position code; 0: off.
    same_length: bool = False  # Every query sees the same number of keys.
    loss: LossPart = LossPart.FULL  # Positions of the segment that are scored.
    activation_l2: float = 0.0  # Added to the loss: this times the mean square of the last layer's outputs (AR).
    temporal_l2: float = 0.0  # The same of their change from each position to the next (TAR).
    adversarial: float = 0.0  # Words' vectors are pushed off by this part of their length (AdvSoft); full softmax only.
    segments_per_call: int = 1  # S, updates per dispatch; larger hides the host's work, the numbers stay the same.
    log_every: int = free(200)  # Updates between progress lines.
    eval_every: int = free(4000)  # Updates between evaluations on the validation text.
    checkpoint_every: int = free(4000)  # Updates between checkpoints.
    keep_checkpoints: int = free(2)  # Newest checkpoints kept, beside the best.
    patience: int = free(0)  # Evaluations in a row without a better loss that end the training; 0: none do.

    @property
    def new_tokens(self) -> int:
        """Tokens of a row that an update reads for the first time."""
        return self.stride or self.segment_len

    def validate(self) -> None:
        _validate_span("train", self)
        _require(
            not self.stride or self.loss is LossPart.FULL,
            f"train.stride is {self.stride} and train.loss is {self.loss}; the stride says what is scored",
        )
        for name in ("activation_l2", "temporal_l2", "adversarial", "patience"):
            _require(getattr(self, name) >= 0, f"train.{name} is {getattr(self, name)}; it cannot be negative")
        _require(
            self.batch_chunks >= 1 and self.batch_size % self.batch_chunks == 0,
            f"train.batch_size is {self.batch_size} and train.batch_chunks is {self.batch_chunks}; the rows must divide evenly",
        )
        _require(self.keep_checkpoints >= 1, f"train.keep_checkpoints is {self.keep_checkpoints}; keep at least 1")
        for name in ("steps", "log_every", "eval_every", "checkpoint_every"):
            interval = getattr(self, name)
            _require(interval >= 1, f"train.{name} is {interval}; it must be at least 1")
            _require(
                interval % self.segments_per_call == 0,
                f"train.{name} is {interval}, no multiple of train.segments_per_call, {self.segments_per_call}",
            )


@dataclasses.dataclass(frozen=True)
class AverageConfig:
    """A mean over updates of the weights, which is what is then scored and kept as the best."""

    start: int = -1  # Updates before the mean begins; below 0: there is none, unless trigger begins it.
    trigger: int = 0  # Begin once validation is worse than the best but of the last so many (AWD-LSTM: 5); 0: never.
    rate: float = 1.0  # Factor on the learning rate from start on.
    decay: float = 1.0  # 1: all weights since the start count alike; below: older ones fade by this with each update.

    @property
    def on(self) -> bool:
        """Whether a mean is kept at all."""
        return self.start >= 0 or self.trigger > 0

    def validate(self) -> None:
        _require(self.trigger >= 0, f"average.trigger is {self.trigger}; it cannot be negative")
        _require(self.rate > 0, f"average.rate is {self.rate}; it must be positive")
        _require(
            self.start >= 0 or self.rate == 1,
            f"average.rate is {self.rate} and average.start is {self.start}; the factor applies from there on, so give it",
        )
        _require(0 < self.decay <= 1, f"average.decay is {self.decay}; it must be above 0 and at most 1")
        _require(
            self.start < 0 or not self.trigger,
            f"average.start is {self.start} and average.trigger {self.trigger}; the mean begins by one of the two",
        )
        _require(
            self.on or self.decay == 1, f"average.decay is {self.decay} and nothing begins a mean; give average.start"
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """The evaluation walk. Lengths are usually not those of training: short segments, long memory."""

    batch_size: int = free(1)  # B, streams read side by side; each starts from an empty memory.
    segment_len: int = free(80)  # L, tokens per row and step.
    mem_len: int = free(2100)  # M, slots of memory.
    stride: int = free(0)  # Without memory: tokens that a window of segment_len scores, at its end; 0: all.
    clamp_len: int = free(820)  # Distances above this share one position code; 0: off.
    same_length: bool = free(True)  # Every query sees the same number of keys.
    segments_per_call: int = free(8)  # S, segments per dispatch.
    memory_type: MemoryType = free(MemoryType.COMPUTED)  # Type of the stored keys and values.
    average_checkpoints: int = free(0)  # Scoring a trained run: the mean of so many newest checkpoints; 0: the best.
    temperature: float = free(1.0)  # Logits are divided by this before a text is scored; full softmax only.
    warmup_tokens: int = free(0)  # Unscored tokens that each row but the first reads first: no cold start.
    valid_tokens: int = free(0)  # Tokens of the validation text scored during training; 0: all.

    def validate(self) -> None:
        _validate_span("eval", self)
        _require(
            self.valid_tokens == 0 or self.valid_tokens >= 2,
            f"eval.valid_tokens is {self.valid_tokens}; give at least 2, or 0 for all",
        )
        _require(
            self.average_checkpoints >= 0,
            f"eval.average_checkpoints is {self.average_checkpoints}; give a number of checkpoints, or 0 for the best",
        )
        _require(self.temperature > 0, f"eval.temperature is {self.temperature}; it must be positive")
        _require(self.warmup_tokens >= 0, f"eval.warmup_tokens is {self.warmup_tokens}; it cannot be negative")
        _require(
            not (self.stride and self.warmup_tokens),
            f"eval.stride is {self.stride} and eval.warmup_tokens is {self.warmup_tokens}; windows have no cold start but "
            "the text's own, so leave them out",
        )


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How text is written."""

    prompt: str = free("")  # Text to go on from; none: the model starts from an empty memory.
    prompt_file: str = free("")  # File whose whole text is the prompt.
    length: int = free(500)  # Tokens to write.
    stop: str = free("")  # Text of one token that ends a sample early; \n is a newline; none: only the length ends it.
    samples: int = free(1)  # Texts written side by side from the same prompt.
    temperature: float = free(1.0)  # Logits are divided by this; 0: always the likeliest token.
    top_k: int = free(40)  # Draw among the k likeliest tokens (40: the paper's appendix E); 0: among all.
    top_p: float = free(1.0)  # Draw among the likeliest tokens that together reach this probability.
    seed: int = free(0)  # The same seed writes the same text.

    def validate(self) -> None:
        _require(not (self.prompt and self.prompt_file), "generate.prompt and generate.prompt_file are both given")
        for name in ("length", "samples"):
            _require(getattr(self, name) >= 1, f"generate.{name} is {getattr(self, name)}; it must be at least 1")
        _require(self.temperature >= 0, f"generate.temperature is {self.temperature}; it cannot be negative")
        _require(self.top_k >= 0, f"generate.top_k is {self.top_k}; give a number of tokens, or 0 for all")
        _require(0 < self.top_p <= 1, f"generate.top_p is {self.top_p}; it must be above 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One run."""

    seed: int = 1111  # Of initial weights, dropout, and the order of the training text.
    model: ModelConfig = ModelConfig()
    compat: CompatConfig = CompatConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    average: AverageConfig = AverageConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()

    def validate(self) -> None:
        """Raises `ValueError`, one sentence with both numbers, for values that cannot go together."""
        for group in dataclasses.fields(self):
            if dataclasses.is_dataclass(group.type):
                getattr(self, group.name).validate()
        _require(
            self.average.start < self.train.steps,
            f"average.start is {self.average.start} and train.steps is {self.train.steps}; the mean would never begin",
        )
        _require(
            self.model.network is Network.TRANSFORMER_XL or not self.train.stride,
            f"train.stride is {self.train.stride} and model.network is {self.model.network}, whose state has read already "
            "what would be read again; leave it out",
        )
        for name, usual in (("eval.temperature", 1.0), ("train.adversarial", 0.0)):
            value = getattr(getattr(self, name.split(".")[0]), name.split(".")[1])
            _require(
                value == usual or not (self.model.cutoffs or self.model.has_projections),
                f"{name} is {value} and the softmax has clusters or projections (model.cutoffs {list(self.model.cutoffs)}, "
                f"model.d_embed {self.model.d_embed}); it goes with a full softmax over d_model",
            )
        _require(
            self.compat.lr_floor <= self.optimizer.embedding_rate,
            f"compat.lr_floor is {self.compat.lr_floor} and optimizer.embedding_rate is {self.optimizer.embedding_rate}; the "
            "embedding's peak would lie below the floor",
        )
        ends, end = self.optimizer.decay_steps, "optimizer.decay_steps"
        _require(
            ends <= self.train.steps,
            f"optimizer.decay_steps is {ends} and train.steps is {self.train.steps}; the decay must end with the training, "
            "or before",
        )
        if not ends:
            ends, end = self.train.steps, "train.steps"
        _require(
            self.optimizer.warmup_steps < ends,
            f"optimizer.warmup_steps is {self.optimizer.warmup_steps} and {end} is {ends}; "
            "the warm-up must end before the rate has fallen",
        )


def _is_unset(rate: Any) -> bool:
    """Whether a rate stands for another; a traced number (`txl_jax.training.together`) stands for itself."""
    return isinstance(rate, int | float) and rate < 0


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)
