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
use windlass_server::config::{Given, Settings};
use windlass_testkit::{
    hollow::{Runtime, empty_job},
    replicas::{Plan, Replicas},
    server::{ask, submission},
};

/// What all servers together may have open.
const CONNECTIONS_MAX: i64 = 60;
/// Lock timeout and longest pause between two looks.
const TAKEN_OVER: Duration = Duration::from_secs(35);
const PATIENCE: Duration = Duration::from_secs(120);

const OPEN: &str = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'windlass'";
const STARTED_TWICE: &str = "SELECT count(*) FROM (SELECT entity_id FROM events WHERE entity = 'job' \
    AND kind = 'status' AND to_status = 'running' GROUP BY entity_id HAVING count(*) > 1) twice";

fn lasting(name: &str, millis: u64) -> Value {
    let mut job = empty_job(name);
    job["env"]["HOLLOW_RUN_MS"] = millis.to_string().into();
    job
}

/// The names of all runs that ended well.
async fn done(replicas: &Replicas) -> BTreeSet<String> {
    let rows = replicas.postgres.run("SELECT name FROM runs WHERE status = 'done'").await.unwrap();
    rows.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l12_three_postgres_replicas_share_the_work_and_a3_each_sees_what_another_was_told() {
    let plan = Plan { name: "share", servers: 3, hosts: 6, blocks: 8, runtime: Runtime::Hollow };
    let replicas = Replicas::start(plan).await.unwrap();
    let mut most = 0;
    for number in 0..120 {
        let name = format!("run-{number}");
        replicas.apply(number % 3, &lasting(&name, 200)).await.unwrap();
        // Whoever is asked next knows of it.
        let run = replicas.run((number + 1) % 3, &name).await.unwrap();
        assert_eq!(run["run_spec"]["run_name"], json!(name));
        if number % 10 == 0 {
            most = most.max(replicas.postgres.count(OPEN).await.unwrap());
        }
    }
    // Told to one, and the next knows.
    replicas.apply(0, &lasting("stopped", 600_000)).await.unwrap();
    replicas
        .post(0, "/api/project/main/runs/stop", &json!({"runs_names": ["stopped"], "abort": false}))
        .await
        .unwrap();
    let stopped = replicas.run(1, "stopped").await.unwrap();
    assert!(matches!(stopped["status"].as_str(), Some("terminating" | "terminated")), "{stopped:#}");
    replicas.is_quiet(PATIENCE).await.unwrap();
    assert_eq!(done(&replicas).await.len(), 120);
    assert!((3..=CONNECTIONS_MAX).contains(&most), "{most} connections");
    assert_eq!(replicas.postgres.count(STARTED_TWICE).await.unwrap(), 0);
    for number in 0..3 {
        let claimed = replicas.total(number, "claimed").await.unwrap();
        assert!(claimed >= 60, "server {number} took {claimed} rows only");
        assert_eq!(replicas.total(number, "lost").await.unwrap(), 0);
    }
}

/// Hosts stand still so that passes hold their rows; one of the holders dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_the_rows_of_a_killed_postgres_replica_are_taken_over_within_the_lock_timeout() {
    let plan = Plan { name: "kill", servers: 3, hosts: 4, blocks: 8, runtime: Runtime::Hollow };
    let mut replicas = Replicas::start(plan).await.unwrap();
    // It ends long after the kill: who hears of that?
    replicas.apply(0, &lasting("long", 45_000)).await.unwrap();
    replicas.reaches(1, "long", &["running"]).await.unwrap();
    replicas.freeze_hosts().unwrap();
    for number in 0..30 {
        replicas.apply(number % 3, &lasting(&format!("run-{number}"), 100)).await.unwrap();
    }
    let asked = Instant::now();
    while replicas.total(0, "in_work").await.unwrap() == 0 {
        assert!(asked.elapsed() < PATIENCE, "the first server takes no work");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
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
        assert!(killed.elapsed() < TAKEN_OVER, "{left} rows are still the dead server's");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    replicas.is_quiet(PATIENCE).await.unwrap();
    assert_eq!(done(&replicas).await.len(), 31);
    assert_eq!(replicas.postgres.count(STARTED_TWICE).await.unwrap(), 0);
    // Its host told a server that lives, at once: looks alone come every ten seconds.
    let late = "SELECT (max(e.recorded_at) FILTER (WHERE e.to_status = 'terminating') \
                - max(e.recorded_at) FILTER (WHERE e.to_status = 'running')) / 1000 \
                FROM events e JOIN jobs j ON j.id = e.entity_id JOIN runs r ON r.id = j.run_id \
                WHERE r.name = 'long' AND e.entity = 'job'";
    let lasted = replicas.postgres.count(late).await.unwrap();
    assert!((44_000..49_000).contains(&lasted), "the end was heard after {lasted} ms");
}

/// Everybody submits and asks somebody else when refused; each server is stopped and started once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_postgres_replicas_loses_and_delays_nothing() {
    let plan = Plan { name: "roll", servers: 3, hosts: 6, blocks: 8, runtime: Runtime::Hollow };
    let mut replicas = Replicas::start(plan).await.unwrap();
    let addresses = Arc::new(parking_lot::Mutex::new(replicas.addresses()));
    let (over, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
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
    replicas.is_quiet(PATIENCE).await.unwrap();
    let done = done(&replicas).await;
    assert!(acknowledged.len() >= 100, "only {} were submitted", acknowledged.len());
    let lost: Vec<_> = acknowledged.difference(&done).collect();
    assert!(lost.is_empty(), "{lost:?} were acknowledged and are not done");
    assert_eq!(replicas.postgres.count(STARTED_TWICE).await.unwrap(), 0);
    // Nobody waited for a lock of a server that had gone: those last half a minute.
    let longest = "SELECT max(e.recorded_at - r.submitted_at) / 1000 FROM runs r JOIN events e \
                   ON e.entity_id = r.id AND e.entity = 'run' AND e.is_final";
    let longest = replicas.postgres.count(longest).await.unwrap();
    assert!(longest < 20_000, "a run took {longest} ms");
}

async fn wait_for(submitted: &AtomicUsize, more: usize) {
    let (enough, asked) = (submitted.load(Ordering::Relaxed) + more, Instant::now());
    while submitted.load(Ordering::Relaxed) < enough {
        assert!(asked.elapsed() < PATIENCE, "nothing is submitted any more");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The names that were acknowledged. A refusal is 503 or no answer at all, and somebody else is asked.
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
            match ask(&address, "/api/project/main/runs/apply", &body).await {
                Ok(answer) if answer.status == 200 => break,
                Ok(answer) => assert_eq!(answer.status, 503, "{answer:?}"),
                // Refused, or cut off in the middle: to submit the same again is harmless.
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

/// A server without pipelines takes the request; the other one, which has nothing to do, must hear of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_what_one_postgres_replica_is_told_wakes_another_at_once() {
    let plan = Plan { name: "hints", servers: 1, hosts: 1, blocks: 1, runtime: Runtime::Hollow };
    let replicas = Replicas::start(plan).await.unwrap();
    let given = Given {
        port: Some(0),
        data_dir: Some(replicas.home().join("front")),
        database_url: Some(replicas.postgres.url()),
        key_file: Some(replicas.key_file()),
        log_store: Some(format!("dir:{}", replicas.home().join("logs").display())),
        no_local: Some(true),
        ..Given::default()
    };
    let settings = Settings { pipelines: false, ..Settings::new(given, None).unwrap() };
    let front = windlass_server::Server::start(settings).await.unwrap();
    let address = front.address().to_string();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let front = tokio::spawn(front.run(async { drop(stopped.await) }));

    let mut taken = Vec::new();
    for round in 0..5 {
        // By now the other looks every few seconds only.
        tokio::time::sleep(Duration::from_secs(4)).await;
        let name = format!("run-{round}");
        let asked = Instant::now();
        let body = submission(&lasting(&name, 600_000));
        ask(&address, "/api/project/main/runs/apply", &body).await.unwrap().ok().unwrap();
        replicas.reaches(0, &name, &["running"]).await.unwrap();
        taken.push(asked.elapsed());
        let asked = Instant::now();
        let body = json!({"runs_names": [name], "abort": false});
        ask(&address, "/api/project/main/runs/stop", &body).await.unwrap().ok().unwrap();
        replicas.reaches(0, &name, &["terminated"]).await.unwrap();
        taken.push(asked.elapsed());
    }
    taken.sort();
    let middle = taken[taken.len() / 2];
    assert!(middle < Duration::from_millis(900), "looks alone take seconds: {taken:?}");
    stop.send(()).unwrap();
    front.await.unwrap();
}
