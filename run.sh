#!/usr/bin/env bash
set -euo pipefail

home=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
venv=$home/.venv
python=$venv/bin/python
unset PYTHONHOME PYTHONPATH PYTHONSAFEPATH           # they would lead away from .venv and this folder

help() {
  cat <<'END'
Sparks, the front door of a model served by vLLM.

  ./run.sh                 start the gateway in front of the engine on this machine (SPARKS_UPSTREAM names another)
  ./run.sh --local         the same on a machine without vLLM: also installs and starts a small model
  ./run.sh keys ...        add, list and revoke people's keys; works while the gateway runs
  ./run.sh reload          let the running gateway read sparks.toml again; no stream is dropped
  ./run.sh engines         say how each engine is, since when and why; works while the gateway runs
  ./run.sh lint            look for mistakes and for lines out of form (ruff); nothing is changed
  ./run.sh test            run all tests, three at a time
  ./run.sh test pure       run tests/pure alone, some seconds; server, engines, clients likewise
  ./run.sh test [...]      other arguments go to pytest
  ./run.sh test --vllm     run the tests against real vLLM on the CPU (installs it: some minutes, 2.5 GB)
  ./run.sh test --clients  run other makers' client programs against the gateway (installs them: 400 MB a program)
  ./run.sh test --conformance [SUITE...]  run other people's test suites against the gateway (installs them: 1.2 GB)
  ./run.sh test --soak     run requests of all kinds for a quarter of an hour; SPARKS_SOAK names other seconds
  ./run.sh test --wheels   check that every pinned package has a wheel for x86-64 and aarch64, Python 3.11 to 3.13
  ./run.sh bench [...]     measure what the gateway costs, beside nginx; bench/README.md says how to read it
  ./run.sh --help          show this

The first start makes .venv with the packages pinned in requirements.txt; later ones follow when these or Python change.
It needs Python 3.11, 3.12 or 3.13; SPARKS_PYTHON names the one to use.
Settings are SPARKS_* variables or sparks.toml; sparks.example.toml explains every one.

Examples:
  ./run.sh keys add alice
  SPARKS_UPSTREAM=http://10.0.0.7:8000 SPARKS_BIND=0.0.0.0:8080 ./run.sh
  ./run.sh test pure
  ./run.sh test -x tests/server/test_chat.py
END
}

say() { printf '%s\n' "$*" >&2; }
fail() { say "run.sh: $1"; exit "${2:-1}"; }

# ---- Python

find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11)
  [ -z "${SPARKS_PYTHON:-}" ] || candidates=("$SPARKS_PYTHON")
  for candidate in "${candidates[@]}"; do
    # Run it: a name that is found can still be a version manager's empty shim.
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  [ -z "${SPARKS_PYTHON:-}" ] || fail "SPARKS_PYTHON: $SPARKS_PYTHON is no Python 3.11, 3.12 or 3.13"
  fail "Python 3.11, 3.12 or 3.13 is needed: apt install python3 python3-venv (or name one in SPARKS_PYTHON)"
}

identity() { "$1" -ISc 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null; }

same_python() {
  local now
  now=$(identity "${SPARKS_PYTHON:-$python}") && [ -x "$python" ] && [ "$now" = "$(cat "$venv/made-by" 2>/dev/null)" ]
}

make_venv() {
  local base
  base=$(find_python)
  "$base" -c 'import ensurepip, venv' 2>/dev/null || fail "this Python cannot make .venv: apt install python3-venv"
  check_venv
  say "making .venv with $("$base" --version)"
  rm -rf "$venv-old"
  [ ! -e "$venv" ] || mv "$venv" "$venv-old"       # it comes back if there can be no other
  if ! "$base" -m venv "$venv" >&2; then
    rm -rf "$venv"
    [ ! -e "$venv-old" ] || mv "$venv-old" "$venv"
    fail "$base could not make $venv"
  fi
  identity "$python" > "$venv/made-by"
  rm -rf "$venv-old"
}

# Ends with a line that says what to do where .venv cannot be made or changed, before anything is.
check_venv() {
  local folder
  if [ -L "$venv" ]; then
    fail "$venv is a link to $(readlink "$venv"), where not all is as requirements.txt wants it: set that up, or remove the link"
  fi
  [ ! -e "$venv" ] || [ -d "$venv" ] || fail "$venv is no folder: move it away, and a start makes one"
  same_python || can_write "$home" || fail "$home cannot be written to, and needs a .venv: let its owner run ./run.sh once"
  [ -d "$venv" ] || return 0
  while IFS= read -r folder; do
    [ "$folder" != "$venv" ] || can_write "$folder" && [ -w "$folder" ] && [ -x "$folder" ] ||
      fail "$venv has to be set up anew, and $folder cannot be changed: run ./run.sh as its owner, or remove $venv"
  done < <(find "$venv" -type d 2>/dev/null)
}

