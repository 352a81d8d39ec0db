"""Logs from a table: roles of columns, names of actions, and what is refused or warned about."""

import warnings

import numpy as np
import pandas as pd
import pytest

import cqm
from cqm import Logs
from cqm.columns import Column
from cqm.logs.roles import Roles, logs_from_table
from cqm.tables import as_table

ROLES = {"observations": ["age", "ward"], "action": "drug", "outcomes": ["pain", "cost"]}


def table(num=40, **changes):
    rng = np.random.default_rng(0)
    columns = {
        "age": rng.normal(50, 10, num).round(3),
        "ward": np.array(["north", "south"], object)[np.arange(num) % 2],
        "drug": np.array(["no", "yes"], object)[rng.permutation(num) % 2],
        "pain": rng.normal(size=num),
        "cost": rng.normal(size=num),
    }
    return {**columns, **changes}


def make(given, **changes):
    return Logs.from_frame(given, **{**ROLES, **changes})


def with_value(name, row, value, **changes):
    given = table(**changes)
    given[name] = given[name].astype(object)
    given[name][row] = value
    return given


def test_each_row_is_a_decision_of_one_step():
    given = table()
    logs = make(given)
    assert (len(logs), logs.recipe.horizon) == (40, 1)
    assert logs.observation_names == ("age", "ward=south")
    assert logs.feature_names == ("pain", "cost")
    assert logs.action_names == ("no", "yes")
    np.testing.assert_array_equal(logs.observations[:, 0], given["age"])
    np.testing.assert_array_equal(logs.observations[:, 1], np.arange(40) % 2)
    np.testing.assert_array_equal(logs.first_actions, given["drug"] == "yes")
    np.testing.assert_array_equal(logs.outcomes, np.stack([given["pain"], given["cost"]], axis=1))
    assert (logs.propensities, logs.groups) == (None, None)
    assert logs.columns == (Column("age"), Column("ward", ("north", "south")))


def test_files_give_the_same_logs_as_the_frame(tmp_path):
    frame = pd.DataFrame(table())
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "semicolon.csv", index=False, sep=";", decimal=",", encoding="latin-1")
    frame.to_parquet(tmp_path / "t.parquet")
    expected = make(frame)
    for logs in (
        Logs.from_csv(tmp_path / "t.csv", **ROLES),
        Logs.from_csv(tmp_path / "semicolon.csv", encoding="latin-1", **ROLES),
        Logs.from_parquet(tmp_path / "t.parquet", **ROLES),
    ):
        np.testing.assert_array_equal(logs.observations, expected.observations)
        np.testing.assert_array_equal(logs.features, expected.features)
        assert (logs.columns, logs.action_names) == (expected.columns, expected.action_names)


@pytest.mark.parametrize(
    ("values", "names", "controls"),
    [
        ([0, 1], ("0", "1"), [0, 1]),
        ([10.0, 2.5], ("2.5", "10"), [2.5, 10]),
        ([1, 2], ("drug 1", "drug 2"), [1, 2]),  # 1 alone would also be the index of the second
        (["arm 10", "arm 9"], ("arm 9", "arm 10"), [0, 1]),
        ([True, False], ("False", "True"), [0, 1]),
    ],
)
def test_values_of_the_action_column_name_the_actions_in_order(values, names, controls):
    given = np.array(values, object)[np.arange(40) % 2]
    logs = make(table(drug=given))
    assert logs.action_names == names
    assert logs.candidate_actions[:, 0].tolist() == controls
    first = logs.first_actions[0]
    assert names[first].endswith(f"{values[0]:g}" if values[0] == 10 else str(values[0]))


def test_the_probability_of_the_action_taken_is_enough_for_two_actions():
    given = table()
    logs = make({**given, "p": np.where(given["drug"] == "yes", 0.7, 0.4)}, propensities="p")
    expected = np.where((given["drug"] == "yes")[:, None], [[0.3, 0.7]], [[0.4, 0.6]])
    np.testing.assert_allclose(logs.propensities, expected)


