//! Rows with which tests of the database start.

use uuid::Uuid;
use windlass_model::id::{ProjectId, RunId, UserId};
use windlass_server::db::{Db, Unit, Val, Values};

/// A user and a project that the user owns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestOwner {
    pub(crate) user: UserId,
    pub(crate) project: ProjectId,
}

pub(crate) async fn create_owner(db: &Db) -> TestOwner {
    let user = UserId(db.new_id().unwrap());
    let values = vec![
        ("id", user.into()),
        ("name", "owner".into()),
        ("global_role", "admin".into()),
        ("created_at", Val::Now),
    ];
    db.write(Unit::new().insert("users", values)).await.unwrap().done().unwrap();
    TestOwner { user, project: insert_project(db, user, "main").await }
}

pub(crate) async fn insert_project(db: &Db, owner: UserId, name: &str) -> ProjectId {
    let id = ProjectId(db.new_id().unwrap());
    let values =
        vec![("id", id.into()), ("name", name.into()), ("owner_id", owner.into()), ("created_at", Val::Now)];
    db.write(Unit::new().insert("projects", values)).await.unwrap().done().unwrap();
    id
}

pub(crate) fn run_values(made: &TestOwner, id: Uuid, name: &str) -> Values {
    vec![
        ("id", id.into()),
        ("project_id", made.project.into()),
        ("user_id", made.user.into()),
        ("name", name.into()),
        ("spec", "{}".into()),
        ("status", "submitted".into()),
        ("submitted_at", Val::Now),
        ("last_processed_at", Val::Now),
    ]
}

pub(crate) async fn insert_run(db: &Db, made: &TestOwner, name: &str) -> RunId {
    let id = db.new_id().unwrap();
    db.write(Unit::new().insert("runs", run_values(made, id, name))).await.unwrap().done().unwrap();
    RunId(id)
}
