//! Explanations of runs, managed jobs and instances, the queue and timelines.

use serde_json::{Value, json};
use windlass_server::{
    db::{Unit, Val},
    params,
};

use crate::{
    http::{ServerFixture, TestServer, on_both},
    http_rows::{add_fleet, add_instance},
};

on_both! {
    a_waiting_run_is_explained_with_its_refusals_and_cures
    a_finished_run_is_explained_by_its_end
    the_queue_lists_runs_in_their_order
    managed_jobs_and_instances_are_explained
    a_timeline_shows_the_phases_of_a_run_and_of_earlier_ones
    variants_of_a_run_are_planned
}

async fn submit(server: &TestServer, project: &str, name: &str, priority: i64) -> Value {
    let configuration = json!({ "type": "task", "commands": ["true"], "priority": priority });
    let spec = json!({ "run_name": name, "configuration": configuration });
    let path = format!("/api/project/{project}/runs/apply");
    server.admin(&path, json!({ "plan": { "run_spec": spec }, "force": false })).await
}

async fn exec(server: &TestServer, sql: &'static str, params: Vec<Val>) {
    server.app.db().write(Unit::new().exec(sql, params)).await.unwrap().done().unwrap();
}

fn refusals() -> String {
    let short = |message: &str, cure: &str, passes: bool| json!({ "kind": "cpus", "message": message, "cure": cure, "passes": passes });
    json!({ "left_out": 2, "refusals": [
        { "place": "one", "count": 1, "shortfalls": [short("needs 8 CPUs, has 2", "lower cpu to 2", false)] },
        { "place": "fleet gpu", "count": 3, "shortfalls": [short("needs 9 GB", "lower memory to 4GB", false)] },
    ] })
    .to_string()
}

async fn a_waiting_run_is_explained_with_its_refusals_and_cures(ground: &ServerFixture) {
    let server = ground.start().await;
    let fleet = add_fleet(&server, "gpu").await;
    add_instance(&server, "one", &fleet, "idle").await;
    submit(&server, "main", "first", 0).await;
    let run = submit(&server, "main", "second", 0).await;
    exec(&server, "UPDATE jobs SET shortfalls = $1", params![refusals()]).await;
    for body in [json!({ "run_name": "second" }), json!({ "id": run["id"] })] {
        let why = server.admin("/api/project/main/runs/why", body).await;
        // The sentence of the run itself, which lists show.
        let read = server.admin("/api/project/main/runs/get", json!({ "run_name": "second" })).await;
        assert_eq!((&why["sentence"], &read["reason"]), (&json!("waiting for its turn"), &why["sentence"]));
        let job = &why["jobs"][0];
        assert_eq!((&job["position"], &job["in_front"][0]["run"]), (&json!(1), &json!("first")));
        assert_eq!((&job["left_out"], &job["refusals"][0]["place_kind"]), (&json!(2), &json!("instance")));
        assert!(job["refusals"][0]["place_id"].is_string());
        assert_eq!(
            (&job["refusals"][1]["place_kind"], &job["refusals"][1]["place_id"]),
            (&json!("fleet"), &fleet)
        );
        assert_eq!(
            (&why["cures"][0]["message"], &why["cures"][0]["fits"]),
            (&json!("lower memory to 4GB"), &json!(3))
        );
        assert_eq!(why["command"], "windlass why second");
    }
    server
        .refused(
            crate::http::ADMIN_TOKEN,
            "/api/project/main/runs/why",
            json!({ "run_name": "none" }),
            "resource_not_exists",
        )
        .await;
    server.stop().await;
}

async fn a_finished_run_is_explained_by_its_end(ground: &ServerFixture) {
    let server = ground.start().await;
    submit(&server, "main", "broken", 0).await;
    exec(
        &server,
        "UPDATE jobs SET status = 'failed', finished = TRUE, exit_status = 3, termination_reason = $1",
        params!["container_exited_with_error"],
    )
    .await;
    exec(
        &server,
        "UPDATE runs SET status = 'failed', finished = TRUE, termination_reason = $1",
        params!["job_failed"],
    )
    .await;
    let why = server.admin("/api/project/main/runs/why", json!({ "run_name": "broken" })).await;
    assert_eq!(
        (&why["sentence"], &why["hint"]),
        (&json!("It failed: exit code 3."), &json!("Read its output: `windlass logs broken`."))
    );
    server.stop().await;
}

async fn the_queue_lists_runs_in_their_order(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    submit(&server, "main", "usual", 0).await;
    submit(&server, "main", "urgent", 50).await;
    submit(&server, "lab", "other", 0).await;
    exec(&server, "UPDATE jobs SET shortfalls = $1 WHERE job_name LIKE 'usual%'", params![refusals()]).await;
    let queue = server.admin("/api/queue/list", json!({})).await;
    let entries = queue["entries"].as_array().unwrap();
    let order: Vec<_> = entries.iter().map(|entry| entry["run"].as_str().unwrap()).collect();
    // The projects share no fleet, so each has a queue of its own.
    assert_eq!(order, ["urgent", "other", "usual"]);
    let positions: Vec<_> = entries.iter().map(|entry| (&entry["position"], &entry["rule"])).collect();
    let none = Value::Null;
    assert_eq!(positions, [(&json!(0), &none), (&json!(0), &none), (&json!(1), &json!("priority"))]);
    let queues: Vec<_> = entries.iter().map(|entry| entry["queue"].as_u64().unwrap()).collect();
    assert_eq!(queues, [0, 1, 0]);
    let usual = &entries[2];
    assert_eq!(
        (&usual["nearest"]["place"], &usual["passes"], &usual["mine"]),
        (&json!("one"), &json!(false), &json!(true))
    );
    assert_eq!((&entries[0]["passes"], &entries[0]["type"]), (&json!(true), &json!("task")));
    assert!(queue["slots"]["alive_max"].as_u64().unwrap() > 0);
    let own = server.ok(&mira, "/api/queue/list", json!({})).await;
    assert_eq!((own["entries"].as_array().unwrap().len(), &own["entries"][0]["run"]), (1, &json!("other")));
    assert_eq!(own["entries"][0]["queue"], 0, "nothing shows how many other queues there are");
    server.stop().await;
}

