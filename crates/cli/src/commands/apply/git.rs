//! The code of a run with `repos`.
//!
//! A clone with a remote is sent as the URL of the remote, a commit that the remote has, and the difference between
//! that commit and the local files, including new files. A directory without a remote is sent as a whole.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use windlass_api::{Document, repos};
use windlass_model::config::mounts::{RepoSpec, is_clonable, repository_name};

use super::{
    Args,
    archive::{archive_directory, fetch_upload_limit, local_path},
    config_source::ConfigSource,
    keys,
};
use crate::{
    context::Context,
    error::{self, CliError},
    local_server::sha256,
    output,
};

/// Code to register with the server.
#[derive(Debug)]
pub(super) struct CodeUpload {
    pub(super) init: repos::InitRequest,
    /// The `repo_data` of the run.
    pub(super) data: Value,
    /// A diff or a tar archive; may be empty.
    pub(super) content: Vec<u8>,
    pub(super) hash: String,
}

pub(super) async fn find_code(
    cx: &Context,
    args: &Args,
    source: &ConfigSource,
) -> Result<Option<CodeUpload>, CliError> {
    let repos = source.configuration.run().map(|run| run.repos.as_slice()).unwrap_or_default();
    let Some(repo) = repos.first() else { return Ok(None) };
    match (&repo.0.local_path, &repo.0.url) {
        (Some(path), _) => {
            let bytes_max = fetch_upload_limit(cx).await?;
            from_local_path(args, &local_path(&source.dir, path)?, bytes_max).map(Some)
        }
        (None, Some(url)) if !is_clonable(url) => {
            Err(CliError::new(format!("cannot clone the repository `{url}`"))
                .code(error::ErrorCode::Repository)
                .why("instances clone only over https, ssh or git")
                .hint("for a directory of this machine, use `repos: [PATH]`"))
        }
        (None, Some(url)) => from_remote_url(args, url, &repo.0).map(Some),
        (None, None) => Ok(None),
    }
}

/// A repository given by its URL: no local files are read.
fn from_remote_url(args: &Args, url: &str, spec: &RepoSpec) -> Result<CodeUpload, CliError> {
    let data = json!({
        "repo_type": "remote",
        "repo_name": repository_name(url),
        "repo_branch": spec.branch,
        "repo_hash": spec.hash,
        "repo_config_name": null,
        "repo_config_email": null,
    });
    build_upload(args, url, data, Vec::new())
}

fn build_upload(args: &Args, url: &str, data: Value, content: Vec<u8>) -> Result<CodeUpload, CliError> {
    let name = repository_name(url);
    let identity = args.git_identity.as_ref().map(keys::read_key).transpose()?;
    let creds = repos::Creds {
        clone_url: url.to_owned(),
        private_key: identity.and_then(|key| key.private),
        oauth_token: args.git_token.clone().filter(|token| !token.is_empty()),
    };
    let info = json!({ "repo_type": "remote", "repo_name": name });
    let init = repos::InitRequest {
        repo_id: format!("{name}-{}", &sha256(url.as_bytes())[..8]),
        repo_info: Document::new(&info)
            .map_err(|error| CliError::from_error("failed to encode the repository information", &error))?,
        repo_creds: Some(creds),
    };
    Ok(CodeUpload { init, data, hash: sha256(&content), content })
}

fn from_local_path(args: &Args, path: &Path, bytes_max: u64) -> Result<CodeUpload, CliError> {
    let whole = path.canonicalize().map_err(|error| {
        CliError::from_error(&format!("cannot find the repository `{}`", path.display()), &error)
    })?;
    let Some(git) = Git::at(&whole)? else {
        return from_plain_directory(&whole, "it is not a git repository", bytes_max);
    };
    let Some(remote) = git.remote()? else {
        return from_plain_directory(&whole, "it has no remote to clone from", bytes_max);
    };
    let url = git.text(&["remote", "get-url", &remote])?;
    if !is_clonable(&url) {
        return from_plain_directory(
            &whole,
            &format!("instances cannot clone from its remote `{url}`"),
            bytes_max,
        );
    }
    let Some(base) = git.base(&remote)? else {
        return from_plain_directory(&whole, "it has no known commit in common with its remote", bytes_max);
    };
    let data = json!({
        "repo_type": "remote",
        "repo_name": repository_name(&url),
        "repo_branch": git.branch(&remote)?,
        "repo_hash": base,
        "repo_config_name": git.try_output(&["config", "user.name"])?,
        "repo_config_email": git.try_output(&["config", "user.email"])?,
    });
    let diff = git.diff(&base)?;
    if diff.len() as u64 > bytes_max {
        return Err(CliError::new("cannot upload the changes of the repository")
            .code(error::ErrorCode::TooLarge)
            .why(format!(
                "their size of {} KiB exceeds the server's limit of {} KiB",
                diff.len() / 1024,
                bytes_max / 1024
            ))
            .hint("commit and push them, or exclude large files with .gitignore"));
    }
    build_upload(args, &url, data, diff)
}

