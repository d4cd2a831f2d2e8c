"""Tests `kill -9` at chosen and random moments: the run resumes with the numbers of an undisturbed
run.
"""

import functools
import random

import pytest

from support.faults import KILLED, assert_equal_runs, few_or_all, finished, result

# File operations that a start is killed before. They follow one another, so that each start comes a
# little further.
MOMENTS = {
    "while records are written": "os.mkdir *tfds*incomplete*",
    "before the records have their name": "os.rename *tfds*incomplete*",
    "while tokens are written": "open *tokens/*/test.npy",
    "before the tokens have their name": "os.rename *tokens/ptb-*",
    "while the workdir is tried": "os.remove */.probe-*",
    "before the lock": "open */.lock",
    "between vocabulary.txt and config.json": "open */.config.json.*",
    "before config.json has its name": "os.rename *config.json*",
    "while arrays are written": "os.mkdir *latest/6.orbax-checkpoint-tmp/*",
    "before a checkpoint has its name": "os.rename *latest/6.orbax-checkpoint-tmp*",
    "between a checkpoint and its digests": "open *latest/12/.digests.json*",
    "before the digests have their name": "os.rename *latest/18/*digests.json*",
    "while a step goes": "shutil.rmtree *latest/6.deleted",
    "between the best parameters and their digests": "open *best/24/.digests.json*",
    "while the best before goes": "shutil.rmtree *best/8*.deleted",
    "before the test scores are written": "open */.results.json.*",
    "before results.json has its name": "os.rename *results.json*",
}
# Then it is left to end, so that there are many ends to compare.
KILLS_PER_RUN = 6
# The number of file operations of a whole run. A start that resumes from a checkpoint has fewer.
OPERATIONS = 200
FAST = (
    "before the tokens have their name",
    "while arrays are written",
    "between a checkpoint and its digests",
    "between the best parameters and their digests",
    "before the test scores are written",
)

# Best parameters are written per ensemble member: the second's only at step 8, the first's at steps
# 8, 16 and 24.
OF_ENSEMBLE = [
    "os.mkdir *best/seed=2*/8.orbax-checkpoint-tmp*",
    "open *best/seed=1/16/.digests.json.*",
    "open *latest/24/.digests.json*",
]


def kill_at_each(moments, name, train, place, undisturbed):
    """Kills a start of a run at each moment, one after the other, and lets the last start end."""
    for at in moments:
        assert train(name, fault="kill", at=at).end().returncode == KILLED, f"no kill at {at}"
    finished(train(name))
    assert_equal_runs(place.workdir(name), undisturbed)
    assert_nothing_left_over(place, name)


@pytest.mark.parametrize("moments", few_or_all([MOMENTS[name] for name in FAST], MOMENTS.values()))
def test_kills_before_chosen_file_operations(moments, place, undisturbed):
    kill_at_each(moments, f"chosen-{len(moments)}", place.train, place, undisturbed)


@pytest.mark.full
def test_kills_of_an_ensemble(place):
    train = functools.partial(place.train, program="ensemble")
    finished(train("undisturbed-ensemble"))
    kill_at_each(OF_ENSEMBLE, "ensemble", train, place, place.workdir("undisturbed-ensemble"))


def assert_nothing_left_over(place, name):
    """Asserts that temporary files of killed starts are removed.

    A file of scoring may stay, since another process may be writing it.
    """
    workdir = place.workdir(name)
    left = set()
    for pattern in ("*.tmp", ".probe-*", "*.deleted", "*orbax*"):
        left |= {*workdir.rglob(pattern)}
    assert left <= {*workdir.glob(".evaluation.json.*.tmp")}


@pytest.mark.parametrize("kills", few_or_all(2, 50))
def test_kills_at_random_moments(kills, place, undisturbed, fault_seed):
    """Runs are killed before random file operations, and end with the undisturbed numbers.

    Each run is left to end after some kills, so that this test ends too. Scoring is killed as well.
    """
    rng = random.Random(fault_seed)
    landed = 0
    runs = 0
    while landed < kills:
        name = f"random-{kills}-{runs}"
        runs += 1
        for act in (place.train, place.score):
            for _ in range(min(KILLS_PER_RUN, kills - landed)):
                # With only the larger number, hardly any kill would come while a text is prepared.
                last = rng.choice([OPERATIONS // 5, OPERATIONS])
                ended = act(name, fault="kill", at=f"*{name}/*", count=rng.randint(1, last)).end()
                if ended.returncode != KILLED:  # It ended before the operation.
                    assert ended.returncode == 0, ended.stderr
                    break
                landed += 1
            finished(act(name))
        assert_equal_runs(place.workdir(name), undisturbed)
        scores = result(place.workdir(name), "evaluation.json")
        assert scores == result(undisturbed, "evaluation.json")
        assert_nothing_left_over(place, name)
    print(f"seed {fault_seed}: {landed} kills in {runs} runs")
