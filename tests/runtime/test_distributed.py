"""Tests that processes tell each other what they found and what failed, and fetch arrays that are spread over both."""

import json

from support import processes

SCRIPT = """
import json

import jax
import numpy as np

from experiments import hosts
from txl_jax import processes, sharding
from txl_jax.config import MeshConfig

found = {}


def told(act):
    try:
        return act()
    except Exception as error:
        return [type(error).__name__, str(error), processes.is_known_to_all(error)]


def fail():
    raise KeyError("nothing there")


def fail_in(number):
    if jax.process_index() == number:
        raise OSError("no space")
    return number


hosts._given = dict  # No flags here.
hosts.join()
me = jax.process_index()
found["first tells"] = processes.broadcast_from_primary(lambda: {"loss": 0.1, "of": me, "none": None})
found["first fails"] = told(lambda: processes.broadcast_from_primary(fail))
found["together"] = told(lambda: processes.together(lambda: me * 10))
found["second fails"] = told(lambda: processes.together(lambda: fail_in(1)))
found["same"] = told(lambda: processes.assert_same_on_all("text", lambda first, other: "differs"))
found["other"] = told(lambda: processes.assert_same_on_all("text"[me:], lambda first, other: f"{other}, not {first}"))
found["trouble"] = [processes.first_error(None), processes.first_error("flat tyre" if me else None)]
mesh = sharding.make_mesh(MeshConfig())
rows = sharding.named_sharding(mesh, "batch", None)
spread = jax.make_array_from_process_local_data(rows, np.arange(6.0).reshape(2, 3) + 6 * me, (4, 3))
assert not spread.is_fully_addressable
found["spread"] = processes.on_host(spread).tolist()
found["first"] = processes.is_primary()
print("not for the terminal of the second")
if me == 0:
    print(json.dumps(found))
else:
    import sys

    print(json.dumps(found), file=sys.stderr)
"""


def test_what_one_finds_all_know_and_what_fails_in_one_fails_in_all():
    (code_0, out_0, _), (code_1, out_1, err_1) = processes.finish(processes.start("-c", SCRIPT, devices=2))
    assert code_0 == code_1 == 0, err_1
    assert out_0.splitlines()[0] == "not for the terminal of the second", "Gloo's lines are left out"
    assert out_1 == ""
    first, second = json.loads(out_0.splitlines()[-1]), json.loads(err_1.splitlines()[-1])
    for found in (first, second):
        assert found["first tells"] == {"loss": 0.1, "of": 0, "none": None}
        assert found["same"] is None
        assert found["other"] == ["ValueError", "process 1: ext, not text", True]
        assert found["trouble"] == [None, "process 1: flat tyre"]
        assert found["spread"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert (first["together"], second["together"]) == (0, 10)
    assert first["first fails"] == ["KeyError", "'nothing there'", True]
    assert second["first fails"] == ["RemoteProcessError", "process 0: 'nothing there'", True]
    assert first["second fails"] == ["RemoteProcessError", "process 1: no space", True]
    assert second["second fails"] == ["OSError", "no space", True]
    assert (first["first"], second["first"]) == (True, False)
