//! Retention: expired data is deleted, and everything else is kept.

use std::time::Duration;

use serde_json::{Value, json};
use windlass_model::{
    id::{RunId, SubmissionId},
    time::Span,
};
use windlass_server::{
    db::{Db, Dialect, Unit, Val, jobs, retention},
    limits::{Limits, RetentionPeriods},
    logs::{Log, LogSource, LogStore},
    params,
    retention::{DeletedCounts, RetentionBatches, run_round},
};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    old_events_behind_many_that_are_kept_are_deleted_in_one_round
    of_an_instance_that_exists_the_newest_events_are_kept
    old_events_are_deleted_unless_their_run_is_active
    old_finished_runs_are_deleted_with_their_jobs_logs_and_metrics
    unreferenced_uploads_are_deleted_and_those_in_use_are_kept
    passwords_of_registries_are_deleted_with_the_last_run_that_refers_to_them
    nothing_is_deleted_without_retention_periods
}

const KEEP_FOREVER: RetentionPeriods =
    RetentionPeriods { events: None, runs: None, uploads: None, metrics: None };

/// A few rows per batch, so that each test has several.
const SMALL: RetentionBatches = RetentionBatches { events: 7, runs: 1, pause: Duration::ZERO };

async fn write(db: &Db, sql: &'static str, params: Vec<Val>) {
    db.write(Unit::new().exec(sql, params)).await.unwrap().done().unwrap();
}

async fn count(db: &Db, sql: &'static str) -> i64 {
    db.query_opt(sql, vec![]).await.unwrap().unwrap().int(0).unwrap()
}

/// Submits a run and returns it with its job.
async fn submit_run(server: &TestServer, name: &str, more: Value) -> (RunId, SubmissionId) {
    let mut spec =
        json!({ "run_name": name, "configuration": { "type": "task", "commands": ["true"], "image": "a" } });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let body = json!({ "plan": { "run_spec": spec }, "force": false });
    let run = server.admin("/api/project/main/runs/apply", body).await;
    let job = run["latest_job_submission"]["id"].as_str().unwrap().parse().unwrap();
    (RunId(run["id"].as_str().unwrap().parse().unwrap()), SubmissionId(job))
}

/// Ends a run `days` days ago.
async fn end_run(db: &Db, run: RunId, days: i64) {
    let ago = Span::days(days).0;
    let sql =
        "UPDATE jobs SET status = 'done', finished = TRUE, finished_at = now_us() - $2 WHERE run_id = $1";
    write(db, sql, params![run, ago]).await;
    let sql = "UPDATE runs SET status = 'done', finished = TRUE, finished_at = now_us() - $2 WHERE id = $1";
    write(db, sql, params![run, ago]).await;
}

async fn old_events_are_deleted_unless_their_run_is_active(ground: &ServerFixture) {
    let server = ground.start().await;
    let (db, logs) = (server.app.db().clone(), server.app.logs().clone());
    let (over, _) = submit_run(&server, "over", json!({})).await;
    let (active, job) = submit_run(&server, "active", json!({})).await;
    end_run(&db, over, 40).await;
    write(&db, "UPDATE events SET recorded_at = recorded_at - $1", params![Span::days(31).0]).await;
    // A recent event, so that the newest of all is not one of these.
    let (_, _) = submit_run(&server, "young", json!({})).await;
    let keep = RetentionPeriods { events: Some(Span::days(30)), ..KEEP_FOREVER };
    let deleted = run_round(&db, &logs, keep, SMALL).await.unwrap();
    assert!(deleted.events > 0 && deleted.runs == 0 && deleted.uploads == 0, "{deleted:?}");
    let of = async |id: Val| {
        let sql = "SELECT count(*) FROM events WHERE entity_id = $1";
        db.query_opt(sql, vec![id]).await.unwrap().unwrap().int(0).unwrap()
    };
    assert_eq!(of(over.into()).await, 0);
    assert!(of(active.into()).await > 0 && of(job.into()).await > 0, "a run that goes on keeps its story");
    let orphan = "SELECT count(*) FROM event_targets t WHERE NOT EXISTS (SELECT 1 FROM events e WHERE e.id = t.event_id)";
    assert_eq!(count(&db, orphan).await, 0);
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap(), DeletedCounts::default(), "once");
    server.stop().await;
}

