"""Tests of exported models: the numbers of the model in a process without this project, and what is
refused.
"""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import txl_jax
from experiments import export as job
from support import ROOT, drawn_run
from txl_jax.config import GenerateConfig, Tokenizer
from txl_jax.errors import CheckpointError, UserError
from txl_jax.interop import exported
from txl_jax.runs.convert import convert

pytestmark = pytest.mark.full
EXAMPLE = ROOT / "docs" / "examples" / "run_exported.py"
FILES = [
    "generate.jax_export",
    "manifest.json",
    "manifest.sha256",
    "score.jax_export",
    "tokens.json",
]
FILES += ["weights.safetensors"]
COUNT = 50
BYTES = {"tokenizer": Tokenizer.BYTE, "model__n_layer": 1}


def export_model(source, target, **options):
    job.run(job.Plan(from_=str(source), to=str(target), **options), None)


RUN = """
import json, pathlib, runpy, sys
import numpy as np
example = runpy.run_path(sys.argv[1])
folder = pathlib.Path(sys.argv[2])
ids = json.loads(sys.argv[3])
manifest, weights, memory, functions = example["load"](folder)
# The reset empties it.
used = {name: np.full_like(array, manifest["segment_len"]) for name, array in memory.items()}
model = manifest, weights, used, functions
generated = None
if "generate" in functions:
    generated = example["generate"](model, ids[:12], int(sys.argv[4]))
packages = {name.partition(".")[0] for name in sys.modules}
print(json.dumps({
    "nats": example["score"](model, ids).tolist(),
    "ids": generated,
    "imported": sorted(packages & {"txl_jax", "experiments", "flax", "optax"}),
}))
"""


def run_elsewhere(folder, ids, tmp_path):
    """Runs the example in a process of its own."""
    command = [
        sys.executable,
        "-c",
        RUN,
        *map(str, (EXAMPLE, folder, json.dumps(ids.tolist()), COUNT)),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["imported"] == []
    return found


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return drawn_run.of_words(tmp_path_factory.mktemp("runs") / "run", **BYTES)


@pytest.fixture(scope="module")
def folder(workdir, tmp_path_factory):
    target = tmp_path_factory.mktemp("exported") / "model"
    export_model(workdir.path, target, rows=2)
    return target


@pytest.mark.parametrize("changes", [BYTES, drawn_run.WT103], ids=["bytes", "clusters"])
def test_another_process_computes_what_the_model_does(changes, tmp_path):
    made, folder = drawn_run.of_words(tmp_path / "run", **changes), tmp_path / "model"
    export_model(made.path, folder, rows=2)
    model = txl_jax.load(made.path)
    ids = model.encode(drawn_run.TEXT[:28])  # Six segments; the memory of 9 fills up in the second.
    found = run_elsewhere(folder, ids, tmp_path)
    np.testing.assert_allclose(
        found["nats"], model.score([ids], per_token=True)[0], rtol=1e-6, atol=1e-6
    )
    [text] = model.generate([ids[:12]], GenerateConfig(length=COUNT, temperature=0.0))
    pieces = json.loads((folder / "tokens.json").read_bytes())
    assert b"".join(bytes.fromhex(pieces[i]) for i in found["ids"]).decode(errors="replace") == text
    assert len(set(found["ids"])) > 2


def test_int8_is_exported_where_it_is_asked_for(workdir, tmp_path):
    """Equal but for roundings to int8 and to 16 bits that fall on the other side; far nearer than
    float32 is.
    """
    target, int8 = tmp_path / "int8", {"weight_dtype": "int8", "cache_dtype": "int8"}
    export_model(workdir.path, target, **int8)
    models = [txl_jax.load(workdir.path, **types) for types in (int8, {})]
    ids = models[0].encode(drawn_run.TEXT[:150])
    found = run_elsewhere(target, ids, tmp_path)["nats"]
    off, effect = (np.abs(found - model.score([ids], per_token=True)[0]).max() for model in models)
    assert off < effect / 20, (off, effect)


def test_the_manifest_describes_the_files(workdir, folder):
    assert sorted(path.name for path in folder.iterdir()) == FILES
    manifest, weights, functions = exported.read(folder)
    assert (manifest["rows"], manifest["segment_len"], manifest["mem_len"]) == (2, 5, 9)
    assert {each.platforms for each in functions.values()} == {("cpu", "tpu", "cuda")}
    assert "clusters.0.table" not in weights  # It is the embedding's.


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused(folder, name):
    load = runpy.run_path(str(EXAMPLE))["load"]
    path = folder / name
    whole = path.read_bytes()
    try:
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=name.replace("sha256", "json")):
                exported.read(folder)
            with pytest.raises(ValueError, match="has changed"):
                load(folder)
    finally:
        path.write_bytes(whole)


def test_a_file_too_many_or_too_few_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "more").touch()
    with pytest.raises(CheckpointError, match="more"):
        exported.read(copy)
    (copy / "more").rename(copy / "tokens.json")
    with pytest.raises(CheckpointError, match="tokens"):
        exported.read(copy)


def test_each_row_is_sampled_at_its_own_temperature():
    """At 0 it is the lowest id of the most likely."""
    n, temperatures, log_p = (
        4000,
        np.array([0.5, 2.0, 0.0], np.float32),
        np.log(np.float32([0.1, 0.4, 0.4, 0.1])),
    )
    keys = jax.random.key_data(jax.random.split(jax.random.key(0, impl="threefry2x32"), 3 * n))
    drawn = np.asarray(
        jax.jit(exported._sample)(np.tile(log_p, (3 * n, 1)), keys, np.tile(temperatures, n))
    )
    assert drawn.dtype == np.int32 and set(drawn[2::3]) == {1}
    for i in range(2):
        expected = np.exp(log_p / temperatures[i])
        found = np.bincount(drawn[i::3], minlength=4) / n
        np.testing.assert_allclose(found, expected / expected.sum(), atol=4 * 0.5 / n**0.5)


def test_other_numbers_than_the_models_are_refused(workdir, folder):
    config = txl_jax.load(workdir.path).config
    components = job._on_one_device(config, workdir.text.vocabulary, 2)
    model = job._functions_of(components, txl_jax.load(workdir.path).params)
    name = "layers.0.output"
    other = model._replace(weights=model.weights | {name: model.weights[name] * 1.001})
    with pytest.raises(CheckpointError, match="score"):
        job._verify(folder, other, 256)


def test_a_network_that_does_not_generate_is_scored_only(tmp_path, capsys):
    made = drawn_run.of_words(
        tmp_path / "lstm", tokenizer=Tokenizer.BYTE, model__n_layer=1, model__network="lstm"
    )
    model = txl_jax.load(made.path)
    found = job._functions_of(job._on_one_device(model.config, model.vocabulary, 1), model.params)
    assert list(found.functions) == ["score"] and "lstm" in capsys.readouterr().out


def test_bad_input_is_refused_and_nothing_is_written(workdir, folder, tmp_path, monkeypatch):
    """An exported model is not a source of weights, either."""
    out = tmp_path / "out"
    for read in (txl_jax.load, lambda path: convert(path, out)):
        with pytest.raises(UserError, match="is an exported model"):
            read(folder)
    with pytest.raises(UserError, match="outside of --from"):
        export_model(workdir.path, Path(workdir.path, "inside"))
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(UserError, match="flatbuffers"):
        export_model(workdir.path, out)
    assert not out.exists()
