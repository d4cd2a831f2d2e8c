"""Generation with a trained run, which samples texts after a prompt.

The first text is streamed as it is written.
"""

import codecs
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from txl_jax.config import ExperimentConfig, GenerateConfig, Network
from txl_jax.data import ready_ids
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

    The first text is printed as it is written. All texts are saved in the model's directory.

    Returns the texts, each with the prompt and the stop that ended it. Raises `UserError` if the
    model has no checkpoint or cannot generate, or the prompt or the stop cannot be read.
    `stop_requested` is asked between segments of the prompt and between blocks of tokens.
    """
    weights = TrainedModel.of(model, config)
    check_same_settings(config)
    sample = make_sampler(config, weights.vocabulary)
    folder = weights.outputs()
    built = weights.build(log=say)
    step, params = weights.params(built, log=say)
    at_most = "at most " if config.generate.stop else ""
    print(
        f"--- step {step}, seed {config.generate.seed}, "
        f"{at_most}{config.generate.length} tokens ---"
    )
    texts = sample(built, params, stop_requested, functools.partial(print, end="", flush=True))
    path = os.path.join(folder or "", f"sample-seed{config.generate.seed}.txt")
    is_saved = bool(texts) and folder is not None
    if is_saved:  # First, because printing may fail.
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
    config, vocabulary, batch_size = (
        model.config.generate,
        model.vocabulary,
        model.config.eval.batch_size,
    )
    check_can_generate(model.config)
    options: dict[str, Any] = {"ending": read_stop(config, vocabulary), "batch_size": batch_size}
    built = model.build(log=say)
    generator = built.generator(built.prepare_params(model.params(built, log=say)[1]))
    n_unknown = 0
    n_token = 0
    rows = (
        (numbered, sample) for numbered in enumerate(prompts) for sample in range(config.samples)
    )
    while group := list(itertools.islice(rows, batch_size)):
        read = [
            ready_ids.token_ids(vocabulary, text, name=f"line {line} of {name}")
            for (_, (line, text)), _ in group
        ]
        n_unknown += vocabulary.count_unknown(*read)
        n_token += sum(map(len, read))
        ids, draws = (
            [each if len(each) else vocabulary.start for each in read],
            [(config.seed, k) for _, k in group],
        )
        texts = [""] * len(group)
        for number, piece in generator.pieces(
            ids, config, draws=draws, decode=vocabulary.decode, **options
        ):
            texts[number] += piece
        for ((index, (_, prompt)), sample), text in zip(group, texts, strict=True):
            record = {
                "index": index,
                "sample": sample,
                "prompt": prompt.decode(errors="replace"),
                "text": text,
            }
            write(json.dumps(record) + "\n")
    note_unknown(n_unknown, n_token, "so the model does not read the prompts as they are written")


def make_sampler(config: ExperimentConfig, vocabulary: Vocabulary) -> Callable[..., list[bytes]]:
    """Returns a function of (built model, parameters, stop_requested, write) that generates texts.

    A collective.

    It returns process 0's prompt with each sample after it, or no texts if a stop came while the
    prompt was read. `write` takes the pieces of the first one as its tokens come. Samples of a
    model compile once. Raises `UserError` if such a model cannot generate, or the prompt or the
    stop cannot be read.
    """
    check_can_generate(config)
    settings = config.generate
    ending = read_stop(settings, vocabulary)
    as_bytes = isinstance(vocabulary, ByteVocabulary)
    typed = os.fsencode(
        distributed.broadcast_from_primary(
            lambda: os.fsdecode(read_prompt(settings, as_bytes=as_bytes))
        )
    )
    ids = ready_ids.token_ids(vocabulary, typed, name="the prompt")
    note_unknown(
        vocabulary.count_unknown(ids),
        len(ids),
        "so the model does not read the prompt as it is written",
    )
    # As the model reads it: words with single spaces between them, for example.
    prompt = vocabulary.decode(ids)

    def sample(
        built: Built,
        params: Any,
        stop_requested: Callable[[], Any],
        write: Callable[[str], Any] = lambda text: None,
    ) -> list[bytes]:
        generator = built.generator(built.prepare_params(params))
        first = ids if len(ids) else vocabulary.start
        blocks = generator.tokens(first, settings, stop_token=ending, stop_requested=stop_requested)
        streams = [
            TextStream(vocabulary.decode, (), ending, "surrogateescape")
            for _ in range(settings.samples)
        ]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        write(decoder.decode(prompt))
        texts = [prompt] * settings.samples

        def add(pieces: Iterable[str]) -> None:
            for number, piece in enumerate(pieces):
                texts[number] += (content := piece.encode(errors="surrogateescape"))
                if number == 0:
                    write(decoder.decode(content))

        has_begun = False
        for block in blocks:
            has_begun = True
            add(stream.add(row) for stream, row in zip(streams, block, strict=True))
            # By strings, which the generator does not see.
            if all(stream.ended for stream in streams):
                break
        add(stream.finish() for stream in streams)
        write(decoder.decode(b"", final=True) + "\n")
        return texts if has_begun else []

    return sample


def as_file(texts: Sequence[bytes]) -> bytes:
    """Returns samples as the content of one file."""
    return b"\n\n--- next sample ---\n\n".join(texts) + b"\n"


def check_can_generate(config: ExperimentConfig) -> None:
    """Raises `UserError` if the model cannot generate token by token."""
    is_transformer = config.model.network is Network.TRANSFORMER_XL
    config.expect(
        is_transformer, "model.network", "its models can be scored, but cannot generate text"
    )
    counted = (
        "its positions count within a segment. Only models with relative positions generate text"
    )
    config.expect(encoding_of(config.model).generates_by_token, "model.encoding", counted)
    alone = "each token would attend only to the one before it. Set --eval.mem_len, and no stride"
    config.expect(config.eval.mem_len, "eval.mem_len eval.stride", alone)


def read_prompt(config: GenerateConfig, *, as_bytes: bool = False) -> bytes:
    """Returns the prompt as bytes, empty if none is set.

    Raises `UserError` if `prompt_file` cannot be read.

    A file's byte-order mark is dropped unless it is read `as_bytes`, for a model of bytes.
    """
    if not config.prompt_file:
        # The bytes that are typed need not be valid UTF-8.
        return os.fsencode(unescape(config.prompt or ""))
    with rephrased(
        f"cannot read the prompt file {config.prompt_file} (%s). Check --generate.prompt_file.",
        OSError,
    ):
        content = storage.read_small(config.prompt_file)
    return content if as_bytes else content.removeprefix(BYTE_ORDER_MARK.encode())


def read_stop(config: GenerateConfig, vocabulary: Vocabulary) -> Ending:
    """Returns the token or the text that ends a sample, or None.

    Raises `UserError` if a token is unknown.
    """
    if not config.stop:
        return None
    ids = ready_ids.find_tokens(vocabulary, config.stop, name="generate.stop", several=True)
    if isinstance(vocabulary, SubwordVocabulary):  # The text may be inside of a token.
        return os.fsencode(unescape(config.stop))
    return ids[0] if len(ids) == 1 else vocabulary.decode(ids)
