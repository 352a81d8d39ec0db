"""Malicious files: what is meant to run code, escape a directory, or exhaust memory, is refused."""

import json
import os
import pickle
import struct
import zipfile

import numpy as np

from cqm.observations import read_observations
from cqm.storage import encode_arrays

from . import damage
from .children import in_child
from .trials import Experiment, Result, one_by_one

SECONDS = 20.0
MATERIALS = ("model", "residual", "logs", "checkpoint", "set", "run", "zipped", "observations")


class Bomb:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


# Contents of a file: functions of the random generator and of a path that must not come to exist.


def _pickle(rng, canary):
    return pickle.dumps(Bomb(canary))


def _pickled_npy(rng, canary):
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + _pickle(rng, canary)


def _huge_npy(rng, canary):
    shape = [(10**12, 9), (2**62, 9), (-1, 9), (10**30,)][rng.integers(4)]
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def _safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _bad_offsets(rng, canary):
    size = [10**12, 2**63 - 1, 2**64, -8, 10**30][rng.integers(5)]
    entry = {"dtype": "F64", "shape": [max(size, 0) // 8], "data_offsets": [0, size]}
    return _safetensors({"observations": entry, "index": entry}, bytes(64))


def _overlapping(rng, canary):
    entry = {"dtype": "F64", "shape": [8], "data_offsets": [0, 64]}
    return _safetensors({"observations": entry, "index": entry, "losses": entry}, bytes(64))


def _bad_shape(rng, canary):
    shape = [[-1], [2**32, 2**32], [10**30], ["x"], 3, [1.5]][rng.integers(6)]
    entry = {"dtype": "F64", "shape": shape, "data_offsets": [0, 64]}
    return _safetensors({"observations": entry}, bytes(64))


def _bad_header(rng, canary):
    return [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        _safetensors(b"[" * 100_000),
        _safetensors(b'{"__metadata__": {"seal": 3}}'),
        _safetensors({"observations": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 8]}}),
        b"",
    ][rng.integers(6)]


def _deep_json(rng, canary):
    return [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000][rng.integers(3)]


def _odd_json(rng, canary):
    return [
        b'{"schema": ' + b"9" * 10_000 + b"}",
        b'{"schema": NaN}',
        b'{"schema": 1e999}',
        b'{"schema": 1, "schema": 2}',
        b'{"schema": "\\ud800"}',
        b"\xff\xfe{\x00}\x00",
        b'"text"',
        b"null",
        b'{"\\u0000": 1}',
    ][rng.integers(9)]


def _odd_csv(rng, canary):
    return [
        b"a," * 100_000 + b"\n",
        b"a,b\n" + b"x" * 1_000_000 + b",1\n",
        b"a\x00b,c\n1,2\n",
        b'"' + b"a" * 1_000_000,
        b"\xff\xfe\x00",
        b"domain\n=cmd|'/C calc'!A0\n",
        b"nan,inf,1e999\n",
    ][rng.integers(7)]


CONTENTS = [_pickle, _pickled_npy, _huge_npy, _bad_offsets, _overlapping, _bad_shape, _bad_header]
CONTENTS += [_deep_json, _odd_json, _odd_csv]


# Things in place of a file.


def _fifo(path, rng):
    path.unlink()
    os.mkfifo(path)


def _loop(path, rng):
    path.unlink()
    path.symlink_to(path.name)


def _device(path, rng):
    path.unlink()
    path.symlink_to(["/dev/zero", "/dev/urandom", "/dev/null", "/dev/full"][rng.integers(4)])


def _directory(path, rng):
    path.unlink()
    path.mkdir()


THINGS = [_fifo, _loop, _device, _directory]


def _escaping(path, rng):
    """An entry of a JSON file names something outside the directory, or something absurd."""
    content = json.loads(path.read_text())
    values = ["../../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b", "", ".", 10**12, -1, "🧨"]
    value = values[rng.integers(len(values))]
    places = list(damage.places(content))
    box, key = places[rng.integers(len(places))]
    box[key] = value
    path.write_text(json.dumps(content))
    return f"{key!r} set to {value!r}"


