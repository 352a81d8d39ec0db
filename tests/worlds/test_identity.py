import json

import pytest
from support.worlds import ToyWorld

import cqm
from cqm.worlds.identity import stored_identity
from cqm.worlds.loading import load_world


class Named(ToyWorld):
    def __init__(self, identity):
        self._identity = identity

    def identity(self):
        return self._identity


def test_a_stored_identity_is_what_json_keeps():
    world = Named({"name": "toy", "kind": "test", "names": ("x", "u")})
    assert stored_identity(world) == {"name": "toy", "kind": "test", "names": ["x", "u"]}


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"kind": "test"}, r"identity must contain \['name'\]; got {'kind': 'test'}"),
        ({}, r"identity must contain \['name', 'kind'\]; got {}"),
        ({"name": "toy", "kind": "test", "gain": float("nan")}, "must be JSON-able: Out of range"),
        ({"name": "toy", "kind": "test", "model": object()}, "must be JSON-able: Object of type"),
    ],
)
def test_an_identity_that_cannot_be_stored_is_refused(identity, message):
    with pytest.raises(ValueError, match=message):
        stored_identity(Named(identity))


def test_an_identity_with_a_tuple_is_the_same_when_it_is_read_back(tmp_path):
    for _ in range(2):
        branches = cqm.collect(ToyWorld(), states=8, horizon=3, threads=1, out=tmp_path)
    report = cqm.audit(branches, ToyWorld())
    assert report, str(report)


@pytest.mark.parametrize("name", ["cartpole-swingup", "finger-spin", "CartPole-v1"])
def test_identity_names_the_world_and_its_versions(name):
    identity = json.loads(json.dumps(load_world(name, nuisance=2, seed=3).identity()))
    assert identity["name"] == name
    assert identity["nuisance"]["seed"] == 3
    assert identity["versions"]
