//! Rules of each kind of configuration, and between its fields.

use serde_json::json;
use windlass_model::config::{self, Configuration, quantities::OffableDuration};

use super::{accept, refuse, trimmed};

#[track_caller]
fn refused(text: &str, expected: &[&str]) {
    assert_eq!(refuse(text), expected, "\n{text}");
}

#[test]
fn a_missing_or_unknown_type_is_the_only_problem_reported() {
    refused("commands: [x]", &["C010 type"]);
    refused("", &["C010 type"]);
    refused("# only a comment", &["C010 type"]);
    refused("type: tsak", &["C010 type"]);
    refused("type: [task]", &["C010 type"]);
    refused("- task", &["C013 "]);
    refused("type: preset", &["C017 type"]);
    let text = "type: servce";
    let problems = config::parse(text).unwrap_err();
    assert_eq!(problems[0].hint.as_deref(), Some("did you mean `service`?"));
}

#[test]
fn a_resource_one_level_too_high_gets_a_hint() {
    for field in ["gpu", "cpu", "memory", "disk", "shm_size"] {
        let problems = config::parse(&format!("type: task\ncommands: [a]\n{field}: 2\n")).unwrap_err();
        let expected = format!("it is a field of `resources`: `resources: {{{field}: …}}`");
        assert_eq!(problems[0].hint.as_deref(), Some(expected.as_str()), "{field}");
    }
}

#[test]
fn all_configuration_problems_are_reported_at_once() {
    let text = "type: task\ncommand: [x]\nresources:\n  gpu: \"H100:\"\n  memry: 8GB\nports: [0, 1]\nnodes: 0\npriority: 101";
    let expected = [
        "C011 command",
        "C014 resources.gpu",
        "C011 resources.memry",
        "C015 ports[0]",
        "C015 nodes",
        "C015 priority",
    ];
    refused(text, &expected);
}

#[test]
fn a_task_needs_something_to_run() {
    refused("type: task", &["C012 commands"]);
    accept("type: task\nimage: debian");
    accept("type: task\ncommands: [x]");
    refused("type: task\ncommands:", &["C013 commands"]);
    refused("type: task\ncommands: x", &["C013 commands"]);
    refused("type: task\ncommands: [yes]", &["C013 commands[0]"]);
    refused("type: task\ncommands: [x]\nresources:\n", &["C013 resources"]);
}

#[test]
fn image_docker_and_python_exclude_each_other() {
    let with = |more: &str| format!("type: task\ncommands: [x]\n{more}");
    refused(&with("image: a\npython: 3.12"), &["C016 python"]);
    refused(&with("image: a\nnvcc: true"), &["C016 nvcc"]);
    refused(&with("image: a\ndocker: true"), &["C016 docker"]);
    refused(&with("docker: true\npython: 3.12\nnvcc: true"), &["C016 python", "C016 nvcc"]);
    accept(&with("image: a\nnvcc: false\ndocker: false"));
}

#[test]
fn run_properties_have_bounds() {
    let with = |more: &str| format!("type: task\ncommands: [x]\n{more}");
    refused(&with("repos: [a, b]"), &["C016 repos"]);
    refused(&with("shell: zsh"), &["C014 shell"]);
    refused(&with("working_dir: here"), &["C014 working_dir"]);
    refused(&with("registry_auth: {username: a}"), &["C012 registry_auth.password"]);
    refused(&with("volumes: ['a:/x', 'b:/x']"), &["C016 volumes"]);
    refused(&with("setup: [y]"), &["C016 setup"]);
    refused(&with("max_price: 0"), &["C015 max_price"]);
    refused(&with("spot_policy: cheap"), &["C014 spot_policy"]);
    refused(&with("instances: []"), &["C014 instances"]);
    refused(&with("schedule: {cron: '* *'}"), &["C014 schedule.cron"]);
    refused(
        &with("utilization_policy: {min_gpu_utilization: 10, time_window: 1m}"),
        &["C015 utilization_policy.time_window"],
    );
    refused(
        &with("utilization_policy: {min_gpu_utilization: 101, time_window: 10m}"),
        &["C015 utilization_policy.min_gpu_utilization"],
    );
    refused(&with("backend_options: [{type: vastai}, {type: vastai}]"), &["C016 backend_options"]);
    refused(
        &with("backend_options: [{type: vastai, min_reliability: 2}]"),
        &["C015 backend_options[0].min_reliability"],
    );
    accept(&with(
        "backend_options: [{type: vastai, offer_order: price, min_score: 3}]\nbackends: [aws, remote]",
    ));
}

