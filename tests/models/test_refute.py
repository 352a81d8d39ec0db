"""Refuters: quiet on sound logs, loud about what is planted, and honest about hidden causes."""

import itertools
import json
import warnings

import numpy as np
import pytest
from support.log_generators import SOUND, WRONG, linear, logs_of, two_outcomes

import cqm
from cqm.cli import main
from cqm.models.refute import REFUTERS, refute
from cqm.models.sensitivity import observed_strengths, robustness, robustness_value

# Leaks make for poor coverage.
pytestmark = pytest.mark.filterwarnings("ignore:poor coverage", "ignore:the largest inverse")


def failed(found):
    return [row.refuter for row in found.rows if row.verdict == "FAIL"]


@pytest.mark.parametrize("name", SOUND)
def test_sound_logs_pass(name):
    num = 1_250 if name == "episodes" else 300
    found = cqm.ResidualModel().refute(SOUND[name](np.random.default_rng(0), num))
    assert failed(found) == []
    assert found.passed
    assert found
    measured = {row.refuter for row in found.rows if row.verdict != "skipped"}
    assert {"placebo", "dummy-outcome", "random-cause", "halves", "outcome-copy"} <= measured
    assert len(measured & {"balance", "action-copy"}) == 1


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_planted_is_found(name, seed):
    make, refuter = WRONG[name]
    logs = make(np.random.default_rng(seed), 400)
    found = refute(cqm.ResidualModel(), logs, refuters=[refuter])
    assert failed(found) == [refuter]
    assert not found
    assert found.summary() == f"Do not trust these effects: {refuter} failed."
    if refuter in ("outcome-copy", "action-copy", "balance") and name != "wrong propensities":
        assert found[refuter].note.count("leak") == 1  # it names the observation


def test_a_regressor_that_misses_the_cause_of_both_is_noticed():
    class Blind:  # it learns nothing
        def fit(self, inputs, outputs):
            return self

        def predict(self, inputs):
            return np.zeros(len(inputs))

    logs = linear(np.random.default_rng(0), 1_000, strength=2.0)
    wrong = logs.with_propensities([0.5, 0.5])
    model = cqm.ResidualModel(baseline_regressor=Blind())
    found = model.refute(wrong, refuters=["dummy-outcome"])
    assert failed(found) == ["dummy-outcome"]
    assert not failed(model.refute(logs, refuters=["dummy-outcome"]))


def test_a_group_counts_as_one_decision():
    logs = SOUND["episodes"](np.random.default_rng(0), 900)
    with pytest.raises(ValueError, match="at least 200 independent groups of decisions; got 180"):
        cqm.ResidualModel().refute(logs)


def confounded(seed, choice, cause, *, actions=2, num=500):
    """Logs without the hidden cause, and its partial R² with every contrast and the outcome.

    The hidden cause makes the last action look best, which is worse than the first one.
    """
    rng = np.random.default_rng(seed)
    x, hidden, noise = rng.normal(size=(3, num))
    scores = (0.5 * x + choice * hidden)[:, None] * np.arange(actions) / (actions - 1)
    draws = rng.gumbel(size=scores.shape)
    action = (scores + draws).argmax(axis=1)
    outcome = x - 0.3 * action / (actions - 1) + cause * hidden + noise
    taken = np.eye(actions)[action]
    seen = np.stack([x, hidden], axis=1)
    shares = {
        pair: observed_strengths(seen, taken, outcome, *pair)[1]
        for pair in itertools.permutations(range(actions), 2)
    }
    return x, taken, outcome, shares


def residuals(columns, x):
    design = np.stack([np.ones(len(x)), x], axis=1)
    return columns - design @ np.linalg.lstsq(design, columns, rcond=None)[0]


@pytest.mark.parametrize("actions", [2, 3])
def test_a_hidden_cause_that_overturns_the_best_action_is_stronger_than_reported(actions):
    wrong = right = 0
    for choice, cause, seed in itertools.product((0.2, 0.5, 1.0, 2.0), (0.2, 0.7, 1.5), range(8)):
        x, taken, outcome, shares = confounded(seed, choice, cause, actions=actions)
        found = robustness(residuals(outcome, x), residuals(taken, x))
        assert found.value <= found.without_noise
        if found.best != 0:  # the best action is the first
            wrong += 1
            assert found.value < shares[found.best, 0].max()
            assert found.value <= shares[found.best, found.rival].max() or found.rival != 0
        else:
            right += 1
    assert wrong > 40
    assert right > 5


