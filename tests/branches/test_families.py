"""Families: runs of indices by seed, and what sets of them share."""

import numpy as np
from hypothesis import given, strategies as st

from cqm.branches.families import Families, in_words, stored_seed

KEYS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=60)


def families(keys):
    return Families.of(*np.array(keys, np.int64).reshape(-1, 2).T)


def members(found):
    return {(s, i) for s, first, last in found.runs.tolist() for i in range(first, last + 1)}


@given(KEYS, KEYS)
def test_unions_and_overlaps_are_those_of_sets(first, second):
    one, other = families(first), families(second)
    assert members(one) == set(first)
    assert members(one.union(other)) == set(first) | set(second)
    shared = set(first) & set(second)
    counts = {s: sum(seed == s for seed, _ in shared) for s in {seed for seed, _ in shared}}
    assert one.overlap(other) == other.overlap(one) == counts


@given(KEYS)
def test_runs_are_as_long_as_they_can_be(keys):
    runs = families(keys).runs
    assert runs.tolist() == sorted(runs.tolist())
    same = runs[1:, 0] == runs[:-1, 0]
    assert np.all(runs[1:, 1][same] > runs[:-1, 2][same] + 1)


def test_a_whole_seed_holds_every_family_of_it():
    whole = Families.whole_seed(7)
    assert whole.overlap(Families.of([7, 7, 8], [0, 10**12, 0])) == {7: 2}
    assert whole.union(Families.of(7, [3])).runs.tolist() == whole.runs.tolist()


def test_seeds_of_any_size_are_told_apart():
    large = [2**62, 2**63 + 5, 2**200 + 6]
    assert [stored_seed(seed) for seed in large] == [2**62, 5, 6]
    assert stored_seed(True) == stored_seed(np.uint8(1)) == 1


def test_shared_families_in_words():
    assert in_words({3: 1}) == "1 family of seed 3"
    assert in_words({3: 1, 4: 2000, 5: 7}) == (
        "1 family of seed 3, 2,000 families of seed 4 and 7 families of seed 5"
    )
