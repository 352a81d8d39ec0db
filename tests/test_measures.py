import tracemalloc

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse

from cqm import measures
from cqm.measures import FiniteMDP, sample_events, successor_measure

STAY_OR_GO = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
SPACES = pytest.mark.parametrize("space", ["next_state", "transition"])


def random_mdp(seed, num_states=3, num_actions=2):
    """A random policy on a random MDP, some of whose transitions are impossible."""
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.ones(num_states), size=(num_states, num_actions))
    transitions[rng.random(transitions.shape) < 0.3] = 0
    transitions[:, :, 0] += 1 - transitions.sum(axis=-1)
    policy = rng.dirichlet(np.ones(num_actions), size=num_states)
    return transitions, policy


def paths(transitions, policy, state, action, horizon):
    """Every trajectory from a state and first action, as (probability, transitions)."""
    for following in np.flatnonzero(transitions[state, action]):
        probability, step = transitions[state, action, following], (state, action, following)
        if horizon == 1:
            yield probability, [step]
            continue
        for next_action, chance in enumerate(policy[following]):
            for rest, steps in paths(transitions, policy, following, next_action, horizon - 1):
                yield probability * chance * rest, [step, *steps]


def test_literal_measures():
    mdp = FiniteMDP(STAY_OR_GO)  # uniform continuation
    assert_allclose(
        successor_measure(mdp, discount=0.5, horizon=2),
        [[[1.25, 0.25], [0, 1.5]], [[0, 1.5], [0, 1.5]]],
    )
    infinite = successor_measure(mdp, discount=0.5)
    assert_allclose(infinite[0], [[4 / 3, 2 / 3], [0, 2]])
    assert mdp.events().tolist() == [0, 1]
    transitions = [[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]]
    assert mdp.events("transition").tolist() == transitions
    by_transition = successor_measure(mdp, discount=0.5, horizon=2, space="transition")
    assert_allclose(by_transition[0], [[1.25, 0.25, 0, 0], [0, 1, 0.25, 0.25]])
    always_stay = FiniteMDP(STAY_OR_GO, policy=[[1, 0], [1, 0]])
    assert_allclose(successor_measure(always_stay, discount=0.5, states=0), [[[2, 0], [0, 2]]])


@SPACES
@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_measures_equal_the_sum_over_all_paths(space, discount):
    transitions, policy = random_mdp(0)
    expected = np.zeros((3, 2, 3, 2, 3))
    for state, action in np.ndindex(3, 2):
        for probability, steps in paths(transitions, policy, state, action, 4):
            for k, step in enumerate(steps):
                expected[state, action][step] += discount**k * probability
    mdp = FiniteMDP(transitions, policy)
    got = successor_measure(mdp, discount=discount, horizon=4, space=space)
    if space == "transition":
        listed = tuple(mdp.events(space).T)
        assert len(listed[0]) == np.count_nonzero(transitions)
        assert_allclose(got, expected[:, :, *listed], atol=1e-14)
        assert_allclose(got.sum(), expected.sum())
    else:
        assert_allclose(got, expected.sum(axis=(2, 3)), atol=1e-14)


@SPACES
@pytest.mark.parametrize("seed", range(3))
def test_horizons_spaces_rows_and_formats_agree(space, seed):
    transitions, policy = random_mdp(seed, num_states=6, num_actions=3)
    mdp = FiniteMDP(transitions, policy)
    infinite = successor_measure(mdp, discount=0.8, space=space)
    long = successor_measure(mdp, discount=0.8, horizon=200, space=space)
    assert_allclose(infinite, long, rtol=1e-12, atol=1e-14)
    assert (infinite >= 0).all()
    # A sparse matrix in any order, with repeated and stored zero entries, is the same MDP.
    coo = sparse.coo_array(transitions.reshape(18, 6))
    order = np.random.default_rng(0).permutation(coo.nnz)
    rows, columns = (np.append(np.tile(index[order], 2), 0) for index in coo.coords)
    values = np.append(np.tile(coo.data[order], 2) / 2, 0.0)
    shuffled = FiniteMDP(sparse.coo_array((values, (rows, columns)), shape=(18, 6)), policy)
    assert (shuffled.num_states, shuffled.num_actions) == (6, 3)
    assert_array_equal(shuffled.events(space), mdp.events(space))
    for horizon, expected in ((None, infinite), (200, long)):
        kwargs = {"discount": 0.8, "horizon": horizon, "space": space}
        assert_allclose(successor_measure(shuffled, **kwargs), expected, rtol=1e-12, atol=1e-14)
        some = successor_measure(mdp, **kwargs, states=[4, 0, 4])
        assert_allclose(some, expected[[4, 0, 4]], rtol=1e-12, atol=1e-14)
        marginal = np.zeros((6, 3, 6))
        next_states = mdp.events(space) if space == "next_state" else mdp.events(space)[:, 2]
        np.add.at(marginal.transpose(2, 0, 1), next_states, expected.transpose(2, 0, 1))
        by_state = successor_measure(mdp, discount=0.8, horizon=horizon)
        assert_allclose(marginal, by_state, rtol=1e-12, atol=1e-14)


