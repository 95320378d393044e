//! Setup and removal of the agent on a host, step by step. Every step checks the present state first and may be
//! repeated.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout};
use windlass_api::agent::{
    Health,
    client::ShimClient,
    shim::{TaskStatus, TerminateRequest},
};
use windlass_tunnel::{Connection, TunnelError};

use super::{
    OciProgram, RemoteBackend, RemoteHost, RemoteState, address, error_hints,
    shell_scripts::{
        self, AGENT, Files, HostAccess, INCOMING, INCOMING_OCI_PROGRAM, Installation, SOCKET, ScriptOutput,
    },
};
use crate::{AgentEndpoint, BackendError, BackendInstance, InstanceRequest};

/// Timeout of a script.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a response of a running agent.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// A starting agent waits up to a minute for a container engine.
const START_TIMEOUT: Duration = Duration::from_secs(75);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Number of polls between two checks that a starting agent is alive.
const POLLS_PER_LIVENESS_CHECK: u32 = 20;
/// Grace period of tasks when their host is released, and the timeout for all of them together.
const TASK_GRACE_SECS: u64 = 5;
const TASKS_TIMEOUT: Duration = Duration::from_secs(60);
/// Epoch of the calls that end all tasks: no later call follows.
const LAST_EPOCH: i64 = i64::MAX;

/// Settings of the agent.
const OCI_PROGRAM_VARIABLE: &str = "WINDLASS_AGENT_OCI_PROGRAM";
const OCI_PROGRAM_SHA256_VARIABLE: &str = "WINDLASS_AGENT_OCI_PROGRAM_SHA256";

pub(super) struct HostSetup<'a> {
    remote: &'a RemoteBackend,
    order: &'a InstanceRequest,
    site: &'a RemoteHost,
    connection: Arc<Connection>,
}

impl<'a> HostSetup<'a> {
    /// Logs in.
    pub(super) async fn begin(
        remote: &'a RemoteBackend,
        order: &'a InstanceRequest,
        site: &'a RemoteHost,
    ) -> Result<Self, BackendError> {
        remote.report_progress(order, || format!("connecting to {}", site.target.name()));
        let connected = remote.hosts.control_connection(&order.instance, &site.target).await;
        let (connection, _) =
            connected.map_err(|error| error_hints::to_backend_error(&error, &site.target))?;
        Ok(Self { remote, order, site, connection })
    }

    /// Sets up a host until its agent responds.
    pub(super) async fn bring_up(&self) -> Result<BackendInstance, BackendError> {
        self.remote.report_progress(self.order, || "inspecting the host".to_owned());
        let host = self.inspect().await?;
        let stock = self.probe_installation(&host).await?;
        self.refuse_foreign(&stock)?;
        let sha256 = self.remote.sum(host.arch).await?;
        let has_agent = stock.agent == sha256 || self.has_newer_agent(&host, &stock).await?;
        if !has_agent {
            self.upload(&host, &sha256).await?;
        }
        let oci_program = self.remote.oci_programs.get(host.arch);
        if let Some(program) = oci_program
            && !stock.oci_programs.contains(&program.sha256)
        {
            self.upload_oci_program(&host, program).await?;
        }
        let text = self.run_root_script(&host, "inspect the host", &shell_scripts::describe_script()).await?;
        let undescribed = |error: serde_json::Error| {
            refused("inspect the host", format!("invalid output of its agent: {error}"))
        };
        let has = shell_scripts::parse_hardware(&text, host.arch, &stock.runtime).map_err(undescribed)?;
        let internal_ip = address::select_internal_ip(self.site, &has.addresses, &host.local)?;
        let mut env = self.order.env.clone();
        if let Some(program) = oci_program {
            let path = shell_scripts::oci_program_path(program.name, &program.sha256);
            env.insert(OCI_PROGRAM_VARIABLE.to_owned(), path);
            env.insert(OCI_PROGRAM_SHA256_VARIABLE.to_owned(), program.sha256.clone());
        }
        let files = Files::new(&stock.keeper, &env)?;
        if stock.files != files.sum() {
            self.run_root_script(&host, "write the agent's files", &files.write()).await?;
        }
        let (enrolment, user) = (&self.order.enrolment, &self.site.target.user);
        if !stock.enrolment.as_ref().is_some_and(|enrolled| enrolled.matches(enrolment, user)) {
            let enrol = shell_scripts::enrol_script(enrolment, user);
            self.run_root_script(&host, "enrol the host", &enrol).await?;
        }
        let health = self.start(&host).await?;
        let runtime = self.probe_installation(&host).await?.runtime;
        let has = crate::HardwareInfo { runtime, ..has };
        let deployed = if has_agent { stock.agent } else { sha256 };
        Ok(self.to_instance(has, internal_ip, &health, deployed, &stock.keeper))
    }

