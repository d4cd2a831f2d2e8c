"""Tests `kill -9` at chosen and random moments: the run resumes, every number is as if
undisturbed.
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
# What a whole run does in files; a start that goes on from a checkpoint does less.
OPERATIONS = 200
FAST = (
    "before the tokens have their name",
    "while arrays are written",
    "between a checkpoint and its digests",
)
FAST += ("between the best parameters and their digests", "before the test scores are written")

# Best parameters are written per member: the second's at step 8 only, the first's at steps 8, 16
# and 24.
OF_ENSEMBLE = [
    "os.mkdir *best/seed=2*/8.orbax-checkpoint-tmp*",
    "open *best/seed=1/16/.digests.json.*",
]
OF_ENSEMBLE += ["open *latest/24/.digests.json*"]


def kill_at_each(moments, name, train, place, undisturbed):
    """Kills a start at each moment, and lets the next one end."""
    for at in moments:
        assert train(name, fault="kill", at=at).end().returncode == KILLED, f"no kill at {at}"
    finished(train(name))
    assert_equal_runs(place.workdir(name), undisturbed)
    assert_nothing_left_over(place, name)


@pytest.mark.parametrize("moments", few_or_all([MOMENTS[each] for each in FAST], MOMENTS.values()))
def test_kills_before_chosen_file_operations(moments, place, undisturbed):
    kill_at_each(moments, f"chosen-{len(moments)}", place.train, place, undisturbed)


@pytest.mark.full
def test_kills_of_an_ensemble(place):
    train = functools.partial(place.train, program="ensemble")
    finished(train("undisturbed-ensemble"))
    kill_at_each(OF_ENSEMBLE, "ensemble", train, place, place.workdir("undisturbed-ensemble"))


def assert_nothing_left_over(place, name):
    """Asserts that files of killed training starts are removed; those of scoring may be of one that
    is under way.
    """
    workdir = place.workdir(name)
    left = {
        path
        for pattern in ("*.tmp", ".probe-*", "*.deleted", "*orbax*")
        for path in workdir.rglob(pattern)
    }
    assert not left - {*workdir.glob(".evaluation.json.*.tmp")}


@pytest.mark.parametrize("kills", few_or_all(2, 50))
def test_kills_at_random_moments(kills, place, undisturbed, fault_seed):
    """Runs are killed before random file operations until so many kills have landed; each run is
    then compared.

    Each is left to end after some kills, so this ends too. Scoring again is killed as well.
    """
    rng, landed, runs = random.Random(fault_seed), 0, 0
    while landed < kills:
        name = f"random-{kills}-{runs}"
        runs += 1
        for act in (place.train, place.score):
            for _ in range(min(KILLS_PER_RUN, kills - landed)):
                # Else hardly any would come while a text is prepared.
                last = rng.choice([OPERATIONS // 5, OPERATIONS])
                ended = act(name, fault="kill", at=f"*{name}/*", count=rng.randint(1, last)).end()
                if ended.returncode != KILLED:  # It ended before.
                    assert ended.returncode == 0, ended.stderr
                    break
                landed += 1
            finished(act(name))
        assert_equal_runs(place.workdir(name), undisturbed)
        assert result(place.workdir(name), "evaluation.json") == result(
            undisturbed, "evaluation.json"
        )
        assert_nothing_left_over(place, name)
    print(f"seed {fault_seed}: {landed} kills in {runs} runs")
