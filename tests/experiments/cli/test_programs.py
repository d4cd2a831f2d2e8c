"""Tests the programs as a user starts them: Ctrl-C, and what the first mistakes are answered."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.flag_tree import flagfile_names
from support import ROOT, programs
from txl_jax.runtime.metrics_log import read_metrics
from txl_jax.runtime.sinks.sink import MEASURED

TINY = [
    "--model.n_layer=2",
    "--model.d_model=16",
    "--model.n_head=2",
    "--model.d_head=8",
    "--model.d_inner=32",
    "--train.batch_size=4",
    "--train.segment_len=16",
    "--train.mem_len=16",
    "--train.segments_per_call=2",
    "--train.steps=600",
    "--train.log_every=10",
    "--train.eval_every=150",
    "--train.checkpoint_every=50",
    "--eval.batch_size=4",
    "--eval.segment_len=16",
    "--eval.mem_len=32",
    "--eval.clamp_len=none",
]


def start(program, *flags, **kwargs):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = programs.command(f"experiments.{program}", *flags)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def numbers(workdir):
    records = read_metrics(workdir)
    return {(r["kind"], r["step"]): {k: v for k, v in r.items() if k not in MEASURED} for r in records}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], 12_000)))
    return path


@pytest.fixture(scope="module")
def undisturbed(text_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    code, out, err = finish(
        start("text", *TINY, f"--data.file={text_file}", f"--cache_dir={text_file.parent}", f"--workdir={workdir}")
    )
    assert code == 0, err
    return workdir, out


def wait_for_step(workdir, step, process):
    """Returns once the run has reported `step`."""
    for _ in range(1200):
        if any(record["step"] >= step for record in read_metrics(workdir)):
            return
        if process.poll() is not None:
            pytest.fail(f"the run ended before step {step}: {process.communicate()}")
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"the run never came to step {step}")


def test_ctrl_c_saves_and_leaves_with_a_clear_line(undisturbed, text_file, tmp_path):
    command = [*TINY, f"--data.file={text_file}", f"--cache_dir={text_file.parent}", f"--workdir={tmp_path}"]
    process = start("text", *command)
    wait_for_step(tmp_path, 60, process)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in err
    stopped_at = int(re.search(r"(?m)^stopped\D*(\d+)", out)[1])
    assert (tmp_path / "checkpoints" / "latest" / str(stopped_at)).exists()
    code, out, err = finish(start("text", *command))
    assert code == 0 and re.search(rf"resum\w+\D*\b{stopped_at}\b", out)
    assert numbers(tmp_path) == numbers(undisturbed[0])


def test_another_text_is_scored_in_place_of_the_runs_own(undisturbed, tmp_path):
    """Lists in place of one file; and the folder of the ids is that of the run, not one in the current folder."""
    workdir, _ = undisturbed
    (tmp_path / "other.txt").write_text("four three two one " * 50)
    flags = [f"--{split}={tmp_path / 'other.txt'}" for split in ("train", "valid", "test")]
    code, out, err = finish(start("text", "--mode=eval", f"--workdir={workdir}", *flags))
    assert code == 0, err
    trained_on = json.loads((workdir / "config.json").read_text())["text"]
    assert trained_on["description"] in out and "949" in out, "both texts are named"
    assert len(list((Path(trained_on["cache_dir"]) / "tokens").glob("text-*"))) == 2


def test_the_run_opens_with_its_sizes_and_reports_progress(undisturbed):
    _, out = undisturbed
    for words in ("parameters", "memory", "ETA", "tokens/s", "bpc"):
        assert words in out, words


def test_evaluation_and_generation_of_a_workdir(undisturbed, tmp_path):
    workdir, _ = undisturbed
    code, out, err = finish(
        start(
            "enwik8",
            "--mode=eval",
            f"--workdir={workdir}",
            "--eval.mem_len=8",
            "--model.attention=reference",
            f"--data_dir={tmp_path}",
        )
    )
    assert code == 0, err
    assert "attention: evaluation reference (" in out
    assert re.search(r"(?m)^corpus +text\b.*\benwik8$", out), "the run is that of another corpus' program"
    assert json.loads((workdir / "evaluation.json").read_text())["eval"]["mem_len"] == 8
    assert (tmp_path / "prepared" / "tokens").is_dir(), "a data folder that is given brings its own cache"
    flags = ["--mode=generate", f"--workdir={workdir}", "--generate.length=40", "--generate.prompt=one two"]
    first, second = (finish(start("text", *flags)) for _ in range(2))
    assert first[0] == 0, first[2]
    assert first[1] == second[1] and "one two" in first[1] and not re.search("(?m)^corpus ", first[1])


@pytest.mark.slow
def test_tokens_are_scored_and_context_lengths_compared_without_a_flagfile(undisturbed):
    workdir, _ = undisturbed
    code, _, err = finish(start("text", "--mode=score", f"--workdir={workdir}", "--eval.batch_size=3"))
    assert code == 0, err
    results = json.loads((workdir / "results.json").read_text())
    lines = (workdir / "scores-test.tsv").read_text().splitlines()
    assert len(lines) == 1 + results["test"]["tokens"] and lines[0] == "index\ttoken\tnats"
    flags = [f"--workdir={workdir}", "--lengths=32,8", "--split=test"]
    code, _, err = finish(start("paper.context_length", *flags))
    assert code == 0, err
    with open(workdir / "context_length.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["attention_length"] for row in rows] == ["8", "32"]
    # 32 are the slots of the run itself, whose default it is that every query sees the same number of keys.
    assert float(rows[1]["loss"]) == results["test"]["loss"]


def test_a_trained_run_is_studied_without_a_flagfile(undisturbed, tmp_path):
    workdir, _ = undisturbed
    for program, flags, made in (
        ("paper.attention", ["--heads=0.1", f"--out={tmp_path}"], tmp_path / "attention.md"),
        ("paper.continuation", ["--generate.length=5", "--context=40"], workdir / "continuation.md"),
        ("temperature", ["--temperatures=1.1"], workdir / "temperature.json"),
    ):
        code, out, err = finish(start(program, f"--workdir={workdir}", *flags))
        assert code == 0, err
        assert made.exists() and str(made.parent) in out


@pytest.mark.slow
def test_a_group_of_runs_is_compared(undisturbed, text_file, tmp_path):
    workdir, _ = undisturbed
    short = ["--train.steps=2", "--train.log_every=2", "--train.eval_every=2", "--train.checkpoint_every=2"]
    lstm = [*TINY, *short, "--model.network=lstm", f"--data.file={text_file}", f"--workdir={tmp_path / 'lstm'}"]
    code, _, err = finish(start("text", *lstm, f"--cache_dir={text_file.parent}"))
    assert code == 0, err
    group = [
        f"--workdirs={workdir},{tmp_path / 'lstm'}",
        "--names=ours,LSTM",
        f"--out={tmp_path / 'recl'}",
    ]
    code, out, err = finish(start("paper.recl", *group, "--lengths=4,12,4", "--stride=200"))
    assert code == 0, err
    assert "| LSTM | " in out and (tmp_path / "recl" / "recl.json").exists()


@pytest.mark.slow
def test_rows_of_a_table_are_run(text_file, tmp_path):
    short = ["--train.steps=2", "--train.log_every=2", "--train.eval_every=2", "--train.checkpoint_every=2"]
    flags = [*TINY, *short, "--data.corpus=text", f"--data.file={text_file}", f"--cache_dir={text_file.parent}"]
    chosen = ["--rows=none-shaw-half", "--lengths=8", "--stride=8", "--seeds=1"]
    code, out, err = finish(start("paper.ablation", *flags, *chosen, f"--out={tmp_path}"))
    assert code == 0, err
    assert "| no | shaw | half | " in out and (tmp_path / "none-shaw-half-seed1" / "ablation.json").exists()


@pytest.mark.slow
def test_an_ensemble_is_trained_a_member_scored_and_split_off(text_file, tmp_path):
    short = ["--train.steps=2", "--train.log_every=2", "--train.eval_every=2", "--train.checkpoint_every=2"]
    flags = [*TINY, *short, "--data.corpus=text", f"--data.file={text_file}", f"--cache_dir={text_file.parent}"]
    chosen = ["--ensemble_member=seed=1", "--ensemble_member=seed=2 optimizer.learning_rate=0.002"]
    code, _, err = finish(start("ensemble", *flags, *chosen, f"--workdir={tmp_path / 'all'}"))
    assert code == 0, err
    name = "seed=2+learning_rate=0.002"
    assert f"| {name} | " in (tmp_path / "all" / "members.md").read_text()
    member = [f"--workdir={tmp_path / 'all'}", f"--ensemble_member={name}"]
    code, _, err = finish(start("text", "--mode=eval", *member))
    assert code == 0, err
    assert (tmp_path / "all" / "members" / name / "evaluation.json").exists()
    code, _, err = finish(start("text", "--mode=eval", member[0]))
    assert code == 1 and "--ensemble_member" in err and name in err
    code, _, err = finish(start("text", *flags, *member))
    assert code == 1 and "--mode=split" in err
    code, _, err = finish(start("ensemble", "--mode=split", *member, f"--to={tmp_path / 'own'}"))
    assert code == 0, err
    assert (tmp_path / "own" / "results.json").exists()


@pytest.mark.parametrize(
    ("program", "flags", "code", "expected"),
    [
        ("ensemble", ["--workdir=WORK", "--ensemble_member=seed=1"], 1, ["1"]),
        ("ensemble", ["--workdir=WORK", "--ensemble_member=seed"], 1, ["--ensemble_member", "'seed'", "seed=2"]),
        ("ensemble", ["--ensemble_member=seed=1"], 1, ["--workdir"]),
        ("ensemble", ["--workdir=WORK", "--mode=split"], 1, ["0", "--ensemble_member"]),
        ("paper.recl", ["--workdirs=WORK", "--out=WORK"], 1, ["workdirs", "1"]),
        ("paper.recl", ["--workdirs=WORK"], 1, ["out"]),
        ("paper.recl", ["--workdirs=WORK,WORK/b", "--out=WORK"], 1, ["WORK", "config.json"]),
        ("bench.speed", ["--model.network=lstm"], 1, ["model.network", "lstm"]),
        ("paper.recl", ["--lengths=3"], 1, ["lengths", "3", "100,1000,100"]),
        ("paper.ablation", ["--rows=best", "--out=WORK"], 1, ["best", "none-al_rfou-half"]),
        ("paper.ablation", ["--flagfile=ptb_small"], 1, ["out"]),
        ("paper.attention", ["--workdir=WORK"], 1, ["WORK", "config.json"]),
        ("paper.continuation", ["--workdir=WORK"], 1, ["WORK", "config.json"]),
        ("temperature", ["--workdir=WORK"], 1, ["WORK", "config.json"]),
        ("enwik8", ["--workdir=WORK", "--data_dir=WORK"], 1, ["enwik8.zip", "--data.file", "mattmahoney"]),
        ("enwik8", ["--workdir=WORK", "--data.file=WORK/none"], 1, ["WORK/none"]),
        ("text", ["--data.file=setup.cfg"], 1, ["--workdir"]),
        (
            "enwik8",
            ["--workdir=WORK", "--flagfile=wt103_base"],
            1,
            ["data.corpus", "enwik8", "python -m experiments.wikitext103"],
        ),
        ("text", ["--workdir=WORK", "--model.n_layr=3"], 2, ["model.n_layr", "model.n_layer"]),
        ("text", ["--workdir=WORK", "--flagfile=smal"], 2, ["smal", "small", "enwik8_12l"]),
        (
            "text",
            ["--workdir=WORK", "--data.file=setup.cfg", "--train.steps=7", "--train.segments_per_call=2"],
            1,
            ["train.steps", "7", "segments_per_call", "2"],
        ),
        ("text", ["--workdir=WORK", "--mode=generate"], 1, ["WORK", "config.json"]),
        ("text", ["--workdir=WORK", "--mode=score"], 1, ["WORK", "config.json"]),
        ("paper.context_length", ["--lengths=8"], 1, ["--workdir"]),
        ("paper.context_length", ["--workdir=WORK", "--lengths=8,x"], 1, ["--lengths", "'x'"]),
        ("paper.context_length", ["--workdir=WORK", "--split=train"], 2, ["split", "valid", "test"]),
    ],
)
def test_first_mistakes_are_answered_in_one_sentence(tmp_path, program, flags, code, expected):
    got, _, err = finish(start(program, *(flag.replace("WORK", str(tmp_path)) for flag in flags)))
    assert got == code
    assert len(err.strip().splitlines()) == 1 and err.startswith("error: "), err
    for words in expected:
        assert re.search(rf"(?<!\w){re.escape(words.replace('WORK', str(tmp_path)))}(?!\w)", err), (words, err)


def test_a_missing_prompt_file_is_named(undisturbed, tmp_path):
    workdir, _ = undisturbed
    prompt = tmp_path / "none"
    code, _, err = finish(start("text", "--mode=generate", f"--workdir={workdir}", f"--generate.prompt_file={prompt}"))
    assert code == 1 and str(prompt) in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("program", ["enwik8", "text", "quickstart", "bench.speed", "paper.ablation", "ensemble"])
def test_help_names_the_programs_flags_and_the_flagfiles(program):
    code, out, err = finish(start(program, "--help"))
    assert code == 0 and not err
    assert f"python -m experiments.{program}" in out
    for words in ("--model.n_layer=", "--model.d_embed=none", *flagfile_names()):
        assert words in out


def test_help_of_a_study_has_its_settings_first_and_only_groups_that_it_reads():
    code, out, err = finish(start("paper.context_length", "--help"))
    assert code == 0 and not err
    assert out.index("--lengths=64,") < out.index("--eval.mem_len=") and "--model.n_layer=" not in out
    code, full, _ = finish(start("paper.context_length", "--helpfull"))
    assert code == 0 and "--model.n_layer=" in full


@pytest.mark.slow
def test_speeds_are_printed_and_written(tmp_path):
    tiny = [*TINY, "--generate.length=4", "--model.cutoffs=50,100", "--model.div_val=2"]
    tasks = ["--tasks=training,evaluation,generation", "--calls=1", "--warmup=0"]
    code, out, err = finish(start("bench.speed", *tiny, *tasks, f"--json={tmp_path / 'speed.json'}"))
    assert code == 0, err
    rows = [line.split(" | ")[0] for line in out.splitlines() if line.startswith("| ")]
    assert rows[1:-1] == ["| training", "| evaluation", "| generation"] and rows[-1].startswith("| generation")
    found = json.loads((tmp_path / "speed.json").read_text())
    assert {"device", "threads", "jax", "date", "plan"} <= found.keys()
    assert found["config"]["model.dtype"] == "float32" and found["vocab_size"] == 256
    assert len(found["tasks"]) == 4 and all(task["tokens_per_second"] > 0 for task in found["tasks"])
    # Tails that are read are counted.
    assert found["tasks"][3]["bytes_per_step"] > found["tasks"][2]["bytes_per_step"]


def test_speeds_beside_a_peer_are_refused_where_they_would_not_compare():
    for flags, pattern in (
        (["--generate.samples=3"], r"generate\.samples\D*\b3\b.*\b1\b"),
        (["--warmup=0"], r"warmup\D*\b0\b.*\b1\b"),
        (["--tasks=data_loading"], r"tasks\b.*\bdata_loading\b.*--peer"),
    ):
        code, _, err = finish(start("bench.speed", *TINY, "--peer=hf", *flags))
        assert code == 1 and re.search(pattern, err) and len(err.strip().splitlines()) == 1


def test_every_flagfile_that_is_spoken_of_exists():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *(ROOT / "experiments").rglob("*.py")]
    named = {name for path in texts for name in re.findall(r"--flagfile=(\w+)", path.read_text())} - {"NAME"}
    assert named and named <= set(flagfile_names())
