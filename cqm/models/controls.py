"""Controls as networks see them: indicators of discrete actions, or scaled control vectors.

The code of an action has unit mean square over the menu or, if controls were drawn from the whole
box, over the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cqm.arguments import real_numbers, shown
from cqm.branches.dataset import Branches
from cqm.branches.recipe import Continuation

RULE = 64  # points of the rule that averages over the box


def menu_codes(branches: Branches) -> np.ndarray:
    """Codes of the candidate actions, `[actions, codes]`."""
    if branches.box is not None:
        return box_codes(branches.candidate_actions, branches.box)
    return _unscaled(branches.candidate_actions, branches.world)


def _unscaled(actions: np.ndarray, world: Mapping[str, Any]) -> np.ndarray:
    """Indicators of discrete actions; the others scaled to the range of the menu."""
    listed = np.array_equal(actions, actions[0] + np.arange(len(actions))[:, None])
    if not world.get("continuous", not (world["kind"] == "gymnasium" and listed)):
        return np.eye(len(actions))
    low, high = actions.min(axis=0), actions.max(axis=0)
    scaled = (2 * actions - low - high) / np.where(high > low, high - low, 1.0)
    return scaled / max(np.sqrt(np.mean(np.sum(scaled**2, axis=1))), 1e-300)


def first_codes(branches: Branches) -> np.ndarray:
    """Codes of the first actions, `[n, arms, codes]`."""
    if branches.has_menu:
        return menu_codes(branches)[branches.arms]
    assert branches.box is not None
    return box_codes(branches.first_controls, branches.box)


def later_codes(branches: Branches) -> np.ndarray:
    """Codes of the later actions, `[n, draws, arms or 1, horizon − 1, codes]`."""
    if branches.recipe.continuation.on_box:
        assert branches.box is not None
        return box_codes(branches.later_controls, branches.box)
    return menu_codes(branches)[branches.continuation]


def draw_later(
    law: Continuation, shape: tuple[int, ...], menu: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw later actions: indices `[*shape]`, or codes `[*shape, codes]` of controls from the box.

    Under a policy, uniform random numbers `[*shape]` from which it will choose.

    Args:
        law: The law of the later actions.
        shape: How many to draw.
        menu: Codes of the candidate actions, `[actions, codes]`.
        rng: Draws them.
    """
    if law.on_box:
        return codes_in_box(rng.random((*shape, menu.shape[1])))
    uniforms = rng.random(shape)
    return law.draw(uniforms, len(menu)) if law.open_loop else uniforms


def box_codes(controls: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Codes of controls `[..., controls]` in a box `[2, controls]`.

    >>> box_codes(np.array([[0.0], [10.0]]), np.array([[0.0], [10.0]])).round(2).tolist()
    [[-1.73], [1.73]]
    """
    low, high = box
    return codes_in_box((controls - low) / (high - low))


def box_controls(codes: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Controls whose codes these are; the inverse of `box_codes`, kept within the bounds."""
    low, high = box
    shares = (codes / np.sqrt(3 / codes.shape[-1]) + 1) / 2
    return np.clip(low + (high - low) * shares, low, high)


def codes_in_box(shares: np.ndarray) -> np.ndarray:
    """Codes of points of the unit cube, `[..., controls]`."""
    return (2 * shares - 1) * np.sqrt(3 / shares.shape[-1])


def centered_monomials(codes: np.ndarray) -> np.ndarray:
    """Controls, their squares and products, minus their means over the box, `[..., monomials]`.

    >>> centered_monomials(np.array([[1.0], [-1.0]])).tolist()
    [[1.0, 0.0], [-1.0, 0.0]]
    """
    size = codes.shape[-1]
    first, second = np.triu_indices(size)
    return np.concatenate(
        [codes, codes[..., first] * codes[..., second] - (first == second) / size], axis=-1
    )


def box_rule(num_controls: int, *, seed: int = 0, num: int = RULE) -> np.ndarray:
    """Codes of evenly spread points that stand for the whole box, `[points, controls]`."""
    from scipy.stats import qmc  # slow to import, and rarely needed

    sequence = qmc.Sobol(num_controls, rng=np.random.default_rng(seed))
    return codes_in_box(sequence.random_base2(int(np.ceil(np.log2(num))))[:num])


def checked_controls(given: Any, box: np.ndarray, num_states: int) -> np.ndarray:
    """Controls `[actions, controls]`, or one set per state, within a box."""
    controls = real_numbers("actions", given)
    low, high = box
    shaped = controls.ndim in (2, 3) and controls.shape[-1] == len(low) and controls.shape[-2] > 0
    if not shaped or (controls.ndim == 3 and len(controls) != num_states):
        raise ValueError(
            f"actions must be controls [actions, {len(low)}], or one set per state "
            f"[{num_states}, actions, {len(low)}]; got shape {list(controls.shape)}"
        )
    outside = ~((controls >= low) & (controls <= high)).all(axis=-1)  # also if not finite
    if outside.any():
        raise ValueError(
            f"actions must be from {low.tolist()} to {high.tolist()}; got "
            f"{shown(controls[outside][0].tolist())}"
        )
    return controls
