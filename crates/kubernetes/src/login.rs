//! Bearer tokens for the API: fixed, from a file that is rotated, or from a program.

use std::{path::PathBuf, process::Stdio, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use tokio::{process::Command, time::timeout};

use crate::kubeconfig::parse_exec_credential;

/// Maximum time for a program to print a token.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// A token is replaced so long before it ends.
const EXPIRY_MARGIN: SignedDuration = SignedDuration::from_secs(60);
/// Maximum length of the error output that is quoted.
const ERROR_TEXT_MAX: usize = 500;

/// Proof of identity of the backend, beyond a certificate.
pub(crate) enum Login {
    /// A certificate, or nothing.
    None,
    Token(String),
    /// Read for each request: the cluster rotates it.
    TokenFile(PathBuf),
    Exec(Arc<ExecLogin>),
}

/// Program that prints a token.
#[derive(Debug)]
pub(crate) struct ExecPlugin {
    pub(crate) command: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    /// Value of `KUBERNETES_EXEC_INFO`.
    pub(crate) info: String,
}

pub(crate) struct ExecLogin {
    plugin: ExecPlugin,
    /// Held while the program runs, so that it runs once for all callers.
    token: tokio::sync::Mutex<Option<(String, Option<Timestamp>)>>,
}

/// Contains no credentials.
impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Token(_) => f.write_str("Token(…)"),
            Self::TokenFile(path) => f.debug_tuple("TokenFile").field(path).finish(),
            Self::Exec(exec) => f.debug_tuple("Exec").field(&exec.plugin.command).finish(),
        }
    }
}

impl Login {
    pub(crate) fn exec(plugin: ExecPlugin) -> Self {
        Self::Exec(Arc::new(ExecLogin { plugin, token: tokio::sync::Mutex::default() }))
    }

    /// Returns the present token.
    pub(crate) async fn token(&self) -> Result<Option<String>, String> {
        match self {
            Self::None => Ok(None),
            Self::Token(token) => Ok(Some(token.clone())),
            Self::TokenFile(path) => {
                let text = tokio::fs::read_to_string(path).await;
                let text = text.map_err(|error| format!("failed to read `{}`: {error}", path.display()))?;
                Ok(Some(text.trim().to_owned()))
            }
            Self::Exec(exec) => exec.token().await.map(Some),
        }
    }

    /// Drops a token that the API refused. Returns whether another one may be accepted.
    pub(crate) async fn reject(&self, refused: Option<&str>) -> bool {
        match self {
            Self::None | Self::Token(_) => false,
            Self::TokenFile(_) => self.token().await.is_ok_and(|now| now.as_deref() != refused),
            Self::Exec(exec) => {
                let mut known = exec.token.lock().await;
                if known.as_ref().is_some_and(|(token, _)| Some(token.as_str()) == refused) {
                    *known = None;
                }
                true
            }
        }
    }
}

impl ExecLogin {
    async fn token(&self) -> Result<String, String> {
        let mut known = self.token.lock().await;
        if let Some((token, until)) = &*known
            && until.is_none_or(|until| Timestamp::now() + EXPIRY_MARGIN < until)
        {
            return Ok(token.clone());
        }
        let found = self.plugin.run().await.map_err(|message| {
            format!("the credential program `{}` failed: {message}", self.plugin.command.display())
        })?;
        let token = found.0.clone();
        *known = Some(found);
        Ok(token)
    }
}

impl ExecPlugin {
    async fn run(&self) -> Result<(String, Option<Timestamp>), String> {
        let mut command = Command::new(&self.command);
        command
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .env("KUBERNETES_EXEC_INFO", &self.info)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let ended = timeout(PLUGIN_TIMEOUT, command.output()).await;
        let output = ended
            .map_err(|_| format!("no answer within {} s", PLUGIN_TIMEOUT.as_secs()))?
            .map_err(|error| error.to_string())?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let text: String = text.trim().chars().take(ERROR_TEXT_MAX).collect();
            return Err(format!("{}: {text}", output.status));
        }
        parse_exec_credential(&output.stdout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(script: &str, dir: &std::path::Path) -> Login {
        Login::exec(ExecPlugin {
            command: "sh".into(),
            args: vec!["-c".into(), script.into()],
            env: vec![("COUNT".into(), dir.join("count").display().to_string())],
            info: "{}".into(),
        })
    }

    #[tokio::test]
    async fn a_program_runs_once_until_its_token_ends_or_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let script = r#"echo x >> "$COUNT"; echo "{\"status\": {\"token\": \"t$(wc -l < "$COUNT")\"}}""#;
        let login = plugin(script, dir.path());
        assert_eq!(login.token().await.unwrap().as_deref(), Some("t1"));
        assert_eq!(login.token().await.unwrap().as_deref(), Some("t1"), "the token is kept");
        assert!(login.reject(Some("t1")).await);
        assert_eq!(login.token().await.unwrap().as_deref(), Some("t2"));
        assert!(login.reject(Some("t1")).await);
        assert_eq!(login.token().await.unwrap().as_deref(), Some("t2"), "another caller replaced it already");
    }

    #[tokio::test]
    async fn an_ended_token_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let script = r#"echo x >> "$COUNT"
            echo "{\"status\": {\"token\": \"t$(wc -l < "$COUNT")\", \"expirationTimestamp\": \"2020-01-01T00:00:00Z\"}}""#;
        let login = plugin(script, dir.path());
        assert_eq!(login.token().await.unwrap().as_deref(), Some("t1"));
        assert_eq!(login.token().await.unwrap().as_deref(), Some("t2"));
    }

    #[tokio::test]
    async fn the_error_output_of_a_program_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let error = plugin("echo expired >&2; exit 3", dir.path()).token().await.unwrap_err();
        assert!(error.contains("expired") && error.contains('3'), "{error}");
    }

    #[tokio::test]
    async fn a_token_file_is_read_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "one\n").unwrap();
        let login = Login::TokenFile(path.clone());
        assert_eq!(login.token().await.unwrap().as_deref(), Some("one"));
        assert!(!login.reject(Some("one")).await, "the same token would be refused again");
        std::fs::write(&path, "two\n").unwrap();
        assert!(login.reject(Some("one")).await);
    }
}
