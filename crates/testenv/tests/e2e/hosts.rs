//! SSH hosts: network namespaces of this machine, each with a real OpenSSH server and a real agent.

use std::time::Duration;

use serde_json::json;
use windlass_testkit::lab::{Lab, LabHost};

use crate::test_env::{HostMode, TestEnv, host_of_job, newest_submission, small_task_config};

/// Shortens the time after which a silent agent's jobs are lost, and the delay before the first retry. The defaults are
/// two minutes, which row F4 of the fault matrix waits for with `--long`, and 15 s.
const SHORT_TIMEOUT_SETTINGS: [(&str, &str); 2] =
    [("WINDLASS_SERVER_LOST_AFTER", "10s"), ("WINDLASS_SERVER_RETRY_DELAY", "1s")];
/// Time limit for what follows the loss.
const LOSS_TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) async fn fleet(env: &mut TestEnv, lab: &Lab, hosts: &[LabHost], blocks: u32) {
    env.create_lab_fleet(lab, hosts, blocks).await;
}

#[tokio::test]
async fn a_job_runs_on_an_ssh_host_and_deleting_the_fleet_leaves_no_files_there() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let run = env.ends(&small_task_config("remote", &["hostname", "echo $DSTACK_RUN_NAME"])).await;
    assert_eq!(run["status"], "done", "{run:#}");
    let name = String::from_utf8(lab.host(1).run("hostname").unwrap().stdout).unwrap();
    assert_eq!(env.log(&run).await, format!("{name}remote\n"));

    env.project("fleets/delete", &json!({"names": ["lab"]})).await;
    env.eventually("the agent is gone", || {
        let processes = lab.host(1).processes().unwrap();
        !processes.iter().any(|process| process.command.contains("windlass-agent"))
    });
    env.eventually("no file of ours is left", || {
        let left = lab
            .host(1)
            .run("find /var /etc -xdev -name '*windlass*' -not -path /etc/windlass 2>/dev/null")
            .unwrap();
        left.stdout.is_empty()
    });
}

#[tokio::test]
async fn a_forced_delete_removes_a_fleet_whose_host_is_cut_off() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    lab.host(1).partition().unwrap();
    let home = env.home().to_owned();
    let windlass = |env: &TestEnv, args: &[&str]| {
        let done = env.windlass(&home, args);
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    };
    windlass(&env, &["fleet", "delete", "-y", "lab"]);
    env.eventually_fleet("lab", |fleet| fleet["instances"][0]["status"] == "terminating").await;
    windlass(&env, &["fleet", "delete", "-y", "--force", "--wait", "lab"]);
    assert_eq!(windlass(&env, &["fleet", "-o", "name"]), "");
    let events = windlass(&env, &["event", "--last", "100"]);
    assert!(events.contains("released without cleanup"), "{events}");
}

#[tokio::test]
async fn four_nodes_find_and_reach_their_master() {
    let lab = Lab::start(4).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let master = "for i in 1 2 3; do busybox nc -l -p 990$i > got.$i & done; wait; cat got.1 got.2 got.3";
    // Not with nc: the master's sends nothing, and the local one would treat that as the end before it has read its
    // line.
    let worker = "until bash -c 'echo \"rank $DSTACK_NODE_RANK of $DSTACK_NODES_NUM\" > \
                  /dev/tcp/$DSTACK_MASTER_NODE_IP/990$DSTACK_NODE_RANK' 2> /dev/null; do sleep 0.1; done";
    let both = format!("if [ $DSTACK_NODE_RANK = 0 ]; then {master}; else {worker}; fi");
    let mut job = small_task_config("cluster", &[&both, "echo \"$DSTACK_NODES_IPS\" | wc -l"]);
    job["nodes"] = json!(4);
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert_eq!(env.log_of_job(&run, 0, usize::MAX).await, "rank 1 of 4\nrank 2 of 4\nrank 3 of 4\n4\n");
    let mut used: Vec<usize> = (0..4).map(|node| host_of_job(&lab, &run, node)).collect();
    used.sort_unstable();
    assert_eq!(used, [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_port_in_use_on_a_host_ends_its_node_with_that_reason() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    // Nodes accept SSH connections of the others on this port.
    let listen = "setsid busybox nc -ll -p 10022 -e true > /dev/null 2>&1 < /dev/null & \
                  until busybox nc 127.0.0.1 10022 < /dev/null; do sleep 0.05; done";
    assert!(lab.host(1).run(listen).unwrap().status.success());
    let mut job = small_task_config("cluster", &["sleep 600"]);
    job["nodes"] = json!(2);
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "failed", "{run:#}");
    let node = (0..2).find(|node| host_of_job(&lab, &run, *node) == 1).unwrap();
    let ended = run["jobs"][node]["job_submissions"].as_array().unwrap().last().unwrap();
    assert_eq!(ended["termination_reason"], "ports_binding_failed", "{run:#}");
    let message = ended["termination_reason_message"].as_str().unwrap();
    assert!(message.contains("another process on the host listens on 0.0.0.0:10022"), "{message}");
}

#[tokio::test]
async fn four_tasks_share_two_hosts_by_blocks() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 2).await;
    let names = ["one", "two", "three", "four"];
    for name in names {
        env.apply(&small_task_config(name, &["echo up; sleep 600"])).await;
    }
    for name in names {
        env.says(name, "up").await;
    }
    let fleet = env.fleet("lab").await;
    for instance in fleet["instances"].as_array().unwrap() {
        assert_eq!(
            (&instance["busy_blocks"], &instance["total_blocks"]),
            (&json!(2), &json!(2)),
            "{instance:#}"
        );
    }
    env.apply(&small_task_config("fifth", &["true"])).await;
    for name in names {
        env.stop(name, true).await;
    }
    env.reaches("fifth", &["done", "failed"]).await;
    env.wait_for_hosts("lab", 2).await;
}

