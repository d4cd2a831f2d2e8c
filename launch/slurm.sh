#!/usr/bin/env bash
# Submits a run to Slurm, on any number of nodes with GPUs, and requeues the job until the run has finished.
#
#   launch/slurm.sh [flags] -- python -m experiments.PROGRAM ... --workdir=FOLDER
#   launch/slurm.sh [flags] --workers=8 -- python -m launch.sweep sweep.toml --out=FOLDER --storage=postgresql://...
#
#   --nodes=N             default 1
#   --gpus=N              GPUs per node, default 1, 0 for a CPU run
#   --per=gpu             one process per GPU (the default), or with --per=node one per node
#   --cpus=N              cores per process, default 8
#   --time=LIMIT          time limit of a job, default 24:00:00. A run may take many jobs
#   --grace=SECONDS       time before the limit at which the run gets SIGTERM and saves, default 120
#   --partition=NAME, --account=NAME, --name=NAME
#   --setup=COMMAND       runs at the start of each job, for example 'source .venv/bin/activate'
#   --workers=N           a job array: N workers of a study, each with all GPUs of a node
#   --dry_run             print the batch script and submit nothing
#
# The workdir must be on a file system that all nodes share. A job's log is NAME-JOB.log in the current directory.
set -euo pipefail

parse_arguments() {
  nodes=1 gpus=1 per=gpu cpus=8 time=24:00:00 grace=120 partition='' account='' name=txl setup='' workers=''
  dry_run='' program=()
  while (($#)); do
    case $1 in
      -h | --help)
        awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
        exit 0
        ;;
      --nodes=* | --gpus=* | --cpus=* | --grace=* | --workers=*)
        [[ ${1#*=} =~ ^[0-9]+$ ]] || usage_error "${1%%=*} must be a whole number, got '${1#*=}'"
        set_variable "$1"
        ;;
      --time=* | --partition=* | --account=* | --name=* | --setup=* | --per=gpu | --per=node)
        set_variable "$1"
        ;;
      --dry_run) dry_run=1 ;;
      --)
        program=("${@:2}")
        break
        ;;
      *) usage_error "unknown flag $1. launch/slurm.sh --help lists all flags, and the run's own flags come after --" ;;
    esac
    shift
  done
  ((${#program[@]})) || usage_error "no command was passed. Pass it after --, such as -- python -m experiments.enwik8 --workdir=runs/one"
  [[ -z $workers || $nodes -eq 1 ]] || usage_error "--nodes must be 1 with --workers, because a worker has one node, got $nodes"
}

batch_script() {
  # srun does not inherit --cpus-per-task from sbatch.
  local processes=$gpus srun="srun --cpus-per-task=$cpus"
  [[ $per == gpu && $gpus -gt 0 && -z $workers ]] || processes=1
  echo '#!/usr/bin/env bash'
  option job-name "$name"
  option nodes "$nodes"
  option ntasks-per-node "$processes"
  option cpus-per-task "$cpus"
  # Not per task: jax expects to see all GPUs of the node, and takes the one with its process's number.
  ((gpus == 0)) || option gpus-per-node "$gpus"
  option time "$time"
  [[ -z $partition ]] || option partition "$partition"
  [[ -z $account ]] || option account "$account"
  [[ -z $workers ]] || option array "1-$workers"
  if [[ -z $workers ]]; then option output "$name-%j.log"; else option output "$name-%A_%a.log"; fi
  option open-mode append
  option requeue
  echo "# To the run alone, not to this script: the run saves and exits with code 143."
  option signal "TERM@$grace"
  [[ -z $setup ]] || echo "$setup || exit"
  echo "$srun $(quoted "${program[@]}")"
  cat <<'END'
code=$?
# scancel ends this script too, so a cancelled run is not requeued.
if [ $code -eq 143 ]; then
  echo "saved before the time limit; the job is requeued and resumes from there"
  scontrol requeue "$SLURM_JOB_ID"
elif [ $code -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  echo "a process of the run has lost another; the job is requeued and resumes from the last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
END
}

option() { echo "#SBATCH --$1${2:+=$2}"; }

set_variable() { # --NAME=VALUE
  local flag=${1%%=*}
  printf -v "${flag#--}" %s "${1#*=}"
}

# Quotes arguments for a shell.
quoted() {
  local word out='' safe='^[-A-Za-z0-9_./:=,@%+]+$'
  for word in "$@"; do
    [[ $word =~ $safe ]] || word="'${word//\'/\'\\\'\'}'"
    out+=" $word"
  done
  echo "${out# }"
}

usage_error() {
  echo "error: $*" >&2
  exit 2
}

parse_arguments "$@"
if [[ -n $dry_run ]]; then batch_script; else batch_script | sbatch; fi
