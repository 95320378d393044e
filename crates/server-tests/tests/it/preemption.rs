//! Preemption: jobs end so that others can start, by request in a column, with a grace period and blocks that are kept.

use serde_json::{Value, json};
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    http::{ServerFixture, on_both},
    job_test_env::JobTestEnv,
    project_order::{apply, wait_for_queue},
};
use windlass_server::hints::Hint;

on_both! {
    without_the_setting_nothing_is_preempted_and_with_it_a_higher_class_starts
    a_project_gets_its_share_back_from_one_that_borrows
    a_preempted_job_that_is_retried_keeps_its_place_in_the_queue
    kept_blocks_are_not_given_to_a_job_that_comes_first
    a_preempted_job_has_the_grace_period_of_its_fleet_and_names_no_other_project
    a_waiting_run_learns_who_is_before_it_by_which_rule_without_hidden_names
    the_start_of_a_waiting_run_follows_from_the_limits_of_those_that_run
    blocks_that_are_kept_or_reserved_for_a_run_are_shown
    a_managed_job_for_which_others_are_preempted_is_not_withdrawn
    a_preempted_managed_job_keeps_its_place_in_the_queue
    a_fleet_preempts_no_more_replicas_than_its_budget_in_ten_minutes
}

/// A host with four blocks that `main` shares with `left` and `right`; jobs there may be preempted at once.
async fn shared_host(ground: &ServerFixture) -> JobTestEnv {
    let env = JobTestEnv::new(ground, 1, 4).await;
    for project in ["left", "right"] {
        env.server.admin("/api/projects/create", json!({"project_name": project})).await;
    }
    let importers =
        json!({"name": "shared", "importer_projects": ["left", "right"], "exported_fleets": ["hosts"]});
    env.server.admin("/api/project/main/exports/create", importers).await;
    env
}

async fn allow(env: &JobTestEnv, preemption: Value) {
    let spec = json!({"configuration": {"type": "fleet", "name": "hosts", "placement": "cluster",
        "preemption": preemption, "blocks": 4,
        "ssh_config": {"user": "ubuntu", "port": 2222, "identity_file": "/key", "hosts": ["10.0.0.1"]}}, "profile": {"name": "default"}});
    env.write("UPDATE fleets SET spec = $1 WHERE name = 'hosts'", vec![spec.to_string().into()]).await;
}

fn at_once() -> Value {
    json!({"min_run": 0, "wait": 0, "grace": 7})
}

/// Status and termination detail of the submissions of runs, in the order of the runs.
async fn submissions(env: &JobTestEnv) -> Vec<(String, String, Option<String>)> {
    let sql = "SELECT r.name, j.status, j.termination_detail FROM jobs j JOIN runs r ON r.id = j.run_id \
               ORDER BY r.name, j.submission_num";
    let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
    rows.iter().map(|row| (row.text(0).unwrap(), row.text(1).unwrap(), row.opt_text(2).unwrap())).collect()
}

async fn running(env: &JobTestEnv, wanted: &[&str]) {
    eventually_ok_async("these runs run", async || {
        env.wake_pipelines();
        let all = submissions(env).await;
        let runs: Vec<&str> =
            all.iter().filter(|(_, status, _)| status == "running").map(|(name, ..)| name.as_str()).collect();
        if runs == wanted { Ok(()) } else { Err(format!("{all:?}")) }
    })
    .await;
}

