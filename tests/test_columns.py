"""Columns as observations: the encoding is learned once and applied to later tables."""

import numpy as np
import pytest

from cqm.columns import Column, check_columns, encode, learn_columns, observation_names
from cqm.tables import as_table

TABLE = as_table({"age": [30, 40, 50], "ward": ["b", "a", "c"], "smoker": [True, False, True]})


def test_texts_become_indicators_of_all_categories_but_the_first():
    columns = learn_columns(TABLE, ["ward", "age", "smoker"])
    assert observation_names(columns) == ("ward=b", "ward=c", "age", "smoker=True")
    assert encode(TABLE, columns).tolist() == [[1, 0, 30, 1], [0, 0, 40, 0], [0, 1, 50, 1]]


def test_later_tables_are_encoded_alike():
    columns = learn_columns(TABLE, ["age", "ward", "smoker"])
    later = as_table({"smoker": ["TRUE"], "name": ["x"], "ward": ["c"], "age": ["7"]})
    assert encode(later, columns).tolist() == [[7, 0, 1, 1]]
    with pytest.raises(
        ValueError, match=r"'ward' of the table has the unknown value 'd' in rows 1,"
    ):
        encode(as_table({"ward": ["a", "d", "d"]}), columns[1:2])
    with pytest.raises(ValueError, match=r"in row 0; known: \['a', 'b', 'c'\]"):
        encode(as_table({"ward": ["d"]}), columns[1:2])
    with pytest.raises(ValueError, match="'age' of the table must be numbers; got 'old' in row 1"):
        encode(as_table({"age": [3, "old"]}), columns[:1])


def test_codes_are_categories_if_named_so():
    table = as_table({"ward": [10, 2, 10]})
    assert learn_columns(table, ["ward"]) == (Column("ward"),)
    columns = learn_columns(table, ["ward"], ["ward"])
    assert columns == (Column("ward", ("2", "10")),)
    assert encode(as_table({"ward": ["10", "2.0"]}), columns).tolist() == [[1], [0]]


def test_a_text_among_numbers_is_a_mistake_unless_they_are_codes():
    table = as_table({"age": [30, "n.a.", 50]})
    with pytest.raises(ValueError, match=r"must be numbers; got 'n\.a\.' in row 1; correct it, or"):
        learn_columns(table, ["age"])
    assert learn_columns(table, ["age"], ["age"])[0].categories == ("30", "50", "n.a.")


def test_missing_values_are_filled_in_and_marked_if_that_was_learned():
    table = as_table({"age": [30, None, 50], "ward": ["a", "b", None], "dose": [1, 2, 3]})
    columns = learn_columns(table, ["age", "ward", "dose"], fill=True)
    names = ("age", "age=(missing)", "ward=b", "ward=(missing)", "dose")
    assert observation_names(columns) == names
    assert encode(table, columns).tolist() == [
        [30, 0, 0, 0, 1],
        [40, 1, 1, 0, 2],
        [50, 0, 0, 1, 3],
    ]
    later = as_table({"age": [None], "ward": [None], "dose": [4]})
    assert encode(later, columns).tolist() == [[40, 1, 0, 1, 4]]
    with pytest.raises(ValueError, match="'dose' of the table lacks 2 values, in rows 0, 2; fill"):
        encode(as_table({"dose": [None, 1, None]}), columns[2:])
    with pytest.raises(ValueError, match="'ward' of the table lacks 1 value, in row 0; fill"):
        encode(as_table({"ward": [None, "a"]}), [Column("ward", ("a", "b"))])


def test_columns_without_use_are_refused():
    with pytest.raises(ValueError, match="column 'x' of the table has no values; leave it out"):
        learn_columns(as_table({"x": [None, None]}), ["x"], fill=True)
    many = as_table({"name": [f"n{i}" for i in range(101)]})
    with pytest.raises(ValueError, match="has 101 different texts, such as 'n0' and 'n1'; at most"):
        learn_columns(many, ["name"])


def test_columns_are_stored_as_json():
    for column in (Column("x"), Column("x", fill=1.5), Column("x", ("a", "b"))):
        assert Column.from_json(column.to_json()) == column
    assert Column("x").to_json() == {"name": "x"}


def test_columns_must_give_the_observations():
    check_columns((), ["anything"])
    with pytest.raises(ValueError, match="become the observations x, y=b; got the names x, y"):
        check_columns((Column("x"), Column("y", ("a", "b"))), ["x", "y"])
    assert encode(TABLE, [Column("ward", ("a", "b", "c"))]).shape == (3, 2)
    assert np.shape(encode(TABLE, ())) == (3, 0)
