"""What a launcher (horovodrun, mpirun) told this process: whether it is a rank of a job, and which.

Read from the environment, without TensorFlow or Horovod: it costs nothing, and it works where they
are missing.
"""

import os

# Set by horovodrun (Gloo) and by Open MPI, MPICH or Slurm launchers.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# "1": Horovod lets ranks come and go.
ELASTIC = "HOROVOD_ELASTIC"


def rank_variable() -> str | None:
    """Returns the name of the variable that makes this process a rank; None: it is alone."""
    return next((name for name in RANK_VARIABLES if name in os.environ), None)


def rank() -> int | None:
    """Returns the rank of this process in its job, from 0; None: it is in no job."""
    variable = rank_variable()
    return None if variable is None else int(os.environ[variable])


def is_elastic() -> bool:
    """Whether Horovod's launcher lets ranks come and go (`horovodrun --host-discovery-script`)."""
    return os.environ.get(ELASTIC) == "1"


def is_on_one_host() -> bool:
    """Whether the launcher says that all ranks of the job run on this host."""
    variable = rank_variable()
    if variable is None:
        return True
    local, every = (
        os.environ.get(variable.replace("_RANK", name)) for name in ("_LOCAL_SIZE", "_SIZE")
    )
    return local is not None and local == every
