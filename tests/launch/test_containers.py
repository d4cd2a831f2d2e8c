"""Tests of the image, its pinned versions, and the manifests of GKE and SkyPilot."""

import configparser
import re
import shlex

import pytest
import yaml
from packaging.requirements import Requirement

from launch import sweep_file
from support import ROOT

CONTAINER = ROOT / "launch" / "container"


def check_command(words):
    """Raises `UserError` for a command whose flags its program does not take."""
    program = words.index("-m") + 1
    given = [word for word in words[program + 1 :] if not word.startswith("--workdir=")]
    sweep_file.config_of(words[program].removeprefix("experiments."), given)
    assert any(word.startswith("--workdir=gs://") for word in words)


@pytest.mark.parametrize("accelerator", ["cpu", "tpu", "cuda13"])
def test_the_pinned_versions_are_those_that_setup_cfg_allows(accelerator):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pinned = dict(
        re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", (CONTAINER / f"{accelerator}.txt").read_text())
    )
    for line in setup["options"]["install_requires"].split("\n"):
        if line.strip():
            needed = Requirement(line)
            assert needed.specifier.contains(pinned[needed.name.lower().replace("_", "-")]), line
    assert {"gcsfs", "matplotlib"} <= pinned.keys()
    assert ("libtpu" in pinned) == (accelerator == "tpu")
    assert ("jax-cuda13-plugin" in pinned) == (accelerator == "cuda13")


def test_the_image_runs_as_a_user_and_without_a_shell():
    *before, command = re.findall(r"(?m)^([A-Z]+) +(.*)", (CONTAINER / "Dockerfile").read_text())
    assert ("USER", "txl") in before
    assert command[0] == "CMD" and command[1].startswith('["python",'), (
        "no shell, which would not pass SIGTERM on"
    )


def test_each_documented_accelerator_has_its_versions():
    text = (CONTAINER / "Dockerfile").read_text()
    [(comment, argument, default)] = re.findall(r"(?m)^# ([\w, ]+) \(.*\n^ARG (\w+)=(\w+)$", text)
    known = set(re.split(r", | or ", comment))
    assert known == {path.stem for path in CONTAINER.glob("*.txt")} and default in known
    assert f"COPY launch/container/${{{argument}}}.txt /tmp/versions.txt" in text.splitlines()
    assert re.search(r"--requirement=/tmp/versions\.txt\b", text)


def test_the_manifest_of_gke_has_as_many_hosts_as_its_topology():
    manifest = yaml.safe_load((CONTAINER / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [slices] = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    sizes = [
        int(size) for size in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    ]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert job["parallelism"] * chips == job["completions"] * chips == sizes[0] * sizes[1] == 16
    assert slices["replicas"] == 2 and pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    assert "--mesh.fsdp=16" in container["command"], (
        "a slice shares the parameters, and slices are replicas"
    )
    check_command(container["command"])


def test_the_task_of_skypilot_runs_a_program_or_a_worker_of_a_study():
    task = yaml.safe_load((ROOT / "launch" / "sky.yaml").read_text())
    assert task["envs"].keys() == {"BUCKET", "EXTRA", "RUN"} and task["resources"]["use_spot"]
    assert task["run"].splitlines()[-1] == 'eval "exec $RUN"', "the shell would not pass SIGTERM on"
    assert "--workdir=gs://$BUCKET/" in task["envs"]["RUN"]
    check_command(shlex.split(task["envs"]["RUN"]))
    assert '".[plots,gcs,sweep,$EXTRA]"' in task["setup"]
