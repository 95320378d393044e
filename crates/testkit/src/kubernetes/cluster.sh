#!/usr/bin/env bash
# A real Kubernetes with one node for tests: `cluster.sh up DIR BIN` starts it and prints its kubeconfig,
# `cluster.sh down DIR` ends it, and `cluster.sh restart DIR NAME` ends one of its programs at once and starts it again.
# BIN contains kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and etcd. Needs root.
# Ports, sockets, state and logs are below DIR; nothing else of the machine is touched but one bridge.
set -euo pipefail
verb=${1:?up, down or restart}; dir=${2:?a directory}; mkdir -p "$dir"; dir=$(cd "$dir" && pwd)
bridge=wk$(printf '%s' "$dir" | cksum | cut -c1-8)

down() {
  for p in kubelet scheduler controller-manager apiserver etcd containerd; do
    [ -f "$dir/$p.pid" ] || continue
    if [ $p = containerd ]; then  # first the pods' own processes, then their keeper
      for t in $(ctr -a "$dir/ctd.sock" -n k8s.io tasks ls -q 2>/dev/null); do ctr -a "$dir/ctd.sock" -n k8s.io tasks kill -s KILL "$t" 2>/dev/null || true; done
      sleep 0.5
      for t in $(ctr -a "$dir/ctd.sock" -n k8s.io tasks ls -q 2>/dev/null); do ctr -a "$dir/ctd.sock" -n k8s.io tasks rm -f "$t" 2>/dev/null || true; done
    fi
    pid=$(cat "$dir/$p.pid"); kill "$pid" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -9 "$pid" 2>/dev/null || true; rm -f "$dir/$p.pid"
  done
  awk -v d="$dir/" 'index($2, d) == 1 {print $2}' /proc/mounts | sort -r | while read -r m; do umount -l "$m" 2>/dev/null || true; done
  ip link del "$bridge" 2>/dev/null || true
}
[ "$verb" = down ] && { down; exit 0; }

# Each program has a script, so that it can be started again.
run() { setsid "$dir/$1.run" >>"$dir/$1.log" 2>&1 & echo $! >"$dir/$1.pid"; }
start() { local name=$1; shift; { echo '#!/bin/sh'; printf 'exec'; printf " '%s'" "$@"; echo; } >"$dir/$name.run"; chmod +x "$dir/$name.run"; run "$name"; }
if [ "$verb" = restart ]; then
  cd "$dir"; kill -9 "$(cat "$3.pid")"; while kill -0 "$(cat "$3.pid")" 2>/dev/null; do sleep 0.05; done; run "$3"; exit 0
fi
bin=$(cd "${3:?the directory of the binaries}" && pwd)
port() { python3 -c 'import socket;s=socket.socket();s.bind(("127.0.0.1",0));print(s.getsockname()[1])'; }
cd "$dir"; E=$(port); EP=$(port); A=$(port); K=$(port); KH=$(port); C=$(port); S=$(port); N=$((RANDOM % 200 + 20))

# Images: a pause and a busybox, imported without a registry.
cat >image.py <<'P'
import hashlib, io, json, sys, tarfile
def tar(files):
    b = io.BytesIO(); t = tarfile.open(fileobj=b, mode="w")
    for d in ("bin", "tmp", "etc"):
        i = tarfile.TarInfo(d); i.type = tarfile.DIRTYPE; i.mode = 0o1777 if d == "tmp" else 0o755; t.addfile(i)
    data = open("/bin/busybox", "rb").read()
    i = tarfile.TarInfo("bin/busybox"); i.size = len(data); i.mode = 0o755; t.addfile(i, io.BytesIO(data))
    for n in files:
        i = tarfile.TarInfo("bin/" + n); i.type = tarfile.SYMTYPE; i.linkname = "busybox"; t.addfile(i)
    if files:  # jobs without an image use bash
        script = b'#!/bin/sh\nexec /bin/sh "$@"\n'
        i = tarfile.TarInfo("bin/bash"); i.size = len(script); i.mode = 0o755; t.addfile(i, io.BytesIO(script))
    t.close(); return b.getvalue()
