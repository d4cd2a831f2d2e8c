"""Tests that the hundred-thousandth token costs what the thousandth did."""

import resource
import statistics
import time

import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax.config import EvalConfig, GenerateConfig

TOKENS, BLOCK = 100_000, 500


@pytest.mark.nightly(part="long")
def test_time_and_memory_per_token_stay_the_same():
    model = tiny.make(n_layer=4, d_model=32, n_head=4, d_head=8, d_inner=64)
    span = EvalConfig(segment_len=16, mem_len=512, clamp_len=100, same_length=True)
    config = GenerateConfig(length=TOKENS, top_k=5)
    blocks = tiny_run.generator(model, span).tokens(np.arange(5), config, block=BLOCK)
    seconds, peaks, count = [], [], 0
    began = time.perf_counter()
    for tokens in blocks:
        count += tokens.shape[1]
        seconds.append(time.perf_counter() - began)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # Bytes, the most so far.
        began = time.perf_counter()
    assert count == TOKENS
    tenths = [statistics.median(seconds[i : i + 20]) for i in range(0, TOKENS // BLOCK, 20)]
    print(f"ms per token, tenth by tenth: {', '.join(f'{1e3 * s / BLOCK:.3f}' for s in tenths)}")
    print(f"peak memory after 10,000 and 100,000 tokens: {peaks[19] / 1e6:.1f} and {peaks[-1] / 1e6:.1f} MB")
    assert peaks[-1] - peaks[19] < 2e6
    assert max(tenths[1:]) < 1.5 * min(tenths[1:])
