//! Routes of single pages of the web UI: the editor, plots, saved views, savings, the history of an instance.

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use windlass_model::time::Timestamp;
use windlass_server::{
    db::{Unit, Val},
    params,
};
use windlass_testkit::wait::TIMEOUT;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    http_rows::{add_fleet, add_instance},
};

on_both! {
    a_text_is_checked_and_planned_with_the_lines_of_its_problems
    a_text_whose_run_is_active_is_planned_as_an_update
    a_task_file_is_planned_by_its_first_attempt
    views_belong_to_their_user_or_are_shared_in_a_project
    series_are_limited_to_the_projects_of_the_caller
    requests_of_a_service_are_kept_in_minutes
    the_stream_of_blocks_shows_the_jobs_on_them
    a_managed_job_shows_its_attempts_and_savings
    an_instance_lists_the_jobs_that_ran_on_it
    costs_are_returned_in_steps_and_by_market
    an_earlier_deployment_is_applied_again
    a_terminal_is_refused_without_a_running_job
}

async fn exec(server: &TestServer, sql: &'static str, params: Vec<Val>) {
    server.app.db().write(Unit::new().exec(sql, params)).await.unwrap().done().unwrap();
}

async fn submit(server: &TestServer, name: &str, configuration: Value) -> Value {
    let spec = json!({ "run_name": name, "configuration": configuration });
    let body = json!({ "plan": { "run_spec": spec }, "force": false });
    server.admin("/api/project/main/runs/apply", body).await
}

/// A user who is in no project, and the token of that user.
async fn outsider(server: &TestServer) -> String {
    let made = server
        .admin("/api/users/create", json!({ "username": "eve", "global_role": "user", "active": true }))
        .await;
    made["creds"]["token"].as_str().unwrap().to_owned()
}

async fn a_text_is_checked_and_planned_with_the_lines_of_its_problems(ground: &ServerFixture) {
    let server = ground.start().await;
    let plan = async |text: &str, env: Value| {
        server.admin("/api/project/main/configurations/plan", json!({ "text": text, "env": env })).await
    };
    let wrong = "type: task\ntypo: 1\ncommands: [a]\n";
    let checked = server.admin("/api/project/main/configurations/check", json!({ "text": wrong })).await;
    let problem = &checked["problems"][0];
    assert_eq!(
        (&problem["code"], &problem["severity"], &problem["line"]),
        (&json!("C011"), &json!("error"), &json!(2))
    );
    let planned = plan(wrong, json!({})).await;
    assert_eq!((&planned["plan"], &planned["problems"]), (&Value::Null, &checked["problems"]));

    let text = "type: task\nname: train\nenv:\n  - TOKEN\ncommands: [a]\n";
    let open = plan(text, json!({})).await;
    assert!(open["plan"].is_null() && open["problems"][0]["line"] == 3, "{open}");
    let whole = plan(text, json!({ "TOKEN": "x" })).await;
    let found = &whole["plan"];
    assert_eq!(
        (&whole["problems"], &found["name"], &found["action"]),
        (&json!([]), &json!("train"), &json!("create"))
    );
    assert_eq!(found["type"], "task");
    assert!(found["effective_text"].as_str().unwrap().starts_with("type: task\nname: train\n"), "{found}");
    // Nothing fits: there is no fleet.
    assert!(found["starts_now"] == false && !found["refusals"].as_array().unwrap().is_empty(), "{found}");
    // It is applied as it is.
    let applied = json!({ "plan": { "run_spec": found["run_spec"], "current_resource": found["current_resource"] }, "force": false });
    let run = server.admin("/api/project/main/runs/apply", applied).await;
    assert_eq!(run["run_spec"]["configuration"]["env"]["TOKEN"], "x");

    let schema = server.admin("/api/schemas/get", json!({ "name": "windlass" })).await;
    assert!(schema["$schema"].is_string(), "{schema}");
    let page = server.admin("/api/errors/get", json!({ "code": "c011" })).await;
    assert_eq!((&page["code"], &page["title"]), (&json!("C011"), &json!("unknown-field")));
    for (path, body) in [("schemas", json!({ "name": "x" })), ("errors", json!({ "code": "Z1" }))] {
        let (status, _) = server.post(ADMIN_TOKEN, &format!("/api/{path}/get"), &body.to_string()).await;
        assert!([400, 422].contains(&status), "{path}");
    }
    let templates = server.admin("/api/project/main/templates/list", json!({})).await;
    assert!(templates.as_array().unwrap().iter().any(|one| one["name"] == "hello"), "{templates}");
    let settings = server.admin("/api/server/settings", json!({})).await;
    assert!(settings["settings"].as_array().unwrap().iter().any(|one| one["name"] == "database"));
    assert!(!settings.to_string().contains(ADMIN_TOKEN));
    server.stop().await;
}

