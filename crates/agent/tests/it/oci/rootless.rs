//! Containers of an agent that is not root.

use std::{fs, path::Path};

use serde_json::{Value, json};
use windlass_api::agent::{
    SSH_PORT,
    shim::{TaskInfo, TaskStatus},
};
use windlass_testkit::{lab::registry::ImageOptions, wait::eventually_ok};

use super::end_to_end::{run_job, wait_output};
use crate::{
    ssh,
    support::{
        images::{Image, Tar},
        leftover_check, oci,
        shim::{Setup, Shim},
    },
};

/// A user without an account, and so without subordinate ids.
const USER: u32 = 61_234;
/// A user with an account, which subordinate ids require.
const NOBODY: u32 = 65534;
/// First subordinate id that a test assigns to the user.
const FIRST_ID: u32 = 700_000;

/// Serves an image whose second layer removes and hides files, and has directories that only root can write.
pub(super) fn serve_layered_image() -> String {
    let mut middle = Tar::new();
    middle.file("home/hidden", b"", 0o644);
    let mut upper = Tar::new();
    upper.file("etc/.wh.group", b"", 0o644);
    upper.file("home/.wh..wh..opq", b"", 0o644);
    upper.dir("home/closed", 0o555);
    upper.file("home/closed/kept", b"kept\n", 0o400);
    upper.owned_file("home/job.txt", b"text\n", (1000, 1000));
    oci::serve_layers(
        "layered",
        vec![Image::Busybox.tar(), middle.done(), upper.done()],
        ImageOptions { config: Image::Busybox.config(), ..ImageOptions::default() },
    )
}

async fn start(shim: &Shim, image: &str, change: impl FnOnce(&mut Value)) -> TaskInfo {
    let mut spec = shim.spec("rootless");
    spec["image_name"] = image.into();
    change(&mut spec);
    let id = shim.submit(&spec, 1).await;
    shim.wait_for(id, TaskStatus::Running).await
}

/// Runs a script in a container to its end, and returns its output.
async fn run(shim: &Shim, image: &str, script: &str) -> String {
    let info = start(shim, image, |_| {}).await;
    run_job(shim, info.id, &["/bin/sh", "-c", &format!("{script}; exit 3")]).await;
    let (record, text) = wait_output(shim, info.id).await;
    assert_eq!(record.states.last().unwrap().exit_status, Some(3), "{record:?}\n{text}");
    remove(shim, &info).await;
    text
}

async fn remove(shim: &Shim, info: &TaskInfo) {
    shim.terminate(info.id, 1, 0).await;
    shim.remove(info.id, 1).await;
    leftover_check::assert_clean(&shim.home(), &[info.id]).await;
}

const LOOK: &str =
    "echo from $FROM_IMAGE; id -u; set -- $(cat /proc/self/uid_map); echo $2; ls /etc; ls /home
    stat -c %u /home/job.txt; cat /home/closed/kept; touch /home/closed/new /made && echo written";

#[tokio::test]
async fn rootless_jobs_run_in_an_image_as_an_ordinary_user() {
    let shim = Shim::start(Setup::oci().user(USER));
    let text = run(&shim, &serve_layered_image(), LOOK).await;
    let expected = format!(
        "from yes\n0\n{USER}\nhostname\nhosts\npasswd\nresolv.conf\nclosed\njob.txt\n0\nkept\nwritten\n"
    );
    assert_eq!(text, expected, "every file belongs to the only user");
}

#[tokio::test]
async fn rootless_containers_have_the_users_of_their_image_if_there_are_subordinate_ids() {
    let shim = Shim::start(Setup::oci().user(NOBODY).subordinate_ids(FIRST_ID));
    let text = run(&shim, &serve_layered_image(), LOOK).await;
    let expected = format!(
        "from yes\n0\n{NOBODY}\nhostname\nhosts\npasswd\nresolv.conf\nclosed\njob.txt\n1000\nkept\nwritten\n"
    );
    assert_eq!(text, expected);
    let info = start(&shim, &oci::serve_image(Image::Busybox), |_| {}).await;
    let job = json!({
        "run": {"id": "0", "run_spec": {"run_name": "whole"}},
        "job_spec": {
            "commands": ["/bin/sh", "-c", "id -u; id -G; touch /tmp/mine; stat -c %u /tmp/mine"],
            "user": {"username": "job"},
        },
    });
    shim.play(info.id, &job).await;
    let (_, text) = wait_output(&shim, info.id).await;
    assert_eq!(text, "1000\n1000 2000\n1000\n");
    remove(&shim, &info).await;
}

#[tokio::test]
async fn rootless_containers_start_where_the_options_of_mounts_are_locked() {
    let data = crate::support::temp_dir("data").unwrap();
    fs::write(data.path().join("text"), "given\n").unwrap();
    std::os::unix::fs::chown(data.path(), Some(USER), Some(USER)).unwrap();
    let policy = format!("mounts: [{}]\n", data.path().display());
    let setup = Setup::oci().user(USER).policy(&policy);
    let setup = setup.locked_home("nosuid,nodev,noatime");
    let shim = Shim::start(setup.locked_mount(data.path(), "nosuid,nodev,noexec,relatime"));
    let info = start(&shim, &oci::serve_image(Image::Busybox), |spec| {
        spec["instance_mounts"] = json!([{"instance_path": data.path(), "path": "/data"}]);
    })
    .await;
    let script = "cat /data/text; touch /data/made && echo written
        while read -r _ at _ options _; do case $at in /data|/windlass/agent) echo $at $options;; esac; done < /proc/mounts";
    run_job(&shim, info.id, &["/bin/sh", "-c", script]).await;
    let (record, text) = wait_output(&shim, info.id).await;
    let lines: Vec<&str> = text.lines().collect();
    let expected = [
        "given",
        "written",
        "/windlass/agent ro,nosuid,nodev,noatime",
        "/data rw,nosuid,nodev,noexec,relatime",
    ];
    assert_eq!(lines[..2], expected[..2], "{record:?}");
    for line in &expected[2..] {
        // The options of the file system follow.
        assert!(lines.iter().any(|one| one.starts_with(line)), "{line}: {text}");
    }
    remove(&shim, &info).await;
}

