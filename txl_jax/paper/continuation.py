"""The model's continuations of a text beside the text's own: appendix E of the paper.

The paper's prompts are parts of WikiText-103's test set; it sampled with top-k, k = 40.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from txl_jax import cli
from txl_jax.config import ExperimentConfig, Tokenizer
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError
from txl_jax.inference.generator import Generator
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.paper.detokenize import detokenize
from txl_jax.paper.study import Split
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.run import Run
from txl_jax.runs.score import Interrupted
from txl_jax.runs.weights import load_to_score
from txl_jax.runtime import distributed, environment, storage


@dataclasses.dataclass(frozen=True)
class Plan(cli.TrainedRun):
    """The contexts that are continued."""

    split: Split = setting(Split.TEST, "Text that has the contexts.")
    starts: tuple[int, ...] = setting((0,), "Tokens of the text at which contexts begin.")
    context: int = setting(512, "Tokens of a context.", at_least=1)
    out: str | None = setting(None, "Markdown file; none: continuation.md in the workdir.", path=True)

    def validate(self) -> None:
        """Raises `UserError` for no start, or a setting out of range."""
        check_fields(self, "")
        require(self.starts, "no start was given; give numbers of tokens, as 1000,52000")

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` for a model that cannot generate."""
        check_can_generate(config)


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> None:
    """Writes a markdown file with a context, the model's continuation and the text's own, for each start.

    Args:
      config: of the trained run; `generate.length` tokens are written after a context.
      corpus: has the text.
      trained: the run; another text than its own may be read if its vocabulary is the same.
      plan: text, starts and length of the contexts.
      log: takes lines for the user.
      stop_requested: whether to stop.

    Raises:
      UserError: a start too near the end, a model that cannot generate, or no checkpoint.
      Interrupted: a stop was requested; nothing is written.
    """
    plan.validate()
    plan.check(config)
    tokens, length, context = np.asarray(getattr(corpus, plan.split)), config.generate.length, plan.context
    for start in plan.starts:
        if not 0 <= start <= len(tokens) - context - length:
            raise UserError(
                f"a context of {context:,} tokens and {length:,} after it were asked for at token {start:,}, and the "
                f"{plan.split} text has {len(tokens):,}; the last possible start is {len(tokens) - context - length:,}"
            )
    path = plan.out or os.path.join(trained.outputs, "continuation.md")
    parts, step, params = load_to_score(config, corpus, trained, log=log)
    assert isinstance(parts.model, TransformerXL)  # As `check` found.
    generator = Generator(
        parts.model, config.eval, config.generate, memory_dtype=parts.evaluation.memory_dtype, mesh=parts.mesh
    )
    weights = generator.prepare_params(params)
    sections = [_opening(config, corpus, plan.split, step)]
    for start in plan.starts:
        known = tokens[start : start + context]
        blocks = list(generator.tokens(weights, known, stop_requested=stop_requested))
        if stop_requested():
            raise Interrupted(f"the continuation of token {start:,}")
        written = np.concatenate(blocks, axis=1)
        own = tokens[start + context : start + context + length]
        sections.append(_section(corpus, start, known, written, own))
        log(f"written   from token {start:,}: {len(written)} x {length:,} tokens")
    distributed.broadcast_from_primary(lambda: storage.write(path, "\n".join(sections).encode()))
    log(f"results   {path}")


def _opening(config: ExperimentConfig, corpus: Corpus, split: str, step: int) -> str:
    how, facts = config.generate, environment.describe()
    sampled = "from all tokens" if how.top_k is None else f"with top-k, k = {how.top_k}"
    return (
        f"# Continuations of {corpus.description} ({split})\n\n"
        f"Step {step:,}; sampled {sampled}, temperature {how.temperature:g}, seed {how.seed}, with a memory of "
        f"{config.eval.mem_len:,}; {facts['device']}, {facts['date']}.\n"
    )


def _section(corpus: Corpus, start: int, known: np.ndarray, written: np.ndarray, own: np.ndarray) -> str:
    lines = [f"## From token {start:,}", "", f"### Context ({len(known):,} tokens)", "", _quoted(corpus, known), ""]
    for number, row in enumerate(written, start=1):
        which = "" if len(written) == 1 else f" {number}"
        lines += [f"### The model's continuation{which} ({len(row):,} tokens)", "", _quoted(corpus, row), ""]
    return "\n".join([*lines, f"### The text's own ({len(own):,} tokens)", "", _quoted(corpus, own), ""])


def _quoted(corpus: Corpus, ids: np.ndarray) -> str:
    """Returns tokens as a quotation in markdown that shows the text literally."""
    text = corpus.vocabulary.decode(ids).decode(errors="replace")
    if corpus.vocabulary.kind == Tokenizer.WORD:
        text = detokenize(text)
    return "\n".join(f"> {line}" if line.strip() else ">" for line in _escaped(text).splitlines())


def _escaped(text: str) -> str:
    """Escapes the characters that markdown interprets, and those that would begin a list or a heading."""
    text = re.sub(r"([\\`*_<>\[\]#|&~])", r"\\\1", text)
    text = re.sub(
        r"^( *)([-+=]|\d+[.)])",
        lambda match: f"{match[1]}\\{match[2]}" if match[2] in "-+=" else f"{match[1]}{match[2][:-1]}\\{match[2][-1]}",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^ {4,}", lambda match: "&nbsp;" * len(match[0]), text, flags=re.MULTILINE)
    return text.replace("\n", "  \n")
