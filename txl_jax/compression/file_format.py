"""The format of compressed files.

    8 bytes           MAGIC
    4 bytes           the header's length, little-endian
    the header        JSON in UTF-8: the fields of `Header`
    the payload       the coded bits, or the text itself if it did not shrink
    32 bytes          the SHA-256 of everything before

Except for MAGIC, the content of a file is not used until its SHA-256 has been checked, so a
corrupted file fails immediately. A header with the right SHA-256 may still come from a stranger, so
each value is checked before it is used.
"""

import dataclasses
import hashlib
import json
import struct
from typing import Any

from txl_jax.compression.range_coder import fewest_bits
from txl_jax.errors import UserError

MAGIC = b"\x93TXL\r\n\x1a\n"  # Like PNG's, it notices a transfer that changes line endings.
VERSION = 1

_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_HEADER_BYTES = 1 << 14
# A decoder may read symbols past the end of the payload, as if two more words followed.
_CODER_BYTES = 8

# Upper limits of the values in a header. They are far above useful values.
MAX_STREAMS = 1024
MAX_SEGMENT_LEN = 1 << 14
MAX_MEM_LEN = 1 << 16
MAX_THREADS = 1024
# The model's numbers are floats of 32 bits, whose largest one is 3.4e38.
MAX_FLOAT = 1e38
# Upper limits of two products that determine the model's memory use: streams * (mem_len +
# segment_len), and the same times segment_len (attention scores).
MAX_POSITIONS = 1 << 18
MAX_PAIRS = 1 << 25


@dataclasses.dataclass(frozen=True)
class Coding:
    """Settings of the prediction. Decoding needs the same values."""

    # Number of streams that are predicted in parallel.
    streams: int
    # Number of bytes of each stream between two updates of the model.
    segment_len: int
    # Length of the model's memory.
    mem_len: int
    # Learning rate, decay and epsilon of the rule RMSprop (`evaluation.dynamic`).
    learning_rate: float
    decay: float
    epsilon: float
    # Number of XLA's threads. A sum over another number of threads has other last bits.
    threads: int


@dataclasses.dataclass(frozen=True)
class Environment:
    """Everything that a model's numbers may depend on, except its inputs."""

    # The device, such as "CPU (Intel(R) Xeon(R) Processor, 2 cores)".
    device: str
    # The processor's kind and instructions, in the form of the compilation cache.
    processor: str
    # Versions of txl_jax, jax, jaxlib and constriction, as "jax 0.10.2, ...".
    versions: str

    def differences(self, other: "Environment") -> list[str]:
        """Returns phrases for the differences, with the other environment's value first."""
        phrases = []
        for field in dataclasses.fields(self):
            own = getattr(self, field.name)
            others = getattr(other, field.name)
            if own != others:
                phrases.append(f"{field.name}: {others} there, {own} here")
        return phrases


@dataclasses.dataclass(frozen=True)
class Header:
    """Everything that decoding needs, except the model and the payload."""

    # Length of the text, and its SHA-256 in hexadecimal.
    text_bytes: int
    text_sha256: str
    # How the text was coded, or None if the payload is the text itself.
    coding: Coding | None = None
    environment: Environment | None = None
    # SHA-256 of the model's parameters, in hexadecimal.
    weights_sha256: str | None = None
    # SHA-256 of numbers that the model has computed at the start (`Predictor.probe`).
    probe_sha256: str | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the payload is the text itself."""
        return self.coding is None

    @classmethod
    def of_stored(cls, text: bytes) -> "Header":
        """Returns the header of a text that is stored uncompressed."""
        return cls(len(text), sha256(text))


def sha256(content: bytes) -> str:
    """Returns the SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def dump(header: Header, payload: bytes) -> bytes:
    """Returns the file's content."""
    fields = dataclasses.asdict(header)
    # A stored text has no model.
    values = {name: value for name, value in fields.items() if value is not None}
    values["version"] = VERSION
    head = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    content = MAGIC + _LENGTH.pack(len(head)) + head + payload
    return content + hashlib.sha256(content).digest()