#[test]
fn a_task_with_groups_may_not_set_the_group_fields_itself() {
    let group = "groups: [{commands: [x]}, {nodes: 2, commands: [y]}]";
    accept(&format!("type: task\n{group}"));
    refused(
        &format!("type: task\nnodes: 2\ncommands: [x]\nports: [1]\nentrypoint: e\n{group}"),
        &["C016 nodes", "C016 commands", "C016 ports", "C016 entrypoint"],
    );
    refused("type: task\ngroups: [{commands: [x]}, {nodes: 0}]", &["C015 groups[1].nodes"]);
    refused(
        "type: task\ngroups: [{name: a, commands: [x]}, {name: a, commands: [x]}]",
        &["C016 groups[1].name"],
    );
    refused("type: task\ngroups: [{commands: [x]}, {name: '0', commands: [x]}]", &["C016 groups[1].name"]);
    refused("type: task\ngroups: [{commands: [x]}, {nodes: 2}]", &["C012 groups[1].commands"]);
    refused("type: task\ngroups: []", &["C016 groups"]);
    accept("type: task\nimage: a\ngroups: [{commands: [x]}, {nodes: 2}]");
}

#[test]
fn a_dev_environment_accepts_only_known_ides_and_valid_versions() {
    accept("type: dev-environment");
    accept(
        "type: dev-environment\nide: windsurf\nversion: 1.2@abc\nsetup: [x]\ninactivity_duration: off\ndstack: true",
    );
    refused("type: dev-environment\nide: vi", &["C014 ide"]);
    refused("type: dev-environment\nversion: 1.2", &["C016 version"]);
    refused("type: dev-environment\nide: windsurf\nversion: 1.2", &["C016 version"]);
    refused("type: dev-environment\nentrypoint: x", &["C016 entrypoint"]);
    refused("type: dev-environment\ndstack: true\ninactivity_duration: 1h", &["C016 dstack"]);
}

#[test]
fn scaling_is_required_exactly_when_the_replica_count_is_a_range() {
    let with = |more: &str| format!("type: service\nport: 80\nimage: a\n{more}");
    refused("type: service\nimage: a", &["C012 port"]);
    refused(&with("replicas: 1..4"), &["C012 scaling"]);
    refused(&with("replicas: 2\nscaling: {metric: rps, target: 1}"), &["C016 scaling"]);
    refused(&with("scaling: {metric: rps, target: 1}"), &["C016 scaling"]);
    refused(&with("replicas: 1.."), &["C014 replicas"]);
    refused(
        &with("replicas: 1..2\nscaling: {metric: cpu, target: 0}"),
        &["C014 scaling.metric", "C015 scaling.target"],
    );
    refused(&with("replicas: 1..2\nscaling: {metric: rps, target: 1, window: 45}"), &["C015 scaling.window"]);
    accept(&with("replicas: 0..2\nscaling: {metric: rps, target: 0.5, window: 300s}"));
    accept(&with("replicas: 0..2\nscaling: {metric: concurrency, target: 4}"));
    let queue = "replicas: 0..2\nscaling: {metric: queue-depth, target: 4}";
    refused(&with(queue), &["C012 max_concurrency"]);
    accept(&with(&format!("max_concurrency: 8\n{queue}")));
}