def test_the_refuter_reports_the_same_strength():
    for seed, choice in enumerate((1.0, 1.5, 2.0)):
        x, taken, outcome, shares = confounded(seed, choice, 1.0, num=800)
        logs = logs_of(x[:, None], taken.argmax(axis=1), outcome)
        found = cqm.ResidualModel().refute(logs, refuters=["hidden-cause"])["hidden-cause"]
        assert "1 is the best action on average, unless a hidden cause" in found.note
        plain = robustness(residuals(outcome, x), residuals(taken, x))
        assert found.value == pytest.approx(plain.value, abs=0.05)
        assert found.value < shares[1, 0].max()


def test_the_robustness_value_is_the_root_of_the_bias_formula():
    for strength in (0.01, 0.3, 1.0, 5.0):
        share = robustness_value(strength)
        assert share**2 / (1 - share) == pytest.approx(strength**2)
    assert robustness_value(1e-200) == 0
    assert robustness_value(1e200) == 1


def test_the_bias_of_a_hidden_cause_is_that_of_the_formula():
    # With equality, because there is a single hidden cause.
    x, taken, outcome, shares = confounded(0, 1.0, 1.0, actions=3, num=2_000)
    _, hidden, _ = np.random.default_rng(0).normal(size=(3, 2_000))
    design = np.stack([np.ones(len(x)), x, taken[:, 1], taken[:, 2]], axis=1)  # against action 0
    short = np.linalg.lstsq(design, outcome, rcond=None)[0]
    long = np.linalg.lstsq(np.column_stack([design, hidden]), outcome, rcond=None)[0]
    rest = outcome - design @ short
    others = design[:, :3]
    contrast = taken[:, 2] - others @ np.linalg.lstsq(others, taken[:, 2], rcond=None)[0]
    of_action, of_outcome = shares[2, 0]
    bias = np.sqrt(of_outcome * of_action / (1 - of_action) * (rest @ rest) / (contrast @ contrast))
    assert short[3] - long[3] == pytest.approx(bias, rel=1e-4)


def test_noise_alone_gives_the_value_zero():
    zero = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        taken = np.eye(3)[rng.integers(3, size=300)]
        zero += robustness(rng.normal(size=300), taken - 1 / 3).value == 0
    assert zero >= 90


def test_a_query_says_what_is_best():
    logs = two_outcomes(np.random.default_rng(0), 600)
    model = cqm.ResidualModel().fit(logs)
    some = {"refuters": ["mirror", "hidden-cause"]}
    without = model.refute(logs, **some)
    assert without["hidden-cause"].verdict == "skipped"
    cheap = model.refute(logs, cqm.Query([0.1, -1.0]), **some)
    assert "0 is the best action" in cheap["hidden-cause"].note
    assert model.refute(logs, np.array([1.0, 0.0]), **some)["hidden-cause"].value > 0
    # A reward that is the cost of the action alone needs no logs.
    assert failed(model.refute(logs, np.array([0.0, -1.0]), **some)) == ["mirror"]


def test_seeds_decide_and_refuters_do_not_disturb_each_other():
    logs = linear(np.random.default_rng(0), 250, known=True)
    model = cqm.ResidualModel()
    both = model.refute(logs, refuters=["dummy-outcome", "placebo"], seed=3)
    alone = model.refute(logs, refuters=["placebo"], seed=3)
    assert both["placebo"] == alone["placebo"]
    assert model.refute(logs, refuters=["placebo"], seed=4)["placebo"] != alone["placebo"]


def test_hindsight_and_tables_are_refuted_as_well():
    logs = SOUND["repeated states"](np.random.default_rng(0), 3_000)
    for model in (cqm.HindsightModel(method="tabular"), cqm.ResidualModel(method="tabular")):
        found = model.refute(logs)
        assert found.passed
        assert {row.refuter for row in found.rows if row.verdict == "skipped"} == {"balance"}
    assert "the hindsight model" in str(cqm.HindsightModel(method="tabular").refute(logs))


