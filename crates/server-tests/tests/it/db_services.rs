//! Proxy state in the database: ready replicas, registrations of proxies, request counts.

use windlass_model::{
    decide::replicas::Traffic,
    id::{GatewayId, InstanceId, RunId, SubmissionId},
    time::Span,
};
use windlass_server::db::{Db, Dialect, Unit, Val, gateways, service_replicas};

use crate::{
    db::on_both,
    db_fixtures::{TestOwner, create_owner, run_values},
};

on_both! {
    s2_a_replica_becomes_ready_only_while_it_runs_and_from_a_current_read
    only_ready_replicas_have_seats_and_seats_end_with_their_proxy
    requests_are_summed_over_proxies
    replica_queries_start_from_the_services_index
}

async fn write(db: &Db, unit: Unit) {
    db.write(unit).await.unwrap().done().unwrap();
}

async fn insert_service(db: &Db, made: &TestOwner) -> RunId {
    let id = db.new_id().unwrap();
    let mut values = run_values(made, id, "page");
    values.push(("service", "{}".into()));
    write(db, Unit::new().insert("runs", values)).await;
    RunId(id)
}

/// A running replica on an instance that no pipeline processes.
async fn insert_replica(db: &Db, made: &TestOwner, run: RunId) -> SubmissionId {
    let (id, instance) = (db.new_id().unwrap(), InstanceId(db.new_id().unwrap()));
    let host = vec![
        ("id", instance.into()),
        ("project_id", made.project.into()),
        ("name", "host".into()),
        ("instance_num", 0_i64.into()),
        ("status", "busy".into()),
        ("created_at", Val::Now),
        ("last_processed_at", Val::Now),
    ];
    let job = vec![
        ("id", id.into()),
        ("run_id", run.into()),
        ("project_id", made.project.into()),
        ("job_name", "page-0-0".into()),
        ("replica_num", 0_i64.into()),
        ("job_num", 0_i64.into()),
        ("submission_num", 0_i64.into()),
        ("status", "running".into()),
        ("job_spec", "{}".into()),
        ("instance_id", instance.into()),
        ("submitted_at", Val::Now),
        ("last_processed_at", Val::Now),
    ];
    write(db, Unit::new().insert("instances", host).insert("jobs", job)).await;
    SubmissionId(id)
}

/// A server has many jobs and few services, and this query runs with every change of a job.
async fn replica_queries_start_from_the_services_index(db: &Db) {
    for plan in service_replicas::explain(db).await.unwrap() {
        // Postgres plans by the size of its tables, which are empty here.
        if db.dialect() == Dialect::Sqlite {
            assert!(plan.starts_with("SCAN r USING INDEX runs_services"), "{plan}");
        }
    }
}

async fn has_proxy_seat(db: &Db, job: SubmissionId) -> bool {
    let rows = db.query("SELECT 1 FROM proxy_seats WHERE job_id = $1", vec![job.into()]).await.unwrap();
    !rows.is_empty()
}

async fn s2_a_replica_becomes_ready_only_while_it_runs_and_from_a_current_read(db: &Db) {
    let made = create_owner(db).await;
    let run = insert_service(db, &made).await;
    let job = insert_replica(db, &made, run).await;
    let watched = service_replicas::running_replicas(db).await.unwrap();
    assert_eq!((watched.len(), watched[0].id, watched[0].registered), (1, job, false));
    assert!(service_replicas::ready_replicas(db).await.unwrap().is_empty());
    assert!(service_replicas::set_ready(db, &watched[0], "[]", true, vec![]).await.unwrap());
    // A second writer that read the same state is too late.
    assert!(!service_replicas::set_ready(db, &watched[0], "[]", true, vec![]).await.unwrap());
    assert_eq!(service_replicas::ready_replicas(db).await.unwrap()[0].id, job);
    // Without probes there is nothing more to observe.
    assert!(service_replicas::running_replicas(db).await.unwrap().is_empty());

    // A replica that was requested to end receives no requests, and is not made ready again.
    let requested =
        "UPDATE jobs SET end_asked = 'scaled_down', replica_registered = FALSE, probes = NULL WHERE id = $1";
    write(db, Unit::new().exec(requested, vec![job.into()])).await;
    assert!(!service_replicas::set_ready(db, &watched[0], "[]", true, vec![]).await.unwrap());
    assert!(service_replicas::ready_replicas(db).await.unwrap().is_empty());
    assert_eq!(service_replicas::services(db).await.unwrap()[0].run, run);
}