async fn a_waiting_run_learns_who_is_before_it_by_which_rule_without_hidden_names(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    fill(&env, json!({})).await;
    apply(&env, "left", "secret-name", json!({"class": "urgent"})).await;
    apply(&env, "main", "older", json!({})).await;
    apply(&env, "main", "mine", json!({})).await;
    wait_for_queue(&env, 3).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "user")]).await;
    let body = json!({"run_name": "mine"});
    let why = env.server.ok(&mira, "/api/project/main/runs/why", body.clone()).await;
    let before = why["jobs"][0]["in_front"].as_array().unwrap();
    let seen: Vec<_> = before.iter().map(|one| (&one["run"], &one["rule"])).collect();
    assert_eq!(seen, [(&Value::Null, &json!("class")), (&json!("older"), &json!("age"))]);
    assert!(before[0]["wants"].as_str().unwrap().contains("GPU"), "{why}");
    assert!(!why.to_string().contains("secret-name"), "{why}");
    // The position is that of `in_front`, also in lists and plans; the other project's run is counted, and has no name.
    assert_eq!((&why["turn"]["position"], &why["turn"]["length"]), (&json!(2), &json!(3)), "{why}");
    let request = json!({"project_name": "main", "only_active": true, "queue_positions": true});
    let listed = env.server.ok(&mira, "/api/runs/list", request).await;
    let of = |name: &str| {
        let runs = listed.as_array().unwrap().iter();
        let run = runs.clone().find(|run| run["run_spec"]["run_name"] == name).unwrap();
        run["latest_job_submission"]["queue_position"].clone()
    };
    assert_eq!((of("older"), of("mine"), of("first-0")), (json!(1), json!(2), Value::Null), "{listed}");
    let queue = env.server.ok(&mira, "/api/queue/list", json!({})).await;
    let entries = queue["entries"].as_array().unwrap();
    let seen: Vec<_> = entries.iter().map(|one| (&one["run"], &one["position"], &one["rule"])).collect();
    let none = Value::Null;
    assert_eq!(
        seen,
        [
            (&none, &json!(0), &none),
            (&json!("older"), &json!(1), &json!("class")),
            (&json!("mine"), &json!(2), &json!("age"))
        ]
    );
    assert!(entries[0]["turn"].is_null() && !queue.to_string().contains("secret-name"), "{queue}");
    assert_eq!(entries[2]["turn"]["sentences"], why["turn"]["sentences"]);
    let resources = json!({"cpu": "1..", "memory": "0..", "gpu": "1..", "disk": null});
    let spec = JobTestEnv::spec("planned", json!({"resources": resources, "class": "idle"}));
    let plan = env.server.ok(&mira, "/api/project/main/runs/get_plan", json!({"run_spec": spec})).await;
    assert_eq!((&plan["turn"]["position"], &plan["turn"]["length"]), (&json!(3), &json!(4)), "{plan}");
    let why = env.server.admin("/api/project/main/runs/why", body).await;
    assert_eq!(why["jobs"][0]["in_front"][0]["run"], "secret-name");
    env.end().await;
}

/// The turn of a run, as an admin sees it.
async fn turn(env: &JobTestEnv, project: &str, name: &str) -> Value {
    let path = format!("/api/project/{project}/runs/why");
    env.server.admin(&path, json!({"run_name": name})).await["turn"].clone()
}

/// End of the limit of a run that runs.
async fn deadline(env: &JobTestEnv, name: &str) -> i64 {
    let sql = format!(
        "SELECT j.run_deadline_at FROM jobs j JOIN runs r ON r.id = j.run_id WHERE r.name = '{name}'"
    );
    env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap()
}

async fn the_start_of_a_waiting_run_follows_from_the_limits_of_those_that_run(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    env.server.admin("/api/project/right/quotas/set", json!({"resource": "gpu", "share": 2, "max": 3})).await;
    for (number, limit) in ["3h", "1h", "2h", "off"].iter().enumerate() {
        let name = format!("first-{number}");
        apply(&env, "main", &name, json!({"max_duration": limit})).await;
        env.wait_for_job(&name, "running").await;
    }
    apply(&env, "right", "one", json!({"max_duration": "30m"})).await;
    apply(&env, "left", "two", json!({})).await;
    wait_for_queue(&env, 2).await;
    // `one` is within its share, so it comes first: when `first-1` ends. `two` follows when `one` has ended.
    let time = |at: &Value| {
        let at: windlass_model::time::Timestamp = serde_json::from_value(at.clone()).unwrap();
        at.0
    };
    let first = turn(&env, "right", "one").await;
    let ends = deadline(&env, "first-1").await;
    assert_eq!(time(&first["starts_at"]), ends, "{first}");
    assert_eq!((&first["is_within_share"], &first["quotas"][0]["share"]), (&json!(true), &json!(2.0)));
    let text = first["sentences"].to_string();
    assert!(text.contains("holds 0 of its share of 2 `gpu`, so it comes before those that borrow"), "{text}");
    let second = turn(&env, "left", "two").await;
    assert_eq!(time(&second["starts_at"]), ends + 30 * 60 * 1_000_000, "{second}");
    assert_eq!((&second["in_front"][0]["rule"], &second["position"]), (&json!("share"), &json!(1)));
    env.end().await;
}

