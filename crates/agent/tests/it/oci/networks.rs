//! Containers on the bridge: reachable on published ports, isolated from each other and from the metadata of the machine.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use windlass_agent::shim::runtime::Runtime;
use windlass_api::agent::shim::{NetworkMode, TaskStatus};
use windlass_testkit::wait::eventually_async;

use super::{OciHost, read, wait_written};
use crate::support::shim::{Setup, Shim};

/// Responds to every connection to port 8000 with the name of the container.
const SERVE_SCRIPT: &str = "cd /windlass/run; mkdir /www; hostname > /www/name; hostname -i > address
    httpd -p 8000 -h /www; touch up; sleep 600";

fn fetch(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(b"GET /name HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.split("\r\n\r\n").nth(1).map(|body| body.trim().to_owned()).filter(|body| !body.is_empty())
}

/// Interfaces of containers on this host.
fn interfaces() -> BTreeSet<String> {
    let entries = fs::read_dir("/sys/class/net").unwrap().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("wl-")).collect()
}

#[tokio::test]
async fn g9_oci_reports_the_mapped_ports_and_no_two_tasks_share_one() {
    let host = OciHost::new();
    let mut ports = BTreeSet::new();
    let mut running = Vec::new();
    for _ in 0..3 {
        let task = host.bridged_task(SERVE_SCRIPT).await;
        let handle = host.oci.create(&task).await.unwrap();
        let mapped = host.oci.start(&task, &handle).await.unwrap();
        assert_eq!(mapped.len(), 1);
        assert_eq!(mapped[0].container, 8000);
        assert!(ports.insert(mapped[0].host));
        assert_eq!(host.oci.start(&task, &handle).await.unwrap(), mapped, "a repeat says the same");
        running.push((task, handle, mapped[0].host));
    }
    for (task, handle, port) in &running {
        wait_written(task, "up").await;
        let name = eventually_async("the port answers", async || fetch(*port)).await;
        assert_eq!(handle.name, name, "the port leads to the task that reported it");
    }
    // Another shim finds the same ports.
    let again = host.reopen();
    let (task, handle, port) = &running[0];
    assert_eq!(again.start(task, handle).await.unwrap()[0].host, *port);
    for (task, ..) in &running {
        host.oci.remove(&task.dir, None).await.unwrap();
    }
    assert!(running.iter().all(|(_, _, port)| TcpStream::connect(("127.0.0.1", *port)).is_err()));
}

