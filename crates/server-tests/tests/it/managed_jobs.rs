//! Managed jobs over HTTP, with and without running pipelines.

use serde_json::{Value, json};
use windlass_model::decide::managed_jobs::slots::{SlotLimits, SlotRequest, grant_slots};
use windlass_server::{
    config::{Settings, SettingsSource},
    db::pipeline_rows::managed_jobs as rows,
    hints::Hint,
};
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    job_test_env::JobTestEnv,
    scripted_hosts::end_state,
};

on_both! {
    launched_managed_jobs_are_listed_read_and_cancelled
    an_invalid_or_unsupported_task_file_is_refused_with_the_cause
    launched_copies_are_queued_by_number
    launch_slots_are_shared_between_projects
    m5_slots_are_granted_by_priority_then_age_and_never_beyond_the_limits
    a_task_that_no_fleet_can_take_fails_its_prechecks_and_ends_its_job
    secrets_of_a_managed_job_are_sealed_and_never_shown
    fields_without_effect_are_reported_before_launch
    m8_a_run_that_ends_before_its_node_is_a_controller_failure
    a_failed_managed_job_is_resumed_under_its_number
}

async fn post_jobs(server: &TestServer, what: &str, body: Value) -> Value {
    server.admin(&format!("/api/project/main/jobs/{what}"), body).await
}

async fn start_without_pipelines(ground: &ServerFixture) -> TestServer {
    let mut settings = Settings::new(SettingsSource { port: Some(0), ..ground.given() }, None).unwrap();
    settings.pipelines = false;
    TestServer::start_with_settings(settings).await
}

async fn launched_managed_jobs_are_listed_read_and_cancelled(ground: &ServerFixture) {
    let server = start_without_pipelines(ground).await;
    let text =
        "name: sweep\nresources: {cpus: 2+, memory: 4, use_spot: true}\nrun: echo $SKYPILOT_JOB_RANK\n";
    let launched = post_jobs(&server, "launch", json!({"text": text, "num_jobs": 3, "priority": 7})).await;
    let numbers: Vec<i64> =
        launched["jobs"].as_array().unwrap().iter().map(|job| job["job_id"].as_i64().unwrap()).collect();
    assert_eq!(numbers, [1, 2, 3], "{launched}");
    let more =
        post_jobs(&server, "launch", json!({"text": "run: echo a\n---\nrun: echo b\n", "name": "two"})).await;
    assert_eq!(more["jobs"][0]["job_id"], 4);
    let all = post_jobs(&server, "list", json!({})).await;
    let listed: Vec<i64> =
        all.as_array().unwrap().iter().map(|job| job["job_id"].as_i64().unwrap()).collect();
    assert_eq!(listed, [4, 3, 2, 1], "the newest first: {all:#}");
    let page = post_jobs(&server, "list", json!({"limit": 2, "prev_job_id": 4, "name": "sweep"})).await;
    assert_eq!(page.as_array().unwrap().len(), 2);
    let one = post_jobs(&server, "get", json!({"job_id": 2})).await;
    assert_eq!(
        (&one["rank"], &one["num_jobs"], &one["priority"]),
        (&json!(1), &json!(3), &json!(7)),
        "{one:#}"
    );
    assert_eq!((&one["status"], &one["schedule_state"]), (&json!("PENDING"), &json!("INACTIVE")));
    let unread = "submitted; the server has not processed it yet";
    assert_eq!((&one["reason"], &one["tasks"][0]["reason"]), (&json!(unread), &json!(unread)), "{one:#}");
    let task = &one["tasks"][0];
    assert_eq!((&task["resources"], &task["pending_kind"]), (&json!("2+ CPU, 4 GB, spot"), &json!("queued")));
    let two = post_jobs(&server, "get", json!({"job_id": 4})).await;
    let names: Vec<&str> =
        two["tasks"].as_array().unwrap().iter().map(|task| task["name"].as_str().unwrap()).collect();
    assert_eq!((&two["shape"], names), (&json!("pipeline"), vec!["two-0", "two-1"]), "{two:#}");
    assert_eq!(two["tasks"][1]["reason"], "it begins when task two-0 has succeeded", "{two:#}");
    let done = post_jobs(&server, "cancel", json!({"name": "sweep"})).await;
    assert_eq!(done["job_ids"], json!([1, 2, 3]));
    assert_eq!(post_jobs(&server, "get", json!({"job_id": 1})).await["cancel_asked"], true);
    assert_eq!(post_jobs(&server, "get", json!({"job_id": 4})).await["cancel_asked"], false);
    server.stop().await;
}

