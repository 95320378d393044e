//! Metrics of jobs: sampled, retained, rendered for clients; and retention of logs.

use std::sync::atomic::{AtomicI64, Ordering};

use serde_json::{Value, json};
use windlass_api::agent::runner::{GpuMetrics, Metrics};
use windlass_model::{
    id::{InstanceId, SubmissionId},
    time::{Span, Timestamp},
};
use windlass_server::{
    config::SettingsSource,
    db::{Unit, job_metrics as rows, jobs},
    job_metrics::{is_gpu_idle, sampler},
    logs::{Log, LogSource, LogStore, retention},
    params,
};

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    scripted_hosts::ScriptedHosts,
};

/// Default of `keep_metrics`.
const KEEP: Option<Span> = Some(Span::days(30));

on_both! {
    running_jobs_are_sampled_and_shown_as_series
    metric_samples_are_thinned_out_and_deleted_after_their_retention_period
    samples_are_kept_for_the_time_of_the_setting
    the_samples_of_a_round_are_one_statement_however_many_they_are
    a_gpu_idle_for_the_whole_window_is_detected
    only_logs_of_old_or_deleted_runs_are_removed
}

struct MetricsTestEnv {
    server: TestServer,
    job: SubmissionId,
}

impl MetricsTestEnv {
    /// One job that runs on an instance.
    async fn new(ground: &ServerFixture) -> Self {
        Self::with_settings(ground.given()).await
    }

    async fn with_settings(given: SettingsSource) -> Self {
        let server = TestServer::start_with(given).await;
        let job = submit_run(&server, "train-1").await;
        let project = jobs::find(server.app.db(), job).await.unwrap().unwrap().project_id;
        let instance = InstanceId(server.app.db().new_id().unwrap());
        let unit = Unit::new()
            .exec(
                "INSERT INTO instances (id, project_id, name, instance_num, created_at, status, last_processed_at) \
                 VALUES ($1, $2, 'one', 0, now_us(), 'busy', now_us())",
                params![instance, project],
            )
            .expect_one(
                "UPDATE jobs SET status = 'running', instance_id = $2, provisioning = $3 WHERE id = $1",
                params![
                    job,
                    instance,
                    json!({ "instance_type": { "resources": {
                        "cpus": 8, "memory_mib": 1024, "gpus": [{ "memory_mib": 2 }, { "memory_mib": 2 }],
                    } } })
                    .to_string(),
                ],
            );
        server.app.db().write(unit).await.unwrap().done().unwrap();
        Self { server, job }
    }

    async fn count(&self) -> usize {
        rows::recent(self.server.app.db(), self.job, None, None, 10_000).await.unwrap().len()
    }

    /// Makes all samples older by this time.
    async fn age_samples(&self, by: Span) {
        let unit = Unit::new().exec("UPDATE job_metrics SET at = at - $1", params![by.0]);
        self.server.app.db().write(unit).await.unwrap().done().unwrap();
    }

    async fn read(&self, query: &str) -> (u16, Value) {
        let (status, body) =
            self.server.get(ADMIN_TOKEN, &format!("/api/project/main/metrics/job/train-1{query}")).await;
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }
}

async fn submit_run(server: &TestServer, name: &str) -> SubmissionId {
    let spec = json!({ "run_name": name, "configuration": { "type": "task", "commands": ["true"] } });
    let plan = json!({ "plan": { "run_spec": spec }, "force": false });
    let run = server.admin("/api/project/main/runs/apply", plan).await;
    SubmissionId(run["latest_job_submission"]["id"].as_str().unwrap().parse().unwrap())
}

/// A host whose job uses two CPUs and half of its second GPU; each sample is ten seconds after the last.
fn hosts_with_metrics() -> ScriptedHosts {
    let looks = AtomicI64::new(0);
    ScriptedHosts::with_metrics(move || {
        let check = looks.fetch_add(1, Ordering::SeqCst);
        Metrics {
            timestamp_micro: 1_000_000_000 + check * 10_000_000,
            cpu_usage_micro: check * 20_000_000,
            memory_usage_bytes: 100 + check,
            memory_working_set_bytes: 50,
            gpus: vec![
                GpuMetrics { gpu_memory_usage_bytes: 7, gpu_util_percent: 0 },
                GpuMetrics { gpu_memory_usage_bytes: 8, gpu_util_percent: 50 },
            ],
        }
    })
}

