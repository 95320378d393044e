//! Several servers on one Postgres: they share the work, and the loss of one loses nothing.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_testenv::{
    replicas::{ReplicaOptions, Replicas},
    server::{call_api_idempotent, submission},
    test_hosts::{HostRuntime, empty_job},
};

/// Maximum number of open connections of all servers.
const CONNECTIONS_MAX: i64 = 60;
/// The default is three times as long, which row F2 of the fault matrix waits for with `--long`.
const LOCK_TIMEOUT: &str = "10s";
/// Lock timeout plus the maximum polling interval.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(15);
const TIMEOUT: Duration = Duration::from_secs(120);

const OPEN_CONNECTIONS_SQL: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'windlass'";
const STARTED_TWICE_SQL: &str = "SELECT count(*) FROM (SELECT entity_id FROM events WHERE entity = 'job' \
    AND kind = 'status' AND to_status = 'running' GROUP BY entity_id HAVING count(*) > 1) twice";

fn job_running(name: &str, millis: u64) -> Value {
    let mut job = empty_job(name);
    job["env"]["SIMULATED_RUN_MS"] = millis.to_string().into();
    job
}

/// Names of all successful runs.
async fn done_runs(replicas: &Replicas) -> BTreeSet<String> {
    let rows = replicas.postgres.run("SELECT name FROM runs WHERE status = 'done'").await.unwrap();
    rows.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l12_three_postgres_replicas_share_the_work_and_a3_each_sees_writes_of_the_others() {
    let plan =
        ReplicaOptions { name: "share", servers: 3, hosts: 6, blocks: 8, runtime: HostRuntime::Simulated };
    let replicas = Replicas::start(plan).await.unwrap();
    let mut most = 0;
    for number in 0..120 {
        let name = format!("run-{number}");
        replicas.apply(number % 3, &job_running(&name, 200)).await.unwrap();
        // The next server knows the run.
        let run = replicas.run((number + 1) % 3, &name).await.unwrap();
        assert_eq!(run["run_spec"]["run_name"], json!(name));
        if number % 10 == 0 {
            most = most.max(replicas.postgres.count(OPEN_CONNECTIONS_SQL).await.unwrap());
        }
    }
    // Sent to one server, and visible on the next.
    replicas.apply(0, &job_running("stopped", 600_000)).await.unwrap();
    replicas
        .post(0, "/api/project/main/runs/stop", &json!({"runs_names": ["stopped"], "abort": false}))
        .await
        .unwrap();
    replicas.reaches(1, "stopped", &["terminating", "terminated"]).await.unwrap();
    replicas.wait_until_no_active_runs(TIMEOUT).await.unwrap();
    assert_eq!(done_runs(&replicas).await.len(), 120);
    assert!((3..=CONNECTIONS_MAX).contains(&most), "{most} connections");
    assert_eq!(replicas.postgres.count(STARTED_TWICE_SQL).await.unwrap(), 0);
    for number in 0..3 {
        let claimed = replicas.total(number, "claimed").await.unwrap();
        assert!(claimed >= 60, "server {number} took {claimed} rows only");
        assert_eq!(replicas.total(number, "lost").await.unwrap(), 0);
    }
}

/// Frozen hosts make passes hold their rows; one of the holders dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_the_rows_of_a_killed_postgres_replica_are_taken_over_within_the_lock_timeout() {
    let plan =
        ReplicaOptions { name: "kill", servers: 3, hosts: 4, blocks: 8, runtime: HostRuntime::Simulated };
    let mut replicas = Replicas::start_with_lock_timeout(plan, LOCK_TIMEOUT).await.unwrap();
    // It ends long after the kill, so a live server must detect that.
    replicas.apply(0, &job_running("long", 25_000)).await.unwrap();
    replicas.reaches(1, "long", &["running"]).await.unwrap();
    replicas.freeze_hosts().unwrap();
    for number in 0..30 {
        replicas.apply(number % 3, &job_running(&format!("run-{number}"), 100)).await.unwrap();
    }
    replicas.wait_for_call_to_host(0).await.unwrap();
    replicas.kill(0);
    let killed = Instant::now();
    let held = "SELECT lock_token FROM jobs WHERE lock_token IS NOT NULL UNION ALL \
                SELECT lock_token FROM instances WHERE lock_token IS NOT NULL";
    let tokens: BTreeSet<String> = replicas.postgres.run(held).await.unwrap().into_iter().flatten().collect();
    replicas.thaw_hosts().unwrap();
    assert!(!tokens.is_empty());
    loop {
        let left = replicas.postgres.run(held).await.unwrap();
        let left = left.into_iter().flatten().filter(|token| tokens.contains(token)).count();
        if left == 0 {
            break;
        }
        assert!(killed.elapsed() < TAKEOVER_TIMEOUT, "{left} rows are still the dead server's");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    replicas.wait_until_no_active_runs(TIMEOUT).await.unwrap();
    assert_eq!(done_runs(&replicas).await.len(), 31);
    assert_eq!(replicas.postgres.count(STARTED_TWICE_SQL).await.unwrap(), 0);
    // Its host notified a live server immediately: polls alone have an interval of ten seconds.
    let late = "SELECT (max(e.recorded_at) FILTER (WHERE e.to_status = 'terminating') \
                - max(e.recorded_at) FILTER (WHERE e.to_status = 'running')) / 1000 \
                FROM events e JOIN jobs j ON j.id = e.entity_id JOIN runs r ON r.id = j.run_id \
                WHERE r.name = 'long' AND e.entity = 'job'";
    let lasted = replicas.postgres.count(late).await.unwrap();
    assert!((24_000..29_000).contains(&lasted), "the end was heard after {lasted} ms");
}

/// All clients submit and try another server when refused; each server is restarted once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_postgres_replicas_loses_no_run_and_leaves_no_lock() {
    let plan =
        ReplicaOptions { name: "roll", servers: 3, hosts: 6, blocks: 8, runtime: HostRuntime::Simulated };
    let mut replicas = Replicas::start(plan).await.unwrap();
    let addresses = Arc::new(parking_lot::Mutex::new(replicas.addresses()));
    let (over, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let ended = Arc::new(AtomicBool::new(false));
    let expired = watch_locks(replicas.postgres.session().await.unwrap(), Arc::clone(&ended));
    let clients: Vec<_> = (0..3)
        .map(|client| {
            tokio::spawn(submit_until(client, Arc::clone(&addresses), Arc::clone(&over), Arc::clone(&next)))
        })
        .collect();
    for number in 0..3 {
        wait_for(&next, 20).await;
        replicas.stop(number).await.unwrap();
        wait_for(&next, 20).await;
        replicas.raise(number).await.unwrap();
        *addresses.lock() = replicas.addresses();
    }
    wait_for(&next, 20).await;
    over.store(true, Ordering::Relaxed);
    let mut acknowledged = BTreeSet::new();
    for client in clients {
        acknowledged.extend(client.await.unwrap());
    }
    replicas.wait_until_no_active_runs(TIMEOUT).await.unwrap();
    ended.store(true, Ordering::Relaxed);
    let done = done_runs(&replicas).await;
    assert!(acknowledged.len() >= 100, "only {} were submitted", acknowledged.len());
    let lost: Vec<_> = acknowledged.difference(&done).collect();
    assert!(lost.is_empty(), "{lost:?} were acknowledged and are not done");
    assert_eq!(replicas.postgres.count(STARTED_TWICE_SQL).await.unwrap(), 0);
    // No work waited for a lock of a stopped server.
    assert_eq!(expired.await.unwrap(), 0, "locks were left behind and ran out");
}

/// Continuously searches for expired locks, and returns the maximum number seen.
fn watch_locks(session: tokio_postgres::Client, over: Arc<AtomicBool>) -> tokio::task::JoinHandle<i64> {
    let each = ["runs", "jobs", "instances", "fleets"].map(|table| {
        format!("SELECT id FROM {table} WHERE lock_token IS NOT NULL AND lock_expires_at < now_us()")
    });
    let sql = format!("SELECT count(*) FROM ({}) expired", each.join(" UNION ALL "));
    tokio::spawn(async move {
        let mut most = 0;
        while !over.load(Ordering::Relaxed) {
            most = most.max(session.query_one(sql.as_str(), &[]).await.unwrap().get::<_, i64>(0));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        most
    })
}

async fn wait_for(submitted: &AtomicUsize, more: usize) {
    let (enough, requested) = (submitted.load(Ordering::Relaxed) + more, Instant::now());
    while submitted.load(Ordering::Relaxed) < enough {
        assert!(requested.elapsed() < TIMEOUT, "nothing is submitted any more");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the acknowledged names. A refusal is 503 or no response at all, and the next server is tried.
async fn submit_until(
    client: usize,
    addresses: Arc<parking_lot::Mutex<Vec<String>>>,
    over: Arc<AtomicBool>,
    next: Arc<AtomicUsize>,
) -> Vec<String> {
    let mut acknowledged = Vec::new();
    for number in 0.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("run-{client}-{number}");
        let body = submission(&empty_job(&name));
        for attempt in client.. {
            let address = {
                let all = addresses.lock();
                all[attempt % all.len()].clone()
            };
            match call_api_idempotent(&address, "/api/project/main/runs/apply", &body, Some(&name)).await {
                Ok(answer) if answer.status == 200 => break,
                Ok(answer) => assert!(matches!(answer.status, 429 | 503), "{answer:?}"),
                // Refused, or cut off: repeating the same submission is harmless.
                Err(_) => {}
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        acknowledged.push(name);
        next.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    acknowledged
}

/// A server that receives a request wakes the others; a woken one polls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_a_request_to_one_postgres_replica_wakes_the_others() {
    let plan =
        ReplicaOptions { name: "hints", servers: 2, hosts: 1, blocks: 1, runtime: HostRuntime::Simulated };
    let replicas = Replicas::start(plan).await.unwrap();
    let (reported, mut received) = tokio::sync::mpsc::unbounded_channel();
    let listener = listen_for_hints(&replicas, reported).await;
    replicas.apply(0, &job_running("first", 600_000)).await.unwrap();
    wait_for_hint(&mut received, "jobs_submitted").await;
    replicas.reaches(1, "first", &["running"]).await.unwrap();
    let body = json!({"runs_names": ["first"], "abort": false});
    replicas.post(0, "/api/project/main/runs/stop", &body).await.unwrap();
    wait_for_hint(&mut received, "runs").await;
    replicas.reaches(1, "first", &["terminated"]).await.unwrap();
    drop(listener);

    // Woken pipelines poll, although they have polled a moment ago.
    let quiet = count_polls_during(&replicas, 0).await;
    let reported = count_polls_during(&replicas, 40).await;
    assert!(reported > 2 * quiet + 20, "{reported} looks when told 40 times, {quiet} by itself");
}

/// Receives every hint that passes through the database.
async fn listen_for_hints(
    replicas: &Replicas,
    reported: tokio::sync::mpsc::UnboundedSender<String>,
) -> (tokio_postgres::Client, tokio::task::JoinHandle<()>) {
    let config: tokio_postgres::Config = replicas.postgres.url().parse().unwrap();
    let (client, mut connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    let task = tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let tokio_postgres::AsyncMessage::Notification(hint) = message {
                let _ = reported.send(hint.payload().to_owned());
            }
        }
    });
    client.batch_execute("LISTEN windlass_hints").await.unwrap();
    (client, task)
}

async fn wait_for_hint(received: &mut tokio::sync::mpsc::UnboundedReceiver<String>, name: &str) {
    let wanted = async { while received.recv().await.unwrap().split(' ').all(|hint| hint != name) {} };
    tokio::time::timeout(TIMEOUT, wanted).await.unwrap_or_else(|_| panic!("nobody was told of {name}"));
}

/// Counts the polls of the volume table within some seconds, by a pipeline without work.
async fn count_polls_during(replicas: &Replicas, hints: usize) -> i64 {
    let looks = "SELECT seq_scan + coalesce(idx_scan, 0) FROM pg_stat_user_tables WHERE relname = 'volumes'";
    let before = replicas.postgres.count(looks).await.unwrap();
    for number in 0..40 {
        if number < hints {
            replicas.postgres.run("SELECT pg_notify('windlass_hints', 'volumes')").await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // Postgres reports counts with a delay.
    tokio::time::sleep(Duration::from_secs(3)).await;
    replicas.postgres.count(looks).await.unwrap() - before
}
