"""Models of effects: how they are fitted, and what they are made of."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
