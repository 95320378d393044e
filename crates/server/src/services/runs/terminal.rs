//! Terminals of browsers: a shell in a job, through the SSH server that comes with every job.

use std::sync::Arc;

use serde_json::Value;
use tokio::io::duplex;
use windlass_api::runs::{ConnectRequest, TerminalRequest};
use windlass_model::{
    error_chain::format_chain,
    event::Entity,
    id::{RunId, SubmissionId},
};
use windlass_tunnel::{
    Connection, HostKeyPin, LoginKey, ShellInput, ShellOutput, SshDestination, TerminalSize, TunnelError,
};

use super::connect;
use crate::{
    app::App,
    auth::ProjectScope,
    db::{Unit, documents::JOB_RUNTIME, jobs},
    error::{Error, Result},
    events::{EventSubject, note},
    services::project_keys,
};

/// Bytes between the connection to the job and its SSH client.
const BUFFER: usize = 64 << 10;
/// Bytes that the SSH client buffers for a slow browser.
const OUTPUT_MAX: usize = 1 << 20;
/// Size until the browser sends its own.
const FIRST_SIZE: TerminalSize = TerminalSize { columns: 80, rows: 24 };

/// A shell that was opened for a browser.
pub(crate) struct OpenedShell {
    pub(crate) output: ShellOutput,
    pub(crate) input: ShellInput,
}

/// Opens a shell, and records who opened it.
pub(crate) async fn open_terminal(
    app: &App,
    scope: &ProjectScope,
    requested: &TerminalRequest,
) -> Result<OpenedShell> {
    let port = connect(app, scope, &as_connect(requested)).await?;
    let absent = || Error::absent("Job submission");
    let job = jobs::find(app.db(), SubmissionId(requested.job_submission_id)).await?.ok_or_else(absent)?;
    let key = project_keys::open(app, scope.project.id).await?.ok_or_else(|| Error::absent("Project"))?;
    let key = LoginKey::parse(&key).map_err(|error| Error::refused(format_chain(&error)))?;
    let (near, mut far) = duplex(BUFFER);
    // It ends with either side.
    tokio::spawn(async move { port.join(&mut far).await });
    // The stream comes from the agent of this job, so the host key adds nothing.
    let target = SshDestination {
        host: requested.run_name.clone(),
        port: 0,
        user: login_user(job.id, job.runtime.as_deref())?,
        keys: vec![key],
        pin: HostKeyPin::FirstUse,
        via: None,
    };
    let refused =
        |error: TunnelError| Error::refused(format!("no shell could be opened: {}", format_chain(&error)));
    let connection = Connection::open_over(near, &target, OUTPUT_MAX).await.map_err(refused)?;
    let (output, input) = Arc::new(connection).open_shell(FIRST_SIZE).await.map_err(refused)?;
    record(app, scope, job.run_id, &requested.run_name).await?;
    Ok(OpenedShell { output, input })
}

/// Checks that the caller of an open terminal still has the rights to it.
pub(crate) async fn check_terminal(
    app: &App,
    scope: &ProjectScope,
    requested: &TerminalRequest,
) -> Result<()> {
    super::check_connect(app, scope, &as_connect(requested)).await
}

fn as_connect(requested: &TerminalRequest) -> ConnectRequest {
    ConnectRequest {
        run_name: requested.run_name.clone(),
        job_submission_id: requested.job_submission_id,
        port: 0,
    }
}

/// The SSH server maps every user except root to the job's user; the real name makes prompts and paths right.
fn login_user(job: SubmissionId, runtime: Option<&str>) -> Result<String> {
    let runtime: Value = JOB_RUNTIME.decode_opt(job, runtime)?.unwrap_or_default();
    let name = runtime["username"].as_str().filter(|name| {
        !name.is_empty()
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-.".contains(letter))
    });
    Ok(name.unwrap_or("root").to_owned())
}

async fn record(app: &App, scope: &ProjectScope, run: RunId, name: &str) -> Result<()> {
    let by = scope.caller.user.id;
    let about = EventSubject { entity: Entity::Run, id: run.0, name, project: Some(scope.project.id) };
    let message = "Terminal opened in the web UI".to_owned();
    let changes = note(app.db(), Some(by), &about, "terminal_opened", message)?;
    app.db().write(Unit::new().and(changes)).await?.done().map(drop)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use windlass_model::id::SubmissionId;

    use super::login_user;

    #[test]
    fn the_login_uses_the_name_of_the_jobs_user() {
        let job = SubmissionId(Uuid::nil());
        assert_eq!(login_user(job, Some(r#"{"username":"ada"}"#)).unwrap(), "ada");
        for runtime in [None, Some("{}"), Some(r#"{"username":"a b"}"#), Some(r#"{"username":""}"#)] {
            assert_eq!(login_user(job, runtime).unwrap(), "root");
        }
        assert!(login_user(job, Some("{")).is_err());
    }
}
