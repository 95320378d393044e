//! Files with a `service`: the rules of the section, and the service that it becomes.

use serde_json::{Value, json};
use windlass_model::{
    config::{Configuration, references},
    skypilot::{
        self, CommandLineValues, ServerContext, ServiceAlternatives, ServiceFile, ServiceSettings,
        UpdateMode, stored_secret_name,
    },
};

use super::{accept, accept_with, given, refuse, secret};

const HTTP: &str = "resources: {ports: 8080}\nrun: serve\n";

fn service_with(text: &str, values: &CommandLineValues) -> ServiceFile {
    accept_with(text, values).into_service().unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn service(text: &str) -> ServiceFile {
    service_with(text, &CommandLineValues::default())
}

/// A server with its own hosts only.
fn own_hosts() -> ServerContext {
    ServerContext { has_no_spot: true, ..ServerContext::default() }
}

fn cloud() -> ServerContext {
    ServerContext { backends: vec!["aws".to_owned()], ..ServerContext::default() }
}

fn settings() -> ServiceSettings {
    ServiceSettings { name: "web-1".to_owned(), has_auth: true, ..ServiceSettings::default() }
}

fn convert(file: &ServiceFile, site: &ServerContext) -> ServiceAlternatives {
    file.configurations(&settings(), site).unwrap_or_else(|error| panic!("{error}"))
}

/// The only configuration, as the client sends it.
fn only(file: &ServiceFile, site: &ServerContext) -> Value {
    let found = convert(file, site);
    assert_eq!(found.all.len(), 1, "{found:?}");
    sent(&found.all[0].configuration)
}

fn sent(configuration: &Configuration) -> Value {
    let mut configuration = configuration.clone();
    references::resolve_for_client(&mut configuration, &[], |_| None).unwrap();
    // The server reads what the client sends.
    let value = serde_json::to_value(&configuration).unwrap();
    Configuration::from_json(&value).unwrap_or_else(|problems| panic!("{problems:?}"));
    value
}

/// The messages of what cannot run here, with the line and the hint.
fn refusals(text: &str) -> Vec<String> {
    let parsed = accept(text);
    let line = |one: &windlass_model::config::error::Diagnosis| {
        format!("{}: {} ({})", one.span.start.line, one.message, one.hint.clone().unwrap_or_default())
    };
    parsed.refusals.iter().map(line).collect()
}

#[test]
fn a_readiness_probe_is_a_path_or_a_mapping_with_a_body() {
    let plain = only(&service(&format!("service: {{readiness_probe: /health}}\n{HTTP}")), &own_hosts());
    assert_eq!(plain["probes"][0]["url"], "/health");
    assert_eq!((&plain["probes"][0]["method"], &plain["probes"][0]["timeout"]), (&json!("get"), &json!(15)));
    assert_eq!(plain["deployment"]["ready_within"], 1200);
    let post = format!(
        "envs: {{MODEL: 'a \"b\"'}}\nservice:\n  readiness_probe:\n    path: /v1/chat\n    post_data: {{model: $MODEL, n: 1, \
         price: '$5', list: [true, null, 1.5]}}\n    initial_delay_seconds: 30.5\n    timeout_seconds: 7\n    headers: \
         {{X-Key: v}}\n{HTTP}"
    );
    let post = only(&service(&post), &own_hosts());
    let probe = &post["probes"][0];
    assert_eq!((&probe["method"], &probe["timeout"]), (&json!("post"), &json!(7)));
    assert_eq!(post["deployment"]["ready_within"], 31);
    let body: Value = serde_json::from_str(probe["body"].as_str().unwrap()).unwrap();
    assert_eq!(body, json!({"model": "a \"b\"", "n": 1, "price": "$5", "list": [true, null, 1.5]}));
    let headers =
        json!([{"name": "X-Key", "value": "v"}, {"name": "Content-Type", "value": "application/json"}]);
    assert_eq!(probe["headers"], headers);
    let text = format!("service: {{readiness_probe: {{path: /, post_data: '{{\"a\": 1}}'}}}}\n{HTTP}");
    assert_eq!(only(&service(&text), &own_hosts())["probes"][0]["body"], "{\"a\":1}");
}

#[test]
fn mistakes_in_a_service_are_reported_with_line_and_field() {
    let of = |section: &str| refuse(&format!("service:\n{section}{HTTP}"));
    let cases = [
        ("  replicas: 2\n", "2: a service requires `readiness_probe`: the path that a ready replica answers"),
        ("  readiness_probe: health\n", "2: invalid `readiness_probe`: `health` must start with `/`"),
        ("  readiness_probe: /\n  replica: 2\n", "3: unknown field `replica`"),
        ("  readiness_probe: {path: /, post: 1}\n", "2: unknown field `post`"),
        ("  readiness_probe: {initial_delay_seconds: 3}\n", "2: `readiness_probe` requires `path`"),
        (
            "  readiness_probe: {path: /, post_data: nothing}\n",
            "2: invalid `post_data`: it is not JSON: expected ident at line 1 column 2",
        ),
        (
            "  readiness_probe: {path: /, timeout_seconds: 0}\n",
            "2: `timeout_seconds` must be between 1 and 300",
        ),
        (
            "  readiness_probe: {path: /, initial_delay_seconds: -1}\n",
            "2: `initial_delay_seconds` must be at least 0, not -1",
        ),
        (
            "  readiness_probe: /\n  replicas: 1\n  replica_policy: {min_replicas: 1}\n",
            "3: `replicas` and `replica_policy` are mutually exclusive",
        ),
        (
            "  readiness_probe: /\n  replica_policy: {max_replicas: 2}\n",
            "3: `replica_policy` requires `min_replicas`",
        ),
        (
            "  readiness_probe: /\n  replica_policy: {min_replicas: 3, max_replicas: 2}\n",
            "3: `max_replicas` must be at least `min_replicas` (3), not 2",
        ),
        (
            "  readiness_probe: /\n  replica_policy: {min_replicas: 1, target_qps_per_replica: 2}\n",
            "3: `target_qps_per_replica` requires `max_replicas`",
        ),
        (
            "  readiness_probe: /\n  replica_policy: {min_replicas: 1, max_replicas: 2}\n",
            "3: `max_replicas` above `min_replicas` requires `target_qps_per_replica`",
        ),
        (
            "  readiness_probe: /\n  replica_policy: {min_replicas: 0, max_replicas: 2, target_qps_per_replica: 0}\n",
            "3: `target_qps_per_replica` must be greater than 0",
        ),
        (
            "  readiness_probe: /\n  load_balancing_policy: least_loaded\n",
            "3: `least_loaded` is not a valid value for `load_balancing_policy`",
        ),
        (
            "  readiness_probe: /\n  load_balancing_policy: instance_aware_least_load\n  replica_policy: {min_replicas: \
             1, max_replicas: 2, target_qps_per_replica: 1}\n",
            "3: `instance_aware_least_load` requires `target_qps_per_replica` as a mapping of accelerators",
        ),
        ("  readiness_probe: /\n  tls: {key: a}\n", "3: unknown field `key`"),
    ];
    for (section, want) in cases {
        assert_eq!(of(section), [want], "{section}");
    }
}

#[test]
fn what_has_no_counterpart_is_refused_by_name_with_a_cure() {
    let of = |section: &str| refusals(&format!("service:\n  readiness_probe: /\n{section}{HTTP}"));
    let cases = [
        ("  tls: {keyfile: a, certfile: b}\n", "3: `tls` is not supported", "certificate: {type: files"),
        (
            "  replica_policy: {min_replicas: 1, num_overprovision: 1}\n",
            "3: `num_overprovision` is not supported",
            "raise `min_replicas`",
        ),
        (
            "  replica_policy: {min_replicas: 1, queue_length_threshold: 1}\n",
            "3: `queue_length_threshold` is not supported",
            "use `target_qps_per_replica`",
        ),
        (
            "  replica_policy: {min_replicas: 1, spot_placer: dynamic_fallback}\n",
            "3: `spot_placer` is not supported",
            "dynamic_ondemand_fallback",
        ),
        ("  ports: 9090\n", "1: `ports` of the service is 9090", "add 9090 to `resources.ports`"),
    ];
    for (section, message, cure) in cases {
        let found = of(section);
        assert_eq!(found.len(), 1, "{section}: {found:?}");
        assert!(found[0].starts_with(message) && found[0].contains(cure), "{section}: {found:?}");
    }
    let none = "service: {readiness_probe: /}\nrun: serve\n";
    assert_eq!(
        refusals(none),
        ["1: the service has no port (set `resources.ports` to the port that its replicas listen on)"]
    );
    let many = "service: {readiness_probe: /}\nresources: {ports: [80, 81]}\nrun: serve\n";
    assert!(refusals(many)[0].contains("the service opens several ports"));
    let named = "service: {readiness_probe: /, ports: 81}\nresources: {ports: [80, 81]}\nrun: serve\n";
    assert_eq!(only(&service(named), &own_hosts())["port"]["container_port"], 81);
    let nodes = format!("service: {{readiness_probe: /}}\nnum_nodes: 2\n{HTTP}");
    assert!(refusals(&nodes)[0].contains("`num_nodes` is not supported in a service"));
}

#[test]
fn price_type_disk_and_priority_of_the_resources_apply_to_a_service() {
    let text = "service: {readiness_probe: /}\nresources: {ports: 80, max_hourly_cost: 2.5, instance_type: m5.large, \
                disk_size: 200, priority: 500}\nrun: serve\n";
    let found = only(&service(text), &cloud());
    assert_eq!((&found["max_price"], &found["instance_types"]), (&json!(2.5), &json!(["m5.large"])));
    assert_eq!((&found["resources"]["disk"]["size"]["min"], &found["priority"]), (&json!(200.0), &json!(75)));
    let plain = only(&service(&format!("service: {{readiness_probe: /}}\n{HTTP}")), &cloud());
    for field in ["max_price", "instance_types", "priority"] {
        assert_eq!(plain[field], Value::Null, "{field}");
    }
}

#[test]
fn fields_that_apply_to_jobs_are_refused_or_warned_about_in_a_service() {
    let text = format!(
        "service: {{readiness_probe: /}}\nmax_duration: 2h\ndeadline: {{within: 3h, work: 1h}}\ndepends_on: other\n{HTTP}"
    );
    let why = refusals(&text).join("\n");
    for key in ["max_duration", "deadline", "depends_on"] {
        assert!(why.contains(&format!("`{key}` is not supported in a service")), "{why}");
    }
    let text = "service: {readiness_probe: /}\nresources: {ports: 80, job_recovery: FAILOVER}\nrun: serve\n";
    let warned: Vec<String> = service(text).warnings.into_iter().map(|warning| warning.path).collect();
    assert_eq!(warned, ["resources.job_recovery"]);
}

#[test]
fn a_service_is_not_a_job_and_a_job_is_not_a_service() {
    let file = accept(&format!("service: {{readiness_probe: /}}\n{HTTP}"));
    let refused = file.into_launchable().unwrap_err();
    assert_eq!(refused[0].message, "a `service` is not a managed job");
    assert!(refused[0].hint.as_ref().unwrap().contains("windlass serve up"), "{refused:?}");
    let refused = accept("run: a\n").into_service().unwrap_err();
    assert_eq!(refused[0].message, "the file contains no `service`");
    assert!(skypilot::is_service_file("service: {readiness_probe: /}\nrun: a\n"));
    assert!(
        !skypilot::is_service_file("type: service\nservice: x\n") && !skypilot::is_service_file("run: a\n")
    );
}

#[test]
fn a_qps_target_becomes_scaling_with_its_delays() {
    let text = format!(
        "service:\n  readiness_probe: /\n  replica_policy:\n    min_replicas: 1\n    max_replicas: 5\n    \
         target_qps_per_replica: 2.5\n    upscale_delay_seconds: 20\n    downscale_delay_seconds: 40\n{HTTP}"
    );
    let found = only(&service(&text), &own_hosts());
    assert_eq!(found["replicas"], json!({"min": 1, "max": 5}));
    assert_eq!(found["scaling"]["metric"], "rps");
    assert_eq!((&found["scaling"]["target"], &found["scaling"]["window"]), (&json!(2.5), &Value::Null));
    assert_eq!(
        (&found["scaling"]["scale_up_delay"], &found["scaling"]["scale_down_delay"]),
        (&json!(20), &json!(40))
    );
    // Least load is the default of these files, and round-robin that of our own.
    assert_eq!(found["balance"], "least-outstanding");
    let round = only(
        &service(&format!(
            "service: {{readiness_probe: /, load_balancing_policy: round_robin, replicas: 2}}\n{HTTP}"
        )),
        &own_hosts(),
    );
    assert_eq!((&round["balance"], &round["scaling"]), (&json!("round-robin"), &Value::Null));
    assert_eq!(round["replicas"], json!({"min": 2, "max": 2}));
}

#[test]
fn spot_replicas_get_an_on_demand_group_or_fall_back_to_it() {
    let text = |policy: &str| {
        format!(
            "service:\n  readiness_probe: /\n  replica_policy: {{min_replicas: 2, max_replicas: 5, \
             target_qps_per_replica: 1{policy}}}\nresources: {{ports: 80, use_spot: true}}\nrun: serve\n"
        )
    };
    let plain = only(&service(&text("")), &cloud());
    assert_eq!((&plain["spot_policy"], &plain["groups"]), (&json!("spot"), &Value::Null));
    assert_eq!(only(&service(&text(", dynamic_ondemand_fallback: true")), &cloud())["spot_policy"], "auto");
    let based = service(&text(", base_ondemand_fallback_replicas: 1"));
    let found = only(&based, &cloud());
    let group = |index: usize| found["groups"][index].clone();
    assert_eq!((&group(0)["name"], &group(0)["spot_policy"]), (&json!("ondemand"), &json!("on-demand")));
    assert_eq!(group(0)["replicas"], json!({"min": 1, "max": 1}));
    assert_eq!((&group(1)["name"], &group(1)["spot_policy"]), (&json!("spot"), &json!("spot")));
    assert_eq!(group(1)["replicas"], json!({"min": 1, "max": 4}));
    assert_eq!(group(1)["scaling"]["target"], 1.0);
    // Without rented instances there is nothing to reclaim: one group has all replicas.
    let own = convert(&based, &own_hosts());
    assert!(own.warnings[0].starts_with("`use_spot` has no effect"), "{own:?}");
    let own = sent(&own.all[0].configuration);
    assert_eq!((&own["groups"], &own["replicas"]), (&Value::Null, &json!({"min": 2, "max": 5})));
    // Without spot replicas the policies have no effect, and this is reported.
    let without = format!(
        "service:\n  readiness_probe: /\n  replica_policy: {{min_replicas: 1, dynamic_ondemand_fallback: true}}\n{HTTP}"
    );
    let warnings = accept(&without).warnings;
    assert!(warnings[0].message.starts_with("`dynamic_ondemand_fallback` has no effect"), "{warnings:?}");
}

#[test]
fn accelerators_that_differ_only_in_name_are_one_alternative() {
    let text = "service: {readiness_probe: /}\nresources:\n  ports: 80\n  accelerators: {L4:8, A10G:8, A100:4, A100-80GB:8, \
                H100:8}\nrun: serve\n";
    let found = convert(&service(text), &cloud());
    let described: Vec<&str> = found.all.iter().map(|one| one.description.as_str()).collect();
    assert_eq!(described, ["L4 or A10G or H100:8", "A100:4", "A100-80GB:8"]);
    let gpu = sent(&found.all[0].configuration)["resources"]["gpu"].clone();
    assert_eq!((&gpu["name"], &gpu["count"]), (&json!(["L4", "A10G", "H100"]), &json!({"min": 8, "max": 8})));
    // The target differs by accelerator, so the alternatives are separate; one without a target is left out.
    let text = "service:\n  readiness_probe: /\n  load_balancing_policy: instance_aware_least_load\n  replica_policy: \
                {min_replicas: 1, max_replicas: 2, target_qps_per_replica: {L4: 1, 'a100:2': 4}}\nresources:\n  ports: \
                80\n  accelerators: {L4:1, A100:2, T4:1}\nrun: serve\n";
    let found = convert(&service(text), &cloud());
    let targets: Vec<Value> =
        found.all.iter().map(|one| sent(&one.configuration)["scaling"]["target"].clone()).collect();
    assert_eq!(targets, [json!(1.0), json!(4.0)]);
    let ignored = "the alternative with `T4` is ignored: `target_qps_per_replica` has no value for it";
    assert_eq!(found.warnings, [ignored]);
}

#[test]
fn infra_selects_a_fleet_or_a_backend_and_unknown_locations_are_left_out() {
    let text = "service: {readiness_probe: /}\nresources:\n  ports: 80\n  any_of: [{infra: aws/us-east-1}, {infra: gcp}]\nrun: a\n";
    let found = convert(&service(text), &cloud());
    assert_eq!(found.all.len(), 1);
    let value = sent(&found.all[0].configuration);
    assert_eq!((&value["backends"], &value["regions"]), (&json!(["aws"]), &json!(["us-east-1"])));
    assert!(found.warnings[0].starts_with("`infra: gcp` is ignored"), "{found:?}");
    let only_there = "service: {readiness_probe: /}\nresources: {ports: 80, infra: gcp}\nrun: a\n";
    let error = service(only_there).configurations(&settings(), &cloud()).unwrap_err();
    assert!(error.to_string().starts_with("`infra: gcp` is neither a fleet"), "{error}");
    let own = convert(&service(only_there), &own_hosts());
    assert!(own.warnings[0].starts_with("`infra: gcp` has no effect"), "{own:?}");
}

#[test]
fn secrets_never_appear_in_the_service() {
    let text =
        format!("secrets: {{OWN: in-the-file, PROJECT: null}}\nservice: {{readiness_probe: /}}\n{HTTP}");
    let mut values = given(&[("PLAIN", "v")]);
    values.secrets.insert("GIVEN".to_owned(), secret("from-the-command-line"));
    let file = service_with(&text, &values);
    let versioned = ServiceSettings { secrets_version: Some(3), ..settings() };
    let found = file.configurations(&versioned, &own_hosts()).unwrap();
    let value = sent(&found.all[0].configuration);
    let env = &value["env"];
    assert_eq!(env["OWN"], "${{ secrets.serve_web_1__OWN }}");
    assert_eq!(env["GIVEN"], "${{ secrets.serve_web_1__GIVEN }}");
    assert_eq!((&env["PROJECT"], &env["PLAIN"]), (&json!("${{ secrets.PROJECT }}"), &json!("v")));
    assert_eq!(env[skypilot::SECRETS_VERSION], "3");
    for value in [format!("{file:?}"), value.to_string()] {
        assert!(!value.contains("in-the-file") && !value.contains("from-the-command"), "{value}");
    }
    let stored = file.stored_secrets("web-1");
    assert_eq!(stored.len(), 2);
    assert_eq!(stored[&stored_secret_name("web-1", "OWN")], secret("in-the-file"));
    // A name with dashes cannot be taken for another service.
    assert!(!stored_secret_name("a-b", "C").starts_with(&skypilot::stored_secret_prefix("a")));
}

#[test]
fn the_program_of_a_replica_survives_both_passes_of_references() {
    let text = "service: {readiness_probe: /}\nworkdir: code\nfile_mounts: {/etc/x: x.txt}\nenvs: {N: '1'}\nresources: {ports: 80}\nrun: \
                |\n  echo $$ '${{ secrets.A }}' $N\n";
    let value = only(&service(text), &own_hosts());
    let command = value["commands"][0].as_str().unwrap();
    assert!(command.contains("echo $$ ") && !command.contains("$$$"), "{command}");
    assert!(!command.contains("${{"), "{command}");
    assert!(
        command.contains("SKYPILOT_SERVE_REPLICA_ID=\"$((${WINDLASS_REPLICA_NUM:-0} + 1))\""),
        "{command}"
    );
    assert_eq!(value["env"]["SKYPILOT_SERVICE_NAME"], "web-1");
    let files =
        json!([{"local_path": "code", "path": "sky_workdir"}, {"local_path": "x.txt", "path": "/etc/x"}]);
    assert_eq!(value["files"], files);
    assert_eq!((&value["auth"], &value["retry"]), (&json!(true), &json!(true)));
}

#[test]
fn a_blue_green_update_starts_all_new_replicas_at_once() {
    let file = service(&format!("service: {{readiness_probe: /, replicas: 3}}\n{HTTP}"));
    let surge = |mode| {
        let found = file.configurations(&ServiceSettings { mode, ..settings() }, &own_hosts()).unwrap();
        sent(&found.all[0].configuration)["deployment"]["surge"].clone()
    };
    assert_eq!((surge(UpdateMode::Rolling), surge(UpdateMode::BlueGreen)), (json!(1), json!(3)));
}
