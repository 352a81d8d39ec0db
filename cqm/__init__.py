"""Counterfactual Quotient Models: learn what actions change, not what the world does.

The public names are listed in `__init__.pyi`, for type checkers, for editors and for the loader
below, which imports each on first use: the simulators and the compiler behind some of them take
seconds to import.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
