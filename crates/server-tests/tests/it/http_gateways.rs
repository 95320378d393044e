//! The server's API for gateway processes, and HTTP/2 on its port.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Version, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

const NODE_ID: &str = "00000000-0000-4000-8000-000000000001";

on_both! {
    a_gateway_plan_returns_its_path_and_the_default_is_a_gateway_of_the_project
    a_gateway_receives_only_its_own_services_and_domains_are_unique
    a_pending_request_of_a_gateway_ends_when_its_token_is_replaced
    the_server_accepts_http2
}

async fn create_gateway(server: &TestServer, project: &str) -> String {
    let base = format!("/api/project/{project}/gateways");
    let configuration = json!({ "type": "gateway", "name": "edge", "backend": "remote", "region": "here",
        "domain": "*.a.example", "certificate": null });
    server
        .admin(&format!("{base}/apply"), json!({ "plan": { "spec": { "configuration": configuration } } }))
        .await;
    let made = server.admin(&format!("{base}/create_token"), json!({ "name": "edge" })).await;
    made["token"].as_str().unwrap().to_owned()
}

fn service_spec(name: &str) -> Value {
    let configuration = json!({ "type": "service", "name": name, "port": 80, "image": "none",
        "commands": ["true"], "auth": false });
    json!({ "plan": { "run_spec": { "run_name": name, "configuration": configuration } }, "force": false })
}

async fn a_gateway_receives_only_its_own_services_and_domains_are_unique(ground: &ServerFixture) {
    let server = ground.start().await;
    server.admin("/api/projects/create", json!({ "project_name": "other" })).await;
    let (mine, others) = (create_gateway(&server, "main").await, create_gateway(&server, "other").await);
    let apply = |project: &str| format!("/api/project/{project}/runs/apply");
    let message = server.refused(ADMIN_TOKEN, &apply("main"), service_spec("page"), "gateway_error").await;
    assert!(message.contains("is offline"), "{message}");

    let request = json!({ "node": NODE_ID, "address": "edge.example" });
    let first = server.ok(&mine, "/api/gateway/routes", request.clone()).await;
    let nothing = json!({ "services": [], "sites": {}, "own": "gateway.a.example", "certificate": null });
    assert_eq!(first["routes"], nothing);
    let again = json!({ "node": NODE_ID, "version": first["version"], "wait_ms": 1 });
    let again = server.ok(&mine, "/api/gateway/routes", again).await;
    assert_eq!((&again["version"], &again["routes"]), (&first["version"], &Value::Null));
    let edge = server.admin("/api/project/main/gateways/get", json!({ "name": "edge" })).await;
    assert_eq!((&edge["status"], &edge["replicas"][0]["status"]), (&json!("running"), &json!("running")));

    let run = server.admin(&apply("main"), service_spec("page")).await;
    assert_eq!(run["service"]["url"], "http://page.a.example/", "{run:#}");
    let reported = server.ok(&mine, "/api/gateway/routes", request.clone()).await;
    let page = &reported["routes"]["services"][0];
    assert_eq!(
        (&page["run"], &page["domains"]),
        (&json!("page"), &json!(["page.a.example"])),
        "{reported:#}"
    );

    // The other project has a gateway with the same domain.
    let reported = server.ok(&others, "/api/gateway/routes", request).await;
    assert_eq!(reported["routes"]["services"], json!([]));
    let message = server.refused(ADMIN_TOKEN, &apply("other"), service_spec("page"), "gateway_error").await;
    assert!(message.contains("`page.a.example` is taken by service `page` of project `main`"), "{message}");
    let message = server
        .refused(ADMIN_TOKEN, "/api/project/main/gateways/delete", json!({ "names": ["edge"] }), "error")
        .await;
    assert!(message.contains("is used by `page`"), "{message}");

    // A gateway checks tokens for its own project only; its token grants nothing else, and a new one replaces it.
    let allowed = async |token: &str, project: &str| {
        let requested = json!({ "token": token, "project": project });
        server.ok(&mine, "/api/gateway/check", requested).await["allowed"] == true
    };
    assert!(allowed(ADMIN_TOKEN, "main").await);
    assert!(
        !allowed(ADMIN_TOKEN, "other").await
            && !allowed("wrong", "main").await
            && !allowed(&mine, "main").await
    );
    // Tokens that no service may receive: all tokens of the server, whatever they grant.
    let known = async |token: &str| {
        let requested = json!({ "token": token, "project": "main" });
        server.ok(&mine, "/api/gateway/check", requested).await["known"] == true
    };
    let requested = json!({ "api_client_authorization": { "scopes": ["all"] } }).to_string();
    let (status, queue) = server.post(ADMIN_TOKEN, "/arvados/v1/api_client_authorizations", &requested).await;
    assert_eq!(status, 200, "{queue}");
    let queue = format!("v2/{}/{}", queue["uuid"].as_str().unwrap(), queue["api_token"].as_str().unwrap());
    let other = server.user("stranger").await;
    for token in [ADMIN_TOKEN, &mine, &others, &queue, &other] {
        assert!(known(token).await, "{token}");
    }
    assert!(
        !known("theirs").await && !known("eyJhbGciOi.of-somebody-else.c2lnbmF0dXJlLXRoYXQtaXMtbG9uZw").await
    );
    assert_eq!(server.post(&mine, "/api/project/main/gateways/list", "{}").await.0, 403);
    let came = json!({ "node": NODE_ID, "came": [{ "project": "main", "run": "page", "requests": 3, "asleep": true }] });
    server.ok(&mine, "/api/gateway/report", came).await;
    server.ok(&mine, "/api/gateway/leave", json!({ "node": NODE_ID })).await;
    let message = server.refused(ADMIN_TOKEN, &apply("main"), service_spec("late"), "gateway_error").await;
    assert!(message.contains("is offline"), "{message}");
    server.admin("/api/project/main/gateways/create_token", json!({ "name": "edge" })).await;
    assert_eq!(
        server.post(&mine, "/api/gateway/routes", &json!({ "node": NODE_ID }).to_string()).await.0,
        403
    );
    server.stop().await;
}

