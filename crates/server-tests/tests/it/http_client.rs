//! The typed client of the `api` crate against a real server, and the number of queries per response.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use serde_json::json;
use windlass_api::{Document, client::ApiClient, files, operations::*, projects, runs, server::EmptyRequest};
use windlass_server::{
    app::App,
    auth::authenticate,
    config::{Settings, SettingsSource},
    db::{Change, Db, Expect, FaultHook, HookFuture, Unit},
    encryption::Keyring,
    services,
};

use crate::http::{ADMIN_TOKEN, ServerFixture, on_both};

on_both! {
    the_typed_client_supports_every_kind_of_call
    listing_runs_takes_a_constant_number_of_queries
    two_replicas_that_start_together_make_one_admin
    every_project_has_its_own_key_and_missing_keys_are_created_at_startup
}

fn document(value: serde_json::Value) -> Document {
    Document::from_text(value.to_string()).unwrap()
}

fn apply_request(name: &str) -> runs::ApplyRequest {
    let spec = json!({ "run_name": name, "configuration": { "type": "task", "commands": ["true"] } });
    runs::ApplyRequest {
        plan: runs::ApplyInput { run_spec: document(spec), current_resource: None },
        force: false,
    }
}

async fn the_typed_client_supports_every_kind_of_call(ground: &ServerFixture) {
    let server = ground.start().await;
    let client = ApiClient::new(&format!("http://{}", server.authority), Some(ADMIN_TOKEN)).unwrap();
    let me = client.call::<ReadMyUser>(&[], &EmptyRequest {}).await.unwrap();
    assert_eq!((me.username.as_str(), me.creds.token.as_str()), ("admin", ADMIN_TOKEN));
    let listed = client.call::<ListProjects>(&[], &projects::ListRequest::default()).await.unwrap();
    assert!(matches!(listed, projects::ProjectList::Plain(projects) if projects.len() == 1));
    let counted = projects::ListRequest { return_total_count: true, ..projects::ListRequest::default() };
    let counted = client.call::<ListProjects>(&[], &counted).await.unwrap();
    assert!(matches!(counted, projects::ProjectList::Counted { total_count: Some(1), .. }));
    let run = client.call::<ApplyRun>(&["main"], &apply_request("train-1")).await.unwrap();
    let read = runs::ReadRequest { run_name: Some("train-1".into()), id: None };
    let again = client.call::<ReadRun>(&["main"], &read).await.unwrap();
    assert_eq!((again.id, again.run_spec.text()), (run.id, run.run_spec.text()));
    let absent = runs::ReadRequest { run_name: Some("none".into()), id: None };
    assert!(client.call::<ReadRun>(&["main"], &absent).await.unwrap_err().is_not_found());
    let stop = runs::StopRequest { runs_names: vec!["train-1".into()], abort: false };
    client.call::<StopRuns>(&["main"], &stop).await.unwrap();
    let content = b"--windlass-part--\r\n";
    let hash = crate::http_secrets::sha256_hex(content);
    let archive = client.upload::<UploadArchive>(&[], &EmptyRequest {}, &hash, content).await.unwrap();
    let found = client.call::<ReadArchive>(&[], &files::HashRequest { hash }).await.unwrap();
    assert_eq!(found.id, archive.id);
    let other = ApiClient::new(&format!("http://{}/", server.authority), Some("nobody")).unwrap();
    let denied = other.call::<ReadMyUser>(&[], &EmptyRequest {}).await.unwrap_err();
    assert_eq!(denied.to_string(), "Invalid token");
    server.stop().await;
    assert!(client.call::<ReadMyUser>(&[], &EmptyRequest {}).await.is_err(), "nobody is there any more");
}

/// Counts the operations on the database.
#[derive(Default)]
struct QueryCounter(AtomicUsize);

impl FaultHook for QueryCounter {
    fn before<'a>(&'a self, _: &'static str) -> HookFuture<'a> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { Ok(()) })
    }

    fn after<'a>(&'a self, _: &'static str) -> HookFuture<'a> {
        Box::pin(async { Ok(()) })
    }
}

