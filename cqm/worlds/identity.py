"""The identity of a world, in the form in which it is stored with the data."""

from __future__ import annotations

import json
from typing import Any

from cqm.worlds.contract import World


def stored_identity(world: World) -> dict[str, Any]:
    """A world's identity after a round trip through JSON, which turns tuples into lists."""
    identity = world.identity()
    missing = [key for key in ("name", "kind") if key not in identity]
    if missing:
        raise ValueError(f"a world's identity must contain {missing}; got {identity}")
    try:
        return json.loads(json.dumps(identity, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a world's identity must be JSON-able: {error}") from error
