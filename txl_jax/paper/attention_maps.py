"""The attention job: what the heads of a trained run look at (appendix D of the paper, figures 5, 6 and 7).

The text is read as evaluation reads it, in one row, with `same_length`, so that every query sees A keys. Queries whose
memory is not full yet are left out of the average.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from txl_jax import sharding
from txl_jax.config import Encoding, ExperimentConfig, Network
from txl_jax.data.corpus import Corpus
from txl_jax.jobs import report
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import progress_bar
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.metrics import Totals
from txl_jax.paper import attention_terms, plots
from txl_jax.runtime import environment
from txl_jax.runtime.files import write_json, write_text

_CHOSEN = 3  # Heads of figures 6 and 7, as in the paper.
_NAMED = 12  # Tokens that are named per head.
_TERMS = {"a": "(a) content", "b": "(b) content and distance", "d": "(d) distance"}


@dataclasses.dataclass(frozen=True)
class Query:
    """What one token's prediction looked at, by distance 0 .. A - 1."""

    position: int  # Of the query's own token in the text.
    probabilities: np.ndarray  # [N, H, A]
    terms: dict[str, np.ndarray]  # "a", "b" and "d": each its own softmax, [N, H, A].


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    trained_on: TextInfo,
    folder: Path,
    split: str = "valid",
    n_token: int = 0,
    heads: Sequence[tuple[int, int]] = (),
    positions: Sequence[int] = (),
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> np.ndarray:
    """Writes average.png, head and term pictures, their arrays and the tokens looked at into `folder`.

    Args:
      n_token: tokens of the text that are read; 0: all.
      heads: (layer, head) of the pictures of single queries, from 0; none: those with the widest spans.
      positions: tokens whose queries are drawn; none: the last one that is read.

    Returns:
      Mean probabilities [N, H, A].

    Raises:
      ValueError: the model has no such attention or no memory, or heads, positions or tokens that it has not.
      FileNotFoundError: the workdir holds no checkpoint.
      Interrupted: a stop was requested; nothing is written.
    """
    check(config)
    parts, step, params = load_to_score(config, corpus, workdir, trained_on=trained_on, log=log)
    tokens = np.asarray(getattr(corpus, split)[: n_token or None])
    span = config.eval
    n_segment = len(tokens) // span.segment_len
    first_full = -(-span.mem_len // span.segment_len)
    if n_segment <= first_full:
        raise ValueError(
            f"{len(tokens):,} tokens are read and the memory has {span.mem_len:,} slots, which would not be full; read more, "
            "or give a shorter --eval.mem_len"
        )
    positions = list(positions) or [n_segment * span.segment_len - 1]
    last = n_segment * span.segment_len - 1
    for position in positions:
        if not first_full * span.segment_len <= position <= last:
            raise ValueError(
                f"position {position:,} was asked for; queries with a full memory stand at "
                f"{first_full * span.segment_len:,} to {last:,}"
            )
    for layer, head in heads:
        if not (0 <= layer < config.model.n_layer and 0 <= head < config.model.n_head):
            raise ValueError(
                f"head {layer}.{head} was asked for; layers are 0 to {config.model.n_layer - 1} and heads 0 to "
                f"{config.model.n_head - 1}"
            )
    watch = {"measure": corpus.vocabulary.measure, "log": log, "stop_requested": stop_requested}
    began = time.monotonic()
    average, queries = _walk(parts, params, tokens, first_full, positions, watch)
    folder.mkdir(parents=True, exist_ok=True)
    heads = list(heads) or attention_terms.widest(average, _CHOSEN)
    _write(folder, average, heads, queries, tokens, corpus, facts={"step": int(step), "split": split}, log=log)
    log(report.timed(f"results   {folder}", time.monotonic() - began))
    return average


def check(config: ExperimentConfig) -> None:
    """Raises `ValueError` for a model whose memory cannot be drawn."""
    model, span = config.model, config.eval
    if model.network is not Network.TRANSFORMER_XL or model.encoding is not Encoding.RELATIVE:
        what = model.network if model.network is not Network.TRANSFORMER_XL else f"encoding {model.encoding}"
        raise ValueError(f"the run is of {what}; these pictures are of relative attention with the terms (a) to (d)")
    if span.mem_len == 0 or config.train.mem_len == 0:
        raise ValueError(
            f"train.mem_len is {config.train.mem_len} and eval.mem_len {span.mem_len}; a model without memory looks at none"
        )


def _walk(
    parts: Any, params: Any, tokens: np.ndarray, first_full: int, positions: Sequence[int], watch: dict[str, Any]
) -> tuple[np.ndarray, list[Query]]:
    """Mean probabilities, and the queries at `positions`."""
    span, model = parts.config.eval, parts.model
    length = span.segment_len

    def looks_at(params: Any, segment: jax.Array, memory: Any) -> Any:
        return attention_terms.read(params, model, segment, memory, clamp_len=span.clamp_len, same_length=True)

    def summed_probabilities(params: Any, segment: jax.Array, memory: Any) -> Any:
        looks, memory = looks_at(params, segment, memory)
        return looks.probabilities.sum(axis=(1, 3)), memory

    read = sharding.bind_mesh(parts.mesh, jax.jit(summed_probabilities))
    look = sharding.bind_mesh(
        parts.mesh, jax.jit(looks_at)
    )  # All of a segment's looks, which can be a gigabyte: only where a query is asked for.

    memory, total, found = model.init_memory(batch_size=1, mem_len=span.mem_len), 0.0, {}
    n_segment = len(tokens) // length
    with progress_bar("attention", total=n_segment, unit="segment", **watch) as show:
        for k in range(n_segment):
            segment = tokens[None, k * length : (k + 1) * length].astype(np.int32)
            here = [position for position in positions if position // length == k]
            if here:
                looks, _ = look(params, segment, memory)
                found |= {position: _query(looks, position, position % length) for position in here}
            summed, memory = read(params, segment, memory)
            if k >= first_full:
                total = total + np.asarray(summed, np.float64)
            show(k + 1, Totals())
    return total / ((n_segment - first_full) * length), [found[position] for position in positions]


def _query(looks: attention_terms.Looks, position: int, row: int) -> Query:
    terms = {name: np.asarray(getattr(looks.terms, name)[:, 0, :, row]) for name in _TERMS}
    return Query(
        position=position,
        probabilities=np.asarray(looks.probabilities[:, 0, :, row]),
        terms={name: np.asarray(jax.nn.softmax(term, axis=-1)) for name, term in terms.items()},
    )


def _write(
    folder: Path,
    average: np.ndarray,
    heads: Sequence[tuple[int, int]],
    queries: Sequence[Query],
    tokens: np.ndarray,
    corpus: Corpus,
    *,
    facts: dict[str, Any],
    log: Callable[[str], None],
) -> None:
    """Arrays first, then what is drawn of them."""
    spans = attention_terms.spans(average)
    arrays = {"average": average.astype(np.float32), "spans": spans}
    for query in queries:
        arrays[f"probabilities_{query.position}"] = query.probabilities
        arrays |= {f"term_{name}_{query.position}": term for name, term in query.terms.items()}
    np.savez_compressed(folder / "attention.npz", **arrays)
    names = [f"layer {layer + 1}, head {head + 1}" for layer, head in heads]
    chosen = [{"layer": layer, "head": head, "span": float(spans[layer, head])} for layer, head in heads]
    write_json(
        folder / "attention.json", {"text": corpus.description, **facts, **environment.describe(), "heads": chosen}
    )
    lines = [f"# What attention looks at: {corpus.description} ({facts['split']}), step {facts['step']:,}", ""]
    for query in queries:
        lines += _told(query, heads, names, spans, tokens, corpus)
    write_text(folder / "attention.md", "\n".join(lines))
    if not plots.can_draw():
        log("no pictures: matplotlib is missing (pip install 'txl_jax[plots]')")
        return
    title = f"{corpus.name} ({facts['split']}), step {facts['step']:,}"
    plots.attention_average(average, folder / "average.png", title=f"{title}: mean attention of every head")
    for query in queries:
        where = f"{title}: the query at token {query.position:,}"
        rows = {name: query.probabilities[head] for name, head in zip(names, heads, strict=True)}
        labels = _labels(query.position, average.shape[-1], tokens, corpus)
        plots.attention_rows(rows, labels, folder / f"heads-{query.position}.png", title=where)
        layer_head = heads[0]
        terms = {told: query.terms[name][layer_head] for name, told in _TERMS.items()}
        plots.attention_rows(
            terms,
            labels,
            folder / f"terms-{query.position}.png",
            title=f"{where}, {names[0]}, term by term",
            without_labels=[_TERMS["d"]],
        )


def _told(
    query: Query,
    heads: Sequence[tuple[int, int]],
    names: Sequence[str],
    spans: np.ndarray,
    tokens: np.ndarray,
    corpus: Corpus,
) -> list[str]:
    """The tokens that a query's heads look at most, as markdown."""
    labels = _labels(query.position, query.probabilities.shape[-1], tokens, corpus)
    start = max(query.position - 60, 0)
    before = corpus.vocabulary.decode(tokens[start : query.position + 1]).decode(errors="replace")
    lines = [f"## The query at token {query.position:,}", "", "It ends", "", "```", before, "```", ""]
    lines += ["| head | mean distance over the text | looks most at (distance: probability) |", "|---|---|---|"]
    for name, head in zip(names, heads, strict=True):
        row = query.probabilities[head]
        most = np.argsort(-row, kind="stable")[:_NAMED]
        told = ", ".join(f"`{labels[d]}` ({d}: {row[d]:.2f})" for d in most)
        lines.append(f"| {name} | {spans[head]:.1f} | {told} |")
    return [*lines, ""]


def _labels(position: int, n_distance: int, tokens: np.ndarray, corpus: Corpus) -> list[str]:
    """The token at each distance before a query, as one can print it."""
    texts = (corpus.vocabulary.decode(tokens[position - d : position - d + 1]) for d in range(n_distance))
    shown = (text.decode(errors="replace") for text in texts)
    shown = (text.rstrip(" ") or text for text in shown)  # A word's space says nothing; a space by itself is a token.
    return [text.replace("\n", "\\n").replace("\t", "\\t").replace("|", "\\|").replace("`", "'") for text in shown]