async fn blocks_that_are_kept_or_reserved_for_a_run_are_shown(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    allow(&env, at_once()).await;
    fill(&env, json!({"class": "idle"})).await;
    // The host does not answer, so the preempted job does not end yet.
    env.update_script(|script| script.silent = true);
    apply(&env, "left", "normal", json!({})).await;
    eventually_ok_async("a job is preempted", async || {
        env.wake_pipelines();
        let sql = "SELECT count(*) FROM jobs WHERE promised_until IS NOT NULL";
        let count = env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap();
        if count == 1 { Ok(()) } else { Err(count) }
    })
    .await;
    let kept = turn(&env, "left", "normal").await;
    let reserved = &kept["reserved"][0];
    assert_eq!((&reserved["place"], &reserved["is_preempted"]), (&json!("hosts-0"), &json!(true)), "{kept}");
    assert!(reserved["until"].is_string() && kept["starts_at"].is_string(), "{kept}");
    assert!(kept["sentences"].to_string().contains("jobs there were preempted for it"), "{kept}");
    // Another run learns that, without the name if it may not see it.
    allow(&env, json!("off")).await;
    apply(&env, "main", "other", json!({})).await;
    wait_for_queue(&env, 2).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "user")]).await;
    let why = env.server.ok(&mira, "/api/project/main/runs/why", json!({"run_name": "other"})).await;
    let text = why["turn"]["sentences"].to_string();
    assert!(text.contains("`hosts-0` is reserved for a run of another project, until"), "{text}");
    // A project that shares only another fleet with `left` is in the same queue, and does not learn of the host.
    share_full_fleet(&env).await;
    apply(&env, "third", "far", json!({})).await;
    wait_for_queue(&env, 3).await;
    let far = turn(&env, "third", "far").await;
    assert_eq!((&far["length"], far.to_string().contains("hosts-0")), (&json!(3), false), "{far}");
    env.update_script(|script| script.silent = false);
    env.mark_due().await;
    running(&env, &["first-0", "first-1", "first-2", "normal"]).await;
    // A run that has waited for more than five minutes, and is blocked only by others, reserves the host.
    env.age("submitted_at", 400).await;
    let path = "/api/project/main/runs/why";
    let why = env.server.admin(path, json!({"run_name": "other"})).await;
    let text = why["turn"]["sentences"].to_string();
    assert!(text.contains("`hosts-0` is reserved for it"), "{text}");
    env.end().await;
}

/// A fleet of `left`, with one full host, that `third` may use.
async fn share_full_fleet(env: &JobTestEnv) {
    env.server.admin("/api/projects/create", json!({"project_name": "third"})).await;
    let fleet = "INSERT INTO fleets (id, project_id, name, spec, status, created_at, last_processed_at) \
                 SELECT new_uuid(), p.id, 'spare', f.spec, 'active', now_us(), now_us() FROM fleets f, projects p \
                 WHERE f.name = 'hosts' AND p.name = 'left'";
    env.write(fleet, vec![]).await;
    let host = "INSERT INTO instances (id, project_id, fleet_id, name, instance_num, backend, region, hostname, price, \
                instance_type, provisioning, ssh, status, total_blocks, busy_blocks, created_at, last_processed_at) \
                SELECT new_uuid(), f.project_id, f.id, 'spare-0', 0, i.backend, i.region, 'spare', i.price, i.instance_type, \
                i.provisioning, i.ssh, 'busy', 1, 1, now_us(), now_us() FROM instances i, fleets f \
                WHERE i.name = 'hosts-0' AND f.name = 'spare'";
    env.write(host, vec![]).await;
    let importers = json!({"name": "spare", "importer_projects": ["third"], "exported_fleets": ["spare"]});
    env.server.admin("/api/project/left/exports/create", importers).await;
}

