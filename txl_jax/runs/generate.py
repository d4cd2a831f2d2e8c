"""Generation with a trained run: samples texts after a prompt, and streams the first as it is written."""

import codecs
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from txl_jax.config import ExperimentConfig, GenerateConfig, Network
from txl_jax.data import ready_ids
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import rephrased
from txl_jax.modules.positions import encoding_of
from txl_jax.runs.build import Built
from txl_jax.runs.run import Run, check_same_settings
from txl_jax.runs.weights import build_trained, load_parameters
from txl_jax.runtime import distributed, storage

_SEPARATOR = b"\n\n--- next sample ---\n\n"

_write = functools.partial(print, end="", flush=True)


def generate_text(
    config: ExperimentConfig, run: Run, *, stop_requested: Callable[[], Any] = lambda: False
) -> list[bytes]:
    """Prints `generate.samples` texts of a trained run, the first as it is written, and saves all in its directory.

    Returns the texts without the prompt. A text that ended with the stop token includes it, if that token has a text.
    Raises `UserError` if the run has no checkpoint, the prompt or the stop cannot be read, or the model cannot
    generate. A stop may be requested between segments of the prompt and between blocks of tokens.
    """
    vocabulary = run.text.vocabulary
    check_can_generate(config)
    stop = read_stop(config.generate, vocabulary)
    check_same_settings(config)
    prompt, ids = encode_prompt(config.generate, vocabulary)
    built = build_trained(config, run, log=print)
    step, params = load_parameters(built, run, log=print)
    generator = built.generator(built.prepare_params(params))
    at_most = "" if stop is None else "at most "
    print(f"--- step {step}, seed {config.generate.seed}, {at_most}{config.generate.length} tokens ---")
    sampled = generator.tokens(ids, config.generate, stop_token=stop, stop_requested=stop_requested)
    blocks = _stream(sampled, vocabulary, prompt, stop)
    if not blocks:
        return []  # Stopped while the prompt was read.
    texts = [vocabulary.decode(_until_stop(stop, row)) for row in np.concatenate(blocks, axis=1)]
    for number, text in enumerate(texts[1:], start=2):
        print(f"--- sample {number} ---\n{(prompt + text).decode(errors='replace')}", flush=True)
    path = os.path.join(run.outputs, f"sample-seed{config.generate.seed}.txt")
    separated = _SEPARATOR.join(prompt + text for text in texts) + b"\n"
    distributed.broadcast_from_primary(lambda: storage.write(path, separated))
    print(f"sample    {path}", flush=True)
    return texts


def make_sampler(built: Built, vocabulary: Vocabulary) -> Callable[[Any, Callable[[], Any]], bytes]:
    """Returns (parameters, stop_requested) -> all samples as one text; it compiles once. Raises as `generate_text`."""
    config = built.config.generate
    check_can_generate(built.config)
    stop = read_stop(config, vocabulary)
    prompt, ids = encode_prompt(config, vocabulary)

    def sample(params: Any, stop_requested: Callable[[], Any]) -> bytes:
        generator = built.generator(built.prepare_params(params))
        blocks = generator.tokens(ids, config, stop_token=stop, stop_requested=stop_requested)
        rows = np.concatenate([np.zeros((config.samples, 0), np.int32), *blocks], axis=1)
        return _SEPARATOR.join(prompt + vocabulary.decode(_until_stop(stop, row)) for row in rows) + b"\n"

    return sample


def encode_prompt(config: GenerateConfig, vocabulary: Vocabulary) -> tuple[bytes, np.ndarray]:
    """Returns the prompt of process 0 as the model reads it, and the ids [T] to continue; a collective."""
    prompt = os.fsencode(distributed.broadcast_from_primary(lambda: os.fsdecode(read_prompt(config))))
    with rephrased("the prompt cannot be read by this model: %s", ValueError):
        ids = vocabulary.encode(prompt)
    # As the model reads it: words with single spaces between them, for example.
    return vocabulary.decode(ids), ids if len(ids) else vocabulary.start


def check_can_generate(config: ExperimentConfig) -> None:
    """Raises `UserError` if the model cannot generate token by token."""
    is_transformer = config.model.network is Network.TRANSFORMER_XL
    config.expect(is_transformer, "model.network", "its models can be scored and do not generate text")
    counted = "its positions count within a segment; only models with relative positions generate text"
    config.expect(encoding_of(config.model).generates_by_token, "model.encoding", counted)
    alone = "each token would see only the one before it; give a memory with --eval.mem_len, and no stride"
    config.expect(config.eval.mem_len, "eval.mem_len eval.stride", alone)


def read_prompt(config: GenerateConfig) -> bytes:
    """Returns the prompt as bytes, empty if none is set; raises `UserError` if `prompt_file` cannot be read."""
    if not config.prompt_file:
        return os.fsencode(config.prompt or "")  # As typed: the bytes need not be valid UTF-8.
    with rephrased(f"cannot read the prompt file {config.prompt_file} (%s); check --generate.prompt_file", OSError):
        return storage.read(config.prompt_file)


def read_stop(config: GenerateConfig, vocabulary: Vocabulary) -> int | None:
    """Returns the id of the stop token, or None if none is set; raises `UserError` unless the text is one token."""
    return ready_ids.find_token(vocabulary, config.stop, name="generate.stop") if config.stop else None


def _stream(sampled: Iterable[np.ndarray], vocabulary: Vocabulary, prompt: bytes, stop: int | None) -> list[np.ndarray]:
    """Prints the prompt and the first sample as its tokens come; returns the blocks of all samples, [samples, T]."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    _write(decoder.decode(prompt))
    blocks: list[np.ndarray] = []
    ended = False  # Whether the first sample has ended; others may continue.
    for block in sampled:
        blocks.append(block)
        if not ended:
            _write(decoder.decode(vocabulary.decode(_until_stop(stop, block[0]))))
            ended = stop in block[0].tolist()
    _write(decoder.decode(b"", final=True) + "\n")
    return blocks


def _until_stop(stop: int | None, tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens [T] up to and including the first stop token."""
    found = [] if stop is None else np.flatnonzero(tokens == stop).tolist()
    return tokens[: found[0] + 1] if found else tokens
