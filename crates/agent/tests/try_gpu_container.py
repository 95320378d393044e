#!/usr/bin/env python3
"""Runs a container without an engine on a machine with NVIDIA GPUs, and checks that it can use exactly one of them.

Needs root, openssl, a C compiler, and crun or runc. Three times: with the device files and the driver's libraries that the
agent finds, with specifications of the Container Device Interface that this script writes to a directory of its own, and with
those of the host, if it has any.

    sudo python3 crates/agent/tests/try_gpu_container.py --agent target/release/windlass-agent

To a machine that can install nothing, three files are to be carried: the agent (static), this script, and a static crun or
runc, given with `--oci-program PATH`; its digest is given to the agent too. A runc that is not static needs its
`libseccomp.so.2` in a directory that the linker searches. The last line is `all passed`.
"""

import argparse
import base64
import hashlib
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid

CREDENTIAL = "credential-of-the-trial"
PREFIX = b"windlass task specification 1\n"
TIMEOUT = 60
HOST_SPECIFICATIONS = ["/etc/cdi", "/var/run/cdi"]
# A group that the specification gives to the container.
GROUP = 61777

# Allocates memory on every GPU that the driver shows, and copies to it and back.
PROGRAM = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
typedef int (*call)();
#define GET(name) call name = (call)dlsym(lib, #name); if (!name) { puts("no " #name); return 2; }
#define DO(what) do { int status = (what); if (status) { printf("%s: %d\n", #what, status); return 3; } } while (0)
int main(void) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW);
    if (!lib) { puts(dlerror()); return 1; }
    GET(cuInit) GET(cuDeviceGetCount) GET(cuDeviceGetName) GET(cuCtxCreate_v2) GET(cuMemAlloc_v2)
    GET(cuMemcpyHtoD_v2) GET(cuMemcpyDtoH_v2)
    int count = 0;
    DO(cuInit(0));
    DO(cuDeviceGetCount(&count));
    printf("%d GPUs\n", count);
    for (int at = 0; at < count; at++) {
        char name[64] = "", sent[64] = "from the host", received[64] = "";
        void *context = 0;
        unsigned long long memory = 0;
        DO(cuDeviceGetName(name, 64, at));
        DO(cuCtxCreate_v2(&context, 0u, at));
        DO(cuMemAlloc_v2(&memory, (size_t)64));
        DO(cuMemcpyHtoD_v2(memory, sent, (size_t)64));
        DO(cuMemcpyDtoH_v2(received, memory, (size_t)64));
        printf("%s: %s\n", name, strcmp(sent, received) ? "wrong" : "copied");
    }
    return 0;
}
"""


def run(*words, **options):
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, **options).stdout


def libraries(program):
    text = run("ldd", program).decode()
    return {word for word in text.split() if word.startswith("/")}


def build_image(scratch):
    """An archive with a shell, the program, and the libraries of both and of nvidia-smi."""
    (scratch / "try.c").write_text(PROGRAM)
    run("cc", "-O1", "-w", "-o", str(scratch / "try-cuda"), str(scratch / "try.c"), "-ldl")
    programs = {"/bin/sh": "/bin/sh", "/bin/ls": "/bin/ls", "/bin/grep": "/bin/grep", "/bin/try-cuda": str(scratch / "try-cuda")}
    files = dict(programs)
    for program in [*programs.values(), shutil.which("nvidia-smi")]:
        files.update({library: library for library in libraries(program)})
    layer = scratch / "layer.tar"
    with tarfile.open(layer, "w") as tar:
        for target, source in sorted(files.items()):
            tar.add(os.path.realpath(source), target.lstrip("/"))
    digest = "sha256:" + hashlib.sha256(layer.read_bytes()).hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    config = {
        "architecture": machine,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    (scratch / "config.json").write_text(json.dumps(config))
    manifest = [{"Config": "config.json", "RepoTags": ["trial:1"], "Layers": ["layer.tar"]}]
    (scratch / "manifest.json").write_text(json.dumps(manifest))
    image = scratch / "image.tar"
    with tarfile.open(image, "w") as tar:
        for name in ["manifest.json", "config.json", "layer.tar"]:
            tar.add(scratch / name, name)
    return f"docker-archive:{image}"


class Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("shim", timeout=TIMEOUT)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self.path)


class Shim:
    """An enrolled agent, and calls to it."""

    def __init__(self, agent, scratch, arguments):
        self.home, self.key = scratch / "home", scratch / "key.pem"
        self.home.mkdir(exist_ok=True)
        self.instance = str(uuid.uuid4())
        run("openssl", "genpkey", "-algorithm", "ed25519", "-out", str(self.key))
        public = run("openssl", "pkey", "-in", str(self.key), "-pubout", "-outform", "DER")[-32:]
        words = ["--instance", self.instance, "--server-key", base64.b64encode(public).decode()]
        words += ["--credential-sha256", hashlib.sha256(CREDENTIAL.encode()).hexdigest()]
        run(agent, "shim", "enrol", "--home", str(self.home), *words)
        policy = scratch / "policy.yml"
        policy.write_text(f"mounts: [{scratch}]\n")
        words = [agent, "shim", "--runtime", "oci", "--home", str(self.home), "--policy", str(policy), *arguments]
        self.process = subprocess.Popen(words)
        self.wait(lambda: self.call("GET", "/api/healthcheck")[0] == 200, "the agent responds")

    def call(self, method, path, body=None, headers=None):
        connection = Connection(str(self.home / "shim.sock"))
        all_headers = {"authorization": f"Bearer {CREDENTIAL}", "windlass-epoch": "1", **(headers or {})}
        if body is not None:
            all_headers["content-type"] = "application/json"
        try:
            connection.request(method, path, body, all_headers)
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def wait(self, condition, what):
        end = time.monotonic() + TIMEOUT
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() > end or self.process.poll() is not None:
                sys.exit(f"failed to wait until {what}")
            time.sleep(0.05)

    def submit(self, spec):
        claims = {"instance_id": self.instance, "epoch": 1, "expires_at": int(time.time()) + 3600}
        body = json.dumps({**spec, "claims": claims}).encode()
        signed = self.home.parent / "signed"
        signed.write_bytes(PREFIX + body)
        signature = run("openssl", "pkeyutl", "-sign", "-rawin", "-inkey", str(self.key), "-in", str(signed))
        headers = {"windlass-signature": base64.b64encode(signature).decode()}
        status, reply = self.call("POST", "/api/tasks", body, headers)
        if status != 200:
            sys.exit(f"the task was refused: {status} {reply.decode()}")

    def info(self, task):
        return json.loads(self.call("GET", f"/api/tasks/{task}")[1])

    def run_job(self, image, script):
        task = str(uuid.uuid4())
        self.submit({"id": task, "name": "gpu", "image_name": image, "network_mode": "host", "gpu": 1})

        def has_started():
            info = self.info(task)
            if info["status"] == "terminated":
                sys.exit(f"the task ended: {info}")
            return info["status"] == "running"

        self.wait(has_started, "the task runs")
        runner = f"/api/tasks/{task}/runner/api"
        self.wait(lambda: self.call("GET", f"{runner}/healthcheck")[0] == 200, "the runner responds")
        job = {
            "run": {"id": "0", "run_spec": {"run_name": "gpu"}},
            "job_spec": {"commands": ["/bin/sh", "-c", script]},
        }
        for call, body in [("submit", job), ("run", {})]:
            status, reply = self.call("POST", f"{runner}/{call}", json.dumps(body))
            if status != 200:
                sys.exit(f"{call} failed: {status} {reply.decode()}")

        def has_ended():
            record = json.loads(self.call("GET", f"/api/tasks/{task}/job")[1])
            return record if record.get("log_complete") and record["states"][-1]["state"] != "running" else None

        record = self.wait(has_ended, "the job ends")
        output = self.call("GET", f"/api/tasks/{task}/logs?stream=job&offset=0")[1].decode()
        for call in ["terminate", "remove"]:
            self.wait(lambda: self.call("POST", f"/api/tasks/{task}/{call}", "{}")[0] == 200, call)
            self.wait(lambda: call == "remove" or self.info(task)["status"] == "terminated", "the task ends")
        return record["states"][-1].get("exit_status"), output

    def stop(self):
        self.process.terminate()
        self.process.wait()


def write_specifications(directory):
    """The device files of each GPU, and the driver's libraries at a path of the image's loader; one of another vendor."""
    table = run("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader").decode()
    devices = []
    for line in table.strip().splitlines():
        index, name = [part.strip() for part in line.split(",")]
        devices.append({"name": name, "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{index}"}]}})
    common = [f"/dev/{name}" for name in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]]
    mounts = [{"hostPath": shutil.which("nvidia-smi"), "containerPath": "/usr/bin/nvidia-smi"}]
    for line in run("ldconfig", "-p").decode().splitlines():
        name, _, path = line.strip().partition(" => ")
        name = name.split(" ")[0]
        if name.startswith(("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")):
            mounts.append({"hostPath": os.path.realpath(path), "containerPath": f"/opt/driver/{name}"})
    edits = {
        "deviceNodes": [{"path": path} for path in common if os.path.exists(path)],
        "mounts": [{**mount, "options": ["ro", "bind"]} for mount in mounts],
        "env": ["LD_LIBRARY_PATH=/opt/driver"],
        "additionalGids": [GROUP],
    }
    kind = {"cdiVersion": "0.7.0", "kind": "nvidia.com/gpu"}
    (directory / "b.json").write_text(json.dumps({**kind, "devices": devices, "containerEdits": edits}))
    other = {"cdiVersion": "0.7.0", "kind": "vendor.example/other", "devices": []}
    (directory / "a.json").write_text(json.dumps(other))


def check(shim, image, what, group=None):
    began = time.monotonic()
    status, output = shim.run_job(image, "grep Groups /proc/self/status; ls -C /dev; nvidia-smi -L && try-cuda")
    print(f"== {what}, {time.monotonic() - began:.2f} s\n{output}", flush=True)
    lines = output.splitlines()
    is_fine = "1 GPUs" in lines and any(line.endswith(": copied") for line in lines)
    if status != 0 or not is_fine or sum(line.startswith("GPU ") for line in lines) != 1:
        sys.exit(f"{what}: expected one usable GPU; exit status {status}")
    if group and str(group) not in lines[0].split():
        sys.exit(f"{what}: expected the group {group}: {lines[0]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", required=True)
    parser.add_argument("--oci-program", help="crun or runc, if it is not in a usual directory")
    options = parser.parse_args()
    arguments = []
    if options.oci_program:
        digest = hashlib.sha256(pathlib.Path(options.oci_program).read_bytes()).hexdigest()
        arguments = ["--oci-program", os.path.abspath(options.oci_program), "--oci-program-sha256", digest]
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="windlass-gpu-"))
    shim = None
    try:
        image = build_image(scratch)
        agent, specifications = os.path.abspath(options.agent), scratch / "cdi"
        specifications.mkdir()
        shim = Shim(agent, scratch, [*arguments, "--cdi-dir", str(specifications)])
        check(shim, image, "by device files and libraries")
        write_specifications(specifications)
        check(shim, image, "by a specification", GROUP)
        if any(list(pathlib.Path(path).glob("*")) for path in HOST_SPECIFICATIONS):
            shim.stop()
            shim = Shim(agent, scratch, arguments)
            check(shim, image, "by the specification of this host")
        print("all passed")
    finally:
        if shim:
            shim.stop()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
