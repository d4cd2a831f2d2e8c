"""Generation with a trained run: samples texts after a prompt, and streams the first as it is written."""

import codecs
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from txl_jax.config import ExperimentConfig, GenerateConfig, Network
from txl_jax.data import ready_ids
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.vocabulary import Ending, TextStream, Vocabulary, unescape
from txl_jax.errors import rephrased
from txl_jax.modules.positions import encoding_of
from txl_jax.runs.build import Built
from txl_jax.runs.run import Run, check_same_settings
from txl_jax.runs.weights import Weights
from txl_jax.runtime import distributed, storage

_SEPARATOR = b"\n\n--- next sample ---\n\n"


def generate_text(
    config: ExperimentConfig, model: Run | Weights, *, stop_requested: Callable[[], Any] = lambda: False
) -> list[bytes]:
    """Prints `generate.samples` texts of a trained model, the first as it is written, and saves all in its directory.

    Returns the texts without the prompt, each with the stop that ended it. Raises `UserError` if the model has no
    checkpoint or cannot generate, or the prompt or the stop cannot be read. `stop_requested` is asked between segments
    of the prompt and between blocks of tokens.
    """
    weights = Weights.of(model, config)
    vocabulary = weights.vocabulary
    check_can_generate(config)
    ending = read_stop(config.generate, vocabulary)
    check_same_settings(config)
    prompt, ids = encode_prompt(config.generate, vocabulary)
    folder = weights.outputs()
    built = weights.build(log=print)
    step, params = weights.params(built, log=print)
    generator = built.generator(built.prepare_params(params))
    at_most = "" if ending is None else "at most "
    print(f"--- step {step}, seed {config.generate.seed}, {at_most}{config.generate.length} tokens ---")
    sampled = generator.tokens(ids, config.generate, stop_token=ending, stop_requested=stop_requested)
    write = functools.partial(print, end="", flush=True)
    texts = _stream(sampled, _streams(config.generate, vocabulary, ending), prompt, write=write)
    if not texts:
        return []  # Stopped while the prompt was read.
    for number, text in enumerate(texts[1:], start=2):
        print(f"--- sample {number} ---\n{(prompt + text).decode(errors='replace')}", flush=True)
    if folder is not None:
        path = os.path.join(folder, f"sample-seed{config.generate.seed}.txt")
        separated = _SEPARATOR.join(prompt + text for text in texts) + b"\n"
        print(f"sample    {path}{distributed.broadcast_from_primary(lambda: _save(path, separated))}")
    return texts


def _save(path: str, content: bytes) -> str:
    """Writes the samples. Returns a clause for the user if they replace others."""
    note = ", replacing an earlier one" if storage.exists(path) and storage.read(path) != content else ""
    storage.write(path, content)
    return note


def continue_prompts(
    model: Weights, prompts: Iterable[tuple[int, bytes]], *, name: str, write: Callable[[str], Any]
) -> None:
    """Writes a JSON record of each sample after each prompt, in their order.

        {"index": 0, "sample": 0, "prompt": "Once upon", "text": " a time"}

    `index` counts the prompts, and `sample` the samples of each, which are the same as from `generate_text`.
    `eval.batch_size` samples are generated in parallel. Arguments and errors are as for `score.score_documents`.
    """
    config, vocabulary, batch_size = model.config.generate, model.vocabulary, model.config.eval.batch_size
    check_can_generate(model.config)
    options: dict[str, Any] = {"ending": read_stop(config, vocabulary), "batch_size": batch_size}
    built = model.build(log=print)
    generator = built.generator(built.prepare_params(model.params(built, log=print)[1]))
    rows = ((numbered, sample) for numbered in enumerate(prompts) for sample in range(config.samples))
    while group := list(itertools.islice(rows, batch_size)):
        read = (ready_ids.token_ids(vocabulary, text, name=f"line {line} of {name}") for (_, (line, text)), _ in group)
        ids, draws = [each if len(each) else vocabulary.start for each in read], [(config.seed, k) for _, k in group]
        texts = [""] * len(group)
        for number, piece in generator.pieces(ids, config, draws=draws, decode=vocabulary.decode, **options):
            texts[number] += piece
        for ((index, (_, prompt)), sample), text in zip(group, texts, strict=True):
            record = {"index": index, "sample": sample, "prompt": prompt.decode(errors="replace"), "text": text}
            write(json.dumps(record) + "\n")