/// Adds old events about something, in order.
async fn add_events(db: &Db, about: Val, number: i64, first_at: i64) {
    let fill = match db.dialect() {
        Dialect::Sqlite => {
            "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < CAST($2 AS BIGINT))"
        }
        Dialect::Postgres => "WITH n AS (SELECT generate_series(1, CAST($2 AS BIGINT)) AS n)",
    };
    let sql = format!(
        "{fill} INSERT INTO events (id, entity, entity_id, kind, message, actor, recorded_at) \
         SELECT new_uuid(), 'run', CAST($1 AS TEXT), 'note', 'm', 'system', CAST($3 AS BIGINT) + n FROM n"
    );
    db.write(Unit::new().exec(sql, vec![about, number.into(), first_at.into()]))
        .await
        .unwrap()
        .done()
        .unwrap();
}

async fn old_events_behind_many_that_are_kept_are_deleted_in_one_round(ground: &ServerFixture) {
    let server = ground.start().await;
    let (db, logs) = (server.app.db().clone(), server.app.logs().clone());
    let (active, _) = submit_run(&server, "active", json!({})).await;
    let other = db.new_id().unwrap();
    add_events(&db, active.into(), 300, 0).await;
    add_events(&db, other.into(), 1_000, 1_000_000).await;
    // The newest of all is kept, and so is this one.
    submit_run(&server, "young", json!({})).await;
    let plan = retention::explain_old_events(&db).await.unwrap();
    assert!(plan.contains("events_time"), "{plan}");
    let keep = RetentionPeriods { events: Some(Span::days(30)), ..KEEP_FOREVER };
    let batches = RetentionBatches { events: 100, ..SMALL };
    let before = db.counts().commits;
    let deleted = run_round(&db, &logs, keep, batches).await.unwrap();
    assert_eq!(deleted, DeletedCounts { events: 1_000, ..DeletedCounts::default() });
    assert!(db.counts().commits - before <= 10, "one transaction for each batch that deletes");
    assert_eq!(count(&db, "SELECT count(*) FROM events WHERE message = 'm'").await, 300);
    server.stop().await;
}

async fn of_an_instance_that_exists_the_newest_events_are_kept(ground: &ServerFixture) {
    let server = ground.start().await;
    let (db, logs) = (server.app.db().clone(), server.app.logs().clone());
    let (run, _) = submit_run(&server, "young", json!({})).await;
    let instance = db.new_id().unwrap();
    let sql = "INSERT INTO instances (id, project_id, name, instance_num, created_at, status, last_processed_at) \
               SELECT $1, r.project_id, 'one', 0, now_us(), 'idle', now_us() FROM runs r WHERE r.id = $2";
    write(&db, sql, params![instance, run]).await;
    add_events(&db, instance.into(), 3, 0).await;
    write(&db, "UPDATE events SET to_status = 'idle' WHERE entity_id = $1", params![instance]).await;
    add_events(&db, instance.into(), 4, 1_000).await;
    submit_run(&server, "younger", json!({})).await;
    let keep = RetentionPeriods { events: Some(Span::days(30)), ..KEEP_FOREVER };
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap().events, 5);
    let kept =
        db.query("SELECT recorded_at FROM events WHERE entity_id = $1 ORDER BY seq", params![instance]);
    let kept: Vec<i64> = kept.await.unwrap().iter().map(|row| row.int(0).unwrap()).collect();
    assert_eq!(kept, [3, 1_004], "the newest one with a status, and the newest one");
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap(), DeletedCounts::default());
    // Once it has ended, nothing is kept.
    write(&db, "UPDATE instances SET finished = TRUE WHERE id = $1", params![instance]).await;
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap().events, 2);
    server.stop().await;
}

