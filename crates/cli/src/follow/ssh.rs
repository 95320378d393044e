//! `ssh RUN`: an OpenSSH host entry, which editors read too.
//!
//! OpenSSH reaches the job through this program as its proxy command, and through the server. An entry therefore works
//! in every terminal, whether or not the run is followed, and no host needs an open port. The connection is
//! authenticated by that path (the user's token, the server's credential, the host's own); the host key of the SSH
//! server is as young as the job and proves nothing.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use windlass_api::{operations::ReadMyUser, runs::Run, server::EmptyRequest};

use super::progress::JobProgress;
use crate::{
    cli::ServerArgs,
    context::Context,
    error::CliError,
    home::{Home, make_private_dir, read_if_exists, write_private},
};

/// Private key to use instead of the one that the server stores.
pub(crate) type Identity = Option<PathBuf>;

/// Connection data of a proxy command, stored only if the server was given by flags.
#[derive(Deserialize, Serialize)]
struct SavedServer {
    url: Option<String>,
    token: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    certificate: Option<String>,
}

/// A job of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoginTarget {
    pub(crate) replica: i64,
    pub(crate) job: i64,
}

impl LoginTarget {
    pub(crate) fn matches(self, job: &JobProgress) -> bool {
        (self.replica, self.job) == (job.replica, job.job)
    }
}

/// Writes the entry and returns the host name for `ssh`.
pub(crate) async fn write_entry(
    cx: &Context,
    at: &ServerArgs,
    run: &Run,
    name: &str,
    place: LoginTarget,
    identity: &Identity,
) -> Result<String, CliError> {
    let home = Home::find()?;
    let dir = home.ssh_dir();
    let failed = |error: std::io::Error| {
        CliError::from_error(&format!("failed to write to `{}`", dir.display()), &error)
    };
    make_private_dir(&dir.join("runs")).map_err(failed)?;
    let dir = dir.canonicalize().map_err(failed)?;
    let identity = match identity {
        Some(file) => std::path::absolute(file).map_err(failed)?,
        None => write_private_key(cx, &dir).await?,
    };
    let host = host_alias(name, place);
    let connection = dir.join("runs").join(format!("{host}.json"));
    let is_named = [&at.url, &at.token, &at.server_cert].into_iter().flatten().any(|value| !value.is_empty());
    if is_named {
        let text = serde_json::to_string(&SavedServer {
            url: Some(cx.url.clone()),
            token: Some(cx.token.clone()),
            certificate: cx.certificate.clone(),
        })
        .map_err(|error| CliError::from_error("failed to encode the address of the server", &error))?;
        write_private(&connection, &text).map_err(failed)?;
    }
    let program = std::env::current_exe().map_err(failed)?;
    let entry = SshConfigEntry {
        host: &host,
        user: login_user(run, place),
        identity: &identity,
        home: dir.parent().unwrap_or(&dir),
        program: &program,
        project: &cx.project,
        run: name,
        place,
        connection: is_named.then_some(connection.as_path()),
    };
    write_private(&dir.join("runs").join(format!("{host}.conf")), &entry.text()).map_err(failed)?;
    let all = dir.join("runs").join("*.conf");
    write_private(&dir.join("config"), &format!("Include {}\n", quote_config(&all))).map_err(failed)?;
    add_include(&dir.join("config"))?;
    Ok(host)
}

/// Removes the entry of a run that has ended.
pub(crate) fn remove_entry(name: &str, place: LoginTarget) {
    let Ok(home) = Home::find() else { return };
    let host = host_alias(name, place);
    for kind in ["conf", "json"] {
        let _ = std::fs::remove_file(home.ssh_dir().join("runs").join(format!("{host}.{kind}")));
    }
}

/// Reads the connection data of a proxy command, if the server was given by flags.
pub(crate) fn read_saved_server(file: &Path, project: Option<String>) -> Result<ServerArgs, CliError> {
    let text = read_if_exists(file)?.ok_or_else(|| {
        CliError::new(format!("cannot read `{}`", file.display()))
            .why("the file does not exist")
            .hint("run `windlass attach RUN` to write it")
    })?;
    let connection: SavedServer = serde_json::from_str(&text)
        .map_err(|error| CliError::from_error(&format!("failed to parse `{}`", file.display()), &error))?;
    Ok(ServerArgs {
        project,
        url: connection.url,
        token: connection.token,
        server_cert: connection.certificate,
    })
}

/// Name of the run for its first job, else the job name: `RUN-RANK-REPLICA`.
fn host_alias(name: &str, place: LoginTarget) -> String {
    match (place.replica, place.job) {
        (0, 0) => name.to_owned(),
        (replica, job) => format!("{name}-{job}-{replica}"),
    }
}

/// Parses a job name `RUN-RANK-REPLICA`.
pub(crate) fn parse_job_name(name: &str) -> Option<(&str, LoginTarget)> {
    let (rest, replica) = name.rsplit_once('-')?;
    let (run, job) = rest.rsplit_once('-')?;
    Some((run, LoginTarget { replica: replica.parse().ok()?, job: job.parse().ok()? }))
}

