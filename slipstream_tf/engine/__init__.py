"""Finds saturated keys and skippable examples, without Keras or Horovod.

`tracker` runs the window loop. `window_end`, `hot_set`, `states`, `settings` and `report` compute
its decisions without side effects.
"""
