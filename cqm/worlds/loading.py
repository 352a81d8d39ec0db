"""Worlds by name, and worlds from the identity stored with their data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cqm.worlds.contract import World
from cqm.worlds.identity import stored_identity


def load_world(
    name: str,
    *,
    nuisance: int | Any = 0,
    seed: int = 0,
    candidate_actions: Any = None,
    features: Any = (),
) -> World:
    """A world by its name: a dm_control suite task or a Gymnasium environment.

    Args:
        name: `domain-task` as in `reacher-easy`, or a registered Gymnasium id as in `CartPole-v1`.
        nuisance: The dimension of the paper's nuisance to mix in, 0 for none, or a `Nuisance`.
        seed: Of the mixing. Candidate actions are fixed for each world whatever the seed.
        candidate_actions: `[actions, controls]`; the world's own by default.
        features: One or several maps from `cqm.worlds.features` that add features, such as
            `Squares()`.

    >>> load_world("reacher-easy", nuisance=64, seed=7).feature_names[:2]
    ('mixed_0', 'mixed_1')
    """
    from cqm.worlds import suite
    from cqm.worlds.nuisance import Nuisance, NuisanceWorld

    if name in suite.task_names():
        world = suite.load_task(name, candidate_actions=candidate_actions)
    else:
        import gymnasium

        from cqm.worlds.gym import GymWorld

        if name not in gymnasium.registry:
            raise ValueError(
                f"unknown world {name!r}; available: Gymnasium ids such as 'CartPole-v1' and the "
                f"suite tasks {suite.task_names()}"
            )
        world = GymWorld(name, candidate_actions=candidate_actions)
    maps = tuple(features) if isinstance(features, Iterable) else (features,)
    if maps:
        from cqm.worlds.features import ExpandedWorld

        world = ExpandedWorld(world, *maps)
    if not nuisance:
        return world
    if not isinstance(nuisance, Nuisance):
        nuisance = Nuisance(dimension=nuisance, seed=seed)
    return NuisanceWorld(world, nuisance)


def reload_world(identity: Mapping[str, Any]) -> World:
    """The world of a stored identity, for worlds that have a name to load them by."""
    from cqm.worlds.features import load_maps
    from cqm.worlds.nuisance import Nuisance

    loadable = identity["kind"] in ("suite", "suite task")
    if identity["kind"] == "gymnasium":
        import gymnasium

        loadable = identity["name"] in gymnasium.registry
    if not loadable:
        raise ValueError(
            f"the world {identity['name']!r} is not known by its name alone, so it cannot be "
            "loaded; functions take the world itself, as in audit(branches, world=...)"
        )
    nuisance = identity.get("nuisance")
    world = load_world(
        identity["name"],
        nuisance=Nuisance(**nuisance) if nuisance else 0,
        candidate_actions=identity["candidate_actions"],
        features=load_maps(identity.get("feature_maps", ())),
    )
    loaded = stored_identity(world)
    if loaded != identity:
        raise ValueError(
            f"the world {identity['name']!r} is not what it was: stored as {identity}, "
            f"loads as {loaded}"
        )
    return world