#[test]
fn a_deployment_requires_surge_or_unavailable_and_a_positive_ready_within() {
    let with = |more: &str| format!("type: service\nport: 80\nimage: a\ndeployment: {more}");
    accept(&with("{surge: 2}"));
    accept(&with("{surge: 0, unavailable: 1, ready_within: 5m, rollback: false}"));
    refused(&with("{surge: 0}"), &["C016 deployment.surge"]);
    refused(&with("{unavailable: -1, ready_within: 0}"), &["C015 deployment.unavailable"]);
    refused(&with("{ready_within: 0}"), &["C015 deployment.ready_within"]);
}

#[test]
fn cors_credentials_require_listed_origins() {
    let with = |more: &str| format!("type: service\nport: 80\nimage: a\n{more}");
    accept(&with("balance: least-outstanding\ncors: {}"));
    accept(&with("cors: {origins: [\"https://a.example\"], credentials: true, max_age: 1h}"));
    refused(&with("cors: {credentials: true}"), &["C016 cors.credentials"]);
    refused(&with("cors: {origins: [\"https://a.example/\"]}"), &["C014 cors.origins"]);
    refused(&with("balance: random"), &["C014 balance"]);
}

#[test]
fn rate_limits_and_probes_have_bounds() {
    let with = |more: &str| format!("type: service\nport: 80\nimage: a\n{more}");
    refused(&with("rate_limits: [{rps: 1}, {prefix: /, rps: 2}]"), &["C016 rate_limits"]);
    refused(
        &with("rate_limits: [{prefix: api, rps: 0.01, burst: -1}]"),
        &["C014 rate_limits[0].prefix", "C015 rate_limits[0].rps", "C015 rate_limits[0].burst"],
    );
    refused(&with("rate_limits: [{rps: 1, key: {type: header}}]"), &["C012 rate_limits[0].key.header"]);
    refused(
        &with("rate_limits: [{rps: 1, key: {type: header, header: 'a b'}}]"),
        &["C014 rate_limits[0].key.header"],
    );
    accept(&with("rate_limits: [{rps: 1, key: {type: header, header: X-Key}}, {prefix: /a, rps: 2}]"));
    refused(&with("probes: [{url: /x}]"), &["C012 probes[0].type"]);
    refused(
        &with("probes: [{type: http, timeout: 10m, interval: 0}]"),
        &["C015 probes[0].timeout", "C015 probes[0].interval"],
    );
    refused(&with("probes: [{type: http, body: x}]"), &["C016 probes[0].body"]);
    refused(&with("probes: [{type: http, method: head, body: x}]"), &["C016 probes[0].body"]);
    refused(&with("probes: [{type: http}, {type: http}]"), &["C016 probes"]);
    refused(&with("probes: [{type: http, ready_after: 0}]"), &["C015 probes[0].ready_after"]);
    let many: Vec<String> = (0..11).map(|n| format!("{{type: http, url: /{n}}}")).collect();
    refused(&with(&format!("probes: [{}]", many.join(", "))), &["C015 probes"]);
    accept(&with(
        "probes: [{type: http, method: post, body: x, headers: [{name: A, value: b}], until_ready: true}]",
    ));
}

#[test]
fn a_setting_is_given_on_the_service_or_on_its_groups_but_not_both() {
    let with = |more: &str| format!("type: service\nport: 80\n{more}");
    accept(&with(
        "groups: [{replicas: 1, commands: [x]}, {count: 1..2, scaling: {metric: rps, target: 1}, image: a}]",
    ));
    refused(
        &with("replicas: 2\ncommands: [x]\ngroups: [{replicas: 1, commands: [x]}]"),
        &["C016 replicas", "C016 commands"],
    );
    refused(&with("groups: [{replicas: 1}]"), &["C012 groups[0].commands"]);
    refused(&with("groups: [{commands: [x]}]"), &["C012 groups[0].replicas"]);
    refused(
        &with("image: a\nspot_policy: spot\ngroups: [{replicas: 1, image: b, spot_policy: auto}]"),
        &["C016 image", "C016 spot_policy"],
    );
    refused(&with("groups: [{replicas: 2, commands: [x], router: {type: smg}}]"), &["C016 groups[0].router"]);
    let routers = "groups: [{replicas: 1, commands: [x], router: {type: dynamo}}, {replicas: 1, commands: [x], router: {}}]";
    refused(&with(&format!("retry: true\n{routers}")), &["C016 retry", "C016 groups"]);
    refused(
        &with("replicas: [{count: 1, commands: [x]}]\ngroups: [{replicas: 1, commands: [x]}]"),
        &["C016 replicas"],
    );
}

