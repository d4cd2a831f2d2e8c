"""Tests the adapter of lm-evaluation-harness, offline, on a task in local files. Needs the extra
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
# Documents shorter and longer than a segment, and one of a single token. Some of their words and
# letters are not in TEXT.
DOCUMENTS = [
    "the cat sat",
    "a dog ran on the mat and sat there for a while, as long as this line",
    "x",
]
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
MAX_TOKENS = 7  # Of a generated text of the task.
TASK = {
    "task": "own_generation",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": MAX_TOKENS, "do_sample": False},
}


@pytest.fixture(scope="module")
def lm_eval_model():
    from txl_jax import lm_eval_model  # Imports the harness.

    return lm_eval_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The workdirs of a run on characters and a run on words, by the kind of tokens."""
    # The memory holds a whole document, so scores do not depend on how it is cut into segments.
    lengths = EvalConfig(segment_len=8, mem_len=120, clamp_len=None, same_length=False)
    text = (TEXT * 4 + "\n").encode() * 20
    paths = {}
    for kind in ("char", "word"):
        directory = tmp_path_factory.mktemp(kind)
        config, corpus = drawn_run.on_text(
            directory, text, data__tokenizer__kind=kind, eval=lengths
        )
        run, _ = drawn_run.make(directory / "run", config, corpus)
        paths[kind] = run.path
    return paths


def greedy(model, prompt, length):
    return model.generate([prompt], GenerateConfig(length=length, temperature=0.0, top_k=None))[0]


def test_a_task_of_a_file_of_ones_own_from_the_command_line(runs, tmp_path):
    """One of its two texts is the model's own, so the score is a half."""
    of_model = {"prompt": "a ", "text": greedy(load(runs["word"]), "a ", MAX_TOKENS)}
    of_nobody = {"prompt": "the dog ", "text": "something else"}
    (tmp_path / "own.jsonl").write_text(f"{json.dumps(of_model)}\n{json.dumps(of_nobody)}\n")
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

    def run(*flags):
        return subprocess.run(
            [*command, *flags],
            check=False,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    ended = run(*flags)
    assert ended.returncode == 0, ended.stderr[-3000:]
    scores = json.loads((tmp_path / "scores.json").read_text())["results"]
    assert scores["own_generation"]["exact_match,none"] == 0.5

    ended = run("--tasks=no_such_task_here")
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert "no_such_task_here" in ended.stderr.splitlines()[-1]


def requests(kind, arguments):
    """The harness's requests of a kind, with the arguments of each."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments=words, idx=index) for index, words in enumerate(arguments)]


@pytest.fixture(params=["char", "word"])
def model_and_harness(request, lm_eval_model, runs):
    """A trained model, and the same model as the harness loads it."""
    from lm_eval.api.registry import get_model

    path = runs[request.param]
    harness = get_model("txl_jax").create_from_arg_string(
        f"path={path}", {"batch_size": 2, "device": None}
    )
    assert isinstance(harness, lm_eval_model.HarnessModel)
    return load(path), harness


def test_rolling_log_likelihoods_are_those_of_all_tokens(model_and_harness):
    model, harness = model_and_harness
    arguments = [(text,) for text in DOCUMENTS]
    rolling = harness.loglikelihood_rolling(requests("loglikelihood_rolling", arguments))

    totals = model.score(DOCUMENTS, first=int(model.vocabulary.start[0]))
    np.testing.assert_allclose(rolling, [-total.nats for total in totals], rtol=1e-5)


def test_a_continuation_has_its_log_likelihood_and_whether_it_is_greedy(model_and_harness):
    model, harness = model_and_harness
    pairs = [
        ("the cat", " sat on the mat"),
        ("", "the dog"),
        ("the dog ", greedy(model, "the dog ", 5)),
    ]
    answers = harness.loglikelihood(requests("loglikelihood", pairs))

    logprobs = [logprob for logprob, _ in answers]
    expected = [score.logprob for score in model.score_continuations(pairs)]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5)
    assert [is_greedy for _, is_greedy in answers] == [False, False, True]


def test_generation_settings_of_a_task(lm_eval_model, runs):
    harness = lm_eval_model.HarnessModel(str(runs["char"]), max_gen_toks=9)
    # A greedy task's limits of sampling do not count.
    settings, stop = harness._generation(
        {"until": "\n", "do_sample": False, "temperature": 0.7, "top_k": 3}
    )
    assert settings == GenerateConfig(length=9, temperature=0.0, top_k=None)
    assert stop == ("\n",)

    sampled = {
        "until": ["a", "b"],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_gen_toks": 3,
        "seed": 5,
    }
    settings, stop = harness._generation(sampled)
    assert settings == GenerateConfig(length=3, temperature=0.7, top_p=0.9, top_k=None, seed=5)
    assert stop == ("a", "b")

    with pytest.raises(UserError, match="num_beams"):
        harness._generation({"num_beams": 2})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("path", "/nowhere", "no run"),
        ("first", "two bytes", "9 tokens"),  # Each character is a token, and one is needed.
        ("batch_size", "many", "'many'"),
        ("device", "cuda:0", "JAX_PLATFORMS"),
    ],
)
def test_mistakes_are_refused(lm_eval_model, runs, name, value, words):
    with pytest.raises(UserError, match=words):
        lm_eval_model.HarnessModel(**{"path": str(runs["char"]), name: value})
