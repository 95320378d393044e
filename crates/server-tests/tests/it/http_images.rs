//! Images are looked up at their registries before a run is placed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpListener};
use windlass_server::config::SettingsSource;
use windlass_testkit::lab::registry::{ImageOptions, Registry};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer};

const PLAN: &str = "/api/project/main/runs/get_plan";
const APPLY: &str = "/api/project/main/runs/apply";
const LAUNCH: &str = "/api/project/main/jobs/launch";

/// Starts a server that may query this registry.
async fn start(ground: &ServerFixture, registry: &Registry, limit: &str) -> TestServer {
    TestServer::start_with(SettingsSource {
        image_lookup: Some(limit.to_owned()),
        insecure_registries: Some(registry.address().to_owned()),
        // The offer of this machine has an architecture.
        no_local: Some(false),
        ..ground.given()
    })
    .await
}

fn spec(image: &str, more: Value) -> Value {
    let mut configuration = json!({ "type": "task", "image": image, "commands": ["true"] });
    for (key, value) in more.as_object().unwrap() {
        configuration[key] = value.clone();
    }
    json!({ "run_spec": { "run_name": "demo", "configuration": configuration } })
}

fn apply(plan: &Value) -> Value {
    json!({ "plan": plan, "force": false })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_describes_the_image_and_contacts_the_registry_once() {
    let (ground, registry) = (ServerFixture::sqlite(), Registry::start().await);
    let content =
        r#"{"Entrypoint": ["/serve"], "Cmd": ["now"], "User": "app", "Env": ["A=1"], "WorkingDir": "/srv"}"#;
    let options = ImageOptions { config: content, ..ImageOptions::default() };
    let (image, by_digest) = registry.put_with("team/app", "1", b"layer".to_vec(), options);
    let server = start(&ground, &registry, "5s").await;
    let plan = server.admin(PLAN, spec(&image, json!({ "commands": [] }))).await;
    let report = &plan["images"][0];
    let digest = by_digest.split_once('@').unwrap().1;
    assert_eq!((&report["name"], &report["digest"]), (&json!(image), &json!(digest)), "{report}");
    assert_eq!((&report["entrypoint"], &report["command"]), (&json!(["/serve"]), &json!(["now"])));
    assert_eq!((&report["user"], &report["working_dir"]), (&json!("app"), &json!("/srv")));
    assert_eq!((&report["environment"], &report["not_checked"]), (&json!(["A=1"]), &Value::Null));
    assert!(report["platforms"][0].as_str().unwrap().starts_with("linux/"), "{report}");
    let requested = registry.manifests_requested();
    server.admin(PLAN, spec(&image, json!({}))).await;
    server.admin(APPLY, apply(&spec(&image, json!({})))).await;
    assert_eq!(registry.manifests_requested(), requested, "the answer is cached");
    // A request for offers runs nothing.
    let mut offers = spec(&registry.name("team/missing:1"), json!({}));
    offers["for_offers_only"] = json!(true);
    assert_eq!(server.admin(PLAN, offers).await["images"], Value::Null);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_image_is_refused_in_the_plan_and_by_apply_and_launch() {
    let (ground, registry) = (ServerFixture::sqlite(), Registry::start().await);
    let missing = registry.name("team/app:2");
    let server = start(&ground, &registry, "5s").await;
    for (path, body) in [(PLAN, spec(&missing, json!({}))), (APPLY, apply(&spec(&missing, json!({}))))] {
        let message = server.refused(ADMIN_TOKEN, path, body, "error").await;
        assert!(message.contains("team/app:2 does not exist in the registry 127.0.0.1:"), "{message}");
    }
    let text = format!("resources:\n  image_id: docker:{missing}\nrun: echo hi\n");
    let message = server.refused(ADMIN_TOKEN, LAUNCH, json!({ "text": text }), "error").await;
    assert!(message.contains("does not exist"), "{message}");
    assert_eq!(server.admin("/api/runs/list", json!({})).await, json!([]), "nothing was submitted");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_private_image_needs_the_right_password_written_sealed_or_as_a_secret() {
    let (ground, registry) = (ServerFixture::sqlite(), Registry::start().await);
    let (image, _) = registry.put("team/app", "1", b"layer".to_vec());
    registry.set_password("ada", "right");
    let server = start(&ground, &registry, "5s").await;
    let message = server.refused(ADMIN_TOKEN, PLAN, spec(&image, json!({})), "error").await;
    assert!(
        message.contains("without a user name and password") && message.contains("set `registry_auth`"),
        "{message}"
    );
    let with = |password: &str| {
        spec(&image, json!({ "registry_auth": { "username": "ada", "password": password } }))
    };
    let message = server.refused(ADMIN_TOKEN, PLAN, with("wrong"), "error").await;
    assert!(message.contains("with a user name and password") && !message.contains("wrong"), "{message}");
    let plan = server.admin(PLAN, with("right")).await;
    assert!(plan["images"][0]["digest"].is_string(), "{plan}");
    // What the plan returns has the password sealed, and can be applied.
    let sealed = &plan["run_spec"]["configuration"]["registry_auth"]["password"];
    assert!(sealed.as_str().unwrap().starts_with("sealed:"), "{sealed}");
    server.admin(APPLY, apply(&json!({ "run_spec": plan["run_spec"] }))).await;
    let secret = json!({ "name": "hub", "value": "right" });
    server.admin("/api/project/main/secrets/create_or_update", secret).await;
    let plan = server.admin(PLAN, with("${{ secrets.hub }}")).await;
    assert!(plan["images"][0]["digest"].is_string(), "{plan}");
    // Another user's answer is not reused without the password.
    let message = server.refused(ADMIN_TOKEN, PLAN, with("wrong"), "error").await;
    assert!(message.contains("denies access"), "{message}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_without_commands_needs_an_image_that_has_some() {
    let (ground, registry) = (ServerFixture::sqlite(), Registry::start().await);
    let options = ImageOptions { config: "{}", ..ImageOptions::default() };
    let (image, _) = registry.put_with("team/bare", "1", b"layer".to_vec(), options);
    let server = start(&ground, &registry, "5s").await;
    let message = server.refused(ADMIN_TOKEN, PLAN, spec(&image, json!({ "commands": [] })), "error").await;
    assert!(
        message.contains("nothing to run: image") && message.contains("neither an entry point"),
        "{message}"
    );
    server.admin(PLAN, spec(&image, json!({}))).await;
    server.admin(PLAN, spec(&image, json!({ "commands": [], "entrypoint": "/bin/true" }))).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_for_other_cpus_does_not_fit_this_machine() {
    let (ground, registry) = (ServerFixture::sqlite(), Registry::start().await);
    let (other, ours, theirs) = match cfg!(target_arch = "aarch64") {
        true => ("amd64", "arm", "x86"),
        false => ("arm64", "x86", "arm"),
    };
    let options = ImageOptions { architecture: other, ..ImageOptions::default() };
    let (image, _) = registry.put_with("team/app", "other", b"layer".to_vec(), options);
    let server = start(&ground, &registry, "5s").await;
    let plan = server.admin(PLAN, spec(&image, json!({}))).await;
    let job = &plan["job_plans"][0];
    assert_eq!(job["job_spec"]["image_architectures"], json!([theirs]), "{job:#}");
    let text = format!("needs {theirs} CPUs for image {image}, has {ours}");
    assert!(job["misfits"].to_string().contains(&text), "{job:#}");
    // The stored run keeps it, so that later replicas and attempts are placed by it too.
    let run = server.admin(APPLY, apply(&spec(&image, json!({})))).await;
    assert_eq!(run["run_spec"]["image_architectures"], json!({ (image.as_str()): [theirs] }), "{run:#}");
    // An image for this machine does fit.
    let (image, _) = registry.put("team/app", "ours", b"layer".to_vec());
    let plan = server.admin(PLAN, spec(&image, json!({}))).await;
    assert!(!plan["job_plans"][0]["misfits"].to_string().contains("CPUs for image"), "{plan:#}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_registry_delays_one_request_and_no_other() {
    let (ground, registry) = (ServerFixture::sqlite(), Registry::start().await);
    let (image, _) = registry.put("team/app", "1", b"layer".to_vec());
    registry.set_silent(true);
    let server = start(&ground, &registry, "2s").await;
    let body = spec(&image, json!({})).to_string();
    let slow = server.post(ADMIN_TOKEN, PLAN, &body);
    let others = async {
        let started = Instant::now();
        for _ in 0..20 {
            server.admin("/api/runs/list", json!({})).await;
        }
        started.elapsed()
    };
    let ((status, plan), others) = tokio::join!(slow, others);
    assert!(others < Duration::from_secs(2), "{others:?}");
    assert_eq!(status, 200, "{plan}");
    let reason = plan["images"][0]["not_checked"].as_str().unwrap().to_owned();
    assert_eq!(reason, unusable(registry.address()));
    // The next request does not wait again.
    let started = Instant::now();
    server.admin(APPLY, apply(&spec(&image, json!({})))).await;
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    server.stop().await;
}

/// What a plan reports about every registry without a usable answer.
fn unusable(registry: &str) -> String {
    format!(
        "the server got no usable answer from {registry}; hint: a registry in a private network must be listed in the \
         setting `--registry-networks` of the server, or in `--insecure-registries` if it has no TLS"
    )
}

/// A port of this machine that does to each connection what a test wants, and counts them.
async fn listener(answer: Option<&'static [u8]>) -> (String, Arc<AtomicUsize>) {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        let mut silent = Vec::new();
        while let Ok((mut stream, _)) = socket.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            match answer {
                Some(answer) => stream.write_all(answer).await.unwrap_or_default(),
                None => silent.push(stream),
            }
        }
    });
    (address, count)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registries_in_private_networks_are_contacted_only_where_a_setting_lists_them() {
    let ground = ServerFixture::sqlite();
    let (tls_less, contacted) = listener(Some(b"SSH-2.0-server\r\n")).await;
    let given = SettingsSource { image_lookup: Some("5s".into()), ..ground.given() };
    let server = TestServer::start_with(given).await;
    let reason = async |server: &TestServer, registry: &str| {
        let plan = server.admin(PLAN, spec(&format!("{registry}/team/app:1"), json!({}))).await;
        plan["images"][0]["not_checked"].as_str().unwrap().to_owned()
    };
    let private = ["10.0.0.5:22", "192.168.0.1:443", "100.64.0.1:80", "169.254.169.254:80", "localhost:1"];
    for registry in private.into_iter().chain([tls_less.as_str()]) {
        assert_eq!(reason(&server, registry).await, unusable(registry));
    }
    assert_eq!(contacted.load(Ordering::SeqCst), 0);
    server.stop().await;

    let given = SettingsSource {
        image_lookup: Some("1s".into()),
        registry_networks: Some("127.0.0.0/8".into()),
        ..ground.given()
    };
    let server = TestServer::start_with(given).await;
    let (silent, _) = listener(None).await;
    let closed = format!("127.0.0.1:{}", windlass_testkit::ports::reserve_free_port());
    // A caller cannot tell what is behind a port.
    for registry in [tls_less.as_str(), &silent, &closed] {
        assert_eq!(reason(&server, registry).await, unusable(registry));
    }
    assert!(contacted.load(Ordering::SeqCst) > 0, "the setting lists its network");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_text_of_a_registry_is_not_shown() {
    let ground = ServerFixture::sqlite();
    let body = br#"{"errors":[{"code":"X","message":"text of another service"}]}"#;
    let answer =
        [b"HTTP/1.1 418 Nope\r\nconnection: close\r\ncontent-length: 61\r\n\r\n".as_slice(), body].concat();
    let (registry, contacted) = listener(Some(answer.leak())).await;
    let given = SettingsSource {
        image_lookup: Some("5s".into()),
        insecure_registries: Some(registry.clone()),
        ..ground.given()
    };
    let server = TestServer::start_with(given).await;
    let plan = server.admin(PLAN, spec(&format!("{registry}/team/app:1"), json!({}))).await;
    assert_eq!(plan["images"][0]["not_checked"], json!(unusable(&registry)));
    assert!(contacted.load(Ordering::SeqCst) > 0);
    server.stop().await;
}
