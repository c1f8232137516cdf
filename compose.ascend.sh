#!/bin/sh
# `docker compose` with compose.yaml and compose.ascend.yaml, for any number of NPUs:
#
#   ASCEND_DECODER_DEVICES=0-7 ASCEND_ENCODER_DEVICES=7 ./compose.ascend.sh up --build --wait --scale decoder=8
#
# The lists name the /dev/davinci<number> that the replicas of a service get, 0 unless given. No variable of a compose
# file holds a list, so this writes a third file from them. Each replica takes devices of its service's list for itself,
# one or TESSERA_TENSOR_PARALLEL_SIZE of them, and ends with an error where none are left (shared/hardware/npu_leases.py).
set -eu
cd "$(dirname "$0")"

# The numbers that a list such as 0,2,4-7 names, in order, each once.
numbers() {
  found=
  for part in $(printf %s "$1" | tr , ' '); do
    if ! printf %s "$part" | grep -Eqx '[0-9]+(-[0-9]+)?' || [ "${part%-*}" -gt "${part#*-}" ]; then
      echo "$0: '$1' is no list of devices, such as 0,2,4-7" >&2
      exit 2
    fi
    found="$found $(seq -s ' ' "${part%-*}" "${part#*-}")"
  done
  # shellcheck disable=SC2086
  printf '%s\n' $found | sort -nu
}

# The device files of a service.
files() {
  echo "  $1:"
  echo '    devices: !override'
  for number in $2; do
    echo "      - /dev/davinci$number"
  done
  for name in davinci_manager devmm_svm hisi_hdc; do
    echo "      - /dev/$name"
  done
}

decoders=$(numbers "${ASCEND_DECODER_DEVICES:-0}")
encoders=$(numbers "${ASCEND_ENCODER_DEVICES:-0}")
mkdir -p build
list=build/compose.ascend.devices.yaml
{
  echo 'services:'
  files decoder "$decoders"
  files vision-encoder "$encoders"
} >"$list.$$"
mv "$list.$$" "$list"
exec docker compose -f compose.yaml -f compose.ascend.yaml -f "$list" "$@"
