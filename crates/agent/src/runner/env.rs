//! Environment variables of the job. Decisions only: which variables are set, and their precedence.
//!
//! The image's variables come first, then those of the user account, those that windlass sets for the run, secrets, and
//! last the job's own. The agent's variables are removed.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::Path,
};

use windlass_api::agent::runner::{ClusterInfo, SubmitBody};

use super::{user::Account, user_context::UserContext};

pub type Env = BTreeMap<OsString, OsString>;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Variable that marks every process of the task. The job keeps it.
const TASK_MARK: &str = "WINDLASS_TASK_ID";
/// Prefixes of variables that configure agents; they are not passed to the job.
const AGENT_PREFIXES: [&str; 6] =
    ["WINDLASS_", "DSTACK_SHIM_", "DSTACK_RUNNER_", "DSTACK_DOCKER_", "DSTACK_SERVICE_MODE", "RUST_"];
/// Each variable of the run is set under both prefixes.
const RUN_PREFIXES: [&str; 2] = ["WINDLASS_", "DSTACK_"];

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    #[error("invalid environment variable name `{}`", .0.escape_debug())]
    BadName(String),
    #[error("invalid value of environment variable `{0}`: it contains a NUL byte")]
    BadValue(String),
}

/// Refuses variables that the kernel cannot pass to a program. Everything else is passed byte for byte.
pub fn validate<'a>(variables: impl IntoIterator<Item = (&'a String, &'a String)>) -> Result<(), EnvError> {
    for (name, value) in variables {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(EnvError::BadName(name.clone()));
        }
        if value.contains('\0') {
            return Err(EnvError::BadValue(name.clone()));
        }
    }
    Ok(())
}

/// Returns the part of the runner's own environment that is passed on.
///
/// In a container that is the image's environment, and all of it counts: images set `LD_LIBRARY_PATH` for their
/// libraries. A plain process would inherit the host's environment, so variables that control the loader are removed.
pub fn base_env(own: impl IntoIterator<Item = (OsString, OsString)>, in_container: bool) -> Env {
    let is_kept = |name: &OsStr| {
        let name = name.as_bytes();
        if name == TASK_MARK.as_bytes() {
            return true;
        }
        let is_agents = AGENT_PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()));
        let is_loaders = name.starts_with(b"LD_") || name == b"GLIBC_TUNABLES" || name == b"GCONV_PATH";
        !is_agents && (in_container || !is_loaders)
    };
    let mut env: Env = own.into_iter().filter(|(name, _)| is_kept(name)).collect();
    env.entry("PATH".into()).or_insert_with(|| DEFAULT_PATH.into());
    env
}

/// Adds the variables of the user account.
pub fn add_account(env: &mut Env, account: &Account) {
    env.insert("HOME".into(), account.home.clone().into());
    env.insert("USER".into(), account.name.clone().into());
    env.insert("LOGNAME".into(), account.name.clone().into());
    env.insert("SHELL".into(), account.shell.clone().into());
}

/// Returns the whole environment of the job.
pub fn job_env(base: &Env, submit: &SubmitBody, site: &UserContext, hostfile: Option<&Path>) -> Env {
    let mut env = base.clone();
    add_account(&mut env, &site.account);
    for (name, value) in run_variables(submit, site, hostfile) {
        for prefix in RUN_PREFIXES {
            env.insert(format!("{prefix}{name}").into(), value.clone());
        }
    }
    for (name, value) in submit.secrets.iter().chain(&submit.job_spec.env) {
        env.insert(name.into(), value.into());
    }
    env
}

