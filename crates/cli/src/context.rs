//! Connection of a command to the server: one client, one project, and errors with explanations.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use windlass_api::{
    Operation,
    client::{ApiClient, CallError},
    operations::{ListProjects, ListRuns, ReadRun},
    projects, runs,
};

use crate::{
    cli::ServerArgs,
    error::{CliError, ErrorCode},
    login::{self, ServerTarget},
};

/// Maximum number of names that are compared for a suggestion.
const NAMES_MAX: i64 = 100;
/// Minimum similarity of a suggested name.
const SIMILARITY_MIN: f64 = 0.75;
/// Time limit for pending work at the end of a command, such as an unanswered request.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(20);

/// Time for which commands that follow a run wait for an unreachable server.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_DELAY: Duration = Duration::from_millis(200);

pub(crate) struct Context {
    pub(crate) client: ApiClient,
    pub(crate) url: String,
    pub(crate) token: String,
    pub(crate) certificate: Option<String>,
    pub(crate) project: String,
    /// True if the server has responded to this command before.
    is_known: AtomicBool,
}

/// Runs a command that needs a server.
pub(crate) fn with_context<T>(
    at: &ServerArgs,
    command: impl AsyncFnOnce(&Context) -> Result<T, CliError>,
) -> Result<T, CliError> {
    let chosen = login::choose_server(at)?;
    block_on(async {
        let context = Context::new(chosen)?;
        command(&context).await
    })
}

pub(crate) fn block_on<T>(command: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::from_error("failed to start the runtime", &error))?;
    let done = runtime.block_on(command);
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    done
}

impl Context {
    pub(crate) fn new(chosen: ServerTarget) -> Result<Self, CliError> {
        let ServerTarget { url, token, certificate, project } = chosen;
        let client = ApiClient::with_certificate(&url, Some(&token), certificate.as_deref())
            .map_err(|error| CliError::call(&url, &error))?;
        Ok(Self { client, url, token, certificate, project, is_known: AtomicBool::new(false) })
    }

    /// Returns a context for another project on the same server.
    pub(crate) fn in_project(&self, name: &str) -> Self {
        Self {
            client: self.client.clone(),
            url: self.url.clone(),
            token: self.token.clone(),
            certificate: self.certificate.clone(),
            project: name.to_owned(),
            is_known: AtomicBool::new(self.is_known.load(Ordering::Relaxed)),
        }
    }

    /// Calls an operation of the project.
    pub(crate) async fn call<O: Operation>(&self, request: &O::Request) -> Result<O::Response, CliError> {
        match self.try_call::<O>(request).await {
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.explain(&error).await),
        }
    }

    /// Calls an idempotent operation, and waits for a server that restarts. A server that never responded is not waited
    /// for.
    pub(crate) async fn call_with_retry<O: Operation>(
        &self,
        request: &O::Request,
    ) -> Result<O::Response, CliError> {
        let began = tokio::time::Instant::now();
        loop {
            match self.try_call::<O>(request).await {
                Err(error)
                    if error.is_unconfirmed()
                        && self.is_known.load(Ordering::Relaxed)
                        && began.elapsed() < RETRY_TIMEOUT =>
                {
                    tokio::time::sleep(RETRY_DELAY).await;
                }
                Ok(answer) => return Ok(answer),
                Err(error) => return Err(self.explain(&error).await),
            }
        }
    }

    /// Calls once and returns the raw error, for callers that handle it.
    pub(crate) async fn try_call<O: Operation>(
        &self,
        request: &O::Request,
    ) -> Result<O::Response, CallError> {
        let path: &[&str] = if O::ACCESS.in_project() { &[&self.project] } else { &[] };
        let answer = self.client.call::<O>(path, request).await;
        if !answer.as_ref().is_err_and(CallError::is_unconfirmed) {
            self.is_known.store(true, Ordering::Relaxed);
        }
        answer
    }

    pub(crate) async fn explain(&self, error: &CallError) -> CliError {
        if let CallError::Denied { status: 404, .. } = error {
            return self.unknown_project().await;
        }
        CliError::call(&self.url, error)
    }

    async fn unknown_project(&self) -> CliError {
        let problem = CliError::new(format!("no project named `{}` on the server", self.project))
            .code(ErrorCode::UnknownProject);
        let request = projects::ListRequest::default();
        let names: Vec<String> = match self.client.call::<ListProjects>(&[], &request).await {
            Ok(projects::ProjectList::Plain(all) | projects::ProjectList::Counted { projects: all, .. }) => {
                all.into_iter().map(|project| project.project_name).collect()
            }
            Err(_) => Vec::new(),
        };
        let near = closest_name(&self.project, names.iter().map(String::as_str));
        match near {
            Some(name) => problem.hint(format!("did you mean `--project {name}`?")),
            None if names.is_empty() => problem.hint("you are not a member of any project"),
            None => {
                problem.hint(format!("use `--project NAME` with one of your projects: {}", names.join(", ")))
            }
        }
    }

    /// Reads a run by its name.
    pub(crate) async fn run(&self, name: &str) -> Result<runs::Run, CliError> {
        let request = runs::ReadRequest { run_name: Some(name.to_owned()), id: None };
        match self.try_call::<ReadRun>(&request).await {
            Ok(run) => Ok(run),
            Err(error) if error.is_not_found() => Err(self.unknown_run(name).await),
            Err(error) => Err(self.explain(&error).await),
        }
    }

    pub(crate) async fn unknown_run(&self, name: &str) -> CliError {
        let request = runs::ListRequest {
            project_name: Some(self.project.clone()),
            include_jobs: false,
            limit: NAMES_MAX,
            ..runs::ListRequest::default()
        };
        let runs = self.client.call::<ListRuns>(&[], &request).await.unwrap_or_default();
        let names: Vec<String> = runs.iter().map(run_name).collect();
        let problem = CliError::new(format!("no run named `{name}` in project `{}`", self.project))
            .code(ErrorCode::UnknownName);
        match closest_name(name, names.iter().map(String::as_str)) {
            Some(near) => problem.hint(format!("did you mean `{near}`?")),
            None => problem.hint("run `windlass ps -a` to list runs"),
        }
    }
}

/// Errors for unknown names, with suggestions.
impl Context {
    pub(crate) fn unknown<'a>(&self, kind: &str, name: &str, all: impl Iterator<Item = &'a str>) -> CliError {
        let problem = CliError::new(format!("no {kind} named `{name}` in project `{}`", self.project))
            .code(ErrorCode::UnknownName);
        match closest_name(name, all) {
            Some(near) => problem.hint(format!("did you mean `{near}`?")),
            None => problem.hint(format!("run `windlass {kind}` to list them")),
        }
    }
}

/// Name of a run, which is part of its specification.
pub(crate) fn run_name(run: &runs::Run) -> String {
    let spec = run.run_spec.value().unwrap_or_default();
    spec["run_name"].as_str().unwrap_or("?").to_owned()
}

/// Returns the most similar name, if it is similar enough.
pub(crate) fn closest_name<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    all.map(|other| (strsim::jaro_winkler(name, other), other))
        .filter(|(alike, _)| *alike >= SIMILARITY_MIN)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, other)| other)
}

#[cfg(test)]
mod tests {
    use super::closest_name;

    #[test]
    fn a_typo_suggests_the_closest_name_and_unrelated_input_suggests_none() {
        let names = ["hello", "train-7b"];
        assert_eq!(closest_name("helo", names.into_iter()), Some("hello"));
        assert_eq!(closest_name("trian-7b", names.into_iter()), Some("train-7b"));
        assert_eq!(closest_name("zzzz", names.into_iter()), None);
    }
}
