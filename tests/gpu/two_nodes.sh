#!/usr/bin/env bash
# A command beside two Ray nodes, processes of this host with a GPU each; they end with it:
#     two_nodes.sh python3 tests/gpu/check.py --modes tp2-ray,pp2-ray --jobs 1
# vLLM asks that nodes have addresses of their own: those of the loopback device serve.
set -u
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
export PYTHONPATH="$(cd "$(dirname "$0")/../.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
work=$(mktemp -d /tmp/vlens-ray-XXXXXX)
nodes=()

node() {  # its address, its GPU, and what makes it the first or another node
    CUDA_VISIBLE_DEVICES=$2 VLLM_HOST_IP=$1 setsid "$python" -m ray.scripts.scripts start --block --node-ip-address="$1" \
        --num-gpus=1 --num-cpus=8 --object-store-memory=500000000 --temp-dir="$work" "${@:3}" >"$work/node-$1.log" 2>&1 &
    nodes+=($!)
}

stop() {
    for pid in "${nodes[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done
    wait "${nodes[@]}" 2>/dev/null
    rm -rf "$work"
}
trap stop EXIT

ready() {
    "$python" - "$1" <<'PY'
import sys, time
import ray

for _ in range(60):
    try:
        ray.init(address="auto", logging_level="ERROR")
        if len([node for node in ray.nodes() if node["Alive"]]) >= int(sys.argv[1]):
            sys.exit(0)
        ray.shutdown()
    except ConnectionError:
        pass
    time.sleep(0.5)
sys.exit(f"no {sys.argv[1]} Ray nodes within a minute")
PY
}

# As Ray finds it, whatever it is told of the loopback device.
first=$("$python" -c "import ray.util; print(ray.util.get_node_ip_address())")
export RAY_ADDRESS=$first:6399
node "$first" 0 --head --port=6399 --disable-usage-stats --include-dashboard=false
ready 1 || { tail -20 "$work"/node-*.log; exit 1; }
node 127.0.0.2 1 --address="$RAY_ADDRESS"
ready 2 || { tail -20 "$work"/node-*.log; exit 1; }
VLLM_HOST_IP=$first "$@"