#[test]
fn the_old_syntax_for_replica_groups_equals_the_new_one() {
    let old =
        accept("type: service\nport: 80\nreplicas: [{count: 1, commands: [x], router: {type: sglang}}]");
    let new = accept("type: service\nport: 80\ngroups: [{replicas: 1, commands: [x], router: {type: smg}}]");
    assert_eq!(old, new);
    let json = serde_json::to_value(&new).unwrap();
    assert_eq!(json["groups"][0]["router"], json!({"type": "sglang"}), "the wire calls it by its old name");
}

#[test]
fn a_fleet_has_either_nodes_or_ssh_hosts() {
    refused("type: fleet", &["C012 nodes"]);
    let ssh = "ssh_config: {user: u, identity_file: k, hosts: [a]}";
    accept(&format!("type: fleet\n{ssh}\nenv: [A=1]\nblocks: auto\nplacement: cluster"));
    refused(
        &format!("type: fleet\nnodes: 1\nspot_policy: auto\nidle_duration: 1h\n{ssh}"),
        &["C016 nodes", "C016 spot_policy", "C016 idle_duration"],
    );
    refused("type: fleet\nnodes: 1\nenv: [A=1]", &["C016 env"]);
    refused("type: fleet\nnodes: 1\nmax_duration: 1h", &["C011 max_duration"]);
    refused(
        "type: fleet\nssh_config: {hosts: [a, {hostname: b, user: u}]}",
        &[
            "C012 ssh_config.hosts[0].user",
            "C012 ssh_config.hosts[0].identity_file",
            "C012 ssh_config.hosts[1].identity_file",
        ],
    );
    refused("type: fleet\nssh_config: {user: u, identity_file: k, hosts: []}", &["C016 ssh_config.hosts"]);
    let hosts = |more: &str| format!("type: fleet\nssh_config:\n  user: u\n  identity_file: k\n{more}");
    refused(&hosts("  hosts: [{hostname: a, internal_ip: 10.0.0.1}, b]"), &["C016 ssh_config.hosts"]);
    refused(
        &hosts("  network: 10.0.0.0/8\n  hosts: [{hostname: a, internal_ip: 10.0.0.1}]"),
        &["C016 ssh_config.network"],
    );
    refused(
        &hosts("  proxy_jump: {hostname: j}\n  hosts: [a]"),
        &["C012 ssh_config.proxy_jump.user", "C012 ssh_config.proxy_jump.identity_file"],
    );
    refused(&hosts("  hosts: ['-oProxyCommand=x']"), &["C014 ssh_config.hosts[0]"]);
}

#[test]
fn gateway_backend_must_support_its_load_balancer_and_certificate() {
    let with = |more: &str| format!("type: gateway\nregion: r\n{more}");
    refused("type: gateway", &["C012 backend", "C012 region"]);
    accept(&with(
        "backend: aws\ndomain: '*.x.org'\nload_balancer: {type: alb}\ncertificate: {type: acm, arn: a}",
    ));
    refused(&with("backend: azure\nload_balancer: {type: alb}"), &["C016 load_balancer"]);
    refused(&with("backend: gcp\ncertificate: {type: acm, arn: a}"), &["C016 certificate"]);
    refused(&with("backend: gcp\ncertificate: {type: gcp-cm, name: n}"), &["C016 certificate"]);
    refused(&with("backend: aws\ncertificate: {type: acm}"), &["C012 certificate.arn"]);
    refused(&with("backend: aws\npublic_ip: false"), &["C016 certificate"]);
    refused(&with("backend: aws\nreplicas: 2"), &["C016 replicas"]);
    refused(&with("backend: aws\nreplicas: 10\ncertificate: null"), &["C015 replicas"]);
    accept(&with("backend: aws\nreplicas: 9\npublic_ip: false\ncertificate: null"));
}