/// Returns the variables that windlass sets for the run, without the prefix.
fn run_variables(
    submit: &SubmitBody,
    site: &UserContext,
    hostfile: Option<&Path>,
) -> Vec<(&'static str, OsString)> {
    let job = &submit.job_spec;
    let spec = submit.run_spec.as_ref().or(submit.run.run_spec.as_ref());
    let text = |value: Option<&String>| OsString::from(value.map(String::as_str).unwrap_or_default());
    let mut reported: Vec<(&'static str, OsString)> = vec![
        ("RUN_ID", submit.run.id.clone().into()),
        ("JOB_ID", submit.job_submission.id.clone().into()),
        ("RUN_NAME", text(spec.and_then(|spec| spec.run_name.as_ref()))),
        ("REPO_ID", text(spec.and_then(|spec| spec.repo_id.as_ref()))),
        ("WORKING_DIR", site.working_dir.clone().into()),
        ("REPLICA_NUM", job.replica_num.to_string().into()),
        ("JOB_NUM", job.job_num.to_string().into()),
        ("NODE_RANK", job.job_num.to_string().into()),
    ];
    if let Some(dir) = &job.repo_dir {
        reported.push(("REPO_DIR", site.resolve(dir).into()));
    }
    let none = ClusterInfo::default();
    let cluster = submit.cluster_info.as_ref().unwrap_or(&none);
    let ips = cluster.job_ips.len();
    let nodes = if ips == 0 { job.jobs_per_replica.max(1).to_string() } else { ips.to_string() };
    let gpus = gpus_per_node(cluster);
    let rank = usize::try_from(job.job_num).unwrap_or(usize::MAX);
    reported.push(("NODES_NUM", nodes.into()));
    reported.push(("NODES_IPS", cluster.job_ips.join("\n").into()));
    reported.push(("MASTER_NODE_IP", cluster.master_job_ip.clone().into()));
    reported.push(("GPUS_PER_NODE", gpus.get(rank).unwrap_or(&cluster.gpus_per_job).to_string().into()));
    reported.push(("GPUS_NUM", gpus.iter().sum::<i64>().to_string().into()));
    if let Some(path) = hostfile {
        reported.push(("MPI_HOSTFILE", path.into()));
    }
    reported
}

/// Returns the number of GPUs of each node, in the order of their addresses.
pub fn gpus_per_node(cluster: &ClusterInfo) -> Vec<i64> {
    match &cluster.gpus_per_node {
        Some(each) if each.len() == cluster.job_ips.len() => each.clone(),
        Some(_) | None => vec![cluster.gpus_per_job; cluster.job_ips.len()],
    }
}

/// Returns lines for a login shell that set the job's variables: those that differ from `base` and have a name that a
/// shell accepts. A login shell sets the variables of its user itself.
pub fn shell_exports(base: &Env, env: &Env) -> Vec<u8> {
    let mut lines = Vec::new();
    for (name, value) in env {
        let own = ["HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_"];
        if base.get(name) == Some(value) || own.iter().any(|own| name == own) || !is_identifier(name) {
            continue;
        }
        lines.extend_from_slice(b"export ");
        lines.extend_from_slice(name.as_bytes());
        lines.extend_from_slice(b"='");
        for byte in value.as_bytes() {
            match byte {
                b'\'' => lines.extend_from_slice(br"'\''"),
                other => lines.push(*other),
            }
        }
        lines.extend_from_slice(b"'\n");
    }
    lines
}