#[tokio::test]
async fn oci_tasks_on_the_bridge_cannot_reach_each_other() {
    let host = OciHost::new();
    let served = host.bridged_task(SERVE_SCRIPT).await;
    host.start(&served).await;
    wait_written(&served, "up").await;
    let address = read(&served, "address");
    // The loopback proves that the request itself works; the neighbour must not respond to it.
    let script = format!(
        "cd /windlass/run; mkdir /www; echo me > /www/name; httpd -p 8000 -h /www
        ask() {{ timeout 3 wget -q -O - http://$1:8000/name || echo none; }}
        ask 127.0.0.1 > out; ask {address} >> out; exit 0"
    );
    let request = host.bridged_task(&script).await;
    assert_eq!(host.message(&request).await, "me\nnone");
    // From the host it answers, so it is the bridge that separates them.
    assert!(TcpStream::connect(format!("{address}:8000")).is_ok());
}

/// Sends packets for neighbours by the host, as a container that may change its routes can.
const ROUTE_BY_HOST: &str = "gate=$(ip route | awk '/^default/ { print $3 }'); net=${gate%.*.*}
    ip route add $gate dev eth0 && ip route add $net.0.0/17 via $gate && ip route add $net.128.0/17 via $gate || exit 9";

#[tokio::test]
async fn oci_tasks_cannot_reach_each_other_around_the_bridge_port_either() {
    let host = OciHost::new();
    let mut served = host.bridged_task(&format!("{ROUTE_BY_HOST}\n{SERVE_SCRIPT}")).await;
    served.limits.capabilities.push("NET_ADMIN".to_owned());
    host.start(&served).await;
    wait_written(&served, "up").await;
    let address = read(&served, "address");
    let script = format!(
        "{ROUTE_BY_HOST}
        timeout 3 wget -q -O - http://{address}:8000/name > /windlass/run/out || echo none > /windlass/run/out; exit 0"
    );
    let mut request = host.bridged_task(&script).await;
    request.limits.capabilities.push("NET_ADMIN".to_owned());
    assert_eq!(host.message(&request).await, "none");
    assert!(TcpStream::connect(format!("{address}:8000")).is_ok());
}

#[tokio::test]
async fn oci_reports_the_exit_status_of_a_task_that_ended_before_its_ports_were_read() {
    let host = OciHost::new();
    let task = host.bridged_task("exit 5").await;
    let handle = host.start(&task).await;
    assert_eq!(host.wait(&task, &handle).await.code, Some(5));
    assert_eq!(host.oci.start(&task, &handle).await.unwrap(), []);
}

/// A network outside of this host: a namespace behind a pair of interfaces. It ends when it is dropped.
struct Outside {
    namespace: String,
    link: String,
    server: Option<Child>,
}

impl Outside {
    const HOST: &str = "203.0.113.1";
    const ADDRESS: &str = "203.0.113.2";

    fn new() -> Self {
        let id = std::process::id();
        let (namespace, link) = (format!("wlout{id}"), format!("wlo{id}"));
        let script = format!(
            "ip netns add {namespace} && ip link add {link} type veth peer name eth0 netns {namespace} \
             && ip address add {}/24 dev {link} && ip link set {link} up \
             && ip netns exec {namespace} sh -c 'ip link set lo up; ip address add {}/24 dev eth0; \
             ip link set eth0 up; ip address add 169.254.169.254/32 dev lo; ip route add default via {}' \
             && ip route add 169.254.169.254/32 via {}",
            Self::HOST,
            Self::ADDRESS,
            Self::HOST,
            Self::ADDRESS
        );
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        Self { namespace, link, server: None }
    }

    /// Serves files on port 8000; requests are logged in `log`.
    fn serve(&mut self, www: &Path) {
        let script = format!("exec busybox httpd -f -vv -p 8000 -h {}", www.display());
        let log = fs::File::create(www.join("log")).unwrap();
        self.server = Some(self.command(&script).stderr(log).spawn().unwrap());
    }

    /// Returns whether a connection from outside succeeds.
    fn can_connect(&self, address: &str) -> bool {
        let (host, port) = address.rsplit_once(':').unwrap();
        let script = format!("timeout 2 bash -c 'echo > /dev/tcp/{host}/{port}'");
        self.command(&script).stderr(Stdio::null()).status().unwrap().success()
    }

    fn command(&self, script: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace, "sh", "-c", script]);
        command
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
        let script = format!("ip link del {}; ip netns del {}", self.link, self.namespace);
        let _ = Command::new("sh").args(["-c", &script]).status();
    }
}

#[tokio::test]
async fn oci_tasks_on_the_bridge_reach_the_outside_by_the_address_of_the_host_but_no_metadata() {
    let host = OciHost::new();
    let mut outside = Outside::new();
    let www = host.scratch.path().join("www");
    fs::create_dir(&www).unwrap();
    fs::write(www.join("name"), "outside\n").unwrap();
    outside.serve(&www);
    eventually_async("the server outside is up", async || {
        TcpStream::connect((Outside::ADDRESS, 8000)).ok().map(drop)
    })
    .await;
    // The metadata service answers the host itself.
    assert!(TcpStream::connect("169.254.169.254:8000").is_ok());
    let script = format!(
        "cd /windlass/run; timeout 5 wget -q -O - http://{}:8000/name > out
        timeout 2 wget -q -O - http://169.254.169.254:8000/name >> out || echo none >> out; hostname -i > address",
        Outside::ADDRESS
    );
    let task = host.bridged_task(&script).await;
    assert_eq!(host.message(&task).await, "outside\nnone");
    let log = fs::read_to_string(www.join("log")).unwrap();
    assert!(log.contains(Outside::HOST) && !log.contains(&read(&task, "address")), "{log}");

    // Nothing from outside reaches a container, also if it knows the way.
    let served = host.bridged_task(SERVE_SCRIPT).await;
    host.start(&served).await;
    wait_written(&served, "up").await;
    let address = read(&served, "address");
    assert!(TcpStream::connect(format!("{address}:8000")).is_ok());
    let listener = TcpListener::bind((Outside::HOST, 0)).unwrap();
    assert!(outside.can_connect(&listener.local_addr().unwrap().to_string()), "the host can be reached");
    assert!(!outside.can_connect(&format!("{address}:8000")));
}

