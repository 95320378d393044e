//! `windlass-agent host`, with the vendors' tools of a host with GPUs.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use crate::support::{self, temp_dir};

/// Writes a program into `dir` that responds as the vendor's does.
fn write_tool(dir: &Path, name: &str, script: &str) {
    fs::write(dir.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o755)).unwrap();
}

fn host_report(path: &Path) -> serde_json::Value {
    let mut command = Command::new(support::agent());
    command.arg("host").env("PATH", format!("{}:/usr/bin:/bin", path.display()));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_host_report_lists_gpus_as_the_driver_reports_them() {
    let scratch = temp_dir("host-gpus").unwrap();
    let script = r#"case "$1" in
        *mig.mode*) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2;;
        --query-gpu=index*)
            echo '0, GPU-0a, Tesla V100-SXM2-16GB, 16160, 418.87.00, 00000000:00:1E.0'
            echo '1, GPU-1b, Tesla V100-SXM2-16GB, 16160, 418.87.00, 00000000:00:1F.0';;
        esac"#;
    write_tool(scratch.path(), "nvidia-smi", script);
    let reported = host_report(scratch.path());
    assert_eq!(reported["host"]["gpu_vendor"], "nvidia");
    assert_eq!(reported["host"]["gpu_name"], "Tesla V100-SXM2-16GB");
    assert_eq!(reported["host"]["gpu_count"], 2);
    assert_eq!(reported["host"]["gpu_memory"], 16160);
    assert_eq!(reported["driver_version"], "418.87.00");
    assert_eq!(reported["gpus"][1]["id"], "GPU-1b");
    assert_eq!(reported["problems"], serde_json::json!([]));
}

#[test]
fn a_broken_gpu_driver_is_reported_as_a_problem_and_is_not_fatal() {
    let scratch = temp_dir("host-broken").unwrap();
    write_tool(
        scratch.path(),
        "nvidia-smi",
        "echo \"NVIDIA-SMI has failed because it couldn't communicate\"; exit 9",
    );
    let reported = host_report(scratch.path());
    assert_eq!(reported["host"]["gpu_vendor"], "none");
    let problem = reported["problems"][0].as_str().unwrap();
    assert!(problem.contains("exit status: 9") && problem.contains("couldn't communicate"), "{problem}");
    assert!(reported["host"]["cpus"].as_u64().unwrap() > 0);
}