async fn a_text_whose_run_is_active_is_planned_as_an_update(ground: &ServerFixture) {
    let server = ground.start().await;
    let text = |replicas: i64, image: &str| {
        format!("type: service\nname: web\nport: 80\nimage: {image}\ncommands: [a]\nreplicas: {replicas}\n")
    };
    let plan = async |text: String| {
        server.admin("/api/project/main/configurations/plan", json!({ "text": text, "env": {} })).await
    };
    let first = plan(text(1, "one")).await;
    let body = json!({ "plan": { "run_spec": first["plan"]["run_spec"] }, "force": false });
    server.admin("/api/project/main/runs/apply", body).await;
    let second = plan(text(2, "one")).await;
    let found = &second["plan"];
    assert_eq!((&found["action"], &second["problems"]), (&json!("update"), &json!([])));
    assert!(found["current_text"].as_str().unwrap().contains("replicas"), "{found}");
    assert_ne!(found["current_text"], found["effective_text"]);
    let body = json!({ "plan": { "run_spec": found["run_spec"], "current_resource": found["current_resource"] }, "force": false });
    let (status, answer) = server.post(ADMIN_TOKEN, "/api/project/main/runs/apply", &body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    // Another type cannot replace an active run.
    let task = plan("type: task\nname: web\ncommands: [a]\n".to_owned()).await;
    assert_eq!(task["problems"][0]["severity"], "error", "{task}");
    server.stop().await;
}

async fn a_task_file_is_planned_by_its_first_attempt(ground: &ServerFixture) {
    let server = ground.start().await;
    let text = "name: sky\nresources:\n  cpus: 512+\nrun: echo hi\n";
    let planned =
        server.admin("/api/project/main/configurations/plan", json!({ "text": text, "env": {} })).await;
    let found = &planned["plan"];
    assert_eq!((&found["type"], &found["name"]), (&json!("managed-job"), &json!("sky")), "{planned}");
    assert!(found["effective_text"].as_str().unwrap().contains("echo hi"), "{found}");
    assert_eq!(found["starts_now"], false);
    server.stop().await;
}

async fn views_belong_to_their_user_or_are_shared_in_a_project(ground: &ServerFixture) {
    let server = ground.start().await;
    let set = |query: &str, project: Value| json!({ "name": "failed", "page": "runs", "query": query, "project": project });
    let own = server.admin("/api/views/set", set("q=a", Value::Null)).await;
    let shared = server.admin("/api/views/set", set("q=b", json!("main"))).await;
    assert_eq!((&shared["project"], &shared["user"]), (&json!("main"), &json!("admin")));
    let again = server.admin("/api/views/set", set("q=c", Value::Null)).await;
    assert_eq!(again["id"], own["id"], "a view of the same name is replaced");
    let list = server.admin("/api/views/list", json!({})).await;
    let queries: Vec<&Value> = list["views"].as_array().unwrap().iter().map(|view| &view["query"]).collect();
    assert_eq!(queries.len(), 2);
    assert!(queries.contains(&&json!("q=c")) && queries.contains(&&json!("q=b")), "{list}");

    let eve = outsider(&server).await;
    let (_, none) = server.post(&eve, "/api/views/list", "{}").await;
    assert_eq!(none["views"], json!([]));
    let id = json!({ "id": shared["id"] }).to_string();
    assert_eq!(server.post(&eve, "/api/views/delete", &id).await.0, 400);
    let member = json!({ "members": [{ "username": "eve", "project_role": "user" }] });
    server.admin("/api/projects/main/add_members", member).await;
    let (_, one) = server.post(&eve, "/api/views/list", "{}").await;
    assert_eq!(one["views"][0]["query"], "q=b");
    assert_eq!(server.post(&eve, "/api/views/delete", &id).await.0, 403);
    server.admin("/api/views/delete", json!({ "id": shared["id"] })).await;
    assert_eq!(server.admin("/api/views/list", json!({})).await["views"].as_array().unwrap().len(), 1);
    for (field, body) in [
        ("page", json!({ "name": "x", "page": "secrets", "query": "" })),
        ("name", json!({ "name": " ", "page": "runs", "query": "" })),
        ("query", json!({ "name": "x", "page": "runs", "query": "x".repeat(2001) })),
    ] {
        let (status, answer) = server.post(ADMIN_TOKEN, "/api/views/set", &body.to_string()).await;
        assert_eq!((status, &answer["detail"][0]["loc"][1]), (422, &json!(field)));
    }
    server.stop().await;
}

/// A run that holds two of four blocks of an instance, with two samples.
async fn sampled_run(server: &TestServer) -> (Value, Value, Value) {
    let fleet = add_fleet(server, "gpu").await;
    add_instance(server, "one", &fleet, "busy").await;
    let instance = server.admin("/api/instances/rows", json!({})).await["rows"][0]["id"].clone();
    let run = submit(server, "train", json!({ "type": "task", "commands": ["true"] })).await;
    let job = run["jobs"][0]["job_submissions"][0]["id"].clone();
    exec(
        server,
        "UPDATE jobs SET status = 'running', instance_id = $1, blocks = 2, provisioned_at = now_us() - 600000000, \
         provisioning = $2 WHERE run_id = $3",
        params![
            instance.as_str().unwrap(),
            r#"{"instance_type":{"resources":{"cpus":8,"memory_mib":1024}}}"#,
            run["id"].as_str().unwrap()
        ],
    )
    .await;
    exec(
        server,
        "UPDATE instances SET total_blocks = 4, busy_blocks = 2, instance_type = $2, backend = 'remote' WHERE id = $1",
        params![
            instance.as_str().unwrap(),
            r#"{"name":"x","resources":{"cpus":8,"memory_mib":1024,"gpus":[],"spot":false}}"#
        ],
    )
    .await;
    for (age, cpu) in [(20, 0), (10, 20)] {
        exec(
            server,
            "INSERT INTO job_metrics (job_id, at, host_at, cpu_us, memory_bytes, working_set_bytes, gpus) \
             VALUES ($1, now_us() - $2, $3, $4, 0, 536870912, '[]')",
            params![
                job.as_str().unwrap(),
                age * 1_000_000_i64,
                (100 - age) * 1_000_000_i64,
                cpu * 1_000_000_i64
            ],
        )
        .await;
    }
    (fleet, instance, job)
}

async fn series_are_limited_to_the_projects_of_the_caller(ground: &ServerFixture) {
    let server = ground.start().await;
    let (fleet, instance, job) = sampled_run(&server).await;
    let now = server.app.db().now().await.unwrap();
    let at = |seconds: i64| Timestamp(now.0 + seconds * 1_000_000).to_string();
    let query = |of: &str, id: &Value| json!({ "of": of, "ids": [id], "names": ["cpu", "memory"], "from": at(-600), "to": at(5), "points": 100 });
    for (of, id, limit) in
        [("job", &job, json!(8.0)), ("instance", &instance, Value::Null), ("fleet", &fleet, Value::Null)]
    {
        let found = server.admin("/api/metrics/query", query(of, id)).await;
        let cpu = found["series"].as_array().unwrap().iter().find(|one| one["name"] == "cpu").unwrap();
        let values: Vec<f64> = cpu["mean"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
        assert_eq!((values, &cpu["limit"]), (vec![2.0], &limit), "{of}");
        assert_eq!(found["times"].as_array().unwrap().len(), cpu["mean"].as_array().unwrap().len());
    }
    let eve = outsider(&server).await;
    for (of, id) in [("job", &job), ("instance", &instance), ("fleet", &fleet)] {
        let (status, found) = server.post(&eve, "/api/metrics/query", &query(of, id).to_string()).await;
        assert_eq!((status, &found["series"]), (200, &json!([])), "{of}");
    }
    let wrong = json!({ "of": "job", "ids": ["x"], "names": [], "from": at(-1), "to": at(0), "points": 5 });
    assert_eq!(server.post(ADMIN_TOKEN, "/api/metrics/query", &wrong.to_string()).await.0, 422);
    // The list of instances shows the same use.
    let rows = server.admin("/api/instances/rows", json!({})).await;
    assert_eq!(
        (&rows["rows"][0]["used"]["cpu"], &rows["rows"][0]["used"]["memory"]),
        (&json!(0.25), &json!(0.5))
    );
    server.stop().await;
}

async fn requests_of_a_service_are_kept_in_minutes(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit(&server, "web", json!({ "type": "service", "port": 80, "commands": ["true"] })).await;
    for (ago, requests) in [(65, 30), (70, 30), (3, 10)] {
        exec(
            &server,
            "INSERT INTO service_requests (run_id, window_at, proxy_id, requests, in_flight_us, waiting_us) \
             VALUES ($1, now_us() - now_us() % 60000000 + 60000000 - $2, 'one', $3, 0, 0)",
            params![run["id"].as_str().unwrap(), (ago + 60) * 1_000_000_i64, requests],
        )
        .await;
    }
    for _ in 0..2 {
        // A second sweep counts nothing twice.
        windlass_server::db::service_replicas::sweep(server.app.db()).await.unwrap();
    }
    let kept =
        server.app.db().query("SELECT requests FROM service_minutes ORDER BY at", vec![]).await.unwrap();
    let kept: Vec<i64> = kept.iter().map(|row| row.int(0).unwrap()).collect();
    assert_eq!(kept, [60, 10]);
    exec(&server, "DELETE FROM service_requests", vec![]).await;
    let now = server.app.db().now().await.unwrap();
    let body = json!({ "of": "service", "ids": ["main/web"], "names": ["requests"], "points": 60,
        "from": Timestamp(now.0 - 600_000_000).to_string(), "to": now.to_string() });
    let found = server.admin("/api/metrics/query", body).await;
    let values: Vec<f64> =
        found["series"][0]["max"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
    assert_eq!(values.first(), Some(&1.0), "60 requests in a minute: {found}");
    server.stop().await;
}

async fn the_stream_of_blocks_shows_the_jobs_on_them(ground: &ServerFixture) {
    let server = ground.start().await;
    let (_, instance, _) = sampled_run(&server).await;
    let read = async |query: &str| {
        let request = Request::get(format!("/api/metrics/stream{query}"))
            .header("host", &server.authority)
            .header("authorization", format!("Bearer {ADMIN_TOKEN}"))
            .body(Full::new(Bytes::new()))
            .unwrap();
        let stream = TcpStream::connect(&server.authority).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut body = sender.send_request(request).await.unwrap().into_body();
        let mut text = String::new();
        while !text.contains("\n\n") {
            let frame = timeout(TIMEOUT, body.frame()).await.expect("the stream is silent").unwrap().unwrap();
            text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
        assert!(text.contains("event: sample\n"), "{text}");
        let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
        serde_json::from_str::<Value>(data).unwrap()
    };
    let sample = read("").await;
    let one = &sample["instances"][0];
    assert_eq!(one["id"], instance);
    let states: Vec<&Value> = one["blocks"].as_array().unwrap().iter().map(|block| &block["state"]).collect();
    assert_eq!(states, [&json!("taken"), &json!("taken"), &json!("free"), &json!("free")]);
    assert_eq!(one["blocks"][0]["job"], json!({ "project": "main", "run": "train", "rank": 0 }));
    assert_eq!(one["blocks"][0]["used"], 0.5, "two of the four processors of its blocks");
    assert_eq!(read("?fleets=other").await["instances"], json!([]));
    server.stop().await;
}

async fn a_managed_job_shows_its_attempts_and_savings(ground: &ServerFixture) {
    let server = ground.start().await;
    let launched = server
        .admin(
            "/api/project/main/jobs/launch",
            json!({ "text": "name: sky\nresources:\n  cpus: 1+\nrun: echo hi\n" }),
        )
        .await;
    let number = launched["jobs"][0]["job_id"].clone();
    let job = server.admin("/api/project/main/jobs/get", json!({ "job_id": number })).await;
    assert_eq!((&job["tasks"][0]["attempts"], &job["tasks"][0]["after"]), (&json!([]), &json!([])));
    assert!(job["text"].as_str().unwrap().contains("echo hi"), "{job}");
    let savings = server.admin("/api/project/main/jobs/savings", json!({ "job_id": number })).await;
    assert_eq!((&savings["spent"], &savings["changeovers"]), (&json!(0.0), &json!(0)));
    let listed = server.admin("/api/project/main/jobs/list", json!({ "all_users": true })).await;
    assert!(listed[0].get("text").is_none(), "lists are short");
    server.stop().await;
}

async fn an_instance_lists_the_jobs_that_ran_on_it(ground: &ServerFixture) {
    let server = ground.start().await;
    let (_, instance, _) = sampled_run(&server).await;
    let past = submit(&server, "past", json!({ "type": "task", "commands": ["true"] })).await;
    exec(
        &server,
        "UPDATE jobs SET status = 'done', finished = TRUE, instance_id = $1, provisioned_at = 1000000, \
         finished_at = 5000000, termination_message = 'it ended' WHERE run_id = $2",
        params![instance.as_str().unwrap(), past["id"].as_str().unwrap()],
    )
    .await;
    let history = server.admin("/api/project/main/instances/history", json!({ "id": instance })).await;
    let shown: Vec<(&Value, &Value, bool)> = history["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|job| (&job["run"], &job["reason"], job["to"].is_null()))
        .collect();
    assert_eq!(shown, [(&json!("train"), &Value::Null, true), (&json!("past"), &json!("it ended"), false)]);
    server.stop().await;
}

async fn costs_are_returned_in_steps_and_by_market(ground: &ServerFixture) {
    let server = ground.start().await;
    let (_, instance, _) = sampled_run(&server).await;
    exec(
        &server,
        "UPDATE instances SET price = 6.0, started_at = now_us() - 600000000 WHERE id = $1",
        params![instance.as_str().unwrap()],
    )
    .await;
    let costs = server.admin("/api/project/main/costs/list", json!({ "every": "hour" })).await;
    let sum: f64 =
        costs["series"]["items"][0]["costs"].as_array().unwrap().iter().filter_map(Value::as_f64).sum();
    // Ten minutes of half of an instance at 6 dollars an hour.
    assert!((sum - 0.5).abs() < 0.05, "{costs}");
    assert!((costs["markets"]["on_demand"].as_f64().unwrap() - 0.5).abs() < 0.05, "{costs}");
    assert_eq!(costs["series"]["items"][0]["name"], "train");
    let by_fleet =
        server.admin("/api/project/main/costs/list", json!({ "every": "day", "by": "fleet" })).await;
    assert_eq!(by_fleet["series"]["items"][0]["name"], "gpu");
    let plain = server.admin("/api/project/main/costs/list", json!({})).await;
    assert!(plain.get("series").is_none() && plain.get("markets").is_none());
    server.stop().await;
}

async fn an_earlier_deployment_is_applied_again(ground: &ServerFixture) {
    let server = ground.start().await;
    let configuration =
        |image: &str| json!({ "type": "service", "port": 80, "image": image, "commands": ["true"] });
    let apply = async |image: &str| {
        let spec = json!({ "run_name": "web", "configuration": configuration(image) });
        let body = json!({ "plan": { "run_spec": spec }, "force": true });
        server.admin("/api/project/main/runs/apply", body).await
    };
    for image in ["one", "two", "three"] {
        apply(image).await;
    }
    let list =
        async || server.admin("/api/project/main/runs/deployments", json!({ "run_name": "web" })).await;
    let shown = |list: &Value| -> Vec<(i64, bool, String)> {
        let of = |one: &Value| {
            let text = one["text"].as_str().unwrap();
            let image = text.lines().find_map(|line| line.strip_prefix("image: ")).unwrap().to_owned();
            (one["num"].as_i64().unwrap(), one["current"] == true, image)
        };
        list["deployments"].as_array().unwrap().iter().map(of).collect()
    };
    let found = list().await;
    assert_eq!(
        shown(&found),
        [(2, true, "three".into()), (1, false, "two".into()), (0, false, "one".into())]
    );
    assert_eq!(found["deployments"][1]["user"], "admin");
    let body = json!({ "run_name": "web", "num": 0 });
    server.admin("/api/project/main/runs/redeploy", body).await;
    assert_eq!(shown(&list().await)[0], (3, true, "one".into()));
    let missing = json!({ "run_name": "web", "num": 9 }).to_string();
    assert_eq!(server.post(ADMIN_TOKEN, "/api/project/main/runs/redeploy", &missing).await.0, 400);
    server.stop().await;
}

async fn a_terminal_is_refused_without_a_running_job(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit(&server, "train", json!({ "type": "task", "commands": ["true"] })).await;
    let job = run["jobs"][0]["job_submissions"][0]["id"].as_str().unwrap().to_owned();
    let open = async |name: &str, protocol: &str| {
        let request =
            Request::get(format!("/api/project/main/runs/terminal?run_name={name}&job_submission_id={job}"))
                .header("host", &server.authority)
                .header("authorization", format!("Bearer {ADMIN_TOKEN}"))
                .header("connection", "upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-version", "13")
                .header("sec-websocket-key", "x3JJHMbDL1EzLkh9GBhXDw==")
                .header("sec-websocket-protocol", protocol)
                .body(Full::new(Bytes::new()))
                .unwrap();
        let stream = TcpStream::connect(&server.authority).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    };
    let (status, body) = open("train", "windlass.terminal.v1").await;
    assert!(status == 400 && body.contains("the job is not running: it is submitted"), "{status} {body}");
    let (status, body) = open("other", "windlass.terminal.v1").await;
    assert!(status == 400 && body.contains("not found"), "{status} {body}");
    let (status, body) = open("train", "other").await;
    assert!(status == 400 && body.contains("windlass.terminal.v1"), "{status} {body}");
    server.stop().await;
}
