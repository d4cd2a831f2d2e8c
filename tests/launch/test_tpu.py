"""Tests launch/tpu.sh: the commands that it prints, and the script itself against a fake gcloud and fake hosts."""

import shlex

import pytest

from support import shell
from support.fake_cloud import RUN, call

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (
            (
                "create one --zone=z --type=v5p-16 --node-count=2 --project=p --network=n --spot "
                "--service-account=a@p.iam.gserviceaccount.com"
            ),
            (
                "gcloud compute tpus queued-resources create one --zone=z --project=p --node-count=2 --node-prefix=one "
                "--accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5 --spot --network=n "
                "--service-account=a@p.iam.gserviceaccount.com\n"
            ),
        ),
        (
            "logs one --zone=z --worker=3 --follow",
            (
                "gcloud compute tpus tpu-vm ssh one --zone=z "
                "'--command=sudo journalctl --unit=txl --output=cat --lines=200 --follow' --worker=3 --quiet\n"
            ),
        ),
    ],
)
def test_dry_run_prints_each_command_and_runs_none(cloud, words, printed):
    code, out, err = call(cloud, *words.split(), "--dry_run")
    assert (code, out, err) == (0, printed, "")
    assert not (cloud / "gcloud.log").exists()


def test_the_scripts_for_the_hosts_are_valid_shell(cloud):
    code, out, err = call(cloud, "watch", "one", "--zone=z", "--type=v5p-8", "--git=https://h/r@v1", "--dry_run", *RUN)
    assert code == 0, err
    commands = (word for word in shlex.split(out) if word.startswith("--command="))  # As a shell reads them.
    install, run, poll = (word.removeprefix("--command=") for word in commands)
    for script in (install, run, poll):
        assert not shell.findings(script)
    for line in ("git clone --quiet https://h/r txl/source", "git -C txl/source checkout --quiet v1"):
        assert line in install.splitlines()
    assert "pip install --quiet './txl/source[plots,tpu,gcs]'" in install
    assert shlex.split(run.splitlines()[-1])[1:] == RUN[1:]
    assert '--setenv=PYTHONPATH="$HOME/txl/source"' in run and '--working-directory="$HOME"' in run
    assert "--property=LimitMEMLOCK=infinity" in run


def test_watch_takes_a_workdir_after_a_space(cloud):
    words = ["python", "-m", "experiments.ptb", "--workdir", "gs://bucket/run"]
    code, out, err = call(cloud, "watch", "one", "--zone=z", "--type=v4-8", "--dry_run", "--", *words)
    assert code == 0 and "gs://bucket/run" in out, err


def test_a_folder_that_is_no_clone_is_not_sent(cloud):
    (cloud / "clone" / "setup.cfg").unlink()
    code, _, err = call(cloud, "install", "one", "--zone=z")
    assert code == 2 and str(cloud / "clone") in err and "--git=" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["create", "one", "--zone=z", "--type=v9-8"], "v9-8"),
        (["create", "one", "--zone=z", "--type=v4-8", "--spot", "--reserved"], "--spot and --reserved"),
        (["install", "one", "--zone=z", "--git=https://h/r"], "URL@REVISION"),
        (["create", "one", "--zone=z", "--runtime=v2"], "--type"),
        (["watch", "one", "--zone=z", "--type=v4-8", "--", "python", "-m", "experiments.ptb"], "--workdir=gs://"),
        (["watch", "one", "--zone=z", "--type=v4-8", "--", "python", "-m", "x", "--workdir=runs/one"], "gs://"),
    ],
)
def test_mistakes_are_named(cloud, words, expected):
    code, out, err = call(cloud, *words)
    assert code == 2 and not out
    assert err.startswith("error: ") and expected in err
    assert not (cloud / "gcloud.log").exists()
