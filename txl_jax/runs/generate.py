"""The generation job: samples text from a trained run and streams it as it is written."""

import codecs
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from txl_jax.config import ExperimentConfig, GenerateConfig, Network
from txl_jax.data import ready_ids
from txl_jax.data.vocabulary import TextStream, Vocabulary
from txl_jax.errors import UserError
from txl_jax.inference.batch_generator import BatchGenerator, Drawn, Prompts, row_key
from txl_jax.inference.generator import Generator, Weights
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.runs.build import RunComponents
from txl_jax.runs.run import Run, check_same_settings
from txl_jax.runs.weights import build_trained, load_parameters
from txl_jax.runtime import distributed, storage


def generate_text(
    config: ExperimentConfig,
    run: Run,
    *,
    log: Callable[[str], None] = print,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
    stop_requested: Callable[[], Any] = lambda: False,
) -> list[bytes]:
    """Writes `generate.samples` texts with a trained run, streams the first one, and saves them all in its folder.

    Args:
      log: takes one line for people.
      write: takes pieces of text, streamed.

    Returns:
      The texts without the prompt. One that ended with the stop token includes it, if that token has a text.

    Raises:
      UserError: the run has no checkpoint; there is no prompt file; the prompt has bytes outside the vocabulary;
        `generate.stop` is not one of its tokens; the model has absolute positions, or no memory.
    """
    vocabulary = run.text.vocabulary
    check_can_generate(config)
    stop = read_stop(config.generate, vocabulary)
    check_same_settings(config)
    prompt = os.fsencode(distributed.broadcast_from_primary(lambda: os.fsdecode(read_prompt(config.generate))))
    ids = _encode(vocabulary, prompt, what="the prompt")
    prompt = vocabulary.decode(ids)  # As the model reads it: words with single spaces between them, for example.
    if not len(ids):
        ids = vocabulary.start
    components = build_trained(config, run, log=log)
    step, params = load_parameters(components, run, log=log)
    assert isinstance(components.model, TransformerXL)  # As `check_can_generate` has seen.
    generator = Generator(
        components.model,
        config.eval,
        config.generate,
        memory_dtype=components.evaluation.memory_dtype,
        mesh=components.mesh,
        stop_token=stop,
    )
    at_most = "" if stop is None else "at most "
    log(f"--- step {step}, seed {config.generate.seed}, {at_most}{config.generate.length} tokens ---")
    sampled = generator.tokens(generator.prepare_params(params), ids, stop_requested=stop_requested)
    blocks = _stream(sampled, vocabulary, prompt, stop, write)
    if not blocks:
        return []  # Stopped while the prompt was read.
    texts = [vocabulary.decode(until_stop(stop, row)) for row in np.concatenate(blocks, axis=1)]
    for number, text in enumerate(texts[1:], start=2):
        log(f"--- sample {number} ---")
        write((prompt + text).decode(errors="replace") + "\n")
    path = os.path.join(run.outputs, f"sample-seed{config.generate.seed}.txt")
    separated = b"\n\n--- next sample ---\n\n".join(prompt + text for text in texts) + b"\n"
    distributed.broadcast_from_primary(lambda: storage.write(path, separated))
    return texts


def check_can_generate(config: ExperimentConfig) -> None:
    """Raises `UserError` for a model that cannot generate token by token."""
    if config.model.network is not Network.TRANSFORMER_XL:
        raise UserError(
            f"model.network is {config.model.network}, a baseline that can be scored and does not generate text"
        )
    if not encoding_of(config.model).generates_by_token:
        raise UserError(
            f"model.encoding is {config.model.encoding}, which counts positions within a segment, and a token that is "
            "generated alone has no position in one; only models with relative positions generate text"
        )
    if config.eval.mem_len == 0:
        raise UserError(
            "eval.mem_len is 0, so that each token would see only the one before it; give a memory with "
            "--eval.mem_len" + (f", and no stride (eval.stride is {config.eval.stride})" if config.eval.stride else "")
        )


def read_prompt(config: GenerateConfig) -> bytes:
    """Returns the prompt as bytes; empty if none was given.

    Raises:
      UserError: `prompt_file` cannot be read.
    """
    if not config.prompt_file:
        return os.fsencode(config.prompt or "")  # As typed: the bytes need not be valid UTF-8.
    try:
        return storage.read(config.prompt_file)
    except OSError as error:
        raise UserError(
            f"cannot read the prompt file {config.prompt_file} ({error.strerror}); check --generate.prompt_file"
        ) from error


