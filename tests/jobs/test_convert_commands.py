"""Tests of `python -m experiments.convert`: each format from the command line, and bad input."""

import os
import pickle
import subprocess

import jax
import numpy as np
import pytest

import txl_jax
from support import ROOT, foreign, programs, torch_bytes, trained
from txl_jax.config import NormPlace

CHANGES = foreign.CONFIGS["div_val 2"]


def run(source, target, *arguments):
    """Runs the program; returns the exit code, the output and the errors."""
    command = programs.command("experiments.convert", f"--from={source}", f"--to={target}", *arguments)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("to_format", "changes"), [("huggingface", {}), ("original", {"model__layer_norm": NormPlace.PRE})]
)
def test_a_run_to_another_format_and_back(tmp_path, to_format, changes):
    made = trained.make(tmp_path / "run", **trained.WT103, **changes)
    code, printed, errors = run(made.path, tmp_path / "there", f"--to_format={to_format}")
    assert code == 0, errors
    assert "verified  tensors equal bit for bit" in printed
    code, printed, errors = run(tmp_path / "there", tmp_path / "back")
    assert code == 0, errors
    assert f"from      {to_format}:" in printed and "cutoffs=5,8,14" in printed
    before, after = txl_jax.load(made.path), txl_jax.load(tmp_path / "back")
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert after.vocabulary == before.vocabulary
    names = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "layer_norm", "div_val", "tie_projs", "tie_weight")
    assert all(getattr(after.config.model, name) == getattr(before.config.model, name) for name in names)
    assert after.config.eval.mem_len == 9 and after.config.eval.clamp_len == 6
    if to_format == "original":  # The same start of memory: also the same losses.
        assert after.score([trained.TEXT[:200]])[0] == before.score([trained.TEXT[:200]])[0]


def test_a_module_that_the_original_pickled(tmp_path):
    config, params = foreign.make("pytorch", **{name: value for name, value in CHANGES.items() if name != "untie_r"})
    (tmp_path / "original").mkdir()
    torch_bytes.write_legacy(tmp_path / "original" / "model.pt", foreign.pickled_module(config, params))
    (tmp_path / "original" / "vocab.txt").write_text("\n".join(foreign.WORDS))
    code, _, errors = run(tmp_path / "original", tmp_path / "ours", "--from_format=original")
    assert code == 0, errors
    model = txl_jax.load(tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, model.params), params)
    assert model.vocabulary.words == foreign.WORDS and model.config.compat.final_norm is False


class Executed:
    """A pickle that would run a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_bad_input_is_one_sentence_and_nothing_is_written(tmp_path):
    config, params = foreign.make("hf", **CHANGES)
    good = foreign.huggingface_folder(tmp_path / "good", config, params)
    malicious = tmp_path / "malicious"
    malicious.mkdir()
    (malicious / "model.pt").write_bytes(pickle.dumps(Executed(tmp_path / "touched")))
    (tmp_path / "words").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "words" / name).write_bytes((good / name).read_bytes())
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(foreign.WORDS[:-1]))
    for source, arguments, expected in (
        (malicious, (), "model.pt"),
        (tmp_path / "words", (), "vocab.txt"),
        (good, ("--from_format=nvidia",), "nvidia"),
        (tmp_path / "none", (), "none"),
    ):
        code, _, errors = run(source, tmp_path / "out" / "new", *arguments)
        assert code == 1 and errors.startswith("error: ") and errors.count("\n") == 1, errors
        assert expected in errors and "Traceback" not in errors
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert not (tmp_path / "touched").exists()


def test_the_paths_must_be_given():
    code, _, errors = run("", "somewhere")
    assert code == 1 and "give --from=PATH" in errors
