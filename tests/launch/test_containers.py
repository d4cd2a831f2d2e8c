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
    flags = [word for word in words[program + 1 :] if not word.startswith("--workdir=")]
    sweep_file.config_of(words[program].removeprefix("experiments."), flags)
    assert any(word.startswith("--workdir=gs://") for word in words)


def required():
    """The packages that setup.cfg requires, with the versions that it allows."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    return [Requirement(line) for line in lines if line.strip()]


@pytest.mark.parametrize("accelerator", ["cpu", "tpu", "cuda13"])
def test_the_pinned_versions_are_allowed_by_setup_cfg(accelerator):
    content = (CONTAINER / f"{accelerator}.txt").read_text()
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", content))
    for requirement in required():
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), requirement
    # Of the extras for buckets and for plots.
    assert {"gcsfs", "matplotlib"} <= pinned.keys()
    assert ("libtpu" in pinned) == (accelerator == "tpu")
    assert ("jax-cuda13-plugin" in pinned) == (accelerator == "cuda13")


def test_the_image_runs_as_a_user_and_without_a_shell():
    """A shell would not pass SIGTERM on."""
    *before, last = re.findall(r"(?m)^([A-Z]+) +(.*)", (CONTAINER / "Dockerfile").read_text())
    assert ("USER", "txl") in before
    instruction, command = last
    assert instruction == "CMD"
    assert command.startswith('["python",')


def test_each_documented_accelerator_has_its_versions():
    text = (CONTAINER / "Dockerfile").read_text()
    [(comment, argument, default)] = re.findall(r"(?m)^# ([\w, ]+) \(.*\n^ARG (\w+)=(\w+)$", text)
    documented = set(re.split(r", | or ", comment))
    assert documented == {path.stem for path in CONTAINER.glob("*.txt")}
    assert default in documented
    assert f"COPY launch/container/${{{argument}}}.txt /tmp/versions.txt" in text.splitlines()
    assert re.search(r"--requirement=/tmp/versions\.txt\b", text)


def test_the_manifest_of_gke_has_as_many_hosts_as_its_topology():
    manifest = yaml.safe_load((CONTAINER / "jobset.yaml").read_text())
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet"

    [slices] = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert slices["replicas"] == 2
    assert job["backoffLimit"] == 0

    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert pod["restartPolicy"] == "Never"
    assert container["resources"]["requests"] == container["resources"]["limits"]

    chips = container["resources"]["limits"]["google.com/tpu"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    # All hosts of a slice of 4 x 4 chips run at the same time.
    assert job["parallelism"] * chips == 16
    assert job["completions"] * chips == 16
    # A slice shares the parameters, and slices are replicas.
    assert "--mesh.fsdp=16" in container["command"]
    check_command(container["command"])


def test_the_task_of_skypilot_runs_a_program_or_a_worker_of_a_study():
    task = yaml.safe_load((ROOT / "launch" / "sky.yaml").read_text())
    assert task["envs"].keys() == {"BUCKET", "EXTRA", "RUN"}
    assert task["resources"]["use_spot"]
    assert '".[plots,gcs,sweep,$EXTRA]"' in task["setup"]
    # Without `exec`, the shell would not pass SIGTERM on.
    assert task["run"].splitlines()[-1] == 'eval "exec $RUN"'
    assert "--workdir=gs://$BUCKET/" in task["envs"]["RUN"]
    check_command(shlex.split(task["envs"]["RUN"]))