async fn running_jobs_are_sampled_and_shown_as_series(ground: &ServerFixture) {
    let scene = MetricsTestEnv::new(ground).await;
    submit_run(&scene.server, "waits").await;
    let host = hosts_with_metrics();
    assert_eq!(scene.read("").await, (200, json!({ "metrics": [] })));
    sampler::round(scene.server.app.db(), &host, KEEP).await;
    sampler::round(scene.server.app.db(), &host, KEEP).await;
    assert_eq!(scene.count().await, 1, "whoever comes second finds a young sample");
    assert_eq!(scene.read("").await, (200, json!({ "metrics": [] })), "one sample is no series");
    for _ in 0..2 {
        scene.age_samples(Span::secs(10)).await;
        sampler::round(scene.server.app.db(), &host, KEEP).await;
    }
    let (status, answer) = scene.read("?limit=1000").await;
    assert_eq!(status, 200);
    let series = |name: &str| {
        let all = answer["metrics"].as_array().unwrap();
        let one =
            all.iter().find(|series| series["name"] == name).unwrap_or_else(|| panic!("{name}: {answer}"));
        assert_eq!(one["timestamps"].as_array().unwrap().len(), 2, "{name}");
        one["values"].clone()
    };
    assert_eq!(series("cpu_usage_percent"), json!([200, 200]));
    assert_eq!(series("memory_usage_bytes"), json!([102, 101]), "newest first");
    assert_eq!(series("memory_working_set_bytes"), json!([50, 50]));
    assert_eq!(series("cpus_detected_num"), json!([8, 8]));
    assert_eq!(series("memory_total_bytes"), json!([1 << 30, 1 << 30]));
    assert_eq!(series("gpus_detected_num"), json!([2, 2]));
    assert_eq!(series("gpu_memory_total_bytes"), json!([2 << 20, 2 << 20]));
    assert_eq!(series("gpu_memory_usage_bytes_gpu1"), json!([8, 8]));
    assert_eq!(series("gpu_util_percent_gpu1"), json!([50, 50]));
    let (_, newest) = scene.read("?limit=1").await;
    assert_eq!(newest["metrics"][1]["values"], json!([102]));
    assert_eq!(scene.read("?job_num=7").await.0, 400);
    assert_eq!(scene.read("?replica_num=7").await.0, 400);
    for empty in ["?after=2100-01-01T00:00:00Z", "?before=2001-01-01T00:00:00Z"] {
        assert_eq!(scene.read(empty).await, (200, json!({ "metrics": [] })), "{empty}");
    }
    let whole = scene.read("?after=2001-01-01T00:00:00Z&before=2100-01-01T00:00:00Z&limit=1000").await;
    assert_eq!(whole, (200, answer.clone()));
    assert_eq!(scene.read("?run_id=5d3a0a3e-1a52-4c39-8f0c-8a3f6f1f7f10").await.0, 400);
    assert_eq!(scene.read("?limit=0").await.0, 422);
    let (_, text) = scene.server.get(ADMIN_TOKEN, "/metrics").await;
    let text = String::from_utf8(text).unwrap();
    let line = "windlass_job_gpu_usage_ratio{project=\"main\",run=\"train-1\",replica=\"0\",job=\"0\",gpu=\"1\"} 0.5\n";
    assert!(text.contains(line) && text.ends_with("# EOF\n"), "{text}");
    assert!(!text.contains("waits"), "a job that does not run has no series");
    scene.server.stop().await;
}

async fn metric_samples_are_thinned_out_and_deleted_after_their_retention_period(ground: &ServerFixture) {
    let scene = MetricsTestEnv::new(ground).await;
    let (host, db) = (hosts_with_metrics(), scene.server.app.db().clone());
    // Two whole minutes of samples, more than 60 and less than 63 minutes ago.
    let insert = "INSERT INTO job_metrics (job_id, at, host_at, cpu_us, memory_bytes, working_set_bytes, gpus) \
                  VALUES ($1, now_us() - now_us() % 60000000 - 3720000000 + $2, 0, 0, 0, 0, '[]')";
    for second in (0..120).step_by(10) {
        let values = params![scene.job, second * 1_000_000_i64];
        db.write(Unit::new().exec(insert, values)).await.unwrap().done().unwrap();
    }
    assert_eq!(scene.count().await, 12);
    sampler::round(&db, &host, KEEP).await;
    sampler::thin(&db).await;
    assert_eq!(scene.count().await, 3, "one of each minute, and the new one");
    scene.age_samples(Span::mins(10)).await;
    sampler::round(&db, &host, KEEP).await;
    sampler::thin(&db).await;
    assert_eq!(scene.count().await, 4, "the last hour is kept as it is");
    let ended = "UPDATE jobs SET status = 'done', finished = TRUE WHERE id = $1";
    db.write(Unit::new().expect_one(ended, params![scene.job])).await.unwrap().done().unwrap();
    scene.age_samples(Span::days(29)).await;
    sampler::round(&db, &host, KEEP).await;
    sampler::thin(&db).await;
    assert_eq!(scene.count().await, 4, "what was there at the end stays");
    scene.age_samples(Span::days(1)).await;
    sampler::round(&db, &host, None).await;
    assert_eq!(scene.count().await, 4, "`keep_metrics: off` deletes nothing");
    sampler::round(&db, &host, KEEP).await;
    assert_eq!(scene.count().await, 0);
    scene.server.stop().await;
}