async fn old_finished_runs_are_deleted_with_their_jobs_logs_and_metrics(ground: &ServerFixture) {
    let server = ground.start().await;
    let (db, logs) = (server.app.db().clone(), server.app.logs().clone());
    let text = "run: sleep 1\n";
    let launched = server.admin("/api/project/main/jobs/launch", json!({ "text": text })).await;
    let managed = launched["jobs"][0]["id"].as_str().unwrap().to_owned();
    let mut all = Vec::new();
    // Name, and days since its end.
    for (name, ended) in [("old", Some(91)), ("young", Some(89)), ("active", None), ("attempt", Some(91))] {
        let (run, job) = submit_run(&server, name, json!({})).await;
        let project = jobs::find(&db, job).await.unwrap().unwrap().project_id;
        let log = Log { project, run, submission: job, stream: LogSource::Job };
        logs.append_to_files(&log, 0, 0, b"dear").await.unwrap();
        let sql = "INSERT INTO job_metrics (job_id, at, host_at, cpu_us, memory_bytes, working_set_bytes, gpus) \
                   VALUES ($1, now_us(), 0, 0, 0, 0, '[]')";
        write(&db, sql, params![job]).await;
        if let Some(days) = ended {
            end_run(&db, run, days).await;
        }
        all.push((name, run, log));
    }
    let attempt = all[3].1;
    write(&db, "UPDATE runs SET managed_job_id = $2 WHERE id = $1", params![attempt, managed.as_str()]).await;
    let keep = RetentionPeriods { runs: Some(Span::days(90)), ..KEEP_FOREVER };
    assert_eq!(
        run_round(&db, &logs, keep, SMALL).await.unwrap(),
        DeletedCounts { runs: 1, ..DeletedCounts::default() }
    );
    for (name, run, log) in &all {
        let here = db.query_opt("SELECT 1 FROM runs WHERE id = $1", params![*run]).await.unwrap().is_some();
        let metrics =
            db.query_opt("SELECT 1 FROM job_metrics WHERE job_id = $1", params![log.submission]).await;
        let log = logs.end(log).await.unwrap();
        let expected = *name != "old";
        assert_eq!((here, metrics.unwrap().is_some(), log > 0), (expected, expected, expected), "{name}");
    }
    assert_eq!(count(&db, "SELECT count(*) FROM jobs").await, 3);
    // The attempts of a managed job are deleted once it has ended; its record stays.
    write(
        &db,
        "UPDATE managed_jobs SET finished = TRUE, finished_at = now_us(), status = 'SUCCEEDED'",
        vec![],
    )
    .await;
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap().runs, 1);
    assert_eq!(count(&db, "SELECT count(*) FROM managed_jobs").await, 1);
    assert_eq!(count(&db, "SELECT count(*) FROM runs").await, 2);
    server.stop().await;
}

