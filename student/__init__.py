"""Students: stream a cache with Grain into a pmapped distillation loop.

Nothing is here yet: capture and the cache come first.
"""
