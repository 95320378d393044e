//! Every short syntax: its result, and what it refuses.

use serde_json::{Value, json};
use windlass_model::config::{
    decode::{self, Decode, DecodeMode},
    env::Env,
    fleet::{Blocks, FleetNodes, InternalIp, Network},
    mounts::{FileMapping, Mount, Repo},
    name::{GroupName, Name, PythonVersion, ResourceReference, Tags, User},
    ports::{PortMapping, ServicePort},
    profile::{Cron, InstanceSelector, RetrySetting},
    quantities::{IdleDuration, InactivityDuration, MemorySize, OffableDuration, PositiveNumber, Seconds},
    traffic::{GatewayChoice, Https, Model, Replicas},
    yaml,
};
use windlass_model::resources::{CpuSpec, DiskSpec, GpuSpec, Range};

use super::trimmed;

fn read<T: Decode + serde::Serialize>(text: &str) -> Result<Value, String> {
    let node = yaml::read(text).unwrap();
    let value: T = decode::decode(&node, DecodeMode::Strict)
        .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))?;
    Ok(trimmed(serde_json::to_value(&value).unwrap()))
}

/// Checks that each valid text produces its JSON, in both modes and again from that JSON, and that each invalid text is
/// refused.
#[track_caller]
fn table<T: Decode + serde::Serialize + PartialEq + std::fmt::Debug>(good: &[(&str, Value)], bad: &[&str]) {
    for (text, expected) in good {
        let value = read::<T>(text).unwrap_or_else(|problem| panic!("{text:?}: {problem}"));
        assert_eq!(value, *expected, "{text:?}");
        let again = yaml::Node::from_json(&value);
        let again: T = decode::decode(&again, DecodeMode::Lenient).unwrap();
        assert_eq!(trimmed(serde_json::to_value(&again).unwrap()), *expected, "{text:?} again");
    }
    for text in bad {
        if let Ok(value) = read::<T>(text) {
            panic!("{text:?} is read as {value}");
        }
    }
}

#[test]
fn a_range_is_exact_open_or_closed() {
    table::<Range<u32>>(
        &[
            ("4", json!({"min": 4, "max": 4})),
            ("'4'", json!({"min": 4, "max": 4})),
            ("4..", json!({"min": 4})),
            ("..8", json!({"max": 8})),
            ("4..8", json!({"min": 4, "max": 8})),
            ("4 .. 8", json!({"min": 4, "max": 8})),
            ("{min: 1}", json!({"min": 1})),
            ("{min: 1, max: 2}", json!({"min": 1, "max": 2})),
        ],
        &["..", "8..4", "-1", "x", "1...2", "{}", "{min: 2, max: 1}", "{mim: 2}", "[1]", "1.5", "true", "''"],
    );
}

#[test]
fn memory_sizes_are_read_as_gibibytes() {
    table::<MemorySize>(
        &[
            ("16", json!(16.0)),
            ("16GB", json!(16.0)),
            ("16 gb", json!(16.0)),
            ("512MB", json!(0.5)),
            ("1TB", json!(1024.0)),
            ("1.5GB", json!(1.5)),
        ],
        &["GB", "16KB", "-1GB", "1e3GB", ".inf", ".nan", "sixteen", "1..2GB", "true"],
    );
    table::<Range<f64>>(
        &[
            ("16GB", json!({"min": 16.0, "max": 16.0})),
            ("512MB..1TB", json!({"min": 0.5, "max": 1024.0})),
            ("{min: 8GB}", json!({"min": 8.0})),
        ],
        &["..", "2GB..1GB", "big"],
    );
}

#[test]
fn durations_are_read_as_seconds() {
    table::<Seconds>(
        &[
            ("90", json!(90)),
            ("30s", json!(30)),
            ("5m", json!(300)),
            ("2h", json!(7200)),
            ("3d", json!(259_200)),
            ("1w", json!(604_800)),
            ("'60'", json!(60)),
        ],
        &["-1", "5 minutes", "1.5h", "off", "true", "99999999999999999w", "h", "[1]"],
    );
    table::<OffableDuration>(
        &[
            ("off", json!("off")),
            ("'off'", json!("off")),
            ("false", json!("off")),
            ("true", json!(null)),
            ("~", json!(null)),
            ("0", json!(0)),
            ("2d", json!(172_800)),
        ],
        &["-5", "never", "{}"],
    );
    table::<IdleDuration>(
        &[
            ("off", json!(-1)),
            ("no", json!(-1)),
            ("-1", json!(-1)),
            ("1h", json!(3600)),
            ("true", json!(null)),
        ],
        &["-2", "idle"],
    );
    table::<InactivityDuration>(&[("off", json!(null)), ("2h", json!(7200))], &["-1", "soon"]);
}