def test_an_mdp_keeps_its_own_copy():
    matrix = sparse.csr_array(STAY_OR_GO.reshape(4, 2))
    matrix = sparse.csr_array((np.append(matrix.data, 0.0), [0, 1, 1, 1, 0], [0, 1, 2, 3, 5]))
    policy = np.full((2, 2), 0.5)
    mdp = FiniteMDP(matrix, policy)
    assert matrix.nnz == 5  # the zero given explicitly is still the caller's
    matrix.data[:] = 0
    policy[:] = 0
    measure = successor_measure(mdp, discount=0.5, horizon=2)[0]
    assert_allclose(measure, [[1.25, 0.25], [0, 1.5]])
    assert_allclose(mdp.transitions.toarray().reshape(2, 2, 2), STAY_OR_GO)
    assert_allclose(mdp.policy, 0.5)


@SPACES
def test_no_states_give_no_rows(space):
    mdp = FiniteMDP(STAY_OR_GO)
    none = successor_measure(mdp, discount=0.5, horizon=3, space=space, states=np.arange(0))
    assert none.shape == (0, 2, len(mdp.events(space)))


@SPACES
@pytest.mark.parametrize(("discount", "horizon"), [(0.9, None), (0.9, 5), (1.0, 4), (0.0, None)])
def test_sampled_frequencies_match_the_measure(space, discount, horizon):
    mdp = FiniteMDP(*random_mdp(1))
    time = {"discount": discount, "horizon": horizon}
    measure = successor_measure(mdp, **time, space=space).reshape(6, -1)
    expected = measure / measure.sum(axis=1, keepdims=True)
    num = 20_000
    pairs = np.repeat(np.arange(6), num)
    sample = sample_events(
        mdp, pairs // 2, pairs % 2, np.random.default_rng(2), **time, space=space
    )
    counts = np.zeros_like(measure)
    np.add.at(counts, (pairs, sample.events), 1)
    standard_error = np.sqrt(expected * (1 - expected) / num)
    assert np.all(abs(counts / num - expected) <= 4.5 * standard_error + 1e-12)
    steps = np.arange(horizon or 60)
    delays = np.bincount(sample.delays, minlength=len(steps))[: len(steps)] / len(pairs)
    chance = discount**steps / measure.sum(axis=1)[0]
    standard_error = np.sqrt(chance * (1 - chance) / len(pairs))
    assert np.all(abs(delays - chance) <= 4.5 * standard_error + 1e-12)


def test_sampler_is_keyed_by_its_generator_and_broadcasts():
    mdp = FiniteMDP(*random_mdp(1))
    first, second = (
        sample_events(mdp, [0, 1, 2], 1, np.random.default_rng(5), discount=0.9) for _ in range(2)
    )
    assert_array_equal(first.events, second.events)
    assert first.events.shape == first.delays.shape == (3,)
    assert sample_events(mdp, 0, 1, np.random.default_rng(5), discount=0.9).events.shape == (1,)


@SPACES
@pytest.mark.parametrize("seed", range(5))
def test_density_ratio_and_posterior_agree(space, seed):
    rng = np.random.default_rng(seed)
    mdp = FiniteMDP(*random_mdp(seed, num_states=5, num_actions=3))
    family = successor_measure(mdp, discount=0.9, horizon=(None, 2)[seed % 2], space=space)
    for reference in (None, [0.2, 0.3, 0.5], 0.7 * rng.dirichlet(np.ones(3), size=5) + 0.1):
        base = measures.reference_measure(family, reference)
        posterior = measures.outcome_posterior(family, reference)
        weights = (
            np.full((5, 3), 1 / 3) if reference is None else np.broadcast_to(reference, (5, 3))
        )
        for s, a, z in np.ndindex(family.shape):
            evidence = sum(weights[s, b] * family[s, b, z] for b in range(3))
            bayes = weights[s, a] * family[s, a, z] / evidence if evidence > 0 else weights[s, a]
            assert abs(posterior[s, a, z] - bayes) < 1e-14
        ratio = measures.density_ratio(family, base)
        assert_allclose(measures.ratio_from_posterior(posterior, reference), ratio, atol=1e-10)
        effects = measures.effect_measure(family, reference)
        assert_allclose(ratio * base[:, None], effects, atol=1e-12)


