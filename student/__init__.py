"""Students: stream a cache with Grain into a pmapped distillation loop.

`train.train` is the way in; users find it, `evaluate` and `export` in `stillroom`.
"""
