//! Every ending of a job, through the pipelines.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use windlass_api::agent::shim::TaskStatus;
use windlass_model::time::Timestamp;
use windlass_server::{logs::copier::TRUNCATION_NOTICE, params};

use crate::{
    http::{ServerFixture, on_both},
    job_test_env::JobTestEnv,
    scripted_hosts::end_state,
};

on_both! {
    a_successful_job_is_done_and_its_log_is_kept
    a_failed_job_reports_its_exit_status
    a_job_over_its_disk_limit_reports_it_in_status_message_and_events
    a_job_ends_with_the_reason_of_its_runner
    a_task_that_ends_before_its_runner_starts_ends_the_job_with_its_reason
    a_task_refused_by_the_host_ends_the_job_at_once_with_its_message
    a_secret_deleted_before_the_start_ends_the_job
    a_secret_withdrawn_from_the_creator_ends_the_job
    a_stop_calls_the_runner_and_an_abort_does_not
    a_stop_reaches_the_commands_on_a_host_that_was_cut_off_when_it_was_requested
    an_abort_overrides_a_pending_stop
    a_stopping_job_reports_when_it_is_killed_at_the_latest
    a_silent_host_ends_its_job_as_unreachable
    a_reclaimed_spot_instance_interrupts_its_job
    an_instance_that_was_never_created_ends_the_job_with_no_capacity
    an_instance_moved_to_another_project_ends_the_job_as_access_revoked
    an_instance_that_is_not_ready_in_time_ends_the_job
    an_endless_image_pull_ends_the_job
    an_image_pull_ends_its_job_after_the_time_of_the_setting
    a_log_over_the_size_limit_is_truncated_with_the_setting_name
    an_inactive_dev_environment_is_terminated
    inactivity_is_not_reported_without_an_inactivity_limit
    the_server_enforces_max_duration_if_the_runner_does_not
    a_job_with_an_idle_gpu_is_terminated_after_the_whole_window
    scaling_down_a_service_ends_its_last_replica
    a_job_with_a_missing_volume_ends_with_a_volume_error
    a_service_whose_gateway_was_deleted_ends_with_a_gateway_error
}

fn end_fields(run: &Value) -> (&str, &str, &str) {
    let job = &run["latest_job_submission"];
    (
        run["status"].as_str().unwrap(),
        job["status"].as_str().unwrap(),
        job["termination_reason"].as_str().unwrap_or_default(),
    )
}

async fn a_successful_job_is_done_and_its_log_is_kept(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.update_script(|script| {
        script.job_ends = Some(end_state("done", "", Some(0)));
        script.log = b"hello\n".to_vec();
    });
    env.apply("good", json!({})).await;
    env.wait_for_job("good", "running").await;
    env.mark_due().await;
    let run = env.wait_for_run("good", "done").await;
    assert_eq!(end_fields(&run), ("done", "done", "done_by_runner"));
    assert_eq!(run["latest_job_submission"]["exit_status"], 0);
    assert_eq!(run["latest_job_submission"]["status_message"], "exited (0)");
    let request = json!({"run_name": "good", "job_submission_id": run["latest_job_submission"]["id"]});
    let logs = env.server.admin("/api/project/main/logs/poll", request).await;
    assert_eq!(logs["logs"][0]["message"], "aGVsbG8K");
    assert_eq!(*env.hosts.calls.lock(), ["terminate done_by_runner", "remove"]);
    env.end().await;
}

async fn a_failed_job_reports_its_exit_status(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let oom = Some("oom_killed".to_owned());
    env.update_script(|script| {
        let failed = end_state("failed", "container_exited_with_error", Some(137));
        script.job_ends = Some(windlass_api::agent::runner::JobState { detail: oom, ..failed });
    });
    env.apply("bad", json!({})).await;
    env.wait_for_job("bad", "running").await;
    env.mark_due().await;
    let run = env.wait_for_run("bad", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "container_exited_with_error"));
    assert_eq!(run["latest_job_submission"]["status_message"], "exited (137)");
    env.end().await;
}

