"""Pieces of words by SentencePiece (Kudo and Richardson, 2018): a vocabulary of a chosen size for own text.

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
from txl_jax.data.tokens.vocabulary import checked, id_type, prompt_text
from txl_jax.metrics import Measure

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # What SentencePiece writes for a space.
# Enough to learn pieces from, and a bound on the memory: the trainer holds its sentences.
_TRAINING_SENTENCES = 1_000_000


@dataclasses.dataclass(frozen=True)
class PieceVocabulary:
    """The pieces of a SentencePiece model. Its normalisation (NFKC, one space for many) applies."""

    model: bytes = dataclasses.field(repr=False)  # The model file.
    line_mark: LineMark = LineMark.EOS  # EOS: the model's own </s> after each line. NONE: lines are joined.
    lower_case: bool = False

    kind: ClassVar[str] = "sentencepiece"
    measure: ClassVar[Measure] = Measure.PPL

    def __post_init__(self):
        if self._processor.eos_id() < 0 and self.line_mark is LineMark.EOS:
            raise ValueError(
                "the SentencePiece model has no </s> to end a line with; give --data.tokenizer.line_mark=none or another model"
            )

    @property
    def size(self) -> int:
        return self._processor.vocab_size()

    @property
    def start(self) -> np.ndarray:
        """The line mark, or without one the unknown piece."""
        return np.array([self.unknown_id if self.mark is None else self.mark])

    @property
    def mark(self) -> int | None:
        return self._processor.eos_id() if self.line_mark is LineMark.EOS else None

    @property
    def unknown_id(self) -> int:
        return self._processor.unk_id()

    def names(self) -> list[bytes]:
        processor = self._processor
        return [
            processor.id_to_piece(token).encode() if processor.is_control(token) else text
            for token, text in enumerate(self._texts)
        ]

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        for block in text_blocks(files, close_lines=True):
            yield self._encode(block)

    def encode(self, text: bytes) -> np.ndarray:
        return self._encode(prompt_text(text))

    def decode(self, ids: Any) -> bytes:
        """Pieces joined as they stand, a newline for a mark."""
        return b"".join(self._texts[token] for token in checked(ids, self.size).tolist())

    def header(self) -> dict[str, Any]:
        return {"line_mark": self.line_mark.value, "lower_case": self.lower_case}

    def lines(self) -> Iterator[str]:
        yield base64.b64encode(self.model).decode()

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "PieceVocabulary":
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
    """Learns pieces from the first million lines of a training text.

    Raises:
      ValueError: the text is too short for that many pieces.
    """
    model, errors = io.BytesIO(), []
    try:
        package().SentencePieceTrainer.train(
            sentence_iterator=_sentences(files, lower_case, errors),
            model_writer=model,
            vocab_size=size,
            input_sentence_size=_TRAINING_SENTENCES,
            shuffle_input_sentence=False,
            byte_fallback=True,  # What the training text lacks is spelt in bytes instead of being unknown.
            num_threads=1,  # Sums over threads come out in any order, and another model with them.
            minloglevel=2,
        )
    except RuntimeError as error:
        if errors:
            raise errors[0] from None
        raise ValueError(
            f"SentencePiece could not learn {size} pieces from the training text ({_reason(error)}); try another "
            "--data.tokenizer.sentencepiece_vocab"
        ) from error
    if errors:
        raise errors[0]
    return PieceVocabulary(model.getvalue(), line_mark, lower_case)


def _sentences(files: Iterable[File], lower_case: bool, errors: list[ValueError]) -> Iterator[str]:
    """The lines that are not empty, long ones in parts; ends early at a mistake in the files, which goes to `errors`.

    SentencePiece would wrap the mistake in several lines of its own.
    """
    try:
        for block in text_blocks(files, close_lines=True):
            for line in (block.lower() if lower_case else block).split("\n"):
                # SentencePiece leaves out what has more than 4,192 bytes. One word in a thousand characters may be cut.
                yield from (line[i : i + 1000] for i in range(0, len(line), 1000) if not line.isspace())
    except ValueError as error:
        errors.append(error)


def package() -> ModuleType:
    """The package sentencepiece.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            "--data.tokenizer.kind=sentencepiece needs the package sentencepiece; pip install '.[sentencepiece]'"
        ) from error
    return sentencepiece


def _reason(error: RuntimeError) -> str:
    return str(error).rpartition("] ")[2].strip() or str(error)
