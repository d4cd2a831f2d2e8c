"""Scores of both splits of a corpus, and files with the loss of each of their tokens."""

import enum
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.vocabulary import Vocabulary, escape
from txl_jax.metrics import Totals
from txl_jax.runs.dynamic import check_can_learn
from txl_jax.runs.dynamic_statistics import learning_model
from txl_jax.runs.run import Run
from txl_jax.runs.score import as_result, note_unknown, score, score_text_with_line
from txl_jax.runs.trained import TrainedModel, load_to_score
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import write_json, write_lines

_TOKENS_PER_BLOCK = 1 << 16
# Control characters and line separators. A reader may end a line at them, and a terminal may
# interpret control characters.
_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}]")


class Split(enum.StrEnum):
    """A split that is scored."""

    VALID = "valid"
    TEST = "test"


class Kind(enum.StrEnum):
    """How a split is scored, if both ways are reported together."""

    STATIC = "static"  # With the trained parameters, unchanged.
    DYNAMIC = "dynamic"  # Learning from each segment after it was scored (`runs.dynamic`).


def evaluate_splits(
    config: ExperimentConfig,
    corpus: Corpus,
    model: Run | TrainedModel,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Any]:
    """Scores both splits at the evaluation lengths of `config`. Returns and writes evaluation.json.

    With `eval.dynamic.rule` they are scored twice, and the results are below the keys static and
    dynamic.

    The text may differ from the training text if its vocabulary is the same. After `Interrupted`
    nothing is written.
    """
    trained = TrainedModel.of(model, config)
    check_can_learn(trained)
    folder = trained.outputs()
    built, step, params = load_to_score(config, corpus, trained, log=say)
    results: dict[str, Any] = {
        "text": corpus.description,
        "text_sha256": corpus.digest,
        "step": step,
        "eval": config_tree.to_dict(config.eval),
        **environment.describe(),
    }

    def results_of(score_text: Callable[..., Totals], kind: Kind | None) -> dict[str, Any]:
        scored_splits = _score_splits(score_text, trained, corpus, stop_requested, kind=kind)
        return {
            str(scored.split): as_result(scored.totals, corpus.vocabulary)
            for scored in scored_splits
        }

    static = functools.partial(score, built, params)
    if config.eval.dynamic.rule is None:
        results |= results_of(static, None)
    else:
        # Checked before the first score, because a text that cannot be learned from is an error.
        dynamic_model = learning_model(
            trained, params, corpus=corpus, folder=folder, stop_requested=stop_requested
        )
        results[Kind.STATIC] = results_of(static, Kind.STATIC)
        results[Kind.DYNAMIC] = results_of(dynamic_model.score, Kind.DYNAMIC)

    if folder is not None:
        path = os.path.join(folder, "evaluation.json")
        distributed.broadcast_from_primary(lambda: write_json(path, results))
        print(f"results   {path}")
    return results


def score_tokens(
    config: ExperimentConfig,
    corpus: Corpus,
    model: Run | TrainedModel,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Totals]:
    r"""Scores both splits like `evaluate_splits`.

    With `eval.dynamic.rule` each token's loss is computed before it is learned.

    Writes scores-valid.tsv and scores-test.tsv, each when it is done.

        index	token	nats
        1	h	2.3841858
        2	\n	0.017624786

    There is a line for each token except the first, in the order of the text, with its name escaped
    by `printable`. `nats` is its negative logprob, and reads back as exactly the number that was
    computed. It depends on the evaluation lengths and on `eval.batch_size`: every row of the batch
    starts from an empty memory.
    """
    totals: dict[str, Totals] = {}
    trained = TrainedModel.of(model, config)
    check_can_learn(trained)
    folder = trained.outputs(needed=True) or ""
    built, _, params = load_to_score(config, corpus, trained, log=say)
    if config.eval.dynamic.rule is None:
        kind = None
        score_text: Callable[..., Totals] = functools.partial(score, built, params)
    else:
        kind = Kind.DYNAMIC
        dynamic_model = learning_model(
            trained, params, corpus=corpus, folder=folder, stop_requested=stop_requested
        )
        score_text = dynamic_model.score

    # Each file is written before the next split is scored.
    scored_splits = _score_splits(
        score_text, trained, corpus, stop_requested, kind=kind, per_token=True
    )
    for scored in scored_splits:
        totals[scored.split] = scored.totals
        path = os.path.join(folder, f"scores-{scored.split}.tsv")
        lines = token_lines(getattr(corpus, scored.split), scored.nats, corpus.vocabulary)
        distributed.broadcast_from_primary(functools.partial(write_lines, path, lines))
        print(f"scores    {path}")
    return totals


