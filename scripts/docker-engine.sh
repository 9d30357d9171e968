#!/usr/bin/env bash
# Makes sure a Docker Engine answers. Starts Debian's one where none does; never touches
# a running engine or its configuration. Idempotent; prints one line.
#
#   scripts/docker-engine.sh          start where needed, wait until it answers
#   scripts/docker-engine.sh --check  only tell (exit code 1 when none answers)
#
# Where it is started by hand (PID 1 is not systemd) it is started without a bridge and
# without firewall rules: by default dockerd sets the FORWARD policy to DROP, turns on
# ip_forward and takes over `docker0`, which breaks the routing of whatever else runs on
# the machine. Sandboxes get their network from the edge and never from Docker. An
# operator's own /etc/docker/daemon.json wins: with it dockerd gets no flags from here.
set -euo pipefail

readonly RUN_DIR=/run/dsec-docker
readonly PID_FILE=/var/run/docker.pid
readonly CONTAINERD_PID_FILE=/var/run/docker/containerd/containerd.pid
readonly ANSWER_DEADLINE_S=60
readonly LOG="$RUN_DIR/dockerd.log"

engine_version() {
  timeout 10 docker version --format '{{.Server.Version}}' 2>/dev/null
}

# True while the process of a pid file really runs. An engine killed under a PID 1 that
# does not reap stays a zombie for ever, and dockerd takes a zombie for a living rival.
pid_file_lives() {
  local pid state
  pid=$(cat "$1" 2>/dev/null) || return 1
  state=$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$pid/status" 2>/dev/null) || return 1
  [[ -n $state && $state != Z && $state != X ]] || return 1
  grep -q "^$2" "/proc/$pid/comm" 2>/dev/null
}

drop_stale_pid_files() {
  pid_file_lives "$PID_FILE" dockerd || rm -f "$PID_FILE"
  pid_file_lives "$CONTAINERD_PID_FILE" containerd || rm -f "$CONTAINERD_PID_FILE"
}

under_systemd() { [[ -d /run/systemd/system && $(cat /proc/1/comm) == systemd ]]; }

start_by_hand() {
  local flags=()
  [[ -e /etc/docker/daemon.json ]] ||
    flags=(--bridge=none --iptables=false --ip6tables=false --ip-forward=false)
  drop_stale_pid_files
  if [[ -e $PID_FILE ]]; then
    return 0 # someone's dockerd is on its way up: wait for it
  fi
  ulimit -n "$(ulimit -Hn)"
  # 9 is the lock: an inherited one would be held for as long as the engine lives.
  setsid nohup dockerd "${flags[@]}" >>"$LOG" 2>&1 </dev/null 9>&- &
}

wait_until_it_answers() {
  local deadline=$((SECONDS + ANSWER_DEADLINE_S))
  until engine_version >/dev/null; do
    if ((SECONDS > deadline)); then
      echo "docker engine: no answer after ${ANSWER_DEADLINE_S} s; last lines of its log:" >&2
      if under_systemd; then journalctl -u docker -n 20 --no-pager >&2; else tail -n 20 "$LOG" >&2; fi
      exit 1
    fi
    sleep 0.2
  done
}

main() {
  local version
  if version=$(engine_version); then
    echo "docker engine: $version answers"
    return
  fi
  [[ ${1:-} != --check ]] || { echo "docker engine: none answers"; exit 1; }
  if [[ -n ${DOCKER_HOST:-} ]]; then
    echo "docker engine: DOCKER_HOST is set but nothing answers there; unset it or start that engine" >&2
    exit 1
  fi
  [[ $EUID -eq 0 ]] || { echo "docker engine: none answers and starting one needs root" >&2; exit 1; }
  command -v dockerd >/dev/null || { echo "docker engine: dockerd is not installed (scripts/setup.sh installs it)" >&2; exit 1; }
  mkdir -p "$RUN_DIR"
  exec 9>"$RUN_DIR/lock"
  flock -w "$ANSWER_DEADLINE_S" 9 # two set-ups at once start one engine
  if ! engine_version >/dev/null; then
    if under_systemd; then systemctl start docker; else start_by_hand; fi
    wait_until_it_answers
    echo "docker engine: started, $(engine_version) answers"
  fi
}

main "$@"