    fn to_instance(
        &self,
        has: crate::HardwareInfo,
        internal_ip: Option<IpAddr>,
        health: &Health,
        agent_sha256: String,
        keeper: &str,
    ) -> BackendInstance {
        let host_keys =
            self.connection.host_keys().into_iter().map(|seen| (seen.host, seen.key.to_openssh())).collect();
        let memo = RemoteState {
            agent_sha256,
            host_keys,
            keeper: shell_scripts::describe_keeper(keeper).to_owned(),
        };
        BackendInstance {
            id: self.site.target.name(),
            reach: Some(AgentEndpoint::Ssh { socket: SOCKET.to_owned() }),
            hostname: Some(self.site.target.host.clone()),
            internal_ip: internal_ip.map(|address| address.to_string()),
            has: Some(has),
            agent_version: Some(health.version.clone()),
            memo: serde_json::to_value(memo).unwrap_or_default(),
        }
    }

    async fn inspect(&self) -> Result<HostAccess, BackendError> {
        let text = self.script("inspect the host", "exec /bin/sh -s", shell_scripts::PROBE_HOST).await?;
        shell_scripts::check_host(
            &ScriptOutput::read(&text),
            &self.site.target.user,
            &self.remote.binaries.arches(),
        )
    }

    async fn probe_installation(&self, host: &HostAccess) -> Result<Installation, BackendError> {
        let text = self.run_root_script(host, "inspect the host", shell_scripts::PROBE_INSTALLATION).await?;
        Ok(Installation::read(&ScriptOutput::read(&text)))
    }

    /// Refuses a host that is enrolled elsewhere: two servers would start two tasks on one GPU.
    fn refuse_foreign(&self, stock: &Installation) -> Result<(), BackendError> {
        let Some(enrolled) = &stock.enrolment else { return Ok(()) };
        if enrolled.instance_id == self.order.instance.to_string() {
            return Ok(());
        }
        let message = format!(
            "it already belongs to another fleet or server, as instance {}. Remove it there first. If that server no \
             longer exists, run on the host as root: rm {}/home/enrolment.json",
            enrolled.instance_id,
            shell_scripts::ROOT
        );
        Err(refused("use the host", message))
    }

    /// Returns whether the host has a newer agent than this server: another server of the same fleet is ahead, and
    /// versions only increase.
    async fn has_newer_agent(&self, host: &HostAccess, stock: &Installation) -> Result<bool, BackendError> {
        if stock.agent.is_empty() {
            return Ok(false);
        }
        let message = self.run_root_command(host, &format!("{AGENT} --version\n")).await?;
        let there = String::from_utf8_lossy(&message.stdout).trim().rsplit(' ').next().map(str::to_owned);
        Ok(message.status == Some(0) && there.is_some_and(|there| is_newer(&there, super::VERSION)))
    }

    async fn upload(&self, host: &HostAccess, sha256: &str) -> Result<(), BackendError> {
        self.remote.report_progress(self.order, || "waiting for other uploads of the agent".to_owned());
        // The semaphore is never closed, so acquiring cannot fail.
        let _round = self.remote.uploads.acquire().await;
        let binary = self.remote.load(host.arch).await?;
        let mib = binary.bytes.len() >> 20;
        self.remote.report_progress(self.order, || format!("uploading the agent ({mib} MiB)"));
        self.run_root_script(
            host,
            "create the agent's directory",
            &shell_scripts::prepare_script(host, sha256),
        )
        .await?;
        let uploaded = self.connection.upload(INCOMING, &binary.bytes, &binary.sha256).await;
        let uploaded = uploaded.map_err(|error| {
            let reported = error_hints::to_backend_error(&error, &self.site.target);
            let BackendError::Unavailable { message, .. } = reported else { return reported };
            unavailable("upload the agent", message)
        })?;
        tracing::debug!(host = self.site.target.name(), resumed_at = uploaded.resumed_at, "agent uploaded");
        let installed = self.run_root_command(host, &shell_scripts::install_script(&uploaded.path)).await?;
        if installed.status == Some(0) {
            return Ok(());
        }
        let message = shell_scripts::sanitize(&String::from_utf8_lossy(&installed.stderr));
        Err(refused(
            "install the agent",
            format!(
                "it cannot run from {}: {message}. Check that the file system is not mounted with `noexec`",
                shell_scripts::ROOT
            ),
        ))
    }

