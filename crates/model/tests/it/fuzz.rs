//! Fuzzing of all parsers of external input: no panic, little time and little memory for any input.
//!
//! A few hundred inputs each; `FUZZ=100000 cargo nextest run --release -p windlass-model fuzz` for more. Half of the
//! inputs are noise, the other half are tokens that the parsers know, in random order.

use proptest::{prelude::*, test_runner::TestRunner};
use serde_json::{Value, json};
use windlass_model::{
    config::{
        self, Configuration, env,
        interpolate::{self, DollarEscape, Substitution},
        mounts::{FileMapping, Mount, RepoSpec},
        name::UnixUser,
        ports::PortMapping,
        quantities::{parse_duration, parse_memory, parse_range},
        resources::{parse_cpu, parse_gpu},
        shell, yaml, yaml_scalars,
    },
    plan::diff,
    schedule::CronSchedule,
    time::Timestamp,
};

/// Maximum CPU time of one input. Without optimisation everything is about twenty times slower.
const CPU_MS_MAX: u64 = if cfg!(debug_assertions) { 1_000 } else { 50 };
/// Maximum memory that a whole target may add to the process: the inputs, proptest's state and the parser.
const MEMORY_KB_MAX: u64 = 32 * 1024;

#[expect(clippy::disallowed_methods, reason = "a test may look at the world; the model may not")]
fn cases() -> u32 {
    std::env::var("FUZZ").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

/// Returns the CPU time, not the wall clock time: other tests run concurrently.
#[expect(clippy::disallowed_methods, reason = "a test may look at the world; the model may not")]
fn cpu_ms() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse::<u64>().unwrap() / 1_000_000
}

/// Returns the peak memory of this process.
#[expect(clippy::disallowed_methods, reason = "a test may look at the world; the model may not")]
fn peak_kb() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[track_caller]
fn target<T: std::fmt::Debug>(inputs: impl Strategy<Value = T>, read: impl Fn(&T)) {
    let settings = ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() };
    let before = peak_kb();
    let ran = TestRunner::new(settings).run(&inputs, |input| {
        let began = cpu_ms();
        read(&input);
        let took = cpu_ms() - began;
        prop_assert!(took <= CPU_MS_MAX, "it took {took} ms");
        Ok(())
    });
    if let Err(problem) = ran {
        panic!("{problem}");
    }
    let more = peak_kb().saturating_sub(before);
    assert!(more <= MEMORY_KB_MAX, "it took {more} kB of memory");
}

/// Generates noise, or tokens of a small language without its grammar.
fn text(words: &'static [&'static str]) -> impl Strategy<Value = String> {
    let message = prop::collection::vec(prop::sample::select(words), 0..40).prop_map(|words| words.concat());
    prop_oneof!["(?s).{0,200}", message]
}

const YAML: &[&str] = &[
    "type: task\n",
    "type: service\n",
    "type: fleet\n",
    "type: volume\n",
    "type: gateway\n",
    "type: dev-environment\n",
    "commands: [x]\n",
    "env: ",
    "volumes: ",
    "resources: ",
    "gpu: ",
    "port: ",
    "nodes: ",
    "- ",
    "? ",
    ": ",
    "  ",
    "\n",
    "\t",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "<<: ",
    "!!str ",
    "|\n",
    ">\n",
    "'",
    "\"",
    "\\",
    "#",
    "---\n",
    "...\n",
    "\u{feff}",
    "\0",
    ".nan",
    "1e999",
    "0o17",
    "010",
    "no",
    "~",
    "1..2",
    "A100:80GB:8",
    "${{ secrets.x }}",
    "x",
];

#[test]
fn fuzz_of_configurations() {
    target(text(YAML), |text| {
        if let Err(problems) = config::parse(text) {
            assert!(!problems.is_empty() && problems.len() <= 101);
            let _ = config::render(&problems, "x", text);
        }
        let _ = config::parse_profiles(text);
        let _ = yaml::read_bytes(text.as_bytes());
    });
}

const TASK_FILE: &[&str] = &[
    "name: a\n",
    "run: x\n",
    "setup: ",
    "num_nodes: ",
    "execution: parallel\n",
    "primary_tasks: ",
    "termination_delay: ",
    "depends_on: ",
    "deadline: ",
    "type: task\n",
    "commands: [x]\n",
    "envs: ",
    "secrets: ",
    "workdir: ",
    "file_mounts: ",
    "volumes: ",
    "service: ",
    "resources:\n  ",
    "any_of: ",
    "ordered: ",
    "accelerators: ",
    "job_recovery: ",
    "recover_on_exit_codes: ",
    "memory: ",
    "cpus: ",
    "ports: ",
    "image_id: ",
    "infra: ",
    "H100:8",
    "4+",
    "8x",
    "s3://b",
    "$A${A}${",
    "137",
    "1h",
    "---\n",
    "- ",
    "  ",
    "\n",
    "[",
    "]",
    "{",
    "}",
    "a",
    ", ",
    "~",
    "1e999",
];

