//! Several servers on one Postgres, and connections that break at the worst moment.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};
use windlass_engine::{LeaseKey, LeaseStore, Queue};
use windlass_server::{
    db::{Db, DbError, Unit},
    params,
};
use windlass_testkit::temp_dir;
use windlass_testkit::wait::{eventually_async, is_listening};

use crate::{
    db::on_both,
    db_fixtures::{create_owner, insert_run},
    postgres::TestDb,
};

on_both! {
    a_changed_migration_is_refused
    a_database_of_a_newer_version_is_refused
}

const QUEUE: Queue = Queue { pipeline: "runs", table: "runs", statuses: &["submitted"] };

/// Migrates again, as a restarted server does, after the journal was tampered with.
async fn migrate_error(db: &Db, tamper: &'static str) -> DbError {
    db.write(Unit::new().exec(tamper, vec![])).await.unwrap();
    db.migrate_again().await.unwrap_err()
}

async fn a_changed_migration_is_refused(db: &Db) {
    db.migrate_again().await.expect("nothing is left to do");
    let error = migrate_error(db, "UPDATE migrations SET checksum = 'other' WHERE number = 1").await;
    let message = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(message.contains("`0001_core.sql` was changed"), "{message}");
}

async fn a_database_of_a_newer_version_is_refused(db: &Db) {
    let newer =
        "INSERT INTO migrations (number, name, checksum, applied_at) VALUES (9999, '9999_x.sql', 'x', 0)";
    let error = migrate_error(db, newer).await;
    let message = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(message.contains("newer version") && message.contains("9999"), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_replicas_that_start_at_once_migrate_once() {
    let (first, others) = TestDb::open_by_many(4).await;
    let made = create_owner(&first.db).await;
    for replica in &others {
        insert_run(replica, &made, &format!("run-{}", replica.new_id().unwrap())).await;
    }
    let rows = first.db.query("SELECT count(*), max(number) FROM migrations", vec![]).await.unwrap();
    assert_eq!(rows[0].int(0).unwrap(), rows[0].int(1).unwrap());
    assert_eq!(first.db.query("SELECT id FROM runs", vec![]).await.unwrap().len(), 3);
}

/// Changing the stored clock offset has the same effect for all sessions as setting the database server's clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_l5_setting_the_clock_changes_neither_time_nor_locks() {
    let test = TestDb::open().await;
    let (other, ttl) = (test.replica().await, Duration::from_secs(30));
    let made = create_owner(&test.db).await;
    insert_run(&test.db, &made, "one").await;
    insert_run(&test.db, &made, "two").await;
    assert_eq!(test.db.claim(&QUEUE, 1, ttl).await.unwrap().leases.len(), 1);
    let second = other.claim(&QUEUE, 1, ttl).await.unwrap().leases.remove(0).key();
    other.finish(&QUEUE, &[(second, Some(Duration::from_secs(300)))]).await.unwrap();
    let before = test.db.now().await.unwrap();
    for seconds in [600_i64, -1200, 600] {
        let sql = "UPDATE clock SET version = version + 1, offset_us = offset_us + $1, since_us = wall_us()";
        test.db.write(Unit::new().exec(sql, params![seconds * 1_000_000])).await.unwrap();
        for db in [&test.db, &other] {
            let claim = db.claim(&QUEUE, 9, ttl).await.unwrap();
            assert!(claim.leases.is_empty(), "one is held and one is not due: {claim:?}");
            let passed = db.now().await.unwrap().0 - before.0;
            assert!((0..60_000_000).contains(&passed), "{passed} us after {seconds} s");
        }
    }
}

/// Many replicas detect a jump at the same time, each before the others have corrected it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_l5_a_clock_jump_is_corrected_once_even_if_many_replicas_detect_it() {
    let test = TestDb::open().await;
    let (other, ttl) = (test.replica().await, Duration::from_secs(30));
    let made = create_owner(&test.db).await;
    insert_run(&test.db, &made, "one").await;
    assert_eq!(other.claim(&QUEUE, 1, ttl).await.unwrap().leases.len(), 1);
    assert!(test.db.claim(&QUEUE, 1, ttl).await.unwrap().leases.is_empty());
    let before = test.db.now().await.unwrap();
    for (seconds, version) in [(600_i64, 2), (-600, 3), (0, 4)] {
        let set = format!(
            "DO $do$ BEGIN CREATE OR REPLACE FUNCTION wall_us() RETURNS BIGINT LANGUAGE sql STABLE AS \
             $$ SELECT (extract(epoch FROM now()) * 1000000)::BIGINT + {seconds} * 1000000 $$; END $do$"
        );
        test.db.write(Unit::new().exec(set, vec![])).await.unwrap();
        let passed = test.db.now().await.unwrap().0 - before.0;
        assert!((0..60_000_000).contains(&passed), "{passed} us before anybody looked");
        let dbs = [&test.db, &other].repeat(12);
        let claims = dbs.iter().map(|db| db.claim(&QUEUE, 9, ttl));
        for claim in futures_util::future::join_all(claims).await {
            assert!(claim.unwrap().leases.is_empty(), "it is held");
        }
        let rows = test.db.query("SELECT version, now_us() FROM clock", vec![]).await.unwrap();
        assert_eq!(rows[0].int(0).unwrap(), version, "set to {seconds} s: taken out once");
        let passed = rows[0].int(1).unwrap() - before.0;
        assert!((0..60_000_000).contains(&passed), "{passed} us after {seconds} s");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_l5_times_written_by_a_wrong_clock_are_corrected() {
    let test = TestDb::open().await;
    let made = create_owner(&test.db).await;
    for name in ["held", "free"] {
        insert_run(&test.db, &made, name).await;
    }
    let ttl = Duration::from_secs(30);
    let held = test.db.claim(&QUEUE, 1, ttl).await.unwrap().leases.remove(0);
    let wrong = "UPDATE runs SET last_processed_at = now_us() + 600000000, due_at = now_us() + 600000000, \
                 lock_expires_at = lock_expires_at + 600000000";
    test.db.write(Unit::new().exec(wrong, vec![])).await.unwrap();
    // The first claim of a server searches for such rows.
    let claimed = test.replica().await.claim(&QUEUE, 9, ttl).await.unwrap().leases;
    assert_eq!(claimed.len(), 1, "the free one is due, the other one is held");
    assert_ne!(claimed[0].id, held.id);
    let sql = "SELECT lock_expires_at - now_us() FROM runs WHERE id = $1";
    let left = test.db.query(sql, params![held.id]).await.unwrap()[0].int(0).unwrap();
    assert!((1..=60_000_000).contains(&left), "it ends as a lock does: {left} us");
    assert_eq!(test.db.extend(&QUEUE, &[held.key()], ttl).await.unwrap(), [held.id], "nobody took it");
}

fn set_deadlock_timeout_sql(time: &str) -> String {
    format!(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''{time}''', \
         current_database()); END $$"
    )
}

/// Postgres detects a deadlock after a second of wall-clock time, and that clock may be set. The server does not rely
/// on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_f9_an_undetected_deadlock_times_out_and_is_retried() {
    let test = TestDb::open().await;
    let made = create_owner(&test.db).await;
    insert_run(&test.db, &made, "one").await;
    insert_run(&test.db, &made, "two").await;
    test.db.write(Unit::new().exec(set_deadlock_timeout_sql("10min"), vec![])).await.unwrap();
    let (first, second) = (test.replica().await, test.replica().await);
    let unit = |one: &'static str, two: &'static str| {
        let sql = "UPDATE runs SET retry_count = retry_count + 1 WHERE name = $1";
        Unit::new()
            .exec(sql, params![one])
            .query("SELECT 1 FROM (SELECT pg_sleep(0.5)) AS slept", vec![])
            .exec(sql, params![two])
    };
    let both = async { tokio::join!(first.write(unit("one", "two")), second.write(unit("two", "one"))) };
    let (one, two) = tokio::time::timeout(Duration::from_secs(60), both).await.expect("they wait for ever");
    assert!(one.unwrap().is_done() && two.unwrap().is_done());
    let rows = test.db.query("SELECT retry_count FROM runs", vec![]).await.unwrap();
    assert!(rows.iter().all(|row| row.int(0).unwrap() == 2), "each once: {rows:?}");
}

/// Applies, heartbeats and claims over the same rows, from two replicas, in all orders.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_replicas_never_deadlock_over_the_same_rows() {
    let test = TestDb::open().await;
    // Postgres must detect the deadlock before either side times out.
    test.db.write(Unit::new().exec(set_deadlock_timeout_sql("10ms"), vec![])).await.unwrap();
    let (first, other) = (test.replica().await, test.replica().await);
    let made = create_owner(&test.db).await;
    for number in 0..40 {
        insert_run(&test.db, &made, &format!("run-{number}")).await;
    }
    let ttl = Duration::from_secs(60);
    let held: Vec<LeaseKey> =
        test.db.claim(&QUEUE, 40, ttl).await.unwrap().leases.iter().map(|lease| lease.key()).collect();
    let mut tasks = Vec::new();
    for round in 0..6_usize {
        for db in [&first, &other] {
            let mut mine = held.clone();
            mine.rotate_left(round * 7);
            if round % 2 == 0 {
                mine.reverse();
            }
            let (db, beats) = (db.clone(), mine.clone());
            let heart = db.clone();
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    assert_eq!(heart.extend(&QUEUE, &beats, ttl).await.unwrap().len(), 40);
                }
            }));
            tasks.push(tokio::spawn(async move {
                let writes = mine.iter().map(|held| {
                    let unit = Unit::guarded("runs", *held, vec![("priority", 1_i64.into())]).exec(
                        "UPDATE runs SET retry_count = retry_count + 1 WHERE id = $1 AND lock_token = $2",
                        params![held.id, held.token],
                    );
                    db.write(unit)
                });
                for written in futures_util::future::join_all(writes).await {
                    assert!(written.unwrap().is_done());
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    let counted = test.db.query("SELECT DISTINCT retry_count FROM runs", vec![]).await.unwrap();
    assert_eq!((counted.len(), counted[0].int(0).unwrap()), (1, 12), "each write once");
    let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(test.db.query(sql, vec![]).await.unwrap()[0].int(0).unwrap(), 0);
    first.close().await;
    other.close().await;
}

const NO_FAULT: u8 = 0;
const LOSE_THE_COMMIT: u8 = 1;
const LOSE_THE_ANSWER: u8 = 2;

/// A socket in front of Postgres's that breaks the connection around the next COMMIT.
async fn run_fault_proxy(real: PathBuf, dir: &Path, mood: Arc<AtomicU8>) {
    let listener = UnixListener::bind(dir.join(".s.PGSQL.5432")).unwrap();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let server = UnixStream::connect(&real).await.unwrap();
        tokio::spawn(forward(client, server, Arc::clone(&mood)));
    }
}

async fn forward(mut client: UnixStream, mut server: UnixStream, mood: Arc<AtomicU8>) {
    let (mut requested, mut answered) = (vec![0; 65536], vec![0; 65536]);
    loop {
        tokio::select! {
            read = client.read(&mut requested) => {
                let Ok(read @ 1..) = read else { return };
                let is_commit = requested[..read].windows(7).any(|text| text == b"COMMIT\0");
                match if is_commit { mood.swap(NO_FAULT, Ordering::SeqCst) } else { NO_FAULT } {
                    LOSE_THE_COMMIT => return,
                    LOSE_THE_ANSWER => {
                        server.write_all(&requested[..read]).await.unwrap();
                        // A response arrived, so the commit is done; the client does not receive it.
                        let _ = server.read(&mut answered).await;
                        return;
                    }
                    _ => server.write_all(&requested[..read]).await.unwrap(),
                }
            }
            read = server.read(&mut answered) => {
                let Ok(read @ 1..) = read else { return };
                if client.write_all(&answered[..read]).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losing_postgres_during_a_commit_leaves_the_outcome_unknown() {
    let test = TestDb::open().await;
    let made = create_owner(&test.db).await;
    let dir = temp_dir("db").unwrap();
    let mood = Arc::new(AtomicU8::new(NO_FAULT));
    let real = test.sockets().join(".s.PGSQL.5432");
    let (at, moods) = (dir.path().to_owned(), Arc::clone(&mood));
    let front = tokio::spawn(async move { run_fault_proxy(real, &at, moods).await });
    let socket = dir.path().join(".s.PGSQL.5432");
    eventually_async("the proxy listens", async || is_listening(&socket).then_some(())).await;
    let db = Db::open(&test.url_through(dir.path())).await.unwrap();
    for (next, kept) in [(LOSE_THE_ANSWER, 1), (LOSE_THE_COMMIT, 1), (LOSE_THE_ANSWER, 2)] {
        mood.store(next, Ordering::SeqCst);
        let id = db.new_id().unwrap();
        let unit =
            Unit::new().insert("runs", crate::db_fixtures::run_values(&made, id, &format!("run-{id}")));
        let error = db.write(unit).await.unwrap_err();
        assert!(matches!(error, DbError::Unknown { .. }), "{error:?}");
        // A direct query: what was committed is stored, and nothing was written twice.
        let rows = test.db.query("SELECT id FROM runs", vec![]).await.unwrap();
        assert_eq!(rows.len(), kept);
    }
    insert_run(&db, &made, "after").await;
    db.close().await;
    front.abort();
}
