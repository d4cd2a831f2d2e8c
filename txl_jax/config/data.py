"""Settings of the text and its tokens."""

import dataclasses
import enum

from txl_jax.config.config_tree import Config, free_setting, require, setting

__all__ = [
    "CorpusName",
    "DataConfig",
    "Heldout",
    "LineMark",
    "Newlines",
    "Order",
    "Roll",
    "Tokenizer",
    "TokenizerConfig",
]


class CorpusName(enum.StrEnum):
    """Corpora."""

    ENWIK8 = "enwik8"
    TEXT8 = "text8"
    WIKITEXT103 = "wikitext103"
    WIKITEXT2 = "wikitext2"
    PTB = "ptb"
    LM1B = "lm1b"  # One Billion Word.
    TEXT = "text"  # The user's own files.
    PYTHON_STDLIB = "python_stdlib"  # Source text of the standard library of this Python.


class Newlines(enum.StrEnum):
    """Treatment of newline bytes."""

    KEEP = "keep"
    DROP = "drop"  # Like the original's preparation of enwik8 (V = 204 instead of 205).


class Tokenizer(enum.StrEnum):
    """Kind of tokens."""

    BYTE = "byte"
    # A Unicode character of UTF-8 text.
    CHAR = "char"
    # Words between white space.
    WORD = "word"
    # Parts of words, by a tokenizer.json that you pass or that is trained on the text. It requires
    # the package tokenizers.
    SUBWORD = "subword"
    # Ready-made ids in .npy or .bin files.
    ID = "id"


class LineMark(enum.StrEnum):
    """Token that marks the end of a line, for word tokens."""

    # <eos> after each line: WikiText and PTB.
    EOS = "eos"
    # One <S> between sentences: One Billion Word, like the original PyTorch release.
    S = "s"
    # <S> before and after each sentence: the original TensorFlow release, which also scores the <S>
    # after an <S>.
    DOUBLE_S = "double_s"
    # No token. A newline counts as white space.
    NONE = "none"


class Heldout(enum.StrEnum):
    """One Billion Word's held-out shards for validation.

    The first shard is always the test split.
    """

    SEPARATE = "separate"  # The second shard, so that nothing is chosen on the test split.
    PUBLISHED = "published"  # The first shard too, like both original releases.


class Order(enum.StrEnum):
    """Order of the training split in an epoch."""

    # The order of the file.
    STREAM = "stream"
    # A different order of the lines in each epoch, for One Billion Word, whose lines have no order.
    SENTENCES = "sentences"


class Roll(enum.StrEnum):
    """Rotation of the training split by a random offset in each epoch.

    Segments therefore start at different tokens in each epoch.
    """

    NONE = "none"
    STREAM = "stream"  # The whole training split, before it is cut into rows.
    ROWS = "rows"  # Each row by itself: the partial shuffle of Press (2019).


DEFAULT_SUBWORDS = 8000  # Size of a subword vocabulary that is trained on the text.
_WORDS = {"kind": (Tokenizer.WORD,)}
_SUBWORDS = {"kind": (Tokenizer.SUBWORD, Tokenizer.ID)}


@dataclasses.dataclass(frozen=True)
class TokenizerConfig(Config, prefix="data.tokenizer."):
    """Tokenizer: from text to token ids."""

    kind: Tokenizer = setting(
        Tokenizer.BYTE,
        "Kind of tokens. id means ready-made token ids in .npy or .bin files.",
        shapes_tokens=True,
    )
    newlines: Newlines = setting(
        Newlines.KEEP,
        "Byte tokens: keep or drop newlines.",
        shapes_tokens=True,
        only_with={"kind": (Tokenizer.BYTE,)},
    )
    line_mark: LineMark = setting(
        LineMark.EOS,
        "Word tokens: token that marks the end of a line.",
        shapes_tokens=True,
        only_with=_WORDS,
    )
    min_count: int = setting(
        1,
        "Character and word tokens: minimum count in the training split. "
        "Rarer tokens become <unk>.",
        at_least=1,
        shapes_tokens=True,
        only_with={"kind": (Tokenizer.CHAR, Tokenizer.WORD)},
        not_with=("vocab_file",),
    )
    vocab_file: str | None = free_setting(
        None,
        "Word tokens: vocabulary file with one word per line. "
        "none builds it from the training split.",
        path=True,
        only_with=_WORDS,
    )
    hf_file: str | None = free_setting(
        None,
        "Subword tokens: a tokenizer.json. none trains one on the training split. Ready-made ids: "
        "the tokenizer.json that made them.",
        path=True,
        only_with=_SUBWORDS,
    )
    vocab_size: int | None = setting(
        None,
        f"Vocabulary size. none means {DEFAULT_SUBWORDS:,} for subwords trained on the text. For "
        "ready-made ids it means the size of the tokenizer.json if set, otherwise the largest id "
        "plus one.",
        at_least=1,
        shapes_tokens=True,
        only_with=_SUBWORDS,
        not_with=("hf_file",),
    )


