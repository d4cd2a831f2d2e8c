"""Attention weights of a trained run: appendix D of the paper, figures 5, 6 and 7.

The text is read as evaluation reads it, in one row, with `same_length`, so that every query sees A keys. Queries whose
memory is not full yet are left out of the average.
"""

import dataclasses
import io
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from txl_jax import cli, sharding
from txl_jax.config import ExperimentConfig, Network
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.errors import UserError
from txl_jax.metrics import Totals
from txl_jax.modules.positions import encoding_of
from txl_jax.paper import attention_terms, plots
from txl_jax.paper.study import Split
from txl_jax.runs.run import Run
from txl_jax.runs.score import progress_bar
from txl_jax.runs.validation import with_duration
from txl_jax.runs.weights import load_to_score
from txl_jax.runtime import environment
from txl_jax.runtime.storage import as_path, make_folder, write, write_json

_DEFAULT_HEADS = 3  # Heads of figures 6 and 7, as in the paper.
_TOP_TOKENS = 12  # Tokens that are listed per head.
_TERMS = {"a": "(a) content", "b": "(b) content and distance", "d": "(d) distance"}


@dataclasses.dataclass(frozen=True)
class Plan(cli.TrainedRun):
    """The text, and the heads and queries that are drawn."""

    split: Split = setting(Split.VALID, "Text that is read.")
    tokens: int | None = setting(None, "Tokens of the text that are read; none: all.", at_least=1)
    heads: tuple[str, ...] = setting(
        (), f"Heads drawn, as layer.head from 0; empty: the {_DEFAULT_HEADS} with the largest mean distance."
    )
    positions: tuple[int, ...] = setting((), "Tokens whose queries are drawn; empty: the last.")
    out: str | None = setting(None, "Folder of plots and arrays; none: attention in the workdir.", path=True)

    @property
    def layer_heads(self) -> list[tuple[int, int]]:
        """The heads as (layer, head); raises `UserError` for a text that is none."""
        try:
            pairs = [head.split(".") for head in self.heads]
            return [(int(layer), int(head)) for layer, head in pairs]
        except ValueError:
            raise UserError(f"heads is {','.join(self.heads)!r}; give layer.head, from 0, as 0.1,3.2") from None

    def validate(self) -> None:
        """Raises `UserError` for a setting out of range, or a head that is none."""
        check_fields(self, "")
        self.layer_heads  # noqa: B018 (raises)

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` for a model without relative attention to a memory, or without one of the heads."""
        model = config.model
        if model.network is not Network.TRANSFORMER_XL or not encoding_of(model).has_four_terms:
            kind = model.network if model.network is not Network.TRANSFORMER_XL else f"encoding {model.encoding}"
            raise UserError(f"the run is of {kind}; these plots are of relative attention with the terms (a) to (d)")
        require(
            config.eval.mem_len and config.train.mem_len,
            f"train.mem_len is {config.train.mem_len} and eval.mem_len {config.eval.mem_len}; a model without memory "
            "attends to none",
        )
        require(
            model.end_token is None,
            "the run keeps documents apart (data.reset_at), and the window of these plots reaches over their ends",
        )
        for layer, head in self.layer_heads:
            require(
                0 <= layer < model.n_layer and 0 <= head < model.n_head,
                f"head {layer}.{head} was asked for; layers are 0 to {model.n_layer - 1} and heads 0 to "
                f"{model.n_head - 1}",
            )


@dataclasses.dataclass(frozen=True)
class Query:
    """The attention of one query, by distance 0 .. A - 1.

    Attributes:
      position: of the query's own token in the text.
      probabilities: [N, H, A].
      terms: "a", "b" and "d": each its own softmax, [N, H, A].
    """

    position: int
    probabilities: np.ndarray
    terms: dict[str, np.ndarray]


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> np.ndarray:
    """Writes average.png, plots of heads and terms, their arrays and the tokens attended to into `plan.out`.

    Args:
      config: of the trained run.
      corpus: has the text.
      trained: the run; another text than its own may be read if its vocabulary is the same.
      plan: text, heads and queries.
      log: takes lines for the user.
      stop_requested: whether to stop.

    Returns:
      Mean probabilities [N, H, A].

    Raises:
      UserError: the model has no such attention or no memory, or not these heads, positions or tokens, or no
        checkpoint.
      Interrupted: a stop was requested; nothing is written.
    """
    plan.validate()
    plan.check(config)
    parts, step, params = load_to_score(config, corpus, trained, log=log)
    eval_config, tokens = config.eval, np.asarray(getattr(corpus, plan.split)[: plan.tokens])
    n_segment = len(tokens) // eval_config.segment_len
    first_full = -(-eval_config.mem_len // eval_config.segment_len)
    require(
        n_segment > first_full,
        f"{len(tokens):,} tokens are read and the memory has {eval_config.mem_len:,} slots, which would not be full; "
        "read more, or give a shorter --eval.mem_len",
    )
    first, last = first_full * eval_config.segment_len, n_segment * eval_config.segment_len - 1
    positions = plan.positions or (last,)
    for position in positions:
        require(
            first <= position <= last,
            f"position {position:,} was asked for; queries with a full memory are at {first:,} to {last:,}",
        )
    progress = {"measure": corpus.vocabulary.measure, "log": log, "stop_requested": stop_requested}
    began = time.monotonic()
    average, queries = _read(parts, params, tokens, first_full, positions, progress)
    folder = as_path(plan.out) if plan.out else os.path.join(trained.outputs, "attention")
    make_folder(folder)
    heads = plan.layer_heads or attention_terms.widest(average, _DEFAULT_HEADS)
    _write(folder, average, heads, queries, tokens, corpus, facts={"step": int(step), "split": plan.split}, log=log)
    log(with_duration(f"results   {folder}", time.monotonic() - began))
    return average


def _read(
    parts: Any, params: Any, tokens: np.ndarray, first_full: int, positions: Sequence[int], progress: dict[str, Any]
) -> tuple[np.ndarray, list[Query]]:
    """Reads the text segment by segment; returns mean probabilities, and the queries at `positions`."""
    eval_config, model = parts.config.eval, parts.model
    length = eval_config.segment_len

    def weights_of(params: Any, segment: jax.Array, memory: Any) -> Any:
        return attention_terms.attention_weights(
            params, model, segment, memory, clamp_len=eval_config.clamp_len, same_length=True
        )

    def sum_weights(params: Any, segment: jax.Array, memory: Any) -> Any:
        weights, memory = weights_of(params, segment, memory)
        return weights.probabilities.sum(axis=(1, 3)), memory

    summed_weights = sharding.bind_mesh(parts.mesh, jax.jit(sum_weights))
    # All weights of a segment can be a gigabyte: only where a query is asked for.
    all_weights = sharding.bind_mesh(parts.mesh, jax.jit(weights_of))
    memory = model.init_memory(batch_size=1, mem_len=eval_config.mem_len)
    total: Any = 0.0
    found: dict[int, Query] = {}
    n_segment = len(tokens) // length
    with progress_bar("attention", total=n_segment, unit="segment", **progress) as show:
        for k in range(n_segment):
            segment = tokens[None, k * length : (k + 1) * length].astype(np.int32)
            here = [position for position in positions if position // length == k]
            if here:
                weights, _ = all_weights(params, segment, memory)
                found |= {position: _query(weights, position, position % length) for position in here}
            summed, memory = summed_weights(params, segment, memory)
            if k >= first_full:
                total = total + np.asarray(summed, np.float64)
            show(k + 1, Totals())
    return total / ((n_segment - first_full) * length), [found[position] for position in positions]


def _query(weights: attention_terms.AttentionWeights, position: int, row: int) -> Query:
    terms = {name: np.asarray(getattr(weights.terms, name)[:, 0, :, row]) for name in _TERMS}
    return Query(
        position=position,
        probabilities=np.asarray(weights.probabilities[:, 0, :, row]),
        terms={name: np.asarray(jax.nn.softmax(term, axis=-1)) for name, term in terms.items()},
    )


def _write(
    folder: str,
    average: np.ndarray,
    heads: Sequence[tuple[int, int]],
    queries: Sequence[Query],
    tokens: np.ndarray,
    corpus: Corpus,
    *,
    facts: dict[str, Any],
    log: Callable[[str], None],
) -> None:
    """Writes the arrays, then lists and plots of them."""
    distances = attention_terms.mean_distances(average)
    arrays: dict[str, Any] = {"average": average.astype(np.float32), "spans": distances}
    for query in queries:
        arrays[f"probabilities_{query.position}"] = query.probabilities
        arrays |= {f"term_{name}_{query.position}": term for name, term in query.terms.items()}
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    write(os.path.join(folder, "attention.npz"), data.getvalue())
    names = [f"layer {layer + 1}, head {head + 1}" for layer, head in heads]
    chosen = [{"layer": layer, "head": head, "span": float(distances[layer, head])} for layer, head in heads]
    write_json(
        os.path.join(folder, "attention.json"),
        {"text": corpus.description, **facts, **environment.describe(), "heads": chosen},
    )
    lines = [f"# Attention weights on {corpus.description} ({facts['split']}), step {facts['step']:,}", ""]
    for query in queries:
        lines += _markdown(query, heads, names, distances, tokens, corpus)
    write(os.path.join(folder, "attention.md"), "\n".join(lines).encode())
    if not plots.can_draw():
        log("no plots: matplotlib is missing (pip install 'txl_jax[plots]')")
        return
    title = f"{corpus.name} ({facts['split']}), step {facts['step']:,}"
    plots.attention_average(
        average, os.path.join(folder, "average.png"), title=f"{title}: mean attention of every head"
    )
    for query in queries:
        _draw(folder, query, heads, names, tokens, corpus, title=f"{title}: the query at token {query.position:,}")


def _draw(
    folder: str,
    query: Query,
    heads: Sequence[tuple[int, int]],
    names: Sequence[str],
    tokens: np.ndarray,
    corpus: Corpus,
    *,
    title: str,
) -> None:
    """Draws one query: the weights of each head (figure 6), and the terms of the first head (figure 7)."""
    rows = {name: query.probabilities[head] for name, head in zip(names, heads, strict=True)}
    labels = _labels(query.position, query.probabilities.shape[-1], tokens, corpus)
    plots.attention_rows(rows, labels, os.path.join(folder, f"heads-{query.position}.png"), title=title)
    plots.attention_rows(
        {label: query.terms[name][heads[0]] for name, label in _TERMS.items()},
        labels,
        os.path.join(folder, f"terms-{query.position}.png"),
        title=f"{title}, {names[0]}, term by term",
        without_labels=[_TERMS["d"]],
    )


def _markdown(
    query: Query,
    heads: Sequence[tuple[int, int]],
    names: Sequence[str],
    distances: np.ndarray,
    tokens: np.ndarray,
    corpus: Corpus,
) -> list[str]:
    """Lists the tokens with the largest weights of a query's heads."""
    labels = _labels(query.position, query.probabilities.shape[-1], tokens, corpus)
    start = max(query.position - 60, 0)
    before = corpus.vocabulary.decode(tokens[start : query.position + 1]).decode(errors="replace")
    lines = [f"## The query at token {query.position:,}", "", "It ends", "", "```", before, "```", ""]
    lines += ["| head | mean distance over the text | largest weights (distance: probability) |", "|---|---|---|"]
    for name, head in zip(names, heads, strict=True):
        row = query.probabilities[head]
        top = np.argsort(-row, kind="stable")[:_TOP_TOKENS]
        listed = ", ".join(f"`{labels[d]}` ({d}: {row[d]:.2f})" for d in top)
        lines.append(f"| {name} | {distances[head]:.1f} | {listed} |")
    return [*lines, ""]


def _labels(position: int, n_distance: int, tokens: np.ndarray, corpus: Corpus) -> list[str]:
    """Returns the token at each distance before a query, printable."""
    texts = (corpus.vocabulary.decode(tokens[position - d : position - d + 1]) for d in range(n_distance))
    shown = (text.decode(errors="replace") for text in texts)
    shown = (text.rstrip(" ") or text for text in shown)  # A word's own space is dropped; a space by itself is a token.
    return [text.replace("\n", "\\n").replace("\t", "\\t").replace("|", "\\|").replace("`", "'") for text in shown]
