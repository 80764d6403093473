#!/usr/bin/env bash
# Launches an art-server on a rented machine: runs `sky launch` on scripts/sky.yaml with the variables of .env.
#
#   scripts/launch-cluster.sh [arguments of sky launch...]      -c NAME, --gpus H100:1, --infra aws, --yes...
#
# Needs SkyPilot with a cloud that `sky check` accepts. Without an ART_API_KEY in .env it writes a new one there.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v sky >/dev/null; then
  echo "launch-cluster.sh: SkyPilot is missing; in an environment without the server:" >&2
  echo "  pip install '.[sky]' 'skypilot[aws]'   # in this folder, or for your cloud; then: sky check" >&2
  exit 1
fi

cluster=art
previous=
for argument in "$@"; do
  case $previous in -c | --cluster) cluster=$argument ;; esac
  case $argument in
    --cluster=*) cluster=${argument#--cluster=} ;;
    -c?*) cluster=${argument#-c} ;;
  esac
  previous=$argument
done

umask 077
[ -f .env ] || cp .env.example .env
if ! grep -Eq '^[[:space:]]*(export[[:space:]]+)?ART_API_KEY=.' .env; then
  [ -z "$(tail -c 1 .env)" ] || echo >> .env # an editor may have left the last line open
  key=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
  printf 'ART_API_KEY=%s\n' "$key" >> .env
  echo "A new ART_API_KEY is in .env."
fi

sky launch --cluster "$cluster" --detach-run --secret-file .env scripts/sky.yaml "$@"

cat <<END

The server is being installed on '$cluster'. From here:

  sky logs $cluster                               shows how far it is
  ssh -N -L 7623:127.0.0.1:7623 $cluster          is a tunnel to it, as long as this command runs
  export \$(grep -o 'ART_API_KEY=.*' .env)      lets art.Backend() in, through the tunnel
  sky down $cluster                               gives the machine back, with its disk
END
