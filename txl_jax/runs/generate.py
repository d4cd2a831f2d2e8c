"""Generates samples after a prompt with a trained run.

The first text is streamed while it is generated.
"""

import codecs
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from txl_jax.config import ExperimentConfig, GenerateConfig, Network
from txl_jax.data import encode
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.text import BYTE_ORDER_MARK
from txl_jax.data.vocabulary import Ending, TextStream, Vocabulary, unescape
from txl_jax.errors import rephrased
from txl_jax.modules.positions import encoding_of
from txl_jax.runs.build import Built
from txl_jax.runs.run import Run, check_same_settings
from txl_jax.runs.score import note_unknown
from txl_jax.runs.trained import TrainedModel
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.output import say


def generate_text(
    config: ExperimentConfig,
    model: Run | TrainedModel,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> list[bytes]:
    """Prints and saves `generate.samples` texts of a trained model.

    The first text is printed while it is generated. All texts are saved in the model's directory.

    Returns the texts, each with the prompt and the stop that ended it. Raises `UserError` if the
    model has no checkpoint or cannot generate, or the prompt or the stop cannot be read.
    `stop_requested` is called between segments of the prompt and between blocks of tokens.
    """
    trained = TrainedModel.of(model, config)
    check_same_settings(config)
    sample = make_sampler(config, trained.vocabulary)
    folder = trained.outputs()
    built = trained.build(log=say)
    step, params = trained.params(built, log=say)

    seed = config.generate.seed
    at_most = "at most " if config.generate.stop else ""
    print(f"--- step {step}, seed {seed}, {at_most}{config.generate.length} tokens ---")
    texts = sample(built, params, stop_requested, functools.partial(print, end="", flush=True))

    path = os.path.join(folder or "", f"sample-seed{seed}.txt")
    is_saved = bool(texts) and folder is not None
    # The texts are saved before the others are printed, because printing may fail.
    if is_saved:
        distributed.broadcast_from_primary(lambda: storage.write(path, as_file(texts)))
    for number, text in enumerate(texts[1:], start=2):
        print(f"--- sample {number} ---\n{text.decode(errors='replace')}", flush=True)
    if is_saved:
        print(f"sample    {path}")
    return texts


def continue_prompts(
    model: TrainedModel,
    prompts: Iterable[tuple[int, bytes]],
    *,
    name: str,
    write: Callable[[str], Any],
) -> None:
    """Writes a JSON record of each sample after each prompt, in their order.

        {"index": 0, "sample": 0, "prompt": "Once upon", "text": " a time"}

    `index` counts the prompts, and `sample` the samples of each, which are the same as from
    `generate_text`. `eval.batch_size` samples are generated in parallel. Arguments and errors are
    as for `score.score_documents`.
    """
    config = model.config.generate
    vocabulary = model.vocabulary
    batch_size = model.config.eval.batch_size
    check_can_generate(model.config)
    ending = read_stop(config, vocabulary)
    built = model.build(log=say)
    _, params = model.params(built, log=say)
    generator = built.generator(built.prepare_params(params))

    n_unknown = 0
    n_token = 0
    # Prompts are read when they are needed, so an error in a prompt comes after the records of
    # earlier batches.
    requests = _requests(prompts, vocabulary, samples=config.samples, name=name)
    while batch := list(itertools.islice(requests, batch_size)):
        for request in batch:
            n_unknown += vocabulary.count_unknown(request.ids)
            n_token += len(request.ids)

        texts = [""] * len(batch)
        pieces = generator.pieces(
            [or_start(request.ids, model.config, vocabulary) for request in batch],
            config,
            draws=[(config.seed, request.sample) for request in batch],
            decode=vocabulary.decode,
            ending=ending,
            batch_size=batch_size,
        )
        for row, piece in pieces:
            texts[row] += piece

        for request, text in zip(batch, texts, strict=True):
            record = {
                "index": request.index,
                "sample": request.sample,
                "prompt": request.prompt.decode(errors="replace"),
                "text": text,
            }
            write(json.dumps(record) + "\n")
    note_unknown(n_unknown, n_token, "so the model does not read the prompts as they are written")


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
    """One sample to generate after one prompt."""

    index: int  # Number of the prompt, from 0.
    sample: int  # Number of the sample among those of this prompt, from 0.
    prompt: bytes
    ids: np.ndarray  # Tokens of the prompt, int32 [T]. T may be 0.


def _requests(
    prompts: Iterable[tuple[int, bytes]], vocabulary: Vocabulary, *, samples: int, name: str
) -> Iterator[_Request]:
    """Yields the requests for each prompt, which is read and encoded when it is needed."""
    for index, (line, prompt) in enumerate(prompts):
        ids = encode.token_ids(vocabulary, prompt, name=f"line {line} of {name}")
        for sample in range(samples):
            yield _Request(index, sample, prompt, ids)


def or_start(ids: np.ndarray, config: ExperimentConfig, vocabulary: Vocabulary) -> np.ndarray:
    """Returns the ids [T] that a model continues: a prompt's, or `start_ids` for an empty one."""
    return ids if len(ids) else start_ids(config, vocabulary)


def start_ids(config: ExperimentConfig, vocabulary: Vocabulary) -> np.ndarray:
    """Returns the ids [1] that a text without a prompt continues.

    If `data.reset_at` names the token that ends a document, it is this token, so that a new
    document begins. Otherwise it is a token that could precede a text, such as a newline.
    """
    if config.data.reset_at is None:
        return vocabulary.start
    end_ids = encode.find_tokens(vocabulary, config.data.reset_at, name="data.reset_at")
    return np.array(end_ids)


def make_sampler(config: ExperimentConfig, vocabulary: Vocabulary) -> "Sampler":
    """Reads the prompt and the stop, and returns a sampler of texts after the prompt.

    A collective. All processes get process 0's prompt.

    Raises:
      UserError: If such a model cannot generate, or the prompt or the stop cannot be read.
    """
    check_can_generate(config)
    settings = config.generate
    # The end of a sample: a token, a string of multiple tokens as bytes, or None.
    ending = read_stop(settings, vocabulary)

    # A broadcast takes text, and the prompt may be bytes that are not valid UTF-8.
    as_bytes = isinstance(vocabulary, ByteVocabulary)
    typed = distributed.broadcast_from_primary(
        lambda: os.fsdecode(read_prompt(settings, as_bytes=as_bytes))
    )
    ids = encode.token_ids(vocabulary, os.fsencode(typed), name="the prompt")
    note_unknown(
        vocabulary.count_unknown(ids),
        len(ids),
        "so the model does not read the prompt as it is written",
    )
    return Sampler(settings, vocabulary, ending, ids, prompt=vocabulary.decode(ids))


@dataclasses.dataclass(frozen=True, eq=False)
class Sampler:
    """Generates texts after one prompt, with any parameters of a model. It is compiled once."""

    settings: GenerateConfig
    vocabulary: Vocabulary
    # Token or text that ends a sample, or None.
    ending: Ending
    # Tokens of the prompt, int32 [T]. T may be 0.
    ids: np.ndarray
    # The prompt as the model reads it, for example with single spaces between words.
    prompt: bytes

    def __call__(
        self,
        built: Built,
        params: Any,
        stop_requested: Callable[[], Any],
        write: Callable[[str], Any] = lambda text: None,
    ) -> list[bytes]:
        """Generates `settings.samples` texts. All processes call it.

        Args:
          built: The model.
          params: Its parameters, as in training.
          stop_requested: Is called between segments of the prompt and between blocks of tokens.
          write: Receives the first text in pieces, as its tokens are generated.

        Returns:
          The prompt with each sample after it, or an empty list if a stop was requested while the
          prompt was read.
        """
        # The parameters are cast, scaled and laid out once for inference (`inference.prepare`).
        generator = built.generator(built.prepare_params(params))
        blocks = generator.tokens(
            or_start(self.ids, built.config, self.vocabulary),
            self.settings,
            # A token ends a sample in the generator. The stream finds strings in the text.
            stop_token=self.ending,
            stop_requested=stop_requested,
        )
        # Bytes that are not UTF-8 pass through the streams as surrogates, which `_GrowingTexts`
        # turns into the same bytes again.
        streams = [
            TextStream(
                self.vocabulary.decode, stop=(), ending=self.ending, errors="surrogateescape"
            )
            for _ in range(self.settings.samples)
        ]
        texts = _GrowingTexts(self.prompt, len(streams), write)

        has_begun = False
        for block in blocks:
            has_begun = True
            for number, stream in enumerate(streams):
                texts.add(number, stream.add(block[number]))
            # The generator itself stops at a token, but does not detect a text that ends a sample.
            if all(stream.ended for stream in streams):
                break
        for number, stream in enumerate(streams):
            texts.add(number, stream.finish())
        texts.finish()
        if not has_begun:
            return []
        return texts.contents


class _GrowingTexts:
    """Texts that begin with the same prompt. The first is written as it grows."""

    def __init__(self, prompt: bytes, n_text: int, write: Callable[[str], Any]):
        self.contents = [prompt] * n_text
        self._write = write
        # Human-readable output: invalid bytes become replacement characters.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        write(self._decoder.decode(prompt))

    def add(self, number: int, piece: str) -> None:
        """Appends a piece, with its invalid bytes as surrogates, to a text."""
        content = piece.encode(errors="surrogateescape")
        self.contents[number] += content
        if number == 0:
            self._write(self._decoder.decode(content))

    def finish(self) -> None:
        """Ends the line of the text that is written."""
        self._write(self._decoder.decode(b"", final=True) + "\n")


def as_file(texts: Sequence[bytes]) -> bytes:
    """Returns samples as the content of one file."""
    return b"\n\n--- next sample ---\n\n".join(texts) + b"\n"


def check_can_generate(config: ExperimentConfig) -> None:
    """Raises `UserError` if the model cannot generate token by token."""
    config.expect(
        config.model.network is Network.TRANSFORMER_XL,
        "model.network",
        "its models can be scored, but cannot generate text",
    )
    config.expect(
        encoding_of(config.model).generates_by_token,
        "model.encoding",
        "its positions restart in each segment. Only models with relative positions generate text",
    )
    config.expect(
        config.eval.mem_len,
        "eval.mem_len eval.stride",
        "each token would attend only to the one before it. Set --eval.mem_len, and no stride",
    )


def read_prompt(config: GenerateConfig, *, as_bytes: bool = False) -> bytes:
    """Returns the prompt as bytes, empty if none is set.

    Raises `UserError` if `prompt_file` cannot be read.

    A file's byte-order mark is dropped unless it is read `as_bytes`, for a model of bytes.
    """
    if not config.prompt_file:
        # Typed bytes need not be valid UTF-8.
        return os.fsencode(unescape(config.prompt or ""))
    sentence = (
        f"cannot read the prompt file {config.prompt_file} (%s). Check --generate.prompt_file."
    )
    with rephrased(sentence, OSError):
        content = storage.read_small(config.prompt_file)
    return content if as_bytes else content.removeprefix(BYTE_ORDER_MARK.encode())


def read_stop(config: GenerateConfig, vocabulary: Vocabulary) -> Ending:
    """Returns the token or the text that ends a sample, or None.

    Raises `UserError` if a token is unknown.
    """
    if not config.stop:
        return None
    ids = encode.find_tokens(vocabulary, config.stop, name="generate.stop", several=True)
    if isinstance(vocabulary, SubwordVocabulary):
        # The text may be inside a token, so it is found in the text instead of by tokens.
        return os.fsencode(unescape(config.stop))
    return ids[0] if len(ids) == 1 else vocabulary.decode(ids)
