//! The first five minutes: both binaries, a server on SQLite, one configuration checked and planned.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::{
    http, out,
    process::{self, Guarded, Scratch},
    workspace::Workspace,
};

const EXAMPLE: &str = "examples/hello.yml";
const TOKEN: &str = "demo-token-for-this-machine-only";
const READY_WITHIN: Duration = Duration::from_secs(30);

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    out::heading("build `windlass` and `windlass-agent`");
    process::run(workspace.cargo().args(["build", "-p", "windlass-cli", "-p", "windlass-agent"]))?;
    let windlass = workspace.built("debug", "windlass")?;

    let port = http::free_port()?;
    out::heading(&format!("start `windlass server --port {port}` on SQLite"));
    let home = Scratch::new("demo")?;
    let mut command = Command::new(&windlass);
    command.args(["server", "--host", "127.0.0.1", "--port", &port.to_string(), "--admin-token", TOKEN]);
    command.arg("--data-dir").arg(home.path()).env("WINDLASS_HOME", home.path()).stdin(Stdio::null());
    let mut server = Guarded::spawn(&mut command, "TERM")?;
    let took = process::wait_until(&mut server, READY_WITHIN, "the server is ready", || {
        http::get(port, "/healthcheck").is_ok_and(|answer| answer.status == 200)
    })?;
    out::talk(&format!("ready after {} ms, pid {}", took.as_millis(), server.id()));

    out::heading(&format!("windlass check {EXAMPLE}"));
    process::run(Command::new(&windlass).current_dir(&workspace.root).args(["check", EXAMPLE]))?;

    out::heading("submit a task of one line through the HTTP API");
    submit(port)?;

    out::heading("what to try next");
    out::say(&format!(
        "The server does not drive its agents yet, so no fleet can take the run above: it ends and says so. Running it on this machine arrives with them.\n\
         \n\
         windlass:  {windlass}\n\
         \n\
         {windlass} server                    a server of your own, data in ~/.windlass\n\
         {windlass} check FILE…               every problem of a configuration, with line and column\n\
         cargo xtask test                     every test on this machine",
        windlass = windlass.display(),
    ));
    Ok(())
}

/// Plan, then apply, as a client does.
fn submit(port: u16) -> Result<()> {
    let spec = json!({
        "run_name": "hello",
        "repo_id": "none",
        "repo_data": {"repo_type": "virtual"},
        "configuration_path": EXAMPLE,
        "configuration": {"type": "task", "name": "hello", "commands": ["echo hello from windlass"]},
        "profile": {"name": "default", "default": false},
        "ssh_key_pub": null,
    });
    let Some(plan) = call(port, "/api/project/main/runs/get_plan", &json!({"run_spec": spec}))? else {
        return Ok(());
    };
    out::say(&format!("plan: {} `{}`", text(&plan["action"]), text(&plan["run_spec"]["run_name"])));
    let request = json!({"plan": {"run_spec": spec, "current_resource": null}, "force": false});
    let Some(run) = call(port, "/api/project/main/runs/apply", &request)? else { return Ok(()) };
    out::say(&format!("run:  `{}` is {}", text(&run["run_spec"]["run_name"]), text(&run["status"])));
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

/// `None` when this server does not have the call yet.
fn call(port: u16, path: &str, body: &Value) -> Result<Option<Value>> {
    let answer = http::post(port, path, TOKEN, &body.to_string())?;
    if matches!(answer.status, 404 | 405 | 501) {
        out::say(&format!("this server does not answer `{path}` yet"));
        return Ok(None);
    }
    ensure!(answer.status == 200, "`{path}` answered {}: {}", answer.status, answer.body);
    Ok(Some(serde_json::from_str(&answer.body)?))
}
