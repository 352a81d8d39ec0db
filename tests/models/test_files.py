"""Saved models: every change is noticed, and nonsense is named, whatever it is."""

import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.worlds import pushed_world

import cqm
from cqm import storage
from cqm.models.files import CONFIG, MODEL
from cqm.models.predictors import StackedPredictor
from cqm.storage import DamagedFileError

RECIPE = {"horizon": 2, "warmup": (0, 0), "per_step": True, "seed": 1}
OLD = Path(__file__).parents[1] / "data" / "v0.1" / "models"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directories of saved models of several kinds."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("residual-tabular", "residual", "effect-direct", "effect-unrolled"):
        cqm.load_model(OLD / name).save(directory / name)
    small = {"width": 4, "updates": 1, "draws": 2, "validation": 0.0}
    branches = cqm.collect(pushed_world(push), states=60, **RECIPE)
    ridge = cqm.EffectModel(candidates="ridge").fit(branches)
    ridge.save(directory / "effect-ridge")
    latent = pushed_world(
        push,
        features=lambda state, action, noise, after: np.cos(after[:, :1]),
        feature_names=("cosine",),
    )
    model = cqm.EffectModel(candidates="unrolled", **small)
    model.fit(cqm.collect(latent, states=20, **RECIPE)).save(directory / "effect-latent")
    constant = cqm.EffectModel(candidates="constant").fit(branches)
    parts = constant.predictor_, ridge.predictor_
    ridge.predictor_ = StackedPredictor(parts, np.array([0.25, 0.75]))
    ridge.save(directory / "effect-stack")
    return directory


def push(state, action, noise):
    return action * state[:, 0] * state[:, 1]


@pytest.mark.parametrize("kind", ["ridge", "latent", "stack"])
def test_models_are_read_as_long_as_nothing_is_changed(saved, tmp_path, kind):
    directory = shutil.copytree(saved / f"effect-{kind}", tmp_path / "model")
    reseal(directory)
    assert np.isfinite(cqm.load_model(directory).effect(np.zeros((1, 2)))).all()


@pytest.fixture
def tabular(saved, tmp_path):
    return shutil.copytree(saved / "residual-tabular", tmp_path / "model")


def reseal(directory, change=lambda config: None, change_arrays=lambda arrays: None):
    """Edit a saved model and make its checksums right again, as a forger would."""
    config = storage.read_json(directory / CONFIG)
    arrays, metadata = storage.read_arrays(directory / MODEL)
    del config["seal"], config["sha256"]
    change(config)
    change_arrays(arrays)
    storage.write_described(directory / CONFIG, config, directory / MODEL, arrays, metadata)


def state(model):
    return (
        model.get_params(),
        model.world_,
        model.recipe_,
        model.feature_names,
        model.observation_names,
        model.candidate_actions_.tolist(),
        model.action_names_,
        model.num_examples_,
        model.versions_,
    )


