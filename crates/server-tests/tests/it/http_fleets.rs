//! Fleets, instances, volumes and gateways over HTTP.

use serde_json::{Value, json};
use windlass_server::{config::SettingsSource, params};

use crate::{
    dstack_wire,
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
};

on_both! {
    an_ssh_fleet_has_an_instance_for_each_host_and_shows_no_key
    only_the_host_list_of_a_fleet_changes_in_place
    a_fleet_is_marked_for_deletion_unless_a_job_uses_it
    ssh_fleet_changes_require_permission
    an_unusable_fleet_key_is_refused_at_once
    a_host_of_another_fleet_is_refused_with_that_fleets_name
    a_fleet_being_deleted_is_planned_as_new_and_refuses_an_apply
    volumes_are_created_read_and_marked_for_deletion
    gateways_are_created_updated_and_made_default
    empty_responses_are_well_formed
}

const APPLY: &str = "/api/project/main/fleets/apply";
const GET: &str = "/api/project/main/fleets/get";

fn ssh_fleet(hosts: Value) -> Value {
    json!({ "configuration_path": "fleet.yml", "profile": { "name": "default", "default": false },
        "configuration": { "type": "fleet", "name": "gpus", "placement": "cluster", "blocks": 1, "env": {},
            "ssh_config": { "user": "ubuntu", "port": 22, "identity_file": "~/.ssh/id",
                "ssh_key": { "public": "ssh-ed25519 AAAA", "private": private_key() }, "hosts": hosts } } })
}

/// A private key in the format of a file.
pub(crate) fn private_key() -> String {
    let key = ssh_key::PrivateKey::from(ssh_key::private::Ed25519Keypair::from_seed(&[7; 32]));
    key.to_openssh(ssh_key::LineEnding::LF).unwrap().to_string()
}

fn apply_request(spec: &Value, seen: &Value) -> Value {
    json!({ "plan": { "spec": spec, "current_resource": seen }, "force": false })
}

async fn an_ssh_fleet_has_an_instance_for_each_host_and_shows_no_key(ground: &ServerFixture) {
    let server = ground.start().await;
    let spec = ssh_fleet(json!(["10.4.0.7", { "hostname": "10.4.0.8", "blocks": 4 }]));
    let plan = server.admin("/api/project/main/fleets/get_plan", json!({ "spec": spec })).await;
    assert_eq!((&plan["action"], &plan["offers"]), (&json!("create"), &json!([])));
    // dstack's clients apply the spec that the plan holds.
    assert_eq!(plan["spec"], spec);
    assert!(!plan["effective_spec"].to_string().contains("PRIVATE KEY"));
    let fleet = server.admin(APPLY, apply_request(&spec, &Value::Null)).await;
    dstack_wire::assert_fleet(&fleet);
    assert!(!fleet.to_string().contains("PRIVATE KEY"));
    assert_eq!(fleet["status"], "active");
    let instances = fleet["instances"].as_array().unwrap();
    assert_eq!(instances.len(), 2);
    assert_eq!((&instances[0]["name"], &instances[0]["hostname"]), (&json!("gpus-0"), &json!("10.4.0.7")));
    assert_eq!((&instances[0]["backend"], &instances[1]["total_blocks"]), (&json!("remote"), &json!(4)));
    assert_eq!((&instances[0]["status"], &instances[0]["fleet_name"]), (&json!("pending"), &json!("gpus")));
    assert_eq!(server.admin(GET, json!({ "name": "gpus" })).await, fleet);
    let listed = server.admin("/api/project/main/fleets/list", json!({ "include_imported": true })).await;
    assert_eq!(listed, json!([fleet]));
    assert_eq!(server.admin("/api/fleets/list", json!({})).await, json!([fleet]));
    let all = server.admin("/api/instances/list", json!({ "fleet_ids": [fleet["id"]] })).await;
    assert_eq!(all.as_array().unwrap().len(), 2);
    let one = server.admin("/api/project/main/instances/get", json!({ "id": instances[0]["id"] })).await;
    assert_eq!(one, instances[0]);
    let checks = json!({ "fleet_name": "gpus", "instance_num": 0 });
    let checks = server.admin("/api/project/main/instances/get_instance_health_checks", checks).await;
    assert_eq!(checks, json!({ "health_checks": [] }));
    server.refused(ADMIN_TOKEN, GET, json!({ "name": "none" }), "resource_not_exists").await;
    server.stop().await;
}

