"""Attention weights of a trained run: figures 5, 6 and 7 of the paper.

    python -m experiments.paper.attention --workdir=runs/mine
    python -m experiments.paper.attention --workdir=runs/mine --heads=0.1,3.2 --positions=4000,5210

The command writes these files to --out:

- average.png: the mean attention of every head to each distance (figure 5).
- heads-T.png: the weights of some heads for the query at token T (figure 6).
- terms-T.png: the terms (a), (b) and (d) of the first of these heads, each with its own softmax
  (figure 7).
- attention.md, attention.json and attention.npz: the tokens, the numbers of these heads, and the
  arrays of all heads.

The default is to draw the three heads with the largest mean distance. Lengths come from
--eval.segment_len, --eval.mem_len and --eval.clamp_len. The batch size is 1 and same_length is on,
so that every query attends to A keys. Queries whose memory is not full are omitted from the
average.
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
    """The split, and the heads and queries to draw."""

    split: Split = setting(Split.VALID, "Split to read.")
    tokens: int | None = setting(
        None, "Number of tokens to read. none reads the whole split.", at_least=1
    )
    heads: tuple[str, ...] = setting(
        (),
        f"Heads to draw, as layer.head from 0. If empty, the {_DEFAULT_HEADS} with the "
        "largest mean distance.",
    )
    positions: tuple[int, ...] = setting((), "Tokens whose queries to draw. If empty, the last.")
    out: str | None = setting(
        None, "Directory for plots and arrays. none means WORKDIR/attention.", path=True
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
        """Raises `UserError` if a setting is out of range, or a head is not layer.head."""
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
        config.expect(
            has_terms,
            "model.network model.encoding",
            "These plots need relative attention with the terms (a) to (d)",
        )
        config.expect(
            config.train.mem_len and config.eval.mem_len,
            "train.mem_len eval.mem_len",
            "Both must be above 0, because the plots show attention to the memory",
        )
        config.expect(
            config.data.reset_at is None,
            "data.reset_at",
            "It must be none, because the window of these plots crosses document ends",
        )
        for layer, head in self.layer_heads:
            require(
                layer < model.n_layer and head < model.n_head,
                f"layers must be 0 to {model.n_layer - 1} and heads 0 to {model.n_head - 1}, got "
                f"{layer}.{head}",
            )


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
    length = config.eval.segment_len
    mem_len = config.eval.mem_len
    tokens = np.asarray(getattr(corpus, plan.split)[: plan.tokens])

    # The first token whose memory is full, and the last token of a whole segment.
    first = -(-mem_len // length) * length
    n_segments = len(tokens) // length
    last = n_segments * length - 1
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

    began = time.monotonic()
    with progress_bar(
        "attention",
        n_segments,
        unit="segment",
        measure=corpus.vocabulary.measure,
        log=print,
        stop_requested=stop_requested,
    ) as show:
        average, queries = _read(built, params, tokens[: last + 1], first, positions, show)

    folder = plan.out or os.path.join(trained.outputs, "attention")
    make_folder(folder)
    heads = plan.layer_heads or widest(average, _DEFAULT_HEADS)
    facts = {"step": int(step), "split": plan.split}
    _write(folder, average, queries, heads, tokens, corpus, facts)
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
    (_, next_memory), collections = model.apply(
        {"params": params},
        tokens,
        memory,
        clamp_len=clamp_len,
        same_length=True,
        deterministic=True,
        mutable=["attention"],
    )
    parts = collections["attention"]["stack"]["layers"]["attention"]
    mem_len = memory.mem_len
    segment_len = tokens.shape[1]
    window = model.config.compat.window(mem_len, same_length=True)
    mask = Visibility(memory.valid, segment_len, mem_len, window).mask()[None, :, None]

    def terms_of_layer(
        query: jax.Array, key: jax.Array, position_key: jax.Array, u: jax.Array, v: jax.Array
    ) -> ScoreTerms:
        return score_terms(query, key, position_key, content_bias=u, position_bias=v)

    terms = jax.vmap(terms_of_layer)(*(parts[name] for name in SCORE_PARTS))
    probabilities = jax.nn.softmax(jnp.where(mask, sum(terms), -jnp.inf), axis=-1)
    # The column of the key at each distance from each row's query: [L, A].
    column = mem_len + jnp.arange(segment_len)[:, None] - jnp.arange(window)[None, :]

    def by_distance(array: jax.Array, hidden: float) -> jax.Array:
        """Gathers keys [N, B, H, L, K] by distance: [N, B, H, L, A]."""
        index = jnp.broadcast_to(jnp.maximum(column, 0), (*array.shape[:-2], *column.shape))
        taken = jnp.take_along_axis(jnp.where(mask, array, hidden), index, axis=-1)
        return jnp.where((column >= 0)[None, None, None], taken, hidden)

    weights = AttentionWeights(
        probabilities=by_distance(probabilities, 0.0),
        terms=ScoreTerms(*(by_distance(term, -jnp.inf) for term in terms)),
    )
    return weights, next_memory


class Query(NamedTuple):
    """The attention of one query, by distance 0 .. A - 1."""

    position: int  # Position of the query's own token in the text.
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
    eval_config = built.config.eval
    model = cast(TransformerXL, built.model)
    length = eval_config.segment_len

    def weights_of(params: Any, segment: jax.Array, memory: Any) -> Any:
        return attention_weights(params, model, segment, memory, clamp_len=eval_config.clamp_len)

    def sum_weights(params: Any, segment: jax.Array, memory: Any) -> Any:
        weights, memory = weights_of(params, segment, memory)
        return weights.probabilities.sum(axis=(1, 3)), memory

    # All weights of a segment can be a gigabyte, so they are computed only for drawn queries.
    summed_weights = built.jit(sum_weights)
    all_weights = built.jit(weights_of)

    memory = model.init_memory(batch_size=1, mem_len=eval_config.mem_len)
    total: Any = 0.0
    queries: dict[int, Query] = {}
    for start in range(0, len(tokens), length):
        segment = tokens[None, start : start + length].astype(np.int32)
        in_segment = [position for position in positions if start <= position < start + length]
        if in_segment:
            weights, _ = all_weights(params, segment, memory)
            for position in in_segment:
                queries[position] = _query_at(position, weights, position - start)
        summed, memory = summed_weights(params, segment, memory)
        if start >= first:
            total = total + np.asarray(summed, np.float64)
        show(start // length + 1, Totals())
    average = total / (len(tokens) - first)
    return average, [queries[position] for position in positions]


def _query_at(position: int, weights: AttentionWeights, row: int) -> Query:
    """Returns the attention of the query in a row of a segment's weights."""
    probabilities = np.asarray(weights.probabilities[:, 0, :, row])
    terms = {}
    for name in _TERMS:
        scores = getattr(weights.terms, name)[:, 0, :, row]
        terms[name] = np.asarray(jax.nn.softmax(scores, axis=-1))
    return Query(position, probabilities, terms)


