"""The replay buffer in Redis: groups of trajectories, with the policy version of every token."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
