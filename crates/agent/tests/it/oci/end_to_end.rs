//! A task from its submission to its removal: the real shim and the real runner in the container.

use serde_json::{Value, json};
use windlass_api::agent::{
    SSH_PORT,
    runner::JobRecord,
    shim::{TaskInfo, TaskStatus},
};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    ssh,
    support::{
        images::Image,
        leftover_check,
        oci::serve_image,
        shim::{Setup, Shim},
    },
};

/// Submits a job to the runner of a running task, and starts it.
pub(super) async fn run_job(shim: &Shim, id: SubmissionId, commands: &[&str]) {
    let job = json!({
        "run": {"id": "0", "run_spec": {"run_name": "whole"}},
        "job_spec": {"commands": commands, "env": {"SEED": "7"}},
    });
    shim.play(id, &job).await;
}

/// Waits for the job's end and reads its output.
pub(super) async fn wait_output(shim: &Shim, id: SubmissionId) -> (JobRecord, String) {
    let record = eventually_ok_async("the job ends", async || {
        let record: JobRecord = shim.client().get(&format!("/api/tasks/{id}/job")).await.json();
        // The last state may come a moment after the last byte.
        let is_over = record.states.last().is_some_and(|last| last.state != "running");
        if record.log_complete && is_over { Ok(record) } else { Err(format!("{record:?}\n{}", shim.log())) }
    })
    .await;
    let text = shim.client().get(&format!("/api/tasks/{id}/logs?stream=job&offset=0")).await;
    (record, text.expect(200).text().to_owned())
}

async fn start_task(shim: &Shim, image: Image, change: impl FnOnce(&mut Value)) -> TaskInfo {
    let mut spec = shim.spec("whole");
    spec["image_name"] = serve_image(image).into();
    change(&mut spec);
    let id = shim.submit(&spec, 1).await;
    shim.wait_for(id, TaskStatus::Running).await
}

#[tokio::test]
async fn oci_jobs_run_in_any_image_and_leave_nothing_behind() {
    let shim = Shim::start(Setup::oci());
    let table: [(Image, &[&str], &str); 4] = [
        (Image::Busybox, &["/bin/sh", "-c", "echo seed $SEED $FROM_IMAGE; exit 3"], "seed 7 yes"),
        (Image::Bare, &["/busybox", "sh", "-c", "echo bare $SEED; exit 3"], "bare 7"),
        (Image::Bash, &["bash", "-c", "echo $BASH $SEED; exit 3"], "bash 7"),
        (Image::Busybox, &[], "UTC"),
    ];
    for (image, commands, expected) in table {
        let info = start_task(&shim, image, |_| {}).await;
        // Another test may use the default SSH port of this host.
        assert!(info.ports.as_ref().unwrap().iter().all(|port| port.container == SSH_PORT), "{info:?}");
        run_job(&shim, info.id, commands).await;
        let (record, text) = wait_output(&shim, info.id).await;
        assert!(text.contains(expected), "{image:?}: {text} {record:?}");
        let status = if commands.is_empty() { 0 } else { 3 };
        assert_eq!(record.states.last().unwrap().exit_status, Some(status), "{record:?}");
        shim.terminate(info.id, 1, 0).await;
        shim.remove(info.id, 1).await;
        leftover_check::assert_clean(&shim.home(), &[info.id]).await;
    }
}

#[tokio::test]
async fn f14_oci_task_survives_a_killed_shim() {
    let mut shim = Shim::start(Setup::oci());
    let info = start_task(&shim, Image::Busybox, |_| {}).await;
    run_job(
        &shim,
        info.id,
        &["/bin/sh", "-c", "while ! [ -e /tmp/go ]; do sleep 0.05; done; echo went on; exit 5"],
    )
    .await;
    shim.kill();
    shim.restart();
    let again = shim.wait_for(info.id, TaskStatus::Running).await;
    assert_eq!(again.container_id, info.container_id);
    let process = shim.home().join("tasks").join(info.id.to_string()).join("container/process.json");
    let process: serde_json::Value = serde_json::from_slice(&std::fs::read(process).unwrap()).unwrap();
    let pid = process["pid"].as_i64().unwrap();
    std::fs::write(format!("/proc/{pid}/root/tmp/go"), "").unwrap();
    let (record, text) = wait_output(&shim, info.id).await;
    assert!(text.contains("went on"), "{text}");
    assert_eq!(record.states.last().unwrap().exit_status, Some(5));
}