/// Archives a whole directory.
fn from_plain_directory(path: &Path, why: &str, bytes_max: u64) -> Result<CodeUpload, CliError> {
    output::print_message(&format!("Uploading the files of {}: {why}.", path.display()));
    let content = archive_directory(path, Path::new(""), bytes_max)?;
    let info = json!({ "repo_type": "virtual" });
    let init = repos::InitRequest {
        repo_id: format!("local-{}", &sha256(path.as_os_str().as_encoded_bytes())[..8]),
        repo_info: Document::new(&info)
            .map_err(|error| CliError::from_error("failed to encode the repository information", &error))?,
        repo_creds: None,
    };
    Ok(CodeUpload { init, data: info, hash: sha256(&content), content })
}

/// Git commands in one working tree.
struct Git {
    root: PathBuf,
}

impl Git {
    fn at(path: &Path) -> Result<Option<Self>, CliError> {
        let git = Self { root: path.to_owned() };
        let root = git.try_output(&["rev-parse", "--show-toplevel"])?;
        Ok(root.map(|root| Self { root: root.into() }))
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("git");
        command.arg("-C").arg(&self.root).args(args).stdin(Stdio::null());
        // Disables password prompts, pagers and translated output.
        command.env("GIT_TERMINAL_PROMPT", "0").env("LC_ALL", "C").env("GIT_PAGER", "cat");
        command
    }

    fn run(&self, command: &mut Command) -> Result<std::process::Output, CliError> {
        command.output().map_err(|error| {
            let problem =
                CliError::from_error(&format!("failed to run git in {}", self.root.display()), &error)
                    .code(error::ErrorCode::Repository);
            if error.kind() == std::io::ErrorKind::NotFound { problem.hint("install git") } else { problem }
        })
    }

    /// Returns the output of git, or `None` if it fails.
    fn try_output(&self, args: &[&str]) -> Result<Option<String>, CliError> {
        let output = self.run(&mut self.command(args))?;
        if !output.status.success() {
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(Some(text).filter(|text| !text.is_empty()))
    }

    fn text(&self, args: &[&str]) -> Result<String, CliError> {
        self.try_output(args)?.ok_or_else(|| {
            CliError::new(format!("`git {}` failed", args.join(" "))).code(error::ErrorCode::Repository)
        })
    }

    fn output_bytes(&self, command: &mut Command) -> Result<Vec<u8>, CliError> {
        let output = self.run(command)?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(CliError::new("failed to determine the changes of the repository")
            .code(error::ErrorCode::Repository)
            .why(format!("git reported: {message}")))
    }

    /// Returns the remote of the current branch, else `origin`, else the only remote.
    fn remote(&self) -> Result<Option<String>, CliError> {
        if let Some(branch) = self.try_output(&["symbolic-ref", "--short", "-q", "HEAD"])?
            && let Some(remote) = self.try_output(&["config", &format!("branch.{branch}.remote")])?
            && remote != "."
        {
            return Ok(Some(remote));
        }
        let all = self.try_output(&["remote"])?.unwrap_or_default();
        let mut names = all.lines();
        if let Some(origin) = names.clone().find(|name| *name == "origin") {
            return Ok(Some(origin.to_owned()));
        }
        Ok(names.next().map(str::to_owned))
    }

    /// Returns the remote branch that contains the base commit.
    fn branch(&self, remote: &str) -> Result<Option<String>, CliError> {
        let upstream = self.try_output(&["rev-parse", "--abbrev-ref", "@{upstream}"])?;
        let head = || self.try_output(&["rev-parse", "--abbrev-ref", &format!("{remote}/HEAD")]);
        let full = match upstream {
            Some(full) => Some(full),
            None => head()?,
        };
        Ok(full.and_then(|full| full.strip_prefix(&format!("{remote}/")).map(str::to_owned)))
    }

    /// Returns the newest local commit that the remote has.
    fn base(&self, remote: &str) -> Result<Option<String>, CliError> {
        for known in ["@{upstream}".to_owned(), format!("{remote}/HEAD")] {
            if let Some(base) = self.try_output(&["merge-base", "HEAD", &known])? {
                return Ok(Some(base));
            }
        }
        Ok(None)
    }

    /// Returns the diff from `base` to the working tree, including new files that are not ignored. Works on a temporary
    /// index and object directory, so the repository is not modified.
    fn diff(&self, base: &str) -> Result<Vec<u8>, CliError> {
        let temp = tempfile::Builder::new().prefix("windlass-git-").tempdir().map_err(|error| {
            CliError::from_error("failed to create a temporary directory for git", &error)
        })?;
        let index = temp.path().join("index");
        let objects = self.text(&["rev-parse", "--path-format=absolute", "--git-path", "objects"])?;
        let own = self.text(&["rev-parse", "--path-format=absolute", "--git-path", "index"])?;
        if Path::new(&own).exists() {
            copy_index(Path::new(&own), &index)
                .map_err(|error| CliError::from_error("failed to copy the git index", &error))?;
        }
        let with = |args: &[&str]| {
            let mut command = self.command(args);
            command
                .env("GIT_INDEX_FILE", &index)
                .env("GIT_OBJECT_DIRECTORY", temp.path().join("objects"))
                .env("GIT_ALTERNATE_OBJECT_DIRECTORIES", &objects);
            command
        };
        std::fs::create_dir(temp.path().join("objects")).map_err(|error| {
            CliError::from_error("failed to create a temporary directory for git", &error)
        })?;
        self.output_bytes(&mut with(&["add", "--all", "."]))?;
        self.output_bytes(&mut with(&[
            "diff",
            "--cached",
            "--binary",
            "--full-index",
            "--no-color",
            "--no-ext-diff",
            base,
        ]))
    }
}

/// Copies an index with its modification time: git re-reads files that changed at the time the index was written, and
/// only those.
fn copy_index(from: &Path, to: &Path) -> std::io::Result<()> {
    let time = std::fs::metadata(from)?.modified()?;
    std::fs::copy(from, to)?;
    std::fs::File::options().write(true).open(to)?.set_modified(time)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, process::Command};

