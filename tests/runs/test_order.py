"""Tests in which order a run writes its files, so that a kill at any moment leaves a run to resume.

The events are from the run that other tests compare with. How each file is written is tested in
tests/runtime/test_order.py.
"""

import jax.numpy as jnp
import pytest

from support import order
from txl_jax.errors import UserError
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.run import Run
from txl_jax.training.member_axis import Members

# The steps after which the run of conftest.py is evaluated and saved. The losses become better from
# one evaluation to the next, so each saves the best parameters.
EVALUATED = [8, 16, 24]
SAVED = [6, 12, 18, 24]


def calls(events):
    """The calls of the thread that trains: of the lock, of the log, and of saving."""
    return [event for event in events if event[0] in ("confirm", "seal", "save")]


def renamed_files(events):
    """The names that files got, in order."""
    return [name for what, name in events if what == "rename"]


def test_the_record_is_written_first_and_the_vocabulary_before_its_config(events):
    assert renamed_files(events)[:2] == ["vocabulary.txt", "config.json"]
    order.assert_in_order(events, ("rename", "config.json"), ("save", "latest/6"))


def test_before_each_checkpoint_the_log_is_sealed_and_then_the_lock_confirmed(events):
    """A resumed run does not repeat the records before its checkpoint, so they must last. A run
    that has lost its lock would write into another run.
    """
    made = calls(events)
    saved = []
    for place, (call, checkpoint) in enumerate(made):
        if call != "save":
            continue
        saved.append(checkpoint)
        assert made[place - 1] == ("confirm", ""), checkpoint
        if checkpoint.startswith("latest"):
            # The log is sealed, which confirms the lock too. Then it is confirmed for the
            # checkpoint.
            assert made[place - 3 : place - 1] == [("seal", ""), ("confirm", "")], checkpoint
    assert saved == [
        *("latest/6", "best/8", "latest/12", "best/16", "latest/18", "best/24", "latest/24")
    ]


# The first checkpoint comes before the first evaluation, and counts on nothing.
@pytest.mark.parametrize("step", SAVED[1:])
def test_the_best_parameters_last_before_a_checkpoint_that_counts_on_them(events, step):
    """They are on the disk when saving begins."""
    for evaluated in EVALUATED:
        if evaluated <= step:
            best_lasts = ("sync", f"checkpoints/best/{evaluated}")
            order.assert_in_order(events, best_lasts, ("save", f"latest/{step}"))


# Two of the latest checkpoints are kept, and one of the best.
@pytest.mark.parametrize(
    ("new", "old"), [("latest/18", "latest/6"), ("latest/24", "latest/12"), ("best/24", "best/16")]
)
def test_an_old_step_goes_after_the_digests_of_the_new_one(events, new, old):
    order.assert_in_order(
        events,
        ("rename", f"checkpoints/{new}"),
        ("rename", f"checkpoints/{new}/digests.json"),
        ("sync", f"checkpoints/{new}"),
        ("rename", f"checkpoints/{old}.deleted"),
        ("remove", f"checkpoints/{old}.deleted"),
    )


def test_the_results_come_last_and_after_the_lock_is_confirmed(events):
    """With them the run counts as finished, so its checkpoints are whole by then."""
    place = events.index(("rename", "results.json"))
    assert calls(events[:place])[-2:] == [("seal", ""), ("confirm", "")]
    assert renamed_files(events)[-1] == "results.json"
    for folder in ("checkpoints/latest/24", "checkpoints/best/24"):
        order.assert_in_order(events, ("sync", folder), ("sync", ".results.json.tmp"))


def test_a_run_that_has_lost_its_lock_saves_nothing(tmp_path, monkeypatch):
    """It notices before the write, not only between two updates."""

    def lost(run):
        raise UserError("the lock was lost")

    monkeypatch.setattr(Run, "confirm", lost)
    parameters = {"x": jnp.arange(3)}  # Any array.
    with RunCheckpoints(Run(tmp_path), Members(), keep=1, log=print) as checkpoints:
        with pytest.raises(UserError, match="lost"):
            checkpoints.save(1, parameters, {})
        with pytest.raises(UserError, match="lost"):
            checkpoints.save_best(0, 1, parameters, {})
        checkpoints.wait()
        assert checkpoints.saved_step is None
    assert list(tmp_path.iterdir()) == []
