"""Counterfactual Quotient Models: learn what actions change, not what the world does.

The public names are listed in `__init__.pyi`, which type checkers, editors and the loader below all
read. A name is imported when it is first used, because the simulators and the compiler behind some
of them take seconds to import.
"""

import lazy_loader

__version__ = "0.2.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):  # its type is in __init__.pyi
    if name not in __all__:
        raise AttributeError(f"module 'cqm' has no attribute {name!r}; available: {__all__}")
    return _load(name)
