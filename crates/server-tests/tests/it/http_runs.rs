//! Runs over HTTP: plan, apply, list, stop, delete.

use serde_json::{Value, json};
use windlass_server::{config::SettingsSource, params};

use crate::{
    dstack_wire,
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
};

on_both! {
    a_plan_returns_the_given_spec_and_a_completed_copy
    a_submitted_run_is_read_back_as_it_was_planned
    a_run_without_a_name_gets_one_and_names_are_unique
    a_finished_run_releases_its_name_and_is_still_found_by_id
    an_active_run_changes_in_place_or_not_at_all
    l14_a_stop_is_stored_as_a_request_and_does_not_change_the_status
    only_finished_runs_are_deleted
    a5_pages_of_runs_neither_skip_nor_repeat
    a1_the_same_key_and_body_create_one_run_and_another_body_conflicts
    a1_concurrent_repeats_with_one_key_return_the_same_run
    a_scheduled_run_waits_without_jobs
    a_service_run_shows_its_url_and_replicas
    invalid_run_specs_are_refused_with_the_reason
    a_restart_keeps_every_run
    a_plan_offers_the_instances_that_fit
    runs_on_unknown_fleets_or_backends_are_refused_with_those_that_exist
}

const APPLY: &str = "/api/project/main/runs/apply";
const GET: &str = "/api/project/main/runs/get";
const PLAN: &str = "/api/project/main/runs/get_plan";

fn task_spec(name: Value) -> Value {
    json!({
        "run_name": name, "repo_id": null, "repo_data": null, "configuration_path": "train.yml",
        "configuration": { "type": "task", "image": "debian:12", "user": "root", "commands": ["python train.py"],
            "env": { "SEED": "7" }, "ports": [{ "local_port": 6006, "container_port": 6006 }],
            "resources": { "cpu": { "count": { "min": 4, "max": null } }, "memory": { "min": 16.0, "max": null },
                "gpu": { "name": ["H100"], "count": { "min": 1, "max": 1 } } } },
        "profile": { "name": "default", "default": false }, "ssh_key_pub": null,
    })
}

async fn submit_run(server: &TestServer, spec: &Value) -> Value {
    server
        .admin(APPLY, json!({ "plan": { "run_spec": spec, "current_resource": null }, "force": false }))
        .await
}

/// The stored run, as in the response to its submission.
async fn get_run(server: &TestServer, requested: Value) -> Value {
    without_position(server.admin(GET, requested).await)
}

/// Removes the queue position, which changes and is in no response to a submit.
fn without_position(mut run: Value) -> Value {
    let latest = run["latest_job_submission"].as_object_mut().unwrap().remove("queue_position");
    let of_job = run["jobs"][0]["job_submissions"][0].as_object_mut().unwrap().remove("queue_position");
    assert_eq!(latest, of_job);
    run
}

/// Finishes a run as the pipelines do.
async fn finish_run(server: &TestServer, run: &Value) {
    let unit = windlass_server::db::Unit::new()
        .exec(
            "UPDATE jobs SET status = 'done', finished = TRUE, finished_at = now_us(), \
             termination_reason = 'done_by_runner', exit_status = 0 WHERE run_id = $1",
            params![run["id"].as_str().unwrap()],
        )
        .exec(
            "UPDATE runs SET status = 'done', finished = TRUE, termination_reason = 'all_jobs_done' WHERE id = $1",
            params![run["id"].as_str().unwrap()],
        );
    server.app.db().write(unit).await.unwrap().done().unwrap();
}