/// User for the login. The SSH server maps every user except root to the job's user; the real name makes prompts and
/// paths right.
fn login_user(run: &Run, place: LoginTarget) -> String {
    let of_place = run.jobs.iter().find(|job| {
        let spec = job.job_spec.value().unwrap_or_default();
        spec["replica_num"].as_i64().unwrap_or(0) == place.replica
            && spec["job_num"].as_i64().unwrap_or(0) == place.job
    });
    let runtime =
        of_place.and_then(|job| job.job_submissions.last()?.job_runtime_data.as_ref()?.value().ok());
    let name = runtime.and_then(|runtime| runtime["username"].as_str().map(str::to_owned));
    let is_plain = |name: &String| {
        !name.is_empty()
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-.".contains(letter))
    };
    name.filter(is_plain).unwrap_or_else(|| "root".to_owned())
}

/// Writes the private key whose public half the server put into the job.
async fn write_private_key(cx: &Context, dir: &Path) -> Result<PathBuf, CliError> {
    let me = cx.call::<ReadMyUser>(&EmptyRequest {}).await?;
    let private = me.ssh_private_key.ok_or_else(|| {
        CliError::new("cannot log in to the job")
            .why("the server has no SSH key for your user")
            .hint("if the run was submitted with your own key, pass it with `--ssh-identity FILE`")
    })?;
    let path = dir.join(format!("{}.key", me.username));
    let text = if private.ends_with('\n') { private } else { private + "\n" };
    write_private(&path, &text)
        .map_err(|error| CliError::from_error("failed to write the SSH key", &error))?;
    Ok(path)
}

struct SshConfigEntry<'a> {
    host: &'a str,
    user: String,
    identity: &'a Path,
    home: &'a Path,
    program: &'a Path,
    project: &'a str,
    run: &'a str,
    place: LoginTarget,
    connection: Option<&'a Path>,
}

impl SshConfigEntry<'_> {
    fn text(&self) -> String {
        let connection = self
            .connection
            .map(|connection| format!(" --connection {}", quote_shell(&connection.display().to_string())));
        // OpenSSH expands percent signs.
        let proxy = format!(
            "env WINDLASS_HOME={} {} attach --stdio{} --project {} --replica {} --job {} {}",
            quote_shell(&self.home.display().to_string()),
            quote_shell(&self.program.display().to_string()),
            connection.unwrap_or_default(),
            quote_shell(self.project),
            self.place.replica,
            self.place.job,
            quote_shell(self.run),
        )
        .replace('%', "%%");
        format!(
            "Host {}\n  HostName {0}\n  User {}\n  IdentityFile {}\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  \
             UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n  LogLevel ERROR\n  ProxyCommand {proxy}\n",
            self.host,
            self.user,
            quote_config(self.identity),
        )
    }
}

fn quote_config(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

/// Quotes a text as one shell argument.
fn quote_shell(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Includes the file in the first line of `~/.ssh/config`: further down the line would belong to a host block.
fn add_include(config: &Path) -> Result<(), CliError> {
    let Some(home) = std::env::var_os("HOME").filter(|home| !home.is_empty()) else { return Ok(()) };
    let dir = PathBuf::from(home).join(".ssh");
    let file = dir.join("config");
    let line = format!("Include {}", quote_config(config));
    let failed = |error: std::io::Error| {
        CliError::from_error(&format!("failed to write `{}`", file.display()), &error)
            .hint(format!("add `{line}` as its first line"))
    };
    let text = read_if_exists(&file)?.unwrap_or_default();
    if text.lines().any(|known| known.trim() == line) {
        return Ok(());
    }
    // Keep a symbolic link, which users have whose configuration is in a repository.
    let real = file.canonicalize().unwrap_or_else(|_| file.clone());
    write_private(&real, &format!("{line}\n{text}")).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{LoginTarget, SshConfigEntry, host_alias, parse_job_name};

    #[test]
    fn job_host_name_contains_rank_then_replica() {
        let place = LoginTarget { replica: 2, job: 0 };
        assert_eq!(host_alias("svc", place), "svc-0-2");
        let (run, found) = parse_job_name("my-svc-0-2").unwrap();
        assert_eq!((run, found.job, found.replica), ("my-svc", 0, 2));
        assert!(parse_job_name("svc").is_none() && parse_job_name("my-svc").is_none());
        assert_eq!(host_alias("svc", LoginTarget { replica: 0, job: 0 }), "svc");
    }

    #[test]
    fn config_entry_quotes_paths_for_the_shell_and_openssh() {
        let entry = SshConfigEntry {
            host: "train",
            user: "dev".to_owned(),
            identity: Path::new("/home/a b/.windlass/ssh/a.key"),
            home: Path::new("/home/a b/.windlass"),
            program: Path::new("/opt/100%/it's/windlass"),
            project: "main",
            run: "train",
            place: LoginTarget { replica: 0, job: 1 },
            connection: None,
        };
        let text = entry.text();
        assert!(text.contains("IdentityFile \"/home/a b/.windlass/ssh/a.key\"\n"), "{text}");
        let proxy = "ProxyCommand env WINDLASS_HOME='/home/a b/.windlass' '/opt/100%%/it'\\''s/windlass' attach \
                     --stdio --project 'main' --replica 0 --job 1 'train'\n";
        assert!(text.ends_with(proxy), "{text}");
    }
}