def test_propensities_of_several_actions_have_a_column_each():
    arms = np.array(["a", "b", "c"], object)[np.arange(40) % 3]
    given = table(drug=arms, pa=np.full(40, 0.5), pb=np.full(40, 0.3333), pc=np.full(40, 0.1666))
    logs = make(given, propensities={"c": "pc", "a": "pa", "b": "pb"})
    np.testing.assert_allclose(logs.propensities[3], [0.5, 0.3333, 0.1666], rtol=2e-4)
    np.testing.assert_allclose(logs.propensities.sum(axis=1), 1, atol=1e-12)
    with pytest.raises(ValueError, match="with 3 actions, propensities must be one column per act"):
        make(given, propensities="pa")
    with pytest.raises(ValueError, match=r"a column for every action; missing: \['c'\]"):
        make(given, propensities={"a": "pa", "b": "pb"})
    with pytest.raises(ValueError, match=r"unknown action 'd'"):
        make(given, propensities={"a": "pa", "b": "pb", "d": "pc"})
    given["pa"][7] = 0.9
    with pytest.raises(ValueError, match=r"must sum to 1 in every row; got 1\.3999 in row 7$"):
        make(given, propensities={"a": "pa", "b": "pb", "c": "pc"})
    given["pa"][7] = 0.0
    with pytest.raises(ValueError, match=r"above 0 and below 1.*; got 0 in column 'pa'.*, row 7$"):
        make(given, propensities={"a": "pa", "b": "pb", "c": "pc"})


def test_rows_of_an_episode_stay_together_in_order_of_time():
    given = table(patient=np.array(list("bababa") + ["c"] * 34, object), day=np.arange(40)[::-1])
    logs = make(given, episode="patient", time="day")
    rows = [4, 2, 0, 5, 3, 1, *range(39, 5, -1)]  # b appears first
    np.testing.assert_array_equal(logs.observations[:, 0], given["age"][rows])
    assert [len(set(logs.groups[part])) for part in (slice(3), slice(3, 6), slice(6, 40))] == [
        1
    ] * 3
    assert len(set(logs.groups)) == 3
    dates = np.array([f"2024-01-{day + 1:02d}" for day in range(30)], object)
    late = make(table(num=30, day=dates[::-1]), time="day")
    np.testing.assert_array_equal(late.observations[:, 0], table(num=30)["age"][::-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"action": "drgu"},
            r"missing column 'drgu' in the table; did you mean \['drug'\]\? it has \['age'",
        ),
        ({"outcomes": ["age"]}, "column 'age' is both an observation and an outcome; what follows"),
        ({"observations": ["age", "drug"]}, "'drug' is both an observation and the action; choose"),
        ({"propensities": "pain"}, "'pain' is both an outcome and a propensity; choose one"),
        ({"observations": ["age", "age"]}, "observations must be different names; got 'age' more"),
        ({"observations": "age"}, "observations must be several names"),
        ({"observations": []}, "observations must be at least one column; got none"),
        ({"outcomes": []}, "outcomes must be at least one column; got none"),
        ({"action": None}, "action must be text that is not empty; got None"),
        ({"episode": 3}, "episode must be text that is not empty; got 3"),
        (
            {"categorical": ["pain"]},
            "categorical columns must be among the observations; got 'pain'",
        ),
        ({"missing": "ignore"}, "missing must be 'error', 'mean' or 'drop'; got 'ignore'"),
        ({"propensities": 0.5}, "propensities must be a dictionary of columns by action"),
    ],
)
def test_wrong_roles_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        make(table(), **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (table(drug=["no"] * 40), "'drug' of the table is 'no' in all 40 rows; .* at least 2"),
        (table(drug=np.arange(40) / 7), "'drug' of the table has 40 different values in 40 rows"),
        (
            with_value("pain", 3, "strong"),
            "'pain' of the table must be numbers; got 'strong' in row 3",
        ),
        (
            with_value("age", 3, "old"),
            "'age' of the table must be numbers; got 'old' in row 3; corr",
        ),
        ({name: [] for name in table()}, "the table has no rows"),
    ],
)
def test_wrong_columns_are_explained(given, message):
    with pytest.raises(ValueError, match=message):
        make(given)