async fn listing_runs_takes_a_constant_number_of_queries(ground: &ServerFixture) {
    let settings = Settings::new(SettingsSource { port: Some(0), ..ground.given() }, None).unwrap();
    let keys = Keyring::open(&settings.key_file).unwrap();
    let counter = Arc::new(QueryCounter::default());
    let db = Db::open(&settings.database_url).await.unwrap();
    let app =
        App::new(db.with_fault_hook(Arc::clone(&counter) as Arc<dyn FaultHook>), settings, keys).unwrap();
    services::bootstrap::ensure(&app).await.unwrap();
    let me = authenticate(&app, Some(&format!("Bearer {ADMIN_TOKEN}"))).await.unwrap();
    let mut costs = Vec::new();
    for round in 0..3 {
        for n in 0..5 {
            let scope = windlass_server::auth::project_scope(&app, me.clone(), "main", vec![]).await.unwrap();
            services::runs::apply(&app, &scope, apply_request(&format!("run-{round}-{n}"))).await.unwrap();
        }
        counter.0.store(0, Ordering::SeqCst);
        let runs = services::runs::list(&app, &me, runs::ListRequest::default()).await.unwrap();
        assert_eq!(runs.len(), 5 * (round + 1));
        costs.push(counter.0.load(Ordering::SeqCst));
    }
    // The rows of the list, its runs that were not cached as finished, their jobs, and the queue of the project, because
    // runs of the list wait in it.
    assert!(costs.iter().all(|cost| *cost == costs[0] && *cost <= 4), "queries per list: {costs:?}");
    app.db().close().await;
}

async fn two_replicas_that_start_together_make_one_admin(ground: &ServerFixture) {
    let settings = Settings::new(SettingsSource { port: Some(0), ..ground.given() }, None).unwrap();
    let db = Db::open(&settings.database_url).await.unwrap();
    let app = || App::new(db.clone(), settings.clone(), Keyring::open(&settings.key_file).unwrap()).unwrap();
    let apps: Vec<App> = (0..4).map(|_| app()).collect();
    let starts: Vec<_> = apps
        .iter()
        .cloned()
        .map(|app| tokio::spawn(async move { services::bootstrap::ensure(&app).await }))
        .collect();
    for start in starts {
        start.await.unwrap().unwrap();
    }
    let rows = db
        .query("SELECT (SELECT count(*) FROM users), (SELECT count(*) FROM projects)", vec![])
        .await
        .unwrap();
    assert_eq!((rows[0].int(0).unwrap(), rows[0].int(1).unwrap()), (1, 1));
    for app in &apps {
        authenticate(app, Some(&format!("Bearer {ADMIN_TOKEN}"))).await.unwrap();
    }
    db.close().await;
}

async fn every_project_has_its_own_key_and_missing_keys_are_created_at_startup(ground: &ServerFixture) {
    let settings = Settings::new(SettingsSource { port: Some(0), ..ground.given() }, None).unwrap();
    let keys = Keyring::open(&settings.key_file).unwrap();
    let app = App::new(Db::open(&settings.database_url).await.unwrap(), settings, keys).unwrap();
    services::bootstrap::ensure(&app).await.unwrap();
    let me = authenticate(&app, Some(&format!("Bearer {ADMIN_TOKEN}"))).await.unwrap();
    services::projects::add(&app, me.user.id, "other", false, None).await.unwrap();
    let check = async || {
        let sql = "SELECT id, ssh_public_key FROM projects ORDER BY name";
        let mut found = Vec::new();
        for row in app.db().query(sql, vec![]).await.unwrap() {
            let private = services::project_keys::open(&app, row.id(0).unwrap()).await.unwrap().unwrap();
            let public = row.text(1).unwrap();
            assert_eq!(windlass_tunnel::LoginKey::parse(&private).unwrap().public_line(), public.trim());
            found.push(public);
        }
        found
    };
    let drawn = check().await;
    assert!(drawn.len() == 2 && drawn[0] != drawn[1], "{drawn:?}");
    let sql = "UPDATE projects SET ssh_public_key = NULL, ssh_private_key_sealed = NULL WHERE name = 'other'";
    let change = Change::Exec { sql: sql.into(), params: vec![], expect: Expect::One };
    app.db().write(Unit::new().and([change])).await.unwrap();
    services::bootstrap::ensure(&app).await.unwrap();
    let again = check().await;
    assert_eq!(again[0], drawn[0], "a key in use is never replaced");
    assert_ne!(again[1], drawn[1]);
    app.db().close().await;
}
