"""Tests of exported models: the numbers of the model in a process without this project, and errors
for files that were changed and models that cannot be exported.
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
    "weights.safetensors",
]
COUNT = 50  # Tokens to generate.
BYTES = {"tokenizer": Tokenizer.BYTE, "model__n_layer": 1}


def export_model(source, target, **options):
    job.run(job.Plan(from_=str(source), to=str(target), **options), None)


RUN = """
import json, pathlib, runpy, sys
import numpy as np
example = runpy.run_path(sys.argv[1])
folder = pathlib.Path(sys.argv[2])
ids = json.loads(sys.argv[3])
model = example["load"](folder)
# A memory that another text has filled. The reset empties it.
used = {}
for name, array in model.memory.items():
    used[name] = np.full_like(array, model.manifest["segment_len"])
model = model._replace(memory=used)
generated = None
if "generate" in model.functions:
    generated = example["generate"](model, ids[:12], int(sys.argv[4]))
packages = {name.partition(".")[0] for name in sys.modules}
print(json.dumps({
    "nats": example["score"](model, ids).tolist(),
    "ids": generated,
    "imported": sorted(packages & {"txl_jax", "experiments", "flax", "optax"}),
}))
"""


def run_elsewhere(folder, ids, tmp_path):
    """Runs the example in another process, which imports nothing of this project."""
    arguments = [str(EXAMPLE), str(folder), json.dumps(ids.tolist()), str(COUNT)]
    command = [sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["imported"] == []
    return result


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
    """The same losses, and the same tokens at temperature 0."""
    run = drawn_run.of_words(tmp_path / "run", **changes)
    folder = tmp_path / "model"
    export_model(run.path, folder, rows=2)
    model = txl_jax.load(run.path)
    # As bytes, six segments of 5 targets, of which the second fills the memory of 9.
    ids = model.encode(drawn_run.TEXT[:28])

    result = run_elsewhere(folder, ids, tmp_path)

    [nats] = model.score([ids], per_token=True)
    np.testing.assert_allclose(result["nats"], nats, rtol=1e-6, atol=1e-6)
    [text] = model.generate([ids[:12]], GenerateConfig(length=COUNT, temperature=0.0))
    pieces = json.loads((folder / "tokens.json").read_bytes())
    generated = b"".join(bytes.fromhex(pieces[i]) for i in result["ids"])
    assert generated.decode(errors="replace") == text
    assert len(set(result["ids"])) > 2, "a token or two over and over would show little"


def test_int8_is_exported_where_it_is_asked_for(workdir, tmp_path):
    """Equal but for roundings to int8 and to 16 bits that fall on the other side: much closer than
    float32 is.
    """
    int8 = {"weight_dtype": "int8", "cache_dtype": "int8"}
    export_model(workdir.path, tmp_path / "int8", **int8)
    quantized = txl_jax.load(workdir.path, **int8)
    usual = txl_jax.load(workdir.path)
    ids = quantized.encode(drawn_run.TEXT[:150])

    nats = np.array(run_elsewhere(tmp_path / "int8", ids, tmp_path)["nats"])

    error = np.abs(nats - quantized.score([ids], per_token=True)[0]).max()
    effect = np.abs(nats - usual.score([ids], per_token=True)[0]).max()
    assert error < effect / 20, (error, effect)


def test_the_manifest_describes_the_files(workdir, folder):
    assert sorted(path.name for path in folder.iterdir()) == FILES
    manifest, weights, functions = exported.read(folder)
    assert manifest["rows"] == 2
    assert manifest["segment_len"] == 5
    assert manifest["mem_len"] == 9
    for name, function in functions.items():
        assert function.platforms == ("cpu", "tpu", "cuda"), name
    assert "clusters.0.table" not in weights  # It is the embedding's.


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_an_error(folder, name):
    """Wherever it changed, for us and for the example."""
    load = runpy.run_path(str(EXAMPLE))["load"]
    path = folder / name
    whole = path.read_bytes()
    try:
        for place in (0, len(whole) // 2, len(whole) - 1):
            changed = bytes([whole[place] ^ 1])
            path.write_bytes(whole[:place] + changed + whole[place + 1 :])
            # manifest.sha256 is the sum of manifest.json, which then seems to have changed.
            with pytest.raises(CheckpointError, match=name.replace("sha256", "json")):
                exported.read(folder)
            with pytest.raises(ValueError, match="has changed"):
                load(folder)
    finally:
        path.write_bytes(whole)


def test_a_file_too_many_or_too_few_is_an_error(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "more").touch()
    with pytest.raises(CheckpointError, match="more"):
        exported.read(copy)

    (copy / "more").rename(copy / "tokens.json")
    with pytest.raises(CheckpointError, match="tokens"):
        exported.read(copy)


def test_each_row_is_sampled_at_its_own_temperature():
    """At 0 it is the lowest id of the most likely."""
    n = 4000
    log_p = np.log(np.float32([0.1, 0.4, 0.4, 0.1]))
    temperatures = np.array([0.5, 2.0, 0.0], np.float32)
    # n rows at each temperature, which take turns.
    keys = jax.random.key_data(jax.random.split(jax.random.key(0, impl="threefry2x32"), 3 * n))

    sample = jax.jit(exported._sample)
    ids = np.asarray(sample(np.tile(log_p, (3 * n, 1)), keys, np.tile(temperatures, n)))

    assert ids.dtype == np.int32
    assert set(ids[2::3]) == {1}
    for i in range(2):
        expected = np.exp(log_p / temperatures[i])
        frequencies = np.bincount(ids[i::3], minlength=4) / n
        # A frequency's standard deviation is at most 0.5 / sqrt(n).
        np.testing.assert_allclose(
            frequencies,
            expected / expected.sum(),
            atol=4 * 0.5 / n**0.5,
            err_msg=f"temperature {temperatures[i]}",
        )


def test_other_numbers_than_the_models_are_an_error(workdir, folder):
    loaded = txl_jax.load(workdir.path)
    components = job._on_one_device(loaded.config, workdir.text.vocabulary, 2)
    model = job._functions_of(components, loaded.params)
    name = "layers.0.output"
    other = model._replace(weights=model.weights | {name: model.weights[name] * 1.001})
    with pytest.raises(CheckpointError, match="score"):
        job._verify(folder, other, workdir.text.vocabulary.size)


def test_a_network_that_does_not_generate_is_scored_only(tmp_path, capsys):
    run = drawn_run.of_words(
        tmp_path / "lstm", tokenizer=Tokenizer.BYTE, model__n_layer=1, model__network="lstm"
    )
    model = txl_jax.load(run.path)
    components = job._on_one_device(model.config, model.vocabulary, 1)
    functions = job._functions_of(components, model.params).functions
    assert list(functions) == ["score"]
    assert "lstm" in capsys.readouterr().out


def test_an_exported_model_is_not_a_source_of_weights(folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="is an exported model"):
        txl_jax.load(folder)
    with pytest.raises(UserError, match="is an exported model"):
        convert(folder, out)
    assert not out.exists()


def test_a_target_inside_the_source_is_an_error(workdir):
    with pytest.raises(UserError, match="outside of --from"):
        export_model(workdir.path, Path(workdir.path, "inside"))


def test_without_flatbuffers_nothing_is_written(workdir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(UserError, match="flatbuffers"):
        export_model(workdir.path, out)
    assert not out.exists()