#[tokio::test]
async fn f8_a_rebooted_host_loses_its_job_and_runs_the_retry() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::with_settings(HostMode::None, &SHORT_TIMEOUT_SETTINGS).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let once = "if [ -e /var/tmp/tried ]; then exit 0; fi; echo up; touch /var/tmp/tried; sleep 600";
    let mut job = small_task_config("rebooted", &[once]);
    job["retry"] = json!({"on_events": ["error", "interruption"], "duration": 600});
    env.apply(&job).await;
    env.says("rebooted", "up").await;
    env.eventually("the job has begun", || lab.host(1).path("/var/tmp/tried").exists());
    lab.host(1).reboot().unwrap();
    let run = env.wait_for_status_within("rebooted", &["done"], LOSS_TIMEOUT).await;
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 2, "{run:#}");
}

#[tokio::test]
async fn a_lost_node_restarts_its_whole_replica() {
    let lab = Lab::start(3).unwrap();
    let mut env = TestEnv::with_settings(HostMode::None, &SHORT_TIMEOUT_SETTINGS).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let wait = "echo up; until [ -e /var/tmp/go ]; do sleep 0.1; done";
    let mut job = small_task_config("lost", &[wait]);
    job["nodes"] = json!(2);
    job["retry"] = json!({"on_events": ["error", "interruption"], "duration": 3600});
    env.apply(&job).await;
    // The run is running as soon as its first node is; the other one may follow later.
    let run = env.eventually_run("lost", LOSS_TIMEOUT, |run| {
        let runs = |node: usize| run["jobs"][node]["job_submissions"][0]["status"] == "running";
        runs(0) && runs(1)
    });
    let run = run.await;
    env.says("lost", "up").await;
    let lost = host_of_job(&lab, &run, 1);
    lab.host(lost).power_off().unwrap();
    let dead = env.eventually_run("lost", LOSS_TIMEOUT, |run| {
        run["jobs"][1]["job_submissions"][0]["termination_reason"] == "instance_unreachable"
    });
    dead.await;
    // The host returns without its job; until then the server could not know that the job is dead.
    lab.host(lost).power_on().unwrap();
    let again = env.eventually_run("lost", LOSS_TIMEOUT, |run| {
        let twice = |node: usize| run["jobs"][node]["job_submissions"].as_array().unwrap().len() == 2;
        twice(0) && twice(1) && run["status"] == "running"
    });
    let again = again.await;
    let first = &again["jobs"][0]["job_submissions"][0];
    assert_eq!(first["termination_reason"], "terminated_by_server", "{again:#}");
    for host in lab.hosts() {
        host.run("touch /var/tmp/go").unwrap();
    }
    env.reaches("lost", &["done"]).await;
}

#[tokio::test]
async fn f7_a_reconnected_host_kills_its_lost_job_and_accepts_new_ones() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::with_settings(HostMode::None, &SHORT_TIMEOUT_SETTINGS).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    env.apply(&small_task_config("cut", &["echo up", "sleep 4711"])).await;
    env.says("cut", "up").await;
    lab.host(1).partition().unwrap();
    let run = env.wait_for_status_within("cut", &["terminating", "failed"], LOSS_TIMEOUT).await;
    assert_eq!(newest_submission(&run)["termination_reason"], "instance_unreachable", "{run:#}");
    let alive = |lab: &Lab| lab.host(1).processes().unwrap().iter().any(|p| p.command.contains("sleep 4711"));
    assert!(alive(&lab), "nobody could reach it");
    lab.host(1).heal().unwrap();
    env.wait_for_status_within("cut", &["failed"], LOSS_TIMEOUT).await;
    env.eventually("the old job is dead", || !alive(&lab));
    let run = env.ends(&small_task_config("next", &["echo usable"])).await;
    assert_eq!(run["status"], "done", "{run:#}");
}

#[tokio::test]
async fn an_agent_upgrade_does_not_interrupt_a_running_job() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    env.apply(&small_task_config(
        "steady",
        &["echo up", "until [ -e /var/tmp/go ]; do sleep 0.05; done", "echo down"],
    ))
    .await;
    env.says("steady", "up").await;
    let shim = |lab: &Lab| {
        let all = lab.host(1).processes().unwrap();
        all.into_iter()
            .find(|p| p.command.contains("windlass-agent shim") || p.command.contains(" shim --home"))
            .map(|p| p.pid)
    };
    let before = shim(&lab).unwrap();
    env.stop_server();
    env.use_another_agent();
    env.start().await;
    env.eventually("another shim runs", || shim(&lab).is_some_and(|pid| pid != before));
    lab.host(1).run("touch /var/tmp/go").unwrap();
    let run = env.reaches("steady", &["done"]).await;
    assert_eq!(env.log(&run).await, "up\ndown\n");
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 1, "{run:#}");
}

#[tokio::test]
async fn a_host_with_a_changed_key_is_not_used_and_reports_the_change() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    lab.host(1).change_host_key().unwrap();
    let deadline = std::time::Instant::now() + LOSS_TIMEOUT;
    loop {
        let fleet = env.fleet("lab").await;
        let message = fleet["instances"][0].to_string();
        if message.contains("key") && message.contains("changed") {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{fleet:#}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let processes = lab.host(1).processes().unwrap();
    assert!(!processes.iter().any(|p| p.command.contains("windlass-agent")), "{processes:?}");
}
