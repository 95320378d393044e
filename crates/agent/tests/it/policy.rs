//! The host's policy applies to every caller and on every listener.

use std::{fs, os::unix::fs::symlink, process::Command};

use serde_json::{Value, json};
use windlass_agent::shim::journal;
use windlass_api::agent::shim::{TaskInfo, TaskList, TaskStatus};
use windlass_testkit::wait::eventually_ok_async;

use crate::support::{
    agent,
    shim::{Setup, Shim},
    temp_dir,
};

/// Submits a change of the minimal specification on both listeners; both must refuse it with all reasons. A dstack
/// server learns of it by the end of the task: it would repeat a refused submission without limit.
async fn check_refused(shim: &Shim, change: impl Fn(&mut Value), why: &[&str]) {
    let mut spec = shim.spec("t");
    change(&mut spec);
    let signed = shim.try_submit(&spec, 1).await.expect(403);
    let compat = shim.compat();
    compat.post("/api/tasks", &spec).await.expect(200);
    let path = format!("/api/tasks/{}", spec["id"].as_str().unwrap());
    let ended = eventually_ok_async("the refused task ends", async || {
        let info: TaskInfo = compat.get(&path).await.json();
        if info.status == TaskStatus::Terminated { Ok(info) } else { Err(format!("{info:?}")) }
    })
    .await;
    assert_eq!(ended.termination_reason, "executor_error");
    for part in why {
        assert!(signed.text().contains(part), "{part} is not in {}", signed.text());
        assert!(ended.termination_message.contains(part), "{part} is not in {ended:?}");
    }
    assert!(!ended.termination_message.contains("[/"), "{ended:?}");
    compat.post(&format!("{path}/remove"), &json!({})).await.expect(200);
    let written = journal::read(&shim.home().join("journal")).unwrap().records;
    let refusals =
        written.iter().filter(|record| record.kind.is_refusal() && json!(record.submission) == spec["id"]);
    assert_eq!(refusals.count(), 2, "both refusals are written down");
}

#[tokio::test]
async fn x9_policy_violations_are_refused_on_the_socket_and_the_compat_port() {
    let data = temp_dir("policy").unwrap();
    let policy = format!("mounts: [{}]\nhost_ssh_users: []\npids: 100\n", data.path().display());
    let shim = Shim::start(Setup::process().policy(&policy).compat());
    let below = |name: &str| data.path().join(name).to_str().unwrap().to_owned();
    symlink("/etc", data.path().join("link")).unwrap();
    let mount = |path: &str| {
        let mounts = json!([{"instance_path": path, "path": "/in"}]);
        move |spec: &mut Value| spec["instance_mounts"] = mounts.clone()
    };
    let file = shim.scratch().join("policy.yml").display().to_string();
    check_refused(&shim, |spec| spec["privileged"] = json!(true), &["privileged", "privileged: true", &file])
        .await;
    check_refused(&shim, mount("/etc"), &["mount /etc", "add `/etc` to `mounts`"]).await;
    check_refused(&shim, mount("/"), &["mount /"]).await;
    check_refused(&shim, mount(&below("link")), &["/etc"]).await;
    check_refused(&shim, mount(&below("link/ssl")), &["/etc/ssl"]).await;
    check_refused(&shim, mount(&below("a/../../x")), &["contains `..`"]).await;
    check_refused(&shim, mount("/var/tmp"), &["not below an allowed path"]).await;
    check_refused(&shim, mount(shim.home().to_str().unwrap()), &["mount"]).await;
    check_refused(&shim, |spec| spec["pids"] = json!(101), &["at most 100"]).await;
    let keys = |spec: &mut Value| {
        spec["host_ssh_user"] = json!("root");
        spec["host_ssh_keys"] = json!(["ssh-ed25519 AAAA"]);
    };
    check_refused(&shim, keys, &["host_ssh_keys for root"]).await;
    // All violations are reported at once.
    let both = |spec: &mut Value| {
        spec["privileged"] = json!(true);
        spec["instance_mounts"] = json!([{"instance_path": "/proc", "path": "/windlass/run"}]);
    };
    check_refused(&shim, both, &["privileged", "mount /proc", "mount at /windlass/run"]).await;
    let list: TaskList = shim.client().get("/api/tasks").await.json();
    assert_eq!(list.tasks, []);
    assert!(!data.path().join("a").exists(), "a refusal makes nothing");
}