def test_single_steps_skip_what_makes_no_sense_for_them():
    logs = SOUND["motion"](np.random.default_rng(0), 300)
    model = cqm.ResidualModel(method="steps")
    found = model.refute(logs, refuters=["placebo", "dummy-outcome", "random-cause"])
    assert {row.verdict for row in found.rows} == {"skipped"}
    assert "later actions" in found["placebo"].note


def test_the_table_says_what_logs_cannot_reveal():
    logs = linear(np.random.default_rng(0), 300)
    found = cqm.ResidualModel().refute(logs, refuters=["mirror", "balance", "hidden-cause"])
    title, header, *lines = str(found).splitlines()
    assert title == "Attempts to refute the residual model, from 300 decisions"
    assert header.split() == ["refuter", "what", "was", "done", "found", "verdict"]
    assert lines[0].split()[0] == "mirror"
    assert "Nothing refuted these effects." in lines
    assert lines[-2].startswith("A pass is no proof. Logs never show a hidden cause")
    assert "For comparison, obs_0 explains" in str(found).replace("\n", " ")
    frame = found.to_pandas()
    assert frame["verdict"].tolist() == ["pass", "skipped", "measured"]
    assert found._repr_html_().count("<tr>") == 4
    assert np.isnan(found["balance"].value)
    with pytest.raises(ValueError, match="unknown refuter 'placebo'"):
        found["placebo"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda logs: logs, {"refuters": ["placbo"]}, r"unknown refuter 'placbo'; did you mean"),
        (lambda logs: logs, {"refuters": []}, "refuters must not be empty"),
        (lambda logs: logs, {"refuters": "placebo"}, "refuters must be several names"),
        (lambda logs: logs, {"seed": -1}, "seed must be a whole number of at least 0"),
        (lambda logs: logs, {"query": np.ones(3)}, "3"),
        (lambda logs: logs, {"show_progress": "yes"}, "show_progress must be"),
        (lambda logs: logs[:150], {}, "at least 200 independent decisions; got 150"),
        (lambda logs: logs[logs.first_actions == 0], {}, r"actions \[1\] never occur"),
    ],
)
def test_mistakes_are_explained(change, options, message):
    logs = linear(np.random.default_rng(0), 600)
    with pytest.raises(ValueError, match=message):
        cqm.ResidualModel().refute(change(logs), **options)


def test_logs_of_another_world_are_refused():
    logs = linear(np.random.default_rng(0), 300)
    model = cqm.ResidualModel(members=1).fit(logs)
    data = (logs.observations, logs.first_actions, logs.outcomes[:, 0])
    with pytest.raises(ValueError, match="another world"):
        model.refute(logs_of(*data, world={"name": "plant", "kind": "logs"}))
    with pytest.raises(ValueError, match="the observations of the logs are obs_0, obs_1; those"):
        model.refute(logs_of(data[0][:, :2], *data[1:]))
    with pytest.raises(ValueError, match=r"discount 0\.5; the model was fitted with discount 1\.0"):
        model.refute(cqm.Logs.from_arrays(*data[:2], logs.features, discount=0.5))
    with pytest.raises(ValueError, match="logs must be Logs"):
        refute(model, logs.observations)


def test_the_command_line_refutes_a_saved_model(tmp_path, capsys):
    logs = linear(np.random.default_rng(0), 300)
    logs.save(tmp_path / "logs")
    cqm.ResidualModel(members=1).fit(logs).save(tmp_path / "model")
    command = ["refute", str(tmp_path / "model"), str(tmp_path / "logs"), "--json"]
    some = ["--refuters", "mirror", "balance", "hidden-cause"]
    assert main([*command, *some, "--reward", "feature_0"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["verdict"] for row in rows] == ["pass", "skipped", "measured"]
    assert rows[1]["value"] is None
    bad, _ = WRONG["action"]
    bad(np.random.default_rng(0), 300).save(tmp_path / "leaky")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cqm.ResidualModel(members=1).fit(str(tmp_path / "leaky")).save(tmp_path / "fooled")
    args = ["refute", str(tmp_path / "fooled"), str(tmp_path / "leaky")]
    assert main([*args, "--refuters", "action-copy"]) == 1
    assert "Do not trust these effects: action-copy failed." in capsys.readouterr().out
    assert main([*args, "--refuters", "nothing"]) == 2
    assert set(REFUTERS) >= {"action-copy"}