# A file that cannot be made there tells of more than [ -w ] does: root may write anywhere but where nobody may.
can_write() { [ -w "$1" ] && [ -x "$1" ] && ( : > "$1/.run.sh-$$" ) 2>/dev/null && rm -f "$1/.run.sh-$$"; }

# ---- packages

section() { awk -v name="$1" '/^# == /{wanted = $3 == name} wanted' "$home/requirements.txt"; }

installed() { section "$1" | cmp -s - "$venv/installed-$1"; }

ready() {
  local name
  same_python || return 1
  for name; do installed "$name" || return 1; done
}

show_large() {
  local line file size
  while read -r line; do
    case $line in
      "Downloading "*" MB)" | "Using cached "*" MB)")
        line=${line#Downloading } line=${line#Using cached } file=${line##*/}
        size=${file##*(}
        say "  ${file%%-*} ${size%)}" ;;
    esac
  done
}

install() {
  local log=$venv/pip.log
  rm -f "$venv/installed-$1"
  section "$1" > "$venv/wanted-$1"
  say "installing the packages for '$1': $(grep -c "^[^# ].*==" "$venv/wanted-$1")"
  if ! PIP_USER=0 PIP_TARGET='' PIP_PREFIX='' "$python" -m pip install --require-hashes --no-deps --only-binary :all: --no-input --disable-pip-version-check \
    --progress-bar off -r "$venv/wanted-$1" 2>&1 | tee "$log" | show_large; then
    grep -E 'Retrying|^ERROR' "$log" | tail -n 3 >&2
    fail "pip could not install the packages for '$1'; all it said is in $log"
  fi
  mv "$venv/wanted-$1" "$venv/installed-$1"        # last, so that an interrupted set-up is done again
}

# prepare SECTION...: .venv has these sections of requirements.txt.
prepare() {
  ready "$@" && return
  {
    if command -v flock >/dev/null; then
      flock --nonblock 9 || { say "waiting for another set-up to end"; flock 9; }
    fi
    local name
    if ! same_python; then make_venv
    elif ! ready "$@"; then check_venv
    fi
    for name; do installed "$name" || install "$name"; done
  } 9<"$home/run.sh"
}

# ---- what to start

test_with() {
  # A file's tests stay together: they share a gateway. In the order of the alphabet, long and short files mix.
  # Three at a time also on two cores: tests mostly wait.
  local several=(-n 3 --dist loadfile --no-loadscope-reorder)
  prepare gateway test local
  cd "$home"
  case ${1-} in
    --wheels) exec "$python" tests/support/wheels.py ;;
    --soak) prepare clients; SPARKS_SOAK=${SPARKS_SOAK:-900} exec "$python" -m pytest tests/server/test_storm.py tests/server/test_soak.py tests/engines/test_several.py "${@:2}" ;;
    --clients) prepare clients; exec "$python" -m pytest -m clients --run-clients "${@:2}" ;;
    --vllm) exec "$python" -m pytest -m vllm tests/engines --run-vllm "${@:2}" ;;
    --conformance) if [ $# = 1 ]; then conformance llm-comply schemathesis langchain bfcl; else conformance "${@:2}"; fi ;;
    "") exec "$python" -m pytest "${several[@]}" ;;
    pure) exec "$python" -m pytest tests/pure "${@:2}" ;;
    server | engines | clients) exec "$python" -m pytest "${several[@]}" "tests/$1" "${@:2}" ;;
    *) exec "$python" -m pytest "$@" ;;
  esac
}

conformance() {
  local files=("${@//-/_}")
  files=("${files[@]/#/tests/conformance/test_}")
  exec "$python" -m pytest -m conformance --run-conformance "${files[@]/%/.py}"
}

lint() {
  prepare gateway test
  cd "$home"
  "$python" -m ruff check && exec "$python" -m ruff format --check
}

alone() { [ $# -lt 2 ] || fail "$1 takes no argument, but there is '$2'; ./run.sh --help explains all" 2; }

case ${1-} in
  "") prepare gateway; exec "$python" "$home/sparks.py" ;;
  --local) alone "$@"; prepare gateway local; exec "$python" "$home/sparks.py" --local ;;
  reload) alone "$@"; prepare gateway; exec "$python" "$home/sparks.py" --reload ;;
  engines) alone "$@"; prepare gateway; exec "$python" "$home/sparks.py" --engines ;;
  keys) prepare gateway; exec "$python" "$home/keys.py" "${@:2}" ;;
  test) test_with "${@:2}" ;;
  lint) alone "$@"; lint ;;
  bench) prepare gateway; cd "$home"; exec "$python" -m bench "${@:2}" ;;
  -h | --help) alone "$@"; help ;;
  *) fail "there is no '$1'; ./run.sh --help explains what there is" 2 ;;
esac
