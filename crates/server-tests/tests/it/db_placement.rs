//! Reads and writes of placement: free instances, and waiting jobs that are woken.

use windlass_model::{
    decide::jobs_submitted::POLL_INTERVAL,
    id::{FleetId, RunId, SubmissionId},
};
use windlass_server::{
    db::{
        Db, Dialect, Unit, Val,
        jobs::{self, Job},
        pipeline_rows::{
            placement,
            wait_classes::{WokenDue, wake_next},
        },
    },
    params,
};

use crate::{
    db::on_both,
    db_fixtures::{TestOwner, create_owner, run_values},
};

on_both! {
    reading_the_free_instances_uses_their_index
    a_woken_job_is_due_at_once_only_if_an_instance_is_free
}

async fn write(db: &Db, unit: Unit) {
    db.write(unit).await.unwrap().done().unwrap();
}

async fn insert_fleet(db: &Db, made: &TestOwner) -> FleetId {
    let id = FleetId(db.new_id().unwrap());
    let values = vec![
        ("id", id.into()),
        ("project_id", made.project.into()),
        ("name", "hosts".into()),
        ("spec", "{}".into()),
        ("status", "active".into()),
        ("created_at", Val::Now),
        ("last_processed_at", Val::Now),
    ];
    write(db, Unit::new().insert("fleets", values)).await;
    id
}

/// Instances of one block each, of which every 200th is free.
async fn insert_instances(db: &Db, made: &TestOwner, fleet: FleetId, number: i64) {
    let fill = match db.dialect() {
        Dialect::Sqlite => {
            "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < CAST($3 AS BIGINT))"
        }
        Dialect::Postgres => "WITH n AS (SELECT generate_series(1, CAST($3 AS BIGINT)) AS n)",
    };
    let sql = format!(
        "{fill} INSERT INTO instances (id, project_id, fleet_id, name, instance_num, total_blocks, busy_blocks, status, \
         created_at, last_processed_at) SELECT new_uuid(), $1, $2, 'host-' || n, n, 1, \
         CASE WHEN n % 200 = 0 THEN 0 ELSE 1 END, CASE WHEN n % 200 = 0 THEN 'idle' ELSE 'busy' END, n, n FROM n"
    );
    write(db, Unit::new().exec(sql, params![made.project, fleet, number]).exec("ANALYZE", vec![])).await;
}

async fn reading_the_free_instances_uses_their_index(db: &Db) {
    let made = create_owner(db).await;
    let fleet = insert_fleet(db, &made).await;
    insert_instances(db, &made, fleet, 4000).await;
    let plan = placement::explain_free_instances(db, &[made.project]).await.unwrap();
    assert!(plan.contains("instances_free"), "{plan}");
    assert!(!plan.contains("Seq Scan on instances") && !plan.contains("SCAN i\n"), "{plan}");
    let now = db.now().await.unwrap();
    let found = placement::load_free_inventory(db, &[made.project], now).await.unwrap();
    assert_eq!(found.instances.len(), 20);
}

/// A parked job of a class.
async fn insert_parked(db: &Db, made: &TestOwner, class: &str) -> Job {
    let (id, run) = (db.new_id().unwrap(), db.new_id().unwrap());
    let values = vec![
        ("id", id.into()),
        ("run_id", run.into()),
        ("project_id", made.project.into()),
        ("job_name", "train-0-0".into()),
        ("replica_num", 0_i64.into()),
        ("job_num", 0_i64.into()),
        ("submission_num", 0_i64.into()),
        ("status", "submitted".into()),
        ("job_spec", "{}".into()),
        ("wait_class", class.into()),
        ("parked", true.into()),
        ("submitted_at", Val::Now),
        ("last_processed_at", Val::Now),
    ];
    let named = run_values(made, run, &format!("run-{class}"));
    write(db, Unit::new().insert("runs", named).insert("jobs", values)).await;
    let found = jobs::find(db, SubmissionId(id)).await.unwrap().unwrap();
    assert_eq!(found.run_id, RunId(run));
    found
}

async fn a_woken_job_is_due_at_once_only_if_an_instance_is_free(db: &Db) {
    let made = create_owner(db).await;
    let fleet = insert_fleet(db, &made).await;
    insert_instances(db, &made, fleet, 2).await;
    let due = async |class: &str, set: &str, due: WokenDue| {
        let parked = insert_parked(db, &made, class).await;
        let wakes = wake_next(db, class, 1, &parked, due);
        let unit = Unit::new().exec(format!("UPDATE instances SET {set}"), vec![]).and([wakes]);
        let (now, rows) = db.write(unit).await.unwrap().done().unwrap();
        let row = &rows[0][0];
        assert_eq!(row.uuid(0).unwrap(), parked.id.0);
        let sql = "SELECT due_at, parked FROM jobs WHERE id = $1";
        let stored = db.query_opt(sql, params![parked.id]).await.unwrap().unwrap();
        assert!(!stored.bool(1).unwrap(), "{class}");
        let due_at = stored.opt_int(0).unwrap();
        assert_eq!(row.bool(1).unwrap(), due_at.is_none(), "{class}");
        due_at.map(|at| at - now)
    };
    let later = Some(POLL_INTERVAL.0);
    assert_eq!(due("occupied", "busy_blocks = 1", WokenDue::IfFree).await, later);
    assert_eq!(due("creatable", "busy_blocks = 1", WokenDue::AtOnce).await, None);
    assert_eq!(due("free", "busy_blocks = 0", WokenDue::IfFree).await, None);
    assert_eq!(due("unreachable", "unreachable = TRUE", WokenDue::IfFree).await, later);
    let set = "unreachable = FALSE, fleet_id = NULL";
    assert_eq!(due("other-fleet", set, WokenDue::IfFree).await, later, "its project may not use them");
}
