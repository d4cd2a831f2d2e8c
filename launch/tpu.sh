#!/usr/bin/env bash
# Runs one command on every host of a Cloud TPU, and keeps it running through preemptions.
#
#   launch/tpu.sh COMMAND NAME --zone=ZONE [flags] [-- python -m experiments.PROGRAM ...]
#
#   create    asks for the TPU as a queued resource          --type, and --spot or --reserved
#   wait      returns when it is there
#   status    tells what the request and the run are doing
#   install   brings the program, and mounts what all hosts share
#   run       starts the words after -- on every host; they outlive this shell
#   logs      shows what a host has printed                  --worker, --follow
#   stop      asks the run to save and leave, on every host
#   watch     all of it until the run has finished: creates, installs, runs, and begins again after a preemption
#   delete    gives the TPU back, and removes the request
#
#   --zone=ZONE           where, as us-central2-b
#   --type=TYPE           accelerator type, as v4-32, v5litepod-16, v5p-8, v6e-8
#   --runtime=VERSION     software of the hosts; default: the one that Google names for JAX on that type
#   --spot, --reserved    instead of on demand
#   --git=URL@REVISION    install this instead of the files of the current folder's repository
#   --bucket=NAME         Cloud Storage bucket to mount, or
#   --nfs=HOST:/SHARE     an NFS share (Filestore)
#   --mount=FOLDER        where; default /mnt/txl. The run's --workdir belongs there: all hosts must see its checkpoints
#   --worker=N            host whose log is shown; default 0
#   --follow              keep showing
#   --every=SECONDS       between two looks of wait and watch; default 60
#   --dry_run             print the commands, and run none
set -euo pipefail

UNIT=txl # Of systemd, on the hosts.
SAVING=143 # Exit code of a run that was asked to stop and has saved: 128 + SIGTERM.
MAX_CRASHES=5
MAX_REFUSALS=5 # Of requests, one after the other.

main() {
  read_words "$@"
  [[ -n $dry_run ]] || command -v gcloud >/dev/null || refuse "gcloud is not installed here; see https://cloud.google.com/sdk, or add --dry_run"
  case $command in
    create | wait | status | install | run | logs | stop | watch | delete) "do_$command" ;;
    *) refuse "there is no command '$command'; the commands are create, wait, status, install, run, logs, stop, watch and delete" ;;
  esac
}

read_words() {
  case ${1:-} in
    -h | --help | '')
      awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
      exit 0
      ;;
  esac
  command=$1 name=${2:-}
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    refuse "the name is '$name'; give the TPU's name after the command, in lower-case letters, digits and hyphens"
  shift 2
  zone='' type='' runtime='' tier='' git='' bucket='' nfs='' mount=/mnt/txl worker=0 follow='' every=60 dry_run=''
  program=()
  while (($#)); do
    case $1 in
      --zone=*) zone=${1#*=} ;;
      --type=*) type=${1#*=} ;;
      --runtime=*) runtime=${1#*=} ;;
      --spot | --reserved)
        [[ -z $tier ]] || refuse "both $tier and $1 were given; a TPU is one or the other"
        tier=$1
        ;;
      --git=*) git=${1#*=} ;;
      --bucket=*) bucket=${1#*=} bucket=${bucket#gs://} ;;
      --nfs=*) nfs=${1#*=} ;;
      --mount=*) mount=${1#*=} ;;
      --worker=*) worker=${1#*=} ;;
      --follow) follow=--follow ;;
      --every=*) every=${1#*=} ;;
      --dry_run) dry_run=1 ;;
      --)
        shift
        program=("$@")
        break
        ;;
      *) refuse "there is no flag $1; launch/tpu.sh --help lists all, and the run's own words stand after --" ;;
    esac
    shift
  done
  [[ -n $zone ]] || refuse "no zone was given; say with --zone=ZONE where the TPU is"
  [[ $mount =~ ^(/[-A-Za-z0-9_.]+)+$ ]] || refuse "--mount is '$mount'; give an absolute path of letters, digits, dots and hyphens"
  [[ -z $git || $git == *://*@?* || $git == *@*:*@?* ]] || refuse "--git is '$git'; give URL@REVISION, as https://host/repository@main"
  [[ -z $bucket || -z $nfs ]] || refuse "both --bucket and --nfs were given; one of them is mounted at $mount"
}

# ---- What the commands do ----

do_create() {
  check_type
  execute gcloud compute tpus queued-resources create "$name" --node-id="$name" --zone="$zone" \
    --accelerator-type="$type" --runtime-version="$runtime" ${tier:+"$tier"}
}

do_wait() {
  if [[ -n $dry_run ]]; then
    describe
    return
  fi
  local now before=''
  while now=$(state) && [[ $now != ACTIVE ]]; do
    [[ $now == "$before" ]] || say "the request is $now"
    before=$now
    case $now in
      ABSENT | FAILED | SUSPENDED) fail "$name is $now and will not come; delete it and create it again" ;;
    esac
    sleep "$every"
  done
  say "$name is there"
}