def make_sampler(built: Built, vocabulary: Vocabulary) -> Callable[[Any, Callable[[], Any]], bytes]:
    """Returns (parameters, stop_requested) -> all samples as one text. It compiles once. Raises as `generate_text`."""
    config = built.config.generate
    check_can_generate(built.config)
    ending = read_stop(config, vocabulary)
    prompt, ids = encode_prompt(config, vocabulary)

    def sample(params: Any, stop_requested: Callable[[], Any]) -> bytes:
        generator = built.generator(built.prepare_params(params))
        sampled = generator.tokens(ids, config, stop_token=ending, stop_requested=stop_requested)
        texts = _stream(sampled, _streams(config, vocabulary, ending), prompt, write=lambda text: None)
        return _SEPARATOR.join(prompt + text for text in texts) + b"\n"

    return sample


def encode_prompt(config: GenerateConfig, vocabulary: Vocabulary) -> tuple[bytes, np.ndarray]:
    """Returns the prompt of process 0 as the model reads it, and the ids [T] to continue. A collective."""
    prompt = os.fsencode(distributed.broadcast_from_primary(lambda: os.fsdecode(read_prompt(config))))
    ids = ready_ids.token_ids(vocabulary, prompt, name="the prompt")
    # As the model reads it: words with single spaces between them, for example.
    return vocabulary.decode(ids), ids if len(ids) else vocabulary.start


def check_can_generate(config: ExperimentConfig) -> None:
    """Raises `UserError` if the model cannot generate token by token."""
    is_transformer = config.model.network is Network.TRANSFORMER_XL
    config.expect(is_transformer, "model.network", "its models can be scored, but cannot generate text")
    counted = "its positions count within a segment. Only models with relative positions generate text"
    config.expect(encoding_of(config.model).generates_by_token, "model.encoding", counted)
    alone = "each token would attend only to the one before it. Set --eval.mem_len, and no stride"
    config.expect(config.eval.mem_len, "eval.mem_len eval.stride", alone)


def read_prompt(config: GenerateConfig) -> bytes:
    """Returns the prompt as bytes, empty if none is set. Raises `UserError` if `prompt_file` cannot be read."""
    if not config.prompt_file:
        return os.fsencode(unescape(config.prompt or ""))  # The bytes that are typed need not be valid UTF-8.
    with rephrased(f"cannot read the prompt file {config.prompt_file} (%s). Check --generate.prompt_file.", OSError):
        return storage.read(config.prompt_file)


def read_stop(config: GenerateConfig, vocabulary: Vocabulary) -> Ending:
    """Returns the token or the text that ends a sample, or None. Raises `UserError` if a token is unknown."""
    if not config.stop:
        return None
    ids = ready_ids.find_tokens(vocabulary, config.stop, name="generate.stop", several=True)
    if isinstance(vocabulary, SubwordVocabulary):  # The text may be inside of a token.
        return os.fsencode(unescape(config.stop))
    return ids[0] if len(ids) == 1 else vocabulary.decode(ids)


def _streams(config: GenerateConfig, vocabulary: Vocabulary, ending: Ending) -> list[TextStream]:
    return [TextStream(vocabulary.decode, (), ending, "surrogateescape") for _ in range(config.samples)]


def _stream(
    sampled: Iterable[np.ndarray], streams: Sequence[TextStream], prompt: bytes, *, write: Callable[[str], Any]
) -> list[bytes]:
    """Writes the prompt and the first sample as its tokens come. Returns all samples, or none if no token came."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    write(decoder.decode(prompt))
    texts = [b""] * len(streams)

    def add(pieces: Iterable[str]) -> None:
        for number, piece in enumerate(pieces):
            texts[number] += (content := piece.encode(errors="surrogateescape"))
            if number == 0:
                write(decoder.decode(content))

    has_begun = False
    for block in sampled:
        has_begun = True
        add(stream.add(row) for stream, row in zip(streams, block, strict=True))
        if all(stream.ended for stream in streams):  # By strings, which the generator does not see.
            break
    add(stream.finish() for stream in streams)
    write(decoder.decode(b"", final=True) + "\n")
    return texts if has_begun else []