#[tokio::test]
async fn oci_job_can_use_the_last_second_of_its_grace_period() {
    let shim = Shim::start(Setup::oci());
    let info = start_task(&shim, Image::Busybox, |_| {}).await;
    let script = "trap 'sleep 0.3; echo bye; exit 7' INT TERM; touch /tmp/up; while :; do sleep 0.01; done";
    run_job(&shim, info.id, &["/bin/sh", "-c", &format!("echo up; {script}")]).await;
    let logs = format!("/api/tasks/{}/logs?stream=job&offset=0", info.id);
    eventually_ok_async("the job is up", async || {
        if shim.client().get(&logs).await.text() == "up\n" { Ok(()) } else { Err(shim.log()) }
    })
    .await;
    // The engine only counts whole seconds, and a part of this one has passed when the request arrives.
    let ended = shim.terminate(info.id, 1, 1).await;
    assert_eq!(ended.exit_status, Some(7), "{ended:?}");
    assert_eq!(shim.client().get(&logs).await.text(), "up\nbye\n");
}

#[tokio::test]
async fn oci_tasks_on_the_host_network_are_all_reachable_over_ssh() {
    let shim = Shim::start(Setup::oci());
    let keys = crate::support::temp_dir("keys").unwrap();
    ssh::make_key(&keys.path().join("id"), "ed25519");
    let public = std::fs::read_to_string(keys.path().join("id.pub")).unwrap();
    let mut taken = std::collections::BTreeSet::new();
    for _ in 0..2 {
        let info = start_task(&shim, Image::Busybox, |spec| {
            spec["network_mode"] = "host".into();
            spec["container_ssh_keys"] = json!([public]);
        })
        .await;
        let ports = info.ports.clone().unwrap();
        let port = ports.iter().find(|port| port.container == SSH_PORT).map_or(SSH_PORT, |port| port.host);
        assert!(taken.insert(port), "no two have one port: {info:?}");
        // Each server has a different key, and their ports may have been used by others before.
        let _ = std::fs::remove_file(keys.path().join("known_hosts"));
        let mut client = ssh::client(keys.path(), "ssh", "-p", port);
        client.args(["root@127.0.0.1", "cat /windlass/run/runner.json"]);
        let message = ssh::run(&mut client, b"");
        let text = ssh::text(&message.stdout);
        assert!(text.contains(&info.id.to_string()), "{text} {}", ssh::text(&message.stderr));
        assert!(text.contains("\"ssh_listen\":\"127.0.0.1:10022\""), "{text}");
    }
    assert!(taken.iter().any(|port| *port != SSH_PORT), "{taken:?}");
}

#[tokio::test]
async fn oci_output_of_many_sizes_is_complete_and_in_order_after_the_shim_was_killed_repeatedly() {
    let mut shim = Shim::start(Setup::oci());
    let info = start_task(&shim, Image::Busybox, |spec| spec["network_mode"] = "bridge".into()).await;
    let script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i + 1)); [ $((i % 997)) = 0 ] && sleep 0.01; done; \
        head -c 300000 /dev/zero | tr '\\0' x; echo; echo end; exit 9";
    run_job(&shim, info.id, &["/bin/sh", "-c", script]).await;
    for _ in 0..3 {
        shim.kill();
        shim.restart();
        shim.wait_for(info.id, TaskStatus::Running).await;
    }
    let (record, _) = wait_output(&shim, info.id).await;
    assert_eq!(record.states.last().unwrap().exit_status, Some(9), "{record:?}");
    let mut text = String::new();
    loop {
        let path = format!("/api/tasks/{}/logs?stream=job&offset={}&limit=65536", info.id, text.len());
        let part = shim.client().get(&path).await.expect(200).text().to_owned();
        if part.is_empty() {
            break;
        }
        text.push_str(&part);
    }
    let mut expected: String = (0..20_000).map(|at| format!("line {at}\n")).collect();
    expected.push_str(&"x".repeat(300_000));
    expected.push_str("\nend\n");
    assert_eq!(text.len(), expected.len());
    assert!(text == expected, "the output differs");
}

