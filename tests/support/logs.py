"""Arrays from which tests make logs."""

import numpy as np


def arrays(num=300, horizon=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "observations": rng.normal(size=(num, 2)),
        "actions": rng.integers(2, size=(num, horizon)),
        "features": rng.normal(size=(num, horizon, 2)),
    }
