"""Settings of the text and its tokens."""

import dataclasses
import enum

from txl_jax.config.config_tree import Config, check_fields, require, setting

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
    DROP = "drop"  # As the original's preparation of enwik8 (V = 204 instead of 205).


class Tokenizer(enum.StrEnum):
    """Kinds of tokens."""

    BYTE = "byte"
    CHAR = "char"  # A Unicode character of UTF-8 text.
    WORD = "word"  # Words between white space.
    SUBWORD = "subword"  # Parts of words, by a tokenizer.json, given or trained; needs the package tokenizers.
    ID = "id"  # Ready-made ids in .npy or .bin files.


class LineMark(enum.StrEnum):
    """Token at the end of a line, where tokens are words."""

    EOS = "eos"  # <eos> after each line: WikiText and PTB.
    S = "s"  # One <S> between sentences: One Billion Word, as the original PyTorch scores it.
    DOUBLE_S = "double_s"  # <S> before and after each: the original TensorFlow, which scores <S> after <S> too.
    NONE = "none"  # A line's end is white space.


class Heldout(enum.StrEnum):
    """Shards of One Billion Word's held-out text that validate; the first one is always the test text."""

    SEPARATE = "separate"  # The second shard: nothing is chosen on the test text.
    PUBLISHED = "published"  # The first one too, as both original releases.


class Order(enum.StrEnum):
    """Order of the training text in an epoch."""

    STREAM = "stream"  # In the order of the file.
    SENTENCES = "sentences"  # Lines in another order each epoch: One Billion Word, whose lines have no order.


class Roll(enum.StrEnum):
    """Rotation of the training text by a random number of tokens in each epoch, so that segments begin elsewhere."""

    NONE = "none"
    STREAM = "stream"  # The whole training text, before it is cut into rows.
    ROWS = "rows"  # Each row by itself: the partial shuffle of Press (2019).


_LINES = (Tokenizer.WORD,)
DEFAULT_SUBWORDS = 8000  # Tokens of a vocabulary that is trained here.


