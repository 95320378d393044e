//! Task specifications that hosts receive, and what clients read of them.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use windlass_api::agent::shim::NetworkMode;
use windlass_server::params;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, on_both},
    job_test_env::JobTestEnv,
    scripted_hosts::end_state,
};

on_both! {
    a_job_on_a_whole_instance_has_no_limits_and_uses_the_host_network
    a_job_on_part_of_an_instance_gets_its_share_and_a_bridge_network
    a_task_spec_contains_keys_mounts_and_registry_credentials
    a_literal_registry_password_is_decrypted_only_for_the_host
    a_runner_receives_its_variables_code_and_files
    nodes_receive_cluster_info_and_a_resubmitted_replica_gets_a_new_key
    the_api_shows_where_a_job_runs_and_how_to_connect
    an_invalid_variable_name_is_refused_at_submit
    stored_job_data_contains_no_secret
}

async fn a_job_on_a_whole_instance_has_no_limits_and_uses_the_host_network(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("whole", json!({"resources": {"cpu": "2..", "memory": "8GB..", "shm_size": "2GB"}})).await;
    env.wait_for_job("whole", "running").await;
    let task = env.hosts.specs.lock()[0].clone();
    // The default disk requirement has no upper limit.
    assert_eq!((task.cpu, task.memory, task.gpu, task.disk), (0.0, 0, 4, 0));
    assert_eq!((task.shm_size, task.network_mode), (2 << 30, NetworkMode::Host));
    assert_eq!((task.image_name.as_str(), task.container_user.as_str()), ("busybox", "root"));
    assert_eq!((task.privileged, task.cluster, task.name.as_str()), (false, false, "whole-0-0"));
    env.end().await;
}

async fn a_job_on_part_of_an_instance_gets_its_share_and_a_bridge_network(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    for (name, memory, expected) in
        [("one", "8GB..", (8.0, 16_i64 << 30, 1)), ("two", "30GB..", (16.0, 32 << 30, 2))]
    {
        env.apply(name, json!({"resources": {"cpu": "2..", "memory": memory}})).await;
        env.wait_for_job(name, "running").await;
        let task = env.hosts.specs.lock().last().unwrap().clone();
        assert_eq!((task.cpu, task.memory, task.gpu), expected, "{name}");
        assert_eq!(task.network_mode, NetworkMode::Bridge);
    }
    env.end().await;
}

async fn a_task_spec_contains_keys_mounts_and_registry_credentials(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let set = json!({"name": "registry", "value": "s3cret$$"});
    env.server.admin("/api/project/main/secrets/create_or_update", set).await;
    let key = env.server.admin("/api/users/get_my_user", json!({})).await["ssh_public_key"].clone();
    let more = json!({"privileged": true, "env": {"WHO": "ada"},
        "registry_auth": {"username": "${{ env.WHO }}", "password": "${{ secrets.registry }}"},
        "volumes": [{"instance_path": "/mnt/cache", "path": "/cache", "optional": true}]});
    env.apply("rich", more).await;
    env.wait_for_job("rich", "running").await;
    let task = env.hosts.specs.lock()[0].clone();
    let key = key.as_str().unwrap().trim();
    // The comment of the project's key is the project's name.
    let [project_key, user_key] = &task.container_ssh_keys[..] else {
        panic!("{:?}", task.container_ssh_keys)
    };
    assert!(project_key.starts_with("ssh-ed25519 ") && project_key.ends_with(" main"), "{project_key}");
    assert_eq!(user_key, key);
    assert_eq!((task.host_ssh_user.as_str(), &task.host_ssh_keys[..]), ("ubuntu", &[key.to_owned()][..]));
    assert_eq!((task.registry_username.as_str(), task.registry_password.as_str()), ("ada", "s3cret$$"));
    assert!(task.privileged);
    let mount = &task.instance_mounts[0];
    assert_eq!(
        (mount.instance_path.as_str(), mount.path.as_str(), mount.optional),
        ("/mnt/cache", "/cache", true)
    );
    env.end().await;
}

async fn a_literal_registry_password_is_decrypted_only_for_the_host(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("literal", json!({"registry_auth": {"username": "ada", "password": "l1teral-pw"}})).await;
    let run = env.wait_for_job("literal", "running").await;
    let task = env.hosts.specs.lock()[0].clone();
    assert_eq!((task.registry_username.as_str(), task.registry_password.as_str()), ("ada", "l1teral-pw"));
    let shown = env.server.admin("/api/project/main/runs/get", json!({"run_name": "literal"})).await;
    assert!(!shown.to_string().contains("l1teral-pw"), "{shown}");
    drop(run);
    env.end().await;
}

