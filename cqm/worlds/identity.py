"""A world's identity as it is stored with its data."""

from __future__ import annotations

import json
from typing import Any

from cqm.worlds.contract import World


def stored_identity(world: World) -> dict[str, Any]:
    """A world's identity as it is read back from a file, where a tuple is a list."""
    identity = world.identity()
    missing = [key for key in ("name", "kind") if key not in identity]
    if missing:
        raise ValueError(f"the identity of a world needs {missing}; got {identity}")
    try:
        return json.loads(json.dumps(identity, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the identity of a world must be JSON-able: {error}") from error
