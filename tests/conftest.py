import os

from hypothesis import settings

os.environ.setdefault("MUJOCO_GL", "disable")  # tests run without a display

# The same examples every time: a red run can be repeated, and statistical checks do not flicker.
settings.register_profile("cqm", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("cqm")
