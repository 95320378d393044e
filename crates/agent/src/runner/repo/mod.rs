//! The repository of a job: cloned, unpacked or none.
//!
//! The contents are created in a separate directory inside the target and then moved up, entry by entry. So a runner
//! that is stopped or killed meanwhile leaves no partial repository. The target may be a mount point, which could not
//! be renamed.
//!
//! Git is the image's own, or else the host's ([`host_git`]). It runs as the job's user, gets its credential through an inherited handle ([`credential`])
//! and uses our own SSH client when the job provides a key ([`ssh`]), so images need no SSH client for that.

pub mod credential;
mod git;
pub mod host_git;
pub mod ssh;
mod url;

use std::{fs, io, path::Path};

use windlass_api::agent::runner::{RepoCredentials, RepoData};

use self::{
    credential::{Credential, Secret},
    git::Git,
    url::{RemoteUrl, Scheme},
};
use super::{
    unpack::{
        CONTENT, TopLevel,
        subprocess::{self, ChildError},
    },
    user_context::{self, StagingDir, UserContext},
};

/// Directory that some file systems create themselves.
const LOST_AND_FOUND: &str = "lost+found";

/// Repository that the job requests.
#[derive(Clone, Copy, Debug)]
pub struct RepoRequest<'a> {
    pub data: Option<&'a RepoData>,
    pub credentials: Option<&'a RepoCredentials>,
    /// Target directory, as [`Site::resolve`] reads it.
    pub dir: &'a str,
    /// `error` or `skip` if the directory is not empty; absent means `skip`.
    pub exists_action: Option<&'a str>,
    pub single_branch: bool,
    /// Uploaded code: a diff for a remote repository, a tar for the others. Absent or empty means none.
    pub code: Option<&'a Path>,
    /// Also accept `http:` and `file:` URLs and local paths.
    pub any_url: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum RepoError {
    #[error(
        "failed to set up the repository: unknown `if_exists` value `{action}`: expected `error` or `skip`"
    )]
    UnknownAction { action: String },
    #[error("failed to set up the repository: `{dir}` is not empty")]
    Exists { dir: String },
    #[error("failed to set up the repository: the job has no URL to clone")]
    NoUrl,
    #[error("failed to set up the repository: {0}")]
    Url(#[from] url::UrlError),
    #[error("failed to set up the repository: `{name}` is not a valid {what}")]
    BadName { what: &'static str, name: String },
    #[error("failed to set up the repository: neither the image nor the instance has git")]
    NoGit,
    #[error("failed to set up the repository: the image has no ssh, and the job has no private key")]
    NoSsh,
    #[error("failed to {step}: git ended with {status}: {message}")]
    Git { step: &'static str, status: String, message: String },
    #[error("failed to {step}: timed out after {secs} s")]
    Deadline { step: &'static str, secs: u64 },
    #[error("failed to {step}: cannot start git")]
    Start {
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("failed to set up the repository")]
    Unpack(#[source] ChildError),
    #[error("failed to set up the repository: {what}")]
    Place {
        what: &'static str,
        #[source]
        source: io::Error,
    },
}

impl RepoError {
    /// Returns advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoGit => Some(
                "hint: install git on the instance or in the image, or send the directory with `files` instead of \
                 `repos`",
            ),
            Self::NoSsh => {
                Some("hint: install an SSH client in the image, or provide the repository's private key")
            }
            Self::Url(_) => Some("hint: use an `https:`, `ssh:` or `git:` URL"),
            Self::Exists { .. } => Some("hint: use another directory, or set `if_exists: skip`"),
            Self::Git { message, .. } => hint_for_output(message),
            Self::UnknownAction { .. }
            | Self::NoUrl
            | Self::BadName { .. }
            | Self::Deadline { .. }
            | Self::Start { .. }
            | Self::Unpack(_)
            | Self::Place { .. } => None,
        }
    }

    /// Returns whether the cause is a full disk.
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::Git { message, .. } => message.contains("No space left on device"),
            Self::Unpack(source) => matches!(source, ChildError::NoSpace(_)),
            Self::Start { source, .. } | Self::Place { source, .. } => {
                source.kind() == io::ErrorKind::StorageFull
            }
            Self::UnknownAction { .. }
            | Self::Exists { .. }
            | Self::NoUrl
            | Self::Url(_)
            | Self::BadName { .. }
            | Self::NoGit
            | Self::NoSsh
            | Self::Deadline { .. } => false,
        }
    }
}

fn hint_for_output(message: &str) -> Option<&'static str> {
    const REFUSED: [&str; 4] = [
        "Authentication failed",
        "could not read Username",
        "Permission denied",
        "HTTP Basic: Access denied",
    ];
    if REFUSED.iter().any(|sign| message.contains(sign)) {
        return Some("hint: check the repository's credentials: they are missing, wrong or expired");
    }
    if message.contains("patch does not apply") || message.contains("patch failed") {
        return Some("hint: push the commit your changes are based on");
    }
    None
}

