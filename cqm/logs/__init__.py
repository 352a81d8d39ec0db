"""Logs: trajectories with one action each, where they come from, and what they can tell."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
