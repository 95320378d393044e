//! Jobs that wait for an instance: of those that placement cannot tell apart only the first is evaluated.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use windlass_server::{
    db::{DbCounts, Row, Unit, Val, pipeline_rows::wait_classes},
    hints::Hint,
};
use windlass_testkit::wait::{TIMEOUT, eventually_async};

use crate::{
    http::{ServerFixture, on_both},
    job_test_env::JobTestEnv,
    quotas::{finish, wait_for_message},
    scripted_hosts::end_state,
};

on_both! {
    waiting_jobs_behind_the_first_are_neither_claimed_nor_written_while_others_start
    jobs_start_in_the_order_of_their_submission
    the_next_job_takes_over_when_the_first_is_stopped
    stopped_jobs_in_the_middle_of_the_queue_do_not_stop_it
    a_job_that_fits_starts_although_an_earlier_one_of_another_class_waits
    several_free_instances_are_filled_at_once
    a_job_behind_another_shows_its_reason_and_its_position
    a_higher_priority_moves_a_job_to_the_front
    jobs_behind_a_job_whose_server_was_killed_start
    a_class_without_an_evaluated_job_is_woken
    jobs_behind_one_that_can_never_start_fail_with_it
    the_cost_of_a_run_does_not_grow_with_the_queue
    a_job_that_arrives_leaves_the_blocks_that_are_reserved_for_one_that_waits
}

async fn a_job_that_arrives_leaves_the_blocks_that_are_reserved_for_one_that_waits(ground: &ServerFixture) {
    let stage = JobTestEnv::new(ground, 1, 4).await;
    let gpus = |count: u32| json!({"resources": {"cpu": "1..", "memory": "0..", "gpu": format!("{count}.."), "disk": null}});
    for name in ["one", "two", "three"] {
        stage.apply(name, gpus(1)).await;
        stage.wait_for_job(name, "running").await;
    }
    stage.apply("big", gpus(4)).await;
    wait_for_message(&stage, "big", "needs 4 of 4 blocks, 1 free").await;
    stage.age("submitted_at", 400).await;
    // Each of them comes alone, and one block is free.
    for name in ["late", "later"] {
        stage.apply(name, gpus(1)).await;
        wait_for_message(&stage, name, "is reserved for an older job").await;
    }
    finish(&stage).await;
    stage.wait_for_job("big", "running").await;
    let late = stage.run("late").await;
    assert_eq!(late["latest_job_submission"]["status"], "submitted", "{late:#}");
    finish(&stage).await;
    stage.wait_for_job("late", "running").await;
    stage.end().await;
}

/// A server with one instance, on which a job runs, and other jobs that wait for it.
async fn queue_of(ground: &ServerFixture, waiting: &[&str]) -> JobTestEnv {
    let stage = JobTestEnv::new(ground, 1, 1).await;
    stage.apply("first", json!({})).await;
    stage.wait_for_job("first", "running").await;
    for name in waiting {
        stage.apply(name, json!({})).await;
    }
    wait_for_parked(&stage, waiting.len() - 1).await;
    stage
}

async fn rows(stage: &JobTestEnv, sql: &str, params: Vec<Val>) -> Vec<Row> {
    stage.server.app.db().query(sql.to_owned(), params).await.unwrap()
}

async fn wait_for_parked(stage: &JobTestEnv, number: usize) {
    let sql = "SELECT COUNT(*) FROM jobs WHERE parked AND lock_token IS NULL";
    eventually_async(&format!("{number} jobs are parked"), async || {
        let parked = rows(stage, sql, vec![]).await[0].int(0).unwrap();
        (parked == i64::try_from(number).unwrap()).then_some(())
    })
    .await;
}

/// Names of the runs whose jobs are evaluated for others or for themselves, in order.
async fn evaluated(stage: &JobTestEnv) -> Vec<String> {
    let sql = "SELECT r.name FROM jobs j JOIN runs r ON r.id = j.run_id WHERE j.wait_class IS NOT NULL AND NOT j.parked \
               ORDER BY j.submitted_at";
    rows(stage, sql, vec![]).await.iter().map(|row| row.text(0).unwrap()).collect()
}