async fn an_invalid_or_unsupported_task_file_is_refused_with_the_cause(ground: &ServerFixture) {
    let server = start_without_pipelines(ground).await;
    let refused = async |text: &str| {
        server.refused(ADMIN_TOKEN, "/api/project/main/jobs/launch", json!({"text": text}), "error").await
    };
    assert!(refused("run: echo\nrnu: x\n").await.contains("rnu"));
    assert!(refused("service: {readiness_probe: /}\nrun: echo\n").await.contains("windlass apply"));
    let local = "workdir: {url: /data/code}\nrun: echo\n";
    assert!(refused(local).await.contains("cannot clone the repository `/data/code`"));
    assert!(refused("run: echo\nsecrets: {TOKEN: null}\n").await.contains("TOKEN"));
    let circle = "name: a\ndepends_on: [b]\nrun: x\n---\nname: b\ndepends_on: [a]\nrun: y\n";
    assert!(refused(circle).await.contains("cycle"));
    assert_eq!(post_jobs(&server, "list", json!({})).await, json!([]));
    server.stop().await;
}

async fn m5_slots_are_granted_by_priority_then_age_and_never_beyond_the_limits(ground: &ServerFixture) {
    let server = start_without_pipelines(ground).await;
    let db = server.app.db();
    for priority in [0, 5, 5, -3] {
        post_jobs(&server, "launch", json!({"text": "run: echo\n", "priority": priority})).await;
    }
    let limits = SlotLimits { max_launching: 2, max_alive: 3 };
    let line = rows::slot_queue(db, limits).await.unwrap();
    let jobs: Vec<u64> = line.waiting.iter().map(|(waiting, _)| waiting.job).collect();
    assert_eq!((jobs, line.in_use.launching), (vec![2, 3], 0), "as many as could be granted at all");
    // Two replicas grant the same and further slots at the same moment: the limit holds.
    let all: Vec<(SlotRequest, _)> =
        rows::slot_queue(db, SlotLimits { max_launching: 9, max_alive: 9 }).await.unwrap().waiting;
    assert_eq!(all.len(), 4);
    let (one, two) = tokio::join!(rows::grant(db, &all, limits), rows::grant(db, &all, limits));
    one.unwrap();
    two.unwrap();
    let granted = "SELECT m.number FROM managed_job_tasks t JOIN managed_jobs m ON m.id = t.job_id \
                   WHERE t.granted ORDER BY m.number";
    let found: Vec<i64> =
        db.query(granted, vec![]).await.unwrap().iter().map(|row| row.int(0).unwrap()).collect();
    assert_eq!(found, [2, 3], "the higher priority first, then the older");
    // With free launch slots, the number of alive jobs is the limit.
    rows::grant(db, &all, SlotLimits { max_launching: 9, max_alive: 3 }).await.unwrap();
    assert_eq!(db.query(granted, vec![]).await.unwrap().len(), 3);
    server.stop().await;
}

async fn launch_slots_are_shared_between_projects(ground: &ServerFixture) {
    let server = start_without_pipelines(ground).await;
    let db = server.app.db();
    post_jobs(&server, "launch", json!({"text": "run: echo\n", "num_jobs": 9, "priority": 900})).await;
    let limits = SlotLimits { max_launching: 4, max_alive: 99 };
    // A single project may have all slots.
    let alone = rows::slot_queue(db, limits).await.unwrap();
    assert_eq!((alone.waiting.len(), alone.held.is_none()), (4, true));
    server.admin("/api/projects/create", json!({"project_name": "lab"})).await;
    server.admin("/api/project/lab/jobs/launch", json!({"text": "run: echo\n", "num_jobs": 2})).await;
    let grant = async || {
        let line = rows::slot_queue(db, limits).await.unwrap();
        let queue: Vec<SlotRequest> = line.waiting.iter().map(|(waiting, _)| *waiting).collect();
        let granted = grant_slots(&queue, limits, line.in_use, line.held.as_ref());
        let chosen: Vec<_> =
            line.waiting.into_iter().filter(|(waiting, _)| granted.contains(waiting)).collect();
        rows::grant(db, &chosen, limits).await.unwrap();
        let mut jobs: Vec<u64> = chosen.iter().map(|(waiting, _)| waiting.job).collect();
        jobs.sort_unstable();
        jobs
    };
    // The jobs of `lab` are 10 and 11; one slot stays free for a project that comes later.
    assert_eq!(grant().await, [1, 2, 10]);
    assert_eq!(grant().await, Vec::<u64>::new());
    server.admin("/api/projects/create", json!({"project_name": "later"})).await;
    server.admin("/api/project/later/jobs/launch", json!({"text": "run: echo\n"})).await;
    assert_eq!(grant().await, [12]);
    server.stop().await;
}

