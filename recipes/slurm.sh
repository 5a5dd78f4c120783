#!/bin/bash
# A run over several machines under Slurm, which goes on in job after job until it is finished:
#   sbatch slurm.sh large out/large --set data.path=/shared/text --set training.sharding=full
# Submit it from the environment that has tercet (source .venv/bin/activate): Slurm hands PATH on to the machines.
# RECIPE and the output folder come first, then whatever `tercet train` takes. Edit the lines below for your cluster. The
# output folder must be on a file system that all machines see; prepare the data in a job of its own where that takes
# hours (`tercet data prepare RECIPE --output out/large`).
#SBATCH --job-name=tercet
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Five minutes before the end: each process finishes its step, saves, and exits.
#SBATCH --signal=USR1@300

set -u
recipe=${1:?usage: sbatch slurm.sh RECIPE OUTPUT [--set KEY=VALUE ...]}
output=${2:?usage: sbatch slurm.sh RECIPE OUTPUT [--set KEY=VALUE ...]}
shift 2

# Where no GPUs were asked for, PROCESSES_PER_NODE=2 trains on CPUs.
processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Another port for each job: two of them may share a machine.
port=$((20000 + SLURM_JOB_ID % 20000))
# In case the signal does not come: the run also looks at the clock itself. A little less than --time above.
hours=${MAX_HOURS:-23.8}

case " $* " in *" --restart "*) echo "--restart would begin anew in every job: remove $output instead" >&2; exit 2 ;; esac

newest() { ls "$output/checkpoints" 2>/dev/null | grep '^step-' | tail -n 1; }
before=$(newest)

# torchrun hands SIGUSR1 on to the processes, and gives them four minutes to save.
srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node="$processes" \
  --rdzv_backend=c10d --rdzv_endpoint="$head:$port" --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=240 \
  -m tercet.training "$recipe" --output "$output" --set training.max_hours="$hours" "$@"
status=$?

if [ -f "$output/results.json" ]; then
  echo "finished: $output"
  exit 0
fi
# Again only if this job has brought the run forward: what fails at once would fail for ever.
if [ "$(newest)" != "$before" ]; then
  echo "not finished: queued again, to go on from $(newest)"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
echo "not finished, and no checkpoint was saved in this job (exit code $status): not queued again" >&2
exit "$((status ? status : 1))"
