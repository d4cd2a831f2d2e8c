"""The generation job: a trained run writes text, streamed as it comes."""

import codecs
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig, GenerateConfig, Network
from txl_jax.data.tokens.vocabulary import Vocabulary, unescape
from txl_jax.inference.generator import Generator
from txl_jax.jobs import agreement
from txl_jax.jobs.restore import load_parameters, make
from txl_jax.jobs.workdir import Workdir
from txl_jax.runtime import distributed


def run(
    config: ExperimentConfig,
    vocabulary: Vocabulary,
    workdir: Workdir,
    *,
    log: Callable[[str], None] = print,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
    stop_requested: Callable[[], Any] = lambda: False,
) -> list[bytes]:
    """Writes `generate.samples` texts, the first one streamed, and saves them all beside the run.

    Returns:
      The texts without the prompt. One that a stop token ended holds it, as far as it prints as anything.

    Raises:
      FileNotFoundError: the workdir holds no checkpoint, or there is no prompt file.
      ValueError: the prompt has bytes outside the vocabulary, `generate.stop` is not one of its tokens, or the model
        has absolute positions, or no memory.
    """
    check_can_write(config)
    stop = read_stop(config.generate, vocabulary)
    agreement.check_settings(config)
    prompt = os.fsencode(distributed.broadcast_from_primary(lambda: os.fsdecode(read_prompt(config.generate))))
    try:
        ids = vocabulary.encode(prompt)
        prompt = vocabulary.decode(ids)  # As the model reads it: words stand between single spaces, for example.
    except ValueError as error:
        raise ValueError(f"the prompt cannot be read by this model: {error}") from None
    if not len(ids):
        ids = vocabulary.start
    make(workdir)
    parts = distributed.run_on_all(lambda: assemble(config, vocab_size=vocabulary.size))
    step, params = load_parameters(parts, workdir, log=log)
    generator = Generator(
        parts.model,
        config.eval,
        config.generate,
        memory_dtype=parts.evaluation.memory_dtype,
        mesh=parts.mesh,
        stop_token=stop,
    )
    at_most = "" if stop is None else "at most "
    log(f"--- step {step}, seed {config.generate.seed}, {at_most}{config.generate.length} tokens ---")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    write(decoder.decode(prompt))
    blocks, ended = [], False  # The first sample may end before the others.
    for block in generator.tokens(generator.prepare_params(params), ids, stop_requested=stop_requested):
        blocks.append(block)
        if not ended:
            write(decoder.decode(vocabulary.decode(_until(stop, block[0]))))
            ended = stop in block[0].tolist()
    write(decoder.decode(b"", final=True) + "\n")
    if not blocks:
        return []  # Stopped while the prompt was read.
    texts = [vocabulary.decode(_until(stop, row)) for row in np.concatenate(blocks, axis=1)]
    for number, text in enumerate(texts[1:], start=2):
        log(f"--- sample {number} ---")
        write((prompt + text).decode(errors="replace") + "\n")
    path = workdir.path / f"sample-seed{config.generate.seed}.txt"
    distributed.broadcast_from_primary(lambda: _save(path, prompt, texts))
    return texts


def check_can_write(config: ExperimentConfig) -> None:
    """Raises `ValueError` for a model that cannot write token after token."""
    if config.model.network is Network.LSTM:
        raise ValueError(f"model.network is {config.model.network}, a baseline that is scored and writes no text")
    if not config.model.encoding.is_relative:
        raise ValueError(
            f"model.encoding is {config.model.encoding}, which counts positions from the end of a segment, and a token "
            "that is written by itself has no place in one; only models with relative positions write text"
        )
    if config.eval.mem_len == 0:
        raise ValueError(
            "eval.mem_len is 0, so that each token would be written from the one before it alone; give a memory with "
            "--eval.mem_len" + (f", and no stride (eval.stride is {config.eval.stride})" if config.eval.stride else "")
        )


def read_prompt(config: GenerateConfig) -> bytes:
    """The prompt as bytes; empty if none was given.

    Raises:
      FileNotFoundError: `prompt_file` cannot be read.
    """
    if not config.prompt_file:
        return os.fsencode(config.prompt or "")  # As typed: the bytes need not be valid UTF-8.
    try:
        return Path(config.prompt_file).read_bytes()
    except OSError as error:
        raise FileNotFoundError(
            f"cannot read the prompt file {config.prompt_file} ({error.strerror}); check --generate.prompt_file"
        ) from error


def read_stop(config: GenerateConfig, vocabulary: Vocabulary) -> int | None:
    """The id of the token that ends a sample; None if none was given.

    A line mark is given as a newline or as its own word, `<eos>`.

    Raises:
      ValueError: the text is no single token that the vocabulary knows.
    """
    if not config.stop:
        return None
    text, names = os.fsencode(unescape(config.stop)), vocabulary.names()
    # Not by `encode`, which puts two marks for a newline between sentences, and takes <S> in lower case for a word.
    if vocabulary.mark is not None and text in (b"\n", names[vocabulary.mark]):
        return vocabulary.mark
    try:
        ids = vocabulary.encode(text).tolist()
    except ValueError as error:
        raise ValueError(f"generate.stop cannot be read by this model: {error}") from None
    if len(ids) == 1 and ids[0] != vocabulary.unknown_id:
        return ids[0]
    became = "its unknown token" if ids == [vocabulary.unknown_id] else f"{len(ids)} tokens"
    told = ", ".join(repr(names[token].decode(errors="backslashreplace")) for token in ids[:8])
    raise ValueError(
        f"generate.stop is {config.stop!r}, which this model reads as {became} ({told or 'nothing'}); give the text of "
        "one token of its vocabulary"
    )


def _until(stop: int | None, tokens: np.ndarray) -> np.ndarray:
    """The tokens [T] up to the first stop token, and with it."""
    found = np.flatnonzero(tokens == stop) if stop is not None else ()
    return tokens[: found[0] + 1] if len(found) else tokens


def _save(path: Path, prompt: bytes, texts: list[bytes]) -> None:
    path.write_bytes(b"\n\n--- next sample ---\n\n".join(prompt + text for text in texts) + b"\n")
