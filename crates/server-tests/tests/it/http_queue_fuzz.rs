//! Lists of the container queue accept arbitrary filters, orders and fields: the server parses or rejects all of them.

use serde_json::{Value, json};
use windlass_testkit::rng::Rng;

use crate::http::{ADMIN_TOKEN, ServerFixture, on_both};

on_both! {
    fuzz_of_filters_of_the_queue
}

const LISTS: [&str; 4] = ["containers", "container_requests", "logs", "api_client_authorizations"];
const FIELDS: [&str; 14] = [
    "uuid",
    "state",
    "created_at",
    "priority",
    "name",
    "owner_uuid",
    "runtime_constraints.vcpus",
    "properties.a",
    "any",
    "",
    "colour",
    "a\u{0}b",
    "'; --",
    "uuid) OR (1=1",
];
const OPERATORS: [&str; 14] =
    ["=", "!=", "<", ">=", "in", "not in", "like", "ilike", "is_a", "exists", "contains", "@@", "", "OR 1=1"];
const ORDERS: [&str; 8] =
    ["created_at desc", "uuid", "uuid asc, uuid", "colour", "", "1", "uuid; x", "\u{0}"];

fn random_value(rng: &mut Rng) -> Value {
    let mut deep = json!(1);
    for _ in 0..150 {
        deep = json!([deep]);
    }
    rng.pick(&[
        json!(null),
        json!(""),
        json!("Queued"),
        json!("%"),
        json!("2026-01-01T00:00:00Z"),
        json!("a\u{0}b"),
        json!(7),
        json!(-1.5),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(true),
        json!([]),
        json!(["Queued", 7, null]),
        json!({ "a": {} }),
        deep,
    ])
    .clone()
}

fn random_filters(rng: &mut Rng) -> Value {
    let one = |rng: &mut Rng| match rng.below(8) {
        0 => random_value(rng),
        1 => json!([random_value(rng), random_value(rng)]),
        _ => json!([rng.pick(&FIELDS), rng.pick(&OPERATORS), random_value(rng)]),
    };
    let count = rng.below(4);
    if rng.below(10) == 0 { random_value(rng) } else { (0..count).map(|_| one(rng)).collect() }
}

fn url_encode(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

async fn fuzz_of_filters_of_the_queue(ground: &ServerFixture) {
    let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0x5eed);
    let server = ground.start().await;
    let mut rng = Rng::new(seed);
    for round in 0..windlass_testkit::fuzz_cases() {
        let list = *rng.pick(&LISTS);
        let mut path =
            format!("/arvados/v1/{list}?filters={}", url_encode(&random_filters(&mut rng).to_string()));
        if rng.below(3) == 0 {
            path.push_str(&format!("&order={}", url_encode(rng.pick::<&str>(&ORDERS))));
        }
        if rng.below(3) == 0 {
            path.push_str(&format!("&select={}", url_encode(&random_value(&mut rng).to_string())));
        }
        if rng.below(3) == 0 {
            let number = *rng.pick(&["0", "-1", "1000000000000", "x", "9999999999999999999999"]);
            path.push_str(&format!("&limit={number}&offset={number}&count=none"));
        }
        let (status, body) = server.get(ADMIN_TOKEN, &path).await;
        let message = String::from_utf8_lossy(&body);
        assert!(status < 500, "SEED={seed} round {round}: {path}\nanswers {status}: {message}");
    }
    server.stop().await;
}
