//! `docs/reference/metrics.md`: every metric that the server, a process of a gateway and a dispatcher produce. The check of the
//! alert rules and of the dashboard (`cargo xtask docs --check`) reads that page.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Stdio,
};

use windlass_testkit::{ports, wait::eventually_ok};

use crate::{
    attach::require_agent,
    cli_env::{CliEnv, TOKEN},
};

/// Prefix of names, heading and description. The first prefix that matches counts.
const SECTIONS: &[(&str, &str, &str)] = &[
    (
        "windlass_http_",
        "Requests",
        "Label `operation` is the operation of [the API](../api/openapi.json), `status` that of the response.",
    ),
    (
        "windlass_pipeline_",
        "Pipelines",
        "Label `pipeline` is the name of the [pipeline](../concepts/pipelines.md). Every server has its own values.",
    ),
    ("windlass_database_", "Database", "Work that this server asks of its database."),
    (
        "windlass_job_",
        "Running jobs",
        "Labels `project`, `run`, `replica` and `job`, and `gpu` for a GPU. The last sample of each running job, of at most 5,000. \
         Every server reports all of them: do not add up the values of several servers.",
    ),
    (
        "windlass_service_",
        "Services",
        "Labels `project` and `run`, and `class` (`2xx` to `5xx`) for requests. Each server and each process of a gateway reports \
         the requests that it received itself.",
    ),
    ("windlass_gateway_", "Gateway process", "Only in processes of gateways (`--metrics-listen`)."),
    ("windlass_dispatch_", "Dispatcher", "In the file of `windlass dispatch --metrics-file`."),
    ("windlass_", "Retention", "Label `kind` is the kind of the rows."),
];

/// Name of a series, its type and its help.
type Families = BTreeMap<String, (String, String)>;

/// Reads the metadata of a Prometheus text.
fn read_families(text: &str, found: &mut Families) {
    let mut helps = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            helps.insert(name, help);
        }
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let total = if kind == "counter" && !name.ends_with("_total") { "_total" } else { "" };
            found.insert(format!("{name}{total}"), (kind.to_owned(), helps[name].to_owned()));
        }
    }
}

fn get_metrics(authority: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(authority)?;
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: {authority}\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    if text.starts_with("HTTP/1.1 200") { Ok(text) } else { Err(std::io::Error::other(text)) }
}

/// Writes a file that only its owner can read.
fn token_file(env: &CliEnv, name: &str, token: &str) -> String {
    env.file(name, token);
    let path = env.home.path().join(name);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    path.display().to_string()
}

fn dispatcher_metrics(env: &CliEnv) -> String {
    let token = token_file(env, "dispatch.token", &env.windlass(&["dispatch", "token"]).ok().stdout);
    let path = |name: &str| env.home.path().join(name).display().to_string();
    let (metrics, dir, url) = (path("metrics"), path("attempts"), env.server.url());
    let args = ["dispatch", "local", "--server", &url, "--token-file", &token, "--once", "--allow-process"];
    env.windlass(&[&args[..], &["--metrics-file", &metrics, "--dir", &dir]].concat()).ok();
    std::fs::read_to_string(metrics).unwrap()
}

fn gateway_metrics(env: &CliEnv) -> String {
    env.file(
        "entry.yml",
        "type: gateway\nname: entry\nbackend: remote\nregion: here\ndomain: example.org\ncertificate: null\n",
    );
    env.windlass(&["apply", "-f", "entry.yml", "-y", "-d"]).ok();
    let token = token_file(env, "entry.token", &env.windlass(&["gateway", "token", "entry"]).ok().stdout);
    let listen = |port: u16| format!("127.0.0.1:{port}");
    let (requests, metrics) = (listen(ports::reserve_free_port()), listen(ports::reserve_free_port()));
    let (url, state) = (env.server.url(), env.home.path().join("state").display().to_string());
    let args = ["gateway", "serve", "entry", "--server", &url, "--token-file", &token, "--listen", &requests];
    let mut command =
        env.command(&[&args[..], &["--metrics-listen", &metrics, "--state-dir", &state]].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let text = eventually_ok("the gateway serves its metrics", || get_metrics(&metrics));
    child.kill().unwrap();
    child.wait().unwrap();
    text
}

#[test]
fn the_committed_metrics_reference_matches_what_the_programs_produce() {
    require_agent();
    let env = CliEnv::new();
    let mut found = Families::new();
    read_families(&dispatcher_metrics(&env), &mut found);
    read_families(&gateway_metrics(&env), &mut found);
    let url = env.server.url();
    read_families(&get_metrics(url.trim_start_matches("http://")).unwrap(), &mut found);

    let mut out = "# Metrics\n\nMetrics in the Prometheus text format, generated from what the programs produce. A histogram has the \
        series `_bucket`, `_sum` and `_count`. [Monitoring](../operations/monitoring.md) describes how to collect them, alert rules \
        and a dashboard.\n"
        .to_owned();
    for (at, (prefix, heading, about)) in SECTIONS.iter().enumerate() {
        let is_earlier = |name: &str| SECTIONS[..at].iter().any(|(other, ..)| name.starts_with(other));
        let _ =
            write!(out, "\n## {heading}\n\n{about}\n\n| series | type | meaning |\n| --- | --- | --- |\n");
        for (name, (kind, help)) in
            found.iter().filter(|(name, _)| name.starts_with(prefix) && !is_earlier(name))
        {
            let _ = writeln!(out, "| `{name}` | {kind} | {help} |");
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/metrics.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &out).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == out, "docs/reference/metrics.md is stale: run the tests with UPDATE=1");
}
