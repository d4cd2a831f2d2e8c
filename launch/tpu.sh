#!/usr/bin/env bash
# Runs one command on every host of a Cloud TPU, and restarts it after preemptions and maintenance.
#
#   launch/tpu.sh COMMAND NAME --zone=ZONE [flags] [-- python -m experiments.PROGRAM ... --workdir=gs://BUCKET/FOLDER]
#
#   create    requests the TPU as a queued resource          --type, and --spot or --reserved
#   install   installs the program
#   run       starts the command after -- on every host; it outlives this shell
#   logs      shows the output of a host                     --worker, --follow
#   stop      asks the run to save and exit, on every host
#   watch     does all of it until the run has finished: creates, installs, runs, and restarts after a preemption
#
#   --zone=ZONE, --project=ID   for example us-central2-b; default: the project of gcloud's configuration
#   --type=TYPE           accelerator type, for example v4-32, v5litepod-16, v5p-8, v6e-8
#   --runtime=VERSION     software of the hosts; default: the version that Google recommends for JAX on that type
#   --node-count=N        slices of this type that train together (multislice); default 1. Pass it to every command
#   --spot, --reserved, --network=NAME, --service-account=EMAIL   gcloud's: capacity, VPC, identity of the hosts
#   --worker=N, --node=N, --follow   the host, and its slice, whose log is shown (default 0); keep printing new lines
#   --every=SECONDS       polling interval of watch; default 60
#   --dry_run             print the commands and run none
set -euo pipefail

UNIT=txl # The systemd unit on the hosts.
SAVING=143 # Exit code of a run that was asked to stop and has saved: 128 + SIGTERM.
MAINTENANCE=http://metadata.google.internal/computeMetadata/v1/instance/maintenance-event
MAX_CRASHES=5 MAX_REFUSALS=5 # Consecutive requests that gcloud refuses.

parse_arguments() {
  if [[ ${1:--h} =~ ^(-h|--help)$ ]]; then
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
    exit 0
  fi
  command=$1 name=${2:-}
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    fail "NAME must be lower-case letters, digits and hyphens, got '$name'. Give the TPU's name after the command" 2
  shift 2
  zone='' project='' type='' runtime='' node_count=1 options=() worker=0 node=0 follow='' every=60 dry_run='' program=()
  while (($#)); do
    case $1 in
      --zone=* | --project=* | --type=* | --runtime=* | --node-count=* | --worker=* | --node=* | --every=*)
        flag=${1%%=*} flag=${flag#--}
        printf -v "${flag//-/_}" %s "${1#*=}"
        ;;
      --spot | --reserved | --network=* | --service-account=*) options+=("$1") ;; # gcloud's own flags.
      --follow) follow=--follow ;;
      --dry_run) dry_run=1 ;;
      --)
        program=("${@:2}")
        break
        ;;
      *) fail "unknown flag $1. launch/tpu.sh --help lists all flags, and the run's own flags come after --" 2 ;;
    esac
    shift
  done
  [[ -n $zone ]] || fail "--zone is required. Pass the TPU's with --zone=ZONE" 2
  place=("$name" --zone="$zone" ${project:+--project="$project"})
  [[ $node_count =~ ^[1-9][0-9]*$ ]] || fail "--node-count must be 1 or more, got '$node_count'" 2
}

do_create() {
  check_type
  local nodes=(--node-id="$name")
  ((node_count == 1)) || nodes=(--node-count="$node_count" --node-prefix="$name")
  execute gcloud compute tpus queued-resources create "${place[@]}" "${nodes[@]}" \
    --accelerator-type="$type" --runtime-version="$runtime" ${options[@]+"${options[@]}"}
}

check_type() { # https://cloud.google.com/tpu/docs/runtimes
  [[ -n $type ]] || fail "--type is missing. Pass the type to create, such as --type=v5litepod-16" 2
  [[ -z $runtime ]] || return 0
  case $type in
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) runtime=tpu-ubuntu2204-base ;;
    *) fail "no software is known for --type=$type. Name it with --runtime=VERSION" 2 ;;
  esac
}

do_install() {
  [[ -f setup.cfg && -e .git ]] || fail "$PWD must be the root of a clone, which is installed. Go there" 2
  local archive=${TMPDIR:-/tmp}/txl-$name.tar.gz
  execute bash -c "git ls-files -z --cached --others --exclude-standard |
  tar --create --gzip --file=$(quoted "$archive") --null --ignore-failed-read --files-from=-" || return
  gcloud_to all all scp "$archive" "$name:txl.tar.gz" "${place[@]:1}" || return
  # The hosts' own Python is 3.10, which is too old: uv installs another.
  # shellcheck disable=SC2016 # The hosts expand it.
  on_hosts 'set -euo pipefail
rm -rf txl/source txl/installed
mkdir -p txl/source
tar -xzf txl.tar.gz -C txl/source
python3 -m pip install --quiet --user --upgrade uv
"$HOME/.local/bin/uv" venv --quiet --allow-existing --seed --python=3.12 txl/venv
txl/venv/bin/pip install --quiet "./txl/source[plots,tpu,gcs]"
touch txl/installed'
}