@dataclasses.dataclass(frozen=True)
class TokenizerConfig(Config):
    """Tokenizer: from text to token ids."""

    kind: Tokenizer = setting(Tokenizer.BYTE, "Kind of tokens.", shapes_tokens=True)
    newlines: Newlines = setting(
        Newlines.KEEP, "Byte tokens: treatment of newlines.", shapes_tokens=True, only_with={"kind": (Tokenizer.BYTE,)}
    )
    line_mark: LineMark = setting(
        LineMark.EOS,
        "Word tokens: token at the end of a line.",
        shapes_tokens=True,
        only_with={"kind": _LINES},
    )
    min_count: int = setting(
        1,
        "Character and word tokens: smallest count in the training text; rarer ones are <unk>.",
        at_least=1,
        shapes_tokens=True,
        only_with={"kind": (Tokenizer.CHAR, Tokenizer.WORD)},
    )
    vocab_file: str | None = setting(
        None,
        "Word tokens: vocabulary file, one word per line; none: count the training text.",
        path=True,
        free_on_resume=True,
        only_with={"kind": (Tokenizer.WORD,)},
    )
    hf_file: str | None = setting(
        None,
        "Subword tokens: a tokenizer.json; none trains one on the training split. Ready-made ids: the tokenizer.json "
        "that made them.",
        path=True,
        free_on_resume=True,
        only_with={"kind": (Tokenizer.SUBWORD, Tokenizer.ID)},
    )
    vocab_size: int | None = setting(
        None,
        f"Vocabulary size. Subwords trained here: none means {DEFAULT_SUBWORDS:,}. Ready-made ids: none means the "
        "largest id and one, or the size of the tokenizer.json.",
        at_least=1,
        shapes_tokens=True,
        only_with={"kind": (Tokenizer.SUBWORD, Tokenizer.ID)},
    )

    def validate(self) -> None:
        """Raises `UserError` for a field out of its range, or fields that cannot go together."""
        check_fields(self, "data.tokenizer")
        require(
            not self.vocab_file or self.min_count == 1,
            f"data.tokenizer.min_count is {self.min_count} and data.tokenizer.vocab_file is {self.vocab_file!r}; words "
            "are counted or given, not both",
        )
        require(
            self.hf_file is None or self.vocab_size is None,
            f"data.tokenizer.vocab_size is {self.vocab_size} and data.tokenizer.hf_file is {self.hf_file!r}, which has "
            "a size of its own; give one of them",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig(Config):
    """The text, and the order in which it is read."""

    corpus: CorpusName = setting(CorpusName.ENWIK8, "Corpus; text: own files.")
    # Paths may change when a run is resumed: the digest of the text decides whether it is the same.
    file: str | None = setting(
        None,
        "One file, split 90/5/5 by position: own text, or a part of a corpus that is one file.",
        path=True,
        free_on_resume=True,
    )
    train: tuple[str, ...] = setting((), "Own text: training files, in order.", path=True, free_on_resume=True)
    valid: tuple[str, ...] = setting((), "Own text: validation files.", path=True, free_on_resume=True)
    test: tuple[str, ...] = setting((), "Own text: test files.", path=True, free_on_resume=True)
    tokenizer: TokenizerConfig = TokenizerConfig()
    reset_at: str | None = setting(
        None,
        "Documents are kept apart: text of the token that ends one and resets the memory; none: they are not.",
        shapes_tokens=True,
    )
    heldout: Heldout = setting(
        Heldout.SEPARATE,
        "One Billion Word: held-out shard for validation.",
        only_with={"corpus": (CorpusName.LM1B,)},
    )
    order: Order = setting(Order.STREAM, "Order of the training text in an epoch.")
    roll: Roll = setting(Roll.NONE, "Rotation of the training text, or of each row, by a random offset each epoch.")

    def validate(self) -> None:
        """Raises `UserError` for fields that cannot go together."""
        self.tokenizer.validate()
        check_fields(self, "data")
        self._validate_files()
        require(
            self.tokenizer.kind is not Tokenizer.ID or self.corpus is CorpusName.TEXT,
            f"data.tokenizer.kind is {self.tokenizer.kind} and data.corpus is {self.corpus}; ready-made ids go with "
            f"{CorpusName.TEXT}",
        )
        has_marks = self.tokenizer.kind in _LINES and self.tokenizer.line_mark is not LineMark.NONE
        require(
            self.order is not Order.SENTENCES or has_marks,
            f"data.order is {self.order} and there are no line marks (data.tokenizer.kind {self.tokenizer.kind}, "
            f"data.tokenizer.line_mark {self.tokenizer.line_mark}); sentences are found by them",
        )
        require(
            self.order is not Order.SENTENCES or self.roll is Roll.NONE,
            f"data.order is {self.order} and data.roll is {self.roll}; shuffled sentences need no roll",
        )

    def _validate_files(self) -> None:
        own = {name: getattr(self, name) for name in ("train", "valid", "test")}
        given = [f"data.{name}" for name, files in own.items() if files]
        missing = [f"data.{name}" for name, files in own.items() if not files]
        if self.corpus is CorpusName.TEXT:
            wrong = f"data.file is {self.file!r} and {', '.join(given)} was given too" if given else "no text was given"
            require(
                bool(self.file) != bool(given),
                f"{wrong}; give one file, --data.file=PATH, or three lists, --data.train=... --data.valid=... "
                "--data.test=...",
            )
            if self.tokenizer.kind is Tokenizer.ID and missing == ["data.test"]:
                return  # The validation ids are the test text too.
            require(not given or not missing, f"{', '.join(given)} given without {', '.join(missing)}")
            return
        require(not given, f"{', '.join(given)} given, but data.corpus is {self.corpus}; they go with text")
