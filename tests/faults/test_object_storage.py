"""Tests runs on object storage: killed between two writes, or with errors of the server, each curve is the same."""

import random

import pytest

pytest.importorskip("gcsfs", reason="gs:// needs gcsfs (extra gcs)")
pytest.importorskip("gcp_storage_emulator", reason="gs:// is tested with gcp-storage-emulator (extra test)")

from support.faults import KILLED, Place, assert_equal_runs, finished
from support.object_storage import BUCKET, ObjectStorage
from txl_jax.runtime.paths import as_path

WRITES = 400  # More than a start does after its probe; later ones are no kill.


class Bucket(Place):
    """Runs whose workdirs are in a bucket; text and tokens are on this machine, and shared."""

    def workdir(self, name):
        return as_path(f"gs://{BUCKET}/{name}")

    def cache(self, name):
        return self.folder / "undisturbed" / "cache"


@pytest.fixture
def storage(monkeypatch):
    with ObjectStorage() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(storage, place, undisturbed):
    return Bucket(place.folder, place.environment | storage.environment)


def killed_at(storage, victim, number):
    """Kills a start at its write of this number; returns whether it came so far."""
    victim.wait_for("ready")
    storage.kill_at_write(victim.pid, number)
    code = victim.end().code
    assert code in (KILLED, 0)
    was_killed = storage.killed
    storage.calm()
    return was_killed


@pytest.mark.slow
def test_a_kill_and_errors_in_one_run(bucket, storage, undisturbed):
    assert killed_at(storage, bucket.train("few"), 150)
    storage.fail_every(40)
    finished(bucket.train("few"))
    assert storage.errors > 3
    storage.calm()
    assert_equal_runs(bucket.workdir("few"), undisturbed)
    assert not (bucket.workdir("few") / ".lock").exists()


@pytest.mark.slow
def test_thirty_kills_and_errors(bucket, storage, undisturbed, fault_seed):
    """Each run is killed until it ends; every thirtieth request of the last start fails."""
    rng = random.Random(fault_seed)
    kills, errors, runs = 0, 0, 0
    while kills < 30 or errors < 30:
        name = f"many-{runs}"
        for _ in range(6):
            kills += killed_at(storage, bucket.train(name), rng.randrange(WRITES))
        storage.fail_every(30)
        finished(bucket.train(name))
        errors += storage.errors
        storage.errors = 0
        storage.calm()
        assert_equal_runs(bucket.workdir(name), undisturbed)
        runs += 1
    print(f"seed {fault_seed}: {kills} kills between writes and {errors} errors in {runs} runs, all curves equal")
