//! Runs on a real Kubernetes cluster, where the binaries of one are found (`WINDLASS_KUBE_BIN`).

use std::{fs, path::Path, time::Duration};

use serde_json::{Value, json};
use windlass_testkit::{
    kubernetes::{IMAGE, KubeCluster},
    wait::eventually,
};

use crate::{
    attach::assert_shell_and_port_work,
    test_env::{HostMode, TestEnv},
};

const NAMESPACE: &str = "default";
const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
const FLEET: &str = "type: fleet\nname: cluster\nnodes: 0..\nplacement: cluster\nbackends: [kubernetes]\n";
/// Nodes under load start pods slowly.
const LIMIT: Duration = Duration::from_secs(180);

/// A server whose only fleet is a cluster.
async fn start(cluster: &KubeCluster) -> TestEnv {
    let mut env = TestEnv::new_unstarted(HostMode::None).with_env("WINDLASS_SERVER_DEFAULT_IMAGE", IMAGE);
    let config = format!(
        "backends:\n  - type: kubernetes\n    kubeconfig: {{filename: {}}}\n",
        cluster.kubeconfig().display()
    );
    fs::write(env.home().join("server/config.yml"), config).unwrap();
    env.start().await;
    fs::write(env.home().join("fleet.yml"), FLEET).unwrap();
    let applied = env.windlass(env.home(), &["apply", "-f", "fleet.yml", "-y"]);
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    env
}

fn task(name: &str, commands: &[&str], more: &Value) -> Value {
    let mut task = json!({
        "type": "task", "name": name, "commands": commands,
        "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 0.0}, "disk": null},
    });
    task.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    task
}

/// One cluster for all: its start takes longer than the runs.
#[tokio::test(flavor = "multi_thread")]
async fn runs_of_every_kind_work_on_a_real_cluster() {
    let Some(cluster) = KubeCluster::start() else { return };
    let mut env = start(&cluster).await;
    examples_run_unmodified(&env);
    no_pod_is_left(&cluster);
    the_environment_of_the_image_is_that_of_the_job(&mut env).await;
    assert_shell_and_port_work(&env, "");
    env.stop("open", true).await;
    a_service_with_two_replicas_responds(&mut env).await;
    a_job_whose_pod_is_deleted_starts_again(&mut env, &cluster).await;
    an_unknown_image_ends_the_run_with_the_reason(&mut env).await;
    a_run_that_fits_nowhere_lists_the_nodes(&env);
    no_pod_is_left(&cluster);
}

fn no_pod_is_left(cluster: &KubeCluster) {
    eventually("no pod is left", || cluster.pods(NAMESPACE).is_empty());
}

fn examples_run_unmodified(env: &TestEnv) {
    for (file, expected) in
        [("hello.yml", vec!["hello from windlass"]), ("nodes.yml", vec!["node 0 of 2", "node 1 of 2"])]
    {
        let path = Path::new(EXAMPLES).join(file);
        let done = env.windlass(env.home(), &["apply", "-f", path.to_str().unwrap(), "-y"]);
        let (output, errors) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{file}: {output}{errors}");
        for line in expected {
            assert!(output.contains(line), "{file}: {output}{errors}");
        }
    }
}

async fn the_environment_of_the_image_is_that_of_the_job(env: &mut TestEnv) {
    let commands = [
        "echo \"path $PATH user $(id -u) variable $GREETING\"",
        "cat /proc/1/cmdline | tr '\\0' ' ' || true",
        "grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status | tr -d '\\t'",
    ];
    let task = task("inside", &commands, &json!({"env": {"GREETING": "hello"}}));
    env.apply(&task).await;
    let run = env.wait_for_status_within("inside", &["done"], LIMIT).await;
    let log = env.log(&run).await;
    assert!(log.contains("path /bin user 0 variable hello"), "{log}");
    // The ten capabilities of the manifest, by their numbers.
    for restriction in ["CapBnd:00000000800404fb", "NoNewPrivs:1", "Seccomp:2"] {
        assert!(log.contains(restriction), "{restriction}: {log}");
    }
}

async fn a_service_with_two_replicas_responds(env: &mut TestEnv) {
    let service = json!({
        "type": "service", "name": "pages", "port": 8000, "auth": false, "replicas": 2,
        "commands": ["mkdir -p /tmp/page", "echo pong > /tmp/page/index.html",
            "exec busybox httpd -f -p 8000 -h /tmp/page"],
        "resources": {"cpu": {"count": {"min": 0}}, "memory": {"min": 0.0}, "disk": null},
    });
    env.apply(&service).await;
    env.wait_for_status_within("pages", &["running"], LIMIT).await;
    let url = format!("http://{}/proxy/services/main/pages/", env.address());
    eventually("both replicas respond", || {
        let answer =
            std::process::Command::new("curl").args(["-s", "--max-time", "10", &url]).output().unwrap();
        answer.stdout == b"pong\n"
    });
    let run = env.run("pages").await;
    assert_eq!(run["jobs"].as_array().unwrap().len(), 2, "{run:#}");
    env.stop("pages", false).await;
    env.wait_for_status_within("pages", &["terminated", "done"], LIMIT).await;
}

async fn a_job_whose_pod_is_deleted_starts_again(env: &mut TestEnv, cluster: &KubeCluster) {
    // Those of the service end after it.
    no_pod_is_left(cluster);
    let retry = json!({"retry": {"on_events": ["interruption"], "duration": 3600}});
    env.apply(&task("again", &["echo begun", "sleep 600"], &retry)).await;
    env.says("again", "begun").await;
    let first = cluster.pods(NAMESPACE);
    assert_eq!(first.len(), 1);
    let _ = cluster.api("DELETE", &format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", first[0]), None);
    eventually("another pod is there", || {
        let pods = cluster.pods(NAMESPACE);
        !pods.is_empty() && !pods.contains(&first[0])
    });
    env.says("again", "begun").await;
    let run = env.run("again").await;
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 2, "{run:#}");
    env.stop("again", true).await;
    env.wait_for_status_within("again", &["terminated"], LIMIT).await;
}

async fn an_unknown_image_ends_the_run_with_the_reason(env: &mut TestEnv) {
    env.apply(&task("unknown", &["true"], &json!({"image": "registry.invalid/none:1"}))).await;
    env.wait_for_status_within("unknown", &["failed"], LIMIT).await;
    let why = env.windlass(env.home(), &["why", "unknown"]);
    let text = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(text.contains("failed to pull the image"), "{text}");
}

fn a_run_that_fits_nowhere_lists_the_nodes(env: &TestEnv) {
    let file =
        "type: task\nname: large\ncommands: [\"true\"]\nresources: {cpu: 999.., memory: 0.., disk: null}\n";
    fs::write(env.home().join("large.yml"), file).unwrap();
    let refused = env.windlass(env.home(), &["apply", "-f", "large.yml", "-y"]);
    let text =
        format!("{}{}", String::from_utf8_lossy(&refused.stdout), String::from_utf8_lossy(&refused.stderr));
    assert!(text.contains("999") && text.contains("node1"), "{text}");
}