def read_stop(config: GenerateConfig, vocabulary: Vocabulary) -> int | None:
    """Returns the id of the stop token; None if none was given.

    Raises:
      UserError: the text is not exactly one token of the vocabulary.
    """
    if not config.stop:
        return None
    return ready_ids.find_token(vocabulary, config.stop, name="generate.stop")


def _stream(
    sampled: Iterable[np.ndarray],
    vocabulary: Vocabulary,
    prompt: bytes,
    stop: int | None,
    write: Callable[[str], None],
) -> list[np.ndarray]:
    """Writes the prompt and the first sample as its tokens come; returns the blocks of all samples, [samples, T]."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    write(decoder.decode(prompt))
    blocks: list[np.ndarray] = []
    ended = False  # Whether the first sample has ended; others may go on.
    for block in sampled:
        blocks.append(block)
        if not ended:
            write(decoder.decode(vocabulary.decode(until_stop(stop, block[0]))))
            ended = stop in block[0].tolist()
    write(decoder.decode(b"", final=True) + "\n")
    return blocks


def _encode(vocabulary: Vocabulary, text: bytes, *, what: str) -> np.ndarray:
    try:
        return vocabulary.encode(text)
    except ValueError as error:
        raise UserError(f"{what} cannot be read by this model: {error}") from None


def until_stop(stop: int | None, tokens: np.ndarray) -> np.ndarray:
    """The tokens [T] up to and including the first stop token."""
    found = [] if stop is None else np.flatnonzero(tokens == stop).tolist()
    return tokens[: found[0] + 1] if found else tokens


# Generation after many prompts: groups of prompts of about the same length, their texts, and stop strings.


class Piece(NamedTuple):
    """A piece of the text after one prompt."""

    number: int  # Of the prompt.
    text: str
    ended: bool  # Whether it is the text's last piece.


class Ends(NamedTuple):
    """Ends of a text."""

    length: int  # Tokens, at most.
    token: int | None  # Ends a text, which includes it; None: nothing does.
    strings: Sequence[str]  # End a text, which does not include them.


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns stop strings given as one or several; raises `UserError` for an empty one."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in strings):
        raise UserError(f"stop is {stop!r}; give strings that are not empty")
    return strings


def make_generator(components: RunComponents, config: GenerateConfig) -> BatchGenerator:
    """Returns the generator of a model that can generate (`check_can_generate`)."""
    assert isinstance(components.model, TransformerXL)
    return BatchGenerator(
        components.model,
        components.config.eval,
        config,
        memory_dtype=components.evaluation.memory_dtype,
        mesh=components.mesh,
    )


def generate_pieces(
    generator: BatchGenerator,
    weights: Weights,
    prompts: Sequence[np.ndarray],
    *,
    seeds: Sequence[int],
    ends: Ends,
    vocabulary: Vocabulary,
    segment_len: int,
    batch_size: int,
) -> Iterator[Piece]:
    """Yields the texts after all prompts piece by piece; what each prompt's pieces make up is what it gives alone.

    Args:
      generator: of the model.
      weights: its prepared parameters.
      prompts: ids [T] of at least one token.
      seeds: one per prompt.
      ends: of the texts.
      vocabulary: decodes the tokens.
      segment_len: L, of evaluation.
      batch_size: prompts that are continued side by side, at most.
    """
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        rows = min(1 << (len(group) - 1).bit_length(), batch_size)  # A program for each power of two.
        keys = np.stack([row_key(seeds[number]) for number in group] + [row_key(0)] * (rows - len(group)))
        streams = [TextStream(vocabulary.decode, ends.strings) for _ in group]
        over = np.arange(rows) >= len(group)
        drawn = generator.tokens(
            weights,
            Prompts.of([prompts[number] for number in group], rows=rows, segment_len=segment_len),
            keys,
            length=ends.length,
            ended=over,
            stop_token=ends.token,
        )
        for block in drawn:
            for row, number in enumerate(group):
                if not over[row]:
                    piece = _piece(number, streams[row], block, row, ends)
                    over[row] = piece.ended
                    if piece.text or piece.ended:
                        yield piece


def _piece(number: int, stream: TextStream, block: Drawn, row: int, ends: Ends) -> Piece:
    """Adds a row's new tokens to its text."""
    numbers = block.numbers[row]
    mine = (numbers >= 0) & (numbers < ends.length)
    ids = block.tokens[row][mine]
    stops = np.flatnonzero(ids == ends.token) if ends.token is not None else np.zeros(0, int)
    last = bool(stops.size) or bool(np.any(numbers[mine] == ends.length - 1))
    text = stream.add(ids[: stops[0] + 1] if stops.size else ids)
    if stream.ended:
        return Piece(number, text, True)
    return Piece(number, text + (stream.finish() if last else ""), last)
