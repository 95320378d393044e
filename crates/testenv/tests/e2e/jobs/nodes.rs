//! Managed jobs on several nodes: the environment of each, and the recovery from the loss of one.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use windlass_testkit::lab::{Lab, LabHost};

use super::{launch, runs, wait_until, wait_until_done};
use crate::test_env::{HostMode, TestEnv, host_of_job};

/// A stage with a fleet of hosts with separate networks.
pub(super) async fn with_lab(hosts: usize) -> (TestEnv, Lab) {
    let lab = Lab::start(hosts).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    env.stop_server();
    env = env.with_env("WINDLASS_SERVER_LOST_AFTER", "5s");
    env.start().await;
    env.create_lab_fleet(&lab, lab.hosts(), 1).await;
    (env, lab)
}

/// Lines of a file, over all hosts.
pub(super) fn lines(lab: &Lab, path: &str) -> Vec<String> {
    let of = |host: &LabHost| std::fs::read_to_string(host.path(path)).unwrap_or_default();
    lab.hosts().iter().flat_map(|host| of(host).lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn touch(lab: &Lab, path: &str) {
    lab.hosts().iter().for_each(|host| std::fs::write(host.path(path), "").unwrap());
}

/// One node is prepared immediately, the other after a file exists.
#[tokio::test]
async fn no_node_starts_before_the_setup_of_all_nodes_is_done() {
    let (mut env, lab) = with_lab(2).await;
    let text = "num_nodes: 2\nsetup: |\n  if [ $SKYPILOT_SETUP_NODE_RANK = 1 ]; then\n    \
                until [ -e /home/may ]; do sleep 0.05; done\n  fi\n  echo $SKYPILOT_SETUP_NODE_RANK >> /home/prepared\n\
                run: |\n  echo $SKYPILOT_NODE_RANK >> /home/begun\n";
    let id = launch(&mut env, text, json!({})).await;
    env.eventually("the first is prepared", || lines(&lab, "/home/prepared") == ["0"]);
    // The server reports that the node waits.
    let seen = wait_until(&mut env, id, "it is handed to its nodes", |job| job["status"] == "RUNNING").await;
    let run = seen["tasks"][0]["runs"][0].as_str().unwrap().to_owned();
    let says = |run: &Value| run.to_string().contains("the other nodes to be prepared");
    env.eventually_run(&run, std::time::Duration::from_secs(60), says).await;
    assert_eq!(lines(&lab, "/home/begun"), Vec::<String>::new());
    touch(&lab, "/home/may");
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!(seen["status"], "SUCCEEDED", "{seen:#}");
    let mut begun = lines(&lab, "/home/begun");
    begun.sort();
    assert_eq!(begun, ["0", "1"]);
}

#[tokio::test]
async fn m6_all_nodes_restart_with_their_ranks_when_one_is_lost() {
    let (mut env, lab) = with_lab(3).await;
    let text = "name: gang\nnum_nodes: 2\nrun: |\n  \
                echo \"$SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES at $(echo \"$SKYPILOT_NODE_IPS\" | sort -u | wc -l) \
                as $SKYPILOT_TASK_ID\" >> /home/lines\n  until [ -e /home/go ]; do sleep 0.05; done\n";
    let id = launch(&mut env, text, json!({})).await;
    let first = runs(&mut env, id).await;
    env.eventually("both nodes are at work", || lines(&lab, "/home/lines").len() == 2);
    let placement = first["tasks"][0]["placement"].as_str().unwrap().to_owned();
    let number: usize = placement.rsplit('-').next().unwrap().parse().unwrap();
    lab.host(number + 1).power_off().unwrap();
    let seen = wait_until(&mut env, id, "it runs again", |job| {
        job["recovery_count"] == 1 && job["status"] == "RUNNING"
    })
    .await;
    assert_eq!(seen["tasks"][0]["attempt"], 2, "{seen:#}");
    env.eventually("both nodes are at work again", || lines(&lab, "/home/lines").len() == 4);
    let written = lines(&lab, "/home/lines");
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for line in &written {
        *times.entry(line).or_default() += 1;
    }
    // The same two ranks with the same name, twice each: neither was left out.
    assert_eq!(times.values().copied().collect::<Vec<_>>(), [2, 2], "{written:?}");
    for (rank, line) in times.keys().enumerate() {
        assert!(line.starts_with(&format!("{rank} of 2 at 2 as sky-managed-")), "{written:?}");
    }
    touch(&lab, "/home/go");
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!((&seen["status"], lines(&lab, "/home/lines").len()), (&json!("SUCCEEDED"), 4), "{seen:#}");
}

/// The remaining machine is reused, and only the lost one is replaced.
#[tokio::test]
async fn only_the_lost_node_of_two_is_replaced() {
    let (mut env, lab) = with_lab(3).await;
    let text = "num_nodes: 2\nrun: |\n  echo $SKYPILOT_NODE_RANK >> /home/lines\n  sleep 600\n";
    let id = launch(&mut env, text, json!({})).await;
    let hosts = async |env: &mut TestEnv, job: &Value| {
        let runs = job["tasks"][0]["runs"].as_array().unwrap();
        let run = env.run(runs.last().unwrap().as_str().unwrap()).await;
        [host_of_job(&lab, &run, 0), host_of_job(&lab, &run, 1)]
    };
    let first = runs(&mut env, id).await;
    env.eventually("both nodes are at work", || lines(&lab, "/home/lines").len() == 2);
    let [kept, lost] = hosts(&mut env, &first).await;
    lab.host(lost).power_off().unwrap();
    let again = wait_until(&mut env, id, "it runs again", |job| job["recovery_count"] == 1).await;
    assert_eq!(again["tasks"][0]["attempt"], 2, "{again:#}");
    let after = hosts(&mut env, &again).await;
    assert!(after.contains(&kept) && !after.contains(&lost), "{kept} and {lost}, then {after:?}");
    env.eventually("both nodes are at work again", || lines(&lab, "/home/lines").len() == 4);
    env.project("jobs/cancel", &json!({"job_ids": [id]})).await;
    wait_until_done(&mut env, id).await;
}
