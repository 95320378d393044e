//! `python:` of a run: a virtual environment of that version, created by `uv` or by the host's Python.
//!
//! Its `bin` comes first in the `PATH` of the job and of SSH sessions.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use super::{env::Env, helper_process, job::RunnerContext, user_context::UserContext};

/// Path of the virtual environment inside a container; elsewhere it is next to the job's directory.
const VENV_IN_CONTAINER: &str = "/windlass/python";
const VENV_DIR: &str = "python";
/// Time limit; `uv` may have to download an interpreter.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum length of a program's error output that is kept.
const ERROR_OUTPUT_MAX: usize = 1000;

#[derive(Debug, thiserror::Error)]
pub(super) enum PythonError {
    #[error(
        "failed to prepare Python {version}: neither `uv` nor `python{version}` was found (install one of them, or use \
         an `image` that has it)"
    )]
    NotFound { version: String },
    #[error("failed to prepare Python {version}: create {}", .dir.display())]
    Directory {
        version: String,
        dir: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("failed to prepare Python {version}: `{program}`: {message}")]
    Failed { version: String, program: String, message: String },
}

/// Returns the path of the job's virtual environment.
pub(super) fn venv_dir(around: &RunnerContext) -> PathBuf {
    if let Some(inside) = &around.confined {
        return inside.python.clone();
    }
    match &around.scratch {
        Some(scratch) if !around.in_container => scratch.with_file_name(VENV_DIR),
        Some(_) | None => PathBuf::from(VENV_IN_CONTAINER),
    }
}

/// Puts programs of the virtual environment first in `PATH`.
pub(super) fn activate(env: &mut Env, dir: &Path) {
    let mut path = dir.join("bin").into_os_string();
    if let Some(rest) = env.get(std::ffi::OsStr::new("PATH")) {
        path.push(":");
        path.push(rest);
    }
    env.insert("PATH".into(), path);
    env.insert("VIRTUAL_ENV".into(), dir.as_os_str().to_owned());
}

/// Creates the virtual environment, as the job's user.
pub(super) async fn create_venv(
    site: &UserContext,
    env: &Env,
    version: &str,
    dir: &Path,
) -> Result<(), PythonError> {
    let failed = |source| PythonError::Directory { version: version.to_owned(), dir: dir.to_owned(), source };
    site.create_dirs(dir).map_err(failed)?;
    let mut last = PythonError::NotFound { version: version.to_owned() };
    for (program, args) in venv_commands(site, version, dir) {
        match run(site, env, &program, &args).await {
            Ok(()) => return Ok(()),
            Err(message) => {
                let program = program.display().to_string();
                last = PythonError::Failed { version: version.to_owned(), program, message };
            }
        }
    }
    Err(last)
}

/// Returns the commands of this host that can create it, best first.
fn venv_commands(site: &UserContext, version: &str, dir: &Path) -> Vec<(PathBuf, Vec<OsString>)> {
    let words = |words: &[&str]| -> Vec<OsString> {
        words.iter().map(OsString::from).chain([dir.as_os_str().to_owned()]).collect()
    };
    let uv = site.program("uv");
    let uv = uv.map(|uv| (uv, words(&["venv", "--quiet", "--clear", "--seed", "--python", version])));
    let own = site.program(&format!("python{version}"));
    let whole = own.clone().map(|python| (python, words(&["-m", "venv", "--clear"])));
    // Debian has `pip` in a separate package; most programs do not need it.
    let bare = own.map(|python| (python, words(&["-m", "venv", "--without-pip", "--clear"])));
    uv.into_iter().chain(whole).chain(bare).collect()
}

async fn run(site: &UserContext, env: &Env, program: &Path, args: &[OsString]) -> Result<(), String> {
    let mut command = helper_process::user_command(program, &site.account);
    command.args(args).envs(env).current_dir(&site.working_dir);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut group = helper_process::ProcessGroup::spawn(&mut command).map_err(|error| error.to_string())?;
    let stderr = group.child().stderr.take();
    let (ended, message) =
        tokio::join!(group.wait(TIMEOUT), helper_process::read_tail(stderr, ERROR_OUTPUT_MAX));
    match ended.map_err(|error| error.to_string())? {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let message = String::from_utf8_lossy(&message);
            let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
            Err(if message.is_empty() { status.to_string() } else { message })
        }
        None => Err(format!("timed out after {} s", TIMEOUT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use windlass_testkit::temp_dir;

    use super::{super::user::Account, *};

    fn site(path: &Path) -> UserContext {
        let account = Account {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: vec![],
            ..Account::root()
        };
        UserContext { path: path.into(), ..UserContext::new(account, path.to_owned()) }
    }

    fn program(dir: &Path, name: &str, script: &str) {
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[tokio::test]
    async fn the_python_of_the_host_creates_the_venv_when_uv_fails() {
        let temp = temp_dir("python").unwrap();
        let (site, dir) = (site(temp.path()), temp.path().join("env"));
        let missing = create_venv(&site, &Env::new(), "3.12", &dir).await.unwrap_err();
        assert!(missing.to_string().contains("neither `uv` nor `python3.12` was found"), "{missing}");
        program(temp.path(), "uv", "echo no such interpreter >&2; exit 2");
        let refused = create_venv(&site, &Env::new(), "3.12", &dir).await.unwrap_err();
        assert!(refused.to_string().ends_with("no such interpreter"), "{refused}");
        program(temp.path(), "python3.12", "echo \"$@\" > \"$4\"/made");
        create_venv(&site, &Env::new(), "3.12", &dir).await.unwrap();
        let made = std::fs::read_to_string(dir.join("made")).unwrap();
        assert_eq!(made.trim(), format!("-m venv --clear {}", dir.display()));
    }

    #[test]
    fn programs_of_the_venv_come_first_in_the_path() {
        let mut env = Env::from([("PATH".into(), "/usr/bin:/bin".into())]);
        activate(&mut env, Path::new("/task/python"));
        assert_eq!(env[std::ffi::OsStr::new("PATH")], "/task/python/bin:/usr/bin:/bin");
        assert_eq!(env[std::ffi::OsStr::new("VIRTUAL_ENV")], "/task/python");
    }
}
