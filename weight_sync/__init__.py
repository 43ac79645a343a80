"""The checkpoint engine: versions of the weights from the trainer's ranks to the engines' hosts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