async fn only_ready_replicas_have_seats_and_seats_end_with_their_proxy(db: &Db) {
    let made = create_owner(db).await;
    let run = insert_service(db, &made).await;
    let job = insert_replica(db, &made, run).await;
    service_replicas::record_proxy(db, "a", &[job]).await.unwrap();
    assert!(!has_proxy_seat(db, job).await, "it is not ready");
    let watched = service_replicas::running_replicas(db).await.unwrap();
    service_replicas::set_ready(db, &watched[0], "[]", true, vec![]).await.unwrap();
    for proxy in ["a", "b", "b"] {
        service_replicas::record_proxy(db, proxy, &[job]).await.unwrap();
    }
    service_replicas::release_seat(db, "a", job).await.unwrap();
    assert!(has_proxy_seat(db, job).await, "the other one is there");
    service_replicas::remove_proxy(db, "b").await.unwrap();
    assert!(!has_proxy_seat(db, job).await);

    // A proxy that did not report for long has no registrations either.
    service_replicas::record_proxy(db, "c", &[job]).await.unwrap();
    service_replicas::sweep(db).await.unwrap();
    assert!(has_proxy_seat(db, job).await);
    write(db, Unit::new().exec("UPDATE proxies SET seen_at = seen_at - 60000000", vec![])).await;
    service_replicas::sweep(db).await.unwrap();
    assert!(!has_proxy_seat(db, job).await);
}

async fn requests_are_summed_over_proxies(db: &Db) {
    let made = create_owner(db).await;
    let run = insert_service(db, &made).await;
    let none = service_replicas::traffic(db, run, None, Span::secs(60)).await.unwrap();
    assert_eq!(none, None, "nobody is there who would say");
    for (proxy, requests) in [("a", 3), ("b", 4), ("a", 5)] {
        let came = Traffic { requests, in_flight_us: 10 * requests, waiting_us: requests };
        service_replicas::record_proxy(db, proxy, &[]).await.unwrap();
        let answers = Some(format!("{{\"latency_us\": {requests}}}"));
        let came = service_replicas::ServiceTraffic { run, traffic: came, answers };
        service_replicas::record_traffic(db, proxy, &[came], &[run]).await.unwrap();
    }
    let all = Some(Traffic { requests: 12, in_flight_us: 120, waiting_us: 12 });
    let read = async |run, gateway, secs| {
        service_replicas::traffic(db, run, gateway, Span::secs(secs)).await.unwrap()
    };
    assert_eq!(read(run, None, 60).await, all);
    assert_eq!(service_replicas::recent_answers(db, run, Span::secs(60)).await.unwrap().len(), 3);
    assert_eq!(read(RunId(db.new_id().unwrap()), None, 60).await, Some(Traffic::default()));
    // Counts of a service that a gateway publishes are unknown while the gateway is silent.
    let gateway = GatewayId(db.new_id().unwrap());
    assert_eq!(read(run, Some(gateway), 60).await, None);
    service_replicas::record_gateway_node(db, gateways::record_node("node", gateway, None), "node", &[])
        .await
        .unwrap();
    assert_eq!(read(run, Some(gateway), 60).await, all);
    write(db, Unit::new().exec("UPDATE service_requests SET window_at = window_at - 100000000", vec![]))
        .await;
    assert_eq!(read(run, None, 60).await, Some(Traffic::default()));
    assert_eq!(read(run, None, 300).await, all);
}
