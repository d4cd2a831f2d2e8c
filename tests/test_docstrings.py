"""Tests that the examples in docstrings give what they show."""

import doctest
import importlib

import pytest

WITH_EXAMPLES = [
    "txl_jax.metrics",
    "txl_jax.jobs.report",
    "txl_jax.training.progress",
    "txl_jax.data.batches.segments",
    "txl_jax.evaluation.sliding_window",
    "txl_jax.data.tokens.build_vocabulary",
    "txl_jax.data.tokens.byte_vocabulary",
    "txl_jax.jobs.score_tokens",
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0 and failed == 0