# A systemd unit outlives the ssh session, and gets SIGTERM when the host is shut down. Programs are in the clone, which
# the package lacks: hence PYTHONPATH. Relative paths are relative to the home directory, since install replaces the clone.
# libtpu locks the memory that it maps for the device: hence LimitMEMLOCK. systemd expands $: hence $$ in arguments.
do_run() {
  ((${#program[@]})) || fail "no command was passed. Pass it after --, such as -- python -m experiments.enwik8 --workdir=gs://BUCKET/runs/one" 2
  on_hosts "$(
    cat <<END
set -euo pipefail
if [ "\$(systemctl show $UNIT --property=SubState --value)" = running ]; then
  echo 'error: a run is active here; stop it first, with launch/tpu.sh stop' >&2
  exit 1
fi
sudo systemctl stop $UNIT 2>/dev/null || true
sudo systemctl reset-failed $UNIT 2>/dev/null || true
rm -f txl/stopped
sudo systemd-run --quiet --unit=$UNIT --remain-after-exit --uid="\$(id -u)" --gid="\$(id -g)" \\
  --working-directory="\$HOME" --setenv=HOME="\$HOME" --setenv=PATH="\$HOME/txl/venv/bin:\$PATH" \\
  --setenv=PYTHONPATH="\$HOME/txl/source" --setenv=PYTHONUNBUFFERED=1 \\
  --property=TimeoutStopSec=600 --property=LimitMEMLOCK=infinity \\
  env $(quoted "${program[@]//\$/\$\$}")
END
  )"
}

do_logs() {
  gcloud_to "$worker" "$node" ssh "${place[@]}" --command="sudo journalctl --unit=$UNIT --output=cat --lines=200${follow:+ $follow}"
}

do_stop() {
  # If SIGTERM kills a run before it handles signals, systemd reports a clean end: hence the file.
  on_hosts "mkdir -p txl && touch txl/stopped && sudo systemctl stop $UNIT"
}

do_watch() {
  check_type
  [[ " ${program[*]} " =~ \ --workdir[=\ ]gs:// ]] ||
    fail "watch needs a command with --workdir=gs://BUCKET/FOLDER after --. Only a bucket outlives the TPU" 2
  if [[ -n $dry_run ]]; then
    echo "# Until the run has finished; after a preemption, which ends the request, again:"
    do_create
    do_install
    do_run
    on_hosts "$(poll_script)"
    return
  fi
  local asked='' begun='' maintained='' crashes=0 refusals=0 now before=''
  while :; do
    now=$(state)
    [[ $now == "$before" ]] || log "the request is $now"
    before=$now
    case $now in
      ABSENT)
        if do_create; then
          asked=1 crashes=0 refusals=0
        elif ((++refusals < MAX_REFUSALS)); then
          log "the TPU could not be requested; trying again"
        else
          fail "the TPU could not be requested, $refusals times. See gcloud's message above"
        fi
        ;;
      SUSPENDED | FAILED)
        [[ $now != FAILED || -z $asked ]] ||
          fail "the request failed before it was served. See gcloud compute tpus queued-resources describe ${place[*]}"
        gcloud compute tpus queued-resources delete "${place[@]}" --force --quiet || log "it could not be deleted; trying again"
        ;;
      ACTIVE) asked='' && check_run ;;
    esac
    sleep "$every"
  done
}

# Polls the hosts of an active TPU once and acts on the state of the run. Ends the script when nothing is left to do.
check_run() {
  local now
  now=$(poll)
  case $now in
    running) begun=1 ;;
    finished | failed | stopped | crashed) [[ -n $begun ]] || now=idle ;; # A run that ended before this watch is started again.
  esac
  case $now in
    finished)
      log "the run has finished; the TPU still exists: gcloud compute tpus queued-resources delete ${place[*]} --force"
      exit 0
      ;;
    failed) do_logs || true && fail "the run ended with an error, shown in its last lines; fix it and start watch again" ;;
    stopped)
      # The hosts also report this in the seconds before a preemption: the next poll shows which it was.
      sleep "$every"
      [[ $(state) != ACTIVE || $(poll) != stopped ]] || fail "the run was stopped; start watch again to resume it" $SAVING
      ;;
    crashed)
      ((++crashes <= MAX_CRASHES)) || fail "the run crashed $crashes times; see launch/tpu.sh logs $name"
      log "the run crashed; restarting it"
      on_hosts "sudo systemctl stop $UNIT" || true
      begun=''
      ;;
    bare) if do_install; then log "the program is installed"; else log "it could not be installed; trying again"; fi ;;
    idle)
      if do_run; then begun=1 maintained='' && log "the run has been started"; else log "it could not be started; trying again"; fi
      ;;
    maintenance)
      [[ -n $maintained ]] || log "a host will be maintained, and the run has saved; it is started again afterwards"
      begun='' maintained=1
      ;;
    unreachable) log "the hosts are unreachable" ;;
  esac
}

