"""Tests the adapter of lm-evaluation-harness, offline, on a task in local files; needs the extra
`lm-eval`.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from support import ROOT, drawn_run
from txl_jax.config import EvalConfig, GenerateConfig
from txl_jax.errors import UserError
from txl_jax.trained_model import load

pytestmark = pytest.mark.nightly(part="lm_eval")

TEXT = "the cat sat on the mat and the dog ran to the cat "
DOCUMENTS = [
    "the cat sat",
    "a dog ran on the mat and sat there for a while, as long as this line",
    "x",
]
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
TASK = {
    "task": "own_generation",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
}
TASK |= {
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "exact_match"}],
}
TASK |= {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 7, "do_sample": False}}


@pytest.fixture(scope="module")
def lm_eval_model():
    from txl_jax import lm_eval_model  # Imports the harness.

    return lm_eval_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    changes, found = (
        {"eval": EvalConfig(segment_len=8, mem_len=120, clamp_len=None, same_length=False)},
        {},
    )
    for kind in ("char", "word"):
        folder = tmp_path_factory.mktemp(kind)
        text = drawn_run.on_text(
            folder, (TEXT * 4 + "\n").encode() * 20, data__tokenizer__kind=kind, **changes
        )
        found[kind] = drawn_run.make(folder / "run", *text)[0].path
    return found


def greedy(model, prompt, length):
    return model.generate([prompt], GenerateConfig(length=length, temperature=0.0, top_k=None))[0]


def test_a_task_of_a_file_of_ones_own_from_the_command_line(runs, tmp_path):
    written = greedy(load(runs["word"]), "a ", 7)
    documents = [
        {"prompt": "a ", "text": written},
        {"prompt": "the dog ", "text": "something else"},
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    files = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "own.jsonl")}}}
    (tmp_path / "own.yaml").write_text(json.dumps(TASK | files))  # JSON is YAML.
    command = [
        sys.executable,
        "-m",
        "experiments.lm_eval",
        f"--model_path={runs['word']}",
        "--batch_size=2",
    ]
    flags = [
        f"--tasks={TASK['task']}",
        f"--include_path={tmp_path}",
        f"--output={tmp_path / 'scores.json'}",
    ]
    environment = os.environ | OFFLINE | {"PYTHONPATH": str(ROOT)}
    given = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, *flags], check=False, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "scores.json").read_text())["results"]
    assert found["own_generation"]["exact_match,none"] == 0.5
    unknown = subprocess.run([*command, "--tasks=no_such_task_here"], check=False, **given)
    assert unknown.returncode == 1 and "no_such_task_here" in unknown.stderr.splitlines()[-1]


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments=each, idx=index) for index, each in enumerate(arguments)]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_log_likelihoods_are_our_own(lm_eval_model, runs, kind):
    """Rolling: of all T tokens; of a continuation: after its context, and whether it is the greedy
    one.
    """
    from lm_eval.api.registry import get_model

    model = load(runs[kind])
    harness = get_model("txl_jax").create_from_arg_string(
        f"path={runs[kind]}", {"batch_size": 2, "device": None}
    )
    assert isinstance(harness, lm_eval_model.HarnessModel)
    rolling = harness.loglikelihood_rolling(
        requests("loglikelihood_rolling", *((text,) for text in DOCUMENTS))
    )
    first = int(model.vocabulary.start[0])
    np.testing.assert_allclose(
        rolling, [-each.nats for each in model.score(DOCUMENTS, first=first)], rtol=1e-5
    )
    pairs = [
        ("the cat", " sat on the mat"),
        ("", "the dog"),
        ("the dog ", greedy(model, "the dog ", 5)),
    ]
    found = harness.loglikelihood(requests("loglikelihood", *pairs))
    expected = [each.logprob for each in model.score_continuations(pairs)]
    np.testing.assert_allclose([logprob for logprob, _ in found], expected, rtol=1e-5)
    assert [is_greedy for _, is_greedy in found] == [False, False, True]


def test_generation_settings_of_a_task(lm_eval_model, runs):
    harness = lm_eval_model.HarnessModel(str(runs["char"]), max_gen_toks=9)
    settings, stop = harness._generation(
        {"until": "\n", "do_sample": False, "temperature": 0.7, "top_k": 3}
    )
    assert settings == GenerateConfig(length=9, temperature=0.0, top_k=None) and stop == ("\n",)
    sampled = {
        "until": ["a", "b"],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_gen_toks": 3,
        "seed": 5,
    }
    settings, stop = harness._generation(sampled)
    assert settings == GenerateConfig(
        length=3, temperature=0.7, top_p=0.9, top_k=None, seed=5
    ) and stop == ("a", "b")
    with pytest.raises(UserError, match="num_beams"):
        harness._generation({"num_beams": 2})


def test_mistakes_are_refused(lm_eval_model, runs):
    mistakes = [
        ("path", "/nowhere", "no run"),
        ("first", "two bytes", "9 tokens"),
        ("batch_size", "many", "'many'"),
    ]
    for name, value, named in (*mistakes, ("device", "cuda:0", "JAX_PLATFORMS")):
        with pytest.raises(UserError, match=named):
            lm_eval_model.HarnessModel(**{"path": str(runs["char"]), name: value})