async fn a_plan_returns_the_given_spec_and_a_completed_copy(ground: &ServerFixture) {
    let server = ground.start().await;
    let spec = task_spec(json!("train-1"));
    let plan =
        server.admin("/api/project/main/runs/get_plan", json!({ "run_spec": spec, "max_offers": 3 })).await;
    dstack_wire::assert_run_plan(&plan);
    assert_eq!(plan["run_spec"], spec);
    let effective = &plan["effective_run_spec"];
    let me = server.admin("/api/users/get_my_user", json!({})).await;
    assert_eq!(effective["ssh_key_pub"], me["ssh_public_key"]);
    assert_eq!(
        (&effective["repo_id"], &effective["repo_data"]),
        (&json!("none"), &json!({ "repo_type": "virtual" }))
    );
    assert_eq!(
        (&effective["configuration"]["nodes"], &effective["configuration"]["priority"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(effective["configuration"]["resources"]["gpu"]["vendor"], "nvidia");
    assert_eq!((&plan["action"], &plan["current_resource"]), (&json!("create"), &Value::Null));
    let job = &plan["job_plans"][0]["job_spec"];
    assert_eq!(job["job_name"], "train-1-0-0");
    assert_eq!(job["commands"], json!(["/bin/sh", "-i", "-c", "python train.py"]));
    assert_eq!(job["app_specs"][0]["port"], 6006);
    let unnamed =
        server.admin("/api/project/main/runs/get_plan", json!({ "run_spec": task_spec(Value::Null) })).await;
    assert_eq!(unnamed["effective_run_spec"]["run_name"], Value::Null);
    assert_eq!(server.admin("/api/runs/list", json!({})).await, json!([]), "a plan submits nothing");
    server.stop().await;
}

async fn a_submitted_run_is_read_back_as_it_was_planned(ground: &ServerFixture) {
    let server = ground.start().await;
    let spec = task_spec(json!("train-1"));
    let plan = server.admin("/api/project/main/runs/get_plan", json!({ "run_spec": spec })).await;
    let run = submit_run(&server, &spec).await;
    dstack_wire::assert_run(&run);
    assert_eq!(run["run_spec"], plan["effective_run_spec"]);
    assert_eq!((&run["status"], &run["status_message"]), (&json!("submitted"), &json!("submitted")));
    assert_eq!(
        (&run["user"], &run["project_name"], &run["deleted"]),
        (&json!("admin"), &json!("main"), &json!(false))
    );
    assert_eq!(run["jobs"][0]["job_spec"], plan["job_plans"][0]["job_spec"]);
    assert_eq!(run["latest_job_submission"], run["jobs"][0]["job_submissions"][0]);
    assert_eq!(get_run(&server, json!({ "run_name": "train-1", "id": null })).await, run);
    assert_eq!(get_run(&server, json!({ "id": run["id"] })).await, run);
    let listed =
        server.admin("/api/runs/list", json!({ "project_name": "main", "job_submissions_limit": 1 })).await;
    let [listed] = listed.as_array().unwrap().as_slice() else { panic!("not one run: {listed}") };
    assert_eq!(without_position(listed.clone()), run);
    let bare = server.admin("/api/runs/list", json!({ "include_jobs": false })).await;
    assert_eq!(bare[0]["jobs"], json!([]));
    // The same plan again: the second one reports that the run exists.
    let again = server.admin("/api/project/main/runs/get_plan", json!({ "run_spec": spec })).await;
    assert_eq!((&again["action"], &again["current_resource"]), (&json!("update"), &run));
    let events = server.admin("/api/events/list", json!({ "within_runs": [run["id"]] })).await;
    let messages: Vec<_> =
        events.as_array().unwrap().iter().map(|event| event["message"].as_str().unwrap()).collect();
    assert!(messages.contains(&"Run submitted") && messages.contains(&"Job submitted"), "{messages:?}");
    server.stop().await;
}

async fn a_run_without_a_name_gets_one_and_names_are_unique(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit_run(&server, &task_spec(Value::Null)).await;
    let name = run["run_spec"]["run_name"].as_str().unwrap();
    assert_eq!(name.split('-').count(), 3, "{name}");
    assert_eq!(run["jobs"][0]["job_spec"]["job_name"], format!("{name}-0-0"));
    let mut by_configuration = task_spec(Value::Null);
    by_configuration["configuration"]["name"] = json!("own-name");
    let run = submit_run(&server, &by_configuration).await;
    assert_eq!(run["run_spec"]["run_name"], "own-name");
    let blind = json!({ "plan": { "run_spec": task_spec(json!("own-name")) }, "force": false });
    let message = server.refused(ADMIN_TOKEN, APPLY, blind, "error").await;
    assert!(message.contains("changed"), "{message}");
    server.stop().await;
}

async fn a_finished_run_releases_its_name_and_is_still_found_by_id(ground: &ServerFixture) {
    let server = ground.start().await;
    let first = submit_run(&server, &task_spec(json!("train-1"))).await;
    finish_run(&server, &first).await;
    let ended = server.admin(GET, json!({ "run_name": "train-1" })).await;
    assert_eq!((&ended["status"], &ended["termination_reason"]), (&json!("done"), &json!("all_jobs_done")));
    assert_eq!(ended["jobs"][0]["job_submissions"][0]["status_message"], "exited (0)");
    let plan = server
        .admin("/api/project/main/runs/get_plan", json!({ "run_spec": task_spec(json!("train-1")) }))
        .await;
    assert_eq!((&plan["action"], &plan["current_resource"]["id"]), (&json!("create"), &first["id"]));
    let second = submit_run(&server, &task_spec(json!("train-1"))).await;
    assert_ne!(second["id"], first["id"]);
    assert_eq!(server.admin(GET, json!({ "run_name": "train-1" })).await["id"], second["id"]);
    assert_eq!(server.admin(GET, json!({ "id": first["id"] })).await["deleted"], true);
    assert_eq!(server.admin("/api/runs/list", json!({})).await.as_array().unwrap().len(), 1);
    server.stop().await;
}

async fn an_active_run_changes_in_place_or_not_at_all(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit_run(&server, &task_spec(json!("train-1"))).await;
    let seen = json!({ "id": run["id"], "run_spec": run["run_spec"], "jobs": [] });
    let mut spec = run["run_spec"].clone();
    spec["configuration"]["priority"] = json!(50);
    let changed = server
        .admin(APPLY, json!({ "plan": { "run_spec": spec, "current_resource": seen }, "force": false }))
        .await;
    assert_eq!((&changed["id"], &changed["run_spec"]["configuration"]["priority"]), (&run["id"], &json!(50)));
    // The resource in the plan is outdated.
    let stale = json!({ "plan": { "run_spec": spec, "current_resource": seen }, "force": false });
    let message = server.refused(ADMIN_TOKEN, APPLY, stale, "error").await;
    assert!(message.contains("changed"), "{message}");
    spec["configuration"]["commands"] = json!(["other"]);
    let forced = json!({ "plan": { "run_spec": spec, "current_resource": null }, "force": true });
    let message = server.refused(ADMIN_TOKEN, APPLY, forced, "error").await;
    assert!(message.contains("commands"), "{message}");
    let plan = server.admin("/api/project/main/runs/get_plan", json!({ "run_spec": spec })).await;
    assert_eq!(plan["action"], "create");
    server.stop().await;
}

async fn l14_a_stop_is_stored_as_a_request_and_does_not_change_the_status(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit_run(&server, &task_spec(json!("train-1"))).await;
    // A pipeline holds the row.
    let token = server.app.db().new_id().unwrap();
    let lock = windlass_server::db::Unit::new().exec(
        "UPDATE runs SET lock_token = $2, lock_owner = 'runs', lock_expires_at = now_us() + 30000000 WHERE id = $1",
        params![run["id"].as_str().unwrap(), token],
    );
    server.app.db().write(lock).await.unwrap().done().unwrap();
    let hinted = server.app.hints().subscribe("runs");
    let stop = json!({ "runs_names": ["train-1", "unknown"], "abort": false });
    assert_eq!(server.admin("/api/project/main/runs/stop", stop).await, Value::Null);
    assert!(hinted.take(), "the pipeline is told");
    let sql = "SELECT status, stop_asked_at IS NOT NULL, abort_asked, lock_token FROM runs WHERE id = $1";
    let row = server.app.db().query_opt(sql, params![run["id"].as_str().unwrap()]).await.unwrap().unwrap();
    assert_eq!((row.str(0).unwrap(), row.bool(1).unwrap(), row.bool(2).unwrap()), ("submitted", true, false));
    assert_eq!(row.uuid(3).unwrap(), token, "the holder keeps its lock");
    server.admin("/api/project/main/runs/stop", json!({ "runs_names": ["train-1"], "abort": true })).await;
    let row = server.app.db().query_opt(sql, params![run["id"].as_str().unwrap()]).await.unwrap().unwrap();
    assert!(row.bool(2).unwrap());
    // A run that was requested to stop accepts no new specification.
    let mut spec = run["run_spec"].clone();
    spec["configuration"]["priority"] = json!(1);
    server.refused(ADMIN_TOKEN, APPLY, json!({ "plan": { "run_spec": spec }, "force": true }), "error").await;
    server.stop().await;
}

async fn only_finished_runs_are_deleted(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit_run(&server, &task_spec(json!("train-1"))).await;
    let names = json!({ "runs_names": ["train-1", "unknown"] });
    server.refused(ADMIN_TOKEN, "/api/project/main/runs/delete", names.clone(), "error").await;
    finish_run(&server, &run).await;
    server.admin("/api/project/main/runs/delete", names).await;
    server.refused(ADMIN_TOKEN, GET, json!({ "run_name": "train-1" }), "resource_not_exists").await;
    assert_eq!(server.admin("/api/runs/list", json!({})).await, json!([]));
    server.stop().await;
}

async fn a5_pages_of_runs_neither_skip_nor_repeat(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut made = Vec::new();
    for n in 0..7 {
        made.push(submit_run(&server, &task_spec(json!(format!("run-{n}")))).await["id"].clone());
    }
    let mut seen = Vec::new();
    let (mut at, mut id) = (Value::Null, Value::Null);
    loop {
        let request = json!({ "limit": 3, "prev_submitted_at": at, "prev_run_id": id, "only_active": true });
        let page = server.admin("/api/runs/list", request).await;
        let Some(last) = page.as_array().unwrap().last() else { break };
        (at, id) = (last["submitted_at"].clone(), last["id"].clone());
        // New runs appear before the page that is being read.
        submit_run(&server, &task_spec(Value::Null)).await;
        seen.extend(page.as_array().unwrap().iter().map(|run| run["id"].clone()));
    }
    made.reverse();
    assert_eq!(seen, made, "newest first");
    assert_eq!(server.post(ADMIN_TOKEN, "/api/runs/list", r#"{"limit":101}"#).await.0, 422);
    server
        .refused(ADMIN_TOKEN, "/api/runs/list", json!({ "username": "nobody" }), "resource_not_exists")
        .await;
    server.stop().await;
}

async fn send_with_key(server: &TestServer, key: &str, body: &Value) -> (u16, Value) {
    use http_body_util::Full;
    use hyper::{Request, body::Bytes};
    let request = Request::post(APPLY)
        .header("host", &server.authority)
        .header("authorization", format!("Bearer {ADMIN_TOKEN}"))
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let (status, body) = server.send(request).await;
    (status, serde_json::from_slice(&body).unwrap())
}

async fn a1_the_same_key_and_body_create_one_run_and_another_body_conflicts(ground: &ServerFixture) {
    let server = ground.start().await;
    let send = async |key: &str, body: &Value| send_with_key(&server, key, body).await;
    let body = json!({ "plan": { "run_spec": task_spec(Value::Null) }, "force": false });
    let (first, second) = tokio::join!(send("k1", &body), send("k1", &body));
    assert_eq!((first.0, second.0), (200, 200), "{first:?} {second:?}");
    assert_eq!(first.1["id"], second.1["id"]);
    let other = json!({ "plan": { "run_spec": task_spec(json!("another")) }, "force": false });
    assert_eq!(send("k1", &other).await.0, 409);
    assert_ne!(send("k2", &body).await.1["id"], first.1["id"]);
    assert_eq!(server.admin("/api/runs/list", json!({})).await.as_array().unwrap().len(), 2);
    server.stop().await;
}

/// With a name, the name conflicts with a repeat, or the run is active by then.
async fn a1_concurrent_repeats_with_one_key_return_the_same_run(ground: &ServerFixture) {
    let server = ground.start().await;
    for round in 0..8 {
        let name = format!("named-{round}");
        let body = json!({ "plan": { "run_spec": task_spec(json!(name)) }, "force": false });
        let answers =
            futures_util::future::join_all((0..6).map(|_| send_with_key(&server, &name, &body))).await;
        for (status, run) in &answers {
            assert_eq!((*status, &run["id"]), (200, &answers[0].1["id"]), "{answers:?}");
        }
    }
    server.stop().await;
}

async fn a_scheduled_run_waits_without_jobs(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut spec = task_spec(json!("nightly"));
    spec["configuration"]["schedule"] = json!({ "cron": ["0 3 * * *"] });
    let run = submit_run(&server, &spec).await;
    dstack_wire::assert_run(&run);
    assert_eq!((&run["status"], &run["jobs"]), (&json!("pending"), &json!([])));
    assert!(
        run["next_triggered_at"].as_str().unwrap().ends_with("T03:00:00Z"),
        "{}",
        run["next_triggered_at"]
    );
    let message = format!("next start at {}", run["next_triggered_at"].as_str().unwrap());
    assert_eq!((&run["status_message"], &run["reason"]), (&json!(message), &json!(message)));
    server.stop().await;
}

async fn a_service_run_shows_its_url_and_replicas(ground: &ServerFixture) {
    let server = ground.start().await;
    let spec = json!({ "run_name": "llm", "configuration": { "type": "service", "image": "vllm", "user": "root",
        "commands": ["serve"], "port": { "local_port": 80, "container_port": 8000 }, "replicas": { "min": 2, "max": 2 },
        "model": { "type": "chat", "name": "m", "format": "openai", "prefix": "/v1" } } });
    let run = submit_run(&server, &spec).await;
    dstack_wire::assert_run(&run);
    assert_eq!(run["service"]["url"], "/proxy/services/main/llm/");
    assert_eq!(run["service"]["model"]["name"], "m");
    let replicas: Vec<_> = run["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|job| job["job_spec"]["replica_num"].as_i64().unwrap())
        .collect();
    assert_eq!(replicas, [0, 1]);
    server.stop().await;
}

async fn invalid_run_specs_are_refused_with_the_reason(ground: &ServerFixture) {
    let server = ground.start().await;
    let with = |change: &dyn Fn(&mut Value)| {
        let mut spec = task_spec(json!("bad"));
        change(&mut spec);
        json!({ "plan": { "run_spec": spec } })
    };
    let cases: [(&str, Value); 5] = [
        ("type", with(&|spec| spec["configuration"]["type"] = json!("tusk"))),
        ("resources.cpu", with(&|spec| spec["configuration"]["resources"]["cpu"] = json!("many"))),
        ("fleet", with(&|spec| spec["configuration"] = json!({ "type": "fleet", "nodes": 1 }))),
        ("TOKEN", with(&|spec| spec["configuration"]["env"] = json!({ "TOKEN": { "key": "TOKEN" } }))),
        ("cron", with(&|spec| spec["configuration"]["schedule"] = json!({ "cron": "0 0 30 2 *" }))),
    ];
    for (word, body) in cases {
        let (status, answer) = server.post(ADMIN_TOKEN, APPLY, &body.to_string()).await;
        assert!(status == 400 || status == 422, "{word}: {status} {answer}");
        assert!(answer.to_string().contains(word), "{word}: {answer}");
    }
    let unknown = with(&|spec| {
        spec["repo_id"] = json!("nowhere");
        spec["repo_data"] = json!({ "repo_type": "remote", "repo_name": "r" });
    });
    server.refused(ADMIN_TOKEN, APPLY, unknown, "repo_does_not_exist").await;
    assert_eq!(server.admin("/api/runs/list", json!({})).await, json!([]));
    server.stop().await;
}

async fn a_restart_keeps_every_run(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit_run(&server, &task_spec(json!("train-1"))).await;
    server.stop().await;
    let server = ground.start().await;
    assert_eq!(get_run(&server, json!({ "run_name": "train-1" })).await, run);
    server.stop().await;
}

async fn a_plan_offers_the_instances_that_fit(ground: &ServerFixture) {
    let server = ground.start().await;
    let fleet = json!({ "plan": { "spec": { "profile": { "name": "default" }, "configuration": { "type": "fleet", "name": "own",
        "ssh_config": { "user": "u", "identity_file": "f", "hosts": ["10.0.0.1", "10.0.0.2", "10.0.0.3"] } } } } });
    server.admin("/api/project/main/fleets/apply", fleet).await;
    let kind = |cpus: i64| {
        json!({ "name": "h100x1", "resources": { "cpus": cpus, "memory_mib": 229_376, "spot": false,
        "cpu_arch": "x86", "disk": { "size_mib": 819_200 }, "gpus": [{ "name": "H100", "memory_mib": 81920, "vendor": "nvidia" }],
        "description": "" } })
    };
    for (num, cpus, status, busy) in [(0, 26, "busy", 1), (1, 26, "idle", 0), (2, 2, "idle", 0)] {
        let unit = windlass_server::db::Unit::new().exec(
            "UPDATE instances SET status = $2, instance_type = $3, busy_blocks = $4 WHERE instance_num = $1",
            params![i64::from(num), status, kind(cpus).to_string(), i64::from(busy)],
        );
        server.app.db().write(unit).await.unwrap().done().unwrap();
    }
    let request = json!({ "run_spec": task_spec(json!("train-1")), "max_offers": 1 });
    let plan = server.admin("/api/project/main/runs/get_plan", request).await;
    let job = &plan["job_plans"][0];
    assert_eq!((&job["total_offers"], job["offers"].as_array().unwrap().len()), (&json!(2), 1), "{job}");
    let offer = &job["offers"][0];
    assert_eq!(
        (&offer["backend"], &offer["availability"], &offer["price"]),
        (&json!("remote"), &json!("idle"), &json!(0.0))
    );
    assert_eq!(offer["instance"], kind(26));
    let other = windlass_server::db::Unit::new().exec(
        "UPDATE instances SET instance_type = $1 WHERE instance_num = 0",
        params![kind(28).to_string()],
    );
    server.app.db().write(other).await.unwrap().done().unwrap();
    let offers = async |reverse: bool| {
        let request = json!({ "run_spec": task_spec(json!("train-1")), "reverse_offers": reverse });
        let plan = server.admin("/api/project/main/runs/get_plan", request).await;
        plan["job_plans"][0]["offers"].as_array().unwrap().clone()
    };
    let (mut forward, reversed) = (offers(false).await, offers(true).await);
    assert_ne!(forward, reversed);
    forward.reverse();
    assert_eq!(forward, reversed);
    let gpus =
        server.admin("/api/project/main/gpus/list", json!({ "run_spec": task_spec(Value::Null) })).await;
    // Offers are complete and of whole instances, requested or not.
    for field in ["full_offers", "unallocated_resources"] {
        let request = json!({ "run_spec": task_spec(json!("train-1")), "reverse_offers": true, field: true });
        let plan = server.admin("/api/project/main/runs/get_plan", request).await;
        assert_eq!(plan["job_plans"][0]["offers"], json!(reversed), "{field}");
        let request = json!({ "run_spec": task_spec(Value::Null), field: true });
        assert_eq!(server.admin("/api/project/main/gpus/list", request).await, gpus, "{field}");
    }
    assert_eq!(
        (&gpus["gpus"][0]["name"], &gpus["gpus"][0]["availability"]),
        (&json!("H100"), &json!(["idle"]))
    );
    server.stop().await;
}

async fn runs_on_unknown_fleets_or_backends_are_refused_with_those_that_exist(ground: &ServerFixture) {
    let server = TestServer::start_with(SettingsSource { no_local: Some(false), ..ground.given() }).await;
    let spec = |field: &str, value: Value| {
        let mut configuration = json!({ "type": "task", "image": "none", "commands": ["true"] });
        configuration[field] = value;
        json!({ "run_name": null, "configuration": configuration, "profile": { "name": "default" } })
    };
    let no_fleet =
        "project `main` has no fleet `nope`; hint: use one of `local`, or remove `fleets` to use any";
    let no_backend = "this server has no backend `gcp`; it has `local`, `remote`, `slurm`; hint: name one of these in \
                      `backends`, or remove `backends` to allow all";
    let not_configured = "backends: [{type: aws, …}]}]`; or name one of these in `backends`, or remove";
    for (field, value, reason) in [
        ("fleets", json!(["nope"]), no_fleet),
        ("backends", json!(["gcp"]), no_backend),
        ("backends", json!(["aws"]), not_configured),
    ] {
        let spec = spec(field, value);
        let plan = json!({ "run_spec": spec });
        let message = server.refused(ADMIN_TOKEN, PLAN, plan, "error").await;
        assert!(message.contains(reason), "{message}");
        let apply = json!({ "plan": { "run_spec": spec, "current_resource": null }, "force": false });
        let message = server.refused(ADMIN_TOKEN, APPLY, apply, "error").await;
        assert!(message.contains(reason), "{message}");
    }
    for (field, value) in [("fleets", json!(["nope", "local"])), ("backends", json!(["aws", "local"]))] {
        let plan = server.admin(PLAN, json!({ "run_spec": spec(field, value) })).await;
        let misfits = plan["job_plans"][0]["misfits"].to_string();
        let is_named = misfits.contains("\"place\":\"fleet nope\"");
        assert_eq!(is_named, field == "fleets", "{misfits}");
    }
    let launch = "/api/project/main/jobs/launch";
    for (text, reason) in [
        ("type: task\ncommands: [\"true\"]\nfleets: [nope]\n", "project `main` has no fleet `nope`"),
        (
            "resources: {infra: ssh/nope}\nrun: \"true\"\n",
            "`infra: ssh/nope` is neither a fleet of the project",
        ),
        ("resources: {infra: nope}\nrun: \"true\"\n", "use one of `local`, or remove `infra`"),
    ] {
        let message = server.refused(ADMIN_TOKEN, launch, json!({ "text": text }), "error").await;
        assert!(message.contains(reason), "{message}");
    }
    let runs = server.admin("/api/runs/list", json!({})).await;
    assert_eq!(runs, json!([]), "nothing was applied");
    server.stop().await;
}
