"""Which keys are saturated, and which inputs may be skipped. No Keras, no Horovod in here.

`tracker` runs the window loop; `threshold`, `hot_set` and `report` are pure.
"""