async fn a_gateway_plan_returns_its_path_and_the_default_is_a_gateway_of_the_project(ground: &ServerFixture) {
    let server = ground.start().await;
    let base = "/api/project/main/gateways";
    let configuration = json!({ "type": "gateway", "name": "edge", "backend": "remote", "region": "here", "domain": "*.a.example" });
    let spec = json!({ "configuration": configuration, "configuration_path": "edge.yml" });
    let plan = server.admin(&format!("{base}/get_plan"), json!({ "spec": spec })).await;
    assert_eq!(plan["spec"]["configuration_path"], "edge.yml");
    assert_eq!(plan["effective_spec"]["configuration_path"], "edge.yml");
    server.admin(&format!("{base}/apply"), json!({ "plan": { "spec": spec } })).await;
    let moved = json!({ "configuration": configuration, "configuration_path": "other.yml" });
    let plan = server.admin(&format!("{base}/get_plan"), json!({ "spec": moved })).await;
    assert_eq!(plan["action"], "update", "the path is no part of the gateway: {plan}");
    let set = |project: &str| json!({ "name": "edge", "gateway_project": project });
    let set_default = format!("{base}/set_default");
    server.refused(ADMIN_TOKEN, &set_default, set("other"), "error").await;
    server.admin(&set_default, set("main")).await;
    server.admin(&set_default, json!({ "name": "edge" })).await;
    let gateway = server.admin(&format!("{base}/get"), json!({ "name": "edge" })).await;
    assert_eq!(gateway["default"], true, "{gateway}");
    server.stop().await;
}

async fn a_pending_request_of_a_gateway_ends_when_its_token_is_replaced(ground: &ServerFixture) {
    let server = ground.start().await;
    let token = create_gateway(&server, "main").await;
    let first = server.ok(&token, "/api/gateway/routes", json!({ "node": NODE_ID })).await;
    let pending = json!({ "node": NODE_ID, "version": first["version"], "wait_ms": 10_000 }).to_string();
    let replace = async {
        // The pending request is connected first: it waits for ten seconds, this does not.
        tokio::task::yield_now().await;
        server.admin("/api/project/main/gateways/create_token", json!({ "name": "edge" })).await;
        Instant::now()
    };
    let ended = async {
        let (status, answer) = server.post(&token, "/api/gateway/routes", &pending).await;
        (status, answer, Instant::now())
    };
    let ((status, answer, ended), replaced) = tokio::join!(ended, replace);
    assert_eq!(status, 403, "{answer}");
    assert!(ended.duration_since(replaced) < Duration::from_secs(5), "it went on");
    server.stop().await;
}

async fn the_server_accepts_http2(ground: &ServerFixture) {
    let server = ground.start().await;
    let stream = TcpStream::connect(&server.authority).await.unwrap();
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    for _ in 0..2 {
        let request = Request::post(format!("http://{}/api/users/get_my_user", server.authority))
            .header("authorization", format!("Bearer {ADMIN_TOKEN}"))
            .body(Full::new(Bytes::from("{}")))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_2));
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let user: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(user["username"], "admin");
    }
    drop(sender);
    server.stop().await;
    connection.abort();
}
