//! A command without a server starts one, once.

use std::{
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
};

use windlass_testkit::ports;

use crate::TestHome;

fn read_running_file(home: &TestHome) -> serde_json::Value {
    let text = std::fs::read_to_string(home.path().join("home/server/running.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_first_command_starts_a_server_and_the_next_reuses_it() {
    let home = TestHome::new();
    let first = home.windlass(&["ps", "-o", "name"]).ok();
    first.says("No server is configured: started one at http://127.0.0.1:");
    first.says("windlass server stop");
    assert_eq!(first.stdout, "");
    let before = read_running_file(&home);
    let second = home.windlass(&["ps", "-o", "name"]).ok();
    assert_eq!((second.stderr.as_str(), read_running_file(&home)), ("", before));
    let token = std::fs::metadata(home.path().join("home/server/admin-token")).unwrap();
    assert_eq!(token.permissions().mode() & 0o777, 0o600);
    home.windlass(&["server", "status"]).ok();
    home.windlass(&["server", "stop"]).ok().says("Stopped the server at");
    assert_eq!(home.windlass(&["server", "status"]).code, Some(1));
    home.windlass(&["server", "stop"]).ok().says("No server is running");
}

#[test]
fn a_restarted_server_reuses_its_port_if_it_is_free() {
    let home = TestHome::new();
    let port = ports::reserve_free_port();
    home.0.file("home/server/port", &format!("{port}\n"));
    home.windlass(&["ps"]).ok();
    assert_eq!(read_running_file(&home)["url"], format!("http://127.0.0.1:{port}"));
    home.windlass(&["server", "stop"]).ok();
    // Another process uses the port now: the server selects another one, and keeps it.
    let taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    home.windlass(&["ps"]).ok();
    let url = read_running_file(&home)["url"].clone();
    assert_ne!(url, format!("http://127.0.0.1:{port}"));
    let kept = std::fs::read_to_string(home.path().join("home/server/port")).unwrap();
    assert!(url.as_str().unwrap().ends_with(&format!(":{}", kept.trim())), "{url} {kept}");
    drop(taken);
}

#[test]
fn server_start_applies_its_flags() {
    let home = TestHome::new();
    let port = ports::reserve_free_port().to_string();
    let token = "0123456789abcdef0123456789abcdef";
    let args =
        ["server", "start", "--port", &port, "--host", "127.0.0.2", "--no-local", "--admin-token", token];
    home.windlass(&args).ok().says(&format!("Started a server at http://127.0.0.2:{port}"));
    assert_eq!(home.windlass(&["fleet", "-o", "name"]).ok().stdout, "", "this machine is not offered");
    let kept = std::fs::read_to_string(home.path().join("home/server/admin-token")).unwrap();
    assert_eq!(kept.trim(), token);
    home.windlass(&args).ok().says("Run `windlass server stop` first to start it with these flags.");
    home.windlass(&["server", "start"]).ok().says("A server is already running at");
    home.windlass(&["server", "stop"]).ok();
}

#[test]
fn concurrent_commands_start_one_server() {
    let home = TestHome::new();
    let start = || {
        let mut command = home.command(&["ps", "-o", "json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let racing: Vec<_> = (0..8).map(|_| start()).collect();
    let mut started = 0;
    for child in racing {
        let done = child.wait_with_output().unwrap();
        let message = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.success(), "{message}");
        started += usize::from(message.contains("started one at"));
    }
    assert_eq!(started, 1);
}

#[test]
fn a_killed_server_is_restarted_with_its_data_and_token() {
    let home = TestHome::new();
    home.windlass(&["ps"]).ok();
    let dead = read_running_file(&home);
    let killed = Command::new("kill").args(["-9", &dead["pid"].to_string()]).status().unwrap();
    assert!(killed.success());
    // Wait until the kernel has removed the process: its socket may still accept a connection.
    while std::path::Path::new(&format!("/proc/{}/cwd", dead["pid"])).exists() {
        std::thread::yield_now();
    }
    home.windlass(&["ps"]).ok().says("started one at");
    assert_ne!(read_running_file(&home)["pid"], dead["pid"]);
}

#[test]
fn a_failed_server_start_shows_the_cause_from_its_log() {
    let home = TestHome::new();
    home.0.file("home/server/config.yml", "prot: 1\n");
    let ran = home.windlass(&["ps"]);
    assert_eq!(ran.code, Some(1));
    ran.says("start a local server");
    ran.says("`prot`");
}
