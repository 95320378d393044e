//! Units: atomic, acknowledged after the commit, many in one transaction.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::future::join_all;
use uuid::Uuid;
use windlass_engine::LeaseKey;
use windlass_server::{
    db::{Db, DbError, Dialect, Unit, Val, Values, WriteOutcome},
    params,
};

use crate::{
    db::on_both,
    db_fixtures::{TestOwner, create_owner, insert_project, insert_run, run_values},
};

on_both! {
    all_statements_of_a_unit_are_committed
    a_unit_that_violates_a_constraint_is_rolled_back
    l1_a_stale_guard_rolls_back_the_whole_unit
    l1_a_lease_token_of_another_row_rejects_the_write
    a_failed_expectation_also_rolls_back_the_guarded_update
    l13_all_times_of_a_unit_are_equal
    unique_violations_name_their_index
    a_foreign_key_violation_is_not_a_conflict
    an_invalid_statement_is_named_in_the_error
    a_wrong_number_of_parameters_is_an_error
    stored_values_are_read_back_unchanged
    a_thousand_concurrent_units_are_all_acknowledged_and_stored
    a_failing_unit_does_not_affect_concurrent_units
    two_writes_under_one_lease_apply_once
    reads_see_acknowledged_writes
    commits_are_on_disk_before_they_are_acknowledged
    every_sql_statement_can_be_prepared
    a_closed_database_refuses_writes
}

fn user_values(id: Uuid, name: &str) -> Values {
    vec![("id", id.into()), ("name", name.into()), ("global_role", "user".into()), ("created_at", Val::Now)]
}

async fn count(db: &Db, table: &'static str) -> i64 {
    db.query(format!("SELECT count(*) FROM {table}"), vec![]).await.unwrap()[0].int(0).unwrap()
}

async fn all_statements_of_a_unit_are_committed(db: &Db) {
    let (a, b) = (db.new_id().unwrap(), db.new_id().unwrap());
    let unit = Unit::new()
        .insert("users", user_values(a, "a"))
        .insert("users", user_values(b, "b"))
        .exec("UPDATE users SET email = $2 WHERE id = $1", params![a, "a@example.org"])
        .query("SELECT name, email FROM users ORDER BY name", vec![]);
    let (now, rows) = db.write(unit).await.unwrap().done().unwrap();
    assert!(now > 1_600_000_000_000_000);
    assert_eq!(rows[0][0].text(1).unwrap(), "a@example.org");
    assert_eq!(rows[0][1].opt_text(1).unwrap(), None);
    assert_eq!(count(db, "users").await, 2);
}

async fn a_unit_that_violates_a_constraint_is_rolled_back(db: &Db) {
    let unit = Unit::new()
        .insert("users", user_values(db.new_id().unwrap(), "same"))
        .insert("users", user_values(db.new_id().unwrap(), "same"));
    assert!(db.write(unit).await.unwrap_err().is_conflict_on("users_name_key"));
    assert_eq!(count(db, "users").await, 0);
}

/// A run that is locked with this token.
async fn insert_locked_run(db: &Db, made: &TestOwner, name: &str) -> LeaseKey {
    let (id, token) = (db.new_id().unwrap(), db.new_id().unwrap());
    let mut values = run_values(made, id, name);
    values.push(("lock_token", token.into()));
    db.write(Unit::new().insert("runs", values)).await.unwrap().done().unwrap();
    LeaseKey { id, token }
}

async fn run_status(db: &Db, id: Uuid) -> String {
    db.query("SELECT status FROM runs WHERE id = $1", params![id]).await.unwrap()[0].text(0).unwrap()
}

async fn l1_a_stale_guard_rolls_back_the_whole_unit(db: &Db) {
    let made = create_owner(db).await;
    let good = insert_locked_run(db, &made, "good").await;
    let stale = LeaseKey { token: db.new_id().unwrap(), ..good };
    let extra = db.new_id().unwrap();
    let unit = |held| {
        Unit::apply("runs", held, None, vec![("status", "running".into())])
            .insert("users", user_values(extra, "extra"))
            .exec("UPDATE users SET email = 'x' WHERE name = $1", params!["owner"])
    };
    assert_eq!(db.write(unit(stale)).await.unwrap(), WriteOutcome::Stale { at: None });
    assert_eq!(run_status(db, good.id).await, "submitted");
    let left = "SELECT count(*) FROM users WHERE name = 'extra' OR email = 'x'";
    assert_eq!(db.query(left, vec![]).await.unwrap()[0].int(0).unwrap(), 0);
    assert!(db.write(unit(good)).await.unwrap().is_done());
    assert_eq!(run_status(db, good.id).await, "running");
    assert_eq!(db.query(left, vec![]).await.unwrap()[0].int(0).unwrap(), 2);
    let after = db.write(unit(good)).await.unwrap();
    assert_eq!(after, WriteOutcome::Stale { at: None }, "an apply gives the lease back");
}

