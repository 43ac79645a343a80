"""The trainer's ranks: a leased batch becomes an optimizer step and a new version."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
