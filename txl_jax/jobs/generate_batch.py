"""Generation after many prompts: groups of prompts of about the same length, their texts, and stop strings."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from txl_jax.assemble import RunComponents
from txl_jax.config import GenerateConfig
from txl_jax.data.tokens.text_stream import TextStream
from txl_jax.data.tokens.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.inference.batch_generator import BatchGenerator, Drawn, Prompts, row_key
from txl_jax.inference.generator import Weights
from txl_jax.modules.transformer_xl import TransformerXL


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
    """Returns the generator of a model that can generate (`jobs.generate.check_can_generate`)."""
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
