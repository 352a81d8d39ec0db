import os
import tempfile

from hypothesis import settings

os.environ.setdefault("MUJOCO_GL", "disable")  # tests run without a display

# Many tests train networks of the same shape; in one run each is compiled once, child processes
# included.
COMPILED = tempfile.TemporaryDirectory(prefix="cqm-compiled-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# The same examples every time: a red run can be repeated, and statistical checks do not flicker.
settings.register_profile("cqm", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("cqm")