class _ScoredSplit(NamedTuple):
    """The scores of one split."""

    split: Split
    totals: Totals
    # Floats [T], the nats of the split's tokens, or None if they were not requested.
    nats: Any


def _score_splits(
    score_text: Callable[..., Totals],
    trained: TrainedModel,
    corpus: Corpus,
    stop_requested: Callable[[], Any],
    *,
    kind: Kind | None,
    per_token: bool = False,
) -> Iterator[_ScoredSplit]:
    """Scores each split when it is needed.

    Args:
      score_text: Scores tokens, as `score` does after the parameters.
      trained: The model.
      corpus: The splits.
      stop_requested: Is called while a split is scored.
      kind: Name in the lines about the scores, or None to omit it.
      per_token: Whether to return the nats of tokens.
    """
    vocabulary = corpus.vocabulary
    scored: _ScoredSplit | None = None
    line = ""
    suffix = f" {kind}" if kind else ""
    for split in Split:
        tokens = getattr(corpus, split)
        if scored is not None and np.array_equal(corpus.valid, tokens):
            scores = line.removeprefix(Split.VALID).rpartition("  in ")[0]  # Without the time.
            print(f"{split}{scores}")
            print(
                f"note      {split} is the same text as {Split.VALID}, so it was not scored again"
            )
            yield scored._replace(split=split)
            continue

        nats = None
        if per_token:
            dtype = jnp.promote_types(jnp.float32, trained.config.model.dtype)
            nats = np.zeros(len(tokens), dtype)
        totals, line = score_text_with_line(
            score_text,
            tokens,
            name=f"{split}{suffix}",
            vocabulary=vocabulary,
            log=print,
            stop_requested=stop_requested,
            token_nats=nats,
        )
        print(line)
        if not totals.bytes:
            note_unknown(
                vocabulary.count_unknown(tokens[1:]),
                len(tokens) - 1,
                "so bits per byte cannot be computed",
            )
        scored = _ScoredSplit(split, totals, nats)
        yield scored


def token_lines(tokens: np.ndarray, nats: np.ndarray, vocabulary: Vocabulary) -> Iterator[str]:
    """Yields the lines of scores-*.tsv for ids [T] and their nats [T].

    The first token is omitted.
    """
    names = list(map(printable, vocabulary.names()))
    yield "index\ttoken\tnats\n"
    for first in range(1, len(tokens), _TOKENS_PER_BLOCK):
        block = slice(first, first + _TOKENS_PER_BLOCK)
        block_tokens = tokens[block].tolist()
        # numpy writes the fewest digits that reproduce the number.
        values = nats[block].astype(str).tolist()
        for offset, (token, value) in enumerate(zip(block_tokens, values, strict=True)):
            yield f"{first + offset}\t{names[token]}\t{value}\n"


def printable(name: bytes) -> str:
    r"""Escapes special characters in a token's name so that it can be printed on one line.

    It escapes tabs, line breaks, control characters, invalid UTF-8, and a quotation mark at the
    start of the name.

    >>> printable(b"a\tb"), printable("\n\N{LINE SEPARATOR}".encode()), printable("é".encode()[:1])
    ('a\\tb', '\\n\\u2028', '\\xc3')
    >>> printable(b'"a"')
    '\\u0022a"'
    """
    text = escape(name.decode(errors="surrogateescape")).replace("\t", "\\t")
    text = _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    # Table readers interpret a quotation mark as the start of a cell with multiple lines.
    if text.startswith('"'):
        text = f"\\u{ord(text[0]):04x}{text[1:]}"
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
