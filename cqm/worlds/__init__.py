"""Worlds: simulators behind one contract, so that their states can be branched."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
