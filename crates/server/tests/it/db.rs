use windlass_server::{
    db::{DatabaseUrl, Db, Unit},
    params,
};

#[tokio::test]
async fn opens_writes_and_reads() {
    let dir = std::env::temp_dir().join(format!("windlass-db-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let db = Db::open(&DatabaseUrl::Sqlite(dir.join("a.db"))).await.unwrap();
    let id = db.new_id().unwrap();
    let unit = Unit::new().insert(
        "users",
        vec![
            ("id", id.into()),
            ("name", "a".into()),
            ("global_role", "admin".into()),
            ("created_at", windlass_server::db::Val::Now),
        ],
    );
    db.write(unit.clone()).await.unwrap().done().unwrap();
    let rows = db.query("SELECT id, name FROM users WHERE id = $1", params![id]).await.unwrap();
    assert_eq!(rows[0].uuid(0).unwrap(), id);
    let again = db.write(unit).await.unwrap_err();
    assert!(again.is_conflict_on("users_name_key"), "{again:?}");
    db.close().await;
    std::fs::remove_dir_all(dir).unwrap();
}

#[tokio::test]
async fn every_statement_prepares() {
    let db = Db::open_inline(std::sync::Arc::new(|| 1), 1).unwrap();
    for sql in windlass_server::db::statements() {
        db.prepare(sql).await.unwrap();
    }
}
