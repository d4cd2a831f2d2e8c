"""The continuation job: the model writes on from a part of a text, and the text itself stands beside (appendix E).

The paper's texts were seeded with a part of WikiText-103's test set and drawn among the 40 likeliest words.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import ExperimentConfig, Tokenizer
from txl_jax.data.corpus import Corpus
from txl_jax.inference.generator import Generator
from txl_jax.jobs.generate import check_can_generate
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import Interrupted
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.paper.detokenize import detokenise
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.files import write_text


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    trained_on: TextInfo,
    path: Path,
    split: str = "test",
    starts: Sequence[int] = (0,),
    context: int = 512,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> None:
    """Writes a markdown file with a context, the model's continuation and the text's own, for each start.

    Args:
      path: of the file.
      starts: tokens of the text at which contexts begin.
      context: tokens of a context. `generate.length` are written after it.

    Raises:
      ValueError: a start that leaves no room, or a model that cannot write.
      FileNotFoundError: the workdir holds no checkpoint.
      Interrupted: a stop was requested; nothing is written.
    """
    check_can_generate(config)
    tokens, length = np.asarray(getattr(corpus, split)), config.generate.length
    for start in starts:
        if not 0 <= start <= len(tokens) - context - length:
            raise ValueError(
                f"a context of {context:,} tokens and {length:,} after it were asked for at token {start:,}, and the {split} "
                f"text has {len(tokens):,}; the last place with room is {len(tokens) - context - length:,}"
            )
    parts, step, params = load_to_score(config, corpus, workdir, trained_on=trained_on, log=log)
    generator = Generator(
        parts.model, config.eval, config.generate, memory_dtype=parts.evaluation.memory_dtype, mesh=parts.mesh
    )
    weights = generator.prepare_params(params)
    sections = [_opening(config, corpus, split, step)]
    for start in starts:
        known = tokens[start : start + context]
        blocks = list(generator.tokens(weights, known, stop_requested=stop_requested))
        if stop_requested():
            raise Interrupted(f"the continuation of token {start:,}")
        written = np.concatenate(blocks, axis=1)
        own = tokens[start + context : start + context + length]
        sections.append(_section(corpus, start, known, written, own))
        log(f"written   from token {start:,}: {len(written)} x {length:,} tokens")
    distributed.broadcast_from_primary(lambda: write_text(path, "\n".join(sections)))
    log(f"results   {path}")


def _opening(config: ExperimentConfig, corpus: Corpus, split: str, step: int) -> str:
    how, facts = config.generate, environment.describe()
    drawn = f"among the {how.top_k} likeliest tokens" if how.top_k else "among all tokens"
    return (
        f"# Written from {corpus.description} ({split})\n\n"
        f"Step {step:,}; drawn {drawn}, temperature {how.temperature:g}, seed {how.seed}, with a memory of "
        f"{config.eval.mem_len:,}; {facts['device']}, {facts['date']}.\n"
    )


def _section(corpus: Corpus, start: int, known: np.ndarray, written: np.ndarray, own: np.ndarray) -> str:
    lines = [f"## From token {start:,}", "", f"### Context ({len(known):,} tokens)", "", _quoted(corpus, known), ""]
    for number, row in enumerate(written, start=1):
        which = "" if len(written) == 1 else f" {number}"
        lines += [f"### The model's continuation{which} ({len(row):,} tokens)", "", _quoted(corpus, row), ""]
    return "\n".join([*lines, f"### The text's own ({len(own):,} tokens)", "", _quoted(corpus, own), ""])


def _quoted(corpus: Corpus, ids: np.ndarray) -> str:
    """As a block of markdown that shows what stands there and nothing else."""
    text = corpus.vocabulary.decode(ids).decode(errors="replace")
    if corpus.vocabulary.kind == Tokenizer.WORD:
        text = detokenise(text)
    return "\n".join(f"> {line}" if line.strip() else ">" for line in _escaped(text).splitlines())


def _escaped(text: str) -> str:
    """Lines that markdown shows as they are: signs that mean something to it, and what would begin a list or a heading."""
    text = re.sub(r"([\\`*_<>\[\]#|&~])", r"\\\1", text)
    text = re.sub(
        r"^( *)([-+=]|\d+[.)])",
        lambda match: f"{match[1]}\\{match[2]}" if match[2] in "-+=" else f"{match[1]}{match[2][:-1]}\\{match[2][-1]}",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^ {4,}", lambda match: "&nbsp;" * len(match[0]), text, flags=re.MULTILINE)
    return text.replace("\n", "  \n")
