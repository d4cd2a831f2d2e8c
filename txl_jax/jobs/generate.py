"""The generation job: a trained run writes text, streamed as it comes."""

import codecs
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig, GenerateConfig
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.generation import Generator
from txl_jax.jobs.parameters import load_parameters
from txl_jax.workdir import Workdir


def run(
    config: ExperimentConfig,
    vocabulary: Vocabulary,
    workdir: Workdir,
    *,
    say: Callable[[str], None] = print,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
    stop_requested: Callable[[], Any] = lambda: False,
) -> list[bytes]:
    """Writes `generate.samples` texts, the first one streamed, and saves them all beside the run.

    Returns:
      The texts without the prompt.

    Raises:
      FileNotFoundError: the workdir holds no checkpoint, or there is no prompt file.
      ValueError: the prompt has bytes outside the vocabulary.
    """
    prompt = read_prompt(config.generate)
    try:
        ids = vocabulary.encode(prompt)
        prompt = vocabulary.decode(ids)  # As the model reads it: words stand between single spaces, for example.
    except ValueError as error:
        raise ValueError(f"the prompt cannot be read by this model: {error}") from None
    if not len(ids):
        ids = vocabulary.start
    workdir.create()
    parts = assemble(config, vocab_size=vocabulary.size)
    step, params = load_parameters(parts, workdir, say=say)
    generator = Generator(parts.model, config.eval, config.generate)
    say(f"--- step {step}, seed {config.generate.seed}, {config.generate.length} tokens ---")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    write(decoder.decode(prompt))
    blocks = []
    for block in generator.tokens(params, ids):
        blocks.append(block)
        write(decoder.decode(vocabulary.decode(block[0])))
        if stop_requested():
            break
    write(decoder.decode(b"", final=True) + "\n")
    texts = [vocabulary.decode(row) for row in np.concatenate(blocks, axis=1)]
    for number, text in enumerate(texts[1:], start=2):
        say(f"--- sample {number} ---")
        write((prompt + text).decode(errors="replace") + "\n")
    _save(workdir.path / f"sample-seed{config.generate.seed}.txt", prompt, texts)
    return texts


def read_prompt(config: GenerateConfig) -> bytes:
    """The prompt as bytes; empty if none was given.

    Raises:
      FileNotFoundError: `prompt_file` cannot be read.
    """
    if not config.prompt_file:
        return os.fsencode(config.prompt)  # As typed: the bytes need not be valid UTF-8.
    try:
        return Path(config.prompt_file).read_bytes()
    except OSError as error:
        raise FileNotFoundError(
            f"cannot read the prompt file {config.prompt_file} ({error.strerror}); check --generate.prompt_file"
        ) from error


def _save(path: Path, prompt: bytes, texts: list[bytes]) -> None:
    path.write_bytes(b"\n\n--- next sample ---\n\n".join(prompt + text for text in texts) + b"\n")
