//! Slim rows of lists, the summary and the search.

use serde_json::{Value, json};
use windlass_server::{
    db::{Unit, Val},
    params,
};

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    http_queue::{QueueClient, text_field},
};

on_both! {
    run_rows_show_the_columns_of_a_list
    run_rows_are_filtered_counted_and_sorted
    run_rows_are_paged_in_both_directions
    runs_that_are_submitted_between_two_pages_do_not_move_the_second
    run_rows_are_limited_to_the_projects_of_the_caller
    instance_rows_are_filtered_by_fleet_and_backend
    managed_job_rows_have_a_row_for_each_task
    container_rows_are_those_of_the_caller
    dispatchers_are_listed_with_the_containers_that_they_hold
    the_summary_counts_what_the_caller_may_see
    the_search_finds_names_and_ids_of_visible_objects
}

async fn submit(server: &TestServer, project: &str, name: &str, more: Value) -> Value {
    let mut configuration =
        json!({ "type": "task", "commands": ["true"], "resources": { "cpu": 2, "memory": "4GB" } });
    for (key, value) in more.as_object().unwrap() {
        configuration[key] = value.clone();
    }
    let spec = json!({ "run_name": name, "configuration": configuration });
    let path = format!("/api/project/{project}/runs/apply");
    server.admin(&path, json!({ "plan": { "run_spec": spec }, "force": false })).await
}

async fn exec(server: &TestServer, sql: &'static str, params: Vec<Val>) {
    server.app.db().write(Unit::new().exec(sql, params)).await.unwrap().done().unwrap();
}