def _archive(path, rng, canary):
    """A zip archive that escapes, explodes or confuses."""
    how = int(rng.integers(6))
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if how == 0:
            for name, content in files.items():
                archive.writestr(f"../../{canary.name}/{name}", content)
        elif how == 1:
            for name in files:
                with archive.open(name, "w", force_zip64=True) as file:
                    for _ in range(64):
                        file.write(bytes(2**25))  # 2 GiB of zeros in 2 MB
        elif how == 2:
            for name, content in files.items():
                archive.writestr(name, content)
                archive.writestr(f"again/{name}", content)
        elif how == 3:
            for name in files:
                link = zipfile.ZipInfo(name)
                link.external_attr = 0o120777 << 16
                archive.writestr(link, "/etc/passwd")
        elif how == 4:
            for i in range(20_000):
                archive.writestr(str(i), b"")
        else:
            archive.writestr("model.json", pickle.dumps(Bomb(canary)))
            archive.writestr("model.safetensors", pickle.dumps(Bomb(canary)))
    kinds = ("escaping names", "2 GiB of zeros", "names twice", "links", "20,000 files", "pickles")
    return f"archive with {kinds[how]}"


def _trial(materials, rng, directory):
    name = MATERIALS[rng.integers(len(MATERIALS))]
    canary, place = directory / "canary", directory / "inside" / "material"
    place.mkdir(parents=True)
    if name == "observations":
        _write_observations(place, rng)
        reader = _read_observations
    else:
        reader = damage.READERS[name][0]
        damage.undamaged(materials, name, reader)  # so that what it compiles is in the cache
        materials.copy(name, place)
    needed = (".json", ".safetensors", ".csv", ".zip", ".npy")
    files = [p for p in sorted(place.rglob("*")) if p.is_file() and p.suffix in needed]
    files = [p for p in files if "branches" not in p.parts]
    path, how = files[rng.integers(len(files))], rng.random()
    what = f"{name}, {path.relative_to(place)}: "
    if path.suffix == ".zip" and how < 0.7:
        what += _archive(path, rng, canary)
    elif path.suffix == ".json" and how < 0.3:
        what += _escaping(path, rng)
    elif how < 0.5:
        thing = THINGS[rng.integers(len(THINGS))]
        thing(path, rng)
        what += thing.__name__[1:]
    else:
        content = CONTENTS[rng.integers(len(CONTENTS))]
        path.write_bytes(content(rng, canary))
        what += content.__name__[1:]
    ended = in_child(damage.answer, reader, materials, place, limit=SECONDS, memory_gb=12)
    if canary.exists():
        return Result(what, "executed", "code in the file was executed, or a file escaped")
    if ended.crash:
        return Result(what, "crashed", ended.crash)
    if ended.raised is not None:
        said = ended.raised.ours or ended.raised.kind == "ReportedError"
        failure = "" if said else str(ended.raised)
        return Result(what, "unexplained" if failure else "refused", failure)
    if name == "observations":
        return Result(what, "harmless")
    same = ended.value == damage.undamaged(materials, name, reader)
    return Result(what, "harmless" if same else "silent", "" if same else "an answer changed")


def _write_observations(place, rng):
    """States in a file of a random kind."""
    kind, states = int(rng.integers(3)), np.zeros((2, 3))
    if kind == 0:
        np.save(place / "states.npy", states)
    elif kind == 1:
        np.savetxt(place / "states.csv", states, delimiter=",")
    else:
        content = encode_arrays([{"observations": states}], {})
        (place / "states.safetensors").write_bytes(b"".join(content))


def _read_observations(materials, place):
    return [read_observations(path, ("a", "b", "c")) for path in sorted(place.iterdir())]


EXPERIMENT = Experiment("malicious", "A file is malicious", 500, 12, one_by_one(_trial))
