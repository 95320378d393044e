//! A job as a container of the queue: its requirements, and one script that contains everything else.
//!
//! The script is a secret mount, because variables and commands may contain secrets; none of it is in the container
//! that users see. Pure.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Map, Value, json};
use windlass_api::agent::runner::{JobSpec as Orders, SubmitBody};
use windlass_model::{
    config::{
        job_spec::{JobSpec, REPO_DIR, Requirements},
        run::RunClass,
        shell::quote,
    },
    id::{SubmissionId, UserId},
    plan::slurm::SlurmObstacle,
    queue::{JOB_VARIABLE, PRIORITY_MAX},
    resources::ResourcesSpec,
};

use super::{STOP_MAX_SECS, UnstartableReason};
use crate::{
    agents::{JobStart, QueueRequest},
    queue_rank::QueueRank,
};

/// Path of the script; below `$WINDLASS_ROOT` where the job is a plain process. Hosts reserve `/windlass` for their agents.
const SCRIPT_PATH: &str = "/.windlass/job";
const CODE: &str = "/.windlass/code";
const OUTPUT: &str = "/out";
/// Directory that every user of an image may write.
const HOME: &str = "/.windlass/home";
/// Maximum size of the files that are passed with a container through the queue.
const FILES_MAX: usize = 8 << 20;
const BYTES_PER_GB: f64 = (1u64 << 30) as f64;
/// Highest priority of a run; that of a container is ten times as high.
const RUN_PRIORITY_MAX: u64 = 100;

/// Part of the script that enters the default directory, or another one if the user of the image cannot create it.
const HOME_SCRIPT: &str = r#"mkdir -p "$home" 2>/dev/null && [ -w "$home" ] || home="$root/.windlass/home"
cd "$home"
"#;

/// Last part of the script, which runs the command. It becomes a plain process, whose guard handles signals. In a
/// container the script is the process whose end is the end of all others: once it was stopped, it waits for
/// those that the command has left.
const RUN_SCRIPT: &str = r#"[ -z "$root" ] || exec "$@" 2>&1
stopped=
trap 'stopped=1' TERM
"$@" 2>&1
code=$?
has_others() {
  for process in /proc/[0-9]*; do
    case "${process#/proc/}" in 1 | $$) ;; *) return 0 ;; esac
  done
  return 1
}
while [ -n "$stopped" ] && has_others; do sleep 1; done
exit "$code"
"#;

pub(super) struct Inputs<'a> {
    pub(super) submission: SubmissionId,
    pub(super) user: UserId,
    pub(super) run_name: &'a str,
    pub(super) rank: QueueRank,
    pub(super) spec: &'a JobSpec,
    pub(super) start: &'a JobStart,
    /// Dispatcher, and partition if there is one.
    pub(super) dispatcher: Option<&'a str>,
    pub(super) partition: Option<&'a str>,
    /// GPU type of the chosen nodes, if it has a name.
    pub(super) gpu_type: Option<String>,
    pub(super) is_spot: bool,
}

pub(super) fn build(inputs: &Inputs<'_>) -> Result<QueueRequest, UnstartableReason> {
    let Inputs { spec, start, .. } = inputs;
    let orders = &start.submit.job_spec;
    let is_dev_environment = orders.tty == Some(true);
    if let Some(obstacle) = SlurmObstacle::find_all(spec, is_dev_environment).first() {
        return Err(not_in_queue(obstacle.as_str(), obstacle.cure()));
    }
    let mut secrets = Map::new();
    let mut text = |path: &str, content: String| {
        secrets.insert(path.to_owned(), json!({ "kind": "text", "content": content }));
    };
    let mut bytes = 0;
    let mut unpack = String::new();
    if let Some(code) = &start.code {
        bytes += code.len();
        text(CODE, BASE64_STANDARD.encode(code));
        unpack.push_str(&format!("base64 -d \"$root\"{CODE} | tar -xf -\n"));
    }
    for (number, ((_, tar), archive)) in start.archives.iter().zip(&orders.file_archives).enumerate() {
        bytes += tar.len();
        let path = format!("/.windlass/files-{number}");
        text(&path, BASE64_STANDARD.encode(tar));
        unpack.push_str(&unpack_script(&path, &archive.path));
    }
    if bytes > FILES_MAX {
        let much =
            format!("a job with {} MiB of files (the maximum is {} MiB)", bytes >> 20, FILES_MAX >> 20);
        return Err(not_in_queue(&much, "put them on a file system that the nodes of the cluster share"));
    }
    text(SCRIPT_PATH, script(&start.submit, &unpack));
    Ok(QueueRequest { submission: inputs.submission, user: inputs.user, request: request(inputs, secrets) })
}