#[test]
fn fuzz_of_task_files() {
    use windlass_model::skypilot::{self, AttemptRunSpec, CommandLineValues, JobIdentity, ServerContext};
    let given = CommandLineValues {
        envs: [("A".to_owned(), "$A".to_owned())].into(),
        ..CommandLineValues::default()
    };
    let identity = JobIdentity {
        job_id: "1".to_owned(),
        submitted_at: Timestamp::from_secs(0),
        user: "a".to_owned(),
        rank: 0,
        copies: 1,
    };
    target(text(TASK_FILE), |text| match skypilot::parse_task_file(text, &given) {
        Err(problems) => assert!(!problems.is_empty() && problems.len() <= 101),
        Ok(parsed) => {
            for task in 0..u32::try_from(parsed.plan.tasks.len()).unwrap() {
                let _ = AttemptRunSpec::for_attempt(
                    &parsed.plan,
                    task,
                    7,
                    None,
                    &identity,
                    &ServerContext::default(),
                );
            }
        }
    });
}

#[test]
fn fuzz_of_configurations_as_bytes() {
    target(prop::collection::vec(any::<u8>(), 0..300), |bytes| {
        let _ = yaml::read_bytes(bytes);
    });
}

fn document(depth: u32) -> impl Strategy<Value = Value> {
    let keys = &[
        "type",
        "name",
        "commands",
        "env",
        "volumes",
        "resources",
        "gpu",
        "hosts",
        "ssh_config",
        "nodes",
        "port",
        "probes",
        "schedule",
        "cron",
        "configuration",
        "hostname",
        "x",
        "replicas",
        "scaling",
        "retry",
        "max_price",
    ];
    let words = &[
        "task",
        "service",
        "fleet",
        "volume",
        "",
        "x",
        "1..2",
        "8GB",
        "* * * * *",
        "a:/b",
        "K=V",
        "-1",
        "\0",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(&words[..]).prop_map(Value::from),
    ];
    leaf.prop_recursive(depth, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((prop::sample::select(&keys[..]), inner), 0..6)
                .prop_map(|pairs| pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        ]
    })
}

#[test]
fn fuzz_of_documents() {
    target(document(5), |value| {
        let _ = Configuration::from_json(value);
        for kind in ["task", "service", "dev-environment", "fleet", "volume", "gateway"] {
            let mut typed = value.clone();
            if let Some(map) = typed.as_object_mut() {
                map.insert("type".to_owned(), json!(kind));
            }
            if let Ok(read) = Configuration::from_json(&typed) {
                let written = serde_json::to_value(&read).unwrap();
                assert_eq!(Configuration::from_json(&written).unwrap(), read, "what was read is read again");
            }
        }
    });
}

#[test]
fn fuzz_of_differences() {
    target((document(4), document(4)), |(old, new)| {
        for compare in [diff::diff_run_configuration, diff::diff_run_spec, diff::diff_fleet] {
            let _ = compare(old, new);
            assert_eq!(compare(new, new).map(|changes| changes.len()).ok(), Some(0), "the same is no change");
        }
    });
}

#[test]
fn fuzz_of_interpolation() {
    const WORDS: &[&str] = &[
        "${{",
        "}}",
        "$$",
        "$",
        "{",
        "}",
        " ",
        "secrets.",
        "env.",
        "x",
        ".",
        "é",
        "\n",
        "windlass.",
        "[0]",
        "\\",
    ];
    target((text(WORDS), text(WORDS)), |(text, value)| {
        let _ = (interpolate::split_pieces(text), interpolate::references(text));
        for dollars in [DollarEscape::Keep, DollarEscape::Unescape] {
            let _ = interpolate::substitute(text, dollars, |_| Ok(Substitution::Keep));
            let _ = interpolate::substitute(text, dollars, |_| Ok(Substitution::Value(value.clone())));
        }
        let once = interpolate::substitute("${{ a.b }}", DollarEscape::Unescape, |_| {
            Ok(Substitution::Value(value.clone()))
        });
        assert_eq!(once.unwrap(), *value, "what is put in is not read again");
    });
}

#[test]
fn fuzz_of_environments() {
    const WORDS: &[&str] = &["A", "=", "\n", "\0", "LD_PRELOAD", "1", "_", " ", "é", ",", "'", "-"];
    target(text(WORDS), |text| {
        let named = env::is_env_name(text);
        assert!(!named || text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'='));
        for env in [json!([text]), json!({ text.as_str(): text })] {
            let _ = Configuration::from_json(&json!({ "type": "task", "commands": ["x"], "env": env }));
        }
    });
}

