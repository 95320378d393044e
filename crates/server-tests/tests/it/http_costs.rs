//! Costs of instances, over HTTP.

use serde_json::{Value, json};
use windlass_server::{
    db::{Unit, Val},
    params,
};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    job_cost_is_price_times_hours_of_its_share_of_the_instance
    costs_are_limited_to_the_requested_period
    gpus_are_grouped_by_the_requested_fields
}

const COSTS: &str = "/api/project/main/costs/list";
const HOUR: i64 = 3_600_000_000;

async fn write(server: &TestServer, sql: &'static str, params: Vec<Val>) {
    server.app.db().write(Unit::new().exec(sql, params)).await.unwrap().done().unwrap();
}

async fn submit_run(server: &TestServer, name: &str) -> Value {
    let spec = json!({ "run_name": name, "configuration": { "type": "task", "commands": ["true"] },
        "profile": { "name": "default" } });
    server.admin("/api/project/main/runs/apply", json!({ "plan": { "run_spec": spec } })).await
}

/// Two hosts at 4 dollars in four blocks each: one since ten hours ago, one from then until two hours ago.
async fn insert_hosts(server: &TestServer) -> i64 {
    let fleet = json!({ "plan": { "spec": { "profile": { "name": "default" }, "configuration": { "type": "fleet",
        "name": "own", "ssh_config": { "user": "u", "identity_file": "f", "hosts": ["10.0.0.1", "10.0.0.2"] } } } } });
    server.admin("/api/project/main/fleets/apply", fleet).await;
    let now = server.app.db().now().await.unwrap().0;
    write(
        server,
        "UPDATE instances SET price = 4.0, total_blocks = 4, started_at = $1",
        params![now - 10 * HOUR],
    )
    .await;
    write(
        server,
        "UPDATE instances SET finished = TRUE, status = 'terminated', finished_at = $1 WHERE instance_num = 1",
        params![now - 2 * HOUR],
    )
    .await;
    // One block for six hours until two hours ago; all four blocks since one hour ago.
    for (name, blocks, from, until) in
        [("small", 1_i64, now - 8 * HOUR, Some(now - 2 * HOUR)), ("whole", 4, now - HOUR, None)]
    {
        let made = submit_run(server, name).await;
        let id = made["id"].as_str().unwrap().to_owned();
        write(
            server,
            "UPDATE jobs SET instance_id = (SELECT id FROM instances WHERE instance_num = 0), blocks = $2, \
             provisioned_at = $3, finished_at = $4, finished = $5 WHERE run_id = $1",
            params![id, blocks, from, until, until.is_some()],
        )
        .await;
    }
    // It waits, and costs nothing.
    submit_run(server, "waits").await;
    now
}

fn is_close(value: &Value, want: f64) -> bool {
    (value.as_f64().unwrap() - want).abs() < 0.05
}

async fn job_cost_is_price_times_hours_of_its_share_of_the_instance(ground: &ServerFixture) {
    let server = ground.start().await;
    insert_hosts(&server).await;
    let by_run = server.admin(COSTS, json!({})).await;
    let items = by_run["items"].as_array().unwrap();
    assert_eq!(items.iter().map(|item| &item["name"]).collect::<Vec<_>>(), ["small", "whole"]);
    assert_eq!((&items[0]["user"], &items[0]["count"]), (&json!("admin"), &json!(1)));
    assert!(is_close(&items[0]["hours"], 1.5) && is_close(&items[0]["cost"], 6.0), "{by_run}");
    assert!(is_close(&items[1]["hours"], 1.0) && is_close(&items[1]["cost"], 4.0), "{by_run}");
    assert!(is_close(&by_run["total"]["cost"], 10.0) && by_run["total"]["count"] == 2, "{by_run}");
    let first = server.admin(COSTS, json!({ "limit": 1 })).await;
    assert_eq!(first["items"].as_array().unwrap().len(), 1);
    assert!(is_close(&first["total"]["cost"], 10.0), "the total is of all: {first}");

    let by_user = server.admin(COSTS, json!({ "by": "user" })).await;
    assert_eq!(by_user["items"][0]["name"], "admin");
    assert!(is_close(&by_user["items"][0]["cost"], 10.0), "{by_user}");
    // Ten hours and eight hours of whole instances, busy or not.
    let by_fleet = server.admin(COSTS, json!({ "by": "fleet" })).await;
    assert_eq!((&by_fleet["items"][0]["name"], &by_fleet["items"][0]["count"]), (&json!("own"), &json!(2)));
    assert!(
        is_close(&by_fleet["total"]["hours"], 18.0) && is_close(&by_fleet["total"]["cost"], 72.0),
        "{by_fleet}"
    );
    server.stop().await;
}

