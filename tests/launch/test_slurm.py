"""Tests launch/slurm.sh: the batch scripts that it prints, and what they do under a fake srun."""

import os
import re
import subprocess

import pytest

from support import ROOT, shell

pytestmark = pytest.mark.full

SCRIPT = str(ROOT / "launch" / "slurm.sh")
RUN = ["--", "python", "-m", "experiments.enwik8", "--workdir=runs/one", "--generate.prompt=it's"]
RUN_LINE = "python -m experiments.enwik8 --workdir=runs/one '--generate.prompt=it'\\''s'"


def call(*words, path=""):
    """Runs the script. Returns its exit code, output and errors."""
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [SCRIPT, *words], env=environment, text=True, capture_output=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def batch_script(*words):
    """The batch script that is printed, which shellcheck accepts."""
    code, out, err = call("--dry_run", *words)
    assert code == 0, err
    assert not shell.findings(out)
    return out


def options(script):
    """Values of the #SBATCH lines, by name."""
    values = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            values[name] = value
    return values


def test_two_nodes_with_a_process_for_each_gpu():
    script = batch_script(
        "--nodes=2",
        "--gpus=8",
        "--time=4:00:00",
        "--partition=a100",
        "--account=us",
        "--name=big",
        "--grace=300",
        *RUN,
    )

    assert options(script) == {
        "job-name": "big",
        "nodes": "2",
        "ntasks-per-node": "8",
        "cpus-per-task": "8",
        "gpus-per-node": "8",
        "time": "4:00:00",
        "partition": "a100",
        "account": "us",
        "output": "big-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": "TERM@300",
    }
    assert f"srun --cpus-per-task=8 {RUN_LINE}" in script.splitlines()
    assert "JAX_LOCAL_DEVICE_IDS" not in script


def test_a_process_for_each_node_takes_all_of_its_gpus():
    script = batch_script("--gpus=4", "--per=node", "--setup=module load cuda", *RUN)
    assert options(script)["ntasks-per-node"] == "1"
    assert options(script)["gpus-per-node"] == "4"
    assert "module load cuda || exit" in script.splitlines()


def test_without_gpus_a_node_has_a_process():
    without_gpus = options(batch_script("--gpus=0", *RUN))
    assert without_gpus["ntasks-per-node"] == "1"
    assert "gpus-per-node" not in without_gpus


def test_workers_of_a_study_are_an_array_and_each_has_all_gpus_of_its_node():
    """Each worker is one process, also on a node with 4 GPUs."""
    command = ["python", "-m", "launch.sweep", "sweep.toml", "--gpus=0,1,2,3"]
    script = batch_script("--workers=8", "--gpus=4", "--", *command)
    assert options(script)["array"] == "1-8"
    assert options(script)["output"] == "txl-%A_%a.log"
    assert options(script)["ntasks-per-node"] == "1"
    assert options(script)["gpus-per-node"] == "4"
    assert f"srun --cpus-per-task=8 {' '.join(command)}" in script.splitlines()


# Another value of each flag, and the lines that it adds to the script of a run with four GPUs.
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


def test_the_flags_with_an_effect_are_those_of_the_help():
    _, out, _ = call("--help")
    # The list of flags begins with --nodes, at which the text is cut.
    table = out.partition("\n\n  --nodes")[2].partition("\n\n")[0]
    documented = {"nodes", *re.findall(r"--(\w+)", table)}
    assert documented - {"dry_run"} == EFFECTS.keys()


@pytest.fixture(scope="module")
def usual_lines():
    """The lines of the script of a run with four GPUs."""
    return set(batch_script("--gpus=4", *RUN).splitlines())


@pytest.mark.parametrize("flag", EFFECTS)
def test_each_documented_flag_changes_its_lines_of_the_script(flag, usual_lines):
    value, lines = EFFECTS[flag]
    after = set(batch_script("--gpus=4", f"--{flag}={value}", *RUN).splitlines())
    assert after - usual_lines == lines


# Commands of Slurm, where {folder} is their directory. srun runs its command, without flags of its
# own. sbatch runs the script, and again for each time that it is queued again.
SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"'
SCONTROL = 'echo "$*" >>{folder}/scontrol.log\ntouch {folder}/again'
SBATCH = """
cat >{folder}/script
export SLURM_JOB_ID=17
touch {folder}/again
while [ -e {folder}/again ]; do
  rm {folder}/again
  bash {folder}/script
  code=$?
done
exit $code
"""


@pytest.fixture
def cluster(tmp_path):
    """A directory with commands of Slurm."""
    commands = {
        "srun": SRUN,
        "scontrol": SCONTROL.format(folder=tmp_path),
        "sbatch": SBATCH.format(folder=tmp_path),
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


# A run exits with 143 after it has saved, and with 75 if a process has lost another.
@pytest.mark.parametrize("code", [143, 75])
def test_a_run_that_saved_or_lost_a_process_queues_again_until_it_has_finished(cluster, code):
    """The job stops three times. Each time it queues again it prints a line."""
    starts = cluster / "starts"
    run = cluster / "run"
    run.write_text(f'echo "$1" >>{starts}\n[ "$(wc -l <{starts})" -gt 3 ] || exit {code}\n')

    exit_code, out, err = call("--", "bash", str(run), "two words", path=cluster)

    assert exit_code == 0, err
    assert starts.read_text() == "two words\n" * 4
    assert (cluster / "scontrol.log").read_text() == "requeue 17\n" * 3
    assert len(out.splitlines()) == 3


def test_a_run_that_often_lost_a_process_does_not_queue_again(cluster, monkeypatch):
    """Slurm says how often a job was queued again. The script allows 20 times."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    exit_code, _, err = call("--", "bash", "-c", "exit 75", path=cluster)
    assert exit_code == 75, err


# It has finished, failed, or was interrupted by Ctrl-C.
@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_run_that_has_ended_otherwise_does_not_queue_again(cluster, code):
    exit_code, _, err = call("--", "bash", "-c", f"exit {code}", path=cluster)
    assert exit_code == code, err
    assert not (cluster / "scontrol.log").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "after --"),
        (["--gpu=2", *RUN], "--gpu=2"),
        (["--workers=2", "--nodes=2", *RUN], "--workers"),
    ],
    ids=["no command", "unknown flag", "workers on two nodes"],
)
def test_mistakes_are_named(words, expected):
    code, out, err = call(*words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert expected in err
