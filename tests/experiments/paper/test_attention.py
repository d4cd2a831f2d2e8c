"""Tests the attention study: weights and terms by distance, averages, its files, and settings that
it rejects.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.paper import attention
from experiments.paper.attention import Plan
from support import oracles, tiny, tiny_run
from txl_jax import plots
from txl_jax.config import DType
from txl_jax.modules.block import Block, LayerContext
from txl_jax.ops.attention import Visibility
from txl_jax.ops.attention.distances import key_distances, sinusoids
from txl_jax.runs.scoring_progress import Interrupted

L = 3
M = 7


def read(model, *, segments, clamp_len=None):
    """Yields the weights of each segment and the memory after it, from an empty memory."""
    params = tiny.variables(model)["params"]
    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    text = tiny.text(segments * L)
    for k in range(segments):
        tokens = text[:, k * L : (k + 1) * L]
        weights, memory = attention.attention_weights(
            params, model, tokens, memory, clamp_len=clamp_len
        )
        yield weights, memory


@pytest.mark.full
# The preset "tf" lets each query attend to one more key.
@pytest.mark.parametrize(("untie_r", "preset", "window"), [(False, "ours", M), (True, "tf", M + 1)])
def test_probabilities_are_those_of_the_model_by_distance(
    untie_r, preset, window, x64, monkeypatch
):
    """They are the softmax's, which is noted while the layers run one by one outside of the scan.

    Distances are clamped, so that the study must clamp them too.
    """
    model = tiny.make(dtype=DType.FLOAT64, untie_r=untie_r, compat=tiny.compat_config(preset))
    params = tiny.variables(model)["params"]
    (_, before), (weights, _) = read(model, segments=2, clamp_len=2)

    probabilities = []
    softmax = jax.nn.softmax

    def keep(scores, **options):
        probabilities.append(softmax(scores, **options))
        return probabilities[-1]

    monkeypatch.setattr(jax.nn, "softmax", keep)
    stack = params["stack"]
    codes = sinusoids(key_distances(M + L, clamp_len=2), tiny.D, jnp.float64)
    visibility = Visibility(before.valid, L, M, window)
    second_segment = tiny.text(2 * L)[:, L:]
    hidden = model.apply({"params": params}, second_segment, clamp_len=2, method=model.embed)
    for number in range(tiny.N):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], stack["layers"])
        biases = None
        if not untie_r:
            biases = stack["biases"]
        context = LayerContext(codes, visibility, biases)
        hidden, _ = Block(model.config).apply(
            {"params": layer}, hidden, before.hidden[number], context
        )

    for by_distance, of_keys in zip(weights.probabilities, probabilities, strict=True):
        for row in range(L):
            # The keys at distances window - 1 .. 0, of M in the memory and L in the segment.
            in_window = of_keys[:, :, row, M + row + 1 - window : M + row + 1]
            np.testing.assert_allclose(
                by_distance[:, :, row], in_window[..., ::-1], rtol=0, atol=1e-12
            )


@pytest.mark.full
def test_term_d_is_the_same_for_every_query_and_term_b_is_not(x64):
    """Both depend on the distance, term (b) also on the query."""
    # After four segments the memory is full.
    *_, (weights, _) = read(tiny.make(dtype=DType.FLOAT64), segments=4)
    d = np.asarray(weights.terms.d)
    b = np.asarray(weights.terms.b)
    np.testing.assert_allclose(d, np.broadcast_to(d[:, :1, :, :1], d.shape), rtol=0, atol=1e-12)
    assert np.abs(b - b[:, :1, :, :1]).max() > 0.1, "compared with the first query of each head"

    # By its definition, term d is v times W_R R of each distance.
    params = tiny.variables(tiny.make(dtype=DType.FLOAT64))["params"]["stack"]
    for distance in (0, 3, M - 1):
        code = oracles.sinusoid(distance, tiny.D)
        key = np.einsum("d,ndhe->nhe", code, params["layers"]["attention"]["position_key"])
        expected = np.einsum("he,nhe->nh", params["biases"]["position"], key) / np.sqrt(tiny.E)
        np.testing.assert_allclose(d[:, 0, :, 0, distance], expected, rtol=0, atol=1e-12)


def test_spans_and_the_widest_heads():
    # Each of two heads in three layers attends to one distance only.
    distances = [[1, 4], [3, 2], [0, 1]]
    average = np.eye(5)[distances]  # [N, H, A], all of the weight at one distance.
    assert attention.mean_distances(average).tolist() == [[1, 4], [3, 2], [0, 1]]
    assert attention.widest(average, 3) == [(0, 1), (1, 0), (2, 1)]
    assert attention.widest(average, 5) == [(0, 1), (1, 0), (2, 1), (1, 1), (0, 0)]


# The attention length of tiny_run's evaluation, whose segments have 5 tokens. The validation split
# has 55 bytes.
A = 9


@pytest.fixture(scope="module")
def run(make_run, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("attention"))


def draw(run, folder, stop_requested=lambda: False, **others):
    return attention.draw(*run, Plan(out=str(folder), **others), stop_requested=stop_requested)


@pytest.mark.full
def test_averages_are_over_queries_with_a_full_memory_and_everything_is_written(
    run, tmp_path, monkeypatch
):
    average = draw(run, tmp_path)

    assert any(tmp_path.glob("*.png")) == plots.can_draw()
    # Three heads are shown unless others are chosen, for the last query.
    assert (tmp_path / "attention.md").read_text().count("| layer ") == 3
    record = json.loads((tmp_path / "attention.json").read_text())
    heads = record["heads"]
    assert len(heads) == 3
    assert heads[0]["span"] == max(head["span"] for head in heads)
    [query] = record["queries"]
    with np.load(tmp_path / "attention.npz") as arrays:
        probabilities = arrays[f"probabilities_{query['position']}"]
    for head, largest in zip(heads, query["largest_weights"], strict=True):
        assert (largest["layer"], largest["head"]) == (head["layer"], head["head"])
        row = probabilities[head["layer"], head["head"]]
        weight = largest["weights"][0]
        assert weight["probability"] == row.max()
        assert weight["probability"] == row[weight["distance"]]

    # The mean by hand, from the queries' own probabilities. The memory of 9 tokens is full from the
    # third segment of 5 on.
    # It would draw two pictures of each of 45 queries.
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    everywhere = tuple(range(10, 55))
    draw(run, tmp_path, positions=everywhere)
    with np.load(tmp_path / "attention.npz") as arrays:
        stacked = {}
        for name in ("probabilities", "term_a", "term_b", "term_d"):
            stacked[name] = np.stack([arrays[f"{name}_{position}"] for position in everywhere])
            assert stacked[name].shape == (len(everywhere), tiny.N, tiny.H, A), name
            np.testing.assert_allclose(stacked[name].sum(-1), 1, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(arrays["average"], average, rtol=1e-6)
    np.testing.assert_allclose(average, stacked["probabilities"].mean(axis=0), rtol=1e-5)


@pytest.mark.full
def test_a_head_can_be_chosen(run, tmp_path):
    draw(run, tmp_path, heads=("1.0",))
    record = json.loads((tmp_path / "attention.json").read_text())
    [head] = record["heads"]
    assert (head["layer"], head["head"]) == (1, 0)


@pytest.mark.full
def test_a_stop_writes_nothing_and_missing_positions_are_refused(run, tmp_path):
    with pytest.raises(Interrupted):
        draw(run, tmp_path / "a", stop_requested=lambda: True)
    # 12 tokens are two segments of 5, in which no query has a full memory of 9. Of 55 tokens, the
    # queries from 10 to 54 have one.
    with pytest.raises(ValueError, match=r"\b12\b.*\b9\b"):
        draw(run, tmp_path / "a", tokens=12)
    with pytest.raises(ValueError, match=r"\b10\b.*\b54\b.*\b3\b"):
        draw(run, tmp_path / "a", positions=(3,))
    assert not (tmp_path / "a").exists()


def test_heads_that_the_model_lacks_are_refused():
    with pytest.raises(ValueError, match=r"\b0\b.*\b1\b.*\b2\.0\b"):
        Plan(heads=("2.0",)).check(tiny_run.CONFIG)
    # The last layer has more digits than Python converts to an integer.
    for text in ("1", "a.b", "1.2.3", "9" * 5000 + ".0"):
        with pytest.raises(ValueError, match=r"heads must be layer\.head"):
            Plan(heads=(text,)).validate()
