//! Tables `runs` and `jobs`.

use std::collections::BTreeSet;

use windlass_engine::{LeaseKey, LeaseStore, Queue};
use windlass_model::{
    event::{Actor, Event, EventCause},
    id::{RunId, SubmissionId, UserId},
    job, run,
    time::Timestamp,
};
use windlass_server::{
    db::{
        Change, Db, Dialect, Page, Unit, Val, WriteOutcome, events, jobs,
        run_rows::{self, PageStart, RunFilter, RunPlace},
        runs,
    },
    params,
};

use crate::{
    db::on_both,
    db_fixtures::{TestOwner, create_owner, insert_project},
};

on_both! {
    a_run_is_written_with_its_jobs_and_events
    a5_paging_through_run_rows_neither_skips_nor_repeats
    runs_are_filtered_by_project_user_and_activity
    listing_many_runs_uses_an_index
    a_stop_request_is_stored_despite_a_lock_and_keeps_its_first_time
    only_a_finished_run_releases_its_name
    a1_an_idempotency_key_makes_one_run
    r6_a_job_has_one_active_submission_and_unique_submission_numbers
    the_newest_submissions_of_each_job_are_found
}

fn new_run(made: &TestOwner, id: RunId, name: &str) -> runs::NewRun {
    runs::NewRun {
        id,
        project_id: made.project,
        user_id: made.user,
        repo_id: Some("none".into()),
        name: name.into(),
        spec: r#"{"run_name":"x"}"#.into(),
        service: None,
        gateway_id: None,
        status: run::Status::Submitted,
        desired_replicas: 1,
        priority: 50,
        next_triggered_at: None,
        idempotency_key: None,
        idempotency_hash: None,
        managed_job_id: None,
        places: None,
    }
}

fn new_job(
    made: &TestOwner,
    id: SubmissionId,
    run: RunId,
    replica: i64,
    number: i64,
    submission: i64,
) -> jobs::NewJob {
    jobs::NewJob {
        id,
        run_id: run,
        project_id: made.project,
        job_name: format!("job-{number}-{replica}"),
        replica_num: replica,
        job_num: number,
        submission_num: submission,
        deployment_num: 0,
        replica_group: None,
        status: job::Status::Submitted,
        job_spec: "{}".into(),
        secrets_sealed: Some(vec![1, 2]),
        priority: 50,
        preemptible: "never".into(),
        preempted_before: 0,
        queued_at: None,
    }
}

async fn insert_run(db: &Db, made: &TestOwner, name: &str) -> RunId {
    let id = RunId(db.new_id().unwrap());
    db.write(Unit::new().and([runs::insert(new_run(made, id, name))])).await.unwrap().done().unwrap();
    id
}

fn page_of(limit: i64) -> Page {
    Page { limit, ..Page::default() }
}

async fn a_run_is_written_with_its_jobs_and_events(db: &Db) {
    let made = create_owner(db).await;
    let (id, job) = (RunId(db.new_id().unwrap()), SubmissionId(db.new_id().unwrap()));
    let because = EventCause {
        actor: Actor::User(made.user),
        reason: "submitted".into(),
        message: "Run submitted".into(),
    };
    let event = Event::created::<run::RunLifecycle>(id.0, run::Status::Submitted, because);
    let place = events::EventContext {
        project: Some(made.project),
        user: Some(made.user),
        lock_token: None,
        targets: &[],
    };
    let unit = Unit::new()
        .and([runs::insert(new_run(&made, id, "train")), jobs::insert(new_job(&made, job, id, 0, 0, 0))])
        .and(events::append(db, &event, &place).unwrap());
    let (now, _) = db.write(unit).await.unwrap().done().unwrap();

    let found = runs::find_by_name(db, made.project, "train").await.unwrap().unwrap();
    assert_eq!(found, runs::find(db, id).await.unwrap().unwrap());
    assert_eq!((found.project_name.as_str(), found.user_name.as_str()), ("main", "owner"));
    assert_eq!((found.run.status, found.run.submitted_at), (run::Status::Submitted, Timestamp(now)));
    let jobs = jobs::list_by_runs(db, &[id], None).await.unwrap();
    assert_eq!(jobs[0], jobs::find(db, job).await.unwrap().unwrap());
    assert_eq!((jobs[0].status, jobs[0].submitted_at), (job::Status::Submitted, Timestamp(now)));
    assert_eq!(jobs::secrets(db, job).await.unwrap().unwrap(), [1, 2]);
    let recorded =
        db.query("SELECT recorded_at FROM events WHERE entity_id = $1", params![id]).await.unwrap();
    assert_eq!(recorded[0].int(0).unwrap(), now);
    assert!(runs::find_by_name(db, made.project, "other").await.unwrap().is_none());
    assert_eq!(runs::count_active(db, made.project).await.unwrap(), 1);
}

