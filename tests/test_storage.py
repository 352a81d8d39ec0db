import ast
import errno
import fcntl
import hashlib
import json
import os
import pickle
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy

import cqm
from cqm import storage
from cqm.storage import DamagedFileError

ARRAYS = {"b": np.arange(6.0).reshape(2, 3), "a": np.array([1, -2], np.int16)}
METADATA = {"kind": "test", "shard": "3", "manifest": "abc", "extra": "x"}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "x/", "a\\b", "..\\x", "a\0b"]
)
def test_names_that_leave_the_directory_are_refused(name):
    with pytest.raises(ValueError, match="must be plain, without directories; got "):
        storage.inside("data", name)


def test_a_plain_name_is_inside():
    assert storage.inside("data", "mixing.safetensors") == Path("data/mixing.safetensors")
    assert storage.inside("data", "..x") == Path("data/..x")


def encoded(batches, metadata=METADATA):
    return b"".join(storage.encode_arrays(batches, metadata))


def test_the_same_arrays_give_the_same_bytes():
    backwards = dict(reversed(ARRAYS.items())), dict(reversed(METADATA.items()))
    contents = {encoded([ARRAYS]) for _ in range(32)}
    contents |= {encoded([backwards[0]], backwards[1]) for _ in range(32)}
    assert len(contents) == 1


def test_arrays_and_metadata_round_trip(tmp_path):
    others = {"turned": ARRAYS["b"].T, "some": np.arange(10)[::3], "none": np.empty((4, 0))}
    arrays = {**ARRAYS, **others}
    path = tmp_path / "x.safetensors"
    storage.write_pieces(path, storage.encode_arrays([arrays], METADATA))
    with storage.open_arrays(path) as file:
        assert file.metadata() == METADATA
        assert sorted(file.keys()) == ["a", "b", "none", "some", "turned"]
        for name, values in arrays.items():
            read = file.get_tensor(name)
            assert read.dtype == values.dtype
            np.testing.assert_array_equal(read, values)
        assert file.get_slice("b")[1:2].tolist() == [[3.0, 4.0, 5.0]]
    for name, values in safetensors.numpy.load(path.read_bytes()).items():
        np.testing.assert_array_equal(values, arrays[name])


@pytest.mark.parametrize("kind", list("?bhiqBHIQfd"))
def test_every_type_of_number_round_trips(tmp_path, kind):
    values = np.array([[0, 1], [100, 7]]).astype(kind)
    path = tmp_path / "x.safetensors"
    path.write_bytes(encoded([{"x": values, "a": np.zeros(1, np.int8)}]))
    with storage.open_arrays(path) as file:
        read = file.get_tensor("x")
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)


def test_batches_are_joined_along_the_first_axis():
    rng = np.random.default_rng(0)
    whole = {"x": rng.standard_normal((7, 2, 3)), "n": np.arange(7), "e": np.empty((7, 0))}
    cuts = [slice(0, 3), slice(3, 3), slice(3, 6), slice(6, 7)]
    batches = [{name: values[cut] for name, values in whole.items()} for cut in cuts]
    assert encoded(batches) == encoded([whole])
    backwards = [{"x": whole["x"][::-1]}]  # a view is written as it reads
    assert encoded(backwards) == encoded([{"x": whole["x"][::-1].copy()}])


def test_batches_that_do_not_fit_are_refused():
    for other in (np.zeros(2, np.float32), np.zeros((2, 1))):
        with pytest.raises(ValueError, match="'x'"):
            encoded([{"x": np.zeros(3)}, {"x": other}])


@pytest.mark.parametrize("values", [np.array([{}]), np.array(["text"]), np.array([1j])])
def test_only_numbers_can_be_stored(tmp_path, values):
    with pytest.raises(ValueError, match=r"array 'x' .*cannot be stored; allowed: .*'float64'"):
        storage.write_pieces(tmp_path / "file", storage.encode_arrays([{"x": values}], {}))
    assert os.listdir(tmp_path) == []