#[test]
fn a_cpu_has_an_architecture_and_a_count() {
    table::<CpuSpec>(
        &[
            ("8", json!({"count": {"min": 8, "max": 8}})),
            ("4..8", json!({"count": {"min": 4, "max": 8}})),
            ("arm:4..", json!({"arch": "arm", "count": {"min": 4}})),
            ("x86", json!({"arch": "x86", "count": {"min": 2}})),
            ("{min: 4}", json!({"count": {"min": 4}})),
            ("{arch: arm, count: 2}", json!({"arch": "arm", "count": {"min": 2, "max": 2}})),
        ],
        &["mips", "arm:x86", "4:8", "arm:", "{arch: sparc}", "{cores: 2}"],
    );
    table::<DiskSpec>(
        &[
            ("100GB..", json!({"size": {"min": 100.0}})),
            ("{size: 1TB}", json!({"size": {"min": 1024.0, "max": 1024.0}})),
        ],
        &["{}", "fast", "{size: x}"],
    );
}

#[test]
fn gpu_spec_parts_may_come_in_any_order() {
    table::<GpuSpec>(
        &[
            ("24GB", json!({"memory": {"min": 24.0, "max": 24.0}, "count": {"min": 1}})),
            ("2", json!({"count": {"min": 2, "max": 2}})),
            ("0", json!({"count": {"min": 0, "max": 0}})),
            ("0..8", json!({"count": {"min": 0, "max": 8}})),
            (
                "H100:80GB:8",
                json!({"name": ["H100"], "memory": {"min": 80.0, "max": 80.0}, "count": {"min": 8, "max": 8}}),
            ),
            (
                "8:80GB:H100",
                json!({"name": ["H100"], "memory": {"min": 80.0, "max": 80.0}, "count": {"min": 8, "max": 8}}),
            ),
            ("A100,H100", json!({"name": ["A100", "H100"], "count": {"min": 1}})),
            (
                "nvidia:80GB..:2..8",
                json!({"vendor": "nvidia", "memory": {"min": 80.0}, "count": {"min": 2, "max": 8}}),
            ),
            ("tpu:v5litepod-8", json!({"vendor": "google", "name": ["v5litepod-8"], "count": {"min": 1}})),
            ("tpu-v2-8", json!({"vendor": "google", "name": ["v2-8"], "count": {"min": 1}})),
            ("tt", json!({"vendor": "tenstorrent", "count": {"min": 1}})),
            ("tt-galaxy-wh:32", json!({"name": ["tt-galaxy-wh"], "count": {"min": 32, "max": 32}})),
            (
                "{name: 'A100,H100', count: 2}",
                json!({"name": ["A100", "H100"], "count": {"min": 2, "max": 2}}),
            ),
            (
                "{memory: 24GB.., compute_capability: 7.5}",
                json!({"memory": {"min": 24.0}, "count": {"min": 1}, "compute_capability": [7, 5]}),
            ),
            (
                "{total_memory: 80GB, compute_capability: [8, 0]}",
                json!({"total_memory": {"min": 80.0, "max": 80.0}, "count": {"min": 1}, "compute_capability": [8, 0]}),
            ),
        ],
        &[
            "",
            "H100:",
            "amd:nvidia",
            "H100:A100",
            "24GB:48GB",
            "1:2",
            "A100,,H100",
            "{vendor: voodoo}",
            "{compute_capability: x}",
            "{gpus: 1}",
            "8..1",
            "[H100]",
        ],
    );
}