/// Thirty runs with five different times, so that most ties are broken by id; new ones are added in between.
async fn a5_paging_through_run_rows_neither_skips_nor_repeats(db: &Db) {
    let made = create_owner(db).await;
    let mut expected = BTreeSet::new();
    for number in 0..30_i64 {
        let id = insert_run(db, &made, &format!("run-{number}")).await;
        let sql = "UPDATE runs SET submitted_at = $2 WHERE id = $1";
        db.write(Unit::new().exec(sql, params![id, 1000 + number % 5])).await.unwrap();
        expected.insert(id);
    }
    for ascending in [false, true] {
        let mut query = runs::Query { projects: Some(vec![made.project]), ..runs::Query::default() };
        query.page = Page { ascending, ..page_of(7) };
        let mut seen = Vec::new();
        loop {
            let found = runs::list(db, &query).await.unwrap();
            let Some(last) = found.last() else { break };
            (query.page.time, query.page.id) = (Some(last.submitted_at), Some(last.id.0));
            seen.extend(found.iter().map(|line| (line.submitted_at, line.id)));
            if !ascending {
                insert_run(db, &made, &format!("late-{}", seen.len())).await;
            }
        }
        let old: Vec<_> = seen.iter().filter(|(at, _)| at.0 < 2000).collect();
        assert_eq!(old.iter().map(|(_, id)| *id).collect::<BTreeSet<_>>(), expected);
        assert_eq!(old.len(), 30);
        let order = |(at, id): &&(Timestamp, RunId)| (if ascending { at.0 } else { -at.0 }, *id);
        assert!(old.is_sorted_by_key(order), "by time, then by id");
    }
}

async fn runs_are_filtered_by_project_user_and_activity(db: &Db) {
    let made = create_owner(db).await;
    let other = TestOwner { project: insert_project(db, made.user, "other").await, ..made };
    let (a, b) = (insert_run(db, &made, "a").await, insert_run(db, &made, "b").await);
    let c = insert_run(db, &other, "c").await;
    db.write(Unit::new().exec("UPDATE runs SET finished = TRUE WHERE id = $1", params![b])).await.unwrap();
    let list = async |query: runs::Query| {
        let query = runs::Query { page: page_of(100), ..query };
        let found = runs::list(db, &query).await.unwrap();
        found.into_iter().map(|line| line.id).collect::<BTreeSet<_>>()
    };
    let all = runs::Query::default;
    assert_eq!(list(all()).await, BTreeSet::from([a, b, c]));
    assert_eq!(list(runs::Query { only_active: true, ..all() }).await, BTreeSet::from([a, c]));
    let of = |projects: &[_]| runs::Query { projects: Some(projects.to_vec()), ..all() };
    assert_eq!(list(of(&[made.project])).await, BTreeSet::from([a, b]));
    assert_eq!(list(of(&[made.project, other.project])).await, BTreeSet::from([a, b, c]));
    assert_eq!(list(of(&[])).await, BTreeSet::new());
    let nobody = UserId(db.new_id().unwrap());
    assert_eq!(list(runs::Query { user: Some(nobody), ..all() }).await, BTreeSet::new());
    assert_eq!(list(runs::Query { user: Some(made.user), ..all() }).await.len(), 3);
    assert_eq!(list(runs::Query { repo_id: Some("none".into()), ..all() }).await.len(), 3);
}