@dataclasses.dataclass(frozen=True)
class DataConfig(Config, prefix="data."):
    """The text, and the order in which it is read."""

    corpus: CorpusName = setting(CorpusName.ENWIK8, "Corpus. text means your own files.")
    # Paths may change when a run is resumed: the digest of the text decides whether it is the same.
    file: str | None = free_setting(
        None,
        "Your own text, or part of a single-file corpus: one file, split 90/5/5 by position. "
        "For your own text also a directory or glob pattern, whose last files become the "
        "validation and test splits, a twentieth each.",
        path=True,
    )
    train: tuple[str, ...] = free_setting((), "Your own text: training files, in order.", path=True)
    valid: tuple[str, ...] = free_setting((), "Your own text: validation files.", path=True)
    test: tuple[str, ...] = free_setting((), "Your own text: test files.", path=True)
    json_field: str | None = free_setting(
        None,
        "Read files and --input as JSON lines, with a document in this field. "
        "none reads them as plain text.",
    )
    tokenizer: TokenizerConfig = TokenizerConfig()
    reset_at: str | None = setting(
        None,
        "Text of the token that ends a document. The memory is reset after it. "
        "none carries the memory across documents.",
        shapes_tokens=True,
    )
    heldout: Heldout = setting(
        Heldout.SEPARATE,
        "One Billion Word: held-out shard for validation.",
        only_with={"corpus": (CorpusName.LM1B,)},
    )
    order: Order = setting(Order.STREAM, "Order of the training split in an epoch.")
    roll: Roll = setting(
        Roll.NONE, "Rotate the training split, or each row, by a random offset each epoch."
    )

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or settings are incompatible."""
        super().validate()
        self._validate_files()
        kind = self.tokenizer.kind
        require(
            kind is not Tokenizer.ID or self.corpus is CorpusName.TEXT,
            f"data.corpus must be {CorpusName.TEXT} for data.tokenizer.kind={kind}, got "
            f"{self.corpus}",
        )
        if self.order is Order.SENTENCES:
            line_mark = self.tokenizer.line_mark
            require(
                kind is Tokenizer.WORD and line_mark is not LineMark.NONE,
                f"data.order must be {Order.STREAM} for data.tokenizer.kind={kind} and "
                f"data.tokenizer.line_mark={line_mark}, got {self.order}. Sentence boundaries "
                "are the line marks of word tokens.",
            )
            require(
                self.roll is Roll.NONE,
                f"data.roll must be {Roll.NONE} for data.order={self.order}, got {self.roll}. "
                "Shuffled sentences need no roll.",
            )

    def _validate_files(self) -> None:
        lists = [f"data.{name}" for name in ("train", "valid", "test") if getattr(self, name)]
        if self.corpus is not CorpusName.TEXT:
            require(
                not lists,
                f"data.corpus must be {CorpusName.TEXT} for {', '.join(lists)}, got {self.corpus}",
            )
            return

        if self.file:
            sources = ["data.file", *lists]
            is_complete = not lists
        else:
            sources = lists
            # Only ready-made ids may lack a test split.
            lacks_test = lists == ["data.train", "data.valid"]
            is_complete = len(lists) == 3 or (lacks_test and self.tokenizer.kind is Tokenizer.ID)
        require(
            is_complete,
            "your own text must be passed as --data.file=PATH, or as three lists, --data.train=... "
            f"--data.valid=... --data.test=..., got {', '.join(sources) or 'none of them'}",
        )
