//! The host's git in a container whose image has none.
//!
//! The shim mounts a copy with its libraries. Its commands are links to the agent's binary, which starts the program of
//! that name with the loader of the copy: the image may have another C library, or none.

use std::{
    ffi::{OsStr, OsString},
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use crate::task_dir::{GIT_IN_CONTAINER, host_git};

/// Places of the certificates that git trusts by default.
const IMAGE_AUTHORITIES: [&str; 2] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// Path of git's command if the shim mounted a copy.
pub(super) fn command() -> Option<PathBuf> {
    let path = Path::new(GIT_IN_CONTAINER).join(host_git::COMMANDS).join("git");
    path.exists().then_some(path)
}

/// Variables with which the copy finds its own parts.
pub(super) fn environment() -> Vec<(OsString, OsString)> {
    let dir = Path::new(GIT_IN_CONTAINER);
    let mut env: Vec<(OsString, OsString)> = vec![
        ("GIT_EXEC_PATH".into(), dir.join(host_git::COMMANDS).into()),
        ("GIT_TEMPLATE_DIR".into(), "".into()),
    ];
    let authorities = dir.join(host_git::AUTHORITIES);
    let image_has_some = IMAGE_AUTHORITIES.iter().any(|path| Path::new(path).exists());
    if !image_has_some && authorities.exists() && std::env::var_os("GIT_SSL_CAINFO").is_none() {
        env.push(("GIT_SSL_CAINFO".into(), authorities.into()));
    }
    env
}

/// Returns the program of the copy that this process must become, by the name with which it was started.
pub fn requested_program(mut argv: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    let name = argv.next()?;
    let name = Path::new(&name).file_name()?.to_str()?;
    let is_git = name == "git" || name.starts_with("git-");
    is_git.then(|| Path::new(GIT_IN_CONTAINER).join(host_git::PROGRAMS).join(name))
}

/// Replaces this process by the program.
pub fn main(program: &Path) -> ExitCode {
    let dir = Path::new(GIT_IN_CONTAINER);
    let loader = dir.join(host_git::LOADER);
    let mut command = if loader.exists() {
        let mut command = Command::new(loader);
        command.args([
            OsStr::new("--library-path"),
            dir.join(host_git::LIBRARIES).as_os_str(),
            program.as_os_str(),
        ]);
        command
    } else {
        Command::new(program)
    };
    let error = command.args(std::env::args_os().skip(1)).exec();
    let _ = writeln!(io::stderr(), "failed to start {}: {error}", program.display());
    ExitCode::from(127)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_git_programs_select_the_copy() {
        let requested = |name: &str| requested_program([name.into(), "--version".into()].into_iter());
        assert_eq!(requested("git"), Some("/windlass/git/programs/git".into()));
        assert_eq!(
            requested("/windlass/git/commands/git-remote-https"),
            Some("/windlass/git/programs/git-remote-https".into())
        );
        for name in ["/windlass/agent", "dstack-shim", "gitx", "windlass-agent"] {
            assert_eq!(requested(name), None, "{name}");
        }
    }
}
