//! Tests of the lab: hosts are isolated, can be partitioned, stopped and restarted, and leave nothing behind.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use windlass_testenv::ssh::SshTarget as _;
use windlass_testkit::lab::{GUEST, Lab, WORKER};
use windlass_testkit::wait::eventually;
use windlass_tunnel::{Connection, TunnelError};

const CAP: usize = 1 << 20;

fn stdout_text(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[tokio::test]
async fn lab_hosts_have_separate_networks_files_and_processes() {
    let lab = Lab::start(2).unwrap();
    let (one, two) = (lab.host(1), lab.host(2));
    let (first, _) = Connection::open(&one.target(), CAP).await.unwrap();
    let (second, _) = Connection::open(&two.target(), CAP).await.unwrap();
    assert_eq!(first.run_checked("hostname", b"").await.unwrap().trim(), "h1");
    assert_eq!(second.run_checked("hostname", b"").await.unwrap().trim(), "h2");
    first.run_checked("mkdir /var/lib/windlass && echo 1 > /var/lib/windlass/x", b"").await.unwrap();
    assert!(one.path("/var/lib/windlass/x").exists());
    assert!(second.run_checked("test -e /var/lib/windlass", b"").await.is_err());
    assert!(!std::path::Path::new("/var/lib/windlass/x").exists(), "this machine is left alone");
    let elsewhere = first.run_checked("touch /usr/local/here", b"").await;
    assert!(elsewhere.is_err(), "what is shared can only be read");
    first.run_checked("setsid sleep 4711 < /dev/null > /dev/null 2>&1 &", b"").await.unwrap();
    let sleeps = |host: &windlass_testkit::lab::LabHost| {
        host.processes().unwrap().iter().filter(|process| process.command == "sleep 4711").count()
    };
    // The shell starts it and exits; the time of its exec is unknown.
    let until = Instant::now() + Duration::from_secs(20);
    while sleeps(one) == 0 {
        assert!(Instant::now() < until, "{:?}", one.processes());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!((sleeps(one), sleeps(two)), (1, 0));
    // Hosts reach each other by name.
    let there = stdout_text(&one.run("timeout 5 bash -c 'head -c 4 < /dev/tcp/h2/22'").unwrap());
    assert_eq!(there, "SSH-");
    let (worker, _) = Connection::open(&two.target_as(WORKER), CAP).await.unwrap();
    assert_eq!(worker.run_checked("id -u; sudo -n id -u", b"").await.unwrap(), "2000\n0\n");
    let (guest, _) = Connection::open(&two.target_as(GUEST), CAP).await.unwrap();
    assert!(guest.run_checked("sudo -n true", b"").await.is_err());
}

#[tokio::test]
async fn lab_hosts_can_be_cut_off_hidden_and_rebooted() {
    let lab = Lab::start(2).unwrap();
    let host = lab.host(1);
    let (before, _) = Connection::open(&host.target(), CAP).await.unwrap();
    host.partition().unwrap();
    assert!(before.ping(Duration::from_millis(300)).await.is_err());
    host.heal().unwrap();
    before.ping(Duration::from_secs(20)).await.unwrap();

    before
        .run_checked("touch /var/lib/kept /run/lost /tmp/lost; setsid sleep 4711 > /dev/null 2>&1 &", b"")
        .await
        .unwrap();
    host.reboot().unwrap();
    assert!(host.processes().unwrap().iter().all(|process| process.command.contains("sshd")));
    let (after, _) = Connection::open(&host.target(), CAP).await.unwrap();
    assert_eq!(
        after.run_checked("ls /var/lib/kept; ls /run/lost /tmp/lost 2>/dev/null || true", b"").await.unwrap(),
        "/var/lib/kept\n"
    );

    let pinned = host.target();
    host.change_host_key().unwrap();
    let changed = Connection::open(&pinned, CAP).await.unwrap_err();
    assert!(matches!(changed, TunnelError::HostKeyChanged { .. }), "{changed}");

    let (gate, inner) = (lab.host(2), host);
    inner.hide().unwrap();
    let (through, _) = Connection::open(&inner.target_via(gate), CAP).await.unwrap();
    assert_eq!(through.run_checked("hostname", b"").await.unwrap().trim(), "h1");
}

#[test]
fn lab_leaves_nothing_behind() {
    let lab = Lab::start(1).unwrap();
    let (dir, pids) = (lab.key_file().parent().unwrap().to_owned(), lab.host(1).processes().unwrap());
    let number = dir.file_name().unwrap().to_str().unwrap().rsplit('-').next().unwrap().to_owned();
    drop(lab);
    assert!(!dir.exists());
    for process in pids {
        assert!(!std::path::Path::new(&format!("/proc/{}", process.pid)).exists(), "{process:?}");
    }
    let left = Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(!stdout_text(&left).contains(&format!("wlab{number}-")));
    let left = Command::new("ip").args(["-o", "link"]).output().unwrap();
    assert!(!stdout_text(&left).contains(&format!("wlab{number}@")));
    let groups = format!("wlab{number}-*");
    let groups = Command::new("find").args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", &groups]).output();
    assert_eq!(stdout_text(&groups.unwrap()), "");
}

#[test]
fn lab_of_a_killed_process_is_cleaned_up_by_the_next_lab() {
    const HOLD: &str = "WINDLASS_TEST_LAB_HOLD";
    if let Some(path) = std::env::var_os(HOLD) {
        // The process to be killed: this test, started again.
        let lab = Lab::start(1).unwrap();
        std::fs::write(path, lab.key_file().to_str().unwrap()).unwrap();
        loop {
            std::thread::park();
        }
    }
    let dir = windlass_testkit::temp_dir("lab-hold").unwrap();
    let path = dir.path().join("key");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "lab::lab_of_a_killed_process_is_cleaned_up_by_the_next_lab"]).env(HOLD, &path);
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let mut key = String::new();
    eventually("the lab is up", || {
        key = std::fs::read_to_string(&path).unwrap_or_default();
        !key.is_empty()
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let dir = std::path::Path::new(&key).parent().unwrap();
    assert!(dir.exists());
    let number = dir.file_name().unwrap().to_str().unwrap().rsplit('-').next().unwrap().to_owned();
    let _lab = Lab::start(0).unwrap();
    assert!(!dir.exists());
    let spaces = Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(!stdout_text(&spaces).contains(&format!("wlab{number}-")));
    let left = Command::new("pgrep").args(["-f", &format!("netns/wlab{number}-")]).output().unwrap();
    assert_eq!(stdout_text(&left), "");
}