async fn a_runner_receives_its_variables_code_and_files(ground: &ServerFixture) {
    let test_env = JobTestEnv::new(ground, 1, 1).await;
    let set = json!({"name": "token", "value": "${{ secrets.token }} is no loop"});
    test_env.server.admin("/api/project/main/secrets/create_or_update", set).await;
    let init = json!({"repo_id": "r1", "repo_info": {"repo_type": "remote", "repo_name": "code"},
        "repo_creds": {"clone_url": "https://git.example/code", "private_key": null, "oauth_token": "t0k"}});
    test_env.server.admin("/api/project/main/repos/init", init).await;
    let hash = |bytes: &[u8]| hex::encode(Sha256::digest(bytes));
    let uploaded = async |path: &str, content: &[u8]| {
        let (status, answer) = test_env.server.upload(ADMIN_TOKEN, path, &hash(content), content).await;
        assert_eq!(status, 200, "{answer}");
        answer
    };
    uploaded("/api/project/main/repos/upload_code?repo_id=r1", b"a diff").await;
    let archive = uploaded("/api/files/upload_archive", b"a tar").await;
    let env = json!({"TOKEN": "x ${{ secrets.token }}", "BOTH": "job", "PLAIN": "$HOME $$ ${{ nothing"});
    let mut spec =
        JobTestEnv::spec("told", json!({"env": env, "max_duration": 60, "working_dir": "/opt/app"}));
    spec["repo_id"] = json!("r1");
    spec["repo_data"] = json!({"repo_type": "remote", "repo_name": "code", "repo_branch": "main",
        "repo_hash": "abc", "repo_config_name": "Ada", "repo_config_email": "ada@example.org"});
    spec["repo_code_hash"] = json!(hash(b"a diff"));
    spec["file_archives"] = json!([{"id": archive["id"], "path": "conf"}]);
    let plan = json!({"plan": {"run_spec": spec}, "force": true});
    test_env.server.admin("/api/project/main/runs/apply", plan).await;
    let run = test_env.wait_for_run("told", "running").await;
    let start = test_env.hosts.starts.lock()[0].clone();
    let (submit, job) = (&start.submit, &start.submit.job_spec);
    assert_eq!(job.env["TOKEN"], "x ${{ secrets.token }} is no loop");
    assert_eq!(job.env["PLAIN"], "$HOME $$ ${{ nothing");
    assert_eq!((job.env["OF_FLEET"].as_str(), job.env["BOTH"].as_str()), ("1", "job"));
    assert_eq!(job.commands, ["/bin/sh", "-c", "true"]);
    assert_eq!((job.tty, job.max_duration, job.stop_duration), (Some(false), Some(60), Some(300)));
    assert_eq!(
        (job.working_dir.as_deref(), job.user.as_ref().unwrap().username.as_deref()),
        (Some("/opt/app"), Some("root"))
    );
    assert_eq!(submit.run.id, run["id"].as_str().unwrap());
    assert_eq!(submit.run.project_name.as_deref(), Some("main"));
    let of_run = submit.run_spec.as_ref().unwrap();
    assert_eq!((of_run.run_name.as_deref(), of_run.repo_id.as_deref()), (Some("told"), Some("r1")));
    assert_eq!(submit.job_submission.id, run["latest_job_submission"]["id"].as_str().unwrap());
    assert_eq!(submit.log_quota_hour, Some(52_428_800), "the setting `log_rate_max`");
    assert!(submit.secrets.is_empty() && job.ssh_key.is_none());
    let creds = submit.repo_credentials.as_ref().unwrap();
    assert_eq!(
        (creds.clone_url.as_str(), creds.oauth_token.as_deref()),
        ("https://git.example/code", Some("t0k"))
    );
    assert_eq!(start.code.as_deref(), Some(&b"a diff"[..]));
    assert_eq!(start.archives[0].0, archive["id"].as_str().unwrap());
    assert_eq!(&*start.archives[0].1, b"a tar");
    assert_eq!(job.file_archives[0].path, "conf");
    let cluster = submit.cluster_info.as_ref().unwrap();
    assert_eq!((&cluster.job_ips[..], cluster.gpus_per_job), (&["10.0.0.0".to_owned()][..], 4));
    test_env.end().await;
}