/// Claims and writes of all parked jobs except those of some runs: their lock epochs, and when they were last written.
async fn parked_state(stage: &JobTestEnv, without: &[String]) -> Vec<(String, i64, i64)> {
    let sql = "SELECT r.name, j.lock_epoch, j.last_processed_at FROM jobs j JOIN runs r ON r.id = j.run_id WHERE j.parked \
               ORDER BY r.name";
    let all = rows(stage, sql, vec![]).await;
    let each = all.iter().map(|row| (row.text(0).unwrap(), row.int(1).unwrap(), row.int(2).unwrap()));
    each.filter(|(name, ..)| !without.contains(name)).collect()
}

/// Ends the jobs that run, and waits until this one runs.
async fn finish_until(stage: &JobTestEnv, next: &str) {
    stage.hosts.finish_all();
    stage.write("UPDATE jobs SET due_at = NULL WHERE status = 'running'", vec![]).await;
    stage.wait_for_job(next, "running").await;
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("wait-{n:03}")).collect()
}

async fn waiting_jobs_behind_the_first_are_neither_claimed_nor_written_while_others_start(
    ground: &ServerFixture,
) {
    let names = names(30);
    let stage = queue_of(ground, &names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    // Those that start, and the one that is evaluated after them.
    let touched = &names[..6];
    let before = parked_state(&stage, touched).await;
    assert_eq!(before.len(), 24);
    for name in &names[..5] {
        finish_until(&stage, name).await;
    }
    wait_for_parked(&stage, 24).await;
    assert_eq!(parked_state(&stage, touched).await, before);
    assert_eq!(evaluated(&stage).await, [names[5].as_str()]);
    stage.end().await;
}

async fn jobs_start_in_the_order_of_their_submission(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-d", "run-c", "run-b", "run-a"]).await;
    for name in ["run-d", "run-c", "run-b", "run-a"] {
        assert_eq!(evaluated(&stage).await, [name]);
        finish_until(&stage, name).await;
        let left = 4 - ["run-d", "run-c", "run-b", "run-a"].iter().position(|other| *other == name).unwrap();
        wait_for_parked(&stage, left.saturating_sub(2)).await;
        eventually_async("the next job is evaluated", async || {
            (evaluated(&stage).await.len() == usize::from(left > 1)).then_some(())
        })
        .await;
    }
    stage.end().await;
}

async fn the_next_job_takes_over_when_the_first_is_stopped(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-a", "run-b", "run-c"]).await;
    stage.stop_run("run-a", false).await;
    stage.wait_for_run("run-a", "terminated").await;
    assert_eq!(evaluated(&stage).await, ["run-b"]);
    finish_until(&stage, "run-b").await;
    assert_eq!(stage.run("run-c").await["status"], "submitted");
    stage.end().await;
}

async fn stopped_jobs_in_the_middle_of_the_queue_do_not_stop_it(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-a", "run-b", "run-c", "run-d"]).await;
    for name in ["run-b", "run-c"] {
        stage.stop_run(name, false).await;
        stage.wait_for_run(name, "terminated").await;
    }
    assert_eq!(evaluated(&stage).await, ["run-a"]);
    finish_until(&stage, "run-a").await;
    finish_until(&stage, "run-d").await;
    stage.end().await;
}

async fn a_job_that_fits_starts_although_an_earlier_one_of_another_class_waits(ground: &ServerFixture) {
    let stage = JobTestEnv::new(ground, 2, 1).await;
    stage.apply("on-0", json!({"instances": ["hosts-0"]})).await;
    stage.wait_for_job("on-0", "running").await;
    stage.apply("on-1", json!({"instances": ["hosts-1"]})).await;
    stage.wait_for_job("on-1", "running").await;
    for name in ["only-0-a", "only-0-b"] {
        stage.apply(name, json!({"instances": ["hosts-0"]})).await;
    }
    for name in ["any-a", "any-b"] {
        stage.apply(name, json!({})).await;
    }
    wait_for_parked(&stage, 2).await;
    assert_eq!(evaluated(&stage).await, ["only-0-a", "any-a"]);
    stage.stop_run("on-1", false).await;
    stage.wait_for_job("any-a", "running").await;
    assert_eq!(evaluated(&stage).await.first().map(String::as_str), Some("only-0-a"));
    stage.stop_run("any-a", false).await;
    stage.wait_for_job("any-b", "running").await;
    stage.stop_run("on-0", false).await;
    stage.wait_for_job("only-0-a", "running").await;
    stage.end().await;
}

async fn several_free_instances_are_filled_at_once(ground: &ServerFixture) {
    let stage = JobTestEnv::new(ground, 1, 4).await;
    let share = json!({"resources": {"cpu": {"count": {"min": 8}}, "memory": {"min": 1.0}, "disk": null}});
    for name in ["run-a", "run-b", "run-c", "run-d"] {
        stage.apply(name, share.clone()).await;
        stage.wait_for_job(name, "running").await;
    }
    for name in ["run-e", "run-f", "run-g", "run-h", "run-i"] {
        stage.apply(name, share.clone()).await;
    }
    wait_for_parked(&stage, 4).await;
    stage.hosts.finish_all();
    stage.write("UPDATE jobs SET due_at = NULL WHERE status = 'running'", vec![]).await;
    for name in ["run-e", "run-f", "run-g", "run-h"] {
        stage.wait_for_job(name, "running").await;
    }
    wait_for_parked(&stage, 0).await;
    assert_eq!(evaluated(&stage).await, ["run-i"]);
    stage.end().await;
}

async fn a_job_behind_another_shows_its_reason_and_its_position(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-a", "run-b", "run-c"]).await;
    let of = async |name: &str| -> Value { stage.run(name).await["latest_job_submission"].clone() };
    let (first, last) = (of("run-a").await, of("run-c").await);
    assert!(first["why"]["refusals"].as_array().is_some_and(|all| !all.is_empty()), "{first}");
    assert_ne!(first["status_message"], "submitted", "{first}");
    assert_eq!(last["status_message"], first["status_message"]);
    assert_eq!(last["why"], first["why"]);
    assert_eq!((&first["queue_position"], &last["queue_position"]), (&json!(0), &json!(2)));
    assert_eq!(stage.run("run-c").await["reason"], stage.run("run-a").await["reason"]);
    stage.end().await;
}

async fn a_higher_priority_moves_a_job_to_the_front(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-a", "run-b", "run-c"]).await;
    stage.apply("run-c", json!({"priority": 80})).await;
    eventually_async("both classes are evaluated", async || {
        (evaluated(&stage).await == ["run-a", "run-c"]).then_some(())
    })
    .await;
    // The first one leaves its class for one that has a job already, and the next one of its former class takes over.
    stage.apply("run-a", json!({"priority": 80})).await;
    eventually_async("the first job leaves its class", async || {
        (evaluated(&stage).await == ["run-a", "run-b"]).then_some(())
    })
    .await;
    for name in ["run-a", "run-c", "run-b"] {
        finish_until(&stage, name).await;
    }
    stage.end().await;
}

async fn jobs_behind_a_job_whose_server_was_killed_start(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-a", "run-b", "run-c"]).await;
    // As a server leaves it that was killed while it placed the job.
    let sql = "UPDATE jobs SET lock_token = new_uuid(), lock_owner = 'jobs_submitted', lock_epoch = lock_epoch + 1, \
               lock_expires_at = now_us() + 2000000 WHERE wait_class IS NOT NULL AND NOT parked AND lock_token IS NULL";
    eventually_async("the first job is locked", async || {
        stage.write(sql, vec![]).await;
        let held = "SELECT COUNT(*) FROM jobs WHERE wait_class IS NOT NULL AND lock_expires_at > now_us()";
        (rows(&stage, held, vec![]).await[0].int(0).unwrap() == 1).then_some(())
    })
    .await;
    for name in ["run-a", "run-b", "run-c"] {
        finish_until(&stage, name).await;
    }
    stage.end().await;
}

async fn a_class_without_an_evaluated_job_is_woken(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-a", "run-b", "run-c"]).await;
    let db = stage.server.app.db();
    assert!(!wait_classes::wake_headless(db).await.unwrap(), "there is one");
    // A lost wake-up.
    let sql = "UPDATE jobs SET parked = TRUE, due_at = now_us() + 3600000000 \
               WHERE wait_class IS NOT NULL AND NOT parked AND lock_token IS NULL";
    eventually_async("all jobs are parked", async || {
        stage.write(sql, vec![]).await;
        evaluated(&stage).await.is_empty().then_some(())
    })
    .await;
    assert!(wait_classes::wake_headless(db).await.unwrap());
    assert_eq!(evaluated(&stage).await, ["run-a"]);
    stage.wake_pipelines();
    for name in ["run-a", "run-b", "run-c"] {
        finish_until(&stage, name).await;
    }
    stage.end().await;
}

async fn jobs_behind_one_that_can_never_start_fail_with_it(ground: &ServerFixture) {
    let stage = queue_of(ground, &["run-a", "run-b", "run-c"]).await;
    stage.write("UPDATE fleets SET deleted = TRUE", vec![]).await;
    for name in ["run-a", "run-b", "run-c"] {
        let run = stage.wait_for_run(name, "failed").await;
        let reason = &run["latest_job_submission"]["termination_reason"];
        assert_eq!(reason, "failed_to_start_due_to_no_capacity", "{name}");
    }
    stage.end().await;
}

/// Statements and claims per finished run, while this many other jobs wait.
async fn cost_per_run(ground: &ServerFixture, waiting: usize) -> DbCounts {
    const RUNS: usize = 12;
    let stage = JobTestEnv::new(ground, 1, 1).await;
    stage.apply("first", json!({})).await;
    stage.wait_for_job("first", "running").await;
    let names = names(waiting + RUNS);
    for name in &names {
        stage.apply(name, json!({})).await;
    }
    wait_for_parked(&stage, names.len() - 1).await;
    // The passes over runs that still wait are not part of the cost of those that end.
    let quiet =
        "UPDATE runs SET due_at = now_us() + 300000000 WHERE status = 'submitted' AND due_at IS NOT NULL";
    stage.write(quiet, vec![]).await;
    stage.update_script(|script| script.job_ends = Some(end_state("done", "", Some(0))));
    stage.hosts.finish_all();
    let db = stage.server.app.db();
    let before = db.counts();
    let began = Instant::now();
    let mut reported = 0;
    // Followed at the hosts, because reading the runs would be counted too.
    while removed(&stage) < RUNS {
        assert!(began.elapsed() < TIMEOUT, "only {} runs ended", removed(&stage));
        let started = stage.hosts.starts.lock().len();
        if started > reported && report_ends(&stage).await {
            reported = started;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let after = db.counts();
    let each = |count: fn(&DbCounts) -> u64| (count(&after) - count(&before)) / RUNS as u64;
    let cost = DbCounts {
        statements: each(|counts| counts.statements),
        rows: each(|counts| counts.rows),
        commits: each(|counts| counts.commits),
        polls: each(|counts| counts.polls),
        claimed: each(|counts| counts.claimed),
        notifications: each(|counts| counts.notifications),
        busy: (after.busy - before.busy) / RUNS as u32,
    };
    stage.end().await;
    cost
}

/// Makes the running job due once, as its host does when it ends. Returns whether there is one.
async fn report_ends(stage: &JobTestEnv) -> bool {
    let sql = "UPDATE jobs SET due_at = NULL WHERE status = 'running' RETURNING id";
    let unit = Unit::new().query(sql, vec![]);
    let (_, rows) = stage.server.app.db().write(unit).await.unwrap().done().unwrap();
    stage.server.app.wake(&[Hint::JobsRunning]);
    rows.iter().any(|found| !found.is_empty())
}

/// Number of jobs whose task was removed from its host, which is the last step.
fn removed(stage: &JobTestEnv) -> usize {
    stage.hosts.calls.lock().iter().filter(|call| *call == "remove").count()
}

async fn the_cost_of_a_run_does_not_grow_with_the_queue(ground: &ServerFixture) {
    let short = cost_per_run(ground, 5).await;
    let second = match ground.is_postgres() {
        true => ServerFixture::postgres().await,
        false => ServerFixture::sqlite(),
    };
    let long = cost_per_run(&second, 80).await;
    assert!(long.claimed <= short.claimed + 3, "claims per run: {short:?}, with a long queue {long:?}");
    let most = if ground.is_postgres() { STATEMENTS_MAX_POSTGRES } else { STATEMENTS_MAX_SQLITE };
    for cost in [short, long] {
        assert!(cost.statements <= most, "statements per run: {short:?}, with a long queue {long:?}");
    }
}

/// Statements of one run from a waiting job to a finished run: 10 % more than measured.
const STATEMENTS_MAX_SQLITE: u64 = 65;
const STATEMENTS_MAX_POSTGRES: u64 = 88;
