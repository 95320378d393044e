//! Projects that share a machine, a gateway and a volume, with the real server, agent and gateway.

use serde_json::{Value, json};
use windlass_testenv::{
    queue_env::QueueEnv,
    server::{TOKEN, call_api, submission},
    services::{
        GatewayProcess, free_port,
        gateway_process::{create_gateway, wait_until_running},
        probe_config, service_config,
    },
};
use windlass_testkit::wait::eventually_ok_async;

use crate::test_env::{HostMode, TestEnv, newest_submission, small_task_config};

const OTHER: &str = "lab";

/// A server whose machine serves two projects.
async fn two_projects() -> TestEnv {
    let mut env = TestEnv::new(HostMode::Processes).await;
    env.post("/api/projects/create", &json!({"project_name": OTHER})).await;
    env
}

async fn apply(env: &mut TestEnv, configuration: &Value) -> Value {
    env.post(&format!("/api/project/{OTHER}/runs/apply"), &submission(configuration)).await
}

/// Submits a configuration that is refused, and returns the reason.
async fn refused(env: &TestEnv, configuration: &Value) -> String {
    let path = format!("/api/project/{OTHER}/runs/apply");
    let answer = call_api(env.address(), &path, &submission(configuration)).await.unwrap();
    assert_eq!(answer.status, 400, "{}", answer.body);
    answer.body.to_string()
}

async fn reaches(env: &mut TestEnv, name: &str, status: &str) -> Value {
    eventually_ok_async(&format!("{name} is {status}"), async || {
        let run = env.post(&format!("/api/project/{OTHER}/runs/get"), &json!({"run_name": name})).await;
        if run["status"] == status { Ok(run) } else { Err(format!("{run:#}\n{}", env.server_log())) }
    })
    .await
}

/// A task that needs the whole machine.
fn whole_machine(name: &str, class: &str, commands: &[&str]) -> Value {
    let mut task = small_task_config(name, commands);
    let cores = std::thread::available_parallelism().unwrap().get();
    // A request that equals the default would be ignored on this machine.
    task["resources"]["cpu"]["count"] = json!({"min": cores, "max": cores});
    task["class"] = class.into();
    task
}

#[tokio::test]
async fn a_preempted_job_gets_its_notice_and_sigterm_and_an_event_names_the_rule() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut fleet = env.fleet("local").await["spec"]["configuration"].clone();
    // Clients see it as a fleet of hosts.
    fleet["backends"] = json!(["local"]);
    fleet["preemption"] = json!({"min_run": 0, "wait": 0, "grace": 45});
    let spec = json!({"configuration": fleet, "profile": {"name": "default"}});
    env.project("fleets/apply", &json!({"plan": {"spec": spec}, "force": true})).await;

    let mut victim = whole_machine(
        "victim",
        "idle",
        &[
            "trap 'echo TERM; cat \"$WINDLASS_PREEMPTION_FILE\"; exit 3' TERM",
            "[ -e \"$WINDLASS_PREEMPTION_FILE\" ] || echo no notice",
            "while :; do sleep 0.05; done",
        ],
    );
    victim["retry"] = json!({"on_events": ["interruption"], "duration": 3600});
    env.apply(&victim).await;
    env.says("victim", "no notice\n").await;
    // It ends for a run of a higher class.
    let go = env.home().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.05; done", go.display());
    env.apply(&whole_machine("chief", "urgent", &[&wait])).await;
    env.reaches("chief", &["running"]).await;
    let run = env.run("victim").await;
    let first = &run["jobs"][0]["job_submissions"][0];
    assert_eq!(first["termination_reason"], "interrupted_by_no_capacity", "{run:#}");
    let notice = "TERM\n{\"reason\": \"preempted_by_scheduler\", \"grace_seconds\": 45}\n";
    // The shell may report the end of its `sleep`, too.
    let log = env.log_of_job(&run, 0, 0).await.replace("Terminated\n", "");
    assert_eq!(log, format!("no notice\n{notice}"), "{run:#}");
    let events = env.post("/api/events/list", &json!({"limit": 100})).await.to_string();
    assert!(events.contains("preempted: run `chief` is of class `urgent`"), "{events}");
    let why = env.windlass(env.home(), &["why", "victim"]);
    let why = String::from_utf8(why.stdout).unwrap();
    assert!(why.contains("chief") && why.contains("higher class"), "{why}");
    // It starts again when the other ends.
    std::fs::write(&go, "").unwrap();
    env.reaches("chief", &["done"]).await;
    let run = env.reaches("victim", &["running"]).await;
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 2, "{run:#}");
    env.stop("victim", true).await;
    env.reaches("victim", &["terminated"]).await;
}

#[tokio::test]
async fn the_machine_of_the_server_serves_every_project_by_default() {
    let mut env = two_projects().await;
    let listed = env.windlass(env.home(), &["export"]);
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.lines().any(|line| line.starts_with("local ") && line.ends_with('*')), "{listed}");
    // Also projects of users who administer nothing but their own.
    let made = env.post("/api/users/create", &json!({"username": "eve", "global_role": "user"})).await;
    let eve = made["creds"]["token"].as_str().unwrap().to_owned();
    let create =
        env.command(env.home(), &["project", "add", "eves"]).env("WINDLASS_TOKEN", &eve).output().unwrap();
    assert!(create.status.success(), "{create:?}");
    let here = env.home().join("job.yml");
    let task = "type: task\nname: hello\nimage: none\ncommands: [echo hello]\n\
                resources: {cpu: 1.., memory: 0.1GB.., disk: null}\n";
    std::fs::write(&here, task).unwrap();
    for (project, token) in [(OTHER, TOKEN), ("eves", eve.as_str())] {
        let run = env
            .command(env.home(), &["apply", "-y", "-f", "job.yml", "--project", project])
            .env("WINDLASS_TOKEN", token)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&run.stdout).into_owned();
        assert!(run.status.success() && output.contains("hello\n"), "{run:?}\n{}", env.server_log());
    }
}