def test_writing_returns_the_checksum_and_makes_directories(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc"
    written = storage.write_pieces(path, [b"a", memoryview(b"bc")])
    assert (written.sha256, written.num_bytes) == (digest, 3)
    assert storage.sha256(path) == digest
    assert path.read_bytes() == b"abc"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt])
def test_a_write_that_is_broken_off_leaves_nothing(tmp_path, error):
    def pieces():
        yield b"abc"
        raise error

    with pytest.raises(error):
        storage.write_pieces(tmp_path / "file", pieces())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, function):
    path = tmp_path / "file"
    storage.write_pieces(path, [b"old"])

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match=f"cannot write {path}: Input/output error"):
        storage.write_pieces(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, events = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor):
        events.append(("flushed", os.fstat(descriptor).st_size, path.exists()))
        fsync(descriptor)

    def renamed(source, target):
        events.append(("renamed", Path(source).read_bytes(), path.exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    storage.write_pieces(path, [b"abcd"])
    assert events[:2] == [("flushed", 4, False), ("renamed", b"abcd", False)]
    assert path.read_bytes() == b"abcd"


@pytest.mark.parametrize(
    ("code", "type_", "advice"),
    [
        (errno.ENOSPC, OSError, "the disk is full; free some space and rerun the command"),
        (errno.EDQUOT, OSError, "the disk quota is used up; free some space"),
        (errno.EROFS, OSError, "the file system is read-only; choose another directory"),
        (errno.EACCES, PermissionError, "no permission; change the directory's permissions"),
        (errno.EPERM, PermissionError, "no permission; change the directory's permissions"),
        (errno.EIO, OSError, "rerun the command"),
    ],
)
def test_what_went_wrong_is_explained(tmp_path, monkeypatch, code, type_, advice):
    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "file"
    with pytest.raises(type_) as caught:
        storage.write_pieces(path, [b"abc"])
    assert caught.value.errno == code
    assert f"cannot write {path}: {os.strerror(code)}" in str(caught.value)
    assert advice in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["file/x", "file/sub/x"])
def test_a_file_in_place_of_a_directory_is_explained(tmp_path, where):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="is a file; choose another directory") as caught:
        storage.write_pieces(tmp_path / where, [b"abc"])
    assert str(tmp_path / where) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_json_round_trips_in_the_order_given(tmp_path):
    path = tmp_path / "x.json"
    value = {"z": 1, "a": [1.5, None, "é"], "m": {"y": True, "b": False}}
    storage.write_json(path, value)
    assert storage.read_json(path) == value
    assert list(storage.read_json(path)) == ["z", "a", "m"]
    assert path.read_text().startswith('{\n  "z": 1,\n')


def test_json_refuses_what_is_not_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.write_json(tmp_path / "x.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_canonical_json_does_not_depend_on_the_order_of_keys():
    text = '{"a":[1.5,null,"\\u00e9"],"b":{"x":true,"y":0.1}}'
    assert storage.canonical_json({"b": {"y": 0.1, "x": True}, "a": (1.5, None, "é")}) == text
    assert storage.canonical_json(json.loads(text)) == text
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.canonical_json({"x": float("inf")})
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        storage.canonical_json({"x": Path("x")})  # never by its repr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"a": 1', "is not valid JSON"),
        (b'{"a": \xff}', "is not valid JSON"),
        (b"[1, 2]", "must contain a JSON object; got list"),
        (b"3", "must contain a JSON object; got int"),
    ],
)
def test_garbled_json_is_named(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=message) as caught:
        storage.read_json(path)
    assert str(path) in str(caught.value)