#[test]
fn a_port_has_a_fixed_or_a_free_local_port() {
    table::<PortMapping>(
        &[
            ("8080", json!({"local_port": 8080, "container_port": 8080})),
            ("'80:8080'", json!({"local_port": 80, "container_port": 8080})),
            ("8080:22", json!({"local_port": 8080, "container_port": 22})),
            ("'*:8080'", json!({"container_port": 8080})),
            ("{container_port: 1}", json!({"container_port": 1})),
        ],
        &[
            "0",
            "65536",
            "-1",
            "'1:'",
            "'*'",
            "a",
            "'1:2:3'",
            "{local_port: 1}",
            "{container_port: 0}",
            "80.5",
            "true",
        ],
    );
    table::<ServicePort>(
        &[
            ("8000", json!({"local_port": 80, "container_port": 8000})),
            ("'81:8000'", json!({"local_port": 81, "container_port": 8000})),
        ],
        &["'*:8000'", "0", "http"],
    );
}

#[test]
fn env_is_a_mapping_or_a_list() {
    table::<Env>(
        &[
            ("{A: x, B: 2, C: 3.10}", json!({"A": "x", "B": "2", "C": "3.10"})),
            ("[A=x, 'N=2', E=, U=a=b]", json!({"A": "x", "N": "2", "E": "", "U": "a=b"})),
            ("[TOKEN]", json!({"TOKEN": {"key": "TOKEN"}})),
            ("[]", json!({})),
        ],
        &["[1A=x]", "[A=1, A=2]", "['A B']", "[A: x]", "{A: true}", "{A: }", "{A: [1]}", "text", "['=x']"],
    );
}

#[test]
fn a_mount_is_a_volume_or_a_directory() {
    table::<Mount>(
        &[
            ("data:/data", json!({"name": "data", "path": "/data"})),
            ("team/data:/data", json!({"name": "team/data", "path": "/data"})),
            ("/mnt:/data", json!({"instance_path": "/mnt", "path": "/data", "optional": false})),
            ("{name: [a, b], path: /data}", json!({"name": ["a", "b"], "path": "/data"})),
            (
                "{instance_path: /mnt, path: /d, optional: true}",
                json!({"instance_path": "/mnt", "path": "/d", "optional": true}),
            ),
        ],
        &[
            "data",
            "data:",
            "data:rel",
            ":/data",
            "data:/a/../b",
            "data:/a/",
            "./dir:/data",
            "~/dir:/data",
            "../dir:/data",
            "rel/dir/more:/data",
            "rel/..:/data",
            "rel/:/data",
            "{name: a}",
            "{name: a, path: /d, optional: true}",
            "{path: /d}",
        ],
    );
    table::<FileMapping>(
        &[
            ("train.py", json!({"local_path": "train.py", "path": "train.py"})),
            ("~/a:/b", json!({"local_path": "~/a", "path": "/b"})),
        ],
        &["''", "a:", ":b", "{local_path: a}"],
    );
}

#[test]
fn a_repo_is_a_local_path_or_a_url() {
    let path = |local: &str, dir: &str| json!({"local_path": local, "path": dir, "if_exists": "error"});
    let url = |url: &str, dir: &str| json!({"url": url, "path": dir, "if_exists": "error"});
    table::<Repo>(
        &[
            (".", path(".", ".")),
            ("..:/my-repo", path("..", "/my-repo")),
            ("https://github.com/a/b", url("https://github.com/a/b", ".")),
            ("https://host:8443/a/b:/dir", url("https://host:8443/a/b", "/dir")),
            ("git@github.com:a/b.git", url("git@github.com:a/b.git", ".")),
            ("git@github.com:a/b.git:/dir", url("git@github.com:a/b.git", "/dir")),
            ("ssh://git@host:22/a", url("ssh://git@host:22/a", ".")),
            (
                "{url: u, branch: main}",
                json!({"url": "u", "branch": "main", "path": ".", "if_exists": "error"}),
            ),
        ],
        &["''", "a:", "{}", "{url: u, local_path: p}", "{url: u, if_exists: maybe}"],
    );
}

#[test]
fn names_tags_and_users_allow_only_their_character_set() {
    let longest = format!("a{}", "b".repeat(40));
    table::<Name>(
        &[("ab", json!("ab")), ("a-1", json!("a-1")), (&longest, json!(longest.clone()))],
        &["a", "A1", "1a", "a_b", "-ab", &format!("{longest}b"), "true"],
    );
    table::<GroupName>(&[("0", json!("0")), ("head", json!("head"))], &["-a", "A", "a_b", "''"]);
    table::<ResourceReference>(
        &[
            ("gpus", json!({"name": "gpus"})),
            ("lab/gpus", json!({"project": "lab", "name": "gpus"})),
            ("{name: x}", json!({"name": "x"})),
        ],
        &["a/b/c", "/a", "a/", "''", "{project: p}"],
    );
    table::<Tags>(
        &[("{team: ml, cost-centre_1: '42 /x'}", json!({"team": "ml", "cost-centre_1": "42 /x"}))],
        &["{'a b': x}", "{a: 'x;y'}", "{a: null}", "[a]"],
    );
    table::<User>(
        &[("root", json!("root")), ("1000:users", json!("1000:users"))],
        &["a:b:c", "''", ":x", "x:", "-u"],
    );
}

