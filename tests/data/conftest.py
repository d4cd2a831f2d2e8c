"""Miniatures in place of the published corpora."""

import pytest
import requests

from support import miniature
from txl_jax.data.published import CORPORA


def refuse(url, **kwargs):
    raise requests.ConnectionError(f"no route to {url}")


@pytest.fixture
def miniatures(monkeypatch):
    """The table of the miniatures, and no network."""
    for name in miniature.NAMES:
        monkeypatch.setitem(CORPORA, name, miniature.corpus(name))
    monkeypatch.setattr(requests, "head", refuse)
    monkeypatch.setattr(requests.Session, "send", lambda *args, **kwargs: pytest.fail("the network was used"))
