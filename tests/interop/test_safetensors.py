"""Tests of safetensors files: written and read again, by the package too, and damaged ones."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from txl_jax.errors import CheckpointError
from txl_jax.interop import leaves
from txl_jax.interop import safetensors as ours
from txl_jax.interop.leaves import Leaf
from txl_jax.runtime.storage import sha256

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
        np.testing.assert_array_equal(found[name].read() if isinstance(found[name], Leaf) else found[name], value)


def test_what_is_written_is_read_here_and_by_the_package(tmp_path):
    path = tmp_path / "a.safetensors"
    digest = ours.write(path, leaves.from_tree(TENSORS))
    assert digest == sha256(path)
    found = ours.read(path)
    check_equal(found, TENSORS)
    with pytest.raises(ValueError, match="read-only"):
        found["matrix"].read()[0] = 1
    np.testing.assert_array_equal(found["matrix"].part(1), TENSORS["matrix"][1])
    theirs = {name: value.copy() for name, value in TENSORS.items() if name != "brain"}  # numpy has no such dtype.
    ours.write(path, leaves.from_tree({name: TENSORS[name] for name in theirs}))
    check_equal(load_file(path), theirs)
    save_file(theirs, path)
    check_equal(ours.read(path), theirs)


def test_a_leaf_that_reads_as_another_array_is_an_error(tmp_path):
    leaf = Leaf((2,), np.dtype(np.float32), lambda _: np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"\ba\b.*\(3,\).*\(2,\)"):
        ours.write(tmp_path / "a", {"a": leaf})
    with pytest.raises(ValueError, match="complex64"):
        ours.write(tmp_path / "a", leaves.from_tree({"a": np.zeros(3, np.complex64)}))


def header(content, *, data=b"\0" * 8):
    encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD = {
    "text": b"# A title and some text of a page",
    "truncated": header({"a": ENTRY}, data=b"\0" * 7),
    "no JSON": header(b"{]"),
    "a name twice": header(b'{"a": %s, "a": %s}' % (2 * (json.dumps(ENTRY).encode(),))),
    "unknown dtype": header({"a": ENTRY | {"dtype": "F8_E4M3", "shape": [8]}}),
    "other size": header({"a": ENTRY | {"shape": [3]}}),
    "overlap": header({"a": ENTRY, "b": ENTRY}),
    "missing": None,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        ours.read(path)
