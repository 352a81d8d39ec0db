"""Tables in memory: what frames of different libraries and dictionaries become."""

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from cqm.tables import as_table, natural_order

DATA = {"age": [30, None, 4], "sex": ["f", "m", None], "smoker": [True, False, True]}
FRAMES = {
    "dictionary": lambda: DATA,
    "arrays": lambda: {
        "age": np.array([30, np.nan, 4]),
        "sex": np.array(["f", "m", None], object),
        "smoker": np.array([True, False, True]),
    },
    "pandas": lambda: pd.DataFrame(DATA),
    "pandas with its own types": lambda: pd.DataFrame(DATA).convert_dtypes(),
    "pyarrow": lambda: pa.table(DATA),
}


@pytest.mark.parametrize("make", FRAMES.values(), ids=FRAMES)
def test_every_kind_of_frame_gives_the_same_table(make):
    table = as_table(make())
    assert table.names == ("age", "sex", "smoker")
    np.testing.assert_array_equal(table["age"], [30, np.nan, 4])
    assert table["sex"].tolist() == ["f", "m", None]
    assert table["smoker"].tolist() == ["True", "False", "True"]
    assert table.categorical == {"smoker"}
    assert table.missing("sex").tolist() == [False, False, True]


class Series:
    """A column as Polars has it: a type, and an array."""

    def __init__(self, values, dtype):
        self.values, self.dtype = values, dtype

    def to_numpy(self):
        return np.array(self.values)


class Frame:
    columns = ("arm", "dose")

    def __getitem__(self, name):
        return {
            "arm": Series(["a", "b"], "Enum(categories=['a', 'b'])"),
            "dose": Series([1, 2], "Int64"),
        }[name]


def test_a_frame_only_needs_columns_and_arrays():
    table = as_table(Frame())
    assert (table["arm"].tolist(), table["dose"].tolist()) == (["a", "b"], [1.0, 2.0])
    assert table.categorical == {"arm"}


def test_a_frame_without_values_is_explained():
    lazy = type("Lazy", (), {"columns": ["a"]})()
    with pytest.raises(
        ValueError, match=r"column 'a' of the table cannot be read: .*subscriptable"
    ):
        as_table(lazy)


def test_codes_of_a_categorical_type_stay_categories():
    frame = pd.DataFrame({"ward": pd.Categorical([2, 10, 2])})
    assert as_table(frame).categorical == {"ward"}
    labels, codes = as_table(frame).categories("ward")
    assert (labels, codes.tolist()) == (["2", "10"], [0, 1, 0])
    dictionary = pa.table({"ward": pa.array(["x", "y"]).dictionary_encode()})
    assert as_table(dictionary).categorical == {"ward"}


def test_dates_are_texts_that_sort_by_time():
    days = pd.to_datetime(["2024-05-31", None, "2023-01-02"])
    values = as_table(pd.DataFrame({"day": days}))["day"].tolist()
    assert values[1] is None
    assert [values[2][:10], values[0][:10]] == ["2023-01-02", "2024-05-31"]
    plain = as_table({"day": [datetime.date(2024, 5, 31)]})
    assert plain["day"].tolist() == ["2024-05-31"]


def test_labels_do_not_depend_on_how_a_number_was_written():
    assert as_table({"a": [1, 2]}).categories("a")[0] == ["1", "2"]
    assert as_table({"a": [1.0, 2.5]}).categories("a")[0] == ["1", "2.5"]
    assert as_table({"a": ["1.0", "true", None]}).categories("a")[0] == ["1", "True"]


def test_people_sort_numbers_by_size():
    labels = ["arm 10", "arm 9", "b", "10", "9", "-1", "0.5"]
    expected = ["-1", "0.5", "9", "10", "arm 9", "arm 10", "b"]
    assert sorted(labels, key=natural_order) == expected


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (3, "must be a table from pandas, Polars or PyArrow, or a dictionary of columns; got 3"),
        ([1, 2], "must be a table from pandas"),
        ({"a": [1, 2], "b": [1]}, "must have the same length; got {'a': 2, 'b': 1}"),
        ({"a": [[1, 2], [3, 4]]}, "column 'a' of the table must have one value per row"),
        ({"a": [1, {}]}, "must be numbers or texts; got {} in row 1"),
        ({"a": [1, 2j]}, r"must be numbers or texts; got .*2j.* in row 1"),
    ],
)
def test_what_is_no_table_is_explained(frame, message):
    with pytest.raises(ValueError, match=message):
        as_table(frame)


def test_a_column_must_be_numbers_where_numbers_are_needed():
    table = as_table({"pain": ["1", "two", "3", "four"], "cost": [1, np.inf, 2, 3]})
    with pytest.raises(
        ValueError, match="'pain' of the table must be numbers; got 'two' in rows 1"
    ):
        table.numbers("pain")
    with pytest.raises(ValueError, match=r"'cost' of the table must be finite; got inf in row 1$"):
        table.numbers("cost")
    with pytest.raises(ValueError, match=r"column 'cots' in the table; did you mean \['cost"):
        table["cots"]