async fn l1_a_lease_token_of_another_row_rejects_the_write(db: &Db) {
    let made = create_owner(db).await;
    let (one, other) =
        (insert_locked_run(db, &made, "one").await, insert_locked_run(db, &made, "other").await);
    let crossed = LeaseKey { id: one.id, token: other.token };
    let unit = Unit::guarded("runs", crossed, vec![("status", "failed".into())]);
    assert_eq!(db.write(unit).await.unwrap(), WriteOutcome::Stale { at: None });
    assert_eq!(run_status(db, one.id).await, "submitted");
}

async fn a_failed_expectation_also_rolls_back_the_guarded_update(db: &Db) {
    let made = create_owner(db).await;
    let good = insert_locked_run(db, &made, "good").await;
    let unit = Unit::apply("runs", good, None, vec![("status", "running".into())])
        .insert("users", user_values(db.new_id().unwrap(), "extra"))
        .expect_one("UPDATE users SET email = 'x' WHERE name = $1", params!["nobody"]);
    assert_eq!(db.write(unit).await.unwrap(), WriteOutcome::Stale { at: Some(1) });
    assert_eq!(run_status(db, good.id).await, "submitted");
    assert_eq!(count(db, "users").await, 1);
}

async fn l13_all_times_of_a_unit_are_equal(db: &Db) {
    let made = create_owner(db).await;
    let good = insert_locked_run(db, &made, "good").await;
    // As a claim leaves it: a row without a due time was hinted while it was locked, and stays due.
    db.write(Unit::new().exec("UPDATE runs SET due_at = now_us() WHERE id = $1", params![good.id]))
        .await
        .unwrap();
    let unit = Unit::apply("runs", good, Some(7_000_000), vec![("finished_at", Val::Now)])
        .insert("users", user_values(db.new_id().unwrap(), "late"))
        .exec(
            "UPDATE runs SET scaled_at = now_us(), retry_since = $2 WHERE id = $1",
            params![good.id, Val::NowPlus(5)],
        );
    let (now, _) = db.write(unit).await.unwrap().done().unwrap();
    let sql = "SELECT r.last_processed_at, r.finished_at, r.scaled_at, u.created_at, r.due_at - 7000000, r.retry_since - 5 \
               FROM runs r, users u WHERE r.id = $1 AND u.name = 'late'";
    let rows = db.query(sql, params![good.id]).await.unwrap();
    let times: BTreeSet<i64> = (0..6).map(|column| rows[0].int(column).unwrap()).collect();
    assert_eq!(times, BTreeSet::from([now]));
}

async fn unique_violations_name_their_index(db: &Db) {
    let made = create_owner(db).await;
    insert_run(db, &made, "train").await;
    let again = Unit::new().insert("runs", run_values(&made, db.new_id().unwrap(), "train"));
    assert!(db.write(again).await.unwrap_err().is_conflict_on("runs_name_key"));
    let id = db.new_id().unwrap();
    let insert = |name| Unit::new().insert("runs", run_values(&made, id, name));
    db.write(insert("first")).await.unwrap().done().unwrap();
    assert!(db.write(insert("second")).await.unwrap_err().is_conflict_on("runs_pkey"));
    let other = insert_project(db, made.user, "other").await;
    let elsewhere = TestOwner { project: other, ..made };
    insert_run(db, &elsewhere, "train").await;
}

async fn a_foreign_key_violation_is_not_a_conflict(db: &Db) {
    let made = create_owner(db).await;
    let nobody = TestOwner { user: db.new_id().unwrap().into(), ..made };
    let unit = Unit::new().insert("runs", run_values(&nobody, db.new_id().unwrap(), "train"));
    let error = db.write(unit).await.unwrap_err();
    assert!(matches!(error, DbError::ConstraintViolated { .. }), "{error:?}");
    let unnamed = Unit::new().insert("users", vec![("id", db.new_id().unwrap().into())]);
    let error = db.write(unnamed).await.unwrap_err();
    assert!(matches!(error, DbError::ConstraintViolated { .. }), "{error:?}");
}

async fn an_invalid_statement_is_named_in_the_error(db: &Db) {
    for error in [
        db.query("SELECT nothing FROM users", vec![]).await.unwrap_err(),
        db.write(Unit::new().exec("UPDATE users SET nothing = 1", vec![])).await.unwrap_err(),
    ] {
        assert!(matches!(&error, DbError::Statement { sql, .. } if sql.contains("nothing")), "{error:?}");
    }
    assert_eq!(count(db, "users").await, 0, "and the database goes on");
}

