#!/bin/sh
#SBATCH --job-name=slipstream-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --requeue
# Four ranks on two nodes. Open MPI starts them by SLURM itself; /shared is seen by all nodes.
export HOROVOD_CPU_OPERATIONS=mpi
exec mpirun -np "$SLURM_NTASKS" --bind-to none --map-by slot -x PATH -x HOROVOD_CPU_OPERATIONS \
    slipstream-train --data=/shared/clicks --output=/shared/runs/four --placement=sharded \
    --threads="$SLURM_CPUS_PER_TASK" --checkpoint_every=1000 --resume