poll_script() {
  echo "echo \"run \$(systemctl show $UNIT --property=SubState --value) \$(systemctl show $UNIT --property=ExecMainStatus --value) \$(test -e txl/installed && echo installed || echo bare) \$(test -e txl/stopped && echo stopped || echo wanted) \$(curl --silent --fail --max-time 5 --header 'Metadata-Flavor: Google' $MAINTENANCE || echo unknown)\""
}

# The state of the run over all hosts, in one word.
poll() {
  { on_hosts "$(poll_script)" 2>/dev/null || echo unreachable; } | awk -v saving=$SAVING '
    $1 == "unreachable" { hosts = 0; exit }
    $1 != "run" { next }
    { hosts++ }
    $4 == "bare" { bare++ }
    $6 ~ /^TERMINATE/ { ending++ }  # The run has had the same notice, and saves and stops.
    $2 == "exited" && $3 == 0 { finished++; next }
    $2 != "dead" && $2 != "exited" && $2 != "failed" { running++; next }
    $5 == "stopped" { asked++ }
    $5 == "stopped" || ($2 == "failed" && $3 == saving) { stopped++; next }
    $2 == "dead" { idle++; next }
    $2 != "exited" && ($3 == 1 || $3 == 2) { errors++; next }
    { crashed++ }  # "exited": by a signal that nobody sent on purpose; systemd calls it a clean end.
    END {
      if (!hosts) print "unreachable"
      else if (ending && !running && !errors && finished != hosts && !asked) print "maintenance"
      else if (bare && !running) print "bare"
      else if (idle == hosts) print "idle"
      else if (finished == hosts) print "finished"
      else if (idle || crashed) print "crashed"  # A host that has rebooted knows of no run.
      else if (errors) print "failed"
      else print running ? "running" : "stopped"
    }'
}

on_hosts() { gcloud_to all all ssh "${place[@]}" --command="$1"; } # Runs a script on every host.
gcloud_to() { # Host number or "all", slice number or "all", "ssh" or "scp" and its arguments.
  local how=(tpu-vm "${@:3}")
  ((node_count == 1)) || how=(queued-resources "${@:3}" --node="$2")
  execute gcloud compute tpus "${how[@]}" --worker="$1" --quiet
}

# Prints the state of the request: ABSENT if it does not exist, UNKNOWN if gcloud failed.
state() {
  local output answer=UNKNOWN
  if output=$(gcloud compute tpus queued-resources describe "${place[@]}" --format='value(state.state)' 2>&1); then
    answer=$(tail -n 1 <<<"$output")
  else
    [[ $output != *NOT_FOUND* ]] || answer=ABSENT
    [[ $answer == ABSENT ]] || tail -n 1 <<<"$output" >&2
  fi
  echo "$answer"
}

# Runs a command, or with --dry_run prints it, quoted for a shell.
execute() { if [[ -z $dry_run ]]; then "$@"; else quoted "$@"; fi; }

# Quotes arguments for a shell; unlike printf %q it leaves lines and flags readable.
quoted() {
  local word out='' safe='^[-A-Za-z0-9_./:=,@%+]+$'
  for word in "$@"; do
    [[ $word =~ $safe ]] || word="'${word//\'/\'\\\'\'}'"
    out+=" $word"
  done
  echo "${out# }"
}

log() { echo "$(date '+%F %T')  $*"; }
fail() { # Message, exit code.
  echo "error: $1" >&2
  exit "${2:-1}"
}

parse_arguments "$@"
[[ -n $dry_run ]] || command -v gcloud >/dev/null || fail "gcloud is not installed. See https://cloud.google.com/sdk, or add --dry_run" 2
case $command in
  create | install | run | logs | stop | watch) "do_$command" ;;
  *) fail "COMMAND must be create, install, run, logs, stop or watch, got '$command'" 2 ;;
esac