@pytest.mark.parametrize("name", [CONFIG, MODEL])
def test_no_flipped_bit_goes_unnoticed(tabular, name, monkeypatch):
    monkeypatch.setattr(cqm.ResidualModel, "_restored", lambda config, arrays: config)
    path, unchanged = tabular / name, cqm.load_model(tabular)
    content, problems = path.read_bytes(), []
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(damaged)
        try:
            assert cqm.load_model(tabular) == unchanged
        except DamagedFileError as error:
            problems.append(str(error))
    assert len(problems) > 0.98 * len(content)  # a letter of an escape may change its case
    assert all(str(tabular) in text and "save the model again" in text for text in problems)


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", [CONFIG, MODEL])
def test_truncated_files_are_refused(tabular, name, share):
    content = (tabular / name).read_bytes()
    (tabular / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(DamagedFileError, match="save the model again"):
        cqm.load_model(tabular)


def test_the_files_of_two_models_do_not_fit(saved, tabular):
    shutil.copy(saved / "residual" / MODEL, tabular / MODEL)
    with pytest.raises(DamagedFileError, match="belongs to another model"):
        cqm.load_model(tabular)


def test_a_missing_half_is_named(tabular):
    (tabular / MODEL).unlink()
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is missing; save the model"):
        cqm.load_model(tabular)


@pytest.mark.parametrize("name", [CONFIG, MODEL])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_waiting(tabular, name, make):
    (tabular / name).unlink()
    make(tabular / name)
    with pytest.raises(DamagedFileError, match="must be a file; got a directory, pipe or device"):
        cqm.load_model(tabular)


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(config):
        for key in path:
            config = config[key]
        config[last] = value

    return change


def drop(*path):
    def change(config):
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


NONSENSE = [
    *(put(key, value) for key in ("settings", "world", "recipe") for value in (None, [], {}, 3)),
    *(
        drop(key)
        for key in ("kind", "settings", "method", "world", "recipe", "feature_names", "versions")
    ),
    put("schema", "3"),
    put("schema", True),
    put("schema", None),
    put("kind", "magic"),
    put("kind", 7),
    put("more", 1),
    put("feature_names", ["one"]),
    put("feature_names", [1, 2]),
    put("feature_names", "ab"),
    put("observation_names", []),
    put("candidate_actions", [[0.0], [1.0]]),
    put("candidate_actions", [[0.0], [1.0, 2.0], [3.0]]),
    put("candidate_actions", [0.0, 1.0, 2.0]),
    put("action_names", ["a", "a", "b"]),
    put("action_names", ["a"]),
    put("action_names", None),
    put("num_examples", "many"),
    put("versions", ["0.2"]),
    put("notes", "text"),
    put("training", {"steps": {"updates": 8}}),
    put("settings", "magic", 1),
    put("settings", "members", "one"),
    put("settings", "members", True),
    put("settings", "reference", [0.5, 0.5]),
    put("settings", "reference", ["a", "b", "c"]),
    put("settings", "method", "magic"),
    put("settings", "method", None),
    put("settings", "training", {"updates": -1}),
    put("settings", "training", {"updates": "8"}),
    put("settings", "training", [1]),
    put("settings", "folds", 0),
    put("world", "name", 3),
    put("recipe", "horizon", 0),
    put("recipe", "horizon", 1.5),
    put("recipe", "discount", 1.5),
    put("recipe", "discount", "0.9"),
    put("recipe", "continuation", [0.5, 0.5]),
    put("recipe", "continuation", ["a", "b", "c"]),
    put("recipe", "warmup", [1]),
    put("recipe", "more", 1),
    drop("recipe", "horizon"),
    drop("settings", "members"),
]


@pytest.mark.parametrize("change", NONSENSE)
def test_nonsense_with_the_right_checksum_is_refused(tabular, change):
    reseal(tabular, change)
    with pytest.raises(DamagedFileError, match=r"model\.(json|safetensors)"):
        cqm.load_model(tabular)


def array(name, change):
    def change_arrays(arrays):
        arrays[name] = change(arrays[name])

    return name, change_arrays


def without(name):
    return name, lambda arrays: arrays.pop(name)


def nan(values):
    values = values.copy()
    values.flat[0] = np.nan
    return values


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("residual-tabular", without("table.effects")),
        ("residual-tabular", array("table.effects", lambda a: a[:, :2])),
        ("residual-tabular", array("table.effects", lambda a: a[1:])),
        ("residual-tabular", array("table.effects", lambda a: a.astype(int))),
        ("residual-tabular", array("table.rows", lambda a: a[:, :0])),
        ("residual-tabular", array("table.rows", nan)),
        ("residual", without("inputs.shift")),
        ("residual", without("basis")),
        ("residual", array("waves.weights", lambda a: a[..., :-1, :])),
        ("residual", array("waves.weights", lambda a: np.concatenate([a, a]))),
        ("residual", array("waves.phases", lambda a: a[0])),
        ("residual", array("basis", lambda a: a[:-1])),
        ("effect-direct", without("network.encoder.1.bias")),
        ("effect-direct", without("network.embedding")),
        ("effect-direct", array("network.head.0.weight", lambda a: a[:, 1:])),
        ("effect-direct", array("network.decoder.weight", nan)),
        ("effect-direct", array("network.embedding", lambda a: a[:, :2])),
        ("effect-unrolled", array("continuations", lambda a: a + 7)),
        ("effect-unrolled", array("continuations", lambda a: a[:, :1])),
        ("effect-unrolled", array("discounts", lambda a: a[:-1])),
        ("effect-unrolled", array("sizes", lambda a: a[:-1])),
        ("effect-unrolled", array("sizes", lambda a: -a)),
        ("effect-unrolled", array("sizes", lambda a: a + 1)),
        ("effect-unrolled", array("sizes", lambda a: np.add(a, (0, 7)))),
        ("effect-unrolled", array("sizes", lambda a: np.add(a, (10**9, 0)))),
        ("effect-latent", array("sizes", lambda a: np.add(a, (10**9, 0)))),
        ("effect-latent", array("sizes", lambda a: 0 * a)),
        ("effect-latent", array("sizes", lambda a: np.add(a, (-1, 0)))),
        ("effect-latent", array("sizes", lambda a: np.add(a, (0, 1)))),
        ("effect-ridge", array("waves.weights", lambda a: np.concatenate([a, a[:, :, :2]], 2))),
        ("effect-ridge", array("waves.weights", lambda a: a[:, :, :-1])),
        ("effect-stack", array("stack.weights", lambda a: a[:0])),
        ("effect-stack", array("stack.weights", lambda a: a[:1])),
        ("effect-stack", array("stack.weights", lambda a: 3 * a)),
        ("effect-stack", array("stack.weights", lambda a: np.array([-0.5, 1.5]))),
        ("effect-stack", array("stack.weights", lambda a: np.array([0.0, 1.0]))),
        ("effect-stack", array("stack.weights", nan)),
        ("effect-stack", array("part.1.waves.weights", lambda a: a[:, :, :-1])),
        ("effect-stack", without("part.1.basis")),
        ("effect-unrolled", without("network.last.weight")),
        ("effect-unrolled", without("sizes")),
        ("effect-unrolled", array("controls", lambda a: a[:-1])),
    ],
)
def test_arrays_that_do_not_fit_are_named(saved, tmp_path, model, change):
    directory = shutil.copytree(saved / model, tmp_path / "model")
    name, change_arrays = change
    reseal(directory, change_arrays=change_arrays)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors does not fit model\.json") as e:
        cqm.load_model(directory)
    assert name.removeprefix("part.1.").partition(".")[0] in str(e.value)