def test_lines_are_added_to_a_log(tmp_path):
    path = tmp_path / "log.jsonl"
    for value in ({"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}):
        storage.append_line(path, value)
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n'


def test_a_torn_line_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    storage.append_line(path, {"step": 3})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 3}']


def test_a_line_that_cannot_be_added_is_explained(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="is a file; choose another directory"):
        storage.append_line(tmp_path / "file" / "log.jsonl", {})


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_an_incomplete_file_of_arrays_is_named(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(encoded([ARRAYS])[:length])
    with (
        pytest.raises(DamagedFileError, match="is not a complete safetensors file") as caught,
        storage.open_arrays(path),
    ):
        pass
    assert str(path) in str(caught.value)


def test_an_absent_file_of_arrays_is_simply_absent(tmp_path):
    with pytest.raises(FileNotFoundError), storage.open_arrays(tmp_path / "x.safetensors"):
        pass


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(
    "make",
    [
        pickle.dumps,
        lambda payload: pickle.dumps(payload, protocol=0),
        lambda payload: np.array([payload], dtype=object).dumps(),
    ],
    ids=["pickle", "pickle of protocol 0", "array of objects"],
)
def test_loading_executes_nothing(tmp_path, make):
    marker, path = tmp_path / "marker", tmp_path / "x.safetensors"
    content = make(Payload(marker))
    path.write_bytes(content)
    for read in (storage.read_json, lambda p: storage.open_arrays(p).__enter__()):
        with pytest.raises(DamagedFileError):
            read(path)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()  # it would have


def test_no_module_can_unpickle():
    forbidden = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    modules = sorted(Path(cqm.__file__).parent.rglob("*.py"))
    assert len(modules) > 10
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not {name.partition(".")[0] for name in names} & forbidden, path
            assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle"), path


def test_only_partial_files_are_removed(tmp_path, monkeypatch):
    partial = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: partial.append(Path(source)))
        storage.write_pieces(tmp_path / "data.json", [b"half"])
    assert partial[0].read_bytes() == b"half"  # as after a power cut
    for name in ("data.json", ".hidden", "notes.partial"):
        (tmp_path / name).write_text("mine")
    storage.remove_partial(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "data.json", "notes.partial"]
    storage.remove_partial(tmp_path / "nowhere")  # nothing to remove is no mistake


def test_the_temporary_file_of_a_live_process_is_left_alone(tmp_path):
    with storage.atomic_file(tmp_path / "data.json") as file:
        file.write(b"whole")
        file.flush()
        storage.remove_partial(tmp_path)
        assert len(os.listdir(tmp_path)) == 1
    assert (tmp_path / "data.json").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["data.json"]


@pytest.mark.parametrize("name", [".data.json.elsewhere.0.partial", ".data.json.123.partial"])
def test_temporary_files_of_other_machines_are_removed_after_a_day(tmp_path, name):
    path = tmp_path / name
    path.write_text("half")
    for age, there in ((0, True), (80_000, True), (90_000, False)):
        os.utime(path, times=(time.time() - age,) * 2)
        storage.remove_partial(tmp_path)
        assert path.exists() == there


def test_a_write_reuses_what_a_dead_process_left(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: None)
        storage.write_pieces(tmp_path / "data.json", [b"a longer half"])
    assert len(os.listdir(tmp_path)) == 1
    storage.write_pieces(tmp_path / "data.json", [b"whole"])
    assert os.listdir(tmp_path) == ["data.json"]
    assert (tmp_path / "data.json").read_bytes() == b"whole"


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    path = tmp_path / "data.json"
    with storage.atomic_file(path) as first, storage.atomic_file(path) as second:
        for _ in range(3):
            first.write(b"a")
            second.write(b"b")
    assert path.read_bytes() == b"aaa"  # the one that ended last
    assert os.listdir(tmp_path) == ["data.json"]


def test_file_systems_without_locks_can_be_written_to(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    storage.write_pieces(tmp_path / "data.json", [b"whole"])
    assert (tmp_path / "data.json").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["data.json"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_opened(tmp_path, make):
    path = tmp_path / "x"
    make(path)
    for read in (storage.read_json, storage.sha256, storage.read_arrays):
        with pytest.raises(DamagedFileError, match="must be a file; got a directory, pipe or dev"):
            read(path)


def test_a_loop_of_links_is_refused(tmp_path):
    path = tmp_path / "x"
    path.symlink_to(path)
    for read in (storage.read_json, storage.sha256, storage.read_arrays):
        with pytest.raises(DamagedFileError, match=r"x cannot be read: Too many levels"):
            read(path)


def test_arrays_of_a_description_that_is_not_theirs_are_refused(tmp_path):
    class Entries(msgspec.Struct):
        sha256: str

    path, arrays_path = tmp_path / "x.json", tmp_path / "x.safetensors"
    storage.write_described(path, {}, arrays_path, ARRAYS, METADATA)
    content, arrays, metadata = storage.read_described(path, Entries, arrays_path, repair="redo")
    assert content == {"sha256": storage.sha256(arrays_path)}
    assert (sorted(arrays), metadata) == (["a", "b"], METADATA)
    storage.write_sealed(path, {"sha256": "0" * 64})
    with pytest.raises(DamagedFileError, match=r"belongs to another x\.json: .*; redo"):
        storage.read_described(path, Entries, arrays_path, repair="redo")


def test_checksums_are_sha256(tmp_path):
    content = json.dumps(list(range(100_000))).encode()
    (tmp_path / "x").write_bytes(content)
    assert storage.sha256(tmp_path / "x") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1, "b": 2}, {"a": 3, "b": 2}, ["  a: 1 -> 3"]),
        ({"a": {"b": {"c": "x"}}}, {"a": {"b": {"c": "y"}}}, ['  a.b.c: "x" -> "y"']),
        ({"a": 1}, {"b": 2}, ["  a: 1 -> null", "  b: null -> 2"]),
        ({"a": None}, {"a": {"b": 1}}, ['  a: null -> {"b": 1}']),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["  a: [1, 2] -> [1, 3]"]),
        ({"a": "x" * 100}, {"a": ""}, ['  a: "' + "x" * 56 + '... -> ""']),
    ],
)
def test_differences_are_listed_by_their_path(old, new, lines):
    assert storage.differences(old, new).splitlines() == lines
    assert bool(storage.differences(new, old)) == bool(lines)