#[tokio::test]
async fn oci_tasks_on_the_bridge_are_reachable_over_ssh_by_their_published_port() {
    let shim = Shim::start(Setup::oci());
    let keys = crate::support::temp_dir("keys").unwrap();
    ssh::make_key(&keys.path().join("id"), "ed25519");
    let public = std::fs::read_to_string(keys.path().join("id.pub")).unwrap();
    let info = start_task(&shim, Image::Busybox, |spec| {
        spec["network_mode"] = "bridge".into();
        spec["container_ssh_keys"] = json!([public]);
    })
    .await;
    let ports = info.ports.clone().unwrap();
    assert_eq!((ports.len(), ports[0].container), (1, SSH_PORT), "{info:?}");
    // The port accepts connections before the SSH server behind it does.
    shim.wait_for_runner(info.id).await;
    let mut client = ssh::client(keys.path(), "ssh", "-p", ports[0].host);
    client.args(["root@127.0.0.1", "hostname; cat /etc/hosts"]);
    let message = ssh::run(&mut client, b"");
    let text = ssh::text(&message.stdout);
    let name = text.lines().next().unwrap_or_default().to_owned();
    assert!(
        name.starts_with("whole-") && text.contains(&format!("\t{name}\n")),
        "{text} {}",
        ssh::text(&message.stderr)
    );
}

#[tokio::test]
async fn a_host_without_an_engine_runs_images_and_plain_processes_without_a_setting() {
    let shim = Shim::start(Setup::without_engine());
    let info = start_task(&shim, Image::Busybox, |spec| spec["network_mode"] = "bridge".into()).await;
    run_job(&shim, info.id, &["/bin/sh", "-c", "echo in a container; ls /windlass"]).await;
    let (_, text) = wait_output(&shim, info.id).await;
    assert_eq!(text, "in a container\nagent\ngit\nrun\n");
    let mut plain = shim.spec("plain");
    plain["image_name"] = "none".into();
    let id = shim.submit(&plain, 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    assert_eq!(std::fs::read_to_string(shim.home().join("runtime")).unwrap(), "any-oci");
}

#[tokio::test]
async fn a_program_that_was_brought_along_runs_containers_until_a_byte_of_it_changes() {
    let scratch = crate::support::temp_dir("program").unwrap();
    let program = scratch.path().join("runc-static");
    let found = crate::support::oci::require_program().path;
    std::fs::copy(&found, &program).unwrap();
    let sha256 = windlass_agent::digest::sha256_hex(&std::fs::read(&program).unwrap());
    let setup = Setup::without_engine().without_oci_program().arg("--oci-program");
    let setup = setup.arg(program.to_str().unwrap()).arg("--oci-program-sha256").arg(&sha256);
    let mut shim = Shim::start(setup);
    assert_eq!(std::fs::read_to_string(shim.home().join("runtime")).unwrap(), "any-oci", "{}", shim.log());
    let info = start_task(&shim, Image::Busybox, |_| {}).await;
    run_job(&shim, info.id, &["/bin/sh", "-c", "echo in a container"]).await;
    let (_, text) = wait_output(&shim, info.id).await;
    assert_eq!(text, "in a container\n");
    // Another file of the same name, size and time of modification.
    let mut changed = std::fs::read(&program).unwrap();
    *changed.last_mut().unwrap() ^= 1;
    let modified = std::fs::metadata(&program).unwrap().modified().unwrap();
    std::fs::write(&program, changed).unwrap();
    std::fs::File::options().write(true).open(&program).unwrap().set_modified(modified).unwrap();
    let mut spec = shim.spec("whole");
    spec["image_name"] = serve_image(Image::Busybox).into();
    let id = shim.submit(&spec, 1).await;
    let ended = shim.wait_for_end(id).await;
    assert!(ended.termination_message.contains("was modified: its SHA-256 is"), "{ended:?}");
    // A new home does not choose it.
    shim.stop();
    std::fs::remove_file(shim.home().join("runtime")).unwrap();
    shim.restart();
    assert_eq!(std::fs::read_to_string(shim.home().join("runtime")).unwrap(), "process", "{}", shim.log());
}

#[test]
fn the_report_about_a_host_shows_whether_it_can_run_containers_without_an_engine() {
    let scratch = crate::support::temp_dir("report").unwrap();
    let mut command = crate::support::oci::command_without_engine(scratch.path(), crate::support::agent());
    let output = command.args(["host", "--data"]).arg(scratch.path()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["oci"], json!({"available": true}), "{output:?}");
    // Nothing can be stored there.
    let mut command = crate::support::oci::command_without_engine(scratch.path(), crate::support::agent());
    let output = command.args(["host", "--data", "/proc"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["oci"]["available"], false, "{report}");
}
