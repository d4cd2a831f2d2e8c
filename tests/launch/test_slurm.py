"""Tests launch/slurm.sh: the batch scripts that it prints, and what they do under a fake srun."""

import os
import re
import subprocess

import pytest

from support import ROOT, shell

pytestmark = pytest.mark.full

SCRIPT = str(ROOT / "launch" / "slurm.sh")
RUN = ["--", "python", "-m", "experiments.enwik8", "--workdir=runs/one", "--generate.prompt=it's"]


def call(*words, path=""):
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [SCRIPT, *words], env=environment, text=True, capture_output=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def batch_script(*words):
    code, out, err = call("--dry_run", *words)
    assert code == 0, err
    assert not shell.findings(out)
    return out


def options(script):
    """Values of the #SBATCH lines, by name."""
    lines = [
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    ]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_two_nodes_with_a_process_for_each_gpu():
    words = [
        "--nodes=2",
        "--gpus=8",
        "--time=4:00:00",
        "--partition=a100",
        "--account=us",
        "--name=big",
        "--grace=300",
    ]
    script = batch_script(*words, *RUN)
    expected = (
        "job-name=big nodes=2 ntasks-per-node=8 cpus-per-task=8 gpus-per-node=8 time=4:00:00 "
        "partition=a100 "
    )
    expected += "account=us output=big-%j.log open-mode=append requeue= signal=TERM@300"
    assert options(script) == dict(word.split("=") for word in expected.split())
    prompt = r"'--generate.prompt=it'\''s'"
    assert (
        f"srun --cpus-per-task=8 python -m experiments.enwik8 --workdir=runs/one {prompt}"
        in script.splitlines()
    )
    assert "JAX_LOCAL_DEVICE_IDS" not in script


def test_a_process_for_each_node_takes_all_of_its_gpus():
    script = batch_script("--gpus=4", "--per=node", "--setup=module load cuda", *RUN)
    assert options(script)["ntasks-per-node"] == "1" and options(script)["gpus-per-node"] == "4"
    assert "module load cuda || exit" in script.splitlines()
    without = options(batch_script("--gpus=0", *RUN))
    assert without["ntasks-per-node"] == "1" and "gpus-per-node" not in without


def test_workers_of_a_study_are_an_array_and_each_has_all_gpus_of_its_node():
    script = batch_script(
        "--workers=8",
        "--gpus=4",
        "--",
        "python",
        "-m",
        "launch.sweep",
        "sweep.toml",
        "--gpus=0,1,2,3",
    )
    found = options(script)
    assert found["array"] == "1-8" and found["output"] == "txl-%A_%a.log"
    assert (found["ntasks-per-node"], found["gpus-per-node"]) == ("1", "4"), (
        "else each worker would be started 4 times"
    )
    assert (
        "srun --cpus-per-task=8 python -m launch.sweep sweep.toml --gpus=0,1,2,3"
        in script.splitlines()
    )


RUN_LINE = "python -m experiments.enwik8 --workdir=runs/one '--generate.prompt=it'\\''s'"
# A second value of each flag, and the lines that it adds to the script of a run with four GPUs.
EFFECTS = {
    "nodes": ("3", {"#SBATCH --nodes=3"}),
    "gpus": ("2", {"#SBATCH --gpus-per-node=2", "#SBATCH --ntasks-per-node=2"}),
    "per": ("node", {"#SBATCH --ntasks-per-node=1"}),
    "cpus": ("3", {"#SBATCH --cpus-per-task=3", f"srun --cpus-per-task=3 {RUN_LINE}"}),
    "time": ("1:00", {"#SBATCH --time=1:00"}),
    "grace": ("7", {"#SBATCH --signal=TERM@7"}),
    "partition": ("a100", {"#SBATCH --partition=a100"}),
    "account": ("us", {"#SBATCH --account=us"}),
    "name": ("big", {"#SBATCH --job-name=big", "#SBATCH --output=big-%j.log"}),
    "setup": ("module load x", {"module load x || exit"}),
    "workers": (
        "5",
        {"#SBATCH --array=1-5", "#SBATCH --output=txl-%A_%a.log", "#SBATCH --ntasks-per-node=1"},
    ),
}


def test_each_documented_flag_changes_its_lines_of_the_script():
    _, out, _ = call("--help")
    table = out.partition("\n\n  --nodes")[2].partition("\n\n")[0]
    documented = {"nodes", *re.findall(r"--(\w+)", table)}
    assert documented - {"dry_run"} == EFFECTS.keys()
    before = set(batch_script("--gpus=4", *RUN).splitlines())
    for flag, (value, lines) in EFFECTS.items():
        after = set(batch_script("--gpus=4", f"--{flag}={value}", *RUN).splitlines())
        assert after - before == lines, flag


@pytest.fixture
def cluster(tmp_path):
    """A folder with commands of Slurm: sbatch runs the script, and again for each time that it is
    queued again.
    """
    commands = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
        "scontrol": f'echo "$*" >>{tmp_path}/scontrol.log\ntouch {tmp_path}/again',
        "sbatch": (
            f"cat >{tmp_path}/script\nexport SLURM_JOB_ID=17\ntouch {tmp_path}/again\nwhile [ -e "
            f"{tmp_path}/again ]; do rm {tmp_path}/again; bash {tmp_path}/script; code=$?; "
            "done\nexit $code"
        ),
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("code", [143, 75])
def test_a_run_that_saved_or_lost_a_process_queues_again_until_it_has_finished(cluster, code):
    """The job stops three times."""
    counted = (
        f'echo "$1" >>{cluster}/starts\n[ "$(wc -l <{cluster}/starts)" -gt 3 ] || exit {code}\n'
    )
    (cluster / "run").write_text(counted)
    found, out, err = call("--", "bash", str(cluster / "run"), "two words", path=cluster)
    assert found == 0, err
    assert (cluster / "starts").read_text() == "two words\n" * 4
    assert (cluster / "scontrol.log").read_text() == "requeue 17\n" * 3
    assert len(out.splitlines()) == 3, "one line for each time that it queues again"


def test_a_run_that_often_lost_a_process_does_not(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    assert call("--", "bash", "-c", "exit 75", path=cluster)[0] == 75


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_run_that_has_ended_otherwise_does_not(cluster, code):
    assert call("--", "bash", "-c", f"exit {code}", path=cluster)[0] == code
    assert not (cluster / "scontrol.log").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "after --"),
        (["--gpu=2", *RUN], "--gpu=2"),
        (["--workers=2", "--nodes=2", *RUN], "--workers"),
    ],
)
def test_mistakes_are_named(words, expected):
    code, out, err = call(*words)
    assert code == 2 and not out
    assert err.startswith("error: ") and expected in err