async fn a_job_over_its_disk_limit_reports_it_in_status_message_and_events(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let message = "disk limit exceeded: the job uses 3.0GB, its `disk` limit is 1.0GB";
    env.update_script(|script| {
        script.job_ends = Some(windlass_api::agent::runner::JobState {
            detail: Some("disk_limit_exceeded".to_owned()),
            termination_message: message.to_owned(),
            ..end_state("failed", "executor_error", None)
        });
    });
    env.apply("large", json!({"resources": {"disk": "..1GB"}})).await;
    env.wait_for_job("large", "running").await;
    assert_eq!(env.hosts.specs.lock()[0].disk, 1 << 30);
    env.mark_due().await;
    let run = env.wait_for_run("large", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "executor_error"));
    let job = &run["latest_job_submission"];
    assert_eq!(job["status_message"], "disk limit exceeded");
    assert_eq!(job["termination_reason_message"], message);
    let events = env.server.admin("/api/events/list", json!({"target_runs": [run["id"]]})).await;
    assert!(events.to_string().contains("disk_limit_exceeded"), "{events}");
    env.end().await;
}

async fn a_job_ends_with_the_reason_of_its_runner(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    for (name, reason, status) in [
        ("quota", "log_quota_exceeded", "failed"),
        ("long", "max_duration_exceeded", "terminated"),
        ("broken", "executor_error", "failed"),
    ] {
        env.update_script(|script| script.job_ends = Some(end_state("failed", reason, None)));
        env.apply(name, json!({})).await;
        env.wait_for_job(name, "running").await;
        env.mark_due().await;
        let run = env.wait_for_run(name, "failed").await;
        assert_eq!(end_fields(&run), ("failed", status, reason));
    }
    env.end().await;
}

async fn a_task_that_ends_before_its_runner_starts_ends_the_job_with_its_reason(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    for (name, reason, message) in [
        ("image", "creating_container_error", "no such image"),
        ("ports", "ports_binding_failed", "port 8000 is taken"),
    ] {
        env.update_script(|script| script.task_ends = Some((reason, message)));
        env.apply(name, json!({})).await;
        let run = env.wait_for_run(name, "failed").await;
        assert_eq!(end_fields(&run), ("failed", "failed", reason));
        assert_eq!(run["latest_job_submission"]["termination_reason_message"], message);
    }
    env.end().await;
}

async fn a_task_refused_by_the_host_ends_the_job_at_once_with_its_message(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.update_script(|script| script.refuses = Some("privileged: not allowed"));
    env.apply("proud", json!({"privileged": true})).await;
    let run = env.wait_for_run("proud", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "executor_error"));
    let message = &run["latest_job_submission"]["termination_reason_message"];
    assert_eq!(message, "privileged: not allowed");
    env.end().await;
}

async fn a_secret_deleted_before_the_start_ends_the_job(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let set = json!({"name": "token", "value": "s3cret"});
    env.server.admin("/api/project/main/secrets/create_or_update", set).await;
    env.update_script(|script| script.deaf = true);
    env.apply("needy", json!({"env": {"TOKEN": "${{ secrets.token }}"}})).await;
    env.wait_for_job("needy", "provisioning").await;
    env.server.admin("/api/project/main/secrets/delete", json!({"secrets_names": ["token"]})).await;
    env.update_script(|script| script.deaf = false);
    env.mark_due().await;
    let run = env.wait_for_run("needy", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "terminated", "terminated_by_server"));
    let message = run["latest_job_submission"]["termination_reason_message"].as_str().unwrap();
    assert!(message.contains("secret `token` is not set in this project"), "{message}");
    assert!(env.hosts.specs.lock().is_empty());
    env.end().await;
}

async fn a_secret_withdrawn_from_the_creator_ends_the_job(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let set = |users: &str| json!({"name": "token", "value": "s3cret", "users": users});
    env.server.admin("/api/project/main/secrets/create_or_update", set("everyone")).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "user")]).await;
    env.update_script(|script| script.deaf = true);
    let spec = JobTestEnv::spec("needy", json!({"env": {"TOKEN": "${{ secrets.token }}"}}));
    env.server.ok(&mira, "/api/project/main/runs/apply", json!({"plan": {"run_spec": spec}})).await;
    env.wait_for_job("needy", "provisioning").await;
    env.server.admin("/api/project/main/secrets/create_or_update", set("managers")).await;
    env.update_script(|script| script.deaf = false);
    env.mark_due().await;
    let run = env.wait_for_run("needy", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "terminated", "terminated_by_server"));
    let message = run["latest_job_submission"]["termination_reason_message"].as_str().unwrap();
    assert!(message.contains("runs of this user may no longer use secret `token`"), "{message}");
    assert!(env.hosts.specs.lock().is_empty());
    env.end().await;
}

