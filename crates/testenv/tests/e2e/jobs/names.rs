//! Tasks of a group find each other by name.

use serde_json::{Value, json};

use super::{
    launch,
    nodes::{lines, with_lab},
    wait_until, wait_until_done,
};

/// A task that serves its host name, and continuously requests that of the other.
fn task(name: &str, other: &str) -> String {
    format!(
        "name: {name}\nresources: {{cpus: 1+}}\nrun: |\n  hostname > /home/me\n  \
         python3 -m http.server 8080 --directory /home > /dev/null 2>&1 &\n  \
         while true; do\n    curl -sf --connect-timeout 1 http://{other}-0.$SKYPILOT_JOBGROUP_NAME:8080/me >> /home/{name}\n    \
         sleep 0.1\n  done\n"
    )
}

#[tokio::test]
async fn group_tasks_resolve_each_other_by_name_even_after_one_moves() {
    let (mut env, lab) = with_lab(3).await;
    let text = format!(
        "name: pair\nexecution: parallel\n---\n{}---\n{}",
        task("left", "right"),
        task("right", "left")
    );
    let id = launch(&mut env, &text, json!({})).await;
    let place =
        |job: &Value, task: usize| job["tasks"][task]["placement"].as_str().unwrap_or_default().to_owned();
    let both = |job: &Value| job["tasks"].as_array().unwrap().iter().all(|task| task["status"] == "RUNNING");
    let first = wait_until(&mut env, id, "both run", both).await;
    // Hosts of a fleet are counted from 0, those of a lab from 1.
    let host = |place: &str| place.rsplit('-').next().unwrap().parse::<usize>().unwrap() + 1;
    let (left, right) = (host(&place(&first, 0)), host(&place(&first, 1)));
    let received = |name: &str, of: usize| lines(&lab, &format!("/home/{name}")).contains(&format!("h{of}"));
    env.eventually("each hears the other", || received("left", right) && received("right", left));
    // The names exist only inside the job.
    assert!(!std::fs::read_to_string(lab.host(left).path("/etc/hosts")).unwrap().contains("pair"));
    lab.host(right).power_off().unwrap();
    let moved = wait_until(&mut env, id, "it runs elsewhere", |job| {
        job["tasks"][1]["recovery_count"] == 1 && job["tasks"][1]["status"] == "RUNNING"
    })
    .await;
    let now = host(&place(&moved, 1));
    assert_ne!(now, right);
    env.eventually("it is heard at its new place", || received("left", now));
    let again = lab.host(now).path("/home/right");
    env.eventually("and hears from there", || {
        std::fs::read_to_string(&again).is_ok_and(|text| text.contains(&format!("h{left}")))
    });
    assert_eq!(moved["tasks"][0]["recovery_count"], 0, "{moved:#}");
    env.project("jobs/cancel", &json!({"job_ids": [id]})).await;
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!(seen["status"], "CANCELLED", "{seen:#}");
}