out = tarfile.open(sys.argv[1], "w"); manifest = []
def add(name, data): i = tarfile.TarInfo(name); i.size = len(data); out.addfile(i, io.BytesIO(data))
for ref, applets, cmd in (("windlass.test/pause:1", [], ["/bin/busybox", "sleep", "infinity"]), ("windlass.test/busybox:1", "sh cat ls echo sleep env id true false mkdir rm cp mv grep head tail tar wc sha256sum dd kill ps nc wget httpd hostname tr date seq".split(), ["/bin/sh"])):
    layer = tar(applets); h = hashlib.sha256(layer).hexdigest()
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Cmd": cmd, "Env": ["PATH=/bin"]}, "rootfs": {"type": "layers", "diff_ids": ["sha256:" + h]}, "history": [{}]}).encode()
    c = hashlib.sha256(config).hexdigest(); add(h + ".tar", layer); add(c + ".json", config)
    manifest.append({"Config": c + ".json", "RepoTags": [ref], "Layers": [h + ".tar"]})
add("manifest.json", json.dumps(manifest).encode()); out.close()
P
python3 image.py images.tar
mkdir -p cni; cat >cni/10.conflist <<J
{"cniVersion":"0.4.0","name":"wl","plugins":[{"type":"bridge","bridge":"$bridge","isGateway":true,"ipMasq":false,"ipam":{"type":"host-local","subnet":"10.98.$N.0/24","dataDir":"$dir/ipam"}},{"type":"portmap","capabilities":{"portMappings":true}}]}
J
cat >ctd.toml <<T
version = 2
root = "$dir/ctd"
state = "$dir/ctds"
[grpc]
  address = "$dir/ctd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "windlass.test/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$dir/cni"
T
cat >kubelet.yaml <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupRoot: /
cgroupsPerQOS: true
enforceNodeAllocatable: []
containerRuntimeEndpoint: unix://$dir/ctd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
port: $K
healthzPort: $KH
readOnlyPort: 0
imageGCHighThresholdPercent: 100
imageMinimumGCAge: 24h
evictionHard: {nodefs.available: "1%", imagefs.available: "1%", memory.available: "100Mi"}
resolvConf: /etc/resolv.conf
Y
cat >kubeconfig <<Y
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:$A", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: token-admin}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
Y
echo 'token-admin,admin,admin,system:masters' >tokens.csv
[ -f sa.key ] || { openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null; }
start containerd containerd --config ctd.toml
start etcd "$bin/etcd" --data-dir etcd --listen-client-urls "http://127.0.0.1:$E" --advertise-client-urls "http://127.0.0.1:$E" --listen-peer-urls "http://127.0.0.1:$EP" --initial-advertise-peer-urls "http://127.0.0.1:$EP" --initial-cluster "default=http://127.0.0.1:$EP" --unsafe-no-fsync
start apiserver "$bin/kube-apiserver" --etcd-servers="http://127.0.0.1:$E" --secure-port="$A" --bind-address=127.0.0.1 --cert-dir=certs --service-account-key-file=sa.pub --service-account-signing-key-file=sa.key \
  --service-account-issuer=https://kubernetes.default.svc --token-auth-file=tokens.csv --authorization-mode=RBAC,Node --service-cluster-ip-range="10.99.$N.0/24" --allow-privileged=true --kubelet-preferred-address-types=InternalIP
for _ in $(seq 120); do [ "$(curl -sk --max-time 2 -H 'Authorization: Bearer token-admin' "https://127.0.0.1:$A/readyz" || true)" = ok ] && break; sleep 0.25; done
start controller-manager "$bin/kube-controller-manager" --kubeconfig kubeconfig --service-account-private-key-file sa.key --leader-elect=false --secure-port="$C" --bind-address=127.0.0.1
start scheduler "$bin/kube-scheduler" --kubeconfig kubeconfig --leader-elect=false --secure-port="$S" --bind-address=127.0.0.1
for _ in $(seq 40); do [ -S ctd.sock ] && ctr -a "$dir/ctd.sock" -n k8s.io images import images.tar >/dev/null 2>&1 && break; sleep 0.25; done
start kubelet "$bin/kubelet" --kubeconfig kubeconfig --config kubelet.yaml --root-dir "$dir/kubelet" --hostname-override node1
for _ in $(seq 160); do
  curl -sk -H 'Authorization: Bearer token-admin' "https://127.0.0.1:$A/api/v1/nodes/node1" 2>/dev/null | python3 -c 'import json,sys; n=json.load(sys.stdin); sys.exit(not any(c["type"]=="Ready" and c["status"]=="True" for c in n.get("status",{}).get("conditions",[])))' 2>/dev/null && { echo "$dir/kubeconfig"; exit 0; }
  sleep 0.25
done
echo "node is not ready; see $dir/*.log" >&2; exit 1