async fn costs_are_limited_to_the_requested_period(ground: &ServerFixture) {
    let server = ground.start().await;
    let now = insert_hosts(&server).await;
    let at = |ago: i64| windlass_model::time::Timestamp(now - ago).to_string();
    let request = json!({ "since": at(4 * HOUR), "until": at(3 * HOUR) });
    let one_hour = server.admin(COSTS, request).await;
    assert_eq!(one_hour["items"].as_array().unwrap().len(), 1, "{one_hour}");
    assert!(is_close(&one_hour["total"]["cost"], 1.0), "{one_hour}");
    let before = server.admin(COSTS, json!({ "until": at(9 * HOUR) })).await;
    assert_eq!((&before["items"], &before["total"]["cost"]), (&json!([]), &json!(0.0)));
    for wrong in [json!({ "since": at(-HOUR) }), json!({ "limit": 0 }), json!({ "limit": 1001 })] {
        let (status, answer) = server.post(ADMIN_TOKEN, COSTS, &wrong.to_string()).await;
        assert_eq!(status, 422, "{wrong}: {answer}");
    }
    server.stop().await;
}

fn words(all: [&str; 2]) -> Vec<String> {
    all.map(str::to_owned).to_vec()
}

async fn gpus_are_grouped_by_the_requested_fields(ground: &ServerFixture) {
    let server = ground.start().await;
    insert_hosts(&server).await;
    let kind = json!({ "name": "h100x2", "resources": { "cpus": 26, "memory_mib": 229_376, "spot": false,
        "cpu_arch": "x86", "disk": { "size_mib": 819_200 }, "description": "",
        "gpus": [{ "name": "H100", "memory_mib": 81920, "vendor": "nvidia" }, { "name": "H100", "memory_mib": 81920, "vendor": "nvidia" }] } });
    write(
        &server,
        "UPDATE instances SET status = 'idle', total_blocks = 1, instance_type = $1 WHERE instance_num = 0",
        params![kind.to_string()],
    )
    .await;
    let spec = json!({ "configuration": { "type": "task", "commands": [":"],
        "resources": { "gpu": { "count": { "min": 0 } } } }, "profile": { "name": "default" } });
    let list = |by: &[&str]| json!({ "run_spec": spec, "group_by": by });
    let plain = server.admin("/api/project/main/gpus/list", list(&[])).await["gpus"][0].clone();
    assert_eq!((&plain["name"], &plain["backends"]), (&json!("H100"), &json!(["remote"])), "{plain}");
    assert_eq!(plain["price"]["min"], 2.0, "of one GPU: {plain}");
    let split = list(&["backend", "region", "count"]);
    let split = server.admin("/api/project/main/gpus/list", split).await["gpus"][0].clone();
    assert_eq!((&split["backend"], &split["backends"]), (&json!("remote"), &Value::Null));
    assert!(split["region"].is_string() && split["count"] == json!({ "min": 2, "max": 2 }), "{split}");
    let other = kind.to_string().replace("H100", "A10").replace("h100x2", "a10x2");
    write(
        &server,
        "UPDATE instances SET status = 'idle', finished = FALSE, finished_at = NULL, total_blocks = 1, price = 1.0, \
         instance_type = $1 WHERE instance_num = 1",
        params![other],
    )
    .await;
    let ordered = async |reverse: bool| {
        let request = json!({ "run_spec": spec, "reverse": reverse });
        let found = server.admin("/api/project/main/gpus/list", request).await;
        let gpus = found["gpus"].as_array().unwrap().iter();
        gpus.map(|gpu| gpu["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((ordered(false).await, ordered(true).await), (words(["A10", "H100"]), words(["H100", "A10"])));
    for (wrong, code) in [(["region"], 400), (["colour"], 422)] {
        let body = list(&wrong).to_string();
        let (status, answer) = server.post(ADMIN_TOKEN, "/api/project/main/gpus/list", &body).await;
        assert_eq!(status, code, "{wrong:?}: {answer}");
    }
    server.stop().await;
}
