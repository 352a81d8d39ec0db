"""The form on disk, and all ways to damage it: refused by name, repaired by collecting again."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import cqm
from cqm import storage
from cqm.branches import collect as collection, shards
from cqm.storage import DamagedFileError
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

REPAIR = "collect again into the same directory"


def make_world():
    native = FunctionWorld(
        step=lambda x, u, e: 0.9 * x + u + e,
        initial=lambda num, rng: rng.standard_normal((num, 2)),
        exogenous=lambda num, horizon, rng: rng.standard_normal((num, horizon, 2)),
        candidate_actions=[[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]],
        name="plane",
    )
    return NuisanceWorld(native, Nuisance(dimension=3))


def collect(directory, **changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collection, "SHARD_BYTES", 0)  # one block per shard
        settings = dict(states=3 * 256, horizon=3, seed=4) | changes
        return cqm.collect(make_world(), out=directory, threads=1, **settings)


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine") / "set"
    collect(directory)
    return directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Another set of the same kind and sizes."""
    directory = tmp_path_factory.mktemp("foreign") / "set"
    collect(directory, seed=5)
    return directory


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "set")


def shard(directory, index):
    return directory / f"shard-{index:05d}.safetensors"


def sidecar(directory, index):
    return directory / f"shard-{index:05d}.json"