async fn a_wrong_number_of_parameters_is_an_error(db: &Db) {
    for params in [params![], params!["a", "b"]] {
        let error = db.query("SELECT id FROM users WHERE name = $1", params.clone()).await.unwrap_err();
        assert!(matches!(error, DbError::Statement { .. }), "{error:?}");
        let unit = Unit::new().exec("DELETE FROM users WHERE name = $1", params);
        assert!(matches!(db.write(unit).await.unwrap_err(), DbError::Statement { .. }));
    }
}

async fn stored_values_are_read_back_unchanged(db: &Db) {
    let id = db.new_id().unwrap();
    let odd = "na\u{ef}ve \u{1f600} 'quoted' \"twice\" $1 ?";
    let mut values = user_values(id, odd);
    values.extend([("active", false.into()), ("ssh_private_key_sealed", vec![0_u8, 255, 7].into())]);
    db.write(Unit::new().insert("users", values)).await.unwrap().done().unwrap();
    let sql = "SELECT id, name, active, ssh_private_key_sealed, email, created_at, 0.5 * CAST(3 AS DOUBLE PRECISION) \
               FROM users WHERE name = $1 AND active = $2";
    let rows = db.query(sql, params![odd, false]).await.unwrap();
    let row = &rows[0];
    assert_eq!(row.uuid(0).unwrap(), id);
    assert_eq!(row.text(1).unwrap(), odd);
    assert!(!row.bool(2).unwrap());
    assert_eq!(row.bytes(3).unwrap(), [0, 255, 7]);
    assert_eq!(row.opt_text(4).unwrap(), None);
    assert!(row.int(5).unwrap() > 0);
    assert!((row.real(6).unwrap() - 1.5).abs() < 1e-9);
    assert!(matches!(row.int(1), Err(DbError::Shape { column: 1, .. })));
    assert!(matches!(row.text(4), Err(DbError::Shape { .. })));
    let listed = "SELECT count(*) FROM users WHERE name IN (SELECT value FROM json_each(CAST($1 AS TEXT)))";
    let found = db.query(listed, vec![Val::list([odd, "other"])]).await.unwrap();
    assert_eq!(found[0].int(0).unwrap(), 1);
}

async fn a_thousand_concurrent_units_are_all_acknowledged_and_stored(db: &Db) {
    let made = Arc::new(create_owner(db).await);
    let tasks = (0..1000).map(|number| {
        let (db, made) = (db.clone(), Arc::clone(&made));
        tokio::spawn(async move {
            let id = db.new_id().unwrap();
            let unit = Unit::new().insert("runs", run_values(&made, id, &format!("run-{number}")));
            db.write(unit).await.unwrap().done().unwrap();
            id
        })
    });
    let acknowledged: BTreeSet<Uuid> = join_all(tasks).await.into_iter().map(|task| task.unwrap()).collect();
    assert_eq!(acknowledged.len(), 1000);
    let kept = db.query("SELECT id FROM runs", vec![]).await.unwrap();
    assert_eq!(kept.iter().map(|row| row.uuid(0).unwrap()).collect::<BTreeSet<_>>(), acknowledged);
}

/// Three kinds of unit, mixed: valid, stale and conflicting. Each gets its own result.
async fn a_failing_unit_does_not_affect_concurrent_units(db: &Db) {
    let made = create_owner(db).await;
    insert_run(db, &made, "taken").await;
    let mut leases = Vec::new();
    for number in 0..200 {
        leases.push(insert_locked_run(db, &made, &format!("run-{number}")).await);
    }
    let tasks = leases.iter().enumerate().map(|(number, good)| {
        let set = vec![("status", "running".into())];
        let unit = match number % 10 {
            0 => Unit::apply("runs", LeaseKey { token: Uuid::nil(), ..*good }, None, set),
            5 => Unit::apply("runs", *good, None, set)
                .insert("runs", run_values(&made, db.new_id().unwrap(), "taken")),
            7 => Unit::apply("runs", *good, None, set)
                .expect_one("UPDATE users SET email = 'x' WHERE name = $1", params!["nobody"]),
            _ => Unit::apply("runs", *good, None, set)
                .insert("users", user_values(db.new_id().unwrap(), &format!("user-{number}"))),
        };
        let db = db.clone();
        tokio::spawn(async move { db.write(unit).await })
    });
    let answers = join_all(tasks).await;
    for (number, answer) in answers.into_iter().enumerate() {
        let (answer, id) = (answer.unwrap(), leases[number].id);
        let expected = match number % 10 {
            0 => matches!(answer, Ok(WriteOutcome::Stale { at: None })),
            5 => matches!(&answer, Err(error) if error.is_conflict_on("runs_name_key")),
            7 => matches!(answer, Ok(WriteOutcome::Stale { at: Some(0) })),
            _ => matches!(answer, Ok(WriteOutcome::Done { .. })),
        };
        assert!(expected, "unit {number}: {answer:?}");
        let wrote = run_status(db, id).await == "running";
        assert_eq!(wrote, ![0, 5, 7].contains(&(number % 10)), "unit {number}");
    }
    assert_eq!(count(db, "users").await, 1 + 140);
}

