//! Managed jobs on several nodes: what each sees, and what becomes of all when one is lost.

use std::collections::BTreeMap;

use serde_json::json;

use super::{ends, launch, runs, starts, until, with_hosts};

/// One node is prepared at once, the other when it may be.
#[tokio::test]
async fn no_node_begins_before_all_are_prepared() {
    let (mut stage, _hosts) = with_hosts(2, 1).await;
    let (dir, may) = (stage.home().to_owned(), stage.home().join("may"));
    let text = format!(
        "num_nodes: 2\nsetup: |\n  if [ $SKYPILOT_SETUP_NODE_RANK = 1 ]; then\n    \
         until [ -e {may} ]; do sleep 0.05; done\n  fi\n  touch {dir}/prepared-$SKYPILOT_SETUP_NODE_RANK\n\
         run: |\n  ls {dir} | grep -c prepared >> {dir}/begun\n",
        may = may.display(),
        dir = dir.display()
    );
    let id = launch(&mut stage, &text, json!({})).await;
    stage.eventually("the first is prepared", || dir.join("prepared-0").exists());
    // The server knows that, and that it waits.
    let waits = |job: &serde_json::Value| job["status"] == "RUNNING";
    let seen = until(&mut stage, id, "it is handed to its nodes", waits).await;
    let run = seen["tasks"][0]["runs"][0].as_str().unwrap().to_owned();
    let says = |run: &serde_json::Value| run.to_string().contains("the other nodes to be prepared");
    stage.eventually_run(&run, std::time::Duration::from_secs(60), says).await;
    assert_eq!(starts(&dir.join("begun")), 0);
    std::fs::write(&may, "").unwrap();
    let seen = ends(&mut stage, id).await;
    assert_eq!(seen["status"], "SUCCEEDED", "{seen:#}");
    assert_eq!(std::fs::read_to_string(dir.join("begun")).unwrap(), "2\n2\n");
}

#[tokio::test]
async fn m6_several_nodes_know_their_ranks_and_are_recovered_whole_when_one_is_lost() {
    let (mut stage, mut hosts) = with_hosts(3, 4).await;
    let (lines, go) = (stage.home().join("lines"), stage.home().join("go"));
    let text = format!(
        "name: gang\nnum_nodes: 2\nsetup: |\n  [ -n \"$SKYPILOT_SETUP_NODE_RANK\" ] || exit 7\nrun: |\n  \
         echo \"$SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES at $(echo \"$SKYPILOT_NODE_IPS\" | sort -u | wc -l) \
         as $SKYPILOT_TASK_ID\" >> {}\n  until [ -e {} ]; do sleep 0.05; done\n",
        lines.display(),
        go.display()
    );
    let id = launch(&mut stage, &text, json!({})).await;
    let first = runs(&mut stage, id).await;
    stage.eventually("both nodes are at work", || starts(&lines) == 2);
    let placement = first["tasks"][0]["placement"].as_str().unwrap().to_owned();
    let number: usize = placement.rsplit('-').next().unwrap().parse().unwrap();
    hosts.power_off(number).unwrap();
    let seen = until(&mut stage, id, "it runs again", |job| job["recovery_count"] == 1).await;
    assert_eq!((&seen["status"], &seen["tasks"][0]["attempt"]), (&json!("RUNNING"), &json!(2)), "{seen:#}");
    stage.eventually("both nodes are at work again", || starts(&lines) == 4);
    let written = std::fs::read_to_string(&lines).unwrap();
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for line in written.lines() {
        *times.entry(line).or_default() += 1;
    }
    // The same two ranks under the same name, twice each: neither was left behind.
    assert_eq!(times.values().copied().collect::<Vec<_>>(), [2, 2], "{written}");
    for (rank, line) in times.keys().enumerate() {
        assert!(line.starts_with(&format!("{rank} of 2 at 2 as sky-managed-")), "{written}");
    }
    std::fs::write(&go, "").unwrap();
    let seen = ends(&mut stage, id).await;
    assert_eq!(seen["status"], "SUCCEEDED", "{seen:#}");
    assert_eq!(starts(&lines), 4);
}
