//! Plain processes and container engines: reports of hosts, and the jobs that they receive.

use serde_json::{Value, json};
use windlass_api::agent::shim::{ConfinementMethod, ProcessIsolation, ProcessMode, ProcessesInfo};
use windlass_server::{config::SettingsSource, params};
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    http::{ServerFixture, on_both},
    job_test_env::JobTestEnv,
    scripted_hosts::end_state,
};

on_both! {
    a_task_runs_as_the_server_user_only_locally_and_with_a_single_user
    a_host_that_cannot_confine_refuses_plain_processes_with_the_reason
    a_job_that_can_no_longer_be_confined_is_not_started
    engine_loss_and_return_record_one_event_each_and_jobs_with_an_image_wait
}

const OWN_PROCESSES: ProcessesInfo =
    ProcessesInfo { mode: ProcessMode::Own, confined_by: Some(ConfinementMethod::Users), problem: None };

async fn start_with_own_processes(ground: &ServerFixture) -> JobTestEnv {
    let given = SettingsSource { local_processes: Some("own".into()), ..ground.given() };
    JobTestEnv::with_settings(given, 1, 4).await
}

/// Changes the host, and makes it due until its stored report satisfies `holds`.
async fn wait_for_stored(env: &JobTestEnv, set: &str, holds: impl Fn(&Value) -> bool) {
    env.write_between_passes("instances", set, "NOT finished").await;
    eventually_ok_async("the host's word is stored", async || {
        env.write("UPDATE instances SET due_at = NULL", params![]).await;
        let fleet = env.server.admin("/api/project/main/fleets/get", json!({"name": "hosts"})).await;
        let kind = fleet["instances"][0]["instance_type"].clone();
        if holds(&kind) { Ok(()) } else { Err(fleet) }
    })
    .await;
}

async fn submitted_isolation(env: &JobTestEnv, name: &str) -> (ProcessIsolation, Value) {
    env.apply(name, json!({"image": "none", "user": null})).await;
    let job = env.wait_for_job(name, "running").await;
    let task = env.hosts.specs.lock().last().unwrap().clone();
    assert_eq!((task.image_name.as_str(), task.name.as_str()), ("none", format!("{name}-0-0").as_str()));
    (task.process_isolation, job["job_runtime_data"]["runs_in"].clone())
}

async fn a_task_runs_as_the_server_user_only_locally_and_with_a_single_user(ground: &ServerFixture) {
    let env = start_with_own_processes(ground).await;
    env.update_script(|script| script.processes = Some(OWN_PROCESSES));
    let here = "backend = 'local', due_at = NULL";
    wait_for_stored(&env, here, |kind| kind["processes"]["mode"] == "own").await;
    let server = "a plain process, not confined: it has all rights of the server (`--local-processes own`)";
    assert_eq!(submitted_isolation(&env, "alone").await, (ProcessIsolation::Own, json!(server)));

    env.server.admin("/api/users/create", json!({"username": "alice", "global_role": "user"})).await;
    let confined = (ProcessIsolation::Confined, json!("a plain process, confined (own user)"));
    assert_eq!(submitted_isolation(&env, "together").await, confined);
    let request = json!({"run_spec": JobTestEnv::spec("plan", json!({"image": "none", "user": null}))});
    let plan = env.server.admin("/api/project/main/runs/get_plan", request).await;
    assert_eq!(plan["job_plans"][0]["runs_in"], json!([confined.1]), "{plan}");

    let disabled = json!({"username": "alice", "global_role": "user", "active": false});
    env.server.admin("/api/users/update", disabled).await;
    assert_eq!(submitted_isolation(&env, "again").await.0, ProcessIsolation::Own);

    // An SSH host receives only confined tasks, whatever it would accept.
    env.write_between_passes("instances", "backend = 'remote', due_at = NULL", "NOT finished").await;
    assert_eq!(submitted_isolation(&env, "there").await, confined);
    env.end().await;
}