async fn listing_many_runs_uses_an_index(db: &Db) {
    let made = create_owner(db).await;
    let fill = match db.dialect() {
        Dialect::Sqlite => "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 20000)",
        Dialect::Postgres => "WITH n AS (SELECT generate_series(1, 20000) AS n)",
    };
    let sql = format!(
        "{fill} INSERT INTO runs (id, project_id, user_id, name, spec, status, submitted_at, last_processed_at, finished) \
         SELECT new_uuid(), $1, $2, 'run-' || n, '{{}}', 'done', n, n, n % 200 <> 0 FROM n"
    );
    db.write(Unit::new().exec(sql, params![made.project, made.user]).exec("ANALYZE", vec![])).await.unwrap();
    let one =
        runs::Query { projects: Some(vec![made.project]), page: page_of(100), ..runs::Query::default() };
    let later = Page { time: Some(Timestamp(9000)), id: Some(made.user.0), ..page_of(100) };
    for (query, index) in [
        (one.clone(), "runs_list"),
        (runs::Query { only_active: true, ..one.clone() }, "runs_list_active"),
        (runs::Query { page: later, ..one.clone() }, "runs_list"),
        (runs::Query { projects: None, ..one }, "runs_list"),
    ] {
        let plan = runs::explain_list(db, &query).await.unwrap();
        assert!(plan.contains(index), "want {index} for {query:?}:\n{plan}");
        assert!(!plan.contains("Seq Scan on runs") && !plan.contains("SCAN r\n"), "{plan}");
        assert_eq!(runs::list(db, &query).await.unwrap().len(), 100);
    }
    let filter = RunFilter { projects: Some(vec![made.project]), ..RunFilter::default() };
    let place = RunPlace { at: Timestamp(9000), id: RunId(made.user.0) };
    for start in [PageStart::First, PageStart::After(place), PageStart::Before(place)] {
        let plan = run_rows::explain_by_time(db, &filter, start).await.unwrap();
        assert!(plan.contains("runs_list"), "{start:?}:\n{plan}");
        assert!(!plan.contains("Sort") && !plan.contains("TEMP B-TREE"), "{start:?}:\n{plan}");
    }
}

async fn a_stop_request_is_stored_despite_a_lock_and_keeps_its_first_time(db: &Db) {
    let made = create_owner(db).await;
    let id = insert_run(db, &made, "train").await;
    let queue = Queue { pipeline: "runs", table: "runs", statuses: &["submitted"] };
    let ttl = std::time::Duration::from_secs(60);
    let early = db.claim(&queue, 1, ttl).await.unwrap();
    assert!(early.leases.is_empty(), "nothing is to be seen before a job of it moves");
    db.mark_due("runs", &[id.0]).await.unwrap();
    let lease = db.claim(&queue, 1, ttl).await.unwrap().leases.remove(0);
    let request = |abort| Unit::new().and([runs::request_stop(id, abort, made.user)]);
    let (first, _) = db.write(request(false)).await.unwrap().done().unwrap();
    db.write(request(true)).await.unwrap().done().unwrap();
    let run = runs::find(db, id).await.unwrap().unwrap().run;
    assert_eq!((run.stop_asked_at, run.abort_asked), (Some(Timestamp(first)), true));
    let unit = Unit::apply("runs", lease.key(), None, vec![("finished", true.into())]);
    assert!(db.write(unit).await.unwrap().is_done(), "the holder still holds it");
    assert_eq!(db.write(request(false)).await.unwrap(), WriteOutcome::Stale { at: Some(0) });
}

async fn only_a_finished_run_releases_its_name(db: &Db) {
    let made = create_owner(db).await;
    let old = insert_run(db, &made, "train").await;
    let new = RunId(db.new_id().unwrap());
    let again = || Unit::new().and([runs::delete(old), runs::insert(new_run(&made, new, "train"))]);
    assert_eq!(db.write(again()).await.unwrap(), WriteOutcome::Stale { at: Some(0) });
    db.write(Unit::new().exec("UPDATE runs SET finished = TRUE WHERE id = $1", params![old])).await.unwrap();
    assert!(db.write(again()).await.unwrap().is_done());
    assert_eq!(runs::find_by_name(db, made.project, "train").await.unwrap().unwrap().run.id, new);
    assert!(runs::find(db, old).await.unwrap().unwrap().run.deleted, "by id it is still found");
}