async fn managed_jobs_and_instances_are_explained(ground: &ServerFixture) {
    let server = ground.start().await;
    let launched =
        server.admin("/api/project/main/jobs/launch", json!({ "text": "name: tune\nrun: echo\n" })).await;
    let number = &launched["jobs"][0]["job_id"];
    let why = server.admin("/api/project/main/jobs/why", json!({ "job_id": number })).await;
    assert!(
        !why["sentence"].as_str().unwrap().is_empty() && why["jobs"].as_array().unwrap().len() == 1,
        "{why}"
    );
    assert_eq!(why["command"], format!("windlass why {number}"));
    let fleet = add_fleet(&server, "gpu").await;
    add_instance(&server, "three", &fleet, "idle").await;
    add_instance(&server, "one", &fleet, "idle").await;
    let rows = server.admin("/api/instances/rows", json!({ "sort": "name" })).await;
    let explain =
        async |row: &Value| server.admin("/api/project/main/instances/why", json!({ "id": row["id"] })).await;
    let silent = explain(&rows["rows"][0]).await;
    assert!(silent["sentence"].as_str().unwrap().starts_with("Its agent does not respond since"), "{silent}");
    let idle = explain(&rows["rows"][1]).await;
    assert_eq!(idle["sentence"], "It is free, and is kept until it is deleted.");
    server.stop().await;
}

async fn a_timeline_shows_the_phases_of_a_run_and_of_earlier_ones(ground: &ServerFixture) {
    let server = ground.start().await;
    for name in ["train-1", "train-2"] {
        submit(&server, "main", name, 0).await;
    }
    exec(
        &server,
        "UPDATE jobs SET provisioned_at = submitted_at + 1000000, pulling_at = submitted_at + 2000000, \
         running_at = submitted_at + 4000000, terminating_at = submitted_at + 9000000, \
         finished_at = submitted_at + 10000000, status = 'done', finished = TRUE WHERE job_name LIKE $1",
        params!["train-1%"],
    )
    .await;
    exec(
        &server,
        "UPDATE runs SET status = 'done', finished = TRUE, submitted_at = submitted_at - 1 WHERE name = $1",
        params!["train-1"],
    )
    .await;
    let rows = server.admin("/api/runs/rows", json!({ "sort": "name" })).await;
    let timeline =
        async |row: &Value| server.admin("/api/project/main/runs/timeline", json!({ "id": row["id"] })).await;
    let done = timeline(&rows["rows"][0]).await;
    let phases: Vec<_> =
        done["spans"].as_array().unwrap().iter().map(|span| span["phase"].as_str().unwrap()).collect();
    assert_eq!(phases, ["queue", "machine", "image", "run", "stop"]);
    assert!(
        done["spans"].as_array().unwrap().windows(2).all(|pair| pair[0]["to"] == pair[1]["from"]),
        "{done}"
    );
    let waiting = timeline(&rows["rows"][1]).await;
    assert_eq!((waiting["spans"].as_array().unwrap().len(), &waiting["spans"][0]["to"]), (1, &Value::Null));
    assert_eq!(
        waiting["previous"][0]["phases"],
        json!({ "queue": 1.0, "machine": 1.0, "image": 2.0, "run": 5.0, "stop": 1.0 })
    );
    server.admin("/api/project/main/jobs/launch", json!({ "text": "name: tune\nrun: echo\n" })).await;
    let of_job = server.admin("/api/project/main/runs/timeline", json!({ "job_id": 1 })).await;
    assert_eq!(of_job["spans"], json!([]), "it has no attempt yet");
    server.stop().await;
}

async fn variants_of_a_run_are_planned(ground: &ServerFixture) {
    let server = ground.start().await;
    server.grant("main", "remote").await;
    let fleet = add_fleet(&server, "gpu").await;
    add_instance(&server, "three", &fleet, "idle").await;
    let configuration = json!({ "type": "task", "commands": ["true"], "resources": { "cpu": 64, "gpu": 0, "disk": "0GB.." } });
    let spec = json!({ "configuration": configuration });
    let variants = json!([{ "label": "as it is", "patch": {} }, { "label": "64 to 4", "patch": { "resources.cpu": "4.." } }]);
    let path = "/api/project/main/runs/what_if";
    let found = server.admin(path, json!({ "run_spec": spec, "variants": variants })).await;
    let (first, second) = (&found["variants"][0], &found["variants"][1]);
    assert_eq!((&first["label"], &first["starts_now"]), (&json!("as it is"), &json!(false)));
    let refusal = first["refusals"][0].to_string();
    assert!(refusal.contains("64 CPUs"), "{found}");
    assert!(!second.to_string().contains("64 CPUs"), "{found}");
    assert_eq!(second["patch"], json!({ "resources.cpu": "4.." }));
    submit(&server, "main", "train", 0).await;
    let of_run = server.admin(path, json!({ "run_name": "train", "variants": variants })).await;
    assert_eq!(of_run["variants"].as_array().unwrap().len(), 2);
    for body in [json!({ "run_spec": spec, "variants": [] }), json!({ "variants": variants })] {
        let (status, _) = server.post(crate::http::ADMIN_TOKEN, path, &body.to_string()).await;
        assert!([400, 422].contains(&status), "{body}");
    }
    server.stop().await;
}