#[tokio::test]
async fn rootless_containers_refuse_users_that_do_not_exist_in_them() {
    let shim = Shim::start(Setup::oci().user(USER));
    let mut spec = shim.spec("rootless");
    spec["image_name"] = oci::serve_image(Image::Busybox).into();
    spec["container_user"] = "job".into();
    let id = shim.submit(&spec, 1).await;
    let info = shim.wait_for_end(id).await;
    assert!(info.termination_message.contains("/etc/subuid"), "{info:?}");
    shim.remove(id, 1).await;
    leftover_check::assert_clean(&shim.home(), &[id]).await;
}

async fn check_separate_network(setup: Setup) {
    let shim = Shim::start(setup);
    let keys = crate::support::temp_dir("keys").unwrap();
    ssh::make_key(&keys.path().join("id"), "ed25519");
    let public = fs::read_to_string(keys.path().join("id.pub")).unwrap();
    let service = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let info = start(&shim, &oci::serve_image(Image::Busybox), |spec| {
        spec["network_mode"] = "bridge".into();
        spec["container_ssh_keys"] = json!([public]);
    })
    .await;
    let ports = info.ports.clone().unwrap();
    assert_eq!((ports.len(), ports[0].container), (1, SSH_PORT), "{info:?}");
    let port = service.local_addr().unwrap().port();
    let script = format!(
        "ls /sys/class/net; ip route | grep -c '^unreachable '
         nc -w 2 127.0.0.1 {port} < /dev/null && echo reached; ip route | grep -c default"
    );
    // The published port is open before the SSH server behind it.
    let message = eventually_ok("the SSH server answers", || {
        let mut client = ssh::client(keys.path(), "ssh", "-p", ports[0].host);
        client.args(["root@127.0.0.1", &script]);
        let message = ssh::run(&mut client, b"");
        if message.status.code() == Some(255) { Err(ssh::text(&message.stderr)) } else { Ok(message) }
    });
    let text = ssh::text(&message.stdout);
    assert_eq!(text, "eth0\nlo\n4\n1\n", "{}\n{}", ssh::text(&message.stderr), shim.log());
    remove(&shim, &info).await;
}

#[tokio::test]
async fn rootless_containers_have_a_separate_network_and_published_ports() {
    check_separate_network(Setup::oci().user(USER)).await;
}

#[tokio::test]
async fn rootless_containers_have_a_separate_network_with_slirp4netns() {
    check_separate_network(Setup::oci().user(USER).without_program("/usr/bin/pasta")).await;
}

#[tokio::test]
async fn rootless_containers_run_with_crun_and_with_runc() {
    for program in ["/usr/bin/crun", "/usr/sbin/runc"] {
        let setup = Setup::oci().user(USER).arg("--oci-program").arg(program);
        let shim = Shim::start(setup.locked_home("nosuid,nodev,relatime"));
        let text = run(&shim, &oci::serve_image(Image::Busybox), "id -u; touch /made && echo written").await;
        assert_eq!(text, "0\nwritten\n", "{program}");
    }
}

#[tokio::test]
async fn rootless_containers_outlive_the_shim_and_end_with_their_task() {
    let mut shim = Shim::start(Setup::oci().user(USER));
    let info = start(&shim, &oci::serve_image(Image::Busybox), |spec| {
        spec["network_mode"] = "bridge".into();
    })
    .await;
    // A process that leaves its parent and its session.
    run_job(&shim, info.id, &["/bin/sh", "-c", "(setsid sleep 4716 &) ; echo up; sleep 4716"]).await;
    shim.kill();
    shim.restart();
    let again = shim.wait_for(info.id, TaskStatus::Running).await;
    assert_eq!(again.ports, info.ports);
    remove(&shim, &info).await;
    // The same with a monitor that was killed: nothing supervises the container any more.
    let info = start(&shim, &oci::serve_image(Image::Busybox), |_| {}).await;
    let record = shim.home().join("tasks").join(info.id.to_string()).join("container/record.json");
    kill(&record);
    let ended = shim.wait_for_end(info.id).await;
    assert_eq!(ended.exit_status, None, "{ended:?}");
    shim.remove(info.id, 1).await;
    leftover_check::assert_clean(&shim.home(), &[info.id]).await;
}

fn kill(record: &Path) {
    let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    let pid = i32::try_from(record["monitor"]["pid"].as_i64().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn the_log_of_a_rootless_job_names_the_limits_that_are_not_enforced() {
    let shim = Shim::start(Setup::oci().user(USER));
    let info = start(&shim, &oci::serve_image(Image::Busybox), |spec| spec["memory"] = json!(64 << 20)).await;
    run_job(&shim, info.id, &["/bin/sh", "-c", "echo $WINDLASS_NOTICES."]).await;
    let (_, text) = wait_output(&shim, info.id).await;
    assert_eq!(text, ".\n", "it is for the log only");
    let log = shim.client().get(&format!("/api/tasks/{}/logs?stream=runner&offset=0", info.id)).await;
    let log = log.expect(200).text().to_owned();
    assert!(log.contains("the memory limit is not enforced"), "{log}");
    remove(&shim, &info).await;
}