@pytest.mark.parametrize(("model", "prefix"), [("effect-ridge", ""), ("effect-stack", "part.1.")])
def test_a_regression_of_an_effect_model_has_one_member(saved, tmp_path, model, prefix):
    directory = shutil.copytree(saved / model, tmp_path / "model")

    def double(arrays):
        for name in ("frequencies", "phases", "weights"):
            values = arrays[f"{prefix}waves.{name}"]
            arrays[f"{prefix}waves.{name}"] = np.concatenate([values, values])

    reseal(directory, change_arrays=double)
    with pytest.raises(
        DamagedFileError, match=r"'waves\.frequencies' must be \[1, inputs, waves\]"
    ):
        cqm.load_model(directory)


def test_a_behaviour_with_a_latent_state_is_refused(saved, tmp_path):
    directory = shutil.copytree(saved / "effect-latent", tmp_path / "model")

    def add_behaviour(arrays):
        sizes = (arrays["inputs.matrix"].shape[1], 4, 4, 3)
        for i in range(3):
            arrays[f"behaviour.layers.{i}.weight"] = np.zeros(sizes[i : i + 2], np.float32)
            arrays[f"behaviour.layers.{i}.bias"] = np.zeros(sizes[i + 1], np.float32)
        arrays["continuations"] = np.zeros(arrays["continuations"].shape)

    reseal(directory, change_arrays=add_behaviour)
    with pytest.raises(DamagedFileError, match="a latent state cannot have a behaviour"):
        cqm.load_model(directory)


def test_a_calibration_must_fit_its_model(saved, tmp_path):
    directory = shutil.copytree(saved / "residual", tmp_path / "model")
    config = storage.read_json(directory / CONFIG)
    shape = (5, len(config["candidate_actions"]), len(config["feature_names"]))
    right = {
        "calibration.residuals": np.ones(shape),
        "calibration.draws": np.array([16]),
        "calibration.noise": np.ones(shape[2]),
        "calibration.size": np.ones(shape[2]),
    }
    reseal(directory, change_arrays=lambda arrays: arrays.update(right))
    assert cqm.load_model(directory).calibration_.draws == 16
    for name, wrong in (
        ("residuals", np.ones((5, shape[1]))),
        ("residuals", np.ones((5, shape[1], shape[2] + 1))),
        ("noise", np.full(shape[2], np.inf)),
        ("draws", np.array([1])),
        ("draws", np.array([16.0])),
        ("draws", np.empty(0, int)),
    ):
        reseal(
            directory,
            change_arrays=lambda a, n=name, w=wrong: (
                a.update(right) or a.update({f"calibration.{n}": w})
            ),
        )
        with pytest.raises(DamagedFileError, match=f"'calibration.{name}'"):
            cqm.load_model(directory)
    reseal(directory, change_arrays=lambda a: a.update(right) or a.pop("calibration.size"))
    with pytest.raises(DamagedFileError, match=r"missing \['calibration.size'\]"):
        cqm.load_model(directory)


