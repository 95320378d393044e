//! This machine, with jobs as containers.

use std::time::{Duration, Instant};

use serde_json::json;

pub(crate) use crate::test_env::IMAGE;
use crate::test_env::{
    HostMode, TestEnv, engine_socket, load_busybox_image, newest_submission, small_task_config, task_config,
};
use windlass_testenv::server::submission;
use windlass_testkit::ports;

pub(crate) fn image() {
    load_busybox_image(&engine_socket());
}

/// Description of plain processes on these servers.
const OWN: &str = "a plain process, not confined: it has all rights of the server (`--local-processes own`)";

#[tokio::test]
async fn a_docker_job_runs_in_its_image_and_its_container_is_removed() {
    image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    let mut job = task_config("contained", &["echo from $(cat /proc/1/comm)", "echo /*"]);
    job["image"] = json!(IMAGE);
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert!(env.log(&run).await.contains("/bin /dev"), "{}", env.log(&run).await);
    let host = format!("unix://{}", engine_socket().display());
    let id = newest_submission(&run)["id"].as_str().unwrap().to_owned();
    let left = std::process::Command::new("docker")
        .args(["--host", &host, "ps", "-a", "--no-trunc"])
        .output()
        .unwrap();
    assert!(!String::from_utf8_lossy(&left.stdout).contains(&id));
}

#[tokio::test]
async fn a_missing_docker_image_ends_the_job_with_the_engine_error() {
    let mut env = TestEnv::new(HostMode::Containers).await;
    let mut job = task_config("imageless", &["true"]);
    job["image"] = json!("localhost:1/windlass/none:1");
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "failed");
    let job = newest_submission(&run);
    assert_eq!(job["termination_reason"], "creating_container_error", "{job:#}");
    assert!(!job["termination_reason_message"].as_str().unwrap_or_default().is_empty(), "{job:#}");
}

/// Commands of two nodes: the second connects to the SSH servers of both and to a port of the first.
pub(crate) fn two_nodes_script(port: u16) -> String {
    let reach_ssh = "for ip in $DSTACK_NODES_IPS; do until busybox nc $ip 10022 < /dev/null 2> /dev/null | busybox head -c 7 | \
                     busybox grep SSH; do sleep 0.1; done; done";
    let reach_master = format!(
        "until busybox nc $DSTACK_MASTER_NODE_IP {port} < /dev/null 2> /dev/null | busybox grep hello; do sleep 0.1; done"
    );
    let answer = format!("busybox nc -l -p {port} -e busybox echo hello from rank 0");
    format!("if [ $DSTACK_NODE_RANK = 0 ]; then {answer}; else {reach_ssh}; {reach_master}; fi")
}

#[tokio::test]
async fn two_nodes_share_this_machine_in_docker_containers_and_reach_each_other() {
    image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    let mut job = small_task_config("pair", &[&two_nodes_script(ports::reserve_free_port())]);
    job["image"] = json!(IMAGE);
    job["nodes"] = json!(2);
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert_eq!(env.log_of_job(&run, 1, usize::MAX).await, "SSH-2.0\nSSH-2.0\nhello from rank 0\n");
    let instance =
        |node: usize| &run["jobs"][node]["job_submissions"][0]["job_provisioning_data"]["instance_id"];
    assert_eq!((instance(0), instance(1)), (&json!("local-0"), &json!("local-0")), "{run:#}");
    // Together they had the whole machine, which is free again.
    let next = env.ends(&small_task_config("next", &["true"])).await;
    assert_eq!(next["status"], "done", "{next:#}");
}

pub(crate) fn docker(args: &[&str]) -> String {
    let host = format!("unix://{}", engine_socket().display());
    let output = std::process::Command::new("docker").args(["--host", &host]).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn a_docker_image_defines_the_default_command_user_and_directory() {
    image();
    let made = docker(&["create", IMAGE, "sh"]);
    let own = "windlass-e2e/own-command:1";
    let command = "CMD [\"sh\", \"-c\", \"busybox id; echo in $PWD\"]";
    docker(&["commit", "-c", "USER 1234:5678", "-c", "WORKDIR /bin", "-c", command, &made, own]);
    docker(&["rm", &made]);
    let mut env = TestEnv::new(HostMode::Containers).await;
    let run = env.ends(&json!({"type": "task", "name": "own", "image": own})).await;
    assert_eq!(run["status"], "done", "{run:#}");
    let log = env.log(&run).await;
    assert!(log.contains("uid=1234 gid=5678") && log.contains("in /bin"), "{log}");
}

#[tokio::test]
async fn a_docker_dev_environment_ends_as_soon_as_it_is_stopped() {
    image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    let dev = json!({"type": "dev-environment", "name": "desk", "image": IMAGE, "ide": "vscode"});
    env.apply(&dev).await;
    env.says("desk", "The dev environment is ready.").await;
    let start = Instant::now();
    env.stop("desk", false).await;
    let run = env.reaches("desk", &["terminated"]).await;
    // Its shell would be killed after the default grace period of five minutes.
    assert!(start.elapsed() < Duration::from_secs(25), "{:?} {run:#}", start.elapsed());
    let submission = newest_submission(&run);
    assert!(!submission["termination_reason_message"].to_string().contains("killed"), "{submission:#}");
}

#[tokio::test]
async fn jobs_without_an_image_skip_docker_and_run_as_plain_processes_as_planned() {
    image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    let see =
        format!("if [ -d {} ]; then echo on the machine; else echo contained; fi", env.home().display());
    let mut contained = task_config("contained", &[&see]);
    contained["image"] = json!(IMAGE);
    let mut plain = task_config("plain", &[&see]);
    plain.as_object_mut().unwrap().remove("image");
    for (job, runs_in, message) in [
        (&contained, format!("a container of image {IMAGE}"), "contained\n"),
        (&plain, OWN.to_owned(), "on the machine\n"),
    ] {
        let request = json!({"run_spec": submission(job)["plan"]["run_spec"]});
        let plan = env.project("runs/get_plan", &request).await;
        assert_eq!(plan["job_plans"][0]["runs_in"], json!([runs_in]), "{plan:#}");
        let run = env.ends(job).await;
        assert_eq!(env.log(&run).await, message);
    }
}
