"""SentencePiece tokens (Kudo and Richardson, 2018): pieces of words, a vocabulary of a chosen size for own text.

The package is optional: `pip install '.[sentencepiece]'`.
"""

import base64
import dataclasses
import functools
import io
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from txl_jax.config import LineMark
from txl_jax.data.sources.text import File
from txl_jax.data.tokens.utf8 import text_blocks
from txl_jax.data.tokens.vocabulary import check_ids, id_type, prompt_text
from txl_jax.errors import MissingPackageError, UserError
from txl_jax.metrics import Measure

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's own character for a space.
# Enough to learn pieces from, and a bound on the memory: the trainer keeps its sentences.
_TRAINING_SENTENCES = 1_000_000


@dataclasses.dataclass(frozen=True)
class PieceVocabulary:
    """The pieces of a SentencePiece model. Its normalisation (NFKC, one space for many) applies."""

    model: bytes = dataclasses.field(repr=False)  # The model file.
    line_mark: LineMark = LineMark.EOS  # EOS: the model's own </s> after each line. NONE: lines are joined.
    lower_case: bool = False

    kind: ClassVar[str] = "sentencepiece"
    measure: ClassVar[Measure] = Measure.PPL

    def __post_init__(self) -> None:
        if self._processor.eos_id() < 0 and self.line_mark is LineMark.EOS:
            raise UserError(
                "the SentencePiece model has no </s> to end lines with; give --data.tokenizer.line_mark=none or "
                "another model"
            )

    @property
    def size(self) -> int:
        """Returns V, the number of tokens."""
        return self._processor.vocab_size()

    @property
    def start(self) -> np.ndarray:
        """Returns the line mark, or without one the unknown piece."""
        return np.array([self.unknown_id if self.mark is None else self.mark])

    @property
    def mark(self) -> int | None:
        """Returns the id that ends a line; None if lines are not marked."""
        return self._processor.eos_id() if self.line_mark is LineMark.EOS else None

    @property
    def unknown_id(self) -> int:
        """Returns the id of tokens that the vocabulary lacks."""
        return self._processor.unk_id()

    def names(self) -> list[bytes]:
        """Returns the name of each token."""
        processor = self._processor
        return [
            processor.id_to_piece(token).encode() if processor.is_control(token) else text
            for token, text in enumerate(self._texts)
        ]

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, in blocks of one axis."""
        for block in text_blocks(files, close_lines=True):
            yield self._encode(block)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids of a text that may go on."""
        return self._encode(prompt_text(text))

    def decode(self, ids: Any) -> bytes:
        """Concatenates the pieces, a newline for a mark."""
        return b"".join(self._texts[token] for token in check_ids(ids, self.size).tolist())

    def header(self) -> dict[str, Any]:
        """Returns the settings of the saved form."""
        return {"line_mark": self.line_mark.value, "lower_case": self.lower_case}

    def lines(self) -> Iterator[str]:
        """Yields the tokens of the saved form."""
        yield base64.b64encode(self.model).decode()

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "PieceVocabulary":
        """Builds a vocabulary from its `header` and `lines`."""
        return cls(base64.b64decode(lines[0]), LineMark(header["line_mark"]), header["lower_case"])

    def _encode(self, text: str) -> np.ndarray:
        *lines, rest = (text.lower() if self.lower_case else text).split("\n")
        encoded = self._processor.encode(lines, add_eos=self.mark is not None) if lines else []
        encoded.append(self._processor.encode(rest) if rest else [])
        dtype = id_type(self.size)
        return np.concatenate([np.array(ids, dtype) for ids in encoded])

    @functools.cached_property
    def _processor(self) -> Any:
        processor = package().SentencePieceProcessor()
        processor.LoadFromSerializedProto(self.model)  # Raises for an empty model too, as the constructor does not.
        return processor

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        return [self._text(token) for token in range(self.size)]

    def _text(self, token: int) -> bytes:
        processor = self._processor
        piece = processor.id_to_piece(token)
        if token == self.mark:
            return b"\n"
        if processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # "<0x0A>"
        return b"" if processor.is_control(token) else piece.replace(_SPACE, " ").encode()


def train(files: Iterable[File], *, size: int, line_mark: LineMark, lower_case: bool) -> PieceVocabulary:
    """Trains a SentencePiece model on the first million lines of a training text.

    Raises:
      UserError: the text is too short for that many pieces.
    """
    model = io.BytesIO()
    errors: list[UserError] = []
    try:
        package().SentencePieceTrainer.train(
            sentence_iterator=_sentences(files, lower_case, errors),
            model_writer=model,
            vocab_size=size,
            input_sentence_size=_TRAINING_SENTENCES,
            shuffle_input_sentence=False,
            byte_fallback=True,  # Characters that the training text lacks become bytes instead of the unknown piece.
            num_threads=1,  # Sums over threads have no fixed order, so the model would vary.
            minloglevel=2,
        )
    except RuntimeError as error:
        if errors:
            raise errors[0] from None
        raise UserError(
            f"SentencePiece could not learn {size} pieces from the training text ({_reason(error)}); try another "
            "--data.tokenizer.sentencepiece_vocab"
        ) from error
    if errors:
        raise errors[0]
    return PieceVocabulary(model.getvalue(), line_mark, lower_case)


def _sentences(files: Iterable[File], lower_case: bool, errors: list[UserError]) -> Iterator[str]:
    """Yields the lines that are not empty, long ones in parts; stops at an error in the files and adds it to `errors`.

    SentencePiece would wrap the error in several lines of its own.
    """
    try:
        for block in text_blocks(files, close_lines=True):
            for line in (block.lower() if lower_case else block).split("\n"):
                # SentencePiece skips lines of more than 4,192 bytes. One word per thousand characters may be cut.
                yield from (line[i : i + 1000] for i in range(0, len(line), 1000) if not line.isspace())
    except UserError as error:
        errors.append(error)


def package() -> ModuleType:
    """Imports the package sentencepiece.

    Raises:
      MissingPackageError: it is not installed.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingPackageError(
            "--data.tokenizer.kind=sentencepiece needs the package sentencepiece; pip install '.[sentencepiece]'"
        ) from error
    return sentencepiece


def _reason(error: RuntimeError) -> str:
    return str(error).rpartition("] ")[2].strip() or str(error)
