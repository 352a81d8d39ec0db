"""Load a world by its name, or from the identity stored with its data."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from cqm.arguments import instance, mapping, shown, whole_number
from cqm.worlds.contract import World
from cqm.worlds.features import ExpandedWorld, FeatureMap, load_maps
from cqm.worlds.identity import stored_identity
from cqm.worlds.nuisance import Nuisance, NuisanceWorld
from cqm.worlds.simulators import sim_extra


def load_world(
    name: str,
    *,
    nuisance: int | Nuisance = 0,
    seed: int = 0,
    candidate_actions: npt.ArrayLike | None = None,
    action_names: Sequence[str] | None = None,
    features: FeatureMap | Iterable[FeatureMap] = (),
) -> World:
    """Load a world by name: a dm_control suite task or a Gymnasium environment.

    Args:
        name: `domain-task` as in `reacher-easy`, or a registered Gymnasium id as in `CartPole-v1`.
        nuisance: Dimension of the paper's nuisance to mix in (0 for none), or a `Nuisance`.
        seed: Random seed for the mixing. The candidate actions do not depend on it.
        candidate_actions: `[actions, controls]`; the world's own by default.
        action_names: One name per candidate action; by default their indices.
        features: One or more maps from `cqm.worlds.features` that add features, such as
            `Squares()`.

    >>> load_world("reacher-easy", nuisance=64, seed=7).feature_names[:2]
    ('mixed_0', 'mixed_1')
    """
    instance("name", name, str, "the name of a world, such as 'cartpole-swingup'")
    whole_number("seed", seed, least=0)
    if not isinstance(nuisance, Nuisance):
        dimension = whole_number("nuisance", nuisance, least=0)
        nuisance = Nuisance(dimension=dimension, seed=seed) if dimension else 0
    maps: tuple[Any, ...] = (features,) if isinstance(features, FeatureMap) else ()
    if not maps:
        given = features if isinstance(features, list | tuple) else (features,)
        allowed = "Squares(), Products(), RandomFourier() or UserFeatures(...), or several of them"
        maps = tuple(instance("features", each, FeatureMap, allowed) for each in given)
    world = _load(name, candidate_actions, action_names)
    if maps:
        world = ExpandedWorld(world, *maps)
    return NuisanceWorld(world, nuisance) if isinstance(nuisance, Nuisance) else world


def reload_world(identity: Mapping[str, Any]) -> World:
    """Load the world that a stored identity describes, if it can be loaded by its name."""
    mapping("identity", identity, "a world's name, kind and parameters, as stored with its data")
    missing = sorted({"name", "kind"} - set(identity))
    if missing:
        raise ValueError(f"the identity of a world needs {missing}; got {shown(identity)}")
    name, nuisance = identity["name"], identity.get("nuisance")
    by_name = identity["kind"] in ("suite", "suite task")
    if not by_name and not (identity["kind"] == "gymnasium" and _is_registered(name)):
        raise ValueError(
            f"the world {name!r} cannot be loaded by its name; pass the world itself, "
            "as in audit(branches, world=...)"
        )
    world = load_world(
        name,
        nuisance=Nuisance(**nuisance) if nuisance else 0,
        candidate_actions=identity["candidate_actions"],
        features=load_maps(identity.get("feature_maps", ())),
    )
    loaded = stored_identity(world)
    if loaded != identity:
        raise ValueError(
            f"the world {name!r} has changed since it was stored: stored as {identity}, "
            f"loaded as {loaded}"
        )
    return world


def _load(
    name: str, candidate_actions: npt.ArrayLike | None, action_names: Sequence[str] | None
) -> World:
    from cqm.worlds import suite

    # Importing dm_control takes seconds. A Gymnasium id, which ends in a version, does not need it.
    if not re.search(r"-v\d+$", name) and name in suite.task_names():
        return suite.load_task(name, candidate_actions=candidate_actions, action_names=action_names)
    if not _is_registered(name):
        import gymnasium

        tasks = suite.task_names()
        known = f"available: Gymnasium ids such as 'CartPole-v1' and the suite tasks {tasks}"
        if close := difflib.get_close_matches(name, [*tasks, *gymnasium.registry]):
            known = f"did you mean {' or '.join(map(repr, close))}? cqm worlds list shows all tasks"
        raise ValueError(f"unknown world {name!r}; {known}")
    from cqm.worlds.gym import GymWorld

    return GymWorld(name, candidate_actions=candidate_actions, action_names=action_names)


def _is_registered(name: str) -> bool:
    """Whether a name is a Gymnasium id."""
    with sim_extra():
        import gymnasium
    return name in gymnasium.registry
