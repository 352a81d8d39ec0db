import os

import numpy as np
import pandas as pd
import pytest

from cqm.columns import Column
from cqm.observations import as_observations, read_observations, read_states
from cqm.storage import DamagedFileError, encode_arrays, write_pieces

NAMES = ("angle", "speed")
VALUES = np.array([[1.0, -2.0], [0.5, 3e-3]])


def test_every_kind_of_file_gives_the_same(tmp_path):
    write_pieces(tmp_path / "o.safetensors", encode_arrays([{"observations": VALUES}], {}))
    np.save(tmp_path / "o.npy", VALUES)
    (tmp_path / "o.csv").write_text("1.0,-2.0\n0.5,3e-3\n")
    (tmp_path / "named.csv").write_text("speed, angle\n-2.0,1.0\n3e-3,0.5\n\n")
    for name in ("o.safetensors", "o.npy", "o.csv", "named.csv"):
        np.testing.assert_array_equal(read_observations(tmp_path / name, NAMES), VALUES)


def test_whole_numbers_are_numbers(tmp_path):
    np.save(tmp_path / "o.npy", np.ones((3, 2), np.int32))
    assert read_observations(tmp_path / "o.npy", NAMES).dtype == float


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "o.csv",
            "1,2,3\n",
            r"must contain observations \[states, 2\] \(angle, speed\); got .*1, 3",
        ),
        ("o.csv", "1,2\n1\n", "must have 2 columns; state 1 has 1"),
        ("o.csv", "1,2\n1,x\n", "must contain numbers; state 1: could not convert"),
        ("o.csv", "1,2\n1,nan\n", "got nan for speed of state 1, and 0 more such values"),
        (
            "o.csv",
            "angle,speeds\n1,2\n",
            r"missing column 'speed' in \S*o\.csv; did you mean \['speeds'\]\? it has \['angle'",
        ),
        ("o.txt", "1,2\n", r"must end in one of \.safetensors, \.npy, \.csv"),
        ("o.npy", "nonsense", "is not an array of numbers"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_observations(tmp_path / name, NAMES)


def test_wrong_arrays_are_refused(tmp_path):
    path = tmp_path / "o.npy"
    for values, message in (
        (np.ones(2), r"got shape \(2,\)"),
        (np.array([["a", "b"]]), "must contain real numbers"),
        (np.array([[1.0, np.inf]]), "got inf for speed of state 0"),
    ):
        np.save(path, values)
        with pytest.raises(ValueError, match=message):
            read_observations(path, NAMES)
    write_pieces(tmp_path / "o.safetensors", encode_arrays([{"states": VALUES}], {}))
    with pytest.raises(ValueError, match=r"must contain an array 'observations'; got \['states'\]"):
        read_observations(tmp_path / "o.safetensors", NAMES)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_observations(tmp_path / "other.npy", NAMES)


def test_pickled_arrays_are_not_loaded(tmp_path):
    np.save(tmp_path / "o.npy", np.array([[object(), 1]]), allow_pickle=True)
    with pytest.raises(DamagedFileError, match="is not an array of numbers"):
        read_observations(tmp_path / "o.npy", NAMES)


GYM = ("position", "velocity", "terminated")


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        ([1, 2], NAMES, [1.0, 2.0]),
        (np.ones((3, 2), np.float32), NAMES, np.ones((3, 2))),
        (np.array([1, 2], np.float32), GYM, [1.0, 2.0, 0.0]),
        ([[1, 2], [3, 4]], GYM, [[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]]),
        ([1, 2, 1], GYM, [1.0, 2.0, 1.0]),
        (np.empty((0, 2)), NAMES, np.empty((0, 2))),
    ],
)
def test_one_state_or_several_as_the_environment_gives_them(given, names, expected):
    found = as_observations(given, names)
    assert found.dtype == float
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize(
    ("given", "names", "message"),
    [
        ([1.0], NAMES, r"\[2\] for one state .* the columns angle, speed; got \(1,\)$"),
        (np.ones((4, 1)), NAMES, r"\[n, 2\] for several.* angle, speed; got \(4, 1\)$"),
        (np.ones((1, 1, 2)), NAMES, r"got \(1, 1, 2\)$"),
        ([1.0], GYM, r"position, velocity, terminated; got \(1,\); flatten it with gymnasium"),
        ({"position": 1.0}, GYM, "got .*1.0}; flatten it with gymnasium.spaces.flatten"),
        (3, GYM, "got 3; flatten it with gymnasium.spaces.flatten"),
        ([1.0, np.nan], NAMES, "observations must be finite; got nan for speed$"),
        (
            [[1.0, 2.0], [3.0, np.inf], [np.nan, 0.0]],
            NAMES,
            "observations must be finite; got inf for speed in row 1, and 1 more such value$",
        ),
    ],
)
def test_wrong_observations_name_the_columns(given, names, message):
    with pytest.raises(ValueError, match=message):
        as_observations(given, names)