/// No pass has processed any of them, and they are queued by their numbers: whichever is processed first, the lowest
/// number is granted first.
async fn launched_copies_are_queued_by_number(ground: &ServerFixture) {
    let server = start_without_pipelines(ground).await;
    post_jobs(&server, "launch", json!({"text": "run: echo\n", "num_jobs": 4})).await;
    let more = [
        json!({"text": "run: echo a\n---\nrun: echo b\n", "name": "two"}),
        json!({"text": "setup: echo\n", "name": "empty"}),
        json!({"text": "name: g\nexecution: parallel\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n"}),
    ];
    for one in more {
        post_jobs(&server, "launch", one).await;
    }
    let limits = SlotLimits { max_launching: 9, max_alive: 9 };
    let line = rows::slot_queue(server.app.db(), limits).await.unwrap();
    let order: Vec<(u64, u32)> =
        line.waiting.iter().map(|(waiting, _)| (waiting.job, waiting.task)).collect();
    // Of a job with sequential tasks only the first, and nothing of a job that has nothing to run.
    assert_eq!(order, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (7, 0), (7, 1)]);
    server.stop().await;
}

async fn wait_for_status(server: &TestServer, number: i64, status: &str) -> Value {
    eventually_ok_async(status, async || {
        let seen = post_jobs(server, "get", json!({"job_id": number})).await;
        if seen["status"] == status && seen["schedule_state"] == "DONE" { Ok(seen) } else { Err(seen) }
    })
    .await
}