async fn two_writes_under_one_lease_apply_once(db: &Db) {
    let made = create_owner(db).await;
    let good = insert_locked_run(db, &made, "good").await;
    let writes = (0..20).map(|_| {
        let db = db.clone();
        tokio::spawn(async move {
            let unit = Unit::apply("runs", good, None, vec![])
                .exec("UPDATE runs SET retry_count = retry_count + 1 WHERE id = $1", params![good.id]);
            db.write(unit).await.unwrap().is_done()
        })
    });
    let done = join_all(writes).await.into_iter().filter(|task| *task.as_ref().unwrap()).count();
    assert_eq!(done, 1);
    let rows = db.query("SELECT retry_count FROM runs WHERE id = $1", params![good.id]).await.unwrap();
    assert_eq!(rows[0].int(0).unwrap(), 1);
}

async fn reads_see_acknowledged_writes(db: &Db) {
    for number in 0..50 {
        let name = format!("user-{number}");
        db.write(Unit::new().insert("users", user_values(db.new_id().unwrap(), &name))).await.unwrap();
        let found = db.query("SELECT id FROM users WHERE name = $1", params![name]).await.unwrap();
        assert_eq!(found.len(), 1, "a3: after write {number}");
    }
}

async fn commits_are_on_disk_before_they_are_acknowledged(db: &Db) {
    let wanted: &[(&str, &str)] = match db.dialect() {
        // 2 is FULL.
        Dialect::Sqlite => &[("journal_mode", "wal"), ("synchronous", "2"), ("foreign_keys", "1")],
        // Settings of a session. `fsync` belongs to the cluster, and the tests' cluster disables it for speed.
        Dialect::Postgres => &[("synchronous_commit", "on")],
    };
    for (name, value) in wanted {
        assert_eq!(db.setting(name).await.unwrap(), *value, "{name}");
    }
}

/// The statements that the tables list, and every other complete statement in the crate.
async fn every_sql_statement_can_be_prepared(db: &Db) {
    let mut all: BTreeSet<String> =
        windlass_server::db::statements().into_iter().map(str::to_owned).collect();
    assert!(all.len() > 40, "the tables list only {}", all.len());
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../db/src")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            all.extend(statements_in(&std::fs::read_to_string(path).unwrap()));
        }
    }
    assert!(all.len() > 60, "only {} were found", all.len());
    for sql in all {
        db.prepare(&sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }
}

/// String literals that are statements. One with `{` is a format string that only its caller can fill.
fn statements_in(source: &str) -> Vec<String> {
    let verbs = ["SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM "];
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(start) = rest.find('"') {
        rest = &rest[start + 1..];
        let Some(end) = rest.find('"') else { break };
        let literal = &rest[..end];
        rest = &rest[end + 1..];
        let is_whole = verbs.iter().any(|verb| literal.starts_with(verb)) && !literal.contains('{');
        if is_whole && !literal.ends_with('\\') {
            found.push(literal.replace("\\\n", " "));
        }
    }
    found
}

async fn a_closed_database_refuses_writes(db: &Db) {
    db.close().await;
    let error = db.write(Unit::new().insert("users", user_values(Uuid::nil(), "late"))).await.unwrap_err();
    assert!(matches!(error, DbError::Unavailable { .. }), "{error:?}");
}

/// The test of the guard must be able to fail.
mod planted {
    use windlass_planted_bugs::{Bug, plant};

    use super::*;
    use crate::db::DbFixture;

    async fn a_stale_write_goes_through(db: &Db) {
        let made = create_owner(db).await;
        let good = insert_locked_run(db, &made, "good").await;
        let stale = LeaseKey { token: Uuid::nil(), ..good };
        let unit = || Unit::guarded("runs", stale, vec![("status", "running".into())]);
        assert!(!db.write(unit()).await.unwrap().is_done());
        plant(Some(Bug::ApplyWithoutTokenCheck));
        let went_through = db.write(unit()).await.unwrap().is_done();
        plant(None);
        assert!(went_through, "the planted bug is not there");
        assert_eq!(run_status(db, good.id).await, "running");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn l1_a_stale_write_succeeds_on_both_databases_without_the_token_check() {
        a_stale_write_goes_through(DbFixture::sqlite().await.db()).await;
        a_stale_write_goes_through(DbFixture::postgres().await.db()).await;
    }
}
