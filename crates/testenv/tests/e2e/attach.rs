//! Jobs on other hosts from the command line: the output of all nodes, a shell, a port.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
};

use windlass_testkit::lab::Lab;

use crate::{
    containers::{IMAGE, image},
    hosts::fleet,
    test_env::{HostMode, TestEnv},
};

const RESOURCES: &str = "resources: {cpu: 1.., memory: 0.., disk: null}\nuser: root\n";
/// Serves one page on the job's loopback.
const PAGE: &str = "busybox mkdir -p /tmp/page && echo pong > /tmp/page/index.html && \
                    exec busybox httpd -f -p 127.0.0.1:7007 -h /tmp/page";

/// An attached command, ended with the test.
struct AttachGuard(Child);

impl Drop for AttachGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the job, attaches to it, and connects by shell and by port.
pub(crate) fn assert_shell_and_port_work(env: &TestEnv, image: &str) {
    let dir = env.home().to_owned();
    let job = format!("type: task\nname: open\n{image}commands:\n  - {PAGE}\n{RESOURCES}");
    fs::write(dir.join("open.yml"), job).unwrap();
    let applied = env.windlass(&dir, &["apply", "-f", "open.yml", "-y", "-d"]);
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));

    let mut attach = env.command(&dir, &["attach", "open", "-p", "*:7007"]);
    let mut attached = AttachGuard(attach.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut address = None;
    let mut seen = Vec::new();
    for line in BufReader::new(attached.0.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some((_, reported)) = line.split_once("Port 7007 of the job: http://") {
            address = Some(reported.to_owned());
            break;
        }
        seen.push(line);
    }
    let address = address.unwrap_or_else(|| panic!("no port is told of: {seen:#?}"));
    assert!(fetch_page(&address).ends_with("pong\n"), "{}", fetch_page(&address));

    let mut ssh = Command::new("ssh");
    ssh.arg("-F").arg(dir.join(".ssh/config")).args(["-o", "BatchMode=yes", "open"]);
    let shell = ssh.arg("cat /tmp/page/index.html").stdin(Stdio::null()).output().unwrap();
    let message = String::from_utf8_lossy(&shell.stderr).into_owned();
    assert_eq!(
        (String::from_utf8_lossy(&shell.stdout).as_ref(), shell.status.code()),
        ("pong\n", Some(0)),
        "{message}"
    );
}

/// Repeats the request, because a job that has just started may not listen yet.
fn fetch_page(address: &str) -> String {
    for _ in 0..200 {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut answer = String::new();
        let requested =
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").and_then(|()| stream.read_to_string(&mut answer));
        if requested.is_ok() && !answer.is_empty() {
            return answer;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("nobody answers at {address}");
}

#[tokio::test]
async fn shell_and_port_forwarding_reach_a_job_on_an_ssh_host() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    assert_shell_and_port_work(&env, "");
}

#[tokio::test]
async fn shell_and_port_forwarding_reach_a_docker_job() {
    image();
    let env = TestEnv::new(HostMode::Containers).await;
    assert_shell_and_port_work(&env, &format!("image: {IMAGE}\n"));
}

#[tokio::test]
async fn output_of_all_nodes_is_shown_with_a_rank_prefix_per_line() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let dir = env.home().to_owned();
    let commands = "commands:\n  - 'for i in 1 2 3; do echo line $i of $DSTACK_NODE_RANK; done'\n";
    fs::write(dir.join("pair.yml"), format!("type: task\nname: pair\nnodes: 2\n{commands}{RESOURCES}"))
        .unwrap();
    let done = env.windlass(&dir, &["apply", "-f", "pair.yml", "-y"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8(done.stdout).unwrap().replace("\r\n", "\n");
    for rank in 0..2 {
        let own: Vec<&str> = text.lines().filter(|line| line.starts_with(&format!("{rank}-0 | "))).collect();
        let want: Vec<String> = (1..=3).map(|i| format!("{rank}-0 | line {i} of {rank}")).collect();
        assert_eq!(own, want, "{text}");
    }
    assert_eq!(text.lines().count(), 6, "{text}");
}