/// Writes a line to the runner's log.
pub type LogFn<'a> = &'a (dyn Fn(&str) + Send + Sync);

/// Prepares the repository. Dropping the future stops git and leaves no partial result.
pub async fn prepare(site: &UserContext, wanted: &RepoRequest<'_>, say: LogFn<'_>) -> Result<(), RepoError> {
    let Some(data) = wanted.data else { return Ok(()) };
    let code = wanted.code.filter(|path| fs::metadata(path).is_ok_and(|meta| meta.len() > 0));
    let remote = match data {
        RepoData::Virtual {} | RepoData::Local {} if code.is_none() => return Ok(()),
        RepoData::Virtual {} | RepoData::Local {} => None,
        RepoData::Remote { .. } => {
            let credentials = wanted.credentials.ok_or(RepoError::NoUrl)?;
            Some(url::parse(&credentials.clone_url, wanted.any_url)?)
        }
    };
    let dir = site.resolve(wanted.dir);
    let place = |what| move |source| RepoError::Place { what, source };
    if !is_empty(&dir).map_err(place("read the directory"))? {
        return handle_existing(wanted, &dir, say);
    }
    let target = Target { made: site.create_dirs(&dir).map_err(place("create the directory"))?, dir: &dir };
    let stage = StagingDir::new(site, &dir).map_err(place("create a temporary directory"))?;
    match (remote, code) {
        (Some(remote), code) => clone_repository(site, wanted, data, &remote, &stage, code, say).await?,
        (None, Some(code)) => {
            let unpacked =
                subprocess::run(stage.path(), code, TopLevel::Keep, site).await.map_err(RepoError::Unpack)?;
            say(&format!(
                "unpacked {} entries of code, Landlock: {:?}",
                unpacked.summary.entries, unpacked.landlock
            ));
        }
        (None, None) => {}
    }
    match move_into_place(&stage, &dir) {
        Ok(()) => {}
        // Another process that shares the directory was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return handle_existing(wanted, &dir, say);
        }
        Err(source) => return Err(RepoError::Place { what: "move it into place", source }),
    }
    drop(stage);
    target.keep();
    Ok(())
}

/// Target directory; removed again if it was created and the repository could not be prepared.
struct Target<'a> {
    dir: &'a Path,
    made: bool,
}

impl Target<'_> {
    fn keep(mut self) {
        self.made = false;
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if self.made {
            let _ = fs::remove_dir(self.dir);
        }
    }
}

fn handle_existing(wanted: &RepoRequest<'_>, dir: &Path, say: LogFn<'_>) -> Result<(), RepoError> {
    match wanted.exists_action {
        None | Some("" | "skip") => {
            say(&format!("`{}` is not empty: left unchanged", dir.display()));
            Ok(())
        }
        Some("error") => Err(RepoError::Exists { dir: dir.display().to_string() }),
        Some(other) => Err(RepoError::UnknownAction { action: other.to_owned() }),
    }
}

