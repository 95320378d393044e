//! A private Postgres: separate data directory, unix socket only, stopped by its guard.
//!
//! Postgres refuses to run as root, so root runs it as the user `postgres`. `setpriv` also ties it to this process:
//! when this process ends for any reason, including Ctrl-C and kill -9, the database stops too.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    process::{self, ChildGuard, ScratchDir},
    setup,
};

const READY_TIMEOUT: Duration = Duration::from_secs(30);
const USER: &str = "postgres";

pub(crate) struct Postgres {
    pub(crate) url: String,
    // Drop order: the server stops before its directory is deleted.
    _server: ChildGuard,
    _home: ScratchDir,
}

/// Returns the directory of `initdb` and `postgres`, of the newest version.
pub(crate) fn find_programs() -> Result<PathBuf> {
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let installed = std::fs::read_dir("/usr/lib/postgresql").context("cannot find /usr/lib/postgresql")?;
    let newest = installed.flatten().map(|entry| entry.path()).filter(|path| version(path).is_some());
    let newest = newest.max_by_key(|path| version(path)).map(|path| path.join("bin"));
    newest.filter(|bin| bin.join("initdb").is_file()).context("cannot find initdb below /usr/lib/postgresql")
}

impl Postgres {
    pub(crate) fn start() -> Result<Self> {
        let bin = find_programs()?;
        let home = ScratchDir::new("postgres")?;
        let data = home.path().join("data");
        if setup::is_root()? {
            process::run(Command::new("chown").arg(USER).arg(home.path()))?;
        }
        let mut initdb = command_as_owner(&bin.join("initdb"))?;
        initdb.args(["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]);
        process::run_for_stdout(initdb.args(["--username", USER, "-D"]).arg(&data))?;

        let mut command = command_as_owner(&bin.join("postgres"))?;
        command.arg("-D").arg(&data).arg("-k").arg(home.path()).args(["-c", "listen_addresses="]);
        command.args(["-c", "max_connections=200"]);
        // Counts statements, for the benchmark of the cost of a run.
        if bin.parent().is_some_and(|home| home.join("lib/pg_stat_statements.so").is_file()) {
            command.args(["-c", "shared_preload_libraries=pg_stat_statements"]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SIGINT requests a fast shutdown.
        let mut server = ChildGuard::spawn(&mut command, "INT")?;
        let socket = home.path().join(".s.PGSQL.5432");
        process::wait_until(&mut server, READY_TIMEOUT, "Postgres listens", || {
            UnixStream::connect(&socket).is_ok()
        })?;
        let host = home.path().display().to_string().replace('/', "%2F");
        Ok(Self { url: format!("postgres://{USER}@{host}/{USER}"), _server: server, _home: home })
    }
}

fn command_as_owner(program: &Path) -> Result<Command> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "INT"]).current_dir("/");
    if setup::is_root()? {
        command.args(["--reuid", USER, "--regid", USER, "--clear-groups"]);
    }
    command.arg("--").arg(program);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_postgres_listens_and_leaves_nothing_behind() {
        let postgres = Postgres::start().unwrap();
        let home = postgres._home.path().to_owned();
        let pid = postgres._server.id();
        assert!(UnixStream::connect(home.join(".s.PGSQL.5432")).is_ok());
        drop(postgres);
        assert!(!home.exists());
        assert!(!Path::new("/proc").join(pid.to_string()).exists());
    }
}
