"""The engines and the workers that fill the buffer, and what a task of your own is made from."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