async fn a_host_that_cannot_confine_refuses_plain_processes_with_the_reason(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    let problem = Some("the kernel allows no user namespaces".to_owned());
    let cannot = ProcessesInfo { mode: ProcessMode::Confined, confined_by: None, problem };
    let refused = ProcessesInfo { mode: ProcessMode::Refused, ..cannot.clone() };
    for (name, reported, why) in [
        ("cannot", cannot, "cannot be confined there: the kernel allows no user namespaces"),
        ("refused", refused, "is a plain process, but the instance refuses plain processes"),
    ] {
        let mode = json!(reported.mode);
        env.update_script(|script| script.processes = Some(reported.clone()));
        wait_for_stored(&env, "due_at = NULL", |kind| kind["processes"]["mode"] == mode).await;
        env.apply(name, json!({"image": "none", "user": null})).await;
        let run = env.wait_for_run(name, "failed").await;
        assert!(run.to_string().contains(why), "{run}");
    }
    assert!(env.hosts.specs.lock().is_empty());
    // A job with an image is not affected.
    env.apply("imaged", json!({})).await;
    env.wait_for_job("imaged", "running").await;
    env.end().await;
}

async fn a_job_that_can_no_longer_be_confined_is_not_started(ground: &ServerFixture) {
    let env = start_with_own_processes(ground).await;
    let problem = Some("the kernel allows no user namespaces".to_owned());
    env.update_script(|script| {
        script.processes = Some(ProcessesInfo { mode: ProcessMode::Own, confined_by: None, problem });
        script.deaf = true;
    });
    let here = "backend = 'local', due_at = NULL";
    wait_for_stored(&env, here, |kind| kind["processes"]["mode"] == "own").await;
    // The job is placed while there is one user, and its host receives the task when there are two.
    env.apply("late", json!({"image": "none", "user": null})).await;
    env.wait_for_job("late", "provisioning").await;
    env.server.admin("/api/users/create", json!({"username": "alice", "global_role": "user"})).await;
    env.update_script(|script| script.deaf = false);
    env.mark_due().await;
    let run = env.wait_for_run("late", "failed").await;
    let why = "cannot start the job: it is a plain process, and cannot be confined there: the kernel allows no user namespaces";
    assert!(run.to_string().contains(why), "{run}");
    assert!(env.hosts.specs.lock().is_empty());
    env.end().await;
}

async fn engine_loss_and_return_record_one_event_each_and_jobs_with_an_image_wait(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let notes = async || {
        let events = env.server.admin("/api/events/list", json!({"limit": 100})).await;
        let text = events.to_string();
        let count = |words: &str| text.matches(words).count();
        (count("its container engine is not available"), count("its container engine is available again"))
    };
    let any = "instance_type = replace(instance_type, '{\"name\":\"big\"', '{\"runtime\":\"any\",\"name\":\"big\"')";
    wait_for_stored(&env, any, |kind| kind["runtime"] == "any").await;
    env.update_script(|script| {
        script.engine = Some("connection refused");
        script.job_ends = Some(end_state("done", "", Some(0)));
    });
    let check = "due_at = NULL";
    wait_for_stored(&env, check, |kind| kind["engine_away"] == "connection refused").await;
    env.apply("waits", json!({})).await;
    let why = "needs image busybox, but the container engine there is not available: connection refused";
    env.until("waits", "it says what it waits for", |run| run.to_string().contains(why)).await;
    assert_eq!(env.run("waits").await["status"], "submitted");
    for _ in 0..3 {
        wait_for_stored(&env, check, |kind| kind["engine_away"].is_string()).await;
    }
    assert_eq!(notes().await, (1, 0));
    env.update_script(|script| script.engine = None);
    wait_for_stored(&env, check, |kind| kind["engine_away"].is_null()).await;
    env.wait_for_run("waits", "done").await;
    assert_eq!(notes().await, (1, 1));
    env.end().await;
}