async fn unreferenced_uploads_are_deleted_and_those_in_use_are_kept(ground: &ServerFixture) {
    let server = ground.start().await;
    let (db, logs) = (server.app.db().clone(), server.app.logs().clone());
    let mut ids = Vec::new();
    for text in ["alone", "of a run", "of a job", "young"] {
        let name = crate::http_secrets::sha256_hex(text.as_bytes());
        let (status, archive) =
            server.upload(ADMIN_TOKEN, "/api/files/upload_archive", &name, text.as_bytes()).await;
        assert_eq!(status, 200, "{archive}");
        ids.push(archive["id"].as_str().unwrap().to_owned());
    }
    let init = json!({ "repo_id": "repo", "repo_info": { "repo_type": "virtual" } });
    server.admin("/api/project/main/repos/init", init).await;
    let mut hashes = Vec::new();
    for text in ["code alone", "code of a run"] {
        let name = crate::http_secrets::sha256_hex(text.as_bytes());
        let path = "/api/project/main/repos/upload_code?repo_id=repo";
        assert_eq!(server.upload(ADMIN_TOKEN, path, &name, text.as_bytes()).await.0, 200);
        hashes.push(name);
    }
    let brought = json!({
        "repo_id": "repo", "repo_data": { "repo_type": "virtual" }, "repo_code_hash": hashes[1],
        "file_archives": [{ "id": ids[1], "path": "x" }],
    });
    let (run, _) = submit_run(&server, "kept", brought).await;
    let files = json!([{ "task": 0, "archive_id": ids[2], "path": "x" }]);
    server.admin("/api/project/main/jobs/launch", json!({ "text": "run: sleep 1\n", "files": files })).await;
    let age = Span::days(8).0;
    for sql in [
        "UPDATE archives SET created_at = created_at - $1, used_at = used_at - $1",
        "UPDATE codes SET created_at = created_at - $1, used_at = used_at - $1",
        "UPDATE runs SET submitted_at = submitted_at - $1",
    ] {
        write(&db, sql, params![age]).await;
    }
    // A client that checks whether an upload exists is about to use it.
    let hash = crate::http_secrets::sha256_hex(b"young");
    server.admin("/api/files/get_archive_by_hash", json!({ "hash": hash })).await;
    let keep = RetentionPeriods { uploads: Some(Span::days(7)), ..KEEP_FOREVER };
    assert_eq!(
        run_round(&db, &logs, keep, SMALL).await.unwrap(),
        DeletedCounts { uploads: 2, ..DeletedCounts::default() }
    );
    let left = async |id: &str| {
        let sql = "SELECT 1 FROM archives WHERE id = $1";
        db.query_opt(sql, params![id]).await.unwrap().is_some()
    };
    assert_eq!(
        [left(&ids[0]).await, left(&ids[1]).await, left(&ids[2]).await, left(&ids[3]).await],
        [false, true, true, true]
    );
    assert_eq!(count(&db, "SELECT count(*) FROM codes").await, 1);
    // A run that ended and is kept keeps its uploads; a deleted one does not.
    end_run(&db, run, 1).await;
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap(), DeletedCounts::default());
    write(&db, "DELETE FROM jobs", vec![]).await;
    write(&db, "DELETE FROM runs", vec![]).await;
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap().uploads, 2, "its archive and its code");
    server.stop().await;
}

async fn passwords_of_registries_are_deleted_with_the_last_run_that_refers_to_them(ground: &ServerFixture) {
    let server = ground.start().await;
    let (db, logs) = (server.app.db().clone(), server.app.logs().clone());
    let spec = json!({ "run_name": "private", "configuration": { "type": "task", "image": "registry.example/x",
        "registry_auth": { "username": "u", "password": "p4ss" }, "commands": ["true"] } });
    let run = server.admin("/api/project/main/runs/apply", json!({ "plan": { "run_spec": spec } })).await;
    let run = RunId(run["id"].as_str().unwrap().parse().unwrap());
    write(&db, "UPDATE registry_passwords SET created_at = created_at - $1", params![Span::days(8).0]).await;
    let keep = RetentionPeriods { uploads: Some(Span::days(7)), ..KEEP_FOREVER };
    let passwords = "SELECT count(*) FROM registry_passwords";
    end_run(&db, run, 1).await;
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap(), DeletedCounts::default());
    assert_eq!(count(&db, passwords).await, 1);
    write(&db, "DELETE FROM jobs", vec![]).await;
    write(&db, "DELETE FROM runs", vec![]).await;
    assert_eq!(run_round(&db, &logs, keep, SMALL).await.unwrap().uploads, 1);
    assert_eq!(count(&db, passwords).await, 0);
    server.stop().await;
}

async fn nothing_is_deleted_without_retention_periods(ground: &ServerFixture) {
    let server = ground.start().await;
    let (db, logs) = (server.app.db().clone(), server.app.logs().clone());
    let (run, _) = submit_run(&server, "ancient", json!({})).await;
    end_run(&db, run, 10_000).await;
    write(&db, "UPDATE events SET recorded_at = 0", vec![]).await;
    assert_eq!(run_round(&db, &logs, KEEP_FOREVER, SMALL).await.unwrap(), DeletedCounts::default());
    let deleted = run_round(&db, &logs, Limits::default().keep, SMALL).await.unwrap();
    assert!(deleted.runs == 1 && deleted.events > 0, "{deleted:?}");
    assert_eq!(count(&db, "SELECT count(*) FROM events").await, 1, "the newest stays");
    server.stop().await;
}