#[test]
fn a_volume_is_new_or_exists() {
    let with = |more: &str| format!("type: volume\nregion: r\n{more}");
    refused("type: volume", &["C012 backend"]);
    refused("type: volume\nbackend: azure", &["C014 backend"]);
    refused(&with("backend: aws"), &["C012 size"]);
    refused("type: volume\nbackend: aws\nsize: 1GB", &["C012 region"]);
    refused(&with("backend: aws\nsize: 1GB\nvolume_id: v"), &["C016 size"]);
    refused(&with("backend: gcp\nvolume_id: v\nauto_cleanup_duration: 1d"), &["C016 auto_cleanup_duration"]);
    refused("type: volume\nbackend: daytona\nsize: 1GB", &["C011 size"]);
    accept("type: volume\nbackend: lium\nauto_cleanup_duration: off");
    accept("type: volume\nbackend: local\nname: data\nauto_cleanup_duration: 1d");
    refused("type: volume\nbackend: local\nsize: 1GB", &["C011 size"]);
    refused("type: volume\nbackend: remote", &["C017 backend"]);
    let volume = accept("type: volume\nbackend: kubernetes\nclaim_name: c");
    assert!(matches!(&volume, Configuration::Volume(volume) if volume.is_external()));
    let expected = json!({"type": "volume", "backend": "kubernetes", "region": "", "claim_name": "c", "access_modes": ["ReadWriteOnce"], "read_only": false});
    assert_eq!(trimmed(serde_json::to_value(&volume).unwrap()), expected);
}

#[test]
fn merge_keys_and_anchors_are_read() {
    let text = "type: task\ncommands: [x]\nenv: &e {A: 1}\nresources: {<<: {cpu: 4}, memory: 1GB}";
    let json = serde_json::to_value(accept(text)).unwrap();
    assert_eq!(json["resources"]["cpu"]["count"], json!({"min": 4, "max": 4}));
    refused("type: task\ncommands: [x]\nresources: {<<: 4}", &["C013 <<"]);
}

/// The complete example of the documentation.
#[test]
fn a_whole_service_is_normalised() {
    let text = r#"
type: service
name: llm
image: vllm/vllm-openai
commands: [vllm serve m]
port: 8000
model: m
env: [HF_TOKEN=x, "N=2"]
replicas: 1..4
scaling: {metric: rps, target: 10, window: 60s}
resources: {gpu: "H100:80GB:2", memory: 64GB.., shm_size: 16GB}
volumes: ["cache:/cache"]
probes: [{type: http, url: /health, interval: 5s}]
retry: {on_events: [interruption], duration: 4h}
max_duration: 2d
fleets: [gpus, other/pool]
"#;
    let expected = json!({"type":"service","name":"llm","image":"vllm/vllm-openai","commands":["vllm serve m"],
        "port":{"local_port":80,"container_port":8000},
        "model":{"type":"chat","name":"m","format":"openai","prefix":"/v1"},"strip_prefix":true,"auth":true,"rate_limits":[],
        "env":{"HF_TOKEN":"x","N":"2"},"replicas":{"min":1,"max":4},
        "scaling":{"metric":"rps","target":10.0,"window":60,"scale_up_delay":300,"scale_down_delay":600},
        "resources":{"cpu":{"count":{"min":2}},"memory":{"min":64.0},"shm_size":16.0,
            "gpu":{"name":["H100"],"count":{"min":2,"max":2},"memory":{"min":80.0,"max":80.0}},"disk":{"size":{"min":100.0}}},
        "volumes":[{"name":"cache","path":"/cache"}],"probes":[{"type":"http","url":"/health","headers":[],"interval":5}],
        "retry":{"on_events":["interruption"],"duration":14400},"max_duration":172_800,
        "fleets":[{"name":"gpus"},{"project":"other","name":"pool"}],
        "privileged":false,"repos":[],"files":[],"dstack":false,"setup":[],"home_dir":"/root"});
    assert_eq!(trimmed(serde_json::to_value(accept(text)).unwrap()), expected);
}