def test_the_states_and_groups_of_a_calibration_must_fit_too(tmp_path):
    world = pushed_world(push)
    model = cqm.EffectModel(candidates="ridge").fit(cqm.collect(world, states=60, **RECIPE))
    held_out = cqm.collect(world, states=40, draws=16, **{**RECIPE, "seed": 2})
    groups = np.arange(40) % 2
    directory = tmp_path / "model"
    model.calibrate(held_out, groups=groups).save(directory)
    right = dict(storage.read_arrays(directory / MODEL)[0])
    for name, wrong, message in (
        ("predicted", right["calibration.predicted"][:-1], "calibration.predicted"),
        ("inputs", right["calibration.inputs"][:-1], "calibration.inputs"),
        ("inputs", np.full_like(right["calibration.inputs"], np.nan), "calibration.inputs"),
        ("matrix", right["calibration.matrix"][:-1], "calibration.matrix"),
        ("groups", groups - 1, "calibration.groups"),
        ("groups", groups + 1, "numbers below 2, each used"),
        ("groups", groups * 1.0, "calibration.groups"),
    ):
        reseal(
            directory,
            change_arrays=lambda a, n=name, w=wrong: a.update(right | {f"calibration.{n}": w}),
        )
        with pytest.raises(DamagedFileError, match=message):
            cqm.load_model(directory)
    reseal(directory, change_arrays=lambda a: a.update(right) or a.pop("calibration.shift"))
    with pytest.raises(DamagedFileError, match=r"missing \['calibration.shift'\]"):
        cqm.load_model(directory)
    reseal(directory, change_arrays=lambda a: a.update(right))
    assert cqm.load_model(directory).calibration_.group_names == ["0", "1"]


def test_a_calibration_of_an_earlier_version_has_one_radius_for_all_states(tmp_path):
    world = pushed_world(push)
    model = cqm.EffectModel(candidates="ridge").fit(cqm.collect(world, states=60, **RECIPE))
    held_out = cqm.collect(world, states=90, draws=16, **{**RECIPE, "seed": 2})
    model.calibrate(held_out).save(tmp_path)

    def as_before(arrays):
        for name in ("predicted", "inputs", "shift", "matrix"):
            del arrays[f"calibration.{name}"]

    def lower(config):
        del config["calibration_groups"]
        config["schema"] = 4

    reseal(tmp_path, lower, as_before)
    loaded, weights = cqm.load_model(tmp_path), np.ones(len(model.feature_names))
    verdict = loaded.certify(held_out.observations, weights)
    np.testing.assert_allclose(verdict.radius, loaded.calibration_.radius(weights, 0.95))
    np.testing.assert_array_equal(verdict.separable, verdict.regret_bound == 0)
    assert not verdict.unlike.any()


def test_a_process_that_dies_while_saving_leaves_the_old_model_or_the_new(
    saved, tmp_path, monkeypatch
):
    """The directory is copied before and after every renaming, and each copy is loaded."""
    old, new = (cqm.load_model(saved / name) for name in ("residual", "residual-tabular"))
    directory, copies, replace = tmp_path / "model", [], os.replace
    old.save(directory)

    def watched(source, target):
        copies.append(shutil.copytree(directory, tmp_path / str(len(copies))))
        replace(source, target)
        copies.append(shutil.copytree(directory, tmp_path / str(len(copies))))

    monkeypatch.setattr(os, "replace", watched)
    new.save(directory)
    monkeypatch.undo()
    found = [state(cqm.load_model(path)) for path in copies]
    assert found == [state(old)] * found.count(state(old)) + [state(new)] * found.count(state(new))
    assert state(old) in found
    assert state(new) in found
    assert len(copies) == 8  # description, arrays, description again, card
    for path in copies:
        new.save(path)  # the command is run again
        assert state(cqm.load_model(path)) == state(new)
        assert sorted(os.listdir(path)) == sorted(os.listdir(directory))
        assert len(os.listdir(path)) == 3