def test_literal_operations():
    family = np.array([[[3, 0], [1, 4]]])  # integers, as someone may type them
    assert measures.reference_measure(family).tolist() == [[2, 2]]
    assert measures.reference_measure(family, [0.75, 0.25]).tolist() == [[2.5, 1]]
    assert measures.effect_measure(family).tolist() == [[[1, -2], [-1, 2]]]
    assert measures.outcome_posterior(family).tolist() == [[[0.75, 0], [0.25, 1]]]
    ratio = measures.density_ratio(family, np.array([[2, 2]]))
    assert ratio.tolist() == [[[0.5, -1], [-0.5, 1]]]
    assert measures.ratio_from_posterior(np.array([[[1, 0], [0, 1]]])).tolist() == [
        [[1, -1], [-1, 1]]
    ]
    assert measures.density_ratio(np.zeros((1, 2, 1)), np.zeros((1, 1))).tolist() == [[[0], [0]]]
    positive, negative = measures.jordan_parts(np.array([1.0, -2.0, 0.0]))
    assert (positive.tolist(), negative.tolist()) == ([1, 0, 0], [0, 2, 0])
    assert measures.mass(family).tolist() == [[3, 5]]
    assert measures.total_variation(np.array([[1.0, -2.0], [-1.0, 2.0]])).tolist() == [3, 3]
    assert measures.integrate(family, [1, -1]).tolist() == [[3, -3]]
    assert measures.project(family, [[1, 2, 0], [0, 1, 1]]).tolist() == [[[3, 6, 0], [1, 6, 4]]]


def test_two_thousand_states_fit_in_memory():
    rng = np.random.default_rng(0)
    num_states, num_actions, discount = 2000, 5, 0.95
    successors = np.repeat(rng.integers(num_states, size=(num_states, 10)), num_actions, axis=0)
    chances = rng.dirichlet(np.ones(10), size=num_states * num_actions)
    starts = np.arange(len(chances) + 1) * 10
    shape = (num_states * num_actions, num_states)
    transitions = sparse.csr_array((chances.ravel(), successors.ravel(), starts), shape=shape)
    policy = rng.dirichlet(np.ones(num_actions), size=num_states)
    mdp = FiniteMDP(transitions, policy)
    some = [0, 7, 1999]
    tracemalloc.start()
    try:
        infinite = successor_measure(mdp, discount=discount)
        three = successor_measure(mdp, discount=discount, horizon=3)
        by_transition = successor_measure(mdp, discount=discount, space="transition", states=some)
        assert tracemalloc.get_traced_memory()[1] < 1.5e9
    finally:
        tracemalloc.stop()

    def one_step_more(measure):
        continued = np.einsum("sa,saz->sz", policy, measure.reshape(infinite.shape))
        return (law + discount * (transitions @ continued)).reshape(infinite.shape)

    law = transitions.toarray()
    assert abs(infinite - one_step_more(infinite)).max() < 1e-12
    assert abs(three - one_step_more(one_step_more(law))).max() < 1e-14
    next_states = mdp.events("transition")[:, 2]
    for row, state in enumerate(some):
        for action in range(num_actions):
            marginal = np.bincount(next_states, by_transition[row, action], num_states)
            assert_allclose(marginal, infinite[state, action], rtol=1e-9)


MDP = FiniteMDP(STAY_OR_GO)
FAMILY = successor_measure(MDP, discount=0.5)
RNG = np.random.default_rng(0)