    /// Uploads the program that runs containers where no engine is installed.
    async fn upload_oci_program(&self, host: &HostAccess, program: &OciProgram) -> Result<(), BackendError> {
        const WHAT: &str = "upload the program that runs containers";
        self.remote.report_progress(self.order, || format!("uploading {}", program.name));
        // The semaphore is never closed, so acquiring cannot fail.
        let _round = self.remote.uploads.acquire().await;
        let given = program.clone();
        let loaded = tokio::task::spawn_blocking(move || given.load()).await;
        let bytes = loaded
            .map_err(|error| unavailable(WHAT, error.to_string()))?
            .map_err(|error| refused(WHAT, error.to_string()))?;
        self.run_root_script(host, WHAT, &shell_scripts::prepare_script(host, &program.sha256)).await?;
        let uploaded = self.connection.upload(INCOMING_OCI_PROGRAM, &bytes, &program.sha256).await;
        let uploaded = uploaded.map_err(|error| error_hints::to_backend_error(&error, &self.site.target))?;
        let path = shell_scripts::oci_program_path(program.name, &program.sha256);
        let install = shell_scripts::install_oci_program_script(&uploaded.path, &path);
        let installed = self.run_root_command(host, &install).await?;
        if installed.status == Some(0) {
            return Ok(());
        }
        let message = shell_scripts::sanitize(&String::from_utf8_lossy(&installed.stderr));
        Err(refused(WHAT, format!("`{}` cannot run there: {message}. Is it a static program?", program.name)))
    }

    /// Starts the agent unless it runs, and waits until it responds through the tunnel.
    async fn start(&self, host: &HostAccess) -> Result<Health, BackendError> {
        self.remote.report_progress(self.order, || "starting the agent".to_owned());
        self.run_root_script(host, "start the agent", shell_scripts::START_AGENT).await?;
        let until = Instant::now() + START_TIMEOUT;
        for inspect in 1.. {
            match self.health().await {
                Ok(health) => return Ok(health),
                Err(error @ BackendError::Refused { .. }) => return Err(error),
                Err(_) => {}
            }
            let is_late = Instant::now() >= until;
            if is_late || inspect % POLLS_PER_LIVENESS_CHECK == 0 {
                let is_running = self.probe_installation(host).await?.is_running;
                if is_late || !is_running {
                    let words =
                        self.run_root_script(host, "start the agent", shell_scripts::AGENT_LOG_TAIL).await?;
                    let state = if is_running { "it is running but does not respond" } else { "it exited" };
                    return Err(unavailable(
                        "start the agent",
                        format!("{state}: {}", shell_scripts::sanitize(&words)),
                    ));
                }
            }
            sleep(POLL_INTERVAL).await;
        }
        Err(unavailable("start the agent", "it does not respond".to_owned()))
    }

    /// Calls the health check of the agent.
    pub(super) async fn health(&self) -> Result<Health, BackendError> {
        let shim = self.shim("").await?;
        match timeout(RESPONSE_TIMEOUT, shim.health()).await {
            Ok(Ok(health)) => Ok(health),
            Ok(Err(error)) => Err(unavailable("query the agent", error.to_string())),
            Err(_) => Err(unavailable(
                "query the agent",
                format!("no response within {} s", RESPONSE_TIMEOUT.as_secs()),
            )),
        }
    }

    async fn shim(&self, credential: &str) -> Result<ShimClient, BackendError> {
        let stream = self.connection.open_unix(SOCKET).await.map_err(|error| self.socket_error(&error))?;
        match timeout(RESPONSE_TIMEOUT, ShimClient::connect(stream, credential)).await {
            Ok(Ok(shim)) => Ok(shim),
            Ok(Err(error)) => Err(unavailable("query the agent", error.to_string())),
            Err(_) => Err(unavailable("query the agent", "no response".to_owned())),
        }
    }

    fn socket_error(&self, error: &TunnelError) -> BackendError {
        if error.is_forbidden() {
            let message = "its SSH server forbids forwarding to Unix sockets. Set `AllowStreamLocalForwarding yes` in \
                        /etc/ssh/sshd_config on the host and reload the SSH server";
            return refused("connect to the agent", message.to_owned());
        }
        error_hints::to_backend_error(error, &self.site.target)
    }