def mean_distances(average: np.ndarray) -> np.ndarray:
    """Computes the mean distance of each head's attention: [N, H, A] -> [N, H]."""
    return (average * np.arange(average.shape[-1])).sum(-1) / average.sum(-1)


def widest(average: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Returns the `count` heads with the largest mean distances, first one head of each layer.

    A head is (layer, head), counted from 0.
    """
    order = np.argsort(-mean_distances(average), axis=None, kind="stable")
    heads = [divmod(int(i), average.shape[1]) for i in order]
    # The widest head of each layer: the last entry that is set comes first in `heads`.
    widest_of_layer = {layer: (layer, head) for layer, head in reversed(heads)}
    return sorted(heads, key=lambda head: head != widest_of_layer[head[0]])[:count]


def _write(
    folder: str,
    average: np.ndarray,
    queries: Sequence[Query],
    heads: Sequence[tuple[int, int]],
    tokens: np.ndarray,
    corpus: Corpus,
    facts: dict[str, Any],
) -> None:
    """Writes attention.md, .json and .npz, and draws the plots.

    Args:
      folder: Directory of the files.
      average: Mean probabilities [N, H, A].
      queries: The queries that are drawn.
      heads: The heads that are drawn, as (layer, head).
      tokens: The text that was read.
      corpus: The corpus of the text.
      facts: Step and split, for the record and the titles.
    """
    distances = mean_distances(average)
    labels = [_labels(query, tokens, corpus) for query in queries]
    described = environment.describe()

    arrays: dict[str, Any] = {"average": average.astype(np.float32), "spans": distances}
    for query in queries:
        arrays[f"probabilities_{query.position}"] = query.probabilities
        for name, term in query.terms.items():
            arrays[f"term_{name}_{query.position}"] = term

    lines = [
        f"# Attention weights on {corpus.description} ({facts['split']}), step {facts['step']:,}",
        "",
        f"{described['device']}, {described['date']}.",
        "",
    ]
    records_of_queries = []
    for query, tokens_at in zip(queries, labels, strict=True):
        largest = [_largest_weights(query, head, tokens_at) for head in heads]
        records_of_queries.append({"position": int(query.position), "largest_weights": largest})
        lines += _page_of_query(query, heads, largest, distances, tokens, corpus)

    records_of_heads = []
    for layer, head in heads:
        span = float(distances[layer, head])
        records_of_heads.append({"layer": layer, "head": head, "span": span})
    record: dict[str, Any] = {
        "text": corpus.description,
        **facts,
        **described,
        "heads": records_of_heads,
        "queries": records_of_queries,
    }

    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    write(os.path.join(folder, "attention.npz"), data.getvalue())
    write_json(os.path.join(folder, "attention.json"), record)
    write(os.path.join(folder, "attention.md"), "\n".join(lines).encode())
    if plots.can_draw():
        title = f"{corpus.name} ({facts['split']}), step {facts['step']:,}"
        _draw_average(
            average,
            os.path.join(folder, "average.png"),
            title=f"{title}: mean attention of every head",
        )
        for query, tokens_at in zip(queries, labels, strict=True):
            _draw_query(folder, query, heads, tokens_at, title)


def _largest_weights(
    query: Query, head: tuple[int, int], tokens_at: Sequence[str]
) -> dict[str, Any]:
    """Returns the record of a head's largest weights, the largest first.

    `tokens_at` contains the token at each distance.
    """
    row = query.probabilities[head]
    weights = []
    for distance in np.argsort(-row, kind="stable")[:_TOP_TOKENS].tolist():
        token = tokens_at[distance]
        weights.append({"distance": distance, "token": token, "probability": float(row[distance])})
    layer, number = head
    return {"layer": layer, "head": number, "weights": weights}


def _page_of_query(
    query: Query,
    heads: Sequence[tuple[int, int]],
    largest: Sequence[dict[str, Any]],
    distances: np.ndarray,
    tokens: np.ndarray,
    corpus: Corpus,
) -> list[str]:
    """Returns the lines of attention.md about one query.

    Args:
      query: The query.
      heads: The heads, as (layer, head).
      largest: The records of their largest weights.
      distances: Mean distance of every head [N, H].
      tokens: The text.
      corpus: The corpus of the text.
    """
    context = tokens[max(query.position - 60, 0) : query.position + 1]
    end = corpus.vocabulary.decode(context).decode(errors="replace")
    rows = []
    for head, record in zip(heads, largest, strict=True):
        cells = []
        for weight in record["weights"]:
            cells.append(f"`{weight['token']}` ({weight['distance']}: {weight['probability']:.2f})")
        rows.append([_name(head), f"{distances[head]:.1f}", ", ".join(cells)])
    columns = ["head", "mean distance over the text", "largest weights (distance: probability)"]
    return [
        f"## The query at token {query.position:,}\n\nIt ends\n\n```\n{end}\n```\n",
        *environment.table(columns, rows),
        "",
    ]


def _draw_query(
    folder: str,
    query: Query,
    heads: Sequence[tuple[int, int]],
    tokens_at: Sequence[str],
    title: str,
) -> None:
    """Draws a query's heads (figure 6), and the terms of the first of them (figure 7)."""
    title += f": the query at token {query.position:,}"
    by_head = {_name(head): query.probabilities[head] for head in heads}
    path = os.path.join(folder, f"heads-{query.position}.png")
    _draw_rows(by_head, tokens_at, path, title=title)

    by_term = {label: query.terms[name][heads[0]] for name, label in _TERMS.items()}
    path = os.path.join(folder, f"terms-{query.position}.png")
    _draw_rows(by_term, tokens_at, path, title=f"{title}, {_name(heads[0])}, term by term")


def _name(head: tuple[int, int]) -> str:
    layer, number = head
    return f"layer {layer + 1}, head {number + 1}"


def _labels(query: Query, tokens: np.ndarray, corpus: Corpus) -> list[str]:
    """Returns the token at each distance before a query, printable."""
    labels = []
    for distance in range(query.probabilities.shape[-1]):
        place = query.position - distance
        text = corpus.vocabulary.decode(tokens[place : place + 1]).decode(errors="replace")
        # The space that belongs to a word is dropped. A space by itself is a token.
        text = text.rstrip(" ") or text
        text = text.replace("\n", "\\n").replace("\t", "\\t")
        # In a table, these characters would end the cell or the code.
        labels.append(text.replace("|", "\\|").replace("`", "'"))
    return labels


def _draw_average(average: np.ndarray, path: str, *, title: str) -> None:
    """Draws the mean attention [N, H, A] of every head, a row each, to the distances 0 .. A - 1.

    The color scale is the square root. Otherwise all distances except the nearest would be white.
    """
    from matplotlib.colors import PowerNorm

    n_layer, n_head, n_distance = average.shape
    figure = plots.figure(height=min(max(0.07 * n_layer * n_head, 3.5), 12))
    plot = figure.add_subplot()
    rows = average.reshape(n_layer * n_head, n_distance)[:, ::-1]
    # The largest weights are few, so the scale ends at a quantile.
    norm = PowerNorm(0.5, vmin=0, vmax=np.quantile(rows, 0.999))
    image = plot.imshow(
        rows,
        cmap="Greys",
        norm=norm,
        extent=(n_distance - 0.5, -0.5, n_layer * n_head, 0),
        aspect="auto",
        interpolation="nearest",
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
        width = max(0.6, 100 / len(row))
        panel.vlines(np.arange(len(row)), 0, row, color="#2980b9", linewidth=width)
        # The term (d) does not depend on the tokens.
        named = [] if name == _TERMS["d"] else spaced(np.argsort(-row), len(row) / 14)[:7]
        for distance in named:
            # At the right edge a centered token would leave the panel.
            is_at_edge = distance < len(row) / 40
            panel.annotate(
                labels[distance].replace("$", r"\$"),
                (distance, row[distance]),
                xytext=(0, 2),
                textcoords="offset points",
                ha="right" if is_at_edge else "center",
                fontsize=8,
            )
        panel.set(ylim=(0, row.max() * 1.25), xlim=(len(row) - 0.5, -0.5), ylabel="probability")
        panel.set_title(name, fontsize=9, loc="left")
        panel.grid(alpha=0.2)
    panels[-1].set_xlabel("distance of the key (tokens)")
    figure.suptitle(title, fontsize=11)
    plots.save(figure, path)


def spaced(places: Sequence[int] | np.ndarray, least: float) -> list[int]:
    """Returns the places in order, without those closer than `least` to an earlier one."""
    spread: list[int] = []
    for place in places:
        if all(abs(place - earlier) >= least for earlier in spread):
            spread.append(int(place))
    return spread


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("data", "mesh", "eval"), hosts="alone")