def test_a_process_that_dies_while_saving_a_first_time_leaves_a_model_or_none(
    saved, tmp_path, monkeypatch
):
    model, directory, replace = (
        cqm.load_model(saved / "residual-tabular"),
        tmp_path / "m",
        os.replace,
    )
    copies = []

    def watched(source, target):
        copies.append(shutil.copytree(directory, tmp_path / str(len(copies))))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    model.save(directory)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match=r"lacks model\.json; see model\.save"):
        cqm.load_model(copies[0])
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is missing"):
        cqm.load_model(copies[1])
    for path in copies[2:]:
        assert state(cqm.load_model(path)) == state(model)


def test_models_without_a_seal_are_read_if_their_schema_had_none(tabular):
    config = storage.read_json(tabular / CONFIG)
    del config["seal"]
    storage.write_json(tabular / CONFIG, config)
    with pytest.raises(DamagedFileError, match="was changed"):
        cqm.load_model(tabular)
    storage.write_json(tabular / CONFIG, {**config, "schema": 2})  # as version 0.2 wrote it
    assert cqm.load_model(tabular).num_examples_ == 600
    storage.write_json(tabular / CONFIG, {**config, "schema": 2, "method": 3})
    with pytest.raises(DamagedFileError, match=r"Expected `str`, got `int` - at `\$.method`"):
        cqm.load_model(tabular)


def zipped(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return path


def test_archives_that_are_no_model_are_refused(tabular, tmp_path):
    contents = {name: (tabular / name).read_bytes() for name in (CONFIG, MODEL)}
    path = tmp_path / "model.zip"
    deep = [(f"a/b/{name}", content) for name, content in contents.items()]
    assert cqm.load_model(zipped(path, deep)).num_examples_ == 600
    twice = [*deep, ("c/model.json", contents[CONFIG])]
    with pytest.raises(DamagedFileError, match=r"must hold one model\.json; got 2"):
        cqm.load_model(zipped(path, twice))
    with pytest.raises(DamagedFileError, match=r"must hold one model\.json; got 0"):
        cqm.load_model(zipped(path, [("model.json/", b""), (MODEL, contents[MODEL])]))
    damaged = [(CONFIG, contents[CONFIG].replace(b"0.9", b"0.8")), (MODEL, contents[MODEL])]
    with pytest.raises(DamagedFileError, match=rf"{path}/model.json was changed"):
        cqm.load_model(zipped(path, damaged))
    link = zipfile.ZipInfo(CONFIG)
    link.external_attr = 0o120777 << 16  # a symbolic link; its content is the name of its target
    with pytest.raises(DamagedFileError, match=r"model\.json is not valid JSON"):
        cqm.load_model(zipped(path, [(link, "/etc/passwd"), (MODEL, contents[MODEL])]))
    with pytest.raises(
        DamagedFileError, match=r"would have 268,435,456 bytes, more than 100 times"
    ):
        cqm.load_model(zipped(path, [(CONFIG, bytes(2**28)), (MODEL, b"")]))
    with pytest.raises(FileNotFoundError, match=r"the model archive .*none\.zip does not exist"):
        cqm.load_model(tmp_path / "none.zip")
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(DamagedFileError, match="must be a file; got a directory, pipe or device"):
        cqm.load_model(tmp_path / "pipe.zip")


def test_encrypted_archives_are_refused(tabular, tmp_path):
    path = zipped(
        tmp_path / "model.zip", [(n, (tabular / n).read_bytes()) for n in (CONFIG, MODEL)]
    )
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # local and central headers
        start = content.find(signature)
        while start >= 0:
            content[start + offset] |= 1
            start = content.find(signature, start + 1)
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="without a password"):
        cqm.load_model(path)


def test_damaged_archives_are_refused(tabular, tmp_path):
    path = zipped(
        tmp_path / "model.zip", [(n, (tabular / n).read_bytes()) for n in (CONFIG, MODEL)]
    )
    content, rng = path.read_bytes(), np.random.default_rng(0)
    expected = state(cqm.load_model(path))
    problems = []
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged[: rng.integers(len(content))] if rng.random() < 0.1 else damaged)
        try:
            assert state(cqm.load_model(path)) == expected  # a date or an attribute
        except DamagedFileError as error:
            problems.append(str(error))
    assert len(problems) > 200
    assert all(str(path) in text for text in problems)