async fn nodes_receive_cluster_info_and_a_resubmitted_replica_gets_a_new_key(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 2, 1).await;
    let groups = json!({"commands": null, "retry": {"on_events": ["error"], "duration": 3600}, "groups": [
        {"name": "head", "nodes": 1, "commands": ["serve $$HOME"]},
        {"name": "tail", "nodes": 1, "commands": ["join ${{ groups[0].nodes[0].IP_ADDRESS }}"]}]});
    env.apply("pair", groups).await;
    let all = |what: &'static str| {
        move |run: &Value| {
            let jobs = run["jobs"].as_array().unwrap();
            jobs.iter()
                .all(|job| job["job_submissions"].as_array().unwrap().last().unwrap()["status"] == what)
        }
    };
    env.until("pair", "running", all("running")).await;
    let mut starts = std::mem::take(&mut *env.hosts.starts.lock());
    starts.sort_by_key(|start| start.submit.job_spec.job_num);
    let cluster = starts[0].submit.cluster_info.clone().unwrap();
    assert_eq!(Some(&cluster), starts[1].submit.cluster_info.as_ref());
    assert_eq!(cluster.job_ips.len(), 2);
    assert_eq!((&cluster.master_job_ip, cluster.gpus_per_node), (&cluster.job_ips[0], Some(vec![4, 4])));
    assert_eq!(starts[0].submit.job_spec.commands[2], "serve $$HOME");
    assert_eq!(starts[1].submit.job_spec.commands[2], format!("join {}", cluster.master_job_ip));
    let first = starts[0].submit.job_spec.ssh_key.clone().unwrap();
    assert_eq!(Some(&first), starts[1].submit.job_spec.ssh_key.as_ref());
    assert!(env.hosts.specs.lock().iter().all(|task| task.cluster && task.network_mode == NetworkMode::Host));

    // One node fails: the replica is resubmitted as a whole, with a new key.
    env.update_script(|script| {
        script.job_ends = Some(end_state("failed", "container_exited_with_error", Some(1)))
    });
    env.mark_due().await;
    env.wait_for_run("pair", "pending").await;
    // Their logs are complete only while their hosts report that they ended.
    let is_over = |job: &Value| {
        let status = &job["job_submissions"].as_array().unwrap().last().unwrap()["status"];
        status == "failed" || status == "terminated"
    };
    env.until("pair", "over", |run| run["jobs"].as_array().unwrap().iter().all(is_over)).await;
    env.update_script(|script| script.job_ends = None);
    env.skip_backoff("pair").await;
    env.until("pair", "running again", all("running")).await;
    let starts = env.hosts.starts.lock().clone();
    assert_eq!(starts.len(), 2);
    let second = starts[0].submit.job_spec.ssh_key.clone().unwrap();
    assert_eq!(Some(&second), starts[1].submit.job_spec.ssh_key.as_ref());
    assert_ne!(first.public, second.public);
    env.end().await;
}

async fn the_api_shows_where_a_job_runs_and_how_to_connect(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    env.apply("seen", json!({"max_duration": 3600})).await;
    let run = env.wait_for_run("seen", "running").await;
    let job = &run["latest_job_submission"];
    let host = &job["job_provisioning_data"];
    assert_eq!((&host["backend"], &host["hostname"]), (&json!("remote"), &json!("host-0")));
    assert_eq!((&host["username"], &host["ssh_port"]), (&json!("ubuntu"), &json!(2222)));
    assert_eq!((&host["internal_ip"], &host["dockerized"]), (&json!("10.0.0.0"), &json!(true)));
    assert_eq!((&host["price"], &host["instance_type"]["name"]), (&json!(0.5), &json!("big")));
    let here = &job["job_runtime_data"];
    assert_eq!((&here["network_mode"], &here["ports"]), (&json!("bridge"), &json!({"10022": 32768})));
    assert_eq!((&here["cpu"], &here["memory"], &here["gpu"]), (&json!(8.0), &json!(16.0), &json!(1)));
    assert_eq!((&here["username"], &here["working_dir"]), (&json!("root"), &json!("/workflow")));
    assert_eq!((&here["offer"]["blocks"], &here["offer"]["total_blocks"]), (&json!(1), &json!(4)));
    assert_eq!(run["jobs"][0]["job_connection_info"]["attached_ssh_command"], json!(["ssh", "seen"]));
    let sql = "SELECT run_deadline_at - running_at FROM jobs";
    let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!(rows[0].int(0).unwrap(), 3_600_000_000);
    env.end().await;
}

async fn an_invalid_variable_name_is_refused_at_submit(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let plan =
        json!({"plan": {"run_spec": JobTestEnv::spec("odd", json!({"env": {"A=B": "x"}}))}, "force": true});
    let message = env.server.refused(ADMIN_TOKEN, "/api/project/main/runs/apply", plan, "error").await;
    assert!(message.contains("invalid environment variable name `A=B`"), "{message}");
    env.end().await;
}

async fn stored_job_data_contains_no_secret(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let set = json!({"name": "token", "value": "never-to-be-seen"});
    env.server.admin("/api/project/main/secrets/create_or_update", set).await;
    env.apply("shy", json!({"env": {"TOKEN": "${{ secrets.token }}"}})).await;
    let run = env.wait_for_run("shy", "running").await;
    assert_eq!(env.hosts.starts.lock()[0].submit.job_spec.env["TOKEN"], "never-to-be-seen");
    assert!(!run.to_string().contains("never-to-be-seen"));
    let sql = "SELECT job_spec || coalesce(runtime, '') || coalesce(provisioning, '') || coalesce(connection_info, '') \
               FROM jobs WHERE NOT finished OR finished = $1";
    for row in env.server.app.db().query(sql, params![true]).await.unwrap() {
        assert!(!row.text(0).unwrap().contains("never-to-be-seen"));
    }
    env.end().await;
}