async fn a_stop_calls_the_runner_and_an_abort_does_not(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("gentle", json!({})).await;
    env.wait_for_job("gentle", "running").await;
    env.stop_run("gentle", false).await;
    let run = env.wait_for_run("gentle", "terminated").await;
    assert_eq!(end_fields(&run), ("terminated", "terminated", "terminated_by_user"));
    assert_eq!(run["latest_job_submission"]["status_message"], "stopped");
    assert_eq!(*env.hosts.calls.lock(), ["stop", "terminate terminated_by_user", "remove"]);
    env.hosts.calls.lock().clear();
    env.apply("rough", json!({})).await;
    env.wait_for_job("rough", "running").await;
    env.stop_run("rough", true).await;
    let run = env.wait_for_run("rough", "terminated").await;
    assert_eq!(end_fields(&run), ("terminated", "aborted", "aborted_by_user"));
    assert_eq!(*env.hosts.calls.lock(), ["terminate aborted_by_user", "remove"]);
    env.end().await;
}

async fn a_stop_reaches_the_commands_on_a_host_that_was_cut_off_when_it_was_requested(
    ground: &ServerFixture,
) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("saves", json!({})).await;
    env.wait_for_job("saves", "running").await;
    env.update_script(|script| script.silent = true);
    env.stop_run("saves", false).await;
    let waits =
        |run: &Value| run["latest_job_submission"]["status_message"] == "waiting for the host to respond";
    env.until("saves", "waiting", waits).await;
    env.update_script(|script| script.silent = false);
    env.mark_due().await;
    let run = env.wait_for_run("saves", "terminated").await;
    // The commands ended by the signal, not at the end of the grace period.
    assert_eq!(run["latest_job_submission"]["exit_status"], 130, "{run}");
    env.end().await;
}

async fn an_abort_overrides_a_pending_stop(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("slow", json!({})).await;
    env.wait_for_job("slow", "running").await;
    // A host that does not answer delays the stop.
    env.update_script(|script| script.silent = true);
    env.stop_run("slow", false).await;
    env.wait_for_job("slow", "terminating").await;
    env.stop_run("slow", true).await;
    env.wait_for_end_request("aborted_by_user").await;
    env.update_script(|script| script.silent = false);
    env.mark_due().await;
    let run = env.wait_for_run("slow", "terminated").await;
    assert_eq!(end_fields(&run), ("terminated", "aborted", "aborted_by_user"));
    env.end().await;
}

async fn a_stopping_job_reports_when_it_is_killed_at_the_latest(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("saves", json!({"stop_duration": 90})).await;
    env.wait_for_job("saves", "running").await;
    env.update_script(|script| script.ignores_stop = true);
    env.stop_run("saves", false).await;
    let message =
        |run: &Value| run["latest_job_submission"]["status_message"].as_str().unwrap_or_default().to_owned();
    let reports = |run: &Value| message(run).contains("is killed at");
    let run = env.until("saves", "stopping", reports).await;
    // The deadline of the server includes 30 s for the last output.
    let sql = "SELECT (stop_deadline_at - terminating_at) / 1000000, (stop_deadline_at - 30000000) / 1000000 FROM jobs";
    let row = &env.server.app.db().query(sql, vec![]).await.unwrap()[0];
    let (span, killed_at) = (row.int(0).unwrap(), Timestamp::from_secs(row.int(1).unwrap()));
    assert!(span >= 120, "{span} s");
    let stopping = format!("waiting for the job to stop, which is killed at {killed_at} at the latest");
    assert_eq!(message(&run), stopping);
    let sentence = format!("ending: stopped by a user; {stopping}");
    assert_eq!(run["reason"], sentence, "{run:#}");
    let path = "/api/project/main/runs/why";
    let why = env.server.admin(path, json!({"run_name": "saves"})).await;
    assert_eq!(why["sentence"], sentence, "{why:#}");
    env.update_script(|script| script.ignores_stop = false);
    env.stop_run("saves", true).await;
    let run = env.wait_for_run("saves", "terminated").await;
    assert_eq!(run["reason"], Value::Null);
    env.end().await;
}