def load(content: bytes, *, name: str) -> tuple[Header, bytes]:
    """Returns the header and the payload of a file's content.

    Args:
      content: The file's content.
      name: The file's name, for errors.

    Raises:
      UserError: If it is not a compressed file, was cut or changed, has another format version, or
        its header contains values that compression does not write.
    """
    if not content.startswith(MAGIC):
        # A file that was cut within its first bytes is one of these, too.
        raise UserError(
            f"{name} must be a file that experiments.compress has written, got another format. "
            "Check the path."
        )
    # Checked before anything else in the content is used.
    body = content[:-_DIGEST_BYTES]
    first = len(MAGIC) + _LENGTH.size
    if len(body) < first or hashlib.sha256(body).digest() != content[-_DIGEST_BYTES:]:
        raise UserError(
            f"{name} was cut or changed: its SHA-256 does not match. Copy it again, or compress "
            "the original again."
        )
    [head_bytes] = _LENGTH.unpack_from(body, len(MAGIC))
    payload = body[first + head_bytes :]
    try:
        # A stranger's length may be longer than the file, and JSON of megabytes may be nested.
        if head_bytes > min(_MAX_HEADER_BYTES, len(body) - first):
            raise ValueError(f"a header of {head_bytes} bytes")
        values = json.loads(body[first : first + head_bytes])
        version = values.pop("version")
        header = _header_of(values) if version == VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{name} has a header that experiments.compress does not write ({error})"
        ) from error
    if header is None:
        raise UserError(
            f"{name} must have format version {VERSION}, got {version!r:.20}. "
            "Decompress it with the version of txl_jax that wrote it."
        )
    check_length(header, payload, name=name)
    return header, payload


def _header_of(values: dict[str, Any]) -> Header:
    """Returns the header with these values. Raises ValueError, KeyError or TypeError."""
    coding = None
    environment = None
    if "coding" in values:
        coding = Coding(**values.pop("coding"))
        check_coding(coding)
        environment = Environment(**values.pop("environment"))
        texts = [*dataclasses.astuple(environment), values["weights_sha256"]]
        texts.append(values["probe_sha256"])
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a number in the place of a text")
    header = Header(coding=coding, environment=environment, **values)
    _check_integer("text_bytes", header.text_bytes, 0, None)
    if not isinstance(header.text_sha256, str):
        raise ValueError("text_sha256 is not a text")
    return header


def check_coding(coding: Coding) -> None:
    """Raises ValueError if a number has the wrong type, or exceeds the limits above."""
    _check_integer("streams", coding.streams, 1, MAX_STREAMS)
    _check_integer("segment_len", coding.segment_len, 1, MAX_SEGMENT_LEN)
    _check_integer("mem_len", coding.mem_len, 1, MAX_MEM_LEN)
    _check_integer("threads", coding.threads, 1, MAX_THREADS)
    positions = coding.streams * (coding.mem_len + coding.segment_len)
    pairs = coding.segment_len * positions
    if positions > MAX_POSITIONS or pairs > MAX_PAIRS:
        raise ValueError(
            f"streams {coding.streams}, segment_len {coding.segment_len} and mem_len "
            f"{coding.mem_len} together"
        )
    for name in ("learning_rate", "decay", "epsilon"):
        value = getattr(coding, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= MAX_FLOAT):
            raise ValueError(f"{name} {value!r:.20}")


def _check_integer(name: str, value: Any, least: int, most: int | None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        raise ValueError(f"{name} {value!r:.20}")


def check_length(header: Header, payload: bytes, *, name: str, vocab_size: int = 2) -> None:
    """Raises `UserError` if a payload cannot be a text of the header's length.

    Otherwise a stranger's small file could keep a machine busy for years, and fill its memory.
    `load` does not know the model, so it assumes two symbols. With more symbols, each takes more
    bits, so the length is checked again once the model is known.

    Args:
      header: The header.
      payload: The payload.
      name: The file's name, for errors.
      vocab_size: Number of the model's symbols. Models of bytes have at least two.
    """
    if header.is_stored:
        fits = len(payload) == header.text_bytes
    else:
        most_bytes = 8 * (len(payload) + _CODER_BYTES) / fewest_bits(vocab_size)
        fits = header.text_bytes <= most_bytes and len(payload) % 4 == 0
    if not fits:
        raise UserError(
            f"{name} has {len(payload):,} bytes of content, which cannot be a text of "
            f"{header.text_bytes:,} bytes. It was not written by experiments.compress."
        )
