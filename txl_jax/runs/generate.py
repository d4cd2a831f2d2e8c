"""Generation with a trained run: samples texts after a prompt, and streams the first as it is written."""

import codecs
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from txl_jax.config import ExperimentConfig, GenerateConfig, Network
from txl_jax.data import ready_ids
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.modules.positions import encoding_of
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
    """Writes `generate.samples` texts with a trained run, streams the first one, and saves all in the run's directory.

    Args:
      config: The run's settings, with `generate`.
      run: The trained run.
      log: Takes one line.
      write: Takes pieces of text as they come.
      stop_requested: Whether to stop; asked between segments of the prompt and between blocks of tokens.

    Returns:
      The texts without the prompt. A text that ended with the stop token includes it, if that token has a text.

    Raises:
      UserError: If the run has no checkpoint, the prompt file is missing, the prompt has bytes outside the vocabulary,
        `generate.stop` is not one of its tokens, or the model has absolute positions or no memory.
    """
    vocabulary = run.text.vocabulary
    check_can_generate(config)
    stop = read_stop(config.generate, vocabulary)
    check_same_settings(config)
    prompt = os.fsencode(distributed.broadcast_from_primary(lambda: os.fsdecode(read_prompt(config.generate))))
    try:
        ids = vocabulary.encode(prompt)
    except ValueError as error:
        raise UserError(f"the prompt cannot be read by this model: {error}") from None
    prompt = vocabulary.decode(ids)  # As the model reads it: words with single spaces between them, for example.
    if not len(ids):
        ids = vocabulary.start
    components = build_trained(config, run, log=log)
    step, params = load_parameters(components, run, log=log)
    generator = components.generator(components.prepare_params(params))
    at_most = "" if stop is None else "at most "
    log(f"--- step {step}, seed {config.generate.seed}, {at_most}{config.generate.length} tokens ---")
    sampled = generator.tokens(ids, config.generate, stop_token=stop, stop_requested=stop_requested)
    blocks = _stream(sampled, vocabulary, prompt, stop, write)
    if not blocks:
        return []  # Stopped while the prompt was read.
    texts = [vocabulary.decode(_until_stop(stop, row)) for row in np.concatenate(blocks, axis=1)]
    for number, text in enumerate(texts[1:], start=2):
        log(f"--- sample {number} ---")
        write((prompt + text).decode(errors="replace") + "\n")
    path = os.path.join(run.outputs, f"sample-seed{config.generate.seed}.txt")
    separated = b"\n\n--- next sample ---\n\n".join(prompt + text for text in texts) + b"\n"
    distributed.broadcast_from_primary(lambda: storage.write(path, separated))
    return texts


def check_can_generate(config: ExperimentConfig) -> None:
    """Raises `UserError` if the model cannot generate token by token."""
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
    """Returns the prompt as bytes, empty if none is set; raises `UserError` if `prompt_file` cannot be read."""
    if not config.prompt_file:
        return os.fsencode(config.prompt or "")  # As typed: the bytes need not be valid UTF-8.
    try:
        return storage.read(config.prompt_file)
    except OSError as error:
        raise UserError(
            f"cannot read the prompt file {config.prompt_file} ({error.strerror}); check --generate.prompt_file"
        ) from error


def read_stop(config: GenerateConfig, vocabulary: Vocabulary) -> int | None:
    """Returns the id of the stop token, or None if none is set; raises `UserError` unless the text is one token."""
    if not config.stop:
        return None
    return ready_ids.find_token(vocabulary, config.stop, name="generate.stop")


def _stream(
    sampled: Iterable[np.ndarray], vocabulary: Vocabulary, prompt: bytes, stop: int | None, write: Callable[[str], None]
) -> list[np.ndarray]:
    """Writes the prompt and the first sample as its tokens come; returns the blocks of all samples, [samples, T]."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    write(decoder.decode(prompt))
    blocks: list[np.ndarray] = []
    ended = False  # Whether the first sample has ended; others may continue.
    for block in sampled:
        blocks.append(block)
        if not ended:
            write(decoder.decode(vocabulary.decode(_until_stop(stop, block[0]))))
            ended = stop in block[0].tolist()
    write(decoder.decode(b"", final=True) + "\n")
    return blocks


def _until_stop(stop: int | None, tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens [T] up to and including the first stop token."""
    found = [] if stop is None else np.flatnonzero(tokens == stop).tolist()
    return tokens[: found[0] + 1] if found else tokens
