"""Run the experiments: `python -m chaos --help`."""

import os

# Before anything is imported: children are forked, so there must be no threads.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["MUJOCO_GL"] = "disable"
os.environ["JAX_PLATFORMS"] = "cpu"

from .run import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