async fn fill(env: &JobTestEnv, more: Value) {
    for number in 0..4 {
        let name = format!("first-{number}");
        apply(env, "main", &name, more.clone()).await;
        running(env, &["first-0", "first-1", "first-2", "first-3"][..=number]).await;
    }
}

async fn without_the_setting_nothing_is_preempted_and_with_it_a_higher_class_starts(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    fill(&env, json!({"class": "idle"})).await;
    apply(&env, "left", "normal", json!({})).await;
    wait_for_queue(&env, 1).await;
    env.mark_due().await;
    env.passes(2).await;
    running(&env, &["first-0", "first-1", "first-2", "first-3"]).await;
    // It runs for too short a time.
    allow(&env, json!({"min_run": "1h", "wait": 0})).await;
    env.mark_due().await;
    env.passes(2).await;
    running(&env, &["first-0", "first-1", "first-2", "first-3"]).await;
    allow(&env, at_once()).await;
    env.mark_due().await;
    // The one that started last.
    running(&env, &["first-0", "first-1", "first-2", "normal"]).await;
    let run = env.wait_for_run("first-3", "failed").await;
    let last = &run["latest_job_submission"];
    assert_eq!(last["termination_reason"], "interrupted_by_no_capacity");
    assert!(submissions(&env).await.iter().any(|(name, _, detail)| {
        name == "first-3" && detail.as_deref() == Some("preempted_by_scheduler")
    }));
    let sql = "SELECT count(*) FROM events WHERE reason = 'preempted_by_scheduler'";
    assert!(env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap() >= 1);
    env.end().await;
}

async fn a_project_gets_its_share_back_from_one_that_borrows(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    allow(&env, at_once()).await;
    for project in ["main", "right"] {
        env.server
            .admin(&format!("/api/project/{project}/quotas/set"), json!({"resource": "gpu", "share": 2}))
            .await;
    }
    fill(&env, json!({"preemptible": true})).await;
    // `left` has no share: it borrows as well, and waits.
    apply(&env, "left", "other", json!({})).await;
    for name in ["mine-0", "mine-1", "mine-2"] {
        apply(&env, "right", name, json!({"preemptible": true})).await;
    }
    running(&env, &["first-0", "first-1", "mine-0", "mine-1"]).await;
    env.passes(2).await;
    running(&env, &["first-0", "first-1", "mine-0", "mine-1"]).await;
    env.end().await;
}

async fn a_preempted_job_that_is_retried_keeps_its_place_in_the_queue(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    allow(&env, at_once()).await;
    fill(&env, json!({"class": "idle", "retry": {"on_events": ["interruption"]}})).await;
    apply(&env, "main", "younger", json!({"class": "idle"})).await;
    wait_for_queue(&env, 1).await;
    apply(&env, "main", "urgent", json!({"class": "urgent"})).await;
    running(&env, &["first-0", "first-1", "first-2", "urgent"]).await;
    env.skip_backoff("first-3").await;
    wait_for_queue(&env, 2).await;
    let sql = "SELECT j.preempted_before, j.queued_at < y.submitted_at FROM jobs j JOIN runs r ON r.id = j.run_id, jobs y \
               JOIN runs s ON s.id = y.run_id WHERE r.name = 'first-3' AND j.submission_num = 1 AND s.name = 'younger'";
    let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!((rows[0].int(0).unwrap(), rows[0].bool(1).unwrap()), (1, true));
    allow(&env, json!(false)).await;
    env.stop_run("urgent", false).await;
    running(&env, &["first-0", "first-1", "first-2", "first-3"]).await;
    env.end().await;
}

/// Waits until a job was asked to end for another.
async fn wait_for_preemption(env: &JobTestEnv) {
    eventually_ok_async("a job is preempted", async || {
        env.wake_pipelines();
        let sql = "SELECT count(*) FROM jobs WHERE preempted_for IS NOT NULL";
        let count = env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap();
        if count == 1 { Ok(()) } else { Err(count) }
    })
    .await;
}

