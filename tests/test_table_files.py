"""Tables in files: what CSV and Parquet files become, and which of them are refused."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from cqm.storage import DamagedFileError
from cqm.table_files import read_csv, read_parquet, read_table

TEXT = "age,sex,dose\n30,f,0.5\n40,m,1\n"


def read(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_csv(path, **options)


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (TEXT, {}),
        (TEXT.replace(",", ";").replace("0.5", "0,5"), {}),
        (TEXT.replace(",", "\t"), {}),
        (TEXT.replace(",", "|"), {}),
        (TEXT.replace(",", "!"), {"delimiter": "!"}),
        (TEXT.replace("\n", "\r\n"), {}),
        ("\ufeff" + TEXT, {}),  # as Excel writes it
        (TEXT.encode("utf-16"), {"encoding": "utf-16"}),
        ("\n" + TEXT.replace("\n", "\n\n"), {}),
        (' age , sex,dose\n 30,"f", 0.5\n"40",m,1', {}),
    ],
)
def test_every_way_to_write_a_table_gives_the_same(content, options, tmp_path):
    table = read(tmp_path / "t.csv", content, **options)
    assert table.names == ("age", "sex", "dose")
    assert table["age"].tolist() == [30, 40]
    assert table["sex"].tolist() == ["f", "m"]
    assert table["dose"].tolist() == [0.5, 1]


def test_cells_without_a_value_are_missing(tmp_path):
    table = read(tmp_path / "t.csv", "a,b\n1,x\n,\nNA,null\nnan,N/A\n2,None\n")
    np.testing.assert_array_equal(table["a"], [1, np.nan, np.nan, np.nan, 2])
    assert table["b"].tolist() == ["x", None, None, None, "None"]


def test_cells_may_have_delimiters_and_line_breaks(tmp_path):
    table = read(tmp_path / "t.csv", 'a,b\n1,"x, y"\n2,"two\nlines"\n3,"say ""ah"""\n')
    assert table["b"].tolist() == ["x, y", "two\nlines", 'say "ah"']
    assert table.rows.tolist() == [2, 3, 4]


def test_rows_are_numbered_as_in_a_spreadsheet(tmp_path):
    table = read(tmp_path / "t.csv", "a\n1\n\n2\n" + "3\n" * 1000)
    assert table.rows[[0, 1, -1]].tolist() == [2, 4, 1004]
    assert len(table) == 1002


def test_a_text_in_a_late_block_makes_a_column_of_texts(tmp_path):
    table = read(tmp_path / "t.csv", "a\n" + "1.0\n" * 1200 + "x\n")
    assert table["a"].tolist() == ["1"] * 1200 + ["x"]


def test_only_the_wanted_columns_are_read(tmp_path):
    table = read(tmp_path / "t.csv", TEXT, wanted=["dose"])
    assert (list(table.columns), table.names) == (["dose"], ("age", "sex", "dose"))
    chosen = read(tmp_path / "t.csv", TEXT, wanted=lambda names: names[:1])
    assert list(chosen.columns) == ["age"]


def test_identifiers_can_be_kept_as_they_are_written(tmp_path):
    table = read(tmp_path / "t.csv", "id,a\n007,1\n1e3,2\n", verbatim=["id"])
    assert table["id"].tolist() == ["007", "1e3"]
    large = 2**60 + 1
    pd.DataFrame({"id": [large]}).to_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet", verbatim=["id"])["id"].tolist() == [str(large)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; its first row must have the column names"),
        ("\n\n", "is empty"),
        ("a,b\n", "has column names, but no rows"),
        ("a,b\n1,2\n3\n", "row 3 of .* has 1 cell; the header has 2"),
        ("a,b\n1,2\n\n3,4,5\n", "row 4 of .* has 3 cells; the header has 2"),
        ("a,b\n" + "1,2\n" * 700 + "3\n", "row 702 of .* has 1 cell"),
        ("a,a\n1,2\n", "has more than one column 'a'; rename one of them"),
        ('a,b\n1,"2\n', "is not a table of comma-separated values"),
        ("a,b\n1,é\n".encode("latin-1"), r"is not utf-8 text \(byte 0xe9 .*such as latin-1"),
        ("a,b\n1,2\n".encode("utf-16"), "is UTF-16 text, not utf-8; pass the encoding utf-16"),
        (b"a,b\n1,\x00\n", "is not a table|must be"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(content, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path / "t.csv", content).numbers("b")
    assert str(tmp_path / "t.csv") in str(caught.value)


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown encoding 'utf-9'"):
        read(tmp_path / "t.csv", TEXT, encoding="utf-9")
    with pytest.raises(ValueError, match="delimiter must be one character, or None; got ', '"):
        read(tmp_path / "t.csv", TEXT, delimiter=", ")
    with pytest.raises(ValueError, match=r"must end in \.csv, \.tsv, \.txt or \.parquet"):
        read_table(tmp_path / "t.xlsx")


def test_only_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "directory.csv").mkdir()
    for name in ("pipe.csv", "directory.csv"):
        with pytest.raises(DamagedFileError, match="must be a file; got a directory, pipe or dev"):
            read_csv(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"none\.csv does not exist"):
        read_csv(tmp_path / "none.csv")


def test_parquet_gives_the_same_table(tmp_path):
    frame = pd.DataFrame({"age": [30, 40], "sex": ["f", "m"], "more": [[1], [2]]})
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet", ["age", "sex"])
    assert table.names == ("age", "sex", "more")
    assert (table["age"].tolist(), table["sex"].tolist()) == ([30, 40], ["f", "m"])
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DamagedFileError, match="is not a Parquet file"):
        read_parquet(tmp_path / "t.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"")
    code = "import sys; sys.modules['pyarrow'] = None; from cqm.table_files import read_parquet; "
    code += "read_parquet(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "t.parquet")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "pip install 'cqm[parquet]'" in done.stderr.splitlines()[-1]