async fn a_silent_host_ends_its_job_as_unreachable(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("lost", json!({})).await;
    env.wait_for_job("lost", "running").await;
    env.update_script(|script| script.silent = true);
    env.mark_due().await;
    let waits =
        |run: &Value| run["latest_job_submission"]["status_message"].as_str().unwrap().starts_with("waiting");
    env.until("lost", "waiting", waits).await;
    env.age("disconnected_at", 121).await;
    env.wait_for_job("lost", "terminating").await;
    let waits =
        |run: &Value| run["latest_job_submission"]["status_message"] == "waiting for the host to respond";
    env.until("lost", "waiting", waits).await;
    env.age("stop_deadline_at", 31).await;
    env.age("terminating_at", 301).await;
    let run = env.wait_for_run("lost", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "instance_unreachable"));
    assert_eq!(run["latest_job_submission"]["error"], "instance unreachable");
    env.end().await;
}

async fn a_reclaimed_spot_instance_interrupts_its_job(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.write_between_passes("instances", "spot = TRUE", "NOT finished").await;
    env.apply("spot", json!({})).await;
    env.wait_for_job("spot", "running").await;
    env.write_between_passes("instances", "status = 'terminated', finished = TRUE", "NOT finished").await;
    env.mark_due().await;
    let run = env.wait_for_run("spot", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "interrupted_by_no_capacity"));
    assert_eq!(run["latest_job_submission"]["status_message"], "interrupted");
    env.end().await;
}

async fn an_instance_that_was_never_created_ends_the_job_with_no_capacity(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.update_script(|script| script.deaf = true);
    env.apply("early", json!({})).await;
    env.wait_for_job("early", "provisioning").await;
    let ended = "status = 'terminated', finished = TRUE, termination_reason = 'no_offers'";
    env.write_between_passes("instances", ended, "NOT finished").await;
    env.mark_due().await;
    let run = env.wait_for_run("early", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "failed_to_start_due_to_no_capacity"));
    env.end().await;
}

async fn an_instance_moved_to_another_project_ends_the_job_as_access_revoked(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.server.admin("/api/projects/create", json!({"project_name": "other", "is_public": false})).await;
    env.apply("guest", json!({})).await;
    env.wait_for_job("guest", "running").await;
    let other = "project_id = (SELECT id FROM projects WHERE name = 'other')";
    env.write_between_passes("instances", other, "NOT finished").await;
    env.mark_due().await;
    let run = env.wait_for_run("guest", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "instance_access_revoked"));
    env.end().await;
}

async fn an_instance_that_is_not_ready_in_time_ends_the_job(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.update_script(|script| script.deaf = true);
    env.apply("patient", json!({})).await;
    env.wait_for_job("patient", "provisioning").await;
    // As an instance that is being created; only its own pipeline may process it.
    let held = "status = 'provisioning', lock_token = 'held', lock_expires_at = now_us() + 600000000";
    env.write_between_passes("instances", held, "NOT finished").await;
    env.age("provisioned_at", 601).await;
    let run = env.wait_for_run("patient", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "waiting_instance_limit_exceeded"));
    env.end().await;
}

async fn an_endless_image_pull_ends_the_job(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.update_script(|script| script.stuck = Some(TaskStatus::Pulling));
    env.apply("heavy", json!({})).await;
    env.wait_for_job("heavy", "pulling").await;
    env.age("pulling_at", 26 * 60).await;
    let run = env.wait_for_run("heavy", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "waiting_runner_limit_exceeded"));
    env.end().await;
}