do_status() {
  if [[ -z $dry_run ]]; then
    local now
    now=$(state)
    echo "$name $now"
    [[ $now == ACTIVE ]] || return 0
  else
    describe
  fi
  on_host all "$(poll_script)"
}

do_install() {
  if [[ -z $git ]]; then
    [[ -f setup.cfg && -e .git ]] ||
      refuse "$PWD is not the root of a clone, whose files would be installed; go there, or give --git=URL@REVISION"
    local archive=${TMPDIR:-/tmp}/txl-$name.tar.gz
    execute bash -c "git ls-files -z --cached --others --exclude-standard |
  tar --create --gzip --file=$(quoted "$archive") --null --ignore-failed-read --files-from=-" || return
    execute gcloud compute tpus tpu-vm scp "$archive" "$name:txl.tar.gz" --zone="$zone" --worker=all --quiet || return
  fi
  on_host all "$(install_script)"
}

do_run() {
  check_program
  on_host all "$(run_script)"
}

do_logs() {
  on_host "$worker" "sudo journalctl --unit=$UNIT --output=cat --lines=200${follow:+ $follow}"
}

do_stop() {
  # A run that SIGTERM ends before it listens leaves no trace in systemd: to it that is a clean end.
  on_host all "mkdir -p txl && touch txl/stopped && sudo systemctl stop $UNIT"
}

do_delete() {
  execute gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force --quiet
}

do_watch() {
  check_type
  check_program
  check_outlives
  if [[ -n $dry_run ]]; then
    watch_in_words
    return
  fi
  local asked='' begun='' crashes=0 refusals=0 now before=''
  while :; do
    now=$(state)
    [[ $now == "$before" ]] || say "the request is $now"
    before=$now
    case $now in
      ABSENT)
        if do_create; then
          asked=1 crashes=0 refusals=0
        else
          ((++refusals < MAX_REFUSALS)) || fail "the TPU could not be asked for, $refusals times; gcloud says above why"
          say "the TPU could not be asked for, which is tried again"
        fi
        ;;
      SUSPENDED | FAILED)
        [[ $now != FAILED || -z $asked ]] ||
          fail "the request failed before it was served; see gcloud compute tpus queued-resources describe $name --zone=$zone"
        do_delete || say "it could not be deleted, which is tried again"
        ;;
      ACTIVE)
        asked=''
        attend
        ;;
    esac
    sleep "$every"
  done
}

# One look at the hosts of a TPU that is there. Ends the script when there is nothing left to do.
attend() {
  local now
  now=$(poll)
  case $now in
    running) begun=1 ;;
    finished | failed | stopped | crashed) [[ -n $begun ]] || now=idle ;; # What ended before this watch is begun again.
  esac
  case $now in
    finished)
      say "the run has finished; the TPU is still there: launch/tpu.sh delete $name --zone=$zone"
      exit 0
      ;;
    failed)
      do_logs || true
      fail "the run ended with a mistake, which its last lines tell; mend it, and start watch again"
      ;;
    stopped)
      # Also what the hosts say in the seconds before a preemption: the next look tells which it was.
      sleep "$every"
      [[ $(state) != ACTIVE || $(poll) != stopped ]] ||
        fail "the run was stopped; start watch again to go on from what it has saved" $SAVING
      ;;
    crashed)
      ((++crashes <= MAX_CRASHES)) || fail "the run broke off $crashes times; launch/tpu.sh logs $name shows why"
      say "the run broke off; it is started again"
      on_host all "sudo systemctl stop $UNIT" || true
      begun=''
      ;;
    bare)
      if do_install; then say "the program is installed"; else say "it could not be installed, which is tried again"; fi
      ;;
    idle)
      if do_run; then
        begun=1
        say "the run is started"
      else
        say "it could not be started, which is tried again"
      fi
      ;;
    unreachable) say "the hosts do not answer" ;;
  esac
}