async fn kept_blocks_are_not_given_to_a_job_that_comes_first(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    allow(&env, at_once()).await;
    fill(&env, json!({"class": "idle"})).await;
    // The host does not answer, so the preempted job does not end yet.
    env.update_script(|script| script.silent = true);
    apply(&env, "left", "normal", json!({})).await;
    wait_for_preemption(&env).await;
    // From now on nothing is preempted, and `urgent` comes before `normal`.
    allow(&env, json!("off")).await;
    apply(&env, "right", "urgent", json!({"class": "urgent"})).await;
    wait_for_queue(&env, 2).await;
    env.update_script(|script| script.silent = false);
    env.mark_due().await;
    running(&env, &["first-0", "first-1", "first-2", "normal"]).await;
    env.end().await;
}

async fn a_preempted_job_has_the_grace_period_of_its_fleet_and_names_no_other_project(
    ground: &ServerFixture,
) {
    let env = shared_host(ground).await;
    allow(&env, at_once()).await;
    fill(&env, json!({"class": "idle"})).await;
    apply(&env, "left", "secret-name", json!({})).await;
    running(&env, &["first-0", "first-1", "first-2", "secret-name"]).await;
    assert!(env.hosts.calls.lock().contains(&"stop within 7 s, preempted".to_owned()));
    let why = json!({"run_name": "first-3"});
    env.wait_for_run("first-3", "failed").await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "user")]).await;
    let answer = env.server.ok(&mira, "/api/project/main/runs/why", why.clone()).await;
    let text = answer.to_string();
    assert!(text.contains("preempted: a run of another project is of class `normal`"), "{text}");
    assert!(!text.contains("secret-name"), "{text}");
    let report = &answer["preempted"];
    assert_eq!(
        (&report["rule"], &report["run"], &report["grace_seconds"]),
        (&json!("class"), &Value::Null, &json!(7))
    );
    let sentences = report["sentences"].to_string();
    assert!(sentences.contains("for a run of another project, which is of a higher class"), "{sentences}");
    assert!(sentences.contains("Nothing submits it again"), "{sentences}");
    // Those who may see the other project see the name.
    let answer = env.server.admin("/api/project/main/runs/why", why).await;
    assert_eq!(
        (&answer["preempted"]["project"], &answer["preempted"]["run"]),
        (&json!("left"), &json!("secret-name"))
    );
    env.end().await;
}

async fn a_fleet_preempts_no_more_replicas_than_its_budget_in_ten_minutes(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    allow(&env, json!({"min_run": 0, "wait": 0, "grace": 7, "budget": 1})).await;
    fill(&env, json!({"class": "idle"})).await;
    apply(&env, "left", "one", json!({})).await;
    running(&env, &["first-0", "first-1", "first-2", "one"]).await;
    apply(&env, "left", "two", json!({})).await;
    wait_for_queue(&env, 1).await;
    env.mark_due().await;
    env.passes(2).await;
    running(&env, &["first-0", "first-1", "first-2", "one"]).await;
    let earlier = "preempted_at = preempted_at - 660000000";
    env.write_between_passes("jobs", earlier, "preempted_at IS NOT NULL").await;
    env.mark_due().await;
    running(&env, &["first-0", "first-1", "one", "two"]).await;
    env.end().await;
}

/// Waits for a state of the managed job, while its pipeline runs.
async fn managed_job(env: &JobTestEnv, project: &str, what: &str, is_so: impl Fn(&Value) -> bool) {
    eventually_ok_async(what, async || {
        env.write("UPDATE managed_jobs SET due_at = NULL WHERE NOT finished", vec![]).await;
        env.server.app.wake(&[Hint::ManagedJobs]);
        let seen = env.server.admin(&format!("/api/project/{project}/jobs/get"), json!({"job_id": 1})).await;
        if is_so(&seen["tasks"][0]) { Ok(()) } else { Err(seen) }
    })
    .await;
}

