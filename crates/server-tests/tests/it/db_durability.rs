//! Durability: a killed server, a killed database, a second server, a lost connection.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use uuid::Uuid;
use windlass_engine::{LeaseStore, Queue};
use windlass_server::{
    db::{DatabaseUrl, Db, DbError, FaultHook, HookFuture, Unit, Val, WriteOutcome},
    params,
};
use windlass_testkit::temp_dir;

use crate::{
    db::DbFixture,
    db_fixtures::{TestOwner, create_owner, run_values},
    postgres::{Cluster, TestDb},
};

const CHILD_DATABASE_ENV: &str = "WINDLASS_TEST_CHILD_DATABASE";

async fn submit(db: &Db, made: &TestOwner) -> Result<Uuid, DbError> {
    let id = db.new_id()?;
    let unit = Unit::new().insert("runs", run_values(made, id, &format!("run-{id}")));
    db.write(unit).await?.done()?;
    Ok(id)
}

async fn stored_runs(db: &Db) -> BTreeSet<Uuid> {
    let rows = db.query("SELECT id FROM runs", vec![]).await.unwrap();
    rows.iter().map(|row| row.uuid(0).unwrap()).collect()
}

/// Not a test by itself: the process that `r1_…_killed_…` starts and kills. Without a database to write to it does
/// nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_submits_until_it_is_killed() {
    let Ok(path) = std::env::var(CHILD_DATABASE_ENV) else { return };
    let db = Db::open(&DatabaseUrl::Sqlite(PathBuf::from(path))).await.unwrap();
    let made = create_owner(&db).await;
    loop {
        let submits = (0..16).map(|_| submit(&db, &made));
        for id in futures_util::future::join_all(submits).await {
            println!("acknowledged {}", id.unwrap());
        }
    }
}

/// Starts the child, lets it acknowledge `enough` writes, kills it without warning, and returns the acknowledged ids.
fn acknowledged_before_the_kill(database: &Path, enough: usize) -> BTreeSet<Uuid> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "db_durability::a_child_that_submits_until_it_is_killed", "--nocapture"])
        .env(CHILD_DATABASE_ENV, database)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut message = BTreeSet::new();
    let mut is_killed = false;
    // After the kill the pipe still holds the lines written before it.
    while let Some(Ok(line)) = lines.next() {
        if let Some(id) = line.strip_prefix("acknowledged ").and_then(|id| id.parse().ok()) {
            message.insert(id);
        }
        if message.len() >= enough && !is_killed {
            child.kill().unwrap();
            is_killed = true;
        }
    }
    child.wait().unwrap();
    message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r1_writes_that_a_killed_server_acknowledged_are_stored() {
    let dir = temp_dir("db").unwrap();
    let path = dir.path().join("windlass.db");
    let message = acknowledged_before_the_kill(&path, 300);
    assert!(message.len() >= 300, "the child said only {}", message.len());
    let db = Db::open(&DatabaseUrl::Sqlite(path)).await.expect("the dead server's lock is gone with it");
    let kept = stored_runs(&db).await;
    assert!(message.is_subset(&kept), "lost: {:?}", message.difference(&kept).collect::<Vec<_>>());
    db.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r1_acknowledged_writes_survive_a_kill_of_postgres() {
    let cluster = Cluster::own().await;
    cluster.admin("CREATE DATABASE windlass").await;
    let db = Db::open(&cluster.url("windlass")).await.unwrap();
    let made = Arc::new(create_owner(&db).await);
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..8)
        .map(|_| {
            let (db, made, stop) = (db.clone(), Arc::clone(&made), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut message = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    match submit(&db, &made).await {
                        Ok(id) => message.push(id),
                        Err(DbError::Unknown { .. } | DbError::Unavailable { .. }) => {
                            tokio::task::yield_now().await
                        }
                        Err(error) => panic!("neither unknown nor unavailable: {error:?}"),
                    }
                }
                message
            })
        })
        .collect();
    while db.query("SELECT count(*) FROM runs", vec![]).await.unwrap()[0].int(0).unwrap() < 300 {
        tokio::task::yield_now().await;
    }
    cluster.kill();
    stop.store(true, Ordering::Relaxed);
    let mut message = BTreeSet::new();
    for writer in writers {
        message.extend(writer.await.unwrap());
    }
    cluster.start_again().await;
    // The same handle, not reopened.
    let kept = wait_for_stored_runs(&db).await;
    assert!(message.len() >= 200, "only {} were acknowledged", message.len());
    assert!(message.is_subset(&kept), "lost: {:?}", message.difference(&kept).collect::<Vec<_>>());
    // Writes have a separate connection, which reconnects by itself within the same time.
    for _ in 0..200 {
        match submit(&db, &made).await {
            Ok(_) => return,
            Err(DbError::Unavailable { .. }) => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(error) => panic!("not unavailable: {error:?}"),
        }
    }
    panic!("writes do not go on");
}