async fn an_image_pull_ends_its_job_after_the_time_of_the_setting(ground: &ServerFixture) {
    let mut given = ground.given();
    *given.limits.named("image_pull_timeout").unwrap() = Some("1h".to_owned());
    let env = JobTestEnv::with_settings(given, 1, 1).await;
    env.update_script(|script| script.stuck = Some(TaskStatus::Pulling));
    env.apply("heavy", json!({})).await;
    env.wait_for_job("heavy", "pulling").await;
    env.age("pulling_at", 59 * 60).await;
    let pulls = |run: &Value| run["latest_job_submission"]["status_message"] == "waiting for the image";
    env.until("heavy", "pulling", pulls).await;
    env.age("pulling_at", 60 * 60).await;
    let run = env.wait_for_run("heavy", "failed").await;
    let message = "waited 3600 s for the image (`image_pull_timeout` of the server)";
    assert_eq!(run["latest_job_submission"]["termination_reason_message"], message, "{run:#}");
    env.end().await;
}

async fn a_log_over_the_size_limit_is_truncated_with_the_setting_name(ground: &ServerFixture) {
    let mut given = ground.given();
    *given.limits.named("log_max").unwrap() = Some("1KB".to_owned());
    let env = JobTestEnv::with_settings(given, 1, 1).await;
    env.update_script(|script| {
        script.job_ends = Some(end_state("done", "", Some(0)));
        script.log = b"one more line\n".repeat(1000);
    });
    env.apply("chatty", json!({})).await;
    env.wait_for_job("chatty", "running").await;
    env.mark_due().await;
    let run = env.wait_for_run("chatty", "done").await;
    let request =
        json!({"run_name": "chatty", "job_submission_id": run["latest_job_submission"]["id"], "limit": 1000});
    let logs = env.server.admin("/api/project/main/logs/poll", request).await;
    let lines = logs["logs"].as_array().unwrap().iter().map(|line| line["message"].as_str().unwrap());
    let log: String = lines.map(|line| String::from_utf8(STANDARD.decode(line).unwrap()).unwrap()).collect();
    let notice = String::from_utf8_lossy(TRUNCATION_NOTICE).into_owned();
    assert!(notice.contains("`log_max`") && log.ends_with(&notice), "{log}");
    assert_eq!(log.len(), 1024 + notice.len());
    env.end().await;
}

async fn an_inactive_dev_environment_is_terminated(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let dev = |secs: i64| {
        json!({"run_name": "dev", "profile": {"name": "default"}, "configuration":
            {"type": "dev-environment", "name": "dev", "image": "busybox", "user": "root", "ide": "vscode",
             "inactivity_duration": secs}})
    };
    let apply = async |secs| {
        let plan = json!({"plan": {"run_spec": dev(secs)}, "force": true});
        env.server.admin("/api/project/main/runs/apply", plan).await
    };
    env.update_script(|script| script.no_connections_secs = Some(100));
    apply(3600).await;
    let run = env.wait_for_run("dev", "running").await;
    let connection = &run["jobs"][0]["job_connection_info"];
    assert_eq!(connection["attached_ide_url"], "vscode://vscode-remote/ssh-remote+dev/workflow");
    assert_eq!(connection["ide_name"], "VS Code");
    assert_eq!(env.hosts.starts.lock()[0].submit.job_spec.tty, Some(true));
    let idle = |run: &Value| run["jobs"][0]["job_submissions"][0]["inactivity_secs"].as_i64();
    env.until("dev", "idle", |run| idle(run).is_some_and(|secs| secs >= 100)).await;
    // Changed in place: the limit applies to the running environment.
    apply(60).await;
    let run = env.wait_for_run("dev", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "terminated", "inactivity_duration_exceeded"));
    env.end().await;
}

/// Inactivity ends nothing here, and clients would show it wherever it is reported.
async fn inactivity_is_not_reported_without_an_inactivity_limit(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.update_script(|script| script.no_connections_secs = Some(100));
    env.apply("busy", json!({})).await;
    env.wait_for_job("busy", "running").await;
    env.passes(2).await;
    let run = env.run("busy").await;
    assert_eq!(run["jobs"][0]["job_submissions"][0]["inactivity_secs"], Value::Null, "{run:#}");
    env.end().await;
}