#[test]
fn absent_fields_serialize_as_null_except_nodes_and_groups() {
    let json = serde_json::to_value(accept("type: task\ncommands: [x]")).unwrap();
    let map = json.as_object().unwrap();
    assert!(map["name"].is_null() && map["retry"].is_null() && map["max_duration"].is_null());
    assert!(!map.contains_key("nodes") && !map.contains_key("groups"));
    let service = serde_json::to_value(accept("type: service\nport: 1\nimage: a")).unwrap();
    assert!(service["replicas"].is_null() && service.get("groups").is_none());
}

#[test]
fn unknown_json_fields_from_clients_are_ignored() {
    let json = json!({"type": "task", "commands": ["x"], "hologram": true, "ports": null, "resources": {"gpu": null, "qpu": 1}});
    let Configuration::Task(task) = Configuration::from_json(&json).unwrap() else { panic!("a task") };
    assert!(task.ports.is_empty() && task.run.resources.gpu.is_none() && task.run.resources.disk.is_some());
    let again: Configuration = serde_json::from_value(json).unwrap();
    assert_eq!(again, Configuration::Task(task));
    let error =
        serde_json::from_value::<Configuration>(json!({"type": "task", "commands": "x"})).unwrap_err();
    assert_eq!(error.to_string(), "commands: `commands` must be a list, not `x`");
}

#[test]
fn a_configuration_wins_over_its_profile() {
    let profiles = config::parse_profiles(
        "profiles:\n- {name: cheap, default: true, spot_policy: spot, max_price: 1, max_duration: 1h, idle_duration: off}\n- {name: big, regions: [a]}",
    )
    .unwrap();
    let chosen = profiles.select(None).unwrap().unwrap();
    assert_eq!(chosen.name, "cheap");
    assert_eq!(profiles.select(Some("bgi")).unwrap_err(), "no profile `bgi`; did you mean `big`?");
    let mut task = accept("type: task\ncommands: [x]\nspot_policy: auto\nmax_duration: off");
    task.merge_profile(&chosen.properties);
    let merged = task.profile().unwrap();
    assert_eq!(merged.max_duration, OffableDuration::Off);
    let json = serde_json::to_value(&task).unwrap();
    assert_eq!(
        (&json["spot_policy"], &json["max_price"], &json["idle_duration"], &json["max_duration"]),
        (&json!("auto"), &json!(1.0), &json!(-1), &json!("off"))
    );
}

#[test]
fn profiles_require_unique_names_and_at_most_one_default() {
    let problems = |text: &str| -> Vec<String> {
        config::parse_profiles(text)
            .unwrap_err()
            .iter()
            .map(|p| format!("{} {}", p.code.id(), p.path))
            .collect()
    };
    assert_eq!(problems("profiles: [{name: a}, {name: a}]"), ["C016 profiles[1].name"]);
    assert_eq!(
        problems("profiles: [{name: a, default: true}, {name: b, default: true}]"),
        ["C016 profiles[1].default"]
    );
    assert_eq!(problems("profiles: [{spot_policy: spot}]"), ["C012 profiles[0].name"]);
    assert_eq!(problems("profiles: [{name: a, image: b}]"), ["C011 profiles[0].image"]);
    assert_eq!(problems("{}"), ["C012 profiles"]);
}

#[test]
fn a_gpu_count_prefix_gets_a_suggestion_and_a_cron_error_names_the_valid_range() {
    let gpu = windlass_model::config::resources::parse_gpu("8xH100").unwrap_err();
    assert!(gpu.ends_with("did you mean `H100:8`?"), "{gpu}");
    let other = windlass_model::config::resources::parse_gpu("8many").unwrap_err();
    assert!(!other.contains("did you mean"), "{other}");
    let cron = |text: &str| windlass_model::config::profile::parse_cron(text).unwrap_err();
    assert_eq!(cron("99 * * * *"), "`99 * * * *`: minute 99 is not between 0 and 59");
    assert_eq!(cron("0 8-30 * * *"), "`0 8-30 * * *`: hour 30 is not between 0 and 23");
}