async fn only_the_host_list_of_a_fleet_changes_in_place(ground: &ServerFixture) {
    let server = ground.start().await;
    let fleet =
        server.admin(APPLY, apply_request(&ssh_fleet(json!(["10.4.0.7", "10.4.0.8"])), &Value::Null)).await;
    let wanted = ssh_fleet(json!(["10.4.0.8", "10.4.0.9"]));
    let plan = server.admin("/api/project/main/fleets/get_plan", json!({ "spec": wanted })).await;
    assert_eq!((&plan["action"], &plan["current_resource"]), (&json!("update"), &fleet));
    let changed = server.admin(APPLY, apply_request(&wanted, &fleet)).await;
    assert_eq!(changed["id"], fleet["id"]);
    let names: Vec<_> = changed["instances"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["hostname"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["10.4.0.7", "10.4.0.8", "10.4.0.9"],
        "the host to remove goes when its pipeline says so"
    );
    let sql = "SELECT hostname FROM instances WHERE termination_asked_at IS NOT NULL";
    let requested = server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!(requested.iter().map(|row| row.str(0).unwrap()).collect::<Vec<_>>(), ["10.4.0.7"]);
    let message = server.refused(ADMIN_TOKEN, APPLY, apply_request(&wanted, &fleet), "error").await;
    assert!(message.contains("changed"), "{message}");
    let mut other = wanted.clone();
    other["configuration"]["placement"] = json!("any");
    let forced = json!({ "plan": { "spec": other }, "force": true });
    let message = server.refused(ADMIN_TOKEN, APPLY, forced, "error").await;
    assert!(message.contains("placement"), "{message}");
    server.stop().await;
}

async fn a_fleet_is_marked_for_deletion_unless_a_job_uses_it(ground: &ServerFixture) {
    let server = ground.start().await;
    let fleet =
        server.admin(APPLY, apply_request(&ssh_fleet(json!(["10.4.0.7", "10.4.0.8"])), &Value::Null)).await;
    let task =
        json!({ "plan": { "run_spec": { "configuration": { "type": "task", "commands": ["true"] } } } });
    let run = server.admin("/api/project/main/runs/apply", task).await;
    let place = windlass_server::db::Unit::new().exec(
        "UPDATE jobs SET instance_id = $2 WHERE run_id = $1",
        params![run["id"].as_str().unwrap(), fleet["instances"][0]["id"].as_str().unwrap()],
    );
    server.app.db().write(place).await.unwrap().done().unwrap();
    let names = json!({ "names": ["gpus"] });
    let message =
        server.refused(ADMIN_TOKEN, "/api/project/main/fleets/delete", names.clone(), "error").await;
    assert!(message.contains("running jobs"), "{message}");
    let busy = json!({ "name": "gpus", "instance_nums": [0, 1] });
    server.refused(ADMIN_TOKEN, "/api/project/main/fleets/delete_instances", busy, "error").await;
    let idle = json!({ "name": "gpus", "instance_nums": [1] });
    server.admin("/api/project/main/fleets/delete_instances", idle).await;
    let shown =
        server.admin("/api/project/main/instances/get", json!({ "id": fleet["instances"][0]["id"] })).await;
    assert_eq!(shown["job_name"], run["jobs"][0]["job_spec"]["job_name"]);
    let free = windlass_server::db::Unit::new().exec(
        "UPDATE jobs SET finished = TRUE, status = 'done' WHERE run_id = $1",
        params![run["id"].as_str().unwrap()],
    );
    server.app.db().write(free).await.unwrap().done().unwrap();
    server.admin("/api/project/main/fleets/delete", names).await;
    let sql = "SELECT count(*) FROM fleets WHERE termination_asked_at IS NOT NULL";
    assert_eq!(server.app.db().query_opt(sql, vec![]).await.unwrap().unwrap().int(0).unwrap(), 1);
    server.admin("/api/project/main/fleets/delete", json!({ "names": ["none"] })).await;
    server.stop().await;
}

async fn an_unusable_fleet_key_is_refused_at_once(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut spec = ssh_fleet(json!(["10.4.0.7"]));
    spec["configuration"]["ssh_config"]["ssh_key"]["private"] = json!("no key at all");
    let planned = json!({ "spec": spec });
    for (path, body) in
        [("/api/project/main/fleets/get_plan", planned), (APPLY, apply_request(&spec, &Value::Null))]
    {
        let message = server.refused(ADMIN_TOKEN, path, body, "error").await;
        assert!(
            message.contains("invalid SSH key of the fleet") && message.contains("passphrase"),
            "{message}"
        );
        assert!(!message.contains("no key at all"), "a key is not repeated: {message}");
    }
    let own = json!([{ "hostname": "10.4.0.8", "ssh_key": { "public": "p", "private": "-----BEGIN" } }]);
    let message =
        server.refused(ADMIN_TOKEN, APPLY, apply_request(&ssh_fleet(own), &Value::Null), "error").await;
    assert!(message.contains("invalid SSH key of 10.4.0.8"), "{message}");
    assert_eq!(server.admin("/api/fleets/list", json!({})).await, json!([]));
    server.stop().await;
}

async fn a_host_of_another_fleet_is_refused_with_that_fleets_name(ground: &ServerFixture) {
    let server = ground.start().await;
    server.admin(APPLY, apply_request(&ssh_fleet(json!(["10.4.0.7"])), &Value::Null)).await;
    let mut other = ssh_fleet(json!(["10.4.0.9", "10.4.0.7"]));
    other["configuration"]["name"] = json!("others");
    let message = server.refused(ADMIN_TOKEN, APPLY, apply_request(&other, &Value::Null), "error").await;
    assert!(
        message.contains("host `10.4.0.7` belongs to fleet `gpus`: remove it from that fleet first"),
        "{message}"
    );
    // The same address behind another port or another jump host is another machine.
    other["configuration"]["ssh_config"]["port"] = json!(2222);
    server.admin(APPLY, apply_request(&other, &Value::Null)).await;
    server.admin("/api/project/main/fleets/delete", json!({ "names": ["others"] })).await;
    let mut third = other.clone();
    third["configuration"]["name"] = json!("third");
    let message = server.refused(ADMIN_TOKEN, APPLY, apply_request(&third, &Value::Null), "error").await;
    assert!(message.contains("fleet `others`: that fleet is being deleted"), "{message}");
    server.stop().await;
}

async fn a_fleet_being_deleted_is_planned_as_new_and_refuses_an_apply(ground: &ServerFixture) {
    let server = ground.start().await;
    let spec = ssh_fleet(json!(["10.4.0.7"]));
    let fleet = server.admin(APPLY, apply_request(&spec, &Value::Null)).await;
    server.admin("/api/project/main/fleets/delete", json!({ "names": ["gpus"] })).await;
    let plan = server.admin("/api/project/main/fleets/get_plan", json!({ "spec": spec })).await;
    assert_eq!((&plan["action"], &plan["current_resource"]["id"]), (&json!("create"), &fleet["id"]));
    let message = server.refused(ADMIN_TOKEN, APPLY, apply_request(&spec, &fleet), "error").await;
    assert!(message.contains("fleet `gpus` is being deleted"), "{message}");
    server.stop().await;
}

async fn ssh_fleet_changes_require_permission(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let body = apply_request(&ssh_fleet(json!(["10.4.0.7"])), &Value::Null).to_string();
    assert_eq!(server.post(&mira, APPLY, &body).await.0, 403);
    server.admin(APPLY, apply_request(&ssh_fleet(json!(["10.4.0.7"])), &Value::Null)).await;
    assert_eq!(server.post(&mira, "/api/project/main/fleets/delete", r#"{"names":["gpus"]}"#).await.0, 403);
    let rented = json!({ "plan": { "spec": { "configuration": { "type": "fleet", "nodes": { "min": 0, "max": 2 } },
        "profile": { "name": "default" } } } });
    let fleet = server.ok(&mira, APPLY, rented).await;
    dstack_wire::assert_fleet(&fleet);
    assert_eq!(fleet["name"].as_str().unwrap().split('-').count(), 3);
    server.stop().await;
}

async fn volumes_are_created_read_and_marked_for_deletion(ground: &ServerFixture) {
    let server = TestServer::start_with(SettingsSource { no_local: Some(false), ..ground.given() }).await;
    let base = "/api/project/main/volumes";
    let body = json!({ "configuration": { "type": "volume", "name": "data", "backend": "local", "tags": { "team": "a" } } });
    let volume = server.admin(&format!("{base}/create"), body.clone()).await;
    dstack_wire::assert_volume(&volume);
    assert_eq!(volume["configuration"]["tags"], json!({ "team": "a" }));
    assert_eq!(
        (&volume["status"], &volume["external"], &volume["user"]),
        (&json!("submitted"), &json!(false), &json!("admin"))
    );
    server.refused(ADMIN_TOKEN, &format!("{base}/create"), body, "resource_exists").await;
    assert_eq!(server.admin(&format!("{base}/get"), json!({ "name": "data" })).await, volume);
    assert_eq!(server.admin(&format!("{base}/list"), json!({})).await, json!([volume]));
    assert_eq!(server.admin("/api/volumes/list", json!({ "project_name": "main" })).await, json!([volume]));
    server.admin(&format!("{base}/delete"), json!({ "names": ["data"] })).await;
    let sql = "SELECT count(*) FROM volumes WHERE delete_asked_at IS NOT NULL";
    assert_eq!(server.app.db().query_opt(sql, vec![]).await.unwrap().unwrap().int(0).unwrap(), 1);
    server
        .refused(ADMIN_TOKEN, &format!("{base}/get"), json!({ "name": "none" }), "resource_not_exists")
        .await;
    let far =
        json!({ "type": "volume", "name": "far", "backend": "aws", "region": "eu-west-1", "size": 100.0 });
    let body = json!({ "configuration": far });
    let message = server.refused(ADMIN_TOKEN, &format!("{base}/create"), body, "error").await;
    assert!(message.contains("this server has no backend `aws`"), "{message}");
    let task = json!({ "configuration": { "type": "task", "commands": ["true"] } });
    assert_eq!(server.post(ADMIN_TOKEN, &format!("{base}/create"), &task.to_string()).await.0, 422);
    server.stop().await;
}

async fn gateways_are_created_updated_and_made_default(ground: &ServerFixture) {
    let server = ground.start().await;
    let base = "/api/project/main/gateways";
    let configuration = |name: &str, domain: &str| {
        json!({ "type": "gateway", "name": name, "backend": "remote", "region": "eu-west-1", "domain": domain,
            "tags": { "team": "a" } })
    };
    let spec = |name: &str, domain: &str| json!({ "configuration": configuration(name, domain), "configuration_path": "g.yml" });
    let plan = server.admin(&format!("{base}/get_plan"), json!({ "spec": spec("edge", "a.example") })).await;
    assert_eq!((&plan["action"], &plan["spec"]), (&json!("create"), &spec("edge", "a.example")));
    let edge = server
        .admin(&format!("{base}/apply"), json!({ "plan": { "spec": spec("edge", "a.example") } }))
        .await;
    dstack_wire::assert_gateway(&edge);
    assert_eq!((&edge["default"], &edge["wildcard_domain"]), (&json!(true), &json!("a.example")));
    assert_eq!(edge["configuration"]["tags"], json!({ "team": "a" }));
    let other = server
        .admin(&format!("{base}/create"), json!({ "configuration": configuration("other", "b.example") }))
        .await;
    assert_eq!(other["default"], false);
    server.admin(&format!("{base}/set_default"), json!({ "name": "other" })).await;
    let listed = server.admin(&format!("{base}/list"), json!({ "include_imported": true })).await;
    let defaults: Vec<_> = listed.as_array().unwrap().iter().filter(|one| one["default"] == true).collect();
    assert_eq!((defaults.len(), &defaults[0]["name"]), (1, &json!("other")));
    let seen = server.admin(&format!("{base}/get"), json!({ "name": "edge" })).await;
    let change =
        json!({ "plan": { "spec": spec("edge", "c.example"), "current_resource": seen }, "force": false });
    assert_eq!(server.admin(&format!("{base}/apply"), change).await["wildcard_domain"], "c.example");
    let mut moved = spec("edge", "c.example");
    moved["configuration"]["region"] = json!("us-east-1");
    let message = server
        .refused(
            ADMIN_TOKEN,
            &format!("{base}/apply"),
            json!({ "plan": { "spec": moved }, "force": true }),
            "error",
        )
        .await;
    assert!(message.contains("region"), "{message}");
    let domain = json!({ "name": "edge", "wildcard_domain": "d.example" });
    assert_eq!(
        server.admin(&format!("{base}/set_wildcard_domain"), domain).await["wildcard_domain"],
        "d.example"
    );
    server.admin(&format!("{base}/delete"), json!({ "names": ["edge"] })).await;
    server
        .refused(ADMIN_TOKEN, &format!("{base}/delete"), json!({ "names": ["none"] }), "resource_not_exists")
        .await;
    server.stop().await;
}

async fn empty_responses_are_well_formed(ground: &ServerFixture) {
    let server = ground.start().await;
    let lists = [
        ("/api/project/main/exports/list", json!({ "exports": [], "warnings": [] })),
        ("/api/project/main/imports/list", json!({ "imports": [], "warnings": [] })),
        ("/api/auth/list_providers", json!([])),
        ("/api/instances/list", json!([])),
    ];
    for (path, want) in lists {
        assert_eq!(server.admin(path, json!({})).await, want, "{path}");
    }
    let spec = json!({ "run_spec": { "configuration": { "type": "task", "commands": [":"], "image": "scratch", "user": "root" } } });
    assert_eq!(server.admin("/api/project/main/gpus/list", spec).await["gpus"], json!([]));
    let task = json!({ "plan": { "run_spec": { "run_name": "train-1", "configuration": { "type": "task", "commands": ["true"] } } } });
    server.admin("/api/project/main/runs/apply", task).await;
    let (status, body) = server
        .get(ADMIN_TOKEN, "/api/project/main/metrics/job/train-1?replica_num=0&job_num=0&limit=10")
        .await;
    assert_eq!((status, body.as_slice()), (200, br#"{"metrics":[]}"#.as_slice()));
    assert_eq!(server.get(ADMIN_TOKEN, "/api/project/main/metrics/job/none").await.0, 400);
    dstack_wire::assert_user(&server.admin("/api/users/get_my_user", json!({})).await);
    dstack_wire::assert_project(&server.admin("/api/projects/main/get", json!({})).await);
    server.stop().await;
}
