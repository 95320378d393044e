//! Machines that the server rents from a real LXD: system containers with systemd, cloud-init and an SSH server.

use std::{collections::BTreeSet, fmt::Write as _, time::Duration};

use serde_json::{Value, json};
use windlass_testkit::{lxd::LxdServer, wait::eventually_ok};

use crate::{
    jobs::{launch, runs, wait_until, wait_until_done},
    test_env::{HostMode, TestEnv, newest_submission, small_task_config},
};

/// Time limit for what machines must be created for, on a machine that is busy with other things.
const TIMEOUT: Duration = Duration::from_secs(400);

/// Starts a server whose `config.yml` gives project `main` this LXD.
async fn server_with(lxd: &LxdServer) -> TestEnv {
    let mut env = TestEnv::new_unstarted(HostMode::None)
        .with_env("WINDLASS_SERVER_LOST_AFTER", "10s")
        .with_env("WINDLASS_SERVER_RETRY_DELAY", "1s");
    let mut config = String::from("projects:\n- name: main\n  backends:\n");
    write!(
        config,
        "  - type: lxd\n    url: {}\n    image: {}\n    region: lab\n    config: {{security.nesting: true}}\n    \
         capacity: {{instances: 3, cpus: 6, memory: 6GB}}\n    instance_types:\n    \
         - {{name: small, cpus: 1, memory: 1GB, price: 0.01}}\n    - {{name: large, cpus: 2, memory: 2GB, price: 0.05}}\n",
        lxd.url(),
        windlass_testkit::lxd::IMAGE
    )
    .unwrap();
    std::fs::write(env.home().join("server/config.yml"), config).unwrap();
    env.start().await;
    env
}

/// Creates a fleet without machines, which grows on demand.
async fn growing_fleet(env: &mut TestEnv, idle_duration: &str) {
    let fleet = json!({"type": "fleet", "name": "rented", "backends": ["lxd"], "idle_duration": idle_duration,
        "placement": "cluster", "nodes": {"min": 0, "target": 0, "max": 3}});
    let spec = json!({"configuration": fleet, "profile": {"name": "default"}});
    env.project("fleets/apply", &json!({"plan": {"spec": spec}, "force": false})).await;
}

async fn ends(env: &mut TestEnv, name: &str) -> Value {
    env.wait_for_status_within(name, &["done", "failed", "terminated"], TIMEOUT).await
}

fn no_machine_is_left(env: &TestEnv, lxd: &LxdServer) {
    eventually_ok("no machine is left", || match lxd.instances() {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}\n{}", env.server_log())),
    });
}