fn is_identifier(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    bytes.first().is_some_and(|byte| byte.is_ascii_alphabetic() || *byte == b'_')
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn env(pairs: &[(&str, &str)]) -> Env {
        pairs.iter().map(|&(name, value)| (name.into(), value.into())).collect()
    }

    fn submit(text: &str) -> SubmitBody {
        serde_json::from_str(text).unwrap()
    }

    fn site() -> UserContext {
        UserContext::new(Account::root(), PathBuf::from("/opt/app"))
    }

    fn value<'a>(env: &'a Env, name: &str) -> Option<&'a str> {
        env.get(OsStr::new(name)).and_then(|value| value.to_str())
    }

    #[test]
    fn variables_of_the_agent_are_removed_and_the_task_id_stays() {
        let own = env(&[
            ("PATH", "/opt/bin"),
            ("LD_PRELOAD", "/x.so"),
            ("LD_LIBRARY_PATH", "/cuda"),
            ("WINDLASS_NOTICES", "n"),
            ("WINDLASS_TASK_ID", "t"),
            ("DSTACK_RUNNER_HTTP_PORT", "1"),
            ("RUST_LOG", "debug"),
            ("LANG", "C"),
        ]);
        let bare = base_env(own.clone(), false);
        assert_eq!(bare, env(&[("LANG", "C"), ("PATH", "/opt/bin"), ("WINDLASS_TASK_ID", "t")]));
        let image = base_env(own, true);
        assert_eq!(value(&image, "LD_LIBRARY_PATH"), Some("/cuda"));
        assert_eq!(value(&image, "RUST_LOG"), None);
        assert_eq!(value(&base_env(env(&[]), true), "PATH"), Some(DEFAULT_PATH));
    }

    #[test]
    fn run_variables_are_set_with_the_dstack_and_the_windlass_prefix() {
        let submit = submit(
            r#"{"run":{"id":"r1","run_spec":{"run_name":"train","repo_id":"none"}},"job_submission":{"id":"j1"},
            "job_spec":{"replica_num":2,"job_num":1,"jobs_per_replica":2,"repo_dir":"code","env":{}},
            "cluster_info":{"job_ips":["10.0.0.1","10.0.0.2"],"master_job_ip":"10.0.0.1","gpus_per_job":8,
            "gpus_per_node":[8,4]}}"#,
        );
        let env = job_env(&env(&[]), &submit, &site(), Some(Path::new("/mpi")));
        let expected = [
            ("RUN_ID", "r1"),
            ("JOB_ID", "j1"),
            ("RUN_NAME", "train"),
            ("REPO_ID", "none"),
            ("REPO_DIR", "/opt/app/code"),
            ("WORKING_DIR", "/opt/app"),
            ("REPLICA_NUM", "2"),
            ("JOB_NUM", "1"),
            ("NODE_RANK", "1"),
            ("NODES_NUM", "2"),
            ("NODES_IPS", "10.0.0.1\n10.0.0.2"),
            ("MASTER_NODE_IP", "10.0.0.1"),
            ("GPUS_PER_NODE", "4"),
            ("GPUS_NUM", "12"),
            ("MPI_HOSTFILE", "/mpi"),
        ];
        for (name, reported) in expected {
            assert_eq!(value(&env, &format!("DSTACK_{name}")), Some(reported));
            assert_eq!(value(&env, &format!("WINDLASS_{name}")), Some(reported));
        }
        assert_eq!(env.len(), 2 * expected.len() + 4);
    }

    #[test]
    fn variables_take_precedence_in_the_order_job_secrets_run_image() {
        let submit = submit(
            r#"{"run":{"id":"r"},"job_spec":{"env":{"A":"job","DSTACK_RUN_ID":"mine"}},
            "secrets":{"A":"secret","B":"secret"}}"#,
        );
        let env = job_env(&env(&[("A", "image"), ("B", "image"), ("C", "image")]), &submit, &site(), None);
        let got = ["A", "B", "C", "DSTACK_RUN_ID", "WINDLASS_RUN_ID", "DSTACK_NODES_NUM"]
            .map(|name| value(&env, name));
        assert_eq!(got, ["job", "secret", "image", "mine", "r", "1"].map(Some));
    }

    #[test]
    fn variables_that_the_kernel_cannot_pass_are_refused() {
        let checked = |name: &str, text: &str| validate([(&name.to_owned(), &text.to_owned())]);
        assert_eq!(checked("A\nB", "x\ny"), Ok(()));
        assert!(checked("", "x").is_err());
        assert!(checked("A=B", "x").is_err());
        assert!(checked("A\0", "x").is_err());
        assert_eq!(
            checked("A", "x\0y").unwrap_err().to_string(),
            "invalid value of environment variable `A`: it contains a NUL byte"
        );
    }

    #[test]
    fn shell_exports_quote_every_value_and_skip_invalid_names() {
        let base = env(&[("SAME", "1")]);
        let job = env(&[
            ("SAME", "1"),
            ("HOME", "/root"),
            ("A", "it's $(x)\n`y`"),
            ("B\nrm -rf", "x"),
            ("1C", "x"),
            ("A;b", ""),
        ]);
        assert_eq!(shell_exports(&base, &job), b"export A='it'\\''s $(x)\n`y`'\n");
    }
}
