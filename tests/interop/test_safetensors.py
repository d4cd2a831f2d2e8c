"""Tests of safetensors files: written and read again, by the package too, corrupted ones, and the
memory it takes.
"""

import json
import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support import foreign
from txl_jax.errors import CheckpointError
from txl_jax.interop import leaves, portable
from txl_jax.interop import safetensors as ours
from txl_jax.interop.leaves import Leaf
from txl_jax.runs import convert as conversion

TENSORS = {
    "small": np.arange(3, dtype=np.uint8),
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "reversed": np.arange(4, dtype=np.float16)[::-1],
    "brain": np.arange(5, dtype=ml_dtypes.bfloat16),
    "nothing": np.zeros((0, 7), np.float64),
    "number": np.array(-4, dtype=np.int64),
}


def check_equal(found, expected):
    assert set(found) == set(expected) and len(found) == len(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_array_equal(
            found[name].read() if isinstance(found[name], Leaf) else found[name], value
        )


def test_what_is_written_is_read_here_and_by_the_package(tmp_path):
    path = tmp_path / "a.safetensors"
    ours.write(path, leaves.from_tree(TENSORS))
    found = ours.read(path)
    check_equal(found, TENSORS)
    with pytest.raises(ValueError, match="read-only"):
        found["matrix"].read()[0] = 1
    np.testing.assert_array_equal(found["matrix"].part(1), TENSORS["matrix"][1])
    # numpy has no such dtype.
    theirs = {name: value.copy() for name, value in TENSORS.items() if name != "brain"}
    ours.write(path, leaves.from_tree({name: TENSORS[name] for name in theirs}))
    check_equal(load_file(path), theirs)
    save_file(theirs, path)
    check_equal(ours.read(path), theirs)


def test_a_conversion_has_an_array_at_a_time_in_memory_and_the_parameters_once(
    tmp_path, monkeypatch
):
    """From Hugging Face's format and back.

    Losses, of the source and of the result, need all parameters.
    """
    config, params = foreign.make("hf", d_model=512, n_head=8, d_head=64, d_inner=512)
    foreign.huggingface_folder(tmp_path / "theirs", config, params)
    whole, largest = (of([leaf.nbytes for leaf in jax.tree.leaves(params)]) for of in (sum, max))
    before, losses, place, peaks, live = live_bytes(), conversion._losses, portable.place, [], []
    del params

    def losses_with_peak(*given, **options):
        peaks.append(tracemalloc.get_traced_memory()[1])  # Before JAX compiles.
        return losses(*given, **options)

    def placed(*given):
        found = place(*given)
        live.append(live_bytes() - before)
        return found

    monkeypatch.setattr(conversion, "_losses", losses_with_peak)
    monkeypatch.setattr(portable, "place", placed)
    for source, target, to_format in (
        ("theirs", "ours", "native"),
        ("ours", "back", "huggingface"),
    ):
        tracemalloc.start()
        paths = tmp_path / source, tmp_path / target
        conversion.convert(
            *paths, to_format=conversion.TargetFormat(to_format), log=lambda line: None
        )
        tracemalloc.stop()
    assert max(peaks[::2]) < 4 * largest < 0.6 * whole and max(live) < 1.1 * whole


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_leaf_that_reads_as_another_array_is_an_error(tmp_path):
    leaf = Leaf((2,), np.dtype(np.float32), lambda _: np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"\ba\b.*\(3,\).*\(2,\)"):
        ours.write(tmp_path / "a", {"a": leaf})
    with pytest.raises(ValueError, match="complex64"):
        ours.write(tmp_path / "a", leaves.from_tree({"a": np.zeros(3, np.complex64)}))


def header(content):
    encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(encoded).to_bytes(8, "little") + encoded + b"\0" * 8


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD = {  # The package checks sizes and places.
    "text": b"# A title and some text of a page",
    "a name twice": header(b'{"a": %s, "a": %s}' % (2 * (json.dumps(ENTRY).encode(),))),
    "unknown dtype": header({"a": ENTRY | {"dtype": "F8_E4M3", "shape": [8]}}),
    "other size": header({"a": ENTRY | {"shape": [3]}}),
    "missing": None,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        ours.read(path)