    /// Ends all tasks, stops the agent and removes the installation. Returns false if there was none.
    pub(super) async fn uninstall(&self) -> Result<bool, BackendError> {
        self.remote.report_progress(self.order, || "removing the agent from the host".to_owned());
        let host = self.inspect().await?;
        let stock = self.probe_installation(&host).await?;
        if !stock.any || self.refuse_foreign(&stock).is_err() {
            return Ok(false);
        }
        if stock.enrolment.is_some() && !stock.agent.is_empty() {
            self.start(&host).await?;
            self.end_tasks(&host).await?;
        }
        self.run_root_script(&host, "remove the agent", shell_scripts::UNINSTALL).await?;
        Ok(true)
    }

    /// Ends all tasks with a temporary credential, because the server's credential is not known here.
    async fn end_tasks(&self, host: &HostAccess) -> Result<(), BackendError> {
        let mut random = [0u8; 32];
        getrandom::fill(&mut random)
            .map_err(|error| unavailable("generate a credential", error.to_string()))?;
        let credential = hex::encode(random);
        let also = {
            use sha2::Digest as _;
            hex::encode(sha2::Sha256::digest(&credential))
        };
        let enrol = shell_scripts::last_enrol_script(&self.order.enrolment, &also);
        self.run_root_script(host, "enrol the host", &enrol).await?;
        let shim = self.shim(&credential).await?;
        let failed = |error: windlass_api::agent::client::ShimError| {
            unavailable("terminate the tasks", error.to_string())
        };
        let how = TerminateRequest {
            termination_reason: "terminated_by_server".to_owned(),
            termination_message: "the host is being released".to_owned(),
            timeout: TASK_GRACE_SECS,
        };
        let until = Instant::now() + TASKS_TIMEOUT;
        loop {
            let tasks = shim.tasks().await.map_err(failed)?.tasks;
            if tasks.is_empty() {
                return Ok(());
            }
            if Instant::now() >= until {
                let left = tasks.len();
                return Err(unavailable("terminate the tasks", format!("{left} tasks are still running")));
            }
            for task in tasks {
                // The result appears in the next list.
                let _ = match task.status {
                    TaskStatus::Terminated => shim.remove(task.id, LAST_EPOCH).await,
                    TaskStatus::Queued
                    | TaskStatus::Pending
                    | TaskStatus::Preparing
                    | TaskStatus::Pulling
                    | TaskStatus::Creating
                    | TaskStatus::Running => shim.terminate(task.id, &how, LAST_EPOCH).await.map(drop),
                };
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn run_root_script(
        &self,
        host: &HostAccess,
        what: &'static str,
        script: &str,
    ) -> Result<String, BackendError> {
        self.script(what, shell_for(host), script).await
    }

    async fn run_root_command(
        &self,
        host: &HostAccess,
        script: &str,
    ) -> Result<windlass_tunnel::CommandOutput, BackendError> {
        let run = timeout(SCRIPT_TIMEOUT, self.connection.run(shell_for(host), script.as_bytes())).await;
        let late = |_| unavailable("run a command on the host", "timed out".to_owned());
        run.map_err(late)?.map_err(|error| error_hints::to_backend_error(&error, &self.site.target))
    }

    async fn script(&self, what: &'static str, shell: &str, script: &str) -> Result<String, BackendError> {
        let run = timeout(SCRIPT_TIMEOUT, self.connection.run(shell, script.as_bytes())).await;
        let late = |_| unavailable(what, format!("timed out after {} s", SCRIPT_TIMEOUT.as_secs()));
        let output =
            run.map_err(late)?.map_err(|error| error_hints::to_backend_error(&error, &self.site.target))?;
        match output.status {
            Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            Some(status) => {
                let message = shell_scripts::sanitize(&String::from_utf8_lossy(&output.stderr));
                Err(unavailable(what, format!("exit status {status}: {message}")))
            }
            None => Err(unavailable(what, "the connection was lost, or the command was killed".to_owned())),
        }
    }
}

fn shell_for(host: &HostAccess) -> &'static str {
    if host.is_root { "exec /bin/sh -s" } else { "exec sudo -n /bin/sh -s" }
}

pub(super) fn unavailable(what: &'static str, message: String) -> BackendError {
    BackendError::Unavailable { what, message }
}

fn refused(what: &'static str, message: String) -> BackendError {
    BackendError::Refused { what, message }
}

/// Compares `1.10.2` with `1.9.0` by its numbers.
pub(super) fn is_newer(there: &str, here: &str) -> bool {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(['.', '-', '+']).map_while(|part| part.parse().ok()).collect()
    };
    numbers(there) > numbers(here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (there, here, newer) in [
            ("0.10.0", "0.9.9", true),
            ("0.1.0", "0.1.0", false),
            ("0.1", "0.1.1", false),
            ("x", "0.1.0", false),
        ] {
            assert_eq!(is_newer(there, here), newer, "{there} {here}");
        }
    }
}