async fn a1_an_idempotency_key_makes_one_run(db: &Db) {
    let made = create_owner(db).await;
    let with_key = |id, name: &str| {
        let keyed = runs::NewRun {
            idempotency_key: Some("key".into()),
            idempotency_hash: Some("hash".into()),
            ..new_run(&made, id, name)
        };
        Unit::new().and([runs::insert(keyed)])
    };
    let first = RunId(db.new_id().unwrap());
    db.write(with_key(first, "one")).await.unwrap().done().unwrap();
    let again = db.write(with_key(RunId(db.new_id().unwrap()), "two")).await.unwrap_err();
    assert!(again.is_conflict_on("runs_idempotency_key"), "{again:?}");
    let found = runs::find_by_key(db, made.project, made.user, "key").await.unwrap().unwrap();
    assert_eq!((found.run.id, found.run.idempotency_hash.as_deref()), (first, Some("hash")));
    insert_run(db, &made, "three").await;
    insert_run(db, &made, "four").await;
}

async fn r6_a_job_has_one_active_submission_and_unique_submission_numbers(db: &Db) {
    let made = create_owner(db).await;
    let run = insert_run(db, &made, "train").await;
    let submit = async |number| {
        let id = SubmissionId(db.new_id().unwrap());
        let written = db.write(Unit::new().and([jobs::insert(new_job(&made, id, run, 0, 0, number))])).await;
        written.map(|_| id)
    };
    let first = submit(0).await.unwrap();
    assert!(submit(1).await.unwrap_err().is_conflict_on("jobs_active_key"));
    let end = "UPDATE jobs SET finished = TRUE, status = 'failed' WHERE id = $1";
    db.write(Unit::new().exec(end, params![first])).await.unwrap();
    assert!(submit(0).await.unwrap_err().is_conflict_on("jobs_submission_key"));
    submit(1).await.unwrap();
    let clones =
        "SELECT 1 FROM jobs WHERE NOT finished GROUP BY run_id, replica_num, job_num HAVING count(*) > 1";
    assert!(db.query(clones, vec![]).await.unwrap().is_empty());
}

async fn the_newest_submissions_of_each_job_are_found(db: &Db) {
    let made = create_owner(db).await;
    let (one, two) = (insert_run(db, &made, "one").await, insert_run(db, &made, "two").await);
    let mut unit = Unit::new();
    for (run, submissions) in [(one, 4), (two, 2)] {
        for job in 0..2 {
            for submission in 0..submissions {
                let id = SubmissionId(db.new_id().unwrap());
                let Change::Insert { table, mut values } =
                    jobs::insert(new_job(&made, id, run, 0, job, submission))
                else {
                    panic!("not an insert")
                };
                values.push(("finished", Val::Bool(true)));
                unit = unit.insert(table, values);
            }
        }
    }
    db.write(unit).await.unwrap().done().unwrap();
    let numbers = async |runs: &[RunId], limit| {
        let found = jobs::list_by_runs(db, runs, limit).await.unwrap();
        found.into_iter().map(|job| (job.job_num, job.submission_num)).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&[one], Some(1)).await, [(0, 3), (1, 3)]);
    assert_eq!(numbers(&[one], Some(2)).await, [(0, 2), (0, 3), (1, 2), (1, 3)]);
    assert_eq!(numbers(&[two], None).await, [(0, 0), (0, 1), (1, 0), (1, 1)]);
    assert_eq!(numbers(&[one, two], Some(3)).await.len(), 10);
    assert!(numbers(&[], None).await.is_empty() && numbers(&[one], Some(0)).await.is_empty());
    let held = LeaseKey { id: one.0, token: two.0 };
    assert!(!db.write(Unit::guarded("jobs", held, vec![])).await.unwrap().is_done());
}