#[tokio::test]
async fn a_service_of_another_project_uses_an_exported_gateway_until_the_export_ends() {
    let mut env = two_projects().await;
    let token = create_gateway(&mut env, "entry", 1).await;
    let (port, url) = (free_port(), env.url());
    let node = GatewayProcess::start(&env, &url, &token, "one", port);
    wait_until_running(&mut env, 1).await;
    let mut page = service_config("page", free_port());
    (page["probes"], page["gateway"]) = (probe_config(), json!("main/entry"));
    let message = refused(&env, &page).await;
    assert!(message.contains("a gateway of another project that is not exported to `lab`"), "{message}");

    let export = json!({"name": "web", "importer_projects": [OTHER], "exported_gateways": ["entry"]});
    env.project("exports/create", &export).await;
    let run = apply(&mut env, &page).await;
    let url = run["service"]["url"].as_str().unwrap();
    let host = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    assert!(host.ends_with(".services.test"), "{run:#}");
    let caller = node.caller(&host);
    eventually_ok_async("the gateway serves the page", async || {
        let got = caller.get("/a?b=c");
        let is_served = got.as_ref().is_ok_and(|got| got.status == 200 && got.body.contains(" path=/a?b=c"));
        if is_served { Ok(()) } else { Err(format!("{got:?}\n{}", node.log_tail())) }
    })
    .await;
    assert_eq!(caller.with_token(None).get("/").unwrap().status, 401);

    env.project("exports/delete", &json!({"name": "web"})).await;
    let mut late = service_config("late", free_port());
    late["gateway"] = json!("main/entry");
    let message = refused(&env, &late).await;
    assert!(message.contains("a gateway of another project that is not exported to `lab`"), "{message}");
    let stop = json!({"runs_names": ["page"], "abort": false});
    env.post(&format!("/api/project/{OTHER}/runs/stop"), &stop).await;
    reaches(&mut env, "page", "terminated").await;
}

#[tokio::test]
async fn jobs_of_two_projects_keep_data_in_an_exported_volume() {
    let mut env = two_projects().await;
    let volume = json!({"configuration": {"type": "volume", "name": "data", "backend": "local"}});
    env.project("volumes/create", &volume).await;
    env.eventually_volume("data", "active").await;
    let path = env.home().join("mounted").display().to_string();
    let mut write = small_task_config("write", &[&format!("echo kept > {path}/note")]);
    write["volumes"] = json!([format!("main/data:{path}")]);
    let message = refused(&env, &write).await;
    assert!(message.contains("`main/data` does not exist"), "{message}");

    let export = json!({"name": "disks", "importer_projects": [OTHER], "exported_volumes": ["data"]});
    env.project("exports/create", &export).await;
    apply(&mut env, &write).await;
    reaches(&mut env, "write", "done").await;
    let mut read = small_task_config("read", &[&format!("cat {path}/note")]);
    read["volumes"] = json!([format!("data:{path}")]);
    let run = env.ends(&read).await;
    assert_eq!(env.log(&run).await, "kept\n", "{run:#}");

    // A job that has it mounted ends with the export.
    let mut hold = small_task_config("hold", &["sleep 600"]);
    hold["volumes"] = write["volumes"].clone();
    apply(&mut env, &hold).await;
    reaches(&mut env, "hold", "running").await;
    env.project("exports/delete", &json!({"name": "disks"})).await;
    let run = reaches(&mut env, "hold", "failed").await;
    assert_eq!(newest_submission(&run)["termination_reason"], "instance_access_revoked", "{run:#}");
    let message = refused(&env, &write).await;
    assert!(message.contains("`main/data` does not exist"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn users_of_the_container_queue_take_turns_whatever_priorities_they_set() {
    let mut ground = QueueEnv::start("turns").await;
    let (ada, bob) = (ground.user("ada").await, ground.user("bob").await);
    let order = ground.shared("order");
    let cores = std::thread::available_parallelism().unwrap().get();
    let mut containers = Vec::new();
    for (who, name, priority) in [(&ada, "ada-1", 1000), (&ada, "ada-2", 999), (&bob, "bob", 1)] {
        let script = format!("echo {name} >> {}; sleep 0.2", order.display());
        // Each needs the whole machine.
        let more = json!({"priority": priority, "runtime_constraints": {"vcpus": cores, "ram": 64 << 20}});
        containers.push(ground.request_as(who, &["sh", "-c", &script], more).await.container);
    }
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    for container in &containers {
        let record = ground.ended(container).await;
        assert_eq!(record["state"], "Complete", "{record}\n{}", ground.dispatcher_log());
    }
    assert_eq!(std::fs::read_to_string(order).unwrap(), "ada-1\nbob\nada-2\n");
}