async fn a_task_that_no_fleet_can_take_fails_its_prechecks_and_ends_its_job(ground: &ServerFixture) {
    let given = SettingsSource { port: Some(0), ..ground.given() };
    let server = TestServer::start_with_settings(Settings::new(given, None).unwrap()).await;
    let text = "name: lonely\nrun: echo a\n---\nname: second\nrun: echo b\n";
    post_jobs(&server, "launch", json!({"text": text, "name": "lonely"})).await;
    let seen = wait_for_status(&server, 1, "FAILED_PRECHECKS").await;
    let statuses: Vec<&str> =
        seen["tasks"].as_array().unwrap().iter().map(|task| task["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["FAILED_PRECHECKS", "CANCELLED"], "{seen:#}");
    let reason = seen["tasks"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("no fleet can run it: "), "{seen:#}");
    assert_eq!(seen["reason"], format!("task lonely: {reason}"), "the job says what its first task says");
    assert!(seen["tasks"][0]["why"]["refusals"][0]["place"].is_string(), "{seen:#}");
    assert!(seen["end_at"].is_string() && seen["submitted_at"].is_string(), "{seen:#}");
    // Each of its steps was recorded with its reason.
    let request = json!({"target_managed_jobs": [seen["id"]], "ascending": true, "limit": 100});
    let events = server.admin("/api/events/list", request).await.to_string();
    let slots = ["Schedule state INACTIVE -> WAITING", "Schedule state WAITING -> LAUNCHING", "-> DONE"];
    for message in slots.into_iter().chain([
        "a launch slot was granted",
        "no fleet can run it",
        "Task lonely",
        "ended with status FAILED_PRECHECKS",
    ]) {
        assert!(events.contains(message), "{message}: {events}");
    }
    server.stop().await;
}

async fn fields_without_effect_are_reported_before_launch(ground: &ServerFixture) {
    let server = start_without_pipelines(ground).await;
    let text = "resources: {infra: aws/us-east-1, labels: {team/x: y}}\nrun: echo\n";
    let checked = post_jobs(&server, "check", json!({"text": text})).await;
    let warnings = checked["warnings"].to_string();
    assert_eq!(checked["jobs"], json!([]), "{checked}");
    assert!(
        warnings.contains("`infra: aws/us-east-1` has no effect: the server has no cloud backend"),
        "{warnings}"
    );
    assert!(warnings.contains("label `team/x: y` is ignored"), "{warnings}");
    let wrong = json!({"text": "rnu: x\n"});
    assert!(
        server.refused(ADMIN_TOKEN, "/api/project/main/jobs/check", wrong, "error").await.contains("rnu")
    );
    assert_eq!(post_jobs(&server, "list", json!({})).await, json!([]), "nothing was launched");
    server.stop().await;
}

async fn m8_a_run_that_ends_before_its_node_is_a_controller_failure(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    post_jobs(&env.server, "launch", json!({"text": "name: odd\nrun: sleep 600\n"})).await;
    // A pass in progress overwrites this with what it had read, so it is repeated until it takes effect.
    let seen = eventually_ok_async("FAILED_CONTROLLER", async || {
        let over = "UPDATE runs SET status = 'failed', finished = TRUE WHERE managed_job_id IS NOT NULL";
        env.write(over, vec![]).await;
        env.write("UPDATE managed_jobs SET due_at = NULL WHERE NOT finished", vec![]).await;
        env.server.app.wake(&[Hint::ManagedJobs]);
        let seen = post_jobs(&env.server, "get", json!({"job_id": 1})).await;
        if seen["status"] == "FAILED_CONTROLLER" { Ok(seen) } else { Err(seen) }
    })
    .await;
    let reason = seen["reason"].as_str().unwrap();
    assert!(reason.contains("an invalid state: the run has ended, but its node 0 is "), "{seen:#}");
    env.end().await;
}

async fn secrets_of_a_managed_job_are_sealed_and_never_shown(ground: &ServerFixture) {
    let server = start_without_pipelines(ground).await;
    let text = "secrets: {TOKEN: null, OTHER: in-the-file-canary}\nrun: echo\n";
    post_jobs(&server, "launch", json!({"text": text, "secrets": {"TOKEN": "canary-4711"}})).await;
    let db = server.app.db();
    let rows = db.query("SELECT plan, files, secrets_sealed FROM managed_jobs", vec![]).await.unwrap();
    assert!(rows[0].opt_bytes(2).unwrap().is_some());
    let stored = format!("{:?}", rows[0]);
    assert!(!stored.contains("canary"), "{stored}");
    let shown = post_jobs(&server, "get", json!({"job_id": 1})).await.to_string();
    assert!(!shown.contains("canary"), "{shown}");
    server.stop().await;
}

async fn a_failed_managed_job_is_resumed_under_its_number(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let ends = |code: i32| {
        let state = if code == 0 { "done" } else { "failed" };
        let reason = if code == 0 { "" } else { "container_exited_with_error" };
        env.update_script(|script| script.job_ends = Some(end_state(state, reason, Some(code))));
    };
    let text = "name: first\nrun: prepare\n---\nname: second\nsecrets: {TOKEN: null}\nrun: train\n";
    let launch = json!({"text": text, "name": "pair", "secrets": {"TOKEN": "v"}});
    post_jobs(&env.server, "launch", launch).await;
    let until = async |what: &str, is_so: &dyn Fn(&Value) -> bool| {
        eventually_ok_async(what, async || {
            env.mark_due().await;
            let seen = post_jobs(&env.server, "get", json!({"job_id": 1})).await;
            if is_so(&seen) { Ok(seen) } else { Err(seen) }
        })
        .await
    };
    until("the first task is running", &|job| job["tasks"][0]["status"] == "RUNNING").await;
    env.hosts.finish_all();
    // The first task has ended successfully already; what starts from now on fails.
    ends(3);
    let resume = "/api/project/main/jobs/resume";
    let body = |secrets: Value| json!({"job_id": 1, "secrets": secrets});
    let failed =
        until("the job has failed", &|job| job["status"] == "FAILED" && job["schedule_state"] == "DONE")
            .await;
    assert_eq!(failed["tasks"][0]["status"], "SUCCEEDED", "{failed:#}");
    let message = env.server.refused(ADMIN_TOKEN, resume, body(json!({})), "error").await;
    assert!(message.contains("secret `TOKEN` has no value"), "{message}");
    let unknown = body(json!({"TOKEN": "w", "OTHER": "x"})).to_string();
    assert_eq!(env.server.post(ADMIN_TOKEN, resume, &unknown).await.0, 422);

    ends(0);
    let resumed = env.server.admin(resume, body(json!({"TOKEN": "w"}))).await;
    assert_eq!((&resumed["job_id"], &resumed["status"]), (&json!(1), &json!("PENDING")), "{resumed:#}");
    assert_eq!(resumed["tasks"][0]["status"], "SUCCEEDED");
    assert_eq!(resumed["tasks"][1]["reason"], "submitted; the server has not processed it yet");
    let done = until("the job has succeeded", &|job| {
        job["status"] == "SUCCEEDED" && job["schedule_state"] == "DONE"
    })
    .await;
    let attempts = |task: usize| done["tasks"][task]["runs"].as_array().unwrap().len();
    assert_eq!((attempts(0), attempts(1)), (1, 2), "what succeeded is not repeated: {done:#}");
    let message = env.server.refused(ADMIN_TOKEN, resume, body(json!({"TOKEN": "w"})), "error").await;
    assert!(message.contains("managed job 1 succeeded"), "{message}");
    let events = json!({"target_managed_jobs": [done["id"]]});
    let events = env.server.admin("/api/events/list", events).await.to_string();
    assert!(events.contains("Managed job resumed"), "{events}");
    env.end().await;
}