#[test]
fn fuzz_of_mounts_ports_and_users() {
    const WORDS: &[&str] =
        &["/", ":", "a", "..", ".", "C:", "\\", "://", "@", "git", "é", "*", "80", "-", "\0", "~"];
    target(text(WORDS), |text| {
        if let Ok(mount) = Mount::parse(text) {
            assert!(mount.path().starts_with('/'), "{mount:?}");
        }
        let _ = (
            FileMapping::parse(text),
            RepoSpec::parse(text),
            PortMapping::parse(text),
            UnixUser::parse(text),
        );
    });
}

#[test]
fn fuzz_of_ranges_durations_and_sizes() {
    const WORDS: &[&str] = &[
        "..",
        "1",
        "0",
        "-",
        "9999999999999999999",
        "GB",
        "MB",
        "TB",
        "s",
        "h",
        "w",
        "off",
        "inf",
        "nan",
        "1e308",
        ".",
        ":",
        " ",
        "A100",
        ",",
        "x86",
        "arm",
        "*",
        "é",
    ];
    target(text(WORDS), |text| {
        if let Ok(range) = parse_range::<f64>(text) {
            assert!(
                range.min.is_none_or(f64::is_finite) && range.max.is_none_or(f64::is_finite),
                "{range:?}"
            );
        }
        if let Ok(size) = parse_memory(text) {
            assert!(size.is_finite() && size >= 0.0, "{size}");
        }
        let _ = (parse_range::<u32>(text), parse_duration(text), parse_cpu(text), parse_gpu(text));
        let _ = (yaml_scalars::resolve_scalar(text), shell::split(text), Timestamp::parse(text));
    });
}

#[test]
fn fuzz_of_cron() {
    const WORDS: &[&str] = &[
        "*",
        " ",
        "/",
        "-",
        ",",
        "0",
        "59",
        "31",
        "30 2",
        "L",
        "W",
        "#",
        "MON",
        "FEB",
        "@daily",
        "?",
        "9999999999",
        "1",
    ];
    target((text(WORDS), any::<i64>()), |(text, moment)| {
        let _ = config::profile::parse_cron(text);
        if let Ok(crons) = CronSchedule::parse(&[text]) {
            let next = crons.next_after(Timestamp(*moment));
            assert!(next.is_none_or(|next| next.0 > *moment));
        }
    });
}

/// Well-known YAML bombs, each in its usual size.
#[test]
fn fuzz_of_known_yaml_bombs() {
    let mut aliases = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..30 {
        aliases
            .push_str(&format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 9].join(", ")));
    }
    let keys: String = (0..1_000_000).map(|n| format!("{n:x}:\n")).collect();
    let utf16: Vec<u8> = "\u{feff}type: task".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let plain = |text: &str| format!("type: task\ncommands: [x]\nmax_price: {text}").into_bytes();
    let bombs: [(&str, Vec<u8>); 15] = [
        ("alias bomb", aliases.into_bytes()),
        ("nesting, flow", "[".repeat(100_000).into_bytes()),
        ("nesting, block", "- ".repeat(100_000).into_bytes()),
        ("nesting, mappings", "{a: ".repeat(100_000).into_bytes()),
        ("a million keys", keys.into_bytes()),
        ("duplicate keys", b"type: task\ntype: service\ncommands: [x]".to_vec()),
        ("tags", b"type: !!python/object/apply:os.system [x]".to_vec()),
        ("UTF-16", utf16),
        ("no UTF-8", b"type: task\ncommands: [\xff]".to_vec()),
        ("NaN", plain(".nan")),
        ("infinity", plain("1e999")),
        ("the word no", plain("no")),
        ("several documents", b"type: task\n---\ntype: task".to_vec()),
        ("NUL", b"type: task\ncommands: [\"a\0b\"]".to_vec()),
        ("binary", vec![0x80; 100_000]),
    ];
    for (name, bytes) in bombs {
        let (began, before) = (cpu_ms(), peak_kb());
        let refused = match std::str::from_utf8(&bytes) {
            Ok(text) => config::parse(text).is_err(),
            Err(_) => yaml::read_bytes(&bytes).is_err(),
        };
        assert!(refused, "{name} is taken");
        let (took, more) = (cpu_ms() - began, peak_kb().saturating_sub(before));
        assert!(took <= CPU_MS_MAX, "{name}: {took} ms");
        assert!(more <= MEMORY_KB_MAX, "{name}: {more} kB");
    }
}