async fn the_server_enforces_max_duration_if_the_runner_does_not(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("endless", json!({"max_duration": 600})).await;
    env.wait_for_job("endless", "running").await;
    env.age("running_at", 721).await;
    let run = env.wait_for_run("endless", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "terminated", "max_duration_exceeded"));
    env.end().await;
}

async fn a_job_with_an_idle_gpu_is_terminated_after_the_whole_window(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let policy = json!({"utilization_policy": {"min_gpu_utilization": 20, "time_window": 300}});
    env.apply("idle", policy).await;
    env.wait_for_run("idle", "running").await;
    // A sample every half minute over the whole window; one GPU is busy, the other idle.
    for ago in 0..12_i64 {
        let sql = "INSERT INTO job_metrics (job_id, at, host_at, cpu_us, memory_bytes, working_set_bytes, gpus) \
                   SELECT id, now_us() - $1, now_us() - $1, 0, 0, 0, '[[0,95],[0,3]]' FROM jobs";
        env.write(sql, params![ago * 30_000_000]).await;
    }
    env.mark_due().await;
    assert_eq!(env.run("idle").await["status"], "running", "it has not run for the whole window yet");
    env.age("running_at", 301).await;
    let run = env.wait_for_run("idle", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "terminated", "terminated_due_to_utilization_policy"));
    env.end().await;
}

async fn scaling_down_a_service_ends_its_last_replica(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 2, 1).await;
    let service = |count: i64| json!({"type": "service", "port": 8000, "replicas": {"min": count, "max": count}, "auth": false});
    env.apply("web", service(2)).await;
    let all_run = |run: &Value| {
        run["jobs"].as_array().unwrap().iter().all(|job| job["job_submissions"][0]["status"] == "running")
    };
    env.until("web", "all running", all_run).await;
    env.apply("web", service(1)).await;
    let run = env
        .until("web", "smaller", |run| run["jobs"][1]["job_submissions"][0]["status"] == "terminated")
        .await;
    assert_eq!(run["jobs"][1]["job_submissions"][0]["termination_reason"], "scaled_down");
    assert_eq!(run["jobs"][0]["job_submissions"][0]["status"], "running");
    assert_eq!(run["status"], "running");
    env.end().await;
}

async fn a_job_with_a_missing_volume_ends_with_a_volume_error(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.update_script(|script| script.deaf = true);
    env.apply("disk", json!({})).await;
    env.wait_for_job("disk", "provisioning").await;
    // The volume existed when the run was submitted.
    let rows = env.server.app.db().query("SELECT job_spec FROM jobs", vec![]).await.unwrap();
    let mut spec: Value = serde_json::from_str(&rows[0].text(0).unwrap()).unwrap();
    spec["volumes"] = json!([{"name": ["data"], "path": "/data"}]);
    env.write("UPDATE jobs SET job_spec = $1", params![spec.to_string()]).await;
    // A pass in progress has read the old one.
    env.passes(2).await;
    env.update_script(|script| script.deaf = false);
    env.mark_due().await;
    let run = env.wait_for_run("disk", "failed").await;
    assert_eq!(end_fields(&run), ("failed", "failed", "volume_error"));
    env.end().await;
}

async fn a_service_whose_gateway_was_deleted_ends_with_a_gateway_error(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let service = json!({"type": "service", "port": 80, "auth": false});
    env.apply("page", service).await;
    env.wait_for_job("page", "running").await;
    // Only a delete request that does not see a concurrent submission can remove the gateway of a service.
    env.write(
        "INSERT INTO gateways (id, project_id, name, configuration, status, created_at, last_processed_at) \
         SELECT new_uuid(), id, 'edge', '{}', 'running', now_us(), now_us() FROM projects WHERE name = 'main'",
        vec![],
    )
    .await;
    env.write("UPDATE runs SET gateway_id = (SELECT id FROM gateways), due_at = NULL", vec![]).await;
    env.write("UPDATE gateways SET deleted = TRUE", vec![]).await;
    env.write("UPDATE runs SET due_at = NULL", vec![]).await;
    let run = env.wait_for_run("page", "failed").await;
    assert_eq!(run["termination_reason"], "gateway_error", "{run:#}");
    assert_eq!(run["latest_job_submission"]["termination_reason"], "terminated_by_server", "{run:#}");
    env.end().await;
}