#[tokio::test]
async fn oci_containers_on_the_bridge_leave_no_interface_and_may_use_low_ports() {
    let host = OciHost::new();
    let script = "cd /windlass/run; ls /sys/class/net | tr '\\n' ' ' > out
        httpd -p 80 -h / && echo low >> out
        touch up; while ! [ -e go ]; do sleep 0.05; done";
    let before = interfaces();
    let mut task = host.bridged_task(script).await;
    task.spec.container_user = "1234".to_owned();
    std::os::unix::fs::chown(task.dir.run(), Some(1234), Some(1234)).unwrap();
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let address = fs::read_to_string(task.dir.root().join("container/files/hosts")).unwrap();
    let address: std::net::Ipv4Addr =
        address.lines().last().unwrap().split_whitespace().next().unwrap().parse().unwrap();
    let [.., c, d] = address.octets();
    let name = format!("wl-{:x}", u32::from(c) << 8 | u32::from(d));
    assert!(interfaces().contains(&name) && !before.contains(&name), "{name}: {:?}", interfaces());
    fs::write(task.dir.run().join("go"), "").unwrap();
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, read(&task, "out").as_str()), (Some(0), "eth0 lo low"), "{exit:?}");
    eventually_async("the interface is gone", async || (!interfaces().contains(&name)).then_some(())).await;
}

/// A service on the loopback of the host without authentication.
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

/// Returns a script that attempts to reach everything of the host, and records what answers.
fn probe_script(paths: &[PathBuf], port: u16) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    format!(
        "cd /windlass/run; : > out
        for s in $(find / -xdev -type s 2>/dev/null); do
            case $s in /windlass/run/*) ;; *) echo \"socket $s\" >> out;; esac
        done
        for p in {} /run/windlass /var/run/docker.sock; do [ -e $p ] && echo \"path $p\" >> out; done
        grep -qE '@[^ ]*(windlass|shim|runner|docker|containerd)' /proc/net/unix && echo abstract >> out
        gate=$(ip route 2>/dev/null | awk '/^default/ {{ print $3 }}')
        for a in 127.0.0.1 $gate; do for p in 2375 10998 10999; do
            timeout 3 wget -q -O - http://$a:$p/ >/dev/null 2>&1 && echo \"port $a:$p\" >> out
        done; done
        for a in 127.0.0.1 $gate; do
            timeout 3 wget -q -O - http://$a:{port}/ 2>/dev/null | grep -q answered && echo database >> out
        done
        exit 0",
        paths.join(" ")
    )
}

#[tokio::test]
async fn x5_oci_tasks_cannot_reach_the_agent_a_runner_or_services_on_the_loopback_of_the_host() {
    let shim = Shim::start(Setup::oci());
    let mut spec = shim.spec("victim");
    spec["network_mode"] = "bridge".into();
    let id = shim.submit(&spec, 1).await;
    let info = shim.wait_for(id, TaskStatus::Running).await;
    assert_eq!(info.ports.unwrap().len(), 1, "its SSH server is published");
    let port = start_open_service();
    let host = OciHost::new();
    let targets: Vec<PathBuf> = vec![shim.socket(), shim.home()];
    // The script works: on the host's network the loopback is that of the host.
    let task = host.task(&probe_script(&targets, port)).await;
    assert_eq!(host.message(&task).await, "database", "from the host's network");
    let task = host.bridged_task(&probe_script(&targets, port)).await;
    assert_eq!(host.message(&task).await, "", "from the bridge");
    assert!(Path::new("/sys/class/net/windlass0").exists());
}

#[tokio::test]
async fn oci_tasks_on_the_host_network_are_not_permitted_to_connect_to_cloud_metadata() {
    let host = OciHost::new();
    let script = "timeout 3 wget -q -O - http://169.254.169.254/ > /windlass/run/out 2>&1; exit 0";
    // One after the other: nothing of any task may be left when one is removed.
    for network in [NetworkMode::Host, NetworkMode::Bridge] {
        let mut task = host.task(script).await;
        task.spec.network_mode = network;
        let message = host.message(&task).await;
        assert!(message.contains("Operation not permitted"), "{network:?}: {message}");
        host.remove(&task).await;
    }
}
