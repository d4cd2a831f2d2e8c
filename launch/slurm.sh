#!/usr/bin/env bash
# Submits a run to Slurm, on any number of nodes with GPUs, and lets it queue again until it has finished.
#
#   launch/slurm.sh [flags] -- python -m experiments.PROGRAM ... --workdir=FOLDER
#   launch/slurm.sh [flags] --commands=FILE          one command per line: a job array
#
#   --nodes=N             default 1
#   --gpus=N              GPUs of each node; default 1; 0: none, for a CPU
#   --per=gpu             a process for each GPU (the default), or with --per=node one for each node
#   --cpus=N              cores for each process; default 8
#   --time=LIMIT          time limit of a job, as 24:00:00 (the default); a run may take many jobs
#   --grace=SECONDS       this long before the limit the run is asked to save; default 120
#   --partition=NAME, --account=NAME, --name=NAME
#   --setup=COMMAND       what each job does first, as --setup='source .venv/bin/activate'
#   --at_most=N           of an array, this many at a time
#   --dry_run             print the batch script, and submit nothing
#
# The workdir belongs on a file system that all nodes see. The log of a job is NAME-JOB.log in the current folder.
set -euo pipefail

main() {
  read_words "$@"
  if [[ -n $dry_run ]]; then
    batch_script
  else
    batch_script | sbatch
  fi
}

read_words() {
  nodes=1 gpus=1 per=gpu cpus=8 limit=24:00:00 grace=120 partition='' account='' name=txl setup='' commands='' at_most=''
  dry_run='' program=()
  while (($#)); do
    case $1 in
      -h | --help)
        awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
        exit 0
        ;;
      --nodes=*) nodes=$(number "$1") ;;
      --gpus=*) gpus=$(number "$1") ;;
      --per=gpu | --per=node) per=${1#*=} ;;
      --cpus=*) cpus=$(number "$1") ;;
      --time=*) limit=${1#*=} ;;
      --grace=*) grace=$(number "$1") ;;
      --partition=*) partition=${1#*=} ;;
      --account=*) account=${1#*=} ;;
      --name=*) name=${1#*=} ;;
      --setup=*) setup=${1#*=} ;;
      --at_most=*) at_most=$(number "$1") ;;
      --commands=*) commands=${1#*=} ;;
      --dry_run) dry_run=1 ;;
      --)
        shift
        program=("$@")
        break
        ;;
      *) refuse "there is no flag $1; launch/slurm.sh --help lists all, and the run's own words stand after --" ;;
    esac
    shift
  done
  if [[ -n $commands ]]; then
    ((${#program[@]} == 0)) || refuse "both --commands and a command after -- were given; give one of them"
    mapfile -t lines < <(grep -vE '^[[:space:]]*(#|$)' -- "$commands")
    ((${#lines[@]})) || refuse "there is no command in $commands; write one per line"
  elif ((${#program[@]} == 0)); then
    refuse "there is nothing to run; give the command after --, as -- python -m experiments.enwik8 --workdir=runs/one"
  fi
}

batch_script() {
  # srun does not take over the cores that sbatch was asked for.
  local processes=$gpus srun="srun --cpus-per-task=$cpus"
  [[ $per == gpu && $gpus -gt 0 ]] || processes=1
  echo '#!/usr/bin/env bash'
  option job-name "$name"
  option nodes "$nodes"
  option ntasks-per-node "$processes"
  option cpus-per-task "$cpus"
  # Not per task: jax counts on seeing all GPUs of the node, and takes the one with its process's number.
  ((gpus == 0)) || option gpus-per-node "$gpus"
  option time "$limit"
  [[ -z $partition ]] || option partition "$partition"
  [[ -z $account ]] || option account "$account"
  if [[ -n $commands ]]; then
    option array "0-$((${#lines[@]} - 1))${at_most:+%$at_most}"
    option output "$name-%A_%a.log"
  else
    option output "$name-%j.log"
  fi
  option open-mode append
  option requeue
  echo "# To the run alone, not to this script: it saves, and leaves with exit code 143."
  option signal "TERM@$grace"
  [[ -z $setup ]] || echo "$setup || exit"
  if [[ -n $commands ]]; then
    echo "case \$SLURM_ARRAY_TASK_ID in"
    local i
    for i in "${!lines[@]}"; do
      echo "  $i) $srun ${lines[i]} ;;"
    done
    echo 'esac'
  else
    echo "$srun $(quoted "${program[@]}")"
  fi
  cat <<'END'
code=$?
# scancel ends this script too, so that a run which is cancelled stays so.
if [ $code -eq 143 ]; then
  echo "saved before the time limit; the job queues again, and goes on from there"
  scontrol requeue "$SLURM_JOB_ID"
elif [ $code -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  echo "a process of the run has lost another; the job queues again, and goes on from the last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
END
}

option() { echo "#SBATCH --$1${2:+=$2}"; }

number() {
  [[ ${1#*=} =~ ^[0-9]+$ ]] || refuse "${1%%=*} is '${1#*=}'; give a whole number"
  echo "${1#*=}"
}

# Words as a shell reads them.
quoted() {
  local word out='' safe='^[-A-Za-z0-9_./:=,@%+]+$'
  for word in "$@"; do
    [[ $word =~ $safe ]] || word="'${word//\'/\'\\\'\'}'"
    out+=" $word"
  done
  echo "${out# }"
}

refuse() {
  echo "error: $*" >&2
  exit 2
}

main "$@"