#[tokio::test]
async fn allowed_mounts_are_created_and_forbidden_optional_ones_skipped() {
    let data = temp_dir("policy").unwrap();
    let shim = Shim::start(Setup::process().policy(&format!("mounts: [{}]\n", data.path().display())));
    let mut spec = shim.spec("t");
    let inside = data.path().join("new/deep");
    let target = data.path().join("target");
    fs::create_dir(&target).unwrap();
    spec["instance_mounts"] = json!([
        {"instance_path": inside, "path": target},
        {"instance_path": "/etc", "path": "/optional", "optional": true},
    ]);
    let id = shim.submit(&spec, 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    assert!(inside.is_dir());
}

#[test]
fn a_policy_file_that_is_invalid_or_writable_by_others_prevents_shim_startup() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = temp_dir("policy").unwrap();
    let file = scratch.path().join("policy.yml");
    let start = || {
        let mut command = Command::new(agent());
        command.args(["shim", "--runtime", "simulated", "--home"]).arg(scratch.path().join("home"));
        let output = command.arg("--policy").arg(&file).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    fs::write(&file, "privileged: false\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o664)).unwrap();
    assert!(start().contains("mode 664"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
    assert!(start().contains("must belong to root"));
    std::os::unix::fs::chown(&file, Some(0), None).unwrap();
    fs::write(&file, "mouns: [/data]\n").unwrap();
    let message = start();
    assert!(message.contains("did you mean `mounts`?") && message.contains("policy.yml:1:1"), "{message}");
}

fn read_text(file: &std::path::Path) -> String {
    String::from_utf8_lossy(&fs::read(file).unwrap()).into_owned()
}

const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFpe1VEr4vk/w2OaNzvZbmmpbRnHzT3XVpqzGkOmFSJN ann@laptop";

#[tokio::test]
async fn g6_keys_are_present_only_during_their_task_and_foreign_lines_are_kept() {
    let accounts = temp_dir("accounts").unwrap();
    let ssh = accounts.path().join("home/ann/.ssh");
    fs::create_dir_all(&ssh).unwrap();
    fs::create_dir(accounts.path().join("etc")).unwrap();
    fs::write(accounts.path().join("etc/passwd"), "ann:x:0:0::/home/ann:/bin/sh\n").unwrap();
    let foreign = b"# ann's own\nssh-rsa AAAA ann\n\xff not text\n";
    let file = ssh.join("authorized_keys");
    fs::write(&file, foreign).unwrap();
    let mut shim =
        Shim::start(Setup::process().env("WINDLASS_DEBUG_ACCOUNTS", accounts.path().to_str().unwrap()));
    let mut spec = shim.spec("t");
    spec["host_ssh_user"] = json!("ann");
    spec["host_ssh_keys"] = json!([KEY]);
    let id = shim.submit(&spec, 1).await;
    let info = shim.wait_for(id, TaskStatus::Running).await;
    let with = fs::read(&file).unwrap();
    assert!(with.starts_with(foreign));
    let line = String::from_utf8(with[foreign.len()..].to_vec()).unwrap();
    assert!(
        line.starts_with("restrict,port-forwarding,permitopen=") && line.contains(&id.to_string()),
        "{line}"
    );
    assert!(line.contains(",command=\"false\" "), "the key opens ports and runs nothing: {line}");
    // Once the task's own port is known, nothing else can be reached.
    let port = info.ports.unwrap()[0].host;
    eventually_ok_async("the key opens the task's port", async || {
        let text = read_text(&file);
        if text.contains(&format!("permitopen=\"localhost:{port}\"")) { Ok(()) } else { Err(text) }
    })
    .await;
    // A crash in between does not change the keys.
    shim.kill();
    shim.restart();
    shim.wait_for(id, TaskStatus::Running).await;
    assert!(read_text(&file).contains(&id.to_string()));
    shim.terminate(id, 1, 0).await;
    assert_eq!(fs::read(&file).unwrap(), foreign);
    shim.remove(id, 1).await;
    assert_eq!(fs::read_dir(shim.home().join("keys")).unwrap().count(), 0);
}