def test_missing_values_are_refused_dropped_or_filled_in():
    given = with_value("age", [3, 5, 6, 8], None)
    with pytest.raises(
        ValueError,
        match=r"missing in the table: 'age' in 4 rows \(rows 3, 5, 6 and 1 more\); to leave these "
        "rows out, pass missing='drop'; to fill in observations, pass missing='mean'",
    ):
        make(given)
    dropped = make(given, missing="drop")
    assert (len(dropped), dropped.columns[0]) == (36, Column("age"))
    filled = make(given, missing="mean")
    mean = np.delete(table()["age"], [3, 5, 6, 8]).mean()
    assert filled.observation_names == ("age", "age=(missing)", "ward=south")
    np.testing.assert_allclose(filled.observations[[3, 4], :2], [[mean, 1], [table()["age"][4], 0]])
    for name in ("pain", "drug"):
        with pytest.raises(
            ValueError, match=f"'{name}' in 1 row .*only observations can be filled"
        ):
            make(with_value(name, 3, None), missing="mean")
        assert len(make(with_value(name, 3, None), missing="drop")) == 39
    with pytest.raises(ValueError, match="every row of the table lacks a value in age"):
        make(table(age=[None] * 40), missing="drop")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (table(ward=["north"] * 40), "column 'ward' is 'north' in every row"),
        (table(age=[50] * 40), "column 'age' is '50' in every row"),
        (table(age=table()["pain"]), "observation 'age' equals outcome 'pain' in every row; what"),
        (
            {name: np.append(values, values[:3]) for name, values in table().items()},
            "3 rows of 43 repeat an earlier row; remove them unless they are separate decisions",
        ),
    ],
)
def test_suspicious_tables_are_warned_about(given, message):
    with pytest.warns(UserWarning, match=message):
        make(given)


def test_rows_may_repeat_where_all_columns_have_few_values():
    coarse = {"age": np.arange(40) % 3, "pain": np.arange(40) % 2, "cost": np.arange(40) % 5}
    with warnings.catch_warnings(action="error"):
        make(table(**coarse))


def test_notes_tell_what_became_of_the_table():
    given = {**with_value("age", 3, None), "name": ["x"] * 40, "pain score": np.arange(40)}
    roles = {**ROLES, "outcomes": ["pain score"], "missing": "drop"}
    _, notes = logs_from_table(as_table(given), Roles(**roles))
    assert notes == [
        "ignored 3 columns: pain, cost, name",
        "in a reward formula, write `pain score` with backquotes, and on the command line put the "
        "formula in single quotes",
        "dropped 1 row of 40 with missing values",
        "categories (ward: north, south)",
    ]


@pytest.mark.filterwarnings("ignore:effects are set to zero")  # that on the cost
def test_the_encoding_is_saved_with_the_logs_and_with_models(tmp_path):
    given = table(num=600)
    given["pain"] += 2 * (given["drug"] == "yes") * (given["ward"] == "south")
    make(given).save(tmp_path / "logs")
    logs = Logs.load(tmp_path / "logs")
    assert logs.columns == (Column("age"), Column("ward", ("north", "south")))
    assert logs[:5].columns == logs.columns
    cqm.ResidualModel().fit(logs).save(tmp_path / "model")
    model = cqm.load_model(tmp_path / "model")
    assert model.columns_ == logs.columns
    raw = pd.DataFrame({"name": ["x", "y"], "ward": ["south", "north"], "age": [50, 50]})
    encoded = model.effect([[50, 1], [50, 0]], action="yes", baseline="no")
    np.testing.assert_array_equal(model.effect(raw, action="yes", baseline="no"), encoded)
    np.testing.assert_array_equal(
        model.effect({"ward": ["south", "north"], "age": [50, 50]}, action="yes", baseline="no"),
        encoded,
    )
    assert encoded[0, 0] > 1 > encoded[1, 0]
    with pytest.raises(ValueError, match=r"unknown value 'west' in row 0; known: \['north', 'sout"):
        model.effect(raw.replace("south", "west"))


def test_an_encoding_that_does_not_fit_the_observations_is_refused():
    logs = make(table())
    with pytest.raises(
        ValueError, match="become the observations age, ward=south; got the names a"
    ):
        Logs(**{**vars(logs), "observation_names": ("a", "b")})