watch_in_words() {
  echo "# If there is no request, or it was preempted or failed:"
  do_delete
  do_create
  echo "# Every $every seconds, until it is ACTIVE:"
  describe
  echo "# When it is:"
  do_install
  do_run
  echo "# Every $every seconds, until the run has finished; after a preemption from the top:"
  describe
  on_host all "$(poll_script)"
}

# ---- Checks ----

check_type() {
  [[ -n $type ]] || refuse "no type was given; say with --type=TYPE what to create, as v5litepod-16"
  [[ -n $runtime ]] || runtime=$(usual_runtime)
}

check_program() {
  ((${#program[@]})) || refuse "there is nothing to run; give the command after --, as -- python -m experiments.enwik8 --workdir=$mount/runs/one"
}

check_outlives() {
  [[ -n $bucket || -n $nfs ]] ||
    refuse "watch was given neither --bucket nor --nfs; a run goes on from its workdir, which must outlive the TPU"
  local word
  for word in "${program[@]}"; do
    [[ $word != --workdir=* || $word == --workdir=$mount/* ]] ||
      refuse "$word is not in $mount, which alone outlives the TPU; give a --workdir there"
  done
}

usual_runtime() { # https://cloud.google.com/tpu/docs/runtimes
  case $type in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    *) refuse "no software is known for the type $type; name it with --runtime=VERSION" ;;
  esac
}

# ---- What the hosts are told ----

install_script() {
  echo "set -euo pipefail"
  echo "rm -rf txl/source txl/installed"
  echo "mkdir -p txl/source"
  if [[ -n $git ]]; then
    echo "git clone --quiet $(quoted "${git%@*}") txl/source"
    echo "git -C txl/source checkout --quiet $(quoted "${git##*@}")"
  else
    echo "tar -xzf txl.tar.gz -C txl/source"
  fi
  cat <<'END'
# The hosts' own Python is 3.10, which is too old: uv brings one.
python3 -m pip install --quiet --user --upgrade uv
"$HOME/.local/bin/uv" venv --quiet --allow-existing --seed --python=3.12 txl/venv
txl/venv/bin/pip install --quiet './txl/source[plots]' 'jax[tpu]'
END
  [[ -z $bucket$nfs ]] || mount_script
  echo "touch txl/installed"
}

# As a line of fstab, systemd unmounts it only after the run has been stopped, and mounts it again after a reboot.
mount_script() {
  local line
  if [[ -n $bucket ]]; then
    # Checkpoints are written under another name and renamed: a bucket without folders renames file by file, up to a limit.
    line="$bucket $mount gcsfuse rw,_netdev,allow_other,implicit_dirs,rename_dir_limit=100000,uid=\$(id -u),gid=\$(id -g) 0 0"
  else
    line="$nfs $mount nfs rw,_netdev,hard 0 0"
  fi
  echo "if ! mountpoint --quiet $mount; then"
  if [[ -n $bucket ]]; then
    cat <<'END'
  if ! command -v gcsfuse >/dev/null; then
    keys=/usr/share/keyrings/cloud.google.asc packages=https://packages.cloud.google.com/apt
    curl --silent --show-error --fail $packages/doc/apt-key.gpg | sudo tee $keys >/dev/null
    echo "deb [signed-by=$keys] $packages gcsfuse-$(lsb_release -cs) main" | sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
    sudo apt-get -o DPkg::Lock::Timeout=600 -qq install --yes gcsfuse
  fi
END
  else
    echo "  sudo apt-get -o DPkg::Lock::Timeout=600 -qq update"
    echo "  sudo apt-get -o DPkg::Lock::Timeout=600 -qq install --yes nfs-common"
  fi
  cat <<END
  sudo mkdir -p $mount
  grep -q ' $mount ' /etc/fstab || echo "$line" | sudo tee -a /etc/fstab >/dev/null
  sudo systemctl daemon-reload
  sudo systemctl start "\$(systemd-escape --path --suffix=mount $mount)"
fi
END
}

# A unit of systemd outlives the ssh session, and gets SIGTERM when the host is shut down.
run_script() {
  local needs=''
  [[ -z $bucket$nfs ]] || needs=" --property=RequiresMountsFor=$mount"
  # libtpu locks the memory that it maps for the device. And systemd would put the values of variables into the words.
  cat <<END
set -euo pipefail
if [ "\$(systemctl show $UNIT --property=SubState --value)" = running ]; then
  echo 'error: a run is going on here; stop it first, with launch/tpu.sh stop' >&2
  exit 1
fi
sudo systemctl stop $UNIT 2>/dev/null || true
sudo systemctl reset-failed $UNIT 2>/dev/null || true
rm -f txl/stopped
sudo systemd-run --quiet --unit=$UNIT --remain-after-exit --uid="\$(id -u)" --gid="\$(id -g)" \\
  --working-directory="\$HOME" --setenv=HOME="\$HOME" --setenv=PATH="\$HOME/txl/venv/bin:\$PATH" \\
  --setenv=PYTHONUNBUFFERED=1 --property=TimeoutStopSec=600 --property=LimitMEMLOCK=infinity$needs \\
  env $(quoted "${program[@]//\$/\$\$}")
END
}

poll_script() {
  cat <<END
echo "run \$(systemctl show $UNIT --property=SubState --value) \$(systemctl show $UNIT --property=ExecMainStatus --value) \$(test -e txl/installed && echo installed || echo bare) \$(test -e txl/stopped && echo stopped || echo wanted)"
END
}

# What the run is doing, in one word for all hosts.
poll() {
  local lines
  lines=$(on_host all "$(poll_script)" 2>/dev/null) || {
    echo unreachable
    return
  }
  awk -v saving=$SAVING '
    $1 != "run" { next }
    { hosts++ }
    $4 == "bare" { bare++ }
    $2 == "exited" && $3 == 0 { finished++; next }
    $2 != "dead" && $2 != "exited" && $2 != "failed" { running++; next }
    $5 == "stopped" || ($2 == "failed" && $3 == saving) { stopped++; next }
    $2 == "dead" { idle++; next }
    $2 == "exited" { crashed++; next }  # By a signal that nobody asked for, and that systemd calls a clean end.
    $3 == 1 || $3 == 2 { mistaken++; next }
    { crashed++ }
    END {
      if (!hosts) print "unreachable"
      else if (bare && !running) print "bare"
      else if (idle == hosts) print "idle"
      else if (finished == hosts) print "finished"
      else if (idle || crashed) print "crashed"  # A host that has started anew knows of no run.
      else if (mistaken) print "failed"
      else if (running) print "running"
      else print "stopped"
    }' <<<"$lines"
}

# ---- gcloud ----

on_host() { # Number, or all; script.
  execute gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --quiet --command="$2"
}

describe() {
  execute gcloud compute tpus queued-resources describe "$name" --zone="$zone" --format='value(state.state)'
}

# The state of the request; ABSENT if there is none, UNKNOWN if gcloud could not tell.
state() {
  local told
  if told=$(describe 2>&1); then
    tail -n 1 <<<"$told"
  elif [[ $told == *NOT_FOUND* ]]; then
    echo ABSENT
  else
    tail -n 1 <<<"$told" >&2
    echo UNKNOWN
  fi
}

# ---- Words ----

# Runs a command, or prints it as a shell reads it.
execute() {
  if [[ -z $dry_run ]]; then
    "$@"
  else
    quoted "$@"
  fi
}

# Words as a shell reads them. Unlike printf %q it leaves lines and flags readable.
quoted() {
  local word out='' safe='^[-A-Za-z0-9_./:=,@%+]+$'
  for word in "$@"; do
    [[ $word =~ $safe ]] || word="'${word//\'/\'\\\'\'}'"
    out+=" $word"
  done
  echo "${out# }"
}

say() { echo "$(date '+%F %T')  $*"; }

refuse() {
  echo "error: $*" >&2
  exit 2
}

fail() { # Sentence, exit code.
  echo "error: $1" >&2
  exit "${2:-1}"
}

main "$@"