def copy_shard(source, i, target, j):
    shutil.copy(shard(source, i), shard(target, j))
    shutil.copy(sidecar(source, i), sidecar(target, j))


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def flip(path, position, bit=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Payload:
    """Leaves a marker where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def put_pickle(path, sidecar_path=None):
    """A pickle in place of a file, with a sidecar that vouches for it."""
    path.write_bytes(pickle.dumps(Payload(path.parent / "marker")))
    if sidecar_path is not None:
        edit(sidecar_path, bytes=path.stat().st_size, sha256=storage.sha256(path))


def test_a_set_on_disk_is_a_manifest_mixing_and_shards_with_sidecars(pristine):
    assert sorted(contents(pristine)) == [
        "manifest.json",
        "mixing.safetensors",
        "shard-00000.json",
        "shard-00000.safetensors",
        "shard-00001.json",
        "shard-00001.safetensors",
        "shard-00002.json",
        "shard-00002.safetensors",
    ]
    manifest = json.loads((pristine / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["num_shards"] == 3
    assert manifest["recipe"]["seed"] == 4
    assert manifest["world"]["nuisance"]["dimension"] == 3
    written = json.loads(sidecar(pristine, 1).read_text())
    assert written["shard"] == 1
    assert written["families"] == 256
    assert written["bytes"] == shard(pristine, 1).stat().st_size
    assert written["sha256"] == storage.sha256(shard(pristine, 1))
    assert written["dropped"] == {}


def test_an_undamaged_set_opens(pristine):
    branches = cqm.Branches.open(pristine)
    branches.verify()
    assert len(branches) == 768
    assert branches.index.tolist() == list(range(768))


# Name: what to do to the set, the file that the message names, and what else it says.
DAMAGE = {
    "truncated": (
        lambda d, _: os.truncate(shard(d, 1), shard(d, 1).stat().st_size - 100),
        ("shard-00001.safetensors", "bytes instead of", REPAIR),
    ),
    "emptied": (
        lambda d, _: os.truncate(shard(d, 1), 0),
        ("shard-00001.safetensors", "has 0 bytes", REPAIR),
    ),
    "longer": (
        lambda d, _: shard(d, 1).write_bytes(shard(d, 1).read_bytes() + b"\0"),
        ("shard-00001.safetensors", "bytes instead of", REPAIR),
    ),
    "bit flipped in the data": (
        lambda d, _: flip(shard(d, 2), -1),
        ("shard-00002.safetensors", "checksum is wrong", REPAIR),
    ),
    "bit flipped in the middle": (
        lambda d, _: flip(shard(d, 0), shard(d, 0).stat().st_size // 2, bit=7),
        ("shard-00000.safetensors", "checksum is wrong", REPAIR),
    ),
    "bit flipped in the header's length": (
        lambda d, _: flip(shard(d, 0), 3),
        ("shard-00000.safetensors", REPAIR),
    ),
    "bit flipped in the header": (
        lambda d, _: flip(shard(d, 0), 8),
        ("shard-00000.safetensors", REPAIR),
    ),
    "missing": (
        lambda d, _: shard(d, 1).unlink(),
        ("shard-00001.safetensors", "is missing", REPAIR),
    ),
    "missing with its sidecar": (
        lambda d, _: (shard(d, 2).unlink(), sidecar(d, 2).unlink()),
        ("shard-00002.safetensors", "is missing", REPAIR),
    ),
    "copied over another": (
        lambda d, _: copy_shard(d, 0, d, 1),
        ("shard-00001.safetensors", "copy of shard 0", REPAIR),
    ),
    "copied over another with a corrected sidecar": (
        lambda d, _: (copy_shard(d, 0, d, 1), edit(sidecar(d, 1), shard=1)),
        ("shard-00001.safetensors", "copy of shard 0", REPAIR),
    ),
    "copied over another without its sidecar": (
        lambda d, _: shutil.copy(shard(d, 0), shard(d, 1)),
        ("shard-00001.safetensors", REPAIR),
    ),
    "swapped": (
        lambda d, _: (swap(shard(d, 1), shard(d, 2)), swap(sidecar(d, 1), sidecar(d, 2))),
        ("shard-00001.safetensors", "copy of shard 2", REPAIR),
    ),
    "sidecars swapped": (
        lambda d, _: swap(sidecar(d, 1), sidecar(d, 2)),
        ("shard-00001.json", REPAIR),
    ),
    "of another set": (
        lambda d, foreign: copy_shard(foreign, 1, d, 1),
        ("shard-00001.safetensors", "belongs to another set", REPAIR),
    ),
    "sidecar missing": (
        lambda d, _: sidecar(d, 0).unlink(),
        ("shard-00000.json", "is missing", REPAIR),
    ),
    "sidecar garbled": (
        lambda d, _: sidecar(d, 0).write_bytes(b'{"shard": 0, "sha2'),
        ("shard-00000.json", "not valid JSON", REPAIR),
    ),
    "sidecar emptied": (
        lambda d, _: os.truncate(sidecar(d, 0), 0),
        ("shard-00000.json", "not valid JSON", REPAIR),
    ),
    "sidecar of bytes": (
        lambda d, _: sidecar(d, 0).write_bytes(bytes(range(256))),
        ("shard-00000.json", "not valid JSON", REPAIR),
    ),
    "sidecar a list": (
        lambda d, _: sidecar(d, 0).write_text("[]"),
        ("shard-00000.json", REPAIR),
    ),
    "sidecar incomplete": (
        lambda d, _: sidecar(d, 0).write_text('{"shard": 0}'),
        ("shard-00000.json", "lacks", REPAIR),
    ),
    "sidecar with fewer families": (
        lambda d, _: edit(sidecar(d, 0), families=255),
        ("shard-00000.json", REPAIR),
    ),
    "sidecar with more families": (
        lambda d, _: edit(sidecar(d, 0), families=257),
        ("shard-00000.json", REPAIR),
    ),
    "sidecar with other drops": (
        lambda d, _: edit(sidecar(d, 0), dropped={"diverged": 3}),
        ("shard-00000.json", REPAIR),
    ),
    "sidecar with another checksum": (
        lambda d, _: edit(sidecar(d, 0), sha256="0" * 64),
        ("shard-00000.safetensors", "checksum is wrong", REPAIR),
    ),
    "a pickle": (
        lambda d, _: put_pickle(shard(d, 1)),
        ("shard-00001.safetensors", REPAIR),
    ),
    "a pickle with a sidecar": (
        lambda d, _: put_pickle(shard(d, 1), sidecar(d, 1)),
        ("shard-00001.safetensors", REPAIR),
    ),
    "mixing missing": (
        lambda d, _: (d / "mixing.safetensors").unlink(),
        ("mixing.safetensors", REPAIR),
    ),
    "mixing flipped": (
        lambda d, _: flip(d / "mixing.safetensors", -1),
        ("mixing.safetensors", REPAIR),
    ),
    "mixing a pickle": (
        lambda d, _: put_pickle(d / "mixing.safetensors"),
        ("mixing.safetensors", REPAIR),
    ),
    "manifest garbled": (
        lambda d, _: os.truncate(d / "manifest.json", 200),
        ("manifest.json", "not valid JSON", REPAIR),
    ),
    "manifest emptied": (
        lambda d, _: os.truncate(d / "manifest.json", 0),
        ("manifest.json", "not valid JSON", REPAIR),
    ),
    "manifest incomplete": (
        lambda d, _: (d / "manifest.json").write_text('{"schema": 1}'),
        ("manifest.json", "lacks", REPAIR),
    ),
    "manifest with other white space": (
        lambda d, _: edit(d / "manifest.json"),
        ("shard-00000.safetensors", "belongs to another set", REPAIR),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "use", [cqm.Branches.verify, lambda branches: branches.outcomes], ids=["verify", "read"]
)
def test_damage_is_refused_by_name(directory, foreign, damage, use):
    damage_fn, message = DAMAGE[damage]
    damage_fn(directory, foreign)
    with pytest.raises(DamagedFileError) as caught:
        use(cqm.Branches.open(directory))
    name, *parts = message
    assert str(directory / name) in str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert not (directory / "marker").exists()


@pytest.mark.parametrize("damage", DAMAGE)
def test_collecting_again_repairs_damage(pristine, directory, foreign, damage):
    DAMAGE[damage][0](directory, foreign)
    collect(directory).verify()
    assert contents(directory) == contents(pristine)


def test_repair_touches_only_what_is_damaged(directory):
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    flip(shard(directory, 1), -1)
    collect(directory)
    after = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"shard-00001.safetensors", "shard-00001.json"}


def test_damage_between_opening_and_reading_is_noticed(directory):
    branches = cqm.Branches.open(directory)
    flip(shard(directory, 2), -1)
    assert branches[:512].outcomes.shape == (512, 1, 3, 5)  # of the two undamaged shards
    with pytest.raises(DamagedFileError, match=r"shard-00002\.safetensors is damaged"):
        _ = branches[500:600].arms


def test_every_flipped_bit_of_a_small_shard_is_noticed(tmp_path):
    collect(tmp_path / "set", states=2, horizon=1)
    path = shard(tmp_path / "set", 0)
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        flip(path, position, bit=position % 8)
        with pytest.raises(DamagedFileError, match=r"shard-00000\.safetensors"):
            cqm.Branches.open(tmp_path / "set").verify()
        path.write_bytes(content)


@pytest.mark.parametrize("index", [3, 7, 12345])
def test_an_extra_shard_is_refused_until_it_is_removed(pristine, directory, index):
    copy_shard(directory, 1, directory, index)
    name = shard(directory, index).name
    for use in (cqm.Branches.open, collect):
        with pytest.raises(DamagedFileError, match=rf"not list: \['{name}'\]; remove") as caught:
            use(directory)
        assert str(directory) in str(caught.value)
    shard(directory, index).unlink()
    sidecar(directory, index).unlink()
    collect(directory)
    assert contents(directory) == contents(pristine)


@pytest.mark.parametrize(
    "entry",
    [
        *({"num_shards": value} for value in (None, "1", 1.5, [], {}, -1, 0)),
        {"mixing": "mixing.safetensors"},
        {"mixing": {"file": 3, "sha256": ""}},
        {"recipe": []},
        {"world": {"name": 3}},
        {"feature_names": "abc"},
        {"candidate_actions": [1.0]},
    ],
)
def test_nonsense_in_a_manifest_is_refused(directory, entry):
    edit(directory / "manifest.json", **entry)
    with pytest.raises(DamagedFileError, match=r"manifest\.json is not valid: .*collect again"):
        cqm.Branches.open(directory)


def test_a_manifest_of_an_unknown_schema_is_refused(directory):
    edit(directory / "manifest.json", schema=99)
    before = contents(directory)
    for use in (cqm.Branches.open, collect):
        with pytest.raises(
            ValueError, match="has schema 99; this version reads schema 1"
        ) as caught:
            use(directory)
        assert str(directory / "manifest.json") in str(caught.value)
    assert contents(directory) == before


def test_a_missing_manifest_is_named(directory, tmp_path):
    (directory / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"set contains no branches: manifest\.json is"):
        cqm.Branches.open(directory)
    with pytest.raises(FileNotFoundError, match="nowhere contains no branches"):
        cqm.Branches.open(tmp_path / "nowhere")


def test_a_missing_manifest_is_made_again_for_the_same_configuration(pristine, directory):
    (directory / "manifest.json").unlink()
    collect(directory)
    assert contents(directory) == contents(pristine)


@pytest.mark.parametrize("damage", ["missing", "garbled"])
def test_without_a_manifest_shards_of_another_configuration_are_kept(directory, damage):
    (directory / "manifest.json").unlink()
    if damage == "garbled":
        (directory / "manifest.json").write_text("{")
    before = contents(directory)
    with pytest.raises(ValueError, match="another directory") as caught:
        collect(directory, seed=5)
    assert str(directory) in str(caught.value)
    assert contents(directory) == before


def forge_manifest(directory, **changes):
    """A changed manifest, with all shards made to belong to it."""
    manifest = directory / "manifest.json"
    old = storage.sha256(manifest).encode()
    edit(manifest, **changes)
    new = storage.sha256(manifest).encode()
    for index in range(3):
        path = shard(directory, index)
        assert path.read_bytes().count(old) == 1
        path.write_bytes(path.read_bytes().replace(old, new))
        edit(sidecar(directory, index), sha256=storage.sha256(path))


def test_a_forged_manifest_that_fits_its_shards_opens(directory):
    # Which shows that the refusal in the next test is about the file name.
    forge_manifest(directory, versions={"cqm": "0.0.1"})
    cqm.Branches.open(directory).verify()


@pytest.mark.parametrize("file", ["../mixing.safetensors", "/etc/passwd", "sub/x", "..", ""])
def test_a_manifest_cannot_reach_out_of_its_directory(directory, file):
    outside = directory.parent / "mixing.safetensors"
    shutil.copy(directory / "mixing.safetensors", outside)
    forge_manifest(directory, mixing={"file": file, "sha256": storage.sha256(outside)})
    with pytest.raises(DamagedFileError) as caught:
        cqm.Branches.open(directory)
    assert str(directory / "manifest.json") in str(caught.value)
    assert f"got {file!r}" in str(caught.value)
    before = contents(directory)
    with pytest.raises(ValueError, match="a different configuration") as caught:
        collect(directory)
    assert "mixing.file" in str(caught.value)
    assert contents(directory) == before


def test_memory_and_file_shards_read_alike(pristine):
    digest = storage.sha256(pristine / "manifest.json")
    on_disk = shards.open_shard(pristine, 1, digest)
    in_memory = shards.MemoryShard(
        {name: on_disk.read(name, slice(None)) for name in on_disk.names()}, on_disk.dropped
    )
    in_memory.verify()
    assert in_memory.names() == on_disk.names()
    assert in_memory.num_families == on_disk.num_families == 256
    assert on_disk.read("index", slice(3, 6)).tolist() == [259, 260, 261]
    for name in on_disk.names():
        for rows in (slice(0, 256), slice(7, 200), slice(5, 5)):
            np.testing.assert_array_equal(on_disk.read(name, rows), in_memory.read(name, rows))


def test_an_array_that_is_not_stored_is_no_damage(pristine):
    branches = cqm.Branches.open(pristine)
    for kept in (branches, collect(None)):
        with pytest.raises(ValueError, match=r"'uniforms'.*'arms'") as caught:
            kept.array("uniforms")
        assert not isinstance(caught.value, DamagedFileError)


def test_shard_names_sort_in_their_order():
    assert shards.shard_name(3) == "shard-00003.safetensors"
    assert shards.shard_name(12345) == "shard-12345.safetensors"
    assert shards.shard_name("*") == "shard-*.safetensors"