fn machine_of(run: &Value, job: usize) -> String {
    let submission = run["jobs"][job]["job_submissions"].as_array().unwrap().last().unwrap();
    submission["job_provisioning_data"]["hostname"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_fleet_grows_from_zero_to_the_machines_of_its_tasks_and_shrinks_when_idle() {
    let lxd = LxdServer::start();
    let mut env = server_with(&lxd).await;
    growing_fleet(&mut env, "3s").await;
    assert!(lxd.instances().is_empty(), "nothing is created before it is needed");
    // Three nodes on three machines.
    let mut job = small_task_config("three", &["hostname", "echo \"$DSTACK_NODES_IPS\" | wc -l"]);
    job["nodes"] = json!(3);
    env.apply(&job).await;
    let run = ends(&mut env, "three").await;
    assert_eq!(run["status"], "done", "{run:#}\n{}", env.server_log());
    let machines: BTreeSet<String> = (0..3).map(|job| machine_of(&run, job)).collect();
    assert_eq!(machines.len(), 3, "{machines:?}");
    for node in 0..3 {
        let log = env.log_of_job(&run, node, usize::MAX).await;
        assert!(log.starts_with("windlass-") && log.ends_with("\n3\n"), "{log:?}");
    }
    let submission = newest_submission(&run);
    let offered = &submission["job_provisioning_data"];
    assert_eq!((&offered["region"], &offered["price"]), (&json!("lab"), &json!(0.01)), "{offered:#}");
    assert_eq!(offered["instance_type"]["name"], "small", "{offered:#}");
    no_machine_is_left(&env, &lxd);
    env.eventually_fleet("rented", |fleet| fleet["instances"].as_array().unwrap().is_empty()).await;
}

#[tokio::test]
async fn a_managed_job_continues_on_a_new_machine_when_its_machine_is_deleted_by_hand() {
    let lxd = LxdServer::start();
    let mut env = server_with(&lxd).await;
    growing_fleet(&mut env, "5s").await;
    let text = "resources: {cpus: 1+, memory: 0.5+, disk_size: 0+}\nrun: |\n  hostname\n  sleep 600\n";
    let id = launch(&mut env, text, json!({})).await;
    let first = runs(&mut env, id).await;
    eventually_ok("its machine runs", || match lxd.instances().len() {
        1 => Ok(()),
        _ => Err(env.server_log()),
    });
    wait_until(&mut env, id, "it runs", |job| job["status"] == "RUNNING").await;
    let before = lxd.instances();
    lxd.run(["delete", "--force", &before[0]]);
    let again = wait_until(&mut env, id, "it runs again", |job| {
        job["recovery_count"] == 1 && job["status"] == "RUNNING"
    })
    .await;
    assert_eq!(again["tasks"][0]["attempt"], 2, "{first:#}\n{again:#}");
    let after = lxd.instances();
    assert!(after.len() == 1 && after != before, "{before:?} {after:?}");
    env.project("jobs/cancel", &json!({"job_ids": [id]})).await;
    wait_until_done(&mut env, id).await;
    no_machine_is_left(&env, &lxd);
}

#[tokio::test]
async fn a_volume_keeps_its_data_when_its_machine_is_deleted() {
    let lxd = LxdServer::start();
    let mut env = server_with(&lxd).await;
    growing_fleet(&mut env, "1s").await;
    let volume = json!({"type": "volume", "name": "data", "backend": "lxd", "region": "lab", "size": "1GB"});
    env.project("volumes/create", &json!({ "configuration": volume })).await;
    env.eventually_volume("data", "active").await;
    let job = |name: &str, command: &str| {
        let mut job = small_task_config(name, &["hostname", command]);
        job["volumes"] = json!(["data:/data"]);
        job
    };
    env.apply(&job("writer", "echo kept > /data/file")).await;
    let writer = ends(&mut env, "writer").await;
    assert_eq!(writer["status"], "done", "{writer:#}\n{}", env.server_log());
    no_machine_is_left(&env, &lxd);
    env.apply(&job("reader", "cat /data/file")).await;
    let reader = ends(&mut env, "reader").await;
    assert_eq!(reader["status"], "done", "{reader:#}\n{}", env.server_log());
    let (wrote, read) = (env.log(&writer).await, env.log(&reader).await);
    let (there, text) = read.split_once('\n').unwrap();
    assert_eq!(text, "kept\n");
    assert_ne!(wrote.trim(), there, "the second task ran on another machine");
    no_machine_is_left(&env, &lxd);
    env.project("volumes/delete", &json!({"names": ["data"]})).await;
    eventually_ok("the volume is deleted", || {
        let left = lxd.run(["storage", "volume", "list", "default", "--format", "csv"]);
        if left.contains("custom") { Err(left) } else { Ok(()) }
    });
}

/// The server is killed at any moment of a creation; the machine that it asked for is found again.
#[tokio::test]
async fn a_server_that_is_killed_while_machines_are_created_makes_none_twice_and_leaves_none() {
    let lxd = LxdServer::start();
    let mut env = server_with(&lxd).await;
    growing_fleet(&mut env, "2s").await;
    for name in ["one", "two"] {
        env.apply(&small_task_config(name, &["echo done"])).await;
    }
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for kill in 0..4_usize {
        // Before the first machine, at its creation, at the second one, and while both start.
        eventually_ok("LXD has the machines of this step", || {
            seen.extend(lxd.instances());
            if seen.len() >= kill.min(2) { Ok(()) } else { Err(env.server_log()) }
        });
        env.kill();
        env.start().await;
    }
    for name in ["one", "two"] {
        let run = ends(&mut env, name).await;
        assert_eq!(run["status"], "done", "{run:#}\n{}", env.server_log());
        seen.extend(lxd.instances());
    }
    assert_eq!(seen.len(), 2, "one machine for each task: {seen:?}");
    no_machine_is_left(&env, &lxd);
}

#[tokio::test]
async fn a_fleet_of_a_backend_that_is_not_configured_is_refused_with_what_to_configure() {
    let mut env = TestEnv::new(HostMode::None).await;
    let home = env.home().to_owned();
    let file = home.join("fleet.dstack.yml");
    std::fs::write(&file, "type: fleet\nname: rented\nbackends: [lxd]\nnodes: 0..3\n").unwrap();
    let done = env.windlass(&home, &["apply", "-y", "-f", file.to_str().unwrap()]);
    let message = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(!done.status.success() && message.contains("no backend `lxd`"), "{message}");
    assert!(message.contains("config.yml"), "{message}");
    // A file that cannot be honoured stops the server instead of being ignored.
    env.stop_server();
    let config = "projects:\n- name: main\n  backends:\n  - {type: lxd, images: deb12}\n";
    std::fs::write(home.join("server/config.yml"), config).unwrap();
    let refused =
        env.command(&home, &["server", "--data-dir", home.join("server").to_str().unwrap()]).output();
    let refused = refused.unwrap();
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("images"), "{message}");
}

#[tokio::test]
async fn a_configured_backend_is_listed_with_its_projects_and_checked() {
    let lxd = LxdServer::start();
    let env = server_with(&lxd).await;
    let home = env.home().to_owned();
    let windlass = |args: &[&str]| {
        let done = env.windlass(&home, args);
        (done.status.code(), String::from_utf8_lossy(&done.stdout).into_owned())
    };
    let (code, listed) = windlass(&["backend", "-o", "json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let rented = json!({"name": "lxd", "projects": ["main"]});
    assert!(code == Some(0) && listed["backends"].as_array().unwrap().contains(&rented), "{listed:#}");
    let (code, checked) = windlass(&["backend", "check", "lxd"]);
    assert!(code == Some(0) && checked.contains("image `windlass-test`"), "{checked}");
    let (code, offers) = windlass(&["offer", "--cpu", "1..", "--memory", "0.5GB..", "--disk", "0.."]);
    assert!(code == Some(0) && offers.contains("small") && offers.contains("large"), "{offers}");
    lxd.run(["image", "alias", "delete", windlass_testkit::lxd::IMAGE]);
    let (code, checked) = windlass(&["backend", "check", "lxd"]);
    assert!(code == Some(1) && checked.contains("it does not exist; hint: "), "{checked}");
    let (code, _) = windlass(&["backend", "check", "aws"]);
    assert_ne!(code, Some(0));
}