async fn samples_are_kept_for_the_time_of_the_setting(ground: &ServerFixture) {
    let mut given = ground.given();
    *given.limits.named("keep_metrics").unwrap() = Some("2d".to_owned());
    let scene = MetricsTestEnv::with_settings(given).await;
    let (host, db) = (hosts_with_metrics(), scene.server.app.db().clone());
    let keep = scene.server.app.settings().limits.keep.metrics;
    assert_eq!(keep, Some(Span::days(2)));
    sampler::round(&db, &host, keep).await;
    scene.age_samples(Span::days(1)).await;
    sampler::round(&db, &host, keep).await;
    assert_eq!(scene.count().await, 2);
    scene.age_samples(Span::days(1)).await;
    sampler::round(&db, &host, keep).await;
    assert_eq!(scene.count().await, 2, "the oldest is deleted, and there is a new one");
    scene.server.stop().await;
}

async fn the_samples_of_a_round_are_one_statement_however_many_they_are(ground: &ServerFixture) {
    let scene = MetricsTestEnv::new(ground).await;
    let mut running = vec![scene.job];
    for name in ["train-2", "train-3", "train-4"] {
        running.push(submit_run(&scene.server, name).await);
    }
    let db = scene.server.app.db().clone();
    let sample = rows::Sample {
        at: Timestamp(0),
        host_at: Timestamp(7),
        cpu_us: 1,
        memory_bytes: 2,
        working_set_bytes: 3,
        gpus: vec![(4, 5)],
    };
    let insert = async |jobs: &[SubmissionId]| {
        let samples: Vec<_> = jobs.iter().map(|job| (*job, sample.clone())).collect();
        let mut costs = Vec::new();
        for _ in 0..3 {
            let now = db.now().await.unwrap();
            let before = db.counts();
            rows::insert_all(&db, now, &samples).await.unwrap();
            costs.push(db.counts().statements - before.statements);
        }
        // The connection to Postgres has statements of its own now and then.
        costs.into_iter().min()
    };
    let one = insert(&running[..1]).await;
    // A job that was deleted meanwhile does not prevent the others.
    running.push(SubmissionId(db.new_id().unwrap()));
    assert_eq!(insert(&running).await, one);
    for (job, expected) in running.iter().zip([6, 3, 3, 3, 0]) {
        let stored = rows::recent(&db, *job, None, None, 10).await.unwrap();
        assert_eq!(stored.len(), expected, "{job}");
        assert!(stored.iter().all(|kept| rows::Sample { at: sample.at, ..kept.clone() } == sample));
    }
    scene.server.stop().await;
}

async fn a_gpu_idle_for_the_whole_window_is_detected(ground: &ServerFixture) {
    let scene = MetricsTestEnv::new(ground).await;
    let (host, db) = (hosts_with_metrics(), scene.server.app.db().clone());
    let evaluate = async |percent| {
        let now = db.now().await.unwrap();
        is_gpu_idle(&db, scene.job, percent, Span::mins(10), now).await.unwrap()
    };
    for _ in 0..5 {
        sampler::round(&db, &host, KEEP).await;
        assert!(!evaluate(10).await, "the window is not covered yet");
        scene.age_samples(Span::secs(110)).await;
    }
    sampler::round(&db, &host, KEEP).await;
    assert!(evaluate(10).await, "the first GPU did nothing");
    assert!(!evaluate(0).await);
    scene.server.stop().await;
}

async fn only_logs_of_old_or_deleted_runs_are_removed(ground: &ServerFixture) {
    let scene = MetricsTestEnv::new(ground).await;
    let (db, archive) = (scene.server.app.db().clone(), scene.server.app.logs().clone());
    let mut logs = Vec::new();
    // Name, days since its end (`None`: it runs), whether it was deleted.
    let runs = [
        ("active", None, false),
        ("young", Some(29), false),
        ("old", Some(31), false),
        ("gone", Some(1), true),
    ];
    for (name, days, deleted) in runs {
        let job = jobs::find(&db, submit_run(&scene.server, name).await).await.unwrap().unwrap();
        let log =
            Log { project: job.project_id, run: job.run_id, submission: job.id, stream: LogSource::Job };
        archive.append_to_files(&log, 0, 0, b"dear").await.unwrap();
        if let Some(days) = days {
            let sql = "UPDATE runs SET status = 'done', finished = TRUE, finished_at = now_us() - $2, deleted = $3 \
                       WHERE id = $1";
            let unit = Unit::new().expect_one(sql, params![job.run_id, Span::days(days).0, deleted]);
            db.write(unit).await.unwrap().done().unwrap();
        }
        logs.push(log);
    }
    let left = async || {
        let mut ends = Vec::new();
        for log in &logs {
            ends.push(archive.end(log).await.unwrap());
        }
        ends
    };
    assert_eq!(retention::run_round(&db, &archive, None).await.unwrap(), 1);
    assert_eq!(left().await, [4, 4, 4, 0], "for ever is not for the deleted");
    assert_eq!(retention::run_round(&db, &archive, Some(retention::DEFAULT_RETENTION)).await.unwrap(), 1);
    assert_eq!(left().await, [4, 4, 0, 0]);
    assert_eq!(retention::run_round(&db, &archive, Some(retention::DEFAULT_RETENTION)).await.unwrap(), 0);
    scene.server.stop().await;
}
