"""Attention weights of a trained run: figures 5, 6 and 7 of the paper.

    python -m experiments.paper.attention --workdir=runs/mine
    python -m experiments.paper.attention --workdir=runs/mine --heads=0.1,3.2 --positions=4000,5210

It writes to --out average.png, the mean attention of every head to each distance (figure 5),
heads-T.png, the weights of some heads for the query at token T (figure 6), terms-T.png, the terms
(a), (b) and (d) of the first of them, each with its own softmax (figure 7), attention.md with the
tokens, attention.json with the numbers of these heads, and attention.npz with the arrays of all.
By default it draws the three heads with the largest mean distance. Lengths are --eval.segment_len,
--eval.mem_len and --eval.clamp_len, with batch size 1 and same_length, so that every query attends
to A keys. Queries whose memory is not full yet are omitted from the average.
"""

import dataclasses
import io
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import cli, plots
from txl_jax.config import ExperimentConfig, Network
from txl_jax.config.config_tree import require, setting
from txl_jax.data.corpus import Corpus
from txl_jax.memory import Memory
from txl_jax.metrics import Totals
from txl_jax.modules.attention import SCORE_PARTS
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import ScoreTerms, Visibility, score_terms
from txl_jax.runs.build import Built
from txl_jax.runs.run import Run
from txl_jax.runs.score_splits import Split
from txl_jax.runs.scoring_progress import progress_bar
from txl_jax.runs.trained import load_to_score
from txl_jax.runtime import environment
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import make_folder, write, write_json

_DEFAULT_HEADS = 3  # Heads of figures 6 and 7, as in the paper.
_TOP_TOKENS = 12  # Tokens that are listed per head.
_TERMS = {"a": "(a) content", "b": "(b) content and distance", "d": "(d) distance"}