/// Returns whether the directory is missing or has no entries that count.
fn is_empty(dir: &Path) -> io::Result<bool> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name() != LOST_AND_FOUND && !user_context::is_staging_dir(&entry) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Moves the contents to the target. `.git` comes last: a directory with it is complete.
fn move_into_place(stage: &StagingDir, dir: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let content = stage.path().join(CONTENT);
    let mut names: Vec<_> = fs::read_dir(&content)?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<_, _>>()?;
    names.sort_by_key(|name| name == ".git");
    for name in names {
        let (from, to) = (content.join(&name), dir.join(&name));
        match renameat_with(CWD, &from, CWD, &to, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            // Some file systems do not support `NOREPLACE`.
            Err(rustix::io::Errno::INVAL) if fs::symlink_metadata(&to).is_err() => fs::rename(&from, &to)?,
            Err(rustix::io::Errno::INVAL) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

async fn clone_repository(
    site: &UserContext,
    wanted: &RepoRequest<'_>,
    data: &RepoData,
    remote: &RemoteUrl,
    stage: &StagingDir,
    diff: Option<&Path>,
    say: LogFn<'_>,
) -> Result<(), RepoError> {
    let RepoData::Remote { repo_branch, repo_hash, repo_config_name, repo_config_email, .. } = data else {
        return Ok(());
    };
    let branch = validate_name(repo_branch.as_deref(), "branch", is_ref_name)?;
    let hash = validate_name(repo_hash.as_deref(), "commit hash", is_hash)?;
    let credential = wanted.credentials.and_then(|credentials| credential_for(remote, credentials));
    let own_ssh = credential.as_ref().is_some_and(|it| matches!(it.secret, Secret::PrivateKey(_)));
    if remote.scheme == Scheme::Ssh && !own_ssh && site.program("ssh").is_none() {
        return Err(RepoError::NoSsh);
    }
    let hidden = credential.map(|credential| credential.to_memfd()).transpose();
    let hidden = hidden.map_err(|source| RepoError::Place { what: "store the credential", source })?;
    let git = Git::find(site, say, hidden, own_ssh, wanted.any_url)?;

    say(&format!("cloning {}", remote.url));
    let mut arguments = vec!["clone", "--progress", "--no-checkout"];
    if wanted.single_branch {
        arguments.push("--single-branch");
    }
    if let Some(branch) = branch {
        arguments.extend(["--branch", branch]);
    }
    arguments.extend(["--", &remote.url, CONTENT]);
    git.run("clone the repository", stage.path(), &arguments, None).await?;

    let dir = stage.path().join(CONTENT);
    check_out(&git, &dir, branch, hash).await?;
    if dir.join(".gitmodules").exists() {
        let submodules = ["submodule", "update", "--init", "--recursive"];
        git.run("fetch the submodules", &dir, &submodules, None).await?;
    }
    if let Some(diff) = diff {
        let input =
            git::open_upload(diff).map_err(|source| RepoError::Place { what: "open the changes", source })?;
        git.run("apply the changes", &dir, &["apply", "--whitespace=nowarn", "-"], Some(input)).await?;
    }
    for (key, value) in [("user.name", repo_config_name), ("user.email", repo_config_email)] {
        if let Some(value) = value.as_deref().filter(|value| !value.is_empty()) {
            let arguments = ["config", "--local", "--replace-all", key, value];
            git.run("set the user name and email", &dir, &arguments, None).await?;
        }
    }
    Ok(())
}

/// Checks out the branch at the commit. A commit that is not in the clone is fetched by its hash.
async fn check_out(
    git: &Git<'_>,
    dir: &Path,
    branch: Option<&str>,
    hash: Option<&str>,
) -> Result<(), RepoError> {
    const STEP: &str = "check out the commit";
    let Some(hash) = hash else {
        return git.run(STEP, dir, &["reset", "--hard", "--quiet"], None).await;
    };
    let commit = format!("{hash}^{{commit}}");
    let known = git.run("find the commit", dir, &["cat-file", "-e", &commit], None).await;
    if matches!(known, Err(RepoError::Git { .. })) {
        git.run("fetch the commit", dir, &["fetch", "--progress", "--", "origin", hash], None).await?;
    } else {
        known?;
    }
    match branch {
        Some(branch) => {
            git.run(STEP, dir, &["checkout", "--quiet", "--force", "-B", branch, hash, "--"], None).await
        }
        None => git.run(STEP, dir, &["checkout", "--quiet", "--force", "--detach", hash, "--"], None).await,
    }
}

fn validate_name<'a>(
    name: Option<&'a str>,
    what: &'static str,
    fits: fn(&str) -> bool,
) -> Result<Option<&'a str>, RepoError> {
    match name {
        None | Some("") => Ok(None),
        Some(name) if fits(name) => Ok(Some(name)),
        Some(name) => Err(RepoError::BadName { what, name: name.chars().take(100).collect() }),
    }
}

fn is_ref_name(name: &str) -> bool {
    !name.starts_with('-')
        && name.len() <= 255
        && !name.contains(|c: char| c.is_control() || " ~^:?*[\\".contains(c))
}

fn is_hash(name: &str) -> bool {
    (7..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the token or key for this URL, if there is one.
fn credential_for(remote: &RemoteUrl, given: &RepoCredentials) -> Option<Credential> {
    let some = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let secret = match remote.scheme {
        Scheme::Ssh => Secret::PrivateKey(some(&given.private_key)?),
        Scheme::Https | Scheme::Http => {
            let scheme = if remote.scheme == Scheme::Https { "https" } else { "http" }.to_owned();
            let (username, password) = match (some(&given.oauth_token), &remote.login) {
                (Some(token), _) => (token_username(&remote.host).to_owned(), token),
                (None, Some((user, password))) => (user.clone(), password.clone()),
                (None, None) => return None,
            };
            Secret::Login { scheme, username, password }
        }
        Scheme::Git | Scheme::Local => return None,
    };
    Some(Credential { host: remote.host.clone(), secret })
}

/// Returns the user name for a token. Most hosts accept any; one requires a specific name.
fn token_username(host: &str) -> &'static str {
    if host == "bitbucket.org" { "x-token-auth" } else { "oauth2" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ref_names_that_look_like_options_are_invalid() {
        for (name, fits) in
            [("main", true), ("feature/x", true), ("--upload-pack=x", false), ("a b", false), ("a\nb", false)]
        {
            assert_eq!(is_ref_name(name), fits, "{name}");
        }
        for (name, fits) in [("0123abc", true), ("0123ab", false), ("HEAD", false), ("-123abcdef", false)] {
            assert_eq!(is_hash(name), fits, "{name}");
        }
    }
}