class Note(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    weight: float
    names: list[str]


NOTE = {"schema": 2, "weight": 0.1, "names": ["a", "b"]}


def read_note(path, sealed_since=1):
    return storage.read_sealed(path, Note, repair="write it again", sealed_since=sealed_since)


def test_a_sealed_object_is_read_back(tmp_path):
    storage.write_sealed(tmp_path / "note.json", NOTE)
    assert read_note(tmp_path / "note.json") == NOTE


def test_no_changed_byte_of_a_sealed_object_goes_unnoticed(tmp_path):
    path = tmp_path / "note.json"
    storage.write_sealed(path, NOTE)
    content, problems = path.read_bytes(), []
    for i in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[i] ^= 1 << bit
            path.write_bytes(changed)
            try:
                value = read_note(path)
            except DamagedFileError as error:
                problems.append(str(error))
            else:
                assert value == NOTE  # a changed space
    assert len(problems) > 6 * len(content)
    assert all(str(path) in text and "write it again" in text for text in problems)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({**NOTE, "weight": "0.1"}, r"Expected `float`, got `str` - at `\$.weight`"),
        ({"schema": 2, "weight": 0.1}, "missing required field `names`"),
        ({**NOTE, "more": 1}, "unknown field `more`"),
    ],
)
def test_a_sealed_object_must_fit_its_schema(tmp_path, content, problem):
    storage.write_sealed(tmp_path / "note.json", content)
    with pytest.raises(DamagedFileError, match=problem):
        read_note(tmp_path / "note.json")