def changed(array, index, value):
    array = np.array(array, float)
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FiniteMDP(changed(STAY_OR_GO, (1, 0, 1), 0.8)), r"transitions .*sum to 1.* 0\.8"),
        (lambda: FiniteMDP(changed(STAY_OR_GO, (0, 0), [1.5, -0.5])), r"not negative.*got -0\.5"),
        (lambda: FiniteMDP(changed(STAY_OR_GO, (0, 0, 0), np.nan)), "transitions .*NaN; got nan"),
        (lambda: FiniteMDP(np.ones((2, 1, 2)) / 2), "2 actions; got 1"),
        (lambda: FiniteMDP(np.ones((2, 2)) / 2), r"\[states, actions, states\]; got .*\(2, 2\)"),
        (lambda: FiniteMDP(np.ones((2, 2, 3)) / 3), r"\[states, actions, st.* \(2, 2, 3\)"),
        (lambda: FiniteMDP(sparse.csr_array(np.ones((3, 2)) / 2)), r"states · act.* \(3, 2\)"),
        (lambda: FiniteMDP(sparse.csr_array(np.eye(2))), "2 actions; got 1"),
        (lambda: FiniteMDP(sparse.csr_array(np.eye(2)[[0, 0, 1, 1]] * 0.9)), r"sum to 1.* 0\.9"),
        (lambda: FiniteMDP(STAY_OR_GO, np.ones((2, 3)) / 3), r"policy .*\(2, 2\); got .*\(2, 3\)"),
        (lambda: FiniteMDP(STAY_OR_GO, np.ones((2, 2))), r"policy .*sum to 1; row 0 .* 2\.0"),
        (lambda: FiniteMDP(STAY_OR_GO, [[1.5, -0.5]] * 2), r"policy .*negative.*got -0\.5"),
        (lambda: FiniteMDP(STAY_OR_GO, [[np.nan, 1]] * 2), "policy .*NaN; got nan"),
        (lambda: MDP.events("state"), "'next_state' or 'transition'; got 'state'"),
        (lambda: successor_measure(MDP, discount=0.5, space="x"), "'transition'; got 'x'"),
        (lambda: successor_measure(MDP, discount=1.0), r"discount must be in \[0, 1\).*got 1\.0"),
        (lambda: successor_measure(MDP, discount=-0.1, horizon=3), r"discount .*got -0\.1"),
        (lambda: successor_measure(MDP, discount=1.1, horizon=3), r"discount .*got 1\.1"),
        (lambda: successor_measure(MDP, discount=np.nan), "discount .*got nan"),
        (lambda: successor_measure(MDP, discount=0.5, horizon=0), "horizon .*at least 1.*got 0"),
        (lambda: successor_measure(MDP, discount=0.5, horizon=2.5), r"horizon .*got 2\.5"),
        (lambda: successor_measure(MDP, discount=0.5, horizon=2.0), r"horizon .*got 2\.0"),
        (lambda: successor_measure(MDP, discount=0.5, states=[2]), r"states .*0\.\.1; got \[2\]"),
        (lambda: successor_measure(MDP, discount=0.5, states=[-1]), r"states .*got \[-1\]"),
        (lambda: successor_measure(MDP, discount=0.5, states=[[0]]), r"states .*got \[\[0\]\]"),
        (lambda: successor_measure(MDP, discount=0.5, states=[0.5]), r"states .*got \[0\.5\]"),
        (lambda: successor_measure(MDP, discount=0.5, states=[True, False]), "states .*got .*True"),
        (lambda: sample_events(MDP, [2], [0], RNG, discount=0.5), r"states .*0\.\.1; got \[2\]"),
        (lambda: sample_events(MDP, [0], [2], RNG, discount=0.5), r"actions .*0\.\.1; got \[2\]"),
        (lambda: sample_events(MDP, [-1], [0], RNG, discount=0.5), r"states .*got \[-1\]"),
        (lambda: sample_events(MDP, [0.5], [0], RNG, discount=0.5), r"states .*got \[0\.5\]"),
        (lambda: sample_events(MDP, [0, 1], [0, 1, 0], RNG, discount=0.5), "states and actions"),
        (lambda: sample_events(MDP, [0], [0], RNG, discount=1.0), r"discount .*got 1\.0"),
        (lambda: measures.effect_measure(FAMILY, [0.0, 1.0]), r"reference .*above 0; got .*0\.0"),
        (lambda: measures.reference_measure(FAMILY, [0.5, 0.4]), r"sum to 1 .*got 0\.9"),
        (lambda: measures.reference_measure(FAMILY[0, 0]), r"actions, events.*got shape \[2\]"),
        (lambda: measures.outcome_posterior(FAMILY, [[0.5, 0.5]] * 3), r"\[2\].* \(3, 2\)"),
        (lambda: measures.effect_measure(changed(FAMILY, 0, np.nan)), "NaN; got 4"),
        (lambda: measures.integrate(FAMILY, [1.0]), r"reward .*\[2\], .*got shape \(1,\)"),
        (lambda: measures.integrate(FAMILY, [1, np.inf]), "reward must be finite.*got inf"),
        (lambda: measures.integrate(FAMILY, [1, np.nan]), "reward must be finite.*got nan"),
        (lambda: measures.project(FAMILY, [1.0, 2.0]), r"features .*\[2 events, d\].* \(2,\)"),
        (lambda: measures.project(FAMILY, [[1.0], [np.nan]]), "features .*NaN; got 1"),
        (lambda: measures.density_ratio(FAMILY, FAMILY[:, 0, :1]), r"base .*\(2, 2\); .*\(2, 1\)"),
        (lambda: measures.density_ratio(FAMILY[0], FAMILY[0, 0]), r"\[states, actions, events\]"),
        (
            lambda: measures.density_ratio(FAMILY[[1, 0]], FAMILY[[1, 0], 1]),
            r"absolutely continuous.* row 1, action 0 puts mass 1\.33 on event 0.*\(1 such",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