fn names(rows: &Value) -> Vec<&str> {
    rows["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

async fn run_rows_show_the_columns_of_a_list(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit(&server, "main", "train", json!({ "nodes": 2 })).await;
    let message = "fleet h100: needs 16 GPUs, has 8";
    exec(&server, "UPDATE jobs SET status_message = $1", params![message]).await;
    let listed = server.admin("/api/runs/rows", json!({})).await;
    let row = &listed["rows"][0];
    for (field, value) in [
        ("id", run["id"].clone()),
        ("project", json!("main")),
        ("name", json!("train")),
        ("type", json!("task")),
        ("user", json!("admin")),
        ("status", json!("submitted")),
        ("reason", json!(message)),
        ("queue_position", json!(0)),
        ("resources", json!("2 CPU, 4 GB")),
        ("gpus", json!(0)),
        ("ready", json!(0)),
        ("wanted", json!(2)),
        ("attempts", json!(1)),
        ("cost", json!(0.0)),
        ("submission_id", run["jobs"][0]["job_submissions"][0]["id"].clone()),
        ("submitted_at", run["submitted_at"].clone()),
    ] {
        assert_eq!(row[field], value, "{field} of {row}");
    }
    assert!(row.get("finished_at").is_none() && row.get("gpu").is_none(), "null is left out: {row}");
    assert_eq!((&listed["counts"], &listed["total"]), (&json!({ "submitted": 1 }), &json!(1)));
    assert!(listed["as_of"].as_i64().unwrap() > 1_700_000_000_000_000);

    exec(
        &server,
        "UPDATE jobs SET status = 'failed', finished = TRUE, exit_status = 3, termination_reason = $1, \
         running_at = submitted_at, finished_at = submitted_at",
        params!["container_exited_with_error"],
    )
    .await;
    exec(
        &server,
        "UPDATE runs SET status = 'failed', finished = TRUE, finished_at = submitted_at, termination_reason = $1",
        params!["job_failed"],
    )
    .await;
    let listed = server.admin("/api/runs/rows", json!({})).await;
    let row = &listed["rows"][0];
    assert_eq!((&row["reason"], &row["termination_reason"]), (&json!("exit code 3"), &json!("job_failed")));
    assert_eq!((&row["started_at"], &row["finished_at"]), (&run["submitted_at"], &run["submitted_at"]));
    assert!(row.get("queue_position").is_none(), "{row}");
    server.stop().await;
}

async fn run_rows_are_filtered_counted_and_sorted(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut ids = Vec::new();
    for name in ["alpha", "beta", "gamma"] {
        ids.push(submit(&server, "main", name, json!({})).await["id"].as_str().unwrap().to_owned());
    }
    submit(&server, "main", "web", json!({ "type": "service", "port": 80 })).await;
    exec(&server, "UPDATE runs SET status = 'failed', finished = TRUE, finished_at = now_us(), termination_message = 'Out of Memory' WHERE name = $1", params!["beta"]).await;
    exec(&server, "UPDATE runs SET submitted_at = 1000000 WHERE name = $1", params!["alpha"]).await;
    let list = async |body: Value| server.admin("/api/runs/rows", body).await;
    let all = list(json!({ "sort": "name" })).await;
    assert_eq!(names(&all), ["alpha", "beta", "gamma", "web"]);
    assert_eq!(names(&list(json!({ "sort": "-name" })).await), ["web", "gamma", "beta", "alpha"]);
    assert_eq!(names(&list(json!({})).await).last(), Some(&"alpha"), "newest first");
    for sort in ["status", "-user", "cost", "-duration", "-submitted_at"] {
        assert_eq!(list(json!({ "sort": sort })).await["rows"].as_array().unwrap().len(), 4, "{sort}");
    }
    let failed = list(json!({ "statuses": ["failed"] })).await;
    assert_eq!((names(&failed), &failed["total"]), (vec!["beta"], &json!(1)));
    assert_eq!(failed["counts"], json!({ "submitted": 3, "failed": 1 }), "counts ignore the statuses");
    for (body, found) in [
        (json!({ "types": ["service"] }), vec!["web"]),
        (json!({ "text": "MEM" }), vec!["beta"]),
        (json!({ "text": "a%" }), vec![]),
        (json!({ "text": &ids[2][..8] }), vec!["gamma"]),
        (json!({ "text": "eta" }), vec!["beta"]),
        (json!({ "users": ["admin"], "types": ["task"] }), vec!["alpha", "beta", "gamma"]),
        (json!({ "users": ["nobody"] }), vec![]),
        (json!({ "fleets": ["none"] }), vec![]),
        (json!({ "until": "2001-01-01T00:00:00Z" }), vec!["alpha"]),
        (json!({ "since": "2001-01-01T00:00:00Z", "text": "amma" }), vec!["gamma"]),
    ] {
        let mut sorted = body.clone();
        sorted["sort"] = json!("name");
        assert_eq!(names(&list(sorted).await), found, "{body}");
    }
    for (body, field) in [
        (json!({ "sort": "spec" }), "sort"),
        (json!({ "limit": 501 }), "limit"),
        (json!({ "cursor": "?" }), "cursor"),
    ] {
        let (status, answer) = server.post(ADMIN_TOKEN, "/api/runs/rows", &body.to_string()).await;
        assert_eq!((status, &answer["detail"][0]["loc"][1]), (422, &json!(field)));
    }
    server.stop().await;
}

async fn run_rows_are_paged_in_both_directions(ground: &ServerFixture) {
    let server = ground.start().await;
    for n in 0..5 {
        submit(&server, "main", &format!("run-{n}"), json!({})).await;
    }
    let list = async |cursor: &Value| {
        server.admin("/api/runs/rows", json!({ "sort": "name", "limit": 2, "cursor": cursor })).await
    };
    let first = list(&Value::Null).await;
    assert_eq!((names(&first), &first["prev"]), (vec!["run-0", "run-1"], &Value::Null));
    let second = list(&first["next"]).await;
    assert_eq!(names(&second), ["run-2", "run-3"]);
    let third = list(&second["next"]).await;
    assert_eq!((names(&third), &third["next"]), (vec!["run-4"], &Value::Null));
    assert_eq!(names(&list(&third["prev"]).await), ["run-2", "run-3"]);
    assert_eq!(third["total"], 5);
    let counts = server.admin("/api/runs/rows", json!({ "limit": 0 })).await;
    assert_eq!((&counts["rows"], &counts["total"], &counts["next"]), (&json!([]), &json!(5), &Value::Null));
    server.stop().await;
}

async fn runs_that_are_submitted_between_two_pages_do_not_move_the_second(ground: &ServerFixture) {
    let server = ground.start().await;
    for n in 0..5 {
        submit(&server, "main", &format!("run-{n}"), json!({})).await;
    }
    // Two at the same time, whose order is that of their ids.
    let unit = Unit::new().exec("UPDATE runs SET submitted_at = 7 WHERE name IN ('run-0', 'run-1')", vec![]);
    server.app.db().write(unit).await.unwrap().done().unwrap();
    for (sort, ascends) in [("-submitted_at", false), ("submitted_at", true)] {
        let list = async |cursor: &Value| {
            server.admin("/api/runs/rows", json!({ "sort": sort, "limit": 2, "cursor": cursor })).await
        };
        let all = server.admin("/api/runs/rows", json!({ "sort": sort })).await;
        let all: Vec<String> = names(&all).iter().map(ToString::to_string).collect();
        let first = list(&Value::Null).await;
        assert_eq!((names(&first), &first["prev"]), (vec![all[0].as_str(), &all[1]], &Value::Null));
        let added = format!("added-{ascends}");
        submit(&server, "main", &added, json!({})).await;
        let second = list(&first["next"]).await;
        assert_eq!(names(&second), [&all[2], &all[3]]);
        assert_eq!(names(&list(&second["prev"]).await), [&all[0], &all[1]]);
        let mut page = second;
        let mut rest = Vec::new();
        while !page["next"].is_null() {
            page = list(&page["next"]).await;
            rest.extend(names(&page).iter().map(ToString::to_string));
        }
        let mut expected = all[4..].to_vec();
        expected.extend(ascends.then_some(added));
        assert_eq!(rest, expected);
    }
    let wrong = json!({ "cursor": "YWZ0ZXIgMSB4" }).to_string();
    assert_eq!(server.post(ADMIN_TOKEN, "/api/runs/rows", &wrong).await.0, 422, "after 1 x");
    server.stop().await;
}

async fn run_rows_are_limited_to_the_projects_of_the_caller(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    submit(&server, "main", "hidden", json!({})).await;
    submit(&server, "lab", "shown", json!({})).await;
    for body in [json!({}), json!({ "projects": ["lab", "main"] })] {
        let listed = server.ok(&mira, "/api/runs/rows", body).await;
        assert_eq!((names(&listed), &listed["counts"]), (vec!["shown"], &json!({ "submitted": 1 })));
    }
    assert_eq!(names(&server.ok(&mira, "/api/runs/rows", json!({ "projects": ["main"] })).await), [""; 0]);
    let main = server.admin("/api/runs/rows", json!({ "projects": ["main"] })).await;
    assert_eq!(names(&main), ["hidden"]);
    assert_eq!(server.admin("/api/runs/rows", json!({})).await["total"], 2, "an admin sees all projects");
    server.stop().await;
}

pub(crate) async fn add_instance(server: &TestServer, name: &str, fleet: &Value, status: &str) {
    let db = server.app.db();
    let project = db.query_opt("SELECT id FROM projects WHERE name = 'main'", vec![]).await.unwrap().unwrap();
    let kind = json!({ "name": "big", "resources": { "cpus": 8, "memory_mib": 65_536, "gpus": [{ "name": "H100", "memory_mib": 81_920 }] } });
    let is_over = status == "terminated";
    let values = vec![
        ("id", db.new_id().unwrap().into()),
        ("project_id", project.text(0).unwrap().into()),
        ("fleet_id", fleet.as_str().unwrap().into()),
        ("name", name.into()),
        ("instance_num", i64::try_from(name.len()).unwrap().into()),
        ("backend", "remote".into()),
        ("status", status.into()),
        ("finished", is_over.into()),
        ("total_blocks", 4_i64.into()),
        ("busy_blocks", 1_i64.into()),
        ("price", 2.5.into()),
        ("instance_type", kind.to_string().into()),
        ("unreachable", (name == "one").into()),
        ("unreachable_since", Val::Now),
        ("created_at", Val::Now),
        ("last_processed_at", Val::Now),
    ];
    db.write(Unit::new().insert("instances", values)).await.unwrap().done().unwrap();
}

pub(crate) async fn add_fleet(server: &TestServer, name: &str) -> Value {
    let spec = json!({ "configuration": { "type": "fleet", "name": name, "nodes": 0 }, "profile": { "name": "default" } });
    let fleet = server
        .admin("/api/project/main/fleets/apply", json!({ "plan": { "spec": spec }, "force": false }))
        .await;
    fleet["id"].clone()
}

async fn instance_rows_are_filtered_by_fleet_and_backend(ground: &ServerFixture) {
    let server = ground.start().await;
    let (gpu, cpu) = (add_fleet(&server, "gpu").await, add_fleet(&server, "cpu").await);
    add_instance(&server, "one", &gpu, "busy").await;
    add_instance(&server, "three", &gpu, "idle").await;
    add_instance(&server, "fourth", &cpu, "idle").await;
    add_instance(&server, "bygone.", &cpu, "terminated").await;
    let list = async |body: Value| server.admin("/api/instances/rows", body).await;
    let all = list(json!({})).await;
    assert_eq!(
        (names(&all), &all["counts"]),
        (vec!["fourth", "one", "three"], &json!({ "idle": 2, "busy": 1 }))
    );
    let row = &all["rows"][1];
    for (field, value) in [
        ("fleet", json!("gpu")),
        ("resources", json!("1 × H100 80 GB, 8 CPU, 64 GB")),
        ("gpu", json!("H100")),
        ("blocks_total", json!(4)),
        ("blocks_busy", json!(1)),
        ("price", json!(2.5)),
        ("jobs", json!([])),
        ("draining", json!(false)),
    ] {
        assert_eq!(row[field], value, "{field} of {row}");
    }
    assert!(row["unreachable_since"].is_string() && all["rows"][0].get("unreachable_since").is_none());
    assert_eq!(names(&list(json!({ "fleets": ["gpu"], "sort": "-name" })).await), ["three", "one"]);
    assert_eq!(names(&list(json!({ "types": [row["backend"]], "text": "four" })).await), ["fourth"]);
    assert_eq!(names(&list(json!({ "types": ["nothing"] })).await), [""; 0]);
    assert_eq!(names(&list(json!({ "statuses": ["terminated"] })).await), ["bygone."]);
    assert_eq!(names(&list(json!({ "limit": 1, "sort": "name" })).await), ["fourth"]);
    let outsider = server.user("mira").await;
    assert_eq!(server.ok(&outsider, "/api/instances/rows", json!({})).await["total"], 0);
    server.stop().await;
}

async fn managed_job_rows_have_a_row_for_each_task(ground: &ServerFixture) {
    let server = ground.start().await;
    let text = "name: pipe\n---\nname: first\nrun: echo 1\n---\nname: second\nrun: echo 2\n";
    server.admin("/api/project/main/jobs/launch", json!({ "text": text })).await;
    let listed = server.admin("/api/jobs/rows", json!({ "sort": "name" })).await;
    let rows = listed["rows"].as_array().unwrap();
    let shown: Vec<_> =
        rows.iter().map(|row| (row["id"].as_str().unwrap(), row["task"].as_str().unwrap())).collect();
    assert_eq!(shown, [("1/0", "first"), ("1/1", "second")]);
    assert_eq!(
        (&rows[0]["tasks"], &rows[0]["status"], &rows[0]["user"]),
        (&json!(2), &json!("PENDING"), &json!("admin"))
    );
    assert_eq!((&listed["counts"], &rows[0]["cost"]), (&json!({ "PENDING": 2 }), &json!(0.0)));
    assert_eq!(
        server.admin("/api/jobs/rows", json!({ "text": "pip", "limit": 1 })).await["rows"][0]["task_id"],
        0
    );
    let outsider = server.user("mira").await;
    assert_eq!(server.ok(&outsider, "/api/jobs/rows", json!({})).await["total"], 0);
    server.stop().await;
}

async fn container_rows_are_those_of_the_caller(ground: &ServerFixture) {
    let server = ground.start().await;
    let queue = QueueClient { server: &server };
    let mira = server.create_queue_user("mira").await;
    queue.submit(&mira, json!({ "name": "align" })).await;
    queue.submit(ADMIN_TOKEN, json!({ "name": "merge", "priority": 7 })).await;
    let listed = server.ok(&mira, "/api/containers/rows", json!({})).await;
    assert_eq!(names(&listed), ["align"]);
    let row = &listed["rows"][0];
    assert_eq!((&row["state"], &row["owner"], &row["id"]), (&json!("Queued"), &json!("mira"), &row["uuid"]));
    assert_eq!(listed["counts"], json!({ "Queued": 1 }));
    let all = server.admin("/api/containers/rows", json!({ "sort": "-priority" })).await;
    assert_eq!(names(&all), ["merge", "align"]);
    assert_eq!(names(&server.admin("/api/containers/rows", json!({ "users": ["mira"] })).await), ["align"]);
    server.stop().await;
}

async fn dispatchers_are_listed_with_the_containers_that_they_hold(ground: &ServerFixture) {
    let server = ground.start().await;
    let queue = QueueClient { server: &server };
    let mira = server.create_queue_user("mira").await;
    let (slurm, local) = (queue.dispatcher().await, queue.dispatcher().await);
    let nodes = json!([{ "partition": "main", "cpus": 16, "memory_mib": 65536, "gpus": 4, "gpu_type": "a100", "count": 3 }]);
    let announce = async |name: &str| {
        let body = json!({ "dispatcher": { "kind": "slurm", "nodes": nodes } });
        queue.ok(&slurm, "PUT", &format!("dispatchers/{name}"), body).await;
    };
    announce("before").await;
    announce("hpc").await;
    let hold = async |token: &str, holder: &str, seconds: u64| {
        let lease = json!({ "lease": { "holder": holder, "described": format!("process of {holder}"), "seconds": seconds } });
        queue.ok(token, "PUT", "dispatchers/current/lease", lease).await;
    };
    hold(&slurm, "login-1", 60).await;
    hold(&local, "bench-2", 60).await;
    let of_mira = text_field(&queue.submit(&mira, json!({})).await, "container_uuid");
    let (_, of_admin) = queue.requested(json!({})).await;
    queue.requested(json!({ "name": "waits" })).await;
    queue.ok(&slurm, "POST", &format!("containers/{of_mira}/lock"), Value::Null).await;
    queue.ok(&local, "POST", &format!("containers/{of_admin}/lock"), Value::Null).await;
    let running = json!({ "container": { "state": "Running" } });
    queue.ok(&local, "PUT", &format!("containers/{of_admin}"), running).await;

    let list = async |token: &str| server.ok(token, "/api/dispatchers/list", json!({})).await;
    let short = |listed: &Value| -> Vec<Value> {
        let fields = ["name", "kind", "online", "process", "locked", "running"];
        let of = |one: &Value| fields.iter().map(|field| one[*field].clone()).collect();
        listed["dispatchers"].as_array().unwrap().iter().map(of).collect()
    };
    let all = list(ADMIN_TOKEN).await;
    assert_eq!(all["queued"], 1);
    let none = Value::Null;
    assert_eq!(
        short(&all),
        [
            json!(["before", "slurm", true, none, 0, 0]),
            json!(["hpc", "slurm", true, "process of login-1", 1, 0]),
            json!([none, none, true, "process of bench-2", 0, 1]),
        ]
    );
    assert_eq!(all["dispatchers"][1]["nodes"], nodes);
    assert!(all["dispatchers"][1]["seen_at"].is_string() && all["dispatchers"][2]["held_until"].is_string());
    // Others see no processes, and count only their own containers.
    let own = list(&mira).await;
    assert_eq!(own["queued"], 0);
    assert_eq!(
        short(&own),
        [
            json!(["before", "slurm", true, none, 0, 0]),
            json!(["hpc", "slurm", true, none, 1, 0]),
            json!([none, none, true, none, 0, 0]),
        ]
    );
    assert!(own["dispatchers"].as_array().unwrap().iter().all(|one| one["held_until"].is_null()), "{own}");
    let outsider = server.user("rolf").await;
    assert_eq!(list(&outsider).await["dispatchers"], json!([]), "the user may not use the queue");

    exec(&server, "UPDATE dispatchers SET seen_at = seen_at - 600000000", params![]).await;
    hold(&local, "bench-2", 0).await;
    let after = list(ADMIN_TOKEN).await;
    let online: Vec<&Value> =
        after["dispatchers"].as_array().unwrap().iter().map(|one| &one["online"]).collect();
    assert_eq!(online, [&json!(false); 3]);
    assert_eq!(after["dispatchers"][2]["process"], "process of bench-2", "it is still known where it was");
    server.stop().await;
}

async fn the_summary_counts_what_the_caller_may_see(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    submit(&server, "main", "one-run", json!({})).await;
    submit(&server, "lab", "other", json!({})).await;
    let fleet = add_fleet(&server, "gpu").await;
    add_instance(&server, "one", &fleet, "busy").await;
    add_instance(&server, "three", &fleet, "idle").await;
    exec(
        &server,
        "UPDATE jobs SET submitted_at = now_us() - 3600000000 WHERE job_name LIKE $1",
        params!["one-run%"],
    )
    .await;
    let summary = server.admin("/api/summary", json!({})).await;
    assert_eq!((&summary["runs"], &summary["queue"]["length"]), (&json!({ "submitted": 2 }), &json!(2)));
    assert_eq!(summary["instances"], json!({ "busy": 1, "idle": 1 }));
    assert_eq!((&summary["blocks"]["total"], &summary["blocks"]["taken"]), (&json!(8), &json!(2)));
    assert_eq!((&summary["gpus"]["total"], &summary["cost"]["per_hour"]), (&json!(2), &json!(5.0)));
    let attention = summary["attention"].as_array().unwrap();
    let what: Vec<_> =
        attention.iter().map(|one| (one["what"].as_str().unwrap(), one["name"].as_str().unwrap())).collect();
    assert_eq!(what, [("unreachable", "one"), ("waiting", "one-run")]);
    assert!(summary["pipelines"].is_array());
    let last = |summary: &Value, of: &str| {
        let steps = summary["history"][of].as_array().unwrap();
        assert_eq!(steps.len(), 30);
        (steps[0].as_i64().unwrap(), steps[29].as_i64().unwrap())
    };
    assert_eq!((last(&summary, "waiting"), last(&summary, "running")), ((0, 2), (0, 0)));
    let own = server.ok(&mira, "/api/summary", json!({})).await;
    assert_eq!((&own["runs"], &own["instances"]), (&json!({ "submitted": 1 }), &json!({})));
    assert_eq!(last(&own, "waiting"), (0, 1));
    assert!(own.get("pipelines").is_none());
    let lab = server.admin("/api/summary", json!({ "projects": ["lab"] })).await;
    assert_eq!(lab["runs"], json!({ "submitted": 1 }));
    server.stop().await;
}

async fn the_search_finds_names_and_ids_of_visible_objects(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let run = submit(&server, "main", "train-llama", json!({})).await;
    submit(&server, "main", "llama-eval", json!({})).await;
    add_fleet(&server, "llamas").await;
    server.admin("/api/project/main/jobs/launch", json!({ "text": "name: tune-llama\nrun: echo\n" })).await;
    let find = async |token: &str, body: Value| -> Vec<String> {
        let found = server.ok(token, "/api/search", body).await;
        let hits = found["hits"].as_array().unwrap();
        hits.iter()
            .map(|hit| format!("{} {}", hit["kind"].as_str().unwrap(), hit["name"].as_str().unwrap()))
            .collect()
    };
    let mut found = find(ADMIN_TOKEN, json!({ "text": "Llama" })).await;
    assert!(
        found[..2].contains(&"run llama-eval".to_owned()) && found[..2].contains(&"fleet llamas".to_owned()),
        "names that begin with the text come first: {found:?}"
    );
    found.sort_unstable();
    assert_eq!(found, ["fleet llamas", "managed-job tune-llama", "run llama-eval", "run train-llama"]);
    assert_eq!(
        find(ADMIN_TOKEN, json!({ "text": run["id"].as_str().unwrap()[..8] })).await,
        ["run train-llama"]
    );
    assert_eq!(find(ADMIN_TOKEN, json!({ "text": "llama", "limit": 1 })).await.len(), 1);
    assert_eq!(find(ADMIN_TOKEN, json!({ "text": "mai" })).await, ["project main"]);
    assert_eq!(find(&mira, json!({ "text": "llama" })).await, [""; 0]);
    assert_eq!(find(ADMIN_TOKEN, json!({ "text": "%" })).await, [""; 0]);
    server.stop().await;
}