@pytest.mark.parametrize("content", ["1,2\n3,4\n", "velocity,position\n2,1\n4,3\n"])
def test_files_may_lack_the_column_that_environments_do_not_give(content, tmp_path):
    (tmp_path / "o.csv").write_text(content)
    expected = [[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]]
    np.testing.assert_array_equal(read_observations(tmp_path / "o.csv", GYM), expected)
    (tmp_path / "o.csv").write_text("position,terminated,velocity\n1,1,2\n")
    np.testing.assert_array_equal(read_observations(tmp_path / "o.csv", GYM), [[1.0, 2.0, 1.0]])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npy", b"\x93NUMPY\x01\x00v\x00{'descr': ", "is not an array of numbers"),
        ("x.npy", b"\x93NUMPY\x01\x00\x0a\x00[[[[[[[[[[", "is not an array of numbers"),
        ("x.csv", b"1,2\n\xff\xfe\x00", "is not a table of comma-separated values"),
        ("x.csv", b"1,2\x00\n", "must contain|is not a table"),
        ("x.npz", b"PK", "must end in one of"),
    ],
)
def test_malformed_files_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_observations(tmp_path / name, ["a", "b"])


def test_pipes_directories_and_pickles_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "directory.npy").mkdir()
    np.save(tmp_path / "pickle.npy", np.array([{}], object), allow_pickle=True)
    for name in ("pipe.csv", "directory.npy"):
        with pytest.raises(ValueError, match="must be a file; it is a directory or a pipe"):
            read_observations(tmp_path / name, ["a", "b"])
    with pytest.raises(ValueError, match="is not an array of numbers"):
        read_observations(tmp_path / "pickle.npy", ["a", "b"])


def test_columns_of_a_table_are_found_by_their_names():
    table = pd.DataFrame({"speed": [2.0, 4.0], "angle": [1.0, 3.0]})
    got = as_observations(table, ["angle", "speed", "terminated"])
    assert got.tolist() == [[1, 2, 0], [3, 4, 0]]
    with pytest.raises(ValueError, match="must have the columns angle, height; got speed, angle"):
        as_observations(table, ["angle", "height"])
    columns = table.to_dict("list")
    assert as_observations(columns, ["angle", "speed"]).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"with the columns angle, height; got \{'speed'"):
        as_observations(columns, ["angle", "height"])


WARD = (Column("angle"), Column("ward", ("a", "b")))
ENCODED = ("angle", "ward=b")


@pytest.mark.parametrize("name", ["s.csv", "s.tsv", "s.parquet"])
def test_files_may_have_the_columns_that_observations_were_made_from(name, tmp_path):
    table = pd.DataFrame({"id": ["01", "02"], "ward": ["b", "a"], "more": [1, 2], "angle": [3, 4]})
    if name.endswith("parquet"):
        table.to_parquet(tmp_path / name)
    else:
        table.to_csv(tmp_path / name, index=False, sep="," if name.endswith("csv") else "\t")
    states = read_states(tmp_path / name, ENCODED, WARD, id_column="id")
    assert states.observations.tolist() == [[3, 1], [4, 0]]
    assert (states.ids, states.ignored) == (("01", "02"), ("more",))
    assert as_observations(table, ENCODED, WARD).tolist() == [[3, 1], [4, 0]]


def test_observations_may_still_be_given_as_they_are(tmp_path):
    (tmp_path / "s.csv").write_text("ward=b,angle,more\n1,3,x\n")
    assert read_observations(tmp_path / "s.csv", ENCODED, WARD).tolist() == [[3, 1]]
    (tmp_path / "s.csv").write_text("3,1\n")
    assert read_observations(tmp_path / "s.csv", ENCODED, WARD).tolist() == [[3, 1]]
    frame = pd.DataFrame({"ward=b": [1], "angle": [3]})
    for given in (frame, [[3, 1]]):
        assert as_observations(given, ENCODED, WARD).tolist() == [[3, 1]]


def test_states_without_names_have_no_ids(tmp_path):
    np.save(tmp_path / "o.npy", VALUES)
    with pytest.raises(ValueError, match="has no column names, so states cannot be named by 'id'"):
        read_states(tmp_path / "o.npy", NAMES, id_column="id")


def test_further_columns_are_ignored_and_named(tmp_path):
    (tmp_path / "s.csv").write_text("speed,name,angle\n2,x,1\n")
    states = read_states(tmp_path / "s.csv", NAMES)
    assert (states.observations.tolist(), states.ignored) == ([[1, 2]], ("name",))
