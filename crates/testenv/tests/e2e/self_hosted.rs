//! A server whose machine is also a host of an SSH fleet: it reaches itself at 127.0.0.1.

use std::{
    fs,
    net::TcpStream,
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use windlass_testenv::server::{TOKEN, binary_path};
use windlass_testkit::lab::{Lab, LabHost};

const TIMEOUT: Duration = Duration::from_secs(150);
const PORT: u16 = 3000;

/// Copies both binaries to a host and starts the server there; it ends with the host.
fn start_server_on(host: &LabHost) {
    let dir = host.path("/var/windlass");
    fs::create_dir_all(&dir).unwrap();
    for name in ["windlass", "windlass-agent"] {
        fs::copy(binary_path(name).unwrap(), dir.join(name)).unwrap();
    }
    let start = format!(
        "cd /var/windlass && DOCKER_HOST=unix:///none setsid ./windlass server --host 0.0.0.0 --port {PORT} \
         --data-dir /var/windlass/data --admin-token {TOKEN} --allow-host-networks 127.0.0.0/8 > log 2>&1 < /dev/null &"
    );
    assert!(host.run(&start).unwrap().status.success());
    let started_at = Instant::now();
    while TcpStream::connect((host.addr(), PORT)).is_err() {
        assert!(started_at.elapsed() < TIMEOUT, "no server: {}", server_log(host));
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn server_log(host: &LabHost) -> String {
    fs::read_to_string(host.path("/var/windlass/log")).unwrap_or_default()
}

/// Runs the command line, outside of the host.
fn windlass(host: &LabHost, dir: &Path, args: &[&str]) -> String {
    let mut command = Command::new(binary_path("windlass").unwrap());
    command.args(args).current_dir(dir).stdin(Stdio::null()).env("HOME", dir).env("WINDLASS_HOME", dir);
    command.env("WINDLASS_URL", format!("http://{}:{PORT}", host.addr())).env("WINDLASS_TOKEN", TOKEN);
    let Output { status, stdout, stderr } = command.output().unwrap();
    let message = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "windlass {args:?}: {message}\n{}", server_log(host));
    String::from_utf8(stdout).unwrap()
}

#[test]
fn the_servers_own_machine_can_be_an_ssh_host_and_is_cleaned_up_afterwards() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    start_server_on(host);
    let dir = lab.key_file().with_file_name("person");
    fs::create_dir(&dir).unwrap();
    let fleet = format!(
        "type: fleet\nname: own\nssh_config:\n  user: root\n  identity_file: {}\n  hosts: [127.0.0.1]\n",
        lab.key_file().display()
    );
    fs::write(dir.join("own.yml"), fleet).unwrap();
    let task = "type: task\nname: here\nfleets: [own]\ncommands: [echo here]\n\
                resources: {cpu: 1.., memory: 0.., disk: null}\n";
    fs::write(dir.join("here.yml"), task).unwrap();
    windlass(host, &dir, &["apply", "-y", "-f", "own.yml"]);
    assert_eq!(windlass(host, &dir, &["apply", "-y", "-f", "here.yml"]), "here\n");
    windlass(host, &dir, &["fleet", "delete", "-y", "--wait", "own"]);
    assert!(!host.path("/var/lib/windlass").exists(), "{}", server_log(host));
    // The local fleet of the machine is independent.
    fs::write(dir.join("here.yml"), task.replace("own", "local").replace("name: here", "name: there"))
        .unwrap();
    assert_eq!(windlass(host, &dir, &["apply", "-y", "-f", "here.yml"]), "here\n");
}
