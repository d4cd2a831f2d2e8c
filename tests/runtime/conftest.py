"""A bucket on this machine."""

import pytest


@pytest.fixture(scope="session")
def storage(session_monkeypatch):
    """A server of object storage; one for the session, as gcsfs keeps its address."""
    session_monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # Read when gcsfs is imported.
    pytest.importorskip("gcsfs", reason="gs:// needs gcsfs (extra gcs)")
    pytest.importorskip("gcp_storage_emulator", reason="gs:// is tested with gcp-storage-emulator (extra test)")
    from support.object_storage import ObjectStorage

    with ObjectStorage() as server:
        for name, value in server.environment.items():
            session_monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def session_monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def bucket(storage, request):
    """A folder in the bucket for one test; faults end with it."""
    from support.object_storage import BUCKET
    from txl_jax.runtime.paths import as_path

    yield as_path(f"gs://{BUCKET}/{request.node.name.partition('[')[0]}-{id(request)}")
    storage.calm()
    storage.is_up = True