#[test]
fn python_version_3_1_is_read_as_3_10() {
    table::<PythonVersion>(
        &[
            ("3.12", json!("3.12")),
            ("'3.12'", json!("3.12")),
            ("3.10", json!("3.10")),
            ("3.1", json!("3.10")),
            ("3.9", json!("3.9")),
        ],
        &["2.7", "3.8", "'3.1'", "3.16", "python3"],
    );
}

#[test]
fn short_form_settings_are_normalised_and_invalid_ones_refused() {
    table::<RetrySetting>(
        &[
            ("true", json!(true)),
            ("{on_events: [error], duration: 4h}", json!({"on_events": ["error"], "duration": 14400})),
            ("{}", json!({})),
        ],
        &["{on_events: []}", "{on_events: [errors]}", "sometimes"],
    );
    table::<Cron>(
        &[
            ("0 8 * * mon-fri", json!("0 8 * * mon-fri")),
            ("['15 23 * * *', '0 0 1 * *']", json!(["15 23 * * *", "0 0 1 * *"])),
        ],
        &["'* * * *'", "60 * * * *", "0 0 0 8 * *", "[]", "daily", "0 8 * * funday"],
    );
    table::<InstanceSelector>(
        &[
            ("gpu-0", json!({"name": "gpu-0"})),
            ("{hostname: h}", json!({"hostname": "h"})),
            ("{fleet: f, instance: 3}", json!({"fleet": {"name": "f"}, "instance": 3})),
        ],
        &["''", "{fleet: f}", "{fleet: f, instance: -1}", "{name: a, hostname: b}", "{}"],
    );
    table::<GatewayChoice>(&[("false", json!(false)), ("main", json!({"name": "main"}))], &["[a]", "a/b/c"]);
    table::<Https>(&[("auto", json!("auto")), ("no", json!(false))], &["maybe"]);
    table::<Model>(
        &[
            ("m", json!({"type": "chat", "name": "m", "format": "openai", "prefix": "/v1"})),
            (
                "{name: m, format: tgi, eos_token: e}",
                json!({"type": "chat", "name": "m", "format": "tgi", "eos_token": "e"}),
            ),
        ],
        &["{name: m}", "{name: m, format: x}", "{name: m, format: tgi, prefix: /v1}", "{format: openai}"],
    );
    table::<Replicas>(
        &[
            ("2", json!({"min": 2, "max": 2})),
            ("1..4", json!({"min": 1, "max": 4})),
            ("..4", json!({"min": 0, "max": 4})),
        ],
        &["1..", "4..1", "-1"],
    );
    table::<FleetNodes>(
        &[
            ("2", json!({"min": 2, "max": 2})),
            ("1..4", json!({"min": 1, "max": 4})),
            ("..4", json!({"min": 0, "max": 4})),
            ("0..", json!({"min": 0})),
            ("{min: 2, target: 6, max: 10}", json!({"min": 2, "target": 6, "max": 10})),
            ("{min: 2, target: 2}", json!({"min": 2})),
        ],
        &["{min: 3, target: 2}", "{target: 5, max: 4}", "4..1", "x"],
    );
    table::<Blocks>(&[("auto", json!("auto")), ("4", json!(4))], &["0", "-1", "many"]);
    table::<InternalIp>(&[("10.0.0.1", json!("10.0.0.1"))], &["8.8.8.8", "10.0.0.300", "host"]);
    table::<Network>(&[("10.0.0.0/16", json!("10.0.0.0/16"))], &["8.0.0.0/8", "10.0.0.0/33", "lan"]);
    table::<PositiveNumber>(
        &[("0.5", json!(0.5)), ("2", json!(2.0))],
        &["0", "-1", ".nan", ".inf", "1e999", "free"],
    );
}