@dataclasses.dataclass(frozen=True)
class Plan(cli.TrainedRun):
    """The split, and the heads and queries that are drawn."""

    split: Split = setting(Split.VALID, "Split that is read.")
    tokens: int | None = setting(
        None, "Number of tokens that are read. none reads the whole split.", at_least=1
    )
    heads: tuple[str, ...] = setting(
        (),
        f"Heads drawn, as layer.head from 0. If empty, the {_DEFAULT_HEADS} with the "
        "largest mean distance.",
    )
    positions: tuple[int, ...] = setting((), "Tokens whose queries are drawn. If empty, the last.")
    out: str | None = setting(
        None, "Directory of plots and arrays. If none, attention in the workdir.", path=True
    )

    @property
    def layer_heads(self) -> list[tuple[int, int]]:
        """The heads as (layer, head)."""
        pairs = []
        for text in self.heads:
            layer, head = text.split(".")
            pairs.append((int(layer), int(head)))
        return pairs

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or a text does not name a head."""
        super().validate()
        # Nine digits are enough, and Python refuses to read thousands of them.
        are_pairs = all(re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", head) for head in self.heads)
        require(
            are_pairs,
            f"heads must be layer.head, from 0, such as 0.1,3.2, got {','.join(self.heads)!r}",
        )

    def check(self, config: ExperimentConfig) -> None:
        """Raises `UserError` if the model has no relative attention to a memory.

        Also raises it if the model lacks one of the heads.
        """
        model = config.model
        has_terms = model.network is Network.TRANSFORMER_XL and encoding_of(model).has_four_terms
        needed = "These plots need relative attention with the terms (a) to (d)"
        config.expect(has_terms, "model.network model.encoding", needed)
        without = "Both must be above 0, because a model without memory attends to none"
        config.expect(
            config.train.mem_len and config.eval.mem_len, "train.mem_len eval.mem_len", without
        )
        across = "It must be none, because the window of these plots crosses document ends"
        config.expect(config.data.reset_at is None, "data.reset_at", across)
        wanted = f"layers must be 0 to {model.n_layer - 1} and heads 0 to {model.n_head - 1}"
        for layer, head in self.layer_heads:
            require(layer < model.n_layer and head < model.n_head, f"{wanted}, got {layer}.{head}")


def run(plan: Plan, job: cli.Job) -> None:
    """Reads the run and its text, and draws its attention."""
    trained = job.trained(plan.check)
    with job.stop:
        draw(*trained, plan, stop_requested=lambda: job.stop)


def draw(
    config: ExperimentConfig,
    corpus: Corpus,
    trained: Run,
    plan: Plan,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> np.ndarray:
    """Writes plots, their arrays, and the tokens attended to into `plan.out`.

    The plots show the average, heads, and terms.

    The corpus may differ from the run's text if its vocabulary is the same. Returns mean
    probabilities [N, H, A]. After `Interrupted` nothing is written.
    """
    built, step, params = load_to_score(config, corpus, trained, log=say)
    length, mem_len = config.eval.segment_len, config.eval.mem_len
    tokens = np.asarray(getattr(corpus, plan.split)[: plan.tokens])
    first, last = -(-mem_len // length) * length, len(tokens) // length * length - 1
    require(
        first <= last,
        f"{len(tokens):,} tokens do not fill the memory's {mem_len:,} slots. "
        "Raise --tokens, or lower --eval.mem_len.",
    )
    positions = plan.positions or (last,)
    for position in positions:
        require(
            first <= position <= last,
            f"positions must be {first:,} to {last:,}, where the memory is full, got {position:,}",
        )
    began, count = time.monotonic(), (last + 1) // length
    options: dict[str, Any] = {
        "measure": corpus.vocabulary.measure,
        "log": print,
        "stop_requested": stop_requested,
    }
    with progress_bar("attention", count, unit="segment", **options) as show:
        average, queries = _read(built, params, tokens[: last + 1], first, positions, show)
    folder = plan.out or os.path.join(trained.outputs, "attention")
    make_folder(folder)
    heads = plan.layer_heads or widest(average, _DEFAULT_HEADS)
    _write(
        folder, average, queries, heads, tokens, corpus, {"step": int(step), "split": plan.split}
    )
    print(f"results   {folder}  in {environment.duration(time.monotonic() - began)}")
    return average


class AttentionWeights(NamedTuple):
    """The attention weights of one segment's queries by distance 0 .. A - 1, where A is the window.

    A key at distance d is d positions before the query, and 0 is the query's own.
    """

    probabilities: jax.Array  # [N, B, H, L, A].
    terms: ScoreTerms  # (a) to (d), [N, B, H, L, A] each, before any softmax.


def attention_weights(
    params: Any, model: TransformerXL, tokens: jax.Array, memory: Memory, *, clamp_len: int | None
) -> tuple[AttentionWeights, Memory]:
    """Computes the attention weights of a segment int [B, L], and the memory after it.

    The weights are computed with `same_length`.

    Distances that a query does not attend to have probability 0 and terms of -inf.
    """
    modes: dict[str, Any] = {"same_length": True, "deterministic": True, "mutable": ["attention"]}
    (_, after), kept = model.apply({"params": params}, tokens, memory, clamp_len=clamp_len, **modes)
    parts = kept["attention"]["stack"]["layers"]["attention"]
    mem_len, segment_len = memory.mem_len, tokens.shape[1]
    window = model.config.compat.window(mem_len, same_length=True)
    mask = Visibility(memory.valid, segment_len, mem_len, window).mask()[None, :, None]
    terms = jax.vmap(
        lambda query, key, position_key, u, v: score_terms(
            query, key, position_key, content_bias=u, position_bias=v
        )
    )(*(parts[name] for name in SCORE_PARTS))
    probabilities = jax.nn.softmax(jnp.where(mask, sum(terms), -jnp.inf), axis=-1)
    # The column of the key at each distance from each row's query: [L, A].
    column = mem_len + jnp.arange(segment_len)[:, None] - jnp.arange(window)[None, :]

    def by_distance(array: jax.Array, hidden: float) -> jax.Array:
        """Gathers keys [N, B, H, L, K] by distance: [N, B, H, L, A]."""
        index = jnp.broadcast_to(jnp.maximum(column, 0), (*array.shape[:-2], *column.shape))
        taken = jnp.take_along_axis(jnp.where(mask, array, hidden), index, axis=-1)
        return jnp.where((column >= 0)[None, None, None], taken, hidden)

    terms_by_distance = ScoreTerms(*(by_distance(term, -jnp.inf) for term in terms))
    return AttentionWeights(by_distance(probabilities, 0.0), terms_by_distance), after


class Query(NamedTuple):
    """The attention of one query, by distance 0 .. A - 1."""

    position: int  # Of the query's own token in the text.
    probabilities: np.ndarray  # [N, H, A].
    terms: dict[str, np.ndarray]  # "a", "b" and "d": each its own softmax, [N, H, A].


def _read(
    built: Built,
    params: Any,
    tokens: np.ndarray,
    first: int,
    positions: Sequence[int],
    show: Callable[..., Any],
) -> tuple[np.ndarray, list[Query]]:
    """Reads whole segments.

    Returns mean probabilities from token `first` on, and the queries at `positions`.
    """
    eval_config, model = built.config.eval, cast(TransformerXL, built.model)
    length = eval_config.segment_len

    def weights_of(params: Any, segment: jax.Array, memory: Any) -> Any:
        return attention_weights(params, model, segment, memory, clamp_len=eval_config.clamp_len)

    def sum_weights(params: Any, segment: jax.Array, memory: Any) -> Any:
        weights, memory = weights_of(params, segment, memory)
        return weights.probabilities.sum(axis=(1, 3)), memory

    # All weights of a segment can be a gigabyte: only where a query is asked for.
    summed_weights, all_weights = built.jit(sum_weights), built.jit(weights_of)
    memory = model.init_memory(batch_size=1, mem_len=eval_config.mem_len)
    total: Any = 0.0
    found: dict[int, Query] = {}
    for start in range(0, len(tokens), length):
        segment = tokens[None, start : start + length].astype(np.int32)
        here = [position for position in positions if start <= position < start + length]
        if here:
            weights, _ = all_weights(params, segment, memory)
            for position in here:
                own = {
                    name: getattr(weights.terms, name)[:, 0, :, position - start] for name in _TERMS
                }
                terms = {
                    name: np.asarray(jax.nn.softmax(term, axis=-1)) for name, term in own.items()
                }
                probabilities = np.asarray(weights.probabilities[:, 0, :, position - start])
                found[position] = Query(position, probabilities, terms)
        summed, memory = summed_weights(params, segment, memory)
        if start >= first:
            total = total + np.asarray(summed, np.float64)
        show(start // length + 1, Totals())
    return total / (len(tokens) - first), [found[position] for position in positions]


def mean_distances(average: np.ndarray) -> np.ndarray:
    """Computes the mean distance of each head's attention: [N, H, A] -> [N, H]."""
    return (average * np.arange(average.shape[-1])).sum(-1) / average.sum(-1)


