"""Tests the attention job: what it writes, that averages are probabilities, and what is refused."""

import json

import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax.config import Encoding, Network
from txl_jax.config import tree as config_tree
from txl_jax.paper import attention_maps, plots
from txl_jax.paper.attention_maps import Plan
from txl_jax.runs.score import Interrupted

M, L = 9, 5  # Of tiny_run's evaluation; the validation text has 55 bytes.


@pytest.fixture(scope="module")
def run(make_run, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("attention"))


def draw(run, folder, stop_requested=lambda: False, **others):
    return attention_maps.run(*run, Plan(out=str(folder), **others), log=str, stop_requested=stop_requested)


@pytest.mark.full
def test_averages_are_probabilities_and_everything_is_written(run, tmp_path):
    average = draw(run, tmp_path, positions=(20, 41))
    assert average.shape == (tiny.N, tiny.H, M)
    np.testing.assert_allclose(average.sum(-1), 1, rtol=1e-5)
    with np.load(tmp_path / "attention.npz") as arrays:
        np.testing.assert_allclose(arrays["average"], average, rtol=1e-6)
        for position in (20, 41):
            for name in ("probabilities", "term_a", "term_b", "term_d"):
                array = arrays[f"{name}_{position}"]
                assert array.shape == (tiny.N, tiny.H, M)
                np.testing.assert_allclose(array.sum(-1), 1, rtol=1e-5)
    record = json.loads((tmp_path / "attention.json").read_text())
    assert len(record["heads"]) == 3 and record["heads"][0]["span"] == max(head["span"] for head in record["heads"])
    assert (tmp_path / "attention.md").exists() and any(tmp_path.glob("*.png")) == plots.can_draw()


@pytest.mark.full
def test_the_average_is_over_queries_with_a_full_memory(run, tmp_path, monkeypatch):
    """The mean by hand, from the queries' own probabilities: the memory of 9 is full from the third segment of 5 on."""
    monkeypatch.setattr(plots, "can_draw", lambda: False)  # Ninety pictures.
    everywhere = tuple(range(10, 55))
    average = draw(run, tmp_path, positions=everywhere)
    with np.load(tmp_path / "attention.npz") as arrays:
        mean = np.mean([arrays[f"probabilities_{position}"] for position in everywhere], axis=0)
    np.testing.assert_allclose(average, mean, rtol=1e-5)


@pytest.mark.full
def test_a_stop_writes_nothing_and_what_is_not_there_is_refused(run, tmp_path):
    with pytest.raises(Interrupted):
        draw(run, tmp_path / "a", stop_requested=lambda: True)
    for others, pattern in (
        ({"tokens": 12}, r"\b12\b.*\b9\b"),
        ({"positions": (3,)}, r"\b3\b.*\b10\b.*\b54\b"),
        ({"heads": ("2.0",)}, r"\b2\.0\b.*\b0\b.*\b1\b"),
    ):
        with pytest.raises(ValueError, match=pattern):
            draw(run, tmp_path / "a", **others)
    assert not (tmp_path / "a").exists()


def test_models_without_such_a_memory_are_refused():
    for changes, pattern in (
        ({"model.network": Network.LSTM}, r"\blstm\b"),
        ({"model.encoding": Encoding.SHAW, "model.num_positions": 9}, r"\bshaw\b"),
        ({"eval.mem_len": 0, "eval.same_length": False}, r"eval\.mem_len\D*\b0\b"),
    ):
        with pytest.raises(ValueError, match=pattern):
            Plan().check(config_tree.replace(tiny_run.CONFIG, changes))