fn not_in_queue(what: &str, hint: &str) -> UnstartableReason {
    UnstartableReason::NotInQueue { what: what.to_owned(), hint: hint.to_owned() }
}

fn request(inputs: &Inputs<'_>, secrets: Map<String, Value>) -> Map<String, Value> {
    // A new field does not compile until the container gets it, or another place is named that does something with it.
    let JobSpec {
        job_name,
        image_name: _,
        max_duration,
        stop_duration,
        requirements:
            Requirements { resources, max_price: _, spot: _, reservation: _, multinode: _, backend_options: _ },
        // In the script, which is made from the orders for a runner.
        replica_num: _,
        job_num: _,
        commands: _,
        env: _,
        working_dir: _,
        repo_dir: _,
        repo_exists_action: _,
        repo_code_hash: _,
        file_archives: _,
        // Refused, by `SlurmObstacle`.
        jobs_per_replica: _,
        app_specs: _,
        user: _,
        default_image: _,
        python: _,
        privileged: _,
        registry_auth: _,
        volumes: _,
        repo_data: _,
        service_port: _,
        // Without a meaning there: no repository is cloned, there is one node, and the node has the home.
        single_branch: _,
        ssh_key: _,
        home_dir: _,
        // Decided by the server and its pipelines.
        replica_group: _,
        node_group_index: _,
        node_group_name: _,
        node_group_job_index: _,
        image_architectures: _,
        default_image_from: _,
        utilization_policy: _,
        retry: _,
        probes: _,
    } = inputs.spec;
    let ResourcesSpec { cpu, memory, gpu, shm_size: _, disk: _ } = resources;
    let cpus = cpu.count.min.unwrap_or(1).max(1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a size in bytes; casts saturate"
    )]
    let memory = (memory.min.unwrap_or(1.0) * BYTES_PER_GB).round() as u64;
    let mut constraints = json!({ "vcpus": cpus, "ram": memory.max(1 << 20) });
    let gpus = gpu.as_ref().and_then(|gpu| gpu.count.min).unwrap_or(0);
    if gpus > 0 {
        constraints["gpu"] = json!({ "stack": "cuda", "device_count": gpus });
    }
    let stop_duration = stop_duration.unwrap_or(STOP_MAX_SECS).max(0);
    let mut scheduling = json!({ "preemptible": inputs.is_spot, "stop_duration": stop_duration });
    if let Some(partition) = inputs.partition {
        scheduling["partitions"] = json!([partition]);
    }
    if let Some(gpu_type) = inputs.gpu_type.as_ref().filter(|_| gpus > 0) {
        scheduling["gpu_type"] = gpu_type.as_str().into();
    }
    if let Some(dispatcher) = inputs.dispatcher {
        scheduling["dispatcher"] = dispatcher.into();
    }
    if let Some(seconds) = max_duration.filter(|seconds| *seconds > 0) {
        scheduling["max_run_time"] = seconds.into();
    }
    let run = format!("sh=\"${{WINDLASS_ROOT:-}}{SCRIPT_PATH}\"; exec /bin/sh \"$sh\"");
    let description = format!("job of run {}", inputs.run_name);
    let fields = [
        ("name", json!(job_name)),
        ("description", json!(description)),
        ("state", json!("Committed")),
        ("priority", json!(priority(inputs.rank))),
        // Retries are decided by the run.
        ("container_count_max", json!(1)),
        ("use_existing", json!(false)),
        ("command", json!(["/bin/sh", "-c", run])),
        ("cwd", json!(".")),
        ("container_image", json!(image(inputs.spec))),
        ("environment", json!({ JOB_VARIABLE: inputs.submission.to_string() })),
        ("mounts", json!({ OUTPUT: { "kind": "tmp" }, HOME: { "kind": "tmp" } })),
        ("output_path", json!(OUTPUT)),
        ("runtime_constraints", constraints),
        ("scheduling_parameters", scheduling),
        ("secret_mounts", secrets.into()),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Image of the request, which is required even for plain processes.
fn image(spec: &JobSpec) -> &str {
    if spec.image_name.is_empty() { "none" } else { &spec.image_name }
}

/// Maps the rank of a run to 1 to 1000, preserving the order: all `urgent` runs have the highest priority, and all `idle`
/// ones the lowest.
fn priority(rank: QueueRank) -> u64 {
    match rank.class {
        RunClass::Idle => 1,
        RunClass::Normal => {
            1 + u64::from(rank.priority).min(RUN_PRIORITY_MAX) * (PRIORITY_MAX - 1) / RUN_PRIORITY_MAX
        }
        RunClass::Urgent => PRIORITY_MAX,
    }
}

/// Moves the single entry of an archive to its path, under that name, replacing what was there.
fn unpack_script(archive: &str, path: &str) -> String {
    let path = path.trim_end_matches('/');
    let above = match path.rsplit_once('/') {
        None => ".",
        Some(("", _)) => "/",
        Some((above, _)) => above,
    };
    let (above, path) = (quote_path(above), quote_path(path));
    format!(
        "mkdir -p {above}\nrm -rf {path}\nstage=$(mktemp -d)\nbase64 -d \"$root\"{archive} | tar -xf - -C \"$stage\"\n\
         for it in \"$stage\"/* \"$stage\"/.[!.]*; do [ ! -e \"$it\" ] || mv \"$it\" {path}; done\nrm -rf \"$stage\"\n"
    )
}

fn script(submit: &SubmitBody, unpack: &str) -> String {
    let orders = &submit.job_spec;
    let mut text = String::from("set -e\nroot=\"${WINDLASS_ROOT:-}\"\n");
    let home = orders.repo_dir.as_deref().unwrap_or("workflow");
    let quoted = quote_path(home);
    text.push_str(&match home {
        REPO_DIR => format!("home={quoted}\n{HOME_SCRIPT}"),
        _ => format!("mkdir -p {quoted}\ncd {quoted}\n"),
    });
    for (name, value) in variables(submit) {
        text.push_str(&format!("export {name}={}\n", quote(&value)));
    }
    text.push_str(unpack);
    if let Some(dir) = &orders.working_dir {
        text.push_str(&format!("mkdir -p {0}\ncd {0}\n", quote_path(dir)));
    }
    text.push_str("export WINDLASS_WORKING_DIR=\"$PWD\"\nset +e\n");
    text.push_str(&format!("set -- {}\n{RUN_SCRIPT}", command(orders)));
    text
}

/// Quotes a path. Absolute paths begin at the container's root.
fn quote_path(path: &str) -> String {
    if path.starts_with('/') { format!("\"$root\"{}", quote(path)) } else { quote(path) }
}

fn command(orders: &Orders) -> String {
    let words: Vec<String> = orders.commands.iter().map(|word| quote(word)).collect();
    if words.is_empty() { "true".to_owned() } else { words.join(" ") }
}

/// Variables that describe the run, under both prefixes, then the job's own.
fn variables(submit: &SubmitBody) -> BTreeMap<String, String> {
    let orders = &submit.job_spec;
    let name = submit.run_spec.as_ref().and_then(|spec| spec.run_name.clone()).unwrap_or_default();
    let reported = [
        ("RUN_ID", submit.run.id.clone()),
        ("JOB_ID", submit.job_submission.id.clone()),
        ("RUN_NAME", name),
        ("REPLICA_NUM", orders.replica_num.to_string()),
        ("JOB_NUM", orders.job_num.to_string()),
        ("NODE_RANK", orders.job_num.to_string()),
        ("NODES_NUM", "1".to_owned()),
    ];
    let reported = reported.into_iter().flat_map(|(name, value)| {
        [(format!("DSTACK_{name}"), value.clone()), (format!("WINDLASS_{name}"), value)]
    });
    reported.chain(orders.env.clone()).filter(|(name, _)| is_variable_name(name)).collect()
}

/// Returns whether a shell accepts this as the name of a variable.
fn is_variable_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && name.chars().all(is_letter) && !name.starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command};

    use serde_json::from_value;
    use windlass_testkit::temp_dir;

    use super::*;

    fn spec(more: Value) -> JobSpec {
        let mut spec = json!({
            "job_num": 0, "job_name": "train-0-0", "commands": [], "env": {}, "image_name": "debian:12",
            "requirements": {"resources": {"cpu": {"count": {"min": 3}}, "memory": {"min": 0.5}, "gpu": null, "disk": null}},
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        from_value(spec).unwrap()
    }

    fn start(orders: Value) -> JobStart {
        let submit = json!({
            "run": {"id": "r"}, "job_submission": {"id": "s"}, "run_spec": {"run_name": "train"}, "job_spec": orders,
        });
        JobStart { submit: from_value(submit).unwrap(), code: None, archives: Vec::new() }
    }

    fn built(spec: &JobSpec, start: &JobStart) -> Result<Map<String, Value>, UnstartableReason> {
        let inputs = Inputs {
            submission: SubmissionId(uuid::Uuid::from_u128(7)),
            user: UserId(uuid::Uuid::from_u128(8)),
            run_name: "train",
            rank: QueueRank { class: RunClass::Normal, priority: 50 },
            spec,
            start,
            dispatcher: Some("cluster"),
            partition: Some("gpu"),
            gpu_type: Some("A100-80GB".to_owned()),
            is_spot: false,
        };
        build(&inputs).map(|queued| queued.request)
    }

    /// Runs a request's container as a plain process below `root`, and returns its output.
    fn run(request: &Map<String, Value>, root: &Path) -> String {
        for (path, mount) in request["secret_mounts"].as_object().unwrap() {
            let file = root.join(path.trim_start_matches('/'));
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, mount["content"].as_str().unwrap()).unwrap();
        }
        let words: Vec<&str> =
            request["command"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let output = Command::new(words[0])
            .args(&words[1..])
            .env("WINDLASS_ROOT", root)
            .current_dir(root)
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        String::from_utf8(output.stdout).unwrap()
    }

    fn tar(name: &str, text: &str) -> std::sync::Arc<[u8]> {
        let dir = temp_dir("queued").unwrap();
        std::fs::write(dir.path().join(name), text).unwrap();
        let packed = Command::new("tar").arg("-C").arg(dir.path()).args(["-cf", "-", name]).output().unwrap();
        packed.stdout.into()
    }

    #[test]
    fn container_request_keeps_secrets_in_secret_mounts_only() {
        let start = start(json!({"commands": ["echo", "hunter2"], "env": {"TOKEN": "hunter2"}}));
        let request = built(&spec(json!({"max_duration": 60, "stop_duration": 90})), &start).unwrap();
        assert_eq!(request["runtime_constraints"], json!({"vcpus": 3, "ram": 1 << 29}));
        let scheduling = json!({"preemptible": false, "partitions": ["gpu"], "dispatcher": "cluster", "max_run_time": 60, "stop_duration": 90});
        assert_eq!(request["scheduling_parameters"], scheduling);
        assert_eq!(request["priority"], 500);
        let mut open = request;
        assert!(open.remove("secret_mounts").unwrap().to_string().contains("hunter2"));
        assert!(!Value::Object(open).to_string().contains("hunter2"), "secrets are in secret mounts alone");
    }

    #[test]
    fn job_script_runs_commands_with_variables_files_and_merged_output() {
        let root = temp_dir("queued").unwrap();
        let commands = "echo \"$GREETING from $DSTACK_RUN_NAME in ${PWD##*/}\"; echo aside >&2; cat ../note $WINDLASS_ROOT/data/set";
        let orders = json!({
            "commands": ["/bin/sh", "-c", commands], "env": {"GREETING": "it's\nme", "2bad": "x"},
            "repo_dir": "/workflow", "working_dir": "sub",
            "file_archives": [{"id": "a", "path": "note"}, {"id": "b", "path": "/data/set"}],
        });
        let mut start = start(orders);
        start.archives = vec![("a".into(), tar("any", "a note\n")), ("b".into(), tar(".hidden", "a set\n"))];
        let request = built(&spec(json!({})), &start).unwrap();
        assert_eq!(run(&request, root.path()), "it's\nme from train in sub\naside\na note\na set\n");
    }

    #[test]
    fn jobs_that_a_queue_cannot_run_are_refused_with_the_reason() {
        let plain = start(json!({"commands": ["true"]}));
        for (more, word) in [
            (json!({"jobs_per_replica": 2}), "several nodes"),
            (json!({"user": {"username": "a"}}), "a `user`"),
        ] {
            let message = built(&spec(more), &plain).unwrap_err().to_string();
            assert!(message.contains(word) && message.contains("hint"), "{message}");
        }
        let dev = start(json!({"commands": ["true"], "tty": true}));
        assert!(built(&spec(json!({})), &dev).unwrap_err().to_string().contains("dev environment"));
        let with_disk = |size: Value| {
            let mut spec = spec(json!({}));
            spec.requirements.resources.disk = from_value(json!({ "size": size })).unwrap();
            built(&spec, &plain).map_err(|error| error.to_string())
        };
        assert!(with_disk(json!({"min": 100.0})).is_ok());
        assert!(with_disk(json!({"min": 1.0, "max": 10.0})).unwrap_err().contains("a job with a disk limit"));
    }
}
