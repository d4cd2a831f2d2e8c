#!/usr/bin/env bash
# Makes the lock files of the image again (glibc 2.36 of Debian 12): the newest versions that setup.cfg allows, with hashes. Needs uv and a network.
#
#   launch/container/lock.sh [--dry_run]
set -euo pipefail

cd "$(dirname "$0")/../.."
case ${1:-} in
  '') run=() ;;
  --dry_run) run=(echo) ;;
  *)
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
    exit 2
    ;;
esac
for accelerator in cpu tpu cuda13; do
  extras=(--extra=plots --extra=gcs)
  [[ $accelerator == cpu ]] || extras+=(--extra="$accelerator")
  ${run[@]+"${run[@]}"} uv pip compile setup.cfg --quiet --upgrade --generate-hashes --no-header --no-annotate \
    --python-version=3.12 --python-platform=x86_64-manylinux_2_36 "${extras[@]}" \
    --output-file="launch/container/$accelerator.lock"
done