def widest(average: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Returns the `count` heads with the largest mean distances, first one of each layer.

    A head is (layer, head), counted from 0.
    """
    order = np.argsort(-mean_distances(average), axis=None, kind="stable")
    heads = [divmod(int(i), average.shape[1]) for i in order]
    first = {layer: (layer, head) for layer, head in reversed(heads)}  # The widest of each layer.
    return sorted(heads, key=lambda head: head != first[head[0]])[:count]


def _write(
    folder: str,
    average: np.ndarray,
    queries: Sequence[Query],
    heads: Sequence[tuple[int, int]],
    tokens: np.ndarray,
    corpus: Corpus,
    facts: dict[str, Any],
) -> None:
    """Writes the arrays, the mean distances of the heads, and plots.

    Also writes lists of the tokens with the largest weights.
    """
    distances = mean_distances(average)
    labels = [_labels(query, tokens, corpus) for query in queries]
    described = environment.describe()
    arrays: dict[str, Any] = {"average": average.astype(np.float32), "spans": distances}
    lines = [
        f"# Attention weights on {corpus.description} ({facts['split']}), step {facts['step']:,}",
        "",
    ]
    lines += [f"{described['device']}, {described['date']}.", ""]
    chosen = [
        {"layer": layer, "head": head, "span": float(distances[layer, head])}
        for layer, head in heads
    ]
    record: dict[str, Any] = {
        "text": corpus.description,
        **facts,
        **described,
        "heads": chosen,
        "queries": [],
    }
    for query, shown in zip(queries, labels, strict=True):
        arrays[f"probabilities_{query.position}"] = query.probabilities
        arrays |= {f"term_{name}_{query.position}": term for name, term in query.terms.items()}
        before = tokens[max(query.position - 60, 0) : query.position + 1]
        end = corpus.vocabulary.decode(before).decode(errors="replace")
        lines += [f"## The query at token {query.position:,}\n\nIt ends\n\n```\n{end}\n```\n"]
        rows = []
        largest = []
        for head in heads:
            row = query.probabilities[head]
            strongest = np.argsort(-row, kind="stable")[:_TOP_TOKENS].tolist()
            top = (f"`{shown[d]}` ({d}: {row[d]:.2f})" for d in strongest)
            rows.append([_name(head), f"{distances[head]:.1f}", ", ".join(top)])
            weights = [
                {"distance": d, "token": shown[d], "probability": float(row[d])} for d in strongest
            ]
            largest.append({"layer": head[0], "head": head[1], "weights": weights})
        record["queries"].append({"position": int(query.position), "largest_weights": largest})
        columns = ["head", "mean distance over the text", "largest weights (distance: probability)"]
        lines += [*environment.table(columns, rows), ""]
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    write(os.path.join(folder, "attention.npz"), data.getvalue())
    write_json(os.path.join(folder, "attention.json"), record)
    write(os.path.join(folder, "attention.md"), "\n".join(lines).encode())
    if not plots.can_draw():
        return
    title = f"{corpus.name} ({facts['split']}), step {facts['step']:,}"
    _draw_average(
        average, os.path.join(folder, "average.png"), title=f"{title}: mean attention of every head"
    )
    # Figure 6: each head; figure 7: the terms of the first.
    for query, shown in zip(queries, labels, strict=True):
        own_title = f"{title}: the query at token {query.position:,}"
        by_head = {_name(head): query.probabilities[head] for head in heads}
        _draw_rows(
            by_head, shown, os.path.join(folder, f"heads-{query.position}.png"), title=own_title
        )
        by_term = {label: query.terms[name][heads[0]] for name, label in _TERMS.items()}
        own_title += f", {_name(heads[0])}, term by term"
        _draw_rows(
            by_term, shown, os.path.join(folder, f"terms-{query.position}.png"), title=own_title
        )


def _name(head: tuple[int, int]) -> str:
    return f"layer {head[0] + 1}, head {head[1] + 1}"


def _labels(query: Query, tokens: np.ndarray, corpus: Corpus) -> list[str]:
    """Returns the token at each distance before a query, printable."""
    places = range(query.position, query.position - query.probabilities.shape[-1], -1)
    shown = (
        corpus.vocabulary.decode(tokens[place : place + 1]).decode(errors="replace")
        for place in places
    )
    # A word's own space is dropped; a space by itself is a token.
    shown = (text.rstrip(" ") or text for text in shown)
    return [
        text.replace("\n", "\\n").replace("\t", "\\t").replace("|", "\\|").replace("`", "'")
        for text in shown
    ]


def _draw_average(average: np.ndarray, path: str, *, title: str) -> None:
    """Draws the mean attention [N, H, A] of every head, a row each, to the distances 0 .. A - 1.

    The color scale is the square root. Otherwise all distances except the nearest would be white.
    """
    from matplotlib.colors import PowerNorm

    n_layer, n_head, n_distance = average.shape
    figure = plots.figure(height=min(max(0.07 * n_layer * n_head, 3.5), 12))
    plot = figure.add_subplot()
    rows = average.reshape(n_layer * n_head, n_distance)[:, ::-1]
    edges = {
        "extent": (n_distance - 0.5, -0.5, n_layer * n_head, 0),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    image = plot.imshow(
        rows, cmap="Greys", norm=PowerNorm(0.5, vmin=0, vmax=np.quantile(rows, 0.999)), **edges
    )
    for layer in range(1, n_layer):
        plot.axhline(layer * n_head, color="#c0392b", linewidth=0.5)
    plot.set_yticks(
        [(layer + 0.5) * n_head for layer in range(n_layer)],
        [str(layer + 1) for layer in range(n_layer)],
    )
    plot.set(
        title=title, xlabel="distance of the key (tokens)", ylabel=f"layer, {n_head} heads each"
    )
    figure.colorbar(image, label="probability")
    plots.save(figure, path)


def _draw_rows(
    rows: Mapping[str, np.ndarray], labels: Sequence[str], path: str, *, title: str
) -> None:
    """Draws the probabilities [A] of one query, with one panel per row.

    The tokens of the largest weights are shown too.
    """
    figure = plots.figure(height=1.9 * len(rows) + 0.8)
    panels = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for panel, (name, row) in zip(panels, rows.items(), strict=True):
        panel.vlines(
            np.arange(len(row)), 0, row, color="#2980b9", linewidth=max(0.6, 100 / len(row))
        )
        # The term (d) does not depend on the tokens.
        for distance in [] if name == _TERMS["d"] else spaced(np.argsort(-row), len(row) / 14)[:7]:
            side = "right" if distance < len(row) / 40 else "center"
            style = {"xytext": (0, 2), "textcoords": "offset points", "ha": side, "fontsize": 8}
            panel.annotate(labels[distance].replace("$", r"\$"), (distance, row[distance]), **style)
        panel.set(ylim=(0, row.max() * 1.25), xlim=(len(row) - 0.5, -0.5), ylabel="probability")
        panel.set_title(name, fontsize=9, loc="left")
        panel.grid(alpha=0.2)
    panels[-1].set_xlabel("distance of the key (tokens)")
    figure.suptitle(title, fontsize=11)
    plots.save(figure, path)


def spaced(places: Sequence[int] | np.ndarray, least: float) -> list[int]:
    """Returns the places in order, without those nearer than `least` to an earlier one."""
    kept: list[int] = []
    for place in places:
        if all(abs(place - other) >= least for other in kept):
            kept.append(int(place))
    return kept


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("data", "mesh", "eval"), hosts="alone")