    use windlass_model::config::mounts::repository_name;

    use super::{Git, copy_index};

    #[test]
    fn repo_name_is_the_last_segment_of_its_url() {
        let names =
            ["https://host/team/app.git", "git@host:team/app", "ssh://host/app/"].map(repository_name);
        assert_eq!(names, ["app", "app", "app"]);
    }

    #[test]
    fn hosts_cannot_clone_from_local_paths_or_plain_http() {
        for url in
            ["https://host/app.git", "git@host:team/app", "ssh://git@host/app", "git://127.0.0.1:9418/a"]
        {
            assert!(super::is_clonable(url), "{url}");
        }
        for url in ["file:///app.git", "/app.git", "../app", "http://host/app.git", "./a:b"] {
            assert!(!super::is_clonable(url), "{url}");
        }
    }

    fn git(dir: &Path, args: &[&str]) {
        let done = Command::new("git")
            .arg("-C")
            .arg(dir)
            .args(["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"])
            .args(args)
            .output()
            .unwrap();
        assert!(done.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&done.stderr));
    }

    /// Creates a clone of a remote with one pushed commit, one unpushed commit, a changed file and a new file.
    fn clone(at: &Path) {
        let (remote, here) = (at.join("remote.git"), at.join("here"));
        fs::create_dir(&here).unwrap();
        git(at, &["init", "--bare", "--quiet", remote.to_str().unwrap()]);
        git(&here, &["init", "--quiet"]);
        fs::write(here.join("kept"), "1\n").unwrap();
        fs::write(here.join(".gitignore"), "secret\n").unwrap();
        git(&here, &["add", "."]);
        git(&here, &["commit", "--quiet", "-m", "one"]);
        git(&here, &["remote", "add", "origin", remote.to_str().unwrap()]);
        git(&here, &["push", "--quiet", "-u", "origin", "main"]);
        fs::write(here.join("unpushed"), "2\n").unwrap();
        git(&here, &["add", "."]);
        git(&here, &["commit", "--quiet", "-m", "two"]);
        fs::write(here.join("kept"), "1\nchanged\n").unwrap();
        fs::write(here.join("new"), [0_u8, 255, 10]).unwrap();
        fs::write(here.join("secret"), "x").unwrap();
    }

    #[test]
    fn diff_contains_unpushed_changes_and_leaves_the_index_unchanged() {
        let scratch = tempfile::tempdir().unwrap();
        let scratch = scratch.path();
        clone(scratch);
        let here = scratch.join("here");
        let index = fs::read(here.join(".git/index")).unwrap();
        let found = Git::at(&here).unwrap().unwrap();
        assert_eq!(found.remote().unwrap().as_deref(), Some("origin"));
        assert_eq!(found.branch("origin").unwrap().as_deref(), Some("main"));
        let base = found.base("origin").unwrap().unwrap();
        let diff = found.diff(&base).unwrap();
        assert_eq!(fs::read(here.join(".git/index")).unwrap(), index);

        // Applied to the remote's commit, the diff reproduces the local files, except for ignored ones.
        let there = scratch.join("there");
        git(scratch, &["clone", "--quiet", "remote.git", "there"]);
        git(&there, &["checkout", "--quiet", &base]);
        let patch = scratch.join("patch");
        fs::write(&patch, diff).unwrap();
        git(&there, &["apply", patch.to_str().unwrap()]);
        for name in ["kept", "unpushed", "new", ".gitignore"] {
            assert_eq!(fs::read(here.join(name)).unwrap(), fs::read(there.join(name)).unwrap(), "{name}");
        }
        assert!(!there.join("secret").exists());
    }

    /// Git trusts its recorded state of files that are older than the index. A copy with a newer time would hide a
    /// change made in the same second as a commit, if the file size is unchanged.
    #[test]
    fn index_copy_keeps_the_modification_time() {
        let scratch = tempfile::tempdir().unwrap();
        let scratch = scratch.path();
        let (from, to) = (scratch.join("from"), scratch.join("to"));
        fs::write(&from, "index").unwrap();
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        fs::File::options().write(true).open(&from).unwrap().set_modified(old).unwrap();
        copy_index(&from, &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"index");
        assert_eq!(fs::metadata(&to).unwrap().modified().unwrap(), old);
    }
}