/// Waits until the managed job was evaluated twice more.
async fn managed_passes(env: &JobTestEnv) {
    let epoch = async || {
        let sql = "SELECT max(lock_epoch) FROM managed_jobs";
        env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap()
    };
    let before = epoch().await;
    eventually_ok_async("the managed job is evaluated", async || {
        env.write("UPDATE managed_jobs SET due_at = NULL WHERE NOT finished", vec![]).await;
        env.server.app.wake(&[Hint::ManagedJobs]);
        let now = epoch().await;
        if now >= before + 2 { Ok(()) } else { Err(now) }
    })
    .await;
}

async fn a_managed_job_for_which_others_are_preempted_is_not_withdrawn(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    allow(&env, json!({"min_run": 0, "wait": "30s", "grace": 7})).await;
    fill(&env, json!({"class": "idle"})).await;
    // The preempted job does not end; a host that is silent altogether would become unreachable.
    env.update_script(|script| script.deaf = true);
    // An attempt that waits for nothing in particular would be followed by one with the second candidate.
    let text = "run: work\nresources:\n  ordered:\n    - {cpus: 1+, memory: 1+, accelerators: 'A100:1'}\n    \
                - {cpus: 2+, memory: 1+, accelerators: 'A100:1'}\n";
    env.server.admin("/api/project/left/jobs/launch", json!({"text": text})).await;
    managed_job(&env, "left", "the first attempt", |task| task["attempt"] == 1).await;
    wait_for_queue(&env, 1).await;
    let earlier = "submitted_at = submitted_at - 40000000, due_at = NULL";
    env.write_between_passes("jobs", earlier, "status = 'submitted'").await;
    wait_for_preemption(&env).await;
    let earlier = "submitted_at = submitted_at - 120000000";
    env.write_between_passes("runs", earlier, "managed_job_id IS NOT NULL").await;
    managed_passes(&env).await;
    env.update_script(|script| script.deaf = false);
    env.mark_due().await;
    managed_job(&env, "left", "it runs", |task| task["status"] == "RUNNING").await;
    managed_job(&env, "left", "the first attempt runs", |task| task["attempt"] == 1).await;
    env.end().await;
}

async fn a_preempted_managed_job_keeps_its_place_in_the_queue(ground: &ServerFixture) {
    let env = shared_host(ground).await;
    allow(&env, at_once()).await;
    for number in 0..3 {
        let name = format!("first-{number}");
        apply(&env, "main", &name, json!({})).await;
        running(&env, &["first-0", "first-1", "first-2"][..=number]).await;
    }
    let text = "run: work\nresources: {cpus: 1+, memory: 1+, accelerators: 'A100:1'}\n";
    env.server.admin("/api/project/main/jobs/launch", json!({"text": text})).await;
    managed_job(&env, "main", "it runs", |task| task["status"] == "RUNNING").await;
    // Of the same priority as an attempt.
    apply(&env, "main", "younger", json!({"priority": 50})).await;
    wait_for_queue(&env, 1).await;
    apply(&env, "main", "urgent", json!({"class": "urgent"})).await;
    // First on other hosts, of which there are none, and then anywhere.
    managed_job(&env, "main", "it is launched again", |task| task["attempt"] == 3).await;
    wait_for_queue(&env, 2).await;
    let sql = "SELECT j.preempted_before, j.queued_at < y.submitted_at FROM jobs j JOIN runs r ON r.id = j.run_id, jobs y \
               JOIN runs s ON s.id = y.run_id WHERE r.managed_job_id IS NOT NULL AND j.status = 'submitted' \
               AND s.name = 'younger'";
    let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!((rows[0].int(0).unwrap(), rows[0].bool(1).unwrap()), (1, true));
    allow(&env, json!(false)).await;
    env.stop_run("urgent", false).await;
    managed_job(&env, "main", "it runs again", |task| {
        env.wake_pipelines();
        task["status"] == "RUNNING" && task["attempt"] == 3
    })
    .await;
    let all = submissions(&env).await;
    assert!(all.iter().any(|(name, status, _)| name == "younger" && status == "submitted"), "{all:?}");
    env.end().await;
}