def test_only_files_from_before_there_were_seals_may_lack_one(tmp_path):
    path = tmp_path / "note.json"
    storage.write_json(path, NOTE)
    with pytest.raises(DamagedFileError, match="was changed"):
        read_note(path)
    assert read_note(path, sealed_since=3) == NOTE
    storage.write_json(path, {**NOTE, "seal": "0" * 64})
    with pytest.raises(DamagedFileError, match="was changed"):
        read_note(path, sealed_since=3)


@pytest.mark.parametrize(
    "text", ["{", '{"schema": NaN}', '{"schema": 1e999}', "[1]", "\0", "[" * 100_000, ""]
)
def test_what_is_no_json_object_is_refused_with_the_way_out(tmp_path, text):
    path = tmp_path / "note.json"
    path.write_text(text)
    with pytest.raises(DamagedFileError, match="write it again"):
        read_note(path)


def test_no_changed_byte_of_sealed_arrays_goes_unnoticed(tmp_path):
    path = tmp_path / "arrays.safetensors"
    storage.write_sealed_arrays(path, ARRAYS, METADATA)
    arrays, metadata = storage.read_sealed_arrays(path, repair="write it again")
    assert metadata == METADATA
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], values)
        assert arrays[name].dtype == values.dtype
    content, problems = path.read_bytes(), []
    for i in range(len(content)):
        changed = bytearray(content)
        changed[i] ^= 1 << i % 8
        path.write_bytes(changed)
        try:
            again, metadata = storage.read_sealed_arrays(path, repair="write it again")
        except DamagedFileError as error:
            problems.append(str(error))
        else:
            assert metadata == METADATA  # a changed space of the header
            assert {n: v.tolist() for n, v in again.items()} == {
                n: v.tolist() for n, v in ARRAYS.items()
            }
    assert len(problems) > 0.9 * len(content)
    assert all(str(path) in text and "write it again" in text for text in problems)


def test_a_directory_belongs_to_one_process_at_a_time(tmp_path):
    directory = tmp_path / "new"
    message = (
        rf"{directory} is in use by process {os.getpid()} on .*; wait until it ends, or choose"
    )
    first, second = (storage.exclusive(directory) for _ in range(2))
    with first, pytest.raises(ValueError, match=message), second:
        pass
    with storage.exclusive(directory):
        pass
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("owner", ["", "process 999999999 on HOST", "nonsense"])
def test_a_lock_whose_owner_is_dead_is_taken_over(tmp_path, owner):
    (tmp_path / ".lock").write_text(owner.replace("HOST", platform.node()))
    with storage.exclusive(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {platform.node()}"
    assert not (tmp_path / ".lock").exists()


def test_an_exception_releases_a_directory(tmp_path):
    with pytest.raises(KeyError), storage.exclusive(tmp_path):
        raise KeyError
    with storage.exclusive(tmp_path):
        pass


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    where = storage.exclusive(tmp_path / "file")
    with pytest.raises(OSError, match="part of the path is a file"), where:
        pass


def test_two_writers_leave_one_of_their_works(tmp_path):
    """Each waits for the other, so a description never gets the other's arrays."""
    path, arrays_path = tmp_path / "note.json", tmp_path / "note.safetensors"

    def write(i):
        arrays = {"a": np.full(1000, float(i))}
        storage.write_described(path, {**NOTE, "weight": float(i)}, arrays_path, arrays, {})

    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(8)))
        content, arrays, _ = storage.read_described(
            path, DescribedNote, arrays_path, repair="again"
        )
        assert set(arrays["a"]) == {content["weight"]}


class DescribedNote(Note, forbid_unknown_fields=True, kw_only=True):
    sha256: str


def test_without_locks_nothing_is_held(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(storage.fcntl, "flock", no_locks)
    with storage.exclusive(tmp_path), storage.exclusive(tmp_path):
        pass


def test_numbers_of_numpy_are_written_as_plain_ones(tmp_path):
    storage.write_sealed(tmp_path / "note.json", {**NOTE, "weight": np.float64(0.1)})
    assert read_note(tmp_path / "note.json") == NOTE
