//! Reachability on a host: from tasks on the host's network and on the bridge, and from a neighbour in a separate
//! network, to the agent, a runner, the engine, the cloud's metadata and the server's database.
//!
//! The origins are real containers and a real namespace; each attempts every connection that it can, and records the
//! responses.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::json;
use windlass_agent::shim::runtime::Runtime as _;
use windlass_api::agent::shim::TaskStatus;

use super::DockerHost;
use crate::support::{
    client::Client,
    shim::{Setup, Shim},
};

/// A service on the loopback of the host without authentication: what a database must not be, and what shows which
/// origins share the loopback.
fn start_open_service() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
            let _ = stream.read(&mut [0; 512]);
            let _ = stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\nanswered");
        }
    });
    port
}

/// Returns a script with everything that a task can attempt without prior knowledge. It records each response on a
/// line.
fn probe_script(paths: &[PathBuf], port: u16) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    format!(
        "cd /windlass/run; : > out
        for s in $(find / -xdev -type s 2>/dev/null); do
            case $s in /windlass/run/*) ;; *) echo \"socket $s\" >> out;; esac
        done
        for p in {} /run/windlass /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock; do
            [ -e $p ] && echo \"path $p\" >> out
        done
        grep -qE '@[^ ]*(windlass|shim|runner|docker|containerd)' /proc/net/unix && echo abstract >> out
        gate=$(ip route 2>/dev/null | awk '/^default/ {{ print $3 }}')
        for a in 127.0.0.1 $gate; do for p in 2375 2376 2377 10998 10999; do
            timeout 3 wget -q -O - http://$a:$p/ >/dev/null 2>&1 && echo \"port $a:$p\" >> out
        done; done
        timeout 3 wget -q -O - http://169.254.169.254/ >/dev/null 2>&1 && echo metadata >> out
        for a in 127.0.0.1 $gate; do
            timeout 3 wget -q -O - http://$a:{port}/ 2>/dev/null | grep -q answered && echo database >> out
        done
        exit 0",
        paths.join(" ")
    )
}

/// Sockets of the shim and of its tasks.
fn sockets(home: &Path) -> Vec<PathBuf> {
    let (mut found, mut todo) = (Vec::new(), vec![home.to_owned()]);
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                todo.push(entry.path());
            } else if kind.is_socket() {
                found.push(entry.path());
            }
        }
    }
    found
}

/// Inodes of the listening TCP sockets of this host.
fn listening_inodes() -> BTreeSet<String> {
    let mut inodes = BTreeSet::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words.get(3) == Some(&"0A") {
                inodes.insert(words[9].to_owned());
            }
        }
    }
    inodes
}

fn listens_on_tcp(pid: u32) -> bool {
    let listening = listening_inodes();
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    files.flatten().any(|file| {
        let to = fs::read_link(file.path()).unwrap_or_default();
        let inode =
            to.to_string_lossy().strip_prefix("socket:[").map(|rest| rest.trim_end_matches(']').to_owned());
        inode.is_some_and(|inode| listening.contains(&inode))
    })
}

#[tokio::test]
async fn x5_docker_tasks_and_other_users_cannot_reach_agent_runner_engine_or_metadata() {
    let shim = Shim::start(Setup::docker());
    let id = shim.submit(&shim.spec("victim"), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let port = start_open_service();
    let host = DockerHost::new().await;
    let mut targets = sockets(&shim.home());
    assert!(targets.len() >= 2, "the shim's and the runner's: {targets:?}");
    targets.push(host.socket.clone());
    targets.push(shim.home());

    // The script works: on the host's network the loopback is that of the host.
    let task = host.task(&probe_script(&targets, port)).await;
    assert_eq!(host.message(&task).await, "database", "from the host's network");
    let task = host.bridged_task(&probe_script(&targets, port)).await;
    assert_eq!(host.message(&task).await, "", "from the bridge");

    // A neighbour on the same host, with a separate network and other rights.
    let names: Vec<String> = targets.iter().map(|path| path.display().to_string()).collect();
    let tries = format!(
        "for p in {}; do [ -r $p ] || [ -w $p ] && echo $p; done
        grep -E '@[^ ]*(windlass|shim|runner|docker|containerd)' /proc/net/unix; exit 0",
        names[..names.len() - 1].join(" ")
    );
    let mut neighbour = Command::new("unshare");
    neighbour.args([
        "--net",
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "sh",
        "-c",
        &tries,
    ]);
    let message = neighbour.output().unwrap();
    assert!(message.status.success(), "{message:?}");
    assert_eq!(String::from_utf8_lossy(&message.stdout), "", "from a neighbour");

    // A process that finds a socket nevertheless has no credential, and there is no other listener.
    for socket in &targets[..targets.len() - 2] {
        let open = fs::metadata(socket).unwrap().permissions().mode() & 0o007;
        let above = fs::metadata(socket.parent().unwrap()).unwrap().permissions().mode() & 0o007;
        assert!(open == 0 || above == 0, "{} is open to everybody", socket.display());
    }
    let other = Client::unix(&shim.socket());
    assert_eq!(other.get("/api/tasks").await.status.as_u16(), 401);
    let stop = other.epoch(9).post(&format!("/api/tasks/{id}/terminate"), &json!({ "timeout": 0 })).await;
    assert_eq!(stop.status.as_u16(), 401);
    assert!(!listens_on_tcp(shim.pid()), "the agent has a port");
    assert!(host.docker.found().await.is_ok());
}