/// Waits until the handle has reconnected.
async fn wait_for_stored_runs(db: &Db) -> BTreeSet<Uuid> {
    for _ in 0..200 {
        if db.query("SELECT 1", vec![]).await.is_ok() {
            return stored_runs(db).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the database was not reached again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_database_connection_is_reopened_without_an_error() {
    let test = TestDb::open().await;
    let made = create_owner(&test.db).await;
    submit(&test.db, &made).await.unwrap();
    for _ in 0..3 {
        test.cut_connections().await;
        submit(&test.db, &made).await.expect("nothing had been sent yet");
        for _ in 0..8 {
            test.db.query("SELECT 1", vec![]).await.expect("a read is repeated");
        }
    }
    assert_eq!(stored_runs(&test.db).await.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_resume_without_a_restart_when_postgres_is_writable_again() {
    let test = TestDb::open().await;
    let made = create_owner(&test.db).await;
    submit(&test.db, &made).await.unwrap();
    test.set_writable(false).await;
    test.cut_connections().await;
    let queue = Queue { pipeline: "runs", table: "runs", statuses: &["submitted"] };
    for _ in 0..3 {
        let error = submit(&test.db, &made).await.unwrap_err();
        assert!(matches!(error, DbError::ReadOnly { .. }), "{error:?}");
        assert!(test.db.claim(&queue, 9, Duration::from_secs(9)).await.is_err());
        assert_eq!(stored_runs(&test.db).await.len(), 1, "reads work");
    }
    // The sessions that were opened meanwhile are not ended.
    test.set_writable(true).await;
    submit(&test.db, &made).await.expect("a session from before would refuse");
    assert_eq!(test.db.claim(&queue, 9, Duration::from_secs(9)).await.unwrap().leases.len(), 2);
}

#[tokio::test]
async fn l4_rows_of_a_dead_server_are_free_when_the_next_opens_the_file() {
    let dir = temp_dir("db").unwrap();
    let url = DatabaseUrl::Sqlite(dir.path().join("windlass.db"));
    let db = Db::open(&url).await.unwrap();
    let made = create_owner(&db).await;
    let id = submit(&db, &made).await.unwrap();
    let queue = Queue { pipeline: "runs", table: "runs", statuses: &["submitted"] };
    let first = db.claim(&queue, 9, Duration::from_secs(600)).await.unwrap().leases;
    // To the row, this is a kill of its holder: nothing is released.
    db.close().await;
    let db = Db::open(&url).await.unwrap();
    let second = db.claim(&queue, 9, Duration::from_secs(600)).await.unwrap().leases;
    assert_eq!((second.len(), second[0].id), (1, id));
    assert_eq!(second[0].epoch, first[0].epoch + 1);
    db.close().await;
}

#[tokio::test]
async fn l8_a_second_server_on_the_file_is_refused_with_the_holders_pid() {
    let dir = temp_dir("db").unwrap();
    let url = DatabaseUrl::Sqlite(dir.path().join("windlass.db"));
    let first = Db::open(&url).await.unwrap();
    let refused = Db::open(&url).await.unwrap_err();
    let message = refused.to_string();
    assert!(
        message.contains("windlass.db") && message.contains(&std::process::id().to_string()),
        "{message}"
    );
    first.close().await;
    let next = Db::open(&url).await.expect("a closed database is free");
    next.close().await;
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused() {
    let dir = temp_dir("db").unwrap();
    let path = dir.path().join("windlass.db");
    std::fs::write(&path, "not a database at all, and long enough to be read as a header of one").unwrap();
    let error = Db::open(&DatabaseUrl::Sqlite(path)).await.unwrap_err();
    assert!(matches!(error, DbError::Corrupt { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_postgres_is_reported_as_unavailable() {
    let url = "postgres:///windlass?user=windlass&host=/nowhere".parse().unwrap();
    let error = Db::open(&url).await.unwrap_err();
    assert!(matches!(error, DbError::Unavailable { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hints_reach_the_other_replica() {
    let test = TestDb::open().await;
    let other = test.replica().await;
    let mut received = other.listen();
    // Listening begins in the background: the hint is repeated until it is received.
    let hint = async {
        loop {
            test.db.notify(&["jobs_running"]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let hint = tokio::select! { hint = received.recv() => hint.unwrap(), () = hint => unreachable!() };
    assert_eq!(hint, "jobs_running");
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l12_two_replicas_never_claim_the_same_row() {
    let test = TestDb::open().await;
    let other = test.replica().await;
    let made = create_owner(&test.db).await;
    for _ in 0..60 {
        submit(&test.db, &made).await.unwrap();
    }
    let queue = Queue { pipeline: "runs", table: "runs", statuses: &["submitted"] };
    let mut taken = Vec::new();
    while taken.len() < 60 {
        let ttl = Duration::from_secs(60);
        let (one, two) = tokio::join!(test.db.claim(&queue, 7, ttl), other.claim(&queue, 7, ttl));
        taken.extend(one.unwrap().leases.into_iter().chain(two.unwrap().leases).map(|lease| lease.id));
    }
    assert_eq!(taken.iter().collect::<BTreeSet<_>>().len(), 60, "a row went to both");
    other.close().await;
}

/// Loses the response of the next write, or the write itself.
struct LostWriteFault {
    before: AtomicBool,
    after: AtomicBool,
}

impl FaultHook for LostWriteFault {
    fn before<'a>(&'a self, what: &'static str) -> HookFuture<'a> {
        Box::pin(async move { fail_if(what == "write" && self.before.swap(false, Ordering::Relaxed)) })
    }

    fn after<'a>(&'a self, what: &'static str) -> HookFuture<'a> {
        Box::pin(async move { fail_if(what == "write" && self.after.swap(false, Ordering::Relaxed)) })
    }
}

fn fail_if(has_fired: bool) -> Result<(), DbError> {
    if has_fired { Err(DbError::Stale { at: None }) } else { Ok(()) }
}

#[tokio::test]
async fn an_injected_fault_fails_a_write_before_or_after_the_commit() {
    let db = Db::open_inline(Arc::new(|| 1_700_000_000_000_000), 1).unwrap();
    let made = create_owner(&db).await;
    let fault = Arc::new(LostWriteFault { before: AtomicBool::new(true), after: AtomicBool::new(false) });
    let replica = db.with_fault_hook(Arc::<LostWriteFault>::clone(&fault));
    assert!(submit(&replica, &made).await.is_err());
    assert_eq!(stored_runs(&db).await.len(), 0, "it never arrived");
    fault.after.store(true, Ordering::Relaxed);
    assert!(submit(&replica, &made).await.is_err());
    assert_eq!(stored_runs(&db).await.len(), 1, "it arrived, and nobody was told");
    assert!(submit(&replica, &made).await.is_ok());
}

#[tokio::test]
async fn the_same_seed_gives_the_same_ids_and_tokens() {
    let history = async |seed| {
        let db = Db::open_inline(Arc::new(|| 1_700_000_000_000_000), seed).unwrap();
        let made = create_owner(&db).await;
        let mut ids = vec![submit(&db, &made).await.unwrap()];
        let queue = Queue { pipeline: "runs", table: "runs", statuses: &["submitted"] };
        let claim = db.claim(&queue, 9, Duration::from_secs(1)).await.unwrap();
        ids.extend(claim.leases.iter().map(|lease| lease.token));
        ids
    };
    assert_eq!(history(3).await, history(3).await);
    assert_ne!(history(3).await, history(4).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l8_a_thousand_writes_concurrent_with_readers_meet_no_lock_error() {
    let home = DbFixture::sqlite().await;
    let db = home.db();
    let made = create_owner(db).await;
    let writes = (0..1000).map(|_| submit(db, &made));
    let reads = (0..200).map(|_| db.query("SELECT count(*) FROM runs", vec![]));
    let (written, read) =
        tokio::join!(futures_util::future::join_all(writes), futures_util::future::join_all(reads));
    assert!(written.iter().all(Result::is_ok) && read.iter().all(Result::is_ok));
    db.close().await;
}

#[tokio::test]
async fn time_does_not_go_backwards_when_the_clock_is_set_back() {
    let times = parking_lot::Mutex::new(vec![50_i64, 100, 200, 300]);
    let db = Db::open_inline(Arc::new(move || times.lock().pop().unwrap_or(10)), 1).unwrap();
    let mut last = 0;
    for _ in 0..6 {
        let now = db.query("SELECT now_us()", vec![]).await.unwrap()[0].int(0).unwrap();
        assert!(now >= last, "{now} after {last}");
        last = now;
    }
    let unit = Unit::new().query("SELECT $1 - now_us()", params![Val::Now]);
    let WriteOutcome::Done { now, rows } = db.write(unit).await.unwrap() else { panic!("stale") };
    assert_eq!((now, rows[0][0].int(0).unwrap()), (300, 0));
}
